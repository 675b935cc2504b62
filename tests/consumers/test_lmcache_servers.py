# SPDX-License-Identifier: Apache-2.0
"""LMCache's real server with a vLLM engine, on two hosts one after the other: the second answers from what the killed first one stored."""

import contextlib
import json
import subprocess
import sys
import urllib.request
import uuid
from pathlib import Path

import pytest
from peers import ROOT, until
from waiting import free_port

pytest.importorskip("lmcache", reason="LMCache is not installed: `make setup-lmcache`")
pytest.importorskip("vllm", reason="vLLM is not installed: `make setup-serve`")
sys.path.insert(0, str(ROOT / "deploy" / "dynamo"))


@pytest.fixture
def serve(on_host, make_pool, tmp_path):
    pool, names, servers = make_pool(size="96M", cells="512K:75%"), [], []

    def start(machine):
        port, web = free_port(), free_port()
        adapter = {"type": "plugin", "shared": True, "module_path": "kvbm_cxl.lmcache", "class_name": "CxlL2Adapter"}
        adapter["adapter_params"] = {"pool": pool}
        names.append(f"kvbm-cxl-{uuid.uuid4().hex[:8]}")
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", port, "--http-host", "127.0.0.1"]
        command += ["--http-port", web, "--chunk-size", 128, "--l1-size-gb", 0.25, "--no-l1-use-lazy", "--eviction-policy", "LRU"]
        # An engine on CPUs asks for this mode, which is not the server's own choice.
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", names[-1], "--l2-adapter", json.dumps(adapter)]
        log = tmp_path / f"server-{machine}"
        with log.open("wb") as file:
            servers.append(subprocess.Popen(list(map(str, command)), env=on_host(machine), stdout=file, stderr=file))
        server = servers[-1]

        def status():
            assert server.poll() is None, log.read_text()[-4000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{web}/status", timeout=10) as page:
                return json.load(page)
            return None

        until(status, "the server", 600)
        return server, port, status

    yield start
    for server in servers:
        server.kill()
        server.wait()
    for name in names:
        for path in Path("/dev/shm").glob(f"*{name}*"):
            path.unlink(missing_ok=True)


def _adapter(status: dict) -> dict:
    """What our adapter says of itself, wherever it stands in the server's status."""
    if "pool_uuid" in status:
        return status
    for value in status.values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict) and (found := _adapter(one)):
                return found
    return {}


def test_a_second_host_answers_from_what_the_first_stored(engine, serve, tmp_path):
    from tiny_model import tiny_model

    model = tiny_model(tmp_path / "model")
    plain = engine("plain", model, "none")
    wanted = plain("answers")
    plain.kill()
    server, port, status = serve("a")
    first = engine("a", model, port)
    answers = first("answers")
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in wanted] and [cached for _, cached in answers] == [0, 0, 0]
    # 1000 tokens are 7 chunks of 128 and a part of one.
    until(lambda: _adapter(status()).get("counts", {}).get("store", {}).get("stored", 0) >= 21, "the chunks to be stored")
    server.kill()
    first.kill()
    _, port, status = serve("b")
    second = engine("b", model, port)
    answers = second("answers")
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in wanted], "the same text as without a cache"
    assert [cached for _, cached in answers] == [896, 896, 896]
    assert _adapter(status())["counts"]["load"] == {"hit": 21} and _adapter(status())["is_healthy"]
