# SPDX-License-Identifier: Apache-2.0
"""A lab of hosts that share one memory: virtual machines with emulated CXL devices, or namespaces of this machine."""

import sys
from pathlib import Path

# The folder that `make setup-lab` fills, and the root of the checkout.
ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".venv" / "lab"


class LabError(Exception):
    """The lab cannot be set up, or something in it went wrong; says what, and where to look."""


def progress(text: str) -> None:
    """Tells a person who waits."""
    print(text, file=sys.stderr, flush=True)
