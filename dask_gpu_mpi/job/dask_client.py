"""Dask in the script's process while it has a session: its configuration, `Client` and `LocalCluster`, and the script's clients.

A plain ``Client()`` connects to the job's cluster. Another cluster, which may be a mistake, gets a warning, or is refused.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
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


# `Client` and `LocalCluster`: their methods are replaced, once in this process, and depend on this state.

#: Address of the scheduler of the open session.
_address: str | None = None
#: The clients that the script has made since its process has had a cluster.
_clients: weakref.WeakSet[Client] = weakref.WeakSet()
#: Whether the script has made a client of the cluster since it has a session.
_made_client = False
#: Whether it has made a cluster of its own since it has a session, of which it was warned.
_made_cluster = False
#: Whether the script has computed without a client since it has a session: Dask calls `_callback` for such computations only.
_computed_locally = False
_callback: Any = None
#: Whether `initialize` has returned False in this process.
_returned_false = False
#: The warnings that were printed: one of each is enough.
_warned: set[str] = set()

#: The state in which the script of a command began, until its first client.
_at_start: AtStart | None = None
#: Called before the cluster is shut down by a client of this process.
_before_shutdown: Callable[[], None] = lambda: None  # noqa: E731


def prefer_cluster(address: str, before_shutdown: Callable[[], None]) -> None:
    """Change Dask's `Client` and `LocalCluster` for a script whose job has a cluster with its scheduler at `address`.

    Another cluster gets a warning, and ``Client(n_workers=...)`` connects to this one. ``Client.shutdown()`` calls
    `before_shutdown`. On a closed client, on which it fails with internal errors, it does nothing: a script may end its cluster
    twice, by this and by `Session.close`.
    """
    from dask.callbacks import Callback

    global _address, _made_client, _made_cluster
    global _before_shutdown, _returned_false, _computed_locally, _callback
    _address, _made_client, _made_cluster = address, False, False
    _before_shutdown, _returned_false = before_shutdown, False
    _computed_locally, _callback = False, Callback(start=_note_computation)
    _callback.register()
    _replace_methods()


def prefer_no_cluster() -> None:
    """The job's cluster is over, and the script may start another one."""
    global _address, _at_start
    _address = _at_start = None
    _callback.unregister()


def refuse_clients() -> None:
    """Let ``Client()`` fail from now on, and `LocalCluster` warn: `initialize` returns False on this rank.

    A script that does not check that would start a cluster of Dask's own here, and compute everything again.
    """
    global _returned_false
    _returned_false = True
    _replace_methods()


def _replace_methods() -> None:
    """Replace the methods of Dask, once in this process."""
    import dask
    from distributed import Client, LocalCluster

    make_cluster, make_client, shutdown = LocalCluster.__init__, Client.__init__, Client.shutdown
    if getattr(shutdown, "once", False):  # for a cluster before this one
        return

    @functools.wraps(make_cluster)
    def cluster(self: LocalCluster, *args: Any, **kwargs: Any) -> None:
        global _made_cluster
        _made_cluster = True
        if _address is not None or _returned_false:
            _warn_of_cluster(type(self).__name__)
        make_cluster(self, *args, **kwargs)

    @functools.wraps(make_client)
    def client(self: Client, address: Any = None, *args: Any, **kwargs: Any) -> None:
        global _made_client
        complete_defaults()
        elsewhere = address or kwargs.get("scheduler_file") or dask.config.get("scheduler-address", None)
        if _returned_false and not elsewhere:
            raise InputError(
                "Client: initialize(exit=False) has returned False on this rank, and the cluster of the job has ended",
                expected="a client on the rank on which initialize returns a session; here it would be one of another cluster",
                fix="if initialize(exit=False): ..., or leave exit=False out",
            )
        _clients.add(self)
        of = getattr(address, "scheduler_address", address)  # a cluster has one
        if not isinstance(of, str) or of == _address:
            if _at_start is not None and not _made_client:
                _at_start.warn_of_changes()
            _made_client = True
        if (
            address is None
            and _address is not None
            and dask.config.get("scheduler-address", None) == _address
        ):
            kwargs = _without_cluster_options(kwargs, make_client, make_cluster)
        make_client(self, address, *args, **kwargs)

    @functools.wraps(shutdown)
    def once(self: Client) -> Any:
        if self.status == "closed" and not self.asynchronous:
            return None
        if _address is not None and getattr(self.scheduler, "address", None) == _address:
            _before_shutdown()
        return shutdown(self)

    once.once = True  # type: ignore[attr-defined]
    LocalCluster.__init__ = cluster  # type: ignore[method-assign]
    Client.__init__ = client  # type: ignore[method-assign]
    Client.shutdown = once  # type: ignore[method-assign]


def _note_computation(graph: Any) -> None:
    global _computed_locally
    _computed_locally = True


def made_client() -> bool:
    """Whether this process has made a client since it has a session, but for those of other clusters."""
    return _made_client


def made_cluster() -> bool:
    """Whether this process has made a cluster of its own since it has a session; a warning has shown the way to the job's."""
    return _made_cluster


def computed_locally() -> bool:
    """Whether this process has computed with Dask, and without a client, since it has a session."""
    return _computed_locally


def _warn_of_cluster(kind: str) -> None:
    """Print a warning of a second cluster; `kind` may be a subclass, such as LocalCUDACluster."""
    if kind in _warned:
        return
    _warned.add(kind)
    if _returned_false:
        say(
            f"warning: {kind}: initialize(exit=False) has returned False on this rank, and this cluster is of this rank alone. "
            "Fix: if initialize(exit=False): ..., unless each rank is to have its cluster"
        )
        return
    say(
        f"warning: {kind}: this job already has a cluster, whose workers do nothing for this one. Fix: client = Client(), "
        "which connects to the job's cluster"
    )


def _without_cluster_options(
    kwargs: dict[str, Any], make_client: Callable[..., None], make_cluster: Callable[..., None]
) -> dict[str, Any]:
    """The keywords of a `Client` without those of the cluster that it would start elsewhere."""
    known = {*inspect.signature(make_client).parameters}
    of_cluster = {*inspect.signature(make_cluster).parameters, "memory_limit", "local_directory"} - known
    if not of_cluster & set(kwargs):
        return kwargs  # Dask reports unknown keywords
    dropped = [name for name in kwargs if name not in known]
    if "Client" not in _warned:
        _warned.add("Client")
        say(
            f"warning: Client: this job already has a cluster, to which it connects; no effect: {', '.join(dropped)}. Fix: "
            "client = Client()"
        )
    return {name: value for name, value in kwargs.items() if name in known}


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
    """Note the state of this process: the script of a command begins now."""
    global _at_start
    _at_start = AtStart()
