"""``check_recipe.py conda/recipe.yaml``: has rattler-build read it, and compares what it requires with pyproject.toml."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import yaml
from rattler_build import Stage0Recipe

#: conda-forge's names, where they differ.
NAMES = {"msgpack": "msgpack-python"}


def main(path: str) -> int:
    """Report what is wrong with the recipe; the exit code."""
    text = Path(path).read_text(encoding="utf-8")
    Stage0Recipe.from_yaml(text)  # raises where rattler-build would not take it
    recipe = yaml.safe_load(text)
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = set()
    for requirement in project["dependencies"]:
        name, limits = re.fullmatch(r"([\w.-]+)(.*)", requirement).groups()
        required.add(f"{NAMES.get(name, name)} {limits}".strip())
    given = set(recipe["requirements"]["run"]) - {f"python {project['requires-python']}"}
    if given != required:
        print(f"{path}: run requirements differ from pyproject.toml's: {sorted(given ^ required)}")
        return 1
    extra = project["optional-dependencies"]["cuda13"]
    constraints = {re.sub(r"(\[cu13\]|-cu13)?([<>])", r" \2", each, count=1) for each in extra}
    if unknown := set(recipe["requirements"]["run_constraints"]) - constraints:
        print(f"{path}: constraints that are not in pyproject.toml's extra cuda13: {sorted(unknown)}")
        return 1
    if recipe["context"]["version"] != project["version"]:
        print(f"{path}: version {recipe['context']['version']}, but pyproject.toml has {project['version']}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
