"""The figures: their schema, as contributing/json.md has it, and what they are made of."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dask_gpu_mpi.base.timeline import Step
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.view.report_data import LEFT_OUT, MOST_RANKS, ReportedJob, assemble, scrub, scrub_options
from dask_gpu_mpi.view.report_summary import headline
from support import ROOT
from support.mocks.inputs import gpu, one_host, plan
from support.mocks.snapshots import made_up

PAGE = ROOT / "contributing" / "json.md"


def job(**more: Any) -> ReportedJob:
    fixed: dict[str, Any] = {
        "plan": plan(one_host((gpu(0),))), "options": Options(), "began": 100.0, "ready": 103.0, "ended": 110.5,
        "how": "the script ended", "exit_code": 0, "hosts": {}, "steps": {},
    }  # fmt: skip
    return ReportedJob(**{**fixed, **more})


def keys(data: Any, prefix: str = "") -> set[str]:
    """The names of all fields, those within lists as ``list[].name``."""
    if isinstance(data, dict):
        return {f"{prefix}{key}" for key in data} | {
            name for key, value in data.items() for name in keys(value, f"{prefix}{key}.")
        }
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return keys(data[0], f"{prefix[:-1]}[].")
    return set()


def fields(table: str) -> Iterator[str]:
    """The names in its first column; ``.x`` replaces the last part of the name before it."""
    for cell in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE):
        parent = ""
        for name in re.findall(r"`([\w.\[\]]+)`", cell):
            parent = parent if name.startswith(".") else name.rpartition(".")[0]
            yield parent + name if name.startswith(".") else name


def test_it_is_json_and_every_field_is_documented() -> None:
    data = made_up(2, 2, 100, 5).report()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert {"Python", "dask", "distributed", "dask-gpu-mpi"} <= data["versions"].keys()
    assert sum(prefix["bytes"] for prefix in data["record"]["prefixes"]) == 500 * 2**20
    documented = set(fields(PAGE.read_text(encoding="utf-8").partition("## `check --json`")[0]))
    # by worker, by action, by package; and what has a schema of its own
    free = re.compile(
        r"(versions|record\.series\.workers|record\.prefixes\[\]\.seconds|record\.workers\[\]\.peaks|plan|options\[\]\.value)\..+"
    )
    found = {name for name in keys(data) if not free.fullmatch(name) and not name.startswith("plan.")}
    assert found - documented == set()
    assert documented - found == set()


def test_without_a_scheduler() -> None:
    options = Options(nthreads=2, explicit=frozenset({"nthreads"}))
    data = assemble(job(how="the cluster was lost: x", exit_code=1, options=options), None)
    assert data["record"] is None
    lines = data["summary"]["lines"]
    assert lines == {"busy": ["the scheduler has no record of the workers"], "where": [], "change": []}
    assert {option["name"]: option["value"] for option in data["options"] if option["set"]} == {"nthreads": 2}
    assert headline(data) == "1 worker on 1 host, 1 GPU, 1 rank; 10.5 s; the cluster was lost: x, exit code 1"


def test_times_are_after_the_begin_and_hosts_have_names() -> None:
    made = made_up(2, 1, 20, 3)
    data = made.report()
    record = data["record"]
    assert record["since"] == 0.0
    assert record["until"] == pytest.approx(made.now - data["job"]["began"], abs=0.01)
    assert {worker["host"] for worker in record["workers"]} == {"h1", "h2"}
    assert [worker["device_memory"] for worker in record["workers"]] == [[80 * 2**30]] * 2
    times = [
        *record["series"]["times"],
        *(each["at"] for each in record["events"] + record["warnings"]),
        *record["tasks"]["start"],
    ]
    assert all(-0.1 <= at <= record["until"] for at in times)
    assert len(record["tasks"]["start"]) == len(record["tasks"]["length"]) == len(record["tasks"]["lane"])


def test_secrets_are_left_out() -> None:
    options = Options(worker_options={"env": {"X": "S3CRET"}}, scheduler_address="tls://a:S3CRET@h:1")
    data = assemble(job(options=options, how="E: token=S3CRET", warnings=("password=S3CRET",)), None)
    assert "S3CRET" not in json.dumps(data)


@pytest.mark.parametrize("level", ["debug", "info"])
def test_texts_of_errors_are_left_out_unless_they_are_asked_for(level: str) -> None:
    made = made_up(1, 1, 5, 1)
    record = {**made.recorder.record(), "events": [(1.0, "process died", "0", "signal 9", "its words")]}
    data = assemble(job(how="ValueError: a\nb", options=Options(log_level=level)), record)
    (event,) = data["record"]["events"]
    asked = level == "debug"
    assert data["job"]["how"] == ("ValueError: a\nb" if asked else "ValueError")
    assert event["output"] == ("its words" if asked else LEFT_OUT)
    assert event["why"] == "signal 9"
    lost = "the cluster was lost: the scheduler's process ended"
    assert assemble(job(how=lost), None)["job"]["how"] == lost


def test_of_many_ranks_the_first_and_the_last_are_kept() -> None:
    count = MOST_RANKS + 100
    steps = {rank: [Step("rank", "start workers", 100.0, 101.0 + rank / 1_000)] for rank in range(count)}
    start = assemble(job(steps=steps, hosts=dict.fromkeys(range(count), "h1")), None)["start"]
    assert start["left_out"] == 100
    ranks = [step["rank"] for step in start["steps"]]
    assert ranks == [*range(MOST_RANKS // 2), *range(count - MOST_RANKS // 2, count)]


# -- no secret of the job or of the user's options is shown


PEM = "-----BEGIN PRIVATE KEY-----\nMIIabc\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        f"tls: {PEM} rest", "http://h:1/status?token=S3CRET", "the password=S3CRET, and more", '{"api_key": "S3CRET"}',
        "Authorization: Bearer S3CRET", "AWS_SECRET_ACCESS_KEY=S3CRET", "s3://user:S3CRET@host/x",
        "-----BEGIN RSA PRIVATE KEY-----\nS3CRET", "run --password S3CRET x", "PGPASS S3CRET", "password S3CRET of the database",
        "DB_PWD=S3CRET", "HF_TOKEN is S3CRET", "https://S3CRET@github.com/x", "ftp://me:p@S3CRET@host",
        'password = "correct S3CRET battery"', "Authorization: Token S3CRET", '"password": ["S3CRET"]',
        "DefaultEndpointsProtocol=https;AccountKey=S3CRET==;", "https://h/container?sv=2022&sig=S3CRET%3D&se=1",
        "Cookie: session=S3CRET", "by ghp_S3CRET0123456789abcdef", "hf_S3CRET0123456789abcdef", "eyJhbGciOiJIUzI1NiJ9.S3CRET.abc",
    ],
)  # fmt: skip
def test_what_looks_like_a_secret(text: str) -> None:
    found = scrub([text, {"x": (text,)}])
    assert "S3CRET" not in str(found)
    assert "MIIabc" not in str(found)
    assert LEFT_OUT in found[0]
    assert found[1]["x"] == [found[0]]


def test_what_was_left_out_stays_so() -> None:
    once = scrub("s.py --password S3CRET -n 2")
    assert once == f"s.py --password {LEFT_OUT} -n 2"
    assert scrub(once) == once


@pytest.mark.parametrize("text", ["", "a token ring", "tcp://host:8786", "key=1", "x = y", "monkey: 3"])
def test_what_does_not(text: str) -> None:
    assert scrub(text) == text


@pytest.mark.parametrize(
    "text", ["a" * 200_000, "token" * 40_000, "token " * 30_000, "a://" * 50_000, "pwd" + " " * 200_000]
)
def test_long_texts_take_no_time(text: str) -> None:
    began = time.process_time()
    scrub(text)
    assert time.process_time() - began < 5  # with repetitions without a bound it is minutes


def test_of_nested_options_only_numbers_are_shown() -> None:
    nested = {"size": "10 GiB", "n": 3, "list": ["a", {"b": "c"}], "api_key": 17}
    found = scrub_options({"worker_class": Options, "worker_options": nested, "plain": ["a", 2]})
    assert found["worker_class"] == "dask_gpu_mpi.options.model.Options"
    assert found["worker_options"] == {"size": LEFT_OUT, "n": 3, "list": LEFT_OUT, "api_key": LEFT_OUT}
    assert found["plain"] == ["a", 2]
