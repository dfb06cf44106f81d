import contextlib
import os
import signal
import sys
import time
import traceback
import zipfile
from pathlib import Path

from distributed import Client, performance_report, wait, worker_client

from support.jobs.scripts.tell import tell, wait_until

FOLDER = Path(sys.argv[1])
SECONDS = 90  # for each of them


def late(number, frame):
    raise TimeoutError(f"not within {SECONDS} s")


signal.signal(signal.SIGALRM, late)
client = Client()


def names(dask_scheduler):
    return sorted(str(worker.name) for worker in dask_scheduler.workers.values())


def pids(**kwargs):
    found = client.run(lambda dask_worker: (str(dask_worker.name), os.getpid()), **kwargs)
    return dict(found.values())


def report():
    with performance_report(filename=str(FOLDER / "report.html")):
        return client.gather(client.map(lambda x: x + 1, range(10), pure=False))


def nested():
    def outer(count):
        with worker_client() as inner:
            return sum(inner.gather(inner.map(lambda x: x * x, range(count), pure=False)))

    # as many as there are threads, which all wait for others
    futures = [client.submit(outer, 4, pure=False, workers=[address_of(name)]) for name in pids()]
    return client.gather(futures)


def use():
    import uploaded
    import zipped

    return [uploaded.VALUE, zipped.VALUE]


def upload():
    (FOLDER / "uploaded.py").write_text("VALUE = 1\n")
    with zipfile.ZipFile(FOLDER / "zipped.zip", "w") as file:
        file.writestr("zipped.py", "VALUE = 2\n")
    for name in ("uploaded.py", "zipped.zip"):
        client.upload_file(str(FOLDER / name))
        (FOLDER / name).unlink()
    found = {"all": list(client.run(use).values())}
    client.restart()
    found["restarted"] = list(client.run(use).values())
    before = pids()
    with contextlib.suppress(Exception):
        client.run(os.kill, before["1"], signal.SIGKILL, workers=[address_of("1")])
    wait_until(lambda: pids(on_error="ignore").get("1", before["1"]) != before["1"], 60)
    return found | {"died": list(client.run(use).values())}


def address_of(name):
    def find(dask_scheduler):
        return next(address for address, worker in dask_scheduler.workers.items() if str(worker.name) == name)

    return client.run_on_scheduler(find)


def restart():
    before, kept = pids(), client.submit(sum, [1, 2], pure=False)
    wait(kept)
    client.restart()
    after = pids()
    new = [name for name in after if after[name] != before[name]]
    return {
        "names": sorted(after),
        "new": sorted(new),
        "kept": kept.status,
        "works": client.submit(sum, [3, 4]).result(),
    }


def restart_again_and_again():
    for _ in range(6):
        client.restart()
    return client.run_on_scheduler(names)


def retire():
    (data,) = client.scatter([list(range(1000))], workers=[address_of("1")])
    client.retire_workers([address_of("1")])
    wait_until(lambda: client.run_on_scheduler(names) == ["0"], 20)
    time.sleep(2)  # a worker that is started again would be there
    found = {"names": client.run_on_scheduler(names), "moved": client.submit(sum, data).result()}
    client.restart()
    return found | {"restarted": client.run_on_scheduler(names), "works": client.submit(sum, [1, 2]).result()}


for test in (report, nested, upload, restart, restart_again_and_again, retire):
    signal.alarm(SECONDS)
    try:
        tell(**{test.__name__: test()})
    except Exception:
        tell(**{test.__name__: traceback.format_exc()})
    signal.alarm(0)
