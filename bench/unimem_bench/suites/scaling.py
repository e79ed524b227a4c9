"""How cost grows with the work, over four decades of size.

Each case measures one call at sizes from 1 to 10,000 times the first, and fits the exponent of its
growth: 0 is constant cost, 1 linear. Constant cost may grow with size to the power of 0.1, a factor
of 2.5 over four decades, and linear cost with the power of 1.1, since larger things fit worse into
caches.

A call has a cost of its own, most of it at the smallest sizes, so the exponent of a linear cost
over all sizes is below 1. Memory too large for a cache costs more per byte, which raises the
exponent: `append` therefore fills the same rows at every size. For `verify`, reading the other
mappings is most of the cost up to blocks of some tens of megabytes.

Times are CPU times of one thread. All sizes exist at once, and each round measures each.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unimem as um
from unimem.base.text import format_bytes
from unimem.system.placement import Pages
from unimem_bench import files, plain, states
from unimem_bench.rounds import Side, stopwatch, warm_stopwatch
from unimem_bench.suite import OURS, Measure, NotMeasured, Suite, grows
from unimem_bench.suites.gguf import of_ggml

SUITE = Suite("scaling", "How does cost grow with the work?", passes=3, quick_passes=3)

CONSTANT, LINEAR = grows(0.1, issue=8), grows(1.1, issue=8)
HEADS = N_HEADS, HEAD_DIM = 1, 64  # 128 B of K and 128 of V a token, as float16
KIB, MIB = 1 << 10, 1 << 20

Sides = dict[float, Side]  # by size
SidesOf = Callable[[Measure, ExitStack, int], Mapping[str, Side]]  # by name, of a size

LEAST_TENSORS = 6  # and 60,000 at most: a header may have 65,536


def sizes(measure: Measure, first: int, decades: int = 4) -> list[int]:
    """Return sizes over `decades`: one a decade, two in a full run."""
    a_decade = 1 if measure.quick else 2
    return [round(first * 10 ** (i / a_decade)) for i in range(decades * a_decade + 1)]


def timed(
    run: Callable[[], Any], unit: float, after: Callable[[Any], object] | None = None
) -> Side:
    """Measure one call in CPU time; its result goes to `after`, untimed."""

    def measured() -> float:
        start = time.thread_time()
        result = run()
        elapsed = time.thread_time() - start
        if after is not None:
            after(result)
        return elapsed / unit

    return measured


def second_run(side: Side) -> Side:
    """Measure the second of two equal runs: the first warms the caches."""

    def again() -> float:
        side()
        return side()

    return again


def tokens(n: int) -> NDArray[np.float16]:
    """Return different rows of K or V."""
    rows = np.arange(n, dtype=np.uint32)[:, None] * HEAD_DIM + np.arange(HEAD_DIM, dtype=np.uint32)
    return (rows % 2039).astype(np.float16)[:, None, :].repeat(N_HEADS, axis=1)


def require_equal(found: NDArray[Any], wanted: NDArray[Any], what: str) -> None:
    """Check that two sides did the same work."""
    if not np.array_equal(found, wanted):
        raise AssertionError(f"{what}: not what was appended")


def by_size(
    name: str,
    question: str,
    *,
    first: int = 10,
    rounds: int,
    quick_rounds: int | None = None,
    warmup: int = 2,
    **declared: Any,
) -> Callable[[SidesOf], SidesOf]:
    """Declare a case whose sides are made for one size after the other, and live together."""

    def declare(sides: SidesOf) -> SidesOf:
        def run(measure: Measure) -> None:
            found: dict[str, Sides] = defaultdict(dict)
            with ExitStack() as stack:
                for size in sizes(measure, first):
                    for side_name, side in sides(measure, stack, size).items():
                        found[side_name][size] = side
                ours = {OURS: found.pop(OURS)}
                measure.scale(ours, found, rounds=rounds, quick_rounds=quick_rounds, warmup=warmup)

        SUITE.case(name, question, **declared)(run)
        return sides

    return declare


# ---- tapes ----


@SUITE.case(
    "take",
    "Does an uninitialised array cost more where it is larger?",
    unit="ns",
    x="bytes of the array",
    targets=[CONSTANT],
)
def take(measure: Measure) -> None:
    """Take arrays of one size from a tape that is cleared before."""
    n = 64
    found = sizes(measure, 64)
    with um.Tape(n * (found[-1] + 64)) as tape:
        ours: Sides = {}
        peers: Sides = {}
        for size in found:
            ours[size] = stopwatch(f"take({size}, 'u1')", n, {"take": tape.take}, tape.clear)
            peers[size] = stopwatch(f"empty({size}, 'u1')", n, {"empty": np.empty})
        measure.scale({"unimem": ours}, {"np.empty": peers}, rounds=61)


@by_size(
    "take-after",
    "Does an array of 16 values cost more after many others?",
    unit="ns",
    x="arrays taken before",
    targets=[CONSTANT],
    rounds=61,
)
def take_after(_measure: Measure, stack: ExitStack, size: int) -> dict[str, Side]:
    """Take from a tape that has given out `size` arrays, beside a heap that has."""
    n = 64
    tape = stack.enter_context(um.Tape((size + n) * 64))
    for _ in range(size):
        tape.take_address(64)
    rewind = partial(tape.rewind, tape.mark())
    held = [np.empty(16, np.float32) for _ in range(size)]
    names = {"empty": np.empty, "held": held}
    return {
        "unimem": warm_stopwatch("take(16)", n, {"take": tape.take}, rewind),
        "np.empty": warm_stopwatch("empty(16, 'f4')", n, names),
    }


@by_size(
    "clear",
    "Does clearing a tape cost more after many arrays?",
    unit="ns",
    x="arrays taken before",
    targets=[CONSTANT],
    rounds=11,
    quick_rounds=3,
    warmup=1,
)
def clear(_measure: Measure, stack: ExitStack, size: int) -> dict[str, Side]:
    """Clear tapes that have given out `size` arrays; giving them out is not measured."""
    n = 32
    tapes = [stack.enter_context(um.Tape(size * 64)) for _ in range(n)]
    fill = partial(_take_all, tapes, size, stack.enter_context(um.Tape(64)))
    clears = {"clears": [tape.clear for tape in tapes]}
    return {"unimem": stopwatch("clears[i]()", n, clears, fill)}


def _take_all(tapes: Iterable[um.Tape], n: int, spare: um.Tape) -> None:
    """Take n times from each tape; then bring the code of `clear` back into the caches."""
    for tape in tapes:
        deque(map(tape.take_address, repeat(64, n)), maxlen=0)
    for _ in range(100):
        spare.clear()


# ---- KV caches ----


@SUITE.case(
    "append",
    "How does appending grow with the tokens that are appended at once?",
    unit="us",
    x="tokens appended at once, of 256 B",
    targets=[LINEAR],
)
def append(measure: Measure) -> None:
    """Fill 25 MB at every size, so that all write to rows in the same kind of memory.

    The appended tokens change with each call, too. NumPy and C write to arrays of the same size.
    """
    found = sizes(measure, 10)
    top = found[-1]
    k = tokens(top)
    keys, values = np.zeros_like(k), np.zeros_like(k)
    ours: Sides = {}
    peers: Sides = {}
    limits: Sides = {}
    with um.KVCache(1, *HEADS, top) as cache:
        cache.warm()
        for size in found:
            n = top // size
            at = [slice(i * size, (i + 1) * size) for i in range(n)]
            names = {"append": cache.append, "k": [k[each] for each in at]}
            ours[size] = _in_us(stopwatch("append(0, k[i], k[i])", n, names, cache.clear))
            names = {"keys": keys, "values": values, "at": at, "k": names["k"]}
            written = "keys[at[i]] = k[i]; values[at[i]] = k[i]"
            peers[size] = _in_us(stopwatch(written, n, names))
            parts = [(to[each], k[each]) for each in at for to in (keys, values)]
            limits[size] = partial(_copy, _table(parts), n)
        sides = {"unimem": ours}, {"NumPy": peers}, {"C memcpy": limits}
        measure.scale(*sides, rounds=11, quick_rounds=3)
        cache.clear()
        cache.append(0, k, k)  # so that all rows are visible
        in_cache = [part[0].swapaxes(0, 1) for part in cache.layer(0)]
        for by_size, held in (ours, in_cache), (peers, [keys, values]), (limits, [keys, values]):
            for tokens_at_once, side in by_size.items():
                for part in held:
                    plain.fill(part.ctypes.data, part.nbytes, 0)
                side()
                n = top - top % round(tokens_at_once)
                for part in held:
                    require_equal(part[:n], k[:n], f"append of {tokens_at_once} tokens")


def _in_us(side: Side) -> Side:
    return lambda: side() / 1e3


def _table(pairs: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> NDArray[np.uint64]:
    """Make the table of copies for C, to the first of each pair."""
    rows = [(to.ctypes.data, of.ctypes.data, of.nbytes) for to, of in pairs]
    return np.array(rows, np.uint64)


def _copy(table: NDArray[np.uint64], n: int = 1) -> float:
    """Return an nth of the microseconds of all copies."""
    return plain.copy(table) / n * 1e6


@by_size(
    "append-after",
    "Does a token cost more where the cache holds more of them?",
    unit="ns",
    x="tokens in the cache",
    targets=[CONSTANT],
    rounds=31,
)
def append_after(_measure: Measure, stack: ExitStack, size: int) -> dict[str, Side]:
    """Append 64 tokens, one by one, behind `size`; the peer joins arrays."""
    n = 64
    k = tokens(1)
    cache = stack.enter_context(um.KVCache(1, *HEADS, size + n))
    cache.warm()
    cache.append(0, tokens(size), tokens(size))
    ours = {"append": cache.append, "k": k}
    theirs = {"join": np.concatenate, "keys": (tokens(size), k), "values": (tokens(size), k)}
    return {
        "unimem": warm_stopwatch("append(0, k, k)", n, ours, partial(cache.crop, size)),
        "np.concatenate": stopwatch("join(keys); join(values)", max(1, 1000 // size), theirs),
    }


@by_size(
    "kv-clear",
    "Does clearing a KV cache cost more where it holds more tokens?",
    unit="ns",
    x="tokens in the cache",
    targets=[CONSTANT],
    rounds=61,
)
def kv_clear(_measure: Measure, stack: ExitStack, size: int) -> dict[str, Side]:
    """Clear tokens that an engine wrote, as a decoder's `reset`; with `reserve` and `commit`."""
    cache = stack.enter_context(um.KVCache(1, *HEADS, size))
    cache.warm()
    names = {"reserve": cache.reserve, "commit": cache.commit, "clear": cache.clear, "n": size}
    return {"unimem": warm_stopwatch("reserve(n); commit(n); clear()", 64, names)}


@by_size(
    "trim",
    "Does dropping the oldest token of a ring cost more where it holds more?",
    unit="ns",
    x="tokens in the ring",
    targets=[CONSTANT],
    rounds=31,
)
def trim(_measure: Measure, stack: ExitStack, size: int) -> dict[str, Side]:
    """Put a token behind those of a ring, as an engine that has written it, and drop the oldest.

    The row is not written here: that of a large ring is in no cache, and would dominate. NumPy
    moves the tokens to the first rows.
    """
    ring = stack.enter_context(um.KVCache(1, *HEADS, size, window=size))
    ring.warm()
    ring.append(0, tokens(size), tokens(size))
    ring.trim_to(size - 1)
    ours = {"reserve": ring.reserve, "commit": ring.commit, "trim": ring.trim_to, "n": size - 1}
    theirs = {"keys": tokens(size), "values": tokens(size), "k": tokens(1)[0]}
    moved = "keys[:-1] = keys[1:]; keys[-1] = k; values[:-1] = values[1:]; values[-1] = k"
    return {
        "unimem": warm_stopwatch("reserve(1); commit(1); trim(n)", 64, ours),
        "NumPy, moving": stopwatch(moved, max(1, 1000 // size), theirs),
    }


# ---- paged caches ----


@by_size(
    "fork",
    "How does forking a sequence grow with its blocks?",
    unit="us",
    x="blocks of the sequence",
    targets=[LINEAR],
    rounds=21,
)
def fork(_measure: Measure, stack: ExitStack, size: int) -> dict[str, Side]:
    """Fork a sequence, which copies its table and counts each block, but copies no token.

    So it is linear in blocks, and constant in their contents: here one token, of 256 B. A table has
    room for all blocks of its pool, here those of the sequence. NumPy copies the tokens.
    """
    n, rows = 4, tokens(size)
    pool = um.PagedKVCache(1, *HEADS, n_blocks=size, block_tokens=1, prefix_cache=False)
    stack.enter_context(pool).warm()
    sequence = stack.enter_context(pool.sequence())
    sequence.append(0, rows, rows)
    if pool.n_blocks_in_use != size:
        raise AssertionError(f"fork: the sequence has not {size} blocks")

    def forked() -> float:
        start = time.thread_time()
        forks = [sequence.fork() for _ in range(n)]
        elapsed = time.thread_time() - start
        for each in forks:
            each.close()
        return elapsed / n * 1e6

    return {
        "unimem": second_run(forked),
        "NumPy, copying": second_run(timed(partial(_copied, rows), 1e-6)),
    }


def _copied(rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    return rows.copy(), rows.copy()


@SUITE.case(
    "gather",
    "How does gathering a sequence grow with its tokens?",
    unit="us",
    x="tokens of the sequence, of 256 B",
    targets=[LINEAR],
)
def gather(measure: Measure) -> None:
    """Gather into existing arrays; C copies the same bytes in two pieces."""
    found = sizes(measure, 10)
    k = tokens(found[-1])
    ours: Sides = {}
    limits: Sides = {}
    out = np.zeros((2, N_HEADS * found[-1] * HEAD_DIM), np.float16)
    with ExitStack() as stack:
        n_blocks = sum(-(-size // 16) for size in found)
        pool = um.PagedKVCache(1, *HEADS, n_blocks=n_blocks, prefix_cache=False)
        stack.enter_context(pool).warm()
        for size in found:
            sequence = stack.enter_context(pool.sequence())
            sequence.append(0, k[:size], k[:size])
            of_size = out[:, : N_HEADS * size * HEAD_DIM].reshape(2, N_HEADS, size, HEAD_DIM)
            into = of_size[0], of_size[1]
            ours[size] = second_run(timed(partial(sequence.gather, 0, into), 1e-6))
            pairs = [(part, k[:size]) for part in into]
            limits[size] = second_run(partial(_copy, _table(pairs)))
            for part in sequence.gather(0, into):
                require_equal(part.swapaxes(0, 1), k[:size], "gather")
        measure.scale({"unimem": ours}, limits={"C memcpy": limits}, rounds=21)


# ---- files and blocks ----


@by_size(
    "plan",
    "How does planning a model grow with its tensors?",
    unit="ms",
    x="tensors of the file",
    targets=[LINEAR],
    first=LEAST_TENSORS,
    rounds=9,
    quick_rounds=3,
)
def plan(measure: Measure, _stack: ExitStack, size: int) -> dict[str, Side]:
    """Plan a GGUF file of `size` tensors of 64 bytes."""
    path = model_file(measure, n_tensors=size)
    return {"unimem": second_run(timed(partial(um.plan, path, load="map"), 1e-3))}


def open_file(
    measure: Measure, _stack: ExitStack, size: int, *, of: str, most_of_ggml: float = math.inf
) -> dict[str, Side]:
    """Open a GGUF file of `size` tensors, tokens or bytes, as `of` names it for `model_file`.

    unimem does not decode its tokens, but ggml does. The data is a hole, since no side reads it.
    """
    path = model_file(measure, **{of: size})
    opening = partial(um.open_weights, path, load="map")
    sides = {"unimem": second_run(timed(opening, 1e-3, um.Weights.close))}
    if size <= most_of_ggml and (pair := of_ggml(measure, path)) is not None:
        open_it, close_it = pair
        sides["ggml"] = second_run(timed(open_it, 1e-3, close_it))
    return sides


opening = partial(by_size, unit="ms", rounds=9, quick_rounds=3)
grows_with = "How does opening a file grow with its"
opening(
    "open-tensors",
    f"{grows_with} tensors?",
    x="tensors of the file",
    targets=[LINEAR],
    first=LEAST_TENSORS,
)(
    partial(open_file, of="n_tensors", most_of_ggml=4000)  # ggml takes seconds for more
)
opening(
    "open-vocabulary", f"{grows_with} vocabulary?", x="tokens of the vocabulary", targets=[LINEAR]
)(partial(open_file, of="n_tokens"))
larger = "Does opening a file cost more where it has more data?"
opening("open-data", larger, x="bytes of data", targets=[CONSTANT], first=1_000_000)(
    partial(open_file, of="nbytes")
)


def model_file(
    measure: Measure, *, n_tensors: int = 1, n_tokens: int = 1, nbytes: int = 64
) -> Path:
    """Return a GGUF file of `n_tensors` of `nbytes`, and of `n_tokens`."""

    def write(path: Path) -> None:
        rows = nbytes // 64
        tensors = [
            files.TensorEntry(f"blk.{i}.weight", (32, rows), files.FLOAT16, rows * 64)
            for i in range(n_tensors)
        ]
        words = b"".join(files.string(b"token%d" % i) for i in range(n_tokens))
        metadata = [
            files.text("general.architecture", "unknown"),
            files.array("tokenizer.ggml.tokens", files.STRING, n_tokens, words),
        ]
        header = files.gguf_header(metadata, tensors)
        path.write_bytes(header)
        os.truncate(path, len(header) + n_tensors * rows * 64)

    name = f"scaling-{n_tensors}-tensors-{n_tokens}-tokens-{nbytes}-bytes.gguf"
    return files.made_once(measure.folder / name, write)


def verify(measure: Measure, *, pages: Pages, first: int, decades: int) -> None:
    """Verify resident blocks, one at a time; a quick run has a decade less.

    The kernel lists mappings from the lowest address on, and `verify` stops behind its block: with
    several, each would walk those below it.
    """
    found = sizes(measure, first, decades=decades - measure.quick)
    wanted, room = 2 * found[-1], states.available_bytes()
    if wanted > room:
        raise NotMeasured(f"wants {format_bytes(wanted)} of memory, there are {format_bytes(room)}")
    ours: Sides = {size: partial(_time_verify, size, pages) for size in found}
    measure.scale({"unimem": ours}, rounds=7, quick_rounds=2, warmup=0)


def _time_verify(nbytes: int, pages: Pages) -> float:
    with um.Block(nbytes, pages=pages, category="diagnostics", warm=True) as block:
        figure = second_run(timed(block.verify, 1e-6))()
        if block.verify().resident_bytes != block.nbytes:
            raise AssertionError(f"verify: a block of {nbytes} bytes is not all resident")
    return figure


for name, what, run in (
    # From the smallest memory that has a mapping of its own.
    ("4k", "4k pages", partial(verify, pages="4k", first=64 * KIB, decades=4)),
    # From one huge page on: four decades of them would end at 20 GiB.
    ("thp", "transparent huge pages", partial(verify, pages="thp", first=2 * MIB, decades=3)),
):
    SUITE.case(
        f"verify-{name}",
        f"How does looking at a block of {what} grow with its size?",
        unit="us",
        x="bytes of the block",
        targets=[LINEAR],
    )(run)
