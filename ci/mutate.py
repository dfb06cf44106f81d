"""Do the tests bite? Changes one thing at a time in a pure module and looks whether the pure tests fail. Run by hand.

`python ci/mutate.py [--count 24] [--seed S] [--modules units,walltime] [--no-numbers] [--jobs 2] [--limit SECONDS]`

A mutation turns a comparison, swaps `and` and `or`, turns a sign, removes a `not`, turns a bool that is returned, or changes a
number by one, which of a deadline or a size means little (`--no-numbers`). The tests of the module, or of its package, run first,
then all pure tests, in a copy of the tree. What no test notices is printed as a diff. Exit code: 0 all noticed, 1 not all, 2 the
tests fail without any mutation, or bad arguments.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import difflib
import os
import queue
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dask_gpu_mpi"
TESTS = Path("tests", "pure")
#: Not copied: environments, histories and what tests leave behind.
LEFT_OUT = (".venv", ".git", "*cache*", ".hypothesis", "*.egg-info", "build", "dist")
#: Bytes that a test process may allocate: a mutation may do so without end. (Not address space: a browser reserves terabytes.)
MEMORY = 1 << 36

#: What each operator becomes: the opposite, and the neighbour where there is one.
COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Lt: ("<", (">=", "<=")),
    ast.LtE: ("<=", (">", "<")),
    ast.Gt: (">", ("<=", ">=")),
    ast.GtE: (">=", ("<", ">")),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),  # codespell:ignore notin
}
SIGNS: dict[type[ast.operator], tuple[str, str]] = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}


@dataclass(frozen=True)
class Mutation:
    """`edits` are (start, end, text) in bytes of the source."""

    line: int
    edits: tuple[tuple[int, int, str], ...]

    def apply(self, source: bytes) -> bytes:
        """The changed source."""
        for start, end, text in sorted(self.edits, reverse=True):
            source = source[:start] + text.encode() + source[end:]
        return source


class _Finder(ast.NodeVisitor):
    """Finds what can be changed."""

    def __init__(self, source: bytes, *, numbers: bool) -> None:
        self._numbers = numbers
        self.found: list[Mutation] = []
        self._source = source
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def visit(self, node: ast.AST) -> None:
        """Leave out f-strings, whose parts have no true place before Python 3.12."""
        if isinstance(node, ast.JoinedStr):
            return
        super().visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        """Leave out annotations, which are never evaluated."""
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Its opposite, or its neighbour."""
        operands = [node.left, *node.comparators]
        if not (isinstance(node.left, ast.Name) and node.left.id == "__name__"):
            for operator, left, right in zip(node.ops, operands, node.comparators, strict=False):
                old, turned = COMPARISONS[type(operator)]
                for new in turned:
                    self._add(node, self._between(left, right, old, new))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`and` and `or`, in all of it."""
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        pairs = zip(node.values, node.values[1:], strict=False)
        self._add(node, *(self._between(left, right, old, new) for left, right in pairs))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Plus and minus, not between texts."""
        if type(node.op) in SIGNS and not _is_text(node.left) and not _is_text(node.right):
            self._add(node, self._between(node.left, node.right, *SIGNS[type(node.op)]))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """The same of ``+=``."""
        if type(node.op) in SIGNS and not _is_text(node.value):
            self._add(node, self._between(node.target, node.value, *SIGNS[type(node.op)]))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Without `not`, without the sign."""
        if isinstance(node.op, ast.Not | ast.USub):
            start = self._start(node)
            self._add(node, (start, start + (3 if isinstance(node.op, ast.Not) else 1), ""))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """A number, one more and one less."""
        if self._numbers and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            for value in (node.value + 1, node.value - 1):
                if value != node.value:
                    self._add(node, (self._start(node), self._end(node), repr(value)))

    def visit_Return(self, node: ast.Return) -> None:
        """A bool."""
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            edit = (self._start(node.value), self._end(node.value), repr(not node.value.value))
            self._add(node, edit)
        self.generic_visit(node)

    def _add(self, node: ast.expr | ast.stmt, *edits: tuple[int, int, str]) -> None:
        line = self._source.count(b"\n", 0, edits[0][0]) + 1
        self.found.append(Mutation(line, edits))

    def _start(self, node: ast.expr) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> tuple[int, int, str]:
        """Between two operands there are blanks, brackets and comments, and the operator."""
        begin = self._end(left)
        gap = self._source[begin : self._start(right)]
        gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), gap)
        start = begin + gap.index(old.encode())
        return start, start + len(old), new


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def mutations(source: bytes, *, numbers: bool = True) -> list[Mutation]:
    """All that can be changed in a module, in the order of the source's tree."""
    finder = _Finder(source, numbers=numbers)
    finder.visit(ast.parse(source))
    return finder.found


def modules_of(root: Path) -> dict[str, Path]:
    """The package's modules, by their dotted names below it."""
    paths = sorted(path.relative_to(root / PACKAGE) for path in (root / PACKAGE).rglob("*.py"))
    return {".".join(path.with_suffix("").parts): path for path in paths}


def own_tests(root: Path, module: Path) -> Path:
    """The tests of a module, ``package/name.py``: ``tests/pure/package/test_name.py``, or all of that folder."""
    own = TESTS / module.parent / f"test_{module.name}"
    return own if (root / own).exists() else own.parent


@dataclass(frozen=True)
class Outcome:
    """What became of a mutation: empty `by`: nobody noticed."""

    module: Path
    mutation: Mutation
    by: str
    seconds: float


#: Test processes; an interrupted run kills them.
_running: set[subprocess.Popen[bytes]] = set()


def _in_child() -> None:
    """Die with the parent (prctl(2), PR_SET_PDEATHSIG), and do not take all memory."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def output_of(tree: Path) -> Path:
    """What the tests said that ran last in a copy of the tree."""
    return tree.with_suffix(".output")


def run_tests(tree: Path, tests: Path, limit: float) -> str:
    """Why the tests fail, in a word, or nothing if they pass."""
    with output_of(tree).open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(tests)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_in_child,
        )
    _running.add(process)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        _running.discard(process)
        _kill(process)
    return "" if code in (0, 5) else f"exit code {code}"  # 5: no test


def try_mutation(tree: Path, module: Path, mutation: Mutation, limit: float) -> Outcome:
    """Change a module of a copy of the tree, test, and change it back."""
    path = tree / PACKAGE / module
    source = path.read_bytes()
    begun = time.monotonic()
    by = ""
    try:
        _write(path, mutation.apply(source))
        for tests in dict.fromkeys((own_tests(tree, module), TESTS)):
            if why := run_tests(tree, tests, limit):
                by = f"{tests} ({why})"
                break
    finally:
        _write(path, source)
    return Outcome(module, mutation, by, time.monotonic() - begun)


def _write(path: Path, source: bytes) -> None:
    path.write_bytes(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()  # the same size in the same second passes for the same source


def hunk(module: Path, source: bytes, mutation: Mutation) -> str:
    """The mutation as a diff, headed by its place."""
    before, after = (text.decode().splitlines() for text in (source, mutation.apply(source)))
    lines = list(difflib.unified_diff(before, after, n=2, lineterm=""))[2:]
    return "\n".join([f"{PACKAGE}/{module}:{mutation.line}", *lines])


def try_all(
    root: Path, chosen: Sequence[tuple[Path, Mutation]], jobs: int, limit: float | None
) -> Iterator[Outcome]:
    """Try mutations, each in one of `jobs` copies of the tree, and tell of them in their order.

    Raises
    ------
    RuntimeError
        The tests fail as they are.
    """
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            tree = Path(folder, str(number))
            shutil.copytree(root, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
            trees.put(tree)
        begun = time.monotonic()
        if why := run_tests(tree, TESTS, 3600.0):
            said = output_of(tree).read_text(errors="replace").splitlines()[-20:]
            raise RuntimeError("\n".join([f"{TESTS} fails without any mutation: {why}", *said]))
        usual = time.monotonic() - begun

        def one(module: Path, mutation: Mutation) -> Outcome:
            tree = trees.get()
            try:
                return try_mutation(tree, module, mutation, limit or 10 + 4 * usual)
            finally:
                trees.put(tree)

        try:
            yield from pool.map(lambda pair: one(*pair), chosen)
        finally:
            for process in list(_running):
                _kill(process)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=24, help="mutations to try (default: 24)")
    parser.add_argument(
        "--seed", type=int, help="the same seed on the same tree: the same mutations (default: random)"
    )
    parser.add_argument(
        "--modules",
        help="names, with commas (default: all of packages with a folder in tests/pure, or with a test file)",
    )
    parser.add_argument("--no-numbers", action="store_true", help="leave out numbers that are changed by one")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that are tested side by side")
    parser.add_argument(
        "--limit", type=float, help="seconds for one run of the tests (default: four times the usual)"
    )
    options = parser.parse_args(argv)
    modules = modules_of(ROOT)
    asked = options.modules.replace(",", " ").split() if options.modules else []
    if unknown := [name for name in asked if name not in modules]:
        parser.error(f"no such module: {', '.join(unknown)} (expected some of {', '.join(modules)})")
    pure = [
        name
        for name, module in modules.items()
        if module.stem.strip("_") == module.stem
        and (own := own_tests(ROOT, module)) != TESTS
        and (ROOT / own).exists()
    ]
    modules = {name: modules[name] for name in asked or pure}
    seed = random.randrange(10**6) if options.seed is None else options.seed
    sources = {module: (ROOT / PACKAGE / module).read_bytes() for module in modules.values()}
    pairs = [
        (module, found)
        for module, source in sources.items()
        for found in mutations(source, numbers=not options.no_numbers)
    ]
    chosen = random.Random(seed).sample(pairs, min(options.count, len(pairs)))
    print(f"{len(chosen)} of {len(pairs)} mutations in {len(modules)} modules, seed {seed}", flush=True)
    survivors, tried = 0, 0
    try:
        for outcome in try_all(ROOT, chosen, max(1, options.jobs), options.limit):
            tried += 1
            place = f"{PACKAGE}/{outcome.module}:{outcome.mutation.line}"
            print(
                f"{tried}/{len(chosen)} {outcome.seconds:.0f} s {place} {outcome.by or 'NOT NOTICED'}",
                flush=True,
            )
            if not outcome.by:
                survivors += 1
                print(hunk(outcome.module, sources[outcome.module], outcome.mutation), flush=True)
    except RuntimeError as error:
        print(f"mutate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    print(f"noticed {tried - survivors} of {tried}")
    return 1 if survivors or tried < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
