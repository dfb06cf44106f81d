"""Standard streams that are closed or full, words of ours that can't be written, and inherited limits."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.base import streams
from dask_gpu_mpi.base.streams import away_from_here


def python(code: str, redirection: str) -> subprocess.CompletedProcess[str]:
    line = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", code]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("redirection", ["", "<&- >&-", "2>&-", "<&- >&- 2>&-", ">/dev/full"])
def test_what_is_missing_is_opened(redirection: str) -> None:
    code = """
import os, subprocess, sys
from dask_gpu_mpi.base import streams
streams.open_missing()
streams.print_by_line()
read, write = os.pipe()
child = subprocess.run(["python3", "-IS", "-c", "import os; [os.fstat(fd) for fd in range(3)]"]).returncode
there = None not in (sys.stdin, sys.stdout, sys.stderr)
streams.flush()
os._exit(0 if read > 2 and there and child == 0 else 1)
"""
    assert python(code, redirection).returncode == 0


HALF = "print_by_line(); print('one'); print('half', end=''); {}os._exit(0)"
SAID = "open_missing(); say('a word'); print('out')"
IN_PLACE = (
    "err = sys.stderr; print('before', end=' ', file=err); say('caf\\xe9 \\udcff'); print('after', file=err)"
)


@pytest.mark.parametrize(
    ("code", "redirection", "out", "err"),
    [
        (HALF.format(""), "", "one\n", ""),
        (HALF.format("flush(); "), "", "one\nhalf", ""),
        (SAID, "2>/dev/full", "out\n", ""),  # what can't be said fails nobody
        (SAID, "2>&-", "out\n", ""),
        (IN_PLACE, "", "", "before dask_gpu_mpi: café \\udcff\nafter\n"),
    ],
)
def test_what_arrives_and_in_which_order(code: str, redirection: str, out: str, err: str) -> None:
    names = "flush, open_missing, print_by_line, say"
    done = python(f"import os, sys; from dask_gpu_mpi.base.streams import {names}; {code}", redirection)
    assert (done.returncode, done.stdout, done.stderr) == (0, out, err)


def test_what_the_script_has_put_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setattr(sys, "stderr", text)
    streams.say("a word")
    assert text.getvalue() == "dask_gpu_mpi: a word\n"
    text.close()
    streams.say("another")
    monkeypatch.setattr(sys, "stderr", object())
    streams.say("a third")
    streams.flush()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everyone may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


IS_PUBLIC = "from dask_gpu_mpi.base.streams import is_public; print(is_public({}), flush=True)"
#: A process that has a pipe to one that has the file, as a rank has to its launcher.
LAUNCHER = (
    "import subprocess, sys; rank = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stderr=subprocess.PIPE); "
    "rank.communicate()"
)


@pytest.mark.parametrize(
    ("mode", "folder", "public"),
    [(0o644, 0o755, True), (0o640, 0o750, True), (0o600, 0o755, False), (0o644, 0o700, False)],
    ids=oct,
)
def test_whether_others_may_read_what_is_printed(
    open_folder: Path, mode: int, folder: int, public: bool
) -> None:
    (output := open_folder / "in" / "output").parent.mkdir()
    output.touch()
    output.chmod(mode)
    output.parent.chmod(folder)
    with open(output, "a") as stderr:
        for words in ([IS_PUBLIC], [LAUNCHER, IS_PUBLIC]):
            line = [sys.executable, "-c", *words]
            done = subprocess.run(line, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60)
            assert done.stdout == f"{public}\n"


def test_what_launch_has_passed_on_and_what_nobody_may_read() -> None:
    assert streams.is_public({streams.PUBLIC: "1"})
    for redirection in ("2>/dev/null", "2>&-"):
        assert python(IS_PUBLIC, redirection).stdout == "False\n"


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (100, 500, (500, 500)),
        (100, 700, (600, 700)),  # not without end
        (100, resource.RLIM_INFINITY, (600, resource.RLIM_INFINITY)),
        (650, 700, None),  # never lowered
    ],
)
def test_the_soft_limit_of_descriptors_follows_the_hard_one(
    soft: int, hard: int, raised: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(streams, "MOST", 600)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: found.append(limits))
    streams.raise_descriptor_limit()
    assert found == ([raised] if raised else [])


def test_a_library_is_loaded_away_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with away_from_here():
        assert os.getcwd() == "/"
    assert os.getcwd() == str(tmp_path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir("gone")
    (tmp_path / "gone").rmdir()
    with away_from_here():
        assert os.getcwd() == "/"
    with pytest.raises(FileNotFoundError):
        os.getcwd()
