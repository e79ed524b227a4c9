"""Tokens for the suites of KV memory, sides that append and copy them, and checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unimem as um
from unimem_bench import plain
from unimem_bench.rounds import Side, warm_stopwatch
from unimem_bench.suite import Measure

Array = NDArray[Any]
KV = Sequence[Array]  # K and V

# 2 KiB of K and 2 KiB of V a token, as float16: a layer of Llama 3 8B.
SHAPE = N_HEADS, HEAD_DIM = 8, 128
N_VALUES = N_HEADS * HEAD_DIM
CACHE_LINE = 64


@lru_cache(maxsize=2)
def tokens(n: int, dtype: str = "float16") -> tuple[Array, Array]:
    """Return K and V of n different tokens, of shape [n, heads, head size]; no side writes to them.

    Their values lie between 1 and 2, or -1 and -2, and are exact in float16.
    """
    # Any sign and mantissa under one exponent, made ten times as fast as random floats.
    bits = np.random.PCG64(1).random_raw(2 * n * N_VALUES // 4).view(np.uint16)
    k, v = (bits & 0x83FF | 0x3C00).view(np.float16).reshape(2, n, *SHAPE)
    return k.astype(dtype), v.astype(dtype)


def stored(cache: um.KVCache, layer: int = 0, dtype: str | None = None) -> list[Array]:
    """Return views of K and V of a layer of one stream, or copies as `dtype`, token by token."""
    return [part[0].swapaxes(0, 1) for part in cache.layer(layer, dtype)]


def check_holds(side: str, found: Iterable[Array], appended: Iterable[Array]) -> None:
    """Raise AssertionError unless a side holds what was appended to it.

    `found` may hold `appended` several times over.
    """
    for have, part in zip(found, appended, strict=True):
        bits = f"u{part.itemsize}"  # compared ten times as fast as float16
        whole = have.dtype == part.dtype and have.size and have.size % part.size == 0
        if not whole or (have.reshape(-1, *part.shape).view(bits) != part.view(bits)).any():
            raise AssertionError(f"{side} does not hold what was appended")


def zeros(n: int, of: KV) -> list[Array]:
    """Return memory for each of these arrays, n times.

    It begins at a cache line, as unimem's does: a memcpy of 2 KiB to where malloc happens to begin
    takes up to a seventh longer.
    """
    arrays = []
    for part in of:
        nbytes = n * part.nbytes
        room = np.zeros(nbytes + CACHE_LINE, np.uint8)
        begin = -room.ctypes.data % CACHE_LINE
        arrays.append(room[begin : begin + nbytes].view(part.dtype).reshape(n, *part.shape))
    return arrays


def zeros_in(block: um.Block, of: KV) -> list[Array]:
    """Return arrays as `zeros` does, as many as fit into a new block."""
    n = block.nbytes // sum(part.nbytes for part in of)
    arrays, offset = [], 0
    for part in of:
        arrays.append(block.as_array(part.dtype, (n, *part.shape), offset))
        offset += n * part.nbytes
    return arrays


def memcpy(n: int, *pairs: tuple[int, Array]) -> Side:
    """Copy arrays with memcpy, n times each, one behind the other; ns for each time.

    As `warm_stopwatch`, it measures the second of two equal runs.
    """
    pieces = [
        (to + i * source.nbytes, source.ctypes.data, source.nbytes)
        for i in range(n)
        for to, source in pairs
    ]
    table = np.array(pieces, np.uint64)

    def run() -> float:
        plain.copy(table)
        return plain.copy(table) / n * 1e9

    return run


def memcpy_to(arrays: KV, sources: KV) -> Side:
    """Copy as `memcpy` does, to arrays of `zeros`."""
    places = [array.ctypes.data for array in arrays]
    return memcpy(len(arrays[0]), *zip(places, sources, strict=True))


def in_gb_s(nbytes: int, side: Side) -> Side:
    """Convert the nanoseconds of a side that handles `nbytes` into GB/s."""
    return lambda: nbytes / side()


def torch_names(measure: Measure, names: Mapping[str, Array], *peers: str) -> dict[str, Any]:
    """Return arrays as torch's tensors over the same memory; {} if torch is not installed."""
    if not measure.installed("torch", *peers):
        return {}
    import torch

    torch.set_num_threads(1)
    return {name: torch.from_numpy(array) for name, array in names.items()}


def appending(cache: um.KVCache, kv: KV, n: int) -> Side:
    """Append tokens n times to a cleared cache; ns for each time."""
    names = {"append": cache.append, "k": kv[0], "v": kv[1]}
    return warm_stopwatch("append(0, k, v)", n, names, cache.clear)
