"""Values of options, from keywords and from texts."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.options.convert import convert, show, suggest
from dask_gpu_mpi.options.model import Option
from dask_gpu_mpi.options.resolve import resolve
from support.jobs.processes import run_python
from support.mocks.inputs import keywords, refused

pytestmark = pytest.mark.usefixtures("unconfigured")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nthreads", 0), ("nthreads", "4"), ("nthreads", True), ("nthreads", 1.5), ("interface", ""), ("interface", "ib 0"),
        ("interface", 3), ("memory_limit", "much"), ("memory_limit", -1), ("memory_limit", True), ("memory_limit", [1]),
        ("memory_limit", float("nan")), ("dashboard", "yes"), ("dashboard", None), ("dashboard_address", "here"),
        ("dashboard_address", ":99999"), ("dashboard_address", "http://h:1"), ("protocol", "udp"), ("layout", "shard"),
        ("layout", None), ("worker_class", 3), ("worker_class", "a b"), ("worker_class", ""), ("worker_options", "{}"),
        ("worker_options", [1]), ("worker_options", {1: 2}), ("scheduler", 1), ("scheduler_port", 65536),
        ("scheduler_port", -1), ("scheduler_rank", -1),
        ("scheduler_rank", None), ("scheduler_file", 3), ("scheduler_file", "a\nb"), ("cpu_workers", -1),
        ("gpus_per_worker", 0), ("client_rank", -1), ("name", "a b"),
        ("name", "a/b"), ("name", "a\nb"), ("name", "../a"), ("startup_timeout", 0), ("startup_timeout", "soon"),
        ("startup_timeout", "-5s"), ("startup_timeout", float("inf")), ("startup_timeout", None), ("startup_timeout", ""),
        ("log_level", "loud"), ("security", "yes"), ("client_rank", 1.0), ("memory_limit", "none"), ("scheduler", "true"),
        ("dashboard", 1),
    ],
)  # fmt: skip
def test_wrong_values(name: str, value: Any) -> None:
    message = refused({name: value})
    assert message.startswith(f"keyword {name}: ")
    assert re.search(r": invalid value .* \((\w+; )?expected .+\)$", message)


@pytest.mark.parametrize(
    ("name", "value", "meaning"),
    [
        ("memory_limit", 0.5, 0.5), ("memory_limit", None, None), ("memory_limit", "4GB", "4GB"), ("memory_limit", 0, 0),
        ("local_directory", "", None), ("local_directory", Path("/x"), "/x"), ("protocol", "TLS", "tls"),
        ("startup_timeout", "5 minutes", 300.0), ("startup_timeout", "90s", 90.0), ("startup_timeout", ".5s", 0.5),
        ("dashboard_address", ":8787", ":8787"), ("dashboard_address", "9000", "127.0.0.1:9000"),
        ("dashboard_address", 9000, "127.0.0.1:9000"), ("dashboard_address", None, "127.0.0.1:8787"),
        ("dashboard_address", "[::1]:8787", "[::1]:8787"), ("worker_options", None, {}), ("log_level", "DEBUG", "debug"),
        ("name", "a.b-c_1", "a.b-c_1"), ("scheduler_port", 0, 0), ("scheduler_port", 65535, 65535), ("worker_class", dict, dict),
    ],
)  # fmt: skip
def test_right_values(name: str, value: Any, meaning: Any) -> None:
    assert getattr(keywords(**{name: value}), name) == meaning


@pytest.mark.parametrize(
    ("name", "text", "meaning"),
    [
        ("nthreads", "4", 4), ("dashboard", "false", False), ("startup_timeout", "2m", 120.0), ("memory_limit", "none", None),
        ("worker_options", '{"a": [1, null]}', {"a": [1, None]}), ("worker_class", "a.B", "a.B"), ("layout", "shared", "shared"),
    ],
)  # fmt: skip
def test_texts_of_the_command_line(name: str, text: str, meaning: Any) -> None:
    assert getattr(resolve({name: text}, source="command line"), name) == meaning


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1', "line 1, column 8, near the end"), ("", "column 1"),
        ('{"aaaaaaaaaaaaaaaa": bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb}', "line 1, column 22, near 'aaaaaaa\": bbbbbbbbbbbbbbbbbbbb')"),
        ('{"a": NaN}', "JSON, which has no NaN"),
        ("{a: 1}", "near '{a: 1}'"), ('{"b": 2, "a": 1, "a": 3}', "found the name 'a' twice"),
        ('{"a": 1,\n "b" 2}', "line 2, column 6"), ("[1]", "an object"), ("3", "an object"),
    ],
)  # fmt: skip
def test_malformed_json_says_where(text: str, said: str) -> None:
    message = refused({"worker_options": text}, "command line")
    assert message.startswith("command line: --worker-options: ")
    assert said in message


def test_a_relative_path_needs_a_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert keywords(report="r.json").report is not None
    gone.rmdir()
    assert keywords(report="/r.json", scheduler_file="~/f").report == "/r.json"
    message = refused({"report": "r.json"})
    assert (
        "invalid value 'r.json' (expected an absolute path, since the working directory was deleted)"
        in message
    )


def test_paths_that_are_not_ascii(tmp_path: Path) -> None:
    assert keywords(report="/tmp/ö ☃.json", log_directory="/l\udce4t").log_directory == "/l\udce4t"
    for hidden in ("/a\nb", "/a\x1b[1m", "/a\ud800"):
        assert "(expected a path, or None)" in refused({"report": hidden})
        assert "(expected a path)" in refused({"report": hidden}, "command line")  # it has no word for None
    code = "from dask_gpu_mpi.options.resolve import resolve; resolve({'report': '/\\xf6.json'}, source='keyword')"
    environ = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = run_python(code, env=os.environ | environ)
    assert "(expected a path in ascii, by which Python names files here, or PYTHONUTF8=1)" in done.stderr


@pytest.mark.parametrize(
    ("least", "most", "right", "wrong", "expected"),
    [
        (None, None, (-5, 0, 10**9), (), "an integer"),
        (1, None, (1, 10**9), (0, -1), "an integer of 1 or more"),
        (0, 3, (0, 3), (-1, 4), "an integer from 0 to 3"),
    ],
)
def test_bounds(
    least: int | None, most: int | None, right: tuple[int, ...], wrong: tuple[int, ...], expected: str
) -> None:
    option = Option("int", "x", 0, "", minimum=least, maximum=most)
    for value in right:
        assert convert(option, value, "x", "keyword") == value
        assert convert(option, f" {value:+} ", "x", "command line") == value
    for value in (*wrong, 1.0, None, True):
        with pytest.raises(OptionError, match=re.escape(f"expected {expected})")):
            convert(option, value, "x", "keyword")


@pytest.mark.parametrize(
    ("kind", "value", "meaning"),
    [
        ("bool", "YES", True), ("bool", "on", True), ("bool", 1, True), ("bool", " 0 ", False), ("bool", "off", False),
        ("str", 12, "12"), ("str", 1.5, "1.5"), ("memory", "4GB", "4GB"), ("memory", "None", None), ("memory", "null", None),
        ("memory", "AUTO", "auto"), ("listen", ":65535", ":65535"), ("listen", "h:0", "h:0"), ("duration", 2, 2.0),
        ("duration", timedelta(seconds=5), 5.0), ("object", [1], [1]), ("class", "a", "a"), ("path", "~", str(Path.home())),
    ],
)  # fmt: skip
def test_what_the_configuration_may_hold(kind: Any, value: Any, meaning: Any) -> None:
    assert convert(Option(kind, "x", 0, ""), value, "x", "configuration") == meaning


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bool", "maybe"), ("bool", 2), ("str", True), ("str", ""), ("str", "a\x00"), ("listen", ":65536"), ("listen", ":²"),
        ("listen", "a/b:1"), ("listen", True), ("listen", Path("80")), ("duration", True), ("duration", [1]),
        ("duration", "1 xyz"), ("memory", "lots"), ("int", "1_0"), ("int", "0x1"),
        ("class", dict), ("class", "1a"), ("path", b"x"), ("json", "null"),
    ],
)  # fmt: skip
def test_what_the_configuration_may_not_hold(kind: Any, value: Any) -> None:
    with pytest.raises(OptionError, match=r"^x: invalid value .*expected "):
        convert(Option(kind, "x", 0, ""), value, "x", "configuration")


class Strange:
    """A value of the user's whose conversions fail in ways of their own."""

    def __index__(self) -> int:
        raise LookupError("a defect")


def test_a_defect_of_a_conversion_is_no_invalid_value() -> None:
    with pytest.raises(LookupError, match="a defect"):
        keywords(nthreads=Strange())


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_endless_values_are_refused_where_they_come_in() -> None:
    assert "expected an integer below 2**63" in refused({"nthreads": 10**5000})
    assert "expected an integer below 2**63" in refused({"nthreads": "9" * 5000}, "command line")
    assert "expected an integer below 2**63" in refused({"memory_limit": 1 << 63})
    for large in ("1e30GB", f"{1 << 63}B"):
        assert "expected less than 2**63 bytes" in refused({"memory_limit": large})
    for small in ("64", 64, 1.5):  # gigabytes were meant, and a fraction
        assert "expected 1 MiB or more, with a unit such as '64GB'" in refused({"memory_limit": small})
    assert "at most 100 levels" in refused({"worker_options": {"a": nested(5000)}})
    for text in ('{"a":' + "[" * 500 + "]" * 500 + "}", '{"a":' * 50_000, '{"a": ' + "9" * 5000 + "}"):
        assert "expected " in refused({"worker_options": text}, "command line")
    assert keywords(worker_options={"a": nested(90)}).worker_options == {"a": nested(90)}
    circle: list[Any] = []
    circle.append(circle)
    assert keywords(worker_options={"a": circle}).worker_options == {"a": circle}


# -- values in messages, and the names that they propose


@pytest.mark.parametrize(
    ("value", "text"),
    [("a\n b", "'a\\n b'"), (3, "3"), ("x" * 78, "'" + "x" * 78 + "'"), ("x" * 79, "'" + "x" * 59 + " ... " + "x" * 14 + "'")],
)  # fmt: skip
def test_a_value_is_one_short_line(value: object, text: str) -> None:
    assert show(value) == text


def test_all_names_are_proposed_where_they_are_few() -> None:
    eight = [f"option{number}" for number in range(8)]
    assert suggest("?", eight) == f"; valid: {', '.join(eight)}"
    assert suggest("?", [*eight, "another"]) == ""
    assert suggest("?", []) == ""
    assert refused({"layout": "exlusive"}).endswith(
        "(expected one of shared, exclusive; did you mean 'exclusive'?)"
    )
    assert suggest("?", ["only"]) == "; valid: only"
    assert suggest("optoin1", eight, str.upper) == "; did you mean 'OPTION1'?"
    assert suggest("?", ["b", "a", "b"], str.upper) == "; valid: A, B"
