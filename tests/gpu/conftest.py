"""The GPUs of this machine, asked of NVML, which makes no context."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Gpus:
    """The GPUs here."""

    #: In the order of NVML.
    uuids: tuple[str, ...]
    #: Bytes of each.
    memory: tuple[int, ...]

    def contexts(self) -> list[int]:
        """How many processes have a context, on each GPU."""
        import pynvml

        handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in self.uuids]
        return [len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) for handle in handles]

    def check_idle(self, seconds: float = 10.0) -> None:
        """Wait until no process has a context any more."""
        limit = time.monotonic() + seconds
        while any(there := self.contexts()):
            assert time.monotonic() < limit, (
                f"processes with a context, of each GPU: {there} after {seconds} s"
            )
            time.sleep(0.2)


@pytest.fixture(scope="session")
def gpus() -> Iterator[Gpus]:
    """Every GPU of this machine; without one the test is skipped: tests/mpi/test_gpus.py has emulated ones."""
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(
            f"no GPU here ({error}); tests/mpi/test_gpus.py and tests/hosts cover the same with emulated ones"
        )
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    yield Gpus(
        tuple(pynvml.nvmlDeviceGetUUID(handle) for handle in handles),
        tuple(int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles),
    )
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them want a GPU, and a CUDA library takes its time to load."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(240))
