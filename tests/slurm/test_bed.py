"""The test bed's Slurm."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from support import TESTBED
from support.bed.slurm import Slurm
from support.jobs.clusters import until


def _where(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def test_nothing_is_left_when_its_owner_is_killed(slurm: Slurm) -> None:
    # the fixture: where there is no Slurm, there is none here either; several can be up at once
    with tempfile.TemporaryDirectory(prefix="dgs-bed-", ignore_cleanup_errors=True) as folder:
        state = Path(folder) / "bed"
        owner = subprocess.Popen(["sleep", "600"])
        env = {**os.environ, "TESTBED_DIR": str(state), "TESTBED_OWNER": str(owner.pid)}
        try:
            subprocess.run([TESTBED / "hosts-up", "2"], env=env, check=True, timeout=60, capture_output=True)
            start = [TESTBED / "slurm-up", "1", "0"]
            up = subprocess.run(start, env=env, check=True, timeout=60, capture_output=True, text=True)
            env["SLURM_CONF"] = up.stdout.strip()
            on_h1 = [str(TESTBED / "on"), "h1"]
            show = [*on_h1, "sinfo", "-h", "-N", "-o", "%N %G"]
            nodes = subprocess.run(show, env=env, capture_output=True, text=True, check=True)
            assert nodes.stdout.split("\n")[:2] == ["h1 gpu:a100:1", "h2 (null)"]
            line = [*on_h1, "sbatch", "--nodes=2", "--output=/dev/null", "--wrap", "srun sleep 600"]
            subprocess.run(line, env=env, check=True, capture_output=True, timeout=30)
            networks = {
                _where(int((state / f"{host}.holder").read_text().split()[0])) for host in ("h1", "h2")
            }

            def commands() -> list[str]:
                pids = [
                    int(name)
                    for name in os.listdir("/proc")
                    if name.isdigit() and _where(int(name)) in networks
                ]
                return [_command(pid) for pid in pids]

            until(
                lambda: sum(command.endswith("/sleep 600") for command in commands()) == 2,
                30,
                "the job runs",
            )
            owner.kill()
            owner.wait()
            until(lambda: not commands(), 30, "processes")
            until(lambda: not state.exists(), 10, "files")
        finally:
            owner.kill()
            owner.wait()
            subprocess.run([TESTBED / "hosts-down"], env=env, check=True, timeout=60)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
