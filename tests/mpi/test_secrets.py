"""The private key is in no place where others, or a file that is passed on, would show it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from support.jobs.clusters import COMMAND, until, without_mpi
from support.jobs.mpi import Mpi
from support.jobs.scripts import script

KEY = b"PRIVATE KEY"

SCRIPT = script("mpi/scripts/leaves_secrets.py")


def has_key(path: Path) -> bool:
    try:
        data = path.read_bytes()
        return KEY in (gzip.decompress(data) if path.suffix == ".gz" else data)
    except OSError:
        return False


@pytest.mark.quick("openmpi")
def test_no_key_in_anything_that_a_job_leaves_or_shows(mpirun: Mpi) -> None:
    options = {
        "--log-level": "debug",
        "--log-directory": "logs",
        "--scheduler-file": "file.json",
        "--report": "report.html",
    }
    argv = [part for option in options.items() for part in option]
    job = mpirun.start([*COMMAND, "--worker-class", "distributed.Nanny", *argv, "script.py"], 2)
    (job.directory / "script.py").write_text(SCRIPT)
    job.wait_for("done")
    for pid in (*job.processes(), *without_mpi(job)):
        for name in ("cmdline", "environ"):
            assert not has_key(Path(f"/proc/{pid}/{name}")), (pid, name)
    files = {path for path in job.directory.rglob("*") if path.is_file()}
    names = {path.name for path in files}
    assert {"dump.msgpack.gz", "dump.yaml", "from-scheduler.yaml", "said.json", "file.json"} <= names
    assert any(path.parent.name == "logs" for path in files), files
    assert {path.name for path in files if has_key(path)} == {"script.py", "file.json"}
    dump = (job.directory / "dump.yaml").read_text()
    assert "private key, left out" in dump
    assert "BEGIN CERTIFICATE" in dump  # the rest of the configuration is there
    (job.directory / "go-on").touch()
    done = job.wait(30).check(0)
    assert KEY.decode() not in done.output
    until(lambda: not (job.directory / "file.json").exists(), 5)
    left = [path.name for path in job.directory.rglob("*") if path.is_file() and has_key(path)]
    assert left == ["script.py"]
    assert (job.directory / "report.html").exists()
