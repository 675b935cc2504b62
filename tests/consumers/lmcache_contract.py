# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest (`-p lmcache_contract`): LMCache's tests of its mock adapter get ours instead, each with a pool of its own."""

import uuid
from pathlib import Path

import kvbm_cxl
import lmcache.v1.distributed.l2_adapters.mock_l2_adapter as mock
from kvbm_cxl.lmcache import CxlL2Adapter, CxlL2AdapterConfig


class InPlaceOfTheMock(CxlL2Adapter):
    """Takes the mock's configuration."""

    def __init__(self, config: mock.MockL2AdapterConfig) -> None:
        self._path = Path(f"/dev/shm/kvbm-cxl-test-{uuid.uuid4().hex[:12]}")
        kvbm_cxl.format_pool(f"{self._path},size=32M", cells="64K:75%")
        # LMCache decides about evictions by this capacity only where it is asked to.
        options = {"pool": str(self._path), "capacity_bytes": int(config.max_size_gb * 2**30)}
        super().__init__(CxlL2AdapterConfig.from_dict(options))

    def close(self) -> None:
        super().close()
        self._path.unlink(missing_ok=True)


mock.MockL2Adapter = InPlaceOfTheMock
