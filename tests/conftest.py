# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures of the repository's own tests."""

import sys
from pathlib import Path

import pytest
import tidy

sys.path.append(str(Path(__file__).resolve().parent / "peers"))


@pytest.fixture(scope="session")
def sources():
    """Every tracked text file as (path, text)."""
    return [(path, text) for path in tidy.tracked() if (text := tidy.read(path)) is not None]
