# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures of the repository's own tests."""

import pytest
import tidy


@pytest.fixture(scope="session")
def sources():
    """Every tracked text file as (path, text)."""
    return [(path, text) for path in tidy.tracked() if (text := tidy.read(path)) is not None]
