"""The user's script runs as Python itself would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.script import check_script

RUN = """
import sys
from dask_gpu_mpi.script import prepare_script, run_script
path, *arguments = sys.argv[1:]
prepare_script(path, arguments)
run_script(path)
"""


def run(tmp_path: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "my script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, "-c", RUN, str(script), *arguments], capture_output=True, text=True, timeout=60
    )


def test_names_arguments_and_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 5")
    text = (
        "import sys, neighbour\n"
        "same = sys.modules['__main__'].__file__ == __file__\n"
        "print(__name__, __file__ == sys.argv[0], sys.argv[1:], neighbour.VALUE, same)\n"
    )
    done = run(tmp_path, text, "a", "--b")
    assert done.stdout.strip() == "__main__ True ['a', '--b'] 5 True", done.stderr


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_exit_codes(tmp_path: Path, text: str, code: int) -> None:
    assert run(tmp_path, text).returncode == code


def test_the_traceback_is_the_users_own(tmp_path: Path) -> None:
    done = run(tmp_path, "def f():\n    1 / 0\nf()\n")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "dask_gpu_mpi" not in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_syntax_error_is_the_users_own(tmp_path: Path) -> None:
    done = run(tmp_path, "def f(:\n")
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr
    assert "script.py" in done.stderr
    assert "run_script" not in done.stderr


def test_a_thread_outlives_the_main_program(tmp_path: Path) -> None:
    text = (
        "import threading\nNAME = 'kept'\ngo = threading.Event()\n"
        "threading.Thread(target=lambda: (go.wait(10), print(NAME))).start()\ngo.set()\n"
    )
    assert run(tmp_path, text).stdout.strip() == "kept"


@pytest.mark.parametrize(("name", "word"), [("none.py", "does not exist"), ("", "is a directory")])
def test_what_is_no_script(tmp_path: Path, name: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        check_script(str(tmp_path / name))


def test_annotations_are_the_scripts_own(tmp_path: Path) -> None:
    done = run(tmp_path, "def f(x: int): ...\nprint(f.__annotations__['x'] is int)")
    assert done.stdout.strip() == "True", done.stderr


def test_the_file_is_absolute(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(
        "import os, sys; os.chdir('/'); print(os.path.exists(__file__), sys.argv[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, "s.py"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout.split() == ["True", "s.py"], done.stderr
