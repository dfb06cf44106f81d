"""The test bed's Slurm: nothing of it is left when it ends or when its owner is killed."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from support import TESTBED
from support.bed import slurm as slurmbed
from support.bed.hosts import TestBed
from support.bed.slurm import REQUIRED, Slurm, new_slurm
from support.jobs.clusters import until
from support.jobs.mpi import JobError


def _where(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


@pytest.mark.parametrize("ending", ["slurm-down", "killed"])
def test_nothing_is_left(slurm: Slurm, ending: str) -> None:
    # the fixture: where there is no Slurm, there is none here either; several can be up at once
    with tempfile.TemporaryDirectory(prefix="dgs-bed-", ignore_cleanup_errors=True) as folder:
        state = Path(folder) / "bed"
        owner = subprocess.Popen(["sleep", "600"])
        env = {**os.environ, "TESTBED_DIR": str(state), "TESTBED_OWNER": str(owner.pid)}
        try:
            subprocess.run([TESTBED / "hosts-up", "2"], env=env, check=True, timeout=60, capture_output=True)
            up = subprocess.run(
                [TESTBED / "slurm-up", "1", "0"],
                env=env,
                check=True,
                timeout=60,
                capture_output=True,
                text=True,
            )
            env["SLURM_CONF"] = up.stdout.strip()
            on_h1 = [str(TESTBED / "on"), "h1"]
            nodes = subprocess.run(
                [*on_h1, "sinfo", "-h", "-N", "-o", "%N %G"],
                env=env,
                capture_output=True,
                text=True,
                check=True,
            )
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
            if ending == "killed":
                owner.kill()
                owner.wait()
                until(lambda: not commands(), 30, "processes")
                until(lambda: not state.exists(), 10, "files")
            else:
                subprocess.run([TESTBED / "slurm-down"], env=env, check=True, timeout=60)
                # who keeps the hosts in being sleeps as well
                until(lambda: set(commands()) == {"sleep infinity"}, 10, f"only hosts: {commands()}")
                assert not (state / "slurm").exists()
        finally:
            owner.kill()
            owner.wait()
            subprocess.run([TESTBED / "hosts-down"], env=env, check=True, timeout=60)


@pytest.mark.parametrize(
    ("error", "required", "has_cgroups", "outcome"),
    [
        (JobError("slurmd"), True, True, JobError),
        (Slurm.Unavailable("groups in use"), True, True, pytest.fail.Exception),
        (Slurm.Unavailable("no cgroups"), True, False, pytest.skip.Exception),
    ],
)
def test_no_host_is_left_when_slurm_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
    required: bool,
    has_cgroups: bool,
    outcome: type[BaseException],
) -> None:
    networks = set[str]()

    def up(bed: TestBed, libdir: Path, *, cgroups: bool) -> Slurm:
        networks.update(
            _where(int((bed.state / f"{host}.holder").read_text().split()[0])) for host in bed.hosts
        )
        raise error

    monkeypatch.setattr(Slurm, "up", up)
    monkeypatch.setattr(slurmbed, "why_no_cgroups", lambda: "" if has_cgroups else "version 2")
    if required:
        monkeypatch.setenv(REQUIRED, "required")
    else:
        monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(outcome), new_slurm(tmp_path, cgroups=True):
        pass
    assert len(networks - {""}) == 3
    assert not [name for name in os.listdir("/proc") if name.isdigit() and _where(int(name)) in networks]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
