"""What a job script is to request; what is written: test_templates."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import dask.config
import pytest
from click.testing import CliRunner

from dask_gpu_mpi.cli.jobscript import request
from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.errors import InputError, OptionError

SHAPE = {"nodes": "2", "gpus_per_node": "4", "time": "01:30:10"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:01", 1), ("0:01:00", 60), ("01:30:10", 5410), ("0000:00:59", 59), ("9999:59:59", 35999999)],
)
def test_walltime(text: str, seconds: int) -> None:
    assert request("slurm", ["my.py"], SHAPE | {"time": text}).seconds == seconds


@pytest.mark.parametrize(
    "text", ["00:00:00", "0:00:00", "0000:00:00", "1:60:00", "1:00:60", "1:00", "10000:00:00", "1:00:001"]
)
def test_walltime_that_is_none(text: str) -> None:
    with pytest.raises(OptionError, match="^command line: --time: .*HH:MM:SS"):
        request("slurm", ["my.py"], SHAPE | {"time": text})


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ({"nodes": "1000", "gpus_per_node": "100"}, True),
        ({"nodes": "1000", "gpus_per_node": "101"}, False),
        ({"nodes": "1000", "ranks_per_node": "100", "gpus_per_node": "100"}, True),
        ({"nodes": "1000", "ranks_per_node": "101"}, False),
        ({"nodes": "100000", "gpus_per_node": "1"}, True),
        ({"nodes": "100001", "gpus_per_node": "0"}, False),
    ],
)
def test_the_largest_job(shape: dict[str, str], fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dask_gpu_mpi.cli.jobscript._check_workers", lambda job: None)
    if fits:
        assert request("slurm", ["my.py"], SHAPE | shape).nodes == int(shape["nodes"])
    else:
        with pytest.raises(OptionError, match="too many .expected at most 100000 in the whole job"):
            request("slurm", ["my.py"], SHAPE | shape)


def test_what_is_not_set() -> None:
    job = request("slurm", ["my.py", "1"], {**SHAPE, "account": None, "modules": ()})
    assert (job.nodes, job.gpus_per_node, job.ranks_per_node, job.program) == (2, 4, 1, ("my.py", "1"))
    assert (job.account, job.modules, job.directives) == (None, (), ())


@pytest.mark.parametrize(
    ("system", "cpus", "notes"), [("pbs", None, 1), ("pbs", "32", 0), ("slurm", None, 0)]
)
def test_cores_that_pbs_must_know(
    system: str, cpus: str | None, notes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    request(system, ["my.py"], {**SHAPE, "cpus_per_node": cpus})
    assert capsys.readouterr().err.count("--cpus-per-node is not set: the job requests") == notes


def test_a_section_that_is_none() -> None:
    with (
        dask.config.set({"gpu-mpi.jobscript": ["nodes"]}),
        pytest.raises(OptionError, match="^configuration gpu-mpi.jobscript: .*expected names and values"),
    ):
        request("slurm", ["my.py"], SHAPE)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [(None, ()), ("cuda", ("cuda",)), (["cuda", "mpi"], ("cuda", "mpi")), (("a",), ("a",))],
)
def test_modules_of_a_site(modules: Any, expected: tuple[str, ...]) -> None:
    with dask.config.set({"gpu-mpi.jobscript": {"modules": modules}}):
        assert request("slurm", ["my.py"], SHAPE).modules == expected


def test_a_cluster_without_a_script_needs_a_scheduler_file() -> None:
    assert request("slurm", ["--scheduler-file", "s.json"], SHAPE).program == ("--scheduler-file", "s.json")
    for program in ([], ["--help"], ["--layout", "shared"]):
        with pytest.raises(InputError, match="^command line: the script is missing .expected -- SCRIPT ARGS"):
            request("slurm", program, SHAPE)


def test_cpu_workers_leave_gpus_alone() -> None:
    assert request("slurm", ["--worker-class", "distributed.Nanny", "my.py"], SHAPE).gpus_per_node == 4
    with pytest.raises(
        InputError, match="^8 of 16 GPUs would have no worker, with 1 ranks on each of 4 nodes: "
    ):
        request("slurm", ["--layout", "exclusive", "my.py"], SHAPE | {"nodes": "4"})


def test_file_that_can_not_be_written(tmp_path: Path) -> None:
    shape = ["--nodes", "1", "--gpus-per-node", "1", "--time", "01:00:00"]
    done = CliRunner().invoke(cli, ["jobscript", "slurm", *shape, "-o", str(tmp_path), "--", "my.py"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"dask_gpu_mpi: error: --output '{tmp_path}' can't be written: Is a directory\n"


def test_device_is_not_replaced_by_the_script(tmp_path: Path) -> None:
    shape = ["--nodes", "1", "--gpus-per-node", "1", "--time", "01:00:00"]
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        done = CliRunner().invoke(cli, ["jobscript", "slurm", *shape, "-o", str(path), "--", "my.py"])
        assert done.stderr == f"dask_gpu_mpi: error: --output '{path}' can't be written: no regular file\n"


@pytest.mark.parametrize(
    ("option", "least"), [("nodes", 1), ("ranks_per_node", 1), ("gpus_per_node", 0), ("cpus_per_node", 1)]
)
def test_the_smallest_job(option: str, least: int) -> None:
    shape = {"nodes": "1", "gpus_per_node": "0", "time": "00:10:00"}
    request("pbs", ["my.py"], shape | {option: str(least)})
    with pytest.raises(OptionError, match=f"^command line: --{option.replace('_', '-')}: "):
        request("pbs", ["my.py"], shape | {option: str(least - 1)})


@pytest.mark.parametrize(
    "seconds", [10**5000, 10_000 * 3600, -1, True], ids=["huge", "too long", "negative", "true"]
)
def test_walltime_that_no_job_has(seconds: int) -> None:
    """YAML 1.1 reads 01:30:00 as a number."""
    shape = {"nodes": "1", "gpus_per_node": "0"}
    with dask.config.set({"gpu-mpi.jobscript": {"time": 5400}}):
        assert request("slurm", ["my.py"], shape).seconds == 5400
    with (
        dask.config.set({"gpu-mpi.jobscript": {"time": seconds}}),
        pytest.raises(
            OptionError, match=r"^configuration gpu-mpi\.jobscript\.time: invalid value .*HH:MM:SS"
        ),
    ):
        request("slurm", ["my.py"], shape)


def test_number_that_is_too_large_to_show() -> None:
    shape = {"nodes": "1", "gpus_per_node": "0", "time": "00:10:00"}
    for name in ("nodes", "ranks_per_node", "cpus_per_node"):
        given = {key: text for key, text in shape.items() if key != name}
        with (
            dask.config.set({"gpu-mpi.jobscript": {name: 10**5000}}),
            pytest.raises(
                OptionError, match=rf"jobscript\.{name}: invalid value .*expected an integer below 2\*\*63"
            ),
        ):
            request("slurm", ["my.py"], given)
