"""Every name of the table is there in what is installed, and the package uses no private name of others that is not in it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dask_gpu_mpi
from support.private_api import TABLE, PrivateName

PACKAGE = Path(dask_gpu_mpi.__file__).parent
MODULES = sorted({*PACKAGE.glob("*.py"), *PACKAGE.glob("*/*.py")})
#: Documented, for all their underscore.
DOCUMENTED = {
    ("os", "_exit"),
    ("os", "_Environ"),
    ("sys", "_current_exceptions"),
    ("sys", "_getframe"),
    ("_libc", "_exit"),
    ("_libc", "__cxa_atexit"),
}
#: What is imported, in a text.
DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")


def name_of(path: Path) -> str:
    """A module of ours as the table writes it."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


def has(owner: Any, name: str) -> bool:
    """Whether an object, a class or the instances of that class have an attribute."""
    if hasattr(owner, name):
        return True
    classes = owner.__mro__[:-1] if isinstance(owner, type) else ()
    return any(
        name in vars(cls).get("__annotations__", {})
        or re.search(rf"\bself\.{name}\b", inspect.getsource(cls))
        for cls in classes
    )


@pytest.mark.parametrize("entry", TABLE, ids=lambda entry: f"{entry.module}.{entry.name}")
def test_it_is_there(entry: PrivateName) -> None:
    package = entry.module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    try:
        owner: Any = importlib.import_module(entry.module)
    except ModuleNotFoundError as error:
        if error.name == "bokeh":
            pytest.skip("no bokeh")
        raise
    *path, name = entry.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    assert has(owner, name), f"{entry.module} has no {entry.name} (seen in {entry.seen}); now {entry.without}"


def own(tree: ast.AST) -> Iterator[str]:
    """The private names that a module makes itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            yield node.attr


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def used(tree: ast.AST) -> Iterator[str]:
    """The private names that a module uses of anything but ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not of_self(node):
            if not (isinstance(node.value, ast.Name) and (node.value.id, node.attr) in DOCUMENTED):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "setattr", "hasattr", "delattr"):
                name = node.args[1]
                yield from [name.value] if isinstance(name, ast.Constant) else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            yield from node.value.split(".")


def foreign(module: str, tree: ast.AST, ours: set[str]) -> set[str]:
    """The private names of others in a module of ours that the table does not have for it."""
    known = {
        part
        for entry in TABLE
        if module in entry.used_in
        for part in (*entry.module.split("."), *entry.name.split("."))
    }
    return {name for name in used(tree) if is_private(name)} - known - ours


def test_no_other_private_name_is_used() -> None:
    trees = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}
    assert len(trees) > 50
    packages: dict[str, set[str]] = {}
    for module, tree in trees.items():  # a module may use what is its own package's
        packages.setdefault(module.partition("/")[0], set()).update(own(tree))
    found = {
        module: names
        for module, tree in trees.items()
        if (names := foreign(module, tree, packages[module.partition("/")[0]]))
    }
    assert found == {}, (
        "private names of others: add them to tests/support/private_api.py, with a guard where they are used"
    )


def test_it_is_used_where_the_table_says() -> None:
    for entry in TABLE:
        for module in entry.used_in:
            text = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
            name = entry.name.rpartition(".")[2]
            assert re.search(rf"\b{name}\b", text), f"{module} does not use {entry.name}"
