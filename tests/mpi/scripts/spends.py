"""Spends its time as told: the report has to find that."""

import os
import sys
import time

from distributed import Client, wait


class Slow:
    """Takes a second to arrive."""

    def __init__(self, pause=0.0):
        time.sleep(pause)

    def __reduce__(self):
        return Slow, (1.0,)


def nap(number, seconds):
    time.sleep(seconds)


def use(data, seconds):
    time.sleep(seconds)


def load(number, size):
    return os.urandom(size)


def naps(*seconds):
    wait(client.map(nap, range(len(seconds)), seconds, pure=False))


def known():
    """2 s alone, and three times 1 s for data and 1 s of work on one worker, while the other has nothing to do."""
    time.sleep(2.0)
    for _ in range(3):
        made = client.submit(Slow, pure=False, workers=[first])
        wait(client.submit(use, made, 1.0, pure=False, workers=[second]))


def good():
    naps(*[0.25] * 96)


def straggler():
    naps(*[0.1] * 20, 6.0)


def transfers():
    for _ in range(5):
        made = client.submit(Slow, pure=False, workers=[first])
        wait(client.submit(use, made, 0.3, pure=False, workers=[second]))


def spills():
    kept = client.map(load, range(48), [25_000_000] * 48, pure=False)
    wait(kept)
    naps(*[0.25] * 96)


client = Client()
first, second = sorted(client.scheduler_info(n_workers=-1)["workers"])
globals()[sys.argv[1]]()
