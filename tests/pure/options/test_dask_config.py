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


@pytest.mark.parametrize(
    ("before", "source", "loaded"),
    [
        ("", "keyword", {"dask", "dask.config"}),
        ("", "command line", set()),
        ("import dask; dask.config.set(x=1);", "command line", {"dask", "dask.config"}),
    ],
)
def test_options_need_the_configuration_of_dask_alone(
    before: str, source: str, loaded: set[str], empty: dict[str, str], tmp_path: Path
) -> None:
    """To import all of Dask takes a tenth of a second, and distributed most of one, in each rank.

    A command needs only the module that reads the configuration. A script that imports Dask later gets the same.
    """
    file = tmp_path / "mine.yaml"
    file.write_text("gpu-mpi: {nthreads: 3}\ndistributed: {nanny: {pre-spawn-environ: {A: 1}}}")
    code = (
        f"import sys; {before} from dask_gpu_mpi.options.resolve import resolve; "
        f"options = resolve({{}}, source={source!r}); "
        "found = {'dask', 'dask.config', 'dask.typing', 'dask.base', 'distributed'} & set(sys.modules); "
        f"assert found >= {loaded or set()} and bool(found) is {bool(loaded)} and 'distributed' not in found, found; "
        "from dask_gpu_mpi.options.convert import loaded_config; "
        "known = loaded_config().get('distributed.nanny.pre-spawn-environ'); "
        "import dask, dask.config, dask.typing; from dask_gpu_mpi.options.convert import import_config; "
        "assert import_config(alone=True) is dask.config is loaded_config() is sys.modules['dask.config']; "
        "assert dask.typing is sys.modules['dask.typing'] and dask.compute; "
        "print(options.nthreads, known, dask.config.get('gpu-mpi.nthreads'), dask.config.get('x', None))"
    )
    x = 1 if before else None
    assert run(code, **empty, DASK_CONFIG=str(file)) == f"3 {{'A': 1}} 3 {x}"


def test_a_configuration_that_can_be_read_once_is_read_once(empty: dict[str, str]) -> None:
    """By a pipe, as a shell's ``<(...)`` is one."""
    code = (
        "import os; read, write = os.pipe(); os.write(write, b'gpu-mpi: {nthreads: 3}'); os.close(write); "
        "os.environ['DASK_CONFIG'] = f'/dev/fd/{read}'; from dask_gpu_mpi.options.resolve import resolve; "
        "options = resolve({}, source='command line'); import dask; "
        "print(options.nthreads, dask.config.get('gpu-mpi.nthreads'))"
    )
    assert run(code, **empty) == "3 3"


def test_a_dask_whose_configuration_needs_more_of_it(empty: dict[str, str], tmp_path: Path) -> None:
    """It is imported whole."""
    package = tmp_path / "dask"
    package.mkdir()
    (package / "__init__.py").write_text("needed = 1\nfrom dask import config\n")
    (package / "config.py").write_text(
        "from dask import needed\ndef get(*_): return {'nthreads': needed}\n"
        "def update_defaults(_): pass\ndef refresh(*_, **__): pass\n"
    )
    code = (
        "import sys; from dask_gpu_mpi.options.resolve import resolve; "
        "print(resolve({}, source='command line').nthreads, sys.modules['dask'].needed)"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    assert run(code, **empty, PYTHONPATH=path) == "1 1"


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
