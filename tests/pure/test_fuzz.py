"""Whatever a text from outside is, it gets an answer or one clear error, soon.

`DASK_GPU_MPI_FUZZ=100000` sets how many inputs each reader gets; 150 without it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dask_gpu_mpi.base.hostlist import fold_names
from dask_gpu_mpi.base.sizes import parse_bytes, parse_memory_limit
from dask_gpu_mpi.errors import DaskGpuMpiError
from dask_gpu_mpi.machine.cgroups import parse_cpu_list
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.mounts import parse_mountinfo
from dask_gpu_mpi.machine.visible_devices import parse_visible
from dask_gpu_mpi.mpi.batch import end_time
from dask_gpu_mpi.mpi.launchers import detect
from dask_gpu_mpi.network.scheduler_file import CREDENTIALS_KEY, read_scheduler_file
from dask_gpu_mpi.options.resolve import resolve
from dask_gpu_mpi.options.table import OPTIONS
from dask_gpu_mpi.plan.device_memory import device_bytes
from dask_gpu_mpi.workers.worker_options import check_options_of

fuzz = settings(
    max_examples=int(os.environ.get("DASK_GPU_MPI_FUZZ", "150")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

#: What readers stumble over: other scripts' digits, what only looks like a number, control characters, paths.
ODD = (
    "", "²", "٣", "1_000", "1e400", "1e400GB", "nan", "inf", "-0", "+1", "0x10", "~nouser/x", "a\0b", "\ud800", "\u202e", "../..",
    "/", "GPU-", "MIG-", "0,0", "-1", "h[1-3]", "tcp://", "tcp://h:1", "[::1]:1", "true", "null", "None", "auto", ",", ":", "=",
    "A=1", "A=1=2", "01:02:03", "1:2:3:4", " 1 ",
)  # fmt: skip
#: What is repeated, how often, and what comes behind it.
LONG = (
    ("1", 5000, ""),
    ("1", 30_000, "x"),
    ("9", 400, "GB"),
    ("a", 30_000, ""),
    ("[", 100_000, ""),
    ('{"a":', 5000, ""),
)
texts = st.one_of(
    st.sampled_from(ODD),
    st.sampled_from(LONG).map(lambda long: long[0] * long[1] + long[2]),
    st.text(max_size=40),
    st.text(alphabet="0123456789.,:-+eEkKMGiBTP[]{}\"'=/ \n~$GPU", max_size=40),
    st.lists(st.sampled_from(ODD), min_size=2, max_size=3).map("".join),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
DEVICES = [Gpu(uuid=f"GPU-{letter}0", index=i, name="A100", memory=1 << 36) for i, letter in enumerate("abc")]


def soon(
    read: Callable[..., Any], *given: Any, errors: tuple[type[Exception], ...] = (DaskGpuMpiError,)
) -> Any:
    """The answer, or None with one of `errors`; minutes would be a reader that is quadratic in the length."""
    began = time.process_time()
    try:
        return read(*given)
    except errors:
        return None
    finally:
        assert time.process_time() - began < 5


@fuzz
@given(texts)
def test_sizes(text: str) -> None:
    found = soon(parse_bytes, text, errors=(ValueError,))
    assert found is None or (isinstance(found, int) and found >= 0)


@fuzz
@given(st.one_of(texts, st.integers(), st.floats(), st.none()))
def test_memory_limits(limit: Any) -> None:
    soon(parse_memory_limit, limit)


@fuzz
@given(st.one_of(texts, st.integers(), st.floats(), st.none()))
def test_device_memory(value: Any) -> None:
    found = soon(device_bytes, value, 1 << 36, errors=(ValueError, TypeError))
    assert found is None or isinstance(found, int)


@fuzz
@given(st.sampled_from(sorted(OPTIONS)), texts)
def test_options_of_the_command_line(name: str, text: str) -> None:
    soon(lambda: resolve({name: text}, source="command line"))


@pytest.mark.filterwarnings("ignore:keyword nanny. deprecated:DeprecationWarning")
@fuzz
@given(st.sampled_from(sorted(OPTIONS)), values)
def test_options_of_a_program(name: str, value: Any) -> None:
    soon(lambda: resolve({name: value}, source="keyword"))


@fuzz
@given(
    st.dictionaries(
        st.one_of(st.sampled_from(["resources", "rmm_pool_size", "env", "nthreads"]), texts),
        values,
        max_size=3,
    )
)
def test_worker_options(options: dict[str, Any]) -> None:
    soon(lambda: check_options_of("dask_cuda.CUDAWorker", options, where="worker_options"))


@fuzz
@given(texts)
def test_visible_devices(text: str) -> None:
    soon(parse_visible, text, DEVICES)


@fuzz
@given(texts)
def test_names_of_hosts(text: str) -> None:
    assert isinstance(soon(fold_names, [text, f"{text}1", f"{text}2"]), str)


@fuzz
@given(
    st.sampled_from(
        ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "SLURM_PROCID", "SLURM_STEP_ID"]
    ),
    texts,
)
def test_variables_of_launchers(name: str, text: str) -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"} if name.startswith("OMPI") else {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "PMI_RANK": "0"
    }  # fmt: skip
    soon(detect, environ | {name: text})


@fuzz
@given(texts, st.one_of(texts, values.map(json.dumps)))
def test_end_of_the_job(text: str, answer: str) -> None:
    for environ in ({"SLURM_JOB_END_TIME": text}, {"PBS_JOBID": text or "7"}, {"FLUX_JOB_ID": text or "f"}):
        found = soon(lambda environ=environ: end_time(environ, now=lambda: 0.0, ask=lambda _: answer))
        assert found is None or 0 <= found < float("inf")


@fuzz
@given(texts, texts)
def test_end_of_a_pbs_job(limit: str, used: str) -> None:
    job = {"Resource_List": {"walltime": limit}, "resources_used": {"walltime": used}}
    answer = json.dumps({"Jobs": {"7": job}})
    found = soon(lambda: end_time({"PBS_JOBID": "7"}, now=lambda: 0.0, ask=lambda _: answer))
    assert found is None or abs(found) < float("inf")


@fuzz
@given(texts)
def test_lists_of_cores_and_mounts(text: str) -> None:
    # the kernel's, whose numbers are small
    if len(text) < 6:
        soon(parse_cpu_list, text, errors=(ValueError,))
    soon(lambda: list(parse_mountinfo(text)))


def as_json(value: Any) -> str:
    return json.dumps(value)


credentials = st.one_of(values, st.fixed_dictionaries({"config": values}))
files = st.fixed_dictionaries({"address": st.one_of(texts, values)}, optional={CREDENTIALS_KEY: credentials})


@fuzz
@given(st.one_of(texts, values.map(as_json), files.map(as_json)))
def test_scheduler_files(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = Path(tmp_path_factory.getbasetemp(), "fuzz.json")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    soon(read_scheduler_file, path)
