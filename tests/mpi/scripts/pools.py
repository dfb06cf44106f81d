import multiprocessing
import time

from distributed import Client

from dask_gpu_mpi import initialize


def pools(count):
    context = multiprocessing.get_context("METHOD")
    for _ in range(count):
        with context.Pool(2) as pool:  # whose end is a SIGTERM
            pool.map(abs, range(4))
    global left
    left = context.Pool(1)
    left.apply_async(time.sleep, (600,))
    stubborn = context.Process(target=time.sleep, args=(600,))
    stubborn.start()
    stubborn.terminate()  # before it runs, perhaps
    stubborn.join(20)
    return count, stubborn.exitcode


initialize(worker_class="CLASS", nthreads=1)

with Client() as client:
    print(client.gather([client.submit(pools, 5, workers=[name]) for name in range(2)]))
