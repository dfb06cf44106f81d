"""`sys.excepthook` while this process is part of a cluster."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from dask_gpu_mpi.base.printable import text_of
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.errors import DaskGpuMpiError

from . import outcome

__all__ = ["ExceptHook", "install", "retire"]

#: What to do about errors of other packages that come of how the job is made, by a pattern of their text.
ADVICE = {
    r"undefined symbol: uc[mpst]_": (
        "this import needs the UCX of its own packages, but MPI has loaded another one: mpi4py.MPI was imported before the "
        "cluster started. Fix: call initialize() before mpi4py is imported, or `import ucxx` first of all"
    ),
    r"without a global spill manager": (
        "the workers have enable_cudf_spill, and the script has not, so it can't unpack what they send. Fix: "
        "cudf.set_option('spill', True) in the script"
    ),
}


class ExceptHook:
    """An uncaught error of ours ends the script with its line and its exit code; others go to the hook that was there before.

    Parameters
    ----------
    label : callable
        What to print before a traceback; None: nothing.
    """

    def __init__(self, label: Callable[[], str | None]) -> None:
        self._label = label
        self._before = sys.excepthook
        self._retired = False
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        """Report the error; SystemExit after one of ours."""
        # Set by Python alone, before it calls this: a script may call the hook for an error that it has caught.
        if getattr(sys, "last_value", None) is error:
            outcome.note(outcome.of_error(error))
        if self._retired or not isinstance(error, DaskGpuMpiError) or error.of_script:
            if not self._retired and (label := self._label()) is not None:
                say(label)
            if not self._retired:
                for advice in (
                    text for pattern, text in ADVICE.items() if re.search(pattern, text_of(error))
                ):
                    say(f"error: {advice}")
            self._before(kind, error, traceback)
            return
        if not error.reported:
            say(f"error: {error}")
        # CPython takes a SystemExit out of the hook for the exit code (Python/pythonrun.c, _PyErr_PrintEx).
        raise SystemExit(error.exit_code)

    def retire(self) -> None:
        """Do nothing any more; a hook of the script's that was put around this one stays."""
        self._retired = True
        if sys.excepthook is self:
            sys.excepthook = self._before


_installed: ExceptHook | None = None


def install(label: Callable[[], str | None]) -> None:
    """Install the hook, unless it is installed."""
    global _installed
    if _installed is not None and sys.excepthook is _installed:
        return
    retire()
    _installed = ExceptHook(label)


def retire() -> None:
    """Give the hook back that was there before `install`."""
    global _installed
    if _installed is not None:
        _installed.retire()
        _installed = None
