"""What a session sets in the script's Dask configuration, for as long as its cluster lives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dask_gpu_mpi.options.dask_config import is_configured

if TYPE_CHECKING:
    from dask_gpu_mpi.plan.plan import Plan

__all__ = ["DaskSettings", "shuffle_settings"]

#: How Dask's dataframes shuffle; it reads that when the graph is made, in the client's process.
SHUFFLE = "dataframe.shuffle.method"


def shuffle_settings(plan: Plan) -> dict[str, str]:
    """Shuffle by tasks, if all workers have GPUs and the user has not configured it.

    Of 160 million rows, cuDF's shuffle took 0.6 to 0.9 s by tasks, and 26 to 30 s by p2p, which is Dask's choice.
    """
    on_gpus = bool(plan.workers) and all(worker.kind == "gpu" for worker in plan.workers)
    return {SHUFFLE: "tasks"} if on_gpus and not is_configured(SHUFFLE) else {}


class DaskSettings:
    """Settings of Dask's that can be taken back.

    Parameters
    ----------
    settings : mapping
        Values by key, as in ``dask.config.set``.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        import dask.config

        self._changes = [(key, value, dask.config.set({key: value})) for key, value in settings.items()]
        # dask.config.refresh() starts again from the defaults: so they are set there as well.
        self._defaults: dict[str, Any] = {}
        for key, value in settings.items():
            dask.config.update(self._defaults, _nest(key, value))
        dask.config.update_defaults(self._defaults)

    def take_back(self) -> None:
        """Make the configuration what it was before; what the script has changed since stays. May be called again."""
        import dask.config

        dask.config.defaults[:] = [each for each in dask.config.defaults if each is not self._defaults]
        for key, value, change in reversed(self._changes):
            if dask.config.get(key, None) == value:
                change.__exit__(None, None, None)
        self._changes = []


def _nest(key: str, value: Any) -> dict[str, Any]:
    head, _, rest = key.partition(".")
    return {head: _nest(rest, value) if rest else value}
