"""Which class a worker has, and which options that accepts, held against dask-cuda's and distributed's own sources."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed
import pytest
from distributed.nanny import Nanny
from distributed.worker import Worker

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.workers.worker_options import (
    TAKEN,
    accepted_options,
    follow_cudf_spill,
    import_worker_class,
    is_dasks,
    options_for,
    read_worker_options,
    tasks_run_in_agent,
    worker_class_for,
)

cuda_worker = pytest.importorskip("dask_cuda.cuda_worker", exc_type=ImportError)
CUDAWorker = cuda_worker.CUDAWorker
CLASSES = [CUDAWorker, Nanny, Worker]


class Picky:
    __await__ = Nanny.__await__

    def __init__(self, one: int, *, two: int = 2, nthreads: int = 1) -> None: ...


class Open:
    __await__ = Nanny.__await__

    def __init__(self, **anything: Any) -> None: ...


class Mine(Nanny):
    def __init__(self, *args: Any, mine: int = 1, **kwargs: Any) -> None: ...


class Narrow(Nanny):
    def __init__(self, scheduler_ip: str, mine: int = 1) -> None: ...


class MyCUDAWorker(CUDAWorker):  # type: ignore[misc]
    """No __init__ of its own."""


def test_import_worker_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dgm_broken.py").write_text("raise RuntimeError('two\\nlines')")
    (tmp_path / "dgm_lacking.py").write_text("import dgm_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_worker_class("distributed.Nanny") is distributed.Nanny
    assert import_worker_class(Nanny) is Nanny
    with pytest.raises(OptionError, match="'dict'> is not a class of workers"):
        import_worker_class(dict)
    for path, said in {
        "distributed.Nany": "did you mean 'distributed.Nanny'?",
        "distribute.Nanny": "there is no module 'distribute'; did you mean 'distributed.Nanny'?",
        "distributed.wait": "is not a class of workers (expected one whose instances can be awaited, such as distributed.Nanny)",
        "decimal.Decimal": "is not a class of workers",
        "distributed.nope.Nanny": "no module 'distributed.nope'",
        "dgm_lacking_.Worker": "there is no module 'dgm_lacking_' (expected the path of an importable class, ",
        "distributed.qqqqqq": "has no class 'qqqqqq'",
        "dgm_broken.Worker": "RuntimeError: two lines",
        "dgm_lacking.Worker": "importing 'dgm_lacking' fails: ModuleNotFoundError: No module named 'dgm_not_there'",
        "Whatever": "is not a dotted path of a class (expected ",
    }.items():
        with pytest.raises(OptionError, match=rf"\A[^\n]*{re.escape(said)}[^\n]*\Z"):
            import_worker_class(path)
    assert "dgm_broken" not in sys.modules


def test_gpu_workers_without_dask_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask_cuda", None)
    for cls in ("auto", "dask_cuda.CUDAWorker"):
        with pytest.raises(OptionError, match="not installed.* Fix: pip install .*distributed.Nanny"):
            worker_class_for("gpu", cls)
    assert worker_class_for("cpu", "auto") is distributed.Nanny
    # an unknown option is not about GPUs
    assert refused("auto", memory_limt=1).endswith(
        "Nanny has no option 'memory_limt'; did you mean 'memory_limit'? (expected an option of Nanny; those of CUDAWorker need "
        "dask-cuda)"
    )
    # it is installed, and broken
    (tmp_path / "dask_cuda.py").write_text("import dgm_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dask_cuda")
    with pytest.raises(OptionError, match=r"(?s)'dgm_not_there'\. Fix: pip install"):
        import_worker_class("dask_cuda.CUDAWorker")


def test_the_class_of_each_kind_of_worker() -> None:
    for cls in ("auto", "dask_cuda.CUDAWorker", CUDAWorker, MyCUDAWorker):
        assert worker_class_for("cpu", cls) is Nanny
        assert issubclass(worker_class_for("gpu", cls), CUDAWorker)
    assert worker_class_for("cpu", "distributed.Worker") is Worker
    assert worker_class_for("gpu", "distributed.Nanny") is Nanny
    assert [tasks_run_in_agent(cls) for cls in ("distributed.Worker", Open)] == [True] * 2
    for cls in ("auto", "distributed.Nanny", Mine, "dask_cuda.CUDAWorker"):
        assert not tasks_run_in_agent(cls)
    stranger = type("Nanny", (), {})  # somebody else's, of the same name
    assert [is_dasks(cls) for cls in (*CLASSES, Mine, stranger)] == [True, True, True, False, False]


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


def test_an_option_that_the_first_class_takes_is_not_taken_by_it() -> None:
    """A class made from CUDAWorker may take ``env`` and do with it what it wants."""

    class WithEnv(CUDAWorker):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, env: dict[str, str] | None = None, **kwargs: Any) -> None: ...

    accepted = accepted_options(WithEnv)
    assert accepted is not None
    assert "env" in accepted
    assert "data" not in accepted


def refused(cls: type | str, **options: Any) -> str:
    with pytest.raises(OptionError, match=r"\Aworker_options: [^\n]*\Z") as caught:
        read_worker_options(cls, options)
    return str(caught.value)


@pytest.mark.parametrize("cls", CLASSES)
def test_options_that_every_class_refuses(cls: type) -> None:
    assert f"{cls.__name__} has no option 'nthread'; did you mean 'nthreads'?" in refused(cls, nthread=1)
    assert "has no option" in refused(cls, zzzzz=1)
    assert "did you mean 'lifetime_restart'?" in refused(cls, lifetime_restarts=True)
    ours = ("name", "scheduler", "scheduler_ip", "scheduler_port", "scheduler_file", "security", "protocol")
    for name in ours:
        fix = f"{name!r} is set by dask_gpu_mpi. Fix: use the option {name.partition('_')[0]}"
        assert fix in refused(cls, **{name: "x"})


@pytest.mark.parametrize(
    ("cls", "accepted", "unknown", "says"),
    [
        (CUDAWorker, {}, "data", "CUDAWorker sets 'data' itself. Fix: leave it out"),
        (Picky, {"one": 1, "two": "anything", "nthreads": 2}, "too", "Picky has no option 'too'; did you mean 'two'?"),
        (Mine, {"mine": 1, "lifetime": "1h"}, "mines", "did you mean 'mine'"),
        (Narrow, {}, "lifetime", "has no option 'lifetime'"),
        (MyCUDAWorker, {"rmm_pool_size": 0.5}, "rmm_asink", "did you mean 'rmm_async'"),
        ("auto", {"rmm_pool_size": "1GB", "env": {"A": "1"}}, "rmm_pool_sise", "did you mean 'rmm_pool_size'"),
        ("distributed.Nanny", {}, "rmm_pool_size", "Nanny has no option 'rmm_pool_size'"),
        # signatures that can't be read
        (Open, {"whatever": 1, "nthreads": "many"}, "", ""),
        (type("Heir", (Open,), {}), {"whatever": 1, "nthreads": "many"}, "", ""),
        (type("Written", (dict,), {"__await__": Nanny.__await__}), {"whatever": 1}, "", ""),
    ],
)  # fmt: skip
def test_options_of_a_class(cls: type | str, accepted: dict[str, Any], unknown: str, says: str) -> None:
    read_worker_options(cls, accepted)
    assert not unknown or says in refused(cls, **{unknown: {}})


def test_options_of_the_class_below_a_nanny() -> None:
    class Deep(Worker):
        def __init__(self, *args: Any, deep: int = 1, **kwargs: Any) -> None: ...

    for cls in (Nanny, CUDAWorker):
        read_worker_options(cls, {"worker_class": Deep, "deep": 2, "lifetime": "1h", "env": {"A": "1"}})
        assert "deep" in refused(cls, deep=2)
    with pytest.raises(OptionError, match="no class 'Workr'; did you mean 'distributed.Worker'"):
        read_worker_options(Nanny, {"worker_class": "distributed.Workr"})


@pytest.mark.parametrize("cls", CLASSES)
def test_values_are_for_the_class_but_for_a_limit_that_kills_each_process(cls: type) -> None:
    options = {"nthreads": "many", "lifetime": 0, "resources": 3}
    assert read_worker_options(cls, options) == options
    for value in ("64", 64, "4 kB"):
        assert "expected 1 MiB or more" in refused(cls, memory_limit=value)
    for port in ("70000", "65535:65536"):
        assert f"port: invalid value {port.rpartition(':')[2]} " in refused(cls, port=port)
    for port in (-1, 99999):
        assert f"port: invalid value {port} (int; expected an integer from 0 to 65535" in refused(
            cls, port=port
        )
    for amount in ("many", -1):
        assert f"invalid amount {amount!r} of GPU (expected a number of 0 or more" in refused(
            cls, resources={"GPU": amount}
        )
    assert "memory_limit: invalid value '4XB' (expected bytes" in refused(cls, memory_limit="4XB")
    for right in (None, 0, 0.5, 1, "auto", "2 MiB"):
        read_worker_options(cls, {"memory_limit": right})


def test_the_form_that_cudaworker_reads() -> None:
    options = {
        "preload": "a.py", "resources": {"FOO": 1, "BAR": 0.5}, "pre_import": "cudf, cupy",
        "rmm_allocator_external_lib_list": "cupy, torch", "rmm_pool_size": "1GB", "worker_class": "distributed.Worker",
    }  # fmt: skip
    before = json.dumps(options)
    for cls in (CUDAWorker, MyCUDAWorker):
        assert options_for(cls, read_worker_options(cls, options)) == {
            "preload": ["a.py"], "resources": "FOO=1 BAR=0.5", "pre_import": ["cudf", "cupy"],
            "rmm_allocator_external_lib_list": ["cupy", "torch"], "rmm_pool_size": "1GB", "worker_class": Worker,
        }  # fmt: skip
    assert json.dumps(options) == before
    for same in ({"preload": ["a"], "resources": "A=1", "pre_import": None}, {"preload": None}):
        assert options_for(CUDAWorker, same) == same
    same = {"preload": "a", "resources": "A=1"}
    assert all(options_for(other, same) == same for other in (Nanny, Worker, Open))


@pytest.mark.parametrize(("spills", "loaded"), [(False, True), (True, True), (True, False)])
def test_a_process_that_unpickles_data_of_cudf_spills_as_the_workers_do(
    spills: bool, loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    monkeypatch.setenv("CUDF_SPILL", "")  # given back afterwards
    monkeypatch.delenv("CUDF_SPILL")
    cudf = SimpleNamespace(set_option=lambda *given: found.append(given)) if loaded else None
    monkeypatch.setitem(sys.modules, "cudf", cudf)  # type: ignore[arg-type]
    follow_cudf_spill({"enable_cudf_spill": True} if spills else {})
    assert os.environ.get("CUDF_SPILL") == ("on" if spills else None)
    assert found == [("spill", True)] * (spills and loaded)
