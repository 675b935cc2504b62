# SPDX-License-Identifier: Apache-2.0
"""The house rules over the checkout; `test_tidy_rules.py` shows that each of them can fail."""

import warnings

import pytest
import tidy


@pytest.mark.parametrize("check", tidy.FILE_CHECKS, ids=lambda check: check.__name__)
def test_rule(check, sources):
    found = [f"{path}:{line}: {reason}" for path, text in sources for line, reason in check(path, text)]
    assert not found, f"{check.__doc__}\n" + "\n".join(found)


def test_fault_names_have_one_meaning(sources):
    found = [f"{path}:{line}: {reason}" for path, line, reason in tidy.fault_names(sources)]
    assert not found, "\n".join(found)


def test_types_with_bare_names_are_told_apart(sources):
    found = [f"{path}:{line}: {reason}" for path, line, reason in tidy.bare_type_names(sources)]
    assert not found, "\n".join(found)


def test_every_test_can_fail(sources):
    found = [f"{path}:{line}: {reason}" for path, line, reason in tidy.tests_that_cannot_fail(sources)]
    assert not found, "\n".join(found)


def test_listed_exceptions_exist():
    assert not tidy.stale_exceptions(tidy.tracked())


def test_long_files_are_listed(sources):
    """Never fails: names the files that are about to become too long."""
    for path, text in sources:
        count = len(text.splitlines())
        if tidy.is_source(path, text) and count > tidy.LONG_FILE_LINES:
            warnings.warn(f"{path}: {count} lines, more than {tidy.LONG_FILE_LINES}", stacklevel=1)
