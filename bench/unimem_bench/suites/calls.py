"""What the hot calls cost from Python, against the calls that they replace.

An uninitialised array from a tape, a plain address from a tape, and one token appended to a KV
cache. One pinned thread, in CPU time, without the loop.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unimem as um
from unimem_bench import plain
from unimem_bench.empty_call import EmptyCall
from unimem_bench.rounds import Side, stopwatch, warm_stopwatch
from unimem_bench.suite import Measure, Suite, costs, faster

SUITE = Suite("calls", "What do the hot calls cost from Python?", passes=5, quick_passes=4)

N_FLOATS = 4096
N_HEADS, HEAD_DIM = 8, 128
ROW_BYTES = N_HEADS * HEAD_DIM * 2
ROUNDS = 101
EMPTY_CALL = "empty Cython call"

# The ways to write a dtype, a good part of the cost: NumPy looks a name up each time.
DTYPES: dict[str, Any] = {
    "np.dtype": np.dtype("float32"),
    "np.float32": np.float32,
    "name": "float32",
}


def take(measure: Measure, dtype: Any) -> None:
    """Compare ``Tape.take`` with ``np.empty``; neither touches the memory.

    ``np.empty`` returns one freed chunk again and again, the tape a new address each time.
    """
    n = 500
    names = {"dtype": dtype, "empty": np.empty, "zeros": np.zeros}
    peers: dict[str, Side] = {
        f"np.{name}": stopwatch(f"{name}({N_FLOATS}, dtype)", n, names)
        for name in ("empty", "zeros")
    }
    if measure.installed("torch", "torch.empty"):
        import torch

        torch_names = {"empty": torch.empty, "dtype": torch.float32}
        peers["torch.empty"] = stopwatch(f"empty({N_FLOATS}, dtype=dtype)", n, torch_names)
    with um.Tape(n * N_FLOATS * 4) as tape:
        names["take"] = tape.take
        ours = {"unimem": stopwatch(f"take({N_FLOATS}, dtype)", n, names, tape.clear)}
        limits = {EMPTY_CALL: empty_call(n)}
        measure.compare(ours, peers, limits, rounds=ROUNDS)


for form, kind in DTYPES.items():
    SUITE.case(
        f"take, dtype as {form}",
        f"What does an uninitialised array of 16 KiB cost, its dtype given as {form}?",
        unit="ns",
        targets=[faster("np.empty", 2.0, issue=2)],
    )(partial(take, dtype=kind))


@SUITE.case(
    "take_address",
    "What does a plain address cost, beside a Cython method that does nothing?",
    unit="ns",
    targets=[costs(EMPTY_CALL, 2.5, issue=2)],
)
def take_address(measure: Measure) -> None:
    """Compare with an empty method of two integers, and with an address from NumPy."""
    n = 2000
    with um.Tape(n * 64) as tape:
        names = {"take_address": tape.take_address}
        theirs = "empty(64, 'u1').ctypes.data"
        ours = {"unimem": stopwatch("take_address(64, 64)", n, names, tape.clear)}
        peers = {"np.empty().ctypes.data": stopwatch(theirs, n // 10, {"empty": np.empty})}
        limits = {EMPTY_CALL: empty_call(n)}
        measure.compare(ours, peers, limits, rounds=ROUNDS)


def empty_call(n: int) -> Side:
    """Measure a method of two integers that does nothing."""
    return stopwatch("call(64, 64)", n, {"call": EmptyCall().call})


def append(measure: Measure, n_tokens: int, rounds: int) -> None:
    """Compare ``KVCache.append`` of one token with the same bytes assigned to slices.

    All sides walk through the same number of rows, 2 KiB each of K and of V; C through those of the
    cache itself.
    """
    shape = (N_HEADS, HEAD_DIM)
    k = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    arrays = {"k": k, "v": k + np.float16(1)}
    arrays |= {name: np.zeros((n_tokens, *shape), np.float16) for name in ("keys", "values")}
    statement = "keys[i] = k; values[i] = v"
    peers = {"NumPy slices": warm_stopwatch(statement, n_tokens, arrays)}
    written = [arrays]
    if measure.installed("torch", "torch slices"):
        import torch

        tensors = {name: torch.from_numpy(each.copy()) for name, each in arrays.items()}
        peers["torch slices"] = warm_stopwatch(statement, n_tokens, tensors)
        written.append({name: each.numpy() for name, each in tensors.items()})
    with um.KVCache(1, N_HEADS, HEAD_DIM, n_tokens, dtype="f16") as cache:
        ours = {"append": cache.append, "k": arrays["k"][None], "v": arrays["v"][None]}
        ours_side = warm_stopwatch("append(0, k, v)", n_tokens, ours, cache.clear)
        ours_side()
        table = copies(cache, arrays["k"], arrays["v"])

        def copy() -> float:
            plain.copy(table)
            return plain.copy(table) / n_tokens * 1e9

        measure.compare({"unimem": ours_side}, peers, {"C memcpy": copy}, rounds=rounds)
    for each in written:
        check(each["keys"], each["k"])
        check(each["values"], each["v"])


def check(rows: NDArray[np.float16], token: NDArray[np.float16]) -> None:
    """Raise AssertionError unless every row is the token."""
    if not np.array_equal(rows, np.broadcast_to(token, rows.shape)):
        raise AssertionError("a side did not write what it was given")


def copies(cache: um.KVCache, k: NDArray[np.float16], v: NDArray[np.float16]) -> NDArray[np.uint64]:
    """Return what C copies: the token `k`, `v`, to the rows of a cache that holds only it."""
    places = []
    for stored, token in zip(cache.layer(0), (k, v), strict=True):
        rows = stored[0].swapaxes(0, 1)
        check(rows, token)
        places.append([(row.ctypes.data, token.ctypes.data, ROW_BYTES) for row in rows])
    # K and V of one token, then those of the next.
    return np.array(places, np.uint64).swapaxes(0, 1).reshape(-1, 3)


SUITE.case(
    "append",
    "What does one token cost, 2 KiB each of K and V, in a cache that stays in the CPU's own?",
    unit="ns",
    targets=[faster("NumPy slices", 3.0, issue=2)],
)(partial(append, n_tokens=256, rounds=ROUNDS))

SUITE.case(
    "append, 4096 tokens", "What does one token cost where its row comes from memory?", unit="ns"
)(partial(append, n_tokens=4096, rounds=31))
