"""Text: characters that can be printed, names in natural order, durations and sizes."""

from __future__ import annotations

import contextlib
import math
import re

from dask_gpu_mpi.errors import OptionError

# Texts of others, such as host names, so that they can be put into a picture, a page or onto a terminal.


def printable(text: str) -> str:
    r"""Replace what no font shows: control characters, halves of surrogate pairs, marks that turn the direction of writing.

    What remains is valid in XML once it is escaped, can be encoded, and moves no cursor.

    >>> printable("n1\x1b[31m"), printable("Größe 5")
    ('n1�[31m', 'Größe 5')
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def text_of(error: BaseException) -> str:
    """The text of an exception, whose class may be the user's and may not be able to say it.

    >>> text_of(ValueError("no such file"))
    'no such file'
    """
    try:
        return str(error)
    except Exception:
        return ""


# The order of names in which numbers count as numbers.


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A name as what it is sorted by.

    >>> sorted(["10-0", "9-cpu-0", "9-0", "join-10", "join-9"], key=natural)
    ['9-0', '9-cpu-0', '10-0', 'join-9', 'join-10']
    """
    parts = re.split(r"(\d+)", name)
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


# Durations as people read them.


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock(59.9), clock(3725), clock(90061)
    ('0:00:59', '1:02:05', '25:01:01')
    """
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


# Bytes as people write them: Dask's units, without importing Dask, which takes a second.

_NUMBER = re.compile(r"((?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?)?([a-z]*)")
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    # As dask.utils.parse_bytes: 1 kB = 1 k = 1000 bytes, 1 KiB = 1 Ki = 1024 bytes.
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power}
    _UNITS |= {f"{_letter}i": 1024**_power, f"{_letter}ib": 1024**_power}


def parse_bytes(text: str) -> int:
    """Read a number of bytes.

    Units are Dask's (`dask.utils.parse_bytes`): decimal kB to PB, binary KiB to PiB, in any case, the B
    optional.

    Raises
    ------
    ValueError
        The text is no number of bytes.

    Examples
    --------
    >>> parse_bytes("4GB"), parse_bytes("1.5 GiB"), parse_bytes("1e9"), parse_bytes("512")
    (4000000000, 1610612736, 1000000000, 512)
    """
    found = _NUMBER.fullmatch(text.replace(" ", "").lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text[:40]!r} is no number of bytes (expected 4GB, 1.5GiB or the like)")
    # A unit alone means one of it, as in Dask; no digits and no unit at all means nothing.
    if found[1] is None and found[2] == "":
        raise ValueError("an empty text is no number of bytes (expected 4GB, 1.5GiB or the like)")
    size = float(found[1] or 1) * _UNITS[found[2]]
    if size == math.inf:
        raise ValueError(f"{text[:40]!r} is too large a number of bytes (expected 4GB, 1.5GiB or the like)")
    return int(size)


def format_bytes(number: int) -> str:
    """Write a number of bytes for people, in binary units.

    >>> format_bytes(64 * 1024**3), format_bytes(512)
    ('64.00 GiB', '512 B')
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {unit}"
    return f"{number} B"


def parse_memory_limit(limit: int | float | str | None) -> int | float | None:
    """Read a worker's memory limit, with Dask's meaning (``distributed.worker_memory.parse_memory_limit``).

    Parameters
    ----------
    limit : int, float, str or None
        ``"auto"``; a number above 1, or a text with a unit: bytes; a number in (0, 1]: that fraction of the
        host's memory; 0 or None: no limit.

    Returns
    -------
    int, float or None
        None for ``"auto"``, a float for a fraction, an int for bytes (0: no limit).

    Raises
    ------
    OptionError
        The limit is none of these.

    Examples
    --------
    >>> parse_memory_limit("4GiB"), parse_memory_limit(0.5), parse_memory_limit(1), parse_memory_limit(None)
    (4294967296, 0.5, 1.0, 0)
    >>> parse_memory_limit("auto") is None
    True
    """
    if limit is None:
        return 0
    if limit == "auto":
        return None
    try:
        number = float(limit)
    except (ValueError, TypeError, OverflowError):
        with contextlib.suppress(ValueError):
            return parse_bytes(str(limit))
        number = -1.0
    if not 0 <= number < math.inf:
        raise OptionError(
            f"memory_limit: invalid value {_shown(limit)}",
            expected="bytes such as '4GB', a fraction of the host's memory, 'auto' or 0",
        )
    return number if 0 < number <= 1 else int(number)


def _shown(value: object) -> str:
    """The beginning of it; an integer of thousands of digits has no text."""
    try:
        return repr(value)[:60]
    except ValueError:
        return "a huge number"
