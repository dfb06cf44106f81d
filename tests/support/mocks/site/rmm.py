"""An emulated RMM, for jobs that have this folder on PYTHONPATH: it writes down what dask-cuda's RMMSetup asks of it."""

from types import SimpleNamespace
from typing import Any

calls: list[tuple[str, dict[str, Any]]] = []


def _note(name: str) -> Any:
    def call(*_: Any, **options: Any) -> None:
        calls.append((name, options))

    return call


reinitialize = _note("reinitialize")
enable_logging = _note("enable_logging")
mr = SimpleNamespace(
    PoolMemoryResource=type("PoolMemoryResource", (), {}),
    CudaAsyncMemoryResource=_note("CudaAsyncMemoryResource"),
    LimitingResourceAdaptor=_note("LimitingResourceAdaptor"),
    TrackingResourceAdaptor=_note("TrackingResourceAdaptor"),
    get_current_device_resource=lambda: None,
    set_current_device_resource=lambda resource: None,
)
