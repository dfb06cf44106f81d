"""Run the user's script as Python itself would."""

from __future__ import annotations

import builtins
import contextlib
import difflib
import io
import os
import sys
import types
from collections.abc import Collection, Sequence
from importlib.machinery import SourceFileLoader
from typing import Any

from dask_gpu_mpi.errors import InputError

from . import exit_codes

__all__ = ["check_script", "prepare_script", "run_script"]


def check_script(path: str, commands: Collection[str] = ()) -> None:
    """Refuse a script that can't be read.

    Parameters
    ----------
    path : str
        The script.
    commands : collection of str
        What the first argument can be instead.

    Raises
    ------
    InputError
        Names the path and the directory it was looked for in, and the command that was meant, perhaps.
    """
    if not os.path.isfile(path) or not os.access(path, os.R_OK):
        what = (
            "is a directory"
            if os.path.isdir(path)
            else "can't be read"
            if os.path.exists(path)
            else "does not exist"
        )
        meant = difflib.get_close_matches(path, commands)
        hint = f"; or did you mean the command {meant[0]!r}, which comes before all options?" if meant else ""
        raise InputError(
            f"script {path!r} {what} ({_where()}; expected a Python file). Fix: give its path after the options"
            + hint
        )


def _where() -> str:
    try:
        return f"working directory {os.getcwd()!r}"
    except FileNotFoundError:
        return "the working directory was deleted"


def prepare_script(path: str, arguments: Sequence[str]) -> None:
    """Set ``sys.argv`` and ``sys.path`` as ``python SCRIPT ARGUMENTS`` does, before the agent takes a copy of the path."""
    own = _own_entries()
    sys.argv = [path, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        if sys.path and sys.path[0] in own:
            del sys.path[0]
        sys.path.insert(0, _folder(path))


def _own_entries() -> set[str]:
    """What Python may have put before ``sys.path`` to run us: nothing, with `-m` in a working directory that was deleted."""
    own = {"", _folder(sys.argv[0])} if sys.argv else {""}
    with contextlib.suppress(FileNotFoundError):
        own.add(os.getcwd())
    return own


def _folder(path: str) -> str:
    """Where the script's neighbours are: beside the file itself, not beside a symbolic link to it."""
    try:
        return os.path.dirname(os.path.realpath(path))
    except FileNotFoundError:  # the working directory was deleted
        return os.path.dirname(path)


def _absolute(path: str) -> str:
    """The script's ``__file__``: not normalized, since ``link/..`` is not where it seems to be."""
    try:
        return os.path.join(os.getcwd(), path)
    except FileNotFoundError:
        return path  # Python does the same


def _main_module(path: str) -> types.ModuleType:
    """The module ``__main__`` of ``python SCRIPT`` (CPython: pylifecycle.c, add_main_module; pythonrun.c, _PyRun_SimpleFile)."""
    module = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    module.__dict__.update(__file__=path, __cached__=None, __loader__=loader, __builtins__=builtins)
    if sys.version_info < (3, 14):  # which no longer does so: cpython#124634
        module.__dict__.update(__annotations__={})
    return module


def run_script(path: str) -> None:
    """Run it as ``__main__``; its own exceptions end the process as they would have.

    Raises
    ------
    SystemExit
        The script's own, or 1 after an exception whose traceback has been printed (130 after a KeyboardInterrupt).
    """
    path = _absolute(path)
    module = _main_module(path)
    # Stays there: threads that outlive the main program, and pickle, look their names up in it.
    sys.modules["__main__"] = module
    try:
        with io.open_code(path) as file:
            # Without our own `from __future__`: the script's annotations stay what they are.
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        error = error.with_traceback(_from_script(error.__traceback__, path))
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(exit_codes.of_exception(error)) from None


def _from_script(trace: Any, path: str) -> Any:
    """The traceback without our own frames."""
    current = trace
    while current is not None and current.tb_frame.f_code.co_filename != path:
        current = current.tb_next
    return current
