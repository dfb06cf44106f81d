"""Names of modules in texts."""

from __future__ import annotations

import re

import dask_gpu_mpi
from support import ROOT

PACKAGE = ROOT / "dask_gpu_mpi"
FOLDERS = ("dask_gpu_mpi", "tests", "benchmarks", "docs", "examples", "ci")


def test_names_of_modules_in_texts_are_those_of_modules() -> None:
    """In imports, but in strings and comments as well, which no tool looks at when a module moves."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    modules = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    known = modules | {module.partition(".")[0] for module in modules} | set(dask_gpu_mpi.__all__)
    unknown = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"\bdask_gpu_mpi\.([a-z]\w*(?:\.[a-z]\w*)?)", text)
        for imported in re.findall(r"\bfrom dask_gpu_mpi import ([\w, ]+)", text):
            named += [name for name in re.findall(r"\w+", imported.partition(" as ")[0]) if name.islower()]
        for name in named:
            package = name.partition(".")[0]
            if name not in known and (package not in known or (PACKAGE / package).is_dir()):
                unknown.append(f"{path.relative_to(ROOT)}: dask_gpu_mpi.{name}")
    assert unknown == []
