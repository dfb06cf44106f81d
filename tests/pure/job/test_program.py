"""The user's program: how it is found, what is refused, and that it runs as Python itself would run it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job.program import Program, ProgramKind, libraries_of_script
from dask_gpu_mpi.sites.command import START
from support import ROOT


def test_what_is_no_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        archive.writestr("other.py", "")
    assert Program.of([str(tmp_path / "x")]).kind is ProgramKind.FOLDER
    for name in ("s.py", "run.sh"):
        (tmp_path / name).touch()
    for name, words in (
        ("x", r"is a zip file without __main__\.py"),
        ("none.py", "does not exist"),
        ("", "is a directory without"),
        (os.devnull, "'/dev/null' is not a regular file"),
        ("run.sh", "is a shell script .*Fix: give the Python script that it starts"),
    ):
        with pytest.raises(InputError, match=words):
            Program.of([str(tmp_path / name)]).check()
    (tmp_path / "job.slurm").write_text("#!/bin/bash\n#SBATCH --nodes=2\nexec dask-gpu-mpi launch my.py\n")
    with pytest.raises(InputError, match="job.slurm' is a shell script .*the batch system takes job scripts"):
        Program.of([str(tmp_path / "job.slurm")]).check_syntax()
    with pytest.raises(InputError, match="script '' is an empty text"):
        Program.of([""]).check()
    with pytest.raises(
        InputError, match=r"does not exist .*Fix: --no-scheduler --scheduler-address tcp://h:8786"
    ):
        Program.of(["tcp://h:8786"]).check()  # dask-mpi takes an address there
    with pytest.raises(InputError, match=r"'pan' does not exist .*did you mean the command 'plan'"):
        Program.of(["pan"]).check(["check", "plan"])
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)  # root may read all
    with pytest.raises(InputError, match=r"can't be read .*Fix: chmod u\+r .*/s\.py, or ask its owner"):
        Program.of([str(tmp_path / "s.py")]).check()


@pytest.mark.parametrize("name", ["dask.py", "folder/numpy.py"])
def test_script_with_the_name_of_a_library(tmp_path: Path, name: str) -> None:
    """Dask's processes would import it instead of the library."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    said = f"has the name of a library: `import {path.stem}` would import the script"
    with pytest.raises(InputError, match=said):
        Program.of([str(path)]).check()
    path.with_name("mine.py").touch()
    said = f"{str(path)!r} has the name of a library, and is imported instead, from the script's folder. Fix: rename it"
    with pytest.raises(InputError) as caught:
        Program.of([str(path.with_name("mine.py"))]).check_name()
    assert str(caught.value) == said
    path.rename(path.with_suffix(""))
    for words in (
        ["-m", "dask.py"],
        ["-c", "dask.py"],
        [str(path.with_suffix(""))],
        [str(path.with_name("mine.py"))],
    ):
        Program.of(words).check_name()


@pytest.mark.parametrize(("name", "is_searched"), [("psutil.py", False), ("mine.py", True)])
def test_the_folder_of_a_script_that_hides_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_searched: bool
) -> None:
    """It is not searched: the start that refuses the script imports this library."""
    (tmp_path / name).touch()
    monkeypatch.setattr(sys, "path", [os.getcwd(), *sys.path])
    monkeypatch.setattr(sys, "argv", ["-c"])
    Program.of([str(tmp_path / name)]).prepare()
    assert (str(tmp_path) in sys.path) is is_searched


@pytest.mark.parametrize(
    ("name", "says"),
    [
        # whether there is such a module inside a package is known only when the package is imported
        *((name, "") for name in ("json.tool", "json", "json.none", "sys", "__main__")),
        ("none_such", "no module named 'none_such' .*Fix: correct its name, or set PYTHONPATH"),
        ("none_such.mod", "no module named 'none_such.mod'"),
        ("script.py", r"Fix: correct its name \(for a script leave -m out\)"),
        (".relative", "no module named '.relative'"),
        ("", "no module named ''"),
    ],
)
def test_modules_that_may_be_there_or_are_not(name: str, says: str) -> None:
    with pytest.raises(InputError, match=f"-m: .*{says}") if says else contextlib.nullcontext():
        Program.of(["-m", name]).check()


RUN = """
import sys
from dask_gpu_mpi.job.program import Program, run_script, libraries_of_script
program = Program.of(sys.argv[1:])
program.prepare()
run_script(program)
"""


#: What a script sees of itself: nothing of it may depend on who runs it.
SELF = '''"""Its docstring."""
import json, os, sys
NUMBER: int = 5
plain = {key: repr(value) for key, value in vars().items() if isinstance(value, (str, dict, type(None)))}
seen = {
    "names": sorted(vars()),
    "plain": plain,
    "loader": [str(__loader__).partition(" at ")[0], getattr(__loader__, "name", ""), getattr(__loader__, "path", "")],
    "spec": [str(getattr(__spec__, key, "")) for key in ("name", "origin", "parent", "cached", "has_location")],
    "builtins": __builtins__ is sys.modules["builtins"],
    "main": vars(sys.modules["__main__"]) is globals(),
    "argv": sys.argv,
    "path": sys.path,
    "code": sys._getframe().f_code.co_filename,
}
sys.stdout.buffer.write(json.dumps(seen, sort_keys=True).encode())
'''


def run_both(
    *words: str | bytes,
    cwd: Path,
    environ: dict[str, str] | None = None,
    flags: str = "",
    start: str = "",
) -> list[subprocess.CompletedProcess[bytes]]:
    """A program with two arguments, run by Python and by us (where `start` comes first), in `cwd`."""
    own = f"{start}\nimport sys; sys.path.append({str(ROOT)!r})\n{RUN}"  # with -I there is no PYTHONPATH
    env = {**os.environ, "PYTHONPATH": "", **(environ or {})}
    python = [sys.executable, *flags.split()]
    return [
        subprocess.run(
            [*python, *ours, *words, "a", "--b"], capture_output=True, timeout=60, cwd=cwd, env=env
        )
        for ours in ([], ["-c", own])
    ]


def see_the_same(*words: str | bytes, cwd: Path, **how: Any) -> None:
    """What `SELF` sees is the same, run by Python and by us."""
    seen = []
    for done in run_both(*words, cwd=cwd, **how):
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        seen.append(json.loads(done.stdout))
    seen[1]["path"].remove(str(ROOT))
    assert seen[1] == seen[0]


#: How Python finds its program, where `SELF` is a script, in a folder, in a zip file, and in modules and packages.
PROGRAMS = {
    "script": ("s.py",),
    "script by a link": ("link.py",),
    "script by a link, absolute": ("{tmp}/link.py",),
    "script beside what a link leads to": ("sub-link/../s.py",),
    "folder": ("folder",),
    "folder by a link": ("folder-link",),
    "folder, absolute": ("{tmp}/folder",),
    "folder, with a slash": ("./folder/",),
    "working directory": (".",),
    "zip": ("program.zip",),
    "zip of any name": ("program",),
    "module": ("-m", "s"),
    "package": ("-m", "package"),
    "module of a package": ("-m", "package.s"),
    "package below a package": ("-m", "package.sub"),
    "namespace": ("-m", "folder.__main__"),
    "module in a zip": ("-m", "zipped"),
    "code": ("-c", SELF),
}


def make_programs(tmp_path: Path, text: str) -> dict[str, str]:
    """All of them with this text; the environment in which they are found."""
    for folder in ("folder", "package/sub", "package/empty"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("s", "__main__", "folder/__main__", "package/s", "package/__main__", "package/sub/__main__"):
        (tmp_path / f"{name}.py").write_text(text)
    for name in ("package", "package/sub"):
        (tmp_path / name / "__init__.py").write_text("import sys\nARGV = list(sys.argv)\n")
    for link, to in (
        ("folder-link", "folder"),
        ("link.py", "sub-link/__main__.py"),
        ("sub-link", "package/sub"),
    ):
        (tmp_path / link).symlink_to(to)
    for path, inside in (("program.zip", "__main__"), ("program", "__main__"), ("modules.zip", "zipped")):
        with zipfile.ZipFile(tmp_path / path, "w") as archive:
            archive.writestr(f"{inside}.py", text)
    return {"PYTHONPATH": f"{tmp_path}:{tmp_path}/modules.zip"}


#: With Python's options that change the import path; one of each kind is enough.
FLAGS = [("", name) for name in PROGRAMS] + [("-P", "folder"), ("-P", "code"), ("-I", "zip")]


@pytest.mark.parametrize(("flags", "name"), FLAGS, ids=[f"{flags} {name}".strip() for flags, name in FLAGS])
def test_every_program_sees_what_it_sees_in_python(tmp_path: Path, flags: str, name: str) -> None:
    environ = make_programs(tmp_path, SELF)
    words = [word.replace("{tmp}", str(tmp_path)) for word in PROGRAMS[name]]
    see_the_same(*words, cwd=tmp_path, environ=environ, flags=flags)


KINDS = ("script", "folder", "module of a package", "code")


@pytest.mark.parametrize("name", [*KINDS, "zip"])
@pytest.mark.parametrize("safe", ["", "1"], ids=["", "safe path"])
def test_below_launch_it_sees_what_it_sees_in_python(tmp_path: Path, name: str, safe: str) -> None:
    """Python's own entry was removed there before; what is first then is the user's, even if it is the working directory."""
    environ = {**make_programs(tmp_path, SELF), "PYTHONSAFEPATH": safe}
    see_the_same(
        *PROGRAMS[name], cwd=tmp_path, environ=environ, start=START.partition("from dask_gpu_mpi")[0]
    )


#: Raises below a function, and asks for its own name by pickle where it is imported.
RAISES = "def f():\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError as error:\n    raise KeyError('x') from error\n"


FAILURES = {
    **{f"{name} that raises": (RAISES, PROGRAMS[name]) for name in (*KINDS, "zip", "module in a zip")},
    **{f"{name} with a syntax error": ("def f(:\n", PROGRAMS[name]) for name in KINDS[::2]},
    **{f"{name} that imports nothing": ("import package.none", PROGRAMS[name]) for name in KINDS[::2]},
    "script that exits with a text": ("raise SystemExit('no')", PROGRAMS["script"]),
    **{f"-m {name}": (SELF, ("-m", name)) for name in ("package.none", "package.empty", "s.py", "none.s")},
}


@pytest.mark.parametrize(("text", "words"), FAILURES.values(), ids=FAILURES)
def test_tracebacks_and_modules_that_are_not_found_are_pythons(
    tmp_path: Path, words: tuple[str, ...], text: str
) -> None:
    environ = make_programs(tmp_path, text)
    given = [text if word == SELF else word for word in words]
    python, ours = run_both(*given, cwd=tmp_path, environ=environ)
    assert ours.stderr.decode() == python.stderr.decode()
    assert ours.returncode == python.returncode == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import numpy", ()),
        ("import cudf_polars, mycudf, cudfx", ()),
        ("import cupy as cp", ("cupy",)),
        ("from cudf import DataFrame", ("cudf",)),
        ("import cupy\nimport dask_cudf", ("dask_cudf", "cupy")),
        (
            'import dask.dataframe as dd\ndask.config.set({"dataframe.backend": "cudf"})',
            ("dask_cudf", "cudf"),
        ),
    ],
)
def test_libraries_that_a_script_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: tuple[str, ...]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert libraries_of_script() == found


def test_a_long_script_is_read_in_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a search for two words in any order grew with the square of the length: this one took a minute."""
    script = tmp_path / "script.py"
    script.write_text("x = cudf.Series([1, 2])\n" * 30_000)
    monkeypatch.setattr(sys, "argv", [str(script)])
    before = time.process_time()
    assert libraries_of_script() == ("cudf",)
    assert time.process_time() - before < 1


@pytest.mark.parametrize("words", [[], ["-c"], ["-m"], ["/dev/null"], ["missing.py"]])
def test_no_script_names_no_library(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", words)
    assert libraries_of_script() == ()
