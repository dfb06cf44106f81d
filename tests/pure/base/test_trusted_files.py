"""Which files are taken for the user's own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.base import files
from dask_gpu_mpi.base.files import UntrustedFileError, read_trusted


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "_is_own_group", lambda gid: False)  # of whoever runs the tests
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    file = folder / "file"
    file.write_text("text")
    file.chmod(0o644)
    return file


def test_own_file_of_any_readers(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_trusted(file) == "text"
    monkeypatch.chdir(file.parent)
    assert read_trusted("file") == "text"


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o602])
def test_file_that_others_may_write(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(
        UntrustedFileError, match=rf"others may write .*file' \(mode {mode:04o}\)\. Fix: chmod go-w"
    ):
        read_trusted(file)


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_folder_that_others_may_write(file: Path, mode: int) -> None:
    file.parent.chmod(mode)
    with pytest.raises(
        UntrustedFileError, match=rf"others may write its folder .*folder' \(mode {mode:04o}\)"
    ):
        read_trusted(file)
    file.parent.chmod(mode | 0o1000)  # as /tmp: they may not replace what is there
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


def test_file_of_roots(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    for path in (file, file.parent):
        owner(monkeypatch, path, 0)
    assert read_trusted(file) == "text"


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
    owner(monkeypatch, link, os.geteuid() + 7)
    with pytest.raises(UntrustedFileError, match="link' belongs to another user"):
        read_trusted(link)


def test_what_is_no_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_folder_with_an_acl_for_others(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_is_own_group", lambda gid: True)
    file.parent.chmod(0o775)
    assert read_trusted(file) == "text"
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"user:eve:rwx")
    with pytest.raises(UntrustedFileError, match="others may write its folder"):
        read_trusted(file)


def test_link_of_a_stranger_on_the_way(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(file.parent)
    assert read_trusted(tmp_path / "link" / "file") == "text"
    owner(monkeypatch, tmp_path / "link", os.geteuid() + 7)
    with pytest.raises(UntrustedFileError, match="the symbolic link .*link' belongs to another user"):
        read_trusted(tmp_path / "link" / "file")


def test_links_without_end(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        read_trusted(tmp_path / "loop")
