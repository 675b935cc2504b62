# SPDX-License-Identifier: Apache-2.0
"""Tests of what this package uses of others, version by version: they import none of the others."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "python", ROOT / "tests" / "versions"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
