"""Handlers of ours: in force in this process, and in none that it forks; and a process that ends with its parent."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from dask_gpu_mpi.base.signals import (
    RANK_PID,
    Action,
    Signals,
    action_before,
    end_programs,
    install,
    is_ours,
    rank_that_started,
    running,
)
from support.jobs.clusters import until
from support.jobs.processes import run_python

HEAD = """
    import ctypes, functools, os, signal, sys, threading, time
    from dask_gpu_mpi.base.signals import install, is_ours, kept

    heard = []
    def hear(number, frame):
        heard.append((os.getpid(), number))

    def code_of(child):
        limit = time.monotonic() + 10
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if time.monotonic() > limit:
                os.kill(child, signal.SIGKILL)
                return "does not end"
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(done[1])

    def in_child(call):
        child = os.fork()
        if child == 0:
            try:
                call()
            finally:
                os._exit(3)
        return child
"""


def run(text: str) -> str:
    """What a process of its own prints."""
    code = textwrap.dedent(HEAD) + textwrap.dedent(text)
    # of a fork beside threads, from Python 3.12 on
    done = run_python(code, env={**os.environ, "PYTHONWARNINGS": "ignore::DeprecationWarning"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_a_child_has_what_there_was_before() -> None:
    told = run(
        """
        def mine(number, frame):
            os._exit(7)

        signal.signal(signal.SIGUSR1, mine)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            install(number, hear)
        install(signal.SIGTERM, hear)  # once more
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            print(code_of(in_child(lambda: os.kill(os.getpid(), number))))
        # a thread that forks is the child's main thread
        thread = threading.Thread(target=lambda: print(code_of(in_child(lambda: os.kill(os.getpid(), 15)))))
        thread.start()
        thread.join()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        print([number for pid, number in heard] == [15, signal.SIGUSR1, signal.SIGUSR2])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        """
    )
    assert told.split("\n")[:6] == ["-15", "7", "3", "-15", "True", "set()"]


@pytest.mark.parametrize("before", ["SIG_DFL", "SIG_IGN", "mine"])
def test_a_child_whose_handler_calls_ours(before: str) -> None:
    """A script's handler, set after ours, that calls the one it replaced: as it must for `on_walltime`."""
    told = run(
        f"""
        def mine(number, frame):
            os._exit(7)

        signal.signal(signal.SIGTERM, {"mine" if before == "mine" else f"signal.{before}"})
        install(signal.SIGTERM, hear)
        install(signal.SIGTERM, hear)
        replaced = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: replaced(number, frame))
        print(code_of(in_child(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.1)))))
        os.kill(os.getpid(), signal.SIGTERM)
        print(len(heard))
        """
    )
    assert told == {"SIG_DFL": "-15\n1\n", "SIG_IGN": "3\n1\n", "mine": "7\n1\n"}[before]


@pytest.mark.parametrize("with_hooks", [True, False])
def test_a_signal_before_python_runs_in_the_child(with_hooks: bool) -> None:
    """`Pool.terminate` right after the fork. Python throws away what its handler in C has noted until then."""
    told = run(
        f"""
        libc = ctypes.PyDLL(None)
        if not hasattr(libc, "__register_atfork"):
            print(-15)
            sys.exit()
        # A function in C: nothing in Python runs, which would look for signals.
        strike = ctypes.PYFUNCTYPE(None)(functools.partial(getattr(libc, "raise"), signal.SIGTERM))
        libc["__register_atfork"](None, None, strike, None)
        install(signal.SIGTERM, hear)
        if {with_hooks}:
            child = in_child(lambda: time.sleep(30))
        else:
            child = libc.fork()  # a library's own
            if child == 0:
                time.sleep(30)
                os._exit(3)
        print(code_of(child))
        """
    )
    assert told == "-15\n"


@pytest.mark.parametrize("when", ["before", "after_in_parent"])
def test_a_signal_while_the_process_forks_is_heard_afterwards(when: str) -> None:
    """What a handler raises where the hooks of a fork run is thrown away."""
    told = run(
        f"""
        def end(number, frame):
            raise SystemExit(5)

        os.register_at_fork({when}=lambda: os.kill(os.getpid(), signal.SIGTERM))
        install(signal.SIGTERM, end)
        try:
            code_of(in_child(lambda: None))
            time.sleep(10)
        except SystemExit as error:
            print(error.code)
        """
    )
    assert told == "5\n"


def test_what_is_forked_as_a_process_of_ours_keeps_the_handlers_and_its_children_do_not() -> None:
    told = run(
        """
        install(signal.SIGTERM, hear)

        def ours():
            os.kill(os.getpid(), signal.SIGTERM)
            theirs = code_of(in_child(lambda: os.kill(os.getpid(), signal.SIGTERM)))
            os._exit(4 if heard == [(os.getpid(), 15)] and theirs == -15 else 5)

        with kept():
            for _ in range(2):
                print(code_of(in_child(ours)))
        print(is_ours(signal.SIGTERM))
        """
    )
    assert told == "4\n4\nTrue\n"


@pytest.fixture
def dumps(tmp_path: Path) -> Any:
    """A file in which each SIGUSR1 leaves a traceback, by a handler in C of which the module `signal` knows nothing."""
    with (tmp_path / "dumps").open("w+") as file:
        # of this thread alone: another test may have left one behind
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        yield lambda: Path(file.name).read_text().count("most recent call first")
        faulthandler.unregister(signal.SIGUSR1)


def test_all_is_as_it_was_afterwards_and_faulthandler_goes_on(dumps: Any) -> None:
    def state() -> list[tuple[Any, bool]]:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
        return [(action.handler, action.in_c) for action in map(Action.now, numbers)]

    before = state()
    signals = Signals()
    thread = threading.Thread(target=signals.take)  # only the main thread can
    thread.start()
    thread.join(10)
    assert not is_ours(signal.SIGTERM)
    signals.take()
    assert is_ours(signal.SIGTERM)
    assert action_before(signal.SIGTERM).handler == before[0][0]
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.got is not None
    assert signals.got[0] == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGUSR1)
    assert dumps() == 1  # a rank that hangs while it joins can be asked why
    signals.give_back()
    assert state() == before
    os.kill(os.getpid(), signal.SIGUSR1)
    assert dumps() == 2


@pytest.mark.parametrize("older_than_python", [False, True])
def test_a_handler_of_ours_for_faulthandlers_signal_gives_it_back(
    older_than_python: bool, dumps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if older_than_python:
        ask = signal.getsignal
        monkeypatch.setattr(signal, "getsignal", lambda n: None if n == signal.SIGUSR1 else ask(n))
    assert Action.now(signal.SIGUSR1).in_c
    replaced = install(signal.SIGUSR1, lambda *_: None)
    assert is_ours(signal.SIGUSR1) is not older_than_python
    os.kill(os.getpid(), signal.SIGUSR1)
    replaced.restore()
    signals = Signals()
    signals.take()
    signals.give_back()
    assert dumps() == 0
    os.kill(os.getpid(), signal.SIGUSR1)
    assert dumps() == 1


def test_a_parent_that_has_gone_already() -> None:
    """One that goes later: tests/pure/machine/test_gpu_probe.py."""
    code = (
        "import os; from dask_gpu_mpi.base.signals import die_with_parent; die_with_parent(os.getppid() + 1)"
    )
    done = run_python(code + "; print('lives on')")
    assert (done.returncode, done.stdout) == (1, "")


# -- programs that are left behind


def program(text: str, **how: Any) -> psutil.Popen:
    """A program that runs, once its first line has come."""
    started = psutil.Popen(
        [sys.executable, "-c", f"print(flush=True)\n{textwrap.dedent(text)}"], stdout=-1, **how
    )
    started.stdout.readline()
    return started


def test_programs_are_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """With what they have started, by force if need be; what ends by itself is not reported."""
    ends = program("import time; time.sleep(0.3)")
    waits = program("import subprocess; subprocess.run(['sleep', '300'])")
    refuses = program(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)\n"
        r"open('/proc/self/comm', 'w').write('\x1b[31mred'); print(flush=True); time.sleep(300)"
    )
    refuses.stdout.readline()
    refuses.stdout.readline()
    started = [psutil.Process(each.pid) for each in (ends, waits, refuses)]
    below = waits.children()
    end_programs(lambda: running(started), "the script", "it", leaving=2.0, killing=0.5)
    assert [each.wait(10) for each in (ends, waits, refuses)] == [0, -15, -9]
    assert not running(below)
    said = capsys.readouterr().err
    assert "warning: 3 programs that the script had started on " in said
    assert f"sleep (process {below[0].pid})" in said
    assert f"(process {ends.pid})" not in said
    assert f"\ufffd[31mred (process {refuses.pid})" in said
    for each in (ends, waits, refuses):
        each.stdout.close()


def test_many_programs_are_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has thousands of processes: they are inspected once, and not once for each program."""
    parent = program(
        """
        import os, time
        for _ in range(20):
            if os.fork() == 0:
                time.sleep(300)
        print(flush=True)
        time.sleep(300)
        """
    )
    parent.stdout.readline()
    below = parent.children()
    inspected = []
    pids = psutil.pids
    monkeypatch.setattr(psutil, "pids", lambda: inspected.append(None) or pids())
    try:
        assert {each.pid for each in running(below)} == {each.pid for each in below}
        assert {each.pid for each in running([psutil.Process(parent.pid), *below[:1]])} == {
            parent.pid,
            *(each.pid for each in below),
        }
        assert len(inspected) == 2
    finally:
        for each in (*below, parent):
            each.kill()
        parent.wait()
        parent.stdout.close()
    until(lambda: not running(below), 10)


def test_the_rank_that_has_started_a_program() -> None:
    for environ, found in (
        ({**os.environ, RANK_PID: "17"}, "17"),
        ({"A": "B"}, ""),
        ({}, None),
    ):
        started = subprocess.Popen(["sleep", "300"], env=environ)
        try:  # it may not have its environment yet
            until(lambda pid=started.pid, found=found: rank_that_started(pid) == found, 10)
        finally:
            started.kill()
            os.waitid(os.P_PID, started.pid, os.WEXITED | os.WNOWAIT)
            assert rank_that_started(started.pid) == ""  # it is no program that somebody has left
            started.wait()
    assert rank_that_started(started.pid) is None
