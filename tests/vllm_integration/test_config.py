# SPDX-License-Identifier: Apache-2.0
"""Options are checked when the engine starts, with messages that name them."""

import inspect

import kvbm_cxl
import pytest
from kvbm_cxl.vllm_integration.config import CACHE_OPTIONS, ConfigError, ConnectorConfig


def test_the_options_of_the_cache_are_those_of_the_pool():
    assert CACHE_OPTIONS | {"checksums"} == set(inspect.signature(kvbm_cxl.Pool.cache).parameters) - {"self"}


def test_defaults_and_environment():
    config = ConnectorConfig.read({}, {"CXL_POOL": "/dev/dax0.0"})
    assert config.pool == "/dev/dax0.0" and config.checksums and config.publish_tail
    assert ConnectorConfig.read({"pool": "/dev/dax1.0"}, {"CXL_POOL": "/dev/dax0.0"}).pool == "/dev/dax1.0"


@pytest.mark.parametrize(
    ("options", "words"),
    (
        ({}, "has no pool.*CXL_POOL"),
        ({"pool": ""}, "has no pool"),
        ({"pool": "p", "wokers": 3}, "no option 'wokers'; it has .*workers"),
        ({"pool": 7}, "pool is 7; it takes a str"),
        ({"pool": "p", "checksums": 1}, "checksums is 1; it takes a bool"),
        ({"pool": "p", "workers": True}, "workers is True; it takes a int"),
        ({"pool": "p", "workers": 0}, "workers is 0; it must be at least 1"),
        ({"pool": "p", "workers": 65}, "more than 64"),
        ({"pool": "p", "max_inflight_bytes": 0}, "max_inflight_bytes is 0"),
        ({"pool": "p", "copy_timeout_ms": 0}, "copy_timeout_ms is 0"),
        ({"pool": "p", "handover_wait_ms": -1}, "handover_wait_ms is -1"),
        ({"pool": "p", "record_dir": "d"}, "record_dir and record_salt go together"),
        ({"pool": "p", "record_salt": "s"}, "record_dir and record_salt go together"),
        ({"pool": "p", "record_max_bytes": 1023}, "record_max_bytes is 1023; it must be at least 1024"),
        ({"pool": "p", "cache": "lru"}, "cache is 'lru'; it takes a Mapping"),
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
        "publish_tail": False,
        "publish_generated": False,
        "handover_wait_ms": 0,
        "copy_timeout_ms": 5,
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
