"""Who listens where: on one host nothing of a job does beyond loopback, but the launcher itself."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

import psutil
import pytest

from support.intruders.listeners import open_memory
from support.jobs.clusters import COMMAND, TELL, foreign_lines, ranks_of
from support.jobs.mpi import Mpi

#: The components that the tests choose otherwise
UNCHOSEN = {"OMPI_MCA_btl": None, "OMPI_MCA_pml": None}
#: What it finds of what MPI was told, and a handler that was there before the cluster, and so runs after it has ended.
SCRIPT = (
    TELL
    + """
import atexit
from dask_gpu_mpi import initialize

def last():
    from mpi4py import MPI
    print(f"rank {MPI.COMM_WORLD.rank}\\n", end="")

atexit.register(last)
initialize(interface="lo")
set_by_us = [name for name in os.environ if name in ("OMPI_MCA_btl", "UCX_NET_DEVICES", "FI_TCP_IFACE")]
print("up", set_by_us, flush=True)
go_on()
"""
)


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    return {each.laddr for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}


@pytest.mark.both_mpis
@pytest.mark.quick
@pytest.mark.mpi
def test_on_one_host_nothing_listens_beyond_loopback(mpirun: Mpi) -> None:
    job = mpirun.start(SCRIPT, 2, env=UNCHOSEN)
    job.wait_for("up")
    processes = [psutil.Process(pid) for pid in job.processes()]
    python = [each for each in processes if each.exe() == psutil.Process().exe()]
    assert len(python) >= 6  # ranks, agents, a scheduler, workers
    # what a launcher has opened is its own, also where its children have inherited it
    launchers = {place for each in processes if each not in python for place in listening(each)}
    beyond = {
        (" ".join(each.cmdline())[:100], place)
        for each in python
        for place in listening(each) - launchers
        if not ipaddress.ip_address(place[0]).is_loopback
    }
    assert beyond == set()
    # MPI asks nobody who they are: its ranks have no port at all, not for the users of this host either
    ranks = {*ranks_of(job).values()}
    assert len(ranks) == 2
    assert {place for each in processes if each.pid in ranks for place in listening(each)} <= launchers
    assert open_memory(each.pid for each in processes) == []
    (job.directory / "go-on").touch()
    done = job.wait(30).check()
    assert sorted(done.stdout.splitlines()) == ["rank 0", "rank 1", "up []"]
    assert foreign_lines(done.stderr) == []


#: By MPI a choice, whether it leaves a port of MPI, and whether the job warns of it.
CHOICES = [
    ("mpich", "UCX_TLS", "all", True),
    ("mpich", "UCX_TLS", "^ib", True),
    ("mpich", "UCX_TLS", "tcp,self", True),
    ("mpich", "UCX_TLS", "sm,self", False),
    ("openmpi", "OMPI_MCA_btl", "^openib", False),
    ("openmpi", "OMPI_MCA_btl", "self,sm,tcp", True),
    ("openmpi", "HOME", "btl = self,sm,tcp", True),  # mpirun makes a variable of it
]


@pytest.mark.both_mpis
@pytest.mark.parametrize(("mpi", "name", "value", "is_open"), CHOICES, ids=lambda value: str(value))
def test_choice_that_leaves_a_port_on_one_host(
    mpirun: Mpi, tmp_path: Path, mpi: str, name: str, value: str, is_open: bool
) -> None:
    """It listens on loopback under MPICH, and the job warns once; a list of what is left out has no port at all."""
    if mpirun.name != mpi:
        pytest.skip(f"a choice of {mpi}'s")
    if name == "HOME":
        (tmp_path / ".openmpi").mkdir()
        (tmp_path / ".openmpi" / "mca-params.conf").write_text(f"{value}\n")
    env = UNCHOSEN | {"HOME": str(tmp_path)} | ({} if name == "HOME" else {name: value})
    code = f"import os, time; print('up', os.environ.get({name!r}), flush=True); time.sleep(60)"
    job = mpirun.start([*COMMAND, "--interface", "lo", "-c", code], 2, env=env)
    job.wait_for(re.escape(f"up {env[name]}"))
    processes = [psutil.Process(pid) for pid in job.processes()]
    ranks = [psutil.Process(pid) for pid in ranks_of(job).values()]
    python = psutil.Process().exe()
    launchers = {place for each in processes if each.exe() != python for place in listening(each)}
    ports = [listening(each) - launchers for each in ranks]
    assert [bool(each) for each in ports] == [is_open] * 2
    if mpi == "mpich" and value != "tcp,self":  # ranks that talk by TCP find no way by loopback
        assert {host for each in ports for host, _ in each} <= {"127.0.0.1"}
    job.signal(15)
    warnings = [line for line in job.wait(30).stderr.splitlines() if "memory of the ranks" in line]
    assert len(warnings) == is_open
    assert all(f"{value.removeprefix('btl = ')} has each rank listen" in line for line in warnings), warnings


@pytest.mark.both_mpis
@pytest.mark.parametrize("closed", [False, True])
def test_mpi_that_the_script_has_started_itself_listens_on_a_port(mpirun: Mpi, closed: bool) -> None:
    """One warning, which says what to change; none where the settings are in the environment."""
    name, value = ("OMPI_MCA_btl", "^tcp") if mpirun.name == "openmpi" else ("UCX_TLS", "^sysv,tcp")
    script = "from mpi4py import MPI\nfrom dask_gpu_mpi import initialize\ninitialize()\n"
    done = mpirun.run(script, 2, env=UNCHOSEN | ({name: value} if closed else {})).check()
    warnings = [
        line for line in done.stderr.splitlines() if "imported mpi4py.MPI before initialize()" in line
    ]
    assert len(warnings) == (0 if closed else 1)
    assert (
        closed
        or f"Fix: call initialize() before mpi4py.MPI is imported, or {name}={value} in " in warnings[0]
    )
