"""What the script's children find the cluster by: a file without a name, which Dask reads as configuration."""

from __future__ import annotations

import copy
import gc
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import pytest

from dask_gpu_mpi.job import child_processes as module
from dask_gpu_mpi.job.child_processes import ClusterFile, forget_cluster
from dask_gpu_mpi.network.credentials import make_credentials
from support import ROOT

SETTINGS = {"scheduler-address": "tls://h:1", **make_credentials().dask_config()}
KEYS = (
    "scheduler-address",
    "distributed.comm.tls.client.key",
    "distributed.comm.require-encryption",
    "mine.a",
)
ASK = f"import dask, json; print(json.dumps([dask.config.get(key, None) for key in {KEYS!r}]))"
KEY = SETTINGS["distributed.comm.tls.client"]["key"]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No configuration of whoever runs the tests, and none of theirs is left."""
    for name in [name for name in os.environ if name.startswith(("DASK_", "DGM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config, defaults, paths = (
        copy.deepcopy(dask.config.config),
        list(dask.config.defaults),
        list(dask.config.paths),
    )
    yield
    for name in [name for name in os.environ if name.startswith(("DASK_", "DGM_"))]:
        del os.environ[name]
    dask.config.config.clear()
    dask.config.config.update(config)
    dask.config.defaults[:], dask.config.paths[:] = defaults, paths


def child(code: str = ASK, **environ: str) -> Any:
    """What a child of this process prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("DASK_", "DGM_"))}


def test_children_read_the_settings_while_it_is_open() -> None:
    before = environ()
    file = ClusterFile(SETTINGS)
    assert child() == ["tls://h:1", KEY, True, None]
    assert "PRIVATE KEY" not in json.dumps(environ())
    file.close()
    file.close()
    assert environ() == before
    assert child() == [None, None, None, None]
    assert not os.path.exists(file.path)


def test_only_this_user_reads_it_and_it_has_no_name(tmp_path: Path) -> None:
    file = ClusterFile(SETTINGS)
    found = os.stat(file.path)
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_nlink) == (0o600, os.geteuid(), 0)
    assert not os.get_inheritable(int(file.path.rpartition("/")[2]))
    file.close()


@pytest.mark.parametrize("shared_memory", ["/nowhere", "/proc"])
def test_elsewhere_where_there_is_no_shared_memory(
    shared_memory: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "SHARED_MEMORY", shared_memory)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = ClusterFile(SETTINGS)
    assert os.stat(file.path).st_dev == tmp_path.stat().st_dev
    assert list(tmp_path.iterdir()) == []
    assert child()[0] == "tls://h:1"
    file.close()


def test_no_place_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environ()
    monkeypatch.setattr(module, "SHARED_MEMORY", "/nowhere")
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(OSError, match="No such file"):
        ClusterFile(SETTINGS)
    assert environ() == before


def test_a_process_whose_files_nobody_else_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before, descriptors = environ(), len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(
        os, "geteuid", lambda: 12345
    )  # /proc/PID belongs to root where a process is not dumpable
    with pytest.raises(OSError, match="not dumpable"):
        ClusterFile(SETTINGS)
    assert (environ(), len(os.listdir("/proc/self/fd"))) == (before, descriptors)


def test_descriptors_that_the_script_has_closed(tmp_path: Path) -> None:
    file = ClusterFile(SETTINGS)
    number = int(file.path.rpartition("/")[2])
    os.close(number)
    with (tmp_path / "mine").open("w") as mine:  # gets the same number
        assert mine.fileno() == number
        file.close()
        mine.write("whole")
    gc.collect()
    assert (tmp_path / "mine").read_text() == "whole"


USERS = "mine: {a: 1}\nscheduler-address: tcp://mine:1\n"


@pytest.mark.parametrize("place", ["directory", "file", "relative"])
def test_the_users_configuration_holds_in_children(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's my\nfolder"
    folder.mkdir()
    (folder / "a.yaml").write_text("mine: {a: 0, b: 2}")
    (folder / "z.yml").write_text(USERS)
    (folder / "no").write_text("mine: {a: 7}")
    whole = {"directory": str(folder), "file": str(folder / "z.yml"), "relative": "z.yml"}[place]
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DASK_CONFIG", whole)
    assert child() == ["tcp://mine:1", None, None, 1]
    file = ClusterFile(SETTINGS)
    monkeypatch.chdir(tmp_path)
    assert child() == ["tls://h:1", KEY, True, 1]
    if place == "directory":
        assert child("import dask; print(dask.config.get('mine.b'))") == 2
    file.close()
    assert os.environ["DASK_CONFIG"] == whole


def test_a_pipe_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # DASK_CONFIG=<(...) of a shell: to open it would wait for ever
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("DASK_CONFIG", str(pipe))
    file = ClusterFile(SETTINGS)
    assert child()[0] == "tls://h:1"
    file.close()


@pytest.mark.parametrize(
    "variable", ["DASK_SCHEDULER_ADDRESS", "DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY", "dask_nothing"]
)
def test_variables_do_not_override_it(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "mine")
    monkeypatch.setenv("DASK_MINE__A", "3")
    before = dict(os.environ)
    file = ClusterFile(SETTINGS)
    assert child() == ["tls://h:1", KEY, True, 3]
    file.close()
    assert dict(os.environ) == before


def test_what_the_script_has_set_since_stays() -> None:
    file = ClusterFile(SETTINGS)
    os.environ["DASK_CONFIG"] = "/mine"
    file.close()
    assert environ() == {"DASK_CONFIG": "/mine"}


FORGET = (
    "import os\nFIRST\nfrom dask_gpu_mpi.job.child_processes import forget_cluster\nforget_cluster()\n"
    f"{ASK[:-2]} + [sorted(name for name in os.environ if name.startswith(('DASK_', 'DGM_')))]))"
)


@pytest.mark.parametrize("first", ["", "import dask", "import dask; dask.config.set({'mine.a': 9})"])
@pytest.mark.parametrize("with_own", [False, True])
def test_a_nested_job_finds_the_users_own(
    first: str, with_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(USERS)
    names = []
    if with_own:
        monkeypatch.setenv("DASK_CONFIG", str(own))
        monkeypatch.setenv("DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION", "false")
        names = ["DASK_CONFIG", "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION"]
    file = ClusterFile(SETTINGS)
    found = child(FORGET.replace("FIRST", first))
    expected: list[object] = ["tcp://mine:1", None, False, 1] if with_own else [None, None, None, None]
    if "set" in first:
        expected[3] = 9
    assert found == [*expected, names]
    file.close()


def test_a_refresh_does_not_bring_it_back() -> None:
    file = ClusterFile(SETTINGS)
    code = (
        FORGET.replace("FIRST", "import dask")
        + "\ndask.config.refresh()\nprint(dask.config.get('scheduler-address', None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "None"
    file.close()


def test_a_job_without_dask_imports_none_for_it() -> None:
    file = ClusterFile(SETTINGS)
    code = "import sys\nfrom dask_gpu_mpi.job.child_processes import forget_cluster\nforget_cluster()\n"
    assert child(code + "print(int(bool({'dask', 'yaml'} & sys.modules.keys())))") == 0
    file.close()


def test_nothing_to_forget() -> None:
    before = dict(os.environ)
    forget_cluster()
    os.environ["DGM_DASK_BEFORE"] = "no JSON"
    forget_cluster()
    del os.environ["DGM_DASK_BEFORE"]
    assert dict(os.environ) == before


def test_the_script_itself_forgets_nothing() -> None:
    # by a command of ours that it calls: its children are to find the cluster afterwards, too
    file = ClusterFile(SETTINGS)
    before = environ()
    forget_cluster()
    assert environ() == before
    file.close()


def test_a_dask_config_of_its_own_stays_in_a_nested_job() -> None:
    file = ClusterFile(SETTINGS)
    found = child(FORGET.replace("FIRST", ""), DASK_CONFIG="/mine")
    assert found == [None, None, None, None, ["DASK_CONFIG"]]
    file.close()
