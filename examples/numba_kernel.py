"""A kernel of numba's on every GPU of the job: the longest Collatz sequence below a million, whose length is known.

    dask-gpu-mpi launch -n 2 examples/numba_kernel.py

Without GPUs the same function is compiled for the CPU. Exit code 1: a wrong answer, or a GPU that was not used.
"""

from __future__ import annotations

import sys

import numpy as np
from distributed import Client

LIMIT = 1_000_000
#: The number below a million with the longest sequence, and its steps, from Project Euler's problem 14.
KNOWN = (837_799, 524)


def steps_of(number: int) -> int:
    """Steps of the Collatz sequence from a number down to 1; compiled by numba for the GPU or the CPU."""
    steps = 0
    while number > 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


def longest(first: int, last: int, on_gpu: bool) -> tuple[int, int, str]:
    """The number from `first` to `last` - 1 with the longest sequence, its steps, and the device; runs on a worker."""
    numbers = np.arange(first, last, dtype=np.int64)
    if on_gpu:
        from numba import cuda

        device_function = cuda.jit(device=True)(steps_of)

        @cuda.jit
        def kernel(numbers, steps):  # type: ignore[no-untyped-def]
            i = cuda.grid(1)
            if i < numbers.size:
                steps[i] = device_function(numbers[i])

        on_device = cuda.device_array(numbers.shape, np.int64)
        kernel.forall(numbers.size)(cuda.to_device(numbers), on_device)
        steps = on_device.copy_to_host()
        device = str(cuda.current_context().device.uuid)
    else:
        from numba import vectorize

        steps = vectorize(["int64(int64)"])(steps_of)(numbers)
        device = "CPU"
    best = int(steps.argmax())
    return int(numbers[best]), int(steps[best]), device


def main() -> int:
    """One task for each worker that has a GPU, or else for each worker; return the exit code."""
    with Client() as client:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        with_gpu = [address for address, worker in workers.items() if worker["resources"].get("GPU")]
        chosen = with_gpu or list(workers)
        bounds = np.linspace(1, LIMIT, len(chosen) + 1).astype(int).tolist()
        tasks = [
            client.submit(longest, first, last, bool(with_gpu), workers=address)
            for first, last, address in zip(bounds[:-1], bounds[1:], chosen, strict=True)
        ]
        found = client.gather(tasks)
    for (number, steps, device), address in zip(found, chosen, strict=True):
        print(f"worker {workers[address]['name']} on {device}: {number} has {steps} steps")
    number, steps, _ = max(found, key=lambda answer: answer[1])
    devices = {device for _, _, device in found}
    if (number, steps) != KNOWN or (with_gpu and len(devices) != len(with_gpu)):
        print(f"WRONG: {number} with {steps} steps (expected {KNOWN}) on {devices}", file=sys.stderr)
        return 1
    print(f"right: {number} has the longest Collatz sequence below {LIMIT}, {steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
