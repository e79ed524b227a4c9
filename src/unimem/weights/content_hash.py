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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem._core import guard
from unimem.base.arguments import check_callable, integer
from unimem.base.threads import run_in_threads
from unimem.system import limits
from unimem.weights.files import FileRange, check_version, open_model
from unimem.weights.loading import LoadRequest, Progress, load_model
from unimem.weights.tensors import Contents, ModelPart, Tensor

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
    if contents._stream is not None:  # it is not in memory as a whole
        with _map_again(contents) as whole:
            return content_hash(whole, mapped=True, threads=threads, progress=progress)
    _check_versions(contents, mapped)
    tensors = sorted(contents.tensors.values(), key=lambda tensor: tensor.name.encode())
    data = [Hashed(*chunk) for tensor in tensors for chunk in _chunks(tensor, mapped)]
    nbytes = sum(each.data.nbytes for each in data)
    # In the order of the files, which are read ahead.
    digests = iter(hash_in_threads(data, n_threads, progress, lambda data: data.ctypes.data))
    _check_versions(contents, mapped)
    total = xxhash.xxh3_128(_HEAD)
    _add_metadata(total, contents)
    total.update(_u64(len(tensors)))
    for tensor in tensors:
        total.update(_text(tensor.name) + _text(tensor.type))
        total.update(_u64(len(tensor.ne), *tensor.ne, tensor.nbytes))
        for _ in range(0, tensor.nbytes, _CHUNK_BYTES):
            total.update(next(digests))
    if progress is not None:
        progress(nbytes, nbytes)
    return total.hexdigest()


@contextmanager
def _map_again(contents: Contents) -> Iterator[Contents]:
    """Map the files of a model, unless they were written to."""
    first = contents._parts[0].file
    place = FileRange(first.begin, first.nbytes) if first.begin else None
    for part in contents._parts:
        check_version(part.file, os.stat(part.file.absolute_path))
    with ExitStack() as undo:
        model = undo.enter_context(open_model(first.absolute_path, place))
        loaded = load_model(model, LoadRequest("map"), undo)
        yield Contents(tuple(map(ModelPart, model.files, loaded.memory)))


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


def _chunks(tensor: Tensor, mapped: bool) -> Iterator[tuple[NDArray[np.uint8], str | None]]:
    data = tensor.as_array().reshape(-1).view(np.uint8)
    for begin in range(0, tensor.nbytes, _CHUNK_BYTES):
        yield data[begin : begin + _CHUNK_BYTES], tensor.file if mapped else None


class Hashed(NamedTuple):
    """Memory to hash, and the file that it is mapped from, if any."""

    data: NDArray[np.uint8]
    path: str | None


def hash_in_threads(
    work: list[Hashed],
    threads: int,
    progress: Progress | None,
    order: Callable[[NDArray[np.uint8]], int],
) -> list[bytes]:
    """Hash pieces of memory, sorted by `order`; return their digests in the order of the list.

    The list is emptied, and no thread is left, when this returns or raises. `progress` is not
    called at the end.
    """
    total, done = sum(each.data.nbytes for each in work), 0
    digests = [b""] * len(work)
    # Taking the next number is one step under the interpreter's lock.
    numbers = iter(sorted(range(len(work)), key=lambda i: order(work[i].data)))
    finished: deque[int] = deque()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True

    def tick() -> None:
        nonlocal done
        while finished:
            done += finished.popleft()
        if progress is not None and done < total:
            progress(done, total)

    def hash_some() -> None:
        copy = np.empty(_PIECE_BYTES, np.uint8)
        while not stopped and (i := next(numbers, None)) is not None:
            data, path = work[i]
            hasher = xxhash.xxh3_128()
            for begin in range(0, data.nbytes, _PIECE_BYTES):
                if stopped:
                    return
                piece = data[begin : begin + _PIECE_BYTES]
                if path is not None:
                    # If the file is truncated meanwhile, that is an error here, and no signal.
                    guard.copy(copy, piece.ctypes.data, piece.nbytes, path)
                    piece = copy[: piece.nbytes]
                hasher.update(piece.data)
                finished.append(piece.nbytes)
            digests[i] = hasher.digest()

    try:
        if work:
            run_in_threads(max(1, min(threads, len(work))), hash_some, stop=stop, tick=tick)
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # the frames of threads keep memory
        raise
    finally:
        work.clear()
    return digests
