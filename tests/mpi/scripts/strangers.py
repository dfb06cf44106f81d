import json
import os
import re
import subprocess
import sys
import textwrap
import time

from dask_gpu_mpi import initialize
from dask_gpu_mpi.network.credentials import make_credentials
from support.jobs.scripts.tell import looks, tell

session = initialize(worker_class="distributed.Nanny")
with session.client() as client:
    tell(workers=looks(client), address=session.address)
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
foreign = json.dumps(make_credentials().dask_config())
environ = {key: value for key, value in os.environ.items() if not re.match("PMI|OMPI_COMM|HYDI|PRTE", key)}
command = [sys.executable, "-c", stranger, session.address]
done = subprocess.run(command, input=foreign, env=environ, capture_output=True, text=True)
tell(strangers=json.loads(done.stdout), words=done.stderr[-2000:])
until = os.path.join(os.environ["TMPDIR"], "go-on")
while not os.path.exists(until):
    time.sleep(0.05)
