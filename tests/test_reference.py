# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/reference say what the sources say."""

import importlib.machinery
import importlib.util
import re

import pytest
import tidy

LOADER = importlib.machinery.SourceFileLoader("reference", str(tidy.ROOT / "scripts" / "reference"))
reference = importlib.util.module_from_spec(importlib.util.spec_from_loader("reference", LOADER))
LOADER.exec_module(reference)

# Sources that read the environment where they ship; names that tests and examples alone use are not options.
SHIPPED = re.compile(r"(kvbm_cxl/(pool|ctl|capi|member|tier)/src/|python/(kvbm_cxl|src)/|nixl_plugin/src/)")
VARIABLE = re.compile(r'"((?:CXL|DYN_KVBM|ETCD|KVBM_CXL)_(?!SHM_|TEST_|NIXL_)[A-Z0-9_]+[A-Z0-9])"')


@pytest.mark.parametrize("page", reference.PAGES)
def test_a_page_follows_from_the_sources(page):
    text = reference.read(page)
    assert reference.filled(page, text) == text, f"{page} is older than the sources: run scripts/reference"


@pytest.mark.parametrize("page", reference.PAGES)
def test_a_page_that_differs_is_noticed(page):
    text = reference.read(page)
    older = re.sub(r"(<!-- generated: \w+ -->\n).*?(<!-- end -->)", r"\1\2", text, flags=re.DOTALL)
    assert older != text and reference.filled(page, older) == text
    with pytest.raises(ValueError, match="parts named"):
        reference.filled(page, "")


def rows(text):
    """The items of a list."""
    return re.findall(r"^- .*", text, re.MULTILINE)


def test_the_lists_are_not_empty():
    assert len(rows(reference.pool_variables())) >= 10 and "`CXL_POOL`" in reference.pool_variables()
    connector = reference.PAGES["docs/reference/configuration.md"]["connector"]()
    consumers = reference.PAGES["docs/reference/configuration.md"]["consumers"]()
    assert len(rows(connector)) >= 15 and "- `audit` (`true`): " in connector
    assert len(rows(consumers)) == 3 and "- `checksums` (`true`): " in consumers and "`checksums`" not in connector
    assert len(rows(reference.member_options())) >= 10 and "- `--cacert`, `ETCD_CACERT`: " in reference.member_options()
    numbers = rows(reference.rack_numbers())
    assert len(numbers) == reference.read("kvbm_cxl/ctl/src/planner/keys.rs").count('";\n') >= 20
    assert any(row.startswith("- `device.latency_ns` (of the preset): ") for row in numbers)
    assert len(rows(reference.c_functions())) >= 10 and all(not row.endswith(": -") for row in rows(reference.c_functions()))
    assert "`cxl_shm_open`" in reference.c_functions() and "`cxl_shm_cache_pull" in reference.c_functions()
    numbers = [int(row.split()[1]) for row in rows(reference.regions())]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 25


def variables(path, text):
    """Environment variables that a shipped source names; the part behind its tests' `mod tests {` is not shipped."""
    if SHIPPED.match(path) and not tidy.is_test_code(path):
        yield from VARIABLE.findall(text.split("#[cfg(test)]\nmod tests {")[0])


def test_every_variable_is_documented(sources):
    documented = reference.read("docs/reference/configuration.md")
    named = {name: path for path, text in sources for name in variables(path, text)}
    assert len(named) >= 15
    assert not {name: path for name, path in named.items() if f"`{name}`" not in documented}


def test_variables_are_found_where_they_ship():
    text = 'env::var("CXL_POOL"); "CXL_SHM_OK"; "CXL_TEST_ROLE"\n#[cfg(test)]\nmod tests {\n"CXL_OTHER"'
    assert list(variables("kvbm_cxl/pool/src/x.rs", text)) == ["CXL_POOL"]
    assert list(variables("kvbm_cxl/sim/src/x.rs", text)) == list(variables("kvbm_cxl/pool/src/tests.rs", text)) == []
