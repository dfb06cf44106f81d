"""Writes docs/options.md, and in dask_gpu_mpi gpu-mpi.yaml and its schema, from the table of options: they can't differ from it.

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

from dask_gpu_mpi.cli.options import TOPICS
from dask_gpu_mpi.options.model import OPTIONS, Option

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "options.md"
YAML = ROOT / "dask_gpu_mpi" / "gpu-mpi.yaml"
SCHEMA = ROOT / "dask_gpu_mpi" / "gpu-mpi-schema.json"
#: The types of values in YAML, by the kind of an option; others are texts.
TYPES = {
    "int": ["integer"],
    "bool": ["boolean"],
    "json": ["object"],
    "duration": ["number", "string"],
    "memory": ["number", "string"],
    "listen": ["string", "integer"],
}
#: The first line of what the YAML file has about job scripts.
JOBSCRIPT = "  # Defaults of `python -m dask_gpu_mpi jobscript`"
HEAD = """\
<!-- made by docs/make_options.py from dask_gpu_mpi/options/model.py: do not edit -->
# Options

These are the options of a cluster: of `run`, `launch`, `check`, `initialize()` and `execute()`.
Others: [Command line](cli.md), [variables of job scripts](batch.md#variables-of-a-job).

An option can be set in several places. The first one in this table has priority:

| place | spelling |
|---|---|
| command line, or a keyword of `initialize()` (`mpirun python script.py`) | `--scheduler-port 9000`, `scheduler_port=9000` |
| environment: two underscores after `MPI` | `DASK_GPU_MPI__SCHEDULER_PORT=9000` |
| Dask's YAML files: below `gpu-mpi:` | `scheduler-port: 9000` |

Times are in seconds, or a text such as `5m`. Sizes are in bytes, or a text such as `4GB`.
In `execute()` `name` may also be `worker_name`.
"""
TAIL = """
## Variables of Dask, MPI and UCX

| variable | meaning |
|---|---|
| `CUDA_VISIBLE_DEVICES` | [GPUs](gpus.md#who-gets-which-gpu) that a rank may use |
| `DASK_*`, `DASK_CONFIG` | Dask's configuration, in the workers too |
| `UCX_*`, `RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY` | UCX's settings, and [which UCX](transports.md) |
| `PYTHONDONTWRITEBYTECODE` | do not set it: every process may compile what it imports |
"""


def entry(option: Option) -> str:
    """How the option is spelled, its default, what it means, and its bounds."""
    facts = [" or ".join(f"`{choice}`" for choice in option.choices) or option.kind]
    if option.default is not None:
        facts.append(f"default `{option.default}`")
    if option.cli and not option.config:
        facts.append("not configurable")
    if option.minimum is not None:
        facts.append(f"at least {option.minimum}")
    if option.maximum is not None:
        facts.append(f"at most {option.maximum}")
    return f"\n### `{option.flags[0] if option.cli else option.name}`\n\n{', '.join(facts)}. {option.help}\n"


def page() -> str:
    """The whole page: the topics of ``--help-all``, then what is a keyword only."""
    names = [name for topic in TOPICS.values() for name in topic]
    topics = {**TOPICS, "In programs only": [name for name in OPTIONS if name not in names]}
    text = HEAD
    for topic, members in topics.items():
        entries = "".join(entry(OPTIONS[name]) for name in members if name in OPTIONS)
        text += f"\n## {topic}\n{entries}" if entries else ""
    return text + TAIL


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


def setting(option: Option) -> dict[str, object]:
    """The schema of an option's values."""
    types = [*TYPES.get(option.kind, ["string"]), *(["null"] if option.allows_none else [])]
    facts = {
        "description": option.help,
        "type": types,
        "minimum": option.minimum,
        "maximum": option.maximum,
        "pattern": f"^(?:{option.pattern})$" if option.pattern else None,
        "enum": [*option.choices, *([None] if option.allows_none else [])] if option.choices else None,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}


def schema() -> str:
    """The JSON schema of the section ``gpu-mpi``, for editors. A key may have underscores as well."""
    options = [option for option in OPTIONS.values() if option.config]
    section = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{option.name: {"$ref": f"#/properties/gpu-mpi/properties/{option.key}"} for option in options},
            **{option.key: setting(option) for option in options},
            "jobscript": {"type": ["object", "null"]},
        },
    }
    whole = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"gpu-mpi": section},
    }
    return json.dumps(whole, indent=1) + "\n"


def main() -> int:
    """Write the files, or compare them."""
    made = {PAGE: page(), YAML: defaults(), SCHEMA: schema()}
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
