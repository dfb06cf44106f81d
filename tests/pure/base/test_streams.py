"""Standard streams that are closed or full, and words of ours that can't be written."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.base import streams


def python(code: str, redirection: str) -> subprocess.CompletedProcess[str]:
    line = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", code]
    return subprocess.run(line, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("redirection", ["", "<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-", ">/dev/full"])
def test_what_is_missing_is_opened(redirection: str) -> None:
    code = (
        "import os, subprocess, sys\n"
        "from dask_gpu_mpi.base import streams\n"
        "streams.open_missing()\n"
        "streams.print_by_line()\n"
        "read, write = os.pipe()\n"
        "child = subprocess.run([sys.executable, '-c', 'import os; [os.fstat(fd) for fd in range(3)]']).returncode\n"
        "there = None not in (sys.stdin, sys.stdout, sys.stderr)\n"
        "streams.flush()\n"
        "os._exit(0 if read > 2 and there and child == 0 else 1)\n"
    )
    assert python(code, redirection).returncode == 0


def test_a_line_is_written_at_once() -> None:
    code = (
        "import os; from dask_gpu_mpi.base import streams; streams.print_by_line(); "
        "print('one'); print('half', end=''); os._exit(0)"
    )
    assert python(code, "").stdout == "one\n"
    assert python(code.replace("os._exit", "streams.flush(); os._exit"), "").stdout == "one\nhalf"


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_what_can_not_be_said_fails_nobody(redirection: str) -> None:
    done = python(
        "from dask_gpu_mpi.base.streams import open_missing, say; open_missing(); say('a word'); print('out')",
        redirection,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "")


def test_a_line_is_said_in_its_place() -> None:
    code = (
        "import sys; from dask_gpu_mpi.base.streams import say\n"
        "print('before', end=' ', file=sys.stderr); say('caf\\xe9 \\udcff'); print('after', file=sys.stderr)"
    )
    assert python(code, "").stderr == "before dask_gpu_mpi: café \\udcff\nafter\n"


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


@pytest.mark.parametrize(
    ("mode", "folder", "public"),
    [(0o644, 0o755, True), (0o640, 0o750, True), (0o600, 0o755, False), (0o644, 0o700, False)],
    ids=oct,
)
def test_whether_others_may_read_what_is_printed(
    open_folder: Path, mode: int, folder: int, public: bool
) -> None:
    """Of a process that has a pipe to one that has the file, as a rank has to its launcher."""
    (output := open_folder / "in" / "output").parent.mkdir()
    output.touch()
    output.chmod(mode)
    output.parent.chmod(folder)
    code = "import os; from dask_gpu_mpi.base.streams import is_public; print(is_public({}), flush=True)"
    launcher = (
        "import subprocess, sys; rank = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stderr=subprocess.PIPE); "
        "rank.communicate()"
    )
    with open(output, "a") as stderr:
        for words in (["-c", code], ["-c", launcher, code]):
            done = subprocess.run(
                [sys.executable, *words], stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60
            )
            assert done.stdout == f"{public}\n"


def test_what_launch_has_passed_on_and_what_nobody_may_read() -> None:
    assert streams.is_public({streams.PUBLIC: "1"})
    code = "from dask_gpu_mpi.base.streams import is_public; print(is_public({}), flush=True)"
    for redirection in ("2>/dev/null", "2>&-"):
        assert python(code, redirection).stdout == "False\n"


@pytest.mark.parametrize("before", [None, "0,1"])
def test_the_environment_is_as_before(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before or "")
    if before is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    with streams.environment({"CUDA_VISIBLE_DEVICES": "GPU-x"}):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-x"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
