# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine with the tier: `tiered_engine.py MODEL POOL ENGINE_ID RANKS` answers prompts. POOL empty: an engine without a cache."""

import sys

import lines
from small_engine import answer, small_engine


class Engine:
    """Its calls."""

    def __init__(self, llm):
        self.llm = llm

    def ask(self, *told):
        """Answers seeds, each for a prompt of 1000 tokens, and says what vLLM has counted. Before them may stand "reload" and a folder,
        to replace its weights, and "reset", to empty vLLM's caches."""
        llm = self.llm
        if told[:1] == ("reload",):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": told[1]})
            told = told[2:]
        if told[:1] == ("reset",):
            assert llm.reset_prefix_cache(reset_connector=True)
            told = told[1:]
        answers = [answer(llm, seed) for seed in told]
        for _ in range(3):  # Late counts.
            llm.llm_engine.step()
        counts = {}
        for metric in llm.get_metrics():
            if metric.name.startswith(("vllm:kvbm_cxl_tier_", "vllm:kv_offload_tiering_")) and getattr(metric, "value", 0):
                label = "/".join(value for key, value in metric.labels.items() if key not in ("engine", "model_name"))
                counts[f"{metric.name}/{label}"] = metric.value
        return answers, counts


def main() -> None:
    model, pool, engine_id, ranks = sys.argv[1:]
    options = {}
    if pool:
        # `cxl` is known to vLLM by the entry point of the package.
        extra = {"spec_name": "CpuTieringSpec", "spec_module_path": "cpu_tiering", "cpu_bytes_to_use": 64 << 20}
        extra["secondary_tiers"] = [{"type": "cxl", "pool": pool}]
        options["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": engine_id,
            "kv_connector_extra_config": extra,
        }
    lines.serve(lambda: Engine(small_engine(model, tensor_parallel_size=int(ranks), **options)))


if __name__ == "__main__":  # Workers of several ranks load this file as well.
    main()
