# SPDX-License-Identifier: Apache-2.0
"""Every field of vLLM's configuration and every environment variable of each recorded version shapes blocks, or is harmless."""

import interface
import pytest
from kvbm_cxl.vllm_integration import harmless_settings
from shaping_settings import SHAPE, SHAPE_ENVIRONMENT

RECORDS = {each["version"]: each["settings"] for each in interface.records("vllm")}
CLASSES = sorted(set(SHAPE) | {name for classes in harmless_settings.FIELDS.values() for name in classes})
# Fields that are not of a dataclass of vllm/config.
ELSEWHERE = {"ScalarType", "QuantKey", "ScaleDesc"}


def classified(name):
    """(harmless fields, those that shape blocks) of a class; under "" the environment variables."""
    if not name:
        return harmless_settings.of_environment(), set(SHAPE_ENVIRONMENT.split())
    return harmless_settings.of_class(name), set(SHAPE.get(name, "").split())


@pytest.mark.parametrize("version", RECORDS)
def test_every_setting_was_read(version):
    unread = {}
    for name in ("", *CLASSES):
        harmless, shaping = classified(name)
        if left := set(RECORDS[version].get(name, "").split()) - harmless - shaping:
            unread[name or "environment"] = sorted(left)
    assert not unread, "do they shape blocks? Enter them in harmless_settings with the reason, or in shaping_settings"


def test_every_entry_is_a_setting_of_some_version():
    for name in ("", *CLASSES):
        harmless, shaping = classified(name)
        known = set(" ".join(settings.get(name, "") for settings in RECORDS.values()).split())
        assert not harmless & shaping, f"{name}: in both lists"
        if name not in ELSEWHERE:
            assert not (harmless | shaping) - known, f"{name or 'environment'}: no version of the window has these"
