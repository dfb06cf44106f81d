"""Every line that a user can see has this project's shape; the texts are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from dask_gpu_mpi import errors
from support import ROOT

PACKAGE = ROOT / "dask_gpu_mpi"
#: Errors and warnings that have neither a fix nor what was expected, by words of them, and why.
WITHOUT_FIX = {
    "(before the script)": "click's text says what it expects",
    "command line: {}": "click's text says what it expects",
    "SIGINT came before the start": "the user has ended the job",
    "came while the cluster started": "somebody has ended the job",
    "see dask-gpu-mpi plan": "it is the fix",
    "launch: --stage: {}: {}": "the error of a node, with its fix",
    "more ranks than GPUs": "the parenthesis says what to do",
    "may use more than the": "the user's own limits",
    "the scheduler file {} is not used": "the reason follows, with its fix",
    "command line: --memory-per-node": "the reason follows, with what was expected",
    "the scheduler did not start: {}": "what the scheduler raised",
    "the monitor of the cluster failed": "a defect of this package",
    "this rank could not end the cluster": "a defect of this package",
    "the gang is cancelled: {}": "the reason follows: what another rank raised",
    "spmd: the connection to the scheduler is lost": "the cluster is lost: the job's own line has the reason",
    "restarting its process": "an event",
    "top: the scheduler at": "the cluster has ended",
    "{} without a GPU": "a reason for no UCX",
    "UCX leads to no other node": "a reason for no UCX",
}
#: Ordinary words with which a message may begin in upper case.
NAMES = ("Dask's", "Option")
LONGEST = 300
#: What makes a message of its first argument.
MAKERS = {*(name for name in vars(errors) if not name.startswith("_")), "say"}


class Message(NamedTuple):
    """A message as it is in the code; what is filled in is ``{}``."""

    found: str
    expected: str = ""
    fix: str = ""

    @property
    def whole(self) -> str:
        """As it is printed."""
        return str(errors.Problem(*self))

    @property
    def helps(self) -> bool:
        """Whether it says what to do, or what was expected."""
        words = ("Fix: ", "expected", "did you mean", "; valid: ")
        return bool(self.expected or self.fix) or any(each in self.found for each in words)


def text_of(node: ast.expr | None) -> str:
    """A text as its reader sees it; what is filled in is ``{}``."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "{}"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Call):
        name = getattr(node.value.func, "id", "")
        return "; did you mean {}?" if name in ("suggest", "_hint") else "{}"
    return "{}" if node is not None else ""


def messages_in(tree: ast.AST) -> Iterator[Message]:
    """The messages that are made of a text where they are raised or printed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            more = {each.arg: text_of(each.value) for each in node.keywords}
            found = text_of(node.args[0])
            if name == "say" and not found.startswith(("error", "warning")):
                continue  # it informs
            if name in MAKERS and " " in found.replace("{} ", "").replace("{}", "").strip(" :"):
                yield Message(found, more.get("expected", ""), more.get("fix", ""))


@cache
def trees() -> tuple[ast.Module, ...]:
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py")))


@cache
def messages() -> tuple[Message, ...]:
    return tuple(dict.fromkeys(each for tree in trees() for each in messages_in(tree)))


def test_every_message_has_a_fix_or_what_was_expected() -> None:
    found = [each.whole for each in messages() if not each.helps]
    assert [text for text in found if not any(words in text for words in WITHOUT_FIX)] == []
    assert [words for words in WITHOUT_FIX if not any(words in text for text in found)] == []


def test_a_message_is_one_line_without_a_full_stop_at_its_end() -> None:
    texts = [each.whole for each in messages()]
    found = [text for text in texts if "\n" in text or re.search(r"(?<!\.)\.$", text)]
    assert found == [
        "error: this rank could not end the cluster; aborting the job\n{}"
    ]  # a traceback follows


def test_a_message_is_short_and_begins_with_its_place_or_subject() -> None:
    assert len(messages()) > 200
    assert [each.whole for each in messages() if len(each.whole.replace("{}", "")) > LONGEST] == []
    begins = [each for each in messages() if re.match(r"[A-Z][a-z']+ ", each.whole)]
    assert [each.whole for each in begins if not each.found.startswith(NAMES)] == []
