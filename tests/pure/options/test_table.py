from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import dask.config
import pytest
import yaml

import dask_gpu_mpi
from dask_gpu_mpi.cli.jobscript import JOB_OPTIONS
from dask_gpu_mpi.network.interfaces import Interface, choose_addresses
from dask_gpu_mpi.options.table import OPTIONS, Options, resolve
from resolving import keywords, refused

pytestmark = pytest.mark.usefixtures("unconfigured")

YAML = Path(dask_gpu_mpi.__file__).with_name("gpu-mpi.yaml")


# --- the table


def test_yaml_and_table_agree() -> None:
    configured = yaml.safe_load(YAML.read_text())["gpu-mpi"]
    section = configured.pop("jobscript")
    assert section == {name.replace("_", "-"): None for name in JOB_OPTIONS} | {
        "modules": [],
        "directives": [],
    }
    assert configured == {option.key: option.default for option in OPTIONS.values() if option.config}


def test_every_key_of_the_yaml_is_explained() -> None:
    lines = YAML.read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if match := re.match(r" +(?=[a-z])", line):
            assert before.startswith(f"{match[0]}# "), line


def test_the_default_interface_is_told_as_it_is_chosen() -> None:
    """As `choose_addresses` does: one host, then a fast network that all have, then the default route."""
    yaml_text = YAML.read_text()
    text = " ".join(yaml_text[: yaml_text.index("  interface:")].replace("#", "").split())
    order = "loopback if the job has one host, else a fast one that all hosts have, else that of the default route."
    assert text.endswith(order)
    assert OPTIONS["interface"].help.endswith(order)

    def job(hosts: int, *networks: str) -> tuple[str | None, set[str]]:
        own = {
            rank: [Interface("lo", "127.0.0.1", "127.0.0.0/8")]
            + [
                Interface(name, f"10.{number}.0.{rank + 1}", f"10.{number}.0.0/24", name == "eth0")
                for number, name in enumerate(networks)
            ]
            for rank in range(hosts)
        }
        name, addresses = choose_addresses([f"h{rank}" for rank in range(hosts)], own, [None] * hosts)
        return name, set(addresses.values())

    assert job(1, "eth0", "ib0") == (None, {"127.0.0.1"})
    assert job(2, "eth0", "ib0") == ("ib0", {"10.1.0.1", "10.1.0.2"})
    assert job(2, "aux0", "eth0") == ("eth0", {"10.1.0.1", "10.1.0.2"})


def test_options_have_a_field_for_every_option() -> None:
    fields = {field.name for field in dataclasses.fields(Options)} - {"warnings", "explicit"}
    assert fields == set(OPTIONS) - {"nanny", "exclusive_workers"}


def test_defaults_of_table_and_class_agree() -> None:
    assert resolve({}, source="keyword") == Options()


def test_command_line_names_are_unique_and_complete() -> None:
    flags = [flag for option in OPTIONS.values() for flag in "/".join(option.flags).split("/") if flag]
    assert len(flags) == len(set(flags))
    for option in OPTIONS.values():
        assert bool(option.flags) == option.cli
        assert option.help.endswith(".")


def test_dask_mpis_names_are_there() -> None:
    import inspect

    import dask_mpi
    from dask_mpi.cli import main

    names = set(inspect.signature(dask_mpi.initialize).parameters)
    names |= set(inspect.signature(dask_mpi.execute).parameters)
    names -= {"client_function", "client_args", "client_kwargs", "worker_name"}
    assert names <= set(OPTIONS)
    ours = {flag for option in OPTIONS.values() for flag in "/".join(option.flags).split("/")}
    theirs = {flag for parameter in main.params for flag in parameter.opts + parameter.secondary_opts}
    assert theirs - ours == {"scheduler_address"}  # an argument


# --- order


def test_keyword_beats_configuration_beats_default() -> None:
    with dask.config.set({"gpu-mpi.nthreads": 3, "gpu-mpi.layout": "exclusive"}):
        options = keywords(nthreads=2)
    assert (options.nthreads, options.layout, options.cpu_workers) == (2, "exclusive", 0)
    assert options.explicit == {"nthreads", "layout"}


def test_none_said_beats_configuration() -> None:
    with dask.config.set({"gpu-mpi.nthreads": 3}):
        assert keywords(nthreads=None).nthreads is None


def test_environment_beats_yaml(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("gpu-mpi: {layout: exclusive, nthreads: 2, worker-options: {a: 1}}")
    code = (
        "from dask_gpu_mpi.options.table import resolve\n"
        "options = resolve({'cpu_workers': 1}, source='keyword')\n"
        "print(options.layout, options.nthreads, options.cpu_workers, options.worker_options, options.dashboard, options.name)"
    )
    environ = dict(os.environ) | {
        "DASK_CONFIG": str(tmp_path),
        "DASK_GPU_MPI__NTHREADS": "5",
        "DASK_GPU_MPI__CPU_WORKERS": "4",
        "DASK_GPU_MPI__DASHBOARD": "no",
        "DASK_GPU_MPI__NAME": "12",
        "DASK_GPU_MPI__WORKER_OPTIONS": '{"rmm_async": true}',
        "PYTHONPATH": str(YAML.parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\n")[0] == "exclusive 5 1 {'rmm_async': True} False 12", done.stderr


def test_importing_the_module_loads_no_dask() -> None:
    code = "import sys, dask_gpu_mpi.options.table; print({'dask', 'mpi4py', 'yaml'} & set(sys.modules))"
    environ = dict(os.environ) | {"PYTHONPATH": str(YAML.parents[1])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "set()", done.stderr


def test_a_message_names_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPU_MPI__NTHREADS", "many")
    with dask.config.set({"gpu-mpi.nthreads": "many"}):
        assert refused({}).startswith(
            "environment DASK_GPU_MPI__NTHREADS: 'many' can't be used; needed: an integer of 1"
        )
    with dask.config.set({"gpu-mpi.nthreads": "lots"}):
        assert refused({}).startswith("configuration gpu-mpi.nthreads: 'lots'")


def test_one_underscore_in_a_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPU_MPI_LAYOUT", "exclusive")
    assert "DASK_GPU_MPI__LAYOUT" in refused({})


# --- unknown names


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("nthread", "nthreads"),
        ("memory-limit", "memory_limit"),
        ("local_dir", "local_directory"),
        ("Layout", "layout"),
    ],
)
def test_unknown_keyword_names_the_nearest(name: str, meant: str) -> None:
    message = refused({name: 1})
    assert "keyword" in message
    assert f"did you mean {meant!r}" in message


def test_unknown_configuration_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    with dask.config.set({"gpu-mpi.memory-limits": 1}):
        assert (
            refused({}) == "configuration gpu-mpi.memory-limits: unknown option; did you mean 'memory-limit'?"
        )
    monkeypatch.setenv("DASK_GPU_MPI__LAYUOT", "shared")
    with dask.config.set({"gpu-mpi.layuot": "shared"}):
        assert (
            "environment DASK_GPU_MPI__LAYUOT: unknown option; did you mean 'DASK_GPU_MPI__LAYOUT'?"
            in refused({})
        )


@pytest.mark.parametrize("name", ["exit", "comm", "nanny", "exclusive-workers"])
def test_what_can_not_be_configured(name: str) -> None:
    with dask.config.set({f"gpu-mpi.{name}": True}):
        assert "can't be configured" in refused({})


# --- classes of workers


class CUDAWorker: ...


class Mine(CUDAWorker): ...


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        ("auto", "auto"), ("dask_cuda.CUDAWorker", "gpu"), ("CUDAWorker", "gpu"), (Mine, "gpu"), ("distributed.Nanny", "cpu"),
        ("distributed.worker.Worker", "cpu"), ("dask.distributed.Worker", "cpu"), ("mine.Worker", "auto"), (dict, "auto"),
    ],
)  # fmt: skip
def test_worker_kind(cls: Any, kind: str) -> None:
    assert keywords(worker_class=cls).worker_kind == kind


def test_worker_kind_of_dasks_own_classes() -> None:
    import distributed

    assert keywords(worker_class=distributed.Nanny).worker_kind == "cpu"
    assert keywords(worker_class=type("Mine", (distributed.Nanny,), {})).worker_kind == "auto"
