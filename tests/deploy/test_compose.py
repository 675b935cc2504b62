# SPDX-License-Identifier: Apache-2.0
"""deploy/compose as it is: a real graph of Dynamo and vLLM in containers, which is asked, loses its decode worker, and answers the same.

Needs the image of CPU workers (7 GB, built here once from .venv/serve) and some minutes. Skipped, with the reason, where it cannot be had.
"""

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import charts
import daemon
import pytest
import test_dashboards
from waiting import free_port

COMPOSE = charts.ROOT / "deploy" / "compose"
CXLCTL = charts.ROOT / "target/release/cxlctl"
READY_TIMEOUT_S = 1200
WAIT_S = 300
WORDS = "a pool of memory is shared by all hosts in the rack and each host maps it but no host sees what another has written".split()


class Graph:
    """Compose's project of one test."""

    def __init__(self, env, compose, profile):
        self.name = f"kvbm-cxl-{uuid.uuid4().hex[:8]}"
        self.folder = Path("/dev/shm") / self.name
        self.ports = {name: free_port() for name in ("PORT", "EXPORTER_PORT", "PROMETHEUS_PORT")}
        told = {"POOL_FOLDER": self.folder, "POOL": "/pool/kv,size=512M", "COMPOSE_PROJECT_NAME": self.name, **self.ports}
        command, more = compose
        self.env = {**env, **more, **{name: str(value) for name, value in told.items()}}
        self.command = [*command, "--profile", profile]

    def compose(self, *arguments, check=True):
        command = [*self.command, *arguments]
        done = subprocess.run(command, cwd=COMPOSE, env=self.env, capture_output=True, text=True, timeout=900, check=False)
        assert not check or done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def docker(self, *arguments):
        done = subprocess.run([daemon.program("docker"), *arguments], env=self.env, capture_output=True, text=True, timeout=300, check=True)
        return done.stdout

    def container(self, service):
        return self.compose("ps", "-q", service).strip()

    def restarts(self, service):
        """How often Docker has started a service again."""
        return int(self.docker("inspect", "--format", "{{.RestartCount}}", self.container(service)))

    def open(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports['PORT']}{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            error.msg = f"{error.msg}: {error.read().decode()[:1000]}"
            raise

    def until(self, what, timeout_s, why):
        """Until `what` answers with something true."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError, IndexError):
                if found := what():
                    return found
            assert time.monotonic() < deadline, f"{why}:\n{self.compose('logs', '--tail', '15', check=False)[-8000:]}"
            time.sleep(1)

    def ask(self, prompt):
        """(text, tokens of the prompt, how many of them were cached)."""
        answer = self.open("/v1/completions", {"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0})
        usage = answer["usage"]
        return answer["choices"][0]["text"], usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def counted(self, service):
        """What a worker has counted: (name, value of our label) -> number."""
        script = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9090/metrics').read().decode())"
        found = {}
        for line in self.docker("exec", self.container(service), "python3", "-c", script).splitlines():
            if line.startswith("vllm:kvbm_cxl_") and "_total{" in line:
                name, rest = line.removeprefix("vllm:kvbm_cxl_").split("{", 1)
                labels, number = rest.rsplit("} ", 1)
                pairs = dict(part.split("=", 1) for part in labels.split(","))
                for label in {"result", "outcome", "source"} & set(pairs):
                    found[name.removesuffix("_total"), pairs[label].strip('"')] = float(number)
        return found

    def cxlctl(self, *arguments):
        command = [CXLCTL, "--json", "--pool", self.folder / "kv", *arguments]
        return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)

    def slots(self):
        return [slot for slot in self.cxlctl("hosts")["slots"] if slot["state"] != "free"]


@pytest.fixture(scope="module")
def docker_env():
    if not (charts.ROOT / ".venv/serve-installed").is_file():
        pytest.skip("no vLLM in .venv/serve: run make serve-ready")
    if not daemon.compose()[0]:
        pytest.skip("no docker-compose here: run make setup-deploy")
    try:
        with daemon.running() as env:
            command = [charts.ROOT / "scripts/images", "base", "tools", "services", "worker-cpu"]
            built = subprocess.run(command, env=env, capture_output=True, text=True, timeout=3000)
            if built.returncode:
                pytest.skip(f"the images cannot be built here: {built.stderr.strip().splitlines()[-1]}")
            yield env
    except daemon.NoDaemon as reason:
        pytest.skip(str(reason))


@contextlib.contextmanager
def running(env, profile):
    graph = Graph(env, daemon.compose(), profile)
    try:
        graph.compose("up", "-d")
        graph.until(lambda: graph.open("/v1/models")["data"], READY_TIMEOUT_S, "the graph does not serve")
        yield graph
    finally:
        graph.compose("down", "-v", "-t", "10", check=False)
        shutil.rmtree(graph.folder, ignore_errors=True)
    for what in (["ps", "--all"], ["network", "ls"], ["volume", "ls"]):
        assert not graph.docker(*what, "--quiet", "--filter", f"name={graph.name}").strip()


def documented_requests():
    """Bodies of the requests that the pages send to this graph."""
    pages = [charts.ROOT / "docs/start/kubernetes.md", charts.ROOT / "deploy/README.md"]
    text = "\n".join(page.read_text() for page in pages)
    return [json.loads(body) for body in re.findall(r"curl http://127\.0\.0\.1:8000/v1/completions .*-d '([^']*)'", text)]


# Each kind of sampling that vLLM has code of its own for.
KINDS = [
    {"temperature": 1.0, "seed": 3},
    {"top_p": 0.5, "top_k": 5, "min_p": 0.1},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logprobs": 3},
    {"n": 2},
    {"logit_bias": {"5": 10.0}},
    {"min_tokens": 4, "stop": ["q"]},
]


def prompt(seed):
    """About 500 tokens: four blocks, the last one not full."""
    choose = random.Random(seed)
    return " ".join(choose.choice(WORDS) for _ in range(500))


# Both pairs of workers would have to start, the graph to answer, and seven gigabytes to be copied.
@pytest.mark.timeout(6000)
def test_a_graph_answers_the_same_after_its_decode_worker_was_killed(docker_env):
    with running(docker_env, "cpu") as graph:
        first, tokens, cached = graph.ask(prompt(1))
        again, _, cached_again = graph.ask(prompt(1))
        other, _, _ = graph.ask(prompt(2))
        assert first and first == again != other and cached == 0 and cached_again >= tokens // 128 * 128
        prefill, decode = graph.counted("prefill"), graph.counted("decode")
        assert prefill["published_blocks", "stored"] >= 2 * (tokens // 128) and decode["handovers", "complete"] == 3
        assert decode["pulled_blocks", "hit"] >= 2 * (tokens // 128) and decode["loads", "failed"] == 0
        before = {slot["machine"]: slot for slot in graph.slots()}
        assert len(before) == 3 and all(slot["state"] == "live" for slot in before.values())

        graph.docker("kill", graph.container("decode"))
        graph.compose("start", "decode")
        # A frontend that still knows the dead worker answers when the new one has come.
        text, _, _ = graph.until(lambda: graph.ask(prompt(1)), READY_TIMEOUT_S, "no answer after decode was started again")
        assert text == first
        after = {slot["machine"]: slot for slot in graph.slots()}
        assert set(after) == set(before)
        assert sorted(after[name]["incarnation"] - before[name]["incarnation"] for name in before)[-1] >= 1
        assert graph.counted("decode")["handovers", "complete"] >= 1

        address = f"127.0.0.1:{graph.ports['PROMETHEUS_PORT']}"
        moving = 'sum(rate(vllm:kvbm_cxl_loads_total{result="complete"}[1m])) > 0'
        seeds = iter(range(100, 10_000))

        def scraped():
            graph.ask(prompt(next(seeds)))
            return test_dashboards.ask(address, "/api/v1/query", query=moving)["result"]

        graph.until(scraped, WAIT_S, "Prometheus does not see the workers")
        for where, expression in test_dashboards.expressions():
            query = test_dashboards.asked(expression, address, "1m")
            answer = test_dashboards.ask(address, "/api/v1/query", query=query)["result"]
            if not where.startswith("alert") and where not in test_dashboards.MAY_BE_EMPTY:
                assert answer, f"{where}: nothing for {query}"

        # One client's request of any kind ends no engine.
        requests = documented_requests()
        assert requests, "no page shows a request"
        for body in [*requests, *({"model": "model", "prompt": prompt(3), "max_tokens": 8, **kind} for kind in KINDS)]:
            answer = graph.open("/v1/completions", body)
            assert all(choice["text"] for choice in answer["choices"]), body
        assert [graph.restarts(each) for each in ("prefill", "decode")] == [0, 0]

        # What ends in good order comes back, too.
        graph.docker("exec", graph.container("frontend"), "python3", "-c", "import os, signal; os.kill(1, signal.SIGTERM)")
        graph.until(lambda: graph.restarts("frontend") == 1, WAIT_S, "the frontend does not come back")
        text, _, _ = graph.until(lambda: graph.ask(prompt(1)), READY_TIMEOUT_S, "no answer after the frontend was started again")
        assert text == first
        assert len(graph.compose("logs", "prometheus").splitlines()) < 100

        # A worker that is stopped leaves the pool, within the time that vLLM gives its engine.
        graph.compose("stop", "prefill", "decode")
        assert sorted(slot["state"] for slot in graph.slots()) == ["left", "left", "live"]
        assert not [finding for finding in graph.cxlctl("fsck")["findings"] if finding["severity"] == "error"]
    assert not Path(f"/dev/shm/{graph.name}").exists() and graph.name not in " ".join(os.listdir("/dev/shm"))


@pytest.mark.timeout(6000)
def test_nixl_profiles_answer_alike(docker_env):
    texts = {}
    for profile in ("nixl-cxl", "nixl-ucx"):
        with running(docker_env, profile) as graph:
            texts[profile] = [graph.ask(prompt(seed))[0] for seed in (1, 2)]
            # Over UCX nothing goes through the pool, which is there for the keeper alone. A host writes its counters from time to time.
            if profile == "nixl-cxl":
                graph.until(lambda: graph.cxlctl("nixl")["all"]["reads"] >= 2, WAIT_S, "no reads are counted")
            moved = graph.cxlctl("nixl")["all"]
            assert moved["failed"] == 0 and (profile == "nixl-cxl" or moved["reads"] == 0)
            assert len(graph.slots()) == (3 if profile == "nixl-cxl" else 1)
    assert texts["nixl-cxl"] == texts["nixl-ucx"] and len(set(texts["nixl-cxl"])) == 2


@pytest.mark.timeout(3000)
def test_nixlbench_measures_between_two_containers(docker_env, tmp_path):
    """With the small program of tests/nixl in nixlbench's place; its bytes are those of NIXL and of our plugin."""
    program = tmp_path / "nixlbench"
    program.write_text("#!/usr/bin/env python3\n" + (charts.ROOT / "tests/nixl/fake_nixlbench.py").read_text())
    program.chmod(0o755)
    tmp_path.chmod(0o755)
    for memory in ("pool", "heap"):
        told = {"NIXLBENCH_FOLDER": str(tmp_path), "NIXLBENCH_MEMORY": memory, "NIXLBENCH_BUFFER": str(48 << 20)}
        graph = Graph({**docker_env, **told}, daemon.compose(), "nixlbench")
        try:
            graph.compose("up", "-d", "initiator", "target")
            statuses = [graph.docker("wait", graph.container(service)).strip() for service in ("initiator", "target")]
            said = graph.compose("logs", "--no-color", "initiator")
            assert statuses == ["0", "0"], f"{statuses}: {graph.compose('logs', '--no-color')}"
            assert "4194304" in said and "B/W (GB/Sec)" in said, said
            moved = graph.cxlctl("nixl")["all"]
            went = {"heap": moved["staged_read_bytes"], "pool": moved["pool_read_bytes"] + moved["pool_written_bytes"]}
            assert moved["failed"] == 0 and [place for place, count in went.items() if count] == [memory]
        finally:
            graph.compose("down", "-v", "-t", "10", check=False)
            shutil.rmtree(graph.folder, ignore_errors=True)
