"""Whatever a text from outside is, it gets an answer or one clear error, soon: options, files, and what people write.

How many inputs: `fuzzing`. What batch systems, launchers, the kernel and programs write: `test_fuzz_system`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import dask.config
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpu_mpi.base.text import fold_names, parse_bytes, parse_memory_limit
from dask_gpu_mpi.cli.job_request import JOB_OPTIONS, request
from dask_gpu_mpi.cli.options import read_texts, split_run
from dask_gpu_mpi.errors import DaskGpuMpiError
from dask_gpu_mpi.job.child_processes import BEFORE, _record, _restore
from dask_gpu_mpi.job.program import Program
from dask_gpu_mpi.network.scheduler_file import CREDENTIALS_KEY, read_scheduler_file
from dask_gpu_mpi.options.convert import convert
from dask_gpu_mpi.options.model import OPTIONS
from dask_gpu_mpi.options.resolve import resolve
from dask_gpu_mpi.sites.jobscript import render
from dask_gpu_mpi.workers.worker_options import device_sizes, import_worker_class, read_worker_options
from support.mocks.fuzzing import fuzz, near, soon, texts, values, variables
from support.mocks.inputs import parse_run, worker_plan


@fuzz
@given(texts)
def test_sizes(text: str) -> None:
    found = soon(parse_bytes, text, errors=(ValueError,))
    assert found is None or (isinstance(found, int) and found >= 0)


NAMES = st.sampled_from(sorted(OPTIONS))
WORKER_OPTIONS = st.sampled_from(["resources", "rmm_pool_size", "env", "nthreads"])
SECTION = st.sampled_from([*JOB_OPTIONS, "modules", "directives", "x"])


def read_section(section: dict[str, Any]) -> None:
    with dask.config.set({"gpu-mpi.jobscript": section}):
        request("slurm", (__file__,), {"nodes": "1", "gpus_per_node": "1", "time": "01:00:00"})


def read_many(options: dict[str, int], times: int) -> None:
    text = json.dumps(options)[1:-1]
    resolve({"worker_options": "{" + ",".join([text] * times) + "}"}, source="command line")


#: Readers, and what they are given.
READERS: dict[str, tuple[Callable[..., Any], tuple[st.SearchStrategy[Any], ...]]] = {
    "memory limit": (parse_memory_limit, (st.one_of(texts, st.integers(), st.floats(), st.none()),)),
    "command line": (lambda name, text: resolve({name: text}, source="command line"), (NAMES, texts)),
    "keyword": (lambda name, value: resolve({name: value}, source="keyword"), (NAMES, values)),
    "configuration": (
        lambda name, value: convert(OPTIONS[name], value, "gpu-mpi", "configuration"),
        (NAMES, values),
    ),
    "configuration of job scripts": (read_section, (st.dictionaries(SECTION, values, max_size=3),)),
    "worker options": (
        lambda options: read_worker_options("dask_cuda.CUDAWorker", options),
        (st.dictionaries(st.one_of(WORKER_OPTIONS, texts), values, max_size=3),),
    ),
    "JSON with many names": (
        read_many,
        (st.dictionaries(texts, st.integers(), min_size=1, max_size=3), st.integers(1, 100)),
    ),
    "names of hosts": (lambda text: fold_names([text, f"{text}1", f"{text}2"]), (texts,)),
    "program": (
        lambda kind, text: Program.of([*filter(None, [kind]), text]).check(("run", "check")),
        (st.sampled_from(["", "-m", "-c"]), variables("my.py", "package.module")),
    ),
    "class of workers": (import_worker_class, (near("distributed.Nanny", "dask_cuda.CUDAWorker"),)),
}


@pytest.mark.parametrize("reader", READERS)
@fuzz
@given(data=st.data())
def test_readers_refuse_or_accept_any_input_soon(reader: str, data: st.DataObject) -> None:
    read, inputs = READERS[reader]
    soon(read, *map(data.draw, inputs))


@fuzz
@given(values)
def test_device_memory(value: Any) -> None:
    found = soon(device_sizes, {"rmm_pool_size": value}, worker_plan("0-0", "GPU-x", device_memory=1 << 36))
    assert found is None or all(0 <= size <= 1 << 36 for size in found.values())


FLAGS = sorted({flag for option in OPTIONS.values() for name in option.flags for flag in name.split("/")})


@fuzz
@given(st.lists(st.one_of(variables("my.py"), st.sampled_from(FLAGS)), max_size=5))
def test_command_lines(words: list[str]) -> None:
    def read() -> None:
        given = parse_run(words)
        program = given.pop("program")
        split_run(given, program)
        read_texts(given)

    soon(read, errors=(DaskGpuMpiError, click.ClickException, click.exceptions.Exit))


@fuzz
@given(
    st.dictionaries(
        st.sampled_from([*JOB_OPTIONS, "modules", "directives"]),
        st.one_of(variables("1"), st.sampled_from(["1", "01:00:00"])),
    ),
    variables("a"),
)
def test_job_scripts(given: dict[str, str], argument: str) -> None:
    texts = {"nodes": "1", "gpus_per_node": "1", "time": "01:00:00"} | given | {"shared": None}
    lists = {name: (texts.pop(name),) for name in ("modules", "directives") if name in texts}
    script = soon(lambda: render(request("slurm", (__file__, argument), texts | lists)))
    assert script is None or f"\nprogram=({__file__} " in script


@fuzz
@given(st.one_of(values.map(json.dumps), texts, st.lists(values, min_size=2, max_size=2).map(json.dumps)))
def test_records_of_the_environment(text: str) -> None:
    record = soon(_record, {BEFORE: text})
    if record is not None:
        environ = {BEFORE: text, "DASK_CONFIG": record[0]}
        _restore(environ, *record)
        assert BEFORE not in environ or BEFORE in record[1]


credentials = st.one_of(values, st.fixed_dictionaries({"config": values}))
files = st.fixed_dictionaries({"address": st.one_of(texts, values)}, optional={CREDENTIALS_KEY: credentials})


@fuzz
@given(st.one_of(texts, values.map(json.dumps), files.map(json.dumps)))
def test_scheduler_files(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = Path(tmp_path_factory.getbasetemp(), "fuzz.json")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    soon(read_scheduler_file, path)
