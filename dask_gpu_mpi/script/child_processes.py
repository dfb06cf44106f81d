"""The processes that a script starts: they find its cluster, and may not bring up another as the rank that their script is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.mpi.local_ranks import is_child_of
from dask_gpu_mpi.sites import launchers

from .cluster_file import ClusterFile
from .exec_as_child import ExecAsChild

__all__ = ["ChildrenOfCluster", "mark_children", "refuse_children"]

#: Variable in the environment of the script's children: process id of the rank.
RANK_PID = "DGM_RANK_PID"


def mark_children() -> None:
    """Let the script's children know whose children they are (`refuse_children`).

    For good: after the cluster too they have the rank's variables, with which their MPI would wait for ever.
    """
    os.environ[RANK_PID] = str(os.getpid())


def refuse_children() -> None:
    """A child of a rank has the rank's variables: its MPI would join as a rank that is there already, and wait for ever.

    Raises
    ------
    InputError
        This is one. Raised here and now: the other ranks are in the cluster of the rank.
    """
    rank = os.environ.get(RANK_PID, "")
    launched = launchers.detect(os.environ) if re.fullmatch(r"[0-9]{1,18}", rank) else None
    if launched is not None and is_child_of(int(rank)):
        size = "" if launched.size is None else f" of {launched.size}"
        raise InputError(
            f"initialize: called in a child process of rank {launched.rank}{size}, which has its cluster already (expected once "
            'per rank). Fix: put the script under `if __name__ == "__main__":`, since multiprocessing runs it again in each '
            "child; a child may connect with a plain Client()"
        )


class ChildrenOfCluster:
    """What the processes that the script starts are given of its cluster, until `release`.

    Parameters
    ----------
    settings : mapping
        Dask's, by key: the scheduler's address and the credentials.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._file: ClusterFile | None = None
        try:
            self._file = ClusterFile(settings)
        except (OSError, ValueError) as error:
            say(
                f"warning: processes that the script starts can't connect with a plain Client(): {error}. Fix: start the job "
                "with --scheduler-file FILE, and call dask_gpu_mpi.connect(FILE) in them"
            )
        self._exec = ExecAsChild()

    def release(self) -> None:
        """What the script starts from now on is without the cluster. May be called again."""
        if self._file is not None:
            self._file.close()
        self._exec.take_back()
