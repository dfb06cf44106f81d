"""jobscripts/pbs.pbs over two hosts, in the environment that PBS gives to a job; there is no PBS server.

What PBS does was read off a real OpenPBS: the node file has one line per MPI process, the shell starts in $HOME, NCPUS and
OMP_NUM_THREADS are the cores of a chunk, the cgroup hook sets CUDA_VISIBLE_DEVICES to UUIDs of the first host or to nothing.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support import ROOT, TESTBED
from support.bed.hosts import SSH, TestBed
from support.jobs.clusters import facts, workers_of
from support.jobs.mpi import CompletedJob, Mpi
from support.jobs.scripts import expanded
from support.mocks.batch import FakeBatch
from support.mocks.gpus import GIB, VARIABLE, SimHost, emulated_environ, make_gpus

JOB = "7.server"
SCRIPT = """
from support.jobs.scripts.client import client, looks, tell
from dask_gpu_mpi import current_session
tell(
    workers=looks(client),
    argv=sys.argv[1:],
    cwd=os.getcwd(),
    threads=sorted(set(client.run(lambda: os.environ.get("OMP_NUM_THREADS")).values())),
    seen=client.run(lambda: os.environ.get("DASK_GPU_MPI__LOG_LEVEL")),
    site=client.run(lambda: os.environ.get("SITE_SAYS")),
)
"""


class Pbs:
    """Runs the job script as PBS would: on the first host, in $HOME, with PBS's variables."""

    def __init__(self, mpirun: Mpi, bed: TestBed, folder: Path) -> None:
        self.mpirun, self.bed = mpirun, bed
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir(parents=True)
        self.work.mkdir()
        self.commands = FakeBatch(folder / "pbs")
        # of the stand-ins, only what PBS itself has
        for path in self.commands.bin.iterdir():
            if path.name not in ("fake", "qsub", "qstat"):
                path.unlink()

    def run(
        self,
        program: str,
        lines: Sequence[str],
        env: Mapping[str, str | None] | None = None,
        *,
        allow_leaks: bool = False,
    ) -> CompletedJob:
        (self.work / "analysis.py").write_text(expanded(program))
        nodefile = self.home / "nodefile"
        nodefile.write_text("".join(f"{line}\n" for line in lines))
        environ = {
            **self.commands.environ(),
            "PATH": f"{sys.prefix}/bin:{self.commands.bin}:/usr/bin:/bin",
            "HOME": str(self.home),
            "PBS_JOBID": JOB,
            "PBS_JOBNAME": "dask-gpu-mpi",
            "PBS_NODEFILE": str(nodefile),
            "PBS_O_WORKDIR": str(self.work),
            "PBS_O_QUEUE": "batch",
            "PBS_QUEUE": "workq",
            "NCPUS": "8",
            "OMP_NUM_THREADS": "8",
            "DGM_PROGRAM": "analysis.py one --two",
            **SSH,
            "TESTBED_PASS": f"{SSH['TESTBED_PASS']} {VARIABLE}",
            **(env or {}),
        }
        line = self.bed.on(lines[0], ["bash", str(ROOT / "jobscripts" / "pbs.pbs")])
        return self.mpirun.run(
            line, None, bed=self.bed, env=environ, cwd=self.home, timeout=150, allow_leaks=allow_leaks
        )


@pytest.fixture
def pbs(mpirun: Mpi, hosts: TestBed, tmp_path: Path) -> Pbs:
    return Pbs(mpirun, hosts, tmp_path)


@pytest.mark.both_mpis
def test_chunk_per_host(pbs: Pbs) -> None:
    # select=1:mpiprocs=1+1:mpiprocs=2
    (pbs.work / "env.sh").write_text("export SITE_SAYS='a b'\n")
    env = {"DASK_GPU_MPI__LOG_LEVEL": "error", "DGM_SETUP": "env.sh"}
    done = pbs.run(SCRIPT + "sys.exit(3)\n", ["h1", "h2", "h2"], env).check(3)
    assert "check of 3 ranks on 2 nodes" in done.stdout
    assert [row for row in pbs.commands.rows() if row["name"] == "qsub"] == []
    told = facts(done)
    rows = workers_of(told)
    assert {name: row["host"] for name, row in rows.items()} == {"0": "h1", "1": "h2", "2": "h2"}
    assert told["argv"] == ["one", "--two"]
    # PBS starts in $HOME, and gives every worker the threads of the whole chunk
    assert told["cwd"] == str(pbs.work)
    assert told["threads"] == ["1"]
    # Open MPI brings no variable to another host by itself
    assert set(told["seen"].values()) == {"error"}
    assert set(told["site"].values()) == {"a b"}
    assert all(row["identity"] == [] for row in rows.values()), rows
    names = {path.name for path in (pbs.work / "logs" / JOB).iterdir()}
    assert {name.split("-")[0] for name in names} == {"rank", "scheduler", "worker"}  # and no mark
    assert [host for host in ("h1", "h2") if not any(host in name for name in names)] == []


@pytest.mark.parametrize(("visible", "second"), [("uuids", 1), ("nothing", 2)])
def test_gpus_of_every_host(pbs: Pbs, visible: str, second: int) -> None:
    counts = {"h1": 2, "h2": second}
    gpus = {host: make_gpus(count, host=host, memory=80 * GIB) for host, count in counts.items()}
    env: dict[str, str | None] = dict(emulated_environ({h: SimHost(g) for h, g in gpus.items()}, {}))
    # the cgroup hook names the GPUs of the host where the script runs
    first = {"uuids": ",".join(gpu.uuid for gpu in gpus["h1"]), "nothing": ""}
    env["CUDA_VISIBLE_DEVICES"] = first[visible]
    env["DGM_CHECK"] = "no"  # its kernel does not run on GPUs that are emulated
    rows = workers_of(facts(pbs.run(SCRIPT, ["h1", "h2"], env).check()))
    if visible == "nothing":
        # no ngpus in the chunk
        assert "GPU" not in rows["0"]["resources"]
        return
    assert sorted(rows) == [f"{rank}-{gpu}" for rank, count in enumerate((2, second)) for gpu in range(count)]
    for row in rows.values():
        assert row["visible"] in {gpu.uuid for gpu in gpus[row["host"]]}


def test_checkpoint_and_the_job_that_goes_on(pbs: Pbs) -> None:
    pbs.commands.answers["qstat"] = (
        "    Resource_List.select = 2:ncpus=8:mpiprocs=1\n    Resource_List.walltime = 01:00:00\n"
        f"    resources_used.walltime = 00:57:30\n    stime = {time.ctime(time.time() - 3570)}\n",
        0,
    )
    program = """
import os, sys, time
from dask_gpu_mpi import current_session
if os.path.exists("checkpoint"):
    sys.exit(0)
current_session().on_walltime(lambda: open("checkpoint", "w").close(), before=60)
time.sleep(60)
"""
    pbs.run(program, ["h1", "h2"]).check(75)
    assert (pbs.work / "checkpoint").exists()
    (row,) = [row for row in pbs.commands.rows() if row["name"] == "qsub"]
    assert row["cwd"] == str(pbs.work)
    words = row["argv"]
    assert words[:4] == ["-q", "batch", "-lselect=2:ncpus=8:mpiprocs=1", "-lwalltime=01:00:00"]
    assert words[-1] == str(ROOT / "jobscripts" / "pbs.pbs")
    # PBS has no variable that counts restarts: the new job is told
    assert {"DGM_PROGRAM", "DGM_RESTART"} <= set(words[words.index("-v") + 1].split(","))
    assert row["env"]["DGM_RESTART"] == "1"
    # the job that goes on finds the checkpoint, and is the last
    pbs.run(program, ["h1", "h2"], {"DGM_RESTART": "1"}).check()
    assert [row["name"] for row in pbs.commands.rows()].count("qsub") == 1


@pytest.mark.both_mpis
def test_temporary_directory_of_the_first_host_alone(pbs: Pbs, tmp_path: Path) -> None:
    # PBS makes it where it starts processes: where mpirun comes by ssh, it may not be there
    tmpdir = "/dev/shm/pbs.7"
    subprocess.run(pbs.bed.on("h1", ["mkdir", tmpdir]), check=True, timeout=10)
    ssh = tmp_path / "ssh"  # it brings no variables
    ssh.write_text(f'#!/bin/bash\nTMPDIR=/tmp exec {TESTBED}/on-rsh "$@"\n')
    ssh.chmod(0o755)
    env = {"TMPDIR": tmpdir, "PRTE_MCA_plm_ssh_agent": str(ssh), "HYDRA_LAUNCHER_EXEC": str(ssh)}
    try:
        done = pbs.run(SCRIPT, ["h1", "h2"], env).check()
        left = subprocess.run(pbs.bed.on("h1", ["ls", tmpdir]), check=True, timeout=10, capture_output=True)
    finally:
        subprocess.run(pbs.bed.on("h1", ["rm", "-r", tmpdir]), check=True, timeout=10)
    places = {row["host"]: row["directory"] for row in workers_of(facts(done)).values()}
    assert places["h1"].startswith(f"{tmpdir}/dgm-")
    assert places["h2"].startswith("/tmp/dgm-")
    assert left.stdout == b""
    # MPICH takes all variables along, Open MPI those that it is told to
    warned = f"TMPDIR={tmpdir} can't be written; using /tmp instead" in done.stdout
    assert warned == (pbs.mpirun.name == "mpich")


@pytest.mark.both_mpis
def test_a_node_that_is_silent(pbs: Pbs) -> None:
    """Its power or network is gone: mpirun would wait for it, until the walltime."""
    program = """
from support.jobs.scripts.client import client
import socket, subprocess
def cut():
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
(there,) = [address for address, host in client.run(socket.gethostname).items() if host == "h2"]
client.submit(cut, workers=[there]).result(300)
"""
    try:
        done = pbs.run(program, ["h1", "h2"], {"DGM_CHECK": "no"}, allow_leaks=True).check(75)
    finally:
        pbs.bed.ip("h2", "link", "set", "eth0", "up")
    assert "rank 1 on h2 lost: its processes or its node died, or its network is down" in done.output
    assert [row["name"] for row in pbs.commands.rows()].count("qsub") == 1
