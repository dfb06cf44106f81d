"""The program that looks whether the tests bite: what it changes, and what it finds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support import ROOT


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "ci" / "mutate.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["mutate"] = importlib.util.module_from_spec(spec)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("a == b", ["a != b"]),
        ("a < b <= c", ["a >= b <= c", "a <= b <= c", "a < b > c", "a < b < c"]),
        ("(a  # is\n) is (b)", ["(a  # is\n) is not (b)"]),
        ("a is not b", ["a is b"]),
        ("a not in b", ["a in b"]),
        ("a in b", ["a not in b"]),
        ("a and b and (c or d)", ["a or b or (c or d)", "a and b and (c and d)"]),
        ("not a", [" a"]),
        ("-a", ["a"]),
        ("a + b", ["a - b"]),
        ("a += b - c", ["a -= b - c", "a += b + c"]),
        ("'text' + b", []),
        ("0", ["1", "-1"]),
        ("0.5", ["1.5", "-0.5"]),
        ("True", []),
        ("'ö☃' if a == b else c", ["'ö☃' if a != b else c"]),
        ("f'{a + 1}'", []),
        ("if __name__ == '__main__': pass", []),
        ("def f(a: 1 = 2) -> 3: return False", ["def f(a: 1 = 3) -> 3: return False",
         "def f(a: 1 = 1) -> 3: return False", "def f(a: 1 = 2) -> 3: return True"]),
    ],
)  # fmt: skip
def test_what_is_changed(mutate: ModuleType, source: str, mutants: list[str]) -> None:
    found = mutate.mutations(source.encode())
    assert [mutation.apply(source.encode()).decode() for mutation in found] == mutants
    assert len(mutate.mutations(b"a == 1 + b", numbers=False)) == 2


def test_survivors_are_told_and_the_tree_stays_as_it_is(
    mutate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "tests" / "pure").mkdir(parents=True)
    module = tmp_path / "pkg" / "m.py"
    module.write_text("def known(a):\n    return not a\n\n\ndef unknown(a):\n    return a == b\n")
    (tmp_path / "pkg" / "other.py").write_text("1 < 2")  # without tests of its own it is not taken
    (tmp_path / "tests" / "pure" / "test_m.py").touch()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    ran: list[tuple[str, bool]] = []
    fails = [""]

    def run_tests(tree: Path, tests: Path, limit: float) -> str:
        assert tree != tmp_path
        assert limit > 0
        known = "return not a" in (tree / "pkg" / "m.py").read_text()
        ran.append((str(tests), known))
        mutate.output_of(tree).write_text("the reason")
        return fails[0] or ("" if known else "exit code 1")

    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    monkeypatch.setattr(mutate, "PACKAGE", "pkg")
    monkeypatch.setattr(mutate, "run_tests", run_tests)
    assert mutate.main(["--seed", "1"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("2 of 2 mutations in 1 modules, seed 1\n")
    assert "pkg/m.py:2 tests/pure/test_m.py (exit code 1)\n" in said
    assert (
        "pkg/m.py:6\n@@ -4,3 +4,3 @@\n \n def unknown(a):\n-    return a == b\n+    return a != b\n" in said
    )
    assert said.endswith("noticed 1 of 2\n")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    # the tests as they are; for what they notice one run is enough
    assert ran[0] == ("tests/pure", True)
    assert sorted(ran[1:]) == [
        ("tests/pure", True),
        ("tests/pure/test_m.py", False),
        ("tests/pure/test_m.py", True),
    ]
    fails[0] = "exit code 1"
    assert mutate.main([]) == 2
    assert "tests/pure fails without any mutation: exit code 1\nthe reason" in capsys.readouterr().err
    fails[0] = ""
    ran.clear()
    assert mutate.main(["--modules", "other", "--count", "1"]) == 1
    assert [tests for tests, _ in ran] == ["tests/pure", "tests/pure"]
    with pytest.raises(SystemExit, match="2"):
        mutate.main(["--modules", "n"])
    assert "no such module: n (expected some of m, other)" in capsys.readouterr().err
