"""The processes that a script starts: which may bring up a cluster, and how they find the script's."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.config
import pytest
from distributed import Client

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job import child_processes as module
from dask_gpu_mpi.job.child_processes import (
    RANK_PID,
    ClusterFile,
    cluster_for_children,
    forget_cluster,
    mark_children,
    refuse_children,
)
from dask_gpu_mpi.network.credentials import make_credentials
from support import ROOT
from support.jobs.processes import run_python


def test_where_they_can_not_find_it_a_warning_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "SHARED_MEMORY", "/nowhere")
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    before = dict(os.environ)
    with cluster_for_children({"scheduler-address": "tls://h:1"}):
        assert os.environ == before
    said = capsys.readouterr().err
    assert "can't connect with a plain Client(): [Errno 2] No such file or directory" in said
    assert ". Fix: start the job with --scheduler-file FILE" in said


def test_a_low_limit_of_open_files_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LEAST_DESCRIPTOR", 1 << 30)  # the kernel refuses it as one above the limit
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: (30, 30))
    with cluster_for_children({"scheduler-address": "tls://h:1"}):
        pass
    assert "the limit of open files, 30, is too low (ulimit -n; expected more than" in capsys.readouterr().err


def test_a_task_starts_no_cluster() -> None:
    with Client(processes=False, n_workers=1, dashboard_address=":0") as client:
        refuse_children()  # not a task, although a worker is in this process
        error = client.submit(refuse_children).exception()
    assert isinstance(error, InputError)
    assert "called in a task, on worker 0" in str(error)


def test_a_child_of_a_rank_starts_no_cluster() -> None:
    mark_children()
    refuse_children()  # the rank itself
    code = "from dask_gpu_mpi.job.child_processes import refuse_children as refuse; refuse()"
    world = {
        f"OMPI_COMM_WORLD_{name}": value
        for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"))
    }
    for other in ("", "no number", "9" * 5000):
        assert run_python(code, env=os.environ | world | {RANK_PID: other}).stderr == ""
    refused = run_python(code, env=os.environ | world).stderr
    assert "called in a child process of a rank that has its cluster already" in refused
    assert run_python(code, env=dict(os.environ)).stderr == ""  # no launcher: a job by itself
    again = (
        "import multiprocessing\nfrom dask_gpu_mpi.job.child_processes import mark_children, refuse_children\nmark_children()\n"
        "child = multiprocessing.get_context('spawn').Process(target=refuse_children)\nchild.start()\nchild.join()"
    )
    assert "called in a child process of a rank" in run_python(again).stderr


SETTINGS = {"scheduler-address": "tls://h:1", **make_credentials()}
KEYS = (
    "scheduler-address",
    "distributed.comm.tls.client.key",
    "distributed.comm.require-encryption",
    "mine.a",
)
ASK = f"import dask, json; print(json.dumps([dask.config.get(key, None) for key in {KEYS!r}]))"
KEY = SETTINGS["distributed.comm.tls.client"]["key"]


@pytest.fixture(autouse=True)
def _as_before(dask_config: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No configuration of whoever runs the tests, and none of theirs is left."""
    for name in environ():
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield
    for name in environ():
        del os.environ[name]


def child(code: str = ASK, **environ: str) -> Any:
    """What a child of this process prints, as JSON."""
    done = run_python(code, env=os.environ | environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(("DASK_", "DGM_"))}


def test_children_read_the_settings_while_it_is_open() -> None:
    """Only this user may, and it has no name."""
    before = environ()
    file = ClusterFile(SETTINGS)
    assert child() == ["tls://h:1", KEY, True, None]
    assert "PRIVATE KEY" not in json.dumps(environ())
    found = os.stat(file.path)
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_nlink) == (0o600, os.geteuid(), 0)
    assert not os.get_inheritable(int(file.path.rpartition("/")[2]))
    for _ in range(2):
        file.close()
    assert environ() == before
    assert not os.path.exists(file.path)


def test_elsewhere_where_there_is_no_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = environ()
    monkeypatch.setattr(module, "SHARED_MEMORY", "/proc")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = ClusterFile(SETTINGS)
    assert os.stat(file.path).st_dev == tmp_path.stat().st_dev
    assert list(tmp_path.iterdir()) == []
    assert "scheduler-address: tls://h:1" in Path(file.path).read_text()
    file.close()
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    with pytest.raises(OSError, match="No such file"):
        ClusterFile(SETTINGS)
    assert environ() == before


def test_a_descriptor_that_the_script_has_closed(tmp_path: Path) -> None:
    file = ClusterFile(SETTINGS)
    number = int(file.path.rpartition("/")[2])
    with (tmp_path / "mine").open("w") as mine:
        os.dup2(mine.fileno(), number)  # of the script, by the same number
        file.close()
    os.write(number, b"whole")
    os.close(number)
    assert (tmp_path / "mine").read_text() == "whole"


USERS = "mine: {a: 1}\nscheduler-address: tcp://mine:1\n"


def test_the_users_configuration_holds_in_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But does not override the cluster's, in files or in variables."""
    folder = tmp_path / "it's my\nfolder"
    folder.mkdir()
    (folder / "a.yaml").write_text("mine: {a: 0, b: 2, c: 4}")
    (folder / "z.yml").write_text(USERS)
    (folder / "no").write_text("mine: {b: 7}")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DASK_CONFIG", ".")
    for name in ("DASK_SCHEDULER_ADDRESS", "DASK_DISTRIBUTED__COMM__TLS__CLIENT__KEY", "dask_nothing"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("DASK_MINE__C", "3")
    before = dict(os.environ)
    file = ClusterFile(SETTINGS)
    monkeypatch.chdir(tmp_path)
    keys = ("scheduler-address", "distributed.comm.tls.client.key", "mine")
    assert child(ASK.replace(repr(KEYS), repr(keys))) == ["tls://h:1", KEY, {"a": 1, "b": 2, "c": 3}]
    file.close()
    assert dict(os.environ) == before


def test_a_variable_with_more_than_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not replace the credentials, and its other values hold in children."""
    variable = repr({"tls": {"client": {"key": "mine"}}, "timeouts": {"connect": "7s"}})
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM", variable)
    inherited = dask.config.serialize({"mine": {"a": 5}, "scheduler-address": "tcp://mine:1"})
    monkeypatch.setenv("DASK_INTERNAL_INHERIT_CONFIG", inherited)
    before = dict(os.environ)
    file = ClusterFile(SETTINGS)
    keys = (*KEYS, "distributed.comm.timeouts.connect")
    assert child(ASK.replace(repr(KEYS), repr(keys))) == ["tls://h:1", KEY, True, 5, "7s"]
    file.close()
    assert dict(os.environ) == before


def test_a_pipe_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # DASK_CONFIG=<(...) of a shell: to open it would wait for ever
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setenv("DASK_CONFIG", str(pipe))
    ClusterFile(SETTINGS).close()
    assert os.environ["DASK_CONFIG"] == str(pipe)


def test_what_the_script_has_set_since_stays() -> None:
    file = ClusterFile(SETTINGS)
    os.environ["DASK_CONFIG"] = "/mine"
    found = child(FORGET.replace("FIRST", ""))  # in a nested job, too
    assert found == [None, None, None, None, ["DASK_CONFIG"]]
    file.close()
    assert environ() == {"DASK_CONFIG": "/mine"}


FORGET = (
    "import os\nFIRST\nfrom dask_gpu_mpi.job.child_processes import forget_cluster\nforget_cluster()\n"
    f"{ASK[:-2]} + [sorted(name for name in os.environ if name.startswith(('DASK_', 'DGM_')))]))"
)
OWN = {"DASK_CONFIG": "own.yaml", "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "false"}


@pytest.mark.parametrize(
    ("first", "own", "expected"),
    [
        ("", {}, [None, None, None, None]),
        ("", OWN, ["tcp://mine:1", None, False, 1]),
        ("import dask", {}, [None, None, None, None]),
        ("import dask; dask.config.set({'mine.a': 9})", OWN, ["tcp://mine:1", None, False, 9]),
    ],
)
def test_a_nested_job_finds_the_users_own(
    first: str, own: dict[str, str], expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(USERS)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    file = ClusterFile(SETTINGS)
    assert child(FORGET.replace("FIRST", first)) == [*expected, [*own]]
    file.close()


def test_a_job_without_dask_imports_none_for_it() -> None:
    file = ClusterFile(SETTINGS)
    code = "import sys\nfrom dask_gpu_mpi.job.child_processes import forget_cluster\nforget_cluster()\n"
    assert child(code + "print(int(bool({'dask', 'yaml'} & sys.modules.keys())))") == 0
    file.close()


def test_nothing_to_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchanged() -> None:
        before = environ()
        forget_cluster()
        assert environ() == before

    unchanged()
    file = ClusterFile(SETTINGS)
    unchanged()  # by a command that the script itself calls: its children are to find the cluster afterwards, too
    file.close()
    monkeypatch.setenv("DGM_DASK_BEFORE", "no JSON")
    unchanged()
