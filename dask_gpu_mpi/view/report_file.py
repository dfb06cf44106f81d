"""The file of a job's report: whether it can be written, and writing it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from dask_gpu_mpi.base.files import check_replaceable, replace
from dask_gpu_mpi.errors import InputError

__all__ = ["check_report", "is_page", "write_report"]


def is_page(path: str) -> bool:
    """Whether the file is to be a page; else JSON.

    >>> is_page("a/b.HTML"), is_page("b.json")
    (True, False)
    """
    return PurePath(path).suffix.lower() in (".html", ".htm")


def check_report(path: str, where: str) -> None:
    """Raise InputError for a report that can't be made or written, before anything starts.

    Parameters
    ----------
    where : str
        Rank and host, for the message.
    """
    if not is_page(path) and PurePath(path).suffix.lower() != ".json":
        raise InputError(
            f"the report {path!r} has no known kind (expected FILE.html or FILE.json). Fix: set report (--report) to such a name"
        )
    if is_page(path) and importlib.util.find_spec("bokeh") is None:
        raise InputError(
            f"the report {path!r} needs bokeh, which is not installed on {where}. Fix: pip install 'bokeh>=3.1,<3.10', or set "
            "report (--report) to FILE.json"
        )
    try:
        check_replaceable(path)
    except OSError as error:
        raise InputError(
            f"the report {path!r} can't be written by {where} ({error.strerror}). Fix: set report (--report) to a file in a "
            "directory that exists and is writable"
        ) from None


def write_report(path: str, data: Mapping[str, Any]) -> None:
    """Write the file, whole or not at all, in place of the one that may be there; OSError where it can't be written."""
    if is_page(path):
        from dask_gpu_mpi.view.report_page import page

        text = page(data)
    else:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"), default=str)
    replace(path, text.encode("utf-8", "backslashreplace"))
