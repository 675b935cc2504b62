# SPDX-License-Identifier: Apache-2.0
"""Tests of deploy/: run by `make test-deploy`, which names the folders of what they need."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "tests" / "deploy", ROOT / "deploy" / "dynamo"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
