"""Rings of KV memory: appends that wrap, windows that wrap, and the bytes that trimming moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

import unimem as um
from unimem_bench import plain
from unimem_bench.kv_sides import SHAPE, appending, check_holds, memcpy_to, stored, tokens, zeros_in
from unimem_bench.rounds import Side, milliseconds, warm_stopwatch
from unimem_bench.suite import Measure

# Names of sides.
RING = "unimem, ring"
PLAIN = "unimem, plain cache"


def append(measure: Measure, *, n_tokens: int, n_rows: int) -> None:
    """Compare appends that wrap in a ring with appends to a plain cache of the same pages."""
    k, v = kv = tokens(n_tokens)
    n = n_rows // n_tokens
    with (
        um.KVCache(1, *SHAPE, n_rows, window=n_rows, pages="4k") as ring,
        um.KVCache(1, *SHAPE, n_rows, pages="4k") as cache,
        um.Block(2 * n * k.nbytes, pages="4k") as room,
    ):
        for memory in (ring, cache, room):
            memory.warm()
        # So that the end of the rows comes in the middle of an append.
        ring.append(0, *tokens(n_tokens // 2 or n_rows // 2))
        names = {"append": ring.append, "k": k, "v": v}
        measure.compare(
            ours={
                RING: warm_stopwatch("append(0, k, v)", n, names),
                PLAIN: appending(cache, kv, n),
            },
            limits={"C memcpy": memcpy_to(zeros_in(room, kv), kv)},
        )
        if ring.row_of(ring.next_position) in (0, n_rows):
            raise AssertionError("the ring's tokens do not go on beyond its last row")
        check_holds(RING, stored(ring), kv)
        check_holds(PLAIN, stored(cache), kv)
        check_holds("C memcpy", zeros_in(room, kv), kv)


def read(measure: Measure) -> None:
    """Compare with reading a plain cache of the same pages."""
    n = 8192 if measure.quick else 32768
    k, v = tokens(n)
    with (
        um.KVCache(1, *SHAPE, n, window=n, pages="4k") as ring,
        um.KVCache(1, *SHAPE, n, pages="4k") as cache,
    ):
        ring.append(0, k[: n // 2], v[: n // 2])
        for memory in (ring, cache):
            memory.append(0, k, v)
        if ring.row_of(ring.next_position) != n // 2:
            raise AssertionError("the window does not wrap")
        check_holds(RING, stored(ring), (k, v))
        check_holds("plain memory", stored(cache), (k, v))

        def reading(cache: um.KVCache) -> Side:
            address = cache.layer(0)[0].ctypes.data
            return lambda: k.nbytes / plain.read(address, k.nbytes) / 1e9

        measure.compare(ours={RING: reading(ring)}, limits={"plain memory": reading(cache)})


# ---- trimming ----

TRIM_LAYERS = 4


def sliding(quick: bool) -> tuple[int, int]:
    """Return how many tokens there are before and after trimming."""
    return (2048, 1536) if quick else (8192, 6144)


def wrapped_ring(n: int) -> um.KVCache:
    """Make a ring whose window begins in the middle of its rows."""
    k, v = tokens(n)
    ring = um.KVCache(TRIM_LAYERS, *SHAPE, n, window=n)
    for layer in range(TRIM_LAYERS):
        ring.append(layer, k[: n // 2], v[: n // 2])
        ring.append(layer, k, v)
    return ring


def trim(measure: Measure) -> None:
    """Compare with moving the tokens to the first rows, which gives no memory back."""
    n, kept = sliding(measure.quick)
    kv = tokens(n)
    last = [part[-kept:] for part in kv]
    lanes = [part.copy() for part in kv * TRIM_LAYERS]

    def trim_ring() -> float:
        with wrapped_ring(n) as ring:
            elapsed = milliseconds(partial(ring.trim_to, kept))
            for layer in range(TRIM_LAYERS):
                check_holds(RING, stored(ring, layer), last)
        return elapsed

    def moving(name: str, move: Callable[[], float]) -> Side:
        def run() -> float:
            for lane, part in zip(lanes, kv * TRIM_LAYERS, strict=True):
                lane[:] = part
            elapsed = move()
            check_holds(name, [lane[:kept] for lane in lanes], last * TRIM_LAYERS)
            return elapsed

        return run

    def move() -> None:
        for lane in lanes:
            lane[:kept] = lane[-kept:]

    # memcpy needs pieces that do not overlap: as long as what was dropped.
    step = (n - kept) * lanes[0][0].nbytes
    pieces = [
        (lane.ctypes.data + to, lane.ctypes.data + to + step, step)
        for lane in lanes
        for to in range(0, lane[:kept].nbytes, step)
    ]
    table = np.array(pieces, np.uint64)
    ours = {RING: trim_ring}
    peers = {"NumPy": moving("NumPy", partial(milliseconds, move))}
    limits = {"C memcpy": moving("C memcpy", partial(milliseconds, partial(plain.copy, table)))}
    measure.compare(ours, peers, limits, rounds=11, quick_rounds=5)


def count_moved(measure: Measure) -> None:
    """Count the bytes of tokens whose row changed, and compare their contents."""
    n, kept = sliding(measure.quick)
    last = [part[-kept:] for part in tokens(n)]
    with wrapped_ring(n) as ring:
        before = rows_of_last(ring, kept)
        ring.trim_to(kept)
        moved = int((rows_of_last(ring, kept) != before).sum()) * ring.row_bytes
        for layer in range(TRIM_LAYERS):
            check_holds(RING, stored(ring, layer), last)
    measure.count(RING, [moved])


def rows_of_last(cache: um.KVCache, n: int) -> NDArray[np.int64]:
    """Return the row of each of the last n tokens, for each layer and for K and V."""
    found = []
    for layer in range(cache.n_layers):
        k, v = cache.layer(layer)
        for view, base in ((k, cache.address(layer, "k")), (v, cache.address(layer, "v"))):
            address = view[:, :, cache.seq_len - n :].ctypes.data
            first = (address - base) // cache.row_bytes
            found.append((first + np.arange(n)) % cache.n_rows)
    return np.stack(found)
