import time

from distributed import Client, wait

from support.jobs.scripts.tell import tell


def make(i):
    return bytes(100_000)


def join(*parts):
    time.sleep(0.02)
    return sum(map(len, parts))


def fail():
    raise ValueError("on purpose")


client = Client()
made = client.map(make, range(20), pure=False)
joined = [client.submit(join, *made, pure=False) for _ in range(8)]
tell(joined=client.gather(joined))
assert isinstance(client.submit(fail, pure=False).exception(), ValueError)
time.sleep(1.2)
