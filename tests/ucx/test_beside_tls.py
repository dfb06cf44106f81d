"""UCX beside TLS (``protocol="ucx"``, and ``auto`` on GPUs), on hosts without GPUs, over shared memory and TCP.

tests/pure/network/test_ucx_comm.py has the agreement with a mock, tests/gpu memory of GPUs.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from support.bed.hosts import TestBed
from support.jobs.clusters import COMMAND, MESSAGES, facts, workers_of
from support.jobs.mpi import CompletedJob, Mpi
from support.jobs.scripts import script
from support.jobs.ucx import needs_ucx
from support.mocks.gpus import make_gpus
from support.private_api import TABLE

pytestmark = needs_ucx

HEAD = script("ucx/scripts/beside_tls.py")
CONNECTED = "client = Client()\n"
INITIALIZED = "from dask_gpu_mpi import initialize\nsession = initialize(protocol='ucx')\nclient = Client()\n"


def check(told: dict[str, Any], workers: int) -> dict[str, dict[str, Any]]:
    """What holds for every such cluster; returns the looks by name."""
    rows = workers_of(told)
    assert len(rows) == workers
    assert told["scheduler"].startswith("tls://")
    assert all(row["address"].startswith("tls://") for row in rows.values()), rows
    assert told["total"] == pytest.approx(2e6, rel=0.01)
    # workers alone use UCX; the script's rank has no other library's UCX before its own, should it import that
    assert told["loaded"] == {
        "workers": [True] * workers,
        "nannies": [False] * workers,
        "scheduler": False,
        "client": False,
    }
    assert all(told["over_ucx"]), told
    return rows


@pytest.mark.both_mpis
def test_ucx_after_mpi_in_the_script(mpirun: Mpi) -> None:
    """The remedy of docs/troubleshooting.md works."""
    imports = "from mpi4py import MPI\nimport ucxx\n"
    done = mpirun.run(HEAD + CONNECTED + imports, 2, command=[]).check(1)
    assert "undefined symbol: ucs_" in done.stderr
    mpirun.run("import ucxx\n" + HEAD + CONNECTED + imports, 2, command=[]).check()


def test_command(mpirun: Mpi, tmp_path: Path) -> None:
    """Workers exchange data over UCX, all else speaks TLS. UCX opens no port, and reads no file of the working directory.

    The script can import ucxx, though MPI has a UCX of its own.
    """
    script = HEAD + CONNECTED + "seen(client)\n" + MESSAGES + "import ucxx\nsys.exit(7)\n"
    # what others may have put into the working directory: UCX would say more, or load code if told so
    (tmp_path / "ucx.conf").write_text("UCX_LOG_LEVEL=info\n")
    done = mpirun.run(script, 2, command=["--protocol", "ucx"], cwd=tmp_path).clean(7)
    told = facts(done)
    check(told, 2)
    assert told["messages"] == [2_000_000_000]
    assert told["listening"] == []
    assert "transport: TLS, and UCX for large data between workers" in done.stderr


def test_mpi_may_come_first(mpirun: Mpi) -> None:
    """The rank does not use UCX, and then does not load it either; what the user configured is kept."""
    env = {
        "DASK_DISTRIBUTED__WORKER__TRANSFER__MESSAGE_BYTES_LIMIT": "123 MB",
        "DASK_DISTRIBUTED_UCXX__ENVIRONMENT__RNDV_THRESH": "12345",
    }
    asked = """
def threshold():
    import ucxx
    return ucxx.get_config()["RNDV_THRESH"]
tell(threshold=[*client.run(threshold).values()])
"""
    program = "from mpi4py import MPI\n" + HEAD + INITIALIZED + "seen(client)\n" + MESSAGES + asked
    told = facts(mpirun.run(program, 2, env=env).check())
    check(told, 2)
    assert told["messages"] == [123_000_000]
    assert all("12345" in value for value in told["threshold"]), told["threshold"]


#: The user's choice by which UCX leads from host to host where there is no RDMA.
OPEN = {"DASK_DISTRIBUTED_UCXX__ENVIRONMENT__TLS": "tcp,sm,self"}


def test_two_hosts(mpirun: Mpi, hosts: TestBed) -> None:
    """Between hosts without RDMA the data is encrypted: UCX would need a port that lets everyone in."""
    program = (
        HEAD + INITIALIZED + "tell(total=work(client), over_ucx=sorted(client.run(over_ucx).values()))\n"
    )
    program += "tell(listening=sorted(sum(client.run(listening).values(), [])))\n"
    done = mpirun.run(program, 3, bed=hosts, hosts=["h1", "h1", "h2"]).check()
    told = facts(done)
    assert told["listening"] == []
    assert [bool(number) for number in told["over_ucx"]] == [False, True, True]
    assert "UCX for large data between workers of a node" in done.stderr
    assert "Between nodes encrypted streams: no RDMA device" in done.stderr
    assert "warning" not in done.stderr


def test_two_hosts_by_the_users_choice(mpirun: Mpi, hosts: TestBed) -> None:
    program = HEAD + INITIALIZED + "seen(client)\n"
    done = mpirun.run(program, 2, env=OPEN, bed=hosts, hosts=["h1", "h2"]).check()
    rows = check(facts(done), 2)
    assert {row["host"] for row in rows.values()} == {"h1", "h2"}
    assert "warning: distributed-ucxx.environment.tls has UCX open a TCP port in each worker" in done.stderr
    assert "anyone who reaches the port can run code as you" in done.stderr


def test_ucx_that_does_not_lead_to_the_other_node_is_told(mpirun: Mpi, hosts: TestBed) -> None:
    env = {**OPEN, "DASK_DISTRIBUTED_UCXX__ENVIRONMENT__NET_DEVICES": "lo"}
    program = HEAD + INITIALIZED + "work(client)\ntell(over_ucx=sorted(client.run(over_ucx).values()))\n"
    done = mpirun.run(program, 2, env=env, bed=hosts, hosts=["h1", "h2"]).check()
    assert "do not go over UCX" in done.stderr
    assert facts(done)["over_ucx"] == [0, 0]


#: Runs a command with an RDMA device, in a view of /sys/class of its own.
WITH_RDMA = """
mkdir "$0/class" "$0/real"
mount --make-rprivate /
mount --bind /sys/class "$0/real"
for each in "$0"/real/*; do ln -s "$each" "$0/class/${each##*/}"; done
mkdir -p "$0/class/infiniband/mlx5_0"
mount --bind "$0/class" /sys/class
exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
@pytest.mark.parametrize("has_ib", [True, False])
def test_a_ucx_of_the_system_that_has_rdma_is_taken(mpirun: Mpi, tmp_path: Path, has_ib: bool) -> None:
    """The package's own libraries stand for a module of the site, and an empty file for its InfiniBand."""
    package = importlib.import_module("libucx").__path__[0]
    module = tmp_path / "module"
    shutil.copytree(
        Path(package, "lib"), module, symlinks=True, ignore=shutil.ignore_patterns("*.a", "cmake")
    )
    if has_ib:
        (module / "ucx" / "libuct_ib.so.0").touch()
    looks = (
        "def look():\n    maps = open('/proc/self/maps').read()\n"
        "    return sorted({line.split()[-1] for line in maps.splitlines() if '/libucp.so' in line})\n"
        "work(client)\ntell(loaded=sum(client.run(look).values(), []))\n"
    )
    folder = tmp_path / "sys"
    folder.mkdir()
    program = tmp_path / "script.py"
    program.write_text(HEAD + CONNECTED + looks)
    words = ["unshare", "-m", "bash", "-ec", WITH_RDMA, str(folder), *COMMAND, "launch", "-n", "2"]
    env = {"LD_LIBRARY_PATH": str(module)}
    done = mpirun.run([*words, "--protocol", "ucx", str(program)], None, env=env).check()
    loaded = {Path(path).parent for path in facts(done)["loaded"]}
    assert loaded == {module if has_ib else Path(package, "lib")}
    assert (f"in {module}, which has RDMA" in done.stderr) is has_ib


def test_idle_workers_leave_their_core_alone_and_killed_and_restarted_ones_come_back(mpirun: Mpi) -> None:
    program = """
import contextlib, signal
before = {row["name"]: row["pid"] for row in looks(client)}
work(client)
used = sum(client.run(time.process_time).values())
time.sleep(3)
tell(cpu=sum(client.run(time.process_time).values()) - used)
client.submit(lambda: os.kill(os.getpid(), signal.SIGKILL), retries=0, workers=[0], pure=False)
def is_back():
    with contextlib.suppress(OSError):  # asked while it dies
        after = {row["name"]: row["pid"] for row in looks(client)}
        return len(after) == 2 and after[0] != before[0]
wait_until(is_back, 60)
work(client)
client.restart(timeout=60)
seen(client)
"""
    told = facts(mpirun.run(HEAD + INITIALIZED + program, 2).check())
    check(told, 2)
    assert told["cpu"] < 1.5  # of 6 s; with distributed-ucxx's own progress it is all of them


def test_a_worker_that_dies_while_others_read_from_it(mpirun: Mpi) -> None:
    """Its peers notice at once, by TLS: the computation goes on with what is made again."""
    program = """
import signal, threading
pids = {row["name"]: row["pid"] for row in looks(client)}
def large(i):
    import numpy
    return numpy.full(20_000_000, i, dtype="f8")
def added(a, b):
    return float(a[0] + b[0])
left = client.map(large, range(4), workers=[0], allow_other_workers=True, pure=False)
right = client.map(large, range(4), workers=[1], allow_other_workers=True, pure=False)
wait([left, right])
sums = client.map(added, left, right, pure=False)
time.sleep(0.3)
os.kill(pids[0], signal.SIGKILL)
began = time.monotonic()
tell(sums=client.gather(sums), seconds=time.monotonic() - began)
seen(client)
"""
    told = facts(mpirun.run(HEAD + INITIALIZED + program, 2).check())
    assert told["sums"] == [0, 2, 4, 6]
    assert told["seconds"] < 60  # a keepalive of UCX would take minutes


def test_auto_where_ucx_does_not_start_stays_with_tls(mpirun: Mpi) -> None:
    """Emulated GPUs, on which no context can be made: the plan says UCX, the connections stay TLS and say so, all is right."""
    script = HEAD + CONNECTED + "tell(total=work(client), over_ucx=sorted(client.run(over_ucx).values()))\n"
    done = mpirun.run(script, 1, command=[], gpus=make_gpus(2, host="one")).check()
    told = facts(done)
    assert told["total"] == pytest.approx(2e6, rel=0.01)
    assert told["over_ucx"] == [0, 0]
    assert "transport: TLS, and UCX for GPU memory between workers" in done.stderr
    lines = [line for line in done.stderr.splitlines() if "do not go over UCX" in line]
    assert len(lines) == 2  # one of each worker
    assert all(line.startswith("dask_gpu_mpi: warning: ") for line in lines), lines


CHECK = [*COMMAND, "check", "--protocol", "ucx", "--json"]


def transport(done: CompletedJob) -> list[dict[str, Any]]:
    """The findings about UCX."""
    return [each for each in json.loads(done.stdout)["findings"] if each["what"] == "transport"]


def test_check_uses_ucx(mpirun: Mpi) -> None:
    done = mpirun.run(CHECK, 2).check()
    (finding,) = transport(done)
    assert finding["level"] == "ok"
    assert "UCX for large data between workers (" in finding["found"]
    assert "within nodes " in finding["found"]


def test_check_uses_ucx_between_hosts(mpirun: Mpi, hosts: TestBed) -> None:
    opened, found = transport(mpirun.run(CHECK, 3, env=OPEN, bed=hosts))
    assert opened["level"] == "warning"
    assert "can run code as you" in opened["found"]
    assert found["level"] == "ok"
    assert "between nodes " in found["found"]


def test_check_where_ucx_finds_no_way_to_another_host(mpirun: Mpi, hosts: TestBed) -> None:
    env = {**OPEN, "DASK_DISTRIBUTED_UCXX__ENVIRONMENT__NET_DEVICES": "lo"}
    done = mpirun.run(CHECK, 2, env=env, bed=hosts, hosts=["h1", "h2"])
    found = [each for each in transport(done) if each["found"].startswith("UCX does not work with ")]
    assert {each["level"] for each in found} == {"warning"}
    assert sorted(rank for each in found for rank in each["ranks"]) == [0, 1]


@pytest.mark.parametrize(
    "entry",
    [entry for entry in TABLE if entry.module.partition(".")[0] in ("ucxx", "distributed_ucxx", "libucxx")],
    ids=lambda entry: f"{entry.module}.{entry.name}",
)
def test_private_names_are_there(entry: Any) -> None:
    with patch.dict(os.environ):  # ucxx sets UCX's variables, which the jobs of other tests would inherit
        owner = importlib.import_module(entry.module)
    assert hasattr(owner, entry.name), f"{entry.module} has no {entry.name}; now {entry.without}"
