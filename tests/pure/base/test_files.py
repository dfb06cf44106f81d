"""Files of ours where other users may put theirs: which are read, and that no planted link leads elsewhere."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base import files
from dask_gpu_mpi.base.files import (
    PlantedError,
    UntrustedFileError,
    located,
    make_folder,
    open_to_append,
    read_trusted,
    remove,
    replace,
)
from support.jobs.processes import run_python

EVE, OWNER = 54321, 54322
two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


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


@contextmanager
def user(uid: int) -> Iterator[None]:
    os.seteuid(0)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.seteuid(OWNER)


@pytest.fixture(params=[0o1777, 0o777], ids=["sticky as /tmp", "open"])
def folder(world: Path, request: pytest.FixtureRequest) -> Path:
    """The folder in which Eve puts her links."""
    with user(0):
        (world / "shared").chmod(request.param)
    return world / "shared"


def append(path: Path) -> None:
    with open(open_to_append(path), "w") as file:
        file.write("log")


WRITERS = {
    "append": append,
    "replace": lambda path: replace(path, b"text"),
    "remove": remove,
    "make": lambda path: make_folder(path / "below"),
}


@two_users
@pytest.mark.parametrize("writer", ["append", "replace"])
def test_link_that_eve_has_planted_for_a_file(world: Path, folder: Path, writer: str) -> None:
    with user(EVE):
        (folder / "log").symlink_to(world / "home" / "precious")
        (folder / "new").symlink_to(world / "home" / "made")
    with pytest.raises(PlantedError) as caught:
        WRITERS[writer](folder / "log")
    assert caught.value.strerror == f"the symbolic link '{folder}/log' belongs to another user (uid {EVE})"
    assert (world / "home" / "precious").read_text() == "precious"
    with pytest.raises(PlantedError):
        WRITERS[writer](folder / "new")
    assert not (world / "home" / "made").exists()


@two_users
@pytest.mark.parametrize("writer", WRITERS)
def test_link_that_eve_has_planted_for_a_folder(world: Path, folder: Path, writer: str) -> None:
    with user(EVE):
        (folder / "logs").symlink_to(world / "home")
    with pytest.raises(PlantedError, match="logs' belongs to another user"):
        WRITERS[writer](folder / "logs" / "precious")
    assert [path.name for path in (world / "home").iterdir()] == ["precious"]
    assert (world / "home" / "precious").read_text() == "precious"


@two_users
def test_file_pipe_and_second_name_of_eves(world: Path, folder: Path) -> None:
    with user(EVE):
        (folder / "hers").touch()
        os.mkfifo(folder / "pipe")
        for name in ("hers", "pipe"):
            (folder / name).chmod(0o666)
    # with fs.protected_regular the kernel says so itself
    for name in ("hers", "pipe"):
        with pytest.raises(OSError, match=r"belongs to another user|No such device|Permission denied"):
            append(folder / name)
    with user(0):  # the kernel may not let Eve: fs.protected_hardlinks
        os.link(world / "home" / "precious", folder / "second")
    with pytest.raises(PlantedError, match="second name"):
        append(folder / "second")
    assert (world / "home" / "precious").read_text() == "precious"


@two_users
def test_links_of_the_user_and_of_root_and_of_who_alone_may_write_are_followed(world: Path) -> None:
    folder, eves = world / "shared", world / "eves"
    with user(0):
        folder.chmod(0o1777)
        eves.mkdir(mode=0o755)
        (folder / "roots").symlink_to("mine")
        (eves / "link").symlink_to("../shared/roots")
        for path in (eves, eves / "link"):
            os.chown(path, EVE, EVE, follow_symlinks=False)
    (folder / "mine").symlink_to(world / "home")
    for number, place in enumerate((folder / "mine", folder / "roots", eves / "link")):
        append(place / f"log-{number}")
        assert (world / "home" / f"log-{number}").read_text() == "log"
    with user(0):
        eves.chmod(0o777)
    with pytest.raises(PlantedError):
        append(eves / "link" / "log")


def test_appending_and_folders_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "log"
    with pytest.raises(FileNotFoundError) as caught, located(path):
        pass
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
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    replace(tmp_path / "absolute", b"text")  # needs no working directory
    assert (tmp_path / "absolute").read_bytes() == b"text"


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
    with pytest.raises(OSError, match=r"not a regular file"):
        replace("/dev/null", b"")
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]
    assert path.read_bytes() == b"2"


@pytest.mark.parametrize("descriptor", [1, 2])
def test_own_output_is_not_replaced(tmp_path: Path, descriptor: int) -> None:
    """The rest of the output would be in a file without a name."""
    path, link = tmp_path / "file", f"/dev/fd/{descriptor}"
    code = f"""
import os; os.dup2(os.open({str(path)!r}, os.O_CREAT | os.O_WRONLY), {descriptor}); os.write({descriptor}, b"text")
from dask_gpu_mpi.base.files import replace
for name in ({str(path)!r}, {link!r}):
    try:
        replace(name, b"x")
    except OSError as error:
        assert error.strerror == "the output of this process goes there"
    else:
        os._exit(1)
os._exit(0)"""
    assert run_python(code).returncode == 0
    assert path.read_text() == "text"


def test_removing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for name in ("link", "link", "no/file"):
        remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "_is_own_group", lambda gid: False)  # of whoever runs the tests
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    file = folder / "file"
    file.write_text("text")
    file.chmod(0o644)
    return file


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_file_and_folder_that_others_may_write(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(UntrustedFileError, match=rf"write .*file' \(mode {mode:04o}\)\. Fix: chmod go-w"):
        read_trusted(file)
    file.chmod(0o644)
    file.parent.chmod(mode | 0o111)
    with pytest.raises(UntrustedFileError, match=rf"write its folder .*folder' \(mode {mode | 0o111:04o}\)"):
        read_trusted(file)
    file.parent.chmod(mode | 0o1111)  # as /tmp: they may not replace what is there
    assert read_trusted(file) == "text"


def owner(monkeypatch: pytest.MonkeyPatch, path: Path, uid: int) -> None:
    """Have `path` belong to somebody else, for whoever asks."""
    number = os.lstat(path).st_ino

    def told(ask: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*given: Any, **words: Any) -> Any:
            status = ask(*given, **words)
            return os.stat_result((*status[:4], uid, *status[5:])) if status.st_ino == number else status

        return asked

    for name in ("stat", "lstat", "fstat"):
        monkeypatch.setattr(os, name, told(getattr(os, name)))


@pytest.mark.parametrize(("which", "what"), [("file", "'/"), ("folder", "its folder '/")])
def test_file_and_folder_of_a_stranger(
    file: Path, monkeypatch: pytest.MonkeyPatch, which: str, what: str
) -> None:
    owner(monkeypatch, file if which == "file" else file.parent, os.geteuid() + 7)
    with pytest.raises(
        UntrustedFileError, match=rf"^{what}.*{which}' belongs to another user \(uid {os.geteuid() + 7};"
    ):
        read_trusted(file)


@pytest.mark.parametrize(
    ("maps", "found"), [("0 0 4294967295\n", None), ("1000 0 1\n0 1 9\n", None), ("1000 1000 1\n", 65534)]
)
def test_users_of_a_container(maps: str, found: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/self/uid_map": maps, "/proc/sys/kernel/overflowuid": "65534\n"}
    monkeypatch.setattr(files, "open", lambda name, **_: io.StringIO(texts[name]), raising=False)
    assert files.unmapped_root() == found


def test_root_that_a_container_does_not_have(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.chmod(0o1777)
    owner(monkeypatch, file.parent, 65534)
    monkeypatch.setattr(files, "unmapped_root", lambda: 65534)
    assert read_trusted(file) == "text"
    file.parent.chmod(0o755)
    with pytest.raises(UntrustedFileError, match="another user"):
        read_trusted(file)
    file.parent.chmod(0o1777)
    monkeypatch.setattr(files, "unmapped_root", lambda: None)
    with pytest.raises(UntrustedFileError, match="another user"):
        read_trusted(file)


def test_link_is_followed_to_what_is_ours(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    assert read_trusted(link) == "text"
    file.chmod(0o666)
    with pytest.raises(UntrustedFileError, match="others may write"):
        read_trusted(link)
    file.chmod(0o600)
    file.parent.chmod(0o777)
    with pytest.raises(UntrustedFileError, match="its folder"):
        read_trusted(link)
    file.parent.chmod(0o700)
    (tmp_path / "folder-link").symlink_to(file.parent)
    assert read_trusted(tmp_path / "folder-link" / "file") == "text"
    owner(monkeypatch, tmp_path / "folder-link", os.geteuid() + 7)
    with pytest.raises(UntrustedFileError, match="the symbolic link .*link' belongs to another user"):
        read_trusted(tmp_path / "folder-link" / "file")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        read_trusted(tmp_path / "loop")
    owner(monkeypatch, link, os.geteuid() + 7)
    with pytest.raises(UntrustedFileError, match="link' belongs to another user"):
        read_trusted(link)


def test_what_is_no_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert read_trusted("file") == "text"
    with pytest.raises(FileNotFoundError):
        read_trusted(file.parent / "other")
    os.mkfifo(file.parent / "pipe", mode=0o600)
    for path in (file.parent / "pipe", file.parent):
        with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
            read_trusted(path)
    with pytest.raises(ValueError, match="null byte"):
        read_trusted(f"{file}\0")
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_trusted(file)
    monkeypatch.setattr(files, "LARGEST", 3)
    file.write_text("123")
    assert read_trusted(file) == "123"
    file.write_text("1234")
    with pytest.raises(OSError, match="far too large"):
        read_trusted(file)


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
