"""``launch --stage``: the nodes get a copy of an environment, so that ranks open no files of a shared file system.

`launch` inspects the source (`find_stage`) and starts one process on each node (`main`). The first process reads the source and
broadcasts it by MPI. Each one pipes what arrives into the programs that unpack it. The SHA-256 of a file comes by the command
line, and nothing of the copy is run before it is compared. A marker, written last, makes a copy complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from typing import IO, Any

from dask_gpu_mpi.base.failures import report_error
from dask_gpu_mpi.base.files import UntrustedFileError, read_trusted, remove, replace
from dask_gpu_mpi.base.signals import die_with_parent
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import counted, format_bytes
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.machine.scratch import exposed_folder, exposed_text, make_scratch, remove_scratch
from dask_gpu_mpi.sites.batch import run_command
from dask_gpu_mpi.sites.command import Stage
from dask_gpu_mpi.sites.launchers import library_name, scrub

#: Bytes of a broadcast.
CHUNK = 1 << 23
#: Bytes of a node's report to all others.
RECORD = 1024
#: The program that decompresses a tar file, by its first bytes.
PROGRAMS = {b"\x28\xb5\x2f\xfd": "zstd", b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}
SQUASHFS = b"hsqs"
#: The end of each tar file, without which a part of it is missing.
TAR_END = bytes(1024)
#: Seconds to remove a part of a copy, and for a program of the copy.
REMOVAL_TIMEOUT, PROGRAM_TIMEOUT = 60.0, 300.0
#: Errors that are printed; those of other nodes are counted.
MOST_ERRORS = 3
#: Imports what a rank does; loading the library fails on a disk from which nothing may be run.
PROBE = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
import dask_gpu_mpi.cli.main
print("dask-gpu-mpi:" + MPI.Get_library_version().partition("\\n")[0])
"""


def find_stage(source: str, local: str, *, job: str) -> Stage:
    """The source of ``--stage`` and the folder of its copies below the local directory; InputError if it can't be used.

    `job`: what a requeued job, which uses its copies again, has in common with this one; empty: nothing.
    """
    path, size, digest = os.path.abspath(source), 0, ""
    try:
        if os.path.isdir(path):
            if not os.path.exists(os.path.join(path, "bin", "python")):
                raise InputError(
                    f"launch: --stage {source}: has no bin/python",
                    expected="the folder of an environment, or an archive of it",
                )
        else:
            with open(path, "rb") as file:
                head = file.read(512)
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - len(TAR_END)))
                is_tar = head[257:262] == b"ustar" and file.read() == TAR_END
                if not is_tar and not head.startswith((*PROGRAMS, SQUASHFS)):
                    raise InputError(
                        f"launch: --stage {source}: is not a complete archive",
                        expected="a tar file, which may be compressed, or a SquashFS image",
                        fix="pack it again: tar -C FOLDER -c . | zstd > ENV.tar.zst",
                    )
                file.seek(0)
                digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(
            f"launch: --stage {source}: can't be read ({error.strerror})",
            expected="an archive or a folder that this node and the first one of the job can read",
        ) from None
    name = f"{job}-{digest[:16]}" if job and digest else os.urandom(8).hex()
    return Stage(path, os.path.join(os.path.abspath(local), f"dgm-stage-{name}"), size, digest)


def main() -> None:
    """The process on a node, with the words of `Stage` as its arguments."""
    source, folder, size, *digest = sys.argv[1:]
    from dask_gpu_mpi.mpi.library import finalize, load_mpi

    try:
        mpi = load_mpi(os.environ, socket.gethostname())
        try:
            StagedNode(mpi, Stage(source, folder, int(size), "".join(digest))).stage()
        except DaskGpuMpiError:
            raise
        except Exception:
            traceback.print_exc()
            mpi.COMM_WORLD.Abort(1)  # the others wait for this process
        finally:
            finalize()
    except DaskGpuMpiError as error:
        report_error(error)
        sys.exit(error.exit_code)


class StagedNode:
    """The process on a node, and the copy there."""

    def __init__(self, mpi: Any, wanted: Stage) -> None:
        self._mpi = mpi
        self._world = mpi.COMM_WORLD
        self._wanted = wanted
        self._host = socket.gethostname()
        self._marker = os.path.join(wanted.folder, "complete")
        self._error = ""

    def stage(self) -> None:
        """Make the copies; if a node has an error, remove all and raise an InputError, which rank 0 has to report."""
        begin = time.monotonic()
        exposed = exposed_folder(os.path.dirname(self._wanted.folder))
        reports = self._exchange("has it" if not exposed and self._is_complete() else "")
        wanting = [host for host, text in reports if not text]
        if not wanting:
            if self._world.rank == 0:
                say("launch: --stage: all nodes have their copies already")
            return
        # a heterogeneous job has several processes on a node; one that has its copy takes part in the broadcast only
        mine = self._host in wanting and reports.index((self._host, "")) == self._world.rank
        unpacker = None
        try:
            if mine and exposed:
                raise InputError(
                    exposed_text(exposed), fix=f"chmod +t {exposed}, or another --local-directory"
                )
            if mine:
                self._remove()
        except (InputError, OSError) as error:
            self._error = str(error)
        self._world.Barrier()  # if nodes share the folder, the others now fail to make it
        if mine and not self._error:
            try:
                make_scratch(self._wanted.folder)
                unpacker = Unpacker(self._wanted.folder)
            except (InputError, OSError) as error:
                self._error = str(error)
        digest = self._receive(unpacker)
        if unpacker is not None:
            try:
                unpacker.finish()
                self._complete(digest)
            except (InputError, OSError) as error:
                self._error = self._error or str(error)
        failed = [f"{host}: {text}" for host, text in self._exchange(self._error) if text]
        if not failed:
            if self._world.rank == 0:
                nodes = counted(len(set(wanting)), "node")
                say(f"launch: --stage: copied to {nodes} in {time.monotonic() - begin:.1f} s")
            return
        if unpacker is not None:
            # `launch` tries again, and prints where it is left
            with contextlib.suppress(InputError, OSError):
                self._remove()
        more = f"; {len(failed) - MOST_ERRORS} more nodes failed" if len(failed) > MOST_ERRORS else ""
        raise InputError(
            "launch: --stage: " + "; ".join(failed[:MOST_ERRORS]) + more, reported=self._world.rank > 0
        )

    def _is_complete(self) -> bool:
        try:
            return bool(self._wanted.sha256) and read_trusted(self._marker) == self._wanted.sha256
        except (OSError, ValueError, UntrustedFileError):
            return False

    def _remove(self) -> None:
        """Remove the copy, first of all the mark that it is complete."""
        folder, fix = self._wanted.folder, "remove it there, or another --local-directory"
        if os.path.lexists(folder):
            remove(self._marker)
            _run(["chmod", "-R", "u+rwX", folder], fix)
            remove_scratch(folder, within=REMOVAL_TIMEOUT)
            if os.path.lexists(folder):
                raise InputError(f"{folder} of the run before can't be removed", fix=fix)

    def _exchange(self, text: str) -> list[tuple[str, str]]:
        """The host and the text of each process."""
        mine = f"{self._host}\0{text}".encode(errors="replace")[:RECORD].ljust(RECORD, b"\0")
        everyone = bytearray(RECORD * self._world.size)
        self._world.Allgather([mine, self._mpi.BYTE], [everyone, self._mpi.BYTE])
        texts = [
            everyone[at : at + RECORD].rstrip(b"\0").decode(errors="replace").partition("\0")
            for at in range(0, len(everyone), RECORD)
        ]
        return [(host, text) for host, _, text in texts]

    def _receive(self, unpacker: Unpacker | None) -> str:
        """Take part in the broadcast, also after an error, since the others need this process; return the SHA-256."""
        world, byte = self._world, self._mpi.BYTE
        buffer, length = bytearray(CHUNK), bytearray(8)
        found, size = hashlib.sha256(), 0
        source = _read(self._wanted, buffer) if world.rank == 0 else None
        failed = False
        while True:
            if source is not None:
                try:
                    length[:] = next(source, 0).to_bytes(8, "little")
                except (InputError, OSError) as error:
                    self._error, length[:] = f"{self._wanted.source} can't be read: {error}", bytes(8)
                    failed = True
            world.Bcast([length, byte], root=0)
            if not (count := int.from_bytes(length, "little")):
                break
            chunk = memoryview(buffer)[:count]
            world.Bcast([chunk, byte], root=0)
            found.update(chunk)
            size += count
            if unpacker is not None:
                unpacker.write(chunk)
        # after an error of the first node, no node may have the same
        digest = bytearray(b"-" * 64 if failed else (self._wanted.sha256 or found.hexdigest()).encode())
        world.Bcast([digest, byte], root=0)
        if found.hexdigest() != digest.decode():
            wanted = f" of {self._wanted.size}" if self._wanted.size else ""
            self._error = self._error or (
                f"{size}{wanted} bytes arrived, and their SHA-256 is another. Fix: start again; if it stays, pack it again"
            )
        return digest.decode()

    def _complete(self, digest: str) -> None:
        """Move the environment to its place, test it, and mark it."""
        if self._error:
            return
        unpacked, place = os.path.join(self._wanted.folder, "unpacked"), os.path.dirname(self._wanted.bin)
        names = os.listdir(unpacked)
        if "bin" not in names and len(names) == 1:
            unpacked = os.path.join(unpacked, names[0])
        os.rename(unpacked, place)
        python = os.path.join(self._wanted.bin, "python")
        relocate = os.path.join(self._wanted.bin, "conda-unpack")
        if os.path.exists(relocate):
            _run([python, relocate], "pack it again with conda-pack")
        fix = "install the same packages and dask-gpu-mpi in the environment; a venv needs its base Python on each node, too"
        printed = _run([python, "-P", "-c", PROBE], fix)
        version = self._mpi.Get_library_version().partition("\n")[0]
        if f"dask-gpu-mpi:{version}\n" not in printed:
            found = printed.rpartition("dask-gpu-mpi:")[2]
            raise InputError(
                f"its MPI library is {library_name(found)}", expected=library_name(version), fix=fix
            )
        replace(self._marker, digest.encode())


def _read(wanted: Stage, buffer: bytearray) -> Iterator[int]:
    """Fill the buffer with the next bytes of an archive, or of a tar file of a folder; yield their number."""
    if wanted.sha256:
        with open(wanted.source, "rb") as file:
            while count := file.readinto(buffer):
                yield count
        return
    log = os.memfd_create("tar")
    with _start(["tar", "-c", "-C", wanted.source, "."], log, stdout=subprocess.PIPE) as tar:
        while count := tar.stdout.readinto(buffer):
            yield count
    if tar.returncode not in (0, 1):  # 1: a file has changed meanwhile
        raise OSError(_first_line(log))


class Unpacker:
    """Unpacks an archive that arrives in parts into the folder `unpacked` of a copy."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._log = os.memfd_create("unpack")
        self._programs: list[Any] = []
        self._file: IO[bytes] | None = None
        self._image = ""
        self._error: Exception | None = None

    def write(self, chunk: memoryview) -> None:
        """Unpack the next part; `finish` raises an error."""
        if self._error is not None:
            return
        try:
            if self._file is None:
                self._begin(bytes(chunk[:16]))
            assert self._file is not None
            self._file.write(chunk)
        except (InputError, OSError) as error:
            self._error = error

    def _begin(self, head: bytes) -> None:
        unpacked = os.path.join(self._folder, "unpacked")
        if head.startswith(SQUASHFS):
            _find("unsquashfs")
            self._image = os.path.join(self._folder, "image")
            self._file = open(self._image, "xb")  # noqa: SIM115
            return
        os.mkdir(unpacked)
        # tar follows no link of the archive to outside, and Python's tarfile takes four times as long
        lines = [["tar", "-x", "--no-same-owner", "-C", unpacked, "-f", "-"]]
        if program := next((each for magic, each in PROGRAMS.items() if head.startswith(magic)), ""):
            lines.insert(0, [program, "-dc"])
        for line in lines:
            _find(line[0])
        for line in reversed(lines):
            stdout = self._programs[-1].stdin if self._programs else subprocess.DEVNULL
            self._programs.append(_start(line, self._log, stdin=subprocess.PIPE, stdout=stdout))
            if self._programs[1:]:
                self._programs[-2].stdin.close()
        self._file = self._programs[-1].stdin

    def finish(self) -> None:
        """Wait until all is unpacked; raise an InputError or OSError if it can't be."""
        for file in (self._file, *(program.stdin for program in self._programs)):
            try:
                if file is not None:
                    file.close()
            except OSError as error:
                self._error = self._error or error
        if self._image and self._error is None:
            line = [
                "unsquashfs",
                "-no-progress",
                "-no-xattrs",
                "-d",
                os.path.join(self._folder, "unpacked"),
                self._image,
            ]
            self._programs.append(_start(line, self._log, stdout=subprocess.DEVNULL))
        codes = [program.wait() for program in self._programs]
        if any(codes) and (self._error is None or isinstance(self._error, BrokenPipeError)):
            status = os.statvfs(self._folder)
            left = format_bytes(status.f_bavail * status.f_frsize)
            raise InputError(
                f"it can't be unpacked, and {left} are left there: {_first_line(self._log)}",
                fix="an archive that `tar -t` can read, and a local directory with more space (--local-directory)",
            )
        if self._error is not None:
            raise self._error
        if self._image:
            os.unlink(self._image)
        # nothing can be renamed in, or removed from, a folder that its owner may not write
        _run(["chmod", "-R", "u+rwX", self._folder], "pack it again")


def _find(program: str) -> None:
    if shutil.which(program) is None:
        raise InputError(f"command {program} not found in PATH", fix=f"install {program}, or pack a .tar.gz")


def _start(line: Sequence[str], log: int, **pipes: Any) -> Any:
    return subprocess.Popen(line, stderr=log, preexec_fn=partial(die_with_parent, os.getpid()), **pipes)


def _first_line(log: int) -> str:
    lines = os.pread(log, RECORD, 0).decode(errors="replace").split("\n")
    return next(filter(None, map(str.strip, lines)), "no message")


def _run(line: Sequence[str], fix: str) -> str:
    """Run a program of the copy, which must not count as a rank; return its output."""
    die = partial(die_with_parent, os.getpid())
    done = run_command(line, scrub(os.environ), PROGRAM_TIMEOUT, prepare=die)
    if done.returncode:
        last = done.stderr.strip().splitlines()
        raise InputError(f"{line[0]} fails: {last[-1].strip() if last else done.returncode}", fix=fix)
    return done.stdout
