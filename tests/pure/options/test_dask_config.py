"""Options from Dask's configuration; and how little a rank imports before its agent starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dask.config
import pytest

from dask_gpu_mpi.options.resolve import resolve
from support import ROOT
from support.jobs.processes import run_python


def run(code: str, **environ: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    done = run_python(code, env=clean | {"PYTHONPATH": str(ROOT)} | environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def empty(tmp_path: Path) -> dict[str, str]:
    """Nothing is configured in /etc or at home."""
    (tmp_path / "home").mkdir()
    return {"HOME": str(tmp_path / "home"), "DASK_ROOT_CONFIG": str(tmp_path / "none")}


#: Values as users write them in variables; what is wrong: test_resolve.
VARIABLES = [
    ({"NTHREADS": "5", "WALLTIME_SIGNAL": "USR1"}, {"nthreads": 5, "walltime_signal": "USR1"}),
    ({"nthreads": "5"}, {"nthreads": 5}),
    ({"MEMORY_LIMIT": "None"}, {"memory_limit": None}),
    ({"MEMORY_LIMIT": "'4 GiB'"}, {"memory_limit": "4 GiB"}),
    ({"DASHBOARD": "false"}, {"dashboard": False}),
    ({"NAME": "12"}, {"name": "12"}),
    ({"LOCAL_DIRECTORY": "/scratch/[1]"}, {"local_directory": "/scratch/[1]"}),
    ({"WORKER_OPTIONS": '{"rmm_async": true}'}, {"worker_options": {"rmm_async": True}}),
]


@pytest.mark.usefixtures("dask_config", "unconfigured")
@pytest.mark.parametrize(("given", "meaning"), VARIABLES, ids=str)
def test_options_in_variables(
    given: dict[str, str], meaning: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in given.items():
        monkeypatch.setenv(f"DASK_GPU_MPI__{name}", text)
    dask.config.refresh()
    options = resolve({}, source="command line")
    assert {name: getattr(options, name) for name in options.explicit} == meaning


@pytest.mark.parametrize("text", ["gpu-mpi: [1", "- gpu-mpi"])
@pytest.mark.parametrize("command", ["plan", "jobscript slurm --nodes 1 -- script.py"])
def test_a_malformed_file_is_one_line_of_every_command(
    empty: dict[str, str], tmp_path: Path, command: str, text: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    environ = os.environ | empty | {"DASK_CONFIG": str(file), "PYTHONPATH": str(ROOT)}
    done = run_python("from dask_gpu_mpi.cli.main import main; main()", *command.split(), env=environ)
    assert done.returncode == 2
    assert done.stderr.startswith("dask_gpu_mpi: error: Dask's configuration can't be read: ")
    assert str(file) in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_an_agent_waits_for_is_little() -> None:
    """The rank starts its agent before it imports what it needs to join; the agent begins with the driver before it imports."""
    joining = ["job.entering", "job.member", "plan.planner"]
    for modules, not_yet in [
        ("cli.main, dask_gpu_mpi.job.api", ["dask", *(f"dask_gpu_mpi.{name}" for name in joining)]),
        ("agent.boot", ["dask_gpu_mpi.agent.main", "asyncio", "multiprocessing.forkserver", "distributed"]),
    ]:
        code = (
            f"import sys, dask_gpu_mpi.{modules}; print([name for name in {not_yet} if name in sys.modules])"
        )
        assert run(code) == "[]"


def test_options_need_dask_but_not_distributed(empty: dict[str, str]) -> None:
    """To import distributed takes most of a second, in each rank, before its agent starts."""
    code = (
        "import sys; from dask_gpu_mpi.options.resolve import resolve; resolve({}, source='command line'); "
        "print({'dask.config', 'distributed'} & set(sys.modules))"
    )
    assert run(code, **empty) == "{'dask.config'}"


def test_what_rank_0_asks_for(empty: dict[str, str], tmp_path: Path) -> None:
    """Settings for the sake of large clusters, unless the user has set them (`is_configured`)."""
    code = (
        "from dask_gpu_mpi.options.convert import is_configured; from dask_gpu_mpi.startup.transport import BACKLOG, CONNECT; "
        "print([key for key in (BACKLOG, CONNECT) if is_configured(key)])"
    )
    assert run(code, **empty, DASK_DISTRIBUTED__COMM__RETRY__COUNT="5") == "[]"
    variable = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "50s"}
    assert run(code, **empty, **variable) == "['distributed.comm.timeouts.connect']"
    file = tmp_path / "mine.yaml"
    file.write_text("distributed: {comm: {socket_backlog: 3}}")
    assert run(code, **empty, DASK_CONFIG=str(file)) == "['distributed.comm.socket-backlog']"
