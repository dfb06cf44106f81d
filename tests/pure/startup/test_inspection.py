"""What a rank waits for before it takes its inventory."""

from __future__ import annotations

from typing import Any

import pytest

from dask_gpu_mpi.errors import DaskGpuMpiError, InputError, OptionError, StartupError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.startup import inspection
from dask_gpu_mpi.startup.inspection import await_agent, inspect
from dask_gpu_mpi.startup.start_context import StartContext
from support.mocks.starts import start_context as context


class Agent:
    """One batch of answers for each look."""

    looks = True
    lost = False

    def __init__(self, *batches: list[tuple[Any, ...]], gpus: Any = ()) -> None:
        self.batches = list(batches)
        self.found = gpus

    def events(self, timeout: float) -> list[tuple[Any, ...]]:
        return self.batches.pop(0) if self.batches else []

    def gpus(self, timeout: float) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def exit_text(self) -> str:
        return "exit code 9"


class Channels:
    rank, size = 1, 2

    def begin_step(self, step: str) -> None:
        self.step = step


CHANNELS: Any = Channels()


def wait(agent: Any, around: StartContext) -> None:
    await_agent(agent, around)


def test_the_agent_is_waited_for() -> None:
    agent = Agent([], [("early", 1)], [("prepared", "/scratch")], [("later",)])
    wait(agent, context())
    assert agent.batches == [[("later",)]]


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (("failed", "no such class", 2), InputError),
        (("failed", "no such class", 2, "OptionError"), OptionError),
        (("failed", "no such class", 1), StartupError),
    ],
)
def test_what_the_agent_finds_wrong_is_raised(frame: tuple[Any, ...], kind: type[DaskGpuMpiError]) -> None:
    with pytest.raises(kind, match="no such class") as caught:
        wait(Agent([frame]), context())
    assert type(caught.value) is kind
    assert not caught.value.reported


def test_an_agent_that_ends_and_one_that_hangs() -> None:
    agent = Agent()
    agent.lost = True
    with pytest.raises(StartupError, match=r"ended before it was ready \(exit code 9\)"):
        wait(agent, context())
    with pytest.raises(StartupError, match="did not finish its imports"):
        wait(Agent(), context(seconds=0.05))


def test_a_signal_ends_the_wait() -> None:
    with pytest.raises(StartupError, match="SIGINT came while the cluster started") as caught:
        wait(Agent(), context(signal=2))
    assert caught.value.exit_code == 130


def take(agent: Any, around: StartContext, **options: Any) -> Any:
    agent.batches = [[("prepared", "/scratch")]]
    return inspect(Options(**options), agent, around, CHANNELS)


def test_the_inventory_has_the_gpus_that_the_agents_child_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(inspection, "take_inventory", lambda *_, **words: given.update(words))
    take(Agent(gpus=("GPU",)), context())
    assert given["seen"] == ("GPU",)
    assert given["look_for_gpus"]
    agent = Agent(gpus=None)
    agent.looks = False
    take(agent, context(), worker_class="distributed.Nanny")
    assert given["seen"] is None
    assert not given["look_for_gpus"]


def test_what_nvml_says_is_told_with_the_rank() -> None:
    with pytest.raises(InputError, match="^rank 1 of 2 on h: no such GPU$"):
        take(Agent(gpus=InputError("no such GPU")), context())


def test_nvml_that_hangs_is_reported_before_the_deadline() -> None:
    with pytest.raises(StartupError, match="^rank 1 of 2 on h: NVML"):
        take(Agent(gpus=None), context(seconds=1.0), startup_timeout=20.0)
    with pytest.raises(StartupError, match="SIGTERM"):
        take(Agent(gpus=None), context(signal=15))


def test_scratch_that_everyone_may_replace_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(inspection, "exposed_folder", lambda path: asked.append(path) or "/shared")
    warnings = [*map(str, take(Agent(), context(), worker_class="distributed.Nanny").warnings)]
    assert asked == ["/"]
    assert warnings[0].startswith(
        "host h: every user of the node may replace the workers' files in '/shared'"
    )
    assert warnings[0].endswith(
        "Fix: chmod +t /shared, or another directory by local_directory (--local-directory)"
    )
