"""Which options the class of a worker takes: its signature, and those of the classes to which it passes ``**kwargs``.

`dask_cuda.CUDAWorker` hands what it does not know to `distributed.Nanny`, and that to `distributed.Worker`, in a child process
that then fails as "Nanny failed to start".
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from .worker_class import is_dasks

__all__ = ["TAKEN", "accepted_options", "sets_itself"]

#: What a class passes to the next one itself, so that it would be passed twice
#: (dask-cuda 25.10 to 26.10, distributed 2025.9.1 to 2026.8; tested). CUDAWorker's own `env` is not among them: `cuda_worker`
#: adds the user's to it.
TAKEN = {
    "CUDAWorker": frozenset({"config", "data", "http_prefix", "plugins", "scheduler_ip"}),
    "Nanny": frozenset({"nanny"}),
    "Worker": frozenset({"handlers", "stream_handlers", "connection_args"}),
}


def accepted_options(worker_class: type, next_class: type | None = None) -> frozenset[str] | None:
    """The names of all options of a class, those that it passes on included; None: it takes everything.

    Parameters
    ----------
    worker_class : type
        Any class.
    next_class : type, optional
        What a Nanny starts instead of `distributed.Worker`.

    Examples
    --------
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
    """Whether one of the classes passes this option on by itself, so that nobody else may."""
    return any(is_dasks(cls) and name in TAKEN[cls.__name__] for cls in _chain(worker_class, None))


def _chain(worker_class: type, next_class: type | None) -> Iterator[type]:
    """The classes whose ``__init__`` sees an option, in order. Dask's own pass ``**kwargs`` on to known places."""
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
