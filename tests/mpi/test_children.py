"""Processes that the script starts find the job's cluster: subprocesses, multiprocessing's, a notebook's kernel."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import nbformat
import pytest

from support.jobs.clusters import COMMAND, TELL, facts
from support.jobs.mpi import Mpi
from support.jobs.scripts import expanded

LAUNCH = (*COMMAND, "launch", "-n", "2")
#: What each child answers: how many workers it found, of which cluster, what it reads in the user's own configuration, and
#: whether others can read the key in what the system shows of it.
CHILD = """
def answer(how):
    import dask
    with how() as client:
        seen = b"".join(open(f"/proc/self/{name}", "rb").read() for name in ("environ", "cmdline"))
        workers = client.scheduler_info(n_workers=-1)["workers"]
        return [len(workers), client.scheduler.address, dask.config.get("mine", None), b"PRIVATE " + b"KEY" in seen]
"""
ANSWER = (
    CHILD
    + """
import json, sys
from distributed import Client
from dask_gpu_mpi import connect
print(json.dumps(answer({"Client": Client, "connect": connect}[sys.argv[1]])))
"""
)
CHILDREN = (
    TELL
    + CHILD
    + f"""
import subprocess
from multiprocessing import get_context
from dask_gpu_mpi import connect, current_session
from distributed import Client

def put(how, answers):
    answers.put(answer(how))

def outside(dask_worker):
    return [os.environ.get(name) for name in ("DASK_CONFIG", "DGM_DASK_BEFORE")]

if __name__ == "__main__":
    found = {{}}
    for how in (Client, connect):
        for start in ("fork", "spawn", "forkserver"):
            answers = get_context(start).Queue()
            child = get_context(start).Process(target=put, args=(how, answers))
            child.start()
            found[f"{{how.__name__}} {{start}}"] = answers.get(timeout=60)
            child.join(60)
        code = {ANSWER!r}
        done = subprocess.run([sys.executable, "-c", code, how.__name__], capture_output=True, text=True, timeout=60)
        tell(errors=done.stderr)
        found[f"{{how.__name__}} subprocess"] = json.loads(done.stdout)
    with connect() as client:
        workers = list(client.run(outside).values())
    session = current_session()
    tell(found=found, workers=workers, address=session.address)
    session.close()
    code = "import dask_gpu_mpi; dask_gpu_mpi.connect()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    tell(closed=done.stderr, left=[name for name in os.environ if name == "DGM_DASK_BEFORE"], own=os.environ["DASK_CONFIG"])
"""
)


@pytest.mark.slow
def test_every_kind_of_process(mpirun: Mpi, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("mine: 7")
    env = {"DASK_CONFIG": str(own)}
    done = mpirun.run(CHILDREN, 2, command=["--no-dashboard"], env=env).clean()
    told = facts(done)
    assert told["address"].startswith("tls://")
    expected = [2, told["address"], 7, False]
    assert told["found"] == dict.fromkeys(told["found"], expected)
    assert len(told["found"]) == 8
    assert told["errors"] == ""
    assert told["workers"] == [[str(own), None]] * 2
    # the cluster is over, the script continues
    assert "error: connect: this process has no cluster" in told["closed"]
    assert told["left"] == []
    assert told["own"] == str(own)


FORKS = """
from support.jobs.scripts.tell import tell
from distributed import Client
from dask_gpu_mpi import initialize
initialize(dashboard=False)
with Client() as client:
    if not (child := os.fork()):
        sys.exit(4)
    tell(code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sum=client.submit(sum, [1, 2]).result())
sys.exit(7)
"""


def test_a_forked_child_that_ends_as_python_does(mpirun: Mpi) -> None:
    """It ends neither the cluster nor the job, and a rank without MPI has none to finalize."""
    done = mpirun.run(FORKS, 2).clean(7)
    assert facts(done) == {"code": 4, "sum": 3}


ENDINGS = {
    "raise": "raise ValueError('mine')",
    "close": "session.close()",
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left(mpirun: Mpi, ending: str) -> None:
    body = TELL + "import signal\nfrom dask_gpu_mpi import initialize\nsession = initialize()\n"
    body += "tell(config=os.environ['DASK_CONFIG'], keys=b'PRIVATE KEY' in open(os.environ['DASK_CONFIG'], 'rb').read())\n"
    before = set(os.listdir("/dev/shm"))
    job = mpirun.start(body + ENDINGS[ending], 2)
    done = job.wait()
    assert (done.rc == 0) is (ending == "close")
    told = facts(done)
    assert told["keys"]
    assert not os.path.exists(told["config"])
    assert [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("dgm-")] == []
    names = [path.name for path in job.directory.iterdir()]
    assert [name for name in names if name.startswith(("dgm-", "dask"))] == []


#: It has read Dask's configuration before its cluster is there.
NESTED = """
from support.jobs.scripts.tell import tell
import dask
BEGIN
from distributed import Client
with Client() as client:
    tell(inner=client.scheduler.address, found=len(client.scheduler_info(n_workers=-1)["workers"]))
"""
OUTER = """
from support.jobs.scripts.tell import tell
import subprocess
from distributed import Client
from dask_gpu_mpi.sites.launchers import scrub
client = Client()
tell(outer=client.scheduler.address)
tell(code=subprocess.run(sys.argv[1:], env=scrub(os.environ), timeout=90).returncode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["initialize", "launch"])
def test_a_job_that_the_script_starts_has_a_cluster_of_its_own(mpirun: Mpi, how: str, tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    begin = "import dask_gpu_mpi; dask_gpu_mpi.initialize()" if how == "initialize" else ""
    inner.write_text(expanded(NESTED.replace("BEGIN", begin)))
    launcher = [mpirun.mpirun, "-n", "2", sys.executable]
    if how == "launch":
        launcher = [sys.executable, "-m", "dask_gpu_mpi", "launch", "-n", "2"]
    words, env = [*map(str, launcher), str(inner)], {"DASK_GPU_MPI__DASHBOARD": "False"}
    done = mpirun.run(OUTER, 1, command=["--protocol", "tcp"], args=words, env=env)
    told = facts(done.check())
    assert told["code"] == 0, done.output
    assert told["outer"].startswith("tcp://")
    assert told["inner"].startswith("tls://")
    assert told["found"] == 2


#: Replaces itself by a program that waits for the end of the cluster. It has pipes, which Dask must not read as a configuration.
REPLACED = """
import os, sys
from dask_gpu_mpi import initialize
initialize().client().submit(sum, [1, 2]).result()
code = (
    "import glob, os, tempfile, time\\n"
    "pipes = [os.pipe() for _ in range(20)]\\n"
    "import dask\\n"
    "print(dask.config.get('scheduler-address', None))\\n"
    "while glob.glob(f'{tempfile.gettempdir()}/dgm-*'): time.sleep(0.05)\\n"
    "raise SystemExit(7)"
)
os.execv(sys.executable, [sys.executable, "-c", code])
"""


@pytest.mark.both_mpis
@pytest.mark.parametrize("words", [(), COMMAND, LAUNCH], ids=["initialize", "command", "launch"])
def test_a_script_that_replaces_itself(mpirun: Mpi, words: tuple[str, ...], tmp_path: Path) -> None:
    """The cluster ends, the program finds none, and the job ends with its code."""
    script = tmp_path / "script.py"
    script.write_text(REPLACED)
    ranks = None if words == LAUNCH else 2
    job = mpirun.start(
        [*(words or ("python",)), str(script)], ranks, env={"DASK_GPU_MPI__DASHBOARD": "False"}
    )
    done = job.wait().clean(7)
    assert done.stdout.split() == ["None"]


def notebook(path: Path) -> Path:
    """A notebook with one cell, which writes what it has found beside it."""
    cell = f"""
import json
from distributed import Client
client = Client()
workers = client.scheduler_info(n_workers=-1)["workers"]
found = [len(workers), client.scheduler.address, client.submit(sum, [1, 2]).result()]
open({str(path / "found.json")!r}, "w").write(json.dumps(found))
client.close()
"""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(book, path / "nb.ipynb")
    return path / "nb.ipynb"


def test_a_notebook(mpirun: Mpi, tmp_path: Path) -> None:
    words = ["-c", "from nbclient.cli import main; main()", str(notebook(tmp_path))]
    env = {"HOME": str(tmp_path), "JUPYTER_PLATFORM_DIRS": "1"}
    mpirun.run([*COMMAND, "--no-dashboard", *words], 2, env=env).check()
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found[0], found[2]) == (2, 3)
    assert found[1].startswith("tls://")
