"""The table of options, what they are, and their protocols."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import distributed
import pytest
import yaml

import dask_gpu_mpi
from dask_gpu_mpi.cli.job_request import JOB_OPTIONS
from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.options.model import OPTIONS, Options
from dask_gpu_mpi.options.resolve import resolve
from support.mocks.inputs import keywords

pytestmark = pytest.mark.usefixtures("unconfigured")


class CUDAWorker: ...


class Mine(CUDAWorker): ...


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        ("auto", "auto"), ("dask_cuda.CUDAWorker", "gpu"), ("CUDAWorker", "gpu"), (Mine, "gpu"), ("distributed.Nanny", "cpu"),
        ("distributed.worker.Worker", "cpu"), ("dask.distributed.Worker", "cpu"), ("mine.Worker", "auto"), (dict, "auto"),
        (distributed.Nanny, "cpu"), (type("Mine", (distributed.Nanny,), {}), "auto"),
    ],
)  # fmt: skip
def test_worker_kind(cls: Any, kind: str) -> None:
    assert keywords(worker_class=cls).worker_kind == kind


@pytest.mark.parametrize(("timeout", "seconds"), [(1.0, 0.5), (4.0, 2.0), (60.0, 2.0)])
def test_workers_close_well_within_the_deadline(timeout: float, seconds: float) -> None:
    assert keywords(shutdown_timeout=timeout).grace == seconds


YAML = Path(dask_gpu_mpi.__file__).with_name("gpu-mpi.yaml")


def test_yaml_and_table_agree() -> None:
    configured = yaml.safe_load(YAML.read_text())["gpu-mpi"]
    section = configured.pop("jobscript")
    assert section == {name.replace("_", "-"): None for name in JOB_OPTIONS} | {
        "modules": [],
        "directives": [],
        "launch-options": [],
    }
    assert configured == {option.key: option.default for option in OPTIONS.values() if option.config}


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


# -- `Protocol`: Dask, messages, JSON and pickles have its text


SCHEMA = Path(dask_gpu_mpi.__file__).with_name("gpu-mpi-schema.json")


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("layout: exclusive", True),
        ("startup-timeout: 5m", True),
        ("memory-limit: 0.5", True),
        ("scheduler_port: 9000", True),
        ("dashboard-address: ':8787'", True),
        ("worker-options: {lifetime: 1 hour}", True),
        ("jobscript: {queue: gpu}", True),
        ("layout: mine", False),
        ("nthreads: 0", False),
        ("worker-options: 3", False),
        ("shedule_port: 9000", False),
        ("name: a/b", False),
        ("layout: null", False),
    ],
)
def test_the_schema_of_the_configuration_accepts_what_the_program_does(text: str, valid: bool) -> None:
    import dask

    jsonschema = pytest.importorskip("jsonschema")
    checks = jsonschema.Draft7Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    section = yaml.safe_load(text)
    assert checks.is_valid({"gpu-mpi": section}) == valid
    with dask.config.set({"gpu-mpi": section}):
        if valid:
            resolve({}, source="command line")
        else:
            with pytest.raises(OptionError):
                resolve({}, source="command line")


def test_the_defaults_fit_the_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    defaults = yaml.safe_load(SCHEMA.with_name("gpu-mpi.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(defaults, schema, jsonschema.Draft7Validator)
