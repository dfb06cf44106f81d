"""``tests/pure`` mirrors the rooms: each module has a test file of its own, or stands here with where its tests are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dask_gpu_mpi

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, TESTS = ROOT / "dask_gpu_mpi", ROOT / "tests" / "pure"
FOLDERS = ("dask_gpu_mpi", "tests", "benchmarks", "docs", "examples", "ci")

#: What other folders of tests start, or what has nothing to test; the tests of each module that has its own are in
#: ``tests/pure/<room>/test_<module>.py``.
ELSEWHERE = {
    "__main__": "a few lines; tests/pure/script/test_run.py and tests/mpi/test_bad_input.py run it",
    "agent/boot": "the first moments of a process: tests/pure/agent/test_forkserver.py, tests/mpi/test_imports.py",
    "agent/main": "a process with Dask in it: tests/pure/workers/test_factory.py, tests/mpi, tests/faults",
    "agent/orders": "plain data, no logic",
    "base/recording": "plain data, no logic",
    "cluster/messages": "plain data, no logic",
    "diagnostics/report_html": "texts of the page: tests/pure/diagnostics/test_report_page.py",
    "diagnostics/report_plots": "figures of the page: tests/pure/diagnostics/test_report_page.py",
    "diagnostics/report_tabs": "parts of the page: tests/pure/diagnostics/test_report_page.py",
    "diagnostics/report_work_tabs": "parts of the page: tests/pure/diagnostics/test_report_page.py",
    "gang/messages": "plain data, no logic",
    "mpi/launcher_table": "plain data; tests/pure/mpi/test_launchers.py",
    "startup/bringup": "starts MPI: tests/mpi, tests/faults/test_starts.py",
    "startup/messages": "plain data, no logic",
    "workers/settings": "plain data, no logic",
}


def names(folder: Path, prefix: str = "") -> set[str]:
    """Modules or test files below a folder, ``room/name``."""
    found = {path.relative_to(folder).with_suffix("") for path in folder.rglob(f"{prefix}*.py")}
    return {str(path.with_name(path.name.removeprefix(prefix))) for path in found if path.name != "__init__"}


def test_every_module_has_a_test_file_or_a_reason() -> None:
    assert names(PACKAGE) - names(TESTS, "test_") == ELSEWHERE.keys()


def test_every_test_file_in_a_room_has_its_module() -> None:
    in_rooms = {name for name in names(TESTS, "test_") if "/" in name}
    assert in_rooms - names(PACKAGE) == set()


@pytest.mark.parametrize("module", ELSEWHERE)
def test_the_reasons_name_files_that_exist(module: str) -> None:
    paths = [word.strip(",;:") for word in ELSEWHERE[module].split() if word.startswith("tests/")]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_names_of_modules_in_texts_are_those_of_modules() -> None:
    """In imports, but in strings and comments as well, which no tool looks at when a module moves."""
    modules = {name.replace("/", ".") for name in names(PACKAGE)}
    known = modules | {module.partition(".")[0] for module in modules} | set(dask_gpu_mpi.__all__)
    unknown = []
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"\bdask_gpu_mpi\.([a-z]\w*(?:\.[a-z]\w*)?)", text)
        for imported in re.findall(r"\bfrom dask_gpu_mpi import ([\w, ]+)", text):
            named += [name for name in re.findall(r"\w+", imported.partition(" as ")[0]) if name.islower()]
        for name in named:
            room = name.partition(".")[0]
            if name not in known and (room not in known or (PACKAGE / room).is_dir()):
                unknown.append(f"{path.relative_to(ROOT)}: dask_gpu_mpi.{name}")
    assert unknown == []
