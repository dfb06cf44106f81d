"""Who may write a file or folder."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dask_gpu_mpi.base import owners
from dask_gpu_mpi.base.safe_paths import located


@pytest.mark.parametrize(
    ("name", "members", "acl", "others"),
    [
        ("ann", [], False, False),
        ("ann", ["ann"], False, False),
        ("ann", ["ann", "eve"], False, True),
        ("lab", [], False, True),
        ("ann", [], True, True),
    ],
)
def test_group_of_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], acl: bool, others: bool
) -> None:
    user = SimpleNamespace(pw_gid=os.getegid(), pw_name="ann")
    group = SimpleNamespace(gr_gid=os.getegid(), gr_name=name, gr_mem=members)
    monkeypatch.setattr(owners.pwd, "getpwuid", lambda uid: user)
    monkeypatch.setattr(owners.grp, "getgrgid", lambda gid: group)
    if acl:
        monkeypatch.setattr(os, "getxattr", lambda path, name: b"user:eve:rwx")
    tmp_path.chmod(0o775)
    with located(tmp_path / "file") as (folder, _):
        assert owners.others_may_write(folder) is others
        tmp_path.chmod(0o757)
        assert owners.others_may_write(folder)
        tmp_path.chmod(0o755)
        assert not owners.others_may_write(folder)
