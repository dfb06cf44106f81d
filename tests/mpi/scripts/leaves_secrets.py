import json
import os
import subprocess
import sys
import textwrap
import time
import traceback
from urllib.request import urlopen

import dask

from dask_gpu_mpi import initialize
from dask_gpu_mpi.network.credentials import make_credentials
from dask_gpu_mpi.sites.launchers import scrub
from support.jobs.scripts.tell import tell

# tries to get in without the job's credentials
stranger = textwrap.dedent("""
    import asyncio, json, socket, ssl, sys, tempfile
    import dask
    from distributed import Client, Security

    address, foreign = sys.argv[1], json.loads(sys.stdin.read())

    async def as_client(address, **kwargs):
        try:
            async with Client(address, asynchronous=True, timeout="3s", **kwargs) as client:
                return str(await client.submit(lambda: "in"))
        except Exception as error:
            return f"refused: {type(error).__name__}"

    def as_anybody(*certificate):
        # believes everything that the scheduler says: the refusal must be the scheduler's
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if certificate:
            with tempfile.NamedTemporaryFile("w") as file:
                file.write("".join(certificate))
                file.flush()
                context.load_cert_chain(file.name)
        host, port = address.removeprefix("tls://").rsplit(":", 1)
        try:
            with socket.create_connection((host, int(port)), 5) as plain, context.wrap_socket(plain) as wrapped:
                said = wrapped.recv(1000)  # Dask's own greeting, for whoever is let in
                return f"in: {said}" if said else "refused: silence"
        except OSError as error:
            return f"refused: {getattr(error, 'reason', error)}"

    with dask.config.set(foreign):
        security = Security()
    own = security.get_tls_config_for_role("client")
    print(json.dumps([
        as_anybody(),
        as_anybody(own["key"], own["cert"]),
        asyncio.run(as_client(address, security=security)),
        asyncio.run(as_client(address.replace("tls://", "tcp://"))),
    ]))
""")

session = initialize()
here = os.environ["TMPDIR"]
with session.client() as client:
    assert client.submit(sum, range(10)).result() == 45
    # there is one to be found
    assert any("PRIVATE KEY" in str(value) for value in client.run(lambda: dask.config.config).values())
    client.dump_cluster_state(os.path.join(here, "dump"))
    client.dump_cluster_state(os.path.join(here, "dump"), format="yaml")
    client.dump_cluster_state(os.path.join(here, "from-scheduler"), format="yaml", write_from_scheduler=True)
    try:
        client.submit(lambda: 1 / 0).result()
    except ZeroDivisionError as error:
        raised = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    said = {
        "session": repr(session),
        "plan": repr(session.plan),
        "security": repr(session.security),
        "html": session.security._repr_html_(),
        "versions": repr(client.get_versions()),
        "scheduler": repr(client.scheduler_info(n_workers=-1)),
        "logs": repr(client.get_worker_logs()),
        "scheduler's logs": repr(client.get_scheduler_logs()),
        "client": repr(client) + client._repr_html_(),
        "identity": repr(client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.identity())),
        "raised": raised,
    }
    for page in ("info/main/workers.html", "json/identity.json", "json/index.html", "metrics", "sysmon"):
        url = (session.dashboard_link or "").replace("status", page)
        if url:
            try:
                said[page] = urlopen(url, timeout=10).read().decode(errors="replace")
            except OSError as error:
                said[page] = str(error)
    with open(os.path.join(here, "said.json"), "w") as file:
        json.dump(said, file)
    command = [sys.executable, "-c", stranger, session.address]
    foreign = json.dumps(make_credentials())
    done = subprocess.run(command, input=foreign, env=scrub(os.environ), capture_output=True, text=True)
    tell(strangers=json.loads(done.stdout), words=done.stderr[-2000:])
    until = os.path.join(here, "go-on")
    while not os.path.exists(until):
        time.sleep(0.05)
