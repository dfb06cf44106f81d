"""Copies of an environment: what is refused, what a node does with an archive, and when it uses a copy again."""

from __future__ import annotations

import functools
import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine import staging
from dask_gpu_mpi.machine.staging import find_stage, make_copy
from dask_gpu_mpi.sites.command import Stage
from support.jobs.clusters import small_environment
from support.jobs.processes import run_python


@functools.cache
def this_library() -> str:
    """The version of the MPI library here, which a copy has as well."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    return run_python(code).stdout


def stage(wanted: Stage, library: str = "", host: str = "h1") -> None:
    make_copy(wanted, library or this_library().partition("\n")[0].rstrip("\0"), host)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_environment(tmp_path / "env")


def packed(source: Path, name: str = "env.tar", *options: str) -> Path:
    archive = source.parent / name
    subprocess.run(["tar", *options, "-cf", archive, "-C", source, "."], check=True, timeout=60)
    return archive


def find(archive: Path, job: str = "") -> Stage:
    return find_stage(str(archive), str(archive.parent / "local"), job=job)


@pytest.fixture
def wanted(source: Path) -> Stage:
    """A copy of an archive, for a job that may be requeued."""
    return find(packed(source), "42")


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
def test_archives(source: Path, name: str, options: tuple[str, ...]) -> None:
    """Also of folders that their owner may not write."""
    (source / "bin" / "conda-unpack").write_text("open(__file__ + '.ran', 'w').close()")
    (source / "bin").chmod(0o555)
    source.chmod(0o555)
    wanted = find(packed(source, name + ".x", *options))
    stage(wanted)
    line = [os.path.join(wanted.bin, "python"), "-c", "import sys; print(sys.prefix)"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == os.path.dirname(wanted.bin)
    assert os.path.exists(os.path.join(wanted.bin, "conda-unpack.ran"))
    assert os.stat(wanted.folder).st_mode & 0o777 == 0o700
    for folder in (wanted.bin, os.path.dirname(wanted.bin)):
        assert os.stat(folder).st_mode & 0o700 == 0o700


def test_an_image(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are no programs for SquashFS, a mock unpacks a tar file behind the magic number."""
    image = tmp_path / "env.sqsh"
    if shutil.which("mksquashfs"):
        subprocess.run(["mksquashfs", source, image, "-quiet"], check=True, stdout=-3, timeout=60)
    else:
        image.write_bytes(b"hsqs" + packed(source).read_bytes())
        unpack = '[ "$1 $2 $3" = "-no-progress -no-xattrs -d" ] && mkdir "$4" && tail -c +5 "$5" | tar -xf - -C "$4"'
        (tmp_path / "unsquashfs").write_text(f"#!/bin/sh\n{unpack}\n")
        (tmp_path / "unsquashfs").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    wanted = find(image)
    stage(wanted)
    assert sorted(os.listdir(wanted.folder)) == ["complete", "env"]


def test_sources_that_are_refused(source: Path, tmp_path: Path) -> None:
    # at the end of a member, where tar itself finds no error
    content = packed(source).read_bytes().rstrip(b"\0")
    part = content.ljust(-(-len(content) // 512) * 512, b"\0")
    for name, data in {"empty": b"", "zip": b"PK" + bytes(4096), "part": part}.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=f"{name}: is not a complete archive"):
            find(tmp_path / name)
    with pytest.raises(InputError, match="No such file"):
        find(tmp_path / "gone")
    with pytest.raises(InputError, match=f"is a folder.*Fix: tar -C {source} -c . "):
        find(source)


def refused(why: str, wanted: Stage, **how: Any) -> None:
    """A copy that fails so, and that no node takes as complete; `launch` removes it."""
    with pytest.raises(InputError, match=why):
        stage(wanted, **how)
    assert not os.path.exists(os.path.join(wanted.folder, "complete"))


def test_a_part_of_a_compressed_file(source: Path) -> None:
    archive = packed(source, "a.tar.gz", "-z")
    os.truncate(archive, archive.stat().st_size // 2)
    refused("can't be unpacked.*[Uu]nexpected end of file", find(archive))


@pytest.mark.parametrize("tar", [None, "exit 0", "exec cat"])
def test_an_archive_that_is_exchanged_meanwhile(
    source: Path, wanted: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tar: str | None
) -> None:
    """It is read to its end, even if `tar` reads a part."""
    (source / "more").write_bytes(os.urandom(1 << 20))
    packed(source)
    if tar is not None:
        (tmp_path / "tar").write_text(f"#!/bin/sh\n{tar}\n")
        (tmp_path / "tar").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    refused("SHA-256 is another", wanted)
    os.unlink(wanted.source)
    refused("env.tar can't be read: .*No such file", wanted)


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
    wanted = find(archive)
    # tar removes / and ../ from names, and writes through no link of the archive
    try:
        stage(wanted)
    except InputError as error:
        assert "can't be unpacked" in str(error)  # noqa: PT017
    assert list(outside.iterdir()) == []
    assert set(os.listdir(tmp_path / "local")) <= {os.path.basename(wanted.folder)}
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "local" / "outside").exists()


def test_an_environment_without_our_packages(source: Path) -> None:
    next(source.glob("lib/*/site-packages/these.pth")).unlink()
    refused("No module named .*Fix: install the same packages", find(packed(source)))


def test_folders_around_an_environment(source: Path) -> None:
    archive = packed(source, "env.tar", "--transform=s|^[.]|home/env|S")
    refused(
        "env.tar has no bin/python at its top. Fix: pack it again: tar -C ENVIRONMENT -c . ", find(archive)
    )


def test_another_mpi_library_than_that_of_launch(wanted: Stage) -> None:
    why = r"its MPI library is .* \(expected Other MPI 1.0\)"
    refused(why, wanted, library="Other MPI 1.0, of a module")


def test_a_program_that_is_missing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = find(packed(source, "a.tar.gz", "-z"))
    monkeypatch.setattr(staging.shutil, "which", lambda name: None if name == "gzip" else name)
    refused("command gzip not found in PATH. Fix: install gzip", wanted)


def test_a_folder_that_others_may_write_is_not_used(wanted: Stage) -> None:
    os.makedirs(os.path.join(wanted.bin, "more"))
    (Path(wanted.folder) / "complete").write_text(f"{wanted.sha256} h1")
    os.chmod(wanted.folder, 0o777)
    stage(wanted)
    assert os.stat(wanted.folder).st_mode & 0o777 == 0o700
    assert "more" not in os.listdir(wanted.bin)


def test_a_folder_of_another_user_is_refused(wanted: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    os.makedirs(wanted.folder)
    monkeypatch.setattr(staging.os, "geteuid", lambda: os.getuid() + 1)
    refused("belongs to another user", wanted)


def test_a_local_directory_that_every_user_may_change(wanted: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    local = os.path.dirname(wanted.folder)
    monkeypatch.setattr(staging, "exposed_folder", {local: local}.get)
    refused(f"other users .* Fix: chmod \\+t {local}, or another", wanted)


def test_a_link_in_place_of_the_copy_is_refused(wanted: Stage, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "local").mkdir()
    os.symlink(tmp_path / "elsewhere", wanted.folder)
    with pytest.raises(OSError, match="dgm-stage-42"):
        stage(wanted)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def run_removal(folder: Path | str) -> str:
    """What the process that removes a copy prints."""
    done = subprocess.run([*MAIN, str(folder)], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout + done.stderr


def test_removal_on_a_node(tmp_path: Path) -> None:
    """Also of folders that their owner may not write; a copy that is not there is none to report."""
    folder = tmp_path / "dgm-stage-1"
    (folder / "env" / "closed" / "more").mkdir(parents=True)
    (folder / "complete").touch()
    (folder / "env" / "closed").chmod(0o555)
    assert (run_removal(folder), folder.exists(), run_removal(folder)) == ("", False, "")


def test_removal_follows_no_link(tmp_path: Path) -> None:
    """Who knows the name of a copy puts a link to files of ours there, which keep their names and modes."""
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "complete").touch()
    (ours / "complete").chmod(0o400)
    folder = tmp_path / "dgm-stage-1"
    folder.symlink_to(ours)
    assert f"launch: --stage: {os.uname().nodename}: {folder} is left (" in run_removal(folder)
    assert (ours / "complete").stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize("what", ["parent", "owner"])
def test_removal_leaves_what_is_not_ours(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's own folder may have been moved to the name, if others may write the folder around."""
    folder = tmp_path / "dgm-stage-1"
    folder.mkdir()
    (folder / "complete").touch()
    if what == "parent":
        monkeypatch.setattr(staging, "exposed_folder", {str(tmp_path): str(tmp_path)}.get)
    else:
        monkeypatch.setattr(staging.os, "geteuid", lambda: os.getuid() + 1)
    staging.remove_copy(str(folder), "h1")
    assert os.listdir(folder) == ["complete"]
    why = {"parent": "other users may replace", "owner": f"{folder} belongs to another user"}[what]
    assert f"launch: --stage: h1: {folder} is left ({why}" in capsys.readouterr().err


def test_the_mark_of_a_copy_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that nobody uses a part."""
    folder = tmp_path / "dgm-stage-1"
    (folder / "env").mkdir(parents=True)
    (folder / "complete").touch()
    monkeypatch.setattr(staging, "remove_scratch", lambda *_, **more: None)
    staging.remove_copy(str(folder), "h1")
    assert os.listdir(folder) == ["env"]
    assert capsys.readouterr().err.endswith(f"launch: --stage: h1: {folder} is left. Fix: remove it there\n")


def test_a_node_that_has_its_copy_keeps_it(source: Path, wanted: Stage) -> None:
    """As those of a requeued job (tests/slurm/test_staging.py); of another archive it has another copy."""
    folder = Path(wanted.folder)
    stage(wanted)
    (folder / "ours").touch()
    assert find(Path(wanted.source), "42") == wanted
    stage(wanted)
    assert sorted(os.listdir(folder)) == ["complete", "env", "ours"]
    with pytest.raises(InputError, match="is the copy of node h1: the local directory is shared by nodes"):
        stage(wanted, host="h2")
    # the first run was killed before it had all
    (folder / "complete").unlink()
    stage(wanted)
    assert sorted(os.listdir(folder)) == ["complete", "env"]
    (source / "more").touch()
    assert find(packed(source), "42").folder != wanted.folder


MAIN = [sys.executable, "-c", "from dask_gpu_mpi.machine.staging import main; main()"]


def test_processes_of_one_node_make_one_copy(wanted: Stage) -> None:
    """As those of a heterogeneous job: the second one waits for the first."""
    words = [wanted.source, wanted.folder, str(wanted.size), wanted.sha256]
    line = [*MAIN, *words, this_library().partition("\n")[0].rstrip("\0")]
    both = [subprocess.Popen(line, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(process.communicate(timeout=60)[1], process.returncode) for process in both] == [("", 0)] * 2
    assert sorted(os.listdir(wanted.folder)) == ["complete", "env"]


def test_programs_of_the_copy_end_with_the_process() -> None:
    code = "import ctypes; n = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(n)); print(n.value)"
    assert staging._run([sys.executable, "-c", code], "") == "9\n"


def test_the_error_has_its_node(tmp_path: Path) -> None:
    words = [str(tmp_path / "gone.tar"), str(tmp_path / "dgm-stage-1"), "7", "abc", "MPI"]
    done = subprocess.run([*MAIN, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    place = f"error: launch: --stage: {os.uname().nodename}: {words[0]}"
    assert f"{place} can't be read: No such file" in done.stderr
    assert "Traceback" not in done.stderr
