r"""A hash of all content of a model, independent of its files and of how it was loaded.

This specifies the hash, so that other programs can compute it. Integers are unsigned, little-endian
and have 64 bits. A text is its length in bytes and its UTF-8. Hashes are XXH3 (128 bits, seed 0); a
hash that is hashed itself is its canonical (big-endian) 16 bytes. The input, in this order:

- the 17 bytes ``unimem content 1\n``;
- the number of keys of the metadata, without ``split.no``, ``split.count`` and
  ``split.tensors.count``; then for each key, in the order of the keys' bytes: the key as a text,
  and the length and the bytes of its value. A value of GGUF is the number of its type (32 bits),
  for an array the type of its items (32 bits) and their count, and then the bytes of the file, a
  string without its length. A value of safetensors is the 4 bytes ``str\0`` and its UTF-8. If a
  model has several files, the metadata of the first file counts;
- the number of tensors; then for each tensor, in the order of the names' bytes: the name and the
  type as texts (`Tensor.type`); the number of dimensions, and each dimension, the contiguous one
  first; the bytes of its data; and the hash of each 8 MiB of the data (the last may be shorter).
"""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem._core import guard
from unimem.base.arguments import check_callable, integer
from unimem.base.threads import run_in_threads
from unimem.system import limits
from unimem.weights.files import check_version
from unimem.weights.loading import Progress
from unimem.weights.tensors import Contents, Tensor

__all__ = ["content_hash"]

_HEAD = b"unimem content 1\n"
_OF_A_SPLIT = frozenset({"split.no", "split.count", "split.tensors.count"})
_CHUNK_BYTES = 8 << 20
# Bytes copied from a mapped file at a time: they fit the cache of the core that hashes them.
_PIECE_BYTES = 1 << 20


def content_hash(
    contents: Contents,
    *,
    mapped: bool,
    threads: int | None = None,
    progress: Progress | None = None,
) -> str:
    """Hash the metadata and all data of a model: see `Weights.content_hash`."""
    n_threads = limits.thread_count() if threads is None else integer(threads, "threads", 1)
    check_callable(progress)
    _check_versions(contents, mapped)
    tensors = sorted(contents.tensors.values(), key=lambda tensor: tensor.name.encode())
    chunks = [chunk for tensor in tensors for chunk in _chunks(tensor)]
    work = _Work(chunks, mapped=mapped)
    work.run(n_threads, progress)
    _check_versions(contents, mapped)
    total = xxhash.xxh3_128(_HEAD)
    _add_metadata(total, contents)
    digests = iter(work.digests)
    total.update(_u64(len(tensors)))
    for tensor in tensors:
        total.update(_text(tensor.name) + _text(tensor.type))
        total.update(_u64(len(tensor.ne), *tensor.ne, tensor.nbytes))
        for _ in range(0, tensor.nbytes, _CHUNK_BYTES):
            total.update(next(digests))
    if progress is not None:
        progress(work.nbytes, work.nbytes)
    return total.hexdigest()


def _check_versions(contents: Contents, mapped: bool) -> None:
    """Raise OSError (ESTALE) if a mapped file was replaced or written to."""
    for part in contents._parts if mapped else ():
        # A removed file is still mapped, and has no path to examine it by.
        with suppress(FileNotFoundError):
            check_version(part.file, os.stat(part.file.absolute_path))


def _add_metadata(total: xxhash.xxh3_128, contents: Contents) -> None:
    header = contents._parts[0].file.header
    keys = {key.encode(): index for key, index in header.keys().items() if key not in _OF_A_SPLIT}
    total.update(_u64(len(keys)))
    for key in sorted(keys):
        value = header.raw_value(keys[key])
        total.update(_u64(len(key)) + key + _u64(len(value)) + value)


def _u64(*values: int) -> bytes:
    return np.array(values, "<u8").tobytes()


def _text(text: str) -> bytes:
    raw = text.encode()
    return _u64(len(raw)) + raw


class _Chunk(NamedTuple):
    data: NDArray[np.uint8]  # it keeps the memory
    path: str


def _chunks(tensor: Tensor) -> Iterator[_Chunk]:
    data = tensor.as_array().reshape(-1).view(np.uint8)
    for begin in range(0, tensor.nbytes, _CHUNK_BYTES):
        yield _Chunk(data[begin : begin + _CHUNK_BYTES], tensor.file)


class _Work:
    """Chunks that are being hashed. Its threads share it; `run` is for one thread."""

    def __init__(self, chunks: list[_Chunk], *, mapped: bool) -> None:
        self.nbytes = sum(chunk.data.nbytes for chunk in chunks)
        self.digests = [b""] * len(chunks)
        self._chunks = chunks
        self._mapped = mapped
        # In the order of the files, which are read ahead. Taking the next chunk is one step under
        # the interpreter's lock.
        in_memory = sorted(range(len(chunks)), key=lambda i: chunks[i].data.ctypes.data)
        self._next = iter(in_memory)
        self._done: deque[int] = deque()
        self._stopped = False

    def run(self, n_threads: int, progress: Progress | None) -> None:
        """Hash all chunks; no thread is left when this returns or raises."""
        n = min(n_threads, len(self._chunks))
        if n == 0:
            return
        done = 0

        def tick() -> None:
            nonlocal done
            while self._done:
                done += self._done.popleft()
            if progress is not None and done < self.nbytes:
                progress(done, self.nbytes)

        try:
            run_in_threads(n, self._work, stop=self._stop, tick=tick)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # the frames of threads keep memory
            raise
        finally:
            self._chunks.clear()

    def _stop(self) -> None:
        self._stopped = True

    def _work(self) -> None:
        piece = np.empty(_PIECE_BYTES if self._mapped else 0, np.uint8)
        while not self._stopped and (i := next(self._next, None)) is not None:
            chunk = self._chunks[i]
            hasher = xxhash.xxh3_128()
            for begin in range(0, chunk.data.nbytes, _PIECE_BYTES):
                if self._stopped:
                    return
                data = chunk.data[begin : begin + _PIECE_BYTES]
                if self._mapped:
                    # If the file is truncated meanwhile, that is an error here, and no signal.
                    guard.copy(piece, data.ctypes.data, data.nbytes, chunk.path)
                    data = piece[: data.nbytes]
                hasher.update(data.data)
                self._done.append(data.nbytes)
            self.digests[i] = hasher.digest()
