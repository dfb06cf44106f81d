"""A session in a notebook: a card with its nodes, GPUs, dashboard and the time left, as HTML."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from dask_gpu_mpi.base.durations import clock

__all__ = ["Card"]

#: The notebook's own colours of text and borders, so that it is legible on a light page and on a dark one.
STYLE = "border: 1px solid currentColor; border-radius: 4px; padding: 8px 12px; display: inline-block; color: inherit"
CELL = "text-align: left; padding: 1px 12px 1px 0; color: inherit; background: none"


@dataclass(frozen=True)
class Card:
    """What the card shows."""

    address: str
    #: Whether the cluster has been ended.
    closed: bool
    #: Network names of the job's nodes.
    nodes: tuple[str, ...]
    gpus: int
    workers: int
    #: Link to the dashboard; None: there is none.
    dashboard: str | None
    #: Seconds until the batch system ends the job; None: unknown.
    seconds_left: float | None

    def html(self) -> str:
        """The card; everything in it is escaped."""
        rows = [
            ("Nodes", escape(_names(self.nodes))),
            ("GPUs", str(self.gpus)),
            ("Workers", str(self.workers)),
            ("Scheduler", escape(self.address)),
        ]
        if not self.closed:
            left = "unknown" if self.seconds_left is None else clock(self.seconds_left)
            rows += [("Dashboard", _link(self.dashboard)), ("Time left", left)]
        lines = "".join(
            f'<tr style="background: none"><th style="{CELL}">{name}</th><td style="{CELL}">{value}</td></tr>'
            for name, value in rows
        )
        state = "closed" if self.closed else "open"
        return (
            f'<div style="{STYLE}"><strong>dask-gpu-mpi session</strong> ({state})'
            f'<table style="border: none; margin: 4px 0 0 0">{lines}</table></div>'
        )


def _names(nodes: tuple[str, ...], shown: int = 4) -> str:
    names = ", ".join(nodes[:shown]) + (", ..." if len(nodes) > shown else "")
    return f"{len(nodes)} ({names})" if nodes else "0"


def _link(link: str | None) -> str:
    if not link:
        return "none"
    if not link.startswith(("http://", "https://")):
        return escape(link)
    page = escape(link.partition("?")[0])
    return f'<a href="{escape(link)}" target="_blank" rel="noopener">{page}</a>'
