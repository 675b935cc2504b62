# SPDX-License-Identifier: Apache-2.0
"""Why nothing is found: each reason is said once, and says what to change.

A hand-over carries what shapes the names of prefill's blocks, each in a few characters. A decode engine compares them with its own, and
names what differs at the first request instead of computing every prompt in silence.
"""

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from .log import logger

# A reason that persists is said again this often.
_AGAIN_S = 3600.0
# So many prompts that were looked up and none found: worth a line.
_LOOKUPS = 64

_NAMES = {
    "pool": "another pool",
    "seed": "PYTHONHASHSEED (set it alike for all engines of the pool, or for none: sha256 needs none)",
    "hash": "--prefix-caching-hash-algo",
    "model": "weights, or model_id",
    "revision": "revision of the model",
    "weights": "weights that were replaced in memory since the start",
    "adapter": "files of the adapter under this name",
    "config": "configuration of the model (config.json, overrides, RoPE)",
    "side": "other files of the model (quantization, processors)",
    "loaded": "load format",
    "computed": "--dtype or quantization",
    "versions": "versions of vLLM or transformers",
    "draft": "draft model, or how it is run",
    "dtype": "KV cache type (--dtype, --kv-cache-dtype)",
    "block_tokens": "--block-size (stored_block_tokens shares blocks between several)",
    "layout": "layout of the KV cache",
    "tp_size": "tensor parallelism (stored_tp shares blocks between several)",
    "first_layer": "pipeline parallelism",
    "layer_count": "pipeline parallelism",
    "kv_head_count": "KV heads of a rank",
    "head_size": "head size",
    "layers": "names of layers",
    "spec": "kind of KV cache",
    "page_bytes": "bytes of a page",
    "backend": "attention backend or instruction set",
    "namespace": "tenant_salt",
}
_SETTINGS = "settings."
_LONG = 24


def facts_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """What tells a namespace from others, for comparison: short, and without the tenant's secret."""
    flat = {**fields, **fields.get("extra", {})}
    return {name: _short(str(value)) for name, value in flat.items() if name in _NAMES or name.startswith(_SETTINGS)}


def _short(text: str) -> str:
    return text if len(text) <= _LONG else hashlib.sha256(text.encode()).hexdigest()[:_LONG]


def hash_seed() -> str:
    """A digest of what vLLM's hashes of blocks begin with in this process."""
    from vllm.v1.core import kv_cache_utils

    return hashlib.sha256(b"seed\0" + bytes(getattr(kv_cache_utils, "NONE_HASH", b""))).hexdigest()[:_LONG]


def differences(theirs: Mapping[str, str], mine: Mapping[str, str]) -> dict[str, str]:
    """What differs, as names of facts and words about each. What one side does not tell of is no difference."""
    found, settings = {}, {name: f"the engine's {name.removeprefix(_SETTINGS)}" for name in theirs if name.startswith(_SETTINGS)}
    for name, words in (_NAMES | settings).items():
        if name in theirs and name in mine and theirs[name] != mine[name]:
            found[name] = f"{words} ({theirs[name] or 'none'} there, {mine[name] or 'none'} here)"
    if len(found) > 1:  # What all others make.
        found.pop("namespace", None)
    elif "namespace" in found and len(theirs) == 1:
        found["namespace"] = (
            f"namespace {theirs['namespace']} there, {mine['namespace']} here: model, weights, KV type, block size, layout, tensor "
            "parallelism, vLLM's attention backend or instruction set"
        )
    return found


class Reasons:
    """Warnings given so far."""

    def __init__(self) -> None:
        self._said_s: dict[str, float] = {}
        self._lookups = 0

    def say(self, reason: str, message: str, *values: Any) -> bool:
        """Logs a warning, once for each reason and hour. True: it was logged now."""
        now_s = time.monotonic()
        if now_s - self._said_s.get(reason, -_AGAIN_S) < _AGAIN_S:
            return False
        self._said_s[reason] = now_s
        logger.warning("CxlConnector: " + message, *values)
        return True

    def foreign(self, request_id: str, found: Mapping[str, str], theirs: str, mine: str) -> None:
        """Prefill's blocks have other names than those that this engine looks for: namespaces `theirs` and `mine`."""
        self.say(
            # By the first of the facts: what a request brings must not make reasons without bound.
            "foreign/" + next(iter(found)),
            "prefill published request %s in namespace %s, and this engine, with namespace %s, finds nothing of it: it computes prompts "
            "itself. What differs: %s",
            request_id,
            theirs,
            mine,
            "; ".join(found.values()),
        )

    def absent(self, request_id: str, tokens: int, has_facts: bool) -> None:
        """Prefill's blocks should be found, and none is."""
        more = "" if has_facts else f"; or prefill, of an earlier version, has another {_NAMES['seed']}"
        self.say(
            "absent",
            "prefill published %d tokens of request %s in this pool, and none of them is there: the pool is too small, so that blocks are "
            "evicted before decode comes for them, their host was lost, or the prompt has other tokens here (tokenizer, chat template)%s",
            tokens,
            request_id,
            more,
        )

    def cannot_publish(self, request_id: str) -> None:
        """An engine that does not publish is asked to."""
        self.say(
            "role",
            "request %s asks for a transfer, and this engine publishes nothing: its kv_role is kv_consumer; prefill needs kv_producer or "
            "kv_both",
            request_id,
        )

    def looked_up(self, found: bool, namespace: str) -> None:
        """A prompt of at least a block was looked up, of which nothing is expected."""
        if self._lookups < 0:
            return
        self._lookups = -1 if found else self._lookups + 1
        if self._lookups >= _LOOKUPS:
            self._lookups = -1
            self.say(
                "nothing_ever",
                "none of the first %d prompts was found in the pool, not even in part. If others publish the same prompts, compare their "
                "logs at start: pool, namespace %s, PYTHONHASHSEED; or prompts have nothing in common",
                _LOOKUPS,
                namespace,
            )
