"""Finds the messages of the package in its source, by `ast`: nothing is run.

A message is

- a text that is given to an error class of `dask_gpu_mpi.errors` or to one of `CALLS`, directly or by a name that has it;
- any other text of a function that has a fix, or says what was expected, or reads like a sentence: what functions return for
  others to raise or print. It is a ``part`` of a message, or in a list of warnings one of these.

A text is written as its reader would: ``f"{observed.host}: no GPU"`` is ``{host}: no GPU``, and what may be left out is in
brackets.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from source_texts import (
    FIX,
    MOST_ALTERNATIVES,
    Function,
    choice,
    has_shape,
    is_wording,
    last_name,
    local_names,
    name_of,
    pairs,
    pick,
    plain_words,
    product,
    reads_like_a_sentence,
    top_level_texts,
)

#: What takes a message, and the position and name of that argument.
CALLS = {
    "Failure": (0, "text"),
    "Finding": (2, "found"),
    "KnownBad": (2, "effect"),
    "world_too_small": (0, "message"),
    "UsageError": (0, "message"),
    "BadParameter": (0, "message"),
    "say": (0, "text"),
    "_say": (0, "text"),
    "warn": (0, "message"),
}
#: Those of them whose level and fix are arguments of their own.
LEVELS = {"Finding": (0, "level"), "KnownBad": (1, "level")}
FIXES = {"Finding": (3, "fix"), "KnownBad": (3, "fix")}
SEVERITIES = {"ok": "information", "warning": "warning", "error": "error"}
#: What takes texts that nobody reads, help, or the fix of messages that have none.
NO_MESSAGES = {"lap", "option", "Option", "argument", "compile", "search", "RuntimeError", "problems"}
#: Modules whose texts are tables, scripts or for programmers, but for what they raise or print.
NO_PARTS = {"__init__", "check/report", "cli/options", "sites/jobscript", "plan/nodes", "plan/picture"}
#: Functions that write a value: what they return is no wording.
FORMATTERS = {"counted", "ranks_text", "fold_names", "fold_numbers", "format_bytes", "show"}
DEEPEST = 12


@dataclass(frozen=True)
class Message:
    """One message, with placeholders in braces."""

    #: Path without suffix in the package.
    module: str
    line: int
    #: ``error``, ``warning``, ``information``, ``part``.
    severity: str
    #: Before the fix.
    text: str
    fix: str = ""
    #: Of the process, where the class of the error says so.
    exit_code: int | None = None

    @property
    def whole(self) -> str:
        """As it is printed."""
        return f"{self.text}. {FIX}{self.fix}" if self.fix else self.text

    @property
    def is_envelope(self) -> bool:
        """Whether it only puts a place before a text that comes from elsewhere, as ``error: {error}`` does."""
        words = plain_words(self.text)
        return not words or (self.text.endswith("}") and len(words) <= 3)


class Source:
    """A module, with the texts that its names stand for.

    Parameters
    ----------
    module : str
        Its name in the messages.
    code : str
        Its source.
    errors : mapping
        Exit codes of the error classes.
    """

    def __init__(self, module: str, code: str, errors: Mapping[str, int]) -> None:
        self.module, self.tree, self.errors = module, ast.parse(code), errors
        nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.wordings = dict(top_level_texts(self.tree))
        #: What belongs to a message already.
        self.taken: set[ast.AST] = set()
        #: Of all modules: the names that others may import.
        self.others: Mapping[str, tuple[Source, list[ast.expr]]] = {}

    def whole_messages(self) -> Iterator[Message]:
        """Those that are raised or printed here."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield from self._of_call(node)
            elif isinstance(node, ast.Tuple):
                yield from self._of_line(node)

    def parts(self) -> Iterator[Message]:
        """What functions return for others; to be called after `whole_messages` of all sources."""
        for node in () if self.module in NO_PARTS else ast.walk(self.tree):
            if isinstance(node, ast.expr) and self._may_be_part(node):
                kind = "warning" if self._is_in_list(node) else "part"
                for text in self.texts(node):
                    if reads_like_a_sentence(text) and (self._function(node) or has_shape(text)):
                        yield self._message(node, text, kind)

    def _is_in_list(self, node: ast.AST) -> bool:
        """Whether a text is returned in a list, or put into one: those are lists of warnings."""
        parent = self.parents[node]
        if isinstance(parent, ast.Call):
            return last_name(parent.func) == "append"
        return isinstance(parent, ast.List) and isinstance(self.parents[parent], ast.Return)

    def _of_call(self, call: ast.Call) -> Iterator[Message]:
        name = last_name(call.func)
        argument = pick(call, (0, "message") if name in self.errors else CALLS.get(name))
        if argument is None:
            return
        fix = pick(call, FIXES.get(name))
        self._take(argument, *([] if fix is None else [fix]))
        for text, remedy in itertools.product(self.texts(argument), self._fixes(fix)):
            severity, code = self._kind(call, name, text)
            yield self._message(argument, text, severity, code, remedy)

    def _of_line(self, line: ast.Tuple) -> Iterator[Message]:
        """Level, text and fix, as some functions return them."""
        if len(line.elts) != 3 or not isinstance(self.parents.get(line), (ast.Yield, ast.Return)):
            return
        level, text, fix = line.elts
        if isinstance(level, ast.Constant) and level.value in SEVERITIES:
            self._take(text, fix)
            for each, remedy in itertools.product(self.texts(text), self._fixes(fix)):
                yield self._message(text, each, SEVERITIES[str(level.value)], None, remedy)

    def _kind(self, call: ast.Call, name: str, text: str) -> tuple[str, int | None]:
        """Severity and exit code."""
        if name in self.errors:
            return "error", self.errors[name]
        if name in ("UsageError", "BadParameter", "world_too_small"):
            return "error", 2
        if name == "Failure":
            code = pick(call, (1, "exit_code"))
            return "error", code.value if isinstance(code, ast.Constant) and isinstance(
                code.value, int
            ) else None
        if name in LEVELS:
            level = pick(call, LEVELS[name])
            return SEVERITIES.get(level.value if isinstance(level, ast.Constant) else "", "warning"), None
        if name == "say":
            head = text.partition(": ")[0]
            return (head if head in SEVERITIES else "information"), None
        return ("warning" if name == "warn" else "error"), None

    def _message(
        self, node: ast.AST, text: str, severity: str, code: int | None = None, fix: str = ""
    ) -> Message:
        text = text.strip().removeprefix("dask_gpu_mpi: ")
        head, separator, rest = text.partition(": ")
        if separator and head in ("error", "warning"):
            severity, text = head, rest
        text = re.sub(r"\[\. (Fix: .*)\]$", r". \1", text)  # a fix that is left out where none is known
        before, _, after = text.rpartition(FIX)
        if before.strip():
            text, fix = before.strip().removesuffix("."), after
        return Message(self.module, getattr(node, "lineno", 0), severity, text, fix, code)

    def _fixes(self, node: ast.expr | None) -> list[str]:
        return [""] if node is None else self.texts(node)

    def _take(self, *parts: ast.expr) -> None:
        """Remember that these expressions, and what their local names stand for, belong to a message."""
        for part in parts:
            self.taken.update(ast.walk(part))
            for each in ast.walk(part):
                for source, text in self._stands_for(each) if isinstance(each, ast.Name | ast.Call) else ():
                    if text not in source.taken:
                        source._take(text)

    def _may_be_part(self, node: ast.expr) -> bool:
        """Whether this is a whole text of a function, and not of a message already."""
        if not is_wording(node) or node in self.taken:
            return False
        parent = self.parents.get(node)
        if isinstance(parent, (ast.Expr, ast.FormattedValue)) or (
            isinstance(parent, ast.expr) and is_wording(parent)
        ):
            return False
        while isinstance(parent, (ast.expr, ast.keyword)):
            if isinstance(parent, ast.Call) and last_name(parent.func) in NO_MESSAGES:
                return False
            node, parent = parent, self.parents.get(parent)
        if isinstance(parent, Function) and node in parent.decorator_list:
            return False  # a command's help
        return parent is None or "fix" not in dict(pairs(parent))

    def texts(self, node: ast.expr, depth: int = 0) -> list[str]:
        """What an expression may be, as text."""
        inner = depth + 1
        if depth > DEEPEST:
            return [f"{{{name_of(node)}}}"]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.JoinedStr):
            return product(self.texts(part, inner) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.texts(node.value, inner)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return product((self.texts(node.left, inner), self.texts(node.right, inner)))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and is_wording(node.left):
            return self.texts(node.left, inner)
        if isinstance(node, ast.IfExp):
            return choice(self.texts(node.body, inner), self.texts(node.orelse, inner))
        if found := [text for source, each in self._stands_for(node) for text in source.texts(each, inner)]:
            some = [text for text in found if text]  # an empty reason is none
            return list(dict.fromkeys(some or found))[:MOST_ALTERNATIVES]
        return [f"{{{name_of(node)}}}"]

    def _stands_for(self, node: ast.expr) -> list[tuple[Source, ast.expr]]:
        """The texts of a local name, of a constant, of a dictionary, or of a function that returns nothing else."""
        if isinstance(node, ast.Name) and (function := self._function(node)) is not None:
            found = self._assigned(function, node)
            if found or node.id in local_names(function):
                are_texts = all(is_wording(each) or self._called(each) for each in found)
                return [(self, each) for each in found if are_texts]
        return self._called(node)

    def _called(self, node: ast.expr) -> list[tuple[Source, ast.expr]]:
        """The texts of a name at the top of a module, as it is, called, or with an index."""
        inner = node.value if isinstance(node, ast.Subscript) else getattr(node, "func", node)
        name = last_name(inner) if isinstance(inner, ast.Name) else ""
        function = self._function(node)
        if name in FORMATTERS or (function is not None and name in local_names(function)):
            return []
        source, found = (
            (self, self.wordings[name]) if name in self.wordings else self.others.get(name, (self, []))
        )
        return [(source, each) for each in found]

    def _assigned(self, function: Function, name: ast.Name) -> list[ast.expr]:
        """What a function may have given to a name where it is used; what it adds to a text may be left out."""
        found: list[tuple[int, ast.expr]] = []
        start = 0
        added = []
        for node in ast.walk(function):
            found += [(value.lineno, value) for each, value in pairs(node) if each == name.id]
            if isinstance(node, ast.AugAssign) and last_name(node.target) == name.id:
                added.append(ast.IfExp(ast.Constant(True), node.value, ast.Constant("")))
            elif any(each == name.id for each, _ in pairs(node)) and self.parents[node] in self._around(name):
                line = getattr(node, "lineno", 0)
                start = max(start, line) if line <= name.lineno else start
        texts = [value for line, value in found if start <= line <= name.lineno]
        for more in added:
            texts = [ast.BinOp(each, ast.Add(), more) for each in texts]
        return texts

    def _around(self, node: ast.AST) -> Iterator[ast.AST]:
        while (parent := self.parents.get(node)) is not None:
            node = parent
            yield node

    def _function(self, node: ast.AST) -> Function | None:
        return next((each for each in self._around(node) if isinstance(each, Function)), None)


def collect(package: Path, errors: Mapping[str, int]) -> list[Message]:
    """The messages of all modules of a package, each once, in the order of modules and lines."""
    sources = [
        Source(path.relative_to(package).with_suffix("").as_posix(), path.read_text(encoding="utf-8"), errors)
        for path in sorted(package.rglob("*.py"))
    ]
    shared = {
        name: (source, found)
        for source in sources
        for name, found in source.wordings.items()
        if not name.startswith("_")
    }
    for source in sources:
        source.others = shared
    found = [each for source in sources for each in source.whole_messages()]
    found += [each for source in sources for each in source.parts()]
    messages: dict[tuple[str, str, str], Message] = {}
    for message in found:
        if not message.is_envelope:
            messages.setdefault((message.module, message.text, message.fix), message)
    return sorted(messages.values(), key=lambda message: (message.module, message.line))
