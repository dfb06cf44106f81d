"""The rank's side of the processes that it starts first: its agent, and on each node one that keeps the CUDA driver initialised.

A rank starts its agent before it reads its options: meanwhile the agent imports Dask, which the rank never does. From then on
they exchange messages (`startup.messages`), and the rank ends the agent within a deadline.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dask_gpu_mpi.agent.boot import Begin
from dask_gpu_mpi.base.frames import FrameReader, Held, write_frame
from dask_gpu_mpi.base.streams import say
from dask_gpu_mpi.base.text import exit_text
from dask_gpu_mpi.base.timeouts import KILLING
from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.nvidia import VISIBLE_DEVICES, driver_is_installed, sees_none
from dask_gpu_mpi.machine.scratch import remove_scratch
from dask_gpu_mpi.options.convert import loaded_config
from dask_gpu_mpi.options.model import Options
from dask_gpu_mpi.sites.launchers import first_on_host, scrub
from dask_gpu_mpi.startup.messages import Configuration, Kind

# The agent's __main__ is empty: a child process has nothing to import again. With -c, Python searches the working directory
# first, where other users may have put a module. So no file is imported before the rank's path is set. -P would do the same,
# but processes that tasks start inherit Python's flags.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[5:]; from dask_gpu_mpi.agent.boot import main; "
    "main(int(sys.argv[1]), rank=int(sys.argv[2]), follow=bool(int(sys.argv[3])), ranks_end=int(sys.argv[4]))"
)


class AgentProcess:
    """The agent of this rank.

    It is started at once, to import while this process reads its options and meets the other ranks. Then it receives frames: a
    `Begin` (`begin`), a `Configuration` (`configure`), then messages (`send`).
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        #: The rank's, without the launcher's identity.
        self.environ = _agent_environ(environ)
        # PR_SET_PDEATHSIG follows the thread that forks: only the main thread lives as long as the process.
        dies_with_rank = threading.current_thread() is threading.main_thread()
        ours, agents = socket.socketpair()
        try:
            arguments = (agents.fileno(), os.getpid(), int(dies_with_rank), os.fstat(ours.fileno()).st_ino)
            self._process = subprocess.Popen(
                [sys.executable, *_interpreter_options(), "-c", _BOOT, *map(str, arguments), *import_path()],
                stdin=subprocess.DEVNULL,
                pass_fds=(agents.fileno(),),
                env=self.environ,
                # A terminal's Ctrl-C and a launcher's signals are for the rank alone.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            agents.close()
        #: The descriptor of the socket to the agent, for those who wait for messages.
        self.fd = ours.detach()
        self._held = Held(self.fd)
        self._reader = FrameReader(self.fd)
        self._lock = threading.Lock()
        self._heard: deque[tuple[Kind, Any]] = deque()
        self._open = True
        #: Its directory, once it has reported that; removed here if the agent could not.
        self.scratch: str | None = None

    @property
    def pid(self) -> int:
        """The agent's process id."""
        return self._process.pid

    @property
    def lost(self) -> bool:
        """True once the agent's end of the socket is closed: it has died."""
        return self._reader.eof

    def begin(self, options: Options, environ: Mapping[str, str], *, inspect_gpus: bool = True) -> None:
        """Send the first frame, once, before the configuration is known; `inspect_gpus`: have GPUs inspected, if any."""
        cuda = may_use_cuda(options, environ)
        self._write(Begin(cuda=cuda, inspect=cuda and inspect_gpus))

    def configure(self, configuration: Configuration) -> None:
        """Send the second frame, after `begin`; the agent reads it when it has imported Dask, until the deadline at most."""
        import cloudpickle  # the options may hold a class of the user's script

        patience = max(1.0, configuration.deadline - time.monotonic())
        self._write(configuration, dumps=cloudpickle.dumps, patience=patience)

    def send(self, kind: Kind, payload: Any = None, *, fds: Sequence[int] = ()) -> None:
        """Send a message; `fds`: descriptors that the agent gets copies of."""
        self._write((kind, payload), fds=fds)

    def _write(self, frame: Any, **how: Any) -> None:
        if self._open and self._held.is_ours:
            try:
                write_frame(self.fd, frame, **how)
            except TimeoutError:  # it hangs, and is noticed when it does not answer
                self._open = False
            except ConnectionError:  # it has died, which shows as `lost`
                pass

    def events(self, timeout: float = 0.0) -> Iterator[tuple[Kind, Any]]:
        """The agent's messages that nobody has taken yet; waits at most `timeout` seconds for one.

        Those that the caller does not take stay: the first of the running cluster may come with the last of the start.
        """
        with self._lock:
            self._heard += self._reader.read(0.0 if self._heard else timeout)
        while self._heard:
            kind, payload = self._heard.popleft()
            if kind == Kind.PREPARED:
                self.scratch = payload
            yield kind, payload

    def take_line(self) -> int | None:
        """The descriptor of the agent's connection to the hub, which has come with `Kind.ENTERED`; None: none has."""
        return self._reader.fds.pop() if self._reader.fds else None

    def exit_text(self) -> str:
        """How the agent died, as text."""
        if self._reader.taken:
            return "the script closed the descriptors of this process"
        try:
            return exit_text(self._process.wait(timeout=0.5))
        except subprocess.TimeoutExpired:
            return "it closed its connection"

    def kill(self) -> None:
        """End the agent and its processes now; `close` still has to be called."""
        self._process.kill()

    def close(self, timeout: float) -> None:
        """End the agent and its processes, and remove its scratch: end of file, `timeout` seconds, then SIGKILL."""
        # First as a message: a process that the script has forked may hold the socket open as well.
        self._write((Kind.CLOSE, None), patience=timeout)
        self._open = False
        if self._held.is_ours:
            with contextlib.suppress(OSError):
                sock = socket.socket(fileno=os.dup(self.fd))
                sock.shutdown(socket.SHUT_WR)
                sock.close()
        limit = time.monotonic() + timeout
        while self._process.poll() is None:
            if time.monotonic() > limit:
                # Its fork server and workers end with it, by pipes and PR_SET_PDEATHSIG.
                self._process.kill()
                try:
                    self._process.wait(KILLING)
                except subprocess.TimeoutExpired:
                    say(
                        f"warning: agent (process {self.pid}) still running {KILLING:g} s after SIGKILL; continuing without it. "
                        "Fix: find out what hangs on this node (its NVIDIA driver, a file system)"
                    )
                break
            time.sleep(0.01)
        with self._lock:
            self._reader.close()
        if self._process.returncode != 0 and self.scratch is not None:
            # its workers end just now, and may still write there
            remove_scratch(self.scratch, within=max(2.0, limit - time.monotonic()), settle=0.1)


def begin_agent(agent: AgentProcess, options: Options, environ: Mapping[str, str]) -> AgentProcess:
    """Send an agent that was started before the options were known its first frame, and return it.

    If Dask's configuration sets variables that an agent must have from its start, another agent replaces it.
    """
    if agent.environ != _agent_environ(environ):
        agent.close(1.0)
        agent = AgentProcess(environ)
    agent.begin(options, environ)
    return agent


# The environment, path and options of the agent's interpreter.

#: distributed's defaults for ``distributed.nanny.pre-spawn-environ``: variables to set before a worker's process starts. Workers
#: are forked from the agent, so the agent must have them from its start. The seed makes hashes of str the same on all hosts;
#: distributed gives the same number to each worker that it spawns.
PRE_SPAWN = {
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "6640",
}
#: The key by which Dask's users set such variables.
_PRE_SPAWN_KEY = "distributed.nanny.pre-spawn-environ"


def _agent_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The rank's environment without the launcher's identity, and with the variables that workers need from the start."""
    loaded = loaded_config()
    configured = (loaded.get(_PRE_SPAWN_KEY, None) if loaded is not None else None) or {}
    if not isinstance(configured, Mapping):
        raise InputError(
            f"configuration {_PRE_SPAWN_KEY}: invalid value {str(configured)[:40]!r}",
            expected="names and values",
            fix="correct or remove it",
        )
    wanted = {key: str(value) for key, value in {**PRE_SPAWN, **configured}.items() if value is not None}
    return {**wanted, **scrub(environ)}


def import_path() -> list[str]:
    """``sys.path`` for the agent, and for MPI's process.

    The empty entry stands for the working directory, in which MPI's process is not; Python ignores entries that are not str.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was deleted: nothing can be imported from there
        here = ""
    entries = [entry or here for entry in sys.path if isinstance(entry, str)]
    return [os.path.join(here, entry) for entry in entries if entry]


#: Options of Python by the name that they have in ``sys.flags``, as their number there says how often they were given.
_FLAGS = {
    "debug": "d", "dont_write_bytecode": "B", "no_site": "S", "no_user_site": "s", "ignore_environment": "E", "isolated": "I",
    "safe_path": "P", "optimize": "O", "bytes_warning": "b", "verbose": "v", "quiet": "q",
}  # fmt: skip


def _interpreter_options() -> list[str]:
    """The options of this interpreter, with which the agent runs too, as processes of `multiprocessing` do."""
    given = ((letter, int(getattr(sys.flags, name))) for name, letter in _FLAGS.items())
    options = [f"-{letter * count}" for letter, count in given if count]
    options += [f"-W{each}" for each in sys.warnoptions]
    return options + [
        f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()
    ]


# The CUDA keep-alive process: it keeps the CUDA driver initialised while the processes of the workers start.
#
# The first process on a node that calls ``cuInit`` waits until the driver has initialised all GPUs, even in persistence mode: a
# second on 4xH200. While one process has done so, the others wait a tenth of that. Neither the rank nor its agent can be that
# process: CUDA does not work in processes that are forked after ``cuInit``, and all workers are forked. So a separate process
# calls it at the start, makes no context, and ends when the workers are up.

#: Seconds after which it ends in any case: only the start needs it.
LONGEST = 120.0
#: The directory in which MPS listens by default.
MPS = "/tmp/nvidia-mps"

# Ends with its parent, at the end of its standard input, for which a thread waits during `cuInit`. Workers report CUDA's errors.
_KEEPALIVE = """
import _thread, ctypes, os, select, sys

def end():
    select.select([0], [], [], float(sys.argv[1]))
    os._exit(0)

_thread.start_new_thread(end, ())
try:
    ctypes.CDLL("libcuda.so.1").cuInit(0)
except (OSError, AttributeError):
    pass
end()
"""


def start_cuda_keepalive(options: Options, environ: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """Start the process, if this rank is the first of its node and may have GPU workers; else return None.

    It is an interpreter that imports nothing else, and so is there long before the agent. It has no variables of the launcher.
    """
    # With MPS, ``cuInit`` starts a server, which would count as a process of another user.
    with_mps = "CUDA_MPS_PIPE_DIRECTORY" in environ or os.path.exists(MPS)
    if with_mps or not may_use_cuda(options, environ) or not first_on_host(environ):
        return None
    with contextlib.suppress(OSError):  # no process can be started: the agent's start reports that
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPALIVE, str(LONGEST)],
            env=scrub(environ),
            stdin=subprocess.PIPE,
            # While it is in the driver it can't be killed, and a launcher waits for the end of these two streams.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    return None


def may_use_cuda(options: Options, environ: Mapping[str, str]) -> bool:
    """Whether the workers may be GPU workers, as far as is known now: a wrong guess costs only time."""
    if options.worker_kind == "cpu" or sees_none(environ.get(VISIBLE_DEVICES)):
        return False
    return options.worker_kind == "gpu" or driver_is_installed()


def release_cuda_keepalive(keepalive: subprocess.Popen[bytes]) -> None:
    """Let the process end."""
    assert keepalive.stdin is not None
    keepalive.stdin.close()
    # It may hang in the driver, so a thread waits for it. If no thread can be started, the kernel reaps it later.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=keepalive.wait, name="CUDA driver", daemon=True).start()
