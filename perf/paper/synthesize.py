#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Requests with the lengths of TraCT's table 1, made by AIPerf's synthesizer of a recorded trace (docs of AIPerf: `aiperf synthesize`).

    PYTHONPATH=.venv/aiperf synthesize.py TRACE UNIQUE INPUT ANSWER    # mean tokens; requests on stdout, in the format of the trace

TraCT used the generator of Dynamo, from which AIPerf's comes: it keeps which requests begin alike, and stretches or shortens what they have
in common and what they have alone. Here the factors are found that give the wanted means. `{"input": [mean, deviation], ...}` of what was
made goes to stderr, as AIPerf's analysis has it.
"""

import json
import sys
import tempfile
from pathlib import Path

BLOCK_TOKENS = 512


def whole_blocks(line):
    """A request without the block that its input fills in part, which AIPerf counts as a whole one."""
    request = json.loads(line)
    request["hash_ids"] = request["hash_ids"][: request["input_length"] // BLOCK_TOKENS]
    return request


def analysed(requests):
    from aiperf.dataset.synthesis.prefix_analyzer import PrefixAnalyzer

    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(request) + "\n" for request in requests)
        file.flush()
        return PrefixAnalyzer(block_size=BLOCK_TOKENS).analyze_file(file.name)


def synthesized(requests, unique, common, answer):
    """The requests with what each has alone, what it shares and its answer as many times as long."""
    from aiperf.common import random_generator
    from aiperf.dataset.synthesis.models import SynthesisParams
    from aiperf.dataset.synthesis.synthesizer import Synthesizer

    random_generator.reset()
    random_generator.init(1)
    factors = {"prompt_len_multiplier": unique, "prefix_len_multiplier": common, "output_len_multiplier": answer}
    return Synthesizer(SynthesisParams(block_size=BLOCK_TOKENS, **factors)).synthesize_traces(requests)


def fitted(requests, unique, tokens, answer):
    """Requests with these means. What is shared has whole blocks, so its factor is searched for."""
    found = analysed(requests)
    unique_factor, answer_factor = unique / found.unique_prompt_length_stats.mean, answer / found.osl_stats.mean
    low, high = 0.0, 1.0
    for _ in range(12):
        factor = (low + high) / 2
        made = synthesized(requests, unique_factor, factor, answer_factor)
        low, high = (factor, high) if sum(request["input_length"] for request in made) / len(made) < tokens else (low, factor)
    return made


def main():
    trace, *means = sys.argv[1:]
    requests = [request for line in Path(trace).read_text().splitlines() if (request := whole_blocks(line))["hash_ids"]]
    made = fitted(requests, *map(float, means))
    found = analysed(made)
    stats = {"input": found.isl_stats, "unique": found.unique_prompt_length_stats, "answer": found.osl_stats}
    print(json.dumps({name: [each.mean, each.std_dev] for name, each in stats.items()}), file=sys.stderr)
    for request in made:
        print(json.dumps(request))


if __name__ == "__main__":
    main()
