import os
import sys
import time

from distributed import Client, Nanny
from distributed.diagnostics.plugin import NannyPlugin, SchedulerPlugin, WorkerPlugin


class Scheduler(SchedulerPlugin):
    async def close(self):
        print("the scheduler's plugin")


class Worker(WorkerPlugin):
    def teardown(self, worker):
        print("the worker's plugin")


class OfNanny(NannyPlugin):
    def teardown(self, nanny):
        print("the nanny's plugin")


def task():
    print("a task")
    print("half a line", end="")


def scheduler():
    print("the scheduler")


go_on, nanny = sys.argv[1], sys.argv[2] == "distributed.Nanny"
client = Client()
client.register_plugin(Scheduler())
client.register_plugin(Worker())
if nanny:
    client.register_plugin(OfNanny())
client.run_on_scheduler(scheduler)
client.submit(task).result()
while not os.path.exists(go_on):
    time.sleep(0.02)
