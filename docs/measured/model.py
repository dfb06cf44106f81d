"""What benchmarks/results/README.md is made of: sections with tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """One table: the function that makes it, its file in benchmarks/results, what it shows."""

    make: Callable[..., str]
    name: str
    about: str
    more: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The table with its caption."""
        return self.make(self.name, self.about, **self.more)


@dataclass(frozen=True)
class Section:
    """A heading, what a reader must know, tables."""

    title: str
    intro: str
    tables: tuple[Table, ...] = ()
    level: int = 2

    def text(self) -> str:
        """The section."""
        head = f"\n{'#' * self.level} {self.title}\n\n{self.intro.strip()}\n"
        return head + "".join(each.text() for each in self.tables)
