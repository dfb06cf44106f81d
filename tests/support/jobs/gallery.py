"""The gallery: which examples there are, what each needs, and its section of docs/gallery.md."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec

import pytest

from support import ROOT

PAGE = ROOT / "docs" / "gallery.md"


@dataclass(frozen=True)
class Example:
    """A script of examples/ that is one job: `options` of the command, and the packages that it needs."""

    options: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


#: By name; the script is ``examples/NAME.py``.
EXAMPLES = {
    "digits_pca": Example(packages=("sklearn",)),
    "numba_kernel": Example(packages=("numba",)),
    "cupy_arrays": Example(packages=("sklearn",)),
    "dataframes": Example(packages=("pandas", "pyarrow")),
    "hyperparameters": Example(packages=("sklearn", "xgboost")),
    "xgboost_train": Example(packages=("sklearn", "xgboost", "pyarrow")),
    "cpu_and_gpu": Example(("--cpu-workers", "1", "--default-workers", "gpu"), ("sklearn",)),
    "jax_regression": Example(
        ("--worker-options", '{"env": {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}}'), ("sklearn", "jax")
    ),
    "polars_query": Example(packages=("polars",)),
    "cuml_kmeans": Example(packages=("sklearn",)),
    "ddp_digits": Example(packages=("sklearn", "torch")),
    "migration/squares": Example(),
}


#: Of the environment, set by ``ci/gpu.sh --rapids``: what is missing fails.
REQUIRED = "RAPIDS_REQUIRED"


def skip_without(*packages: str) -> None:
    """Skip the test where a package is missing, unless all have to be there."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing and os.environ.get(REQUIRED):
        pytest.fail(f"not installed here: {', '.join(missing)} (expected all libraries of the gallery)")
    if missing:
        pytest.skip(
            f"not installed here: {', '.join(missing)} (ci/gallery.sh installs what the examples need)"
        )


def right(output: str) -> list[str]:
    """The lines with which an example says that its answer is right."""
    return re.findall(r"^(?:right: .*|same as [^:\n]*)", output, re.MULTILINE)


def sections() -> dict[str, str]:
    """The page's sections, by the script that each includes."""
    found = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        for name in re.findall(r"^```\{literalinclude\} \.\./examples/(\S+)$", section, re.MULTILINE):
            found[name] = section
    return found
