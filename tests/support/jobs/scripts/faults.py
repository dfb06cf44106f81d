import atexit
import json
import os
import signal
import sys
import threading
import time

from support.jobs.scripts.tell import wait_until

HERE = os.getcwd()
client = None  # the text that follows makes it


def mark(name="end"):
    """Tell the test that and when the script was here; a file, because launchers drop output when they end."""
    part = os.path.join(HERE, f".mark-{name}-{os.getpid()}")  # all ranks may be there at once
    with open(part, "w") as file:
        file.write(repr(time.time()))
    os.rename(part, os.path.join(HERE, "mark-" + name))


def marked(name):
    return os.path.exists(os.path.join(HERE, "mark-" + name))


def rank():
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))


def wait_for_names(*names):
    """Until exactly these workers are there."""
    wait_until(
        lambda: (
            sorted(str(w["name"]) for w in client.scheduler_info(n_workers=-1)["workers"].values())
            == sorted(names)
        )
    )


def process_of(name):
    """PID of this worker's process."""
    pids = client.run(lambda dask_worker: (str(dask_worker.name), os.getpid()))
    return dict(pids.values())[name]


def parent_of(pid, times=1):
    for _ in range(times):
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
        if pid <= 1:  # to signal 0 is to signal this process and its group
            raise ProcessLookupError("its parent has ended")
    return pid


def agent_of(name):
    """PID of the agent that a worker belongs to: the fork server is between them."""
    return parent_of(process_of(name), 2)


def compute():
    """Run one task: the cluster works."""
    result = client.submit(lambda: 5).result()
    assert result == 5, result


def start_tasks():
    """Forty tasks of 0.1 s, of which some run when this returns."""

    def add(x):
        time.sleep(0.1)
        return x + 1

    futures = client.map(add, range(40), pure=False)
    wait_until(lambda: any(client.processing().values()))
    return futures


def check_tasks(futures):
    """Wait for those tasks; their results are right."""
    total = sum(client.gather(futures))
    assert total == sum(range(1, 41)), total
