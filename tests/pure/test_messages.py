"""Every line that a user can see has the shape and the words of this project: the messages are collected from the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

import make_messages  # noqa: E402
from messages_in_code import Message, Source, collect  # noqa: E402
from source_texts import has_shape  # noqa: E402

#: Words with which this project named things before, or that make a message hard to read.
FORBIDDEN = [
    r"members?", r"lifelines?", r"undertakers?", r"pretend(s|ed)?", r"stand-ins?", r"made-up", r"spares?", r"crowds?",
    r"look(s|ed|ing)? at", r"must", r"mend(s|ed)?", r"remed(y|ies)", r"given up", r"brought back", r"in turn", r"altogether",
    r"head rank", r"first rank", r"ours", r"theirs", r"taken away", r"take (it|them) away", r"needed", r"goes on", r"go on",
    r"said", r"unsaid", r"can't be used; needed", r"please", r"sorry", r"illegal", r"abort your",
]  # fmt: skip
#: Errors and warnings without a fix and without what was expected, by words of them, and why.
WITHOUT_FIX = {}
LONGEST = 300


def messages() -> list[Message]:
    return make_messages.all_messages()


def fixed(message: Message) -> str:
    """What is always there."""
    return re.sub(r"\{[^{}]*\}", "", message.whole)


def has_end(message: Message) -> bool:
    return has_shape(message.whole) or "did you mean" in message.text or "; valid: " in message.text


def test_every_error_and_warning_has_its_fix_or_what_was_expected() -> None:
    found = [each.whole for each in messages() if each.severity in ("error", "warning") and not has_end(each)]
    assert [text for text in found if not any(words in text for words in WITHOUT_FIX)] == []


def test_the_exceptions_are_of_messages() -> None:
    texts = [each.whole for each in messages()]
    assert [words for words in WITHOUT_FIX if not any(words in text for text in texts)] == []


@pytest.mark.parametrize("word", FORBIDDEN)
def test_no_message_has_a_word_that_is_not_used(word: str) -> None:
    pattern = re.compile(rf"(?<![\w-]){word}(?![\w-])", re.IGNORECASE)
    assert [
        f"{each.module}:{each.line} {each.whole}" for each in messages() if pattern.search(fixed(each))
    ] == []


def test_a_message_is_one_line_without_a_full_stop_at_its_end() -> None:
    found = [each.whole for each in messages()]
    assert [text for text in found if "\n" in text or re.search(r"(?<!\.)\.$", text)] == []


def test_a_message_is_short() -> None:
    assert [text for text in map(fixed, messages()) if len(text) > LONGEST] == []


def test_a_message_begins_with_its_place_or_subject() -> None:
    """In lower case, but for names: NVML, CUDA_VISIBLE_DEVICES, UCX."""
    odd = [each.whole for each in messages() if re.match(r"[A-Z][a-z']+ ", each.whole)]
    assert odd == []
