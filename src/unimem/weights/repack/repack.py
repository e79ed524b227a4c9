"""Repacking weights: pieces are read past the page cache, in threads on the right nodes."""

from __future__ import annotations

import errno
import os
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from unimem._core.block import Block
from unimem._core.tape import Tape
from unimem.base.arguments import check_callable
from unimem.base.threads import run_in_threads
from unimem.errors import CapacityError, FormatError, PlacementError
from unimem.system import limits, policy
from unimem.system.placement import PlacementOptions
from unimem.weights.files import reopen
from unimem.weights.loading import (
    MOSTLY,
    Lifetime,
    NoDirectReadsError,
    Progress,
    check_tape,
    take_room,
)
from unimem.weights.opened import Weights
from unimem.weights.repack.arrangement import Arrangement, Slot, arrange, new_buffers
from unimem.weights.repack.image import Image
from unimem.weights.repack.image_cache import CacheChoice, check_cache
from unimem.weights.repack.image_search import Images, is_mapped
from unimem.weights.repack.repacked import Repacked
from unimem.weights.residency import (
    Dropper,
    drop,
    drop_beside,
    gaps_in_cache,
    is_mapped_elsewhere,
    runs_beside,
    write_back,
)
from unimem.weights.tensors import Contents

STAGING_SHARE = 100
"""Memory for pieces before they are repacked: a hundredth of the model, if pieces allow it."""

_ALIGN = 4096  # of reads past the page cache
_ROWS = 64  # a multiple of the rows that any order interleaves
_TICK = 0.05  # seconds between two calls of a callback
_MOST_BYTES, _LEAST_BYTES = 4 << 20, 256 << 10  # of a piece, if a type allows pieces


def repack(
    weights: Weights,
    *,
    tape: Tape | None = None,
    cache: CacheChoice = None,
    progress: Progress | None = None,
    **placement: Unpack[PlacementOptions],
) -> Repacked:
    """Put weights in the order that ggml multiplies fastest on this CPU, in placed memory.

    Matrices with such an order are read past the page cache, or from it, and dropped from it unless
    other processes have the file mapped: memory is not doubled. `weights` and their arrays stay as
    they are, and a mapped file is read again where it is used.

    If an image of them is staged (``unimem stage --repack``) or kept in the cache, it is mapped or
    read instead; docs/images.md says when, and what is checked. Otherwise an image is written to
    the cache while the weights are in use; closing waits for that.

    Parameters
    ----------
    weights : Weights
        An opened model, mapped or in memory of its own. It stays there.
    tape : Tape, optional
        A tape to take the memory from, with its placement, instead of a block.
    cache : bool or path-like, optional
        Where to keep an image for the next start: True for the cache folder, or a path. With False,
        no image is kept or used. The default is as True, unless another user owns or may write to
        the model or its folder.
    progress : callable, optional
        Called with the bytes of the file that are repacked and all such bytes, in this thread, at
        most 20 times a second, and once at the end. An exception from it, or an interrupt, stops
        the work: no memory stays taken, and no thread is left.
    **placement
        See `PlacementOptions`. The memory is always warm.

    Returns
    -------
    Repacked
        Without tensors, and with a `PlacementWarning`, if no tensor has another order here.

    Raises
    ------
    CapacityError, PlacementError, MemoryError
        The weights do not fit, or not with this placement; nothing was taken.
    TapeFull, FrozenError, ClosedError
        The tape is full or frozen, or was cleared or closed meanwhile.
    OSError
        A file cannot be read, has become shorter, or was replaced or written to meanwhile.
    ImportError
        ggml is not installed.
    TypeError, ValueError
        An option is unknown, or contradicts another.

    Notes
    -----
    The order is ggml's own (`unimem.backends.ggml_orders`); docs/weights.md lists the types that
    have one. Threads are pinned to the CPUs of the nodes that the memory is placed on.

    Examples
    --------
    Beside the weights, for a runtime on ggml::

        with um.open_weights("model.gguf") as w, um.repack(w, pages="thp") as repacked:
            engine.run(repacked.tensors)
    """
    if not isinstance(weights, Weights):
        raise TypeError(f"weights: expected opened Weights, got {weights!r:.60}: um.open_weights")
    check_tape(tape, placement)
    check_cache(cache)
    check_callable(progress)
    weights._opened()
    found, name = arrange(weights), weights.files[0]
    if not found.slots:
        policy.warn(f"{name}: {why_nothing(weights)}")
        return Repacked(found, None, 0, Lifetime(name), None)
    # While these views live, the weights cannot be closed.
    held = [block.as_array("uint8", 0) for block in weights.blocks]
    work = _Request(weights, found, tape, progress, placement)
    images, keeping = Images(weights, found, cache), None
    with ExitStack() as undo:
        path = work.from_image(images, images.find(), undo)
        if path is None:
            with ExitStack() as making:
                making.enter_context(images.making())
                # Another process may have made it meanwhile.
                path = work.from_image(images, images.find_kept(), undo)
                if path is None:
                    work.place(
                        lambda block, base: repack_into(weights, found, block, base, progress), undo
                    )
                    keeping = images.keep(work.block, work.base, making)
        if keeping is not None:
            undo.callback(keeping.end, cancel=True)
            keeping.start()
            if tape is not None:  # a tape may take the memory back at any time
                keeping.end()
        made = Repacked(found, work.block, work.base, work.lifetime, tape, path, keeping)
        weights._repacked.add(made)
        del held
        undo.pop_all()
        return made


class _Request:
    """One call of `repack`, with the memory that it has filled."""

    block: Block
    base: int
    lifetime: Lifetime

    def __init__(
        self,
        weights: Weights,
        found: Arrangement,
        tape: Tape | None,
        progress: Progress | None,
        placement: PlacementOptions,
    ) -> None:
        self._found, self._tape, self._placement = found, tape, placement
        self._progress = progress
        self._name = weights.files[0]

    def from_image(self, images: Images, image: Image | None, undo: ExitStack) -> str | None:
        """Take an image and return its path; None without one, or if it is damaged."""
        if image is None:
            return None
        with image:
            try:
                if self._is_mappable(image):
                    self._map(image, undo)
                else:
                    self.place(lambda block, base: image.read(block, base, self._tell), undo)
            except FormatError as error:
                images.discard(image, error)
                return None
        return image.path

    def place(self, fill: Callable[[Block, int], object], undo: ExitStack) -> None:
        """Fill memory of the tape, or of a new block."""
        found, tape = self._found, self._tape
        with ExitStack() as attempt:
            self.lifetime = Lifetime(self._name)
            if tape is not None:
                self.block = tape.block
                self.base = take_room(tape, found.nbytes, self.lifetime, attempt)
                self.block._require_room([(self.base, found.nbytes)])
                fill(self.block, self.base)
                if self.block.closed:
                    self.lifetime.end("lay on a tape that was closed")
                self.lifetime.check()
            else:
                options = {key: value for key, value in self._placement.items() if key != "warm"}

                def fill_all(block: Block) -> None:
                    fill(block, 0)
                    block._warm_range(found.nbytes, block.nbytes - found.nbytes)

                self.base = 0
                self.block = attempt.enter_context(
                    Block._filled(
                        found.nbytes,
                        fill_all,
                        name=self._name,
                        category="weights",
                        **options,  # type: ignore[arg-type]
                    )
                )
            undo.push(attempt.pop_all())

    def _is_mappable(self, image: Image) -> bool:
        pages, numa = self._placement.get("pages", "auto"), self._placement.get("numa")
        return self._tape is None and is_mapped(image, pages, numa)

    def _map(self, image: Image, undo: ExitStack) -> None:
        with ExitStack() as attempt:
            self.lifetime, self.base = Lifetime(self._name), 0
            self.block = attempt.enter_context(image.map(limits.thread_count(), self._tell))
            if lock := self._placement.get("lock"):
                try:
                    self.block._lock(lock)
                except PlacementError as error:
                    if self._placement.get("strict"):
                        raise
                    policy.warn(error.strerror or str(error))
            undo.push(attempt.pop_all())

    def _tell(self, done: int, of: int) -> None:
        """Report the progress of an image as a share of the repacked bytes."""
        total = self._found.source_bytes
        if self._progress is not None:
            self._progress(done * total // of, total)


def why_nothing(contents: Contents) -> str:
    """Say why no tensor of a model is repacked."""
    types = ", ".join(contents.by_type())
    return f"no tensor has an order of its own on this CPU (types: {types})"


# ---- the work -----------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """Some rows of a tensor, or all, with their places in the file and in the memory."""

    slot: Slot
    ne: tuple[int, ...]
    offset: int
    nbytes: int
    at: int


def _cut(found: Arrangement, n_threads: int) -> list[_Piece]:
    """Cut tensors into pieces that suit the threads.

    The pieces have the order of the files, so that memory grows as the page cache shrinks. Large
    whole tensors are first, so that no thread is left with one at the end.
    """
    pieces = []
    for slot in found.slots:
        tensor, order, at = slot
        total, n_rows = _count_rows(slot, found, n_threads)
        if n_rows == total:
            pieces.append(_Piece(slot, tensor.ne, tensor.offset, tensor.nbytes, at))
            continue
        row_bytes = tensor.nbytes // total
        for row in range(0, total, n_rows):
            n = min(n_rows, total - row)
            begin, to = tensor.offset + row * row_bytes, at + order.nbytes // total * row
            pieces.append(_Piece(slot, (tensor.ne[0], n), begin, n * row_bytes, to))
    return sorted(pieces, key=lambda piece: min(0, _MOST_BYTES - piece.nbytes))  # and stable


def _count_rows(slot: Slot, found: Arrangement, n_threads: int) -> tuple[int, int]:
    """Count the rows of a tensor, and of its pieces: all rows if it stays whole."""
    from unimem.backends.ggml_orders import are_rows_apart

    most = found.source_bytes // (STAGING_SHARE * n_threads)
    most = min(max(most, _LEAST_BYTES), _MOST_BYTES)
    kind, ne = slot.tensor.ggml_type, slot.tensor.ne
    assert kind is not None  # or it had no order
    total = ne[1] * (ne[2] if len(ne) > 2 else 1)
    n_rows = max(1, most // (slot.tensor.nbytes // total * _ROWS)) * _ROWS
    return total, n_rows if n_rows < total and are_rows_apart(kind, ne, n_rows) else total


def _slots_of(n_threads: int, piece_bytes: int, source_bytes: int) -> tuple[int, int]:
    """Choose how many threads read, and the bytes of staging memory for each of them."""
    slot_bytes = (piece_bytes // _ALIGN + 2) * _ALIGN
    room = max(source_bytes // STAGING_SHARE, n_threads * _LEAST_BYTES)
    return max(1, min(n_threads, room // slot_bytes)), slot_bytes


def staging_bytes(found: Arrangement, n_threads: int) -> int:
    """Bound the bytes of mapped files that are read and not yet repacked, with `n_threads`."""
    most = 0
    for slot in found.slots:
        total, n_rows = _count_rows(slot, found, n_threads)
        most = max(most, slot.tensor.nbytes // total * n_rows)
    n_slots, slot_bytes = _slots_of(n_threads, most, found.source_bytes)
    return n_slots * slot_bytes


def repack_into(
    weights: Weights, found: Arrangement, block: Block, base: int, progress: Progress | None
) -> None:
    """Write all repacked tensors to a block, from byte `base` on."""
    most = limits.thread_count()
    pieces = _cut(found, most)
    n_threads = min(most, len(pieces))
    work = _Repacking(pieces, weights, found, block.address + base)
    if weights.load != "map":
        work.run(_cpus(block, n_threads), progress)
        return
    names = {slot.tensor.name for slot in found.slots}
    runs = {part.file.path: runs_beside(part, weights, names) for part in weights._parts}
    # Files that others have mapped stay cached; the rest would be in RAM twice.
    droppable = {
        part.file.path
        for part in weights._parts
        if not is_mapped_elsewhere(part, runs[part.file.path])
    }
    _unmap(weights)
    most_bytes = max(piece.nbytes for piece in pieces)
    n_slots, slot_bytes = _slots_of(n_threads, most_bytes, found.source_bytes)
    cpus = _cpus(block, n_slots)
    is_cached = _cached_bytes(weights) >= MOSTLY * weights.nbytes
    nbytes = len(cpus) * slot_bytes
    with Block(nbytes, name="repacking", category="staging", pages="4k") as staging:
        work.stage(staging, slot_bytes)
        dropped = {path: runs[path] for path in droppable}
        try:
            work.read(cpus, progress, 0 if is_cached else os.O_DIRECT, dropped)
        except NoDirectReadsError:
            work.read(cpus, progress, 0, dropped)
        finally:
            work.stage(staging, 0)


def _unmap(weights: Weights) -> None:
    """Take files out of this process's page tables, since mapped pages cannot be dropped."""
    for part in weights._parts:
        with suppress(OSError):  # it is locked, and stays
            part.memory.block.advise("dontneed")


def _cached_bytes(weights: Weights) -> int:
    blocks = (part.memory.block for part in weights._parts)
    return sum(min(block._resident_range(0, block.nbytes), block.nbytes) for block in blocks)


def _cpus(block: Block, n_threads: int) -> list[int]:
    """Choose the CPU of each thread from the nodes that the block is placed on."""
    allowed = limits.cpus()
    numa = policy.parse_numa(block.requested["numa"])
    chosen = policy.warm_cpus(numa, n_threads, limits.nodes(), allowed) or sorted(allowed)
    return [chosen[i % len(chosen)] for i in range(n_threads)]


class _Repacking:
    """Pieces that are being repacked. Its threads share it; `read` and `run` are for one thread.

    The result begins at `address`.
    """

    def __init__(
        self, pieces: list[_Piece], weights: Weights, found: Arrangement, address: int
    ) -> None:
        self._pieces, self._weights, self._found = pieces, weights, found
        self._address = address
        self._parts = {part.file.path: part for part in weights._parts}
        self._staging: list[NDArray[np.uint8]] = []
        self._fds: dict[str, int] = {}
        self._droppers: dict[str, Dropper] = {}
        self._is_direct = self._stopped = False
        self._done: deque[int] = deque()

    def stage(self, staging: Block, slot_bytes: int) -> None:
        """Read into a block with a slot of `slot_bytes` for each thread; 0 releases the block."""
        n = staging.nbytes // slot_bytes if slot_bytes else 0
        self._staging = [staging.as_array("uint8", slot_bytes, i * slot_bytes) for i in range(n)]

    def read(
        self,
        cpus: list[int],
        progress: Progress | None,
        flags: int,
        dropped: dict[str, list[tuple[int, int]]],
    ) -> None:
        """Repack tensors from files, which are opened with these flags.

        `dropped` are the files to drop from the page cache, except these ranges. It raises
        NoDirectReadsError if the flags have ``O_DIRECT`` and a file system lacks it.
        """
        with ExitStack() as opened:
            try:
                for path, part in self._parts.items():
                    self._fds[path] = opened.enter_context(reopen(part.file, flags))
            except OSError as error:
                if flags and error.errno == errno.EINVAL:
                    raise NoDirectReadsError from error
                raise
            self._is_direct = bool(flags)
            for path, runs in dropped.items():
                self._droppers[path] = Dropper(self._fds[path], runs)
                if not flags:
                    write_back(self._fds[path])
            try:
                self.run(cpus, progress)
            finally:
                for path, dropper in self._droppers.items():
                    drop_beside(self._parts[path], self._fds[path], dropper.kept)
                self._fds = {}
            for part in self._parts.values():
                with reopen(part.file):
                    pass  # it raises if the file was replaced or written to

    def run(self, cpus: list[int], progress: Progress | None) -> None:
        """Repack all pieces, with a thread for each CPU; no thread is left when this ends."""
        total, done = self._found.source_bytes, 0
        self._done.clear()
        self._next = iter(self._pieces)
        numbers = iter(range(len(cpus)))
        self._buffers = new_buffers(self._found, self._address)

        def tick() -> None:
            nonlocal done
            while self._done:
                done += self._done.popleft()
            if progress is not None and done < total:
                progress(done, total)

        def work() -> None:
            number = next(numbers)
            with suppress(OSError):  # the CPU may have gone
                os.sched_setaffinity(0, {cpus[number]})
            while not self._stopped and (piece := next(self._next, None)) is not None:
                self._repack(piece, number)
                self._done.append(piece.nbytes)

        try:
            run_in_threads(len(cpus), work, stop=self._stop, tick=tick)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the frames of threads keep memory
            raise
        finally:
            self._stopped = False
            for buffer in self._buffers.values():
                buffer.free()
        if progress is not None:
            progress(total, total)

    def _stop(self) -> None:
        self._stopped = True

    def _repack(self, piece: _Piece, number: int) -> None:
        tensor, order, _ = piece.slot
        assert tensor.ggml_type is not None  # or it had no order
        if self._fds:
            source = self._read(piece, self._staging[number])
            if not self._is_direct and tensor.file in self._droppers:
                self._droppers[tensor.file].drop(piece.offset, piece.offset + piece.nbytes)
        else:
            source = tensor.address + piece.offset - tensor.offset
        buffer = self._buffers[order.buffer_type.name]
        buffer.write(tensor.ggml_type, piece.ne, source, self._address + piece.at)

    def _read(self, piece: _Piece, memory: NDArray[np.uint8]) -> int:
        """Read a piece into staging memory; return its address."""
        path, first = piece.slot.tensor.file, piece.offset // _ALIGN * _ALIGN
        fd, wanted, got = self._fds[path], piece.offset + piece.nbytes - first, 0
        size = -(-wanted // _ALIGN) * _ALIGN
        while got < wanted:
            try:
                n = os.preadv(fd, [memory[got:size].data], first + got)
            except OSError as error:
                if self._is_direct and error.errno == errno.EINVAL:
                    raise NoDirectReadsError from error
                error.filename = path
                raise
            got += n
            # A read past the page cache has whole pages, except at the end of the file.
            if n == 0 or (self._is_direct and got < wanted and got % _ALIGN):
                raise OSError(errno.EIO, "The file has become shorter", path)
        return int(memory.ctypes.data) + piece.offset - first


# ---- the rest of the model ----------------------------------------------------------------------


def warm_rest(
    weights: Weights, repacked: Repacked, threads: int, progress: Progress | None = None
) -> None:
    """Bring those tensors of a mapped model into RAM that were not repacked.

    If they cannot stay there, there is a `PlacementWarning`. Reading ahead does not bring repacked
    tensors back.
    """
    from unimem.weights.residency import require_room

    runs = {part.file.path: runs_beside(part, weights, repacked.tensors) for part in weights._parts}
    total = sum(end - begin for those in runs.values() for begin, end in those)
    done = 0
    try:
        require_room(weights, mapped=True, without=repacked.tensors)
    except CapacityError as error:
        policy.warn(f"what cannot stay in RAM is read from the disk for every token: {error}")
        return
    told = 0.0
    for part in weights._parts:
        with reopen(part.file) as fd:
            read_ahead = dict(gaps_in_cache(part, runs[part.file.path]))
            for begin, end in runs[part.file.path]:
                os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_WILLNEED)
                part.memory.block._warm_range(begin, end - begin, threads)
                if end in read_ahead:
                    drop(fd, end, read_ahead[end])
                done += end - begin
                if progress is not None and done < total and time.monotonic() - told >= _TICK:
                    told = time.monotonic()
                    progress(done, total)
            for begin, end in read_ahead.items():  # it was still being read
                drop(fd, begin, end)
    if progress is not None:
        progress(total, total)


def repack_and_warm(
    weights: Weights,
    threads: int,
    progress: Progress | None = None,
    **placement: Unpack[PlacementOptions],
) -> Repacked:
    """Repack weights and bring in the rest of a mapped model, with one progress for both."""
    found, rest_bytes = arrange(weights), 0
    if weights.load == "map":
        names = {slot.tensor.name for slot in found.slots}
        runs = (run for part in weights._parts for run in runs_beside(part, weights, names))
        rest_bytes = sum(end - begin for begin, end in runs)
    total = found.source_bytes + rest_bytes

    def tell(done: int, of: int) -> None:
        # The second pass reports completion, if there is one.
        if progress is not None and (done < of or not rest_bytes):
            progress(done, total)

    def tell_rest(done: int, _: int) -> None:
        if progress is not None:
            progress(found.source_bytes + done, total)

    repacked = repack(weights, progress=tell, **placement)
    if rest_bytes:
        try:
            warm_rest(weights, repacked, threads, tell_rest)
        except BaseException as error:
            repacked.__exit__(type(error))
            raise
    return repacked
