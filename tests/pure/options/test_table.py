from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import dask.config
import pytest
import yaml

import dask_gpu_mpi
from dask_gpu_mpi.cli.jobscript import JOB_OPTIONS
from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.network.interfaces import Interface, choose_addresses
from dask_gpu_mpi.options.table import OPTIONS, Options, parse_text, resolve

YAML = Path(dask_gpu_mpi.__file__).with_name("gpu-mpi.yaml")


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each test has Dask's configuration for itself, without what this machine's user has configured."""
    for name in [name for name in os.environ if name.startswith("DASK_GPU_MPI_")]:
        monkeypatch.delenv(name)
    with dask.config.set({"gpu-mpi": yaml.safe_load(YAML.read_text())["gpu-mpi"]}):
        yield


def keywords(**given: Any) -> Options:
    return resolve(given, source="keyword")


def refused(given: dict[str, Any], source: Any = "keyword") -> str:
    with pytest.raises(OptionError) as caught:
        resolve(given, source=source)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- the table


def test_yaml_and_table_agree() -> None:
    configured = yaml.safe_load(YAML.read_text())["gpu-mpi"]
    section = configured.pop("jobscript")
    assert section == {name.replace("_", "-"): None for name in JOB_OPTIONS} | {
        "modules": [],
        "directives": [],
    }
    assert configured == {option.key: option.default for option in OPTIONS.values() if option.config}


def test_every_key_of_the_yaml_is_explained() -> None:
    lines = YAML.read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        if match := re.match(r" +(?=[a-z])", line):
            assert before.startswith(f"{match[0]}# "), line


def test_the_default_interface_is_told_as_it_is_chosen() -> None:
    """As `choose_addresses` does: one host, then a fast network that all have, then the default route."""
    yaml_text = YAML.read_text()
    text = " ".join(yaml_text[: yaml_text.index("  interface:")].replace("#", "").split())
    order = "loopback if the job has one host, else a fast one that all hosts have, else that of the default route."
    assert text.endswith(order)
    assert OPTIONS["interface"].help.endswith(order)

    def job(hosts: int, *networks: str) -> tuple[str | None, set[str]]:
        own = {
            rank: [Interface("lo", "127.0.0.1", "127.0.0.0/8")]
            + [
                Interface(name, f"10.{number}.0.{rank + 1}", f"10.{number}.0.0/24", name == "eth0")
                for number, name in enumerate(networks)
            ]
            for rank in range(hosts)
        }
        name, addresses = choose_addresses([f"h{rank}" for rank in range(hosts)], own, [None] * hosts)
        return name, set(addresses.values())

    assert job(1, "eth0", "ib0") == (None, {"127.0.0.1"})
    assert job(2, "eth0", "ib0") == ("ib0", {"10.1.0.1", "10.1.0.2"})
    assert job(2, "aux0", "eth0") == ("eth0", {"10.1.0.1", "10.1.0.2"})


def test_options_have_a_field_for_every_option() -> None:
    fields = {field.name for field in dataclasses.fields(Options)} - {"warnings", "explicit"}
    assert fields == set(OPTIONS) - {"nanny", "exclusive_workers"}


def test_defaults_of_table_and_class_agree() -> None:
    assert resolve({}, source="keyword") == Options()


def test_command_line_names_are_unique_and_complete() -> None:
    flags = [flag for option in OPTIONS.values() for flag in "/".join(option.flags).split("/") if flag]
    assert len(flags) == len(set(flags))
    for option in OPTIONS.values():
        assert bool(option.flags) == option.cli
        assert option.help.endswith(".")


def test_dask_mpis_names_are_there() -> None:
    import inspect

    import dask_mpi
    from dask_mpi.cli import main

    names = set(inspect.signature(dask_mpi.initialize).parameters)
    names |= set(inspect.signature(dask_mpi.execute).parameters)
    names -= {"client_function", "client_args", "client_kwargs", "worker_name"}
    assert names <= set(OPTIONS)
    ours = {flag for option in OPTIONS.values() for flag in "/".join(option.flags).split("/")}
    theirs = {flag for parameter in main.params for flag in parameter.opts + parameter.secondary_opts}
    assert theirs - ours == {"scheduler_address"}  # an argument


# --- order


def test_keyword_beats_configuration_beats_default() -> None:
    with dask.config.set({"gpu-mpi.nthreads": 3, "gpu-mpi.layout": "exclusive"}):
        options = keywords(nthreads=2)
    assert (options.nthreads, options.layout, options.cpu_workers) == (2, "exclusive", 0)
    assert options.explicit == {"nthreads", "layout"}


def test_none_said_beats_configuration() -> None:
    with dask.config.set({"gpu-mpi.nthreads": 3}):
        assert keywords(nthreads=None).nthreads is None


def test_environment_beats_yaml(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("gpu-mpi: {layout: exclusive, nthreads: 2, worker-options: {a: 1}}")
    code = (
        "from dask_gpu_mpi.options.table import resolve\n"
        "options = resolve({'cpu_workers': 1}, source='keyword')\n"
        "print(options.layout, options.nthreads, options.cpu_workers, options.worker_options, options.dashboard, options.name)"
    )
    environ = dict(os.environ) | {
        "DASK_CONFIG": str(tmp_path),
        "DASK_GPU_MPI__NTHREADS": "5",
        "DASK_GPU_MPI__CPU_WORKERS": "4",
        "DASK_GPU_MPI__DASHBOARD": "no",
        "DASK_GPU_MPI__NAME": "12",
        "DASK_GPU_MPI__WORKER_OPTIONS": '{"rmm_async": true}',
        "PYTHONPATH": str(YAML.parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\n")[0] == "exclusive 5 1 {'rmm_async': True} False 12", done.stderr


def test_importing_the_module_loads_no_dask() -> None:
    code = "import sys, dask_gpu_mpi.options.table; print({'dask', 'mpi4py', 'yaml'} & set(sys.modules))"
    environ = dict(os.environ) | {"PYTHONPATH": str(YAML.parents[1])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "set()", done.stderr


def test_a_message_names_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPU_MPI__NTHREADS", "many")
    with dask.config.set({"gpu-mpi.nthreads": "many"}):
        assert refused({}).startswith(
            "environment DASK_GPU_MPI__NTHREADS: 'many' can't be used; needed: an integer of 1"
        )
    with dask.config.set({"gpu-mpi.nthreads": "lots"}):
        assert refused({}).startswith("configuration gpu-mpi.nthreads: 'lots'")


def test_one_underscore_in_a_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DASK_GPU_MPI_LAYOUT", "exclusive")
    assert "DASK_GPU_MPI__LAYOUT" in refused({})


# --- unknown names and wrong types


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("nthread", "nthreads"),
        ("memory-limit", "memory_limit"),
        ("local_dir", "local_directory"),
        ("Layout", "layout"),
    ],
)
def test_unknown_keyword_names_the_nearest(name: str, meant: str) -> None:
    message = refused({name: 1})
    assert "keyword" in message
    assert f"did you mean {meant!r}" in message


def test_unknown_configuration_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    with dask.config.set({"gpu-mpi.memory-limits": 1}):
        assert (
            refused({}) == "configuration gpu-mpi.memory-limits: unknown option; did you mean 'memory-limit'?"
        )
    monkeypatch.setenv("DASK_GPU_MPI__LAYUOT", "shared")
    with dask.config.set({"gpu-mpi.layuot": "shared"}):
        assert (
            "environment DASK_GPU_MPI__LAYUOT: unknown option; did you mean 'DASK_GPU_MPI__LAYOUT'?"
            in refused({})
        )


@pytest.mark.parametrize("name", ["exit", "comm", "nanny", "exclusive-workers"])
def test_what_can_not_be_configured(name: str) -> None:
    with dask.config.set({f"gpu-mpi.{name}": True}):
        assert "can't be configured" in refused({})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nthreads", 0), ("nthreads", "4"), ("nthreads", True), ("nthreads", 1.5), ("interface", ""), ("interface", "ib 0"),
        ("interface", 3), ("memory_limit", "much"), ("memory_limit", -1), ("memory_limit", True), ("memory_limit", [1]),
        ("memory_limit", float("nan")), ("dashboard", "yes"), ("dashboard", None), ("dashboard_address", "here"),
        ("dashboard_address", ":99999"), ("dashboard_address", "http://h:1"), ("protocol", "udp"), ("layout", "shard"),
        ("layout", None), ("worker_class", 3), ("worker_class", "a b"), ("worker_class", ""), ("worker_options", "{}"),
        ("worker_options", [1]), ("worker_options", {1: 2}), ("scheduler", 1), ("scheduler_port", 65536), ("scheduler_rank", -1),
        ("scheduler_rank", None), ("scheduler_file", 3), ("scheduler_file", "a\nb"), ("cpu_workers", -1), ("name", "a b"),
        ("name", "a/b"), ("name", "a\nb"), ("name", "../a"), ("startup_timeout", 0), ("startup_timeout", "soon"),
        ("startup_timeout", "-5s"), ("startup_timeout", float("inf")), ("startup_timeout", None), ("startup_timeout", ""),
        ("log_level", "loud"), ("security", "yes"), ("client_rank", 1.0),
    ],
)  # fmt: skip
def test_wrong_values(name: str, value: Any) -> None:
    message = refused({name: value})
    assert message.startswith(f"keyword {name}: ")
    assert "needed: " in message


def test_a_choice_names_choices_and_the_nearest() -> None:
    assert refused({"layout": "exlusive"}).endswith(
        "needed: one of shared, exclusive (did you mean 'exclusive'?)"
    )


@pytest.mark.parametrize(
    ("name", "value", "meaning"),
    [
        ("memory_limit", 0.5, 0.5), ("memory_limit", None, None), ("memory_limit", "4GB", "4GB"), ("memory_limit", 0, 0),
        ("local_directory", "", None), ("local_directory", Path("/x"), "/x"), ("protocol", "TLS", "tls"),
        ("startup_timeout", "5 minutes", 300.0), ("startup_timeout", "90s", 90.0), ("startup_timeout", ".5s", 0.5),
        ("dashboard_address", ":8787", ":8787"), ("dashboard_address", "9000", "127.0.0.1:9000"),
        ("dashboard_address", 9000, "127.0.0.1:9000"), ("dashboard_address", None, "127.0.0.1:8787"),
        ("dashboard_address", "[::1]:8787", "[::1]:8787"), ("worker_options", None, {}), ("log_level", "DEBUG", "debug"),
        ("name", "a.b-c_1", "a.b-c_1"), ("scheduler_port", 0, 0), ("worker_class", dict, dict),
    ],
)  # fmt: skip
def test_right_values(name: str, value: Any, meaning: Any) -> None:
    assert getattr(keywords(**{name: value}), name) == meaning


def test_numpy_numbers_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    options = keywords(nthreads=numpy.int64(2), memory_limit=numpy.float64(0.5))
    assert (options.nthreads, options.memory_limit) == (2, 0.5)


# --- texts


@pytest.mark.parametrize(
    ("name", "text", "meaning"),
    [
        ("nthreads", "4", 4), ("dashboard", "false", False), ("startup_timeout", "2m", 120.0), ("memory_limit", "none", None),
        ("worker_options", '{"a": [1, null]}', {"a": [1, None]}), ("worker_class", "a.B", "a.B"), ("layout", "shared", "shared"),
    ],
)  # fmt: skip
def test_parse_text(name: str, text: str, meaning: Any) -> None:
    assert parse_text(OPTIONS[name], text) == meaning


def test_a_message_names_the_flag() -> None:
    with pytest.raises(
        OptionError, match=r"^command line: --nthreads: 'x' can't be used; needed: an integer of 1 or more"
    ):
        parse_text(OPTIONS["nthreads"], "x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1', "line 1, column 8, near the end"), ("{a: 1}", "line 1, column 2"), ("", "column 1"),
        ('{"a": 1,\n "b" 2}', "line 2, column 6"), ('{"a": 1, "a": 2}', "twice"), ("[1]", "an object"), ("3", "an object"),
    ],
)  # fmt: skip
def test_malformed_json_says_where(text: str, said: str) -> None:
    message = refused({"worker_options": text}, "command line")
    assert message.startswith("command line: --worker-options: ")
    assert said in message


def test_a_hostile_value_stays_one_short_line() -> None:
    message = refused({"name": "x\n" * 5000})
    assert len(message) < 300


# --- what belongs together


@pytest.mark.parametrize(
    ("given", "protocol", "security"),
    [
        ({}, "tls", True), ({"security": True}, "tls", True), ({"security": False}, "tcp", False),
        ({"protocol": "tcp"}, "tcp", False), ({"protocol": "tls"}, "tls", True), ({"protocol": "ucx"}, "ucx", False),
        ({"protocol": "ucx", "security": False}, "ucx", False),
        ({"scheduler": False, "scheduler_address": "tcp://h:1"}, "tcp", False),
        ({"scheduler": False, "scheduler_address": "h:1"}, "tls", True),
    ],
)  # fmt: skip
def test_protocol_and_security(given: dict[str, Any], protocol: str, security: bool) -> None:
    options = keywords(**given)
    assert (options.protocol, options.security) == (protocol, security)
    # an open transport that nobody asked for by name is told
    open_unasked = protocol == "ucx" and "security" not in given
    assert any("ucx" in warning for warning in options.warnings) == open_unasked


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"worker_options": {"enable_nvlink": True}}, ("enable_nvlink", "'tls'", "--protocol ucx")),
        ({"protocol": "tcp", "worker_options": {"enable_infiniband": True, "enable_rdmacm": True}},
         ("enable_infiniband, enable_rdmacm", "'tcp'")),
        ({"protocol": "ucx", "worker_options": {"enable_rdmacm": True}}, ("enable_rdmacm", "enable_infiniband")),
        ({"protocol": "ucx", "worker_options": {"enable_nvlink": True, "enable_rdmacm": True}},
         ("enable_rdmacm", "enable_infiniband")),
        ({"protocol": "ucx", "worker_options": {"enable_infiniband": False, "enable_rdmacm": True}},
         ("enable_rdmacm", "enable_infiniband")),
        ({"scheduler": False, "scheduler_address": "tls://h:1", "worker_options": {"enable_nvlink": True}},
         ("enable_nvlink", "'tls'")),
        ({"worker_options": {"enable_nvlink": False, "rmm_pool_size": 0.5}}, ()),
        ({"protocol": "ucx", "worker_options": {"enable_nvlink": True}}, ()),
        ({"protocol": "ucx", "worker_options": {"enable_infiniband": True, "enable_rdmacm": True}}, ()),
        ({"protocol": "ucx", "worker_options": {"enable_nvlink": False, "enable_rdmacm": True}}, ()),
        # its scheduler file says which protocol it is
        ({"scheduler": False, "scheduler_file": "s.json", "worker_options": {"enable_nvlink": True}}, ()),
    ],
)  # fmt: skip
def test_switches_of_ucx_without_effect_are_told(given: dict[str, Any], words: tuple[str, ...]) -> None:
    found = [warning for warning in keywords(**given).warnings if "enable_" in warning]
    assert len(found) == bool(words)
    for word in words:
        assert word in found[0]
        assert "worker_options" in found[0]


def test_the_interface_auto_is_none() -> None:
    assert keywords(interface="auto").interface is None
    assert resolve({"interface": "auto"}, source="command line").interface is None
    with dask.config.set({"gpu-mpi.interface": "ib0"}):
        assert keywords().interface == "ib0"
        assert keywords(interface="auto").interface is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"protocol": "ucx", "security": True}, "cannot encrypt"), ({"protocol": "tls", "security": False}, "is encrypted"),
        ({"protocol": "tcp", "security": True}, "is not encrypted"), ({"scheduler": False}, "none is named"),
        ({"scheduler_address": "tcp://h:1"}, "--no-scheduler"), ({"exclusive_workers": True, "layout": "shared"}, "'exclusive'"),
        ({"exclusive_workers": False, "layout": "exclusive"}, "'shared'"),
        ({"scheduler": False, "scheduler_address": "udp://h:1"}, "'udp'"),
        ({"scheduler": False, "scheduler_address": "tcp://h:1", "protocol": "tls"}, "not the protocol"),
        ({"scheduler": False, "scheduler_address": "tcp://h:1", "security": True}, "is not encrypted"),
    ],
)  # fmt: skip
def test_contradictions(given: dict[str, Any], said: str) -> None:
    assert said in refused(given)


def test_a_keyword_wins_a_contradiction_with_the_configuration() -> None:
    with dask.config.set({"gpu-mpi.protocol": "tcp", "gpu-mpi.layout": "exclusive"}):
        options = keywords(security=True, exclusive_workers=False)
    assert (options.protocol, options.layout) == ("tls", "shared")
    with dask.config.set({"gpu-mpi.security": True}):
        assert keywords(protocol="tcp").security is False
    with dask.config.set({"gpu-mpi.scheduler-address": "tcp://h:1"}):
        assert keywords(scheduler=True).scheduler_address is None


def test_encryption_that_was_asked_for_is_never_dropped_for_ucx() -> None:
    with dask.config.set({"gpu-mpi.security": True}):
        assert "configuration gpu-mpi.security" in refused({"protocol": "ucx"})


def test_exclusive_workers_is_a_layout() -> None:
    assert keywords(exclusive_workers=True).layout == "exclusive"
    assert keywords(exclusive_workers=False, layout="shared").layout == "shared"
    both = keywords(exclusive_workers=True, scheduler_rank=2, client_rank=2)
    assert (both.scheduler_rank, both.client_rank) == (2, 2)


@pytest.mark.parametrize(("nanny", "cls"), [(True, "distributed.Nanny"), (False, "distributed.Worker")])
def test_nanny_is_deprecated_and_works(nanny: bool, cls: str) -> None:
    with pytest.warns(DeprecationWarning, match=cls) as caught:
        options = keywords(nanny=nanny)
    assert caught[0].filename == __file__
    assert (options.worker_class, options.worker_kind, options.warnings) == (cls, "cpu", ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "deprecated" in resolve({"nanny": nanny}, source="command line").warnings[0]
        assert keywords(nanny=None).worker_class == "auto"


def test_a_class_beats_nanny() -> None:
    with pytest.warns(DeprecationWarning, match="ignored"):
        assert (
            keywords(nanny=False, worker_class="dask_cuda.CUDAWorker").worker_class == "dask_cuda.CUDAWorker"
        )


class CUDAWorker: ...


class Mine(CUDAWorker): ...


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        ("auto", "auto"), ("dask_cuda.CUDAWorker", "gpu"), ("CUDAWorker", "gpu"), (Mine, "gpu"), ("distributed.Nanny", "cpu"),
        ("distributed.worker.Worker", "cpu"), ("dask.distributed.Worker", "cpu"), ("mine.Worker", "auto"), (dict, "auto"),
    ],
)  # fmt: skip
def test_worker_kind(cls: Any, kind: str) -> None:
    assert keywords(worker_class=cls).worker_kind == kind


def test_worker_kind_of_dasks_own_classes() -> None:
    import distributed

    assert keywords(worker_class=distributed.Nanny).worker_kind == "cpu"
    assert keywords(worker_class=type("Mine", (distributed.Nanny,), {})).worker_kind == "auto"


def test_a_class_object_is_for_programs_only() -> None:
    with dask.config.set({"gpu-mpi.worker-class": dict}):
        assert "dotted path" in refused({})


def test_a_relative_path_needs_a_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert keywords(timeline="t.json").timeline is not None
    gone.rmdir()
    assert keywords(timeline="/t.json", scheduler_file="~/f").timeline == "/t.json"
    message = refused({"timeline": "t.json"})
    assert (
        "'t.json' can't be used; needed: an absolute path, since the working directory was deleted" in message
    )


def test_paths_that_are_not_ascii(tmp_path: Path) -> None:
    assert keywords(timeline="/tmp/ö ☃", log_directory="/l\udce4t").log_directory == "/l\udce4t"
    for hidden in ("/a\nb", "/a\x1b[1m", "/a\ud800"):
        assert "can't be used; needed: a path" in refused({"timeline": hidden})
    code = "from dask_gpu_mpi.options.table import resolve; resolve({'timeline': '/\\xf6'}, source='keyword')"
    environ = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, timeout=60
    )
    assert (
        "can't be used; needed: a path in ascii, by which Python names files here, or PYTHONUTF8=1"
        in done.stderr
    )
