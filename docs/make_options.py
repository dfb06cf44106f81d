"""Writes docs/options.md and dask_gpu_mpi/gpu-mpi.yaml from the table of options, so that they can't differ from the program.

    python docs/make_options.py [--check]

With ``--check`` nothing is written; the exit code is 1 when one of them is not up to date.
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

# the checkout's package, whatever is installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dask_gpu_mpi.options.model import OPTIONS, Option

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "options.md"
YAML = ROOT / "dask_gpu_mpi" / "gpu-mpi.yaml"
#: The first line of what the YAML file has about job scripts.
JOBSCRIPT = "  # Defaults of `python -m dask_gpu_mpi jobscript`"
HEAD = """\
<!-- made by docs/make_options.py from dask_gpu_mpi/options/model.py: do not edit -->
# Options

Every option has one name. It can be set in four places; the first one that sets it wins:

1. a keyword of `initialize()` or `execute()`, or an option of the command line;
2. the environment: `DASK_GPU_MPI__` and the name in capitals, with two underscores after `MPI`;
3. Dask's YAML files: the key under `gpu-mpi`;
4. the default.

Unknown names and values of the wrong type are refused before anything starts, in one line and with exit code 2.
Times are in seconds, or a text such as `5m`. Sizes are in bytes, or a text such as `4GB`.
In `execute()` the option `name` has dask-mpi's name, `worker_name`.
The section `gpu-mpi.jobscript` of the YAML files has the defaults of job scripts: see [slurm.md](slurm.md#the-generator).

| keyword | command line | environment | YAML key | kind | default |
|---|---|---|---|---|---|
"""


def default_of(option: Option) -> str:
    """The default as the reader would write it; a dash where the program chooses."""
    return "-" if option.default is None else f"`{option.default}`"


def row(option: Option) -> str:
    """One line of the table."""
    # a | would end the cell
    kind = option.kind if not option.choices else " or ".join(option.choices)
    cells = (
        f"[`{option.name}`](#{option.name})",
        f"`{option.flags[0]}`" if option.cli else "-",
        f"`{option.variable}`" if option.config else "-",
        f"`{option.key}`" if option.config else "-",
        kind,
        default_of(option),
    )
    return f"| {' | '.join(cells)} |\n"


def entry(option: Option) -> str:
    """What the option means, and its bounds."""
    bounds = []
    if option.choices:
        bounds.append(f"One of: {', '.join(f'`{choice}`' for choice in option.choices)}.")
    if option.minimum is not None:
        bounds.append(f"At least {option.minimum}.")
    if option.maximum is not None:
        bounds.append(f"At most {option.maximum}.")
    return f"\n### {option.name}\n\n{' '.join([option.help, *bounds])}\n"


def page() -> str:
    """The whole page."""
    options = list(OPTIONS.values())
    return HEAD + "".join(map(row, options)) + "\n## What they mean\n" + "".join(map(entry, options))


def value(default: object) -> str:
    """A default as YAML."""
    if isinstance(default, float):
        return f"{default:g}"
    return (
        str(default)
        if isinstance(default, (str, int)) and not isinstance(default, bool)
        else json.dumps(default)
    )


def defaults() -> str:
    """The YAML file; its section about job scripts is written by hand."""
    page = YAML.read_text(encoding="utf-8")
    start, end = page.index("gpu-mpi:\n") + len("gpu-mpi:\n"), page.index(JOBSCRIPT)
    entries = []
    for option in OPTIONS.values():
        if option.config:
            others = [choice for choice in option.choices if choice not in option.help]
            text = f"{option.help} One of: {', '.join(option.choices)}." if others else option.help
            comment = textwrap.fill(
                text, 128, initial_indent="  # ", subsequent_indent="  # ", break_on_hyphens=False
            )
            entries.append(f"{comment}\n  {option.key}: {value(option.default)}\n")
    return page[:start] + "".join(entries) + page[end:]


def main() -> int:
    """Write the two files, or compare them."""
    made = {PAGE: page(), YAML: defaults()}
    if "--check" not in sys.argv[1:]:
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [
        path for path, text in made.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        print(f"{path} is not up to date: run python docs/make_options.py", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
