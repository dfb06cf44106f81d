"""The options ``worker_class`` and ``worker_options``: read once, before anything starts, and made ready for each worker.

The agent reads them (`read_worker_options`). A class is imported from the user's path, or chosen by the plan. It accepts the
options of its signature, and of the classes to which it passes ``**kwargs``: `dask_cuda.CUDAWorker` passes on to
`distributed.Nanny`, and that to `distributed.Worker`, in a child process that then fails as "Nanny failed to start". Later
`workers.factory` requests the options of one worker, in the form of its class (`options_for`), with sizes of device memory as
bytes of its own GPU (`device_sizes`).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from numbers import Real
from typing import Any

from dask_gpu_mpi.base.text import format_bytes, one_line, parse_bytes
from dask_gpu_mpi.errors import OptionError, Problem
from dask_gpu_mpi.options.convert import convert, nearest, show, suggest
from dask_gpu_mpi.options.model import Options, Setting
from dask_gpu_mpi.plan import WorkerPlan

CUDA_WORKER, NANNY = "dask_cuda.CUDAWorker", "distributed.Nanny"
KNOWN_CLASSES = (CUDA_WORKER, NANNY, "distributed.Worker")
#: The fix if dask-cuda can't be imported. It is not among the requirements: it pins its Dask.
NO_DASK_CUDA = (
    "pip install 'dask-gpu-mpi[cuda12]' or 'dask-gpu-mpi[cuda13]', to match your driver; or run on CPUs with "
    "worker_class (--worker-class) distributed.Nanny"
)


_MEMORY = Setting("memory", nullable=True)
#: Options of Dask's classes that are ports: a number, or a text with a range.
PORTS, PORT = ("port", "worker_port"), Setting("int", minimum=0, maximum=65535)
#: Options of CUDAWorker that are lists of modules. It would iterate a text by character.
MODULE_LISTS = ("pre_import", "rmm_allocator_external_lib_list")


def read_worker_options(worker_class: str | type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options for a class, before anything starts; raises an OptionError.

    A nested ``worker_class`` is imported. Most values are for the class, whose error the agent reports. A class of the user's
    with ``**kwargs`` accepts all names. For ``"auto"`` the plan chooses CUDAWorker or Nanny, and one of them must
    accept the options.

    >>> from distributed import Nanny
    >>> read_worker_options(Nanny, {"preload": "setup.py"})
    {'preload': 'setup.py'}
    >>> read_worker_options(Nanny, {"lifetme": "1 hour"})
    Traceback (most recent call last):
    dask_gpu_mpi.errors.OptionError: worker_options: Nanny has no option 'lifetme'; did you mean 'lifetime'?
    """
    if worker_class == "auto" and not options:
        return {}
    cls = _class_that_accepts(options, worker_class)
    read = dict(options)
    if any(is_dasks(base) for base in cls.__mro__):
        _check_values(options)
        if isinstance(below := read.get("worker_class"), str):
            read["worker_class"] = import_worker_class(below)
    return read


def _class_that_accepts(options: Mapping[str, Any], worker_class: str | type) -> type:
    """The class itself or, for ``"auto"``, Nanny or CUDAWorker, if it accepts these options; else raises an OptionError."""
    cls = import_worker_class(NANNY if worker_class == "auto" else worker_class)
    try:
        _check_names(cls, options)
    except OptionError as unknown:
        if worker_class != "auto" or unknown.problem.fix:
            raise
        if find_spec("dask_cuda") is None:
            expected = "an option of Nanny; those of CUDAWorker need dask-cuda"
            raise OptionError(str(unknown), expected=expected) from None
        cls = import_worker_class(CUDA_WORKER)
        _check_names(cls, options)
    return cls


def _check_values(options: Mapping[str, Any]) -> None:
    """Refuse values that Dask's classes accept, or refuse by an error without the option's name."""
    convert(_MEMORY, options.get("memory_limit"), "worker_options: memory_limit", "keyword")
    for name in PORTS:
        for port in str(options.get(name, "")).split(":"):
            if re.fullmatch(r"-?[0-9]+", port):
                convert(PORT, int(port), f"worker_options: {name}", "keyword")
    amounts = options.get("resources")
    for name, amount in amounts.items() if isinstance(amounts, Mapping) else ():
        if not (isinstance(amount, Real) and float(amount) >= 0):
            raise OptionError(
                f"worker_options: resources: invalid amount {show(amount)} of {name}",
                expected="a number of 0 or more",
            )


def gpu_options(options: Options) -> list[Problem]:
    """The warning of a job without GPUs: the options of the program or the command line that only a GPU worker has.

    Those of the configuration may be a site's, for all its jobs.
    """
    found = []
    if "worker_options" in options.given and options.worker_class == "auto":
        below = options.worker_options.get("worker_class")
        known = accepted_options(import_worker_class(NANNY), import_worker_class(below) if below else None)
        found = [
            name for name, value in options.worker_options.items() if value and name not in (known or (name,))
        ]
    if "gpus_per_worker" in options.given and options.gpus_per_worker > 1:
        found.append("gpus_per_worker (--gpus-per-worker)")
    if not found:
        return []
    return [
        Problem(
            f"{', '.join(found)}: no effect, since no worker has a GPU",
            fix="leave it out here, or ask the batch system for GPUs",
        )
    ]


def options_for(worker_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the form that this class reads: CUDAWorker needs a text for resources, and lists for some texts.

    >>> from distributed import Nanny
    >>> options_for(Nanny, {"resources": {"A": 1.0}})
    {'resources': {'A': 1.0}}
    """
    found = dict(options)
    if is_cuda_worker(worker_class):
        if isinstance(amounts := found.get("resources"), Mapping):
            found["resources"] = " ".join(f"{key}={number}" for key, number in amounts.items())
        if isinstance(preload := found.get("preload"), str):
            found["preload"] = [preload]
        for name in MODULE_LISTS:
            if isinstance(text := found.get(name), str):
                found[name] = [item.strip() for item in text.split(",")]
    return found


def follow_cudf_spill(worker_options: Mapping[str, Any]) -> None:
    """If cuDF spills in the workers, let it do so in this process, which could not unpickle their data, and in its children."""
    if worker_options.get("enable_cudf_spill"):
        os.environ["CUDF_SPILL"] = "on"  # cuDF reads it when it is imported
        if (cudf := sys.modules.get("cudf")) is not None:
            cudf.set_option("spill", True)


# The classes of workers.


def worker_class_for(kind: str, worker_class: str | type) -> type:
    """The class of a worker of this `kind` (``"gpu"`` or ``"cpu"``), imported. With CUDAWorkers, CPU workers are Nannies."""
    if worker_class == "auto":
        worker_class = CUDA_WORKER if kind == "gpu" else NANNY
    found = import_worker_class(worker_class)
    return import_worker_class(NANNY) if kind == "cpu" and is_cuda_worker(found) else found


def tasks_run_in_agent(worker_class: str | type) -> bool:
    """Whether workers of this class run their tasks in the agent itself, and not in a process of a Nanny.

    ``"auto"`` is CUDAWorker or Nanny, as the plan says for each worker. A CUDAWorker is not a Nanny, but makes some.

    >>> tasks_run_in_agent("auto"), tasks_run_in_agent("distributed.Nanny"), tasks_run_in_agent("distributed.Worker")
    (False, False, True)
    """
    if worker_class == "auto":
        return False
    from distributed import Nanny

    cls = import_worker_class(worker_class)
    return not (issubclass(cls, Nanny) or is_cuda_worker(cls))


def is_cuda_worker(worker_class: type) -> bool:
    """Whether the class is `dask_cuda.CUDAWorker` or a subclass."""
    return any(is_dasks(cls) and cls.__name__ == "CUDAWorker" for cls in worker_class.__mro__)


def is_dasks(worker_class: type) -> bool:
    """Whether this class itself is CUDAWorker, Nanny or Worker, whose ``**kwargs`` go to a known class."""
    package = worker_class.__module__.partition(".")[0]
    return f"{package}.{worker_class.__name__}" in KNOWN_CLASSES


def import_worker_class(value: str | type) -> type:
    """The class of workers with this dotted path, or this class itself; OptionError: there is none.

    >>> import_worker_class("distributed.Nany")
    Traceback (most recent call last):
    dask_gpu_mpi.errors.OptionError: worker_class 'distributed.Nany': the module 'distributed' has no class 'Nany'; did you mean \
'distributed.Nanny'?
    """
    found = value if isinstance(value, type) else _import_path(value)
    if not (isinstance(found, type) and hasattr(found, "__await__")):
        expected = "one whose instances can be awaited, such as distributed.Nanny"
        raise OptionError(f"worker_class {show(value)} is not a class of workers", expected=expected)
    return found


def _import_path(value: str) -> Any:
    where = f"worker_class {show(value)}"
    module_name, _, name = value.rpartition(".")
    if not module_name:
        raise OptionError(f"{where} is not a dotted path of a class{_hint(value)}")
    of_dask_cuda = module_name.partition(".")[0] == "dask_cuda"
    fix = NO_DASK_CUDA if of_dask_cuda else ""
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module_name}.".startswith(f"{missing}."):
            raise OptionError(
                f"{where}: importing {module_name!r} fails: {type(error).__name__}: {one_line(error)}",
                fix=fix,
            ) from error
        if of_dask_cuda and missing == "dask_cuda":
            raise OptionError(
                f"{where}: GPU workers need dask-cuda, which is not installed here", fix=fix
            ) from None
        raise OptionError(f"{where}: there is no module {missing!r}{_hint(value)}") from None
    if not hasattr(module, name):
        raise OptionError(f"{where}: the module {module_name!r} has no class {name!r}{_hint(value)}")
    return getattr(module, name)


def _hint(value: str) -> str:
    """The end of a message: the most similar known class, or the expected form."""
    if near := nearest(value, KNOWN_CLASSES):
        return f"; did you mean {near!r}?"
    return " (expected the path of an importable class, such as distributed.Nanny)"


# The names of the options that a class accepts.


#: Options that dask_gpu_mpi sets for every worker, and the option by which the user can change each.
SET_ELSEWHERE = {
    "name": "name (--name) for a prefix",
    "scheduler": "scheduler_address (--scheduler-address)",
    "scheduler_ip": "scheduler_address (--scheduler-address)",
    "scheduler_port": "scheduler_port (--scheduler-port)",
    "scheduler_file": "scheduler_file (--scheduler-file)",
    "protocol": "protocol (--protocol)",
    "security": "security (--security/--no-security)",
}
#: Options that a class itself passes to the next one, so that the user's would be passed a second time
#: (dask-cuda 25.10 to 26.10, distributed 2025.9.1 to 2026.8; tested). CUDAWorker's `env` is not one of them: `factory`
#: adds the user's to it.
TAKEN = {
    "CUDAWorker": frozenset({"config", "data", "http_prefix", "plugins", "scheduler_ip"}),
    "Nanny": frozenset({"nanny"}),
    "Worker": frozenset({"handlers", "stream_handlers", "connection_args"}),
}


def _check_names(worker_class: type, options: Mapping[str, Any]) -> None:
    """Raise an OptionError for an option that the class does not accept."""
    for name in options:
        if name in SET_ELSEWHERE:
            raise OptionError(
                f"worker_options: {name!r} is set by dask_gpu_mpi",
                fix=f"use the option {SET_ELSEWHERE[name]}",
            )
    below = options.get("worker_class")
    next_class = import_worker_class(below) if isinstance(below, (str, type)) else None
    accepted = accepted_options(worker_class, next_class)
    for name in options:
        if accepted is not None and name not in accepted:
            # one of the classes passes this option on itself
            if any(is_dasks(cls) and name in TAKEN[cls.__name__] for cls in _chain(worker_class, None)):
                reason = f"sets {name!r} itself. Fix: leave it out"
            else:
                reason = f"has no option {show(name)}{suggest(name, accepted - set(SET_ELSEWHERE))}"
            raise OptionError(f"worker_options: {worker_class.__name__} {reason}")


def accepted_options(worker_class: type, next_class: type | None = None) -> frozenset[str] | None:
    """The names of all options of a class, including those that it passes on; None: it accepts all names.

    `next_class` is what a Nanny starts instead of `distributed.Worker`.

    >>> from distributed import Nanny
    >>> accepted = accepted_options(Nanny)
    >>> "preload_nanny" in accepted, "lifetime" in accepted, "rmm_pool_size" in accepted
    (True, True, False)
    """
    names: set[str] = set()
    taken: set[str] = set()
    for cls in _chain(worker_class, next_class):
        try:
            parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
        except (TypeError, ValueError):  # written in C
            return None
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                names |= {parameter.name} - taken
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return frozenset(names)
        if is_dasks(cls):
            taken |= TAKEN[cls.__name__] - names
    return None


def _chain(worker_class: type, next_class: type | None) -> Iterator[type]:
    """The classes whose ``__init__`` receives an option, in order. Dask's classes pass ``**kwargs`` on to known ones."""
    for cls in worker_class.__mro__[:-1]:
        if "__init__" not in vars(cls):
            continue
        yield cls
        if is_dasks(cls):
            from distributed import Nanny, Worker
            from distributed.core import Server

            # CUDAWorker makes Nannies, a Nanny makes a Worker, whose __init__ calls Server's and skips its other bases'.
            following = {"CUDAWorker": Nanny, "Nanny": next_class or Worker, "Worker": Server}
            yield from _chain(following[cls.__name__], next_class)
            return


# Sizes of device memory among the options: how much of a GPU's memory its worker uses, in bytes, and whether the GPU has that
# much.


#: Options of CUDAWorker that are sizes of device memory or fractions of it, and the alignment that RMM requires of them (bytes).
DEVICE_SIZES = {
    "device_memory_limit": 1,
    "rmm_pool_size": 256,
    "rmm_maximum_pool_size": 256,
    "rmm_release_threshold": 256,
}
#: Whether pools may be larger than the device.
MANAGED = "rmm_managed_memory"
#: dask-cuda's "default" for device_memory_limit (dask_cuda.utils.parse_device_memory_limit).
DEFAULT_FRACTION = 0.8
#: Part of the free memory that a message proposes for a pool: the worker's context and kernels need some too.
PROPOSED_FRACTION = 0.9


def device_sizes(asked: Mapping[str, Any], worker: WorkerPlan) -> dict[str, int]:
    """Bytes of a worker's own device for each size of `DEVICE_SIZES` in its options `asked`; ``device_memory_limit`` too.

    If the memory of the device is unknown, there are none: dask-cuda reads the sizes. None for a size leaves it to dask-cuda.
    Raises an OptionError for a value that is no size, and for one that the GPU does not have, which RMM would report in a
    traceback.
    """
    found: dict[str, int] = {}
    for key, value in {"device_memory_limit": "default", **asked}.items():
        if key in DEVICE_SIZES and value is not None and worker.device_memory:
            try:
                found[key] = device_bytes(value, worker.device_memory, DEVICE_SIZES[key])
            except (TypeError, ValueError, OverflowError):
                found[key] = -1
            if found[key] < 0:
                raise OptionError(
                    f"worker_options: {key}: invalid value {show(value)}",
                    expected="bytes, a text such as '4GB', or a fraction up to 1",
                )
    if not asked.get(MANAGED):
        _check_sizes(asked, found, worker)
    return found


def device_bytes(value: int | float | str, memory: int, alignment: int = 1) -> int:
    """Turn a size of device memory, a fraction among them, into bytes.

    ``"default"`` is 0.8 of `memory`, ``"auto"`` is all of it, a float or its text in (0, 1] is that fraction. The rule is
    dask-cuda's (``parse_device_bytes``), in which 1 (int or ``"1"``) is one byte and 1.0 everything. The result is a multiple of
    `alignment` bytes.

    >>> memory = 80 * 10**9
    >>> device_bytes("default", memory), device_bytes(0.5, memory), device_bytes("10GB", memory, alignment=256)
    (64000000000, 40000000000, 10000000000)
    >>> device_bytes(1, memory), device_bytes(1.0, memory)
    (1, 80000000000)
    """
    if value == "default":
        value = DEFAULT_FRACTION
    elif value == "auto":
        value = 1.0
    fraction = 0.0
    if isinstance(value, float) or (isinstance(value, str) and value.strip() != "1"):
        with contextlib.suppress(ValueError):
            fraction = float(value)
    if 0.0 < fraction <= 1.0:
        value = memory * fraction
    if value in (math.inf, -math.inf):
        raise ValueError(f"{value!r} is no number of bytes (expected 4GB, 1.5GiB or the like)")
    size = parse_bytes(value) if isinstance(value, str) else int(value)
    return size // alignment * alignment


def _check_sizes(asked: Mapping[str, Any], sizes: Mapping[str, int], worker: WorkerPlan) -> None:
    """Refuse sizes that the GPU does not have; the OptionError has its free memory, and a value that would fit.

    A pool is taken at once, so it must fit into what is free now; its maximum and the limit of the device must fit into the
    device. Managed memory may be more than the device has: none of this holds for it.
    """
    memory, free = worker.device_memory, worker.device_free
    texts = {key: f"{asked.get(key)!r} ({format_bytes(size)})" for key, size in sizes.items()}
    pool, maximum = sizes.get("rmm_pool_size", 0), sizes.get("rmm_maximum_pool_size", 0)
    available, source = (memory, "its GPU has") if free < 0 else (free, "is free")
    proposed = int(PROPOSED_FRACTION * available)
    proposed = min(proposed, maximum or proposed)
    of_maximum = f"rmm_maximum_pool_size, {texts.get('rmm_maximum_pool_size')}"
    # each option, the bytes that it may have at most, what has so many, and the bytes that would fit
    bounds = (
        ("device_memory_limit", memory, "its GPU has", memory),
        ("rmm_maximum_pool_size", memory, "its GPU has", memory),
        ("rmm_pool_size", available, source, proposed),
        ("rmm_pool_size", maximum or pool, of_maximum, proposed),
    )
    for option, most, limit, fitting in bounds:
        if sizes.get(option, 0) > most:
            fits = _rounded_down(fitting)
            free_text = f"{free} bytes ({format_bytes(free)})" if free >= 0 else "unknown"
            raise OptionError(
                f"worker_options: {option} of worker {worker.name} on {worker.host} is {texts[option]}, more than {limit}: GPU "
                f"{worker.gpu_index} ({worker.devices[0]}) has {memory} bytes ({format_bytes(memory)}), free: {free_text}",
                expected=f"{fits!r} at most" if fits else "",
                fix="" if fits else "end what uses this GPU, or leave the option out",
            )


def _rounded_down(size: int) -> str:
    """The size as a text, in whole GiB or MiB; empty: less than a MiB."""
    if size >= 2 * 1024**3:
        return f"{size // 1024**3} GiB"
    return f"{size // 1024**2} MiB" if size >= 1024**2 else ""
