"""Processes for GPU workers that are there before their nannies ask for them, and make their CUDA context meanwhile.

A context is most of what the start of a GPU worker takes, and the driver makes those of one host more or less one after the
other (on 4xH200 0.3 s for one, 1.2 to 1.8 s for four); it needs nothing of Dask's. So a process for each device is forked as
soon as the device is known, makes its context in a thread, and waits for what `multiprocessing` writes to a new process. The
nanny's process then is that one, instead of a fork of its own: same fork server, same pages, same exit code.

A nanny finds its spare by the device that it shows its process, if it changes nothing else in the environment. Without one, and
whenever it starts a worker again, all is as without this module.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import os
import socket
import sys
import threading
from collections.abc import Iterable, Mapping
from multiprocessing import context, forkserver, get_context, popen_forkserver, reduction, spawn, util
from multiprocessing.connection import Connection
from typing import Any

from dask_gpu_mpi.machine.visible_devices import VARIABLE

__all__ = ["Spares"]

_popen: Any = popen_forkserver
_util: Any = util
_spawn: Any = spawn
_reduction: Any = reduction
_server: Any = forkserver


class Spares:
    """The spare processes of an agent.

    Parameters
    ----------
    environ : mapping
        The environment that the fork server gives to what it forks.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = dict(environ)
        self._waiting: dict[str, _Spare] = {}

    def start(self, devices: Iterable[str]) -> None:
        """Fork a process for each of these devices that has none yet, and have `multiprocessing` use it.

        Parameters
        ----------
        devices : iterable of str
            What each is to see: ``CUDA_VISIBLE_DEVICES``.
        """
        _Popen.spares = self
        context.ForkServerProcess._Popen = staticmethod(_Popen)  # type: ignore[method-assign]
        for device in devices:
            if device not in self._waiting:
                with contextlib.suppress(OSError, EOFError):  # its worker will say why nothing can be forked
                    self._waiting[device] = _Spare(device)

    def keep(self, devices: Iterable[str]) -> None:
        """End those that wait for other devices than these; they were a guess."""
        for device in self._waiting.keys() - set(devices):
            # a nanny's thread may take it meanwhile
            if (spare := self._waiting.pop(device, None)) is not None:
                spare.end()

    def take(self, process: Any) -> _Spare | None:
        """The spare for a process that is to start, if there is one: it is not in `self` any more."""
        try:
            # distributed.nanny.WorkerProcess.start, distributed.process.AsyncProcess
            asked = process._args[0].keywords["env"]
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
        spare = self._waiting.pop(asked.get(VARIABLE), None)
        if spare is None or all(self._environ.get(key) == asked[key] for key in asked.keys() - {VARIABLE}):
            return spare
        spare.end()  # CUDA has read its variables there: the context must not stay beside the worker's
        return None


class _Spare:
    """One process that waits.

    Attributes
    ----------
    popen : multiprocessing.popen_forkserver.Popen
        How the fork server tells of it.
    """

    def __init__(self, device: str) -> None:
        forked = get_context("forkserver")
        self._ours, theirs = forked.Pipe()
        process = forked.Process(target=_wait, args=(theirs, device), name="spare", daemon=True)
        # Not process.start(): nobody else is to collect its exit code.
        self.popen: Any = _popen.Popen(process)
        theirs.close()

    def give(self, read: int, inherited: list[int]) -> None:
        """Hand over the descriptors of a process that is to start; OSError when it is not there any more."""
        with self._ours, socket.socket(fileno=os.dup(self._ours.fileno())) as channel:
            _reduction.sendfds(channel, [read, *inherited])

    def end(self) -> None:
        """It reads the end of its pipe, and exits."""
        self._ours.close()


class _Popen(popen_forkserver.Popen):  # type: ignore[misc, unused-ignore]
    """`multiprocessing`'s, but that the process may be there already."""

    spares: Spares
    _spare: _Spare | None = None

    def _launch(self, process_obj: Any) -> None:
        spare = self.spares.take(process_obj)
        if spare is not None:
            try:
                self._hand_over(spare, process_obj)
            except OSError:  # it has died
                self._fds: list[int] = []
            else:
                self._spare = spare
                return
        super()._launch(process_obj)  # type: ignore[misc, unused-ignore]

    def _hand_over(self, spare: _Spare, process_obj: Any) -> None:
        """As `popen_forkserver.Popen._launch`: the same data through the same kind of pipe."""
        data = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(_spawn.get_preparation_data(process_obj._name), data)
            reduction.dump(process_obj, data)
        finally:
            context.set_spawning_popen(None)
        with contextlib.ExitStack() as opened:
            read, write = os.pipe()
            opened.callback(os.close, write)
            try:
                sentinel = os.dup(spare.popen.sentinel)
                opened.callback(os.close, sentinel)
                # The child takes the end of this pipe for the end of its parent.
                parent = os.dup(write)
                opened.callback(os.close, parent)
                spare.give(read, self._fds)
            finally:
                os.close(read)
            opened.pop_all()
        self.pid, self.sentinel = spare.popen.pid, sentinel
        self.finalizer = _util.Finalize(self, _util.close_fds, (parent, sentinel))
        with contextlib.suppress(BrokenPipeError), open(write, "wb") as pipe:  # its end shows by the sentinel
            pipe.write(data.getbuffer())

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, None before the end: there is one to collect, by the Popen that made the process."""
        if self._spare is None:
            return super().poll(flag)
        self.returncode = self._spare.popen.poll(flag)
        return self.returncode


def _wait(theirs: Connection, device: str) -> None:
    """What a spare does: never returns."""
    os.environ[VARIABLE] = device
    maker = _ContextMaker()
    maker.start()
    with socket.socket(fileno=os.dup(theirs.fileno())) as channel:
        theirs.close()
        try:
            read, *inherited = _reduction.recvfds(channel, _server.MAXFDS_TO_SEND + 1)
        except (EOFError, OSError):
            os._exit(0)
    maker.take_part()
    # As `forkserver._serve_one`, which has forked this process.
    _server._forkserver._inherited_fds = inherited
    code = 1
    try:
        code = _spawn._main(read, os.dup(read))
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        if sys.version_info >= (3, 13):
            atexit._run_exitfuncs()
        os._exit(code)


class _ContextMaker(threading.Thread):
    """Makes the context of the device that this process sees: the primary one, which all libraries share."""

    def __init__(self) -> None:
        super().__init__(name="CUDA context", daemon=True)
        self._made = False

    def run(self) -> None:
        """Make it; why it can't be made is told where dask-cuda tries in turn."""
        with contextlib.suppress(Exception):
            from cuda.bindings import driver

            driver.cuInit(0)
            error, device = driver.cuDeviceGet(0)
            if error == 0:
                # Not cuda.core's Device, which gives it up with the thread. This is kept as long as the process.
                error, _ = driver.cuDevicePrimaryCtxRetain(device)
            self._made = error == 0

    def take_part(self) -> None:
        """Have dask-cuda wait for the context where it would make it, and not warn of it: it does not know whose it is."""
        with contextlib.suppress(ImportError, AttributeError):
            module: Any = importlib.import_module("dask_cuda.initialize")
            create, warn = module._create_cuda_context, module._warn_existing_cuda_context

            def wait() -> None:
                self.join()
                if self._made:
                    module._warn_existing_cuda_context = lambda *_: None
                try:
                    create()  # and makes it this thread's
                finally:
                    module._warn_existing_cuda_context = warn

            module._create_cuda_context = wait
