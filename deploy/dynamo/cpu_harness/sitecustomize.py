# SPDX-License-Identifier: Apache-2.0
"""CPU TEST HARNESS ONLY, never used in production: vLLM and NIXL side by side on a few cores without a GPU.

The launcher puts this folder on the PYTHONPATH of the workers where the machine has no GPU, whatever the connector, so that connectors
that are compared run under the same conditions. Nothing of the connectors, of the pool or of Dynamo is touched.

1. vLLM waits for its workers in a loop around sched_yield. With fewer cores than waiting processes the machine then only waits: the call
   sleeps.
2. NIXL's Python API tells UCX's progress thread to poll without a pause: it is given one.
3. vLLM's workers wait for a message that says that there is one, and it can get lost: then they look again after 5 s, at every step of
   every token (vLLM's pull request 45224, which bounded the wait). They look again soon.
4. NixlConnector on CPUs pins every worker to the last core, so that all of them share it: the call is ignored there.
5. vLLM's attention on CPUs uses AMX without asking the kernel for it. Elsewhere in a process oneDNN asks, for a matrix of many tokens; a
   decode worker, whose first step has one token, ends with SIGILL. The kernel is asked when the backend is loaded.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import time

# Squared: where everything takes so many times longer, looking does too, and there is so much less to be seen.
YIELD_S = 50e-6 * int(os.environ.get("CPU_HARNESS_SLOWNESS", 1)) ** 2
PROGRESS_DELAY_US = 1000
LOOK_AGAIN_MS = 50 * int(os.environ.get("CPU_HARNESS_SLOWNESS", 1))
PINS_ITSELF = "vllm.distributed.kv_transfer.kv_connector.v1.nixl."

_set_affinity = os.sched_setaffinity


def _sleep_instead():
    time.sleep(YIELD_S)


def _set_affinity_elsewhere(pid, mask):
    if not sys._getframe(1).f_globals.get("__name__", "").startswith(PINS_ITSELF):
        _set_affinity(pid, mask)


def _delay_progress(bindings):
    """Puts an agent into NIXL's bindings that sets the delay which the Python API above does not offer."""
    agent = bindings.nixlAgent

    def delay_agent(name, config):
        config.pthrDelay = max(config.pthrDelay, PROGRESS_DELAY_US)
        return agent(name, config)

    bindings.nixlAgent = delay_agent


def _look_again(shm_broadcast):
    """Shortens the longest sleep of a worker that waits for a message. Where vLLM has no such bound there is nothing to shorten."""
    longest_ms = getattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", LOOK_AGAIN_MS)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = min(longest_ms, LOOK_AGAIN_MS)


def _ask_for_amx(_):
    import torch

    torch.cpu._init_amx()


CHANGES = {
    "nixl_cu12._bindings": _delay_progress,
    "nixl_cu13._bindings": _delay_progress,
    "vllm.distributed.device_communicators.shm_broadcast": _look_again,
    "vllm.v1.attention.backends.cpu_attn": _ask_for_amx,
}


class _Loader(importlib.abc.Loader):
    """Loads a module, and changes it before its importer has it."""

    def __init__(self, loader, change):
        self.loader, self.change = loader, change

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        self.change(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that are changed as Python would."""

    def find_spec(self, name, path=None, target=None):
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, CHANGES[name])
        return spec


os.sched_yield = _sleep_instead
os.sched_setaffinity = _set_affinity_elsewhere
sys.meta_path.insert(0, _Finder())
