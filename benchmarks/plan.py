"""How long the plan of a very large job takes: 8,192 ranks with 4 GPUs each, and as many in other shapes.

    python benchmarks/plan.py [--json FILE]

Prints, of five runs each, the median of the seconds that `make_plan` takes. Needs neither MPI nor Dask.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dask_gpu_mpi.machine.inventory import hypothetical_job
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan.planner import make_plan

RUNS = 5
# name: nodes, ranks per node, GPUs per node, what ranks see
SHAPES = {
    "8192 hosts, 1 rank with 4 GPUs each": (8192, 1, 4, "all"),
    "2048 hosts, 4 ranks that all see 4 GPUs": (2048, 4, 4, "all"),
    "1024 hosts, 8 ranks with 1 of 8 GPUs each": (1024, 8, 8, "per-rank"),
    "64 hosts, 128 ranks, no GPU": (64, 128, 0, "all"),
}


def measure(nodes: int, ranks: int, gpus: int, visible: str) -> dict[str, object]:
    """Time `make_plan` on one shape; the inventories are made before the clock starts."""
    inventories = hypothetical_job(nodes, ranks, gpus, visible)  # type: ignore[arg-type]
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        plan = make_plan(inventories, Options())
        seconds.append(time.perf_counter() - start)
    return {
        "ranks": plan.world_size,
        "workers": len(plan.workers),
        "median_s": statistics.median(seconds),
        "runs_s": seconds,
    }


def main() -> None:
    """Measure all shapes, print them, and write the numbers to a file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the numbers there")
    arguments = parser.parse_args()
    results = {}
    for name, shape in SHAPES.items():
        results[name] = measure(*shape)
        workers, median = results[name]["workers"], results[name]["median_s"]
        print(f"{name}: {workers} workers planned in {median:.3f} s (median of {RUNS})")
    if arguments.json is not None:
        document = {
            "benchmark": "plan",
            "python": platform.python_version(),
            "runs": RUNS,
            "results": results,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
