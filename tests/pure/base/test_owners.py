"""Who may write a file or folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dask_gpu_mpi.base import files
from dask_gpu_mpi.base.files import located


@pytest.fixture(autouse=True)
def _forget_groups() -> Iterator[None]:
    files._is_own_group.cache_clear()
    yield
    files._is_own_group.cache_clear()


@pytest.mark.parametrize(
    ("name", "members", "primary", "acl", "others"),
    [
        ("ann", [], ["ann"], False, False),
        ("ann", ["ann"], ["ann"], False, False),
        ("ann", ["ann", "eve"], ["ann"], False, True),
        ("ann", [], ["ann", "eve"], False, True),  # in no list of members, but in the group
        ("ann", [], ["ann", "ann's alias"], False, False),
        ("lab", [], ["ann"], False, True),
        ("ann", [], ["ann"], True, True),
    ],
)
def test_group_of_the_user_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    members: list[str],
    primary: list[str],
    acl: bool,
    others: bool,
) -> None:
    me, here = os.geteuid(), os.getegid()
    user = SimpleNamespace(pw_uid=me, pw_gid=here, pw_name="ann")
    accounts = [SimpleNamespace(pw_uid=me + 7 * (name == "eve"), pw_gid=here) for name in primary]
    accounts.append(SimpleNamespace(pw_uid=me + 8, pw_gid=here + 1))
    group = SimpleNamespace(gr_gid=here, gr_name=name, gr_mem=members)
    monkeypatch.setattr(files.pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(files.pwd, "getpwall", lambda: accounts)
    monkeypatch.setattr(files.grp, "getgrgid", lambda gid: group)
    if acl:
        monkeypatch.setattr(os, "getxattr", lambda path, name: b"user:eve:rwx")
    tmp_path.chmod(0o775)
    with located(tmp_path / "file") as (folder, _):
        assert files.others_may_write(folder) is others
        tmp_path.chmod(0o757)
        assert files.others_may_write(folder)
        tmp_path.chmod(0o755)
        assert not files.others_may_write(folder)


@pytest.mark.parametrize(("uid", "own"), [(1007, True), (1008, False)])
def test_a_directory_that_lists_no_accounts(monkeypatch: pytest.MonkeyPatch, uid: int, own: bool) -> None:
    """As sssd: nobody knows who else has this group, so it is the user's only by the convention of such groups."""
    monkeypatch.setattr(
        files.pwd, "getpwuid", lambda _: SimpleNamespace(pw_uid=uid, pw_gid=1007, pw_name="ann")
    )
    monkeypatch.setattr(files.pwd, "getpwall", lambda: [SimpleNamespace(pw_uid=0, pw_gid=0)])
    monkeypatch.setattr(
        files.grp, "getgrgid", lambda _: SimpleNamespace(gr_gid=1007, gr_name="ann", gr_mem=[])
    )
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert files._is_own_group(1007) is own
