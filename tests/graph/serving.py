# SPDX-License-Identifier: Apache-2.0
"""Real graphs for tests: started once for many assertions, with the texts that one engine alone says to the same prompts."""

import contextlib
import http.client
import json
import random
from concurrent.futures import ThreadPoolExecutor

import leftovers
from graph import counters, question
from graph.client import RequestFailed
from graph.graph import Graph
from graph.model import BLOCK_TOKENS
from graph.options import Options
from graph.reference import Reference

MAX_TOKENS = 12
READY_TIMEOUT_S = 600
REQUEST_TIMEOUT_S = 120
# Tokens of the tiny model that stand for text: behind the special ones.
FIRST_TOKEN, LAST_TOKEN = 300, 2040


def tokens(seed, count):
    """A prompt of so many tokens, which no other seed's begins with."""
    choose = random.Random(seed)
    return [choose.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(count)]


def blocks(prompt):
    """How many blocks a prompt fills, the last one perhaps in part."""
    return -(-len(prompt) // BLOCK_TOKENS)


class Serving:
    """A graph that answers, and what it has to answer."""

    def __init__(self, graph, prompts):
        self.graph = graph
        self.reference = Reference(
            graph.model, graph.environment, Options.state / "reference", graph.record, graph.logs / "reference.log"
        )
        self.reference.begin(prompts, MAX_TOKENS)
        self.prompts = prompts

    def ready(self):
        """Waits for the graph, then for the texts."""
        self.graph.wait_until_ready()
        texts = self.reference.texts()
        # Texts that are all alike would make a right answer out of a wrong block.
        assert len(set(texts)) > len(texts) * 3 // 4
        self.texts = {tuple(prompt): text for prompt, text in zip(self.prompts, texts, strict=True)}

    def expected(self, prompt):
        """What one engine alone says."""
        return self.texts[tuple(prompt)]

    def ask(self, prompt, **named):
        """An answer, whose text is compared. Raises RequestFailed."""
        answer = self.graph.ask(prompt, MAX_TOKENS, timeout_s=REQUEST_TIMEOUT_S, **named)
        # A request that went on elsewhere took what it had said already along as prompt.
        assert answer.prompt_tokens >= len(prompt)
        assert answer.text == self.expected(prompt), f"wrong text for a prompt of {len(prompt)} tokens"
        return answer

    def ask_or_fail(self, prompt):
        """None where the text was right, else why there was none; a wrong text raises."""
        try:
            self.ask(prompt)
        except RequestFailed as error:
            return str(error)
        return None

    def ask_all(self, prompts, at_once=4):
        """Asks many at a time; the reasons of those that were not answered."""
        with ThreadPoolExecutor(at_once) as pool:
            return [reason for reason in pool.map(self.ask_or_fail, prompts) if reason]

    def forget(self):
        """Lets the workers drop the KV cache of their own; the pool keeps its blocks."""
        for worker in self.graph.workers.values():
            connection = http.client.HTTPConnection("127.0.0.1", worker.system_port, timeout=30)
            with contextlib.closing(connection):
                connection.request("POST", "/engine/flush_cache", "{}", {"Content-Type": "application/json"})
                said = json.load(connection.getresponse())
            assert said["status"] == "ok", said

    def cxlctl(self, *words):
        """What a command prints of the pool, on a machine that has it."""
        return self.graph.pool.run(self.graph.pool.spec, *words)

    def clear(self):
        """Empties the pool."""
        self.cxlctl("cache", "clear", "--all")

    def cells(self, *arguments):
        """Cells of the pool that are not free."""
        return json.loads(self.cxlctl("cache", "ls", "--json", "--limit", "100000", *arguments))

    def slot(self, name):
        """The number of a worker's host in the pool."""
        machine = self.graph.pool.machine(list(self.graph.workers).index(name))
        hosts = json.loads(self.cxlctl("hosts", "--json", "--watch-ms", "0"))
        return next(slot["slot"] for slot in hosts["slots"] if slot["machine"] == machine)

    def counted(self, name):
        """What a worker has counted."""
        return counters.read(self.graph)[name]

    def assert_whole(self):
        """Nothing in the pool is pinned or half written once the graph has nothing to do, and the check finds nothing."""
        leftovers.wait_for(self._at_rest, what="blocks are pinned or half written")
        assert self.fsck()["counts"] | {"notes": 0} == {"errors": 0, "warnings": 0, "notes": 0}, self.fsck()

    def _at_rest(self):
        return all(cell["state"] == "ready" and not cell["pinned_by"] for cell in self.cells()["cells"])

    def ask_round(self):
        """Asks what `make serve` asks; all of it is as that wants it, but for texts, which it compares with those of one engine alone."""
        round_ = [question.ask(self.graph, prompt) for prompt in question.prompts(self.graph)]
        assert question.verify(self.graph, round_, [asked.answer.text for asked in round_]) == []
        return round_

    def fsck(self):
        """What the check of all metadata says."""
        return self.graph.pool.fsck()


@contextlib.contextmanager
def serving(prompts, **options):
    """A graph with the tiny model. Everything is gone afterwards."""
    options = {"ready_timeout_s": READY_TIMEOUT_S, "state": Options.state / "tests"} | options
    with Graph(Options(**options)) as graph:
        served = Serving(graph, prompts)
        served.ready()
        yield served
