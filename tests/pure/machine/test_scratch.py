from __future__ import annotations

import os
from pathlib import Path

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine import scratch
from dask_gpu_mpi.machine.scratch import (
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
        ("/home", ("nfs4", "/home")),
        ("/home/me", ("nfs4", "/home")),
        ("/homes/me", ("ext4", "/")),
        ("/home/fast disk/x", ("xfs", "/home/fast disk")),
        ("/lustre/a/b", ("lustre", "/lustre")),
        ("/tmp/x", ("tmpfs", "/tmp")),
    ],
)
def test_file_system_of_a_path(path: str, found: tuple[str, str]) -> None:
    assert filesystem_of(path, MOUNTS) == found


def test_unreadable_mounts() -> None:
    assert filesystem_of("/tmp", "") == ("", "")


def test_looking_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "made"
    found = inspect_scratch(str(place))
    assert (found.path, found.error, found.ignored) == (str(place), "", "")
    assert found.free > 0
    assert found.filesystem
    assert list(place.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert inspect_scratch(str(file)).error == "File exists"
    assert inspect_scratch(str(file / "below")).error == "Not a directory"


def test_tmpdir_that_is_passed_over(tmp_path: Path) -> None:
    assert inspect_scratch(str(tmp_path), str(tmp_path / "gone")).ignored == str(tmp_path / "gone")
    assert inspect_scratch(str(tmp_path), f"{tmp_path}/").ignored == ""


def test_names_that_dask_cannot_send(tmp_path: Path) -> None:
    assert name_error(str(tmp_path / "wörk ☃")) == ""
    latin = os.path.join(tmp_path, "l\udce4t")
    assert name_error(latin) == "its name is not valid utf-8"
    assert inspect_scratch(latin).error == name_error(latin)
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


def test_an_unknown_size_is_not_an_empty_disk() -> None:
    assert scratch.Scratch("/x").free < 0


def test_removing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    place = filled(tmp_path)
    remove_scratch(str(place), within=60)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    remove_scratch(str(place), within=60)
    assert clock.now < 0.01  # nobody writes there: nothing to wait for


def test_a_slow_removal_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, clock, unlink = filled(tmp_path), Clock(monkeypatch), os.unlink

    def slow(path: str) -> None:
        clock.sleep(0.9)
        unlink(path)

    monkeypatch.setattr(scratch.os, "unlink", slow)
    remove_scratch(str(place), within=4.0)
    assert clock.now < 5.5
    assert len(list((place / "worker" / "storage").iterdir())) == 5


def test_what_cannot_be_removed_is_soon_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, clock = filled(tmp_path), Clock(monkeypatch)

    def busy(path: str) -> None:
        raise OSError(16, "Device or resource busy", path)

    monkeypatch.setattr(scratch.os, "rmdir", busy)
    remove_scratch(str(place), within=60)
    assert scratch.STUCK <= clock.now < 2 * scratch.STUCK
    monkeypatch.undo()
    assert [path.name for path in place.iterdir()] == ["worker"]
