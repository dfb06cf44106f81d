"""Where another user may have put a link, nothing of ours is led elsewhere: seen with two users, where root runs the tests."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.base import owners
from dask_gpu_mpi.base.safe_paths import (
    PlantedError,
    located,
    make_folder,
    open_regular,
    open_to_append,
    remove,
    replace,
)

EVE, OWNER = 54321, 54322
two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
#: Of the folder in which Eve puts her link: sticky as /tmp, and not.
shared = pytest.mark.parametrize("mode", [0o1777, 0o777])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that all may search, in which the test is `OWNER` and has a file that Eve may not touch."""
    monkeypatch.setattr(owners, "_is_own_group", lambda gid: False)
    world = Path(tempfile.mkdtemp(prefix="dgm-test-", dir="/tmp"))
    world.chmod(0o711)
    home = world / "home"
    home.mkdir(mode=0o755)
    (home / "precious").write_text("precious")
    for path in (home, home / "precious"):
        os.chown(path, OWNER, OWNER)
    (world / "shared").mkdir()
    os.seteuid(OWNER)
    try:
        yield world
    finally:
        os.seteuid(0)
        shutil.rmtree(world)


def plant(act: Callable[[], object]) -> None:
    """What Eve does."""
    os.seteuid(0)
    os.seteuid(EVE)
    try:
        act()
    finally:
        os.seteuid(0)
        os.seteuid(OWNER)


def share(world: Path, mode: int) -> Path:
    os.seteuid(0)
    (world / "shared").chmod(mode)
    os.seteuid(OWNER)
    return world / "shared"


def append(path: Path) -> None:
    with open(open_to_append(path, make=True), "w") as file:
        file.write("log")


WRITERS = {
    "append": append,
    "replace": lambda path: replace(path, b"text"),
    "remove": remove,
    "make": lambda path: make_folder(path / "below"),
}


@two_users
@shared
@pytest.mark.parametrize("writer", ["append", "replace"])
def test_link_that_eve_has_planted_for_a_file(world: Path, mode: int, writer: str) -> None:
    folder = share(world, mode)
    plant(lambda: (folder / "log").symlink_to(world / "home" / "precious"))
    with pytest.raises(PlantedError) as caught:
        WRITERS[writer](folder / "log")
    assert caught.value.strerror == f"the symbolic link '{folder}/log' belongs to another user (uid {EVE})"
    assert (world / "home" / "precious").read_text() == "precious"
    plant(lambda: (folder / "new").symlink_to(world / "home" / "made"))
    with pytest.raises(PlantedError):
        WRITERS[writer](folder / "new")
    assert not (world / "home" / "made").exists()


@two_users
@shared
@pytest.mark.parametrize("writer", WRITERS)
def test_link_that_eve_has_planted_for_a_folder(world: Path, mode: int, writer: str) -> None:
    folder = share(world, mode)
    plant(lambda: (folder / "logs").symlink_to(world / "home"))
    with pytest.raises(PlantedError, match="logs' belongs to another user"):
        WRITERS[writer](folder / "logs" / "precious")
    assert [path.name for path in (world / "home").iterdir()] == ["precious"]
    assert (world / "home" / "precious").read_text() == "precious"


@two_users
@shared
def test_file_pipe_and_second_name_of_eves(world: Path, mode: int) -> None:
    folder = share(world, mode)
    plant(lambda: (folder / "hers").touch(mode=0o666))
    plant(lambda: (folder / "hers").chmod(0o666))
    # with fs.protected_regular the kernel says so itself
    with pytest.raises(OSError, match=r"belongs to another user|Permission denied"):
        append(folder / "hers")
    plant(lambda: os.mkfifo(folder / "pipe"))
    plant(lambda: (folder / "pipe").chmod(0o666))
    with pytest.raises(OSError, match=r"No such device|Permission denied"):
        append(folder / "pipe")
    os.seteuid(0)  # the kernel may not let Eve: fs.protected_hardlinks
    os.link(world / "home" / "precious", folder / "second")
    os.seteuid(OWNER)
    with pytest.raises(PlantedError, match="second name"):
        append(folder / "second")
    assert (world / "home" / "precious").read_text() == "precious"


@two_users
def test_links_of_the_user_and_of_root_and_of_who_alone_may_write_are_followed(world: Path) -> None:
    folder = share(world, 0o1777)
    (folder / "mine").symlink_to(world / "home")
    os.seteuid(0)
    (folder / "roots").symlink_to("mine")
    (world / "eves").mkdir(mode=0o755)
    (world / "eves" / "link").symlink_to("../shared/roots")
    for path in (world / "eves", world / "eves" / "link"):
        os.chown(path, EVE, EVE, follow_symlinks=False)
    os.seteuid(OWNER)
    for number, place in enumerate((folder / "mine", folder / "roots", world / "eves" / "link")):
        append(place / f"log-{number}")
        assert (world / "home" / f"log-{number}").read_text() == "log"
    os.seteuid(0)
    (world / "eves").chmod(0o777)
    os.seteuid(OWNER)
    with pytest.raises(PlantedError):
        append(world / "eves" / "link" / "log")


def test_appending_and_folders_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "log"
    with pytest.raises(FileNotFoundError) as caught:
        open_to_append(path)
    assert caught.value.filename == str(path)
    for _ in range(2):
        append(path)
    assert path.read_text() == "loglog"
    with open(open_to_append(path, readable=True), "a+") as file:
        file.seek(0)
        assert file.read() == "loglog"
    with pytest.raises(NotADirectoryError):
        append(path / "below")
    make_folder(path.parent)
    with pytest.raises(NotADirectoryError):
        make_folder(path)


def test_relative_paths_and_links_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/./deep/..")
    (tmp_path / "file").symlink_to("link/log")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path / "link")
    append(Path("../file"))
    assert (tmp_path / "real" / "log").read_text() == "log"
    for path in (tmp_path / "loop", tmp_path / "loop" / "log"):
        with pytest.raises(OSError, match="Too many levels"):
            append(path)
    for path in (Path("/"), Path()):
        with pytest.raises(IsADirectoryError):
            append(path)


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace(path, b"1", 0o600)
    replace(path, b"2", 0o600)
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"2", 0o600)
    os.mkfifo(tmp_path / "pipe")
    for name, error in (("pipe", "no regular file"), ("", "Is a directory")):
        with pytest.raises(OSError, match=error):
            replace(tmp_path / name, b"3")
    with pytest.raises(TypeError):
        replace(path, "no bytes")  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]
    assert path.read_bytes() == b"2"


def test_device_is_not_replaced() -> None:
    with pytest.raises(OSError, match=r"no regular file"):
        replace("/dev/null", b"")


def test_removing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for name in ("link", "link", "no/file"):
        remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with located(tmp_path / "pipe") as (folder, name), pytest.raises(OSError, match="no regular file"):
        open_regular(folder, name)
