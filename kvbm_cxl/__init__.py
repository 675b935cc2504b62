# SPDX-License-Identifier: Apache-2.0
"""This folder holds Rust crates; the Python package kvbm_cxl is python/kvbm_cxl, and an installed wheel has it.

Python finds this folder where the checkout's root is on sys.path, as with `python -c` there. Without this file `import kvbm_cxl` would be
an empty module then. It hands over to the package that the rest of sys.path has, or says what to do.
"""

import importlib.machinery
import importlib.util
import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_elsewhere = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != _ROOT]
_spec = importlib.machinery.PathFinder.find_spec(__name__, _elsewhere)
if _spec is None or _spec.loader is None or _spec.origin is None:
    raise ImportError(
        f"{_ROOT}/kvbm_cxl holds Rust crates, and no other folder of sys.path has the package kvbm_cxl: run `make python-extension` "
        f"and set PYTHONPATH={_ROOT}/python, or install the wheel of `make python-package`"
    )
# The import machinery hands out what is in sys.modules when this file has run.
sys.modules[__name__] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])
