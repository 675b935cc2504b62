# SPDX-License-Identifier: Apache-2.0
"""SGLang's modules of storage and host pools, from its wheel, without the engine: importing this puts them in reach.

The package's own first module loads an engine, and one of its helpers loads a notebook's display; empty ones stand in for these two.
"""

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv" / "sglang"


def is_there() -> bool:
    return (FOLDER / "sglang" / "srt").exists()


def reach() -> None:
    """Puts SGLang's modules in reach of this process."""
    if "sglang" in sys.modules:
        return
    # Behind what is there: its lock has what vLLM's has not.
    sys.path.append(str(FOLDER))
    package = ModuleType("sglang")
    package.__path__ = [str(FOLDER / "sglang")]
    sys.modules["sglang"] = package
    for name in ("IPython", "IPython.display"):
        notebook = ModuleType(name)
        notebook.HTML = notebook.display = None
        sys.modules.setdefault(name, notebook)
