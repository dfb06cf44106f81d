"""The end of a rank: each arrow of the table, and what is none."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from dask_gpu_mpi.job.ending import TRANSITIONS, Cause, Ending, State

#: From, by, to.
ARROWS = [
    # a signal, or a rank 0 that does not answer
    (State.RUNNING, Cause.CLOSE, State.LEFT),
    (State.LEFT, Cause.STOP, State.STOPPED_AND_CLOSED),
    (State.LEFT, Cause.END, State.CLOSED),
    # the script ends, and the cluster with it
    (State.RUNNING, Cause.END, State.ENDING),
    (State.ENDING, Cause.CLOSE, State.CLOSED),
    # the cluster ends before the script
    (State.RUNNING, Cause.STOP, State.STOPPED),
    (State.STOPPED, Cause.CLOSE, State.STOPPED_AND_CLOSED),
    (State.STOPPED_AND_CLOSED, Cause.END, State.CLOSED_AFTER_STOP),
    # both at once
    (State.STOPPED, Cause.END, State.ENDING_AFTER_STOP),
    (State.ENDING_AFTER_STOP, Cause.CLOSE, State.CLOSED_AFTER_STOP),
]
NONE = sorted(
    set(itertools.product(State, Cause)) - {(before, event) for before, event, _ in ARROWS},
    key=lambda each: (each[0].name, each[1].name),
)


def name(value: State | Cause) -> str:
    return value.name


def at(state: State) -> Ending:
    ending = Ending()
    ending.state = state
    return ending


@pytest.mark.parametrize(("before", "event", "after"), ARROWS, ids=name)
def test_arrow(before: State, event: Cause, after: State) -> None:
    ending = at(before)
    ending.on(event)
    assert ending.state is after


@pytest.mark.parametrize(("state", "event"), NONE, ids=name)
def test_no_arrow(state: State, event: Cause) -> None:
    ending = at(state)
    with pytest.raises(RuntimeError, match=f"^{event.name} in state {state.name}: expected "):
        ending.on(event)
    assert ending.state is state


def test_what_was_expected_is_named() -> None:
    with pytest.raises(RuntimeError, match="^CLOSE in state CLOSED: expected nothing$"):
        at(State.CLOSED).on(Cause.CLOSE)
    with pytest.raises(RuntimeError, match="^STOP in state STOPPED: expected END, CLOSE$"):
        at(State.STOPPED).on(Cause.STOP)


def test_the_table_has_these_arrows_only() -> None:
    assert set(TRANSITIONS) == set(State)
    assert sum(len(arrows) for arrows in TRANSITIONS.values()) == len(ARROWS)


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


def test_the_page_shows_this_table() -> None:
    page = Path(__file__, "..", "..", "..", "..", "docs", "design.md").resolve().read_text()
    for state, arrows in TRANSITIONS.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {state.name} |")]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2] == ("closed" if state.closed else "open")
        assert cells[3:] == [arrows[event].name if event in arrows else "-" for event in Cause]
