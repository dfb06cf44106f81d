"""Texts of others, such as host names, so that they can be put into a picture, a page or onto a terminal."""

from __future__ import annotations

__all__ = ["printable", "text_of"]


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
