from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import dask_gpu_mpi
from dask_gpu_mpi.cli.jobscript import JOB_OPTIONS
from dask_gpu_mpi.job.api import initialize
from dask_gpu_mpi.options.model import OPTIONS, Options
from dask_gpu_mpi.options.resolve import resolve

pytestmark = pytest.mark.usefixtures("unconfigured")

YAML = Path(dask_gpu_mpi.__file__).with_name("gpu-mpi.yaml")


def test_yaml_and_table_agree() -> None:
    configured = yaml.safe_load(YAML.read_text())["gpu-mpi"]
    section = configured.pop("jobscript")
    assert section == {name.replace("_", "-"): None for name in JOB_OPTIONS} | {
        "modules": [],
        "directives": [],
    }
    assert configured == {option.key: option.default for option in OPTIONS.values() if option.config}


def test_the_default_interface_is_told_as_it_is_chosen() -> None:
    """As `choose_addresses` does: tests/pure/network/test_interfaces.py."""
    yaml_text = YAML.read_text()
    text = " ".join(yaml_text[: yaml_text.index("  interface:")].replace("#", "").split())
    order = "loopback if the job has one node, else a fast one that all nodes have, else that of the default route."
    assert text.endswith(order)
    assert OPTIONS["interface"].help.endswith(order)
    assert order in " ".join((initialize.__doc__ or "").split())


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


def test_importing_the_module_loads_no_dask() -> None:
    code = "import sys, dask_gpu_mpi.options.model; print({'dask', 'mpi4py', 'yaml'} & set(sys.modules))"
    environ = dict(os.environ) | {"PYTHONPATH": str(YAML.parents[1])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "set()", done.stderr
