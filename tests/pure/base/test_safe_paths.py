"""Where another user may have put a link, nothing of ours is led elsewhere: seen with two users, where root runs the tests."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.base import files
from dask_gpu_mpi.base.files import (
    PlantedError,
    located,
    make_folder,
    open_regular,
    open_to_append,
    remove,
    replace,
    write,
)

EVE, OWNER = 54321, 54322
two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
#: Of the folder in which Eve puts her link: sticky as /tmp, and not.
shared = pytest.mark.parametrize("mode", [0o1777, 0o777])


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that all may search, in which the test is `OWNER` and has a file that Eve may not touch."""
    monkeypatch.setattr(files, "_is_own_group", lambda gid: False)
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
    "write": lambda path: write(path, b"text"),
    "replace": lambda path: replace(path, b"text"),
    "remove": remove,
    "make": lambda path: make_folder(path / "below"),
}


@two_users
@shared
@pytest.mark.parametrize("writer", ["append", "replace", "write"])
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


def test_log_that_others_may_read_is_closed_to_them(tmp_path: Path) -> None:
    """It is of an earlier run, or another program's."""
    path = tmp_path / "log"
    path.write_text("old")
    path.chmod(0o644)
    with open(open_to_append(path), "a") as file:
        file.write("new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == "oldnew"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may give a file away")
def test_log_of_another_user_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    path.chmod(0o644)
    os.chown(path, OWNER, -1)
    os.close(open_to_append(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


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
    for name, error in (("pipe", "not a regular file"), ("", "Is a directory")):
        with pytest.raises(OSError, match=error):
            replace(tmp_path / name, b"3")
    with pytest.raises(TypeError):
        replace(path, "no bytes")  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]
    assert path.read_bytes() == b"2"


def test_pipes_and_devices_are_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        write(tmp_path / name, b"text")
        assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    master, terminal = os.openpty()
    write(os.ttyname(terminal), b"text")
    assert os.read(master, 100) == b"text"
    for descriptor in (master, terminal):
        os.close(descriptor)
    write("/dev/null", b"text")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_files_are_replaced_whichever_way(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    for text in (b"1", b"2"):
        write(tmp_path / "link", text)
        assert (tmp_path / "file").read_bytes() == text
    assert (tmp_path / "link").is_symlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="not a regular file"):
            write(tmp_path / "socket", b"3")
    with pytest.raises(OSError, match="Is a directory"):
        write(tmp_path, b"3")


WRITE = "import sys; from dask_gpu_mpi.base.files import write; write(sys.argv[1], b'text')"


@pytest.mark.parametrize("path", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_own_descriptors(tmp_path: Path, path: str) -> None:
    """What they lead to may have no path that can be opened, and is written where it is at."""
    command = [sys.executable, "-c", WRITE, path]
    assert subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60).stdout == b"text"
    (tmp_path / "log").write_bytes(b"before ")
    with open(tmp_path / "log", "ab") as file:
        subprocess.run(command, check=True, stdout=file, timeout=60)
        (tmp_path / "log").rename(tmp_path / "moved")
        subprocess.run(command, check=True, stdout=file, timeout=60)
    assert (tmp_path / "moved").read_bytes() == b"before texttext"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        subprocess.run(command, check=True, stdout=theirs, timeout=60)
        assert ours.recv(100) == b"text"


@two_users
def test_pipe_that_eve_has_planted_is_not_written_to(world: Path) -> None:
    folder = share(world, 0o777)
    plant(lambda: os.mkfifo(folder / "pipe"))
    plant(lambda: (folder / "pipe").chmod(0o666))
    with pytest.raises(PlantedError, match="belongs to another user"):
        write(folder / "pipe", b"text")


def test_absolute_paths_need_no_working_directory(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom dask_gpu_mpi.base.files import replace\n"
        "os.mkdir(sys.argv[1])\nos.chdir(sys.argv[1])\nos.rmdir(sys.argv[1])\nreplace(sys.argv[2], b'text')\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "gone"), str(tmp_path / "file")]
    subprocess.run(command, check=True, timeout=60)
    assert (tmp_path / "file").read_bytes() == b"text"


def test_device_is_not_replaced() -> None:
    with pytest.raises(OSError, match=r"not a regular file"):
        replace("/dev/null", b"")


def test_removing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for name in ("link", "link", "no/file"):
        remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with located(tmp_path / "pipe") as (folder, name), pytest.raises(OSError, match="not a regular file"):
        open_regular(folder, name)
