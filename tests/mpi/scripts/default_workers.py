import time

from distributed import Client, get_worker, wait

from support.jobs.scripts.tell import tell


def where(*_):
    time.sleep(0.05)
    return str(get_worker().name)


def uses_the_gpu(*_):
    raise RuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")


with Client() as client:

    def names(**asks):
        return sorted(set(client.gather(client.map(where, range(24), pure=False, **asks))))

    def notes(worker):
        (failed,) = wait([client.submit(uses_the_gpu, workers=worker, pure=False)]).done
        return [worker, *failed.exception().__notes__]

    loaded = client.submit(where, resources={"CPU": 1})
    tell(
        unasked=names(),
        cpu=names(resources={"CPU": 1}),
        gpu=names(resources={"GPU": 1}),
        one=names(workers="0-cpu-0"),
        loaded=[loaded.result(), client.submit(where, loaded).result()],
        run=sorted(client.run(lambda dask_worker: dask_worker.name).values()),
        notes=[notes("0-cpu-0"), notes("0-0")],
    )
    client.restart()
    tell(again=names())
