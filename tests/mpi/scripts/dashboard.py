import subprocess
import sys

from distributed import Client

from support.jobs.scripts.tell import go_on, tell, wait_until


def routes(dask_scheduler):
    found = set()
    for application in (dask_scheduler.http_application, *dask_scheduler.http_application.applications):
        for rule in (*application.default_router.rules, *application.wildcard_router.rules):
            found |= {each.matcher.regex.pattern for each in getattr(rule.target, "rules", [rule])}
    return found


client = Client()
# the pages come after the script's client
wait_until(lambda: "/status/ws$" in client.run_on_scheduler(routes))
child = "from distributed import Client; print(Client().dashboard_link)"
done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
tell(routes=sorted(client.run_on_scheduler(routes)), child=done.stdout.strip())
tell(link=client.dashboard_link, html=client._repr_html_())
go_on()
print("works", client.submit(sum, [1, 2]).result(), flush=True)
