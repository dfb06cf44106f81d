"""Options from keywords, environment and configuration: which wins, what is refused, and which belong together."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask.config
import pytest

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.options.resolve import register_defaults, resolve
from support.mocks.inputs import keywords, refused

pytestmark = pytest.mark.usefixtures("unconfigured")


def test_keyword_beats_configuration_beats_default() -> None:
    with dask.config.set({"gpu-mpi.nthreads": 3, "gpu-mpi.layout": "exclusive"}):
        options = keywords(nthreads=2)
        assert keywords(nthreads=None).nthreads is None
    assert (options.nthreads, options.layout, options.cpu_workers) == (2, "exclusive", 0)
    assert options.explicit == {"nthreads", "layout"}


@pytest.mark.parametrize(
    ("variables", "section", "said"),
    [
        ({"DASK_GPU_MPI__NTHREADS": "many"}, {"nthreads": "many"},
         "environment DASK_GPU_MPI__NTHREADS: invalid value 'many' (expected an integer of 1"),
        ({"DASK_GPU_MPI__NTHREADS": "many"}, {"nthreads": "lots"}, "configuration gpu-mpi.nthreads: invalid value 'lots'"),
        # one underscore
        ({"DASK_GPU_MPI_LAYOUT": "exclusive"}, {}, "two underscores after MPI, DASK_GPU_MPI__LAYOUT"),
        ({}, {"memory-limits": 1}, "configuration gpu-mpi.memory-limits: unknown option; did you mean 'memory-limit'?"),
        ({"DASK_GPU_MPI__LAYUOT": "shared"}, {"layuot": "shared"},
         "environment DASK_GPU_MPI__LAYUOT: unknown option; did you mean 'DASK_GPU_MPI__LAYOUT'?"),
        *(({}, {name: True}, "can't be configured") for name in ("exit", "comm", "nanny", "exclusive-workers")),
        ({}, "shared", "configuration gpu-mpi: invalid value "),
        ({}, [1], "configuration gpu-mpi: invalid value "),
    ],
)  # fmt: skip
def test_what_can_not_be_configured(
    variables: dict[str, str], section: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with dask.config.set({"gpu-mpi": section}):
        assert said in refused({})


@pytest.mark.parametrize(
    ("value", "is_valid"),
    [(0.7, True), (1.5, True), (False, True), (None, False), ("lots", False), ([1], False)],
)
def test_thresholds_of_memory(value: Any, is_valid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with dask.config.set({"distributed.worker.memory.pause": value}):
        if is_valid:
            keywords()
        else:
            assert refused({}).startswith(
                f"configuration distributed.worker.memory.pause: invalid value {value!r} ("
            )
            monkeypatch.setenv("DASK_DISTRIBUTED__WORKER__MEMORY__PAUSE", str(value))
            assert refused({}).startswith(
                "environment DASK_DISTRIBUTED__WORKER__MEMORY__PAUSE: invalid value "
            )


def test_a_configuration_of_the_user_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path, is_told in {tmp_path / "none.yaml": True, tmp_path: False, "/proc/1/fd/999999": False}.items():
        monkeypatch.setenv("DASK_CONFIG", str(path))
        said = [
            f"environment DASK_CONFIG: Dask ignores {str(path)!r}, which does not exist. Fix: correct or unset it"
        ]
        assert [*map(str, keywords().warnings)] == (said if is_told else [])


@pytest.mark.parametrize(
    ("written", "key"), [({"gpu-mpi": 3}, "gpu-mpi"), ({"gpu-mpi": {"jobscript": [1]}}, "gpu-mpi.jobscript")]
)
def test_what_is_no_section_is_not_replaced_by_the_defaults(written: dict[str, Any], key: str) -> None:
    config = SimpleNamespace(refresh=lambda config, **_: None, get=partial(dask.config.get, config=written))
    with pytest.raises(OptionError, match=f"configuration {key}: invalid value"):
        register_defaults(config)


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = keywords(log_directory="logs", report="/r.json")
    assert (options.log_directory, options.report) == (f"{tmp_path}/logs", "/r.json")


def test_a_default_in_the_configuration_is_not_explicit() -> None:
    with dask.config.set({"gpu-mpi.layout": "shared", "gpu-mpi.startup-timeout": "5m"}):
        assert keywords().explicit == frozenset()
    assert keywords(layout="shared", interface="auto").explicit == {"layout", "interface"}


# -- options that belong together, and those that exclude each other


@pytest.mark.parametrize(
    ("given", "protocol", "ucx"),
    [
        ({}, "tls", "auto"), ({"protocol": "auto"}, "tls", "auto"), ({"protocol": "ucx"}, "tls", "yes"),
        # what is asked to be encrypted is, all of it
        ({"security": True}, "tls", "no"), ({"protocol": "auto", "security": True}, "tls", "no"),
        ({"protocol": "tls"}, "tls", "no"),
        ({"security": False}, "tcp", "no"), ({"protocol": "auto", "security": False}, "tcp", "no"),
        ({"protocol": "tcp"}, "tcp", "no"),
        ({"scheduler": False, "scheduler_address": "tcp://h:1"}, "tcp", "no"),
        ({"scheduler": False, "scheduler_address": "tls://h:1"}, "tls", "auto"),
        ({"scheduler": False, "scheduler_address": "tls://h:1", "protocol": "auto"}, "tls", "auto"),
        ({"scheduler": False, "scheduler_address": "tls://h:1", "protocol": "tls"}, "tls", "no"),
        ({"scheduler": False, "scheduler_address": "tls://h:1", "protocol": "ucx"}, "tls", "yes"),
        ({"scheduler": False, "scheduler_address": "h:1"}, "tls", "auto"),
        ({"scheduler": False, "scheduler_address": "h:1", "protocol": "tcp"}, "tcp", "no"),
        ({"scheduler": False, "scheduler_address": "tcp://[fe80::1%eth0]:8786"}, "tcp", "no"),
    ],
)  # fmt: skip
def test_protocol_and_security(given: dict[str, Any], protocol: str, ucx: str) -> None:
    options = keywords(**given)
    assert (options.protocol, options.security, options.worker_ucx) == (protocol, protocol == "tls", ucx)


def test_encryption_that_is_configured_is_not_dropped_for_an_address() -> None:
    attach = {"scheduler": False, "scheduler_address": "tcp://h:1"}
    with dask.config.set({"gpu-mpi.security": True}):
        assert "is not encrypted, but configuration gpu-mpi.security requests encryption" in refused(attach)
        # who says so in the program joins all the same
        assert keywords(**attach, security=False).security is False
    with dask.config.set({"gpu-mpi.protocol": "tls"}):
        (warning,) = keywords(**attach).warnings
        assert "no effect" in str(warning)
        assert keywords(**attach, security=False).warnings == ()


def test_auto_is_as_if_nothing_were_set() -> None:
    assert replace(keywords(protocol="auto"), given=frozenset()) == keywords()
    with dask.config.set({"gpu-mpi.protocol": "tcp"}):
        assert (keywords(protocol="auto").protocol, keywords(protocol="auto").worker_ucx) == ("tls", "auto")
    with dask.config.set({"gpu-mpi.interface": "ib0"}):
        assert (keywords().interface, keywords(interface="auto").interface) == ("ib0", None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"protocol": "tls", "worker_options": {"enable_nvlink": True}}, ("enable_nvlink", "'tls'", "--protocol ucx")),
        ({"worker_options": {"enable_nvlink": True}}, ()),
        ({"protocol": "tcp", "worker_options": {"enable_infiniband": True, "enable_nvlink": True}},
         ("enable_infiniband, enable_nvlink", "'tcp'")),
        ({"scheduler": False, "scheduler_address": "tls://h:1", "protocol": "tls", "worker_options": {"enable_nvlink": True}},
         ("enable_nvlink", "'tls'")),
        ({"worker_options": {"enable_nvlink": False, "rmm_pool_size": 0.5}}, ()),
        ({"protocol": "ucx", "worker_options": {"enable_nvlink": True}}, ()),
        # its scheduler file says which protocol it is
        ({"scheduler": False, "scheduler_file": "s.json", "worker_options": {"enable_nvlink": True}}, ()),
    ],
)  # fmt: skip
def test_switches_of_ucx_without_effect_are_told(given: dict[str, Any], words: tuple[str, ...]) -> None:
    found = [warning for warning in map(str, keywords(**given).warnings) if "enable_" in warning]
    assert len(found) == bool(words)
    for word in words:
        assert word in found[0]
        assert "worker_options" in found[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"protocol": "ucx", "security": True}, "can't encrypt"),
        ({"protocol": "ucx", "security": False}, "'ucx' needs TLS"), ({"protocol": "ucx", "security": False}, "--protocol tcp"),
        ({"protocol": "tls", "security": False}, "is encrypted"),
        ({"protocol": "tcp", "security": True}, "is not encrypted"), ({"scheduler": False}, "no running one is set"),
        ({"scheduler_address": "tcp://h:1"}, "--no-scheduler"), ({"exclusive_workers": True, "layout": "shared"}, "'exclusive'"),
        ({"exclusive_workers": False, "layout": "exclusive"}, "'shared'"),
        ({"scheduler": False, "scheduler_address": "udp://h:1"}, "'udp'"),
        *(({"tolerate_lost_ranks": 1, **other}, "expected the scheduler and the script on rank 0")
          for other in ({"layout": "exclusive"}, {"scheduler_rank": 1}, {"client_rank": 1},
                        {"scheduler": False, "scheduler_file": "f"})),
        *(({"scheduler": False, "scheduler_address": address}, "expected an address with its port")
          for address in ("tcp://127.0.0.1", "h", "tcp://h:", "tls://h:x", "tcp://:1", "[::1]", "::1", "h:123456", "tcp://h:1/")),
        ({"scheduler": False, "scheduler_address": "tcp://h:1", "protocol": "tls"}, "Fix: protocol='tcp', or none"),
        ({"scheduler": False, "scheduler_address": "tls://h:1", "protocol": "ucx", "security": False},
         "'ucx' needs TLS"),
        ({"scheduler": False, "scheduler_address": "tcp://h:1", "protocol": "ucx"},
         "'ucx' is not the protocol of the scheduler at 'tcp://h:1'"),
        ({"scheduler": False, "scheduler_address": "ucx://h:1"}, "unsupported protocol 'ucx' (expected one of tls, tcp)"),
        ({"scheduler": False, "scheduler_address": "tcp://h:1", "security": True}, "is not encrypted"),
    ],
)  # fmt: skip
def test_contradictions(given: dict[str, Any], said: str) -> None:
    assert said in refused(given)


def test_a_program_that_continues_on_all_ranks_can_lose_none() -> None:
    for continues in (True, False):
        with pytest.raises(OptionError, match="with exit=False") if continues else contextlib.nullcontext():
            resolve({"tolerate_lost_ranks": 1}, source="keyword", continues=continues)


def test_a_keyword_wins_a_contradiction_with_the_configuration() -> None:
    with dask.config.set({"gpu-mpi.protocol": "tcp", "gpu-mpi.layout": "exclusive"}):
        options = keywords(security=True, exclusive_workers=False)
    assert keywords(exclusive_workers=True).layout == "exclusive"
    assert (options.protocol, options.layout) == ("tls", "shared")
    with dask.config.set({"gpu-mpi.security": True}):
        assert keywords(protocol="tcp").security is False
    with dask.config.set({"gpu-mpi.protocol": "tls"}):
        assert keywords(security=False).protocol == "tcp"
        assert keywords(scheduler=False, scheduler_address="tcp://h:1").protocol == "tcp"
    with dask.config.set({"gpu-mpi.protocol": "tcp", "gpu-mpi.security": True}):
        assert "configuration gpu-mpi.security is True" in refused({})
    with dask.config.set({"gpu-mpi.scheduler-address": "tcp://h:1"}):
        assert keywords(scheduler=True).scheduler_address is None


@pytest.mark.parametrize(("nanny", "cls"), [(True, "distributed.Nanny"), (False, "distributed.Worker")])
def test_nanny_is_deprecated_and_works(nanny: bool, cls: str) -> None:
    options = keywords(nanny=nanny)
    assert (options.worker_class, options.worker_kind) == (cls, "cpu")
    assert [*map(str, options.warnings)] == [f"keyword nanny: deprecated. Fix: worker_class='{cls}'"]
    (warning,) = map(str, resolve({"nanny": nanny}, source="command line").warnings)
    assert warning == f"command line: --nanny/--no-nanny: deprecated. Fix: --worker-class {cls}"
    beaten = keywords(nanny=nanny, worker_class="dask_cuda.CUDAWorker")
    assert beaten.worker_class == "dask_cuda.CUDAWorker"
    assert "ignored" in str(beaten.warnings[0])


def test_a_scheduler_beside_an_address() -> None:
    with dask.config.set({"gpu-mpi.scheduler-address": "tcp://h:1"}):
        assert "this job starts its own" in refused({})
        assert "this job starts its own" in refused({"scheduler": True, "scheduler_address": "tcp://h:2"})
        assert keywords(scheduler=False).scheduler_address == "tcp://h:1"
    # a scheduler file is written as well as read
    assert keywords(scheduler_file="/s.json").scheduler_file == "/s.json"
    assert keywords(scheduler=False, scheduler_file="/s.json").scheduler is False


@pytest.mark.parametrize("address", [":8787", "0.0.0.0:8787", "[::]:8787", "10.0.0.1:8787", "node1:8787"])
def test_a_dashboard_on_the_network_is_warned_of(address: str) -> None:
    def warnings(**given: Any) -> list[str]:
        options = resolve({"dashboard_address": address, **given}, source="command line")
        return [str(warning) for warning in options.warnings]

    assert warnings() == [
        f"command line: --dashboard-address: {address!r} opens the dashboard to the network by plain HTTP: the token "
        "that opens it crosses that in clear. Fix: leave the option out, and use a tunnel (ssh -N -L 8787:127.0.0.1:8787 NODE)"
    ]
    (warning,) = warnings(security="false")
    assert "by plain HTTP: everyone there can read it. Fix: " in warning
    assert warnings(dashboard="false") == []
    assert warnings(scheduler="false", scheduler_address="tcp://h:1") == []


@pytest.mark.parametrize("address", ["127.0.0.1:9000", 9000, "[::1]:8787", "localhost:8787"])
def test_a_dashboard_on_the_node_alone_is_not(address: Any) -> None:
    assert keywords(dashboard_address=address).warnings == ()
