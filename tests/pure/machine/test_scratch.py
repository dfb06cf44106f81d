from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dask_gpu_mpi.base import files
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine import scratch
from dask_gpu_mpi.machine.scratch import (
    exposed_folder,
    filesystem_of,
    inspect_scratch,
    make_scratch,
    name_error,
    remove_scratch,
)

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw shared:3 - nfs4 server:/home rw
31 30 0:41 / /home/fast\\040disk rw - xfs /dev/nvme0n1 rw
32 22 0:42 / /lustre rw - lustre 10.0.0.1@o2ib:/scratch rw
33 22 0:43 / /tmp rw - ext4 /dev/sdb1 rw
34 33 0:44 / /tmp rw - tmpfs tmpfs rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/", ("ext4", "/")),
        ("/var/tmp", ("ext4", "/")),
        ("/home/me", ("nfs4", "/home")),
        ("/homes/me", ("ext4", "/")),
        ("/home/fast disk/x", ("xfs", "/home/fast disk")),
        ("/tmp/x", ("tmpfs", "/tmp")),
    ],
)
def test_file_system_of_a_path(path: str, found: tuple[str, str]) -> None:
    assert filesystem_of(path, MOUNTS) == found
    assert filesystem_of(path, "") == ("", "")


def test_looking_leaves_nothing(tmp_path: Path) -> None:
    place, file = tmp_path / "made", tmp_path / "file"
    assert inspect_scratch(str(place)).error == "No such file or directory"
    place.mkdir()
    found = inspect_scratch(str(place))
    assert (found.path, found.error, found.ignored) == (str(place), "", "")
    assert found.free > 0 > scratch.Scratch("/x").free  # an unknown size is not an empty disk
    assert found.filesystem
    assert list(place.iterdir()) == []
    file.touch()
    for wrong in (file, file / "below"):
        assert inspect_scratch(str(wrong)).error == "Not a directory"
    # TMPDIR that is passed over
    assert inspect_scratch(str(tmp_path), str(tmp_path / "gone")).ignored == str(tmp_path / "gone")
    assert inspect_scratch(str(tmp_path), f"{tmp_path}/").ignored == ""


def test_names_that_dask_cannot_send(tmp_path: Path) -> None:
    assert name_error(str(tmp_path / "wörk ☃")) == ""
    latin = os.path.join(tmp_path, "l\udce4t")
    assert name_error(latin) == "its name is not valid utf-8"
    with pytest.raises(InputError, match="its name is not valid utf-8"):
        make_scratch(os.path.join(latin, "dgm-1"))
    assert not os.path.exists(latin)


def test_making_it(tmp_path: Path) -> None:
    place = tmp_path / "not" / "there" / "dgm-1"
    make_scratch(str(place))
    assert place.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="can't be written .*local_directory"):
        make_scratch(str(tmp_path / "file" / "dgm-1"))


class Clock:
    """Time passes only where something is removed, or waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(scratch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(scratch.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.001)


def filled(tmp_path: Path) -> Path:
    place = tmp_path / "dgm-1"
    (place / "worker" / "storage").mkdir(parents=True)
    for i in range(10):
        (place / "worker" / "storage" / f"{i}").touch()
    (place / "link").symlink_to(tmp_path)
    (tmp_path / "kept").touch()
    return place


def test_removing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links are removed, not followed: if others may write the folder around it, one may be in its place."""
    clock = Clock(monkeypatch)
    place = filled(tmp_path)
    for _ in range(2):
        remove_scratch(str(place), within=60)
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert clock.now < 0.01  # nobody writes there: nothing to wait for
    (tmp_path / "home" / "folder").mkdir(parents=True)
    (tmp_path / "home" / "precious").touch()
    place.symlink_to("home")
    remove_scratch(str(place), within=60)
    assert sorted(os.listdir(tmp_path / "home")) == ["folder", "precious"]


def test_a_slow_removal_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, clock, unlink = filled(tmp_path), Clock(monkeypatch), os.unlink

    def slow(path: str, *, dir_fd: int) -> None:
        clock.sleep(0.9)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(scratch.os, "unlink", slow)
    remove_scratch(str(place), within=4.0)
    assert clock.now < 5.5
    assert len(list((place / "worker" / "storage").iterdir())) == 5


def test_a_folder_into_which_others_still_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, clock, rmdir = filled(tmp_path), Clock(monkeypatch), os.rmdir

    def not_empty(path: str, **more: int) -> None:
        if path == str(place) and clock.now < 3 * scratch.STUCK:
            (place / "more").touch()
            raise OSError(39, "Directory not empty", path)
        rmdir(path, **more)

    monkeypatch.setattr(scratch.os, "rmdir", not_empty)
    remove_scratch(str(place), within=60)
    assert not place.exists()


def test_what_cannot_be_removed_is_soon_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, clock = filled(tmp_path), Clock(monkeypatch)

    def busy(path: str, *, dir_fd: int | None = None) -> None:
        raise OSError(16, "Device or resource busy", path)

    monkeypatch.setattr(scratch.os, "rmdir", busy)
    remove_scratch(str(place), within=60)
    assert scratch.STUCK <= clock.now < 2 * scratch.STUCK
    monkeypatch.undo()
    assert [path.name for path in place.iterdir()] == ["worker"]


def test_strangers_link_is_not_followed(tmp_path: Path, links_are_strangers: Callable[[], None]) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to("home")
    links_are_strangers()
    with pytest.raises(InputError, match=r"can't be written \(the symbolic link .* belongs to another user"):
        make_scratch(str(tmp_path / "link" / "dgm-1"))
    assert os.listdir(tmp_path / "home") == []


@pytest.mark.parametrize(
    ("outer", "inner", "exposed"),
    [
        (0o755, 0o1777, ""),
        (0o755, 0o1775, ""),
        (0o755, 0o775, "inner"),
        (0o775, 0o755, "outer"),
        (0o700, 0o775, ""),
        (0o755, 0o777, "inner"),
        (0o777, 0o700, "outer"),
        (0o1777, 0o700, ""),
        (0o710, 0o777, "inner"),
    ],
)
def test_folder_in_which_others_may_replace_what_is_ours(
    outer: int, inner: int, exposed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_is_own_group", lambda gid: False)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name).resolve()
        for folder, mode in ((place, outer), (place / "inner", inner)):
            folder.mkdir(exist_ok=True)
            folder.chmod(mode)
        found = exposed_folder(str(place / "inner"))
        assert scratch.exposed_fix(found, "another one") == f"chmod +t {found}, or another one"
        assert found == {"": "", "inner": str(place / "inner"), "outer": str(place)}[exposed]
        place.chmod(0o700)


@pytest.mark.parametrize("mode", [0o1777, 0o1755, 0o755])
def test_folder_of_a_stranger(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may write it, and the sticky bit does not bind the owner."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name).resolve()
        place.chmod(mode)
        assert exposed_folder(name) == ""
        status = place.stat()
        monkeypatch.setattr(scratch, "is_ours", lambda other: other.st_ino != status.st_ino)
        assert exposed_folder(name) == str(place)
        assert scratch.exposed_fix(name, "another one") == "another one"
        monkeypatch.setattr(scratch, "unmapped_root", lambda: status.st_uid)
        assert exposed_folder(name) == ""
    assert exposed_folder("/no/such/folder") == ""
