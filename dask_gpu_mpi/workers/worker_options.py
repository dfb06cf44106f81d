"""What the user sets for workers (``worker_options``): checked before anything starts, and written as the class reads it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.options.convert import convert
from dask_gpu_mpi.options.hints import show, suggest
from dask_gpu_mpi.options.model import Kind, Option

from .signature import accepted_options, sets_itself
from .worker_class import CUDA_WORKER, NANNY, import_worker_class, is_cuda_worker, is_dasks

__all__ = ["check_options_of", "check_worker_options", "normalise_worker_options"]

#: What dask_gpu_mpi sets for every worker itself, and the option by which the user sets it.
SET_ELSEWHERE = {
    "name": "name (--name) for a prefix",
    "scheduler": "scheduler_address (--scheduler-address)",
    "scheduler_ip": "scheduler_address (--scheduler-address)",
    "scheduler_port": "scheduler_port (--scheduler-port)",
    "scheduler_file": "scheduler_file (--scheduler-file)",
    "protocol": "protocol (--protocol)",
    "security": "security (--security/--no-security)",
}


def _options(kind: Kind, *names: str, **more: Any) -> dict[str, Option]:
    return {name: Option(name, kind, None, "", **more) for name in names}


#: Types, where they are beyond doubt. Sizes of device memory may be fractions too, or dask-cuda's "auto" and "default".
TYPES: dict[str, Option] = {
    **_options("int", "nthreads", minimum=1),
    **_options("int", "cudf_spill_stats", minimum=0),
    **_options("memory", "memory_limit", "device_memory_limit"),
    **_options("memory", "rmm_pool_size", "rmm_maximum_pool_size", "rmm_release_threshold"),
    **_options(
        "bool", "rmm_managed_memory", "rmm_async", "rmm_track_allocations", "enable_cudf_spill", "dashboard"
    ),
    **_options("bool", "enable_tcp_over_ucx", "enable_infiniband", "enable_nvlink", "enable_rdmacm"),
    **_options("bool", "validate", "quiet", "reconnect", "lifetime_restart", "low_level_profiler"),
    **_options("duration", "death_timeout", "lifetime", "heartbeat_interval", "profile_cycle_interval"),
    **_options("path", "local_directory", "rmm_log_directory", "pid_file"),
    **_options("str", "interface", "host"),
    **_options("json", "env", "config"),
}
#: Options that are lists of texts; a single text is meant as a list of one (CUDAWorker would iterate it by character).
LISTS = frozenset({"preload", "preload_nanny"})
#: Lists whose single text has commas, as LocalCUDACluster reads it.
COMMA_LISTS = frozenset({"rmm_allocator_external_lib_list", "pre_import"})
#: Lists of words, which may also be written as one text, as on a command line.
WORD_LISTS = frozenset({"preload_argv", "preload_nanny_argv"})
#: Options that CUDAWorker takes, but not as None.
NEVER_NONE = LISTS | WORD_LISTS | {"nthreads", "resources"}
#: Options of CUDAWorker that do nothing, or fail late, without one of these (dask_cuda.plugins.RMMSetup, CUDFSetup).
NEEDS = {
    "rmm_maximum_pool_size": ("rmm_pool_size", "rmm_async"),
    "rmm_release_threshold": ("rmm_async",),
    "rmm_log_directory": ("rmm_pool_size", "rmm_managed_memory", "rmm_async"),
    "cudf_spill_stats": ("enable_cudf_spill",),
}
#: Pairs that dask-cuda refuses when it makes the worker, or (the last) will refuse, as its LocalCUDACluster warns. For others,
#: such as `interface` with `host`, the start reports its own text.
EXCLUDE = (
    ("rmm_managed_memory", "rmm_async"),
    ("rmm_managed_memory", "enable_nvlink"),
    ("rmm_pool_size", "rmm_async"),
)


def check_options_of(worker_class: str | type, options: Mapping[str, Any], *, where: str) -> None:
    """Check options for a class, or for ``"auto"``: there the plan chooses CUDAWorker or Nanny, and one of them must take them.

    Raises
    ------
    OptionError
        As `import_worker_class` and `check_worker_options` say.
    """
    if worker_class != "auto":
        check_worker_options(import_worker_class(worker_class), options, where=where)
    elif options:
        try:
            check_worker_options(import_worker_class(NANNY), options, where=where)
        except OptionError:
            check_worker_options(import_worker_class(CUDA_WORKER), options, where=where)


def check_worker_options(worker_class: type, options: Mapping[str, Any], *, where: str) -> None:
    """Refuse what this class of workers would not accept.

    Parameters
    ----------
    worker_class : type
        CUDAWorker, Nanny, Worker, or any other class; one that takes ``**kwargs`` and is none of these takes everything.
    options : Mapping
        The user's ``worker_options``.
    where : str
        Where they were set, for the message.

    Raises
    ------
    OptionError
        An option is unknown, of the wrong type, or set by dask_gpu_mpi itself.

    Examples
    --------
    >>> from distributed import Nanny
    >>> check_worker_options(Nanny, {"lifetime": "1 hour"}, where="worker_options")
    >>> check_worker_options(Nanny, {"lifetme": "1 hour"}, where="worker_options")
    Traceback (most recent call last):
    dask_gpu_mpi.errors.OptionError: worker_options: Nanny has no option 'lifetme'; did you mean 'lifetime'?
    """
    for name in options:
        if name in SET_ELSEWHERE:
            raise OptionError(
                f"{where}: {name!r} is set by dask_gpu_mpi. Fix: use the option {SET_ELSEWHERE[name]}"
            )
    below = options.get("worker_class")
    next_class = import_worker_class(below) if isinstance(below, (str, type)) else None
    accepted = accepted_options(worker_class, next_class)
    for name in options:
        if accepted is not None and name not in accepted:
            if sets_itself(worker_class, name):
                reason = f"sets {name!r} itself. Fix: leave it out"
            else:
                reason = f"has no option {show(name)}{suggest(name, accepted - set(SET_ELSEWHERE))}"
            raise OptionError(f"{where}: {worker_class.__name__} {reason}")
    if accepted is None and not _is_known(worker_class):
        return
    for name, value in options.items():
        _read(name, value, f"{where}: {name}", cuda=False)
    if is_cuda_worker(worker_class):
        _check_together(options, where)


def normalise_worker_options(worker_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Write options, which `check_worker_options` has passed, as this class reads them.

    A single text for a list becomes a list; ``resources`` becomes a text for CUDAWorker and a dict of floats for every other
    class, whichever it was; a nested ``worker_class`` is imported; None is left out where CUDAWorker takes no None.

    Examples
    --------
    >>> from distributed import Nanny
    >>> normalise_worker_options(Nanny, {"preload": "setup.py", "resources": "A=1 B=2"})
    {'preload': ['setup.py'], 'resources': {'A': 1.0, 'B': 2.0}}
    """
    if not _is_known(worker_class):
        return dict(options)  # somebody else's class: its options have somebody else's types
    cuda = is_cuda_worker(worker_class)
    return {
        name: _read(name, value, f"worker_options: {name}", cuda=cuda)
        for name, value in options.items()
        if not (cuda and value is None and name in NEVER_NONE)
    }


def _is_known(worker_class: type) -> bool:
    return any(is_dasks(cls) for cls in worker_class.__mro__)


def _read(name: str, value: Any, origin: str, *, cuda: bool) -> Any:
    """One option, checked, as the class reads it."""
    if name in TYPES:
        if not (name == "device_memory_limit" and value == "default"):
            convert(TYPES[name], value, origin, "keyword")
    elif name == "worker_class" and isinstance(value, str):
        return import_worker_class(value)
    elif value is None:
        return None
    elif name in LISTS | COMMA_LISTS | WORD_LISTS:
        return _texts(name, value, origin)
    elif name == "resources":
        resources = _resources(value, origin)
        return " ".join(f"{key}={number!r}" for key, number in resources.items()) if cuda else resources
    return value


def _texts(name: str, value: Any, origin: str) -> list[Any]:
    if isinstance(value, str):
        if name in COMMA_LISTS:
            return [item.strip() for item in value.split(",")]
        if name not in WORD_LISTS:
            return [value]
        try:
            return shlex.split(value)
        except ValueError as error:
            raise OptionError(
                f"{origin}: invalid value {show(value)} ({error}; expected words as a shell reads them)"
            ) from None
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, list)) for item in value):
        return list(value)
    raise OptionError(
        f"{origin}: invalid value {show(value)} of type {type(value).__name__} (expected a list of texts)"
    )


def _resources(value: Any, origin: str) -> dict[str, float]:
    """Read ``{"A": 1}`` or, as on dask-cuda's command line, ``"A=1 B=2"`` and ``"A=1,B=2"``.

    >>> _resources("A=1,B=2", "worker_options: resources")
    {'A': 1.0, 'B': 2.0}
    """
    try:
        if isinstance(value, str):
            value = dict(pair.split("=") for pair in value.replace(",", " ").split())
        elif any(isinstance(number, bool) for number in value.values()):
            raise TypeError
        found = {str(name): float(number) for name, number in value.items()}
        # CUDAWorker reads a text, in which a name with one of these would be another name
        if all(re.fullmatch(r"[^=, \n\t]+", name) and 0 <= found[name] < math.inf for name in found):
            return found
    except (AttributeError, TypeError, ValueError, OverflowError):
        pass
    raise OptionError(
        f'{origin}: invalid value {show(value)} (expected names and numbers, such as {{"FOO": 1}} or "FOO=1 BAR=2")'
    )


def _check_together(options: Mapping[str, Any], where: str) -> None:
    """Refuse options of CUDAWorker that exclude each other, or that have no effect without another."""
    for one, other in EXCLUDE:
        if options.get(one) and options.get(other):
            raise OptionError(f"{where}: {one} and {other} exclude each other (expected one of them)")
    for name, others in NEEDS.items():
        if options.get(name) and not any(options.get(other) for other in others):
            raise OptionError(f"{where}: {name} requires {'one of ' * (len(others) > 1)}{', '.join(others)}")
