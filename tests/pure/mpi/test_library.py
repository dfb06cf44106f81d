"""How MPI is loaded, what is loaded before it, who ends it, and what is said when that can't be."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dask_gpu_mpi.errors import InputError, MpiMissingError
from dask_gpu_mpi.mpi import library
from dask_gpu_mpi.mpi.library import load_mpi, load_ucx_first


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_ucx_is_first", False)
    monkeypatch.setenv("UCX_WARN_UNUSED_ENV_VARS", "n")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says which of these modules are loaded from now on; without an argument: none."""

    def load(*names: str) -> None:
        for name in ("mpi4py.MPI", "ucxx"):
            if name in names:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
            else:
                monkeypatch.delitem(sys.modules, name, raising=False)

    load()
    return load


def test_ucx_comes_before_mpi(loaded: Callable[..., None]) -> None:
    loaded("mpi4py.MPI")
    with pytest.raises(InputError, match=r"has imported mpi4py\.MPI before initialize\(\)"):
        load_ucx_first({}, required=True)
    loaded("mpi4py.MPI", "ucxx")  # in the script's order
    load_ucx_first({}, required=True)


@pytest.mark.parametrize("package", [True, False])
def test_ucx_is_loaded_and_a_second_cluster_is_fine(
    package: bool, loaded: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its library, if that is a package."""
    calls: list[str] = []
    libucxx = types.ModuleType("libucxx")
    libucxx.load_library = lambda: calls.append("library")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "libucxx", libucxx if package else None)
    if not package:
        monkeypatch.setitem(sys.modules, "ucxx", None)
        load_ucx_first({}, required=True)  # neither is here: the agent tells
        loaded("ucxx")
    load_ucx_first({}, required=True)
    assert calls == ["library"] * package
    loaded("mpi4py.MPI")
    load_ucx_first({}, required=True)


@pytest.mark.parametrize(
    ("one_host", "mpi_is_loaded", "lacks", "loads"),
    [
        (False, False, False, True),
        (True, True, False, False),  # too late, which matters only if the script imports it
        # MPI between nodes would lose its network
        (False, False, True, False),
        (True, False, True, True),
    ],
)
def test_ucx_is_loaded_for_what_the_script_imports(
    one_host: bool,
    mpi_is_loaded: bool,
    lacks: bool,
    loads: bool,
    loaded: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if mpi_is_loaded:
        loaded("mpi4py.MPI")
    calls = []
    monkeypatch.setattr(library, "load_library", lambda settings: calls.append("library") or True)
    monkeypatch.setattr(library, "lacks_rdma", lambda environ: lacks)
    monkeypatch.setattr(library, "all_on_one_host", lambda environ: one_host)
    load_ucx_first({}, required=False)
    assert calls == ["library"] * loads


#: An mpi4py that tells what it was asked for, and finds rc.initialize as the real one does: while it is imported.
FAKE_MPI = """
import os
import mpi4py
calls = ["import", mpi4py.rc.initialize]
initialized, finalized = mpi4py.rc.initialize or "OTHER_CODE" in os.environ, False
class COMM_WORLD:
    Abort = lambda code: calls.append(("abort", code))
def Is_initialized():
    return initialized
def Is_finalized():
    return finalized
def Init_thread():
    global initialized
    initialized = True
    calls.append("init")
"""


class FakeMpi4py:
    """A package mpi4py on the path, and how often Finalize was left to the end of Python."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "mpi4py"
        self.folder.mkdir()
        (self.folder / "MPI.py").write_text(FAKE_MPI)
        for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(str(folder))
        self.rc()
        self.at_exit: list[bool] = []
        patch.setattr(library, "finalize_at_exit", lambda: self.at_exit.append(True))

    def rc(self, *, initialize: bool = True, finalize: bool | None = None) -> None:
        """What the script has chosen before."""
        text = f"import types\nrc = types.SimpleNamespace(initialize={initialize}, finalize={finalize})\n"
        (self.folder / "__init__.py").write_text(text)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMpi4py]:
    saved = dict(sys.modules)
    yield FakeMpi4py(tmp_path, monkeypatch)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py" and name not in saved]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("rc", "other", "calls"),
    [
        *(
            pytest.param(rc, "", ["import", False, "init"], id=f"this process, but not its children {rc}")
            for rc in ({}, {"initialize": False}, {"finalize": True}, {"finalize": False})
        ),
        pytest.param({}, "other code", ["import", False], id="other code that has initialized MPI"),
        pytest.param({}, "mpi4py.run", ["import", True], id="below python -m mpi4py it does both"),
    ],
)
def test_who_finalizes(
    fake: FakeMpi4py,
    monkeypatch: pytest.MonkeyPatch,
    rc: dict[str, bool],
    other: str,
    calls: list[object],
) -> None:
    fake.rc(**rc)
    if other == "other code":
        monkeypatch.setenv("OTHER_CODE", "")
    elif other:
        monkeypatch.setitem(sys.modules, other, types.ModuleType(other))
    assert load_mpi().calls == calls
    assert sys.modules["mpi4py"].rc.initialize is rc.get("initialize", True)  # as it was, for who looks
    assert fake.at_exit == [True] * ("init" in calls)


@pytest.mark.parametrize(("initialize", "last"), [(True, True), (False, "init")])
def test_mpi_that_the_script_has_imported(fake: FakeMpi4py, initialize: bool, last: bool | str) -> None:
    """It is taken as it is if it runs."""
    fake.rc(initialize=initialize)
    mpi = importlib.import_module("mpi4py.MPI")
    assert load_mpi() is mpi
    assert mpi.calls[-1] == last
    assert fake.at_exit == [True] * (not initialize)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    ("error", "host", "text"),
    [
        ("RuntimeError('cannot load libmpi\\nx')", "n3", "on n3 (cannot load libmpi). Fix: "),
        ("ImportError", "", "(ImportError)"),
    ],
)
def test_no_library(
    fake: FakeMpi4py, monkeypatch: pytest.MonkeyPatch, waits: bool, error: str, host: str, text: str
) -> None:
    """One rank reports what all ranks lack, below a launcher."""
    (fake.folder / "MPI.py").write_text(f"raise {error}")
    monkeypatch.setattr(library.launcher_check, "wait_for_rank_0_to_report", lambda environ: waits)
    for environ in ({}, None):
        with pytest.raises(MpiMissingError, match=re.escape(text)) as caught:
            load_mpi(environ, host)
        assert caught.value.reported is (waits and environ is not None)


def test_settings_and_the_check_of_the_library_come_before_it_is_loaded(
    fake: FakeMpi4py, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    @contextlib.contextmanager
    def settings(environ: object, *given: object, **options: object) -> Iterator[None]:
        assert "mpi4py.MPI" not in sys.modules
        seen.append(options)
        yield

    monkeypatch.setattr(library, "fewer_components", settings)
    monkeypatch.setattr(library, "closed_to_others", settings)
    monkeypatch.setattr(library.launcher_check, "check_library", lambda *given: seen.append(given))
    monkeypatch.setitem(sys.modules, "ucxx", types.ModuleType("ucxx"))
    load_mpi({"A": "1"}, "n3")
    check = ({"A": "1"}, str(fake.folder / "MPI.py"), "n3")
    assert seen == [{"one_host": True}, check, {"beside_ucx": True, "one_host": True}]


@pytest.mark.parametrize(
    ("initialized", "finalized", "aborts"),
    [(True, False, True), (False, False, False), (True, True, False)],
)
def test_abort_while_mpi_runs(
    fake: FakeMpi4py, monkeypatch: pytest.MonkeyPatch, initialized: bool, finalized: bool, aborts: bool
) -> None:
    mpi = importlib.import_module("mpi4py.MPI")
    mpi.initialized, mpi.finalized = initialized, finalized
    for name in ("look_after_launcher", "flush"):
        monkeypatch.setattr(library, name, lambda name=name: mpi.calls.append(name))
    monkeypatch.setattr(
        library, "wait_until_read", lambda files, limit: mpi.calls.append((files, 0 < limit < 3))
    )
    library.abort(3)
    steps = ["look_after_launcher", "flush", ((1, 2), True), ("abort", 3)]
    assert mpi.calls[2:] == (steps if aborts else [])


def test_mpi_that_the_script_has_imported_leaves_a_port(
    fake: FakeMpi4py, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "all_on_one_host", lambda environ: "ALONE" in environ)
    monkeypatch.setattr(library, "_started_here", False)
    mpi = importlib.import_module("mpi4py.MPI")
    mpi.Get_library_version = lambda: "MPICH Version: 5.0.2\nMPICH Device: ch4:ucx"
    (warning,) = library.warn_of_ports({"ALONE": ""})
    assert "Fix: call initialize() before mpi4py.MPI is imported, or UCX_TLS=^sysv,tcp in the" in warning
    assert library.warn_of_ports({}) == []
    monkeypatch.setattr(library, "_started_here", True)
    assert library.warn_of_ports({"ALONE": ""}) == []
