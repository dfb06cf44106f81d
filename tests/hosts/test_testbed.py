"""The test bed: hosts that are hosts to MPI, several beds at once, and nothing left of them."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support import TESTBED
from support.bed.hosts import TestBed
from support.jobs.clusters import alive
from support.jobs.mpi import Mpi

WHERE = """
    import os, socket
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    address = socket.gethostbyname(socket.gethostname())
    rows = world.gather((world.rank, socket.gethostname(), address, os.environ.get("COLOUR")))
    if world.rank == 0:
        print(rows)
"""


def rows(text: str) -> list[tuple[int, str, str, str | None]]:
    return list(ast.literal_eval(text))


@pytest.mark.both_mpis
@pytest.mark.quick
def test_world_spans_two_hosts(mpirun: Mpi, hosts: TestBed) -> None:
    done = mpirun.run(WHERE, 4, bed=hosts, hosts=["h1", "h2"], env={"COLOUR": "red"}).check()
    assert rows(done.stdout) == [
        (0, "h1", "10.77.0.1", "red"),
        (1, "h1", "10.77.0.1", "red"),
        (2, "h2", "10.77.0.2", "red"),
        (3, "h2", "10.77.0.2", "red"),
    ]


@pytest.mark.both_mpis
def test_processes_on_other_hosts_are_found(mpirun: Mpi, hosts: TestBed) -> None:
    program = "import time; print('asleep', flush=True); time.sleep(600)"
    job = mpirun.start(program, 3, bed=hosts)
    job.wait_for("asleep(.|\n)*asleep(.|\n)*asleep")
    networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in job.processes(r"script\.py$")}
    assert len(networks) == 3
    job.kill()
    assert not job.processes()


def sleeper(bed: TestBed, host: str) -> int:
    """PID of a process on that host that is nobody's child."""
    line = bed.on(host, ["setsid", "--fork", "sh", "-c", "echo $$; exec sleep 600 > /dev/null"])
    return int(subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True, timeout=10).stdout)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


def test_two_beds_do_not_meet(hosts: TestBed, tmp_path: Path) -> None:
    mine = sleeper(hosts, "h1")
    other = TestBed.up(2, tmp_path / "other")
    try:
        others = sleeper(other, "h1")
        assert os.readlink(f"/proc/{mine}/ns/net") != os.readlink(f"/proc/{others}/ns/net")
    finally:
        other.down()
    wait_until_gone(others)
    assert alive(mine)
    assert not other.state.exists()
    os.kill(mine, signal.SIGKILL)


def test_bed_ends_with_its_owner(hosts: TestBed, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as owner:
        env = {**os.environ, "TESTBED_DIR": str(tmp_path / "bed"), "TESTBED_OWNER": str(owner.pid)}
        subprocess.run(
            [TESTBED / "hosts-up", "1"], env=env, check=True, stdout=subprocess.DEVNULL, timeout=60
        )
        bed = TestBed(tmp_path / "bed", ("h1",))
        left = sleeper(bed, "h1")
        owner.kill()
    wait_until_gone(left)


@pytest.mark.quick("mpich")
def test_no_namespaces_is_a_reason_to_skip(tmp_path: Path) -> None:
    # without capabilities, unshare is refused: what an ordinary container does
    env = {**os.environ, "TESTBED_DIR": str(tmp_path / "bed")}
    line = ["setpriv", "--reuid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
    if os.geteuid() != 0:
        line = ["setpriv", "--no-new-privs"]
    done = subprocess.run(
        [*line, TESTBED / "hosts-up", "1"], env=env, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 77, done.stderr
    assert done.stderr.count("\n") == 1
    assert "namespaces are not permitted" in done.stderr
