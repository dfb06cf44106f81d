"""Gang tasks: what a function finds in its group and environment, how gangs fail, and who is a member."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support.jobs.clusters import COMMAND, facts, only_our_lines
from support.jobs.mpi import Mpi
from support.mocks.gpus import GIB, make_gpus, simulated_environ

PATH = {"PYTHONPATH": os.environ.get("PYTHONPATH")}

GROUP = """
import asyncio, os, sys, time
from distributed import Client
from dask_gpu_mpi import Group, current_session, spmd

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR",
         "MASTER_PORT", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "NCCL_SOCKET_IFNAME",
         "GLOO_SOCKET_IFNAME")

def describe(group: Group, *args):
    group.barrier()
    variables = {name: os.environ.get(name) for name in NAMES}
    pids = group.allgather(os.getpid())
    word = group.broadcast({"from": group.rank}, root=group.size - 1)
    # the port is free: rank 0 can listen there, and the others reach it
    import socket
    if group.rank == 0:
        listener = socket.create_server((group.master_addr, group.master_port))
    group.barrier()
    socket.create_connection((group.master_addr, group.master_port), timeout=10).close()
    group.barrier()
    assert group.hosts == (os.uname().nodename,) * group.size
    assert not group.cancelled
    return {"rank": group.rank, "size": group.size, "local": (group.local_rank, group.local_size, group.node_rank),
            "device": group.device, "master": (group.master_addr, group.master_port), "pids": pids, "pid": os.getpid(),
            "word": word, "args": args, "variables": variables}

session = current_session()
# without a client of the script's own; a value of the user's stays
def user(value):
    os.environ["NCCL_SOCKET_IFNAME"] = value
found = session.spmd(describe, 1, "two")
for rank, row in enumerate(found):
    addr, port = row["master"]
    assert row["rank"] == rank and row["size"] == 2 and row["local"] == (rank, 2, 0) and row["device"] is None, row
    assert row["pids"] == [each["pid"] for each in found] and row["word"] == {"from": 1} and row["args"] == (1, "two"), row
    assert row["variables"] == {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1", "NODE_RANK": "0", "MASTER_ADDR": addr, "MASTER_PORT": str(port),
        "JAX_COORDINATOR_ADDRESS": f"{addr}:{port}", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(rank),
        "NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}, row
assert len({row["master"] for row in found}) == 1

with Client() as client:
    assert all(value == [None] * len(NAMES) for value in client.run(lambda: [os.environ.get(name) for name in NAMES]).values())
    assert client.scheduler_info(n_workers=-1) and session.spmd(lambda group: group.rank) == [0, 1]
    client.run(user, "of the user")
    assert session.spmd(lambda group: os.environ["NCCL_SOCKET_IFNAME"]) == ["of the user"] * 2
    # futures arrive as their results
    assert spmd(client, lambda group, x: x + group.rank, client.submit(sum, [40, 2])) == [42, 43]
    # some of the workers, by name and by address; each alone is rank 0
    names = client.run(lambda dask_worker: dask_worker.name)
    me = lambda group: (group.rank, group.size, os.getpid())
    pids = client.run(os.getpid)
    for address, name in names.items():
        assert spmd(client, me, workers=[name]) == spmd(client, me, workers=[address]) == [(0, 1, pids[address])]
    # members come before ordinary tasks that wait, and after those that run
    done = [client.submit(time.sleep, 0.2, pure=False) for _ in range(40)]
    session.spmd(lambda group: group.barrier())
    assert not all(future.done() for future in done)
    client.gather(done)

async def other():
    async with Client(session.address, asynchronous=True, security=session.security) as client:
        return await spmd(client, lambda group: group.allgather(group.rank))
assert asyncio.run(other()) == [[0, 1], [0, 1]]
sys.exit(3)
"""


@pytest.mark.quick("openmpi", security="True")
@pytest.mark.parametrize("security", ["True", "False"], ids=["tls", "tcp"])
def test_group_and_environment(mpirun: Mpi, tmp_path: Path, security: str) -> None:
    (tmp_path / "script.py").write_text(GROUP)
    environ = {**PATH, "DASK_GPU_MPI__SECURITY": security}
    done = mpirun.run([*COMMAND, str(tmp_path / "script.py")], 2, env=environ, timeout=90).check(3)
    assert only_our_lines(done.stderr), done.output


FAILURES = """
import os, pickle, signal, sys, threading, time
from dask_gpu_mpi import (
    ClusterLostError, GangCancelledError, InputError, SpmdError, SpmdTimeoutError, current_session, spmd
)
from distributed import Client

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
        assert "rank 1 raised" in str(cancelled)
        raise RuntimeError("a later error") from cancelled

for error, text, kind in (
    (ValueError("bad"), "ValueError('bad')", ValueError),
    (SystemExit(4), "SystemExit(4)", SystemExit),
    ("lock", "Unpicklable", Exception),
):
    found = error_of(fail, error)
    assert (found.rank, found.worker) == (1, "1") and text in str(found) and str(found).startswith("spmd: rank 1 (worker 1 on ")
    assert type(found.__cause__) is kind and text in repr(found.__cause__) and found.died == (), found.__cause__
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
for waits, words in ((True, ("rank 1 (", "returned while rank 0 waited in allgather (expected the same")),
                     (False, ("rank 0 (", "calls allgather after rank 1 returned (expected the same"))):
    found = str(error_of(early, waits))
    assert found.startswith("spmd: " + words[0]) and words[1] in found, found

# a worker by its name and by its address
one = next(address for address, name in client.run(lambda dask_worker: dask_worker.name).items() if name == 0)
try:
    session.spmd(lambda group: group.size, workers=["0", one])
except InputError as error:
    assert str(error) == f"spmd: workers: {['0', one]} has a worker twice (expected each once: a worker is one rank)", error
else:
    raise AssertionError("no error")

def late(group):
    if group.rank == 0:
        group.barrier(timeout=0.2)
    while not group.cancelled:
        time.sleep(0.01)
found = error_of(late)
assert found.rank == 0 and isinstance(found.__cause__, TimeoutError) and "rank(s) 1 have" in str(found.__cause__)

def large(group):
    group.allgather(bytes(2_000_000))
assert "1048576 at most" in str(error_of(large).__cause__)

# results, arguments and functions that can't be sent
assert "failed in Dask" in str(error_of(lambda group: threading.Lock()))
try:
    session.spmd(lambda group, x: None, threading.Lock())
except TypeError:
    pass
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
assert note.startswith("spmd: rank 1 (worker 1 on ") and note.endswith(") died afterwards, which may be the cause")
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
changed = [[a != b for a, b in zip(*pair)] for pair in zip(pids, pids[1:])]
assert changed == [[False, True], [True, True]], pids  # who left the group; and one that only returned when it was over

# a worker that is just being restarted is a member all the same
pids = dict(client.run(lambda dask_worker: (str(dask_worker.name), os.getpid())).values())
os.kill(pids["1"], signal.SIGKILL)
time.sleep(0.05)
assert session.spmd(lambda group: group.size) == [2, 2]

# what takes long to be sent does not hide why the gang has not started
class Slow:
    def __reduce__(self):
        time.sleep(1.5)
        return int, ()
try:
    session.spmd(lambda group, x: None, Slow(), start_timeout=0.3)
except SpmdTimeoutError as error:
    assert "not started within 0.3 s" in str(error), error
else:
    raise AssertionError("no error")

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
busy = [client.submit(time.sleep, 5, pure=False) for _ in range(sum(client.nthreads().values()))]
while len([key for keys in client.processing().values() for key in keys]) < len(busy):
    time.sleep(0.02)
begun = time.monotonic()
try:
    session.spmd(lambda group: None, start_timeout=0.5)
except SpmdTimeoutError as error:
    assert "worker(s) 0, 1 have not begun: other tasks have their threads" in str(error), error
else:
    raise AssertionError("no error")
client.gather(busy)

for bad in ({"timeout": 0}, {"timeout": "1"}, {"grace": -1}, {"workers": "0"}, {"workers": []}, {"start_timeout": True}):
    try:
        session.spmd(lambda group: None, **bad)
    except InputError as error:
        assert "expected" in str(error) and next(iter(bad)) in str(error)
    else:
        raise AssertionError(bad)
sys.exit(3)
"""


def test_failures(mpirun: Mpi, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILURES)
    mpirun.run([*COMMAND, str(tmp_path / "script.py")], 2, env=PATH, timeout=90).check(3)


UNCAUGHT = """
from dask_gpu_mpi import current_session
def inner(group):
    return 1 // group.rank
current_session().spmd(inner)
"""


@pytest.mark.one_mpi
def test_uncaught_error_is_shown_with_the_members_traceback(mpirun: Mpi, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNCAUGHT)
    done = mpirun.run([*COMMAND, str(tmp_path / "script.py")], 2, env=PATH, timeout=60).check(1)
    assert done.stderr.count("ZeroDivisionError: integer division or modulo by zero\n") == 1
    # cloudpickle from 3.1.3 on takes the file's name out of functions, and with it Python's way to the source line
    assert re.search(r'File ".*", line 4, in inner\n', done.stderr), done.stderr
    assert done.stderr.count("SpmdError: spmd: rank 0 (worker 0 on ") == 1


@pytest.mark.one_mpi
def test_workers_without_a_nanny_are_refused(mpirun: Mpi, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNCAUGHT)
    environ = {**PATH, "DASK_GPU_MPI__WORKER_CLASS": "distributed.Worker"}
    done = mpirun.run([*COMMAND, str(tmp_path / "script.py")], 1, env=environ, timeout=60).check(2)
    assert done.stderr.count("error: spmd: worker(s) 0 without a nanny") == 1
    assert only_our_lines(done.stderr), done.output


DEVICES = """
import json, os, sys
from dask_gpu_mpi import current_session
session = current_session()
def look(group):
    return group.rank, group.size, group.device, os.environ["CUDA_VISIBLE_DEVICES"]
cpu = [worker.name for worker in session.plan.workers if worker.kind == "cpu"]
everybody = [worker.name for worker in session.plan.workers]
told = {"gpus": session.spmd(look), "cpu": session.spmd(look, workers=cpu), "all": session.spmd(look, workers=everybody)}
os.write(1, ("FACTS " + json.dumps(told) + "\\n").encode())
"""


@pytest.mark.one_mpi
def test_gpu_workers_are_the_members_and_know_their_device(mpirun: Mpi, libdir: Path, tmp_path: Path) -> None:
    gpus = make_gpus(2, host="one", memory=80 * GIB)
    (tmp_path / "script.py").write_text(DEVICES)
    environ = {"CUDA_VISIBLE_DEVICES": None, **PATH, **simulated_environ(libdir, gpus, {})}
    line = [*COMMAND, "--cpu-workers", "1", str(tmp_path / "script.py")]
    told = facts(mpirun.run(line, 2, env=environ, timeout=90).check(0))
    assert told["gpus"] == [[rank, 2, 0, gpus[rank].uuid] for rank in range(2)]
    assert told["cpu"] == [[0, 1, None, ""]]
    # by name: 0-0, 0-cpu-0, 1-1
    assert [row[2] for row in told["all"]] == [0, None, 0]
