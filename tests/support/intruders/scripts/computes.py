import json
import os
import re
import resource
import socket
import sys
import threading
import time
from pathlib import Path

from support.intruders.scripts.addresses import servers
from support.jobs.scripts.tell import tell

HERE = Path(os.environ["TMPDIR"])


def hold_the_start():
    from dask_gpu_mpi.startup import reachability

    connect, listen = reachability.connect_to, reachability.Connecting._listen

    def connect_later(*args, **options):
        limit = time.monotonic() + 60
        while not (HERE / "go-start").exists() and time.monotonic() < limit:
            time.sleep(0.02)
        return connect(*args, **options)

    def listen_and_tell(self, wanted):
        ports = listen(self, wanted)
        address = (wanted.scheduler or wanted.workers).address
        tell(**{f"start-{os.getpid()}": [address, ports.scheduler, ports.workers]})
        return ports

    reachability.connect_to, reachability.Connecting._listen = connect_later, listen_and_tell


class Recorder:
    """Passes connections on, and keeps what their clients send."""

    def __init__(self, address):
        host, _, port = address.rpartition("://")[2].rpartition(":")
        self.to, self.sent, self.open = (host, int(port)), [], []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                inner, _ = self.server.accept()
            except OSError:
                return
            outer = socket.create_connection(self.to)
            self.sent.append(bytearray())
            self.open += [inner, outer]
            threading.Thread(target=self.pump, args=(inner, outer, self.sent[-1]), daemon=True).start()
            threading.Thread(target=self.pump, args=(outer, inner, bytearray()), daemon=True).start()

    def pump(self, source, target, kept):
        try:
            while data := source.recv(65536):
                kept += data
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
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ["INTRUDERS_DESCRIPTORS"]), hard))
    hold_the_start()
    tell(**hide())
    from dask_gpu_mpi import initialize

    session = initialize(**options)
    from distributed import Client

    client = session.client()
    client.wait_for_workers(int(os.environ["INTRUDERS_WORKERS"]))
    for each in client.run(hide).values():
        tell(**each)
    recorder = Recorder(session.address)
    scheme = session.address.partition("://")[0]
    if scheme != "ucx":  # whose connections can't be passed on
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
