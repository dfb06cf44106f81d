import time

from distributed import Client

from support.jobs.scripts.tell import tell


def burn(seconds, megabytes):
    import numba.cuda
    import numpy as np

    @numba.cuda.jit
    def spin(values, turns):
        i = numba.cuda.grid(1)
        if i < values.size:
            value = values[i]
            for _ in range(turns):
                value = value * 1.0000001 + 0.5
            values[i] = value

    values = numba.cuda.to_device(np.ones(megabytes << 17))
    end = time.time() + seconds
    while time.time() < end:
        spin[4096, 256](values, 2000)
        numba.cuda.synchronize()
    return bytes(1_000_000)


client = Client()
workers = list(client.scheduler_info(n_workers=-1)["workers"])
held = [client.submit(burn, 8, 2048, workers=[worker], pure=False) for worker in workers]
sums = [
    client.submit(lambda *parts: sum(map(len, parts)), *held, workers=[worker], pure=False)
    for worker in workers
]
tell(sums=client.gather(sums), workers=len(workers))
time.sleep(2)
