"""The processes that a script starts: they find its cluster, and can't start another one as the rank of their script.

`job.start` marks the children of a rank, and refuses to start a cluster in one. `job.session` lets them find the cluster, by a
file (`ClusterFile`). A child that may start another job, by `job.start` or a command, forgets the cluster first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from dask_gpu_mpi.base.frames import Held
from dask_gpu_mpi.base.signals import RANK_PID
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.options.convert import defaults_of
from dask_gpu_mpi.sites import launchers


def mark_children() -> None:
    """Mark the script's children, for `refuse_children`; the mark stays after the cluster."""
    os.environ[RANK_PID] = str(os.getpid())


def refuse_children() -> None:
    """Raise an InputError in a child of a rank that would start a cluster again.

    A process of `multiprocessing` runs the script again if that has no guard. Another child is a job by itself, unless it has the
    rank's variables, with which its MPI would join as that rank, and wait forever. A task would start a job in its worker.
    """
    if (distributed := sys.modules.get("distributed")) is not None:
        worker = None
        with contextlib.suppress(ValueError, AttributeError):  # this is no task; or the module is another one
            worker = distributed.get_worker()
        if worker is not None:
            raise InputError(
                f"initialize: called in a task, on worker {worker.name}",
                expected="once, in the script of the job",
                fix="in a task, distributed.get_client() is a client of its cluster",
            )
    rank = os.environ.get(RANK_PID, "")
    launched = launchers.detect(os.environ)
    # `launch` in the script starts another job: a rank that it has started is below this rank, and has variables of its own
    has_variables = launched is not None and launched.launcher is not launchers.LOCAL
    # while such a process runs the script, `multiprocessing.parent_process` is not set yet
    runs_again = any(word.startswith("from multiprocessing.") for word in sys.orig_argv)
    if not (has_variables or runs_again) or not re.fullmatch(r"[0-9]{1,10}", rank):
        return
    from dask_gpu_mpi.mpi.neighbours import is_child_of  # which imports psutil

    if is_child_of(int(rank)):
        raise InputError(
            "initialize: called in a child process of a rank that has its cluster already",
            expected="once per rank",
            fix="a notebook or another child connects with a plain Client(); if multiprocessing runs the script again in each "
            'child, put it under `if __name__ == "__main__":`',
        )


# The script's children find the cluster by its address and credentials, in a file of Dask's configuration.
#
# ``DASK_CONFIG``, which Dask reads after all other files, has its path. It is a file without a name, if possible in memory, which
# the rank has open: ``/proc/PID/fd/N`` leads to it, for processes of the same user on the same node. So there is no file to
# remove at the end, and no key is ever in a folder, an environment or a command line.

CONFIG = "DASK_CONFIG"
#: The whole configuration of a program that Dask has started this one from; it wins over files.
INHERITED = "DASK_INTERNAL_INHERIT_CONFIG"
#: Environment variable: JSON of our file's path, and of the user's variables that it replaces, for `forget_cluster`.
BEFORE = "DGM_DASK_BEFORE"
SHARED_MEMORY = "/dev/shm"
#: The least number of the descriptor of our file.
LEAST_DESCRIPTOR = 100


def cluster_for_children(settings: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Let the processes that the script starts find its cluster by these settings of Dask, until it is closed."""
    try:
        return contextlib.closing(ClusterFile(settings))
    except (OSError, ValueError) as error:
        why = str(error)
        if getattr(error, "errno", None) == errno.EINVAL:  # of F_DUPFD_CLOEXEC
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            why = f"the limit of open files, {limit}, is too low (ulimit -n; expected more than {LEAST_DESCRIPTOR})"
        say(
            f"warning: processes that the script starts can't connect with a plain Client(): {why}. Fix: start the job "
            "with --scheduler-file FILE, and call dask_gpu_mpi.connect(FILE) in them"
        )
        return contextlib.nullcontext()


class ClusterFile:
    """The file, and the environment by which the script's children find it, until `close`.

    OSError: it can't be written. ValueError: the user's ``DASK_CONFIG`` is malformed.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import dask.config
        import yaml

        own = os.environ.get(CONFIG, "")
        # The user's file is included, since Dask reads one only. A pipe has been read, and opening it again could wait forever.
        regular = os.path.isfile(own) or os.path.isdir(own)
        before = {name: os.environ[name] for name in _overriding(os.environ, settings)}
        variables = {name: value for name, value in before.items() if name != CONFIG}
        # a variable may have more values than those that we set
        content = dask.config.merge(
            *dask.config.collect_yaml([own] if regular else []), dask.config.collect_env(variables)
        )
        dask.config.set(settings, config=content)
        self._file = Held(_nameless_file(yaml.safe_dump(content)))
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fd}"
        for name in before:
            del os.environ[name]
        os.environ.update({CONFIG: self.path, BEFORE: json.dumps([self.path, before])})

    def close(self) -> None:
        """Restore the environment; variables that the script has set since stay. May be called again."""
        if self._file.fd < 0:
            return
        if (record := _record(os.environ)) is not None and record[0] == self.path:
            _restore(os.environ, *record)
        self._file.close()


def forget_cluster() -> None:
    """Undo the settings of a session in a child process of its script that starts another cluster.

    In the environment, and in Dask's configuration if that is loaded.
    """
    record = _record(os.environ)
    if record is None or record[0].startswith(f"/proc/{os.getpid()}/"):
        return
    _restore(os.environ, *record)
    if (config := sys.modules.get("dask.config")) is not None:
        _forget_settings(config, record[0])


def _record(environ: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """Our file, and the user's variables; None: there is none."""
    try:
        path, before = json.loads(environ.get(BEFORE, ""))
        return str(path), {str(name): str(value) for name, value in before.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _restore(environ: MutableMapping[str, str], path: str, before: Mapping[str, str]) -> None:
    del environ[BEFORE]
    if environ.get(CONFIG) == path:
        del environ[CONFIG]
    for name, value in before.items():
        environ.setdefault(name, value)


def _overriding(environ: Iterable[str], settings: Mapping[str, Any]) -> Iterator[str]:
    """The variables that Dask would read instead of our file: `CONFIG`, and any of a key that we set, or around or below one."""
    for name in environ:
        key = name.removeprefix("DASK_").lower().replace("__", ".").replace("_", "-") + "."
        ours = any(f"{each}.".startswith(key) or key.startswith(f"{each}.") for each in settings)
        if name in (CONFIG, INHERITED) or (name.startswith("DASK_") and ours):
            yield name


def _nameless_file(text: str) -> int:
    """The descriptor of a new file with this text, which is readable for its owner only and in no folder."""
    import tempfile

    def in_folder(folder: str) -> int:
        with tempfile.TemporaryFile("w", encoding="utf-8", dir=folder) as file:
            file.write(text)
            file.flush()
            # high, since a program by which the script replaces itself still has the path, and would read its own file there
            return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, LEAST_DESCRIPTOR)

    try:
        return in_folder(SHARED_MEMORY)
    except OSError:  # there is none, or it is full
        return in_folder(tempfile.gettempdir())


def _forget_settings(config: Any, path: str) -> None:
    """Remove from `dask.config` the values of our file; values that were set since stay."""
    import runpy

    content = config.merge(*config.collect_yaml([path]))
    # run once more, the module finds the files of the restored environment
    again = runpy.run_path(config.__file__)
    without = config.merge(defaults_of(config), again["collect"]())
    for key, value in leaves(content):
        other = config.get(key, None, config=without)
        if other != value and config.get(key, None) == value:
            config.set({key: other})


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a configuration of Dask, with dots, and their values."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
