"""Dask in the script's process while it has a session: its configuration, `Client` and `LocalCluster`, and the script's clients.

A plain ``Client()`` connects to the job's cluster. Another cluster, which may be a mistake, gets a warning, or is refused. Called
by `ScriptCluster` (`job.session`), which undoes all of it when the cluster is over and the script continues.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import listed
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job.child_processes import leaves
from dask_gpu_mpi.network.credentials import link_template
from dask_gpu_mpi.options.convert import defaults_of, is_configured

if TYPE_CHECKING:
    from distributed import Client

    from dask_gpu_mpi.plan import Plan

# Dask's configuration, and clients by credentials.

#: Dask's ways to shuffle dataframes and to rechunk arrays, which it reads when a graph is made, in the client's process.
SHUFFLES = ("dataframe.shuffle.method", "array.rechunk.method")


class DaskSettings:
    """Settings of Dask that can be taken back; `settings`: values by key, as in ``dask.config.set``."""

    #: The last ones as sections of the configuration, for `complete_defaults`; empty: they were taken back.
    sections: ClassVar[dict[str, Any]] = {}

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import dask.config

        self._changes = [(key, value, dask.config.set({key: value})) for key, value in settings.items()]
        # dask.config.refresh() starts again from the defaults, so the settings are added there as well.
        self._defaults: dict[str, Any] = {}
        dask.config.set(settings, config=self._defaults)
        dask.config.update_defaults(self._defaults)
        DaskSettings.sections = self._defaults

    def take_back(self) -> None:
        """Restore the configuration; values that the script has changed since stay. May be called again."""
        import dask.config

        self._defaults.clear()  # dask.config keeps this very dict
        for key, value, change in reversed(self._changes):
            if dask.config.get(key, None) == value:
                change.__exit__(None, None, None)
        self._changes = []


def complete_defaults() -> None:
    """Add what is missing in Dask's configuration of the defaults of its packages.

    ``with dask.config.set({"distributed.x": 1}): initialize()`` removes the whole section ``distributed`` at its end, if that was
    not there at its beginning: `initialize` has imported distributed, which registers the section.
    """
    import dask.config

    for known in (DaskSettings.sections, defaults_of(dask.config)):
        dask.config.update(dask.config.config, known, priority="old")


def shuffle_settings(plan: Plan) -> dict[str, str]:
    """Shuffle and rechunk by tasks, if all workers have GPUs and the user has not configured it.

    Dask's choice is p2p. cuDF shuffled 160 million rows in 0.6 to 0.9 s by tasks, 26 to 30 s by p2p. CuPy's rechunk by p2p fails.
    """
    on_gpus = bool(plan.workers) and all(worker.kind == "gpu" for worker in plan.workers)
    return {key: "tasks" for key in SHUFFLES if on_gpus and not is_configured(key)}


def security_of(address: str, config: Mapping[str, Any]) -> Any:
    """The ``distributed.Security`` for clients of the cluster with these credentials; None without TLS."""
    if not address.startswith("tls://"):
        return None
    import dask
    from distributed import Security

    complete_defaults()
    with dask.config.set(config):
        return Security()


def client_with_link(link: str | None) -> type[Client]:
    """Dask's ``Client`` with this ``dashboard_link``, independent of other clients; None: Dask's link."""
    import dask
    from distributed import Client

    if link is None:
        return Client
    known = link

    class ClientWithLink(Client):
        """Dask's client, whose link to the dashboard has the token."""

        @property
        def dashboard_link(self) -> Any:
            """Link to the dashboard, with its token."""
            template: str = dask.config.get("distributed.dashboard.link")
            with dask.config.set({"distributed.dashboard.link": link_template(known, template)}):
                return super().dashboard_link

    return ClientWithLink


#: Dask's schedulers within one process or node that a script may request, and the modules that run them.
_LOCAL_SCHEDULERS = {"threads": "dask.threaded", "processes": "dask.multiprocessing"}

# The script's use of Dask: `Client` and `LocalCluster` are replaced, once in this process, by methods that note and correct it.


class DaskUse:
    """The use that a script makes of Dask while its process has a session.

    `address`: of the scheduler. `before_shutdown` is called before a client of this process shuts the cluster down.
    """

    def __init__(self, address: str, before_shutdown: Callable[[], None]) -> None:
        from dask.callbacks import Callback

        self.address = address
        self.before_shutdown = before_shutdown
        #: A client of the script has ended the cluster.
        self.is_shut_down = False
        #: The script has made a client of the cluster.
        self.has_client = False
        #: It has made a cluster itself, of which it was warned.
        self.has_other_cluster = False
        #: It has computed without a client: Dask calls a `Callback` for such computations only.
        self.has_computed_locally = False
        #: The state in which the script of a command began, until its first client.
        self.at_start: AtStart | None = None
        self._callback = Callback(start=self._on_local_computation)
        self._callback.register()

    def _on_local_computation(self, graph: Any) -> None:
        self.has_computed_locally = True
        # A script that was made for one machine may request one of these; libraries compute small things with "sync".
        if any(getattr(client, "status", None) == "running" for client in list(_clients)):
            modules = {
                frame.f_globals.get("__name__") for frame, _ in traceback.walk_stack(inspect.currentframe())
            }
            for scheduler, module in _LOCAL_SCHEDULERS.items():
                if module in modules:
                    text = f"{scheduler} compute in the script's own process, without the workers"
                    _warn_once(
                        f'scheduler="{scheduler}"',
                        f"{text}. Fix: leave scheduler= (or set_as_default=False) out",
                    )

    def on_client(self) -> None:
        """Note that the script makes a client of the cluster."""
        self.has_client = True
        at_start, self.at_start = self.at_start, None
        if at_start is not None:
            at_start.warn_of_changes()

    def stop(self) -> None:
        """Note nothing any more."""
        self._callback.unregister()


#: That of the open session, set by `prefer_cluster` and `prefer_no_cluster`.
_use: DaskUse | None = None
#: Whether `initialize` has returned False in this process, set by `refuse_clients`.
_returned_false = False
#: The clients that the script has made since its process has had a cluster.
_clients: weakref.WeakSet[Client] = weakref.WeakSet()
#: Addresses of other clusters, of which clients are intended.
_expected: set[str] = set()
#: The classes of which a warning was printed: one of each is enough.
_warned: set[str] = set()


def prefer_cluster(address: str, before_shutdown: Callable[[], None]) -> DaskUse:
    """Change Dask's `Client` and `LocalCluster` for a script whose job has a cluster; the arguments are those of `DaskUse`.

    Another cluster gets a warning, and ``Client(n_workers=...)`` connects to this one. ``Client.shutdown()`` calls
    `before_shutdown`. On a closed client, on which it fails with internal errors, it does nothing: a script may end its cluster
    twice, by this and by `Session.close`.
    """
    global _use, _returned_false
    from distributed import Client

    _use, _returned_false = DaskUse(address, before_shutdown), False
    _replace_methods()
    with contextlib.suppress(ValueError):  # there is none
        other = Client.current()
        if other.status == "running" and getattr(other.scheduler, "address", address) != address:
            _warn_once(
                "Client before initialize()", "it is of another cluster. Fix: Client() after initialize()"
            )
    return _use


def prefer_no_cluster() -> None:
    """The job's cluster is over, and the script may start another one."""
    global _use
    if _use is not None:
        _use.stop()
    _use = None


def refuse_clients() -> None:
    """Let ``Client()`` fail from now on, and `LocalCluster` warn: `initialize` returns False on this rank.

    A script that does not check that would start a cluster of Dask's own here, and compute everything again.
    """
    global _returned_false
    _returned_false = True
    _replace_methods()


@functools.cache
def _replace_methods() -> None:
    """Replace the methods of Dask, once in this process; the new ones depend on the module's state."""
    from distributed import Client, LocalCluster

    make_cluster, make_client, shutdown = LocalCluster.__init__, Client.__init__, Client.shutdown

    @functools.wraps(make_cluster)
    def cluster(self: LocalCluster, *args: Any, **kwargs: Any) -> None:
        _on_cluster(type(self).__name__)
        make_cluster(self, *args, **kwargs)

    @functools.wraps(make_client)
    def client(self: Client, address: Any = None, *args: Any, **kwargs: Any) -> None:
        make_client(self, address, *args, **_on_client(self, address, kwargs))

    @functools.wraps(shutdown)
    def once(self: Client) -> Any:
        if self.status == "closed" and not self.asynchronous:
            return None
        use = _use
        if use is not None and getattr(self.scheduler, "address", None) == use.address:
            use.before_shutdown()
            if self.asynchronous:
                return _shut_down(use, shutdown(self))
            use.is_shut_down = True
        return shutdown(self)

    LocalCluster.__init__ = cluster  # type: ignore[method-assign]
    Client.__init__ = client  # type: ignore[method-assign]
    Client.shutdown = once  # type: ignore[method-assign]


async def _shut_down(use: DaskUse, shutdown: Awaitable[Any]) -> Any:
    """Await a client's shutdown: without that the cluster goes on."""
    result = await shutdown
    use.is_shut_down = True
    return result


def _on_cluster(kind: str) -> None:
    """Print a warning of a cluster that the script is about to start; `kind` may be a subclass, such as LocalCUDACluster."""
    if (use := _use) is not None:
        use.has_other_cluster = True
        advice = (
            "this job already has a cluster, whose workers do nothing for this one. Fix: client = Client(), which connects to "
            "the job's cluster"
        )
    elif _returned_false:
        advice = (
            "initialize(exit=False) has returned False on this rank, and this cluster is of this rank alone. Fix: if "
            "initialize(exit=False): ..., unless each rank is to have its cluster"
        )
    else:
        return
    _warn_once(kind, advice)


def _on_client(client: Client, address: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Note a client that the script is about to make, with these arguments; returns the keywords to use.

    Raises an InputError if it would start a cluster of Dask's own on a rank on which `initialize` has returned False.
    """
    import dask

    complete_defaults()
    configured = dask.config.get("scheduler-address", None)
    if _returned_false and not (address or kwargs.get("scheduler_file") or configured):
        raise InputError(
            "Client: initialize(exit=False) has returned False on this rank, and the cluster of the job has ended",
            expected="a client on the rank on which initialize returns a session; here it would be one of another cluster",
            fix="if initialize(exit=False): ..., or leave exit=False out",
        )
    _clients.add(client)
    use = _use
    if use is None:
        if not (address or kwargs or configured):
            _warn_once(
                "Client()",
                "this program's session has ended, so Dask starts a cluster on this node. Fix: make clients before that",
            )
        return kwargs
    of = getattr(address, "scheduler_address", address)  # a cluster has one
    if use.is_shut_down and not kwargs.get("scheduler_file") and (of or configured) == use.address:
        raise InputError(
            "Client: shutdown() of a client has ended this job's cluster", fix="close() ends a client alone"
        )
    if not isinstance(of, str) or of == use.address:
        use.on_client()
    elif isinstance(address, str) and not (
        use.has_other_cluster or address in _expected or _has_same_port(address, use.address)
    ):
        _warn_once("Client(ADDRESS)", f"{address} is not the job's cluster. Fix: client = Client()")
    file = kwargs.get("scheduler_file")
    if file and not os.path.exists(file):
        _warn_once(
            f"Client(scheduler_file={file!r})",
            "Dask waits for this file, which does not exist. Fix: client = Client(), which connects to the job's cluster",
        )
    return _without_cluster_options(kwargs) if address is None and configured == use.address else kwargs


def _without_cluster_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a `Client` without those of the cluster that it would start elsewhere."""
    from distributed import Client, LocalCluster

    known = {*inspect.signature(Client.__init__).parameters}
    of_cluster = {*inspect.signature(LocalCluster.__init__).parameters, "memory_limit", "local_directory"}
    if not (of_cluster - known) & set(kwargs):
        return kwargs  # Dask reports unknown keywords
    dropped = ", ".join(name for name in kwargs if name not in known)
    _warn_once(
        "Client",
        f"this job already has a cluster, to which it connects; no effect: {dropped}. Fix: client = Client()",
    )
    return {name: value for name, value in kwargs.items() if name in known}


def _has_same_port(address: str, other: str) -> bool:
    """Whether both may be the same scheduler, whose host may be spelt in several ways."""
    return address.rpartition(":")[2] == other.rpartition(":")[2]


def expect_client(address: str) -> None:
    """A client of this cluster, which may be another one than the job's, is intended."""
    _expected.add(address)


def _warn_once(kind: str, text: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        say(f"warning: {kind}: {text}")


# The clients that the script leaves behind at its end.


def close_clients(address: str) -> None:
    """Close the script's clients of this cluster while the scheduler still answers."""
    for client in list(_clients):
        with contextlib.suppress(Exception):
            if (
                not client.asynchronous
                and client.status == "running"
                and client.scheduler is not None
                and client.scheduler.address == address
            ):
                client.close(timeout=1)


def has_lost_client() -> bool:
    """Whether a client has lost its scheduler, and tries to connect again."""
    # a client whose constructor has failed has no status
    return any(getattr(client, "status", None) == "connecting" for client in list(_clients))


def abandon_clients(address: str) -> None:
    """Mark clients that could not be closed as closed.

    ``Client.__del__`` closes open clients, and waits forever once the interpreter ends and its event loop is gone. These are
    clients whose ``shutdown()`` or ``close()`` has failed half way.
    """
    for client in list(_clients):
        with contextlib.suppress(Exception):
            ours = client.scheduler is not None and client.scheduler.address == address
            if client.status == "closing" or (ours and client.status != "closed"):
                client.status = "closed"


def silence_dask() -> list[logging.Logger]:
    """Disable Dask's loggers, and return them: messages of clients after the cluster's end do not matter."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("distributed.")]
    loggers = [logging.getLogger(name) for name in ("distributed", *names)]
    silenced = [logger for logger in loggers if not logger.disabled]
    for logger in silenced:
        logger.disabled = True
    return silenced


# What a script changes in its process after the workers have started, and they do not have.

#: Sections of Dask's configuration that scheduler and workers read.
_READ_ELSEWHERE = tuple(f"distributed.{name}." for name in ("comm", "nanny", "scheduler", "worker"))


class AtStart:
    """The process of a script at its start, which is also that of the workers: the cluster of a command starts first."""

    def __init__(self) -> None:
        self._directory = os.getcwd()
        self._path = [*sys.path]
        self._environ = {**os.environ}
        self._config = _read_elsewhere()

    def changes(self) -> list[str]:
        """What the script has set since, and the workers do not have.

        Packages set variables when they are imported, in workers too. So only those count that are in the script's text.
        """
        try:
            text = inspect.getsource(sys.modules["__main__"])
        except (OSError, TypeError):  # of -c
            text = ""
        changed = [name for name in os.environ if os.environ[name] != self._environ.get(name)]
        # packages, such as setuptools, add their own folders
        added = [each for each in sys.path if each not in self._path and not each.startswith(sys.prefix)]
        now, before = _read_elsewhere(), self._config
        return [
            *(f"the variable {name}" for name in changed if name in text),
            *(["the working directory"] if os.getcwd() != self._directory else []),
            *(f"{each!r} in sys.path" for each in added),
            *(f"{key} of Dask's configuration" for key in now if now[key] != before.get(key)),
        ]

    def warn_of_changes(self) -> None:
        """Warn of these changes, if there are any."""
        if changes := self.changes():
            say(
                f"warning: Client: the workers do not have what the script has set since its start: {listed(changes)}. Fix: set "
                "it before the command (NAME=VALUE, PYTHONPATH, cd, DASK_...), or start the script without the command, and call "
                "initialize() after that"
            )


def _read_elsewhere() -> dict[str, Any]:
    import dask

    return {key: value for key, value in leaves(dask.config.config) if key.startswith(_READ_ELSEWHERE)}


def note_start() -> None:
    """Note the state of this process, which has a session: the script of a command begins now."""
    assert _use is not None
    _use.at_start = AtStart()
