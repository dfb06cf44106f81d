"""Scheduler files: private, whole, removed by their owner only."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.network.scheduler_file import (
    Target,
    read_scheduler_file,
    read_target,
    remove_scheduler_file,
    wait_for_scheduler_file,
    write_scheduler_file,
)
from dask_gpu_mpi.options.resolve import resolve

CONFIG = {"distributed.comm.require-encryption": True}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.json"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "with space 'and quote.json"
    path.write_text('{"address": "tcp://older:1"}')
    path.chmod(0o644)
    link = "https://h:1/status?token=abc"
    write_scheduler_file(str(path), "tls://10.0.0.1:1", 8787, "Scheduler-x", CONFIG, link)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    target = read_scheduler_file(path)
    assert target == Target("tls://10.0.0.1:1", CONFIG, link)
    assert "token" not in repr(target)
    written = json.loads(path.read_text())
    assert (written["type"], written["id"]) == ("Scheduler", "Scheduler-x")
    assert written["services"] == {"dashboard": 8787}
    write_scheduler_file(str(path), "tls://10.0.0.1:1", None, "Scheduler-x", CONFIG)
    assert json.loads(path.read_text())["services"] == {}
    assert read_scheduler_file(path).dashboard == ""
    path.write_text('{"address": "tcp://h:1", "services": {"dashboard": 8787}}')  # of Dask's own
    assert read_scheduler_file(path) == Target("tcp://h:1", {}, None)
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("text", "is_replaced"), [("import dask", False), ('{"lr": 0.1}', False), ("[1]", False), ("", True)]
)
def test_a_file_of_another_kind_is_not_replaced(path: Path, text: str, is_replaced: bool) -> None:
    path.write_text(text)
    if is_replaced:
        write_scheduler_file(str(path), "tls://h:1", None, "a", CONFIG)
    else:
        with pytest.raises(
            InputError, match=r"s.json' exists, and is not a scheduler file \(expected a name for a new file"
        ):
            write_scheduler_file(str(path), "tls://h:1", None, "a", CONFIG)
    assert (path.read_text() == text) is not is_replaced


@pytest.mark.parametrize(("timeout", "seconds"), [(30, 30), ("1m", 60), (None, 30)])
def test_a_file_that_is_not_there_yet(
    path: Path,
    timeout: Any,
    seconds: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its job may still be in the queue."""
    monkeypatch.setattr(time, "sleep", lambda _: write_scheduler_file(str(path), "tls://h:1", None, "x", {}))
    wait_for_scheduler_file(path, timeout)
    assert path.exists()
    assert f"waiting up to {seconds} s for the scheduler file" in capsys.readouterr().err
    wait_for_scheduler_file(path, timeout)
    wait_for_scheduler_file("", timeout)  # of a variable that is not set
    assert capsys.readouterr().err == ""


def test_only_its_owner_removes_it(path: Path) -> None:
    write_scheduler_file(str(path), "tls://h:1", None, "second", {})
    remove_scheduler_file(str(path), "first")
    assert path.exists()
    remove_scheduler_file(str(path), "second")
    assert not path.exists()
    remove_scheduler_file(str(path), "second")
    os.mkfifo(path)
    remove_scheduler_file(str(path), "second")  # which is not waited for


def test_a_path_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wait_for_scheduler_file(tmp_path / "none.json", 0.01)
    with pytest.raises(InputError, match="no scheduler file"):
        read_scheduler_file(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"can't be written .*--scheduler-file"):
        write_scheduler_file(str(tmp_path / "file" / "s.json"), "tls://h:1", None, "a", {})


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "1" * 5000, "[" * 100_000, '{"address": 3}', '{"address": "tcp://h"}',
        '{"address": "tcp://h:1", "dask-gpu-mpi": 3}', '{"address": "tcp://h:1", "dask-gpu-mpi": {"config": []}}', "\0",
        '{"address": "tcp://h:1", "dask-gpu-mpi": {"dashboard": 3}}',
        '{"address": "tcp://h:1", "dask-gpu-mpi": {"dashboard": "http://h/{PATH}"}}',
        '{"address": "tcp://h:1", "dask-gpu-mpi": {"dashboard": "javascript:alert(1)"}}',
    ],
)  # fmt: skip
def test_a_file_that_is_none(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(InputError, match="is not a scheduler file"):
        read_scheduler_file(path)


def test_a_loopback_cluster_is_not_for_other_hosts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_scheduler_file(str(path), "tls://127.0.0.1:1", None, "a", CONFIG)
    assert read_scheduler_file(path).address == "tls://127.0.0.1:1"
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    with pytest.raises(InputError, match=r"can't be reached from elsewhere\. Fix: .*--interface"):
        read_scheduler_file(path)


def test_a_file_without_credentials(path: Path) -> None:
    path.write_text('{"address": "tls://h:1"}')  # of Dask's own
    path.chmod(0o600)
    with pytest.raises(
        InputError,
        match=r"s.json' has no credentials for tls://h:1 \(expected the file of a cluster of this ",
    ):
        joins("", path)
    with dask.config.set({"distributed.comm.tls.ca-file": "ca.pem"}):
        assert joins("", path) == Target("tls://h:1", {}, None)


def test_file_that_others_may_write_is_not_taken(path: Path) -> None:
    write_scheduler_file(str(path), "tls://h:1", None, "a", CONFIG)
    path.chmod(0o666)
    with pytest.raises(InputError, match=r"s.json' is not used: others may write .* Fix: chmod go-w"):
        read_scheduler_file(path)


def test_only_what_is_of_the_connection_is_taken(path: Path) -> None:
    taken = {"distributed.comm.tls.ca-file": "PEM"}
    refused = {
        "distributed-ucxx.environment.tls": "tcp",
        "distributed.worker.preload": ["evil"],
        "distributed.scheduler.preload": [],
        "temporary-directory": "/",
    }
    write_scheduler_file(str(path), "tls://h:1", None, "a", taken | refused)
    assert read_scheduler_file(path).config == taken


def joins(address: str, file: Path | None = None, **options: Any) -> Target:
    cluster = {"scheduler_address": address} if file is None else {"scheduler_file": str(file)}
    return read_target(resolve({"scheduler": False, **cluster, **options}, source="keyword"))


@pytest.mark.parametrize(
    ("options", "said"), [({"security": True}, "security=True"), ({"protocol": "tls"}, "protocol='tls'")]
)
def test_encryption_that_is_asked_for_is_not_dropped(path: Path, options: dict[str, Any], said: str) -> None:
    write_scheduler_file(str(path), "tcp://h:1", None, "a", {})
    with pytest.raises(
        InputError, match=rf"is not encrypted \(tcp://h:1\), but {said} .* requests encryption"
    ):
        joins("", path, **options)
    # an address without a protocol is one of TLS then, for which there are no certificates here
    with pytest.raises(InputError, match="tls://h:1 requires certificates"):
        joins("h:1", **options)
    write_scheduler_file(str(path), "tls://h:1", None, "a", CONFIG)
    assert joins("", path, **options).config == CONFIG
    write_scheduler_file(str(path), "ucx://h:1", None, "a", {})
    with pytest.raises(InputError, match=r"unsupported protocol .*: ucx://h:1 \(expected one of tls, tcp\)"):
        joins("", path, **options)


def test_open_cluster_is_warned_of_unless_that_is_said(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_scheduler_file(str(path), "tcp://h:1", None, "a", {})
    for given in (("h:1",), ("", path)):
        target = joins(*given)
        (line,) = capsys.readouterr().err.splitlines()
        warning = f"warning: the cluster at {target.address} is not encrypted: everyone"
        assert line.startswith(f"dask_gpu_mpi: {warning}")
    for options in ({"security": False}, {"protocol": "tcp"}):
        assert joins("h:1", **options).address == "tcp://h:1"
        joins("", path, **options)
    joins("tcp://h:1")
    assert capsys.readouterr().err == ""


def test_strangers_link_leads_nothing_elsewhere(
    tmp_path: Path, links_are_strangers: Callable[[], None]
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to("home")
    path = tmp_path / "link" / "s.json"
    write_scheduler_file(str(path), "tls://h:1", None, "a", {})
    links_are_strangers()
    belongs = "the symbolic link .*link' belongs to another user"
    with pytest.raises(InputError, match=rf"can't be written \({belongs}"):
        write_scheduler_file(str(path), "tls://h:1", None, "b", {})
    with pytest.raises(InputError, match=f"is not used: {belongs}"):
        read_scheduler_file(path)
    remove_scheduler_file(str(path), "a")
    assert path.exists()
