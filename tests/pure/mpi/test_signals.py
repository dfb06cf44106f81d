"""SIGTERM and SIGINT while a rank joins and serves."""

from __future__ import annotations

import os
import signal

from dask_gpu_mpi.base.signals import Action, Signals, action_before, is_ours


def test_all_is_as_it_was_afterwards() -> None:
    before = [
        Action.now(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    ]
    signals = Signals()
    signals.take()
    assert is_ours(signal.SIGTERM)
    assert action_before(signal.SIGTERM).handler == before[1].handler
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.got is not None
    assert signals.got[0] == signal.SIGTERM
    signals.give_back()
    after = [Action.now(action.number) for action in before]
    assert [(action.handler, action.in_c) for action in after] == [(a.handler, a.in_c) for a in before]
