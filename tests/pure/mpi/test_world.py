"""The transports by which ranks meet: packets over a socket, MPI in a child process, and MPI of the script's own."""

from __future__ import annotations

import ast
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dask_gpu_mpi
from dask_gpu_mpi.errors import InputError, LauncherError, MpiMissingError, StartupError
from dask_gpu_mpi.mpi import world as module
from dask_gpu_mpi.mpi.world import (
    LARGEST,
    LaunchedWorld,
    MpiChild,
    MpiWorld,
    PacketWorld,
    own_world,
    world_of,
)
from dask_gpu_mpi.sites.local import RANK, TRANSPORT
from support.jobs.clusters import until
from support.jobs.processes import run_python
from support.mocks import mpi
from support.mocks.mpi import Comm, install, package


@pytest.fixture(autouse=True)
def no_mpi_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_has_no_port", False)


# -- packets over a socket


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    made = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield made
    for sock in made:
        sock.close()


def test_what_does_not_fit_waits_and_comes_in_order(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = map(PacketWorld, pair)
    sent = [bytes([number]) * LARGEST for number in range(64)]
    for data in sent:  # more than any socket holds; nobody reads meanwhile
        one.send(3, data)
    found: list[tuple[int, bytes]] = []
    while len(found) < len(sent):
        now = other.receive()
        assert now
        found += now
        assert one.receive() == []
    assert found == [(3, data) for data in sent]


@pytest.mark.parametrize("ends", ["leave", "close"])
def test_the_other_side_ends(ends: str, pair: tuple[socket.socket, socket.socket]) -> None:
    """Which has sent all that was queued, when it leaves in order."""
    one, other = PacketWorld(pair[0]), PacketWorld(pair[1])
    other.send(1, b"last")
    getattr(other if ends == "leave" else pair[1], ends)()
    assert one.fileno() == pair[0].fileno()
    assert one.receive() == [(1, b"last")]
    assert one.fileno() is None
    one.send(1, b"into nothing")
    one.abort(3)
    assert one.receive() == []
    one.leave()
    other.leave()


def test_who_leaves_waits_until_all_has_been_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = map(PacketWorld, pair)
    for _ in range(64):
        one.send(3, bytes(LARGEST))
    leaving = threading.Thread(target=one.leave)
    leaving.start()
    found = 0
    while other.fileno() is not None:
        found += len(other.receive())
    leaving.join()
    assert found == 64


def test_words_of_the_transport_are_no_messages(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].send(RANK.pack(TRANSPORT) + b"word")
    pair[1].send(RANK.pack(0))
    world = PacketWorld(pair[0])
    # who waits for the world asks again for what is behind it
    assert [world.receive(), world.receive()] == [[], [(0, b"")]]


def test_an_abort_is_asked_for_and_waited_for(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For some seconds at most."""
    monkeypatch.setattr(module, "ABORTING", 0.1)
    one = PacketWorld(pair[0])
    one.abort(75)
    assert pair[1].recv(100) == RANK.pack(TRANSPORT) + RANK.pack(75)
    assert one.fileno() is not None


def test_ranks_that_launch_has_started(pair: tuple[socket.socket, socket.socket]) -> None:
    given = os.dup(pair[0].fileno())
    os.set_inheritable(given, True)
    world = world_of({"DGM_RANK": "2", "DGM_SIZE": "4", "DGM_MEETING_FD": str(given)}, [])
    assert isinstance(world, LaunchedWorld)
    assert (world.rank, world.size, world.library, world.is_own) == (2, 4, "", False)
    with pytest.raises(OSError, match="Bad file"):  # no child inherits it
        os.fstat(given)
    fd = world.fileno()
    assert fd is not None
    assert not os.get_inheritable(fd)
    world.send(0, b"hello")
    assert pair[1].recv(100) == RANK.pack(0) + b"hello"
    pair[0].close()
    world.end()
    assert pair[1].recv(100) == b""


def test_variables_of_a_rank_that_launch_has_not_started() -> None:
    for fd in ("99999", "x", os.devnull):
        with pytest.raises(
            LauncherError, match=f"DGM_MEETING_FD={fd} is not a socket of `launch`. Fix: unset DGM_MEETING_FD"
        ):
            world_of({"DGM_RANK": "0", "DGM_SIZE": "1", "DGM_MEETING_FD": fd}, [])


# -- MPI in a child process


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[[str], MpiChild]]:
    """Starts one whose MPI has this code besides."""
    made: list[MpiChild] = []

    def start(code: str = "") -> MpiChild:
        world = world_of(dict(os.environ), package(tmp_path, code))
        assert isinstance(world, MpiChild)
        assert world.size == 0  # not known yet
        made.append(world)
        return world

    yield start
    for world in made:
        world.end()


def started(world: MpiChild) -> MpiChild:
    """One that knows its ranks, and has received nothing else."""
    until(lambda: world.receive() or world.size)
    return world


def test_a_child_has_mpi_until_the_rank_leaves(
    child: Callable[[], MpiChild], capfd: pytest.CaptureFixture[str]
) -> None:
    """Signals to all processes of a rank do not end it, not even while it imports: the rank decides."""
    world, mask = child(), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert mask == set()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(world._process.pid, number)
    started(world).send(0, b"to itself")
    assert (world.rank, world.size, world.library, world.is_own) == (0, 1, "mock", False)
    assert until(world.receive) == [(0, b"to itself")]
    world.end()
    assert capfd.readouterr().err == "Finalize\n"


def test_a_child_ends_all_ranks(child: Callable[[], MpiChild], capfd: pytest.CaptureFixture[str]) -> None:
    world = started(child())
    world.abort(75)
    assert (capfd.readouterr().err, world.fileno()) == ("Abort 75\n", None)


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        ("raise ImportError('no libmpi.so')", MpiMissingError, r"mpi4py finds no MPI library on .*no libmpi"),
        ("os._exit(7)", StartupError, r"^MPI could not be initialized \(exit code 7\)"),
        ("os.kill(os.getpid(), 9)", StartupError, r"\(killed by signal SIGKILL\)"),
        (
            "os.write(int(sys.argv[1]), struct.pack('<i', -1) + b'x')",
            StartupError,
            "the process for MPI sent something else",
        ),
    ],
)
def test_a_child_without_mpi(
    child: Callable[[str], MpiChild], code: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        started(child(code))
    assert not caught.value.reported  # type: ignore[attr-defined]


def test_a_child_that_dies_while_the_ranks_meet(child: Callable[[], MpiChild]) -> None:
    world = started(child())
    world._process.kill()
    text = r"MPI's process .* ended .* \(killed by signal SIGKILL\)"
    with pytest.raises(StartupError, match=text) as caught:
        until(world.receive)
    assert (caught.value.fatal, world.fileno()) == (True, None)


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise Exception('lost')", 1, "error: MPI: Exception: lost"),
        ("time.sleep(60)", -signal.SIGKILL, "warning: rank 0: MPI_Finalize has not returned within 0.2 s"),
    ],
)
def test_a_child_that_fails_at_its_end_or_does_not_end(
    child: Callable[[str], MpiChild],
    end: str,
    code: int,
    said: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FINALIZING", 0.2 if code < 0 else 20.0)
    world = started(child(f"def Finalize():\n    {end}"))
    world.end()
    assert world._process.returncode == code
    assert capfd.readouterr().err.count(said) == 1


#: A rank with `thread` in its arguments has a second thread.
FORKS = """
import atexit, os, sys, threading, time
from pathlib import Path
from dask_gpu_mpi.mpi.world import world_of

held = threading.Event()
if "thread" in sys.argv:
    threading.Thread(target=held.wait, daemon=True).start()
environ = dict(os.environ)
os.environ["RANKS"] = "mark"
atexit.register(print, "the rank's atexit")
sys.stdout.write("buffered\\n")
path = [*sys.path]
sys.path[:] = [""]  # the working directory, in which the child is not
world = world_of(environ, path, forks=True)
sys.path[:] = path
while not world.size:
    time.sleep(0.01)
    world.receive()
child = Path("/proc", str(world._process.pid))
print((child / "cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes())
print(os.readlink(child / "cwd"), os.readlink(child / "fd/0"))
world.end()
print(world._process.wait())
"""


def run_forks(
    tmp_path: Path, finalize: str, *words: str, program: str = FORKS
) -> subprocess.CompletedProcess[str]:
    """The output is open until the rank and its child have ended."""
    code = f"import atexit\nassert 'RANKS' not in os.environ\ndef Finalize():\n    {finalize}"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(package(tmp_path, code))}
    return run_python(program, *words, env=environ)


@pytest.mark.parametrize("words", [(), ("thread",)])
def test_a_child_is_a_fork_of_a_process_with_one_thread(words: tuple[str, ...], tmp_path: Path) -> None:
    """It has nothing that the rank has printed or registered, and ends as a new Python would."""
    done = run_forks(tmp_path, "print('Finalize')", *words)
    assert (done.returncode, done.stderr) == (0, "")
    expected = ["buffered", str(not words), "/ /dev/null", "Finalize", "0", "the rank's atexit"]
    assert sorted(done.stdout.splitlines()) == sorted(expected)


def test_a_fork_that_fails_at_its_end(tmp_path: Path) -> None:
    done = run_forks(tmp_path, "raise Exception('lost')")
    assert "error: MPI: Exception: lost" in done.stderr
    assert done.stdout.splitlines()[-2:] == ["1", "the rank's atexit"]


def test_a_fork_dies_with_the_rank(tmp_path: Path) -> None:
    program = FORKS.replace("world.end()", "os.kill(os.getpid(), 9)")
    done = run_forks(tmp_path, "time.sleep(100)", program=program)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")


def test_a_child_that_can_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(StartupError, match=r"could not start the process for MPI \(Too many open files\)"):
        world_of({}, [])


# -- MPI of the script's process


@pytest.mark.parametrize(
    ("loaded", "initialized", "comm", "starts", "rank"),
    [
        (False, False, None, False, None),
        (True, False, None, False, None),  # only imported, with mpi4py.rc.initialize = False
        (True, True, None, False, 0),  # it runs: the rank may not start another one
        (True, True, Comm(3, 5), False, 3),
        (False, False, Comm(3, 5), False, 3),
        (False, False, None, True, 0),
    ],
)
def test_whose_mpi_it_is(
    monkeypatch: pytest.MonkeyPatch,
    loaded: bool,
    initialized: bool,
    comm: Comm | None,
    starts: bool,
    rank: int | None,
) -> None:
    loads: list[tuple[Any, ...]] = []

    def load(environ: Any, host: str, *, by_mpi4py: bool) -> Any:
        loads.append((environ, host, by_mpi4py))
        return mpi

    monkeypatch.setattr("dask_gpu_mpi.mpi.library.load_mpi", load)
    install(monkeypatch)
    monkeypatch.setattr(mpi, "initialized", initialized)
    if not loaded:
        monkeypatch.delitem(sys.modules, "mpi4py.MPI")
    world = own_world(comm, {"A": "1"}, "h", starts=starts)
    if world is None:
        assert rank is None
    else:
        assert (world.rank, world.size, world.library, world.is_own) == (rank, 5 if rank else 1, "mock", True)
        assert world.fileno() is None  # it has to be polled
        assert world.is_open is (rank == 3 and initialized)  # one that is loaded here has no port on one host
    assert loads == ([] if world is None or initialized else [({"A": "1"}, "h", True)])


def test_mpi_that_an_earlier_cluster_has_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no port on one host, also in the next cluster of the program."""
    monkeypatch.setattr("dask_gpu_mpi.mpi.library.load_mpi", lambda *_, **__: mpi)
    install(monkeypatch)
    for initialized in (False, True):
        monkeypatch.setattr(mpi, "initialized", initialized)
        world = own_world(Comm(3, 5), {"A": "1"}, "h", starts=True)
        assert world is not None
        assert not world.is_open


@pytest.mark.parametrize("comm", [0, None])
def test_no_communicator(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(mpi, "initialized", True)
    with pytest.raises(InputError, match="is not a communicator with this rank"):
        own_world(mpi.COMM_NULL if comm is None else comm, {}, "h", starts=False)


def test_a_script_that_has_finalized_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(mpi, "finalized", True)
    with pytest.raises(InputError, match=r"^the script called MPI.Finalize\(\) before initialize\(\)"):
        own_world(None, {}, "h", starts=False)


@pytest.fixture
def over_mpi(monkeypatch: pytest.MonkeyPatch) -> tuple[Comm, MpiWorld]:
    install(monkeypatch)
    comm = Comm(0, 3)
    return comm, MpiWorld(comm, "mock")


def test_all_that_is_here_is_received_in_order(over_mpi: tuple[Comm, MpiWorld]) -> None:
    """A message that takes longer keeps back those of its own rank."""
    comm, zero = over_mpi
    for rank, data in ((1, b"a"), (2, b""), (1, bytes(LARGEST))):
        MpiWorld(comm.beside(rank), "mock").send(0, data)
    assert zero.receive() == [(1, b"a"), (2, b""), (1, bytes(LARGEST))]
    slow = comm.post(0, 1, b"slow", MpiWorld.TAG, comes=False)
    for source in (1, 2):
        comm.post(0, source, b"b", MpiWorld.TAG)
    assert zero.receive() == [(2, b"b")]
    slow.request.ready = True
    assert zero.receive() == [(1, b"slow"), (1, b"b")]


def test_messages_that_are_too_large_or_fail_are_left(over_mpi: tuple[Comm, MpiWorld]) -> None:
    """They are not allocated, and errors of MPI raise nothing."""
    comm, zero = over_mpi
    claims = (LARGEST + 1, 1 << 40, -32766)
    large = [comm.post(0, 1, b"", MpiWorld.TAG, claims=size) for size in claims]
    comm.post(0, 1, b"a", MpiWorld.TAG)
    assert zero.receive() == [(1, b"a")]
    assert not any(each.received for each in large)  # with Open MPI that would write beyond what is allocated
    comm.post(0, 1, b"a", MpiWorld.TAG).request.error = mpi.Exception("connection reset")
    assert [source for source, _ in zero.receive()] == [1]
    comm.broken = mpi.Exception("connection reset")
    zero.send(1, b"a")
    assert (zero.receive(), zero.has_sent()) == ([], True)


def test_the_end_waits_for_what_has_not_left(
    over_mpi: tuple[Comm, MpiWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVING", 0.01)
    comm, zero = over_mpi
    comm.comes = False
    for rank in (1, 2):
        zero.send(rank, b"a")
    comm.leaving[0].ready, comm.leaving[0].error = True, mpi.Exception("connection reset")
    zero.leave()
    assert not zero.has_sent()
    comm.leaving[1].ready = True
    assert zero.has_sent()


@pytest.mark.parametrize(
    ("initialized", "finalized", "forked"),
    [(True, False, False), (False, False, False), (True, True, False), (True, False, True)],
)
def test_an_abort_and_the_end_of_mpi_in_the_scripts_process(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    initialized: bool,
    finalized: bool,
    forked: bool,
) -> None:
    """A process that the script has forked does not end its MPI."""
    codes: list[int] = []
    install(monkeypatch)
    world = own_world(Comm(1, 2), {}, "h", starts=False)
    assert world is not None
    for name, value in (("initialized", initialized), ("finalized", finalized)):
        monkeypatch.setattr(mpi, name, value)
    monkeypatch.setattr(mpi.COMM_WORLD, "Abort", codes.append)
    world.abort(3)
    assert codes == [3] * (initialized and not finalized)
    if forked:
        monkeypatch.setattr(module.os, "getpid", lambda: 1)
    world.finalize()
    assert capfd.readouterr().err == "Finalize\n" * (not finalized and not forked)


#: mpi4py's methods that pickle what they send, or unpickle what arrives, of which there are no others of the same name.
PICKLING = {
    "allgather", "allreduce", "alltoall", "bcast", "bsend", "exscan", "ibsend", "improbe", "irecv", "isend", "issend", "mprobe",
    "reduce", "scan", "scatter", "sendrecv", "ssend",
}  # fmt: skip
#: Those that have namesakes, and what communicators are called.
AMBIGUOUS, COMMUNICATORS = {"gather", "recv", "send"}, {"COMM_WORLD", "_comm", "comm", "message"}


def test_nothing_in_the_package_has_mpi4py_pickle() -> None:
    for path in Path(dask_gpu_mpi.__file__).parent.rglob("*.py"):
        if path.name == "report_page.py":  # bokeh's scatter
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                of = getattr(node.value, "attr", getattr(node.value, "id", ""))
                place = f"{path}:{node.lineno}"
                assert node.attr not in PICKLING, place
                assert node.attr not in AMBIGUOUS or of not in COMMUNICATORS, place
