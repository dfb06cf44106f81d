import asyncio
import os
import sys
import threading
import time

from distributed import Client

from dask_gpu_mpi import Group, current_session, spmd


def expected(rank, address, port):
    """The variables of a member of two on one host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "JAX_COORDINATOR_ADDRESS": f"{address}:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(rank),
        "NCCL_SOCKET_IFNAME": "=lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }


NAMES = tuple(expected(0, "", 0))


def describe(group: Group, *args):
    group.barrier()
    variables = {name: os.environ.get(name) for name in NAMES}
    pids = group.allgather(os.getpid())
    last = group.rank == group.size - 1
    word = group.broadcast({"from": group.rank} if last else threading.Lock(), root=group.size - 1)
    # the port is free: rank 0 can listen there, and the others reach it
    import socket

    if group.rank == 0:
        _listener = socket.create_server((group.master_addr, group.master_port))
    group.barrier()
    socket.create_connection((group.master_addr, group.master_port), timeout=10).close()
    group.barrier()
    assert group.hosts == (os.uname().nodename,) * group.size
    assert not group.cancelled
    return {
        "rank": group.rank,
        "size": group.size,
        "local": (group.local_rank, group.local_size, group.node_rank),
        "device": group.device,
        "master": (group.master_addr, group.master_port),
        "pids": pids,
        "pid": os.getpid(),
        "word": word,
        "args": args,
        "variables": variables,
    }


session = current_session()


# without a client of the script's own; a value of the user's stays
def user(value):
    os.environ["NCCL_SOCKET_IFNAME"] = value


found = session.spmd(describe, 1, "two")
for rank, row in enumerate(found):
    alike = {
        "size": 2,
        "device": None,
        "pids": [each["pid"] for each in found],
        "word": {"from": 1},
        "args": (1, "two"),
    }
    own = {"rank": rank, "local": (rank, 2, 0), "variables": expected(rank, *row["master"])}
    assert row == {**alike, **own, "master": row["master"], "pid": row["pid"]}, row
assert len({row["master"] for row in found}) == 1

with Client() as client:
    left = client.run(lambda: [os.environ.get(name) for name in NAMES])
    assert [*left.values()] == [[None] * len(NAMES)] * 2
    assert client.scheduler_info(n_workers=-1) and session.spmd(lambda group: group.rank) == [0, 1]
    client.run(user, "of the user")
    assert session.spmd(lambda group: os.environ["NCCL_SOCKET_IFNAME"]) == ["of the user"] * 2
    # futures arrive as their results
    assert spmd(client, lambda group, x: x + group.rank, client.submit(sum, [40, 2])) == [42, 43]
    # some of the workers, by name and by address; each alone is rank 0
    names = client.run(lambda dask_worker: dask_worker.name)

    def me(group):
        return (group.rank, group.size, os.getpid())

    pids = client.run(os.getpid)
    for address, name in names.items():
        assert (
            spmd(client, me, workers=[name]) == spmd(client, me, workers=[address]) == [(0, 1, pids[address])]
        )
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
