"""What CUDAWorker, Nanny and Worker take, held against their own sources."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import pytest
from distributed.nanny import Nanny
from distributed.worker import Worker

from dask_gpu_mpi.workers.worker_class import TAKEN, accepted_options

cuda_worker = pytest.importorskip("dask_cuda.cuda_worker", exc_type=ImportError)
CUDAWorker = cuda_worker.CUDAWorker
CLASSES = [CUDAWorker, Nanny, Worker]


def calls_of(cls: type, function: str) -> set[str]:
    """Names of the keywords with which a class's __init__ calls the next one."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))  # type: ignore[misc]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == function]
    assert len(calls) == 1
    return {keyword.arg for keyword in calls[0].keywords if keyword.arg}


def test_what_a_class_says_itself_is_what_its_source_says() -> None:
    own = set(inspect.signature(CUDAWorker.__init__).parameters)
    # the scheduler is the first argument, without a name; dask-cuda 25.10 sets listen_address as a default, which may be passed
    called = calls_of(CUDAWorker, "Nanny") - own | {"scheduler_ip"}
    assert called - {"listen_address"} == TAKEN["CUDAWorker"] | {"preload_argv", "env"} - own
    own = set(inspect.signature(Worker.__init__).parameters)
    assert calls_of(Worker, "ServerNode.__init__") - own == TAKEN["Worker"]


@pytest.mark.parametrize("cls", CLASSES)
def test_names_are_followed_along_the_keywords(cls: type) -> None:
    accepted = accepted_options(cls)
    assert accepted is not None
    assert {"nthreads", "lifetime", "heartbeat_interval", "connection_limit", "resources"} <= accepted
    assert ("rmm_pool_size" in accepted) == (cls is CUDAWorker)
    assert ("preload_nanny" in accepted) == (cls is not Worker)
    assert not accepted & TAKEN[cls.__name__]
    assert "self" not in accepted
    assert "state" not in accepted  # BaseWorker's, which Worker does not call


def test_a_class_that_takes_everything() -> None:
    class Open:
        def __init__(self, one: int, **anything: Any) -> None: ...

    assert accepted_options(Open) is None
    assert accepted_options(type("Heir", (Open,), {})) is None
    assert accepted_options(dict) is None  # written in C: its signature can't be read


def test_an_option_that_the_first_class_takes_is_not_taken_by_it() -> None:
    """A class made from CUDAWorker may take ``env`` and do with it what it wants."""

    class Mine(CUDAWorker):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, env: dict[str, str] | None = None, **kwargs: Any) -> None: ...

    accepted = accepted_options(Mine)
    assert accepted is not None
    assert "env" in accepted
    assert "data" not in accepted
