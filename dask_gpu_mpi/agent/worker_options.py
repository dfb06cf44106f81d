"""What a worker's class takes: checked against its signature before anything starts, and mended where the class is picky.

`dask_cuda.CUDAWorker` hands what it does not know to `distributed.Nanny`, and that to `distributed.Worker`, in a child process
that then fails as "Nanny failed to start". So the signatures are followed here, along ``**kwargs``.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.options.convert import convert
from dask_gpu_mpi.options.hints import show, suggest
from dask_gpu_mpi.options.model import Kind, Option

__all__ = [
    "accepted_options",
    "check_options_of",
    "check_worker_options",
    "import_worker_class",
    "is_cuda_worker",
    "normalise_worker_options",
]

KNOWN_CLASSES = ("dask_cuda.CUDAWorker", "distributed.Nanny", "distributed.Worker")

#: What dask_gpu_mpi says to every worker itself, and the option by which the user says it.
OURS = {
    "name": "name (--name) for a prefix",
    "scheduler": "scheduler_address (--scheduler-address)",
    "scheduler_ip": "scheduler_address (--scheduler-address)",
    "scheduler_port": "scheduler_port (--scheduler-port)",
    "scheduler_file": "scheduler_file (--scheduler-file)",
    "protocol": "protocol (--protocol)",
    "security": "security (--security/--no-security)",
}

#: What a class says to the next one itself, so that it would be said twice (dask-cuda 26.10, distributed 2026.7.1; tested).
TAKEN = {
    "CUDAWorker": frozenset({"config", "data", "env", "http_prefix", "plugins", "scheduler_ip"}),
    "Nanny": frozenset({"nanny"}),
    "Worker": frozenset({"handlers", "stream_handlers", "connection_args"}),
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
#: Options that are lists of texts; a single text is meant as a list of one.
LISTS = frozenset({"preload", "preload_nanny"})
#: Lists whose single text has commas, as LocalCUDACluster reads it; CUDAWorker would iterate it by character as well.
COMMA_LISTS = frozenset({"rmm_allocator_external_lib_list", "pre_import"})
#: Lists of words, which may also be written as one text, as on a command line.
WORD_LISTS = frozenset({"preload_argv", "preload_nanny_argv"})
#: Options of CUDAWorker that do nothing, or fail late, without one of these (dask_cuda.plugins.RMMSetup, CUDFSetup).
NEEDS = {
    "rmm_maximum_pool_size": ("rmm_pool_size", "rmm_async"),
    "rmm_release_threshold": ("rmm_async",),
    "rmm_log_directory": ("rmm_pool_size", "rmm_managed_memory", "rmm_async"),
    "cudf_spill_stats": ("enable_cudf_spill",),
}
#: Pairs that dask-cuda refuses when it makes the worker.
EXCLUDE = (("rmm_managed_memory", "rmm_async"), ("rmm_managed_memory", "enable_nvlink"))


def import_worker_class(value: str | type) -> type:
    """Import a class of workers.

    Parameters
    ----------
    value : str or type
        A dotted path, such as ``"dask_cuda.CUDAWorker"``; a class is returned as it is.

    Raises
    ------
    OptionError
        There is no such module or no such class in it, it can't be imported, or it is no class.
    """
    if isinstance(value, type):
        return value
    path = str(value)
    module_name, _, name = path.rpartition(".")
    known = {path.rpartition(".")[2].lower(): path for path in KNOWN_CLASSES}
    if not module_name:
        near = difflib.get_close_matches(name.lower(), known, 1, 0.6)
        hint = f"did you mean {known[near[0]]!r}?" if near else "needed: package.module.Class"
        raise OptionError(f"worker_class {show(path)} is no dotted path of a class; {hint}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise OptionError(
                f"worker_class {show(path)}: importing {module_name!r} fails, since the module {error.name!r} is missing"
            ) from error
        near = difflib.get_close_matches(path, KNOWN_CLASSES, 1, 0.6)
        hint = (
            f"did you mean {near[0]!r}?" if near else "needed: a module of this environment, or on PYTHONPATH"
        )
        raise OptionError(f"worker_class {show(path)}: there is no module {error.name!r}; {hint}") from None
    except Exception as error:  # a module may raise anything while it is imported
        raise OptionError(
            f"worker_class {show(path)}: importing {module_name!r} fails: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    if not hasattr(module, name):
        classes = [key for key, found in vars(module).items() if isinstance(found, type)]
        near_class = difflib.get_close_matches(name, classes, 1, 0.6)
        hint = f"; did you mean {f'{module_name}.{near_class[0]}'!r}?" if near_class else ""
        raise OptionError(
            f"worker_class {show(path)}: the module {module_name!r} has no class {name!r}{hint}"
        )
    found = getattr(module, name)
    if not isinstance(found, type):
        raise OptionError(f"worker_class {show(path)} is a {type(found).__name__}; needed: a class")
    return found


def accepted_options(worker_class: type, next_class: type | None = None) -> frozenset[str] | None:
    """Collect the names of all options of a class, those that it passes on included.

    Parameters
    ----------
    worker_class : type
        Any class.
    next_class : type, optional
        What a Nanny starts instead of `distributed.Worker`.

    Returns
    -------
    frozenset of str or None
        None if it takes everything, as far as its signature tells.
    """
    names: set[str] = set()
    taken: set[str] = set()
    for cls in _chain(worker_class, next_class):
        try:
            parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
        except (TypeError, ValueError):  # written in C
            return None
        for parameter in list(parameters)[1:]:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                names |= {parameter.name} - taken
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return frozenset(names)
        if _is_dasks(cls):
            taken |= TAKEN.get(cls.__name__, frozenset()) - names
    return None


def check_worker_options(worker_class: type, options: Mapping[str, Any], *, where: str) -> None:
    """Refuse what this class of workers would not understand.

    Parameters
    ----------
    worker_class : type
        CUDAWorker, Nanny, Worker, or any other class; one that takes ``**kwargs`` and is none of these takes everything.
    options : Mapping
        The user's ``worker_options``.
    where : str
        Where they were said, for the message.

    Raises
    ------
    OptionError
        An option is unknown, of the wrong type, or set by dask_gpu_mpi itself.
    """
    for name in options:
        if name in OURS:
            raise OptionError(f"{where}: {name!r} is set by dask_gpu_mpi; use the option {OURS[name]}")
    below = options.get("worker_class")
    next_class = import_worker_class(below) if isinstance(below, (str, type)) else None
    accepted = accepted_options(worker_class, next_class)
    if accepted is not None:
        for name in options:
            if name not in accepted:
                raise OptionError(
                    f"{where}: {worker_class.__name__} {_refusal(worker_class, name, accepted)}"
                )
    elif not any(_is_dasks(cls) for cls in worker_class.__mro__):
        return  # somebody else's class: its options have somebody else's types
    for name, value in options.items():
        origin = f"{where}: {name}"
        if name in TYPES and not (name == "device_memory_limit" and value == "default"):
            convert(TYPES[name], value, origin, "keyword")
        elif name in LISTS | COMMA_LISTS | WORD_LISTS:
            _texts(value, origin)
        elif name == "resources":
            _resources(value, origin)
    if is_cuda_worker(worker_class):
        _check_together(options, where)


def check_options_of(worker_class: str | type, options: Mapping[str, Any], *, where: str) -> None:
    """Check options for a class, or for ``"auto"``: there the plan chooses CUDAWorker or Nanny, and one of them must know them.

    Raises
    ------
    OptionError
        As `import_worker_class` and `check_worker_options` say.
    """
    if worker_class != "auto":
        check_worker_options(import_worker_class(worker_class), options, where=where)
    elif options:
        try:
            check_worker_options(import_worker_class("distributed.Nanny"), options, where=where)
        except OptionError:
            check_worker_options(import_worker_class("dask_cuda.CUDAWorker"), options, where=where)


def is_cuda_worker(worker_class: type) -> bool:
    """Whether the class is `dask_cuda.CUDAWorker`, or made from it."""
    return any(_is_dasks(cls) and cls.__name__ == "CUDAWorker" for cls in worker_class.__mro__)


def _check_together(options: Mapping[str, Any], where: str) -> None:
    """What CUDAWorker's options say together."""
    for one, other in EXCLUDE:
        if options.get(one) and options.get(other):
            raise OptionError(f"{where}: {one} and {other} exclude each other; needed: one of them")
    for name, others in NEEDS.items():
        if options.get(name) and not any(options.get(other) for other in others):
            raise OptionError(f"{where}: {name} requires {'one of ' * (len(others) > 1)}{', '.join(others)}")


def normalise_worker_options(worker_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Write options the way the class understands them.

    A single text for a list becomes a list (CUDAWorker would iterate it by character); ``resources`` becomes a text for
    CUDAWorker and a dict of floats for every other class, whichever way it was written; a nested ``worker_class`` is imported;
    None is left out where CUDAWorker takes no None.

    Parameters
    ----------
    worker_class : type
        The class that gets the options.
    options : Mapping
        Options that `check_worker_options` has passed.

    Returns
    -------
    dict

    Raises
    ------
    OptionError
        ``resources`` or a list can't be read.
    """
    if not any(_is_dasks(cls) for cls in worker_class.__mro__):
        return dict(options)
    cuda = is_cuda_worker(worker_class)
    result = dict(options)
    for name, value in options.items():
        origin = f"worker_options: {name}"
        if value is None:
            if cuda and name in LISTS | WORD_LISTS | {"nthreads", "resources"}:
                del result[name]
        elif name in WORD_LISTS and isinstance(value, str):
            result[name] = shlex.split(value)
        elif name in COMMA_LISTS and isinstance(value, str):
            result[name] = [item.strip() for item in value.split(",")]
        elif name in LISTS | COMMA_LISTS | WORD_LISTS:
            result[name] = _texts(value, origin)
        elif name == "resources":
            resources = _resources(value, origin)
            result[name] = (
                " ".join(f"{key}={number!r}" for key, number in resources.items()) if cuda else resources
            )
        elif name == "worker_class" and isinstance(value, str):
            result[name] = import_worker_class(value)
    return result


def _chain(worker_class: type, next_class: type | None) -> Iterator[type]:
    """The classes whose ``__init__`` sees an option, in order. Dask's own pass ``**kwargs`` on to known places."""
    for cls in worker_class.__mro__[:-1]:
        if "__init__" not in vars(cls):
            continue
        yield cls
        if _is_dasks(cls):
            from distributed import Nanny, Worker
            from distributed.core import Server

            # CUDAWorker makes Nannies, a Nanny makes a Worker, whose __init__ calls Server's and skips its other bases'.
            following = {"CUDAWorker": Nanny, "Nanny": next_class or Worker, "Worker": Server}.get(
                cls.__name__
            )
            if following is not None:
                yield from _chain(following, next_class)
                return


def _is_dasks(cls: type) -> bool:
    return cls.__name__ in TAKEN and cls.__module__.partition(".")[0] in ("distributed", "dask_cuda")


def _refusal(worker_class: type, name: str, accepted: frozenset[str]) -> str:
    if any(_is_dasks(cls) and name in TAKEN[cls.__name__] for cls in _chain(worker_class, None)):
        return f"sets {name!r} itself; leave it out"
    return f"knows no option {show(name)}{suggest(name, accepted - set(OURS))}"


def _texts(value: Any, origin: str) -> list[Any] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return [value]
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, list)) for item in value):
        return list(value)
    raise OptionError(
        f"{origin}: {show(value)} ({type(value).__name__}) can't be used; needed: a list of texts"
    )


def _resources(value: Any, origin: str) -> dict[str, float]:
    """Read ``{"A": 1}`` or, as on dask-cuda's command line, ``"A=1 B=2"`` and ``"A=1,B=2"``."""
    if value is None:
        return {}
    try:
        if isinstance(value, str):
            pairs = [pair.split("=") for pair in value.replace(",", " ").split()]
            value = {name: float(number) for name, number in pairs}
        elif any(isinstance(number, bool) for number in value.values()):
            raise TypeError
        found = {str(name): float(number) for name, number in value.items()}
    except (AttributeError, TypeError, ValueError):
        found = {"": -1.0}
    for name, number in found.items():
        # CUDAWorker reads a text, in which a name with one of these would be another name
        if not name or any(char in name for char in "=, \n\t") or not 0 <= number < float("inf"):
            raise OptionError(
                f'{origin}: {show(value)} can\'t be used; needed: names and numbers, such as {{"FOO": 1}} or "FOO=1 BAR=2"'
            )
    return found
