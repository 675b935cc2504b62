# SPDX-License-Identifier: Apache-2.0
"""vLLM's tiering on a CPU: its spec with another worker, as its own copies between a GPU and the primary tier refuse CPUs.

Scheduler, manager, primary tier and secondary tiers are vLLM's. The worker copies pages between the engine's KV cache and its part of the
primary tier, at once.
"""

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):
    def __init__(self, caches, region, blocks_per_chunk):
        self._region, self._blocks_per_chunk, self._done = region, blocks_per_chunk, []
        self._references = caches.group_data_refs
        self._engine = [one.tensor for one in caches.tensors]
        self._primary = [region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk) for one in caches.tensors]

    def _pages(self, engine, primary):
        """Each page of a job: in the engine's KV cache, and in the primary tier."""
        blocks, chunks = iter(engine.block_ids), iter(primary.block_ids)
        for group, (size, first) in enumerate(zip(engine.group_sizes, engine.block_indices)):
            chunk = None
            for index in range(first, first + size):
                place = index % self._blocks_per_chunk
                if chunk is None or place == 0:
                    chunk = int(next(chunks))
                block = int(next(blocks))
                for reference in self._references[group]:
                    length, tensor = reference.page_size_bytes, reference.tensor_idx
                    there = self._primary[tensor][chunk, place * length : (place + 1) * length]
                    yield self._engine[tensor][block].view(-1)[:length], there

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._end(job_id, [there.copy_(page).numel() for page, there in self._pages(src_spec, dst_spec)])

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._end(job_id, [page.copy_(there).numel() for page, there in self._pages(dst_spec, src_spec)])

    def _end(self, job_id, copied):
        self._done.append(TransferResult(job_id, True, sum(copied), 1e-6))
        return True

    def get_finished(self):
        done, self._done = self._done, []
        return done

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self._primary = []
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
