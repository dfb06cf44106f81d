"""Options from Dask's configuration: from each place that Dask reads; and how little a rank imports before its agent starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from base64 import b64encode
from pathlib import Path

import pytest

from support import ROOT

#: Resolves the options as a rank does, and says what came of it.
RESOLVE = """
from dask_gpu_mpi.options.resolve import resolve
options = resolve({}, source="command line")
print(options.nthreads)
"""


def run(code: str, *arguments: str, **environ: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=clean | {"PYTHONPATH": str(ROOT)} | environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def empty(tmp_path: Path) -> dict[str, str]:
    """Nothing is configured in /etc or at home."""
    (tmp_path / "home").mkdir()
    return {"HOME": str(tmp_path / "home"), "DASK_ROOT_CONFIG": str(tmp_path / "none")}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (None, ""),
        ("distributed.yaml", "distributed:\n  worker:\n    memory: {target: 0.5}\n"),
        # as older versions of Dask have left it in the home of each user
        (
            "old.yaml",
            "# distributed:\n#   nanny:\n#     pre-spawn-environ: {A: 1}\n# gpu-mpi:\n#   nthreads: 7\n",
        ),
        ("notes.txt", "gpu-mpi: {nthreads: 7}"),  # no file that Dask reads
    ],
)
def test_nothing_said(empty: dict[str, str], name: str | None, text: str) -> None:
    directory = Path(empty["HOME"], ".config", "dask")
    directory.mkdir(parents=True)
    if name is not None:
        (directory / name).write_text(text)
    assert run(RESOLVE, **empty) == "None"


NTHREADS = "gpu-mpi:\n  nthreads: 7\n"


@pytest.mark.parametrize(
    ("place", "text"),
    [
        *((place, NTHREADS) for place in ("home", "root", "directory", "file", "prefix")),
        ("home", "gpu_mpi: {nthreads: 7}  # not a comment as a whole\n"),
        ("home", '{"gpu-mpi": {"nthreads": 7}}'),
        (
            "home",
            '{"distributed": {"dashboard": {"link": "http://host/#status"}}, "gpu-mpi": {"nthreads": 7}}',
        ),
    ],
)
def test_said_in_a_file(empty: dict[str, str], tmp_path: Path, place: str, text: str) -> None:
    suffix = ".json" if text.startswith("{") else ".YML"
    places = {
        "home": Path(empty["HOME"], ".config", "dask"),
        "root": tmp_path / "root",
        "directory": tmp_path / "directory",
        "file": tmp_path / "files",
        "prefix": tmp_path / "prefix" / "etc" / "dask",
    }
    places[place].mkdir(parents=True)
    file = places[place] / f"mine{suffix}"
    file.write_text(text)
    environ = dict(empty)
    if place == "root":
        environ["DASK_ROOT_CONFIG"] = str(places["root"])
    elif place in ("directory", "file"):
        environ["DASK_CONFIG"] = str(places["directory"] if place == "directory" else file)
    code = RESOLVE
    if place == "prefix":
        code = f"import site; site.PREFIXES.append({str(tmp_path / 'prefix')!r})" + code
    assert run(code, **environ) == "7"


#: For each set of variables the options that are no defaults, or the error: one process for all of them.
EACH = """
import json, os, sys
import dask.config
from dask_gpu_mpi.options.resolve import resolve
for variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    dask.config.refresh()
    try:
        options = resolve({}, source="command line")
        print(sorted((name, getattr(options, name)) for name in options.explicit))
    except Exception as error:
        print(error)
    for name in variables:
        del os.environ[name]
"""

#: What is in a variable of ours, and what comes of it.
VARIABLES = [
    ({"NTHREADS": "5"}, [("nthreads", 5)]),
    ({"nthreads": "5"}, [("nthreads", 5)]),
    ({"MEMORY_LIMIT": "None"}, [("memory_limit", None)]),
    ({"MEMORY_LIMIT": "null"}, [("memory_limit", None)]),
    ({"MEMORY_LIMIT": "0.5"}, [("memory_limit", 0.5)]),
    ({"MEMORY_LIMIT": "'4 GiB'"}, [("memory_limit", "4 GiB")]),
    ({"DASHBOARD": "false"}, [("dashboard", False)]),
    ({"DASHBOARD": "no"}, [("dashboard", False)]),
    ({"NAME": "12"}, [("name", "12")]),
    ({"WALLTIME_SIGNAL": "USR1"}, [("walltime_signal", "USR1")]),
    ({"LOCAL_DIRECTORY": "/scratch/[1]"}, [("local_directory", "/scratch/[1]")]),
    ({"WORKER_OPTIONS": '{"rmm_async": true}'}, [("worker_options", {"rmm_async": True})]),
    ({"NTHREADS": "5", "WALLTIME_SIGNAL": "USR1"}, [("nthreads", 5), ("walltime_signal", "USR1")]),
    # a bad value is one line
    ({"NTHREADS": "many"}, "environment DASK_GPU_MPI__NTHREADS: invalid value 'many' (expected "),
    ({"NAME": "a b"}, "environment DASK_GPU_MPI__NAME: invalid value 'a b' (expected "),
]


def test_options_in_variables(empty: dict[str, str]) -> None:
    sets = [{f"DASK_GPU_MPI__{name}": text for name, text in given.items()} for given, _ in VARIABLES]
    told = run(EACH, json.dumps(sets), **empty).splitlines()
    assert len(told) == len(VARIABLES)
    for line, (given, meaning) in zip(told, VARIABLES, strict=True):
        assert line.startswith(str(meaning)), given


@pytest.mark.parametrize(
    ("variable", "text", "nthreads"),
    [
        ("DASK_GPU_MPI", "{'nthreads': 7}", 7),
        ("DASK_GPU_MPI__WORKER_OPTIONS", "{'rmm_async': True}", None),
        ("DASK_GPU_MPI__WORKER_OPTIONS__RMM_ASYNC", "True", None),
        ("DASK_DISTRIBUTED__NANNY__PRE_SPAWN_ENVIRON__OMP_NUM_THREADS", "7", None),
        ("DASK_DISTRIBUTED__NANNY", "{'pre-spawn-environ': {'OMP_NUM_THREADS': 7}}", None),
        # as Dask gives it to its own processes: all of it, in base 64
        ("DASK_INTERNAL_INHERIT_CONFIG", b64encode(b'{"gpu-mpi": {"nthreads": 7}}').decode(), 7),
    ],
)
def test_said_in_the_environment(
    empty: dict[str, str], variable: str, text: str, nthreads: int | None
) -> None:
    assert run(RESOLVE, **empty, **{variable: text}) == f"{nthreads}"


def test_a_pipe_is_read_once(empty: dict[str, str], tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("gpu-mpi: {nthreads: 7}",), daemon=True)
    writer.start()
    assert run(RESOLVE, **empty, DASK_CONFIG=str(pipe)) == "7"


@pytest.mark.parametrize("text", ["gpu-mpi: [1", "- gpu-mpi"])
def test_a_malformed_file_is_one_line(empty: dict[str, str], tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    code = (
        "from dask_gpu_mpi.errors import InputError\n"
        "from dask_gpu_mpi.options.resolve import resolve\n"
        "try: resolve({}, source='keyword')\n"
        "except InputError as error: print(error)"
    )
    said = run(code, **empty, DASK_CONFIG=str(file))
    assert said.startswith("Dask's configuration can't be read: ")
    assert str(file) in said
    assert "malformed" in said
    assert "\n" not in said


@pytest.mark.parametrize("command", ["plan", "jobscript slurm --nodes 1 -- script.py"])
def test_a_malformed_file_is_one_line_of_every_command(
    empty: dict[str, str], tmp_path: Path, command: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("gpu-mpi: [1")
    done = subprocess.run(
        [sys.executable, "-m", "dask_gpu_mpi", *command.split()],
        env=dict(os.environ) | empty | {"DASK_CONFIG": str(file), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("dask_gpu_mpi: error: Dask's configuration can't be read: ")
    assert done.stderr.count("\n") == 1


def test_other_variables_of_dask_are_passed_over(empty: dict[str, str]) -> None:
    assert run(RESOLVE, **empty, DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT="50s") == "None"
    assert run(RESOLVE, **empty, DASK_GPU_MPI_OF_SOMEBODY_ELSE="7") == "None"


def test_what_the_program_has_set_counts(empty: dict[str, str]) -> None:
    assert run("import dask; dask.config.set({'gpu-mpi.nthreads': 7})" + RESOLVE, **empty) == "7"


def test_a_file_that_can_not_be_read_is_none(empty: dict[str, str]) -> None:
    directory = Path(empty["HOME"], ".config", "dask")
    (directory / "a.yaml").mkdir(parents=True)  # root may read every file, but not a directory as one
    assert run(RESOLVE, **empty) == "None"


def test_what_an_agent_waits_for_is_little() -> None:
    """The rank starts its agent before it imports what it needs to join; the agent begins with the driver before it imports."""
    joining = ["startup.bringup", "job.member", "plan.planner"]
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
    loaded = RESOLVE + "import sys; print({'dask.config', 'distributed'} & set(sys.modules))"
    assert run(loaded, **empty) == "None\n{'dask.config'}"


#: What rank 0 asks for the sake of large clusters.
KEYS = """
from dask_gpu_mpi.plan.scaling import configured_keys
print(sorted(configured_keys()))
"""


def test_what_rank_0_asks_for(empty: dict[str, str], tmp_path: Path) -> None:
    assert run(KEYS, **empty) == "[]"
    assert run(KEYS, **empty, DASK_DISTRIBUTED__COMM__RETRY__COUNT="5") == "[]"
    said = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "50s"}
    assert run(KEYS, **empty, **said) == "['distributed.comm.timeouts.connect']"
    said = {"DASK_DISTRIBUTED__COMM": "{'timeouts': {'connect': '50s'}}"}
    assert run(KEYS, **empty, **said) == "['distributed.comm.timeouts.connect']"
    file = tmp_path / "mine.yaml"
    file.write_text("distributed: {comm: {socket_backlog: 3}}")
    assert run(KEYS, **empty, DASK_CONFIG=str(file)) == "['distributed.comm.socket-backlog']"
