"""What the thread beside a script does with a signal to another rank; the thread itself: tests/faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dask_gpu_mpi.base.signal_actions import install
from dask_gpu_mpi.cluster.monitor import Monitor


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    numbers: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: numbers.append(number))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def pass_on(number: int) -> None:
    member: Any = SimpleNamespace(signal_elsewhere=number)
    walltime: Any = None
    Monitor(member, walltime)._pass_on_signal(number)
    assert member.signal_elsewhere is None


def test_a_signal_whose_handler_is_ours(sent: list[int]) -> None:
    install(signal.SIGTERM, lambda *_: None)
    pass_on(signal.SIGTERM)
    assert sent == [signal.SIGTERM]


def test_sigint_where_python_handles_it(sent: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pass_on(signal.SIGINT)
    assert sent == [signal.SIGINT]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, lambda *_: None])
def test_a_signal_that_the_script_handles_or_ignores(handler: Any, sent: list[int]) -> None:
    signal.signal(signal.SIGTERM, handler)
    pass_on(signal.SIGTERM)
    assert sent == []
