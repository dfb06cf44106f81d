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


def test_last_output_are_the_last_records_of_that_process(tmp_path: Path) -> None:
    code = """
for i in range(9):
    logger.warning("word %d", i)
logger.info("not this")
if os.fork() == 0:
    logger.error("of the child")
    os._exit(0)
os.wait()
logger.warning("long %s", "y" * 1_000_000)
print(os.getpid())
"""
    done = run_python(begin(tmp_path, quiet=True) + code)
    pid = int(done.stdout)
    *lines, long = last_output(str(tmp_path), pid).splitlines()
    assert [line.rpartition(" - ")[2] for line in lines] == [f"word {i}" for i in range(5, 9)]
    assert long == "y" * (1 << 14)
    (other,) = [path for path in tmp_path.iterdir() if path.name != f"last-output-{pid}"]
    assert "of the child" in other.read_text()
    assert "word" not in other.read_text()
    assert last_output(str(tmp_path), 12345) == last_output(str(tmp_path / "gone"), 1) == ""


@pytest.mark.parametrize(
    ("level", "folder", "code", "printed"),
    [
        (
            "warning",
            "",
            """
logger.info("too quiet")
logger.warning("loud")
logger.error("Error during heartbeat: %s", 5)
logger.error("Failed to initialize worker")
if os.fork() == 0:
    logs.set_ending()  # every process forked from there knows
    os._exit(0)
os.wait()
logger.error("no news")
""",
            ["loud"],
        ),
        ("info", "", "logger.info('soft')\nlogs.set_ending()\nlogger.error('at the end')\n", ["soft", "at the end"]),
        ("warning", "", "logging.getLogger('of.the.user').error(\"user's\")\n", ["user's"]),
        ("warning", "gone", "logger.error('still said')\n", ["still said"]),
    ],
    ids=["warnings, until the end", "who wants everything", "loggers of the user", "the scratch directory is gone"],
)  # fmt: skip
def test_what_is_printed(tmp_path: Path, level: str, folder: str, code: str, printed: list[str]) -> None:
    done = run_python(begin(tmp_path / folder, level) + code)
    assert [line.rpartition(" - ")[2] for line in done.stderr.splitlines()] == printed


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
def test_a_log_file_in_any_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, utf8: str) -> None:
    """It takes the place of standard error, has what loggers of the user are given, and is silent at the end as well."""
    for name, value in {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": utf8}.items():
        monkeypatch.setenv(name, value)
    code = """
place = os.path.join(folder, "l\\udcc3\\udcb6g" if sys.getfilesystemencoding() == "ascii" else "l\\xf6g")
logs.log_to_file(place, "worker-a/b c-0-host")
logging.getLogger("tornado.application").error("tornado's")
logging.getLogger("of.the.user").error("user's")
logger.warning("lost during heartbeat")
logger.warning("\\u2603 of \\udce4")
logs.set_ending()
logger.warning("after")
print(logs.last_output(folder, os.getpid()).encode("ascii", "backslashreplace").decode())
"""
    done = run_python(begin(tmp_path, quiet=True) + code)
    assert done.stdout.splitlines()[-2].endswith(r"\u2603 of \udce4")
    assert done.stderr == ""
    text = (tmp_path / "lög" / "worker-a_b_c-0-host.log").read_text(encoding="utf-8")
    found = [line.rpartition(" - ")[2] for line in text.splitlines()]
    assert found == ["tornado's", "user's", r"☃ of \udce4"]


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
