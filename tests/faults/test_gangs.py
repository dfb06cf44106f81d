"""Gangs (`spmd`) whose members are killed, stopped or hang at every stage: one error, and the cluster is usable afterwards."""

from __future__ import annotations

import pytest

from support.jobs.faults import end, start
from support.jobs.mpi import Mpi
from support.jobs.scripts import script

GANGS = script("faults/scripts/gangs.py")


def run(mpirun: Mpi, body: str) -> None:
    """Run a script of three ranks, which ends by itself, with a cluster that works."""
    job = start(mpirun, "initialize", f"{GANGS}{body}usable(3)\nmark()\nsys.exit(3)\n", ranks=3)
    end(job, 3, 3.0, tracebacks=None, timeout=110)


def test_member_killed_at_every_stage(mpirun: Mpi) -> None:
    body = """
# before the start: its worker has no thread for it, and the other members wait
def hold():
    mark("held")
    time.sleep(600)
address = next(a for a, name in client.run(lambda dask_worker: dask_worker.name).items() if name == 1)
busy = [client.submit(hold, workers=[address], pure=False) for _ in range(client.nthreads()[address])]
wait_until(lambda: marked("held"))
dies(everybody_waits, lambda: sorted(stages()) == ["CALLED", "JOINED", "JOINED"], "died before the gang started")
client.cancel(busy)
assert not any(marked(f"runs-{rank}") for rank in range(3))
usable(3)

# inside the function, while others are in a barrier
def rank_1_works(group):
    mark(f"runs-{group.rank}")
    if group.rank == 1:
        time.sleep(600)
    try:
        group.barrier()
    except GangCancelledError:
        assert group.cancelled
        mark(f"cancelled-{group.rank}")
        raise
dies(rank_1_works, lambda: is_here("runs"), "died while the gang ran")
assert marked("cancelled-0") and marked("cancelled-2")
usable(3)

# inside a barrier, for which rank 2 is late
def rank_2_is_late(group):
    mark(f"runs-{group.rank}")
    while group.rank == 2 and not group.cancelled:
        time.sleep(0.01)
    group.barrier()
dies(rank_2_is_late, lambda: is_here("runs"), "died while the gang ran")
usable(3)

# while the caller collects: the result of rank 1 takes long to be sent
class Slow:
    def __reduce__(self):
        mark("collects-1")
        time.sleep(600)
def slow_result(group):
    return Slow() if group.rank == 1 else None
dies(slow_result, lambda: marked("collects-1"), "died while the gang ran")
"""
    run(mpirun, body)


def test_member_that_hangs_is_restarted(mpirun: Mpi) -> None:
    """In C code, with and without Python's lock, and stopped by a signal; the others are not restarted."""
    body = """
for library, lock in ((ctypes.CDLL, "released"), (ctypes.PyDLL, "held")):
    before = pids()
    def hang(group, library=library):
        if group.rank == 1:
            library(None).pause()
        group.barrier()
    def others_wait(group):
        group.barrier()
        if group.rank == 0:
            raise ValueError("rank 0 fails")
        hang(group)
    try:
        session.spmd(others_wait, grace=0.5, timeout=60)
    except SpmdError as error:
        assert (error.rank, type(error.__cause__)) == (0, ValueError), error
    else:
        raise AssertionError("no error")
    usable(3)
    after = pids()
    assert {name for name in before if before[name] != after[name]} == {"1"}, lock
    clear()

def rank_1_is_late(group):
    mark(f"runs-{group.rank}")
    while group.rank == 1:
        time.sleep(0.01)
    group.barrier()
error = failure(rank_1_is_late, lambda: is_here("runs"), "1", signal.SIGSTOP, timeout=5, grace=0.5)
assert isinstance(error, SpmdTimeoutError) and isinstance(error, TimeoutError), error
"""
    run(mpirun, body)


def test_members_return_while_the_scheduler_is_busy(mpirun: Mpi, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is late, as Dask is: nothing is lost. Limits are a fraction here of those of a job, and so is the time it is busy."""
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT", "1s")
    body = """
from dask_gpu_mpi.gang import group as of_package
here = HERE
def busy():
    open(os.path.join(here, "mark-busy"), "w").close()
    time.sleep(5)
def until_it_is_busy(group):
    group.barrier()
    mark(f"runs-{group.rank}")
    while not marked("busy"):
        time.sleep(0.01)
def return_when_it_is_busy(group):
    of_package.ANSWER_SLACK = 1.0  # of what waits for less than this scheduler is busy
    until_it_is_busy(group)
    return os.getpid()
def call_when_it_is_busy(group):
    until_it_is_busy(group)
    time.sleep(1)  # meanwhile Dask's heartbeat may have the connection
    return group.allgather(group.rank)

before = pids()
for fn in (call_when_it_is_busy, return_when_it_is_busy):
    clear()
    gang = pool.submit(session.spmd, fn)
    wait_until(lambda: is_here("runs"))
    client.run_on_scheduler(busy)
    results = gang.result(60)
    assert pids() == before
assert results == [before[str(rank)] for rank in range(3)]
"""
    run(mpirun, body)


def test_caller_that_is_killed_or_interrupted(mpirun: Mpi) -> None:
    body = """
# another client, killed
child = subprocess.Popen([sys.executable, "-c", '''
import os, sys, time
from dask_gpu_mpi import connect, spmd
HERE = sys.argv[1]
def wait(group):
    open(os.path.join(HERE, f"mark-runs-{group.rank}"), "w")
    group.barrier()
    while not group.cancelled:
        time.sleep(0.01)
    open(os.path.join(HERE, f"mark-cancelled-{group.rank}"), "w")
spmd(connect(), wait)
''', HERE])
wait_until(lambda: is_here("runs"))
child.kill()
child.wait()
wait_until(lambda: is_here("cancelled"))
usable(3)

# any exception that leaves the call of this one ends its gang: Ctrl-C, a time-out of the script's own, SIGTERM's SystemExit
def wait(group):
    mark(f"runs-{group.rank}")
    while not group.cancelled:
        time.sleep(0.01)
    mark(f"cancelled-{group.rank}")
def out_of_time(number, frame):
    raise OSError("out of time")
signal.signal(signal.SIGALRM, out_of_time)
for number, kind in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, OSError), (signal.SIGTERM, SystemExit)):
    clear()
    def send():
        wait_until(lambda: is_here("runs"))
        os.kill(os.getpid(), number)
    pool.submit(send)
    try:
        session.spmd(wait)
    except kind:
        pass
    else:
        raise AssertionError("no error")
    wait_until(lambda: is_here("cancelled"))
    wait_until(lambda: not stages())
    usable(3)
"""
    run(mpirun, body)


def test_scheduler_is_lost_during_a_gang(mpirun: Mpi) -> None:
    body = """
target = client.run_on_scheduler(os.getpid)
def kill():
    wait_until(lambda: is_here("runs"))
    mark()
    os.kill(target, signal.SIGKILL)
pool.submit(kill)
def forever(group):
    everybody_waits(group)
    time.sleep(600)
session.spmd(forever)
"""
    job = start(mpirun, "initialize", GANGS + body, ranks=3)
    end(job, 1, 10, says=("the cluster is lost",), tracebacks=None)


def test_gangs_that_overlap_do_not_wait_for_each_other(mpirun: Mpi) -> None:
    """Twenty times two at the same time, of two threads and two clients, some of which fail."""
    body = """
other = session.client(set_as_default=False)

def meet(group, number):
    group.barrier()
    if number % 5 == 4 and group.rank == 0:
        raise ValueError(number)
    return group.allgather(number)

def outcome(of, number, workers):
    try:
        return spmd(of, meet, number, workers=workers, timeout=60, start_timeout=60)
    except SpmdError as error:
        return [str(error.__cause__)]

for number in range(20):
    gangs = [
        pool.submit(outcome, client, number, ["0", "1"]),
        pool.submit(outcome, other, number, ["2", "1"]),
        pool.submit(outcome, client, number, None),
    ]
    expected = [[str(number)]] * 3 if number % 5 == 4 else [[[number] * size] * size for size in (2, 2, 3)]
    assert [gang.result(100) for gang in gangs] == expected
"""
    run(mpirun, body)
