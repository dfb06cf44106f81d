"""jobscripts/pbs.pbs over two hosts, in the environment that PBS gives to a job; there is no PBS server.

What PBS does was read off a real OpenPBS: the node file has one line per MPI process, the shell starts in $HOME, NCPUS and
OMP_NUM_THREADS are the cores of a chunk, the cgroup hook sets CUDA_VISIBLE_DEVICES to UUIDs of the first host or to nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from clusters import TELL, facts, workers_of
from fakebatch import FakeBatch
from harness import MARK, ROOT, TESTBED, CompletedJob, Mpi, TestBed
from simulated.nvml import GIB, VARIABLE, SimHost, compile_nvml, make_gpus, simulated_environ

JOB = "7.server"
SCRIPT = (
    TELL
    + """
from distributed import Client
from dask_gpu_mpi import current_session

client = Client()
tell(
    workers=looks(client),
    argv=sys.argv[1:],
    cwd=os.getcwd(),
    threads=sorted(set(client.run(lambda: os.environ.get("OMP_NUM_THREADS")).values())),
    seen=client.run(lambda: os.environ.get("DASK_GPU_MPI__LOG_LEVEL")),
    site=client.run(lambda: os.environ.get("SITE_SAYS")),
)
"""
)


class Pbs:
    """Runs the job script as PBS would: on the first host, in $HOME, with PBS's variables."""

    def __init__(self, mpirun: Mpi, bed: TestBed, folder: Path) -> None:
        self.mpirun, self.bed = mpirun, bed
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        self.commands = FakeBatch(folder / "pbs")
        # of the stand-ins, only what PBS itself has
        for path in self.commands.bin.iterdir():
            if path.name not in ("fake", "qsub", "qstat"):
                path.unlink()

    def run(
        self, program: str, lines: Sequence[str], env: Mapping[str, str | None] | None = None
    ) -> CompletedJob:
        (self.work / "analysis.py").write_text(program)
        nodefile = self.home / "nodefile"
        nodefile.write_text("".join(f"{line}\n" for line in lines))
        rsh = str(TESTBED / "on-rsh")
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
            # what stands in for ssh, in place of a site's own
            "PRTE_MCA_plm_ssh_agent": rsh,
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": rsh,
            "TESTBED_PASS": f"{MARK} PYTHONFAULTHANDLER {VARIABLE}",
            "PYTHONPATH": os.environ.get("PYTHONPATH"),
            **(env or {}),
        }
        line = self.bed.on(lines[0], ["bash", str(ROOT / "jobscripts" / "pbs.pbs")])
        return self.mpirun.run(line, None, bed=self.bed, env=environ, cwd=self.home, timeout=90)


@pytest.fixture
def pbs(mpirun: Mpi, hosts: TestBed, tmp_path: Path) -> Pbs:
    return Pbs(mpirun, hosts, tmp_path)


def test_chunk_per_host(pbs: Pbs) -> None:
    # select=2:mpiprocs=2
    (pbs.work / "env.sh").write_text("export SITE_SAYS='a b'\n")
    env = {"DASK_GPU_MPI__LOG_LEVEL": "error", "DGM_SETUP": "env.sh"}
    done = pbs.run(SCRIPT, ["h1", "h1", "h2", "h2"], env).check()
    assert "check of 4 ranks on 2 hosts" in done.stdout
    told = facts(done)
    rows = workers_of(told)
    assert {name: row["host"] for name, row in rows.items()} == {"0": "h1", "1": "h1", "2": "h2", "3": "h2"}
    assert told["argv"] == ["one", "--two"]
    # PBS starts in $HOME, and gives every worker the threads of the whole chunk
    assert told["cwd"] == str(pbs.work)
    assert told["threads"] == ["1"]
    # Open MPI brings no variable to another host by itself
    assert set(told["seen"].values()) == {"error"}
    assert set(told["site"].values()) == {"a b"}
    assert all(row["identity"] == [] for row in rows.values())
    names = {path.name for path in (pbs.work / "logs" / JOB).iterdir()}
    assert any("h1" in name for name in names)
    assert any("h2" in name for name in names)


def test_chunks_that_differ(pbs: Pbs) -> None:
    # select=1:mpiprocs=1+1:mpiprocs=2
    told = facts(pbs.run(SCRIPT, ["h1", "h2", "h2"]).check())
    assert {name: row["host"] for name, row in workers_of(told).items()} == {"0": "h1", "1": "h2", "2": "h2"}


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler")
@pytest.mark.parametrize("visible", ["uuids", "unset", "nothing"])
def test_gpus_of_every_host(pbs: Pbs, tmp_path: Path, visible: str) -> None:
    gpus = {host: make_gpus(2, host=host, memory=80 * GIB) for host in ("h1", "h2")}
    libdir = compile_nvml(tmp_path / "nvml")
    env: dict[str, str | None] = dict(simulated_environ(libdir, {h: SimHost(g) for h, g in gpus.items()}, {}))
    # the cgroup hook names the GPUs of the host where the script runs
    first = {"uuids": ",".join(gpu.uuid for gpu in gpus["h1"]), "unset": None, "nothing": ""}
    env["CUDA_VISIBLE_DEVICES"] = first[visible]
    env["DGM_CHECK"] = "no"  # its kernel does not run on GPUs that are simulated
    rows = workers_of(facts(pbs.run(SCRIPT, ["h1", "h2"], env).check()))
    if visible == "nothing":
        # no ngpus in the chunk
        assert "GPU" not in rows["0"]["resources"]
        return
    assert sorted(rows) == ["0-0", "0-1", "1-0", "1-1"]
    for row in rows.values():
        assert row["visible"] in {gpu.uuid for gpu in gpus[row["host"]]}


def test_checkpoint_and_the_job_that_goes_on(pbs: Pbs) -> None:
    limits = {"Resource_List": {"walltime": "01:00:00"}, "resources_used": {"walltime": "00:59:30"}}
    pbs.commands.answers |= {
        "qstat -f -F": (json.dumps({"Jobs": {JOB: limits}}), 0),
        "qstat": (
            "    Resource_List.select = 2:ncpus=8:mpiprocs=1\n    Resource_List.walltime = 01:00:00\n",
            0,
        ),
    }
    program = """
import time
from dask_gpu_mpi import current_session
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
    assert {"DGM_PROGRAM", "DGM_RESTART"} <= set(words[5].split(","))
    assert row["env"]["DGM_RESTART"] == "1"


def test_exit_code_of_the_script(pbs: Pbs) -> None:
    pbs.run("raise SystemExit(3)", ["h1", "h2"]).check(3)
    assert [row for row in pbs.commands.rows() if row["name"] == "qsub"] == []
