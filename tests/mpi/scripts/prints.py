import sys

from distributed import Client, Nanny
from distributed.diagnostics.plugin import NannyPlugin, SchedulerPlugin, WorkerPlugin

from support.jobs.scripts.tell import go_on


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


nanny = sys.argv[1] == "distributed.Nanny"
client = Client()
client.register_plugin(Scheduler())
client.register_plugin(Worker())
if nanny:
    client.register_plugin(OfNanny())
client.run_on_scheduler(scheduler)
client.submit(task).result()
go_on()
