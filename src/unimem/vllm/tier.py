"""A tier for vLLM: KV chunks that leave its CPU memory go to a `KVStore`, and return from it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import vllm
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from unimem.base.arguments import integer, string
from unimem.kv.store.engine_chunks import EngineChunks
from unimem.kv.store.engine_store import check_budgets
from unimem.kv.store.store import KVStore
from unimem.system import policy
from unimem.weights.files_hash import files_hash

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

_Move = Callable[[bytes, NDArray[np.uint8]], bool]


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """A secondary tier of vLLM in a `KVStore`: budgets, any number of processes, checked chunks.

    vLLM makes it and calls it in its scheduler: only `drain_jobs` and `shutdown` wait for a disk.
    The bytes of a chunk are vLLM's own, and unimem's caches cannot read them.

    All chunks of a request count as used when it came, the first ones of its prompt last: a prompt
    never makes room for its end with its beginning, which the end is of no use without.

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
    salt : str, optional
        As for `KVStore`.
    locality : {"LOCAL", "REMOTE"}, optional
        The place by which requests may select tiers.
    backpressure_detector : optional
        vLLM's detector for ``"backpressure"``: vLLM stores nothing while the tier is slow.

    Raises
    ------
    ValueError, TypeError
        An argument is out of range, or no chunk would fit into `ram_bytes` or `disk_bytes`.
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
        ram_bytes: int | str = 0,
        disk_bytes: int | str | None = None,
        model: str = "",
        n_threads: int = 8,
        salt: str = "",
        locality: str | None = None,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        n_threads = integer(n_threads, "n_threads", 1, 1024)
        namespace = _namespace(offloading_spec, string(model, "model"))
        rows = np.asarray(primary_kv_view)
        self._rows: NDArray[np.uint8] = rows.view(np.uint8).reshape(len(rows), -1)
        check_budgets("vLLM", self._rows.shape[1], ram_bytes, disk_bytes)
        budgets: dict[str, Any] = {"ram_bytes": ram_bytes, "disk_bytes": disk_bytes}
        self._store = KVStore(where, **budgets, pages="thp", salt=salt)
        self._chunks = EngineChunks(self._store, namespace, self._rows.shape[1], engine="vLLM")
        self._pool = ThreadPoolExecutor(n_threads, "unimem-vllm")
        self._lock = threading.Lock()  # for `_moving` and `n_left`
        self._moving: set[Future[None]] = set()
        self._finished: SimpleQueue[_Job] = SimpleQueue()
        self._requests: dict[str, _Prompt] = {}
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
        """Note the use of a prompt that nothing was moved for, and forget the request."""
        self._used_by(req_context)
        self._requests.pop(req_context.req_id, None)
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Write chunks in a thread, the first ones of the prompt first."""
        job, request = _Job(job_metadata), self._used_by(job_metadata.req_context)
        if not job.keys:
            self._finished.put(job)
        moves = [
            (request.used_ns(key), i, key, self._rows[int(chunk)])
            for i, (key, chunk) in enumerate(zip(job.keys, job_metadata.chunk_ids, strict=True))
        ]
        moves.sort(key=lambda move: -move[0])
        request.writes = self._start(self._write, request.writes, job, moves)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read chunks, each in a thread."""
        self._used_by(job_metadata.req_context)
        job = _Job(job_metadata)
        if not job.keys:
            self._finished.put(job)
        for i, (key, chunk) in enumerate(zip(job.keys, job_metadata.chunk_ids, strict=True)):
            self._start(self._move, job, i, self._chunks.get, key, self._rows[int(chunk)])

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note the use of chunks, in a thread."""
        request = self._used_by(req_context)
        self._start(self._touch, {key: request.used_ns(key) for key in keys})

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

    def _used_by(self, context: ReqContext) -> _Prompt:
        """Return a request; when it is new, note the use of all chunks of its prompt.

        vLLM calls `touch` for no chunk, and asks no tier for chunks that it has itself.
        """
        request = self._requests.get(context.req_id)
        if request is None:
            request = _Prompt(context)
            request.writes = self._start(self._touch, request.ages())
            self._requests[context.req_id] = request
        return request

    def _write(self, before: Future[None], job: _Job, moves: list[tuple[Any, ...]]) -> None:
        """Write chunks of a request one by one: two at a time could take each other's room."""
        wait([before])
        for used_ns, i, key, row in moves:
            with suppress(Exception):  # the other chunks are still moved, and the job ends
                self._move(job, i, partial(self._chunks.put, used_ns=used_ns), key, row)

    def _touch(self, ages: dict[bytes, int]) -> None:
        for key, used_ns in ages.items():
            self._chunks.touch([key], used_ns)

    def _start(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        future = self._pool.submit(work, *arguments)
        with self._lock:
            self._moving.add(future)
        future.add_done_callback(self._forget)
        return future

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
                if not job.is_load:
                    self._chunks.sync()
                self._finished.put(job)


class _Job:
    """A running job of vLLM."""

    def __init__(self, given: TransferJob) -> None:
        self.job_id: int = given.job_id
        self.is_load: bool = given.is_promotion
        self.keys: list[bytes] = list(given.keys)
        self.moved = [False] * len(self.keys)
        self.n_left = len(self.keys)


class _Prompt:
    """A request of vLLM: when it was first seen, and the last job that writes its chunks."""

    writes: Future[None]

    def __init__(self, context: ReqContext) -> None:
        self._context, self._seen_ns = context, time.time_ns()

    def used_ns(self, key: bytes) -> int:
        """Return when a chunk counts as used: the earlier in the prompt, the later."""
        return self._seen_ns - (self._context.get_offload_key_position(key) or 0)

    def ages(self) -> dict[bytes, int]:
        """Return when each chunk of the prompt counts as used, as far as vLLM tells."""
        known = getattr(self._context, "_offload_key_positions", ())
        return {key: self.used_ns(key) for key in known}


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
    known["version"] = vllm.__version__
    known["layout"] = spec.config.kv_cache_layout
    known["device"] = current_platform.device_type
    if current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
        known["device"] = "cpu amx"  # vLLM's kernels for it lay blocks out in another way
    path = spec.config.model.name
    if os.path.exists(path):
        known["weights"] = files_hash(Path(path), "vLLM")
    return json.dumps(known, sort_keys=True)
