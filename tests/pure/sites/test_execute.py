"""How `launch` runs its commands: exit codes, signals, and the end of `launch` itself. Each in a process of its own."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError, LauncherError
from dask_gpu_mpi.sites import execute
from dask_gpu_mpi.sites.command import Launch
from dask_gpu_mpi.sites.execute import run_launch
from dask_gpu_mpi.sites.pbs import PBS
from dask_gpu_mpi.sites.slurm import SLURM
from support.jobs.processes import run_python

LAUNCH = """
import os, sys
from dask_gpu_mpi.sites import execute
from dask_gpu_mpi.sites.command import Launch
from dask_gpu_mpi.sites.lsf import LSF
execute.LINGER = float(os.environ.get("LINGER", execute.LINGER))
execute.BATCH_DELAY = float(os.environ.get("BATCH_DELAY", execute.BATCH_DELAY))
execute.time.sleep = lambda seconds: print("lingers", flush=True)
python = (sys.executable, "-c")
check, run = ((*python, text) if text else () for text in sys.argv[1:3])
def requeue():
    print("requeued", flush=True)
sys.exit(execute.run_launch(Launch({"ADDED": "yes", "GONE": None}, check, run, **eval(sys.argv[3])), os.environ, requeue))
"""
#: A launcher that says what it hears.
HEARS = """
import os, signal, sys, time
def heard(number, _):
    os.write(1, f"heard {signal.Signals(number).name}\\n".encode())  # print may be at work already
    if number in (signal.SIGTERM, signal.SIGINT):
        time.sleep(1.5)  # a launcher takes its time: it must not hear twice
        sys.exit(9)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, heard)
print("up", os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start `launch`; it ends with the test, which may have failed."""
    jobs = []

    def started(run: str, *, check: str = "", more: str = "{}") -> subprocess.Popen[str]:
        job = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, check, run, more],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        jobs.append(job)
        return job

    yield started
    for job in jobs:
        job.kill()  # its launcher is sent TERM then
        job.wait(30)


def split(output: str) -> tuple[str, str]:
    """What was printed, without the line that says which signal ends the job; and that line."""
    said = "".join(line for line in output.splitlines(keepends=True) if "received; ending the job" in line)
    return output.replace(said, "") if said else output, said


def end(job: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = split(job.communicate(timeout=30)[0])
    return job.returncode, output


def ran(run: str, *, check: str = "", more: str = "{}", linger: float = 0.1) -> tuple[int, str]:
    done = run_python(
        LAUNCH,
        *(check, textwrap.dedent(run), more),
        capture_output=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "GONE": "1", "LINGER": str(linger)},
    )
    return done.returncode, split(done.stdout)[0]


@pytest.mark.parametrize(
    ("run", "check", "rc", "output"),
    [
        ("import sys; sys.exit(7)", "", 7, ""),
        ("import os; os.kill(os.getpid(), 9)", "", 137, ""),
        (
            "import os, signal; signal.signal(1, signal.SIG_DFL); os.kill(os.getpid(), 1)",
            "",
            129,
            "",
        ),  # also below nohup
        (
            "import os; print(os.environ['ADDED'], 'GONE' in os.environ)",
            "print('checked')",
            0,
            "checked\nyes False\n",
        ),
        ("print('the job')", "import sys; sys.exit(1)", 1, ""),
        ("import sys; sys.exit(75)", "", 75, "requeued\n"),
    ],
)
def test_exit_code(run: str, check: str, rc: int, output: str) -> None:
    assert ran(run, check=check) == (rc, output)


def up(job: subprocess.Popen[str]) -> int:
    assert job.stdout is not None
    word, pid = job.stdout.readline().split()
    assert word == "up"
    return int(pid)


@pytest.mark.parametrize(
    ("given", "signals", "rc", "heard"),
    [
        ({}, [signal.SIGTERM] * 2, 9, ["SIGTERM"]),
        ({}, [signal.SIGINT] * 2, 9, ["SIGTERM"]),
        ({}, [signal.SIGHUP], 9, ["SIGTERM"]),
        ({"code": 143}, [signal.SIGINT], 130, ["SIGTERM"]),  # of Ctrl-C
        ({}, [signal.SIGUSR1, signal.SIGTERM], 9, ["SIGUSR1", "SIGTERM"]),
        ({"code": 0, "is_check": True}, [signal.SIGUSR1, signal.SIGTERM], 143, ["SIGTERM"]),
        ({"code": 75}, [signal.SIGTERM], 75, ["SIGTERM"]),
        ({"code": 75, "more": "{'batch': LSF}"}, [signal.SIGTERM], 143, ["SIGTERM"]),
    ],
    ids=[
        "once", "Ctrl-C, once", "the terminal is gone", "code of Ctrl-C", "before the walltime",
        "the preflight gets no warning, and ends the job", "cancelled, not requeued", "cancelled, not requeued by LSF",
    ],
)  # fmt: skip
def test_signals_are_forwarded(
    start: Start, given: dict[str, Any], signals: list[signal.Signals], rc: int, heard: list[str]
) -> None:
    launcher = HEARS.replace("sys.exit(9)", f"sys.exit({given.get('code', 9)})")
    commands = {"run": "print('the job')", "check": launcher} if "is_check" in given else {"run": launcher}
    job = start(**commands, more=given.get("more", "{}"))
    up(job)
    for number in signals:
        job.send_signal(number)
    output, said = split(job.communicate(timeout=30)[0])
    assert (job.returncode, output) == (rc, "".join(f"heard {name}\n" for name in heard))
    assert said == f"dask_gpu_mpi: launch: {signals[-1].name} received; ending the job\n"


def test_launcher_that_has_heard_it_itself_is_not_told_again(start: Start) -> None:
    """As by `timeout`, which tells the whole group."""
    job = start(HEARS.replace("time.sleep(1.5)", "pass"))
    up(job)
    os.killpg(job.pid, signal.SIGTERM)
    assert end(job) == (9, "heard SIGTERM\n")


def test_ctrl_c_of_a_terminal_is_not_forwarded() -> None:
    """The whole foreground group gets it, so the launcher has heard it itself."""
    terminal, end = os.openpty()
    job = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, "", HEARS, "{}"],
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(end)
    output = b""
    try:
        while True:
            output += os.read(terminal, 1000)
            if b"up " in output and b"\x03" not in output and b"^C" not in output:
                os.write(terminal, b"\x03")
    except OSError:  # the terminal has no process any more
        pass
    finally:
        os.close(terminal)
        job.kill()
        job.wait(30)
    text = output.decode().replace("^C", "").splitlines()
    assert [line for line in text if line.startswith("heard")] == ["heard SIGINT"]
    assert job.returncode == 9


def test_end_that_is_sent_again_is_forwarded_again(start: Start) -> None:
    job = start(HEARS.replace("time.sleep(1.5)", "return signal.signal(number, lambda *_: sys.exit(9))"))
    up(job)
    for _ in range(2):
        job.send_signal(signal.SIGTERM)
        time.sleep(1.5)
    assert end(job) == (9, "heard SIGTERM\n")


def test_batch_system_that_tells_the_ranks_itself(start: Start) -> None:
    job = start(HEARS, more="{'forwards_end': False, 'batch': LSF}")
    pid = up(job)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        job.send_signal(number)
    time.sleep(1.5)  # longer than a forwarded signal would take
    os.kill(pid, signal.SIGINT)
    assert end(job) == (9, "heard SIGINT\n")


#: A launcher that ends with a checkpoint; the signal that cancels the job comes a moment before or after its end.
CANCELLED = {
    "before": "import os, signal, sys; os.kill(os.getppid(), signal.SIGTERM); sys.exit(75)",
    "after": """
        import os, signal, sys, time
        parent = os.getppid()
        if os.fork() == 0:
            time.sleep(1)
            os.kill(parent, signal.SIGTERM)
            os._exit(0)
        sys.exit(75)
    """,
}


@pytest.mark.parametrize("when", CANCELLED)
@pytest.mark.parametrize("more", ["{}", "{'lingers': True}"])
def test_job_that_is_cancelled_while_it_ends_is_not_requeued(when: str, more: str) -> None:
    # `launch` waits for what is left on other nodes, which cleans up
    assert ran(CANCELLED[when], more=more, linger=3.0) == (75, "lingers\n" * ("lingers" in more))


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signal_that_comes_too_late_to_be_forwarded_does_not_end_launch(number: signal.Signals) -> None:
    """While it asks for the second run: Slurm ends the first one then."""
    launch = LAUNCH.replace('print("requeued"', f'os.kill(os.getpid(), {int(number)}); print("requeued"')
    done = run_python(launch, "", "raise SystemExit(75)", "{}", env={**os.environ, "LINGER": "0.1"})
    assert (done.returncode, done.stdout) == (75, "requeued\n"), done.stderr


@pytest.mark.parametrize("code", [0, 255])
def test_mark_of_a_job_that_has_completed(tmp_path: Path, code: int) -> None:
    mark = tmp_path / "ended"
    mark.touch()  # of the run before
    more = repr({"mark": str(mark)})
    rc, output = ran(f"import os; os._exit({code})", more=more)
    assert rc == 75  # it can't go on without the node: it is requeued
    assert f"exited with code {code}, but the job has not completed" in output
    assert output.endswith("requeued\n")
    assert run_launch(Launch({}, (), ("true",), mark=str(mark)), os.environ) == 1
    assert ran(f"open({str(mark)!r}, 'w')", more=more) == (0, "")
    assert not mark.exists()  # nobody reads it any more


@pytest.mark.parametrize(
    ("text", "code", "requeued"),
    [
        ("3", 3, False),
        ("75", 75, True),
        ("0", 0, False),
        ("1 lost", 75, True),
        ("\n", 9, False),
        ("no code", 9, False),
    ],
)
def test_code_of_a_job_that_has_lost_ranks(tmp_path: Path, text: str, code: int, requeued: bool) -> None:
    """Whatever the launcher makes of the ranks that were killed."""
    mark = tmp_path / "ended"
    run = f"import sys; open({str(mark)!r}, 'w').write({text!r}); sys.exit(9)"
    found = ran(run, more=repr({"mark": str(mark)}))
    assert found == (code, "requeued\n" * requeued)


@pytest.mark.parametrize(
    ("code", "expected", "requeued"), [(0, 75, True), (255, 255, False), (137, 137, False)]
)
def test_a_rank_that_has_gone(tmp_path: Path, code: int, expected: int, requeued: bool) -> None:
    """It was killed; or a daemon of Open MPI's mpirun was, which then ends with code 0, and its ranks with it."""
    mark = tmp_path / "ended"
    run = f"import os; open({str(mark)!r}, 'w').write('gone'); os._exit({code})"
    found, output = ran(run, more=repr({"mark": str(mark)}))
    assert found == expected
    assert output.endswith("requeued\n" * requeued)
    assert ("but the job has not completed (a rank has gone before its end)" in output) == requeued


def test_launcher_that_waits_for_a_lost_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "LAUNCHER_GRACE", 0.1)
    mark = tmp_path / "ended"
    command = (sys.executable, "-c", f"import time; open({str(mark)!r}, 'w').write('3'); time.sleep(60)")
    began = time.monotonic()
    assert run_launch(Launch({}, (), command, mark=str(mark)), os.environ) == 3
    assert time.monotonic() < began + 20


@pytest.mark.parametrize("planted", ["file", "link", "folder"])
def test_mark_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str) -> None:
    """A job that was lost is not completed because somebody else says so."""
    mark, ours = tmp_path / "ended", tmp_path / "ours"
    ours.touch()
    if planted == "file":
        monkeypatch.setattr(execute, "is_ours", lambda status: False)
    how = {"file": ["touch"], "link": ["ln", "-s", str(ours)], "folder": ["mkdir"]}[planted]
    assert run_launch(Launch({}, (), (*how, str(mark)), mark=str(mark)), os.environ) == 1


def test_command_that_can_not_be_started() -> None:
    with pytest.raises(LauncherError, match="launch: could not start /gone/mpirun: No such file"):
        run_launch(Launch({}, (), ("/gone/mpirun",)), dict(os.environ))


@pytest.mark.parametrize(("private", "mode"), [(True, 0o700), (False, 0o755)])
def test_the_folder_that_a_profiler_writes_into(private: bool, mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "42"
    launch = Launch({}, (), ("true",), make=str(folder), private=private)
    assert run_launch(launch, os.environ) == 0
    assert (folder.stat().st_mode & 0o777, folder.parent.stat().st_mode & 0o777) == (mode, 0o755)
    folder.chmod(0o750)  # the user's
    assert run_launch(launch, os.environ) == 0
    assert folder.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("what", ["make", "mark"])
def test_folder_of_the_logs_that_is_not_ours(
    tmp_path: Path, what: str, links_are_strangers: Callable[[], None]
) -> None:
    launch = Launch({}, check=(), run=("true",), **{what: str(tmp_path / "logs" / "1")})
    (tmp_path / "logs").touch()
    expected = r"log files can't be written \(.*/logs/1: Not a directory\)\. Fix: .*DGM_LOGS"
    with pytest.raises(InputError, match=expected):
        run_launch(launch, os.environ)
    (tmp_path / "logs").unlink()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "1").touch()
    (tmp_path / "logs").symlink_to("home")
    links_are_strangers()
    with pytest.raises(
        InputError, match=r"logs/1: the symbolic link .* belongs to another user .* Fix: .*DGM_LOGS"
    ):
        run_launch(launch, os.environ)
    assert os.listdir(tmp_path / "home") == ["1"]


def test_preflight_leaves_standard_input_to_the_script() -> None:
    reads = "import sys; print(repr(sys.stdin.read()))"
    assert run_python(LAUNCH, reads, reads, "{}", input="hello").stdout == "''\n'hello'\n"


def echo(word: str, code: int = 0) -> tuple[str, ...]:
    return ("sh", "-c", f"echo {word} >> $ORDER; exit {code}")


@pytest.mark.parametrize(
    ("codes", "answer", "keeps", "rc", "order"),
    [
        ({}, None, False, 0, "stage check run removed"),
        ({"run": 7}, None, False, 7, "stage check run removed"),
        ({"stage": 2}, None, False, 2, "stage removed"),
        ({"check": 1}, None, False, 1, "stage check removed"),
        # requeued under its own number, under another one, and not at all
        ({"run": 75}, None, True, 75, "stage check run"),
        ({"run": 75}, None, False, 75, "stage check run removed"),
        ({"run": 75}, 75, True, 75, "stage check run removed"),
    ],
)
def test_copies_are_removed_unless_the_job_comes_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codes: dict[str, int],
    answer: int | None,
    keeps: bool,
    rc: int,
    order: str,
) -> None:
    monkeypatch.setattr(execute, "LINGER", 0.0)
    check, run, stage = (echo(name, codes.get(name, 0)) for name in ("check", "run", "stage"))
    launch = Launch({}, check, run, stage, echo("removed"), batch=SLURM if keeps else PBS)
    assert run_launch(launch, {**os.environ, "ORDER": str(tmp_path / "order")}, lambda: answer) == rc
    assert (tmp_path / "order").read_text().split() == order.split()


@pytest.mark.parametrize("step", ["stage", "check"])
def test_a_signal_before_the_job_is_the_exit_code(step: str) -> None:
    """MPICH's launcher ends with 15 then."""
    ends = "import os, signal, time; signal.signal(15, lambda *_: os._exit(15)); os.kill(os.getppid(), 15); time.sleep(30)"
    more = {"stage": (sys.executable, "-c", ends), "unstage": ("true",)} if step == "stage" else {}
    assert ran("print('run')", check=ends if step == "check" else "", more=repr(more)) == (143, "")


def test_copies_that_hang_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(execute, "STAGE_TIMEOUT", 0.2)
    monkeypatch.setattr(execute, "LAUNCHER_GRACE", 0.2)
    hangs = ("sh", "-c", "trap '' TERM; while :; do sleep 0.1; done")
    launch = Launch({}, (), echo("run"), hangs, echo("removed"))
    assert run_launch(launch, {**os.environ, "ORDER": str(tmp_path / "order")}) == 137
    assert (tmp_path / "order").read_text().split() == ["removed"]
    assert "launch: --stage: did not end within 0 s" in capsys.readouterr().err


def test_a_signal_does_not_stop_the_removal_of_copies() -> None:
    signals_launch = "kill -TERM $PPID; sleep 1.5; echo removed"
    more = {"stage": ("true",), "unstage": ("sh", "-c", signals_launch)}
    code, said = ran("pass", more=repr(more))
    assert (code, said.splitlines()[1:]) == (0, ["removed"])


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_signal_to_launch_alone_if_the_batch_system_signals_the_ranks(
    start: Start, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ``scancel --batch``; a job that Slurm ends is left alone, since srun would kill ranks that clean up."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho {state}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("BATCH_DELAY", "0.5")
    launcher = HEARS.replace("while True", "limit = time.monotonic() + 5\nwhile time.monotonic() < limit")
    launch = LAUNCH.replace(
        "sys.exit(execute", "from dask_gpu_mpi.sites.slurm import SLURM\nsys.exit(execute"
    )
    monkeypatch.setattr(sys.modules[__name__], "LAUNCH", launch)
    job = start(launcher, more="{'forwards_end': False, 'batch': SLURM}")
    assert job.stdout is not None
    assert job.stdout.readline().startswith("up")
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=30)
    forwarded = state == "RUNNING"
    assert ("heard SIGTERM" in output, "the launcher gets SIGTERM" in output) == (forwarded, forwarded), (
        output
    )
    assert job.returncode == (9 if forwarded else 0)
