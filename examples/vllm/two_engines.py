# SPDX-License-Identifier: Apache-2.0
"""two_engines.py MODEL [OPTION=VALUE...]: an engine computes a prompt and ends; a second engine, as on another host, pulls its KV blocks.

Options are those of vLLM's `LLM`, like max_model_len=4096 or enforce_eager=True. CXL_POOL names the pool; without it the program makes one
of 512 MiB in /dev/shm, whose cells hold blocks of up to 1 MiB.
"""

import ast
import os
import subprocess
import sys
import tempfile

# An engine computes the first prompt that it finds, to compare it with the pool's blocks. Here the only one is to be pulled.
TRANSFER = {
    "kv_connector": "CxlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"audit": False},
}
PROMPT = [10 + number * 7 % 1500 for number in range(700)]  # token ids: no tokenizer is needed


def value(text: str):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def one_engine(model: str, options: dict) -> None:
    """Answers the prompt, and tells how many of its tokens came from the pool."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, kv_transfer_config=TRANSFER, disable_log_stats=False, **options)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = engine.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    hits = metrics["vllm:external_prefix_cache_hits"].value
    print("RESULT", int(hits), list(output.outputs[0].token_ids), flush=True)


def main(model: str, options: list[str]) -> None:
    results = []
    for _ in range(2):
        command = [sys.executable, __file__, "--one", model, *options]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results.append(next(line for line in said.splitlines() if line.startswith("RESULT")).split(" ", 2)[1:])
    (first, text), (second, same) = results
    print(f"engine 1: {first} tokens from the pool; engine 2: {second} tokens from the pool, of {len(PROMPT)}")
    assert text == same, "both engines answer with the same text"
    assert int(first) == 0 and int(second) > 0


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one_engine(sys.argv[2], {name: value(text) for name, _, text in (option.partition("=") for option in sys.argv[3:])})
    elif "CXL_POOL" in os.environ:
        main(sys.argv[1], sys.argv[2:])
    else:
        import kvbm_cxl

        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            os.environ |= {"CXL_POOL": f"{folder}/pool", "CXL_STATE_DIR": f"{folder}/state"}
            kvbm_cxl.format_pool(f"{folder}/pool,size=512M", cells="1M:75%")
            main(sys.argv[1], sys.argv[2:])
