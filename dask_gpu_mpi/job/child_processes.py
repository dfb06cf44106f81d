"""The processes that a script starts: they find its cluster, and may not bring up another as the rank that their script is."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from dask_gpu_mpi.base.signals import die_with_parent
from dask_gpu_mpi.base.streams import flush, say
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job.cluster_file import ClusterFile
from dask_gpu_mpi.mpi.launcher_check import is_child_of
from dask_gpu_mpi.sites import launchers

#: Variable in the environment of the script's children: process id of the rank.
RANK_PID = "DGM_RANK_PID"


def mark_children() -> None:
    """Let the script's children know whose children they are (`refuse_children`).

    For good: after the cluster too they have the rank's variables, with which their MPI would wait for ever.
    """
    os.environ[RANK_PID] = str(os.getpid())


def refuse_children() -> None:
    """A child of a rank has the rank's variables: its MPI would join as a rank that is there already, and wait for ever.

    Raises
    ------
    InputError
        This is one. Raised here and now: the other ranks are in the cluster of the rank.
    """
    rank = os.environ.get(RANK_PID, "")
    launched = launchers.detect(os.environ) if re.fullmatch(r"[0-9]{1,18}", rank) else None
    if launched is not None and is_child_of(int(rank)):
        size = "" if launched.size is None else f" of {launched.size}"
        raise InputError(
            f"initialize: called in a child process of rank {launched.rank}{size}, which has its cluster already (expected once "
            'per rank). Fix: put the script under `if __name__ == "__main__":`, since multiprocessing runs it again in each '
            "child; a child may connect with a plain Client()"
        )


class ChildrenOfCluster:
    """What the processes that the script starts are given of its cluster, until `release`.

    Parameters
    ----------
    settings : mapping
        Dask's, by key: the scheduler's address and the credentials.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._file: ClusterFile | None = None
        try:
            self._file = ClusterFile(settings)
        except (OSError, ValueError) as error:
            say(
                f"warning: processes that the script starts can't connect with a plain Client(): {error}. Fix: start the job "
                "with --scheduler-file FILE, and call dask_gpu_mpi.connect(FILE) in them"
            )
        self._exec = ExecAsChild()

    def release(self) -> None:
        """What the script starts from now on is without the cluster. May be called again."""
        if self._file is not None:
            self._file.close()
        self._exec.take_back()


# A script that replaces itself by another program (``os.exec*``), as ``python -m jupyter lab`` does.
#
# The process is an MPI rank and holds the cluster, so it must stay: the program runs as its child, and the script ends with
# the program's exit code. As with a real ``exec``, it inherits the descriptors that the script has made inheritable; not
# those of MPI and of the launcher, which it could keep open when the job has ended.

#: Seconds that the program has to end when a signal ends the script.
GRACE = 3.0


class ExecAsChild:
    """Replaces ``os.execv`` and ``os.execve``, which all of ``os.exec*`` call, in this process, until `take_back`."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._not_of_script = _inheritable()
        self._before: dict[str, Any] = {"execv": os.execv, "execve": os.execve}
        self._ours = {
            "execv": functools.partial(self._exec, "execv"),
            "execve": functools.partial(self._exec, "execve"),
        }
        for name, function in self._ours.items():
            setattr(os, name, function)

    def take_back(self) -> None:
        """Make them what they were; not where the script has replaced them since. May be called again."""
        for name, function in self._ours.items():
            if getattr(os, name) is function:
                setattr(os, name, self._before[name])

    def _exec(self, name: str, path: Any, argv: Sequence[Any], *env: Mapping[Any, Any]) -> NoReturn:
        if os.getpid() != self._owner or isinstance(path, int):
            self._before[name](path, argv, *env)
        passed = [fd for fd, _ in _inheritable() - self._not_of_script]
        run_to_its_end(path, argv, *env, pass_fds=passed)


def _inheritable() -> set[tuple[int, tuple[int, int]]]:
    """The descriptors of this process that a program would inherit, each with its file."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the one by which the folder was read
                file = os.fstat(fd := int(name))
                if os.get_inheritable(fd):
                    found.add((fd, (file.st_dev, file.st_ino)))
    return found


def run_to_its_end(
    path: Any, argv: Sequence[Any], env: Mapping[Any, Any] | None = None, *, pass_fds: Collection[int] = ()
) -> NoReturn:
    """Run a program as a child of this process, and end the script with its exit code.

    Raises
    ------
    OSError
        It can't be run, as from ``os.execve``.
    SystemExit
        With its exit code, 128 and more after a signal.
    """
    flush()
    # Instead of this process, it would end with it.
    program = subprocess.Popen(
        list(argv),
        executable=path,
        env=env,
        pass_fds=pass_fds,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    try:
        code = program.wait()
    except BaseException:  # a signal ends the script
        program.terminate()
        try:
            program.wait(GRACE)
        except subprocess.TimeoutExpired:
            program.kill()
        raise
    raise SystemExit(code if code >= 0 else 128 - code)
