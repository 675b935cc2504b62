# SPDX-License-Identifier: Apache-2.0
"""The words that cross from prefill to decode in `kv_transfer_params`. They are a hint: decode works without them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FIELD = "kvbm_cxl"
_VERSION = 1
# A request may come from anywhere: its fields have bounds.
_MAX_FACTS, _MAX_FACT_CHARS, _MAX_COMPUTED_MS = 64, 64, 1 << 31


@dataclass(frozen=True)
class Expected:
    """What a prefill worker published for a request."""

    tokens: int
    """Tokens of the prompt whose KV lies in the pool."""
    namespace: str
    """Hexadecimal namespace of the prefill engine's first rank."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else shapes the names of the blocks (`diagnosis`). Prefill of an earlier version tells nothing of it."""
    computed_ms: int | None = None
    """How long prefill took for the request. Prefill of an earlier version does not say."""

    def to_params(self) -> dict[str, Any]:
        words: dict[str, Any] = {"version": _VERSION, "tokens": self.tokens, "namespace": self.namespace}
        words |= {} if self.computed_ms is None else {"computed_ms": self.computed_ms}
        return {FIELD: words | ({"facts": dict(self.facts)} if self.facts else {})}


def prefill_params() -> dict[str, Any]:
    """`kv_transfer_params` of a prefill request whose blocks another worker will pull."""
    return {FIELD: {"version": _VERSION, "publish": True}}


def _ours(params: Any) -> dict[str, Any]:
    """Our part of `kv_transfer_params`. Those of another connector, or of any client that can send a request, are no reason to fail."""
    ours = params.get(FIELD) if isinstance(params, dict) else None
    return ours if isinstance(ours, dict) and ours.get("version") == _VERSION else {}


def wants_publish(params: Any) -> bool:
    """Whether the answer to this request has to wait until its blocks are in the pool."""
    return _ours(params).get("publish") is True


def expected_of(params: Any) -> Expected | None:
    """What decode may expect to find, or None where the request does not say."""
    ours = _ours(params)
    tokens, namespace = ours.get("tokens"), ours.get("namespace")
    if type(tokens) is not int or tokens <= 0 or not isinstance(namespace, str):
        return None
    computed_ms = ours.get("computed_ms")
    is_time = type(computed_ms) is int and 0 <= computed_ms <= _MAX_COMPUTED_MS
    return Expected(tokens, namespace, _facts(ours.get("facts")), computed_ms if is_time else None)


def _facts(said: Any) -> dict[str, str]:
    if not isinstance(said, dict) or len(said) > _MAX_FACTS:
        return {}
    return {
        name: value
        for name, value in said.items()
        if isinstance(name, str) and isinstance(value, str) and len(value) <= _MAX_FACT_CHARS and value.isprintable()
    }
