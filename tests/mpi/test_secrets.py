"""The private key is in no place where others, or a file that is passed on, would show it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from support.jobs.clusters import COMMAND, TELL, until, without_mpi
from support.jobs.mpi import Mpi

KEY = b"PRIVATE KEY"

SCRIPT = (
    TELL
    + """
import logging, traceback
import dask
from dask_gpu_mpi import initialize
session = initialize()
here = os.environ["TMPDIR"]
with session.client() as client:
    assert client.submit(sum, range(10)).result() == 45
    # there is one to be found
    assert any("PRIVATE KEY" in str(value) for value in client.run(lambda: dask.config.config).values())
    client.dump_cluster_state(os.path.join(here, "dump"))
    client.dump_cluster_state(os.path.join(here, "dump"), format="yaml")
    client.dump_cluster_state(os.path.join(here, "from-scheduler"), format="yaml", write_from_scheduler=True)
    try:
        client.submit(lambda: 1 / 0).result()
    except ZeroDivisionError as error:
        raised = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    said = {
        "session": repr(session), "plan": repr(session.plan), "security": repr(session.security),
        "html": session.security._repr_html_(), "versions": repr(client.get_versions()),
        "scheduler": repr(client.scheduler_info(n_workers=-1)), "logs": repr(client.get_worker_logs()),
        "scheduler's logs": repr(client.get_scheduler_logs()), "client": repr(client) + client._repr_html_(),
        "identity": repr(client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.identity())), "raised": raised,
    }
    from urllib.request import urlopen
    for page in ("info/main/workers.html", "json/identity.json", "json/index.html", "metrics", "sysmon"):
        url = (session.dashboard_link or "").replace("status", page)
        if url:
            try:
                said[page] = urlopen(url, timeout=10).read().decode(errors="replace")
            except OSError as error:
                said[page] = str(error)
    with open(os.path.join(here, "said.json"), "w") as file:
        json.dump(said, file)
    until = os.path.join(here, "go-on")
    tell(done=True)
    import time
    while not os.path.exists(until):
        time.sleep(0.05)
"""
)


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
    assert any(path.parent.name == "logs" for path in files)
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
