from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.workers import logs
from dask_gpu_mpi.workers.logs import last_output
from support.jobs.processes import run_python

#: In a process of its own: what is tested changes the loggers of the whole process.
BEGIN = """
import logging, os, sys
import distributed
from dask_gpu_mpi.workers import logs
folder = sys.argv[1] if len(sys.argv) > 1 else {folder!r}
logs.set_up({level!r}, folder, quiet_stream={quiet})
logger = logging.getLogger("distributed.worker")
"""


def begin(folder: Path, level: str = "warning", *, quiet: bool = False) -> str:
    return BEGIN.format(folder=str(folder), level=level, quiet=quiet)


def test_last_output_are_the_last_lines_of_that_process(tmp_path: Path) -> None:
    code = """
for i in range(9):
    logger.warning("word %d", i)
logger.info("not this")
if os.fork() == 0:
    logger.error("of the child")
    os._exit(0)
os.wait()
print(os.getpid())
"""
    done = run_python(begin(tmp_path) + code)
    pid = int(done.stdout)
    lines = last_output(str(tmp_path), pid).splitlines()
    assert [line.rpartition(" - ")[2] for line in lines] == [f"word {i}" for i in range(4, 9)]
    (other,) = [path for path in tmp_path.iterdir() if path.name != f"last-output-{pid}"]
    assert "of the child" in other.read_text()
    assert "word" not in other.read_text()


def test_last_output_of_a_process_that_says_much(tmp_path: Path) -> None:
    code = """
for i in range(1000):
    logger.warning("word %d %s", i, "x" * 1000)
logger.warning("long %s", "y" * 1_000_000)
for i in range(2):
    logger.warning("word %d", i)
print(os.getpid())
"""
    done = run_python(begin(tmp_path, quiet=True) + code)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size <= 5 * (1 << 14)
    lines = last_output(str(tmp_path), int(done.stdout)).splitlines()
    assert [line.split()[-1][:9] for line in lines[:2]] == ["x" * 9] * 2
    assert lines[2] == "y" * (1 << 14)
    assert [line.rpartition(" - ")[2] for line in lines[3:]] == ["word 0", "word 1"]


def test_last_output_of_nobody(tmp_path: Path) -> None:
    assert last_output(str(tmp_path), 12345) == ""
    assert last_output(str(tmp_path / "gone"), 1) == ""


def test_warnings_only_and_silence_at_the_end(tmp_path: Path) -> None:
    code = """
logger.info("too quiet")
logger.warning("loud")
logger.error("Error during heartbeat: %s", 5)
logger.error("Failed to initialize worker")
if os.fork() == 0:
    logs.set_ending()  # every process forked from there knows
    os._exit(0)
os.wait()
logger.error("no news")
"""
    done = run_python(begin(tmp_path) + code)
    assert "loud" in done.stderr
    for text in ("too quiet", "heartbeat", "Failed", "no news"):
        assert text not in done.stderr


def test_a_worker_that_can_not_spill(tmp_path: Path) -> None:
    """One line with folder and fix; Dask repeats a traceback every ten seconds."""
    code = """
import errno
spill = logging.getLogger("distributed.spill")
for again in range(3):
    spill.filters[:] = spill.filters[-1:]  # without Dask's limit of one in ten seconds
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        if os.fork() == 0:
            spill.error("Spill to disk failed; keeping data in memory", exc_info=True)
            os._exit(0)
        os.wait()
spill.error("another error")
"""
    done = run_python(begin(tmp_path / "scratch", "info") + code)
    said, other = done.stderr.splitlines()
    assert f"can't spill to {tmp_path} (No space left on device). Its data stay in memory" in said
    assert "Fix: a local_directory (--local-directory) with more space" in said
    assert other.endswith("another error")


def test_whoever_wants_everything_gets_it(tmp_path: Path) -> None:
    code = "logger.info('soft')\nlogs.set_ending()\nlogger.error('at the end')\n"
    done = run_python(begin(tmp_path, "info") + code)
    assert "soft" in done.stderr
    assert "at the end" in done.stderr


def test_loggers_of_the_user_are_left_alone(tmp_path: Path) -> None:
    """Python prints what a logger without a handler is given."""
    done = run_python(begin(tmp_path) + 'logging.getLogger("of.the.user").error("user\'s")\n')
    assert done.stderr == "user's\n"
    assert list(tmp_path.iterdir()) == []


def test_a_log_file_takes_the_place_of_standard_error(tmp_path: Path) -> None:
    code = f"""
logs.log_to_file({str(tmp_path / "deep" / "logs")!r}, "worker-a/b c-0-host")
logger.warning("to the file")
logging.getLogger("tornado.application").error("tornado's")
logging.getLogger("of.the.user").error("user's")
"""
    done = run_python(begin(tmp_path, quiet=True) + code)
    assert "to the file" not in done.stderr
    (file,) = (tmp_path / "deep" / "logs").iterdir()
    assert file.name == "worker-a_b_c-0-host.log"
    text = file.read_text()
    for word in ("to the file", "tornado's", "user's"):
        assert text.count(word) == 1, text


def test_a_scratch_directory_that_is_gone_is_no_error(tmp_path: Path) -> None:
    done = run_python(begin(tmp_path / "gone") + "logger.error('still said')\n" * 2)
    assert done.stderr.count("still said") == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("quiet", [False, True], ids=["standard error", "log directory"])
def test_a_malformed_log_call_goes_on(tmp_path: Path, quiet: bool) -> None:
    """Python's logging complains on standard error and returns; the user's task must not fail by it."""
    names = ["", "distributed.worker", "of.a.library"]
    code = f"""
class Bad:
    def __str__(self):
        raise RuntimeError("no text")
    __repr__ = __str__
for name in {names}:
    log = logging.getLogger(name)
    log.warning("%d", "two")
    log.warning("%z", 2)
    log.warning("%s", Bad())
    log.warning(Bad())
    log.warning("well made of %r", name)
    print("after", name, file=sys.stderr, flush=True)
print("goes on", logs.last_output(folder, os.getpid()))
"""
    done = run_python(begin(tmp_path, quiet=quiet) + code)
    assert "goes on" in done.stdout
    *errors, _ = done.stderr.split("after ")
    assert ["--- Logging error ---" in text for text in errors] == [True] * 3
    for name in names if quiet else ["distributed.worker"]:
        assert f"well made of {name!r}" in done.stdout


@pytest.mark.parametrize("utf8", ["", "0"], ids=["UTF-8", "ASCII"])
def test_any_text_is_logged_in_any_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, utf8: str) -> None:
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": utf8}.items():
        monkeypatch.setenv(name, value)
    code = """
logs.log_to_file(os.path.join(folder, "l\\udcc3\\udcb6g" if sys.getfilesystemencoding() == "ascii" else "l\\xf6g"), "rank")
logger.warning("\\u2603 of \\udce4")
print(logs.last_output(folder, os.getpid()).encode("ascii", "backslashreplace").decode())
"""
    done = run_python(begin(tmp_path, quiet=True) + code)
    assert done.stdout.rstrip().endswith(r"\u2603 of \udce4")
    assert done.stderr == ""
    text = (tmp_path / "lög" / "rank.log").read_text(encoding="utf-8")
    assert text.rstrip().endswith(r"☃ of \udce4")


def test_a_log_file_is_silent_at_the_end_as_well(tmp_path: Path) -> None:
    code = """
logs.log_to_file(os.path.join(folder, "logs"), "rank")
logger.warning("before")
logger.warning("lost during heartbeat")
logs.set_ending()
logger.warning("after")
"""
    run_python(begin(tmp_path, quiet=True) + code)
    (line,) = (tmp_path / "logs" / "rank.log").read_text().splitlines()
    assert line.endswith("before")


@pytest.mark.parametrize("what", ["link", "file", "pipe"])
def test_log_that_can_not_be_opened_is_one_line(
    tmp_path: Path, what: str, links_are_strangers: Callable[[], None]
) -> None:
    {
        "link": lambda: (tmp_path / "rank.log").symlink_to("precious"),
        "file": lambda: (tmp_path / "rank.log").mkdir(),
        "pipe": lambda: os.mkfifo(tmp_path / "rank.log"),
    }[what]()
    links_are_strangers()
    with pytest.raises(
        InputError, match=r"^the log file .*rank\.log' can't be written on .* Fix: .*--log-directory"
    ):
        logs.log_to_file(str(tmp_path), "rank")
    assert os.listdir(tmp_path) == ["rank.log"]
