import time

from distributed import Client

from support.jobs.scripts.tell import go_on, looks, tell, wait_until

client = Client()
