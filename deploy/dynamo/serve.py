# SPDX-License-Identifier: Apache-2.0
"""`make serve`: a Dynamo graph whose workers exchange KV blocks through a pool; what it is asked shows where each block came from."""

import json
import signal
import sys
import time
from collections.abc import Sequence

from graph import question
from graph.client import body_of
from graph.errors import GraphError
from graph.graph import Graph
from graph.options import parse
from graph.reference import Reference


class Ended(BaseException):
    """A signal asks the graph to end."""


def _end(*_) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise Ended


def _say(line: str) -> None:
    print(line, flush=True)


def _round(graph: Graph, reference: Reference | None, asked: list[str]) -> int:
    answered = []
    for number, prompt in enumerate(asked, 1):
        answered.append(question.ask(graph, prompt))
        _say(f"\nrequest {number}" + (", with the same beginning" if number > 1 else ""))
        for line in question.describe(answered[-1]):
            _say(line)
    if reference is None:
        return 0
    wrong = question.verify(graph, answered, reference.texts())
    for line in wrong:
        _say(f"WRONG  {line}")
    verified = "same text as one engine alone; all counters as they have to be" + ("; the pool is whole" if graph.pool else "")
    _say(f"\nverified: {verified}" if not wrong else f"\n{len(wrong)} things are wrong")
    return 1 if wrong else 0


def _curl(graph: Graph) -> str:
    body = json.dumps(body_of(graph.model.name, "Prefill publishes blocks", question.length(graph).max_tokens))
    return f"curl http://127.0.0.1:{graph.port}/v1/completions -H 'Content-Type: application/json' -d '{body}'"


def _serve(graph: Graph) -> int:
    asked = question.prompts(graph)
    reference = None
    if graph.options.once:
        reference = Reference(
            graph.model, graph.environment, graph.options.state / "reference", graph.record, graph.logs / "reference.log"
        )
        reference.begin(asked, question.length(graph).max_tokens)
    graph.wait_until_ready()
    status = _round(graph, reference, asked)
    if graph.options.once:
        return status
    _say(f"\nThe graph runs until Ctrl-C. Logs: {graph.logs}. Try:\n\n{_curl(graph)}\n")
    while True:
        graph.check()
        time.sleep(1)


def _serve_and_check(graph: Graph) -> int:
    try:
        return _serve(graph)
    except GraphError:
        # A request that failed because a worker is gone tells less than the worker's log.
        graph.check()
        raise


def main(arguments: Sequence[str]) -> int:
    """0; 1 where something is wrong, with the reason on stderr."""
    options = parse(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        with Graph(options, _say) as graph:
            return _serve_and_check(graph)
    except Ended:
        _say("ended")
        return 0
    except (GraphError, RuntimeError, OSError) as error:
        print(f"serve: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
