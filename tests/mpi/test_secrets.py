"""The private key is in no place where others would see it. Who has no certificate does not get in: tests/intruders."""

from __future__ import annotations

import base64
import contextlib
import gzip
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.jobs.clusters import TELL, facts, scratch_of, until, without_mpi
from support.jobs.mpi import Mpi
from support.jobs.scripts import script

KEY = b"PRIVATE KEY"

LEAVES_SECRETS = script("mpi/scripts/leaves_secrets.py")


def has_key(path: Path) -> bool:
    try:
        data = path.read_bytes()
        return KEY in (gzip.decompress(data) if path.suffix == ".gz" else data)
    except OSError:
        return False


def test_no_key_in_anything_that_a_job_leaves_or_shows(mpirun: Mpi) -> None:
    options = ["--worker-class", "distributed.Nanny", "--log-level", "debug", "--log-directory", "logs"]
    files = ["--scheduler-file", "file.json", "--report", "report.html"]
    job = mpirun.start(LEAVES_SECRETS, 2, command=[*options, *files])
    job.wait_for("address")
    assert scratch_of(job)
    assert all(path.stat().st_mode & 0o077 == 0 for path in job.directory.glob("dgm-*"))
    for pid in (*job.processes(), *without_mpi(job)):
        for name in ("cmdline", "environ"):
            assert not has_key(Path(f"/proc/{pid}/{name}")), (pid, name)
    found = {path for path in job.directory.rglob("*") if path.is_file()}
    names = {path.name for path in found}
    assert {"dump.msgpack.gz", "dump.yaml", "from-scheduler.yaml", "said.json", "file.json"} <= names
    assert any(path.parent.name == "logs" for path in found), found
    assert {path.name for path in found if has_key(path)} == {"script.py", "file.json"}
    dump = (job.directory / "dump.yaml").read_text()
    assert "private key, left out" in dump
    assert "BEGIN CERTIFICATE" in dump  # the rest of the configuration is there
    done = job.go_on()
    assert KEY.decode() not in done.output
    until(lambda: not (job.directory / "file.json").exists(), 5)
    left = [path.name for path in job.directory.rglob("*") if path.is_file() and has_key(path)]
    assert left == ["script.py"]
    assert (job.directory / "report.html").exists()


# -- what who sees the network reads of the meeting and of the connections to the hub: not the private key of the job


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
#: MPI in the script's process: mpi4py pickles nothing.
OWN = """
from mpi4py import MPI

def refuse(*_):
    raise AssertionError("pickled")

MPI.pickle.__init__(refuse, refuse)
"""
SNIFFED = """
from dask_gpu_mpi import initialize
session = initialize(worker_class="distributed.Nanny", interface="lo", client_rank=1)
import dask
with session.client() as client:
    answer = client.submit(lambda: 6 * 7).result()
tell(answer=answer, key=dask.config.get("distributed.comm.tls.client")["key"])
"""
#: In the first message of a rank, which is not encrypted.
IN_CLEAR = b"hello"


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


@pytest.mark.both_mpis
@pytest.mark.quick(before="")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may open a packet socket")
@pytest.mark.parametrize("before", ["", OWN], ids=["child", "own"])
def test_private_key_is_not_on_the_network(mpirun: Mpi, before: str) -> None:
    with sniffer() as heard:
        done = mpirun.run(TELL + before + SNIFFED, 2, env=OVER_TCP).check(0)
    told = facts(done)
    assert told["answer"] == 42
    if IN_CLEAR not in heard:
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


# -- a job among strangers: connections that are half opened, at every port of Dask's, in processes with few descriptors


#: Descriptors of each process, and connections to each port.
LIMIT, STRANGERS = 192, 150

HALF_OPEN = script("mpi/scripts/half_open.py")


def test_half_open_connections(mpirun: Mpi) -> None:
    # as a shell's user has it: a soft limit below the hard one
    shell = f'ulimit -Sn {LIMIT - 64}; ulimit -Hn {LIMIT}; exec "$0" -c "$1"'
    job = mpirun.start(["sh", "-c", shell, sys.executable, HALF_OPEN], 2)
    job.wait_for("so_far")
    told = facts(job)
    assert told["limits"] == [[LIMIT, LIMIT]] * 3
    assert len(set(told["places"])) == 5
    with contextlib.ExitStack() as strangers:
        for _ in range(STRANGERS):
            for place in told["places"]:
                host, _, port = place.partition("://")[2].rpartition(":")
                strangers.enter_context(socket.create_connection((host, int(port)), 10))
        count = facts(job)["so_far"]
        until(lambda: facts(job)["so_far"] > count + 6, 30, "work and new clients among the strangers")
        done = job.go_on()
    assert facts(done)["sums"] == [210]
    assert "Traceback" not in done.stderr
