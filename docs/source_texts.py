"""Texts in a syntax tree: what is one, which names stand for one, and how a reader would write it. For `messages_in_code`."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator

FIX = "Fix: "
#: What calls and attributes are called in a placeholder.
ALIASES = {"gethostname": "host", "node": "host", "getcwd": "directory", "getpid": "pid", "__name__": "type"}
#: Of a text that is built of several parts that differ, no more than these.
MOST_ALTERNATIVES = 8

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_wording(node: ast.expr) -> bool:
    """Whether it is a text, or a choice of texts, whatever is filled in."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, (ast.Add, ast.Mod)) and (is_wording(node.left) or is_wording(node.right))
    if isinstance(node, ast.IfExp):
        return is_wording(node.body) and is_wording(node.orelse)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_long(node: ast.expr) -> bool:
    """Whether a text has at least four words, whatever they are."""
    constants = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
    return sum(str(each).count(" ") for each in constants) >= 3


def plain_words(text: str) -> list[str]:
    """The words of a text, without placeholders, names and code."""
    return re.findall(r"(?<![\w.'\"/=-])[a-z']{2,}(?![\w./=(\[-]\w)", re.sub(r"\{[^{}]*\}", "{}", text))


def reads_like_a_sentence(text: str) -> bool:
    """Whether a text is a message, or what was wrong: a fix, what was expected, or some plain words."""
    before = text.partition(FIX)[0].strip()
    if not re.match(r"[\w{'-]", before) or not plain_words(before):
        return False
    return has_shape(text) or (len(plain_words(text)) >= 3 and re.search(r"[a-z] [a-z]+ ", text) is not None)


def has_shape(text: str) -> bool:
    """Whether a text has a fix, or says in parentheses what was expected."""
    return FIX in text or re.search(r"\((?:[^()]|\([^()]*\))*\bexpected\b", text) is not None


def choice(one: list[str], other: list[str]) -> list[str]:
    """How two alternatives are written."""
    found = list(dict.fromkeys(one + other))
    if len(found) == 2:
        short, long = sorted(found, key=len)
        if long.startswith(short):
            return [f"{short}[{long.removeprefix(short)}]"]
        if all(each.count(" ") <= 1 and "{" not in each for each in found):
            return ["/".join(found)]
    return [f"[{each}]" for each in found if each] if "" in found else found


def pick(call: ast.Call, place: tuple[int, str] | None) -> ast.expr | None:
    """An argument by position or name; ``split_fix(text, fix)`` for two of them is none."""
    if place is None:
        return None
    position, name = place
    before = call.args[: position + 1]
    if len(before) > position and not any(isinstance(each, ast.Starred) for each in before):
        return before[position]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def product(parts: Iterable[list[str]]) -> list[str]:
    """All ways to join one of each."""
    joined = map("".join, itertools.product(*parts))
    return list(dict.fromkeys(itertools.islice(joined, MOST_ALTERNATIVES)))


def top_level_texts(tree: ast.Module) -> Iterator[tuple[str, list[ast.expr]]]:
    """What a module names: texts, numbers, dictionaries of texts, and functions that return nothing but one of a few texts."""
    for node in tree.body:
        if isinstance(node, Function):
            returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
            texts = [each for each in returned if each is not None and is_wording(each)]
            if 0 < len(texts) == len(returned) <= 4:
                yield node.name, texts
        for name, value in pairs(node):
            if is_wording(value):
                yield name, [value]
            elif isinstance(value, ast.Constant) and type(value.value) in (int, float):
                yield name, [ast.Constant(f"{value.value:g}")]
            elif isinstance(value, ast.Dict) and all(
                is_wording(each) and is_long(each) for each in value.values
            ):
                yield name, value.values


def local_names(function: Function) -> set[str]:
    """The names of a function's parameters, and of what it assigns, loops included."""
    nodes = list(ast.walk(function))
    return {each.arg for each in nodes if isinstance(each, ast.arg)} | {
        each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }


def pairs(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names of an assignment, and their values."""
    if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        yield last_name(node.target), node.value
    for target in node.targets if isinstance(node, ast.Assign) else ():
        value = node.value if isinstance(node, ast.Assign) else target
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            yield from zip(map(last_name, target.elts), value.elts, strict=True)
        else:
            yield last_name(target), value


def last_name(node: ast.expr) -> str:
    """Of ``a.b.c`` it is ``c``; empty where there is none."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def name_of(node: ast.expr) -> str:
    """A short name for a value: its last attribute, or that of what a function is called with."""
    if isinstance(node, ast.Call):
        if last_name(node.func) in ALIASES:
            return ALIASES[last_name(node.func)]
        candidates = [
            *reversed(node.args),
            *([node.func.value] if isinstance(node.func, ast.Attribute) else []),
            node.func,
        ]
        return next((name for each in candidates if (name := name_of(each)) != "..."), "...")
    if isinstance(node, ast.Subscript):
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        return index if isinstance(index, str) else name_of(node.value)
    if isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
        return name_of(node.elt)
    if isinstance(node, ast.BinOp):
        return next((name for each in (node.left, node.right) if (name := name_of(each)) != "..."), "...")
    if isinstance(node, (ast.Starred, ast.Await, ast.FormattedValue)):
        return name_of(node.value)
    if isinstance(node, ast.BoolOp):
        return name_of(node.values[0])
    if isinstance(node, ast.IfExp):
        return name_of(node.body)
    if isinstance(node, ast.JoinedStr):
        return next((name_of(each) for each in node.values if isinstance(each, ast.FormattedValue)), "...")
    return ALIASES.get(last_name(node), last_name(node).strip("_").lower()) or "..."
