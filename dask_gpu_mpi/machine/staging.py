"""``launch --stage``: the nodes get a copy of an environment, so that ranks open no files of a shared file system.

`launch` inspects the archive (`find_stage`) and starts one process on each node (`main`). This process reads the archive once. It
pipes what it reads into the program that unpacks it. The SHA-256 comes by the command line, and nothing of the copy is run before
it is compared. A marker, written last, makes a copy complete. At the end another process on each node removes the copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from dask_gpu_mpi.base.failures import report_error
from dask_gpu_mpi.base.files import UntrustedFileError, read_trusted, remove, replace
from dask_gpu_mpi.base.signals import die_with_parent
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import format_bytes
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError
from dask_gpu_mpi.machine.scratch import (
    exposed_fix,
    exposed_folder,
    exposed_text,
    make_scratch,
    remove_contents,
    remove_scratch,
)
from dask_gpu_mpi.sites.batch import run_command
from dask_gpu_mpi.sites.choice import LIBRARY_PROGRAM, parse_answer
from dask_gpu_mpi.sites.command import Stage
from dask_gpu_mpi.sites.launchers import library_name, scrub

Bytes = memoryview | bytes

#: Bytes of a read.
CHUNK = 1 << 23
#: Bytes of a program's messages that are read.
RECORD = 1024
#: The program that decompresses a tar file, by its first bytes.
PROGRAMS = {b"\x28\xb5\x2f\xfd": "zstd", b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}
SQUASHFS = b"hsqs"
#: The end of each tar file, without which a part of it is missing.
TAR_END = bytes(1024)
#: Seconds for a program of the copy, and for the removal of one, which `launch` ends soon after that.
PROGRAM_TIMEOUT, REMOVAL_TIMEOUT = 300.0, 100.0


def find_stage(source: str, local: str, *, job: str) -> Stage:
    """The archive of ``--stage`` and the folder of its copies below the local directory; InputError if it can't be used.

    `job`: what a requeued job, which uses its copies again, has in common with this one; empty: nothing.
    """
    path = os.path.abspath(source)
    try:
        if os.path.isdir(path):
            raise InputError(
                f"launch: --stage {source}: is a folder, whose files each node would open",
                expected="an archive of it",
                fix=f"tar -C {source} -c . | zstd > ENV.tar.zst",
            )
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
            expected="an archive that this node and those of the job can read",
        ) from None
    name = f"{job}-{digest[:16]}" if job else os.urandom(8).hex()
    return Stage(path, os.path.join(os.path.abspath(local), f"dgm-stage-{name}"), size, digest)


def main() -> None:
    """The process on a node: its arguments are those of `make_copy`, or the folder of a copy to remove."""
    # libraries read files of the working directory, where others may have put some
    os.chdir("/")
    die_with_parent(os.getppid())
    host = socket.gethostname()
    if len(sys.argv) == 2:
        remove_copy(sys.argv[1], host)
        return
    source, folder, size, digest, library = sys.argv[1:]
    try:
        try:
            make_copy(Stage(source, folder, int(size), digest), library, host)
        except (InputError, OSError) as error:
            raise InputError(f"launch: --stage: {host}: {error}") from None
    except DaskGpuMpiError as error:
        report_error(error)
        sys.exit(error.exit_code)


def make_copy(wanted: Stage, library: str, host: str) -> None:
    """Make the copy on this node, unless it is complete; `launch` removes the part of one that fails."""
    marker = _marker_file(wanted.folder)
    _check_parent(wanted.folder)
    if not os.path.lexists(wanted.folder):
        try:
            make_scratch(wanted.folder)
        except InputError:
            if not os.path.lexists(wanted.folder):
                raise
    with _opened(wanted.folder) as folder:
        # a heterogeneous job has several processes on a node: the first one makes the copy, and the others wait
        fcntl.flock(folder, fcntl.LOCK_EX)
        private = stat.S_IMODE(os.fstat(folder).st_mode) == 0o700
        found = _read_marker(marker).split() if private else []
        if found[1:] and found[1] != host:
            raise InputError(
                f"{wanted.folder} is the copy of node {found[1]}: the local directory is shared by nodes",
                fix="a directory of each node's own disk (--local-directory)",
            )
        if found[:1] == [wanted.sha256]:
            return
        os.fchmod(folder, 0o700)
        remove(marker)
        remove_contents(wanted.folder)
        if os.listdir(folder):
            raise InputError(f"{wanted.folder} can't be emptied", fix="remove it there")
        _unpack(wanted)
        _complete(wanted, library)
        replace(marker, f"{wanted.sha256} {host}".encode())


def remove_copy(folder: str, host: str) -> None:
    """Remove the copy on this node, its marker first; print a line if it is left.

    That is no error, after which a launcher may end the removal on the other nodes.
    """
    if not os.path.lexists(folder):
        return
    why = ""
    try:
        _check_parent(folder)
        with _opened(folder):
            remove(_marker_file(folder))
        remove_scratch(folder, within=REMOVAL_TIMEOUT)
    except (InputError, OSError) as error:
        why = f" ({error})"
    if os.path.lexists(folder):
        say(f"launch: --stage: {host}: {folder} is left{why}. Fix: remove it there")


def _check_parent(folder: str) -> None:
    if exposed := exposed_folder(os.path.dirname(folder)):
        raise InputError(exposed_text(exposed), fix=exposed_fix(exposed, "another --local-directory"))


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[int]:
    """A descriptor of the folder of a copy. Another user, who may know its name, may have made it, or a link to one of ours."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise InputError(f"{folder} belongs to another user", fix="another --local-directory")
        yield descriptor
    finally:
        os.close(descriptor)


def _marker_file(folder: str) -> str:
    return os.path.join(folder, "complete")


def _read_marker(path: str) -> str:
    try:
        return read_trusted(path)
    except (OSError, ValueError, UntrustedFileError):
        return ""


def _unpack(wanted: Stage) -> None:
    """Unpack the archive while it is read."""
    parts = _read(wanted)
    first = next(parts, b"")
    unpack = _unpack_image if first[:4] == SQUASHFS else _unpack_tar
    code, message = unpack(wanted.folder, first, itertools.chain([first], parts))
    if code:
        status = os.statvfs(wanted.folder)
        left = format_bytes(status.f_bavail * status.f_frsize)
        raise InputError(
            f"it can't be unpacked, and {left} are left there: {message or 'no message'}",
            fix="an archive that `tar -t` can read, and a local directory with more space (--local-directory)",
        )
    for _ in parts:  # tar may end before its input does, and the SHA-256 is that of all
        pass
    # nothing can be renamed in, or removed from, a folder that its owner may not write
    _run(["chmod", "-R", "u+rwX", wanted.folder], "pack it again")


def _unpack_image(folder: str, _: Bytes, archive: Iterable[Bytes]) -> tuple[int, str]:
    """Unpack a SquashFS image, of which unsquashfs needs a file; its exit code and first message."""
    _find("unsquashfs")
    image = os.path.join(folder, "image")
    with open(image, "xb") as file:
        file.writelines(archive)
    line = ["unsquashfs", "-no-progress", "-no-xattrs", "-d", _unpacked(folder), image]
    ended = _feed(line, ())
    os.unlink(image)
    return ended


def _unpack_tar(folder: str, first: Bytes, archive: Iterable[Bytes]) -> tuple[int, str]:
    """Unpack a tar file, which its first bytes may show to be compressed; tar's exit code and first message."""
    # tar follows no link of the archive to outside, and Python's tarfile takes four times as long
    line = ["tar", "-x", "--no-same-owner", "-C", _unpacked(folder), "-f", "-"]
    _find("tar")
    if program := next((each for magic, each in PROGRAMS.items() if first[: len(magic)] == magic), ""):
        _find(program)
        line.append(f"--use-compress-program={program}")
    os.mkdir(_unpacked(folder))
    return _feed(line, archive)


def _unpacked(folder: str) -> str:
    """The place of the archive's files, until they are complete."""
    return os.path.join(folder, "unpacked")


def _read(wanted: Stage) -> Iterator[memoryview]:
    """The archive, read once, in parts; InputError if it can't be read, or if its size or SHA-256 is another at the end."""
    found, size, buffer = hashlib.sha256(), 0, bytearray(CHUNK)
    try:
        with open(wanted.source, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                part = memoryview(buffer)[:count]
                found.update(part)
                size += count
                yield part
    except OSError as error:
        raise InputError(
            f"{wanted.source} can't be read: {error.strerror}", fix="put it where all nodes can read it"
        ) from None
    if (size, found.hexdigest()) != (wanted.size, wanted.sha256):
        raise InputError(
            f"{size} of {wanted.size} bytes were read, and their SHA-256 is another",
            fix="start again; if it stays, pack it again",
        )


def _complete(wanted: Stage, library: str) -> None:
    """Move the environment to its place, and test it."""
    unpacked, place = _unpacked(wanted.folder), os.path.dirname(wanted.bin)
    names = os.listdir(unpacked)
    if "bin" not in names and len(names) == 1:
        unpacked = os.path.join(unpacked, names[0])
    if not os.path.lexists(os.path.join(unpacked, "bin", "python")):
        raise InputError(
            f"{wanted.source} has no bin/python at its top",
            fix="pack it again: tar -C ENVIRONMENT -c . | zstd > ENV.tar.zst",
        )
    os.rename(unpacked, place)
    python = os.path.join(wanted.bin, "python")
    relocate = os.path.join(wanted.bin, "conda-unpack")
    if os.path.exists(relocate):
        _run([python, relocate], "pack it again with conda-pack")
    fix = "install the same packages and dask-gpu-mpi in the environment; a venv needs its base Python on each node, too"
    # what a rank does; loading the library fails on a disk from which nothing may be run
    printed = _run([python, "-P", "-c", f"import dask_gpu_mpi.cli.main\n{LIBRARY_PROGRAM}"], fix)
    found, _ = parse_answer(printed) or ("", "")
    if found.partition("\n")[0].rstrip("\0") != library:
        raise InputError(f"its MPI library is {library_name(found)}", expected=library_name(library), fix=fix)


def _find(program: str) -> None:
    if shutil.which(program) is None:
        raise InputError(f"command {program} not found in PATH", fix=f"install {program}, or pack a .tar.gz")


def _feed(line: Sequence[str], parts: Iterable[Bytes]) -> tuple[int, str]:
    """Run a program that reads these bytes, which may end before it has read all; its exit code and its first message."""
    die = partial(die_with_parent, os.getpid())
    with tempfile.TemporaryFile() as log:
        program = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, preexec_fn=die
        )
        assert program.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError), program.stdin as pipe:
                pipe.writelines(parts)
        finally:
            code = program.wait()
        messages = os.pread(log.fileno(), RECORD, 0).decode(errors="replace").strip()
    return code, messages.partition("\n")[0]


def _run(line: Sequence[str], fix: str) -> str:
    """Run a program of the copy, which must not count as a rank; return its output."""
    die = partial(die_with_parent, os.getpid())
    done = run_command(line, scrub(os.environ), PROGRAM_TIMEOUT, prepare=die)
    if done.returncode:
        last = done.stderr.strip().splitlines()
        raise InputError(f"{line[0]} fails: {last[-1].strip() if last else done.returncode}", fix=fix)
    return done.stdout
