"""Where ``launch`` runs: in which job of which batch system, on which nodes; read from the environment."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.sites.launchers import number

__all__ = ["Allocation", "Host", "System", "find_allocation", "parse_hosts", "spread"]

#: ``hosts``: those of the command line; ``local``: no batch system, this machine alone.
System = Literal["slurm", "pbs", "lsf", "flux", "hosts", "local"]

TITLES: Mapping[System, str] = {
    "slurm": "Slurm",
    "pbs": "PBS",
    "lsf": "LSF",
    "flux": "Flux",
    "hosts": "the nodes of --hosts",
    "local": "this machine",
}
#: Parts of a heterogeneous job of Slurm (MAX_HET_JOB_COMPS in slurm.h: 128).
MOST_PARTS = 128
_HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::([1-9]\d{0,5}))?")


@dataclass(frozen=True)
class Host:
    """A node, and how many ranks it gets."""

    name: str
    ranks: int


@dataclass(frozen=True)
class Allocation:
    """The nodes of this job."""

    system: System
    nodes: int
    #: All MPI ranks.
    ranks: int
    #: The nodes by name, where the launcher must be told them. Slurm's and Flux's launchers know them.
    hosts: tuple[Host, ...] = ()
    #: The job's number, as its log folder is called; empty: no batch system.
    job: str = ""
    #: What names this job, or this task of an array, to the batch system's commands.
    requeue_as: str = ""
    #: Parts of a heterogeneous job of Slurm; 0: it is none.
    parts: int = 0
    #: Whether these are all nodes of the job.
    whole: bool = True

    @property
    def ranks_per_node(self) -> int:
        """The ranks of the node that has most."""
        return -(-self.ranks // self.nodes)

    def __str__(self) -> str:
        """One line for the user."""
        job = f" job {self.job}" if self.job else ""
        nodes, ranks = (
            f"{self.nodes} node{'s' * (self.nodes > 1)}",
            f"{self.ranks} MPI rank{'s' * (self.ranks > 1)}",
        )
        return f"{TITLES[self.system]}{job}: {nodes}, {ranks}"


def find_allocation(
    environ: Mapping[str, str],
    *,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    hosts: Sequence[Host] = (),
    read: Callable[[str], str] = lambda path: Path(path).read_text(encoding="utf-8"),
    flux: Callable[[str], str] = lambda attribute: "",
) -> Allocation:
    """The job that this environment belongs to, with its ranks.

    Parameters
    ----------
    environ : mapping
        The environment of a batch script, or of an interactive shell.
    ranks : int, optional
        All MPI ranks (``-n``). Default: as many on each node as the job has requested for it, else one.
    ranks_per_node : int, optional
        The ranks of each node, where `ranks` is not set.
    hosts : sequence of Host
        Nodes to use instead of the batch system's (``--hosts``).
    read : callable
        Returns the text of a file.
    flux : callable
        Returns an attribute of the Flux instance (``flux getattr``), ``""`` if there is none.

    Raises
    ------
    InputError
        A variable or a file of the batch system can't be used.

    Notes
    -----
    Innermost first: a Flux instance may be a job of Slurm. Slurm: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"; PBS: the node file
    has a line for each rank (``mpiprocs``), Torque's one for each core (``ppn``); LSF: a line for each slot, which is a core
    mostly.
    """
    found = _find(environ, tuple(hosts), read, flux)
    if ranks is None and ranks_per_node is not None:
        ranks = found.nodes * ranks_per_node
    if ranks is None:
        return found
    names = [host.name for host in found.hosts]
    return replace(
        found,
        nodes=min(ranks, found.nodes),
        ranks=ranks,
        hosts=spread(ranks, names) if names else (),
        whole=ranks >= found.nodes,
    )


def spread(ranks: int, hosts: Sequence[str]) -> tuple[Host, ...]:
    """Ranks over nodes, as evenly as possible; nodes without a rank are left out.

    >>> [(host.name, host.ranks) for host in spread(5, ["a", "b", "c"])]
    [('a', 2), ('b', 2), ('c', 1)]
    """
    share, more = divmod(ranks, len(hosts))
    return tuple(
        Host(name, share + (index < more)) for index, name in enumerate(hosts) if share + (index < more)
    )


def parse_hosts(text: str, read: Callable[[str], str]) -> tuple[Host, ...]:
    """Nodes of the command line: ``h1,h2:2`` (a rank on h1, two on h2), or a file with one on each line.

    Raises
    ------
    InputError
        It can't be read, or names no node.
    """
    if "/" in text or os.path.isfile(text):
        try:
            words = [line.split("#")[0].strip() for line in read(text).splitlines()]
        except (OSError, ValueError) as error:
            raise InputError(
                f"--hosts {text}: can't be read ({error}). Fix: name a text file, or the nodes: h1,h2"
            ) from None
    else:
        words = text.split(",")
    hosts: Counter[str] = Counter()
    for word in filter(None, words):
        named = _HOST.fullmatch(word)
        if named is None:
            raise InputError(
                f"--hosts: invalid node {word[:60]!r} (expected NAME or NAME:RANKS). Fix: --hosts h1,h2:2"
            )
        hosts[named[1]] += int(named[2] or 1)
    if not hosts:
        raise InputError(f"--hosts {text!r}: names no node (expected h1,h2, or a file with one on each line)")
    return _as_hosts(hosts)


def _find(
    environ: Mapping[str, str],
    hosts: tuple[Host, ...],
    read: Callable[[str], str],
    flux: Callable[[str], str],
) -> Allocation:
    if hosts:
        return Allocation("hosts", len(hosts), sum(host.ranks for host in hosts), hosts)
    # On a login node or below `flux start` there may be an instance that is no job.
    if environ.get("FLUX_URI") and (job := flux("jobid")) and job.isprintable():
        nodes = int(size) if re.fullmatch(r"[1-9][0-9]{0,8}", size := flux("size")) else 1
        return Allocation("flux", nodes, nodes, job=job, requeue_as=job)
    if environ.get("SLURM_JOB_ID"):
        return _slurm(environ)
    if environ.get("PBS_NODEFILE"):
        lines = _lines(environ, "PBS_NODEFILE", read)
        if environ.get("PBS_NUM_PPN"):  # Torque: cores
            lines = Counter(dict.fromkeys(lines, 1))
        job = environ.get("PBS_JOBID", "")
        return Allocation("pbs", len(lines), lines.total(), _as_hosts(lines), job=job, requeue_as=job)
    if environ.get("LSB_DJOB_HOSTFILE"):
        slots = _lines(environ, "LSB_DJOB_HOSTFILE", read)
        job = environ.get("LSB_JOBID", "")
        if (index := environ.get("LSB_JOBINDEX", "0")) != "0":  # all tasks of an array have one number
            job += f"_{index}"
        ones = Counter(dict.fromkeys(slots, 1))
        return Allocation("lsf", len(ones), len(ones), _as_hosts(ones), job=job, requeue_as=job)
    return Allocation("local", 1, 1)


def _slurm(environ: Mapping[str, str]) -> Allocation:
    parts = number(environ, "SLURM_HET_SIZE") or 0
    if parts > MOST_PARTS:
        raise InputError(
            f"environment: SLURM_HET_SIZE={parts}: too many (expected at most {MOST_PARTS}). Fix: run `launch` inside the job"
        )
    job = environ["SLURM_JOB_ID"]
    if parts:
        nodes = sum(number(environ, f"SLURM_JOB_NUM_NODES_HET_GROUP_{part}") or 1 for part in range(parts))
    else:
        nodes = number(environ, "SLURM_JOB_NUM_NODES") or number(environ, "SLURM_NNODES") or 1
    per_node = number(environ, "SLURM_NTASKS_PER_NODE") or 1
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    requeue_as = f"{environ.get('SLURM_ARRAY_JOB_ID') or job}_{task}" if task else job
    return Allocation("slurm", nodes, nodes * per_node, job=job, requeue_as=requeue_as, parts=parts)


def _lines(environ: Mapping[str, str], name: str, read: Callable[[str], str]) -> Counter[str]:
    path = environ[name]
    try:
        lines = Counter(read(path).split())
    except (OSError, ValueError) as error:
        raise InputError(
            f"environment: {name}={path}: can't be read ({error}). Fix: run `launch` inside the job"
        ) from None
    if not lines or not all(map(str.isprintable, lines)):
        raise InputError(f"environment: {name}={path}: names no node. Fix: run `launch` inside the job")
    return lines


def _as_hosts(counted: Mapping[str, int]) -> tuple[Host, ...]:
    return tuple(Host(name, count) for name, count in counted.items())
