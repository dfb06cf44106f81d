"""The inputs of the fuzz tests, and how long a reader may take.

`DASK_GPU_MPI_FUZZ=100000` sets how many inputs each reader gets; 150 without it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dask_gpu_mpi.errors import DaskGpuMpiError

fuzz = settings(
    max_examples=int(os.environ.get("DASK_GPU_MPI_FUZZ", "150")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

#: What readers stumble over: other scripts' digits, what only looks like a number, control characters, paths.
ODD = (
    "", "²", "٣", "1_000", "1e400", "1e400GB", "nan", "inf", "-0", "+1", "0x10", "~nouser/x", "a\0b", "\ud800", "\u202e", "../..",
    "/", "GPU-", "MIG-", "0,0", "-1", "h[1-3]", "tcp://", "tcp://h:1", "[::1]:1", "true", "null", "None", "auto", ",", ":", "=",
    "A=1", "A=1=2", "01:02:03", "1:2:3:4", " 1 ",
)  # fmt: skip
#: What is repeated, how often, and what comes behind it.
LONG = (
    ("1", 5000, ""),
    ("1", 30_000, "x"),
    ("9", 400, "GB"),
    ("a", 30_000, ""),
    ("[", 100_000, ""),
    ("\n", 100_000, "x"),
    ("a1", 50_000, "!"),
    ('{"a":', 5000, ""),
)
texts = st.one_of(
    st.sampled_from(ODD),
    st.sampled_from(LONG).map(lambda long: long[0] * long[1] + long[2]),
    st.text(max_size=40),
    st.text(alphabet="0123456789.,:-+eEkKMGiBTP[]{}\"'=/ \n~$GPU", max_size=40),
    st.lists(st.sampled_from(ODD), min_size=2, max_size=3).map("".join),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


def near(*samples: str) -> st.SearchStrategy[str]:
    """Real texts, in which something is replaced by another."""

    @st.composite
    def change(draw: st.DrawFn) -> str:
        sample = draw(st.sampled_from(samples))
        start = draw(st.integers(0, len(sample)))
        end = draw(st.integers(start, min(start + 8, len(sample))))
        return sample[:start] + draw(texts) + sample[end:]

    return st.one_of(texts, change())


def variables(*samples: str) -> st.SearchStrategy[str]:
    """What an environment or a command line can hold: no NUL, and any bytes, as Python decodes them (PEP 383)."""
    return near(*samples).map(
        lambda text: (
            text.replace("\0", "").encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
        )
    )


def soon(
    read: Callable[..., Any], *given: Any, errors: tuple[type[Exception], ...] = (DaskGpuMpiError,)
) -> Any:
    """The answer, or None with one of `errors`; minutes would be a reader that is quadratic in the length."""
    began = time.process_time()
    try:
        return read(*given)
    except errors:
        return None
    finally:
        assert time.process_time() - began < 5
