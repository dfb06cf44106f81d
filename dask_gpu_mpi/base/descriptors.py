"""How many files and connections a process may have open."""

from __future__ import annotations

import contextlib
import resource

__all__ = ["MOST", "raise_descriptor_limit"]

#: What Linux allows a process where nobody has changed it (``fs.nr_open``). Some containers have a hard limit of 10⁹, and a task
#: may start a program that closes every number below its soft limit, one by one.
MOST = 1 << 20


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open descriptors to the hard one, for this process and all that it starts.

    The soft limit is 1024 on most systems, for the sake of programs that call ``select()``, which knows no higher numbers. The
    kernel gives the lowest number that is free: such a program minds only if it has more than a thousand files open itself,
    and without this it would have failed by then.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
