"""The class of a worker, imported from the user's path or chosen by the plan, and the options that it accepts.

It accepts the options of its signature, and of the classes to which it passes ``**kwargs``: `dask_cuda.CUDAWorker` passes on to
`distributed.Nanny`, and that to `distributed.Worker`, in a child process that then fails as "Nanny failed to start".
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterator

from dask_gpu_mpi.errors import OptionError
from dask_gpu_mpi.options.convert import show

CUDA_WORKER, NANNY = "dask_cuda.CUDAWorker", "distributed.Nanny"
#: The fix if dask-cuda can't be imported. It is not among the requirements: it pins its Dask.
NO_DASK_CUDA = (
    "pip install 'dask-gpu-mpi[cuda12]' or 'dask-gpu-mpi[cuda13]', to match your driver; or run on CPUs with "
    "worker_class (--worker-class) distributed.Nanny"
)
KNOWN_CLASSES = (CUDA_WORKER, NANNY, "distributed.Worker")


def import_worker_class(value: str | type) -> type:
    """Import a class of workers from its dotted path, or raise an OptionError; a class is returned as it is.

    >>> import_worker_class("distributed.Nany")
    Traceback (most recent call last):
    dask_gpu_mpi.errors.OptionError: worker_class 'distributed.Nany': the module 'distributed' has no class 'Nany'; did you mean \
'distributed.Nanny'?
    """
    if isinstance(value, type):
        return value
    where = f"worker_class {show(value)}"
    module_name, _, name = value.rpartition(".")
    of_dask_cuda = module_name.partition(".")[0] == "dask_cuda"
    fix = NO_DASK_CUDA if of_dask_cuda else ""
    if not module_name:
        known = {path.rpartition(".")[2].lower(): path for path in KNOWN_CLASSES}
        near = [known[match] for match in difflib.get_close_matches(name.lower(), known)]
        raise OptionError(f"{where} is not a dotted path of a class{_hint(near, 'package.module.Class')}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise OptionError(
                f"{where}: importing {module_name!r} fails, since the module {error.name!r} is missing",
                fix=fix,
            ) from error
        if of_dask_cuda and error.name == "dask_cuda":
            raise OptionError(
                f"{where}: GPU workers need dask-cuda, which is not installed here", fix=fix
            ) from None
        near = difflib.get_close_matches(value, KNOWN_CLASSES)
        expected = "a module of this environment, or on PYTHONPATH"
        raise OptionError(f"{where}: there is no module {error.name!r}{_hint(near, expected)}") from None
    except Exception as error:  # a module may raise anything while it is imported
        raise OptionError(
            f"{where}: importing {module_name!r} fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            fix=fix,
        ) from error
    if not hasattr(module, name):
        classes = [key for key, found in vars(module).items() if isinstance(found, type)]
        near = [f"{module_name}.{match}" for match in difflib.get_close_matches(name, classes)]
        raise OptionError(f"{where}: the module {module_name!r} has no class {name!r}{_hint(near)}")
    found = getattr(module, name)
    if not isinstance(found, type):
        raise OptionError(f"{where} is a {type(found).__name__}", expected="a class")
    return found


def _hint(near: list[str], expected: str = "") -> str:
    """The end of a message: the most similar right path, or the expected form."""
    if near:
        return f"; did you mean {near[0]!r}?"
    return f" (expected {expected})" if expected else ""


def is_dasks(worker_class: type) -> bool:
    """Whether this class itself is CUDAWorker, Nanny or Worker, whose ``**kwargs`` go to a known class."""
    package = worker_class.__module__.partition(".")[0]
    return f"{package}.{worker_class.__name__}" in KNOWN_CLASSES


def is_cuda_worker(worker_class: type) -> bool:
    """Whether the class is `dask_cuda.CUDAWorker` or a subclass."""
    return any(is_dasks(cls) and cls.__name__ == "CUDAWorker" for cls in worker_class.__mro__)


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


#: Options that a class itself passes to the next one, so that the user's would be passed a second time
#: (dask-cuda 25.10 to 26.10, distributed 2025.9.1 to 2026.8; tested). CUDAWorker's `env` is not one of them: `cuda_worker`
#: adds the user's to it.
TAKEN = {
    "CUDAWorker": frozenset({"config", "data", "http_prefix", "plugins", "scheduler_ip"}),
    "Nanny": frozenset({"nanny"}),
    "Worker": frozenset({"handlers", "stream_handlers", "connection_args"}),
}


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


def sets_itself(worker_class: type, name: str) -> bool:
    """Whether one of the classes passes this option on itself, so that the user may not set it."""
    return any(is_dasks(cls) and name in TAKEN[cls.__name__] for cls in _chain(worker_class, None))


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
