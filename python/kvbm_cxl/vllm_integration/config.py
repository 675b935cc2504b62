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
    """The pool: `/dev/dax0.0`, `/dev/dax0.0,metadata=/dev/dax1.0`, `/dev/shm/kv,size=1G`. Default: CXL_POOL."""
    checksums: bool = True
    """Store a checksum with each block and compare it on every pull."""
    audit: bool = True
    """Compare a share of the pool's blocks with this engine's own computation. For that the engine computes some requests that the pool
    could serve, including the first one after a start."""
    workers: int = 2
    """Copy threads for each direction."""
    max_inflight_bytes: int = 256 << 20
    """Most bytes of blocks that wait to be published or are being copied. A step that would exceed it waits."""
    max_pinned_blocks: int = 16384
    """Most blocks that loads of this engine pin at a time. Further requests wait in vLLM's queue."""
    min_load_tokens: int = 1
    """Compute hits that are shorter than this."""
    publish_generated: bool = True
    """With role kv_both: also publish blocks of generated tokens, for the next turn of a conversation."""
    window_every_tokens: int = 1024
    """With sliding windows: also publish the window at multiples of this many tokens of a prompt. Smaller: the second prompt with a
    beginning may find it; larger: fewer blocks."""
    stored_tp: int = 0
    """Store blocks as an engine with this tensor parallelism does. Engines whose tensor parallelism divides it share blocks. 0: the engine's
    own. Set the largest value, alike in all engines."""
    stored_block_tokens: int = 0
    """Store blocks of this many tokens. Engines whose `--block-size` is a multiple share blocks. 0: the engine's own. Set the smallest
    value, alike in all engines."""
    publish_behind: bool = True
    """Prefill answers a transfer request as soon as the pool has reserved cells, and copies during the next steps; decode waits for these
    blocks. False: prefill answers when all blocks are in the pool."""
    handover_wait_ms: int = 50
    """How long decode looks for blocks that prefill announced and the pool does not know yet. For reserved blocks it waits while prefill's
    host lives, at most copy_timeout_ms."""
    copy_timeout_ms: int = 60_000
    """Longest wait for copies that must complete. After that the engine stops, since memory that is being read must not change."""
    events: bool = True
    """If vLLM publishes KV events (`--kv-events-config`), also publish those of the pool's blocks, of all engines."""
    events_medium: str = "EXTERNAL"
    """Medium name in these events. Routers weigh hits by it: Dynamo's treats EXTERNAL like DISK."""
    events_period_ms: int = 500
    """How often an engine looks for changes in the pool."""
    model_id: str = ""
    """Name of the weights in the pool. Default: a digest of all bytes of their files. Workers share blocks only under one name; use a new
    name for each version. Configuration and engine settings count in any case."""
    tenant_salt: str = ""
    """Secret that separates this engine's blocks from those of others with the same model."""
    record_dir: str = ""
    """Folder for a record of requests, as salted ids of blocks without prompts: for `cxlctl record` and `cxl-plan`. Default: no record."""
    record_salt: str = ""
    """Secret that the recorded ids depend on. Use one on all hosts whose records are merged."""
    record_max_bytes: int = 1 << 30
    """Longest record of an engine. Further entries are dropped and counted."""
    l2: str = ""
    """Second level for blocks that are about to be evicted: a local or shared folder, `nixl+posix://FOLDER` for access by NIXL, or a URL of
    fsspec. They come back when a prompt begins with them. Default: they are dropped."""
    l2_max_bytes: int = 0
    """Size limit of the second level. Beyond it the least recently used blocks are deleted."""
    l2_wait_ms: int = 1000
    """Longest wait of a request for blocks from the second level."""
    cache: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the pool's cache: `policy`, `low_water_percent`, and others. For GPUs: `dma` (`cached`, `uncached`) and
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
            raise ConfigError(f"CxlConnector: workers is {self.workers}; it takes 1 to 64")
        if not self.events_medium:
            raise ConfigError("CxlConnector: events_medium is empty; it is a name that routers know, such as EXTERNAL")
        if bool(self.record_dir) != bool(self.record_salt):
            raise ConfigError("CxlConnector: record_dir and record_salt go together: a folder, and a secret for the ids there")
        if bool(self.l2) != (self.l2_max_bytes > 0):
            raise ConfigError("CxlConnector: l2 and l2_max_bytes go together: the store of evicted blocks, and its size limit")
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


