"""What a job prints: all of it, in time, and what comes of it where there is nobody to print for."""

from __future__ import annotations

import os
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jobs.clusters import COMMAND, INITIALIZED
from support.jobs.mpi import Mpi, foreign_lines
from support.jobs.scripts import script

PRINTS = script("mpi/scripts/prints.py")


@pytest.mark.parametrize("worker_class", ["distributed.Worker", "distributed.Nanny"])
def test_what_is_printed_outside_of_the_script(mpirun: Mpi, worker_class: str) -> None:
    """To a file, which Python buffers. Without a launcher: Open MPI's gives a terminal to its ranks."""
    job = mpirun.start(PRINTS, None, command=["--worker-class", worker_class], args=[worker_class])
    # while the job runs, and not at its end, which it may not live to see
    job.wait_for("a task")
    job.wait_for("the scheduler")
    done = job.go_on().clean()
    ends = ["half a line", "the scheduler's plugin", "the worker's plugin"]
    ends += ["the nanny's plugin"] * (worker_class == "distributed.Nanny")
    assert {line: done.stdout.count(line) for line in ends} == dict.fromkeys(ends, 1), done.output


@pytest.mark.both_mpis
@pytest.mark.quick
def test_what_the_script_has_printed_before_its_job_is_aborted(mpirun: Mpi) -> None:
    """A launcher knows nothing of Python's buffers."""
    program = "from dask_gpu_mpi.mpi.launcher import end_job\nprint('the result')\nend_job(3, {})\n"
    assert mpirun.run(program, 2, begin=INITIALIZED).check(3).stdout == "the result\n"


@pytest.mark.both_mpis
def test_what_a_script_has_printed_that_is_ended_by_force(mpirun: Mpi) -> None:
    program = """
        import contextlib, os, signal, time
        from dask_gpu_mpi.job import monitor

        monitor.LOST_GRACE = 1.0
        client = Client()
        print("the result")
        os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)
        while True:
            with contextlib.suppress(BaseException):
                time.sleep(60)
    """
    done = mpirun.run(program, 2, begin=INITIALIZED).check(1)
    assert "terminating it" in done.stderr
    assert done.stdout == "the result\n"


QUIET = """
import os, subprocess
from distributed import Client

def task():
    print("a task")
    for fd in range(3):
        os.fstat(fd)
    return subprocess.run(["echo", "its child"]).returncode

with Client() as client:
    assert client.submit(task).result() == 0
    open("succeeded", "w").close()
"""


@pytest.mark.parametrize(
    ("redirection", "worker_class"),
    [
        (">&-", "distributed.Worker"),
        ("<&- >&- 2>&-", "distributed.Nanny"),
        ("2>/dev/full", "distributed.Nanny"),
    ],
)
def test_nobody_to_print_for(mpirun: Mpi, tmp_path: Path, redirection: str, worker_class: str) -> None:
    (tmp_path / "script.py").write_text(QUIET)
    program = [sys.executable, *COMMAND[1:], "--worker-class", worker_class, "script.py"]
    done = mpirun.run(["sh", "-c", f"exec {shlex.join(program)} {redirection}"], None, cwd=tmp_path).clean()
    assert (tmp_path / "succeeded").exists()
    assert foreign_lines(done.stdout.replace("a task\n", "").replace("its child\n", "")) == []


@pytest.mark.parametrize("redirection", [">&-", "2>&-"])
def test_bad_input_and_nobody_to_tell(mpirun: Mpi, tmp_path: Path, redirection: str) -> None:
    """Exit code 2 all the same; and what belongs on standard error does not go elsewhere."""
    program = [sys.executable, *COMMAND[1:], "missing.py"]
    done = mpirun.run(["sh", "-c", f"exec {shlex.join(program)} {redirection}"], None, cwd=tmp_path).check(2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == (redirection == ">&-")


LINK = """
import os
from dask_gpu_mpi import current_session
print("LINK", current_session().dashboard_link, flush=True)
place = [line for line in open(os.environ["OUTPUT"]) if "dashboard at" in line][0].split()[-1]
path = place.rpartition(":")[2]
if os.path.exists(path):
    print("RUN", os.environ.get("DGM_RUN"), *os.listdir(os.path.dirname(path)), flush=True)
    print("FILE", oct(os.stat(path).st_mode & 0o777), repr(open(path).read()), flush=True)
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everyone may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize("how", ["file", "scheduler file", "launch", "private"])
def test_the_token_is_not_in_output_that_others_may_read(mpirun: Mpi, public: Path, how: str) -> None:
    """Below the launcher as well, to which a rank has a pipe. Logs and reports are for the user alone."""
    output, files = public / "output", public / "files"
    options = {
        "scheduler file": ["--scheduler-file", str(files)],
        "launch": ["--log-directory", str(files), "--report", str(public / "report.json")],
    }.get(how, [])
    (public / "script.py").write_text(LINK)
    words = [sys.executable, *COMMAND[1:], *options, str(public / "script.py")]
    if how == "launch":
        words[3:3] = ["launch", "--launcher=mpirun", "-n2", "--interface=lo", "--tolerate-lost-ranks=1"]
    else:
        words = mpirun.command(words, 2, env={"OUTPUT": str(output)})
    mask = "077" if how == "private" else "022"
    line = ["sh", "-c", f'umask {mask}; "$@" 2> {output}', "sh", *words]
    done = mpirun.run(line, None, env={"OUTPUT": str(output)}).check()
    found = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.strip())
    (printed,) = (line for line in output.read_text().splitlines() if "dashboard at" in line)
    link = found["LINK"]
    assert "?token=" in link
    if how == "private":
        assert printed.endswith(f"dashboard at {link}")
        return
    assert link.partition("?token=")[2] not in output.read_text()
    assert f"dashboard at {link.partition('?')[0]}: others may read this output" in printed
    # whoever may write to the folder could make a mark of the job's end with this number
    run, *names = found["RUN"].split()
    assert (run == "None") == (how != "launch")
    assert [name for name in names if run in name] == []
    mode, content = found["FILE"].split(maxsplit=1)
    assert mode == "0o600"
    assert link in content or how == "scheduler file"
    written = [path for path in (*files.glob("*"), public / "report.json") if path.is_file()]
    assert not [path for path in files.glob("*") if path.name.startswith(("dashboard-link", "ended"))]
    assert len(written) >= (4 if how == "launch" else 0)
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} <= {0o600}


IMPOSSIBLE = """
from support.jobs.scripts.client import client, go_on
asked = [client.submit(abs, -1, pure=False, resources={"GPU": 1}) for _ in range(3)]
asked.append(client.submit(abs, -1, pure=False, workers="elsewhere"))
go_on()
"""


def test_tasks_that_no_worker_can_run(mpirun: Mpi) -> None:
    job = mpirun.start(IMPOSSIBLE, 2, command=["--no-dashboard"])
    job.wait_for("requires workers=elsewhere", stream="stderr")
    done = job.go_on().clean()
    told = [line for line in done.stderr.splitlines() if "no worker can run" in line]
    assert told == [
        "dask_gpu_mpi: warning: scheduler: no worker can run the task 'abs', which has waited for 10 s: it requires resources "
        "GPU=1 (expected at most CPU=1 of a worker). Fix: start the job on nodes with GPUs, or do not require one",
        "dask_gpu_mpi: warning: scheduler: no worker can run the task 'abs', which has waited for 10 s: it requires "
        "workers=elsewhere (expected one of 0, 1). Fix: choose a worker or node of this cluster",
    ]


SECOND_CLUSTER = """
from distributed import Client, LocalCluster
from dask_gpu_mpi import current_session
if __name__ == "__main__":
    for _ in range(2):
        with LocalCluster(n_workers=1, processes=PROCESSES, dashboard_address="127.0.0.1:0") as cluster:
            with Client(cluster) as client:
                print(client.submit(abs, -1).result(), len(client.scheduler_info()["workers"]))
    with Client(n_workers=7, memory_limit="1GB", set_as_default=False) as client:
        print(client.submit(abs, -1).result(), len(client.scheduler_info()["workers"]))
    try:
        Client(nworkers=7)
    except ValueError as error:
        print(error)
    current_session().close()
    with LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        print(len(cluster.workers))
"""


@pytest.mark.parametrize("processes", [True, False])
def test_another_cluster(mpirun: Mpi, processes: bool) -> None:
    """It works, beside the job's with a warning, afterwards without."""
    script = SECOND_CLUSTER.replace("PROCESSES", str(processes))
    done = mpirun.run(script, 2, command=["--no-dashboard"])
    told = [line for line in done.stderr.splitlines() if "warning: " in line or "error: " in line]
    unexpected = "Unexpected keyword arguments: ['nworkers']"
    assert done.check().stdout.splitlines() == ["1 1", "1 1", "1 2", unexpected, "1"]
    assert told == [
        "dask_gpu_mpi: warning: LocalCluster: this job already has a cluster, whose workers do nothing for this one. Fix: client "
        "= Client(), which connects to the job's cluster",
        "dask_gpu_mpi: warning: Client: this job already has a cluster, to which it connects; no effect: n_workers, "
        "memory_limit. Fix: client = Client()",
    ]


UNUSED = "dask_gpu_mpi: warning: no client has connected to the cluster"
USES = {
    # whose warning has shown the way already
    "its own compute, and a client of another cluster": (
        "from distributed import Client, LocalCluster\nimport dask\nassert dask.delayed(abs)(-1).compute() == 1\n"
        "with LocalCluster(n_workers=1, processes=False, dashboard_address='127.0.0.1:0') as other, Client(other) as client:\n"
        "    print(client.submit(abs, -1).result())",
        False,
    ),
    "its own compute, and sys.exit()": (
        "import dask, sys\nprint(dask.delayed(abs)(-1).compute())\nsys.exit()",
        True,
    ),
    "a program's --help": (
        "import argparse\nparser = argparse.ArgumentParser(usage='1')\nparser.format_help = lambda: '1\\n'\n"
        "parser.parse_args(['--help'])",
        False,
    ),
    "a client of a child": (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'from distributed import Client; "
        "print(Client().submit(abs, -1).result())'], check=True)",
        False,
    ),
}


@pytest.mark.parametrize("use", USES)
def test_a_script_that_does_not_use_its_cluster(mpirun: Mpi, use: str) -> None:
    text, warned = USES[use]
    done = mpirun.run(text, 2, command=["--no-dashboard", "--client-rank", "1"]).check()
    assert done.stdout == "1\n"
    # a cluster of Dask's own may leave a future behind whose error nobody has looked at
    assert warned or foreign_lines(done.stderr) == []
    assert done.stderr.count(UNUSED) == warned


@pytest.mark.parametrize("argument", ["--help", "--wrong", ""])
def test_argparse_after_initialize(mpirun: Mpi, argument: str) -> None:
    program = """
        import argparse
        from dask_gpu_mpi import initialize

        initialize(dashboard=False)
        argparse.ArgumentParser().parse_args()
        import dask

        dask.delayed(abs)(-1).compute()
    """
    done = mpirun.run(program, 2, args=[argument] * bool(argument)).check(2 * (argument == "--wrong"))
    assert done.stderr.count(UNUSED) == (not argument)
