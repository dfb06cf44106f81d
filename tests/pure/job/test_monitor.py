"""What the thread beside a script does, one event at a time, and who hears that the job's time runs out.

With real jobs: tests/faults.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import queue
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dask_gpu_mpi.base.signals import install
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job import monitor as module
from dask_gpu_mpi.job.member import Ending
from dask_gpu_mpi.job.monitor import Monitor, Walltime
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup.messages import Kind
from support.jobs.clusters import until

pytestmark = pytest.mark.usefixtures("handlers")

#: Seconds for what has to happen soon.
LIMIT = 20.0


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that this process would have been sent."""
    numbers: list[int] = []

    def kill(pid: int, number: int) -> None:
        assert pid == os.getpid()
        numbers.append(number)

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(module, "silence_dask", list)
    return numbers


class FakeMember:
    """A rank whose agent says something when the test writes to `says`."""

    launched = gone = False
    for_script: int | None = None

    def __init__(self) -> None:
        self.fd, self.says = os.pipe()
        self.agents = self  # a mock of both
        self.ending = Ending()
        self.joined = SimpleNamespace(options=Options(shutdown_timeout=1.0))
        self.sent: list[Any] = []
        #: Called with each message; a round of the monitor is over.
        self.on_message: Callable[[], Any] = lambda: None
        self.round = threading.Event()

    def seconds_until_due(self) -> float:
        return math.inf

    def pump(self, timeout: float) -> None:
        if self.fd >= 0 and select.select([self.fd], [], [], timeout)[0]:
            os.read(self.fd, 1)
            self.on_message()

    def send(self, kind: Kind) -> None:
        self.sent.append(kind)

    def launcher_gone(self) -> bool:
        self.round.set()
        return self.gone


@pytest.fixture
def member() -> Iterator[Any]:
    made = FakeMember()
    fds = made.fd, made.says
    yield made
    for fd in fds:
        with contextlib.suppress(OSError):  # closed by the test
            os.close(fd)


@contextlib.contextmanager
def running(member: Any, walltime: Walltime | None = None) -> Iterator[Monitor]:
    monitor = Monitor(member, walltime or Walltime({}, None, lambda *_: None))
    monitor.start()
    try:
        yield monitor
    finally:
        monitor.stop()
    assert [thread for thread in threading.enumerate() if "monitor" in thread.name] == []


def pass_on(member: Any, number: int) -> None:
    """Another rank was sent this signal."""
    heard = threading.Event()

    def hear() -> None:
        member.for_script = number
        heard.set()

    member.on_message = hear
    with running(member):
        os.write(member.says, b"x")
        assert heard.wait(LIMIT)
        until(lambda: member.for_script is None)


def test_it_waits_until_something_happens(member: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message, and who calls `wake`, end the wait; the descriptors of this package are looked at from time to time."""
    timeouts: queue.Queue[float | None] = queue.Queue()
    real = select.poll

    class Poll:
        def __init__(self) -> None:
            self.register, self._poll = (poller := real()).register, poller.poll

        def poll(self, timeout: float | None) -> Any:
            timeouts.put(timeout)
            return self._poll(timeout)

    monkeypatch.setattr(select, "poll", Poll)
    heard = threading.Event()
    member.on_message = heard.set
    with running(member) as monitor:
        assert timeouts.get(timeout=LIMIT) == 1000 * module.CHECK_DESCRIPTORS
        os.write(member.says, b"x")
        assert heard.wait(LIMIT)
        assert timeouts.get(timeout=LIMIT) == 1000 * module.CHECK_DESCRIPTORS
        monitor.announce_interrupt()
        assert timeouts.get(timeout=LIMIT) == 1000 * module.CHECK_DESCRIPTORS
        assert member.sent == [Kind.BUSY]
        member.seconds_until_due = lambda: 3.0  # another agent is to be started
        monitor.wake()
        assert timeouts.get(timeout=LIMIT) == 3000.0
        assert timeouts.empty()


def test_the_end_of_the_launcher_ends_the_script(
    member: Any, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as launcher:
        monkeypatch.setattr(os, "getppid", lambda: launcher.pid)
        member.launched = member.gone = True
        with running(member):
            assert launcher.stdin is not None
            launcher.stdin.close()  # it ends
            until(lambda: sent)
    assert sent == [signal.SIGTERM]


def test_it_ends_with_an_agent_that_has_ended_with_its_cluster(member: Any) -> None:
    def end() -> None:
        member.fd, member.ending.stopped = -1, True

    member.on_message = end
    with running(member):
        os.write(member.says, b"x")
        until(lambda: not [thread for thread in threading.enumerate() if "monitor" in thread.name])


def test_a_signal_is_passed_on_whose_handler_is_ours_or_pythons(member: Any, sent: list[int]) -> None:
    """But none that the script handles or ignores."""
    for handler in (signal.SIG_IGN, signal.SIG_DFL, lambda *_: None):
        signal.signal(signal.SIGTERM, handler)
        pass_on(member, signal.SIGTERM)
    assert sent == []
    install(signal.SIGTERM, lambda *_: None)
    pass_on(member, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pass_on(member, signal.SIGINT)
    assert sent == [signal.SIGTERM, signal.SIGINT]


def test_sigint_that_the_script_has_had_itself(member: Any, sent: list[int]) -> None:
    """A launcher tells all ranks of Ctrl-C; a second interrupt would cut the script's cleaning up short."""

    def fail(error: type[BaseException]) -> None:
        try:
            raise error
        finally:
            pass_on(member, signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt)
    assert sent == []
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError)
    assert sent == [signal.SIGINT]


@pytest.mark.parametrize("at_the_end", [True, False])
def test_a_failure_ends_the_script_but_is_nobodys_at_the_end(
    at_the_end: bool, member: Any, sent: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        if at_the_end:
            monitor.stop()
        member.round.set()
        raise OSError("broken pipe")

    member.on_message = fail
    with running(member) as monitor:
        os.write(member.says, b"x")
        assert member.round.wait(LIMIT)
        until(lambda: at_the_end or sent)
    assert sent == [signal.SIGTERM] * (not at_the_end)
    assert (
        "the monitor of the cluster failed: OSError: broken pipe" in capsys.readouterr().err
    ) is not at_the_end
    assert member.ending.lost == (None if at_the_end else "its monitor failed")


def test_another_thread_can_not_replace_a_handler(clock: Any) -> None:
    walltime = Walltime({}, None, lambda *_: None)

    def in_a_thread() -> str:
        with concurrent.futures.ThreadPoolExecutor(1, "mine") as pool:
            return str(pool.submit(walltime.call_back, print, 30.0).exception())

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert "called in the thread 'mine_0', while SIGTERM has another handler" in in_a_thread()
    walltime.call_back(print, 30.0)
    assert in_a_thread() == "None"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Seconds since the epoch, the end of the job, and how often the batch system was queried for it."""
    clock = SimpleNamespace(now=900.0, end=1000.0, asked=0)

    def end_time(environ: Any) -> float | None:
        clock.asked += 1
        return clock.end

    monkeypatch.setattr(module, "end_time", end_time)
    monkeypatch.setattr(module.time, "time", lambda: clock.now)
    return clock


@pytest.mark.parametrize("end", [1000.0, None])
def test_the_time_that_is_left(end: float | None, clock: Any, sent: list[int]) -> None:
    """It is queried once. Without an end there is no signal."""
    clock.end = end
    walltime = Walltime({}, None, lambda *_: None)
    for clock.now, left in ((900.0, 100.0), (999.5, 0.5), (1001.0, 0.0)):
        assert walltime.time_left() == (left if end else None)
    walltime.call_back(print, 30.0)
    walltime.check()
    assert (clock.asked, bool(sent)) == (1, end is not None)


def test_a_monitor_without_a_thread_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of threads is an error of the script, after which the job ends in order."""
    nothing: Any = None
    monitor = Monitor(nothing, nothing)
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="new thread"):
        monitor.start()
    monitor.stop()


def test_a_signal_during_the_query_of_the_batch_system(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def query(environ: Any) -> float:
        walltime.check()  # the monitor does not wait for it
        walltime.run_callback(signal.SIGTERM, None)
        return 1000.0

    monkeypatch.setattr(module, "end_time", query)
    walltime = Walltime({}, None, lambda *_: None)
    walltime.call_back(lambda: calls.append("checkpoint"), 30.0)
    assert calls == ["checkpoint"]


def test_the_signal_comes_in_time_and_the_callback_runs_once(clock: Any, sent: list[int]) -> None:
    calls: list[str] = []
    walltime = Walltime({}, None, lambda *_: None)
    assert not walltime.run_callback(signal.SIGTERM, None)
    clock.now = 2000.0
    walltime.check()  # nobody has asked for it
    assert walltime.seconds_until_due() == math.inf
    walltime.call_back(lambda: calls.append("checkpoint"), 30.0)
    for clock.now, times, seconds in ((900.0, 0, 1.0), (969.8, 0, 0.21), (970.5, 1, 1.0), (971.0, 1, 1.0)):
        walltime.check()
        assert sent == [signal.SIGTERM] * times
        assert walltime.seconds_until_due() == pytest.approx(seconds)
    assert [walltime.run_callback(signal.SIGTERM, None) for _ in range(2)] == [True, False]
    assert calls == ["checkpoint"]


@pytest.mark.usefixtures("clock")
def test_a_handler_that_replaces_ours_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    walltime = Walltime({}, "USR2", lambda *_: None)
    walltime.call_back(print, 30.0)
    walltime.check()
    assert capsys.readouterr().err == ""
    signal.signal(signal.SIGUSR2, lambda *_: None)
    for _ in range(2):
        walltime.check()
    assert capsys.readouterr().err.count("warning: on_walltime: SIGUSR2 got another handler") == 1


@pytest.mark.parametrize(
    ("callback", "is_valid"),
    [
        ("save", False),
        (lambda state: None, False),
        (print, True),
        ([].clear, True),
        (lambda state=None, *more: None, True),
    ],
)
def test_a_callback_is_called_without_arguments(callback: Any, is_valid: bool) -> None:
    walltime = Walltime({}, None, lambda *_: None)
    if is_valid:
        walltime.call_back(callback, 30.0)
    else:
        with pytest.raises(InputError, match="expected a function without arguments"):
            walltime.call_back(callback, 30.0)
