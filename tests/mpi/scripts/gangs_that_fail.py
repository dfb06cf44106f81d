import contextlib
import itertools
import os
import pickle
import signal
import sys
import threading
import time

from distributed import Client

from dask_gpu_mpi import (
    ClusterLostError,
    GangCancelledError,
    SpmdError,
    SpmdTimeoutError,
    current_session,
    spmd,
)

session = current_session()
client = Client()


def error_of(fn, *args, **limits):
    try:
        session.spmd(fn, *args, **limits)
    except SpmdError as error:
        assert session.spmd(lambda group: group.allgather(group.rank)) == [[0, 1]] * 2
        return error
    raise AssertionError("no error")


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(first)
        self.lock = threading.Lock()


def fail(group, error):
    if group.rank == 1:
        if isinstance(error, str):
            raise Unpicklable(error, 2)
        raise error
    try:
        group.barrier()
    except GangCancelledError as cancelled:
        assert "rank 1 (worker 1 on " in str(cancelled) and " raised " in str(cancelled)
        raise RuntimeError("a later error") from cancelled


for error, text, kind in (
    (ValueError("bad"), "ValueError('bad')", ValueError),
    (SystemExit(4), "SystemExit(4)", SystemExit),
    ("lock", "Unpicklable", Exception),
):
    found = error_of(fail, error)
    assert (found.rank, found.worker, found.died, type(found.__cause__)) == (1, "1", (), kind), (
        found.__cause__
    )
    assert str(found).startswith("spmd: rank 1 (worker 1 on ")
    assert text in str(found) and text in repr(found.__cause__)
    copy = pickle.loads(pickle.dumps(found))
    assert (str(copy), copy.rank, copy.host) == (str(found), 1, found.host)


def differ(group):
    group.barrier() if group.rank else group.allgather(1)


found = error_of(differ)
where = f"spmd: rank {found.rank} (worker {found.rank} on {found.host}) calls "
assert found.rank in (0, 1) and str(found).startswith(where), found
assert " where rank " in str(found) and "(expected the same calls in the same order" in str(found), found


# a member that returns early: nobody waits for it
def early(group, waits):
    if group.rank == 1:
        time.sleep(0.3 * waits)
        return
    time.sleep(0.3 * (not waits))
    group.allgather(1)


for waits, words in (
    (True, ("rank 1 (", "returned while rank 0 waited in allgather (expected the same")),
    (False, ("rank 0 (", "calls allgather after rank 1 returned (expected the same")),
):
    found = str(error_of(early, waits))
    assert found.startswith("spmd: " + words[0]) and words[1] in found, found


def late(group):
    if group.rank == 0:
        group.barrier(timeout=0.2)
    while not group.cancelled:
        time.sleep(0.01)


found = error_of(late)
assert found.rank == 0 and isinstance(found.__cause__, TimeoutError)
assert "rank(s) 1 have" in str(found.__cause__)


# results, arguments and functions that can't be sent
assert "failed in Dask" in str(error_of(lambda group: threading.Lock()))
with contextlib.suppress(TypeError):
    session.spmd(lambda group, x: None, threading.Lock())
assert session.spmd(lambda group: group.rank) == [0, 1]


# the cause comes second: what the others meet is told first
def cause(group):
    group.barrier()
    if group.rank == 0:
        raise ConnectionError("closed by its peer")
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


found = error_of(cause)
assert found.rank == 0 and isinstance(found.__cause__, ConnectionError)
[note] = found.__notes__
assert found.died == (1,)
assert note.startswith("spmd: rank 1 (worker 1 on ") and note.endswith(
    ") died afterwards, which may be the cause"
)
assert not hasattr(error_of(fail, ValueError("alone")), "__notes__")


# a member that failed inside a process group of PyTorch, which it can't leave, has another process for the next gang
def with_torch(group, fails):
    import types

    assert "torch.distributed" not in sys.modules
    torch = sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
    torch.is_available, torch.is_initialized = lambda: True, lambda: True
    group.barrier()
    if group.rank == fails:
        raise ValueError("inside the group")
    if group.rank == 0 and fails:
        del sys.modules["torch.distributed"]
    else:
        while not group.cancelled:
            time.sleep(0.01)


def process(group):
    return os.getpid()


pids = [session.spmd(process)]
for fails in (1, 0):
    found = error_of(with_torch, fails)
    assert found.rank == fails and found.died == () and not hasattr(found, "__notes__"), found
    pids.append(session.spmd(process))
changed = [[a != b for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(pids)]
# who left the group; and one that only returned when it was over
assert changed == [[False, True], [True, True]], pids

# a worker that is just being restarted is a member all the same
pids = dict(client.run(lambda dask_worker: (str(dask_worker.name), os.getpid())).values())
os.kill(pids["1"], signal.SIGKILL)
time.sleep(0.05)
assert session.spmd(lambda group: group.size) == [2, 2]


# a client that is closed meanwhile
other = Client(client.scheduler.address, security=client.security)
threading.Timer(0.5, other.close).start()
try:
    spmd(other, lambda group: [time.sleep(0.01) for _ in iter(lambda: group.cancelled, True)])
except ClusterLostError as error:
    assert str(error).startswith("spmd: its client was closed (expected ")
else:
    raise AssertionError("no error")

# time
found = error_of(lambda group: [time.sleep(0.01) for _ in iter(lambda: group.cancelled, True)], timeout=0.5)
assert isinstance(found, SpmdTimeoutError) and "not ended within 0.5 s: rank(s) 0, 1 still ran" in str(found)
found = error_of(lambda group: None, workers=["no such"], start_timeout=0.5)
assert isinstance(found, SpmdTimeoutError) and "not started within 0.5 s: no worker no such" in str(found)
sys.exit(3)
