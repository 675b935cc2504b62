# SPDX-License-Identifier: Apache-2.0
"""Tests of the vLLM connector. They need vLLM and the compiled part of the package (`make serve` makes both); elsewhere none runs."""

import atexit
import importlib
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import uuid
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Of the silence after which a host is suspected, as `saver.LEAST_PATIENCE`.
PATIENT = 60.0
ROOT = HERE.parents[1]

# Before vLLM is imported: one process, no network, one thread.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
    VLLM_HOST_IP="127.0.0.1",
    GLOO_SOCKET_IFNAME="lo",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
)


def _is_importable() -> bool:
    """Whether sys.path has the package kvbm_cxl; the folder of crates at the root of the checkout is none."""
    try:
        importlib.import_module("kvbm_cxl")
    except ImportError:
        return False
    return True


def _is_compiled() -> bool:
    import kvbm_cxl

    try:
        return kvbm_cxl.chain_key is not None
    except ImportError:
        return False


sys.path[:0] = [str(HERE), str(ROOT / "deploy" / "dynamo"), str(ROOT / "tests" / "versions")]
# A GPU whose driver is faked.
sys.path.append(str(ROOT / "python" / "tests"))
# The checkout as it is, where its extension was built; else the package that was made of it and installed.
if any((ROOT / "python" / "kvbm_cxl").glob("_native*.so")) or not _is_importable():
    sys.path.insert(0, str(ROOT / "python"))
    importlib.invalidate_caches()
if not (importlib.util.find_spec("vllm") and _is_compiled()):
    collect_ignore_glob = ["test_*.py"]
else:
    import kvbm_cxl
    import pytest

    # vLLM reads it when it is imported. With the session's own, nothing of another one is reused.
    _cache = tempfile.mkdtemp(prefix="kvbm-cxl-vllm-")
    os.environ["VLLM_CACHE_ROOT"] = _cache
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)

    @pytest.fixture(scope="session", autouse=True)
    def folder():
        """What the tests write: gone afterwards."""
        with tempfile.TemporaryDirectory(prefix="kvbm-cxl-") as made:
            os.environ["CXL_STATE_DIR"] = made
            yield Path(made)

    @pytest.fixture(autouse=True)
    def connector_log(caplog):
        """What the connector logs is in `caplog`, by way of a filter: every engine takes the handlers from all loggers below vLLM's."""

        def catch(record: logging.LogRecord) -> bool:
            caplog.handler.handle(record)
            return False

        logger = logging.getLogger("vllm.kvbm_cxl")
        logger.addFilter(catch)
        yield
        logger.removeFilter(catch)

    @pytest.fixture(autouse=True)
    def patience(monkeypatch) -> float | None:
        """A loaded machine may take long for anything: no publish is given up for that. The value that this replaces, for a test that is
        about it."""
        saver = sys.modules.get("kvbm_cxl.vllm_integration.saver")
        own = saver and saver.LEAST_PATIENCE
        if saver:
            monkeypatch.setattr(saver, "LEAST_PATIENCE", PATIENT)
        return own

    @pytest.fixture
    def waits(monkeypatch):
        """`waits(handover_ms=0, copy_ms=50)`: how long decode looks for blocks that do not come, and copies may take."""
        from kvbm_cxl.vllm_integration import lookups, movers

        def change(handover_ms: int | None = None, copy_ms: int | None = None) -> None:
            for module, name, value in ((lookups, "HANDOVER_WAIT_MS", handover_ms), (movers, "COPY_TIMEOUT_MS", copy_ms)):
                if value is not None:
                    monkeypatch.setattr(module, name, value)

        return change

    @pytest.fixture
    def make_pool():
        """A function that makes pools in shared memory: `make_pool(size="64M", cells="512K:75%")` returns the path, and with the size of
        a device for its metadata, `metadata="32M"`, a name of both."""
        made = []

        def make(size: str = "96M", cells: str = "512K:75%", metadata: str = "") -> str:
            path = f"/dev/shm/kvbm-cxl-test-{uuid.uuid4().hex[:12]}"
            made.append(path)
            if not metadata:
                kvbm_cxl.format_pool(f"{path},size={size}", cells=cells)
                return path
            made.append(f"{path}-metadata")
            name = f"{path},metadata={path}-metadata"
            kvbm_cxl.format_pool(f"{name},size={size},metadata_size={metadata}", cells=cells)
            return name

        yield make
        for path in made:
            Path(path).unlink(missing_ok=True)

    @pytest.fixture
    def pool(make_pool) -> str:
        """A pool for 512 KiB blocks, which are those of the tiny model."""
        return make_pool()

    @pytest.fixture(scope="session")
    def model(folder) -> str:
        """Folder of a tiny random model."""
        from tiny_model import tiny_model

        return str(tiny_model(folder / "model"))
