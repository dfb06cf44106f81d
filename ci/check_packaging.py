"""``check_packaging.py``: the recipes in `packaging` require what pyproject.toml does; rattler-build reads that of conda."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml
from rattler_build import Stage0Recipe

PACKAGING = Path("packaging")
#: conda-forge's names, where they differ.
NAMES = {"msgpack": "msgpack-python"}


def main() -> int:
    """Report what is wrong with the recipes; the exit code."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = dict(re.fullmatch(r"([\w.-]+)>=(.*)", each).groups() for each in project["dependencies"])
    required["python"] = project["requires-python"].removeprefix(">=")
    problems = [*_conda(project, required), *_spack(project, required), *_easybuild(project)]
    print(*problems, sep="\n", end="\n" if problems else "")
    return bool(problems)


def _conda(project: dict, required: dict[str, str]) -> Iterator[str]:
    path = PACKAGING / "conda/recipe.yaml"
    text = path.read_text(encoding="utf-8")
    Stage0Recipe.from_yaml(text)  # raises where rattler-build would not take it
    recipe = yaml.safe_load(text)
    wanted = {f"{NAMES.get(name, name)} >={version}" for name, version in required.items()}
    if wrong := set(recipe["requirements"]["run"]) ^ wanted:
        yield f"{path}: run requirements differ from pyproject.toml's: {sorted(wrong)}"
    extra = project["optional-dependencies"]["cuda13"]
    constraints = {re.sub(r"(\[cu13\]|-cu13)?([<>])", r" \2", each, count=1) for each in extra}
    if unknown := set(recipe["requirements"]["run_constraints"]) - constraints:
        yield f"{path}: constraints that are not in pyproject.toml's extra cuda13: {sorted(unknown)}"
    if recipe["context"]["version"] != project["version"]:
        yield f"{path}: version {recipe['context']['version']}, but pyproject.toml has {project['version']}"


def _spack(project: dict, required: dict[str, str]) -> Iterator[str]:
    path = PACKAGING / "spack/package.py"
    text = path.read_text(encoding="utf-8")
    found = dict(re.findall(r'depends_on\("(?:py-)?([\w-]+)@([\d.]+):"\)', text))
    if found != required:
        yield f"{path}: requirements differ from pyproject.toml's: {sorted(found.items() ^ required.items())}"
    if f'version("{project["version"]}")' not in text:
        yield f"{path}: has no version {project['version']}"


def _easybuild(project: dict) -> Iterator[str]:
    (path,) = PACKAGING.glob("easybuild/*.eb")
    config: dict = {}
    exec(path.read_text(encoding="utf-8"), config)  # as EasyBuild does
    name = f"{config['name']}-{config['version']}-{config['toolchain']['name']}-{config['toolchain']['version']}.eb"
    if path.name != name or config["version"] != project["version"]:
        yield f"{path}: expected {name}, with the version {project['version']} of pyproject.toml"


if __name__ == "__main__":
    sys.exit(main())
