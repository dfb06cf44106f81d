"""What a process may find around it: no working directory, odd entries in `sys.path`, a Python that does not know where it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clusters import TELL, facts, only_our_lines
from dask_gpu_mpi.launchers import scrub
from harness import ROOT, Mpi

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


@pytest.mark.one_mpi
def test_no_working_directory_and_a_path_in_the_import_path(mpirun: Mpi) -> None:
    done = mpirun.run(f"{TELL}{GONE}from dask_gpu_mpi import initialize\ninitialize()\n{CLIENT}", 2).check()
    assert facts(done) == {"answer": 3, "folders": ["/", "/"]}
    assert only_our_lines(done.stderr)


@pytest.mark.one_mpi
def test_the_command_in_a_deleted_directory(mpirun: Mpi, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("")
    script = tmp_path / "s.py"
    script.write_text(f"{TELL}import neighbour\n{CLIENT}")
    # Without a launcher: Open MPI's refuses to start there. PYTHONPATH must not be taken for what `-m` puts in front.
    environ = {"PYTHONPATH": str(ROOT)}
    line = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" -m dask_gpu_mpi "$@"'
    command = ["bash", "-c", line, sys.executable]
    done = mpirun.run([*command, str(script)], None, env=environ).check()
    assert facts(done) == {"answer": 3, "folders": ["/"]}
    assert only_our_lines(done.stderr)
    done = mpirun.run([*command, "--timeline", "t.json", str(script)], None, env=environ).check(2)
    assert "--timeline: 't.json' can't be used; needed: an absolute path" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.one_mpi
def test_a_python_that_does_not_know_where_it_is(mpirun: Mpi) -> None:
    script = "import sys\nsys.executable = ''\nfrom dask_gpu_mpi import initialize\ninitialize()\n"
    done = mpirun.run(script, 2).check(2)
    errors = [line for line in done.stderr.splitlines() if "dask_gpu_mpi: error: " in line]
    assert len(errors) == 1
    assert (
        "sys.executable is '' (expected the path of a Python program). Fix: set sys.executable" in errors[0]
    )
    assert "Traceback" not in done.stderr


#: What launchers set that tells nobody which rank it is: where their libraries are, how Fortran writes, which version it is.
HARMLESS = {
    "GFORTRAN_UNBUFFERED_PRECONNECTED",
    "LD_LIBRARY_PATH",
    "OMPI_VERSION",
    "OPAL_PREFIX",
    "PMIX_PREFIX",
}


def test_all_that_the_launcher_adds_is_scrubbed_and_nothing_else(mpirun: Mpi) -> None:
    """A new version of a launcher may have new names."""
    script = f"{TELL}tell(environ=dict(os.environ))"
    alone, rank = (facts(mpirun.run(script, ranks))["environ"] for ranks in (None, 1))
    assert scrub(alone) == alone
    assert set(rank) - set(alone) != set()
    assert set(scrub(rank)) - set(alone) <= HARMLESS
    assert set(alone) <= set(scrub(rank))
