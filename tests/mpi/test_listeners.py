"""Who listens where: on one host nothing of a job does beyond loopback, but a launcher other than `launch`."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

from support.intruders.listeners import Census, open_memory
from support.jobs.clusters import COMMAND
from support.jobs.mpi import Mpi
from support.jobs.scripts import expanded

#: The components that the tests choose otherwise
UNCHOSEN = {"OMPI_MCA_btl": None, "OMPI_MCA_pml": None}
#: What it finds of what MPI was told.
SCRIPT = """
from support.jobs.scripts.tell import go_on
from dask_gpu_mpi import initialize

initialize(interface="lo")
set_by_us = [name for name in os.environ if name in ("OMPI_MCA_btl", "UCX_NET_DEVICES", "FI_TCP_IFACE")]
print("up", set_by_us, flush=True)
go_on()
"""


@pytest.mark.both_mpis
@pytest.mark.quick
@pytest.mark.mpi
def test_on_one_host_nothing_listens_beyond_loopback(mpirun: Mpi) -> None:
    job = mpirun.start(SCRIPT, 2, env=UNCHOSEN)
    job.wait_for("up")
    census = Census(job)
    now = census.look()
    # what a launcher has opened is its own, also where its children have inherited it
    launchers = {place.socket for place in now if census.roles[place] == "launcher"}
    ours = {place: census.roles[place] for place in now if place.socket not in launchers}
    assert len({place.pid for place in ours}) >= 5  # agents, a scheduler, workers
    assert [place for place in ours if not place.on_loopback] == []
    # MPI asks nobody who they are: its ranks have no port at all, not for the users of this host either
    assert {"rank", "mpi"}.isdisjoint(ours.values()), ours
    assert open_memory(job.processes()) == []
    done = job.go_on().clean()
    assert done.stdout == "up []\n"


@pytest.mark.mpi
def test_of_launch_on_one_node_nothing_listens_beyond_loopback(mpirun: Mpi, tmp_path: Path) -> None:
    """All programs counted, from the first to the last, `launch` as well: it starts the ranks itself."""
    launch = [os.path.join(sys.prefix, "bin", "dask-gpu-mpi"), "launch", "-n", "3"]
    script = tmp_path / "script.py"
    script.write_text(expanded(SCRIPT.replace('interface="lo"', "")))
    job = mpirun.start([*launch, str(script)], None, env=UNCHOSEN)
    with Census(job) as census:
        job.wait_for("up")
        time.sleep(1.0)
        now = census.look()
        others = [
            each
            for pid in job.processes()
            for kind in ("udp", "unix")
            for each in psutil.Process(pid).net_connections(kind)
        ]
        job.go_on()
    # a socket of the system without a folder is everyone's, too
    assert [each for each in others if each.family != socket.AF_UNIX or str(each.laddr).startswith("@")] == []
    assert {
        str(each.laddr) for each in others if each.laddr
    } != set()  # the fork server's, in a private folder
    assert [place for place in census.roles if not place.on_loopback] == []
    roles = {census.roles[place] for place in now}
    assert "launcher" not in roles
    assert not any("dask-gpu-mpi launch" in role or role in ("rank", "mpi") for role in roles), roles
    agents = [place for place in now if census.roles[place] == "agent"]
    assert len(agents) == 3 + 1  # nannies, and the hub


#: By MPI a choice of its user's which gives ranks ports on one host.
CHOICES = [
    pytest.param("UCX_TLS", "tcp,self", marks=pytest.mark.of_mpi("mpich")),
    pytest.param("UCX_TLS", "all", marks=pytest.mark.of_mpi("mpich")),
    pytest.param("OMPI_MCA_btl", "self,sm,tcp", marks=pytest.mark.of_mpi("openmpi")),
]


@pytest.mark.parametrize(("name", "value"), CHOICES)
def test_a_choice_that_opens_ports_opens_them_for_the_start_only(mpirun: Mpi, name: str, value: str) -> None:
    code = f"import os, time; print('up', os.environ.get({name!r}), flush=True); time.sleep(60)"
    job = mpirun.start([*COMMAND, "--interface", "lo", "-c", code], 2, env={**UNCHOSEN, name: value})
    with Census(job) as census:
        census.EVERY = 0.01
        job.wait_for(re.escape(f"up {value}"))
        now = census.look()
    launchers = {place.port for place in census.roles if census.roles[place] == "launcher"}
    ours = {place for place in census.roles if place.port not in launchers}
    of_mpi = {place for place in ours if census.roles[place] == "mpi"}
    assert of_mpi  # so that this is a test
    assert of_mpi & now == set()
    assert {place for place in ours if census.roles[place] == "rank"} == set()
    job.signal(15)
    assert "memory of the rank" not in job.wait().stderr


#: How a script's ranks are MPI processes, and what they listen on then, unless these variables are set.
OWN = {
    "imported first": "from mpi4py import MPI\nfrom dask_gpu_mpi import initialize\nsession = initialize()\n",
    "comm=": (
        "from mpi4py import MPI\nfrom dask_gpu_mpi import initialize\nsession = initialize(comm=MPI.COMM_WORLD)\n"
    ),
}


@pytest.mark.both_mpis
@pytest.mark.parametrize("how", OWN)
def test_mpi_of_the_script_itself(mpirun: Mpi, how: str) -> None:
    """It has MPI's ports as long as it runs; one warning says so."""
    done = mpirun.run(OWN[how], 2, env=UNCHOSEN).check()
    warnings = [line for line in done.stderr.splitlines() if "the script's ranks are MPI processes" in line]
    assert len(warnings) == 1, done.stderr
    assert "anyone who reaches one can read and write" in warnings[0]
    assert "Fix: initialize() first and without exit=False" in warnings[0]
