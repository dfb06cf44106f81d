"""Durations as people read them."""

from __future__ import annotations

__all__ = ["clock"]


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock(59.9), clock(3725), clock(90061)
    ('0:00:59', '1:02:05', '25:01:01')
    """
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"
