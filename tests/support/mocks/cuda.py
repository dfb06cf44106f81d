"""The Python side of the simulated CUDA driver: compile it, and read who made contexts. What it can do is told in ``cuda.c``."""

from __future__ import annotations

from pathlib import Path

from support.mocks.nvml import compile_library

__all__ = ["LOG_VARIABLE", "compile_cuda", "read_log"]

LOG_VARIABLE = "SIMULATED_CUDA_LOG"
"""The file to which every process adds what it does with CUDA."""

SOURCE = Path(__file__).with_name("cuda.c")


def compile_cuda(directory: Path) -> Path:
    """Compile ``libcuda.so.1`` into a directory, which is returned, for ``LD_LIBRARY_PATH``."""
    return compile_library(SOURCE, directory / "libcuda.so.1", "-ldl")


def read_log(file: Path) -> list[tuple[int, str]]:
    """The (pid, function) of every call that initialised CUDA or made a context."""
    if not file.exists():
        return []
    return [(int(pid), function) for pid, function in map(str.split, file.read_text().splitlines())]
