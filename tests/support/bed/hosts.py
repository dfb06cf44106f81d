"""Hosts on this machine: network namespaces that ci/testbed makes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import TESTBED
from support.jobs.mpi import MARK, JobError

#: Of a job that starts the launcher itself: what stands in for ssh, in place of a site's own.
SSH = {
    "PRTE_MCA_plm_ssh_agent": str(TESTBED / "on-rsh"),
    "HYDRA_LAUNCHER": "ssh",
    "HYDRA_LAUNCHER_EXEC": str(TESTBED / "on-rsh"),
    "TESTBED_PASS": f"{MARK} PYTHONFAULTHANDLER",
}


class Unavailable(Exception):
    """No namespaces, or no Slurm, here: a reason to skip."""


@contextlib.contextmanager
def unavailable_is(*, required: bool) -> Iterator[None]:
    """The test is skipped, or fails."""
    try:
        yield
    except Unavailable as reason:
        if required:
            pytest.fail(str(reason), pytrace=False)
        pytest.skip(str(reason))


@dataclass(frozen=True)
class TestBed:
    """Namespace hosts that are up (ci/testbed)."""

    __test__ = False  # not a test class, whatever its name says

    state: Path
    hosts: tuple[str, ...]

    @classmethod
    def up(cls, count: int, state: Path) -> TestBed:
        """Start `count` hosts that end with this process; `Unavailable` says why there can be none."""
        bed = cls(state, tuple(f"h{i}" for i in range(1, count + 1)))
        bed.call("hosts-up", str(count), env={"TESTBED_OWNER": str(os.getpid())})
        return bed

    @classmethod
    @contextlib.contextmanager
    def for_tests(cls, count: int, *, required: bool = False) -> Iterator[TestBed]:
        """`count` hosts while a fixture lives; its tests are skipped, with the reason, where they can't be had."""
        with tempfile.TemporaryDirectory(prefix="dgm-bed-", ignore_cleanup_errors=True) as folder:
            with unavailable_is(required=required):
                bed = cls.up(count, Path(folder) / "bed")
            try:
                yield bed
            finally:
                # before the folder goes, which says what there is to end
                bed.down()

    def call(
        self, script: str, *words: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a script of ci/testbed."""
        environ = {**os.environ, **(env or {}), "TESTBED_DIR": str(self.state)}
        line = [TESTBED / script, *words]
        done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60)
        if done.returncode == 77:
            raise Unavailable(done.stderr.strip())
        if done.returncode:
            raise JobError(f"{script} failed with {done.returncode}: {done.stderr}")
        return done

    def down(self) -> None:
        """Kill everything on the hosts, and the hosts."""
        self.call("hosts-down")

    def on(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs `argv` on `host`."""
        return ["env", f"TESTBED_DIR={self.state}", str(TESTBED / "on"), host, *argv]

    def holder(self, host: str) -> int:
        """The process that keeps a host, or "switch", up."""
        return int((self.state / f"{host}.holder").read_text().split()[0])

    def ip(self, host: str, *words: str) -> None:
        """Change a host's network by iproute2."""
        subprocess.run(self.on(host, ["ip", *words]), check=True, timeout=10)
