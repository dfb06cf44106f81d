"""What a process may find around it: no working directory, odd entries in `sys.path`, a Python that does not know where it is."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from dask_gpu_mpi.sites.launchers import scrub
from support import ROOT
from support.jobs.clusters import COMMAND, INITIALIZED, TELL, facts
from support.jobs.mpi import CompletedJob, Mpi, foreign_lines

GONE = """
import pathlib, shutil, tempfile
sys.path.append(pathlib.Path("/nowhere"))
os.chdir(tempfile.mkdtemp())
shutil.rmtree(os.getcwd())
"""
CLIENT = """
from distributed import Client
client = Client()
tell(answer=client.submit(len, "abc").result(), folders=list(client.run(os.getcwd).values()))
"""


def ours(done: CompletedJob) -> str:
    """Standard error without what Open MPI's library says of a directory that was deleted."""
    return re.sub(".*Unable to get the current working directory.*\n", "", done.stderr)


def test_no_working_directory_and_a_path_in_the_import_path(mpirun: Mpi) -> None:
    done = mpirun.run(TELL + GONE + INITIALIZED + CLIENT, 2).check()
    assert facts(done) == {"answer": 3, "folders": ["/", "/"]}
    assert foreign_lines(ours(done)) == []


def test_a_worker_is_restarted_when_the_working_directory_is_gone(mpirun: Mpi, tmp_path: Path) -> None:
    """The same happens to one that starts when the directory goes."""
    place = tmp_path / "gone"
    place.mkdir()
    script = (
        f"{TELL}import shutil\nos.chdir({str(place)!r})\n{INITIALIZED}"
        "client = Client()\nshutil.rmtree(os.getcwd())\nbefore = client.run(os.getpid)\n"
        "client.restart(timeout=30)\nafter = client.run(os.getpid)\n"
        "tell(workers=len(after), not_restarted=sorted(set(before.values()) & set(after.values())))\n"
    )
    done = mpirun.run(script, 2).check()
    assert facts(done) == {"workers": 2, "not_restarted": []}
    assert "Traceback" not in done.stderr


def test_the_command_in_a_deleted_directory(mpirun: Mpi) -> None:
    # without a launcher: Open MPI's refuses to start there
    line = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" -m dask_gpu_mpi -c 1'
    environ = {"PYTHONPATH": str(ROOT)}
    done = mpirun.run(["bash", "-c", line, sys.executable], None, env=environ).check(2)
    assert "error: the working directory was deleted (expected one in which the ranks can run)" in done.stderr
    assert len(ours(done).splitlines()) == 1


#: Python's file names are ASCII then: every other letter is a byte that it can't decode.
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
NAME = "wörk 'ö' ☃\n"


def test_names_that_are_not_ascii(mpirun: Mpi, tmp_path: Path) -> None:
    place = tmp_path / "wörk ☃"
    script = tmp_path / NAME / "scrïpt 🐍.py"
    for folder in (place, script.parent):
        folder.mkdir()
    (script.parent / "neighbour.py").write_text("VALUE = 3")
    script.write_text(
        f"{TELL}import neighbour\n"
        "from dask_gpu_mpi import connect\n"
        "def task():\n    import logging\n    logging.getLogger('distributed.worker').warning('\u2603')\n"
        "    return neighbour.VALUE\n"
        "with connect(sys.argv[1]) as client:\n    tell(answer=client.submit(task).result(), file=ascii(__file__))\n"
    )
    options = ["--scheduler-file", "s.json", "--report", "r.json", "--log-directory", "logs"]
    options[1::2] = [str(place / name) for name in options[1::2]]
    done = mpirun.run([*COMMAND, *options, str(script), options[1]], 2, env=ASCII).clean()
    assert facts(done) == {"answer": 3, "file": ascii(os.fsencode(script).decode("ascii", "surrogateescape"))}
    assert json.loads((place / "r.json").read_text(encoding="utf-8"))["start"]["steps"]
    assert not (place / "s.json").exists()
    assert "☃" in "".join(file.read_text(encoding="utf-8") for file in (place / "logs").glob("worker-*.log"))


def test_a_local_directory_that_dask_cannot_name(mpirun: Mpi, tmp_path: Path) -> None:
    options = ["--local-directory", str(tmp_path / "löcal")]
    done = mpirun.run(f"{TELL}{CLIENT}", None, command=options, env=ASCII).check(2)
    assert "its name is not valid ascii; PYTHONUTF8=1 may help. Fix: give another one" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    # what LC_ALL=C alone means to Python
    mpirun.run(f"{TELL}{CLIENT}", None, command=options, env={"LC_ALL": "C"}).check()
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["löcal"]


#: What launchers set that tells nobody which rank it is: where their libraries are, how Fortran writes, which version it is.
HARMLESS = {
    "GFORTRAN_UNBUFFERED_PRECONNECTED", "LD_LIBRARY_PATH", "OMPI_VERSION", "OPAL_PREFIX", "PMIX_PREFIX",
}  # fmt: skip


@pytest.mark.both_mpis
@pytest.mark.quick
def test_all_that_the_launcher_adds_is_scrubbed_and_nothing_else(mpirun: Mpi) -> None:
    """A new version of a launcher may have new names."""
    script = f"{TELL}tell(environ=dict(os.environ))"
    alone, rank = (facts(mpirun.run(script, ranks))["environ"] for ranks in (None, 1))
    assert scrub(alone) == alone
    assert set(rank) - set(alone) != set()
    assert set(scrub(rank)) - set(alone) <= HARMLESS
    assert set(alone) <= set(scrub(rank))


SETS = """
import os, sys
os.environ["FROM_SCRIPT"] = "k"
sys.path.insert(0, FOLDER)
os.chdir(FOLDER)
import dask
dask.config.set({"distributed.worker.memory.spill": 0.41, "distributed.client.heartbeat": "4s"})
import helper
"""
LOOKS = """
from distributed import Client

def inside():
    return os.environ.get("FROM_SCRIPT"), os.getcwd(), dask.config.get("distributed.worker.memory.spill")

client = Client()
print(client.submit(inside).result())
"""


def test_what_a_script_sets_at_its_top(mpirun: Mpi, tmp_path: Path) -> None:
    """The workers of a command start before its script; with initialize() they start when it is called."""
    (tmp_path / "helper.py").write_text("def value():\n    return 7\n")
    sets = SETS.replace("FOLDER", repr(str(tmp_path)))
    starts = "from dask_gpu_mpi import initialize\ninitialize(dashboard=False)"
    done = mpirun.run(f"{sets}{starts}{LOOKS}print(client.submit(helper.value).result())", 2).check()
    assert done.stdout.splitlines() == [f"('k', {str(tmp_path)!r}, 0.41)", "7"]
    assert "warning: Client" not in done.stderr
    done = mpirun.run(sets + LOOKS, 2, command=["--no-dashboard"]).check()
    assert done.stdout.startswith("(None, ")
    (said,) = [line for line in done.stderr.splitlines() if "warning: Client: " in line]
    what = f"the variable FROM_SCRIPT, the working directory, {str(tmp_path)!r} in sys.path, distributed.worker.memory.spill of"
    begin = "dask_gpu_mpi: warning: Client: the workers do not have what the script has set since its start"
    assert said.startswith(f"{begin}: {what} Dask's configuration. Fix: ")
    # nothing was set
    done = mpirun.run("from distributed import Client; Client()", 1, command=["--no-dashboard"]).check()
    assert "warning: Client" not in done.stderr


@pytest.mark.both_mpis
@pytest.mark.parametrize("launched", [False, True])
def test_a_python_that_was_built_for_an_old_linux(mpirun: Mpi, tmp_path: Path, launched: bool) -> None:
    """As conda's: it has no functions for descriptors of processes, and the loss of the cluster is noticed all the same."""
    gone = "import os, signal\nfor module, name in ((os, 'pidfd_open'), (signal, 'pidfd_send_signal'), (os, 'memfd_create')):\n"
    (tmp_path / "sitecustomize.py").write_text(f"{gone}    delattr(module, name)\n")
    (tmp_path / "script.py").write_text(
        f"{TELL}import time\n{CLIENT}assert not hasattr(os, 'pidfd_open')\n"
        "os.kill(client.run_on_scheduler(os.getpid), 9)\ntime.sleep(60)\n"
    )
    how = [*COMMAND, "launch", "-n", "2"] if launched else [*COMMAND]
    env = {"PYTHONPATH": str(tmp_path)}
    done = mpirun.run([*how, str(tmp_path / "script.py")], None if launched else 2, env=env)
    assert facts(done)["answer"] == 3
    assert done.rc not in (0, 137)
    assert done.stderr.count("the cluster is lost") == 1
    assert "pidfd" not in done.stderr
