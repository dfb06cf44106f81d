"""The end of a rank: what its states mean, and that no event is lost."""

from __future__ import annotations

import pytest

from dask_gpu_mpi.job.ending import TRANSITIONS, Cause, Ending, State


def at(state: State) -> Ending:
    ending = Ending()
    ending.state = state
    return ending


def test_no_arrow_is_a_defect() -> None:
    with pytest.raises(RuntimeError, match="^CLOSE in state CLOSED: expected nothing$"):
        at(State.CLOSED).on(Cause.CLOSE)
    with pytest.raises(RuntimeError, match="^STOP in state STOPPED: expected END, CLOSE$"):
        at(State.STOPPED).on(Cause.STOP)


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
    assert ending.state is State.STOPPED
    assert (ending.exit_code(), ending.exit_code(15)) == (1, 143)
    ending.on(Cause.END)
    assert (ending.exit_code(), ending.exit_code(15)) == (0, 0)
    ending.signal = 2
    assert (ending.exit_code(), ending.exit_code(15)) == (130, 130)
    ending.lost = "no worker is left"
    assert (ending.exit_code(), ending.exit_code(15)) == (1, 1)
