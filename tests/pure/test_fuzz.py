"""Whatever a text from outside is, it gets an answer or one clear error, soon.

Options, files, and the output of batch systems, launchers and programs. How many inputs: `fuzzing`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import dask.config
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpu_mpi.base.text import parse_bytes, parse_memory_limit
from dask_gpu_mpi.cli.jobscript import JOB_OPTIONS, request
from dask_gpu_mpi.cli.options import read_texts, split_run
from dask_gpu_mpi.errors import DaskGpuMpiError
from dask_gpu_mpi.job.child_processes import BEFORE, _record, _restore
from dask_gpu_mpi.job.program import Program
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.nvidia import parse_visible
from dask_gpu_mpi.machine.scratch import filesystem_of
from dask_gpu_mpi.mpi.library import SETTING, cross_check, is_mpich_before_5
from dask_gpu_mpi.network.scheduler_file import CREDENTIALS_KEY, read_scheduler_file
from dask_gpu_mpi.options.convert import convert
from dask_gpu_mpi.options.model import OPTIONS
from dask_gpu_mpi.options.resolve import resolve
from dask_gpu_mpi.sites.batch import allocated_hosts, end_time, find_allocation, gpus_on_node, parse_hosts
from dask_gpu_mpi.sites.command import Request, decide, launch_environment
from dask_gpu_mpi.sites.jobscript import render
from dask_gpu_mpi.sites.launchers import (
    BY_COMMAND,
    LAUNCHERS,
    MPIRUNS,
    Launcher,
    all_on_one_host,
    detect,
    family_of,
    first_on_host,
    forwarded,
    library_name,
    speaks,
)
from dask_gpu_mpi.sites.pbs import resources
from dask_gpu_mpi.sites.slurm import earliest
from dask_gpu_mpi.sites.starter import Starter, parse_answer
from dask_gpu_mpi.workers.worker_options import device_sizes, read_worker_options
from support.mocks.fuzzing import fuzz, near, soon, texts, values, variables
from support.mocks.inputs import parse_run, worker_plan

NAMES = st.sampled_from(sorted(OPTIONS))
WORKER_OPTIONS = st.sampled_from(["resources", "rmm_pool_size", "env", "nthreads"])
SECTION = st.sampled_from([*JOB_OPTIONS, "modules", "directives", "x"])
JOB = {"nodes": "1", "gpus_per_node": "1", "time": "01:00:00"}
DEVICES = [Gpu(uuid=f"GPU-{letter}0", index=i, name="A100", memory=1 << 36) for i, letter in enumerate("abc")]
#: Variables that a launcher sets, of every row of the table.
LAUNCHER_VARIABLES = sorted(
    {
        name
        for row in LAUNCHERS
        for name in (row.mark, row.rank, row.local_rank, row.local_size, *row.size)
        if name
    }
    | {"SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_NODES"}
)
VERSIONS = (
    "Open MPI v5.0.11, package: x",
    "MPICH Version:      4.0.2\nMPICH Release",
    "mpirun (Open MPI) 5.0.11",
    "Intel(R) MPI",
)
QSTAT = "Job Id: 4\n    Resource_List.select = 2:ncpus=64\n    Resource_List.walltime = 01:00:00\n"
DATES = ("2026-08-01T12:00:00Z\n2026-08-01T12:00:00", "0001-01-01", "NONE", "9999-12-31T23:59:59")


def read_section(section: dict[str, Any]) -> None:
    with dask.config.set({"gpu-mpi.jobscript": section}):
        request("slurm", (__file__,), JOB)


def read_many(options: dict[str, int], times: int) -> None:
    text = json.dumps(options)[1:-1]
    resolve({"worker_options": "{" + ",".join([text] * times) + "}"}, source="command line")


def read_launcher(environ: Mapping[str, str], library: str) -> None:
    for ask in (detect, all_on_one_host, first_on_host, speaks):
        ask(environ)
    cross_check(environ, 1, 0, "h", library=library)


def anything(found: Any) -> bool:
    return True


class Reader(NamedTuple):
    """A reader, what it is given, and what its answer is."""

    read: Callable[..., Any]
    inputs: tuple[st.SearchStrategy[Any], ...]
    fits: Callable[[Any], bool] = anything


READERS = {
    "size": Reader(
        lambda text: soon(parse_bytes, text, errors=(ValueError,)),
        (texts,),
        lambda found: found is None or found >= 0,
    ),
    "memory limit": Reader(parse_memory_limit, (st.one_of(texts, st.integers(), st.floats(), st.none()),)),
    "command line": Reader(lambda name, text: resolve({name: text}, source="command line"), (NAMES, texts)),
    "keyword": Reader(lambda name, value: resolve({name: value}, source="keyword"), (NAMES, values)),
    "configuration": Reader(
        lambda name, value: convert(OPTIONS[name], value, "gpu-mpi", "configuration"), (NAMES, values)
    ),
    "configuration of job scripts": Reader(read_section, (st.dictionaries(SECTION, values, max_size=3),)),
    "worker options": Reader(
        lambda options: read_worker_options("dask_cuda.CUDAWorker", options),
        (st.dictionaries(st.one_of(WORKER_OPTIONS, texts), values, max_size=3),),
    ),
    "device memory": Reader(
        lambda size: device_sizes({"rmm_pool_size": size}, worker_plan("0", "GPU-x", device_memory=1 << 36)),
        (values,),
        lambda found: all(0 <= size <= 1 << 36 for size in found.values()),
    ),
    "JSON with many names": Reader(
        read_many, (st.dictionaries(texts, st.integers(), min_size=1, max_size=3), st.integers(1, 100))
    ),
    "program": Reader(
        lambda kind, text: Program.of([*filter(None, [kind]), text]).check(("run", "check")),
        (st.sampled_from(["", "-m", "-c"]), variables("my.py", "package.module")),
    ),
    "environment of a rank": Reader(
        read_launcher,
        (
            st.dictionaries(st.sampled_from(LAUNCHER_VARIABLES), near("0", "1", "4", "1(x8)"), max_size=6),
            texts,
        ),
    ),
    "CUDA_VISIBLE_DEVICES": Reader(lambda text: parse_visible(text, DEVICES), (near("0,GPU-a"),)),
    "SLURM_GPUS_ON_NODE": Reader(
        lambda text: gpus_on_node({"SLURM_GPUS_ON_NODE": text})[0], (near("4"),), lambda found: found >= 0
    ),
    "hosts of the command line": Reader(parse_hosts, (near("h1,h2:2", "./h1"),)),
    "squeue": Reader(
        lambda text: earliest(text.split()), (near(*DATES),), lambda found: isinstance(found, str)
    ),
    "qstat": Reader(resources, (near(QSTAT),), lambda found: all(option.startswith("-") for option in found)),
    "mpi4py": Reader(
        parse_answer,
        (near('dask-gpu-mpi:["Open MPI v5.0.11", "/usr/lib/libmpi.so"]\n'),),
        lambda found: found is None or len(found) == 2,
    ),
    "mountinfo": Reader(
        lambda text: filesystem_of("/tmp/x", text),
        (near("30 23 0:26 / /tmp rw - ext4 /dev/sda rw\n"),),
        lambda found: all(isinstance(each, str) for each in found),
    ),
    "Open MPI's files": Reader(SETTING.findall, (near("btl = ^tcp\n# so\n--mca pml ucx\n"),)),
    "version of MPI": Reader(
        lambda text: (family_of(text), library_name(text), is_mpich_before_5(text)), (near(*VERSIONS),)
    ),
}


@pytest.mark.parametrize("reader", READERS)
@fuzz
@given(data=st.data())
def test_readers_refuse_or_accept_any_input_soon(reader: str, data: st.DataObject) -> None:
    read, inputs, fits = READERS[reader]
    found = soon(lambda *given: (read(*given),), *map(data.draw, inputs))
    assert found is None or fits(found[0])


def file_of(factory: pytest.TempPathFactory, text: str, name: str = "fuzz") -> Path:
    path = Path(factory.getbasetemp(), name)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


# -- the user's command lines and files

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
    texts = JOB | given | {"shared": None}
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
    soon(read_scheduler_file, file_of(tmp_path_factory, text))


# -- what the batch system has


@fuzz
@given(texts, st.one_of(texts, values.map(json.dumps)))
def test_end_of_the_job(text: str, answer: str) -> None:
    for environ in ({"SLURM_JOB_END_TIME": text}, {"PBS_JOBID": text or "7"}, {"FLUX_JOB_ID": text or "f"}):
        found = soon(lambda environ=environ: end_time(environ, now=lambda: 0.0, ask=lambda _: answer))
        assert found is None or 0 <= found < float("inf")


#: Variables of batch systems that `launch` reads.
BATCH_VARIABLES = (
    "SLURM_JOB_ID", "SLURM_HET_SIZE", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_JOB_ID", "SLURM_JOB_NUM_NODES_HET_GROUP_0", "PBS_NODEFILE", "PBS_NUM_PPN", "PBS_JOBID", "LSB_DJOB_HOSTFILE",
    "LSB_JOBID", "LSB_JOBINDEX", "FLUX_URI", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS",
    "CUDA_VISIBLE_DEVICES", "ENVIRONMENT", "DGM_LOGS", "DGM_SETUP", "DGM_SCRATCH",
)  # fmt: skip
STARTERS = [*BY_COMMAND.values(), *MPIRUNS]


@fuzz
@given(
    st.dictionaries(st.sampled_from(BATCH_VARIABLES), variables("1", "4", "a100:4,h100:2", "x"), max_size=6),
    near("n1\nn2\nn2\n"),
    near("2"),
    st.sampled_from(STARTERS),
    st.one_of(st.none(), st.integers(1, 1000)),
)
def test_allocations(
    tmp_path_factory: pytest.TempPathFactory,
    environ: dict[str, str],
    nodes: str,
    size: str,
    launcher: Launcher,
    ranks: int | None,
) -> None:
    file = str(file_of(tmp_path_factory, nodes))
    environ |= {name: file for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE") if name in environ}
    assert isinstance(soon(allocated_hosts, {"PBS_NODEFILE": file}), str | None)
    soon(parse_hosts, file)

    def commands() -> None:
        found = find_allocation(environ, ranks=ranks, ask=lambda _: size)
        assert found.nodes > 0 < found.ranks
        assert str(found)
        library, starter = "Open MPI v5", Starter(launcher, f"/bin/{launcher.kind}")
        launch_environment(environ, found, library, launcher, lambda _: size, root=True)
        forwarded(environ)
        wish = Request((), ("s.py",))
        launch = decide(wish, environ, found, library, starter, python="/bin/python", cwd="/")
        assert not any("\0" in word for word in launch.run)

    soon(commands)
