"""Which class a worker has."""

from __future__ import annotations

import sys
from pathlib import Path

import distributed
import pytest

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.workers.worker_class import (
    import_worker_class,
    is_cuda_worker,
    is_dasks,
    tasks_run_in_agent,
    worker_class_for,
)


def test_import_worker_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dgm_broken.py").write_text("raise RuntimeError('two\\nlines')")
    (tmp_path / "dgm_lacking.py").write_text("import dgm_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_worker_class("distributed.Nanny") is distributed.Nanny
    assert import_worker_class(dict) is dict
    for path, said in {
        "distributed.Nany": "did you mean 'distributed.Nanny'?",
        "distribute.Nanny": "there is no module 'distribute'; did you mean 'distributed.Nanny'?",
        "Nanny": "did you mean 'distributed.Nanny'?",
        "cudaworker": "did you mean 'dask_cuda.CUDAWorker'?",
        "distributed.wait": "is a function (expected a class)",
        "distributed.nope.Nanny": "no module 'distributed.nope'",
        "dgm_lacking_.Worker": "there is no module 'dgm_lacking_' (expected a module of this environment, or on PYTHONPATH)",
        "distributed.qqqqqq": "has no class 'qqqqqq'",
        "dgm_broken.Worker": "RuntimeError: two lines",
        "dgm_lacking.Worker": "the module 'dgm_not_there' is missing",
        "Whatever": "is not a dotted path of a class (expected package.module.Class)",
    }.items():
        with pytest.raises(OptionError) as caught:
            import_worker_class(path)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    assert "dgm_broken" not in sys.modules


@pytest.mark.parametrize("cls", ["auto", "dask_cuda.CUDAWorker"])
def test_gpu_workers_without_dask_cuda(cls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask_cuda", None)
    with pytest.raises(OptionError) as caught:
        worker_class_for("gpu", cls)
    for part in (
        "GPU workers need dask-cuda",
        "not installed",
        "Fix: pip install 'dask-gpu-mpi[cuda12]'",
        "distributed.Nanny",
    ):
        assert part in str(caught.value)
    if cls == "auto":
        assert worker_class_for("cpu", cls) is distributed.Nanny


def test_the_fix_where_dask_cuda_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dask_cuda.py").write_text("import dgm_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "dask_cuda", raising=False)
    with pytest.raises(OptionError, match=r"(?s)'dgm_not_there' is missing\. Fix: pip install"):
        import_worker_class("dask_cuda.CUDAWorker")


def test_cpu_workers_beside_gpu_workers_are_nannies() -> None:
    pytest.importorskip("dask_cuda.cuda_worker", exc_type=ImportError)
    import dask_cuda
    import distributed

    class Mine(dask_cuda.CUDAWorker):  # type: ignore[misc]
        pass

    for cls in ("auto", "dask_cuda.CUDAWorker", dask_cuda.CUDAWorker, Mine):
        assert worker_class_for("cpu", cls) is distributed.Nanny
        assert issubclass(worker_class_for("gpu", cls), dask_cuda.CUDAWorker)
    assert worker_class_for("cpu", "distributed.Worker") is distributed.Worker


def test_auto_is_cudaworker_on_a_gpu_and_else_a_nanny() -> None:
    assert worker_class_for("cpu", "auto") is distributed.Nanny
    assert worker_class_for("gpu", "distributed.Nanny") is distributed.Nanny


def test_whose_class_it_is() -> None:
    class Nanny:
        """Somebody else's, of the same name."""

    class Mine(distributed.Nanny):
        pass

    assert [is_dasks(cls) for cls in (distributed.Nanny, distributed.Worker, Mine, Nanny, dict)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert not is_cuda_worker(distributed.Nanny)


def test_where_tasks_run() -> None:
    class Mine(distributed.Nanny):
        pass

    class Foreign:
        pass

    assert [tasks_run_in_agent(cls) for cls in ("auto", "distributed.Nanny", Mine)] == [False] * 3
    assert [tasks_run_in_agent(cls) for cls in ("distributed.Worker", Foreign)] == [True] * 2
    pytest.importorskip("dask_cuda.cuda_worker", exc_type=ImportError)
    assert not tasks_run_in_agent("dask_cuda.CUDAWorker")
