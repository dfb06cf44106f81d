"""Every line that a user can see has this project's shape; the messages are collected from the code."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from support import ROOT

sys.path.insert(0, str(ROOT / "docs"))

import make_messages
from messages_in_code import Message, Source, collect
from source_texts import has_shape

#: Errors and warnings that have neither a fix nor what was expected, by words of them, and why.
WITHOUT_FIX = {
    "least: worker {name} on {host}": "an answer of the report",
    "the scheduler has no record of the workers": "the page's line about the scheduler has the reason",
    "(before the script)": "click's text says what it expects",
    "Option {start} requires an argument.": "click's own text, word for word",
    "SIGINT came before the start": "the user has ended the job",
    "came while the cluster started": "somebody has ended the job",
    "not run (--no-kernel)": "the user wants it so",
    "not run: there is no plan": "the line about the placement has the fix",
    "GPUs would have no worker": "the plan's warning follows, with its fix",
    "more ranks than GPUs": "the parenthesis says what to do",
    "the scheduler file {name} is not taken": "the reason follows, with its fix",
    "did not start: {why}": "what the worker's class raised, and its last output",
    "could not be made: {type}": "what the worker's class raised",
    "not responded": "a part of the line that shows the progress of the start",
    "the monitor of the cluster failed": "a defect of this package",
    "this rank could not end the cluster": "a defect of this package",
    "the cluster started without this rank": "a defect of this package",
    "on {worker} restarted": "an event that top shows",
    "{called} lost: its connection": "an event that top shows",
    "{called} paused": "an event that top shows",
    "{called} continues": "an event that top shows",
    "top: the scheduler at": "the cluster has ended",
    "the gang is cancelled: {why}": "the reason follows: what another rank raised",
    "spmd: rank {rank} (worker": "what the user's function raised",
    "spmd: the connection to the scheduler is lost": "the cluster is lost: the job's own line has the reason",
    "has not returned from a gang": "an event: the process is restarted",
    "torch.distributed group of a gang that failed": "an event: the process is restarted",
    "no worker yet": "a part of what top draws",
    "one row per node": "a part of what top draws",
}
#: Messages of several lines, which end with what another program has printed.
WITH_LINES = ("{traceback}", "{output}]")
#: Ordinary words with which a message may begin in upper case.
NAMES = ("Dask's", "Option")
LONGEST = 300

MADE_UP = '''
"""A module. Fix: this is no message."""
LIMIT = 30
HINT = "use the other"


class Odd:
    """Members. Fix: no message either."""

    name = "no message at all of anybody"


def reason(path):
    if path:
        return f"{path} is of no use here"
    return "no path is set here"


def refuse(observed, number, error):
    """Docs. Fix: nothing."""
    text = f"{observed.host}: no GPU within {LIMIT} s"
    if error:
        text += f" ({error})"
    say(f"warning: {reason(number)}. Fix: {HINT}")
    if number:
        raise OptionError(f"{text}. Fix: wait" if number == 1 else "--number: too large (expected 1)")
    return Failure(
        f"rank{'s' if number > 1 else ''} {number} "
        "stopped",
        1,
    )


def line(path):
    yield "warning", f"{path} is slow", HINT
    raise OptionError(f"{path}: {observed}")
'''


@cache
def messages() -> tuple[Message, ...]:
    return tuple(make_messages.all_messages())


def fixed(message: Message) -> str:
    """What is always there."""
    return re.sub(r"\{[^{}]*\}", "", message.whole)


def has_no_end(message: Message) -> bool:
    """Whether it leaves the reader alone."""
    names_the_valid = "did you mean" in message.text or "; valid: " in message.text
    return message.severity in ("error", "warning") and not has_shape(message.whole) and not names_the_valid


def has_odd_lines(message: Message) -> bool:
    if message.text.endswith(WITH_LINES):
        return False
    return "\n" in message.whole or re.search(r"(?<!\.)\.$", message.whole) is not None


def has_odd_beginning(message: Message) -> bool:
    return re.match(r"[A-Z][a-z']+ ", message.whole) is not None and not message.text.startswith(NAMES)


def test_every_error_and_warning_has_a_fix_or_what_was_expected() -> None:
    found = [each.whole for each in messages() if has_no_end(each)]
    assert [text for text in found if not any(words in text for words in WITHOUT_FIX)] == []


def test_the_exceptions_are_messages_without_a_fix() -> None:
    found = [each.whole for each in messages() if has_no_end(each)]
    assert [words for words in WITHOUT_FIX if not any(words in text for text in found)] == []


def test_a_message_is_one_line_without_a_full_stop_at_its_end() -> None:
    found = [each.whole for each in messages() if has_odd_lines(each)]
    assert found == ["Option {start} requires an argument."]  # click's own


def test_a_message_is_short() -> None:
    assert [text for text in map(fixed, messages()) if len(text) > LONGEST] == []


def test_a_message_begins_with_its_place_or_subject() -> None:
    assert [each.whole for each in messages() if has_odd_beginning(each)] == []


def test_messages_come_from_all_rooms() -> None:
    rooms = {path.parent.name for path in (ROOT / "dask_gpu_mpi").glob("*/__init__.py")}
    assert rooms - {each.module.partition("/")[0] for each in messages()} == set()
    assert len(messages()) > 300


def test_the_page_is_up_to_date() -> None:
    text = make_messages.PAGE.read_text(encoding="utf-8")
    assert text == make_messages.page(list(messages())), "run python docs/make_messages.py"


def test_every_cause_is_of_a_message() -> None:
    assert make_messages.unused_causes(list(messages())) == []
    assert make_messages.unused_causes([]) == list(make_messages.CAUSES)


def test_what_is_wrong_is_found() -> None:
    def made(text: str, severity: str = "error") -> Message:
        return Message("a", 1, severity, text)

    assert has_no_end(made("no GPU"))
    assert not has_no_end(made("no GPU (expected one)"))
    assert not has_no_end(made("no GPU", "information"))
    assert not has_no_end(made("no GPU on {host} (it has: none; expected one, or two)"))
    assert [has_odd_lines(made(text)) for text in ("a.", "a\nb", "a...", "a\n{output}]")] == [
        True,
        True,
        False,
        False,
    ]
    assert [has_odd_beginning(made(text)) for text in ("This is it", "NVML hangs", "Dask's files")] == [
        True,
        False,
        False,
    ]
    assert fixed(made("rank {rank} on {host}: no")) == "rank  on : no"


def test_the_messages_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "made_up.py").write_text(MADE_UP)
    found = collect(tmp_path, {"OptionError": 2})
    assert [(each.severity, each.exit_code, each.whole) for each in found] == [
        ("warning", None, "no path is set here. Fix: use the other"),
        ("warning", None, "{path} is of no use here. Fix: use the other"),
        ("error", 2, "{host}: no GPU within 30 s[ ({error})]. Fix: wait"),
        ("error", 2, "--number: too large (expected 1)"),
        ("error", 1, "rank[s] {number} stopped"),
        ("warning", None, "{path} is slow. Fix: use the other"),
    ]
    assert {each.module for each in found} == {"room/made_up"}


TWICE = """
def f(a):
    x = "one thing here"
    say(x)
    x = "another thing here"
    if a:
        x = "or a third"
    say(x)
"""


def test_a_name_stands_for_what_it_was_given_before() -> None:
    found = [each.text for each in Source("m", TWICE, {}).whole_messages()]
    assert found == ["one thing here", "another thing here", "or a third"]


def test_a_parameter_is_not_the_function_of_its_name() -> None:
    code = (
        'def text():\n    return "no value at all"\n\ndef f(text):\n    say(f"the value {text[:3]} is odd")\n'
    )
    assert [each.text for each in Source("m", code, {}).whole_messages()] == ["the value {text} is odd"]
