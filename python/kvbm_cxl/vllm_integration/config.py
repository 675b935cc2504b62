# SPDX-License-Identifier: Apache-2.0
"""Options of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`, checked."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_origin


class ConfigError(ValueError):
    """The connector cannot run as it is configured. The message says what to change."""


CACHE_OPTIONS = frozenset(
    ("policy", "low_water_percent", "high_water_percent", "quotas", "lock_timeout_ms", "service_ms", "upkeep_ms", "remembered_keys", "copy")
    + ("dma", "register_bytes")
)
"""What `cache` may hold: the keywords of `Pool.cache`, but for the one that the connector has itself."""


@dataclass(frozen=True)
class ConnectorConfig:
    """Every option, with its default."""

    pool: str
    """The pool, as `cxlctl` takes it: `/dev/dax0.0`, `/dev/dax0.0,metadata=/dev/dax1.0`, `/dev/shm/kv,size=1G`. Left out: CXL_POOL."""
    checksums: bool = True
    """Blocks carry a checksum that is compared when they are pulled."""
    audit: bool = True
    """Compare a share of the pool's blocks with what this engine computes for the same tokens. Some requests whose prompt was found are
    computed for that, the first one after a start among them."""
    workers: int = 2
    """Threads that copy, for each direction."""
    max_inflight_bytes: int = 256 << 20
    """Bytes of blocks that wait to be published or are being copied. A step that would go beyond waits for room."""
    max_pinned_blocks: int = 16384
    """Blocks that loads of this engine hold in the pool at one time. Requests beyond wait in vLLM's queue."""
    min_load_tokens: int = 1
    """Shorter hits are computed instead."""
    publish_generated: bool = True
    """With role kv_both: publish blocks of generated tokens as well, for the next turn of a conversation."""
    window_every_tokens: int = 1024
    """Of layers with a sliding window, what a prefix needs that ends at a multiple of this many tokens is published, besides that of the
    prompt's end, of what is generated, and of a prefix that the pool has seen before. Smaller: the second prompt with a beginning finds
    it, too; larger: fewer blocks."""
    stored_tp: int = 0
    """Blocks lie in the pool as an engine with this tensor parallelism has them, so that engines of every tensor parallelism that divides
    it share them. 0: that of the engine. Name the largest one, alike for all engines of the pool."""
    stored_block_tokens: int = 0
    """Tokens of a block as it lies in the pool, so that engines share blocks whose `--block-size` is a multiple of it. 0: the engine's
    block size. Name the smallest one, alike for all engines of the pool."""
    publish_behind: bool = True
    """Prefill answers a hand-over when the pool has reserved cells for its blocks, and copies them behind the answer, beside the next
    steps. Decode waits for blocks that are on their way. False: prefill answers when all of them are there."""
    handover_wait_ms: int = 50
    """How long decode looks for blocks that prefill says it publishes and the pool does not know yet. For those that prefill is writing it
    waits as long as prefill's host goes on, at most copy_timeout_ms."""
    copy_timeout_ms: int = 60_000
    """Longest wait for copies that have to be complete. Beyond it the engine stops: memory that is still being read must not change."""
    events: bool = True
    """Where vLLM publishes KV events (`--kv-events-config`), publish those of the pool's blocks as well, of all engines."""
    events_medium: str = "EXTERNAL"
    """What these events call the pool. It decides what routers credit it with: Dynamo's takes EXTERNAL as it does DISK."""
    events_period_ms: int = 500
    """How often an engine finds out what has changed in the pool."""
    model_id: str = ""
    """What the model's weights are called in the pool. Left out: a digest of all bytes of their files. Workers share blocks only under the
    same one; a new version of the weights needs a new one. Configuration and settings of the engine count as without it."""
    tenant_salt: str = ""
    """A secret that keeps this engine's blocks apart from those of others with the same model."""
    record_dir: str = ""
    """A folder for a record of this engine's requests, as salted ids of their blocks without prompts: for `cxlctl record` and
    `cxl-plan`. Left out: nothing is recorded."""
    record_salt: str = ""
    """A secret that the recorded ids depend on, the same on all hosts whose records are to be merged."""
    record_max_bytes: int = 1 << 30
    """Longest record of an engine. What comes behind it is dropped and counted."""
    l2: str = ""
    """A second level behind the pool: a folder of a local disk or of a file system that hosts share, `nixl+posix://FOLDER` to have NIXL
    read and write there, or a URL as fsspec takes it. Blocks that are about to be evicted are kept there, and come back when a prompt
    begins with them. Left out: they are dropped."""
    l2_max_bytes: int = 0
    """What the second level may hold. Beyond it the blocks that were unused for longest go."""
    l2_wait_ms: int = 1000
    """Longest wait of a request for blocks that come back from the second level."""
    cache: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the pool's cache: `policy`, `low_water_percent`, ... Those of GPUs are among them: `dma` (`cached`, `uncached`) and
    `register_bytes`."""

    @classmethod
    def read(cls, extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> "ConnectorConfig":
        """Checks `extra`; `ConfigError` names the option and what it may be."""
        known = {option.name: option for option in fields(cls)}
        if unknown := sorted(set(extra) - set(known)):
            raise ConfigError(f"CxlConnector has no option {', '.join(map(repr, unknown))}; it has {', '.join(sorted(known))}")
        values = dict(extra)
        values.setdefault("pool", environment.get("CXL_POOL", ""))
        for name, value in values.items():
            _check_type(name, value, known[name].type)
        config = cls(**values)
        config._check_ranges()
        return config

    def _check_ranges(self) -> None:
        if not self.pool:
            raise ConfigError(
                "CxlConnector has no pool: name it in kv_connector_extra_config as "
                '{"pool": "/dev/dax0.0"}, or in the environment as CXL_POOL'
            )
        at_least = {"workers": 1, "max_inflight_bytes": 1, "max_pinned_blocks": 1, "min_load_tokens": 1, "handover_wait_ms": 0}
        at_least |= {"window_every_tokens": 1, "stored_tp": 0, "stored_block_tokens": 0, "record_max_bytes": 1024}
        at_least |= {"l2_max_bytes": 0, "l2_wait_ms": 0}
        for name, least in {**at_least, "copy_timeout_ms": 1, "events_period_ms": 1}.items():
            if getattr(self, name) < least:
                raise ConfigError(f"CxlConnector: {name} is {getattr(self, name)}; it must be at least {least}")
        if self.workers > 64:
            raise ConfigError(f"CxlConnector: workers is {self.workers}; more than 64 threads only get in each other's way")
        if not self.events_medium:
            raise ConfigError("CxlConnector: events_medium is empty; it is a name that routers know, such as EXTERNAL")
        if bool(self.record_dir) != bool(self.record_salt):
            raise ConfigError("CxlConnector: record_dir and record_salt go together: a folder, and a secret for the ids there")
        if bool(self.l2) != (self.l2_max_bytes > 0):
            raise ConfigError("CxlConnector: l2 and l2_max_bytes go together: where evicted blocks are kept, and how many bytes of them")
        if "checksums" in self.cache:
            raise ConfigError("CxlConnector: checksums is an option of its own, not one of cache")
        if unknown := sorted(set(self.cache) - CACHE_OPTIONS):
            raise ConfigError(
                f"CxlConnector: cache has no option {', '.join(map(repr, unknown))}; it has {', '.join(sorted(CACHE_OPTIONS))}"
            )


def _check_type(name: str, value: Any, wanted: Any) -> None:
    wanted = get_origin(wanted) or wanted
    fits = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    if not fits:
        raise ConfigError(f"CxlConnector: {name} is {value!r}; it takes {type_words(wanted)}")


_TYPE_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", Mapping: "an object of names and values"}


def type_words(wanted: type) -> str:
    """What a user writes for a value of this type, in JSON."""
    return _TYPE_WORDS.get(wanted) or f"a value of type {wanted.__name__}"


