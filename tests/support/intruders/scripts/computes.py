import inspect
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from support.intruders.scripts.addresses import servers
from support.jobs.scripts.tell import tell

HERE = Path(os.environ["TMPDIR"])


def hold_the_meeting():
    """In MPI's process of a rank: hide something there; of all ranks but rank 0 it waits for the file "go-meet"."""
    from dask_gpu_mpi.mpi import world

    tell(**hide())
    pass_on = world._pass_on

    def pass_on_later(sock, endpoint):
        limit = time.monotonic() + 60
        while endpoint._comm.rank and not (HERE / "go-meet").exists() and time.monotonic() < limit:
            endpoint._comm.Iprobe(tag=1)  # lets the library work
            time.sleep(0.01)
        pass_on(sock, endpoint)

    if "INTRUDERS_HOLD_MEETING" in os.environ:
        world._pass_on = pass_on_later


def inject(module, function):
    """Have a child process of this rank, which a module starts, call a function of this script first."""
    parts = [inspect.getsource(each) for each in (tell, hide, function)]
    head = "import json, os, sys, time\nfrom pathlib import Path\nHERE = Path(os.environ['TMPDIR'])\n"
    text = "\n".join([head, *parts, f"{function.__name__}()\n"])
    first, then = module._BOOT.split("; from ", 1)
    module._BOOT = f"{first}; exec({text!r}, {{}}); from {then}"


class Recorder:
    """Passes connections on, and keeps what their clients send."""

    def __init__(self, address, copy=None):
        host, _, port = address.rpartition("://")[2].rpartition(":")
        self.to, self.sent, self.open, self.copy = (host, int(port)), [], [], copy
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self.accept, daemon=copy is None).start()

    def accept(self):
        while True:
            try:
                inner, _ = self.server.accept()
            except OSError:
                return
            if self.copy is not None:  # of one connection; nothing listens here after it
                self.server.close()
            outer = socket.create_connection(self.to)
            self.sent.append(bytearray())
            self.open += [inner, outer]
            threading.Thread(
                target=self.pump, args=(inner, outer, self.sent[-1]), daemon=self.copy is None
            ).start()
            threading.Thread(
                target=self.pump, args=(outer, inner, bytearray()), daemon=self.copy is None
            ).start()

    def pump(self, source, target, kept):
        try:
            while data := source.recv(65536):
                kept += data
                if self.copy is not None and self.sent and kept is self.sent[0]:
                    part = self.copy.with_suffix(".part")
                    part.write_bytes(kept)
                    os.replace(part, self.copy)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self):
        self.server.close()
        for each in self.open:
            each.close()


def hide(dask_worker=None):
    """Have 64 random bytes in this process, which nobody else should read or write: where they are, and what they are."""
    import ctypes

    hidden = ctypes.create_string_buffer(os.urandom(64), 64)
    (dask_worker or sys).hidden = hidden
    return {f"memory-{os.getpid()}": [ctypes.addressof(hidden), hidden.raw.hex()]}


def record_the_agent():
    """The agent of rank 1 reaches the hub by a recorder, which keeps what it sends in a file. It outlives this process."""
    from dask_gpu_mpi.job import entering

    made = entering.Entry
    head = "import os, socket, sys, threading\nfrom pathlib import Path\n"
    tail = "print(Recorder(sys.argv[1], Path(sys.argv[2])).port, flush=True)\n"

    def entry(rank, size, hub, *more, **steps):
        if rank == 1:
            words = ["-c", head + inspect.getsource(Recorder) + tail, f"tls://{hub[0]}:{hub[1]}"]
            process = subprocess.Popen(
                [sys.executable, *words, str(HERE / "hub-recorded")],
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            port = int(process.stdout.readline())
            tell(hub_recorder=port)
            hub = ("127.0.0.1", port)
        return made(rank, size, hub, *more, **steps)

    entering.Entry = entry


def use_mpi():
    """Be an MPI process, and let its library work now and then, as a script does that sends messages."""
    from mpi4py import MPI

    def work():
        while not (HERE / "go-end").exists():
            MPI.COMM_WORLD.Iprobe(tag=1)
            time.sleep(0.01)

    threading.Thread(target=work, daemon=True).start()


def note(path):
    with open(path, "a") as file:
        file.write("done\n")


def routes(dask_scheduler=None, dask_worker=None):
    from distributed.http.routing import _descend_routes

    application, out = (
        getattr(dask_scheduler or dask_worker, "http_application", None),
        {"/", "/status", "/sitemap.json"},
    )
    if application is None:
        return []
    for each in [*application.applications, application]:
        out.update(getattr(each, "app_paths", ()))
        for router in (each.default_router, each.wildcard_router):
            _descend_routes(router, set(), out)
    return sorted(re.sub(r"\(.*?\)|[$^]", "x", route) for route in out if "/statics/" not in route)


def compute(client, number):
    """A round: right or an exception."""
    found = client.gather(client.map(lambda x, n=number: x + n, range(50)))
    assert found == [x + number for x in range(50)], found


def main(options):
    tell(**hide())
    if "INTRUDERS_OWN_MPI" in os.environ:
        use_mpi()
    from dask_gpu_mpi import initialize
    from dask_gpu_mpi.mpi import world

    inject(world, hold_the_meeting)
    record_the_agent()

    session = initialize(**options)
    from distributed import Client

    client = session.client()
    client.wait_for_workers(int(os.environ["INTRUDERS_WORKERS"]))
    for each in client.run(hide).values():
        tell(**each)
    recorder = Recorder(session.address)
    scheme = session.address.partition("://")[0]
    with Client(f"{scheme}://127.0.0.1:{recorder.port}") as recorded:
        recorded.run_on_scheduler(note, str(HERE / "notes"))
    recorder.close()
    http = sorted(
        {*client.run_on_scheduler(routes), *(route for each in client.run(routes).values() for route in each)}
    )
    tell(
        servers=servers(client),
        address=session.address,
        routes=http,
        recorded=[bytes(each).hex() for each in recorder.sent],
        recorder=recorder.port,
    )
    number = 0
    while not (HERE / "go-end").exists():
        with session.client() as extra:  # whoever belongs here still gets in
            compute(extra, number)
        number += 1
        (HERE / "rounds.part").write_text(str(number))
        os.rename(HERE / "rounds.part", HERE / "rounds")
    compute(client, number)
    tell(rounds=number, right=True)
    client.close()


main(json.loads(os.environ["INTRUDERS_OPTIONS"]))
