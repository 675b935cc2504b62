# SPDX-License-Identifier: Apache-2.0
"""The package fits the recorded interface of every version in its window, without any of them installed.

A new version: add it to the window (`kvbm_cxl/versions.py`) and record it (`make test-versions`); the failures name what does not fit.
"""

import re

import interface
import pytest
from kvbm_cxl import versions

# What does not fit and does not matter: (package, version or None for all, end of the text) -> why.
HARMLESS = {
    ("vllm", None, "reads .expand"): "a method of torch.Tensor",
    ("vllm", None, "reads .saved_tokens"): "a field of our own RequestState",
    ("lmcache", "0.5.6", ":MemoryResidency is gone"): "only 0.5.7 calls get_memory_tags",
    ("lmcache", "0.5.6", ":MemorySegment is gone"): "only 0.5.7 calls get_memory_tags",
    ("lmcache", "0.5.6", ":MemoryTags is gone"): "only 0.5.7 calls get_memory_tags",
}
RECORDED = [(package, record["version"]) for package in versions.WINDOWS for record in interface.records(package)]


def is_harmless(package, version, problem):
    return any(package == of and exact in (None, version) and part in problem for of, exact, part in HARMLESS)


def misfits(package, record, used=None):
    found = interface.problems(used or interface.uses(package), record, interface.records(package)[0])
    return [each for each in found if not is_harmless(package, record["version"], each)]


@pytest.mark.parametrize("package, version", RECORDED, ids="-".join)
def test_the_package_fits(package, version):
    (record,) = [each for each in interface.records(package) if each["version"] == version]
    assert misfits(package, record) == []


def test_both_ends_of_every_window_are_recorded():
    for package, (first, end) in versions.WINDOWS.items():
        if not interface.uses(package).names:
            continue
        found = [each["version"] for each in interface.records(package)]
        assert found and all(versions.release(first) <= versions.release(each) < versions.release(end) for each in found), package
        oldest, (*head, last) = versions.release(first), versions.release(end)
        newest = (*head, last - 1)
        assert versions.release(found[0])[: len(oldest)] == oldest, f"{package}: its oldest version has no record"
        assert versions.release(found[-1])[: len(newest)] == newest, f"{package}: its newest version has no record"


@pytest.fixture
def record():
    return interface.records("vllm")[-1]


BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"


def test_what_a_version_may_take_away_is_found(record):
    """Each kind of difference, made in a record."""
    gone = {**record, "names": {name: about for name, about in record["names"].items() if name != BASE}}
    assert misfits("vllm", gone) == [f"{BASE} is gone"]

    base = record["names"][BASE]
    abstract = {**record, "names": {**record["names"], BASE: {**base, "abstract": [*base["abstract"], "of_tomorrow"]}}}
    (found,) = misfits("vllm", abstract)
    assert re.fullmatch(rf"vllm_integration/connector.py:\d+ lacks of_tomorrow, which is abstract in {BASE}", found)

    methods = {**base["methods"], "take_events": {**base["methods"]["take_events"], "args": ["since"], "required": 1}}
    called = {**record, "names": {**record["names"], BASE: {**base, "methods": methods}}}
    (found,) = misfits("vllm", called)
    assert "take_events is called with since" in found

    without = {**record, "attributes": [each for each in record["attributes"] if each != "kv_transfer_config"]}
    (found,) = misfits("vllm", without)
    assert "reads .kv_transfer_config" in found


def test_calls_are_held_against_signatures(tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/a.py").write_text("from dep.b import made, Row\nmade(1, size=2)\nRow(1, b=2)\n")
    (tmp_path / "dep").mkdir()
    (tmp_path / "dep/b.py").write_text("from .c import made\nclass Row:\n    a: int\n    b: int = 0\n")
    used = interface.uses("dep", tmp_path / "ours")

    def problems(text):
        (tmp_path / "dep/c.py").write_text(text)
        record = interface.offers(tmp_path, "dep", "1.0", used)
        return interface.problems(used, record, record)

    assert problems("def made(count, size=0): ...") == []
    assert problems("def made(count, length=0): ...") == ["a.py:2: dep.b:made has no argument size"]
    assert problems("def made(*, size): ...") == ["a.py:2: dep.b:made takes 0 arguments"]
    assert problems("def made(count, size, kind): ...") == ["a.py:2: dep.b:made needs kind"]
    assert problems("other = 1") == ["dep.b:made is gone"]


@pytest.mark.parametrize("package, version, fits", [("vllm", "0.31.0", True), ("vllm", "0.33.4+cpu", True), ("vllm", "0.33.1rc2", True),
                                                    ("vllm", "0.30.2", False), ("vllm", "0.34.0", False), ("vllm", "1.0", False),
                                                    ("vllm", "0.1.dev1+gabc", False), ("vllm", "unknown", False),
                                                    ("other", "9", True)])  # fmt: skip
def test_a_version_outside_the_window_is_refused(package, version, fits):
    if fits:
        versions.check(package, version)
        return
    with pytest.raises(versions.ConfigError, match=re.escape(version)) as refused:
        versions.check(package, version)
    assert "0.31" in str(refused.value) and "0.33" in str(refused.value)


def test_the_metadata_says_the_windows():
    metadata = (interface.ROOT / "python/pyproject.toml").read_text()
    for package, (first, end) in versions.WINDOWS.items():
        assert re.search(rf'^{package} = \["{package}>={re.escape(first)},<{re.escape(end)}"\]$', metadata, re.MULTILINE), package
