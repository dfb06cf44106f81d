"""The program of a job, as on Python's command line: a script, a folder or zip file, ``-m MODULE`` or ``-c CODE``.

The commands check it before anything starts (`Program`), and the rank with the script runs it as Python would (`run_script`).
"""

from __future__ import annotations

import builtins
import difflib
import importlib.util
import io
import os
import pkgutil
import re
import runpy
import shlex
import sys
import textwrap
import types
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import TYPE_CHECKING, Any, NoReturn

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.errors import InputError, StartupError
from dask_gpu_mpi.job import outcome

if TYPE_CHECKING:
    from dask_gpu_mpi.options.model import Options

#: Libraries that each of Dask's processes imports. The script's folder is searched first, so none of its files may have such a
#: name.
_REQUIRED = (
    "cloudpickle", "dask", "dask_gpu_mpi", "distributed", "locket", "msgpack", "numpy", "packaging", "psutil",
    "sortedcontainers", "tblib", "tlz", "toolz", "tornado", "yaml", "zict",
)  # fmt: skip
#: These, other libraries, and modules of Python's own that users may choose as a name: a script must have another one.
_RESERVED = (
    "calendar", "copy", "csv", "http", "json", "logging", "numbers", "queue", "random", "signal", "types",
    "bokeh", "click", "cuda", "cudf", "cupy", "dask_cuda", "fsspec", "jinja2", "lz4", "mpi4py", "msgspec", "numba", "pandas",
    "pyarrow", "pynvml", "rich", "rmm", "ucxx", "urllib3", *_REQUIRED,
)  # fmt: skip
#: Python's file name of the code of ``-c``.
_COMMAND = "<string>"
#: The first line of a shell script, and the fix for one.
_SHELL = rb"#! *(\S*/)?(env +)?\w{0,2}sh\b"
_NOT_SHELL = "give the Python script that it starts; the batch system takes job scripts (sbatch, qsub)"


class ProgramKind(Enum):
    """The place of the code."""

    SCRIPT = "in a file"
    FOLDER = "in __main__.py of a folder or zip file"
    MODULE = "in a module, -m"
    CODE = "on the command line, -c"


@dataclass(frozen=True)
class Program:
    """The program to run as ``__main__``."""

    kind: ProgramKind
    #: The path, the module's name or the code.
    text: str
    #: The rest of ``sys.argv``.
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: Sequence[str]) -> Program:
        """The program of a command line: ``SCRIPT ARGS...``, ``-m MODULE ARGS...`` or ``-c CODE ARGS...``.

        Raises an InputError if the working directory was deleted.
        """
        try:
            os.getcwd()
        except FileNotFoundError:
            raise InputError(
                "the working directory was deleted",
                expected="one in which the ranks can run",
                fix="cd to another",
            ) from None
        if len(words) > 1 and words[0] in ("-m", "-c"):
            return cls(
                ProgramKind.MODULE if words[0] == "-m" else ProgramKind.CODE, words[1], tuple(words[2:])
            )
        kind = ProgramKind.SCRIPT if pkgutil.get_importer(absolute(words[0])) is None else ProgramKind.FOLDER
        return cls(kind, words[0], tuple(words[1:]))

    def check(self, commands: Collection[str] = ()) -> None:
        """Raise an InputError if the program can't be found; `commands`: the user may have meant one of these.

        A module inside a package is not searched for, since that would import the package.
        """
        self.check_name()
        if self.kind is ProgramKind.MODULE:
            self._check_module()
        elif self.kind is not ProgramKind.CODE:
            self._check_path(commands)

    def _check_module(self) -> None:
        top = self.text.partition(".")[0]
        try:
            found = top != "" and importlib.util.find_spec(top) is not None
        except ValueError:  # a module that is imported already, without a specification
            found = True
        if not found:
            script = " (for a script leave -m out)" if self.text.endswith(".py") else ""
            raise InputError(
                f"-m: no module named {self.text!r} ({_where()}; expected a module that Python can import)",
                fix=f"correct its name{script}, or set PYTHONPATH",
            )

    def _check_path(self, commands: Collection[str]) -> None:
        path, words = self.text, ""
        importer = pkgutil.get_importer(absolute(path))
        if not path:
            what = "is an empty text"
        elif importer is not None:
            if importer.find_spec("__main__") is not None:
                return
            what = f"is a {'directory' if os.path.isdir(path) else 'zip file'} without __main__.py"
        elif not os.path.isfile(path):
            what = "is not a regular file" if os.path.exists(path) else "does not exist"
            if path.startswith("tcp://"):
                words = f"--no-scheduler --scheduler-address {path}"
            elif path.startswith("tls://"):
                words = "--no-scheduler --scheduler-file FILE, the file of that scheduler"
        elif not os.access(path, os.R_OK):
            what = "can't be read"
            words = f"chmod u+r {shlex.quote(path)}, or ask its owner for the right to read it"
        elif path.endswith(".ipynb"):
            what = "is a notebook"
            words = f"give -m nbconvert --execute --to notebook {path}"
        elif path.endswith((".sh", ".bash", ".sbatch")):
            what, words = "is a shell script", _NOT_SHELL
        else:
            return
        if path in (
            "run",
            "launch",
            "check",
            "python",
            "python3",
            "bash",
            "sh",
            "dask-gpu-mpi",
            "srun",
            "mpirun",
            "mpiexec",
        ):
            words = "give the script alone, without a command before it"
        self._refuse(what, words, commands)

    def _refuse(self, what: str, words: str, commands: Collection[str] = ()) -> NoReturn:
        path = self.text
        meant = difflib.get_close_matches(path, commands)
        hint = f"; or did you mean the command {meant[0]!r}, which comes before all options?" if meant else ""
        raise InputError(
            f"script {path!r} {what} ({_where()}; expected a Python file, or a folder or zip file with __main__.py)",
            fix=words or f"give its path after the options{hint}",
        )

    def check_name(self) -> None:
        """Raise an InputError if Dask's processes would import the script itself instead of a library that they need."""
        if name := self._hides():
            raise InputError(
                f"script {self.text!r} has the name of a library: `import {name}` would import the script",
                fix="rename it",
            )
        if self.kind in (ProgramKind.SCRIPT, ProgramKind.FOLDER) and (
            files := self._files_beside(_REQUIRED, ".py")
        ):
            raise InputError(hides_library(files[0]), fix="rename it")

    def _hides(self) -> str:
        """The library that the script would hide; empty: none."""
        name, suffix = os.path.splitext(os.path.basename(self.text))
        is_found = self.kind is ProgramKind.SCRIPT and suffix == ".py" and not sys.flags.safe_path
        return name if is_found and name in _RESERVED else ""

    def neighbour(self, *, imported: bool = False) -> str:
        """The file in the script's folder with the name of a library, if there is one: after a failed start, its likely cause.

        `imported`: one that this process has imported.
        """
        files = self._files_beside(_RESERVED, ".py", "/__init__.py")
        if imported:
            here = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
            files = [file for file in files if file in here]
        return files[0] if files else ""

    def _files_beside(self, names: Sequence[str], *ends: str) -> list[str]:
        """The files of these libraries in the script's folder, if Python searches that."""
        folder = os.path.abspath(self._import_path())
        paths = (os.path.join(folder, f"{name}{end}") for name in names for end in ends)
        return [] if sys.flags.safe_path else [*filter(os.path.isfile, paths)]

    def check_on(self, rank: int, options: Options, commands: Collection[str] = ()) -> None:
        """Raise an error if `rank` is to run the program and can't; `commands` as of `check`."""
        if rank == options.script_rank:
            self.check(commands)
            self.check_syntax()

    def check_syntax(self) -> None:
        """Raise a StartupError after Python's own report, if Python can't compile a script or the code of ``-c``.

        Otherwise the error would come when the cluster is up. Code of modules and folders is not read before it runs.
        """
        if self.kind not in (ProgramKind.SCRIPT, ProgramKind.CODE):
            return
        try:
            text, name = self._code()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they come when it runs
                _compiled(text, name)
        except SyntaxError as error:
            sys.excepthook(SyntaxError, error.with_traceback(None), None)
            is_python = self.kind is ProgramKind.CODE or self.text.endswith(".py")
            if not is_python and isinstance(text, bytes) and re.match(_SHELL, text):
                self._refuse("is a shell script", _NOT_SHELL)
            raise StartupError(
                f"{'-c' if self.kind is ProgramKind.CODE else f'script {self.text!r}'}: Python can't compile it",
                fix="correct the line above",
            ) from None
        except (OSError, ValueError, RecursionError, MemoryError):
            pass  # it is reported when it runs

    def _code(self) -> tuple[str | bytes, str]:
        """The text of a script or of ``-c``, and its file name for Python."""
        if self.kind is ProgramKind.CODE:
            # Python 3.14: indented code as well (cpython#103998)
            return textwrap.dedent(self.text) if sys.version_info >= (3, 14) else self.text, _COMMAND
        path = absolute(self.text)
        with io.open_code(path) as file:
            return file.read(), path

    def prepare(self) -> None:
        """Set ``sys.argv`` and ``sys.path`` as Python does, before the agent gets a copy of the path."""
        safe = sys.flags.safe_path
        own = _own_entries()
        named = {ProgramKind.MODULE: "-m", ProgramKind.CODE: "-c"}.get(self.kind, self.text)
        sys.argv = [named, *self.arguments]
        if not safe and sys.path and sys.path[0] in own:
            del sys.path[0]
        # A folder or zip file is always in the path: its __main__ is a module there (CPython: main.c, pymain_run_python).
        # A script that would hide a library is refused later, by code that may import this library.
        if self.kind is ProgramKind.FOLDER or not (safe or self._hides()):
            sys.path.insert(0, self._import_path())

    def _import_path(self) -> str:
        """The entry that Python puts before ``sys.path``."""
        if self.kind is ProgramKind.CODE:
            return ""
        if self.kind is ProgramKind.SCRIPT:
            return _folder(self.text)
        if self.kind is ProgramKind.FOLDER:
            return absolute(self.text)
        return os.getcwd()


def hides_library(file: str) -> str:
    """What is wrong with a file next to the script."""
    return f"{file!r} has the name of a library, and is imported instead, from the script's folder"


def absolute(path: str) -> str:
    """The script's ``__file__``: not normalized, since ``link/..`` is another folder than it seems."""
    return os.getcwd() if path == "." else os.path.join(os.getcwd(), path)


def _own_entries() -> set[str]:
    """The entry that Python may have put before ``sys.path``."""
    if sys.argv[:1] == ["-c"]:
        return {""}  # `launch` has removed it, so the first entry may be the user's, of PYTHONPATH
    return {"", os.getcwd(), *map(_folder, sys.argv[:1])}


def _folder(path: str) -> str:
    """The folder of the script itself, not of a symbolic link to it."""
    return os.path.dirname(os.path.realpath(path))


def _where() -> str:
    return f"working directory {os.getcwd()!r}"


def run_script(program: Program) -> None:
    """Run it as ``__main__``, as Python does.

    Raises the script's SystemExit, or one with code 1 after an exception whose traceback was printed (130: KeyboardInterrupt).
    """
    try:
        _execute(program)
        outcome.note(outcome.outcome_of_error(None))
    except SystemExit as end:
        outcome.note(outcome.outcome_of_error(end))
        raise
    except BaseException as error:
        outcome.note(outcome.outcome_of_error(error))
        error = error.with_traceback(_from_script(error.__traceback__))
        if type(error).__module__.startswith("dask_mpi."):
            say(
                "error: the job's cluster is not dask_mpi's, which the script uses. Fix: from dask_gpu_mpi import initialize"
            )
        with outcome.reporting():
            sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(outcome.code_of_exception(error)) from None


def _execute(program: Program) -> None:
    module = _main_module()
    # It stays there: threads that outlive the main program, and pickle, find names in it.
    sys.modules["__main__"] = module
    if program.kind in (ProgramKind.MODULE, ProgramKind.FOLDER):
        # by the function that Python's main program calls (CPython: main.c, pymain_run_module)
        is_module = program.kind is ProgramKind.MODULE
        runpy._run_module_as_main(  # type: ignore[attr-defined]
            program.text if is_module else "__main__", alter_argv=is_module
        )
        return
    text, path = program._code()
    if program.kind is not ProgramKind.CODE:
        module.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    exec(_compiled(text, path), module.__dict__)


def _main_module() -> types.ModuleType:
    """The module ``__main__`` as Python begins (CPython: pylifecycle.c, add_main_module; pythonrun.c, _PyRun_SimpleFile)."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__loader__=BuiltinImporter, __builtins__=builtins)
    if sys.version_info < (3, 14):  # 3.14 no longer has it: cpython#124634
        module.__dict__.update(__annotations__={})
    return module


def _from_script(trace: Any) -> Any:
    """The traceback without our frames."""
    own = run_script.__code__.co_filename
    while trace is not None and trace.tb_frame.f_code.co_filename == own:
        trace = trace.tb_next
    return trace


def _compiled(text: str | bytes, path: str) -> types.CodeType:
    # Without the `from __future__` of this module, which would change the script's annotations.
    return compile(text, path, "exec", dont_inherit=True)


#: Libraries of GPUs that take a second or more to import, and the words that a script has which uses them: all of one set.
SLOW_LIBRARIES = {
    "dask_cudf": ({b"dask_cudf"}, {b"cudf", b"dataframe"}),
    "cudf": ({b"cudf"},),
    "cupy": ({b"cupy"},),
}
#: Bytes of a script in which they are looked for.
LOOKED_AT = 2**20


def libraries_of_script() -> tuple[str, ...]:
    """Those of `SLOW_LIBRARIES` that this process's script names, so that scheduler and workers can import them as it does."""
    path = sys.argv[0] if sys.argv else ""
    try:
        if not os.path.isfile(path):  # the code of -c or a pipe, which can be read once
            return ()
        with open(path, "rb") as file:
            text = file.read(LOOKED_AT)
    except OSError:
        return ()
    words = set(re.findall(rb"\b(?:dask_cudf|cudf|cupy|dataframe)\b", text))
    return tuple(name for name, sets in SLOW_LIBRARIES.items() if any(each <= words for each in sets))
