# SPDX-License-Identifier: Apache-2.0
"""Programs and libraries that the wheel carries."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parents[1]


def _first(places: list[Path], how: str) -> Path:
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"{places[0].name} is at none of {', '.join(map(str, places))}: install a wheel of kvbm-cxl, or run `{how}`")


def cxlctl_path() -> Path:
    """The program cxlctl: of this package, or, in a checkout, the one that was built last. Raises FileNotFoundError."""
    return _first([_PACKAGE / "bin" / "cxlctl", _CHECKOUT / "target" / "release" / "cxlctl"], "make build")


def plan_path() -> Path:
    """The program cxl-plan, found as cxlctl_path finds cxlctl. Raises FileNotFoundError."""
    return _first([_PACKAGE / "bin" / "cxl-plan", _CHECKOUT / "target" / "release" / "cxl-plan"], "make build")


def cxlctl() -> NoReturn:
    """Becomes the program cxlctl, with this program's arguments."""
    _become("cxlctl", cxlctl_path)


def cxl_plan() -> NoReturn:
    """Becomes the program cxl-plan, with this program's arguments."""
    _become("cxl-plan", plan_path)


def _become(name: str, path_of: Callable[[], Path]) -> NoReturn:
    try:
        path = path_of()
    except FileNotFoundError as error:
        sys.exit(f"{name}: {error}")
    os.execv(path, [name, *sys.argv[1:]])
