import contextlib
import json
import sys

from support.jobs.clusters import until
from support.jobs.screens import browser

ROWS = """
const rows = [];
for (const document of window.Bokeh ? Bokeh.documents : [])
    for (const model of document._all_models.values())
        if (model.data && "gpu-index" in model.data)
            rows.push(["worker", "gpu-index"].map(name => Array.from(model.data[name])));
return rows;
"""
DRAWN = "return window.Bokeh ? Bokeh.documents.map(d => d.is_idle) : []"
LINKS = "return Array.from(document.links, link => link.pathname)"


def is_there():
    rows, drawn = run(ROWS), run(DRAWN)
    return drawn and all(drawn) and (page == "status" or (rows and len(rows[0][0]) >= 2))


found = {}
with browser() as chromium:
    run = chromium.driver.execute_script
    chromium.driver.get(sys.argv[1])
    for page in ("status", "individual-gpu-memory", "individual-gpu-utilization", "gpu"):
        if page != "status":
            chromium.driver.get(sys.argv[1].partition("/status")[0] + "/" + page)
        with contextlib.suppress(AssertionError):  # the test says so
            until(is_there, 30)
        log = [each["message"] for each in chromium.driver.get_log("browser") if each["level"] == "SEVERE"]
        text = chromium.driver.find_element("tag name", "body").text
        found[page] = {
            "drawn": run(DRAWN),
            "rows": run(ROWS),
            "errors": log,
            "links": run(LINKS),
            "text": text,
        }
        found[page]["title"] = chromium.driver.title
print("FOUND", json.dumps(found))
