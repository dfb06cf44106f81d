"""The workers of a rank, from the plan until they have ended; what Dask would make is played by `Served`."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import distributed
import pytest

from dask_gpu_mpi.base.timeline import DEATHS_TOPIC, Timeline
from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, StartupError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import Start, WorkerPlan
from dask_gpu_mpi.workers import lifecycle, logs
from dask_gpu_mpi.workers.lifecycle import Workers
from support.mocks.inputs import worker_plan

START = Start("tcp://h:1", "tcp", "127.0.0.1", (), {})


class Nanny(distributed.Nanny):
    """One that is not started, and has this process."""

    def __init__(self, process: int | None = None) -> None:
        self.process: Any = None
        if process is not None:
            self.process = SimpleNamespace(pid=process, worker_dir="/a", process=None)
        self.closed_for: str | None = None

    async def close(self, *, reason: str = "") -> None:  # type: ignore[override]
        self.closed_for = reason


class Served:
    """A CUDAWorker with these nannies."""

    def __init__(self, *nannies: Nanny) -> None:
        self.nannies = nannies
        self.error: Exception | None = None
        #: Seconds that it takes to start, and to close.
        self.starting = self.closing = 0.0
        self.timeout: float | None = None
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        #: Whose start must have begun as well.
        self.waits_for = self

    def __await__(self) -> Generator[Any, None, Any]:
        return self._start().__await__()

    async def _start(self) -> Any:
        self.begun.set()
        await self.waits_for.begun.wait()
        await asyncio.sleep(self.starting)
        if self.error is not None:
            raise self.error
        return self

    async def finished(self) -> None:
        await self.ended.wait()

    async def close(self, timeout: float) -> None:
        self.timeout = timeout
        await asyncio.sleep(self.closing)
        if self.error is not None:
            raise self.error


class Bench:
    """`Workers` of such workers, and what is reported."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scratch: Path) -> None:
        self.ended: list[tuple[str | int, str | None]] = []
        self.ending: list[bool] = []
        self.options = Options(shutdown_timeout=4.0)

        def make(plan: WorkerPlan, *given: Any) -> Any:
            if isinstance(found := self.served[str(plan.name)], Exception):
                raise found
            return found, [*found.nannies]

        monkeypatch.setattr(lifecycle, "make_worker", make)
        monkeypatch.setattr(logs, "set_ending", lambda: self.ending.append(True))
        timeline = Timeline("agent")
        self.workers = Workers(self.options, str(scratch), timeline, lambda *given: self.ended.append(given))

    async def start(self, device: str | None = None, **served: Any) -> None:
        self.served = served
        await self.workers.start(replace(START, workers=tuple(worker_plan(name, device) for name in served)))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path)


async def test_they_start_together_and_the_first_has_the_address_for_other_nodes(bench: Bench) -> None:
    await bench.start(a=Served())  # a class of the user's has none
    assert bench.workers.address == ""
    await bench.workers.close()
    nanny = Nanny(1)
    nanny.process.worker_address = "tls://10.0.0.1:5"
    nanny._address = "tls://10.0.0.1:6"
    one, two = Served(nanny), Served()
    one.waits_for, two.waits_for = two, one
    await bench.start(b=one, c=two)
    assert bench.workers.address == "tls://10.0.0.1:5"


MADE, FIX = (
    "worker a could not be made: ",
    "correct or remove nthreads or env (--log-level info prints the traceback)",
)


@pytest.mark.parametrize(
    ("options", "error", "cls", "says"),
    [
        ([], TypeError("no"), StartupError, f"{MADE}TypeError: no"),
        ([], InputError("ours"), InputError, "ours"),
        (
            ["nthreads", "env"],
            TypeError("no."),
            InputError,
            f"worker_options: {MADE}TypeError: no. Fix: {FIX}",
        ),
        (["nthreads", "env"], OSError("no"), StartupError, f"{MADE}OSError: no"),
        # of `preload`
        (
            ["nthreads", "env"],
            FileNotFoundError("no"),
            InputError,
            f"worker_options: {MADE}FileNotFoundError: no. Fix: {FIX}",
        ),
    ],
)
async def test_what_a_class_raises(
    bench: Bench, options: list[str], error: Exception, cls: type[DaskGpuMpiError], says: str
) -> None:
    """A value that it refuses is an error of the user's input."""
    bench.options.worker_options.update(dict.fromkeys(options))
    with pytest.raises(cls) as caught:
        await bench.start(a=error)
    assert str(caught.value) == says


def not_started(cause: str) -> RuntimeError:
    error = RuntimeError("Nanny failed to start")
    error.__cause__ = OSError(cause)
    return error


async def test_a_port_of_the_user_that_is_in_use(bench: Bench) -> None:
    error = RuntimeError("Worker failed to start.")
    error.__cause__ = OSError(errno.EADDRINUSE, "Address already in use")
    one = Served()
    one.error = error
    with pytest.raises(StartupError, match="Address already in use"):  # a port that the system has chosen
        await bench.start(a=one)
    bench.options.worker_options.update({"nthreads": 1, "worker_port": 4711})
    with pytest.raises(InputError) as caught:
        await bench.start(a=one)
    assert str(caught.value) == (
        "worker_options: worker a did not start: worker_port 4711 is in use on h (expected a free port for each worker of a "
        "node). Fix: a range with more ports, such as '9000:9099', or leave worker_port out for any free port"
    )
    # no port of the range is free; a fixed one is the one in use
    bench.options.worker_options["port"] = "19100:19101"
    error.__cause__ = ValueError("Could not start Worker on host 127.0.0.1 with port 19100:19101")
    with pytest.raises(InputError, match=r"worker_port 4711 is in use"):
        await bench.start(a=one)
    del bench.options.worker_options["worker_port"]
    with pytest.raises(InputError, match=r"did not start: port 19100:19101 is in use"):
        await bench.start(a=one)


class Late(Nanny):
    """Its process is there a moment later."""

    polls = 0

    @property
    def process(self) -> Any:
        self.polls += 1
        return SimpleNamespace(pid=12, process=None) if self.polls > 1 else None

    @process.setter
    def process(self, value: Any) -> None: ...


@pytest.mark.parametrize(
    ("error", "device", "options", "says"),
    [
        (not_started("certificate verify failed: certificate is not yet valid (_ssl.c:1006)"), None, {},
         "worker a did not start: the job's certificate is not valid yet"),
        (not_started("the cause"), "GPU-x", {},
         "worker a (GPU GPU-x) did not start: OSError: the cause; its last output:\ntwo\nTypeError: no"),
        # its process has ended before the nanny read the error
        (RuntimeError("Nanny failed to start worker process"), None, {"nthreads": "many"},
         "worker_options: worker a did not start: TypeError: no. Fix: "),
    ],
    ids=["a clock that is wrong", "with its last output", "a value of the user's"],
)  # fmt: skip
async def test_a_worker_that_does_not_start_is_reported_with_its_cause(
    bench: Bench, tmp_path: Path, error: Exception, device: str | None, options: dict[str, Any], says: str
) -> None:
    (tmp_path / "last-output-12").write_text("two\nTypeError: no\n")
    bench.options.worker_options.update(options)
    served = Served(Late())
    served.error, served.starting = error, 0.1
    with pytest.raises(DaskGpuMpiError) as caught:
        await bench.start(device, a=served)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("reason", "closing", "failed", "ended"),
    [
        ("", False, False, [("a", None), ("b", None)]),
        ("scheduler-close", False, False, [("a", None), ("b", None)]),
        ("nanny-instantiate-failed", False, True, [("a", "its nanny could not start it again"), ("b", None)]),
        ("nanny-instantiate-failed", True, True, []),
    ],
    ids=["it ended", "it was closed", "it could not be started again", "while all are closed"],
)
async def test_a_worker_that_has_ended(
    reason: str, closing: bool, failed: bool, ended: list[tuple[str, str | None]], bench: Bench
) -> None:
    nanny = Nanny()
    served = [Served(nanny), Served(Nanny())]
    await bench.start(a=served[0], b=served[1])
    following = asyncio.ensure_future(bench.workers.follow())
    await asyncio.sleep(0.02)
    assert not following.done()
    bench.workers.closing = closing
    await nanny.close(reason=reason)
    for each in served:
        each.ended.set()
    assert await following is failed
    assert bench.ended == ended


async def test_closing_is_silent_polite_and_once(bench: Bench) -> None:
    nanny = Nanny(process=1 << 30)  # a process that is not there
    served = Served(nanny)
    await bench.start(a=served)
    assert not bench.workers.closing
    await bench.workers.close()
    assert served.timeout == pytest.approx(0.8 * bench.options.grace)
    served.timeout = None
    await bench.workers.close()
    assert served.timeout is None
    assert bench.ending == [True] * 2
    assert bench.workers.closing
    assert nanny.process.worker_dir is None  # its directory goes with the scratch


async def test_what_is_left_after_the_grace_is_killed(bench: Bench) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        served = Served(Nanny(process.pid))
        served.closing = 30.0
        bench.workers._grace = 0.2
        await bench.start(a=served)
        await asyncio.wait_for(bench.workers.close(), 10)
        assert process.wait(10) == -9


async def test_a_worker_that_dies_again_and_again_has_failed_and_the_scheduler_is_told_of_each_death(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if it does not finish closing."""
    told: list[tuple[str, Any]] = []

    async def watch(nanny: Any, *, on_death: Callable[[int, int | None], None]) -> str:
        nanny.log_event = lambda topic, message: told.append((topic, message))
        for pid, code in ((7, -9), (8, 3), (9, None)):
            on_death(pid, code)
        nanny.log_event = None  # its connection is gone: no error
        on_death(10, 1)
        return "it died 5 times"

    monkeypatch.setattr(lifecycle, "watch_nanny", watch)
    monkeypatch.setattr(lifecycle.logs, "last_output", lambda scratch, pid: f"{'x' * 5_000} of {pid}")
    await bench.start(a=Served(Nanny()))
    assert await bench.workers.follow() is True
    assert bench.ended == [("a", "it died 5 times")]
    deaths = [message for topic, message in told if topic == DEATHS_TOPIC and message["worker"] == "a"]
    assert [message["how"] for message in deaths] == ["signal 9", "exit code 3", "died"]
    assert all(len(message["output"]) == lifecycle.MOST_OUTPUT for message in deaths)
    assert deaths[0]["output"].endswith(" of 7")
    printed = capsys.readouterr().err
    assert f"warning: the process of worker a ended on {socket.gethostname()} (signal 9), and" in printed
    assert printed.count("the process of worker a ended") == 4
