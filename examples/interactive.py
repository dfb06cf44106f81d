"""A cluster in a batch job, used from another process (a notebook on the login node, say), and grown by a second job.

    dask-gpu-mpi launch -n 2 --scheduler-file cluster.json                   # in a batch job
    python examples/interactive.py cluster.json --grow-to 3 --shutdown      # a notebook's cells, as a script
    dask-gpu-mpi launch -n 1 --no-scheduler --scheduler-file cluster.json    # in a second batch job, once the file exists

The file must be on a file system that all see. For other nodes a job of one node needs --interface NAME.
Exit code 1: the answer is wrong, or the cluster has not grown in time.
"""

from __future__ import annotations

import argparse
import sys

import dask.array as da
from distributed import Client

from dask_gpu_mpi import connect

SIDE = 2_000


def trace_of_square(client: Client) -> float:
    """The trace of a product of matrices, which is known: entries are 1, so that it is SIDE squared."""
    ones = da.ones((SIDE, SIDE), chunks=(500, 500))
    return float(client.compute(da.trace(ones @ ones)).result())


def names(client: Client) -> list[str]:
    """The workers' names."""
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    return sorted(str(worker["name"]) for worker in workers)


def main() -> int:
    """Use the cluster, wait until it has grown, use it again; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scheduler_file")
    parser.add_argument("--grow-to", type=int, default=0, metavar="N", help="wait for a second job's workers")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for that (600)")
    parser.add_argument("--shutdown", action="store_true", help="end the jobs at the end")
    options = parser.parse_args()
    with connect(options.scheduler_file) as client:
        print(f"workers: {', '.join(names(client))}", flush=True)
        answers = [trace_of_square(client)]
        if options.grow_to:
            print(f"waiting for {options.grow_to} workers", flush=True)
            try:
                client.wait_for_workers(options.grow_to, timeout=options.timeout)
            except TimeoutError:
                print(f"WRONG: {len(names(client))} workers after {options.timeout} s", file=sys.stderr)
                return 1
            print(f"{len(names(client))} workers: the cluster has grown")
            answers.append(trace_of_square(client))
        if options.shutdown:
            client.shutdown()
    if any(answer != SIDE**2 for answer in answers):
        print(f"WRONG: {answers} (expected {SIDE**2})", file=sys.stderr)
        return 1
    print(f"right: the trace is {SIDE**2}, computed {len(answers)} times")
    return 0


if __name__ == "__main__":
    sys.exit(main())
