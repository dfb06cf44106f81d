"""Copies of an environment: what is refused, what a node does with what arrives, and when it uses a copy again."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.mpi import staging
from dask_gpu_mpi.mpi.staging import StagedNode, find_stage
from dask_gpu_mpi.sites.command import Stage
from support.jobs.clusters import small_environment
from support.jobs.processes import run_python

Change = Callable[[memoryview], None]


class World:
    """A world of one rank, in which the network may change bytes; or of two, of which the other one, elsewhere, reports this."""

    rank = 0

    def __init__(self, change: Change | None = None, other: str | None = None) -> None:
        self.change, self.other = change, other
        self.size = 1 if other is None else 2
        self.chunks = 0
        self.last = b""

    def Barrier(self) -> None:
        pass

    def Allgather(self, mine: Any, everyone: Any) -> None:
        everyone[0][: staging.RECORD] = mine[0]
        if self.other is not None:
            everyone[0][staging.RECORD :] = f"other\0{self.other}".encode().ljust(staging.RECORD, b"\0")
            self.other = ""  # later it has no error

    def Bcast(self, given: Any, root: int) -> None:
        self.last = bytes(given[0])
        if isinstance(given[0], memoryview):
            self.chunks += 1
            if self.change is not None:
                self.change(given[0])


@functools.cache
def this_library() -> str:
    """The version of the MPI library here, which a copy has as well."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    return run_python(code).stdout


def stage(wanted: Stage, world: World | None = None, library: str = "") -> World:
    world = world or World()
    mpi = SimpleNamespace(COMM_WORLD=world, BYTE="B", Get_library_version=lambda: library or this_library())
    StagedNode(mpi, wanted).stage()
    return world


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_environment(tmp_path / "env")


def packed(source: Path, name: str = "env.tar", *options: str) -> Path:
    archive = source.parent / name
    subprocess.run(["tar", *options, "-cf", archive, "-C", source, "."], check=True, timeout=60)
    return archive


def find(source: Path, tmp_path: Path, job: str = "") -> Stage:
    return find_stage(str(source), str(tmp_path / "local"), job=job)


def copies(tmp_path: Path) -> list[str]:
    local = tmp_path / "local"
    return os.listdir(local) if local.exists() else []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("env.tar", ()),
        ("around.tar", ("--transform=s|^[.]|folder|S",)),  # a folder around the environment
        ("env.tar.gz", ("-z",)),
        pytest.param(
            "env", ("--zstd",), marks=pytest.mark.skipif(not shutil.which("zstd"), reason="no zstd")
        ),
    ],
)
def test_archives(source: Path, tmp_path: Path, name: str, options: tuple[str, ...]) -> None:
    """Also of folders that their owner may not write."""
    (source / "bin").chmod(0o555)
    source.chmod(0o555)
    wanted = find(packed(source, name + ".x", *options), tmp_path)
    stage(wanted)
    python = os.path.join(wanted.bin, "python")
    done = subprocess.run(
        [python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == os.path.dirname(wanted.bin)
    assert os.stat(wanted.folder).st_mode & 0o777 == 0o700
    for folder in (wanted.bin, os.path.dirname(wanted.bin)):
        assert os.stat(folder).st_mode & 0o700 == 0o700


def test_a_folder(source: Path, tmp_path: Path) -> None:
    (source / "bin" / "conda-unpack").write_text("open(__file__ + '.ran', 'w').close()")
    wanted = find(source, tmp_path, "7")
    stage(wanted)
    assert os.path.exists(os.path.join(wanted.bin, "conda-unpack.ran"))
    # its content may be another when the job is requeued
    assert find(source, tmp_path, "7").folder != wanted.folder


@pytest.mark.skipif(not shutil.which("mksquashfs"), reason="no mksquashfs")
def test_an_image(source: Path, tmp_path: Path) -> None:
    image = tmp_path / "env.sqsh"
    subprocess.run(["mksquashfs", source, image, "-quiet"], check=True, stdout=subprocess.DEVNULL, timeout=60)
    wanted = find(image, tmp_path)
    stage(wanted)
    assert sorted(os.listdir(wanted.folder)) == ["complete", "env"]


def test_sources_that_are_refused(source: Path, tmp_path: Path) -> None:
    # at the end of a member, where tar itself finds no error
    content = packed(source).read_bytes().rstrip(b"\0")
    part = content.ljust(-(-len(content) // 512) * 512, b"\0")
    for name, data in {"empty": b"", "zip": b"PK" + bytes(4096), "part": part}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=f"{name}: is not a complete archive"):
            find(tmp_path / name, tmp_path)
    with pytest.raises(InputError, match="No such file"):
        find(tmp_path / "gone", tmp_path)
    with pytest.raises(InputError, match="has no bin/python"):
        find(tmp_path, tmp_path)


def refused(tmp_path: Path, why: str, wanted: Stage, **how: Any) -> None:
    """A copy that fails so, and of which nothing is left."""
    with pytest.raises(InputError, match=why):
        stage(wanted, **how)
    assert copies(tmp_path) == []


def test_a_part_of_a_compressed_file(source: Path, tmp_path: Path) -> None:
    archive = packed(source, "a.tar.gz", "-z")
    os.truncate(archive, archive.stat().st_size // 2)
    refused(tmp_path, "can't be unpacked.*[Uu]nexpected end of file", find(archive, tmp_path))


def test_bytes_that_change_on_the_way(source: Path, tmp_path: Path) -> None:
    def change(chunk: memoryview) -> None:
        chunk[-1] ^= 1

    why = f"{os.uname().nodename}: .* SHA-256 is another"
    refused(tmp_path, why, find(packed(source), tmp_path), world=World(change))


def test_an_archive_that_is_exchanged_meanwhile(source: Path, tmp_path: Path) -> None:
    archive = packed(source)
    wanted = find(archive, tmp_path)
    (source / "more").touch()
    packed(source)
    refused(tmp_path, "SHA-256 is another", wanted)
    archive.unlink()
    refused(tmp_path, "env.tar can't be read: .*No such file", wanted)


@pytest.mark.parametrize("name", ["../outside", "/outside", "link/outside"])
def test_an_archive_writes_nothing_outside(source: Path, tmp_path: Path, name: str) -> None:
    archive = packed(source)
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    with tarfile.open(archive, "a") as tar:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(outside)
        tar.addfile(link)
        member = tarfile.TarInfo(f"{outside}/outside" if name.startswith("/") else name)
        member.size = 3
        tar.addfile(member, io.BytesIO(b"bad"))
    wanted = find(archive, tmp_path)
    # tar removes / and ../ from names, and writes through no link of the archive
    try:
        stage(wanted)
    except InputError as error:
        assert "can't be unpacked" in str(error)  # noqa: PT017
    assert list(outside.iterdir()) == []
    assert set(copies(tmp_path)) <= {os.path.basename(wanted.folder)}
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "local" / "outside").exists()


def test_an_environment_without_our_packages(tmp_path: Path) -> None:
    source = small_environment(tmp_path / "env")
    next(source.glob("lib/*/site-packages/these.pth")).unlink()
    refused(tmp_path, "No module named .*Fix: install the same packages", find(source, tmp_path))


def test_another_mpi_library_than_that_of_launch(source: Path, tmp_path: Path) -> None:
    why = r"its MPI library is .* \(expected Other MPI 1.0\)"
    refused(tmp_path, why, find(source, tmp_path), library="Other MPI 1.0, of a module")


def test_a_program_that_is_missing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = find(packed(source, "a.tar.gz", "-z"), tmp_path)
    which = shutil.which
    monkeypatch.setattr(
        staging.shutil, "which", lambda name, **more: None if name == "gzip" else which(name, **more)
    )
    refused(tmp_path, "command gzip not found in PATH. Fix: install gzip", wanted)


def test_a_folder_of_another_is_not_used(source: Path, tmp_path: Path) -> None:
    wanted = find(packed(source), tmp_path, "42")
    os.makedirs(wanted.folder)
    digest = hashlib.sha256(Path(wanted.source).read_bytes()).hexdigest()
    (Path(wanted.folder) / "complete").write_text(digest)
    os.chmod(wanted.folder, 0o777)
    assert stage(wanted).chunks == 1
    assert os.stat(wanted.folder).st_mode & 0o777 == 0o700


def test_a_node_that_has_its_copy_keeps_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of a requeued job (tests/slurm/test_staging.py); of another archive it has another copy."""
    archive = packed(source)
    wanted = find(archive, tmp_path, "42")
    folder = Path(wanted.folder)
    stage(wanted, World(other=""))
    assert "copied to 2 nodes" in capsys.readouterr().err
    (folder / "ours").touch()
    assert find(archive, tmp_path, "42") == wanted
    assert stage(wanted, World(other="")).chunks == 1  # for the other one
    assert "copied to 1 node in" in capsys.readouterr().err
    assert sorted(os.listdir(folder)) == ["complete", "env", "ours"]
    assert stage(wanted, World(other="has it")).chunks == 0
    assert capsys.readouterr().err.endswith("all nodes have their copies already\n")
    # the first run was killed before it had all
    (folder / "complete").unlink()
    assert stage(wanted, World(other="has it")).chunks == 1
    assert sorted(os.listdir(folder)) == ["complete", "env"]
    (source / "more").touch()
    packed(source)
    assert find(archive, tmp_path, "42").folder != wanted.folder


def test_no_node_completes_a_part_of_a_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars(tmp_path, monkeypatch, 'echo "tar: x: Input/output error" >&2; exit 2')
    world = World()
    refused(tmp_path, "can't be read: tar: x: Input/output error", find(source, tmp_path), world=world)
    assert world.last == b"-" * 64  # the SHA-256 of nothing that a node may have


def test_a_file_of_a_folder_changes_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tars(tmp_path, monkeypatch, 'echo "tar: x: file changed as we read it" >&2; exit 1')
    wanted = find(source, tmp_path)
    stage(wanted)
    assert sorted(os.listdir(wanted.folder)) == ["complete", "env"]


def tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Let the tar that packs end so, after its output."""
    fake = tmp_path / "bin" / "tar"
    fake.parent.mkdir()
    real = shutil.which("tar")
    fake.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exec {real} "$@"\n{real} "$@"\n{end}\n')
    fake.chmod(0o700)
    monkeypatch.setenv("PATH", str(fake.parent), prepend=os.pathsep)


def test_a_copy_of_the_run_before_that_stays(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = find(packed(source), tmp_path, "42")
    stage(wanted)
    (source / "more").touch()
    packed(source)  # by which the archive is another
    os.truncate(os.path.join(wanted.folder, "complete"), 1)
    monkeypatch.setattr(staging, "remove_scratch", lambda folder, within: None)
    with pytest.raises(InputError, match="can't be removed. Fix: remove it there"):
        stage(wanted)
    assert os.listdir(wanted.folder) == ["env"]  # nobody takes it as complete


def test_a_local_directory_that_every_user_may_change(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = str(tmp_path / "local")
    wanted = find_stage(str(packed(source)), local, job="")
    monkeypatch.setattr(staging, "exposed_folder", {local: local}.get)
    refused(tmp_path, f"other users .* Fix: chmod \\+t {local}, or another", wanted)


def test_programs_of_the_copy_end_with_the_process() -> None:
    code = "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); print(n.value)"
    assert staging._run([sys.executable, "-c", code], "") == "9\n"


def test_an_unexpected_exception_ends_all_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    mpi = SimpleNamespace(COMM_WORLD=SimpleNamespace(Abort=codes.append))
    monkeypatch.setattr("dask_gpu_mpi.mpi.library.load_mpi", lambda *_: mpi)
    monkeypatch.setattr(sys, "argv", ["-c", "env.tar", "/local/dgm-stage-1", "7", "abc"])
    staging.main()  # this world has no rank
    assert codes == [1]
    assert "AttributeError" in capsys.readouterr().err
