"""Run the user's program as Python itself would."""

from __future__ import annotations

import builtins
import io
import linecache
import runpy
import sys
import textwrap
import types
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any

from . import exit_codes, outcome
from .program import Kind, Program, absolute

__all__ = ["run_script"]

#: How Python calls the code of ``-c``.
_COMMAND = "<string>"


def run_script(program: Program) -> None:
    """Run it as ``__main__``; its own exceptions end the process as they would have.

    Raises
    ------
    SystemExit
        The script's own, or 1 after an exception whose traceback has been printed (130 after a KeyboardInterrupt).
    """
    try:
        _execute(program)
        outcome.note(outcome.of_error(None))
    except SystemExit as end:
        outcome.note(outcome.of_error(end))
        raise
    except BaseException as error:
        outcome.note(outcome.of_error(error))
        error = error.with_traceback(_from_script(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(exit_codes.of_exception(error)) from None


def _execute(program: Program) -> None:
    module = _main_module()
    # Stays there: threads that outlive the main program, and pickle, look their names up in it.
    sys.modules["__main__"] = module
    if program.kind in (Kind.MODULE, Kind.FOLDER):
        _run_module(program)
        return
    if program.kind is Kind.CODE:
        # Python 3.14: indented code as well (cpython#103998)
        text: str | bytes = textwrap.dedent(program.text) if sys.version_info >= (3, 14) else program.text
        path = _COMMAND
        if sys.version_info >= (3, 13):  # whose tracebacks show it
            linecache.cache[path] = (len(text), None, f"{text}\n".splitlines(keepends=True), path)
    else:
        path = absolute(program.text)
        module.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
        with io.open_code(path) as file:
            text = file.read()
    # Without our own `from __future__`: the script's annotations stay what they are.
    exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)


def _main_module() -> types.ModuleType:
    """The module ``__main__`` as Python begins (CPython: pylifecycle.c, add_main_module; pythonrun.c, _PyRun_SimpleFile)."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__loader__=BuiltinImporter, __builtins__=builtins)
    if sys.version_info < (3, 14):  # which no longer does so: cpython#124634
        module.__dict__.update(__annotations__={})
    return module


def _run_module(program: Program) -> None:
    """As ``python -m``: by the function that Python's own main program calls (CPython: main.c, pymain_run_module)."""
    run_as_main = getattr(runpy, "_run_module_as_main", None)
    is_module = program.kind is Kind.MODULE
    if run_as_main is not None:
        run_as_main(program.text if is_module else "__main__", alter_argv=is_module)
    elif is_module:
        runpy.run_module(program.text, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program.text, run_name="__main__")


def _from_script(trace: Any) -> Any:
    """The traceback without our own frames."""
    own = run_script.__code__.co_filename
    while trace is not None and trace.tb_frame.f_code.co_filename == own:
        trace = trace.tb_next
    return trace
