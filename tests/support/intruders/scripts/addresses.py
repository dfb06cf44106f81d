import os


def ports(server):
    """What a server of Dask listens on: for messages and for HTTP."""
    http = getattr(server, "http_server", None)
    return [
        ("comm", int(server.address.rpartition(":")[2])),
        *([("http", http.port)] if http is not None else []),
    ]


def of_scheduler(dask_scheduler):
    return "scheduler", os.getpid(), ports(dask_scheduler)


async def of_worker(dask_worker):
    if (
        "dask_gpu_mpi-offer_ucx" in dask_worker.plugins
    ):  # it starts a moment after the worker, and opens sockets then
        from dask_gpu_mpi.network.ucx_endpoint import Ucx

        await Ucx.begin()
    return "worker", os.getpid(), ports(dask_worker)


def of_nanny(dask_worker):
    return "nanny", os.getpid(), ports(dask_worker)


def hub():
    """The listener of rank 0's agent, in the words of this rank; a job of one rank has none."""
    from dask_gpu_mpi.job.start import _member

    joined = _member.joined
    port = joined.entry.hub[1]
    return ["hub", joined.agent.pid, [["comm", port]] if port else []]


def servers(client):
    return [
        hub(),
        client.run_on_scheduler(of_scheduler),
        *client.run(of_worker).values(),
        *client.run(of_nanny, nanny=True).values(),
    ]
