"""When the job ends, as each batch system tells it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dask_gpu_mpi.sites.batch import end_time, output_of
from support.jobs.processes import run_python

NOW = 1_000_000.0


def ask(answers: dict[str, str]) -> object:
    def asked(command: Sequence[str]) -> str:
        return answers.get(command[0], "")

    return asked


def qstat(limit: str, used: str | None) -> str:
    job: dict[str, object] = {"Resource_List": {"walltime": limit}}
    if used is not None:
        job["resources_used"] = {"walltime": used}
    return json.dumps({"Jobs": {"7.server": job}})


@pytest.mark.parametrize(
    ("environ", "answers", "expected"),
    [
        ({}, {}, None),
        ({"SLURM_JOB_END_TIME": "1000060"}, {}, 1_000_060.0),
        ({"SLURM_JOB_END_TIME": "Unknown"}, {}, None),
        ({"PBS_JOBID": "7.server"}, {"qstat": '{"Jobs": {"7.server": {}, "8.server": {}}}'}, None),
        ({"FLUX_JOB_ID": "f1"}, {"flux": "forever"}, None),
        ({"PBS_JOBID": "7.server"}, {"qstat": qstat("01:00:00", "00:10:00")}, NOW + 3000),
        ({"PBS_JOBID": "7.server"}, {"qstat": qstat("90", None)}, NOW + 90),
        ({"PBS_JOBID": "7.server"}, {"qstat": "qstat: Unknown Job Id"}, None),
        ({"PBS_JOBID": "7.server"}, {}, None),
        ({"FLUX_JOB_ID": "f1"}, {"flux": "42.5\n"}, NOW + 42.5),
        ({"FLUX_JOB_ID": "f1"}, {"flux": "0\n"}, None),
        # a job within a job: the first end counts
        ({"FLUX_JOB_ID": "f1", "SLURM_JOB_END_TIME": "1000060"}, {"flux": "42"}, NOW + 42),
        ({"FLUX_JOB_ID": "f1", "SLURM_JOB_END_TIME": "1000060"}, {"flux": "99"}, NOW + 60),
    ],
)
def test_the_end(environ: dict[str, str], answers: dict[str, str], expected: float | None) -> None:
    assert end_time(environ, now=lambda: NOW, ask=ask(answers)) == expected  # type: ignore[arg-type]


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
    ("program", "printed"),
    [
        ("#!/bin/sh\necho $# $1\n", "2 job\n"),
        ("#!/bin/sh\nprintf 'J\\344ger'\n", "J\udce4ger"),
        ("#!/bin/sh\necho half of it; exit 1\n", ""),
        ("#!/bin/sh\necho half of it; exec sleep 60\n", ""),
        ("no program at all", ""),
    ],
    ids=["answers", "is no UTF-8", "fails", "hangs", "can't be run"],
)
def test_command_of_the_batch_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, printed: str
) -> None:
    (tmp_path / "flux").write_text(program)
    (tmp_path / "flux").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    timeout = 0.3 if "sleep" in program else 20.0
    assert output_of(["flux", "job", "timeleft"], timeout) == printed


def test_only_the_module_of_the_system_is_loaded() -> None:
    """Each file that a rank opens counts on a parallel file system."""
    code = """
import sys
from dask_gpu_mpi.sites.batch import SYSTEMS, end_time, login_host
environ = {"SLURM_JOB_ID": "1", "SLURM_SUBMIT_HOST": "login"}
assert (login_host(environ), end_time(environ)) == ("login", None)
print([name for name in SYSTEMS if f"dask_gpu_mpi.sites.{name}" in sys.modules])
"""
    done = run_python(code)
    assert done.stdout == "['slurm']\n", done.stderr
