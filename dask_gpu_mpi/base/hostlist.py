"""Many numbers or names, abbreviated: ``0-3,7`` and ``h[1-64]``."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["counted", "fold_names", "fold_numbers", "ranks_text"]

#: Digits of the longest number at the end of a name that is taken for one.
MOST_DIGITS = 18


def counted(number: int, what: str) -> str:
    """Write a number of things.

    >>> counted(1, "rank"), counted(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def fold_numbers(numbers: Iterable[int]) -> str:
    """Write whole numbers as ranges.

    >>> fold_numbers([7, 0, 1, 2, 2]), fold_numbers([])
    ('0-2,7', '')
    """
    return ",".join(_fold(sorted(set(numbers)), width=0))


def ranks_text(ranks: Iterable[int]) -> str:
    """Write ranks.

    >>> ranks_text([3]), ranks_text(range(4, 8))
    ('rank 3', 'ranks 4-7')
    """
    found = sorted(set(ranks))
    return f"rank{'' if len(found) == 1 else 's'} {fold_numbers(found)}"


def fold_names(names: Iterable[str]) -> str:
    """Write host names as Slurm does; zero-padding is kept.

    >>> fold_names(["h1", "h2", "h3"]), fold_names(["login", "n07", "n08", "n10"])
    ('h[1-3]', 'login,n[07-08],n10')
    """
    groups: dict[tuple[str, int], list[int]] = {}
    plain: list[str] = []
    for name in dict.fromkeys(names):
        stem = name.rstrip("0123456789")
        digits = name[len(stem) :]
        if not 0 < len(digits) <= MOST_DIGITS:
            plain.append(name)
            continue
        # A padded number only folds with others of its width, so that the names can be expanded again.
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        groups.setdefault((stem, width), []).append(int(digits))
    return ",".join(
        [*plain, *(_folded_group(stem, width, numbers) for (stem, width), numbers in groups.items())]
    )


def _folded_group(stem: str, width: int, numbers: list[int]) -> str:
    parts = _fold(sorted(numbers), width)
    return f"{stem}{parts[0]}" if len(numbers) == 1 else f"{stem}[{','.join(parts)}]"


def _fold(numbers: list[int], width: int) -> list[str]:
    parts: list[str] = []
    start = 0
    for end in range(1, len(numbers) + 1):
        if end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
            continue
        first, last = numbers[start], numbers[end - 1]
        parts.append(f"{first:0{width}d}" if first == last else f"{first:0{width}d}-{last:0{width}d}")
        start = end
    return parts
