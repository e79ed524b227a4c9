"""Model files to the GPU: read into a ring of pinned memory, and copied from there meanwhile.

`Weights.to_device` is the way in. Threads take pieces of the file in order. For each a thread takes
the next slot of the ring, waits until what was in it is copied, reads the piece into it, and queues
its copy to the device. The mapping is not touched: a file that is truncated meanwhile is an error
of reading, where touching it would end the process.
"""

from __future__ import annotations

import errno
import mmap
import operator
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from unimem import limits
from unimem._core.arrays import array_within
from unimem.cuda.block import Block
from unimem.cuda.tape import Tape
from unimem.gpu import Driver
from unimem.model_file import version_of
from unimem.waiting import wait_until
from unimem.weights import Tensor, Weights

__all__ = ["to_device"]

Progress = Callable[[int, int], object]

# By estimate (bench.gpu measures the whole): a slot of 2 MiB is 40 us of PCIe 5, and looking after
# it about 10 us of Python and CUDA. The ring is pinned anew at each call, for 0.1 to 0.2 ms a MiB,
# where 4 GB are copied in 75 ms: it is no larger than it must be.
_N_SLOTS = 16
_STAGING_BYTES = _N_SLOTS * (2 << 20)
# Each reads 5 to 10 GB/s from the page cache, and PCIe 5 takes 55. They are fewer than the slots,
# so that there are always some on their way.
_THREADS = 12
_ALIGN = 256
_TICK_SECONDS = 0.05


def to_device(
    weights: Weights,
    tape: Tape,
    *,
    progress: Progress | None,
    threads: int | None,
    staging_bytes: int | None,
    stream: Any,
) -> dict[str, Any]:
    """Bring the tensors of a file to the GPU: see `Weights.to_device`."""
    begin = weights._parts[0].file.header.data_offset
    if not isinstance(tape, Tape):
        raise TypeError(
            f"tape: expected a unimem.cuda.Tape, got {type(tape).__name__}: make one with "
            "cuda.Tape(weights.mapped_bytes). In main memory the tensors are already, without a "
            "copy: Tensor.as_array"
        )
    n_threads = _n_threads(threads)
    slot_bytes = _slot_bytes(staging_bytes)
    driver = tape._driver
    earlier = driver.stream(stream)
    tensors = list(weights.tensors.values())
    nbytes = max((tensor.offset + tensor.nbytes for tensor in tensors), default=begin) - begin
    with _opened_again(weights) as fd:
        mark = tape.mark()
        # Where the array will end, unless others take from the tape too: then it stays taken.
        end = -(-mark // _ALIGN) * _ALIGN + nbytes
        region = None
        try:
            region = tape.take_bytes(nbytes, align=_ALIGN)
            # Who had this memory before may still be using it.
            driver.synchronize(earlier)
            if nbytes > 0:
                to = int(region.data.ptr)
                upload = _Upload(driver, weights.files[0], fd, begin, nbytes, to, slot_bytes)
                upload.run(n_threads, progress)
            _check_version(weights, fd)
            if progress is not None:
                progress(nbytes, nbytes)
            return {tensor.name: _array(tape, region, tensor, begin) for tensor in tensors}
        except BaseException:
            # The traceback would keep it, and it the tape.
            region = None
            if not tape.closed and tape.used_bytes == end:
                tape.rewind(mark)
            raise


def _array(tape: Tape, region: Any, tensor: Tensor, begin: int) -> Any:
    dtype, shape = tensor._as_in_arrays()
    at = tensor.offset - begin
    name = f"tensor '{tensor.name}'"
    dims, descr = array_within(name, region.data.ptr, region.nbytes, at, shape, dtype)
    memory = region.data.mem
    return tape._driver.array(memory, region.data.ptr - memory.ptr + at, dims, descr)


def _n_threads(threads: int | None) -> int:
    if threads is None:
        return min(_THREADS, limits.thread_count())
    n = operator.index(threads)
    if n < 1:
        raise ValueError(f"threads: expected 1 or more, got {n}")
    return n


def _slot_bytes(staging_bytes: int | None) -> int:
    asked = _STAGING_BYTES if staging_bytes is None else operator.index(staging_bytes)
    slot = asked // _N_SLOTS // mmap.PAGESIZE * mmap.PAGESIZE
    if slot < 1:
        raise ValueError(
            f"staging_bytes: expected at least {_N_SLOTS * mmap.PAGESIZE}, a page for each of "
            f"{_N_SLOTS} slots, got {asked}"
        )
    return slot


@contextmanager
def _opened_again(weights: Weights) -> Iterator[int]:
    # Without O_NONBLOCK, opening a FIFO that has replaced the file would wait for a writer.
    fd = os.open(weights.files[0], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check_version(weights, fd)
        yield fd
    finally:
        os.close(fd)


def _check_version(weights: Weights, fd: int) -> None:
    if version_of(os.fstat(fd)) != weights._parts[0].file.version:
        raise OSError(
            errno.ESTALE,
            "The file was replaced or written to after open_weights: open it again",
            weights.files[0],
        )


@contextmanager
def _pinned(driver: Driver, nbytes: int) -> Iterator[tuple[memoryview, int]]:
    with Block(
        nbytes,
        device=driver.id,
        pinned=True,
        pages="auto",
        name="upload",
        category="staging",
    ) as block:
        host: Any = block.host
        with memoryview(host) as memory:
            yield memory, block.address


class _Upload:
    """A range of a file on its way to the device. Its threads share it; `run` is for one."""

    def __init__(
        self, driver: Driver, path: str, fd: int, begin: int, nbytes: int, to: int, slot_bytes: int
    ) -> None:
        self._driver = driver
        self._path = path
        self._fd = fd
        self._begin = begin
        self._nbytes = nbytes
        self._to = to
        self._slot_bytes = slot_bytes
        # Offsets that nobody has taken. Taking one is one step under the interpreter's lock.
        self._pieces = iter(range(0, nbytes, slot_bytes))
        # Offsets in the ring, and an event each. The one whose copy was queued first comes first.
        self._slots: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        # Whoever works has taken a lane, and puts it back when all that he queued is done.
        self._lanes: SimpleQueue[_Lane] = SimpleQueue()
        self._stopped = False

    def run(self, n_threads: int, progress: Progress | None) -> None:
        """Read and copy all; no thread and no copy is under way when this returns or raises."""
        n_slots = min(_N_SLOTS, -(-self._nbytes // self._slot_bytes))
        lanes = [_Lane(self._driver.new_stream()) for _ in range(min(n_threads, n_slots))]
        for lane in lanes:
            self._lanes.put(lane)
        for i in range(n_slots):
            self._slots.put((i * self._slot_bytes, self._driver.new_event()))
        with (
            _pinned(self._driver, n_slots * self._slot_bytes) as (memory, address),
            ThreadPoolExecutor(len(lanes), "unimem-upload") as pool,
        ):
            try:
                running = [pool.submit(self._work, memory, address) for _ in lanes]
                while wait(running, _TICK_SECONDS).not_done:
                    done = sum(lane.done_bytes for lane in lanes)
                    if progress is not None and done < self._nbytes:
                        progress(done, self._nbytes)
                for thread in running:
                    thread.result()
            finally:
                self._stopped = True
                wait_until(lambda: self._lanes.qsize() == len(lanes))

    def _work(self, memory: memoryview, address: int) -> None:
        lane = self._lanes.get()
        try:
            self._driver.use()
            # Looked at with the lane in hand: nobody begins anything after the stop.
            while not self._stopped and (piece := next(self._pieces, None)) is not None:
                nbytes = min(self._slot_bytes, self._nbytes - piece)
                slot, copied = self._slots.get()
                try:
                    copied.synchronize()
                    with memory[slot : slot + nbytes] as out:
                        self._read(out, self._begin + piece)
                    self._driver.copy(self._to + piece, address + slot, nbytes, lane.stream.ptr)
                    copied.record(lane.stream.ptr)
                finally:
                    self._slots.put((slot, copied))
                lane.done_bytes += nbytes
        except BaseException:
            self._stopped = True
            raise
        finally:
            try:
                self._driver.synchronize(lane.stream.ptr)
            finally:
                self._lanes.put(lane)

    def _read(self, out: memoryview, offset: int) -> None:
        done = 0
        while done < len(out):
            with out[done:] as rest:
                try:
                    n = os.preadv(self._fd, [rest], offset + done)
                except OSError as error:
                    code = error.errno or errno.EIO
                    raise OSError(code, os.strerror(code), self._path) from error
            if n == 0:
                raise OSError(errno.EIO, "The file has become shorter", self._path)
            done += n


class _Lane:
    """What one thread works with."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.done_bytes = 0
