# SPDX-License-Identifier: Apache-2.0
"""Dashboards and alerts: written by scripts/dashboards, of names that docs/operating/metrics.md documents, and understood by a real
Prometheus that scrapes a pool in use. What vLLM's engines serve is a stand-in here, made of the documented names."""

import contextlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import charts
import daemon
import pytest
import yaml
from waiting import free_port

FOLDER = charts.CHART / "dashboards"
METRICS = (charts.ROOT / "docs/operating/metrics.md").read_text().replace("\n  ", " ")
ROW = re.compile(r"^- `((?:cxl_pool_|vllm:kvbm_cxl_)\w+)(?:{([\w,]+)})?`(?: \(([^)]*)\))?: ", re.MULTILINE)
CXLCTL = charts.ROOT / "target/release/cxlctl"
NAMES = re.compile(r"\b(?:cxl_pool_\w+|vllm:kvbm_cxl_\w+)")
# Of Prometheus' own making.
SUFFIXES = ("_bucket", "_sum", "_count")
WAIT_S = 120


def expressions():
    """(file and title, expression) of everything that is asked."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found += [(f"{path.stem}: {panel['title']}", target["expr"]) for target in panel["targets"]]
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return found + [(f"alert {rule['alert']}", rule["expr"]) for rule in group["rules"]]


def documented():
    """Names that a Prometheus sees: name -> its labels."""
    found = {}
    for name, labels, _ in ROW.findall(METRICS):
        for each in [name + suffix for suffix in SUFFIXES] if name.endswith("_seconds") else [name]:
            found[each] = labels.split(",") if labels else []
    return found


def test_files_are_what_the_script_writes():
    subprocess.run([sys.executable, charts.ROOT / "scripts/dashboards", "--check"], check=True, timeout=60)
    files = [json.loads(path.read_text()) for path in FOLDER.glob("*.json")]
    assert {each["uid"] for each in files} == {f"kvbm-cxl-{name}" for name in ("pool", "hosts", "cache", "transfers", "nixl")}
    assert all(panel["datasource"]["uid"] == "${datasource}" for each in files for panel in each["panels"])
    engines = [variable for each in files for variable in each["templating"]["list"] if variable["name"] == "instance"]
    assert len(engines) == len(files) and all('pool_info{pool="$pool"}' in each["query"]["query"] for each in engines)


def test_every_panel_shows_one_pool():
    for where, expression in expressions():
        if not where.startswith("alert"):
            selectors = re.findall(rf"{NAMES.pattern}{{([^}}]*)}}", expression)
            assert len(selectors) == len(NAMES.findall(expression)), where
            assert all(of.startswith(('pool="$pool"', 'instance=~"$instance"')) for of in selectors), f"{where}: {expression}"


def test_every_name_and_label_is_documented():
    known = documented()
    for where, expression in expressions():
        names = NAMES.findall(expression)
        assert names and set(names) <= set(known), f"{where}: {set(names) - set(known)}"
        labels = {"instance", "le", "pool"}.union(*(known[name] for name in names))
        by = [label.strip() for found in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for label in found.split(",")]
        by += re.findall(r"(\w+)=~?\"", expression)
        assert set(by) <= labels, f"{where}: {set(by) - labels}"


def test_legends_use_labels_that_the_expression_leaves():
    for path in FOLDER.glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                kept = re.findall(r"by \(([^)]*)\)", target["expr"])
                if wanted and kept:
                    assert wanted <= set(kept[0].split(", ")), panel["title"]


def engine_page(number):
    """What an engine's metrics page may hold after so many scrapes: every documented name, with its labels' documented values."""
    lines = []
    for name, label, values in ROW.findall(METRICS):
        if not name.startswith("vllm:"):
            continue
        if name.endswith("_seconds"):
            lines += [f'{name}_bucket{{le="{le}"}} {number * share}' for le, share in (("0.01", 1), ("0.1", 2), ("+Inf", 3))]
            lines += [f"{name}_sum {number}", f"{name}_count {3 * number}"]
        elif label:
            lines += [f'{name}{{{label}="{value.strip()}"}} {number}' for value in (values or "of-this-rack").split(",")]
        else:
            lines.append(f"{name} {number}")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def engine_stand_in():
    """A metrics page of an engine: its address."""
    scrapes = iter(range(1, 1 << 30))

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(engine_page(next(scrapes)).encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def child(command, env, log):
    """A process, ended by SIGTERM."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(address, path, **query):
    """What an HTTP interface of Prometheus answers."""
    with urllib.request.urlopen(f"http://{address}{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
        return json.load(answer)["data"]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    """The address of a Prometheus that scrapes a pool with two hosts at work, and a stand-in for an engine."""
    program = daemon.program("prometheus")
    if not program:
        pytest.skip("no prometheus here: run make setup-deploy")
    if not CXLCTL.is_file():
        pytest.skip("no cxlctl here: run make build")
    folder = tmp_path_factory.mktemp("dashboards")
    pool = Path(f"/dev/shm/kvbm-cxl-dashboards-{os.getpid()}")
    env = {name: value for name, value in os.environ.items() if not name.startswith("CXL_")}
    env |= {"CXL_POOL": f"{pool},size=64M", "CXL_SUSPECT_MS": "30000"}
    exporter, server = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as ends:
        ends.callback(lambda: pool.unlink(missing_ok=True))
        subprocess.run([CXLCTL, "format", "--cells", "64K:50%"], env=env, check=True, capture_output=True, timeout=120)
        for number in (1, 2):
            told = {**env, "CXL_MACHINE_ID": f"host-{number}", "CXL_STATE_DIR": str(folder / f"state-{number}")}
            command = [sys.executable, str(charts.ROOT / "tests/deploy/rack_host.py"), "serve", str(number), "50"]
            ends.enter_context(child(command, told, folder / f"host-{number}.log"))
        ends.enter_context(child([CXLCTL, "exporter", "--port", exporter.split(":")[1]], env, folder / "exporter.log"))
        engine = ends.enter_context(engine_stand_in())
        configuration = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(FOLDER / "alerts.yaml")],
            "scrape_configs": [
                {"job_name": "pool", "static_configs": [{"targets": [exporter]}]},
                {"job_name": "workers", "static_configs": [{"targets": [engine]}]},
            ],
        }
        (folder / "prometheus.yaml").write_text(json.dumps(configuration))
        command = [program, "--config.file", str(folder / "prometheus.yaml"), "--storage.tsdb.path", str(folder / "data")]
        ends.enter_context(child([*command, "--web.listen-address", server], env, folder / "prometheus.log"))
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                moving = ask(server, "/api/v1/query", query="rate(cxl_pool_host_pulled_blocks_total[10s]) > 0")["result"]
                engines = ask(server, "/api/v1/query", query="rate(vllm:kvbm_cxl_loads_total[10s]) > 0")["result"]
                if len(moving) == 2 and engines:
                    break
            assert time.monotonic() < deadline, "\n".join(log.read_text(errors="replace")[-2000:] for log in folder.glob("*.log"))
            time.sleep(0.5)
        yield server
    shutil.rmtree(folder, ignore_errors=True)


# Nothing to see on a pool without such trouble: these have to be understood, and answer nothing.
SILENT = {f"alert {rule['alert']}" for rule in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]}
# The stand-in counts failures like everything else.
LOUD = {"alert CxlLoadsFail", "alert CxlPromptsAreForeign", "alert CxlPoolRefusesBlocks"}
# Hosts get two processors at most here, and locks are rarely taken once a cache is warm.
MAY_BE_EMPTY = {"hosts: Time to get a lock"}


def asked(expression, address, window="20s"):
    """The expression of a panel, with values in the place of Grafana's variables: the one pool, every engine."""
    (pool,) = {each["metric"]["pool"] for each in ask(address, "/api/v1/query", query="cxl_pool_info")["result"]}
    return expression.replace("$__rate_interval", window).replace("$pool", pool).replace("$instance", ".*")


def test_every_expression_answers_on_a_pool_in_use(prometheus):
    for where, expression in expressions():
        answer = ask(prometheus, "/api/v1/query", query=asked(expression, prometheus))["result"]
        if where in SILENT - LOUD:
            assert not answer, f"{where} would fire: {answer}"
        elif where not in MAY_BE_EMPTY:
            assert answer, f"{where}: nothing for {expression}"


def test_figures_are_those_of_the_pool(prometheus):
    def value(expression):
        answer = ask(prometheus, "/api/v1/query", query=expression)["result"]
        return {each["metric"].get("slot", ""): float(each["value"][1]) for each in answer}

    assert value('cxl_pool_slots{state="live"}') == {"": 2.0} and value("cxl_pool_size_bytes") == {"": float(64 << 20)}
    assert all(count >= 50 for count in value("cxl_pool_host_published_blocks_total").values())
    # Of a round each host asks for 50 blocks that are there and 2 that are not.
    found, missed = (f"sum(rate(cxl_pool_host_{what}_total[20s]))" for what in ("hits", "misses"))
    (hits,) = value(f"{found} / ({found} + {missed})").values()
    assert 0.9 < hits < 1


def test_rules_are_loaded_and_healthy(prometheus):
    deadline = time.monotonic() + WAIT_S
    while True:
        (group,) = ask(prometheus, "/api/v1/rules")["groups"]
        health = {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in group["rules"]}
        if all(each == ("ok", "") for each in health.values()):
            return
        assert time.monotonic() < deadline, health
        time.sleep(0.5)
