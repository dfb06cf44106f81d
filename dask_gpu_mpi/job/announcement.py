"""What a job shows of its cluster once that is up: the lines that `job.start` prints, and the card of a session in a notebook."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import secrets
from collections.abc import Mapping
from html import escape

from dask_gpu_mpi.base.files import remove, replace
from dask_gpu_mpi.base.streams import is_public, say
from dask_gpu_mpi.base.text import clock, counted
from dask_gpu_mpi.base.versions import installed, pin_warnings, untested
from dask_gpu_mpi.errors import InputError, Problem
from dask_gpu_mpi.job.entering import Joined
from dask_gpu_mpi.network.credentials import ssh_line
from dask_gpu_mpi.options.model import Options, Protocol
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.sites import launchers
from dask_gpu_mpi.sites.batch import find_allocation
from dask_gpu_mpi.workers.worker_options import gpu_options


def gpu_count(plan: Plan) -> int:
    """The number of the workers' GPUs."""
    return len({device for worker in plan.workers for device in worker.devices})


def announce(joined: Joined, seconds: float) -> None:
    """Print the lines about a cluster that is up."""
    plan = joined.cluster.plan
    assert plan is not None  # called on the client rank, which is given it
    say(
        f"{counted(len(plan.workers), 'worker')} on {counted(len(plan.hosts), 'host')}, {counted(gpu_count(plan), 'GPU')}, "
        f"ready after {seconds:.1f} s"
    )
    for warning in all_warnings(joined):
        say(f"warning: {warning}")
    if joined.cluster.transport:
        say(f"transport: {joined.cluster.transport}")
    if joined.cluster.dashboard:
        # the node of another job's cluster is unknown
        host = plan.scheduler.host if joined.options.scheduler else ""
        if line := ssh_line(joined.cluster.dashboard, host, joined.environ):
            say(f"from your computer: {line}")
        say(f"dashboard at {_link_for_output(joined, joined.cluster.dashboard)}")
    elif joined.options.dashboard and importlib.util.find_spec("bokeh") is None:
        say("no dashboard: bokeh is not installed. Fix: pip install 'bokeh<3.10'")


def _link_for_output(joined: Joined, link: str) -> str:
    """The link for the output; if other users may read that, the link is without token, and the token is in a file."""
    if not is_public(joined.environ):
        return link
    hidden = f"{link.partition('?')[0]}: others may read this output, so the link with its token is in "
    if joined.options.scheduler_file is not None:
        return f"{hidden}the scheduler file {os.path.abspath(joined.options.scheduler_file)}"
    # the log directory can be read from a login node; the agent's directory is removed with the job
    places = ((joined.options.log_directory, ""), (joined.agent.scratch, f"{joined.host}:"))
    for folder, host in places:
        if folder:
            # another run may have the same folder; and who may write there must not learn the name of the mark (`of_run`)
            path = os.path.join(os.path.abspath(folder), f"dashboard-link-{secrets.token_hex(4)}")
            with contextlib.suppress(OSError):
                replace(path, f"{link}\n".encode())
                atexit.register(_remove, path, os.getpid())
                return f"{hidden}{host}{path}"
    return f"{hidden}session.dashboard_link"


def _remove(path: str, owner: int) -> None:
    """Remove a file at the end of the process `owner`, but not of a fork of the script that ends as Python does."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            remove(path)


def announce_waiting(options: Options) -> None:
    """Print what ends a job without a script, which would otherwise seem to hang."""
    if not options.scheduler:
        say(
            "no script: the workers stay until the cluster that they have joined ends, or this job is cancelled"
        )
        return
    file = options.scheduler_file
    how = (
        "start it with --scheduler-file FILE"
        if file is None
        else f"dask_gpu_mpi.connect({os.path.abspath(file)!r})"
    )
    say(
        "no script: the cluster runs until this job is interrupted or cancelled, or a client calls shutdown(). "
        f"To connect to it: {how}"
    )


def all_warnings(joined: Joined) -> tuple[str, ...]:
    """The warnings that the user gets when the cluster is up."""
    plan, options, launched = joined.cluster.plan, joined.options, launchers.detect(joined.environ)
    assert plan is not None  # called on the client rank, which is given it
    warnings = open_warnings(joined.cluster.address, options)
    if joined.world.is_open:  # as far as is known: the user may have closed these ports by a setting
        warnings.append(
            "MPI: the script's ranks are MPI processes (it has imported mpi4py.MPI before initialize(), or continues after the "
            "cluster). Their ports of MPI, which have no authentication, may be open: anyone who reaches one can read and write "
            "a rank's memory. Fix: initialize() first and without exit=False, or a network that you trust"
        )
    if options.survives and launched is not None:
        one_host = len(plan.hosts) == 1
        why = launched.launcher.ends_with_a_rank(joined.environ, joined.world.library, one_host=one_host)
        warnings += [f"lost ranks: {why}"] if why else []
    if launched is None and len(plan.hosts) == 1:
        warnings += _warn_of_other_nodes(joined.environ)
    gpus = any(worker.devices for worker in plan.workers)
    return (
        *warnings,
        *map(str, (*options.warnings, *plan.warnings, *([] if gpus else gpu_options(options)))),
        *map(str, version_warnings(gpus=gpus)),
    )


def _warn_of_other_nodes(environ: Mapping[str, str]) -> list[str]:
    """The warning of a script that nothing has started on the job's other nodes."""
    with contextlib.suppress(InputError):
        job = find_allocation(environ)
        if job.nodes > 1:
            used = f"nodes: the job of {job.batch.title} has {job.nodes}, and this cluster uses one"
            return [
                f"{used}, since no launcher has started a rank on the others. Fix: dask-gpu-mpi launch SCRIPT"
            ]
    return []


def open_warnings(address: str, options: Options) -> list[str]:
    """The warning of an open cluster of this job. A job that joins another's cluster has been warned before.

    >>> open_warnings("tcp://127.0.0.1:8786", Options())[0].partition(", and its")[0]
    'the protocol is tcp, without encryption: everyone on this node can reach this cluster and run code as you'
    """
    protocol = Protocol.of(address)
    if not options.scheduler or protocol is None or protocol.encrypts:
        return []
    where = "this node" if "://127." in address else "the network"
    return [
        f"the protocol is {protocol}, without encryption: everyone on {where} can reach this cluster and run code as you, and "
        f"its dashboard has no token. Fix: leave out --no-security (security=False) and --protocol {protocol}; the default is TLS"
    ]


def version_warnings(*, gpus: bool) -> list[Problem]:
    """Warnings about the installed Dask and, for GPU workers, the installed dask-cuda."""
    from importlib.metadata import PackageNotFoundError, requires

    versions = installed(["distributed", "dask-cuda"] if gpus else ["distributed"])
    warnings = untested(versions)
    if len(versions) == 2:
        with contextlib.suppress(PackageNotFoundError):
            warnings += pin_warnings(versions, requires("rapids-dask-dependency") or ())
    return warnings


def card(plan: Plan, address: str, link: str | None, *, closed: bool, seconds_left: float | None) -> str:
    """A session in a notebook, as HTML; everything in it is escaped. `seconds_left`: until the batch system ends the job."""
    nodes = [host.host for host in plan.hosts]
    rows = {
        "Nodes": escape(f"{len(nodes)} ({', '.join(nodes[:4])}{', ...' if len(nodes) > 4 else ''})"),
        "GPUs": str(gpu_count(plan)),
        "Workers": str(len(plan.workers)),
        "Scheduler": escape(address),
    }
    if not closed:
        page = escape(link or "none")
        is_page = link is not None and link.startswith(("http://", "https://"))
        rows["Dashboard"] = (
            f'<a href="{page}" target="_blank" rel="noopener">{page.partition("?")[0]}</a>'
            if is_page
            else page
        )
        rows["Time left"] = "unknown" if seconds_left is None else clock(seconds_left)
    lines = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows.items())
    return f"<strong>dask-gpu-mpi session</strong> ({'closed' if closed else 'open'})<table>{lines}</table>"
