# SPDX-License-Identifier: Apache-2.0
"""Engines as hosts of their own, of which one is killed while it copies: the other one goes on, with the text of an engine alone. One
model has a single KV cache group, one sliding windows, one recurrent states.
"""

import json
import queue
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import tiny_models
from engine_process import EngineProcess
from engines import engine, prompt
from waiting import until

FAMILIES = ("llama", "gpt-oss", "granite4")
PROMPT, OTHER = prompt(500, 1), prompt(400, 2)
# Silence after which the pool takes a host for dead: long enough that one that waits for a processor is not.
SUSPECT_MS = 5000
WAITS_S = 300
# Beyond all deadlines of these tests: what ends a wait is that a host is fenced.


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> tuple[str, dict]:
    """Folder of a model, and what its engines take."""
    return tiny_models.make(request.param, tmp_path_factory.mktemp("models")), tiny_models.options(request.param)


@pytest.fixture(scope="module")
def texts(family) -> list[list[int]]:
    """Answers of an engine without a connector."""
    model, options = family
    with engine(model, None, **{name: value for name, value in options.items() if name != "extra"}) as plain:
        return [plain.texts([asked])[0] for asked in (PROMPT, OTHER)]


@pytest.fixture
def pool(make_pool) -> str:
    return make_pool(size="128M", cells="512K:80%")


@pytest.fixture
def started(family, pool, tmp_path):
    """Starts engines, each as a host by itself: `started(role, ...)`. All at once, then waits for them."""
    model, options = family
    made = []

    def start(*roles: str) -> list[EngineProcess]:
        told = {**options, "extra": {**options["extra"], "publish_behind": True}}
        engines = []
        for role in roles:
            machine = uuid.uuid4().hex
            env = {"CXL_MACHINE_ID": machine, "CXL_STATE_DIR": str(tmp_path / machine[:8]), "CXL_SUSPECT_MS": str(SUSPECT_MS)}
            engines.append(EngineProcess(model, role, pool, env=env, wait=False, **told))
        made.extend(engines)
        for each in engines:
            each.ready()
        return engines

    yield start
    for each in made:
        each.__exit__()


def _cells(pool: str) -> list[dict]:
    """Those of the pool that are not free."""
    command = [str(Path(sys.executable).with_name("cxlctl")), "cache", "ls", "--json", "--limit", "100000", "--pool", pool]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=WAITS_S).stdout)["cells"]


def _at_rest(pool: str) -> bool:
    return all(cell["state"] == "ready" and not cell["pinned_by"] for cell in _cells(pool))


def test_prefill_is_killed_between_its_answer_and_its_copies(started, pool, texts, tmp_path):
    """Decode waits for the blocks that prefill has reserved, and computes once prefill's host is fenced."""
    prefill, decode = started("kv_producer", "kv_consumer")
    mark = tmp_path / "held"
    prefill("hold_copies", "save", str(mark))
    (answer,) = prefill("handed_over", [PROMPT])
    assert mark.exists() and any(cell["state"] == "writing" for cell in _cells(pool)), "the answer left before the copies"
    decode.send("texts", [PROMPT], extra_args=answer)
    with pytest.raises(queue.Empty):
        decode.answer(timeout_s=2)
    prefill.kill()
    assert decode.answer(WAITS_S) == texts[:1]
    counted = decode("counted")
    assert counted["lookups/deferred"] > 0 and counted["handovers/short"] == 1 and "external_hits" not in counted
    until(lambda: _at_rest(pool), "cells of the dead host stay reserved")
    (again,) = started("kv_producer")
    (answer,) = again("handed_over", [OTHER])
    assert decode("texts", [OTHER], extra_args=answer) == texts[1:]
    assert decode("counted")["handovers/complete"] == 1


def test_an_engine_is_killed_while_it_pulls(started, pool, texts, tmp_path):
    """What it had pinned can be evicted once its host is fenced, and all others find it meanwhile."""
    first, second = started("kv_both", "kv_both")
    assert first("texts", [PROMPT]) == texts[:1]
    until(lambda: _cells(pool) and _at_rest(pool), "the first engine publishes nothing")
    mark = tmp_path / "held"
    second("hold_copies", "load", str(mark))
    second.send("texts", [PROMPT])
    until(mark.exists, "the second engine pulls nothing")
    assert any(cell["pinned_by"] for cell in _cells(pool))
    second.kill()
    first("forget")
    first("counted")
    assert first("texts", [PROMPT]) == texts[:1] and first("counted")["external_hits"] > 0
    until(lambda: _at_rest(pool), "blocks stay pinned by the dead host")
    (third,) = started("kv_both")
    assert third("texts", [PROMPT, OTHER]) == texts
    assert third("counted")["external_hits"] > 0
