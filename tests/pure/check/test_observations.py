"""What one rank observes for the preflight."""

from __future__ import annotations

import importlib.metadata
import platform
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.check import observations as module
from dask_gpu_mpi.check.observations import (
    DISTRIBUTIONS,
    MPI_LIBRARY,
    NOT_INSTALLED,
    PYTHON,
    Observations,
    allocated_gpus,
    observe,
    versions,
    without_rank,
)
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.nvidia import gpu_health
from dask_gpu_mpi.machine.scratch import Scratch
from dask_gpu_mpi.options.model import Options
from support.mocks.preflights import observed


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({}, 0),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "0"}, 0),
        ({"SLURM_GPUS_ON_NODE": "gpu:4"}, 0),
        ({"SLURM_GPUS_ON_NODE": "²"}, 0),
        ({"SLURM_GPUS_ON_NODE": "1" * 5000}, 0),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "2"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_what_the_batch_system_has_allocated(environ: dict[str, str], number: int) -> None:
    assert allocated_gpus(environ) == number


def test_versions_are_those_of_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions("MPI 9")
    assert (found[PYTHON], found[MPI_LIBRARY]) == (platform.python_version(), "MPI 9")
    assert found.keys() == {PYTHON, MPI_LIBRARY, *DISTRIBUTIONS}
    assert found["distributed"] == importlib.metadata.version("distributed")

    def version(name: str) -> str:
        if name == "dask":
            return ""  # a damaged one has none
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = versions("MPI 9")
    assert (found["dask"], found["distributed"]) == ("unknown", NOT_INSTALLED)


class Nvml:
    """A mock of pynvml: GPU "a" has errors, "b" does not count them."""

    class NVMLError(Exception):
        pass

    def __init__(self, driver: Any = "580.1", init: bool = True) -> None:
        self.driver, self.init = driver, init
        self.calls: list[Any] = []

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if not self.init:
            raise self.NVMLError

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")
        raise self.NVMLError

    def nvmlSystemGetDriverVersion(self) -> Any:
        if self.driver is None:
            raise self.NVMLError
        return self.driver

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return f"handle of {uuid}"

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, since: int) -> int:
        self.calls.append((handle, kind, since))
        if handle.endswith("b"):
            raise self.NVMLError
        return 3


@pytest.mark.parametrize(("driver", "text"), [("580.1", "580.1"), (b"570.2", "570.2"), (None, "")])
def test_health_of_gpus(driver: Any, text: str) -> None:
    nvml = Nvml(driver)
    gpus = [Gpu("a", 0, "A", 1), Gpu("b", 1, "A", 1), Gpu("MIG-c", 2, "A", 1, parent="c")]
    assert gpu_health(gpus, nvml) == (text, {"a": 3, "MIG-c": 3})
    # nvml.h: NVML_MEMORY_ERROR_TYPE_UNCORRECTED is 1, NVML_VOLATILE_ECC 0
    assert nvml.calls == ["init", *((f"handle of {name}", 1, 0) for name in "abc"), "shutdown"]


def test_health_where_nvml_does_not_start() -> None:
    nvml = Nvml(init=False)
    assert gpu_health([Gpu("a", 0, "A", 1)], nvml) == ("", {})
    assert nvml.calls == ["init"]


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("rank 1 of 4 on n07: no GPU", "no GPU"),
        ("rank 1 of 4 (n07): no GPU", "no GPU"),
        ("rank 12: no GPU", "no GPU"),
        ("n07: rank 1 of 4 on n07: no GPU", "n07: rank 1 of 4 on n07: no GPU"),
        ("ranks 1-2: no GPU", "ranks 1-2: no GPU"),
    ],
)
def test_the_rank_of_a_message_is_taken_away(text: str, rest: str) -> None:
    assert without_rank(text) == rest


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What `observe` inspects, and what it asks for."""
    inventory = observed(0).inventory
    made = SimpleNamespace(inventory=inventory, raises=None, look_for_gpus=None, tmpdir="?", steps=[])

    def take_inventory(*_: Any, look_for_gpus: bool) -> Any:
        made.look_for_gpus = look_for_gpus
        if made.raises is not None:
            raise made.raises
        return made.inventory

    def inspect_scratch(path: str, tmpdir: str | None) -> Scratch:
        made.tmpdir = tmpdir
        return Scratch(path)

    monkeypatch.setattr(module, "take_inventory", take_inventory)
    monkeypatch.setattr(module, "inspect_scratch", inspect_scratch)
    monkeypatch.setattr(module, "gpu_health", lambda gpus: ("580.1", {gpu.uuid: 0 for gpu in gpus}))
    made.observe = lambda options, environ: observe(
        1, 2, options, environ, "MPI", [("launcher", "x")], made.steps.append
    )
    return made


def test_what_is_observed(node: SimpleNamespace) -> None:
    found: Observations = node.observe(Options(interface="ib0"), {"TMPDIR": "/t", "SLURM_GPUS_ON_NODE": "2"})
    assert (found.rank, found.wanted_interface, found.driver, found.allocated_gpus) == (1, "ib0", "580.1", 2)
    assert found.ecc == {"GPU-h1-0": 0, "GPU-h1-1": 0}
    assert (node.look_for_gpus, node.tmpdir, found.problems) == (True, "/t", (("launcher", "x"),))
    assert [step.split()[:2] for step in node.steps] == [
        ["inspecting", "the"],
        ["inspecting", "the"],
        ["reading", "the"],
    ]


def test_what_is_observed_for_cpu_workers(node: SimpleNamespace) -> None:
    options = Options(worker_class="distributed.Nanny", local_directory="/mine")
    found: Observations = node.observe(options, {"TMPDIR": "/t", "SLURM_GPUS_ON_NODE": "2"})
    assert (node.look_for_gpus, node.tmpdir, found.allocated_gpus) == (False, None, 0)
    assert found.scratch.path == "/mine"


def test_driver_where_there_is_no_gpu(node: SimpleNamespace) -> None:
    node.inventory = observed(0, gpus=0).inventory
    found: Observations = node.observe(Options(), {})
    assert (found.driver, found.ecc) == ("", {})


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (InputError("rank 1 of 2 on h: NVML failed. Fix: reset it"), ("GPUs", "NVML failed. Fix: reset it")),
        (OSError("no /proc"), ("host", "could not inspect this node (OSError: no /proc)")),
    ],
)
def test_node_that_can_not_be_inspected(
    node: SimpleNamespace, error: Exception, problem: tuple[str, str]
) -> None:
    node.raises = error
    found: Observations = node.observe(Options(), {})
    assert (found.inventory, found.problems) == (None, (("launcher", "x"), problem))
