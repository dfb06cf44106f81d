"""Leaves secrets out of what is shown or passed on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["LEFT_OUT", "scrub", "scrub_options"]

LEFT_OUT = "[left out]"
_WORDS = r"token|passw(?:or)?d|passphrase|secret|credentials?|api[_-]?key|access[_-]?key|private[_-]?key|authorization"
_NAME = re.compile(_WORDS, re.IGNORECASE)
_TEXTS = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
        ),
        LEFT_OUT,
    ),
    (
        re.compile(
            rf"((?:{_WORDS})\w*[\"']?\s*[=:]\s*[\"']?(?:(?:bearer|basic)\s+)?)[^\s&,;\"'#)\]}}]+",
            re.IGNORECASE,
        ),
        rf"\1{LEFT_OUT}",
    ),
    (re.compile(r"(\w+://[^\s/:@]*:)[^\s/@]+@"), rf"\1{LEFT_OUT}@"),
)


def scrub(data: Any) -> Any:
    """Plain data with secrets left out of all its texts.

    >>> scrub({"link": "http://localhost:8787/status?token=abc#top", "log": ["password: xyz, ftp://me:pw@host/"]})
    {'link': 'http://localhost:8787/status?token=[left out]#top', 'log': ['password: [left out], ftp://me:[left out]@host/']}
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
