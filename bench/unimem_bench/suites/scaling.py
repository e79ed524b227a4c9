"""How cost grows with the work, over four decades of size.

Each case measures one call at sizes from 1 to 10,000 times the first, and fits the exponent of its
growth: 0 is a constant cost, 1 a linear one. What is meant to be constant may grow with size to the
power of 0.1, which over four decades is a factor of 2.5, since larger things fit in smaller caches
worse. What is linear may grow with the power of 1.1, for the same reason.

A call has a cost of its own beside that of its work, which at the smallest sizes is most of it: of
a linear cost the exponent over all sizes is below 1. Memory costs more per byte where it is too
large for a cache, and lifts the exponent: `append` therefore fills the same rows at every size. Of
`verify`, reading what the kernel says of all other mappings is most of the cost up to blocks of
some tens of megabytes.

Times are CPU times of one thread. All sizes are there at once, and each round measures each.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unimem as um
from unimem.system.placement import Pages
from unimem.system.text import format_bytes
from unimem_bench import files, plain, states
from unimem_bench.rounds import Side, stopwatch, warm_stopwatch
from unimem_bench.suite import Measure, NotMeasured, Suite, grows

SUITE = Suite("scaling", "How does cost grow with the work?", passes=3, quick_passes=3)

CONSTANT, LINEAR = grows(0.1, issue=8), grows(1.1, issue=8)
HEADS = N_HEADS, HEAD_DIM = 1, 64  # 128 B of K and 128 of V a token, as float16
KIB, MIB = 1 << 10, 1 << 20

Sides = dict[float, Side]  # by size


def sizes(measure: Measure, first: int, decades: int = 4) -> list[int]:
    """Give sizes over so many decades: one size a decade, in a full run two."""
    a_decade = 1 if measure.quick else 2
    return [round(first * 10 ** (i / a_decade)) for i in range(decades * a_decade + 1)]


def timed(
    run: Callable[[], Any], unit: float, after: Callable[[Any], object] | None = None
) -> Side:
    """Measure one call in CPU time; what it returns goes to `after`, which is not measured."""

    def measured() -> float:
        start = time.thread_time()
        result = run()
        elapsed = time.thread_time() - start
        if after is not None:
            after(result)
        return elapsed / unit

    return measured


def second(side: Side) -> Side:
    """Measure the second of two equal runs: the first brings code and data into the caches."""

    def again() -> float:
        side()
        return side()

    return again


def tokens(n: int) -> NDArray[np.float16]:
    """Return rows of K or V, which differ."""
    rows = np.arange(n, dtype=np.uint32)[:, None] * HEAD_DIM + np.arange(HEAD_DIM, dtype=np.uint32)
    return (rows % 2039).astype(np.float16)[:, None, :].repeat(N_HEADS, axis=1)


def require_equal(found: NDArray[Any], wanted: NDArray[Any], what: str) -> None:
    """Check that two sides have done the same work."""
    if not np.array_equal(found, wanted):
        raise AssertionError(f"{what}: not what was appended")


# ---- tapes ----


@SUITE.case(
    "take",
    "Does an uninitialised array cost more where it is larger?",
    unit="ns",
    x="bytes of the array",
    targets=[CONSTANT],
)
def take(measure: Measure) -> None:
    """Take arrays of one size, from a tape that is cleared before."""
    n = 64
    found = sizes(measure, 64)
    with um.Tape(n * (found[-1] + 64)) as tape:
        measure.scale(
            ours={
                "unimem": {
                    size: stopwatch(f"take({size}, 'u1')", n, {"take": tape.take}, tape.clear)
                    for size in found
                }
            },
            peers={
                "np.empty": {
                    size: stopwatch(f"empty({size}, 'u1')", n, {"empty": np.empty})
                    for size in found
                }
            },
            rounds=61,
        )


@SUITE.case(
    "take-after",
    "Does an array of 16 values cost more after many others?",
    unit="ns",
    x="arrays taken before",
    targets=[CONSTANT],
)
def take_after(measure: Measure) -> None:
    """Take from tapes that have given out so many arrays already, beside a heap that has."""
    n = 64
    ours: Sides = {}
    peers: Sides = {}
    with ExitStack() as stack:
        for size in sizes(measure, 10):
            tape = stack.enter_context(um.Tape((size + n) * 64))
            for _ in range(size):
                tape.take_address(64)
            rewind = partial(tape.rewind, tape.mark())
            ours[size] = warm_stopwatch("take(16)", n, {"take": tape.take}, rewind)
            held = [np.empty(16, np.float32) for _ in range(size)]
            names = {"empty": np.empty, "held": held}
            peers[size] = warm_stopwatch("empty(16, 'f4')", n, names)
        measure.scale({"unimem": ours}, {"np.empty": peers}, rounds=61)


@SUITE.case(
    "clear",
    "Does clearing a tape cost more after many arrays?",
    unit="ns",
    x="arrays taken before",
    targets=[CONSTANT],
)
def clear(measure: Measure) -> None:
    """Clear tapes that have given out so many arrays; giving them out is not measured."""
    n = 32
    ours: Sides = {}
    with ExitStack() as stack:
        for size in sizes(measure, 10):
            tapes = [stack.enter_context(um.Tape(size * 64)) for _ in range(n)]
            spare = stack.enter_context(um.Tape(64))
            fill = partial(_take_all, tapes, size, spare)
            clears = {"clears": [tape.clear for tape in tapes]}
            ours[size] = stopwatch("clears[i]()", n, clears, fill)
        measure.scale({"unimem": ours}, rounds=11, quick_rounds=3, warmup=1)


def _take_all(tapes: Iterable[um.Tape], n: int, spare: um.Tape) -> None:
    """Take so often from each tape; then bring the code of `clear` back into the caches."""
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
    """Fill 25 MB, at every size, so that all write to rows that lie in the same kind of memory.

    What is appended changes with each call, too. NumPy and C write to arrays as large.
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
        cache.append(0, k, k)  # so that all rows can be seen
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
    """Make the table of copies that C takes, to the first of each pair."""
    rows = [(to.ctypes.data, of.ctypes.data, of.nbytes) for to, of in pairs]
    return np.array(rows, np.uint64)


def _copy(table: NDArray[np.uint64], n: int = 1) -> float:
    """Give an nth of the microseconds of all copies."""
    return plain.copy(table) / n * 1e6


@SUITE.case(
    "append-after",
    "Does a token cost more where the cache holds more of them?",
    unit="ns",
    x="tokens in the cache",
    targets=[CONSTANT],
)
def append_after(measure: Measure) -> None:
    """Append 64 tokens, one by one, behind so many; arrays that are joined stand beside it."""
    n = 64
    k = tokens(1)
    ours: Sides = {}
    peers: Sides = {}
    with ExitStack() as stack:
        for size in sizes(measure, 10):
            cache = stack.enter_context(um.KVCache(1, *HEADS, size + n))
            cache.warm()
            cache.append(0, tokens(size), tokens(size))
            names = {"append": cache.append, "k": k}
            ours[size] = warm_stopwatch("append(0, k, k)", n, names, partial(cache.crop, size))
            keys, values = tokens(size), tokens(size)
            names = {"join": np.concatenate, "keys": (keys, k), "values": (values, k)}
            peers[size] = stopwatch("join(keys); join(values)", max(1, 1000 // size), names)
        measure.scale({"unimem": ours}, {"np.concatenate": peers}, rounds=31)


@SUITE.case(
    "kv-clear",
    "Does clearing a KV cache cost more where it holds more tokens?",
    unit="ns",
    x="tokens in the cache",
    targets=[CONSTANT],
)
def kv_clear(measure: Measure) -> None:
    """Clear caches whose tokens an engine wrote: `reserve` and `commit` are in the figure, too.

    A decoder's `reset` is this, and a few fields.
    """
    statement = "reserve(n); commit(n); clear()"
    ours: Sides = {}
    with ExitStack() as stack:
        for size in sizes(measure, 10):
            cache = stack.enter_context(um.KVCache(1, *HEADS, size))
            cache.warm()
            names = {"reserve": cache.reserve, "commit": cache.commit, "clear": cache.clear}
            ours[size] = warm_stopwatch(statement, 64, {**names, "n": size})
        measure.scale({"unimem": ours}, rounds=61)


@SUITE.case(
    "trim",
    "Does dropping the oldest token of a ring cost more where it holds more?",
    unit="ns",
    x="tokens in the ring",
    targets=[CONSTANT],
)
def trim(measure: Measure) -> None:
    """Put a token behind those of a ring, as an engine that has written it, and drop the oldest.

    The row is not written here: that of a large ring is in no cache, and would be the most of it.
    NumPy moves the tokens to the first rows.
    """
    n = 64
    k = tokens(1)
    ours: Sides = {}
    peers: Sides = {}
    with ExitStack() as stack:
        for size in sizes(measure, 10):
            ring = stack.enter_context(um.KVCache(1, *HEADS, size, window=size))
            ring.warm()
            ring.append(0, tokens(size), tokens(size))
            ring.trim_to(size - 1)
            calls = {"reserve": ring.reserve, "commit": ring.commit, "trim": ring.trim_to}
            statement = "reserve(1); commit(1); trim(n)"
            ours[size] = warm_stopwatch(statement, n, {**calls, "n": size - 1})
            keys, values = tokens(size), tokens(size)
            moved = "keys[:-1] = keys[1:]; keys[-1] = k; values[:-1] = values[1:]; values[-1] = k"
            names = {"keys": keys, "values": values, "k": k[0]}
            peers[size] = stopwatch(moved, max(1, 1000 // size), names)
        measure.scale({"unimem": ours}, {"NumPy, moving": peers}, rounds=31)


# ---- paged caches ----


@SUITE.case(
    "fork",
    "How does forking a sequence grow with its blocks?",
    unit="us",
    x="blocks of the sequence",
    targets=[LINEAR],
)
def fork(measure: Measure) -> None:
    """Fork a sequence, which copies its table and counts each block, and none of its tokens.

    So it is linear in blocks, and constant in what they hold: here a token, of 256 B. A table has
    room for all blocks of its pool, which here has those of the sequence. NumPy copies the tokens.
    """
    found = sizes(measure, 10)
    rows = tokens(found[-1])
    ours: Sides = {}
    peers: Sides = {}
    n = 4

    def forked(sequence: Any) -> float:
        start = time.thread_time()
        forks = [sequence.fork() for _ in range(n)]
        elapsed = time.thread_time() - start
        for each in forks:
            each.close()
        return elapsed / n * 1e6

    with ExitStack() as stack:
        for size in found:
            pool = um.PagedKVCache(1, *HEADS, n_blocks=size, block_tokens=1, prefix_cache=False)
            stack.enter_context(pool).warm()
            sequence = stack.enter_context(pool.sequence())
            sequence.append(0, rows[:size], rows[:size])
            ours[size] = second(partial(forked, sequence))
            peers[size] = second(timed(partial(_copied, rows[:size]), 1e-6))
            if pool.n_blocks_in_use != size:
                raise AssertionError(f"fork: the sequence has not {size} blocks")
        measure.scale({"unimem": ours}, {"NumPy, copying": peers}, rounds=21)


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
    """Gather into arrays that are there; C copies as many bytes in two pieces."""
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
            ours[size] = second(timed(partial(sequence.gather, 0, into), 1e-6))
            pairs = [(part, k[:size]) for part in into]
            limits[size] = second(partial(_copy, _table(pairs)))
            for part in sequence.gather(0, into):
                require_equal(part.swapaxes(0, 1), k[:size], "gather")
        measure.scale({"unimem": ours}, limits={"C memcpy": limits}, rounds=21)


# ---- files and blocks ----


@SUITE.case(
    "plan",
    "How does planning a model grow with its tensors?",
    unit="ms",
    x="tensors of the file",
    targets=[LINEAR],
)
def plan(measure: Measure) -> None:
    """Plan GGUF files of so many tensors of 64 bytes."""
    ours: Sides = {}
    for size in sizes(measure, 10):
        path = model_file(measure, n_tensors=size)
        ours[size] = second(timed(partial(um.plan, path, load="map"), 1e-3))
    measure.scale({"unimem": ours}, rounds=9, quick_rounds=3)


@SUITE.case(
    "open-tensors",
    "How does opening a file grow with its tensors?",
    unit="ms",
    x="tensors of the file",
    targets=[LINEAR],
)
def open_tensors(measure: Measure) -> None:
    """Open GGUF files of so many tensors; ggml compares each name with all before it."""
    most = 4000  # of ggml, which takes seconds for the last
    _open(measure, {n: model_file(measure, n_tensors=n) for n in sizes(measure, 10)}, most)


@SUITE.case(
    "open-vocabulary",
    "How does opening a file grow with its vocabulary?",
    unit="ms",
    x="tokens of the vocabulary",
    targets=[LINEAR],
)
def open_vocabulary(measure: Measure) -> None:
    """Open GGUF files of so many tokens, without making strings of them; ggml makes them."""
    files = {n: model_file(measure, n_tokens=n) for n in sizes(measure, 10)}
    _open(measure, files, max(files))


@SUITE.case(
    "open-data",
    "Does opening a file cost more where it has more data?",
    unit="ms",
    x="bytes of data",
    targets=[CONSTANT],
)
def open_data(measure: Measure) -> None:
    """Open GGUF files of one tensor of so many bytes: sparse ones, for no side reads them."""
    files = {n: model_file(measure, nbytes=n) for n in sizes(measure, 1_000_000)}
    _open(measure, files, max(files))


def _open(measure: Measure, files: Mapping[int, Path], most_of_ggml: int) -> None:
    peers: dict[str, Sides] = {}
    if measure.installed("ggml"):
        import ggml

        parameters = ggml.gguf_init_params(no_alloc=True, ctx=None)

        def open_with_ggml(path: Path) -> Any:
            context = ggml.gguf_init_from_file(str(path).encode(), parameters)
            if not context:
                raise AssertionError(f"ggml does not open {path}")
            return context

        peers["ggml"] = {
            size: second(timed(partial(open_with_ggml, path), 1e-3, ggml.gguf_free))
            for size, path in files.items()
            if size <= most_of_ggml
        }
    ours: Sides = {
        size: second(timed(partial(um.open_weights, path, load="map"), 1e-3, um.Weights.close))
        for size, path in files.items()
    }
    measure.scale({"unimem": ours}, peers, rounds=9, quick_rounds=3)


def model_file(
    measure: Measure, *, n_tensors: int = 1, n_tokens: int = 1, nbytes: int = 64
) -> Path:
    """Return a GGUF file of so many tensors of so many bytes, and so many tokens."""

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


@SUITE.case(
    "verify-4k",
    "How does looking at a block of 4k pages grow with its size?",
    unit="us",
    x="bytes of the block",
    targets=[LINEAR],
)
def verify_4k(measure: Measure) -> None:
    """Look at blocks from 64 KiB on, as small as a memory that is mapped for itself is."""
    _verify(measure, "4k", sizes(measure, 64 * KIB, decades=3 if measure.quick else 4))


@SUITE.case(
    "verify-thp",
    "How does looking at a block of transparent huge pages grow with its size?",
    unit="us",
    x="bytes of the block",
    targets=[LINEAR],
)
def verify_thp(measure: Measure) -> None:
    """Look at blocks from one huge page on: four decades of them would end at 20 GiB."""
    _verify(measure, "thp", sizes(measure, 2 * MIB, decades=2 if measure.quick else 3))


def _verify(measure: Measure, pages: Pages, found: list[int]) -> None:
    """Look at resident blocks, of which one is there at a time.

    The kernel tells mappings from the lowest address on, and `verify` stops behind its block: of
    several, one would walk those that lie below it.
    """
    wanted, room = 2 * found[-1], states.available_bytes()
    if wanted > room:
        raise NotMeasured(f"wants {format_bytes(wanted)} of memory, there are {format_bytes(room)}")
    look: Sides = {size: partial(_look, size, pages) for size in found}
    measure.scale({"unimem": look}, rounds=7, quick_rounds=2, warmup=0)


def _look(nbytes: int, pages: Pages) -> float:
    with um.Block(nbytes, pages=pages, category="diagnostics", warm=True) as block:
        figure = second(timed(block.verify, 1e-6))()
        if block.verify().resident_bytes != block.nbytes:
            raise AssertionError(f"verify: a block of {nbytes} bytes is not all resident")
    return figure
