"""A tier for vLLM: KV chunks that leave its CPU memory go to a `KVStore`, and return from it.

vLLM loads it by its name (docs/engines.md)::

    {"type": "KVStoreTier", "module_path": "unimem.vllm", "where": "/var/cache/kv"}

Importing it needs vLLM. vLLM's interface is experimental and changes with minor versions: this
module is for 0.33.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem.base.arguments import integer, string
from unimem.errors import FormatError
from unimem.kv.store.engine_chunks import EngineChunks
from unimem.kv.store.store import KVStore
from unimem.system import policy
from unimem.weights.opened import open_weights
from unimem.weights.whole_hash import whole_hash

try:
    from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
except ImportError as error:
    raise ImportError(
        "unimem.vllm is loaded by vLLM, and made for version 0.33 of its secondary tiers; "
        f"importing those said: {error}"
    ) from error

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

__all__ = ["KVStoreTier"]

_Move = Callable[[bytes, NDArray[np.uint8]], bool]


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """A secondary tier of vLLM in a `KVStore`: budgets, any number of processes, checked chunks.

    vLLM makes it and calls it in its scheduler: only `drain_jobs` and `shutdown` wait for a disk.
    The bytes of a chunk are vLLM's own, and unimem's caches cannot read them.

    Parameters
    ----------
    offloading_spec : vllm.v1.kv_offload.base.OffloadingSpec
        vLLM's description of the offloaded caches.
    primary_kv_view : memoryview
        vLLM's CPU memory, ``[chunks, bytes of a chunk]``.
    tier_type : str
        vLLM's name of the tier.
    where, ram_bytes, disk_bytes
        As for `KVStore`. vLLM's own CPU memory is in front of it.
    model : str, optional
        Distinguishes models of one name, such as a revision: vLLM knows only the name. A model in a
        local folder is known by all bytes of its files.
    n_threads : int, default 8
        Threads that read and write chunks.
    locality : {"LOCAL", "REMOTE"}, optional
        The place by which requests may select tiers.
    backpressure_detector : optional
        vLLM's detector for ``"backpressure"``: vLLM stores nothing while the tier is slow.

    Raises
    ------
    ValueError, TypeError
        An argument is out of range.
    CapacityError, OSError
        As `KVStore`.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        where: str,
        ram_bytes: int = 0,
        disk_bytes: int | None = None,
        model: str = "",
        n_threads: int = 8,
        locality: str | None = None,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        n_threads = integer(n_threads, "n_threads", 1, 1024)
        namespace = _namespace(offloading_spec, string(model, "model"))
        rows = np.asarray(primary_kv_view)
        self._rows: NDArray[np.uint8] = rows.view(np.uint8).reshape(len(rows), -1)
        self._store = KVStore(where, ram_bytes=ram_bytes, disk_bytes=disk_bytes)
        self._chunks = EngineChunks(self._store, namespace, self._rows.shape[1])
        self._pool = ThreadPoolExecutor(n_threads, "unimem-vllm")
        self._lock = threading.Lock()  # for `_moving` and `n_left`
        self._moving: set[Future[None]] = set()
        self._finished: SimpleQueue[_Job] = SimpleQueue()
        self._lookups = _Lookups(self._chunks, tier_type)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for the new chunks of a request only."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether the store has a chunk; RETRY until a thread has looked."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Start the lookups of this step."""
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget the lookups of a request."""
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Write chunks, each in a thread."""
        self._submit(job_metadata, self._chunks.put)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read chunks, each in a thread."""
        self._submit(job_metadata, self._chunks.get)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note the use of chunks, in a thread."""
        self._start(self._chunks.touch, list(keys))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call."""
        results: list[JobResult] = []
        while True:
            try:
                job = self._finished.get_nowait()
            except Empty:
                return results
            moved = tuple(key for key, done in zip(job.keys, job.moved, strict=True) if done)
            success = len(moved) == len(job.keys)
            result = JobResult(job_id=job.job_id, success=success)
            if job.is_load and not success:
                result.successful_keys = moved or None
                # Otherwise vLLM would ask for them again and again.
                self._lookups.mark_miss(set(job.keys) - set(moved))
            results.append(result)

    def drain_jobs(self) -> None:
        """Wait until no thread reads or writes vLLM's memory."""
        with self._lock:
            moving = set(self._moving)
        wait(moving)

    def shutdown(self) -> None:
        """End the threads and close the store. Calling it twice is no error."""
        if not self._store.closed:
            self._lookups.shutdown()
            self._pool.shutdown()
            self._store.close()
            self._rows = np.empty((0, 0), np.uint8)  # so that vLLM can release its memory

    def _submit(self, given: TransferJob, move: _Move) -> None:
        job = _Job(given)
        if not job.keys:
            self._finished.put(job)
        for i, (key, chunk) in enumerate(zip(job.keys, given.chunk_ids, strict=True)):
            self._start(self._move, job, i, move, key, self._rows[int(chunk)])

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        future = self._pool.submit(work, *arguments)
        with self._lock:
            self._moving.add(future)
        future.add_done_callback(self._forget)

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._moving.discard(future)

    def _move(self, job: _Job, i: int, move: _Move, key: bytes, row: NDArray[np.uint8]) -> None:
        try:
            job.moved[i] = move(key, row)
        except (OSError, MemoryError) as error:
            policy.warn(f"a chunk of vLLM was not moved: {self._store!r}: {error}")
        finally:
            with self._lock:
                job.n_left -= 1
                is_last = job.n_left == 0
            if is_last:
                self._finished.put(job)


class _Job:
    """A running job of vLLM."""

    def __init__(self, given: TransferJob) -> None:
        self.job_id: int = given.job_id
        self.is_load: bool = given.is_promotion
        self.keys: list[bytes] = list(given.keys)
        self.moved = [False] * len(self.keys)
        self.n_left = len(self.keys)


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Looks for chunks in a thread of its own, a step's all at once."""

    def __init__(self, chunks: EngineChunks, tier_type: str) -> None:
        self._chunks = chunks  # before the thread starts
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """Look for chunks."""
        return [self._chunks.has(key) for key in keys]


def _namespace(spec: OffloadingSpec, model: str) -> str:
    """Name everything but the key that the bytes of a chunk depend on, as vLLM's own file tier."""
    mapper = FileMapper.from_offloading_spec(
        root_dir="",
        offloading_spec=spec,
        blocks_per_file=spec.blocks_per_chunk,
        parallel_agnostic=True,
    )
    known = {"vllm": mapper.get_run_config(), "rank": mapper.rank, "model": model}
    path = spec.config.model.name
    if os.path.exists(path):
        known["weights"] = _files_hash(Path(path))
    return json.dumps(known, sort_keys=True)


def _files_hash(path: Path) -> str | None:
    """Hash all bytes of a model's weights and its configurations; None if they cannot be read."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    total = xxhash.xxh3_128()
    try:
        if not files:
            raise FileNotFoundError(errno.ENOENT, "expected *.safetensors, found none")
        for file in files:
            with open_weights(file, load="map") as weights:
                total.update(whole_hash(weights).encode())
    except (FormatError, OSError) as error:
        policy.warn(f"{path}: vLLM's model is known by its name only: {error}")
        return None
    for file in sorted([*path.glob("*config.json"), *path.glob("params.json")]):
        total.update(xxhash.xxh3_128_digest(file.read_bytes()))
    return total.hexdigest()
