"""Every name of the table is there in what is installed, and the package uses and replaces nothing of others that is not in it.

`foreign` reads the package for private names, `replaced` for assignments to attributes and items that other packages own.
"""

from __future__ import annotations

import ast
import ctypes
import functools
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
    ("sys", "_xoptions"),
    ("_libc", "_exit"),
}
#: Documented modules of Python whose content may change with any release.
INTERNALS = {"dis", "opcode"}
#: What its owner documents as something that others set, as the package writes it.
MADE_TO_BE_SET = {
    "os.environ", "sys.argv", "sys.path", "sys.modules", "sys.excepthook", "setattr(sys, name)",  # Python
    "module.__dict__", "Both.__name__", "Both.__qualname__", "error.__cause__", "error.filename",
    "logger.disabled", "logger.handlers", "again.daemon", "context.num_tickets", "ssl_context.num_tickets",
    "_thread.calls", "_c_handler.restype", "().atexit",
    "mpi4py.rc.initialize", "mpi4py.rc.finalize", "context.meta", "environment.filters",  # mpi4py, click, jinja2
    "request.query", "request.uri",  # tornado
}  # fmt: skip
#: It sets bokeh's properties, which are made for that.
PLOTS = "view/report_page"
#: Methods of dicts and lists that change them.
CHANGING = {"update", "setdefault", "append", "insert", "clear", "remove", "extend"}
#: What is imported, in a text.
DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")


def name_of(path: Path) -> str:
    """A module of ours as the table writes it."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def is_private(name: str) -> bool:
    return name in INTERNALS or (name.startswith("_") and not name.endswith("__") and name.strip("_") != "")


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
    if package != "libc" and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    try:
        owner: Any = ctypes.CDLL(None) if entry.module == "libc" else importlib.import_module(entry.module)
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
    trees = trees_of_package()
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


def trees_of_package() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in MODULES}


def attributes(tree: ast.AST) -> Iterator[str]:
    """The attributes that the classes of a module give their instances."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
            yield node.attr
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that a module imports, and what they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def changed(tree: ast.AST) -> Iterator[ast.expr]:
    """The expressions whose value a module replaces, deletes or changes in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGING:
                yield node.func.value
            elif ast.unparse(node.func) == "patch.object":
                yield attribute(node.args)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            yield attribute(node.args)


def attribute(arguments: list[ast.expr]) -> ast.expr:
    """What ``setattr`` sets."""
    owner, name = arguments[:2]
    if isinstance(name, ast.Constant):
        return ast.Attribute(owner, str(name.value), ast.Store())
    return ast.Attribute(ast.Name("setattr"), f"({ast.unparse(owner)}, {ast.unparse(name)})", ast.Store())


def replaced(tree: ast.AST, ours: set[str]) -> Iterator[tuple[str, str]]:
    """What a module replaces of others: as it is written, and the last name; `ours`: attributes of our classes.

    An attribute of an imported name, and of any other object whose attribute no class of ours has.
    """
    imported = dict(imports(tree))
    others = {name for name, what in imported.items() if not what.startswith("dask_gpu_mpi")}
    for target in changed(tree):
        while isinstance(target, ast.Subscript):
            target = target.value
        root: ast.expr = target
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        of_others = isinstance(root, ast.Name) and root.id in others
        if isinstance(target, ast.Name) and of_others:
            yield target.id, target.id
        elif (
            isinstance(target, ast.Attribute)
            and not of_self(target)
            and (of_others or target.attr not in ours)
        ):
            text = ast.unparse(target) if isinstance(root, ast.Name) else f"().{target.attr}"
            if not is_module(text):  # whose function `update`, for example, is called
                yield text.replace("setattr.(", "setattr("), target.attr


def is_module(text: str) -> bool:
    """Whether a module of this name is installed."""
    try:
        return importlib.util.find_spec(text) is not None
    except (ModuleNotFoundError, ValueError):
        return False


@functools.cache
def replaced_by_module() -> dict[str, dict[str, str]]:
    """By module, what it replaces: the name, as it is written."""
    trees = trees_of_package()
    classes = {module: {*attributes(tree)} for module, tree in trees.items()}
    found = {}
    for module, tree in trees.items():
        known = {what for _, what in imports(tree) if what.startswith("dask_gpu_mpi")}
        ours = {name for other, names in classes.items() if is_known(other, module, known) for name in names}
        found[module] = dict(replaced(tree, ours))
    return found


def is_known(other: str, module: str, imported: set[str]) -> bool:
    """Whether a module of ours may have instances of another's classes: of its package, or imported."""
    if other.partition("/")[0] == module.partition("/")[0]:
        return True
    name = "dask_gpu_mpi." + other.replace("/", ".")
    return any(what == name or what.startswith(f"{name}.") for what in imported)


def test_nothing_else_is_replaced() -> None:
    found = replaced_by_module()
    known = {
        module: {
            entry.name.rpartition(".")[2] for entry in TABLE if entry.replaced and module in entry.used_in
        }
        for module in found
    }
    unknown = {
        module: texts
        for module, names in found.items()
        if module != PLOTS
        and (
            texts := [
                text
                for text, name in names.items()
                if name not in known[module] and text not in MADE_TO_BE_SET
            ]
        )
    }
    assert unknown == {}, "replaced: add it to tests/support/private_api.py, with what happens without it"
    assert {text for names in found.values() for text in names} >= MADE_TO_BE_SET


def test_what_the_table_calls_replaced_is() -> None:
    found = replaced_by_module()
    for entry in TABLE:
        name = entry.name.rpartition(".")[2]
        is_found = any(name in found[module].values() for module in entry.used_in)
        assert is_found == entry.replaced or entry.name in BY_ITEM, entry.name


#: An item of a dict of another package, which a local name has: not found by `replaced`.
BY_ITEM = {"TaskState.startstops"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import sys\nsys.exit = f", {"sys.exit": "exit"}),
        ("from distributed import Client\nClient.__init__ = f", {"Client.__init__": "__init__"}),
        ("def f(scheduler):\n    scheduler.handlers['x'] = f", {"scheduler.handlers": "handlers"}),
        ("def f(self):\n    self._scheduler.handlers |= f", {"self._scheduler.handlers": "handlers"}),
        ("def f(worker):\n    worker.handlers.update(x=f)", {"worker.handlers": "handlers"}),
        ("from distributed.comm.registry import backends\nbackends['tls'] = f", {"backends": "backends"}),
        ("import dask.config\ndask.config.defaults[:] = []", {"dask.config.defaults": "defaults"}),
        ("def f(client):\n    client.status = 'closed'", {"client.status": "status"}),
        ("import spawn\nsetattr(spawn, 'prepare', f)", {"spawn.prepare": "prepare"}),
        ("from unittest.mock import patch\nimport lib\nwith patch.object(lib, 'C', f): pass", {"lib.C": "C"}),
        ("import importlib\nimportlib.import_module('a').b = 1", {"().b": "b"}),
        ("import a\ndel a.b", {"a.b": "b"}),
        ("def f(self, ours):\n    self.x = 1\n    ours.mine = 2", {}),
        ("import dask.config\ndask.config.update({})", {}),
        ("from dask_gpu_mpi.base import streams\nstreams.mine = 1", {}),
    ],
)  # fmt: skip
def test_it_is_found(text: str, found: dict[str, str]) -> None:
    assert dict(replaced(ast.parse(text), {"mine"})) == found


def test_each_is_ready_to_be_an_issue() -> None:
    """Each name in a paragraph of the page for the owners, which has no other names than these."""
    text = (PACKAGE.parent / "contributing" / "upstream.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\*\*(.*?)\*\*", text, re.MULTILINE))
    found = {name for line in named for name in re.findall(r"`([^`]+)`", line)}
    assert found == {f"{entry.module}.{entry.name}" for entry in TABLE}


def test_it_is_used_where_the_table_says() -> None:
    for entry in TABLE:
        for module in entry.used_in:
            text = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
            name = entry.name.rpartition(".")[2]
            assert re.search(rf"\b{name}\b", text), f"{module} does not use {entry.name}"
