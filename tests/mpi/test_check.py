"""`check` over real ranks: what is well is green, and what is wrong names the rank, the host and the fix."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from support.jobs.clusters import COMMAND, foreign_launcher
from support.jobs.mpi import CompletedJob, Mpi
from support.mocks.gpus import GIB, SimGpu, SimHost, make_gpus

HOST = socket.gethostname()
CHECK = (*COMMAND, "check", "--interface", "lo")


def findings(done: CompletedJob, level: str = "error") -> list[dict[str, Any]]:
    return [found for found in json.loads(done.stdout)["findings"] if found["level"] == level]


def red(done: CompletedJob) -> dict[str, Any]:
    """The one red line; the others are not."""
    assert json.loads(done.check(1).stdout)["level"] == "error"
    (found,) = findings(done)
    assert found["remedy"]
    return found


@pytest.mark.both_mpis
@pytest.mark.quick
def test_all_is_well(mpirun: Mpi) -> None:
    done = mpirun.run(CHECK, 2).check()
    assert "ERROR" not in done.stdout
    assert "\x1b" not in done.stdout  # colours are for terminals
    assert "check of 2 ranks on 1 node" in done.stdout
    assert f"host {HOST}: ranks 0-1" in done.stdout
    for what in ("launcher", "versions", "placement", "start", "transport", "network", "clocks"):
        assert any(line.split()[:2] == ["ok", what] for line in done.stdout.splitlines()), done.stdout
    assert "GB/s" in done.stdout
    assert done.stderr == ""  # the lines of a job are for jobs


def test_json_with_the_options_and_the_script_of_the_job(mpirun: Mpi, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("raise SystemExit(3)  # it does not run")
    line = "--worker-class distributed.Nanny --shutdown-timeout 9s --json my.py --flag --json"
    done = mpirun.run([*CHECK, *line.split()], 2, cwd=tmp_path).check()
    data = json.loads(done.stdout)
    assert (data["exit_code"], data["world_size"]) == (0, 2)
    assert data["scheduler"] == {"rank": 0, "host": HOST, "address": "127.0.0.1"}
    (host,) = data["hosts"]
    assert (host["host"], host["ranks"], host["gpus"]) == (HOST, [0, 1], [])
    assert host["memory"] > 0
    assert set(host["cpus"]) <= set(range(os.cpu_count() or 1))
    assert [scratch["ranks"] for scratch in host["scratch"]] == [[0, 1]]
    (versions,) = data["versions"]
    assert versions["ranks"] == [0, 1]
    assert versions["versions"]["Python"] == sys.version.split()[0]
    sent = [(one["from"], one["to"], one["error"]) for one in data["transfers"]]
    assert sent == [(0, 1, None), (1, 0, None)]
    assert all(one["rate"] > 0 for one in data["transfers"])
    assert findings(done) == []


@pytest.mark.parametrize(
    ("text", "said"), [(None, "script 'my.py' does not exist"), ("x = 1 +", "Python can't compile it")]
)
def test_a_script_that_could_not_run(mpirun: Mpi, tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "my.py").write_text(text)
    done = mpirun.run([*CHECK, "my.py"], 2, cwd=tmp_path).check(1)
    assert "  ERROR    start " in done.stdout
    assert said in done.stdout


def test_gpus(mpirun: Mpi) -> None:
    there = (*make_gpus(3, host="one", memory=80 * GIB), SimGpu(uuid="GPU-bad", memory=80 * GIB, ecc=7))
    # they are emulated, so nothing can compute on them: each is tried, by its worker
    env = {"NUMBA_CUDA_DRIVER": "/nowhere/libcuda.so"}
    done = mpirun.run([*CHECK, "--json"], 2, gpus=SimHost(there, driver="570.1"), env=env).check(1)
    assert len(findings(done)) == 2, findings(done)
    kernel, found = sorted(findings(done), key=lambda each: str(each["what"]), reverse=True)
    assert (kernel["what"], kernel["ranks"], kernel["hosts"]) == ("kernel", [0, 1], [HOST])
    assert all(gpu.uuid in kernel["found"] for gpu in there)
    assert "driver" in kernel["remedy"]
    assert found["what"] == "GPUs"
    assert found["remedy"]
    assert "GPU-bad" in found["found"]
    assert "7 uncorrected memory errors" in found["found"]
    data = json.loads(done.stdout)
    (host,) = data["hosts"]
    assert host["driver"] == "570.1"
    assert [(gpu["uuid"], gpu["memory"], gpu["kernel"]) for gpu in host["gpus"]] == [
        (gpu.uuid, 80 * GIB, "cuda") for gpu in there
    ]
    assert [gpu["ecc_uncorrected"] for gpu in host["gpus"]] == [0, 0, 0, 7]
    # a GPU that does not compute gets no data
    sent = [(one["from"], one["to"], one["gpu_memory"], one["error"]) for one in data["transfers"]]
    names = ["0-0", "0-1", "1-2", "1-3"]
    assert sent == [(one, other, False, None) for one, other in zip(names, [*names[1:], "0-0"], strict=True)]


def test_gpus_that_are_gone(mpirun: Mpi) -> None:
    # where there is no NVIDIA library, or no driver, NVML is no error by itself
    env = {"CUDA_VISIBLE_DEVICES": None, "SLURM_GPUS_ON_NODE": "99"}
    found = red(mpirun.run([*CHECK, "--json"], 2, env=env))
    assert (found["what"], found["ranks"], found["hosts"]) == ("GPUs", [0, 1], [HOST])
    assert "SLURM_GPUS_ON_NODE=99" in found["found"]
    line = [*CHECK, "--no-kernel", "--expect-gpus", "3", "--json"]
    done = mpirun.run(line, 2, gpus=make_gpus(2, host="one"), env={"SLURM_GPUS_ON_NODE": "2"})
    assert red(done)["found"].startswith("only 2 GPUs visible")
    (host,) = json.loads(done.stdout)["hosts"]
    assert [gpu["kernel"] for gpu in host["gpus"]] == [None, None]


def test_another_version_and_a_port_in_use(mpirun: Mpi, tmp_path: Path) -> None:
    fake = tmp_path / "dask-2020.1.0.dist-info"
    fake.mkdir()
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: dask\nVersion: 2020.1.0\n")
    another = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = [*CHECK, "--json", "--dashboard-address", f"127.0.0.1:{port}"]
        done = mpirun.run(line, 2, per_rank_env=[{}, another])
    found = red(done)
    assert found["what"] == "versions"
    assert f"2020.1.0 for rank 1 on {HOST}" in found["found"]
    (ports,) = [each for each in findings(done, "warning") if each["what"] == "ports"]
    assert ports["ranks"] == [0]
    assert f"127.0.0.1:{port}" in ports["found"]
    assert "--dashboard-address" in ports["remedy"]


def failed_start(done: CompletedJob) -> dict[str, Any]:
    """The one red line of a start that has failed, which is not printed a second time."""
    assert done.stderr.count("dask_gpu_mpi: error:") == 0, done.output
    assert "Traceback" not in done.stderr
    data = json.loads(done.stdout)
    assert (data["exit_code"], data["hosts"], data["scheduler"]) == (1, [], None)
    return red(done)


def test_a_local_directory_that_can_not_be_written(mpirun: Mpi, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    odd = {"DASK_GPU_MPI__LOCAL_DIRECTORY": str(tmp_path / "file")}
    found = failed_start(mpirun.run([*CHECK, "--json"], 2, per_rank_env=[{}, odd]))
    assert (found["what"], found["ranks"], found["hosts"]) == ("scratch", [1], [HOST])
    assert "--local-directory" in found["remedy"]
    done = mpirun.run(CHECK, 2, per_rank_env=[{}, odd]).check(1)
    (line,) = [line for line in done.stdout.splitlines() if "can't be written" in line]
    assert line.split()[:2] == ["ERROR", "scratch"]
    assert f"rank 1 on {HOST}: " in line
    assert "1 error, 0 warnings" in done.stdout


@pytest.mark.parametrize(
    ("way", "what", "found", "remedy"),
    [
        ("port", "ports", "port {port}", "--scheduler-port"),
        ("no library", "launcher", "finds no MPI library", "pip install"),
        # what a foreign launcher makes of two ranks; rank 0 speaks for both
        pytest.param(
            "foreign", "launcher", "world of 1 rank", "use the mpirun of", marks=pytest.mark.both_mpis
        ),
    ],
)
def test_a_start_that_fails(mpirun: Mpi, way: str, what: str, found: str, remedy: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        line, ranks = {
            "port": ([*CHECK, "--json", "--scheduler-port", port], 2),
            "no library": ([*CHECK, "--json"], None),
            "foreign": (foreign_launcher(mpirun.name, "check", "--json"), None),
        }[way]
        env = {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"} if way == "no library" else {}
        one = failed_start(mpirun.run(line, ranks, env=env))
    assert one["what"] == what
    assert found.format(port=port) in one["found"]
    assert remedy in one["remedy"]


def test_all_that_is_wrong_is_found_at_once(mpirun: Mpi, tmp_path: Path) -> None:
    """A line for each problem of the start."""
    (tmp_path / "file").touch()
    odd = [
        {"DASK_GPU_MPI__LOCAL_DIRECTORY": str(tmp_path / "file")},
        {"DASK_GPU_MPI__LOCAL_DIRECTORY": str(tmp_path / "file" / "below")},
    ]
    done = mpirun.run([*CHECK, "--json"], 2, per_rank_env=odd).check(1)
    assert [(found["what"], found["ranks"]) for found in findings(done)] == [
        ("scratch", [0]),
        ("scratch", [1]),
    ]


def test_options_that_can_not_be_used(mpirun: Mpi) -> None:
    done = mpirun.run([*CHECK, "--json", "--nthreads", "none"], 2)
    done.refused("--nthreads")
    assert done.stdout == ""


def test_files_of_the_job_are_not_written(mpirun: Mpi, tmp_path: Path) -> None:
    names = {"--scheduler-file": "scheduler.json", "--report": "report.json", "--log-directory": "logs"}
    words = [word for flag, name in names.items() for word in (flag, str(tmp_path / name))]
    done = mpirun.run([*CHECK, *words], 1).check()
    assert [*tmp_path.iterdir()] == []
    assert "placement" in done.stdout


@pytest.mark.slow
def test_rank_that_does_not_answer(mpirun: Mpi) -> None:
    program = """
        import os
        import dask_gpu_mpi.job.entering as entering

        if "STOPS" in os.environ:
            entering.list_interfaces = lambda: os.kill(os.getpid(), 19)
        from dask_gpu_mpi.cli.main import main

        main(["check", "--interface", "lo", "--json", "--startup-timeout", "5s"])
    """
    done = mpirun.run(program, 2, per_rank_env=[{}, {"STOPS": "yes"}])
    assert done.rc != 0
    (found,) = findings(done)
    assert (found["what"], found["ranks"], found["hosts"]) == ("ranks", [1], [HOST])
    assert "before the start-up timeout" in found["found"]


@pytest.mark.slow
def test_local_directory_that_hangs(mpirun: Mpi, tmp_path: Path) -> None:
    # as on a file server that is gone: opening a FIFO waits for a reader
    fifo = tmp_path / "fifo"
    (tmp_path / "sitecustomize.py").write_text(f"""
import os, sys
if os.environ.get("HANGS") and "check" not in sys.argv:
    import dask_gpu_mpi.check.tasks as tasks
    tasks.inspect_scratch = lambda *_: open({str(fifo)!r}, "w")
""")
    os.mkfifo(fifo)
    found = red(mpirun.run([*CHECK, "--json"], 2, path=tmp_path, per_rank_env=[{}, {"HANGS": "yes"}]))
    assert (found["what"], found["ranks"], found["hosts"]) == ("ranks", [1], [HOST])
    assert "local directory" in found["found"]
    assert "no result within 8 s" in found["found"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "level", "kind"),
    [
        ("import time\ntime.sleep(600)\n", "warning", "slow"),
        ("raise ImportError('no llvmlite')\n", "warning", "import"),
        ("import time\ndef jit(function):\n    time.sleep(600)\n", "error", "late"),
        ("import os\ndef jit(function):\n    os._exit(7)\n", "error", "died"),
    ],
    ids=["slow import", "no numba", "late", "died"],
)
def test_kernel_without_a_result(mpirun: Mpi, tmp_path: Path, module: str, level: str, kind: str) -> None:
    (tmp_path / "numba" / "cuda").mkdir(parents=True)
    (tmp_path / "numba" / "__init__.py").write_text("")
    (tmp_path / "numba" / "cuda" / "__init__.py").write_text(module)
    done = mpirun.run([*CHECK, "--json"], 1, gpus=make_gpus(1, host="one"), path=tmp_path)
    assert done.rc == (level == "error"), done.output
    # a busy machine may have other warnings, such as that another job has the dashboard's port
    (found,) = [each for each in findings(done, level) if each["what"] == "kernel"]
    assert (found["ranks"], found["hosts"]) == ([0], [HOST])
    (host,) = json.loads(done.stdout)["hosts"]
    assert [gpu["kernel"] for gpu in host["gpus"]] == [kind], found
