"""`launch` over two nodes: in the environment of a PBS job, and by `--hosts`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from support.bed.hosts import SSH, TestBed
from support.jobs.clusters import CLIENT, COMMAND, facts, packed_environment, small_environment, workers_of
from support.jobs.mpi import Mpi

SCRIPT = (
    CLIENT
    + """
tell(workers=looks(client), mine=client.run(lambda: os.environ.get("MINE")))
sys.exit(7)
"""
)


def variables(tmp_path: Path, *, pbs: bool) -> dict[str, str | None]:
    """The environment of `launch`."""
    (tmp_path / "nodes").write_text("h1\nh2\n")
    env: dict[str, str | None] = {**SSH, "PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "MINE": "a b"}
    if pbs:
        env |= {
            "PBS_JOBID": "7.server",
            "PBS_NODEFILE": str(tmp_path / "nodes"),
            "NCPUS": "8",
            "OMP_NUM_THREADS": "8",
        }
    return env


@pytest.mark.parametrize("where", [pytest.param("PBS", marks=pytest.mark.both_mpis), "--hosts"])
def test_two_nodes(mpirun: Mpi, hosts: TestBed, tmp_path: Path, where: str) -> None:
    (tmp_path / "analysis.py").write_text(SCRIPT)
    env = variables(tmp_path, pbs=where == "PBS")
    options = [] if where == "PBS" else ["--hosts", "h1,h2"]
    line = hosts.on("h1", [sys.executable, *COMMAND[1:], "launch", *options, str(tmp_path / "analysis.py")])
    done = mpirun.run(line, None, bed=hosts, env=env, cwd=tmp_path, timeout=90).check(7)
    told = facts(done)
    assert sorted(row["host"] for row in workers_of(told).values()) == ["h1", "h2"]
    # Open MPI brings no variable to another node by itself
    assert set(told["mine"].values()) == {"a b"}
    logs = {file.name.split("-")[0] for file in (tmp_path / "logs").glob("7.server/*")}
    assert logs == ({"rank", "scheduler", "worker"} if where == "PBS" else set())  # and no mark


def test_the_token_is_not_in_public_output_of_another_node(
    mpirun: Mpi, hosts: TestBed, tmp_path: Path
) -> None:
    """The script's rank is on another node than `launch`, and can't see where its output ends."""
    (tmp_path / "analysis.py").write_text(
        "from dask_gpu_mpi import initialize\nprint(initialize().dashboard_link)\n"
    )
    with tempfile.TemporaryDirectory() as public:  # everyone may enter it, and read what is in it
        os.chmod(public, 0o755)
        output = Path(public, "output")
        options = ["--hosts", "h1,h2", "--client-rank", "1", "--log-directory", str(tmp_path / "logs")]
        words = [sys.executable, *COMMAND[1:], "launch", *options, str(tmp_path / "analysis.py")]
        line = hosts.on("h1", ["sh", "-c", f'umask 022; exec "$@" 2> {output}', "sh", *words])
        env = variables(tmp_path, pbs=False)
        done = mpirun.run(line, None, bed=hosts, env=env, cwd=tmp_path, timeout=90).check()
        printed = output.read_text()
    token = done.stdout.strip().partition("?token=")[2]
    assert token
    assert "others may read this output" in printed
    assert token not in printed


STAGED = (
    CLIENT
    + """
found = client.run(lambda: (os.uname().nodename, sys.prefix, os.stat(sys.prefix + "/..").st_mode & 0o777))
tell(found=sorted(found.values()), mine=sys.prefix)
sys.exit(7)
"""
)


def staged(hosts: TestBed, tmp_path: Path, source: Path, local: str, *options: str) -> list[str]:
    """The command line of a job on three nodes with a copy of an environment on each."""
    (tmp_path / "analysis.py").write_text(STAGED)
    words = ["--hosts", "h1,h2:2,h3", "--stage", str(source), "--local-directory", local, *options]
    return hosts.on("h1", [sys.executable, *COMMAND[1:], "launch", *words, str(tmp_path / "analysis.py")])


def left(hosts: TestBed, folder: str) -> str:
    """Copies on the hosts."""
    command = ["sh", "-c", f"ls -d {folder}/dgm-stage-* 2>/dev/null; true"]
    return "".join(
        subprocess.run(hosts.on(host, command), capture_output=True, text=True, timeout=30, check=True).stdout
        for host in hosts.hosts
    )


def test_each_node_starts_its_copy_of_an_environment(mpirun: Mpi, hosts: TestBed, tmp_path: Path) -> None:
    source = packed_environment(tmp_path)
    env = variables(tmp_path, pbs=False)
    line = staged(hosts, tmp_path, source, "/dev/shm")
    done = mpirun.run(line, None, bed=hosts, env=env, cwd=tmp_path, timeout=110).check(7)
    told = facts(done)
    assert told["mine"].startswith("/dev/shm/dgm-stage-")
    assert told["found"] == [[host, told["mine"], 0o700] for host in ("h1", "h2", "h2", "h3")]
    assert "each node has its copy" in done.stderr
    assert left(hosts, "/dev/shm") == ""


def test_a_node_without_space_for_the_copy(mpirun: Mpi, hosts: TestBed, tmp_path: Path) -> None:
    source = small_environment(tmp_path / "env")
    (source / "large").write_bytes(os.urandom(1 << 20))
    packed = tmp_path / "env.tar.gz"
    subprocess.run(["tar", "-czf", packed, "-C", source, "."], check=True, timeout=30)
    make = "mkdir -p /dev/shm/small && mount -t tmpfs -o size=256k tmpfs /dev/shm/small"
    subprocess.run(hosts.on("h2", ["sh", "-c", make]), check=True, timeout=30)
    try:
        line = staged(hosts, tmp_path, packed, "/dev/shm/small")
        env = variables(tmp_path, pbs=False)
        done = mpirun.run(line, None, bed=hosts, env=env, cwd=tmp_path, timeout=90).check(2)
    finally:
        subprocess.run(hosts.on("h2", ["umount", "/dev/shm/small"]), check=True, timeout=30)
    assert re.search(
        r"launch: --stage: h2: it can't be unpacked, and \S+ (KiB|B) are left there: tar:", done.error
    )
    assert "h1:" not in done.error
    assert left(hosts, "/dev/shm/small") == ""


def test_copies_in_a_folder_that_all_nodes_share(mpirun: Mpi, hosts: TestBed, tmp_path: Path) -> None:
    source = packed_environment(tmp_path)
    line = staged(hosts, tmp_path, source, str(tmp_path / "shared"))
    env = variables(tmp_path, pbs=False)
    done = mpirun.run(line, None, bed=hosts, env=env, cwd=tmp_path, timeout=90).check(2)
    assert "the local directory is shared by nodes" in done.stderr
    assert "--local-directory" in done.stderr
    assert list((tmp_path / "shared").iterdir()) == []
