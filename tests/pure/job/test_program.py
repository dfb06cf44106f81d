"""What a job runs: how it is found, what of ``sys`` is set for it, and what is refused."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job.program import Program, ProgramKind


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["s.py", "-m", "x"], Program(ProgramKind.SCRIPT, "s.py", ("-m", "x"))),
        (["-m", "package.mod", "a"], Program(ProgramKind.MODULE, "package.mod", ("a",))),
        (["-c", "import this", "-c"], Program(ProgramKind.CODE, "import this", ("-c",))),
        (["-m"], Program(ProgramKind.SCRIPT, "-m")),  # after a `--`
        ([os.path.dirname(__file__)], Program(ProgramKind.FOLDER, os.path.dirname(__file__))),
    ],
)
def test_what_a_command_line_runs(words: list[str], program: Program) -> None:
    assert Program.of(words) == program


def test_a_zip_file_is_a_folder(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        archive.writestr("other.py", "")
    program = Program.of([str(tmp_path / "x")])
    assert program.kind is ProgramKind.FOLDER
    with pytest.raises(InputError, match=r"is a zip file without __main__\.py"):
        program.check()


@pytest.mark.parametrize(("name", "word"), [("none.py", "does not exist"), ("", "is a directory without")])
def test_what_is_no_script(tmp_path: Path, name: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        Program.of([str(tmp_path / name)]).check()


def test_a_script_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "s.py"
    script.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)  # root may read all
    with pytest.raises(InputError, match="can't be read"):
        Program.of([str(script)]).check()


def test_a_script_that_is_there(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.touch()
    Program.of([str(script)]).check()
    (tmp_path / "__main__.py").touch()
    Program.of([str(tmp_path)]).check()
    Program.of(["-c", "anything"]).check()
    with pytest.raises(InputError, match="'/dev/null' is not a regular file"):
        Program.of([os.devnull]).check()
    with pytest.raises(InputError, match=r"'pan' does not exist .*did you mean the command 'plan'"):
        Program.of(["pan"]).check(["check", "plan"])


@pytest.mark.parametrize("name", ["json.tool", "json", "json.none", "sys", "__main__"])
def test_modules_that_may_be_there(name: str) -> None:
    """Whether there is such a module inside a package is known only when the package is imported."""
    Program.of(["-m", name]).check()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none_such", "-m: no module named 'none_such' .*Fix: correct its name, or set PYTHONPATH"),
        ("none_such.mod", "-m: no module named 'none_such.mod'"),
        ("script.py", r"Fix: correct its name \(for a script leave -m out\)"),
        (".relative", "no module named '.relative'"),
        ("", "no module named ''"),
    ],
)
def test_modules_that_are_not_there(name: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Program.of(["-m", name]).check()


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
        program = Program.of(["s.py"])
        program.prepare()
        assert sys.path == after
        assert sys.argv == ["s.py"]
    with pytest.raises(
        InputError,
        match=r"script 's.py' does not exist \(the working directory was deleted; expected a Python file, or",
    ):
        program.check()
    monkeypatch.setattr(sys, "argv", ["/env/bin/dask-gpu-mpi"])
    monkeypatch.setattr(sys, "path", ["/env/bin", "/lib"])
    Program.of(["-m", "s", "a"]).prepare()
    assert (sys.argv, sys.path) == (["-m", "a"], ["/lib"])
