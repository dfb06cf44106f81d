from __future__ import annotations

import os
from pathlib import Path

import pytest

from dask_gpu_mpi.scratch import filesystem_of, look_at_scratch, name_error

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
    found = look_at_scratch(str(place))
    assert (found.path, found.error, found.ignored) == (str(place), "", "")
    assert found.free > 0
    assert found.filesystem
    assert list(place.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert look_at_scratch(str(file)).error == "File exists"
    assert look_at_scratch(str(file / "below")).error == "Not a directory"


def test_tmpdir_that_is_passed_over(tmp_path: Path) -> None:
    assert look_at_scratch(str(tmp_path), str(tmp_path / "gone")).ignored == str(tmp_path / "gone")
    assert look_at_scratch(str(tmp_path), f"{tmp_path}/").ignored == ""


def test_names_that_dask_cannot_send(tmp_path: Path) -> None:
    assert name_error(str(tmp_path / "wörk ☃")) == ""
    latin = os.path.join(tmp_path, "l\udce4t")
    assert name_error(latin) == "its name is not valid utf-8"
    assert look_at_scratch(latin).error == name_error(latin)
    assert not os.path.exists(latin)
