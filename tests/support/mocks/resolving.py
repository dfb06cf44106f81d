"""Options from keywords, and the one line that refuses them."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.options.resolve import resolve

__all__ = ["keywords", "refused"]


def keywords(**given: Any) -> Options:
    return resolve(given, source="keyword")


def refused(given: dict[str, Any], source: Any = "keyword") -> str:
    with pytest.raises(OptionError) as caught:
        resolve(given, source=source)
    message = str(caught.value)
    assert "\n" not in message
    return message
