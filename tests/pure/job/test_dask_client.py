"""What a session does with Dask in the script's process: its clients, its loggers, its configuration; and takes back."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import dask
import distributed
import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.job import dask_client
from dask_gpu_mpi.job.dask_client import DaskSettings
from support.mocks.inputs import plan_of, worker_plan

#: Its defaults belong to the configuration.
assert distributed.config
HERE = "tls://here:1"


class Client:
    def __init__(
        self, status: str = "running", address: str = HERE, asynchronous: bool = False, fails: bool = False
    ):
        self.status, self.asynchronous, self.fails = status, asynchronous, fails
        self.scheduler = SimpleNamespace(address=address)

    def close(self, timeout: float) -> None:
        if self.fails:
            raise OSError("no")
        self.status = "closed"


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    found: list[Client] = []
    monkeypatch.setattr(dask_client, "_clients", found)
    return found


def states(clients: list[Client]) -> list[str]:
    return [client.status for client in clients]


def test_those_of_this_cluster_are_closed_or_abandoned(clients: list[Client]) -> None:
    clients += [Client(fails=True), Client(), Client(address="tcp://other:2"), Client(asynchronous=True)]
    clients += [Client("connecting")]
    dask_client.close_clients(HERE)
    assert states(clients) == ["running", "closed", "running", "running", "connecting"]
    clients[1:] = [Client("closing", "tcp://other:2"), Client(address="tcp://other:2")]
    dask_client.abandon_clients(HERE)
    assert states(clients) == ["closed", "closed", "running"]


def test_a_lost_client(clients: list[Client]) -> None:
    clients.append(Client())
    assert not dask_client.has_lost_client()
    clients.append(Client("connecting"))
    assert dask_client.has_lost_client()


@pytest.mark.parametrize(
    ("address", "kwargs", "configured", "is_told"),
    [
        (None, {}, None, True),
        (None, {"n_workers": 2}, None, False),  # the user wants another cluster
        ("tcp://other:2", {}, None, False),
        (None, {}, "tcp://other:2", False),
    ],
)
def test_a_client_after_the_end_of_the_cluster_would_start_one_of_dask(
    clients: list[Client],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    kwargs: dict[str, int],
    configured: str | None,
    is_told: bool,
) -> None:
    monkeypatch.setattr(dask_client, "_clients", set())
    monkeypatch.setattr(dask_client, "_warned", set())
    with dask.config.set({"scheduler-address": configured}):
        for _ in range(2):
            assert dask_client._on_client(Client(), address, kwargs) == kwargs
    text = "dask_gpu_mpi: warning: Client(): this program's session has ended, so Dask starts a cluster on this node. Fix: "
    assert capsys.readouterr().err.count(text) == is_told


@pytest.mark.parametrize(
    ("scheduler", "status", "is_told"),
    [
        ("threads", "running", True),
        ("processes", "running", True),
        ("sync", "running", False),
        ("threads", "closed", False),
    ],
)
def test_a_computation_beside_a_client_without_the_workers(
    clients: list[Client],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    scheduler: str,
    status: str,
    is_told: bool,
) -> None:
    monkeypatch.setattr(dask_client, "_warned", set())
    clients += [Client(status), Mock(spec=[])]  # one whose __init__ has failed
    use = dask_client.DaskUse(HERE, lambda: None)
    try:
        for _ in range(2):
            assert dask.delayed(int)("3").compute(scheduler=scheduler, num_workers=1) == 3
    finally:
        use.stop()
    assert use.has_computed_locally
    assert capsys.readouterr().err.count(f'dask_gpu_mpi: warning: scheduler="{scheduler}": ') == is_told


@pytest.mark.parametrize(
    ("address", "kwargs", "said"),
    [
        (None, {}, ""),
        (HERE, {}, ""),
        ("localhost:1", {}, ""),
        ("tcp://other:2", {}, "Client(ADDRESS): tcp://other:2 is not the job's cluster. Fix: "),
        (
            None,
            {"scheduler_file": "none.json"},
            "Client(scheduler_file='none.json'): Dask waits for this file, which does not",
        ),
        (None, {"scheduler_file": "/dev/null"}, ""),
    ],
)
def test_a_client_of_another_cluster(
    clients: list[Client],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    kwargs: dict[str, str],
    said: str,
) -> None:
    monkeypatch.setattr(dask_client, "_clients", set())
    monkeypatch.setattr(dask_client, "_warned", set())
    use = dask_client.DaskUse(HERE, lambda: None)
    monkeypatch.setattr(dask_client, "_use", use)
    try:
        dask_client.expect_client("tls://intended:3")  # by `connect`
        assert dask_client._on_client(Client(), "tls://intended:3", kwargs) == kwargs
        assert dask_client._on_client(Client(), address, kwargs) == kwargs
    finally:
        use.stop()
    said_now = capsys.readouterr().err
    assert said_now.count("warning: ") == bool(said)
    assert said in said_now


def test_a_client_after_the_end_of_the_cluster_by_another_one(
    clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_client, "_clients", set())
    use = dask_client.DaskUse(HERE, lambda: None)
    monkeypatch.setattr(dask_client, "_use", use)
    try:
        with dask.config.set({"scheduler-address": HERE}):
            dask_client._on_client(Client(), None, {})
            use.is_shut_down = True
            for address in (None, HERE):
                with pytest.raises(
                    InputError, match=r"shutdown\(\) of a client has ended this job's cluster. Fix: close\(\)"
                ):
                    dask_client._on_client(Client(), address, {})
            dask_client._on_client(Client(), "tls://other:2", {})
            dask_client._on_client(Client(), None, {"scheduler_file": "/dev/null"})
    finally:
        use.stop()


@pytest.mark.parametrize(
    ("status", "of", "is_told"),
    [
        ("running", "tcp://o:2", True),
        ("running", HERE, False),
        ("closed", "tcp://o:2", False),
        (None, HERE, False),
    ],
)
def test_a_client_before_the_cluster(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    status: str | None,
    of: str,
    is_told: bool,
) -> None:
    def current() -> Client:
        if status is None:
            raise ValueError("No clients found")
        return Client(status, of)

    monkeypatch.setattr(distributed.Client, "current", current)
    monkeypatch.setattr(dask_client, "_warned", set())
    monkeypatch.setattr(dask_client, "_use", None)
    monkeypatch.setattr(dask_client, "_replace_methods", lambda: None)
    dask_client.prefer_cluster(HERE, lambda: None).stop()
    said = "Client before initialize(): it is of another cluster. Fix: Client() after initialize()"
    assert (said in capsys.readouterr().err) is is_told


SETTINGS = {"scheduler-address": "tls://h:1", "distributed.probe.a": 1, "gpu-probe": 3}


pytestmark = pytest.mark.usefixtures("dask_config")


def test_a_refresh_keeps_them_until_then_and_what_the_script_has_set_since_stays() -> None:
    settings = DaskSettings(SETTINGS)
    dask.config.refresh()
    assert dask.config.get("scheduler-address") == "tls://h:1"
    dask.config.set({"scheduler-address": "tcp://mine:2"})
    settings.take_back()
    assert dask.config.get("scheduler-address") == "tcp://mine:2"
    dask.config.refresh()
    for key in SETTINGS:
        assert dask.config.get(key, None) is None


def test_a_section_that_the_script_removes_comes_back_with_them() -> None:
    """``with dask.config.set({"distributed.x": 1}): initialize()``: Dask removes the section that it had not at the beginning."""
    settings = DaskSettings({"distributed.comm.timeouts.connect": "77s"})
    del dask.config.config["distributed"]
    dask_client.complete_defaults()
    assert dask.config.get("distributed.comm.timeouts") == {"connect": "77s", "tcp": "30s"}
    settings.take_back()
    del dask.config.config["distributed"]
    dask_client.complete_defaults()
    assert dask.config.get("distributed.comm.timeouts.connect") == "30s"


def test_tables_are_shuffled_by_tasks_where_all_workers_have_gpus_unless_the_user_says_how() -> None:
    of_gpu, of_cpus = worker_plan("1", "GPU-x"), worker_plan("2")
    both = {"dataframe.shuffle.method": "tasks", "array.rechunk.method": "tasks"}
    assert dask_client.shuffle_settings(plan_of(of_gpu)) == both
    assert dask_client.shuffle_settings(plan_of(of_gpu, of_cpus)) == {}
    with dask.config.set({"dataframe.shuffle.method": "disk"}):
        assert dask_client.shuffle_settings(plan_of(of_gpu)) == {"array.rechunk.method": "tasks"}
