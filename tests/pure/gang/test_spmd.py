"""The client's side of `spmd`: which values are refused, and which error an answer stands for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError, SpmdError
from dask_gpu_mpi.gang import spmd as module
from dask_gpu_mpi.gang.spmd import spmd


class Client:
    """Runs nothing; keeps what was asked."""

    asynchronous = False

    def sync(self, function: Any) -> Any:
        return function.__self__.limits


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", 0),
        ("timeout", float("nan")),
        ("start_timeout", "5"),
        ("start_timeout", True),
        ("grace", -1),
        ("grace", None),
        ("workers", []),
        ("workers", "0-0"),
        ("workers", 5),
    ],
)
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^spmd: {name}: invalid value .* \(expected "):
        spmd(Client(), print, **{name: value})
    with pytest.raises(InputError, match="^spmd: workers: .* each worker once"):
        spmd(Client(), print, workers=[0, "1-0", "0"])
    with pytest.raises(InputError, match="^spmd: fn: invalid value 5"):
        spmd(Client(), 5)  # type: ignore[arg-type]


def test_a_call_in_the_middle_of_another_is_refused_at_once() -> None:
    """In a signal's handler: the first call would wait for it, and it for the workers of the first."""

    class Interrupted(Client):
        def sync(self, function: Any) -> Any:
            with pytest.raises(
                InputError, match="another call of this thread .*write a checkpoint in the function"
            ):
                spmd(Client(), print)
            return super().sync(function)

    for _ in range(2):  # afterwards the next one may begin
        assert spmd(Interrupted(), print) == spmd(Client(), print)


async def test_a_call_that_is_given_up_is_cancelled_once() -> None:
    call = module._Run(Client(), print, (), {})
    call._running = asyncio.create_task(asyncio.sleep(60))
    for _ in range(2):
        call._cancel()
    assert call._running.cancelling() == 1


@pytest.mark.parametrize(
    ("limits", "start"), [({}, 300.0), ({"timeout": 7}, 7), ({"timeout": 7, "start_timeout": 2}, 2)]
)
def test_until_when_it_starts(limits: dict[str, Any], start: float) -> None:
    found = spmd(Client(), print, workers=[0, "1-0"], **limits)
    assert found == {
        "workers": ["0", "1-0"],
        "timeout": limits.get("timeout"),
        "start_timeout": start,
        "grace": 5.0,
    }


def test_a_members_error_that_can_not_be_read_here() -> None:
    """Its class is in a module that the worker alone has."""
    answer = {"why": "rank 3 (worker 1-1 on h2) raised ValueError('bad')", "rank": 3}
    found = module._error({**answer, "error": b"conly_on_the_worker\nError\n."})
    assert (type(found), found.rank) == (SpmdError, 3)
    assert "raised ValueError('bad')" in str(found.__cause__)


async def test_what_is_fetched_is_not_cancelled_with_the_call() -> None:
    """Dask fetches results of one client in one request: to cancel it would fail the script's own `gather`, now and later."""
    request = asyncio.get_running_loop().create_future()
    fetching = asyncio.ensure_future(module._result(request))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    fetching.cancel()
    await asyncio.wait([fetching])
    assert fetching.cancelled()
    request.set_result("for the others in it")
    assert await request == "for the others in it"
