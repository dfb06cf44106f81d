"""Reads the settings of the program, the command line and Dask's configuration into `Options`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.options.convert import convert, show, suggest
from dask_gpu_mpi.options.dask_config import import_config
from dask_gpu_mpi.options.model import DASHBOARD_ADDRESS, OPTIONS, Option, Options, Source
from dask_gpu_mpi.options.rules import settle


def register_defaults() -> None:
    """Add the defaults of ``gpu-mpi.yaml`` to those of Dask's configuration, so that ``dask.config.refresh`` keeps them; once."""
    import dask.config
    import yaml

    if not any("gpu-mpi" in known for known in dask.config.defaults):
        text = Path(__file__).parents[1].joinpath("gpu-mpi.yaml").read_text(encoding="utf-8")
        dask.config.update_defaults(yaml.safe_load(text))


def resolve(given: Mapping[str, Any], *, source: Literal["keyword", "command line"]) -> Options:
    """Combine the user's settings: keyword or command line first (`given`), then environment, Dask's YAML, defaults.

    Raises an OptionError for the first option that is unknown, of the wrong type, or contradicts another.

    >>> options = resolve({"nthreads": "2", "protocol": "tcp"}, source="command line")
    >>> options.nthreads, options.protocol, options.security
    (2, 'tcp', False)
    """
    values: dict[str, Any] = {name: option.default for name, option in OPTIONS.items()}
    origins: dict[str, str] = {}
    explicit: dict[str, Any] = {}
    for name, value in given.items():  # first: its errors are nearest to the user
        if name not in OPTIONS:
            raise OptionError(f"{source}: unknown option {show(name)}{suggest(name, OPTIONS)}")
        explicit[name] = convert(OPTIONS[name], value, _origin(OPTIONS[name], source), source)
    for option, value, origin in _configured():
        converted = convert(option, value, origin, "configuration")
        if converted != option.default:
            values[option.name], origins[option.name] = converted, origin
    values |= explicit
    origins |= {name: _origin(OPTIONS[name], source) for name in explicit}
    warnings = settle(values, origins, frozenset(given), source)
    if values["interface"] == "auto":
        values["interface"] = None
    values["dashboard_address"] = values["dashboard_address"] or DASHBOARD_ADDRESS
    values["worker_options"] = values["worker_options"] or {}
    for name, option in OPTIONS.items():
        if option.kind == "path" and values[name] is not None:
            # The script may change to another directory. If this one was deleted, the code that uses the path reports that.
            with contextlib.suppress(OSError):
                values[name] = os.path.abspath(values[name])
    return Options(**values, warnings=warnings, explicit=frozenset(origins))


def _origin(option: Option, source: Source) -> str:
    if source == "command line" and option.flags:
        return f"command line: {option.flags[0]}"
    return f"{source} {option.name}"


def _configured() -> Iterator[tuple[Option, Any, str]]:
    """Each option that is set in Dask's configuration (files and environment), with its value and its place for messages."""
    for variable in os.environ:
        start, _, rest = variable.partition("DASK_GPU_MPI_")
        if not start and rest.lower() in OPTIONS:
            # Dask reads it as another key, which has no effect.
            raise OptionError(
                f"environment {variable}: no effect", fix=f"two underscores after MPI, DASK_GPU_MPI__{rest}"
            )
    config = import_config()
    register_defaults()
    section = config.get("gpu-mpi", {}) or {}
    if not isinstance(section, Mapping):
        raise OptionError(
            f"configuration gpu-mpi: invalid value {show(section)}", expected="names and values"
        )
    for key, value in section.items():
        if key == "jobscript":
            continue  # a separate section: cli/jobscript
        name = str(key).replace("-", "_").lower()
        variable = next((v for v in os.environ if v.upper() == f"DASK_GPU_MPI__{name.upper()}"), "")
        if variable:
            text = config.interpret_value(os.environ[variable])
            if isinstance(text, str) and isinstance(value, Mapping):
                # Dask merges mappings into existing values, so a mapping of a YAML file replaces a JSON text.
                value = text
            elif text != value:
                variable = ""  # the program has set it since, by dask.config.set
        origin = f"environment {variable}" if variable else f"configuration gpu-mpi.{key}"
        if name not in OPTIONS:
            spelling = {o.name: o.variable if variable else o.key for o in OPTIONS.values() if o.config}
            raise OptionError(f"{origin}: unknown option{suggest(name, spelling, spelling.__getitem__)}")
        if not OPTIONS[name].config:
            raise OptionError(
                f"{origin}: {name} can't be configured", fix="set it in the program or on the command line"
            )
        yield OPTIONS[name], value, origin
