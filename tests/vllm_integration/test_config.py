# SPDX-License-Identifier: Apache-2.0
"""Options are checked when the engine starts, with messages that name them."""

import inspect
import json
from dataclasses import fields
from typing import get_origin

import kvbm_cxl
import pytest
from kvbm_cxl.options import CACHE_OPTIONS, ConfigError, ThreadOptions
from kvbm_cxl.vllm_integration import pool_access
from kvbm_cxl.vllm_integration.config import ConnectorConfig
from kvbm_cxl.vllm_integration.tier import TierOptions


def test_the_options_of_the_cache_are_those_of_the_pool():
    """But for those that follow from the pool: how often it looks after itself, and what it remembers."""
    follow = {"checksums", "service_ms", "upkeep_ms", "remembered_keys"}
    assert CACHE_OPTIONS | follow == set(inspect.signature(kvbm_cxl.Pool.cache).parameters) - {"self"}


# What a user may write in JSON for each option of the cache, and what is no value of it.
CACHE_VALUES = {
    "policy": ('"leaf-lru"', '"fifo"'),
    "low_water_percent": ("3", '"3"'),
    "high_water_percent": ("20", "-1"),
    "quotas": ("2097152", '{"name": 5}'),
    "lock_timeout_ms": ("2500", '"2500"'),
    "copy": ('"engine=cpu,workers=2"', '"engine=magic"'),
    "dma": ('"cached"', '"fast"'),
    "register_bytes": ("1048576", "-1"),
}


@pytest.mark.parametrize("option", sorted(CACHE_OPTIONS))
def test_every_option_of_the_cache_can_be_given_as_json(pool, option):
    """As `--kv-transfer-config` has it, into a real cache; a wrong value is a `ConfigError`, whatever kind of value it is."""
    right, wrong = (json.loads('{"pool": "%s", "cache": {"%s": %s}}' % (pool, option, value)) for value in CACHE_VALUES[option])
    access = pool_access.acquire(ConnectorConfig.read(right))
    try:
        assert access.call(lambda cache: cache.pinned()) == 0
    finally:
        access.release()
    with pytest.raises(ConfigError, match="cannot use pool"):
        pool_access.acquire(ConnectorConfig.read(wrong))


def test_a_quota_bounds_what_an_engine_takes(pool):
    quota_bytes = 4 << 19
    access = pool_access.acquire(ConnectorConfig.read({"pool": pool, "cache": {"quotas": quota_bytes}}))
    try:
        space = kvbm_cxl.Namespace.from_bytes(b"an engine's name")
        keys = [kvbm_cxl.chain_key(None, [number]) for number in range(9)]
        for key in keys:
            assert access.call(lambda cache: cache.publish(space, key, bytes(500_000))) == "stored"
        assert sum(access.call(lambda cache: cache.has(space, keys))) == 4
    finally:
        access.release()


@pytest.mark.parametrize("config", (ConnectorConfig, ThreadOptions, TierOptions), ids=lambda config: config.__name__)
def test_every_option_has_a_value_in_json_and_says_so_in_words(config):
    """Each option's default comes back from JSON, and a value of another type is refused in words of JSON."""
    words = {str: "it takes a text", bool: "it takes true or false", int: "it takes an integer"}
    for option in fields(config):
        kind = get_origin(option.type) or option.type
        with pytest.raises(ConfigError, match=f"{option.name} is .*; {words.get(kind, 'it takes an object of names and values')}$"):
            config.read({"pool": "p", option.name: 1.5})
    defaults = {option.name: getattr(config.read({"pool": "p"}), option.name) for option in fields(config)}
    as_json = json.loads(json.dumps(defaults))
    assert {name: getattr(config.read(as_json), name) for name in defaults} == defaults


def test_defaults_and_environment():
    config = ConnectorConfig.read({}, {"CXL_POOL": "/dev/dax0.0"})
    assert config.pool == "/dev/dax0.0" and config.checksums
    assert ConnectorConfig.read({"pool": "/dev/dax1.0"}, {"CXL_POOL": "/dev/dax0.0"}).pool == "/dev/dax1.0"


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({}, "has no pool.*CXL_POOL"),
        ({"pool": ""}, "has no pool"),
        ({"pool": "p", "wokers": 3}, "no option 'wokers'; it has .*workers"),
        ({"pool": 7}, "pool is 7; it takes a text"),
        ({"pool": "p", "checksums": 1}, "checksums is 1; it takes true or false"),
        ({"pool": "p", "workers": True}, "workers is True; it takes an integer"),
        ({"pool": "p", "workers": 0}, "workers is 0; it takes 1 to 64"),
        ({"pool": "p", "workers": 65}, "workers is 65; it takes 1 to 64"),
        ({"pool": "p", "max_inflight_bytes": 0}, "max_inflight_bytes is 0; it must be at least 1"),
        ({"pool": "p", "record_dir": "d"}, "record_dir and record_salt go together"),
        ({"pool": "p", "record_salt": "s"}, "record_dir and record_salt go together"),
        ({"pool": "p", "record_max_bytes": 1023}, "record_max_bytes is 1023; it must be at least 1024"),
        ({"pool": "p", "cache": "lru"}, "cache is 'lru'; it takes an object of names and values"),
        ({"pool": "p", "cache": {"checksums": False}}, "option of its own"),
        ({"pool": "p", "cache": {"polcy": "lru"}}, "no option 'polcy'; it has copy, .*policy"),
    ),
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        ConnectorConfig.read(options, {})


def test_every_option_is_taken():
    options = {
        "pool": "p",
        "checksums": False,
        "workers": 4,
        "max_inflight_bytes": 1,
        "max_pinned_blocks": 2,
        "min_load_tokens": 3,
        "publish_generated": False,
        "events": True,
        "model_id": "m",
        "tenant_salt": "s",
        "record_dir": "d",
        "record_salt": "s",
        "record_max_bytes": 4096,
        "cache": {"policy": "lru"},
    }
    config = ConnectorConfig.read(options, {})
    assert {name: getattr(config, name) for name in options} == options
