"""Upload of model files to the GPU, through a ring of pinned memory.

`Weights.to_device` calls it. Threads take pieces of the files in order. For each piece a thread
takes the next slot of the ring, waits until its previous content is copied, reads the piece into
it, and queues the copy to the device. The weights in main memory are not touched: reading a
truncated file is an error, while touching its mapping would end the process.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple

from unimem._core.arrays import array_within, checked_nbytes
from unimem._core.tape import DeviceTape
from unimem.backends.cuda_driver import Driver
from unimem.base.arguments import integer
from unimem.base.threads import run_in_threads
from unimem.cuda.block import Block
from unimem.planning.gpu_bytes import ALIGN, N_SLOTS, STAGING_BYTES, Transfer, list_transfers
from unimem.system import limits
from unimem.weights.files import check_version, reopen
from unimem.weights.loading import Progress
from unimem.weights.tensors import Contents, Tensor

# A thread reads 5 to 10 GB/s from the page cache, and PCIe 5 takes 55. There are fewer threads than
# slots, so that copies never pause.
_THREADS = 12


def _places(weights: Contents, transfers: list[Transfer]) -> list[tuple[Tensor, int]]:
    """Return the offset of each tensor in the taken region."""
    moved = {transfer.file.path: transfer.at - transfer.begin for transfer in transfers}
    places = [(tensor, tensor.offset + moved[tensor.file]) for tensor in weights.tensors.values()]
    for tensor, at in places:
        dtype, _ = tensor._array_layout()
        if at % dtype.alignment:
            raise ValueError(
                f"tensor '{tensor.name}' of {tensor.file} would lie at no multiple of "
                f"{dtype.alignment} bytes, and a GPU reads no {dtype.name} there: write the file "
                "again with the library safetensors, which aligns tensors"
            )
    return places


def to_device(
    weights: Contents,
    tape: DeviceTape,
    driver: Driver,
    *,
    progress: Progress | None,
    threads: int | None,
    staging_bytes: int | str | None,
    stream: Any,
) -> dict[str, Any]:
    """Copy the tensors of a model to the GPU: see `Weights.to_device`."""
    if threads is None:
        threads = min(_THREADS, limits.thread_count())
    n_threads = integer(threads, "threads", 1)
    slot_bytes = _slot_bytes(staging_bytes)
    earlier = driver.stream(stream)
    transfers = list_transfers(weights)
    nbytes = transfers[-1].end
    places = _places(weights, transfers)
    with ExitStack() as stack:
        fds = [stack.enter_context(reopen(transfer.file)) for transfer in transfers]
        mark = tape.mark()
        # The end of the region, unless another thread takes meanwhile: then an error cannot rewind.
        end = -(-mark // ALIGN) * ALIGN + nbytes
        region = None
        try:
            region = tape.take_bytes(nbytes, align=ALIGN)
            # Queued work may still use this memory.
            driver.synchronize(earlier)
            if nbytes > 0:
                upload = _Upload(driver, transfers, fds, int(region.data.ptr), slot_bytes)
                upload.run(n_threads, progress)
            for transfer, fd in zip(transfers, fds, strict=True):
                check_version(transfer.file, os.fstat(fd))
            if progress is not None:
                total = sum(transfer.nbytes for transfer in transfers)
                progress(total, total)
            return {tensor.name: _array(driver, region, tensor, at) for tensor, at in places}
        except BaseException:
            # The traceback would keep the region, and thus the tape.
            region = None
            if not tape.closed and tape.used_bytes == end:
                tape.rewind(mark)
            raise


def _array(driver: Driver, region: Any, tensor: Tensor, at: int) -> Any:
    dtype, shape = tensor._array_layout()
    name = f"tensor '{tensor.name}'"
    dims, descr = array_within(name, region.data.ptr, region.nbytes, at, shape, dtype)
    memory = region.data.mem
    return driver.array(memory, region.data.ptr - memory.ptr + at, dims, descr)


def _slot_bytes(staging_bytes: int | str | None) -> int:
    asked = STAGING_BYTES
    if staging_bytes is not None:
        asked = checked_nbytes(staging_bytes, "staging_bytes")
    # Pinning more costs more than larger slots save: on an H200 512 MiB halved the speed.
    slot = min(asked, STAGING_BYTES) // N_SLOTS // mmap.PAGESIZE * mmap.PAGESIZE
    if slot < 1:
        raise ValueError(
            f"staging_bytes: expected at least {N_SLOTS * mmap.PAGESIZE}, a page for each of "
            f"{N_SLOTS} slots, got {asked}"
        )
    return slot


@contextmanager
def _pinned(driver: Driver, nbytes: int) -> Iterator[tuple[memoryview, int]]:
    with Block(
        nbytes, device=driver.id, pinned=True, pages="auto", name="upload", category="staging"
    ) as block:
        host: Any = block.host
        with memoryview(host) as memory:
            yield memory, block.address


class _Piece(NamedTuple):
    """A piece of a file, and its address on the device."""

    path: str
    fd: int
    offset: int
    nbytes: int
    to: int


class _Upload:
    """An upload of files. Its threads share it; one calls `run`."""

    def __init__(
        self, driver: Driver, transfers: list[Transfer], fds: list[int], to: int, slot_bytes: int
    ) -> None:
        self._driver = driver
        self._nbytes = sum(transfer.nbytes for transfer in transfers)
        self._slot_bytes = slot_bytes
        pieces = [
            _Piece(
                transfer.file.path,
                fd,
                transfer.begin + first,
                min(slot_bytes, transfer.nbytes - first),
                to + transfer.at + first,
            )
            for transfer, fd in zip(transfers, fds, strict=True)
            for first in range(0, transfer.nbytes, slot_bytes)
        ]
        self._n_pieces = len(pieces)
        # The remaining pieces. Taking one is a single step under the GIL.
        self._pieces = iter(pieces)
        # Offsets in the ring with an event each, in the order of their copies.
        self._slots: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        # One for each thread.
        self._lanes: SimpleQueue[_Lane] = SimpleQueue()
        self._stopped = False

    def run(self, n_threads: int, progress: Progress | None) -> None:
        """Read and copy everything; wait for all threads and copies before returning or raising."""
        n_slots = min(N_SLOTS, self._n_pieces)
        lanes = [_Lane(self._driver.new_stream()) for _ in range(min(n_threads, n_slots))]
        for lane in lanes:
            self._lanes.put(lane)
        for i in range(n_slots):
            self._slots.put((i * self._slot_bytes, self._driver.new_event()))

        def tick() -> None:
            done = sum(lane.done_bytes for lane in lanes)
            if progress is not None and done < self._nbytes:
                progress(done, self._nbytes)

        with _pinned(self._driver, n_slots * self._slot_bytes) as (memory, address):
            run_in_threads(
                len(lanes), lambda: self._work(memory, address), stop=self._stop, tick=tick
            )

    def _stop(self) -> None:
        self._stopped = True

    def _work(self, memory: memoryview, address: int) -> None:
        lane = self._lanes.get()
        try:
            self._driver.use()
            while not self._stopped and (piece := next(self._pieces, None)) is not None:
                slot, copied = self._slots.get()
                try:
                    copied.synchronize()
                    with memory[slot : slot + piece.nbytes] as out:
                        _read(out, piece)
                    self._driver.copy(piece.to, address + slot, piece.nbytes, lane.stream.ptr)
                    copied.record(lane.stream.ptr)
                finally:
                    self._slots.put((slot, copied))
                lane.done_bytes += piece.nbytes
        except BaseException:
            self._stopped = True  # before this thread waits for its copies
            raise
        finally:
            self._driver.synchronize(lane.stream.ptr)


def _read(out: memoryview, piece: _Piece) -> None:
    done = 0
    while done < len(out):
        with out[done:] as rest:
            try:
                n = os.preadv(piece.fd, [rest], piece.offset + done)
            except OSError as error:
                code = error.errno or errno.EIO
                raise OSError(code, os.strerror(code), piece.path) from error
        if n == 0:
            raise OSError(errno.EIO, "The file has become shorter", piece.path)
        done += n


class _Lane:
    """The stream and the progress of a thread."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.done_bytes = 0
