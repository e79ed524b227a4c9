"""Repacked images: opened and checked, or made from a repacked model."""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from unimem._core.block import Block
from unimem._core.load import load as read_parts
from unimem.base.atomic_file import NewFile
from unimem.base.closing import Closing
from unimem.base.descriptors import Descriptors
from unimem.errors import FormatError
from unimem.system import limits
from unimem.weights import loading
from unimem.weights.content_hash import Hashed, hash_in_threads
from unimem.weights.files import is_in_memory
from unimem.weights.loading import Progress
from unimem.weights.repack.arrangement import Arrangement
from unimem.weights.repack.image_format import ALIGN, HEADER, ImageHeader, ImageTensor, pack, parse

IMAGE_NAME = "repacked.unimem"
"""The name of a staged image, which lies beside links to the files of its model."""

_WRITE_BYTES = 4 << 20
_WARM_BYTES = 256 << 20
_READERS = 8  # threads that wait for a disk use no CPU
_NO_HASH = "0" * 32


class Image(Closing):
    """An opened image with a checked header. For one thread.

    Leaving the ``with`` closes the descriptor; mappings stay. `is_staged` tells whether the image
    lies in shared memory: such an image was checked when it was staged.

    Raises
    ------
    FormatError
        It is no image, or damaged.
    OSError
        It cannot be read, or is no regular file; PermissionError if it is another user's.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fds = Descriptors()
        try:
            self._fd = self._fds.add_regular(path, os.O_NOFOLLOW)
            info = os.fstat(self._fd)
            if info.st_uid not in (os.geteuid(), 0):
                raise PermissionError(errno.EPERM, "The image is another user's", path)
            self.header = read_image_header(self._fd, info.st_size, path)
            self.is_staged = is_in_memory(self._fd)
        except BaseException:
            self.close()
            raise

    @property
    def data_bytes(self) -> int:
        """Bytes of the data in whole pages."""
        return self.header.file_bytes - self.header.data_offset

    @cached_property
    def cached_bytes(self) -> int:
        """Bytes of the data in the page cache when this was first asked."""
        with self._map() as block:
            return block._resident_range(0, block.nbytes)

    def is_cached(self) -> bool:
        """Whether most of it is in the page cache."""
        return self.cached_bytes >= loading.MOSTLY * self.data_bytes

    def map(self, threads: int, progress: Progress | None = None) -> Block:
        """Map the data read-only in whole pages, and check its bytes.

        `threads` bring it into the page tables and hash it. `progress` is called with the bytes
        done and all bytes; an exception from it stops the work.

        Raises
        ------
        FormatError
            The hash of a tensor does not match, or the disk has lost bytes.
        CapacityError
            It cannot stay in RAM.
        OSError
            It cannot be mapped.
        """
        block = self._map()
        try:
            if not self.is_staged:
                limits.require_cached(block.nbytes, self.cached_bytes, f"mapping {self.path}")
                # Then the kernel reads ahead in huge pages, if the file system has them.
                with suppress(OSError):  # the kernel has none
                    block.advise("hugepage")
            with self._loss_as_damage():
                self._warm(block, threads, progress)
            if not self.is_staged:
                self._check(block, 0, threads, _second_half(progress))
            elif progress is not None:
                progress(block.nbytes, block.nbytes)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            block.__exit__(None, None, None)
            raise
        return block

    def _warm(self, block: Block, threads: int, progress: Progress | None) -> None:
        """Bring it in by pieces, so that it can be interrupted; that is half of the work."""
        if not (self.is_staged or self.is_cached()):
            threads = max(threads, _READERS)
        for begin in range(0, block.nbytes, _WARM_BYTES):
            if progress is not None:
                progress(begin, 2 * block.nbytes)
            block._warm_range(begin, min(_WARM_BYTES, block.nbytes - begin), threads)

    def read(self, block: Block, base: int, progress: Progress | None = None) -> None:
        """Read the data into a block and check it, past the page cache unless most of it is there.

        `base` is the place in the block, a multiple of 4096. The rest is as for `map`.
        """
        header = self.header
        part = (self._fd, header.data_offset, block, base, header.data_bytes, self.path)
        read = read_parts if self.is_staged or self.is_cached() else loading.read_direct

        def tell(done: int, total: int) -> None:
            if progress is not None and done < total:  # the end is reported after the check
                progress(done, total)

        with self._loss_as_damage():
            try:
                read([part], progress=tell)
            except loading.NoDirectReadsError:
                read_parts([part], progress=tell)
        self._check(block, base, limits.thread_count(), None, is_mapped=False)
        if progress is not None:
            progress(header.data_bytes, header.data_bytes)

    def check(self, threads: int | None = None, progress: Progress | None = None) -> None:
        """Read all of it and compare every tensor with its hash; raise as `map`."""
        with self._map() as block:
            self._check(block, 0, threads or limits.thread_count(), progress)

    def _map(self) -> Block:
        header = self.header
        try:
            return Block._map_fd(self._fd, header.data_offset, self.data_bytes, "r", self.path)
        except ValueError:  # the range was inside the file before
            raise FormatError("the image has become shorter", None, self.path) from None

    @contextmanager
    def _loss_as_damage(self) -> Iterator[None]:
        """Raise FormatError for bytes that are cut off, or that the disk has lost."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EFAULT):
                raise
            raise FormatError(f"it cannot be read: {error.strerror}", None, self.path) from error

    def _check(
        self,
        block: Block,
        base: int,
        threads: int,
        progress: Progress | None,
        *,
        is_mapped: bool = True,
    ) -> None:
        tensors = self.header.tensors
        path = self.path if is_mapped else None
        with self._loss_as_damage():
            found = _hash_tensors(block, base, tensors, threads, progress, path=path)
        for tensor, digest in zip(tensors, found, strict=True):
            if digest != tensor.hash:
                at = self.header.data_offset + tensor.offset
                raise FormatError(f"the hash of {tensor.name} does not match", at, self.path)

    def close(self) -> None:
        """Close the descriptor. Closing twice is no error."""
        self._fds.close()
        self._fd = -1


def read_image_header(fd: int, nbytes: int, path: str) -> ImageHeader:
    """Read and check the header and the table of an image of `nbytes` bytes."""
    head = os.pread(fd, HEADER.nbytes + ALIGN, 0)
    if len(head) >= HEADER.nbytes:
        # Where the data begins; `parse` checks it with the other fields.
        at = HEADER.offsets["data_offset"]
        end = int.from_bytes(head[at : at + 8], "little")
        if HEADER.nbytes + ALIGN < end <= min(nbytes, 1 << 27):
            head = os.pread(fd, end, 0)
    return parse(head, nbytes, path)


def is_for(header: ImageHeader, found: Arrangement) -> bool:
    """Whether an image has exactly the tensors and places of an arrangement."""
    if header.data_bytes != found.nbytes or len(header.tensors) != len(found.slots):
        return False
    return all(
        (one.name, one.type, one.ne, one.order, one.offset, one.nbytes)
        == (tensor.name, tensor.type, tensor.ne, order.buffer_type.name, at, order.nbytes)
        for one, (tensor, order, at) in zip(header.tensors, found.slots, strict=True)
    )


def pack_image(
    found: Arrangement,
    identity: dict[str, Any],
    model: str,
    block: Block | None,
    base: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> bytes:
    """Return the header and the table of an image.

    Without a block, the result has the same length, and no hashes. With one, the data at byte
    `base` is hashed in `threads`. `progress` is called with the bytes hashed and all bytes; an
    exception from it stops the work.
    """
    tensors = [
        ImageTensor(t.name, t.type, t.ne, order.buffer_type.name, at, order.nbytes, _NO_HASH)
        for t, order, at in found.slots
    ]
    if block is not None:
        digests = _hash_tensors(block, base, tensors, threads or limits.thread_count(), progress)
        tensors = [replace(t, hash=digest) for t, digest in zip(tensors, digests, strict=True)]
    return pack(identity, model, tensors, found.nbytes)


def write_image(
    new: NewFile,
    found: Arrangement,
    identity: dict[str, Any],
    model: str,
    block: Block,
    base: int,
    check: Callable[[], object],
) -> None:
    """Hash repacked tensors in a block and write them as an image, in this thread and one more.

    `base` is a multiple of 4096. `check` is called every few MiB; an exception from it ends the
    work. The caller publishes the file. It raises OSError if the file cannot be written, and
    ClosedError if the block was closed meanwhile.
    """
    head = pack_image(found, identity, model, block, base, 1, lambda *_: check())
    # Writes past the page cache need memory in whole pages. The data is in such memory.
    room = np.empty(len(head) + ALIGN, np.uint8)
    pages = room[-room.ctypes.data % ALIGN :][: len(head)]
    pages[:] = np.frombuffer(head, np.uint8)
    new.write(pages, 0)
    end = found.nbytes // ALIGN * ALIGN
    for begin in range(0, end, _WRITE_BYTES):
        check()
        n = min(_WRITE_BYTES, end - begin)
        new.write(block.as_array("uint8", n, base + begin), len(head) + begin)
    if rest := found.nbytes - end:
        pages[:rest] = block.as_array("uint8", rest, base + end)
        pages[rest:ALIGN] = 0
        new.write(pages[:ALIGN], len(head) + end)
    check()


def _second_half(progress: Progress | None) -> Progress | None:
    return None if progress is None else lambda done, total: progress(total + done, 2 * total)


def _hash_tensors(
    block: Block,
    base: int,
    tensors: Sequence[ImageTensor],
    threads: int,
    progress: Progress | None,
    *,
    path: str | None = None,
) -> list[str]:
    """Hash tensors in memory, the largest first; a mapped file is read under the guard."""
    data = [
        Hashed(block.as_array("uint8", tensor.nbytes, base + tensor.offset), path)
        for tensor in tensors
    ]
    digests = hash_in_threads(data, threads, progress, lambda data: -data.nbytes)
    if progress is not None:
        total = sum(tensor.nbytes for tensor in tensors)
        progress(total, total)
    return [digest.hex() for digest in digests]
