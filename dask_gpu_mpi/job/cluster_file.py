"""What the script's children find the cluster by: its address and credentials, as a file of Dask's configuration.

``DASK_CONFIG``, which Dask reads after all other files, names it. It is a file without a name, in memory where that can be had,
which the rank holds open: ``/proc/PID/fd/N`` leads there, for processes of the same user on the same node. So nothing is left to
remove, whichever way the rank ends, and no key is ever in a folder, an environment or a command line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from dask_gpu_mpi.base.frames import identity

__all__ = ["ClusterFile", "forget_cluster"]

CONFIG = "DASK_CONFIG"
#: Variable of what the children's environment was before: JSON of our file and of the user's variables. A job that the script
#: starts is to have these again (`forget_cluster`).
BEFORE = "DGM_DASK_BEFORE"
SHARED_MEMORY = "/dev/shm"


class ClusterFile:
    """That file, and the environment that leads the script's children to it, until `close`.

    Parameters
    ----------
    settings : mapping
        Values by key, as in ``dask.config.set``.

    Raises
    ------
    OSError
        It can't be written, or other processes could not read it.
    ValueError
        The user's own ``DASK_CONFIG`` is malformed by now.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import dask.config
        import yaml

        own = os.environ.get(CONFIG, "")
        # As a file: Dask would read one of the two only. A pipe has been read, and to open it again could wait for ever.
        regular = os.path.isfile(own) or os.path.isdir(own)
        content = dask.config.merge(*dask.config.collect_yaml([own] if regular else []))
        dask.config.set(settings, config=content)
        self._fd = _nameless_file(yaml.safe_dump(content))
        self._identity = identity(self._fd)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            _check_readable(self.path)
        except OSError:
            os.close(self._fd)
            raise
        before = {name: os.environ.pop(name) for name in [*_overriding(os.environ, settings)]}
        os.environ.update({CONFIG: self.path, BEFORE: json.dumps([self.path, before])})

    def close(self) -> None:
        """Make the environment what it was before; what the script has set since stays. May be called again."""
        if self._identity is None:
            return
        if (record := _record(os.environ)) is not None and record[0] == self.path:
            _restore(os.environ, *record)
        # The script may have closed it, and opened another with its number.
        if identity(self._fd) == self._identity:
            os.close(self._fd)
        self._identity = None


def forget_cluster() -> None:
    """In a process that a script has started, for a cluster of its own: what the script's session has set is not there.

    Neither in the environment nor in Dask's configuration, if that is loaded.
    """
    record = _record(os.environ)
    if record is None or record[0].startswith(f"/proc/{os.getpid()}/"):
        return
    _restore(os.environ, *record)
    if (config := sys.modules.get("dask.config")) is not None:
        _forget_settings(config, record[0], record[1].get(CONFIG))


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
    """The variables that Dask would read instead of our file: `CONFIG`, and any of a key that we set."""
    for name in environ:
        key = name.removeprefix("DASK_").lower().replace("__", ".").replace("_", "-")
        ours = any(f"{key}.".startswith(f"{setting}.") for setting in settings)
        if name == CONFIG or (name.startswith("DASK_") and ours):
            yield name


def _nameless_file(text: str) -> int:
    """The descriptor of a new file with this text, which is readable for its owner only and in no folder."""
    import tempfile

    for folder in (SHARED_MEMORY, tempfile.gettempdir()):
        try:
            fd, name = tempfile.mkstemp(prefix="dgm-", dir=folder)
        except OSError as error:
            failure = error
            continue
        try:
            os.unlink(name)
            with open(fd, "w", encoding="utf-8", closefd=False) as file:
                file.write(text)
        except OSError as error:  # it is full
            os.close(fd)
            failure = error
        else:
            return fd
    raise failure


def _check_readable(path: str) -> None:
    """Raise an OSError where no other process of this user can read the files that this one has open (proc(5))."""
    os.stat(path)
    if os.stat(f"/proc/{os.getpid()}").st_uid != os.geteuid():
        raise PermissionError(0, "this process is not dumpable", path)


def _forget_settings(config: Any, path: str, own: str | None) -> None:
    """Take back what `dask.config` has read from our file; what was set since stays."""
    content = config.merge(*config.collect_yaml([path]))
    config.paths[:] = [own if each == path else each for each in config.paths if each != path or own]
    without = config.merge(*config.defaults, config.collect(config.paths))
    for key, value in _leaves(content):
        other = config.get(key, None, config=without)
        if other != value and config.get(key, None) == value:
            config.set({key: other})


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
