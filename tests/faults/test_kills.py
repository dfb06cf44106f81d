"""Processes of the cluster that are killed, one by one, while tasks run."""

from __future__ import annotations

import os
import signal
import time

import pytest

from support.jobs.clusters import parent, ranks_of, scratch_of, until
from support.jobs.faults import end, mark_time, marks, set_mark, start, strike
from support.jobs.mpi import Mpi


@pytest.mark.both_mpis
@pytest.mark.quick(form="initialize")
@pytest.mark.parametrize(
    ("victim", "form", "options"),
    [
        ("launcher", "command", {}),
        ("launcher", "bare", {}),
        (0, "command", {}),
        (1, "bare", {}),
        # whose agents die at once with their ranks
        (1, "initialize", {"worker_class": "distributed.Worker"}),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else str(value),
)
def test_rank_or_launcher(mpirun: Mpi, victim: str | int, form: str, options: dict[str, str]) -> None:
    body = "futures = start_tasks()\nmark('busy')\ntime.sleep(600)\n"
    job = start(mpirun, form, body, at="busy", options=options)
    assert len(scratch_of(job)) == 2
    strike(job, victim)
    # without its launcher the whole job has as long as after any other fault
    until(lambda: not job.processes(), 10)
    # FAILS: if MPICH kills rank 0, its agent, which has a worker in its own process, leaves the scheduler file
    end(job, None, 10, tracebacks=None, scratch="worker_class" in options)
    assert scratch_of(job) == []


@pytest.mark.quick
def test_agent_of_a_worker(mpirun: Mpi) -> None:
    body = (
        "futures = start_tasks()\nos.kill(agent_of('1'), signal.SIGKILL)\ncheck_tasks(futures)\n"
        "wait_for_names('0', '1')\nmark()\nsys.exit(3)\n"
    )
    job = start(mpirun, "initialize", body)
    end(job, 3, 3.0, says=("restarting it in 0.5 s",))


def test_agent_of_a_worker_under_a_profiler(mpirun: Mpi) -> None:
    """The worker ends with it although a task keeps the interpreter to itself."""
    body = """
def hold(begun):
    import ctypes
    open(begun, "w").close()
    ctypes.PyDLL(None).sleep(600)

worker = process_of('1')
held = client.submit(hold, os.path.abspath("begun"), workers=[1])
wait_until(lambda: os.path.exists("begun"))
os.kill(parent_of(worker), signal.SIGKILL)
held.cancel()
wait_until(lambda: not os.path.exists(f"/proc/{worker}/exe"))  # which a zombie does not have
mark()
sys.exit(3)
"""
    job = start(mpirun, "command", body, env={"NVTX_INJECTION64_PATH": "/nothing"})
    end(job, 3, 5.0, tracebacks=None)


@pytest.mark.versions
def test_worker_and_its_fork_server(mpirun: Mpi) -> None:
    """Those that come after it log and are silent as those before."""
    body = """
futures = start_tasks()
before = process_of('1')
os.kill(before, signal.SIGKILL)
check_tasks(futures)
wait_for_names('0', '1')
assert process_of('1') != before

def loggers():
    import logging
    handlers = logging.getLogger("distributed").handlers
    return str([logging.getLogger("distributed").level, *(type(f).__name__ for h in handlers for f in h.filters)])

futures = start_tasks()
before = client.run(loggers)
os.kill(parent_of(process_of('1')), signal.SIGKILL)
check_tasks(futures)
wait_for_names('0', '1')
after = client.run(loggers)
assert before.keys() != after.keys()
assert len({*before.values(), *after.values()}) == 1, (before, after)
mark()
sys.exit(3)
"""
    job = start(mpirun, "command", body, options={"log_level": "error"})
    end(job, 3, 3.0, says=("its fork server has died", "restarting it in 0.5 s"))


@pytest.mark.slow
def test_a_removed_worker_stays_away_when_its_agent_is_restarted(mpirun: Mpi) -> None:
    """And the rank's other worker, which comes back, keeps the cluster when that of the other rank has gone."""
    body = """
for turn in range(5):
    wait_for_names("2", "2-cpu-0", "3")
    time.sleep(0.6)  # deaths between two looks of the agent, 0.25 s apart, count once
    os.kill(process_of("2-cpu-0"), signal.SIGKILL)
    wait_for_names("2", "3")
wait_until(lambda: marked("removed"))
os.kill(agent_of("2"), signal.SIGKILL)
wait_for_names("3")
wait_for_names("2", "3")
client.retire_workers(names=[3])
wait_for_names("2")
compute()
mark()
sys.exit(3)
"""
    options = {"cpu_workers": 1, "nthreads": 1, "layout": "exclusive"}
    job = start(mpirun, "command", body, ranks=4, options=options)
    job.wait_for("worker 2-cpu-0 on .* removed: its process died 5 times", 60, stream="stderr")
    set_mark(job, "removed")
    end(job, 3, 5.0, says=("worker 2-cpu-0 on", "restarting it in 0.5 s"), timeout=90, tracebacks=None)


@pytest.mark.slow
def test_workers_with_a_lifetime(mpirun: Mpi) -> None:
    """They are restarted as often as that is over, and nobody calls it a death."""
    body = """
pids = set()

def restarted():
    pids.update(client.run(os.getpid, on_error="ignore").values())
    return len(pids) > 6

wait_until(restarted, 60)
mark()
sys.exit(3)
"""
    options = {"worker_options": '{"lifetime": "2 s", "lifetime_restart": true}'}
    job = start(mpirun, "command", body, 1, options=options)
    assert "removed" not in end(job, 3, 5.0, timeout=90, tracebacks=None).stderr


#: Shorter times between the starts of an agent.
HURRY = "import dask_gpu_mpi.job.member\ndask_gpu_mpi.job.member.DELAYS = (0.1, 0.2, 0.3)\n"
AGAIN = """
def kill_again(others):
    for _ in range(4):
        wait_for_names(*others, "2")
        os.kill(agent_of("2"), signal.SIGKILL)
        wait_for_names(*others)
"""


@pytest.mark.slow
@pytest.mark.parametrize("others", [["0", "1"], []], ids=["one of three", "the only one"])
def test_agent_too_often(mpirun: Mpi, others: list[str]) -> None:
    body = f"{AGAIN}kill_again({others})\n"
    if others:
        body += f"time.sleep(3)\nwait_for_names(*{others})\n"  # its workers would have come back by now
        body += "check_tasks(start_tasks())\nmark()\nsys.exit(3)\n"
        code, says = 3, ("rank 2 removed, continuing with the other ranks", "restarting it in 0.3 s")
    else:
        body += "mark()\ntime.sleep(60)\n"
        code, says = 1, ("error: no worker is left: the cluster is lost",)
    options = {} if others else {"layout": "exclusive"}
    job = start(mpirun, "initialize", body, ranks=3, before=HURRY, options=options)
    end(job, code, 3.0 if others else 10.0, says=says, timeout=90, tracebacks=0 if others else None)


@pytest.mark.both_mpis
@pytest.mark.quick(victim="scheduler")
@pytest.mark.parametrize(
    ("victim", "form", "ranks", "says"),
    [
        ("scheduler", "initialize", 3, "the scheduler's process ended (exit code -9)"),
        ("head agent", "command", 2, "and the scheduler with it"),
    ],
)
def test_head(mpirun: Mpi, victim: str, form: str, ranks: int, says: str) -> None:
    pid = "client.run_on_scheduler(os.getpid)"
    target = pid if victim == "scheduler" else f"parent_of({pid}, 2)"
    # relative paths are of the directory where the job began
    # exclusive: rank 0, which has the scheduler, has to tell the script's
    options = {"local_directory": "."} | ({"layout": "exclusive"} if ranks == 3 else {})
    body = (
        "futures = start_tasks()\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\n"
        f"target = {target}\nmark()\nos.kill(target, signal.SIGKILL)\nclient.gather(futures)\ntime.sleep(60)\n"
    )
    job = start(mpirun, form, body, ranks, options=options)
    end(job, 1, 10, says=(says, "the cluster is lost"), tracebacks=None)


#: What scripts do of SIGTERM themselves.
OWN = {
    "notes": "signal.signal(signal.SIGTERM, lambda *_: mark('asked'))\nwait = lambda: wait_until(lambda: marked('asked'))\n",
    "ignores": "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwait = lambda: time.sleep(60)\n",
    "default": "signal.signal(signal.SIGTERM, signal.SIG_DFL)\nwait = lambda: time.sleep(60)\n",
    "asyncio": """
import asyncio

async def until_asked():
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    await asked.wait()

wait = lambda: asyncio.run(until_asked())
""",
}


@pytest.mark.parametrize("own", OWN)
def test_scheduler_of_a_script_that_handles_sigterm_itself(mpirun: Mpi, own: str) -> None:
    """It is told by an exception, as any other; and does not end as if its time had run out, with code 0."""
    body = (
        OWN[own]
        + """
from dask_gpu_mpi import ClusterLostError
atexit.register(mark, "atexit")
target = client.run_on_scheduler(os.getpid)
mark()
os.kill(target, signal.SIGKILL)
try:
    wait()
except ClusterLostError:
    mark("told")
    raise
"""
    )
    job = start(mpirun, "initialize", body, options={"report": "report.json"})
    end(job, 1, 10, says=("the cluster is lost",), tracebacks=None)
    assert marks(job) == ["atexit", "end", "told", "up"]
    assert "the cluster was lost" in (job.directory / "report.json").read_text()


@pytest.mark.parametrize("close", ["sys.stderr.close()", "os.close(2)"])
def test_scheduler_of_a_script_without_standard_error(mpirun: Mpi, close: str) -> None:
    body = f"{close}\nmark()\nos.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)\ntime.sleep(20)\n"
    end(start(mpirun, "initialize", body), 1, 10, tracebacks=None)


@pytest.mark.both_mpis
@pytest.mark.parametrize("ranks", [2, None], ids=["launched", "alone"])
def test_all_descriptors_closed(mpirun: Mpi, ranks: int | None) -> None:
    """The agent takes it for the end, and the pipes to it are gone; files of the script's have got their numbers."""
    body = (
        "mark()\ntry:\n    os.closerange(3, 1024)\n    files = [open(f'data-{i}', 'w+') for i in range(200)]\n"
        "    for file in files:\n        file.write('of the script')\n        file.seek(0)\n"
        "    time.sleep(60)\nfinally:\n    mark('finally')\n"
    )
    job = start(mpirun, "command", body, ranks=ranks)
    end(job, 1, 15, tracebacks=None)
    mark_time(job, "finally")
    # the signal may come before the last of them is written
    assert {path.read_text() for path in job.directory.glob("data-*")} <= {"of the script", ""}


@pytest.mark.parametrize("victim", ["scheduler", "head agent"])
def test_head_without_a_script(mpirun: Mpi, victim: str) -> None:
    job = start(mpirun, "bare")
    rank = ranks_of(job)[0]
    parents = {pid: parent(pid) for pid in job.processes("python")}
    agent = next(pid for pid, above in parents.items() if above == rank)
    server = [pid for pid, above in parents.items() if above == agent]
    # of what the fork server has forked the scheduler is the first
    children = sorted(pid for pid, above in parents.items() if above in server)
    fault = time.time()
    os.kill(agent if victim == "head agent" else children[0], signal.SIGKILL)
    says = "the scheduler's process ended" if victim == "scheduler" else "and the scheduler with it"
    end(job, 1, 10, since=fault, says=(says,))


@pytest.mark.of_mpi("mpich")
def test_shared_memory_of_mpi_in_a_killed_rank(mpirun: Mpi) -> None:
    """MPICH removes its file in /dev/shm at the end of MPI, which a killed rank does not reach."""
    body = """
import re, time
from mpi4py import MPI
from dask_gpu_mpi import initialize
with open("/proc/self/maps") as file:
    print(MPI.COMM_WORLD.rank, *set(re.findall(r"/dev/shm/mpich_shm_\\w+", file.read())), flush=True)
initialize()
print("it runs", flush=True)
time.sleep(60)
"""
    job = mpirun.start(body, 2)
    job.wait_for("it runs")
    names = {word for word in job.stdout.split() if word.startswith("/dev/shm/")}
    assert names
    os.kill(ranks_of(job)[1], signal.SIGKILL)
    job.wait(30)
    assert [name for name in names if os.path.exists(name)] == []
