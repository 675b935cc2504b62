# SPDX-License-Identifier: Apache-2.0
"""CPU TEST HARNESS ONLY, never used in production: vLLM and NIXL side by side on a few cores without a GPU.

The launcher puts this folder on the PYTHONPATH of the workers where the machine has no GPU, whatever the connector, so that connectors
that are compared run under the same conditions. Nothing of the connectors, of the pool or of Dynamo is touched.

1. vLLM waits for its workers in a loop around sched_yield. With fewer cores than waiting processes the machine then only waits: the call
   sleeps.
2. NIXL's Python API tells UCX's progress thread to poll without a pause: it is given one.
3. NixlConnector on CPUs pins every worker to the last core, so that all of them share it: the call is ignored there.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time

# Squared: where everything takes so many times longer, looking does too, and there is so much less to be seen.
YIELD_S = 50e-6 * int(os.environ.get("CPU_HARNESS_SLOWNESS", 1)) ** 2
PROGRESS_DELAY_US = 1000
NIXL_BINDINGS = ("nixl_cu12._bindings", "nixl_cu13._bindings")
PINS_ITSELF = "vllm.distributed.kv_transfer.kv_connector.v1.nixl."

_set_affinity = os.sched_setaffinity


def _sleep_instead():
    time.sleep(YIELD_S)


def _set_affinity_elsewhere(pid, mask):
    if not sys._getframe(1).f_globals.get("__name__", "").startswith(PINS_ITSELF):
        _set_affinity(pid, mask)


class _Loader(importlib.abc.Loader):
    """Loads NIXL's bindings and puts an agent in them that sets the delay which the Python API above does not offer."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        agent = module.nixlAgent

        def delayed(name, config):
            config.pthrDelay = max(config.pthrDelay, PROGRESS_DELAY_US)
            return agent(name, config)

        module.nixlAgent = delayed


class _Finder(importlib.abc.MetaPathFinder):
    """Finds NIXL's bindings as Python would."""

    def find_spec(self, name, path=None, target=None):
        if name not in NIXL_BINDINGS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


os.sched_yield = _sleep_instead
os.sched_setaffinity = _set_affinity_elsewhere
sys.meta_path.insert(0, _Finder())
