"""The end of a rank: what its states mean, and that no event is lost."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.job.ending import TRANSITIONS, Cause, Ending, State


def at(state: State) -> Ending:
    ending = Ending()
    ending.state = state
    return ending


def test_an_arrow_is_followed() -> None:
    ending = Ending()
    ending.on(Cause.STOP)
    assert ending.state is State.STOPPED


def test_no_arrow_is_a_defect() -> None:
    with pytest.raises(RuntimeError, match="^CLOSE in state CLOSED: expected nothing$"):
        at(State.CLOSED).on(Cause.CLOSE)
    with pytest.raises(RuntimeError, match="^STOP in state STOPPED: expected END, CLOSE$"):
        at(State.STOPPED).on(Cause.STOP)


@pytest.mark.parametrize(
    ("state", "over", "stopped", "ended", "closed"),
    [
        (State.RUNNING, False, False, False, False),
        (State.LEFT, False, False, False, True),
        (State.STOPPED, True, True, False, False),
        (State.STOPPED_AND_CLOSED, True, True, False, True),
        (State.ENDING, True, False, True, False),
        (State.CLOSED, True, False, True, True),
        (State.ENDING_AFTER_STOP, True, True, True, False),
        (State.CLOSED_AFTER_STOP, True, True, True, True),
    ],
)
def test_what_a_state_means(state: State, over: bool, stopped: bool, ended: bool, closed: bool) -> None:
    assert (state.over, state.stopped, state.ended, state.closed) == (over, stopped, ended, closed)


@pytest.mark.parametrize("state", State)
def test_an_event_is_not_forgotten(state: State) -> None:
    """What has happened stays so: the cluster is not there again, and a rank that has closed does not open."""
    for after in TRANSITIONS[state].values():
        assert after is not state
        for what in ("over", "stopped", "ended", "closed"):
            assert getattr(after, what) >= getattr(state, what)


def test_exit_code() -> None:
    ending = Ending()
    assert (ending.exit_code(), ending.exit_code(15)) == (1, 143)  # it leaves of itself
    ending.on(Cause.STOP)
    assert (ending.exit_code(), ending.exit_code(15)) == (1, 143)
    ending.on(Cause.END)
    assert (ending.exit_code(), ending.exit_code(15)) == (0, 0)
    ending.signal = 2
    assert (ending.exit_code(), ending.exit_code(15)) == (130, 130)
    ending.lost = "no worker is left"
    assert (ending.exit_code(), ending.exit_code(15)) == (1, 1)
