"""`check` over real ranks: what is well is green, and what is wrong names the rank, the host and the fix."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from support.jobs.clusters import COMMAND, foreign_launcher, ranks_of, until
from support.jobs.gpus import gpu_environ
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
    assert f"node {HOST}: ranks 0-1" in done.stdout
    for what in ("launcher", "versions", "placement", "network", "clocks"):
        assert any(line.split()[:2] == ["ok", what] for line in done.stdout.splitlines()), done.stdout
    assert "Traceback" not in done.stderr


def test_json_with_the_options_and_the_script_of_the_job(mpirun: Mpi) -> None:
    line = "--worker-class distributed.Nanny --shutdown-timeout 9s --json my.py --flag --json"
    done = mpirun.run([*CHECK, *line.split()], 2).check()
    data = json.loads(done.stdout)
    assert (data["exit_code"], data["world_size"]) == (0, 2)
    assert data["seconds"] < 20
    assert data["scheduler"] == {"rank": 0, "host": HOST, "address": "127.0.0.1"}
    (host,) = data["hosts"]
    assert (host["host"], host["ranks"], host["gpus"]) == (HOST, [0, 1], [])
    assert host["memory"] > 0
    assert set(host["cpus"]) <= set(range(os.cpu_count() or 1))
    assert [scratch["ranks"] for scratch in host["scratch"]] == [[0, 1]]
    (versions,) = data["versions"]
    assert versions["ranks"] == [0, 1]
    assert versions["versions"]["Python"] == sys.version.split()[0]
    assert findings(done) == []


@pytest.mark.quick("openmpi")
def test_gpus(mpirun: Mpi) -> None:
    there = (*make_gpus(3, host="one", memory=80 * GIB), SimGpu(uuid="GPU-bad", memory=80 * GIB, ecc=7))
    # they are emulated, so nothing can compute on them: each is tried, by one rank, and told
    env = gpu_environ(SimHost(there, driver="570.1")) | {"NUMBA_CUDA_DRIVER": "/nowhere/libcuda.so"}
    done = mpirun.run([*CHECK, "--json"], 2, env=env).check(1)
    kernel, found = sorted(findings(done), key=lambda each: str(each["what"]), reverse=True)
    assert (kernel["what"], kernel["ranks"], kernel["hosts"]) == ("kernel", [0, 1], [HOST])
    assert all(gpu.uuid in kernel["found"] for gpu in there)
    assert "driver" in kernel["remedy"]
    assert found["what"] == "GPUs"
    assert found["remedy"]
    assert "GPU-bad" in found["found"]
    assert "7 uncorrected memory errors" in found["found"]
    (host,) = json.loads(done.stdout)["hosts"]
    assert host["driver"] == "570.1"
    assert [(gpu["uuid"], gpu["memory"], gpu["kernel"]) for gpu in host["gpus"]] == [
        (gpu.uuid, 80 * GIB, "cuda") for gpu in there
    ]
    assert [gpu["ecc_uncorrected"] for gpu in host["gpus"]] == [0, 0, 0, 7]


def test_gpus_that_are_gone(mpirun: Mpi) -> None:
    # where there is no NVIDIA library, or no driver, NVML is no error by itself
    none = {"CUDA_VISIBLE_DEVICES": None}
    done = mpirun.run([*CHECK, "--json"], 2, env={**none, "SLURM_GPUS_ON_NODE": "99"})
    found = red(done)
    assert (found["what"], found["ranks"], found["hosts"]) == ("GPUs", [0, 1], [HOST])
    assert "SLURM_GPUS_ON_NODE=99" in found["found"]
    env = gpu_environ(make_gpus(2, host="one")) | {"SLURM_GPUS_ON_NODE": "2"}
    done = mpirun.run([*CHECK, "--no-kernel", "--expect-gpus", "3", "--json"], 2, env=env)
    assert red(done)["found"].startswith("only 2 GPUs visible")
    (host,) = json.loads(done.stdout)["hosts"]
    assert [gpu["kernel"] for gpu in host["gpus"]] == [None, None]


@pytest.mark.quick("mpich")
def test_all_that_is_wrong_is_found_at_once(mpirun: Mpi, tmp_path: Path) -> None:
    """Another version and a local directory that can't be written on one rank, and a port that is taken."""
    fake = tmp_path / "dask-2020.1.0.dist-info"
    fake.mkdir()
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: dask\nVersion: 2020.1.0\n")
    (tmp_path / "file").touch()
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    odd = {"PYTHONPATH": path, "DASK_GPU_MPI__LOCAL_DIRECTORY": str(tmp_path / "file")}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = [*CHECK, "--json", "--scheduler-port", str(port), "--dashboard-address", f"127.0.0.1:{port}"]
        done = mpirun.run(line, 2, per_rank_env=[{}, odd]).check(1)
    found = {each["what"]: each for each in findings(done)}
    assert sorted(found) == ["ports", "scratch", "versions"]
    assert f"2020.1.0 for rank 1 on {HOST}" in found["versions"]["found"]
    assert (found["scratch"]["ranks"], found["scratch"]["hosts"]) == ([1], [HOST])
    assert "--local-directory" in found["scratch"]["remedy"]
    assert found["ports"]["ranks"] == [0]
    assert f"port {port}" in found["ports"]["found"]
    assert "--scheduler-port" in found["ports"]["remedy"]


@pytest.mark.both_mpis
def test_worlds_of_one(mpirun: Mpi) -> None:
    # what a foreign launcher makes of two ranks; rank 0 speaks for both
    found = red(mpirun.run(foreign_launcher(mpirun.name, "check", "--json"), None))
    assert found["what"] == "launcher"
    assert "world of 1 rank" in found["found"]
    assert "use the mpirun of" in found["remedy"]


def test_no_mpi_library(mpirun: Mpi, tmp_path: Path) -> None:
    env = {"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
    found = red(mpirun.run([*CHECK, "--json"], None, env=env))
    assert "finds no MPI library" in found["found"]


@pytest.mark.slow
@pytest.mark.parametrize("silent", [0, 1])
def test_rank_that_does_not_answer(mpirun: Mpi, tmp_path: Path, silent: int) -> None:
    # It hangs in its local directory, as on a file server that is gone: opening a FIFO waits for a reader.
    fifo = str(tmp_path / "gone")
    done = mpirun.run(_hanging(silent, f"os.mkfifo({fifo!r}), open({fifo!r}, 'w')"), 2, timeout=40)
    assert done.rc != 0
    (found,) = findings(done)
    assert (found["what"], found["ranks"], found["hosts"]) == ("ranks", [silent], [HOST])
    assert "the local directory" in found["found"]
    assert json.loads(done.stdout)["seconds"] < 20
    assert "no response" not in done.stderr


@pytest.mark.slow
def test_rank_0_that_is_stopped(mpirun: Mpi) -> None:
    done = mpirun.run(_hanging(0, "os.kill(os.getpid(), 19)"), 2, timeout=40)
    assert done.rc != 0
    # Launchers let a stopped process go on before they end it, so that it may say something as well.
    assert done.stderr.count("dask_gpu_mpi: error: rank 0: no response") == 1


def _hanging(rank: int, how: str) -> str:
    """``check``, where a rank does this instead of looking at its local directory."""
    return f"""
        import os, sys
        import dask_gpu_mpi.check.observations as observations

        if os.environ["OMPI_COMM_WORLD_RANK" if "OMPI_COMM_WORLD_RANK" in os.environ else "PMI_RANK"] == "{rank}":
            observations.inspect_scratch = lambda *_: ({how})
        from dask_gpu_mpi.cli.main import main

        main(["check", "--interface", "lo", "--json"])
    """


@pytest.mark.slow
@pytest.mark.parametrize(("asleep", "level"), [("import", "warning"), ("compute", "error")])
def test_kernel_that_takes_too_long(mpirun: Mpi, tmp_path: Path, asleep: str, level: str) -> None:
    (tmp_path / "numba" / "cuda").mkdir(parents=True)
    (tmp_path / "numba" / "__init__.py").write_text("")
    sleep = "import time\ntime.sleep(600)\n"
    (tmp_path / "numba" / "cuda" / "__init__.py").write_text(
        sleep if asleep == "import" else f"def jit(function):\n    {sleep.replace(chr(10), chr(10) + '    ')}"
    )
    env = gpu_environ(make_gpus(1, host="one"))
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    done = mpirun.run([*CHECK, "--json"], 1, env=env)
    assert done.rc == (level == "error"), done.output
    # a busy machine may have other warnings, such as that another job has the dashboard's port
    (found,) = [each for each in findings(done, level) if each["what"] == "kernel"]
    assert (found["ranks"], found["hosts"]) == ([0], [HOST])
    assert ("import of numba" in found["found"]) == (asleep == "import")


def test_kernels_end_with_their_rank(mpirun: Mpi, tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text(
        "import time\nprint('asleep', flush=True)\ntime.sleep(600)"
    )
    program = """
        import os
        from dask_gpu_mpi.check.kernel import run_kernels

        print("ready", flush=True)
        run_kernels(["GPU-none"], os.environ, 600.0)
    """
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    job = mpirun.start(program, 2, env={"PYTHONPATH": path})
    job.wait_for("ready(.|\n)*ready")
    until(lambda: len(job.processes("check.kernel")) == 2, 20)
    os.kill(ranks_of(job)[1], signal.SIGKILL)
    job.wait(20)  # finds what is left
