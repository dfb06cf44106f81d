"""A dask-mpi user changes the import and nothing else."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest

import dask_gpu_mpi
from support.jobs.clusters import INITIALIZED, TELL, Driver, facts, up, workers_of
from support.jobs.mpi import CompletedJob, Mpi

#: Begins most scripts.
HEAD = """
import atexit, copy, logging, time
import dask
import dask_gpu_mpi
from dask_gpu_mpi import execute, initialize, send_close_signal
from dask_gpu_mpi.options.resolve import register_defaults
from distributed import Client
from mpi4py import MPI

world = MPI.COMM_WORLD
"""


def facts_of(
    mpirun: Mpi, program: str, ranks: int, rc: int = 0, *, head: str = HEAD, fails: bool = False
) -> tuple[dict[str, Any], CompletedJob]:
    """What a script tells, and its job, which leaves nothing behind, and prints nothing of others unless a task `fails`."""
    done = mpirun.run(TELL + head + program, ranks).check(rc)
    assert done.left == ()
    return facts(done), done if fails else done.clean()


@pytest.mark.quick
@pytest.mark.parametrize("name", ["initialize", "execute"])
def test_arguments_are_dask_mpis_in_their_order(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dask_mpi = pytest.importorskip("dask_mpi")
    theirs = inspect.signature(getattr(dask_mpi, name)).parameters
    ours = inspect.signature(getattr(dask_gpu_mpi, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[key].kind is ours[key].POSITIONAL_OR_KEYWORD for key in theirs), theirs
    by_keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    assert all(ours[key].kind in by_keyword for key in list(ours)[len(theirs) :]), list(ours)[len(theirs) :]


@pytest.mark.quick
def test_positional_arguments_exit_false_and_mpi_afterwards(mpirun: Mpi) -> None:
    program = """
register_defaults(dask.config)

def state():
    return {
        "excepthook": sys.excepthook,
        "config": copy.deepcopy(dask.config.config),
        "defaults": copy.deepcopy([*filter(None, dask.config.defaults)]),  # an empty set stays
    }

def changed(now):
    return [name for name in before if before[name] != now[name]]

before = state()
# interface, nthreads, local_directory, memory_limit, nanny, dashboard, dashboard_address, protocol, worker_class,
# worker_options, comm, exit
client_rank = initialize(
    None, 2, os.environ["TMPDIR"], "200MB", True, False, None, "tcp", None, {"lifetime": "1h"}, world, False
)
if client_rank:
    with Client() as client:
        tell(workers=looks(client), dashboard=client.dashboard_link, address=client.scheduler.address)
    inside = state()
    send_close_signal()
    send_close_signal()
    tell(changed=changed(inside), changed_after=changed(state()))
answers = world.gather((world.rank, type(client_rank).__name__, bool(client_rank)))
if world.rank == 0:
    tell(answers=answers, sum=world.reduce(1))
else:
    world.reduce(1)
"""
    told, done = facts_of(mpirun, program, 2)
    assert told["answers"] == [[0, "Session", True], [1, "bool", False]]
    assert told["changed"] == ["excepthook", "config", "defaults"]
    assert told["changed_after"] == []
    assert told["sum"] == 2
    assert told["address"].startswith("tcp://")
    rows = workers_of(told)
    assert {row["nthreads"] for row in rows.values()} == {2}
    assert {row["memory"] for row in rows.values()} == {200_000_000}
    assert all(row["nanny"] for row in rows.values()), rows
    # deprecated: told, once, and no error
    assert done.stderr.count("dask_gpu_mpi: warning: keyword nanny: deprecated") == 1


@pytest.mark.both_mpis
def test_sub_communicator_beside_mpi_work_of_others(mpirun: Mpi) -> None:
    program = """
mine = world.Split(int(world.rank in (1, 3)))
if world.rank in (1, 3):
    session = initialize(comm=mine, exit=False, worker_class="distributed.Worker")
    if session:
        with session, Client() as client:
            tell(workers=looks(client), cluster_rank=world.rank, doubled=client.submit(lambda x: 2 * x, 4).result())
else:
    turns = 0
    for turn in range(2000):
        turns += mine.allreduce(1)
    if world.rank == 0:
        tell(turns=turns)
total = world.allreduce(world.rank)
if world.rank == 2:
    tell(total=total)
"""
    told, _ = facts_of(mpirun, program, 4)
    assert told["cluster_rank"] == 1
    assert told["doubled"] == 8
    assert told["turns"] == 4000
    assert told["total"] == 6
    assert sorted(workers_of(told)) == ["0", "1"]


def test_execute_returns_the_result(mpirun: Mpi) -> None:
    program = """
def add(left, right=0):
    with Client() as client:
        tell(workers=looks(client), client=world.rank)
        return client.submit(lambda: left + right).result()

# client_function, client_args, client_kwargs, client_rank, scheduler, scheduler_rank
answer = execute(add, (3,), {"right": 4}, 2, True, 1, exclusive_workers=True, worker_name="mine", nthreads=1)
answers = world.gather(answer)
if world.rank == 0:
    tell(answers=answers)
"""
    told, _ = facts_of(mpirun, program, 4)
    assert told["answers"] == [None, None, 7, None]
    assert told["client"] == 2
    assert sorted(workers_of(told)) == ["mine-0", "mine-3"]


@pytest.mark.both_mpis
def test_execute_leaves_the_process_as_it_was(mpirun: Mpi) -> None:
    program = """
at_exit, register, unregister = [], atexit.register, atexit.unregister
atexit.register = lambda call: (at_exit.append(call), register(call))
atexit.unregister = lambda call: (call in at_exit and at_exit.remove(call), unregister(call))

duplicates = 0

def copied(comm, key, value):
    global duplicates
    duplicates += 1
    return value

def deleted(comm, key, value):
    global duplicates
    duplicates -= 1

world.Set_attr(MPI.Comm.Create_keyval(copied, deleted), "mine")

def hook(*args):
    hooked.append(args)

def state():
    return {
        "configuration": copy.deepcopy(dask.config.config),
        "defaults": copy.deepcopy([*filter(None, dask.config.defaults)]),  # an empty set stays
        "hook": sys.excepthook is hook,
        "silent": logging.getLogger("distributed").disabled,
        "duplicates": duplicates,
        "descriptors": len(os.listdir("/proc/self/fd")),
    }

def work(wrap):
    if wrap:
        before = sys.excepthook
        sys.excepthook = lambda *args: (wrapped.append(args), before(*args))
    with Client() as client:
        return client.submit(lambda: 1).result()

def cluster(wrap, **options):
    return execute(work, (wrap,), worker_class="distributed.Worker", dashboard=False, **options)

hooked, wrapped = [], []
sys.excepthook = hook
register_defaults(dask.config)  # as packages do with theirs when they are imported
states = [state()]
for turn in range(3):
    cluster(False, protocol="tcp" if turn == 1 else "tls")
    states.append(state())
open_files = [each.pop("descriptors") for each in states]
tell(**{
    f"changed{world.rank}": [[key for key in states[0] if each[key] != states[0][key]] for each in states],
    # the first cluster opens some for good: MPI's, and those of Dask's event loop
    f"opened{world.rank}": open_files[3] - open_files[1],
})

session = initialize(exit=False, worker_class="distributed.Worker", dashboard=False)
if session:
    session.close()
tell(**{
    f"at_exit{world.rank}": [call.__qualname__ for call in at_exit if call.__module__.startswith("dask_gpu_mpi.")],
})

# A hook that was put around ours stays.
for turn in range(2):
    cluster(turn == 0)
sys.excepthook(ValueError, ValueError("after it all"), None)
tell(**{f"hooks{world.rank}": [len(wrapped), len(hooked)]})
"""
    told, _ = facts_of(mpirun, program, 2)
    for rank in (0, 1):
        assert told[f"changed{rank}"] == [[]] * 4  # after each turn
        assert told[f"opened{rank}"] == 0
        assert told[f"at_exit{rank}"] == ["Member.abort_after_failure"]  # of the last cluster
    assert told["hooks0"] == [1, 1]
    assert told["hooks1"] == [0, 1]


def test_execute_of_a_function_that_shuts_down(mpirun: Mpi) -> None:
    """The other ranks go on at once, and the client's does not wait for them."""
    program = """
def work():
    Client().shutdown()
    world.recv(source=0)

execute(work, client_rank=1, shutdown_timeout=300, worker_class="distributed.Worker", dashboard=False)
if world.rank == 0:
    world.send("go", dest=1)
tell(**{f"after{world.rank}": True})
"""
    told, _ = facts_of(mpirun, program, 2)
    assert told == {"after0": True, "after1": True}


def test_a_shutdown_that_is_awaited(mpirun: Mpi) -> None:
    program = """
import asyncio

session = initialize(dashboard=False)

async def end():
    async with Client(asynchronous=True) as client:
        ending = client.shutdown()
        seen = [session.closed]
        await ending
        tell(closed=[*seen, session.closed])

asyncio.run(end())
"""
    told, _ = facts_of(mpirun, program, 1)
    assert told == {"closed": [False, True]}


def test_exceptions_of_execute_and_of_a_world_that_is_too_small(mpirun: Mpi) -> None:
    program = """
import dask_mpi

def fail():
    Client().submit(lambda: 1 / 0).result()

try:
    dask_gpu_mpi.initialize(layout="exclusive")
except dask_mpi.WorldTooSmallException as error:
    tell(**{f"small{world.rank}": [isinstance(error, dask_gpu_mpi.WorldTooSmallException), str(error)]})
try:
    dask_gpu_mpi.execute(fail)
except ZeroDivisionError as error:
    tell(caught=world.rank)
    world.allreduce(1)
    sys.exit(3)
world.allreduce(1)
"""
    told, done = facts_of(mpirun, program, 2, 3, fails=True)
    for rank in (0, 1):
        ours, text = told[f"small{rank}"]
        assert ours
        assert "needs at least 3 ranks, found 2" in text
    assert told["caught"] == 0
    assert done.stderr.count("Traceback") <= 1  # the worker's own log of the task that failed


def test_exclusive_workers_without_a_script(mpirun: Mpi, tmp_path: Path) -> None:
    """No rank is kept for a client that is elsewhere, nor for a scheduler that is there already."""
    file = tmp_path / "scheduler.json"
    owner = up(mpirun, file, 2, "--exclusive-workers", "--scheduler-rank", "1", workers=1)
    with Driver(file) as driver:
        assert driver.ask("names()") == ["0"]
        joined = up(mpirun, file, 1, "--exclusive-workers", "--no-scheduler")
        assert len(driver.ask("names()")) == 2
        driver.ask("client.shutdown()")
        for job in (owner, joined):
            job.wait().clean()


def test_children_of_a_script_that_has_had_two_sessions_and_its_end(mpirun: Mpi) -> None:
    """Its client is on another rank than 0, which ends at once when its session is closed."""
    program = """
import atexit, time
from dask_gpu_mpi import initialize

# runs after our own, which are registered later
rank = os.getpid()
atexit.register(lambda: tell(seconds=time.monotonic() - since) if session and os.getpid() == rank else None)
for turn in range(2):
    session = initialize(exit=False, client_rank=1, worker_class="distributed.Worker", dashboard=False)
    if session and turn:
        child = os.fork()
        if not child:
            os._exit(4)  # as those of multiprocessing: mpi4py would finalize MPI in it
        tell(code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if session:
        session.close()
since = time.monotonic()
"""
    told, done = facts_of(mpirun, program, 2, head="")
    assert told["code"] == 4
    assert told["seconds"] < 1.5
    assert done.stderr.count("ended after") == 2


#: A script for both: `mpirun python script.py`, and `mpirun python -m dask_gpu_mpi script.py`.
BOTH_WAYS = f"""{TELL}
from dask_gpu_mpi import current_session, initialize
session = initialize(nthreads=1, worker_class="distributed.Nanny", dashboard=False)
with session.client() as client:
    tell(workers=len(client.scheduler_info(n_workers=-1)["workers"]), same=session is current_session())
"""
RUNNING = "initialize: the command has started the cluster already; no effect: "


def test_initialize_below_the_command(mpirun: Mpi) -> None:
    more = "initialize(nthreads=1)\ninitialize(protocol='tcp', exit=False)\n"
    done = mpirun.run(BOTH_WAYS + more, 2, command=["--nthreads", "1"]).clean()
    assert facts(done) == {"workers": 2, "same": True}
    # options that are alike need no warning
    warnings = [line.partition(RUNNING)[2] for line in done.stderr.splitlines() if RUNNING in line]
    assert [warning.partition(". Fix: ")[0] for warning in warnings] == [
        "dashboard=False (the cluster has True), worker_class='distributed.Nanny' (the cluster has 'auto')",
        "protocol='tcp' (the cluster has 'tls'), exit=False",
    ]
    assert all("Fix: give these options to the command" in warning for warning in warnings), warnings


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("initialize(nthreds=1)", "unknown option 'nthreds'"),
        (
            "initialize().close(); initialize()",
            "initialize or execute: the command has started this job's cluster",
        ),
    ],
)
def test_what_is_refused_below_the_command(mpirun: Mpi, call: str, says: str) -> None:
    script = f"from dask_gpu_mpi import initialize\n{call}\nprint('on')\n"
    done = mpirun.run(script, 2, command=["--no-dashboard"]).clean(2)
    assert done.stdout == ""
    assert says in done.error


@pytest.mark.both_mpis
def test_a_script_that_does_not_look_at_the_result_of_initialize(mpirun: Mpi, tmp_path: Path) -> None:
    """On the other ranks it would start clusters of Dask's own, and compute everything again."""
    program = """
        import sys
        from dask_gpu_mpi import initialize

        initialize(exit=False)
        if __name__ == "__main__":
            from distributed import Client

            with Client() as client, open(sys.argv[1], "a") as file:
                print(client.submit(sum, [1, 2]).result(), file=file)
    """
    done = mpirun.run(program, 3, args=[str(tmp_path / "out")])
    said = "error: Client: initialize(exit=False) has returned False on this rank"
    assert (tmp_path / "out").read_text() == "3\n"
    assert said in done.stderr, done.output
    assert "Traceback" not in done.stderr, done.output
    assert done.rc == 2, done.output


def test_a_cluster_of_a_rank_on_which_initialize_has_returned_false(mpirun: Mpi) -> None:
    program = """
        from dask_gpu_mpi import initialize
        from distributed import Client, LocalCluster

        if not initialize(exit=False, dashboard=False):
            with LocalCluster(n_workers=1, processes=False, dashboard_address=None) as own, Client(own) as client:
                print(client.submit(sum, [1, 2]).result())
    """
    done = mpirun.run(program, 2).check()
    assert done.stdout == "3\n"
    assert (
        done.stderr.count("warning: LocalCluster: initialize(exit=False) has returned False on this rank")
        == 1
    )


@pytest.mark.both_mpis
@pytest.mark.parametrize("kept", [False, True])
def test_a_client_whose_constructor_fails(mpirun: Mpi, kept: bool) -> None:
    program = """
        import sys

        errors = []
        try:
            Client(timeout=None)
        except ValueError as error:
            if "kept" not in sys.argv:
                raise
            errors.append(error)
    """
    done = mpirun.run(program, 2, begin=INITIALIZED, args=["kept"] * kept)
    assert done.rc == (not kept), done.output
    assert ("Traceback" in done.stderr, "AttributeError" in done.stderr) == (not kept, False), done.output
    assert "dask_gpu_mpi: ended after" in done.stderr, done.output


@pytest.mark.quick
def test_initialize_within_a_setting_of_dask(mpirun: Mpi) -> None:
    """Its end removes the whole section, which initialize has brought. With dask-mpi, whose import brings it, this works."""
    program = """
        import dask
        from dask_gpu_mpi import current_session, initialize

        with dask.config.set({"distributed.scheduler.allowed-failures": 10}):
            initialize()
        with current_session().client() as client:
            print(client.submit(sum, [1, 2]).result())
            print(client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.allowed_failures))
        from distributed import Client

        print(Client().submit(sum, [2, 2]).result(), dask.config.get("distributed.scheduler.allowed-failures"))
    """
    assert mpirun.run(program, 2).check().stdout.split() == ["3", "10", "4", "3"]
