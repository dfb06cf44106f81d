"""Leaves secrets out of what is shown or passed on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["LEFT_OUT", "scrub", "scrub_options"]

LEFT_OUT = "[left out]"
_WORDS = r"token|passw(?:or)?d|passphrase|pgpass|pwd|secret|credentials?|api[_-]?key|access[_-]?key|private[_-]?key|authorization"
_NAME = re.compile(_WORDS, re.IGNORECASE)
_VALUE = r"""(?:"[^"]{0,999}"|'[^']{0,999}'|[^\s&,;"'#)\]}]+)"""
#: Every repetition that something follows is bounded: else a long text takes time that grows with its square.
_TEXTS = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
            re.DOTALL,
        ),
        LEFT_OUT,
    ),
    (
        re.compile(
            rf"((?:{_WORDS})\w{{0,40}}[\"']?\s{{0,9}}[=:]\s{{0,9}}\[?(?:(?:bearer|basic|token)\s{{1,9}})?){_VALUE}",
            re.IGNORECASE,
        ),
        rf"\1{LEFT_OUT}",
    ),
    # words of a command line, and of a sentence
    (
        re.compile(rf"(--?[\w-]{{0,20}}(?:{_WORDS})[\w-]{{0,20}}\s{{1,9}}){_VALUE}", re.IGNORECASE),
        rf"\1{LEFT_OUT}",
    ),
    (re.compile(rf"((?:{_WORDS})\s{{1,9}}is\s{{1,9}}){_VALUE}", re.IGNORECASE), rf"\1{LEFT_OUT}"),
    (
        re.compile(rf"(\b(?:passw(?:or)?d|pgpass|pwd)\s{{1,9}})(?!is\b){_VALUE}", re.IGNORECASE),
        rf"\1{LEFT_OUT}",
    ),
    (re.compile(r"(\b\w{1,20}://)[^\s/]{1,300}@"), rf"\1{LEFT_OUT}@"),
)


def scrub(data: Any) -> Any:
    """Plain data with secrets left out of all its texts.

    >>> scrub({"link": "http://localhost:8787/status?token=abc#top", "log": ["password: xyz, ftp://me:pw@host/"]})
    {'link': 'http://localhost:8787/status?token=[left out]#top', 'log': ['password: [left out], ftp://[left out]@host/']}
    """
    if isinstance(data, str):
        for pattern, instead in _TEXTS:
            data = pattern.sub(instead, data)
        return data
    if isinstance(data, Mapping):
        return {scrub(key): scrub(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [scrub(value) for value in data]
    return data


def scrub_options(options: Any, *, nested: bool = False) -> Any:
    """Options as plain data. Within an option that is itself made of several, an environment for example, no text is shown.

    >>> scrub_options({"name": "x", "my_token": "abc", "worker_options": {"env": {"HOME": "/home/me"}, "port": 3}})
    {'name': 'x', 'my_token': '[left out]', 'worker_options': {'env': {'HOME': '[left out]'}, 'port': 3}}
    """
    if isinstance(options, Mapping):
        return {
            str(name): LEFT_OUT
            if _NAME.search(str(name))
            else scrub_options(value, nested=nested or isinstance(value, Mapping))
            for name, value in options.items()
        }
    if options is None or isinstance(options, (bool, int, float)):
        return options
    if nested:
        return LEFT_OUT
    if isinstance(options, (list, tuple, set, frozenset)):
        return [scrub_options(value) for value in options]
    if isinstance(options, type):
        return f"{options.__module__}.{options.__qualname__}"
    return scrub(str(options))
