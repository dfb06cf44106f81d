"""When the job ends and where `launch` runs, as each batch system tells it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.sites.batch import (
    Allocation,
    allocated_hosts,
    end_time,
    find_allocation,
    output_of,
    parse_hosts,
)
from support.jobs.processes import run_python

NOW = 1_000_000.0


def qstat(limit: str, used: str | None) -> str:
    times = f"    resources_used.walltime = {used}\n" if used is not None else ""
    return f"Job Id: 7.server\n    Job_Name = a\n{times}    Resource_List.walltime = {limit}\n"


@pytest.mark.parametrize(
    ("environ", "answers", "expected"),
    [
        ({}, {}, None),
        ({"SLURM_JOB_END_TIME": "1000060"}, {}, 1_000_060.0),
        ({"SLURM_JOB_END_TIME": "Unknown"}, {}, None),
        ({"PBS_JOBID": "7.server"}, {"qstat": "Job Id: 7.server\n"}, None),
        ({"FLUX_JOB_ID": "f1"}, {"flux": "forever"}, None),
        ({"PBS_JOBID": "7.server"}, {"qstat": qstat("01:00:00", "00:10:00")}, NOW + 3000),
        ({"PBS_JOBID": "7.server"}, {"qstat": qstat("90", None)}, NOW + 90),
        # the used time is a sample, which may be two minutes old
        (
            {"PBS_JOBID": "7.server"},
            {"qstat": qstat("01:00:00", "0") + f"    stime = {time.ctime(NOW - 100)}\n"},
            NOW + 3500,
        ),
        ({"PBS_JOBID": "7.server"}, {"qstat": qstat("90", "30") + "    stime = soon\n"}, NOW + 60),
        ({"PBS_JOBID": "7.server"}, {"qstat": "qstat: Unknown Job Id"}, None),
        ({"PBS_JOBID": "7.server"}, {}, None),
        ({"FLUX_JOB_ID": "f1"}, {"flux": "42.5\n"}, NOW + 42.5),
        ({"FLUX_JOB_ID": "f1"}, {"flux": "0\n"}, None),
        ({"FLUX_JOB_ID": "f1"}, {"flux": f"{2**32 - 1}\n"}, None),
        # in a batch script, and in ranks that need no launcher
        ({"FLUX_ENCLOSING_ID": "f1", "FLUX_URI": "local:///x"}, {"flux": "42\n"}, NOW + 42),
        # a job within a job: the first end counts
        ({"FLUX_JOB_ID": "f1", "SLURM_JOB_END_TIME": "1000060"}, {"flux": "42"}, NOW + 42),
        ({"FLUX_JOB_ID": "f1", "SLURM_JOB_END_TIME": "1000060"}, {"flux": "99"}, NOW + 60),
    ],
)
def test_the_end(environ: dict[str, str], answers: dict[str, str], expected: float | None) -> None:
    assert end_time(environ, now=lambda: NOW, ask=lambda command: answers.get(command[0], "")) == expected


@pytest.mark.parametrize("path", ["", ":/nowhere", "."])
def test_a_command_that_is_not_there(path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One in the working directory may be another user's."""
    (tmp_path / "qstat").write_text("#!/bin/sh\ntouch here\n")
    (tmp_path / "qstat").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path)
    assert end_time({"PBS_JOBID": "7.server"}) is None
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("#!/bin/sh\necho $# $1\n", "2 job\n"),
        ("#!/bin/sh\nprintf 'J\\344ger'\n", "J\udce4ger"),
        ("#!/bin/sh\necho half of it; exit 1\n", ""),
        ("#!/bin/sh\necho half of it; exec sleep 60\n", ""),
        ("no program at all", ""),
    ],
    ids=["answers", "is no UTF-8", "fails", "hangs", "can't be run"],
)
def test_command_of_the_batch_system(program: Callable[..., Path], text: str, printed: str) -> None:
    program("flux", text)
    timeout = 0.3 if "sleep" in text else 20.0
    assert output_of(["flux", "job", "timeleft"], timeout) == printed


def test_only_the_module_of_the_system_is_loaded() -> None:
    """Each file that a rank opens counts on a parallel file system."""
    code = """
import sys
import dask_gpu_mpi.cli.main
from dask_gpu_mpi.sites.batch import SYSTEMS, end_time, login_host
environ = {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_HOST": "login"}
assert (login_host(environ), end_time(environ)) == ("login", None)
print([name for name in SYSTEMS if f"dask_gpu_mpi.sites.{name}" in sys.modules])
"""
    done = run_python(code)
    assert done.stdout == "['slurm']\n", done.stderr


# -- where `launch` runs, over what real batch systems set


FILES = {
    "pe": "h1 8 all.q@h1 UNDEFINED\nh2 8 all.q@h2 UNDEFINED\nh1 4 gpu.q@h1 UNDEFINED\n",
    "nodes": "h1\nh1\nh2\nh2\n",
    "empty": "\n",
}
SLURM = {"SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
PBS = {"PBS_JOBID": "42.server", "PBS_NODEFILE": "nodes", "NCPUS": "8"}
LSF = {"LSB_JOBID": "42", "LSB_DJOB_HOSTFILE": "nodes", "LSB_DJOB_NUMPROC": "4", "LSB_JOBINDEX": "0"}

SGE = {
    "SGE_TASK_ID": "undefined",
    "JOB_ID": "42",
    "PE_HOSTFILE": "pe",
    "NSLOTS": "20",
    "ENVIRONMENT": "BATCH",
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has `FILES`."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)


ONE_EACH, TWO_EACH = {"h1": 1, "h2": 1}, {"h1": 2, "h2": 2}


@pytest.mark.parametrize(
    ("environ", "given", "expected"),
    [
        ({}, {}, Allocation("local", 1, 1)),
        ({}, {"ranks": 4}, Allocation("local", 1, 4)),
        ({}, {"ranks_per_node": 3}, Allocation("local", 1, 3)),
        (SLURM, {}, Allocation("slurm", 2, 2, job="42")),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "4"}, {}, Allocation("slurm", 2, 8, job="42")),
        (SLURM, {"ranks": 3}, Allocation("slurm", 2, 3, job="42")),
        (SLURM, {"ranks": 1}, Allocation("slurm", 1, 1, job="42")),
        (SLURM, {"ranks_per_node": 3}, Allocation("slurm", 2, 6, job="42")),
        (SLURM, {"ranks_per_node": 3, "ranks": 5}, Allocation("slurm", 2, 5, job="42")),
        # salloc
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "3"}, {}, Allocation("slurm", 3, 3, job="7")),
        (
            {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NUM_NODES_HET_GROUP_1": "2"},
            {},
            Allocation("slurm", 3, 3, job="7", parts=2),
        ),
        (PBS, {}, Allocation("pbs", 2, 4, TWO_EACH, "42.server")),
        (PBS, {"ranks": 3}, Allocation("pbs", 2, 3, {"h1": 2, "h2": 1}, "42.server")),
        (PBS, {"ranks": 1}, Allocation("pbs", 1, 1, {"h1": 1}, "42.server")),
        (PBS, {"ranks_per_node": 1}, Allocation("pbs", 2, 2, ONE_EACH, "42.server")),
        (PBS, {"hosts": {"a": 1, "b": 2}}, Allocation("hosts", 2, 3, {"a": 1, "b": 2})),
        # Torque: a line for each core
        (PBS | {"PBS_NUM_PPN": "2"}, {}, Allocation("pbs", 2, 2, ONE_EACH, "42.server")),
        (LSF, {}, Allocation("lsf", 2, 2, ONE_EACH, "42")),
        (LSF | {"LSB_JOBINDEX": "3"}, {"ranks": 4}, Allocation("lsf", 2, 4, TWO_EACH, "42_3")),
        # a line for each queue of a node
        (SGE, {}, Allocation("sge", 2, 2, ONE_EACH, "42")),
        (SGE | {"SGE_TASK_ID": "3"}, {"ranks": 4}, Allocation("sge", 2, 4, TWO_EACH, "42_3")),
        (SGE | {"PE_HOSTFILE": ""}, {}, Allocation("sge", 1, 1, job="42")),
        ({"SGE_ROOT": "/opt/sge", "JOB_ID": "42"}, {}, Allocation("local", 1, 1)),  # a login node
    ],
)
def test_find_allocation(environ: dict[str, str], given: dict[str, Any], expected: Allocation) -> None:
    found = find_allocation(environ, **given)
    assert found == expected
    assert found.ranks_per_node == math.ceil(expected.ranks / expected.nodes)


def test_flux_is_a_job_only_where_its_instance_is_one() -> None:
    """A login node has the system's instance; below Slurm there may be one as well."""
    environ = {"FLUX_URI": "local:///run/flux/local", **SLURM}
    assert find_allocation(environ).system == "slurm"
    answers = {"jobid": "f42", "size": "3"}
    found = find_allocation(environ, ask=lambda command: answers[command[-1]])
    assert found == Allocation("flux", 3, 3, job="f42")
    for size in ("", "0", "²", "1" * 5000):
        answers["size"] = size
        assert find_allocation(environ, ask=lambda command: answers[command[-1]]).nodes == 1


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (PBS | {"PBS_NODEFILE": "gone"}, r"PBS_NODEFILE=gone: can't be read .*Fix: run `launch` inside the job"),
        (LSF | {"LSB_DJOB_HOSTFILE": "empty"}, "LSB_DJOB_HOSTFILE=empty: lists no node"),
        (SGE | {"PE_HOSTFILE": "empty"}, "PE_HOSTFILE=empty: lists no node"),
        ({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "9" * 18}, r"SLURM_HET_SIZE=9+: too many \(expected at most 128\)\. Fix: "),
        (SLURM | {"SLURM_JOB_NUM_NODES": "two"}, "invalid SLURM_JOB_NUM_NODES='two'"),
        ("h1,h 2", "invalid node 'h 2'"),
        ("h1:0", "invalid node 'h1:0'"),
        ("-x", "invalid node '-x'"),
        (",", "lists no node"),
        ("/gone", "--hosts /gone: can't be read"),
    ],
)  # fmt: skip
def test_what_can_not_be_used(environ: dict[str, str] | str, message: str) -> None:
    """A text is that of ``--hosts``."""
    with pytest.raises(InputError, match=message):
        parse_hosts(environ) if isinstance(environ, str) else find_allocation(environ)


def test_parse_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h1  # the first\n\nh2:2\nh1\n")
    assert parse_hosts("h1,h2:2") == {"h1": 1, "h2": 2}
    assert parse_hosts(str(tmp_path / "hosts")) == {"h1": 2, "h2": 2}


def test_one_line_for_the_user() -> None:
    assert str(Allocation("local", 1, 4)) == "this machine: 1 node, 4 ranks"
    assert str(Allocation("slurm", 2, 1, job="42")) == "Slurm job 42: 2 nodes, 1 rank"


def test_node_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_bytes(b"n1\n\xff\n")
    assert allocated_hosts({"PBS_NODEFILE": str(tmp_path / "nodes")}) == "n1, \ufffd"
    assert allocated_hosts({"PBS_NODEFILE": "a\0b"}) == ""
