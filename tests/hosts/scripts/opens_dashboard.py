import json
import sys
import time

from selenium import webdriver

options = webdriver.ChromeOptions()
for word in (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    f"--user-data-dir={sys.argv[1]}",
):
    options.add_argument(word)
options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
driver = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
ROWS = """
const rows = [];
for (const document of window.Bokeh ? Bokeh.documents : [])
    for (const model of document._all_models.values())
        if (model.data && "gpu-index" in model.data)
            rows.push(["worker", "gpu-index"].map(name => Array.from(model.data[name])));
return rows;
"""
try:
    driver.set_page_load_timeout(60)
    found = {}
    driver.get(sys.argv[2])
    for page in ("status", "individual-gpu-memory", "individual-gpu-utilization", "gpu"):
        if page != "status":
            driver.get(sys.argv[2].partition("/status")[0] + "/" + page)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            drawn = driver.execute_script("return window.Bokeh ? Bokeh.documents.map(d => d.is_idle) : []")
            rows = driver.execute_script(ROWS)
            if drawn and all(drawn) and (page == "status" or (rows and len(rows[0][0]) >= 2)):
                break
            time.sleep(0.2)
        log = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        found[page] = {
            "title": driver.title,
            "drawn": drawn,
            "rows": rows,
            "errors": log,
            "links": driver.execute_script("return Array.from(document.links, link => link.pathname)"),
            "text": driver.find_element("tag name", "body").text,
        }
    print("FOUND", json.dumps(found))
finally:
    driver.quit()
