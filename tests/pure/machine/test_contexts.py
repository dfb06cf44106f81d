"""Contexts that a process has made, found without making one: with an emulated driver, in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dask_gpu_mpi.machine.nvidia import own_contexts
from support.mocks.gpus import LOG_VARIABLE, compile_cuda, read_log

STAGES = """
import ctypes, json
from dask_gpu_mpi.machine.nvidia import own_contexts

def loaded():
    return "libcuda" in open("/proc/self/maps").read()

told = [(own_contexts(), loaded())]
cuda = ctypes.CDLL("libcuda.so.1")
told.append((own_contexts(), loaded()))
cuda.cuInit(0)
told.append((own_contexts(), loaded()))
for device in (1, 3):
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), device)
told.append((own_contexts(), loaded()))
print(json.dumps(told))
"""


@pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler")
def test_what_is_there_is_found_and_nothing_is_made(tmp_path: Path) -> None:
    log = tmp_path / "log"
    libdir = compile_cuda(tmp_path / "lib")
    environ = {**os.environ, "LD_LIBRARY_PATH": str(libdir), "EMULATED_CUDA": "4", LOG_VARIABLE: str(log)}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        [sys.executable, "-c", STAGES], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    one, three = (
        f"device {n}, GPU-{f'{n:02x}' * 4}-{'-'.join([f'{n:02x}' * 2] * 3)}-{f'{n:02x}' * 6}" for n in (1, 3)
    )
    assert json.loads(done.stdout) == [[[], False], [[], True], [[], True], [[one, three], True]]
    # what the process itself asked for, and no more
    assert [function for _, function in read_log(log)] == ["cuInit", *["cuDevicePrimaryCtxRetain"] * 2]


def test_other_files_are_no_driver(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    assert own_contexts(maps) == ()
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libcuda.so.1 (deleted)\n"
        "7f00-7f01 r-xp 00000000 08:01 1 /home/me/libcuda.so.1.d/data\n"
        f"7f00-7f01 r-xp 00000000 08:01 1 {tmp_path}/libcuda.so.1\n"
    )
    assert own_contexts(maps) == ()
