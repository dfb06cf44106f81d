"""Options from keywords, environment and configuration: which wins, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dask.config
import pytest

from support import ROOT
from support.mocks.inputs import keywords, refused

pytestmark = pytest.mark.usefixtures("unconfigured")


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
        "from dask_gpu_mpi.options.resolve import resolve\n"
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
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\n")[0] == "exclusive 5 1 {'rmm_async': True} False 12", done.stderr


def test_a_message_names_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPU_MPI__NTHREADS", "many")
    with dask.config.set({"gpu-mpi.nthreads": "many"}):
        assert refused({}).startswith(
            "environment DASK_GPU_MPI__NTHREADS: invalid value 'many' (expected an integer of 1"
        )
    with dask.config.set({"gpu-mpi.nthreads": "lots"}):
        assert refused({}).startswith("configuration gpu-mpi.nthreads: invalid value 'lots'")


def test_one_underscore_in_a_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPU_MPI_LAYOUT", "exclusive")
    assert "DASK_GPU_MPI__LAYOUT" in refused({})


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


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = keywords(log_directory="logs", report="/r.json")
    assert (options.log_directory, options.report) == (f"{tmp_path}/logs", "/r.json")


def test_the_defaults_are_registered_once() -> None:
    code = (
        "import dask.config; from dask_gpu_mpi.options.resolve import register_defaults\n"
        "register_defaults(); register_defaults()\n"
        "print(sum('gpu-mpi' in known for known in dask.config.defaults), dask.config.get('gpu-mpi.layout'))"
    )
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "DASK_CONFIG": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "1 shared\n", done.stderr


def test_what_the_program_has_set_since_is_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPU_MPI__NTHREADS", "many")
    with dask.config.set({"gpu-mpi.nthreads": "more"}):
        assert refused({}).startswith("configuration gpu-mpi.nthreads: invalid value 'more'")


@pytest.mark.parametrize("section", ["shared", [1]])
def test_a_section_that_is_none(section: object) -> None:
    with dask.config.set({"gpu-mpi": section}):
        assert refused({}).startswith("configuration gpu-mpi: invalid value ")


def test_a_default_in_the_configuration_is_not_explicit() -> None:
    with dask.config.set({"gpu-mpi.layout": "shared", "gpu-mpi.startup-timeout": "5m"}):
        assert keywords().explicit == frozenset()
    assert keywords(layout="shared", interface="auto").explicit == {"layout", "interface"}
