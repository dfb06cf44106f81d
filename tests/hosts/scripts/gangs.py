import os
import signal
import socket
import sys

from distributed import Client

from dask_gpu_mpi import SpmdError, current_session
from support.jobs.scripts.tell import tell

session = current_session()


def look(group):
    group.barrier()
    # a ring over the cluster's network: the gang's master is reached from everywhere
    _listener = socket.create_server((group.master_addr, group.master_port)) if group.rank == 0 else None
    group.barrier()
    socket.create_connection((group.master_addr, group.master_port), timeout=10).close()
    group.barrier()
    return {
        "rank": group.rank,
        "size": group.size,
        "local": group.local_rank,
        "local_size": group.local_size,
        "node": group.node_rank,
        "host": os.uname().nodename,
        "hosts": group.hosts,
        "device": group.device,
        "gathered": group.allgather(group.rank),
        "master": group.master_addr,
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
        "nccl": os.environ["NCCL_SOCKET_IFNAME"],
    }


def killed(group):
    group.barrier()
    if group.rank == 15:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


tell(first=session.spmd(look, timeout=60))
try:
    session.spmd(killed, timeout=60)
except SpmdError as error:
    tell(error=[error.rank, error.worker, error.host, str(error)])
tell(second=session.spmd(look, timeout=60))
with Client() as client:
    tell(alive=sorted(client.run(lambda dask_worker: dask_worker.name).values()))
sys.exit(7)
