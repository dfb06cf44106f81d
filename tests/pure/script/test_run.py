"""The user's script runs as Python itself would run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.script.run import check_script, prepare_script

ROOT = Path(__file__).resolve().parents[3]

RUN = """
import sys
from dask_gpu_mpi.script.run import prepare_script, run_script
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


#: What a script sees of itself: nothing of it may depend on who runs it.
SELF = """
import json, os, sys
plain = {key: repr(value) for key, value in vars().items() if isinstance(value, (str, dict, type(None)))}
seen = {
    "names": sorted(vars()),
    "plain": plain,
    "loader": [str(type(__loader__)), __loader__.name, __loader__.path, __loader__.get_source("__main__")],
    "builtins": __builtins__ is sys.modules["builtins"],
    "main": vars(sys.modules["__main__"]) is globals(),
    "argv": sys.argv,
    "path": sys.path,
    "code": sys._getframe().f_code.co_filename,
}
sys.stdout.buffer.write(json.dumps(seen, sort_keys=True).encode())
"""
GONE = "mkdir gone && cd gone && rmdir ../gone && "


def both(
    script: str | bytes, cwd: Path, environ: dict[str, str] | None = None, *, before: str = ""
) -> list[dict[str, object]]:
    """What `SELF` sees, run by Python and by us, in `cwd` after the shell command `before`."""
    seen = []
    for run in ([], ["-c", RUN]):
        done = subprocess.run(
            ["bash", "-c", before + 'exec "$@"', "bash", sys.executable, *run, script, "a", "--b"],
            capture_output=True,
            timeout=60,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(environ or {})},
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        seen.append(json.loads(done.stdout))
    return seen


@pytest.mark.parametrize(
    "before", ["", '"""Its docstring."""\nNUMBER: int = 5\n'], ids=["plain", "annotated"]
)
def test_main_is_as_python_makes_it(tmp_path: Path, before: str) -> None:
    (tmp_path / "s.py").write_text(before + SELF)
    python, ours = both("s.py", tmp_path)
    assert ours == python


@pytest.mark.parametrize(
    "path",
    [
        "link.py",
        "folder-link/link.py",
        "folder-link/../sub/s.py",
        "sub/../link.py",
        "{tmp}/link.py",
        "./absolute.py",
    ],
)
def test_links_are_followed_as_python_follows_them(tmp_path: Path, path: str) -> None:
    real = tmp_path / "elsewhere" / "real"
    real.mkdir(parents=True)
    (real / "s.py").write_text(SELF)
    (real / "link.py").symlink_to("s.py")
    (tmp_path / "sub").mkdir()
    (real.parent / "sub").symlink_to(real)
    (tmp_path / "folder-link").symlink_to(real)
    (tmp_path / "link.py").symlink_to(Path("folder-link", "link.py"))
    (tmp_path / "absolute.py").symlink_to(real / "s.py")
    python, ours = both(path.format(tmp=tmp_path), tmp_path)
    assert ours == python


def test_a_safe_path_stays_safe(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(SELF)
    python, ours = both("s.py", tmp_path, {"PYTHONSAFEPATH": "1"})
    assert ours == python
    assert str(tmp_path) not in ours["path"]


def test_a_script_in_a_link_imports_its_neighbours(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "neighbour.py").write_text("VALUE = 5")
    (real / "s.py").write_text("import neighbour; print(neighbour.VALUE)")
    (tmp_path / "my script.py").symlink_to("real/s.py")
    done = subprocess.run(
        [sys.executable, "-c", RUN, "my script.py"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout == "5\n", done.stderr


HOSTILE = ["a b.py", "quote'\"$(x).py", "line\nbreak.py", "emoji \N{SNAKE}.py", "-dash.py", b"latin-\xe4.py"]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
@pytest.mark.parametrize("utf8", ["", "0"], ids=["UTF-8", "ASCII"])
def test_any_name_is_a_name(tmp_path: Path, name: str | bytes, utf8: str) -> None:
    script = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    with open(script, "w") as file:
        file.write(SELF)
    environ = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": utf8}
    python, ours = both(script, tmp_path, environ)
    assert ours == python


def test_the_working_directory_was_deleted(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(SELF)
    python, ours = both(str(tmp_path / "s.py"), tmp_path, before=GONE)
    assert ours == python


def test_a_script_in_a_deleted_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for argv, before, after in (
        (["-c"], ["", "/lib"], ["", "/lib"]),
        (["/env/bin/dask-gpu-mpi"], ["/env/bin", "/lib"], ["", "/lib"]),
        (
            ["/env/dask_gpu_mpi/__main__.py"],
            ["/lib"],
            ["", "/lib"],
        ),  # -m puts nothing there, and must lose nothing
    ):
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(sys, "path", before)
        prepare_script("s.py", [])
        assert sys.path == after
        assert sys.argv == ["s.py"]
    with pytest.raises(
        InputError,
        match=r"script 's.py' does not exist \(the working directory was deleted; expected a Python file\)",
    ):
        check_script("s.py")


def test_a_script_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "s.py"
    script.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)  # root may read all
    with pytest.raises(InputError, match="can't be read"):
        check_script(str(script))


def test_a_script_that_is_there(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.touch()
    check_script(str(script))
    with pytest.raises(InputError, match="is a directory"):
        check_script(str(tmp_path))
    with pytest.raises(InputError, match=r"'pan' does not exist .*did you mean the command 'plan'"):
        check_script("pan", ["check", "plan"])
