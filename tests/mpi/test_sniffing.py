"""What who sees the network reads in MPI's messages: not the private key of the job, and mpi4py pickles nothing."""

from __future__ import annotations

import base64
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from support.jobs.clusters import TELL, facts
from support.jobs.mpi import Mpi

#: All that goes from rank to rank goes over TCP, and with that over the loopback interface.
OVER_TCP = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "MPIR_CVAR_NOLOCAL": "1",
    "UCX_TLS": "tcp,self",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "lo",
}
SCRIPT = (
    TELL
    + """
from mpi4py import MPI
from dask_gpu_mpi import initialize

def refuse(*_):
    raise AssertionError("pickled")

MPI.pickle.__init__(refuse, refuse)
MARK = "marks what goes from rank to rank in clear"
if MPI.COMM_WORLD.rank == 0:
    MPI.COMM_WORLD.Send([MARK.encode(), MPI.BYTE], dest=1)
elif MPI.COMM_WORLD.rank == 1:
    MPI.COMM_WORLD.Recv([bytearray(len(MARK)), MPI.BYTE], source=0)
session = initialize(worker_class="distributed.Nanny", interface="lo", client_rank=1)
import dask
with session.client() as client:
    answer = client.submit(lambda: 6 * 7).result()
tell(answer=answer, rank=MPI.COMM_WORLD.rank, key=dask.config.get("distributed.comm.tls.client")["key"])
"""
)


@contextmanager
def sniffer() -> Iterator[bytearray]:
    """All that goes over the loopback interface meanwhile; whole once it is left."""
    heard = bytearray()
    over = threading.Event()
    every = socket.htons(0x0003)  # ETH_P_ALL, packet(7)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, every) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        raw.bind(("lo", 0))
        raw.settimeout(0.1)

        def listen() -> None:
            while True:
                try:
                    heard.extend(raw.recv(1 << 17))
                except TimeoutError:
                    if over.is_set():
                        return

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield heard
        finally:
            over.set()
            thread.join()


@pytest.mark.quick
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may open a packet socket")
def test_private_key_is_not_on_the_network(mpirun: Mpi) -> None:
    with sniffer() as heard:
        done = mpirun.run(SCRIPT, 2, env=OVER_TCP, timeout=60).check(0)
    told = facts(done)
    assert (told["answer"], told["rank"]) == (42, 1)
    if b"marks what goes from rank to rank in clear" not in heard:
        assert mpirun.name != "openmpi"
        pytest.skip("this MPI library sends nothing over the loopback interface")
    lines = told["key"].split("\n")
    body = [line for line in lines if line and "-----" not in line]
    assert len(body) >= 2  # of PEM
    der = base64.b64decode("".join(body))
    assert [line for line in body if line.encode() in heard] == []
    assert b"PRIVATE KEY" not in heard
    assert der not in heard
    assert der[36:68] not in heard  # the number itself, in PKCS #8 of P-256
