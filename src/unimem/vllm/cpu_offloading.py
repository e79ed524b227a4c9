"""Offloading for vLLM's CPU platform: its own spec with another copy engine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec


class CPUOffloading(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiered offloading, on CPUs too.

    vLLM refuses to offload on its CPU platform, since its copy engine needs a GPU's streams. Here
    the KV cache is copied by the CPU; the scheduler, the CPU memory for offloaded chunks and the
    secondary tiers are vLLM's own. With a GPU it is vLLM's `TieringOffloadingSpec`.

    Parameters
    ----------
    config : vllm.v1.kv_offload.config.OffloadingConfig
        vLLM's description of the offloaded caches, with the same options as for
        `TieringOffloadingSpec`.

    Raises
    ------
    ValueError
        `canonical_layout` is set on a CPU, whose pages vLLM's layout does not describe.
    """

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return what copies between the KV cache and the memory for offloaded chunks."""
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self.config.canonical_layout:
            raise ValueError("canonical_layout: expected false on a CPU, got true")
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = _Copies(kv_caches, self.blocks_per_chunk, region)
        return self._worker


class _Copies(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks at once, since the CPU has finished what it computed before.

    Parameters
    ----------
    kv_caches : vllm.v1.kv_offload.base.CanonicalKVCaches
        The KV cache: tensors of ``[blocks, bytes of a block]``, shared by groups of layers.
    blocks_per_chunk : int
        Blocks of the KV cache in an offloaded chunk.
    region : SharedOffloadRegion
        vLLM's memory for offloaded chunks; closed with the worker.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._region, self._per_chunk = region, blocks_per_chunk
        self._done: list[TransferResult] = []
        # For each group of layers: the blocks, the same blocks in the chunks, and the bytes used.
        self._groups: list[list[tuple[NDArray[np.int8], NDArray[np.int8], int]]] = []
        blocks = [cache.tensor.numpy() for cache in kv_caches.tensors]
        chunks = [
            region.create_next_worker_view(block.shape[1] * blocks_per_chunk)
            .numpy()
            .reshape(-1, blocks_per_chunk, block.shape[1])
            for block in blocks
        ]
        for refs in kv_caches.group_data_refs:
            tensors = [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            self._groups.append([(blocks[i], chunks[i], nbytes) for i, nbytes in tensors])

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy blocks of the KV cache to chunks."""
        return self._copy(job_id, src_spec, dst_spec, to_chunks=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy chunks to blocks of the KV cache."""
        return self._copy(job_id, dst_spec, src_spec, to_chunks=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the copies made since the last call."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: copies are made when they are submitted."""

    def shutdown(self) -> None:
        """Close the memory for chunks."""
        self._groups.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, cache: Any, offloaded: Any, *, to_chunks: bool) -> bool:
        began, total, first, first_chunk = time.perf_counter(), 0, 0, 0
        sizes = zip(self._groups, cache.group_sizes, cache.block_indices, strict=True)
        for tensors, size, index in sizes:
            # A group may begin and end within a chunk.
            places = index % self._per_chunk + np.arange(size)
            chunk = offloaded.block_ids[first_chunk + places // self._per_chunk]
            block, place = cache.block_ids[first : first + size], places % self._per_chunk
            for blocks, chunks, nbytes in tensors:
                if to_chunks:
                    chunks[chunk, place, :nbytes] = blocks[block, :nbytes]
                else:
                    blocks[block, :nbytes] = chunks[chunk, place, :nbytes]
                total += size * nbytes
            first += size
            first_chunk += -(-(index % self._per_chunk + size) // self._per_chunk) if size else 0
        self._done.append(TransferResult(job_id, True, total, time.perf_counter() - began))
        return True
