import json
import os
import traceback
from urllib.request import urlopen

import dask

from dask_gpu_mpi import initialize
from support.jobs.scripts.tell import go_on, tell

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
    tell(address=session.address)
    go_on()
