"""No batch system: this machine, or the nodes that the user has listed (``--hosts``)."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.sites.batch import BatchSystem

_HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::([1-9]\d{0,5}))?")


class Hosts(BatchSystem):
    """The nodes of the command line."""

    title = "the nodes of --hosts"


class Local(BatchSystem):
    """The machine on which `launch` runs."""

    title = "this machine"
    is_one_node = True


def parse_hosts(text: str, read: Callable[[str], str]) -> Mapping[str, int]:
    """The ranks of each node of the command line: ``h1,h2:2`` (one on h1, two on h2), or a file with a node on each line."""
    if "/" in text or os.path.isfile(text):
        try:
            words = [line.split("#")[0].strip() for line in read(text).splitlines()]
        except (OSError, ValueError) as error:
            raise InputError(
                f"--hosts {text}: can't be read ({error})", fix="a text file, or the nodes: h1,h2"
            ) from None
    else:
        words = text.split(",")
    hosts: Counter[str] = Counter()
    for word in filter(None, words):
        named = _HOST.fullmatch(word)
        if named is None:
            raise InputError(
                f"--hosts: invalid node {word[:60]!r}", expected="NAME or NAME:RANKS", fix="--hosts h1,h2:2"
            )
        hosts[named[1]] += int(named[2] or 1)
    if not hosts:
        raise InputError(
            f"--hosts {text!r}: lists no node", expected="h1,h2, or a file with a node on each line"
        )
    return hosts


HOSTS = Hosts()
LOCAL = Local()
