"""`launch` over several nodes, by `--hosts`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.bed.hosts import SSH, TestBed
from support.jobs.clusters import COMMAND, facts, packed_environment, small_environment, workers_of
from support.jobs.mpi import CompletedJob, Mpi
from support.jobs.scripts import expanded

SCRIPT = """
from support.jobs.scripts.client import client, looks, tell
tell(workers=looks(client), mine=client.run(lambda: os.environ.get("MINE")))
sys.exit(7)
"""


def launch(
    mpirun: Mpi, hosts: TestBed, tmp_path: Path, script: str, *options: str, shell: str = ""
) -> CompletedJob:
    """A job that `launch` starts on h1; `shell`: runs its command line, "$@"."""
    (tmp_path / "analysis.py").write_text(expanded(script))
    env: dict[str, str | None] = {**SSH, "PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "MINE": "a b"}
    words = [sys.executable, *COMMAND[1:], "launch", *options, str(tmp_path / "analysis.py")]
    line = hosts.on("h1", ["sh", "-c", shell, "sh", *words] if shell else words)
    return mpirun.run(line, None, bed=hosts, env=env, cwd=tmp_path)


def test_two_nodes(mpirun: Mpi, hosts: TestBed, tmp_path: Path) -> None:
    """In the environment of a PBS job: test_pbs.py."""
    told = facts(launch(mpirun, hosts, tmp_path, SCRIPT, "--hosts", "h1,h2").check(7))
    assert sorted(row["host"] for row in workers_of(told).values()) == ["h1", "h2"]
    # Open MPI brings no variable to another node by itself
    assert set(told["mine"].values()) == {"a b"}
    assert not (tmp_path / "logs").exists()


def test_the_token_is_not_in_public_output_of_another_node(
    mpirun: Mpi, hosts: TestBed, tmp_path: Path
) -> None:
    """The script's rank is on another node than `launch`, and can't see where its output ends."""
    script = "from dask_gpu_mpi import initialize\nprint(initialize().dashboard_link)\n"
    options = ["--hosts", "h1,h2", "--client-rank", "1", "--log-directory", str(tmp_path / "logs")]
    with tempfile.TemporaryDirectory() as public:  # everyone may enter it, and read what is in it
        os.chmod(public, 0o755)
        shell = f'umask 022; exec "$@" 2> {public}/output'
        done = launch(mpirun, hosts, tmp_path, script, *options, shell=shell).check()
        printed = Path(public, "output").read_text()
    token = done.stdout.strip().partition("?token=")[2]
    assert token
    assert "others may read this output" in printed
    assert token not in printed


#: A job on three nodes with a copy of an environment on each.
STAGED = """
from support.jobs.scripts.client import client, tell
found = client.run(lambda: (os.uname().nodename, sys.prefix, os.stat(sys.prefix + "/..").st_mode & 0o777))
tell(found=sorted(found.values()), mine=sys.prefix)
sys.exit(7)
"""
THREE = ("--hosts", "h1,h2:2,h3")


def on_all(hosts: TestBed, command: str, names: Sequence[str] = ("h1", "h2", "h3")) -> str:
    """What a command of the shell prints on hosts."""
    return "".join(
        subprocess.run(
            hosts.on(host, ["sh", "-c", command]), capture_output=True, text=True, timeout=30, check=True
        ).stdout
        for host in names
    )


def left(hosts: TestBed, folder: str) -> str:
    """Copies on the hosts."""
    return on_all(hosts, f"ls -d {folder}/dgm-stage-* 2>/dev/null; true")


def test_each_node_starts_its_copy_of_an_environment(mpirun: Mpi, hosts: TestBed, tmp_path: Path) -> None:
    options = ("--stage", str(packed_environment(tmp_path)), "--local-directory", "/dev/shm")
    done = launch(mpirun, hosts, tmp_path, STAGED, *THREE, *options).check(7)
    told = facts(done)
    assert told["mine"].startswith("/dev/shm/dgm-stage-")
    assert told["found"] == [[host, told["mine"], 0o700] for host in ("h1", "h2", "h2", "h3")]
    assert "each node has its copy" in done.stderr
    assert left(hosts, "/dev/shm") == ""


def test_a_node_without_space_for_the_copy(mpirun: Mpi, hosts: TestBed, tmp_path: Path) -> None:
    source = small_environment(tmp_path / "env")
    (source / "large").write_bytes(os.urandom(1 << 20))
    options = ("--stage", str(packed_environment(tmp_path)), "--local-directory", "/dev/shm/small")
    on_all(hosts, "mkdir -p /dev/shm/small && mount -t tmpfs -o size=256k tmpfs /dev/shm/small", ["h2"])
    try:
        error = launch(mpirun, hosts, tmp_path, STAGED, *THREE, *options).check(2).error
    finally:
        on_all(hosts, "umount /dev/shm/small", ["h2"])
    assert re.search(
        r"launch: --stage: h2: it can't be unpacked, and \S+ (KiB|B) are left there: tar:", error
    )
    assert "h1:" not in error
    assert left(hosts, "/dev/shm/small") == ""


def test_copies_in_a_folder_that_all_nodes_share(mpirun: Mpi, hosts: TestBed, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    options = ("--stage", str(packed_environment(tmp_path)), "--local-directory", str(shared))
    done = launch(mpirun, hosts, tmp_path, STAGED, *THREE, *options).check(2)
    assert "the local directory is shared by nodes" in done.stderr
    assert "--local-directory" in done.stderr
    assert list(shared.iterdir()) == []
