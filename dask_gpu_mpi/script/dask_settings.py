"""What a session sets in the script's Dask configuration, for as long as its cluster lives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DaskSettings"]


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
