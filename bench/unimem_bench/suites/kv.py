"""What KV memory costs: appending, converting, rings and blocks, beside plain memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import ml_dtypes
import numpy as np

import unimem as um
from unimem_bench import kv_quants, kv_rings, plain
from unimem_bench.kv_rings import PLAIN, RING
from unimem_bench.kv_sides import (
    HEAD_DIM,
    N_HEADS,
    N_VALUES,
    SHAPE,
    Array,
    appending,
    check_holds,
    in_gb_s,
    memcpy,
    memcpy_to,
    stored,
    tokens,
    torch_names,
    zeros,
    zeros_in,
)
from unimem_bench.rounds import Side, warm_stopwatch
from unimem_bench.suite import Measure, NotMeasured, Suite, at_most, costs, faster

SUITE = Suite(
    "kv",
    "What does KV memory cost, beside NumPy, torch and C that do the same with plain memory?",
    passes=5,
    quick_passes=3,
)

N_ROWS = 64  # for single calls: the rows of all sides stay in a second-level cache
BLOCK_TOKENS = 16

OF_NUMPY = "unimem, NumPy's arrays"
EQUAL = "unimem, layers that are alike"

# How NumPy and torch write a token to a row.
BY_INDEX = "keys[i] = k; values[i] = v"


def by_name(arrays: Sequence[Array]) -> dict[str, Array]:
    """Name two arrays as the statements do."""
    return dict(zip(("keys", "values"), arrays, strict=True))


# ---- one token ----


@SUITE.case(
    "append",
    "What does it cost to append one token, 2 KiB of K and 2 KiB of V?",
    unit="ns",
    targets=[faster("NumPy", 3.5, issue=4), faster("torch", 20.0, issue=4)],
)
def append(measure: Measure) -> None:
    """Compare with the ways in which NumPy and torch write a token to a row."""
    n, kv = N_ROWS, tokens(1)
    k, v = (part[0].copy() for part in kv)
    held = {name: zeros(n, (k, v)) for name in ("NumPy", "C memcpy")}
    statements = {
        "torch": BY_INDEX,
        "torch copy_": "keys[i].copy_(k); values[i].copy_(v)",
        "torch index_copy_": (
            "keys.index_copy_(0, at[i], one_k); values.index_copy_(0, at[i], one_v)"
        ),
    }
    with um.KVCache(1, *SHAPE, n) as cache:
        names = {"k": k, "v": v, "one_k": k[None], "one_v": v[None], "at": np.arange(n)[:, None]}
        peers = {"NumPy": warm_stopwatch(BY_INDEX, n, names | by_name(held["NumPy"]))}
        for name, statement in statements.items():
            arrays = zeros(n, (k, v))
            if given := torch_names(measure, names | by_name(arrays), name):
                given["at"] = list(given["at"])
                held[name] = arrays
                peers[name] = warm_stopwatch(statement, n, given)
        ours = {"unimem": appending(cache, kv, n)}
        limits = {"C memcpy": memcpy_to(held["C memcpy"], (k, v))}
        measure.compare(ours, peers, limits, rounds=101)
        check_holds("unimem", stored(cache), kv)
    for name, arrays in held.items():
        check_holds(name, arrays, kv)


@SUITE.case(
    "append-layers",
    "What does it cost to append one token to 5 sliding layers and a full one, 4 KiB each?",
    unit="ns",
    targets=[costs(EQUAL, 1.1, issue=22)],
)
def append_layers(measure: Measure) -> None:
    """Compare with a cache whose layers are alike."""
    n, (k, v) = N_ROWS, tokens(1)
    sliding, full = um.LayerKV(*SHAPE, window=N_ROWS // 2), um.LayerKV(*SHAPE)
    layers = [*5 * [sliding], full]
    statement = "; ".join(f"append({i}, k, v)" for i in range(len(layers)))
    with (
        um.KVCache(layers=layers, max_seq_len=n, pages="4k") as mixed,
        um.KVCache(len(layers), *SHAPE, n, pages="4k") as equal,
    ):
        sides: dict[str, Side] = {}
        for name, cache in {"unimem": mixed, EQUAL: equal}.items():
            cache.warm()
            names = {"append": cache.append, "k": k, "v": v}
            sides[name] = warm_stopwatch(statement, n, names, cache.clear)
        measure.compare(sides, {}, rounds=101)
        for layer in range(len(layers)):
            check_holds("unimem", stored(mixed, layer), (k, v))
            check_holds(EQUAL, stored(equal, layer), (k, v))


@SUITE.case(
    "append-torch",
    "What does it cost to append one token of torch's tensors, 2 KiB of K and 2 KiB of V?",
    unit="ns",
    targets=[costs(OF_NUMPY, 2.5, issue=20)],
)
def append_torch(measure: Measure) -> None:
    """Compare with the same append of NumPy's arrays, and with torch writing to a row."""
    n, kv = N_ROWS, tokens(1)
    keys, values = held = zeros(n, [part[0] for part in kv])
    names = {"k": kv[0], "v": kv[1], "keys": keys, "values": values}
    if not (given := torch_names(measure, names)):
        raise NotMeasured("torch is not installed")
    with um.KVCache(1, *SHAPE, n) as cache, um.KVCache(1, *SHAPE, n) as other:
        ours = {
            "unimem": appending(cache, (given["k"], given["v"]), n),
            OF_NUMPY: appending(other, kv, n),
        }
        peers = {"torch": warm_stopwatch("keys[i] = k[0]; values[i] = v[0]", n, given)}
        measure.compare(ours, peers, rounds=101)
        check_holds("unimem", stored(cache), kv)
    check_holds("torch", held, kv)


@SUITE.case("scratchpad", "What does it cost to append one row of 2 KiB?", unit="ns")
def scratchpad(measure: Measure) -> None:
    """Compare `Scratchpad.append` with writing to a row of an array."""
    n, row = N_ROWS, tokens(1)[0].reshape(-1).copy()
    held = {name: zeros(n, [row]) for name in ("NumPy", "torch", "C memcpy")}
    with um.Scratchpad(n, N_VALUES, "float16") as pad:
        names = {"append": pad.append, "row": row}
        theirs = {"rows": held["NumPy"][0], "row": row}
        peers = {"NumPy": warm_stopwatch("rows[i] = row", n, theirs)}
        if given := torch_names(measure, {"rows": held["torch"][0], "row": row}):
            peers["torch"] = warm_stopwatch("rows[i] = row", n, given)
        else:
            del held["torch"]
        ours = {"unimem": warm_stopwatch("append(row)", n, names, pad.clear)}
        limits = {"C memcpy": memcpy_to(held["C memcpy"], [row])}
        measure.compare(ours, peers, limits)
        check_holds("unimem", [pad.as_array()], [row[None]])
    for name, arrays in held.items():
        check_holds(name, arrays, [row[None]])


@SUITE.case(
    "paged-append",
    "What does it cost to append one token to a sequence in blocks of 16?",
    unit="ns",
)
def paged_append(measure: Measure) -> None:
    """Compare with a plain cache, and with NumPy and a table of blocks."""
    n, kv = N_ROWS, tokens(1)
    k, v = (part[0].copy() for part in kv)
    keys, values = (array.reshape(-1, BLOCK_TOKENS, *SHAPE) for array in zeros(n, (k, v)))
    room = zeros(n, (k, v))
    table = list(range(n // BLOCK_TOKENS))
    with (
        um.KVCache(1, *SHAPE, n) as cache,
        um.PagedKVCache(1, *SHAPE, n_blocks=len(table), block_tokens=BLOCK_TOKENS) as pool,
        pool.sequence() as sequence,
    ):
        names = {"append": sequence.append, "k": kv[0], "v": kv[1]}
        into = {"keys": keys, "values": values, "k": k, "v": v, "table": table}
        at = f"[table[i // {BLOCK_TOKENS}], i % {BLOCK_TOKENS}]"
        measure.compare(
            ours={
                "unimem": warm_stopwatch("append(0, k, v)", n, names, partial(sequence.crop, 0)),
                PLAIN: appending(cache, kv, n),
            },
            peers={"NumPy": warm_stopwatch(f"keys{at} = k; values{at} = v", n, into)},
            limits={"C memcpy": memcpy_to(room, (k, v))},
        )
        gathered = [part.swapaxes(0, 1) for part in sequence.gather(0)]
        check_holds("unimem", gathered, kv)
        check_holds(PLAIN, stored(cache), kv)
    check_holds("NumPy", (keys, values), kv)
    check_holds("C memcpy", room, kv)


# ---- conversion ----


def convert(measure: Measure, *, n_tokens: int, n: int) -> None:
    """Compare appending float32 to a float16 cache with casts, and with memcpy of the float32."""
    k, v = kv = tokens(n_tokens, "float32")
    converted = tokens(n_tokens)
    held = {name: zeros(n, converted) for name in ("NumPy", "torch")}
    with um.KVCache(1, *SHAPE, n * n_tokens) as cache, um.Block(2 * n * k.nbytes) as room:
        cache.warm()
        room.warm()
        peers = {}
        for name, arrays in list(held.items()):
            names = {"k": k, "v": v} | by_name(arrays)
            given = torch_names(measure, names) if name == "torch" else names
            if given:
                peers[name] = warm_stopwatch(BY_INDEX, n, given)
            else:
                del held[name]
        ours = {"unimem": appending(cache, kv, n)}
        limits = {"C memcpy of the float32": memcpy_to(zeros_in(room, kv), kv)}
        measure.compare(ours, peers, limits, rounds=101, quick_rounds=15)
        check_holds("C memcpy of the float32", zeros_in(room, kv), kv)
        check_holds("unimem", stored(cache), converted)
    for name, arrays in held.items():
        check_holds(name, arrays, converted)


SUITE.case(
    "convert",
    "What does it cost to append one token of float32 to a float16 cache, 4 KiB of K and of V?",
    unit="ns",
    targets=[faster("NumPy", 15.0, issue=4)],
)(partial(convert, n_tokens=1, n=N_ROWS))

SUITE.case(
    "convert-batch",
    "What does it cost to append 256 tokens of float32 to a float16 cache, 1 MiB of K and of V?",
    unit="ns",
    targets=[faster("NumPy", 15.0, issue=4), costs("C memcpy of the float32", 1.3, issue=4)],
)(partial(convert, n_tokens=256, n=4))


KINDS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32}
Q8_0_ERROR = 1 / 200  # of the largest value: half a step is 1/254, and its float16 scale is rounded


@SUITE.case(
    "dtypes",
    "How fast does a cache of each type take float32, 1 MiB of K and of V at a time?",
    unit="GB/s",
)
def dtypes(measure: Measure) -> None:
    """Append the same float32 to caches of all types; the bytes that go in are counted."""
    n, n_tokens = 4, 256
    k, v = kv = tokens(n_tokens, "float32")
    in_speed = partial(in_gb_s, 2 * k.nbytes)
    peers, held, want = {}, {}, {}
    for kind, dtype in KINDS.items():
        name = f"NumPy, {kind}"
        want[name] = [part.astype(dtype) for part in kv]
        held[name] = zeros(n, want[name])
        names = {"k": k, "v": v} | by_name(held[name])
        peers[name] = in_speed(warm_stopwatch(BY_INDEX, n, names))
    if measure.installed("gguf", name := "gguf-py, q8_0"):
        import gguf

        quantize = partial(gguf.quants.quantize, qtype=gguf.GGMLQuantizationType.Q8_0)
        want[name] = [quantize(part) for part in kv]
        held[name] = zeros(n, want[name])
        calling = {"quantize": quantize, "k": k, "v": v} | by_name(held[name])
        statement = "keys[i] = quantize(k); values[i] = quantize(v)"
        peers[name] = in_speed(warm_stopwatch(statement, n, calling))
    room = zeros(n, kv)
    with ExitStack() as stack:
        caches = {
            kind: stack.enter_context(um.KVCache(1, *SHAPE, n * n_tokens, dtype=kind))
            for kind in (*KINDS, "q8_0")
        }
        ours = {
            f"unimem, {kind}": in_speed(appending(cache, kv, n)) for kind, cache in caches.items()
        }
        limits = {"C memcpy of the float32": in_speed(memcpy_to(room, kv))}
        measure.compare(ours, peers, limits, rounds=51, quick_rounds=7)
        for kind in KINDS:
            check_holds(f"unimem, {kind}", stored(caches[kind]), want[f"NumPy, {kind}"])
        for have, part in zip(stored(caches["q8_0"], dtype="float32"), kv, strict=True):
            error = np.abs(have.reshape(n, *part.shape) - part).max()
            if error > Q8_0_ERROR * np.abs(part).max():
                raise AssertionError(f"unimem, q8_0 does not hold what was appended: {error} off")
    for name, arrays in held.items():
        check_holds(name, arrays, want[name])
    check_holds("C memcpy of the float32", room, kv)


for _kind in kv_quants.KINDS:
    SUITE.case(
        f"quantize-{_kind}",
        f"How fast does a {_kind} cache take float32, 1 MiB of K and of V at a time?",
        unit="GB/s",
        targets=[faster("ggml", 0.9, issue=22)],
    )(partial(kv_quants.append, kind=_kind))
    SUITE.case(
        f"read-{_kind}",
        f"How fast is 1 MiB of K and of V read as float32 from a {_kind} cache?",
        unit="GB/s",
        targets=[faster("ggml", 1.0, issue=22)],
    )(partial(kv_quants.read, kind=_kind))


# ---- batches ----


def batch(measure: Measure, *, n_tokens: int, n: int, quick_tokens: int) -> None:
    """Compare with memcpy of the same arrays to the very same rows."""
    n_tokens = quick_tokens if measure.quick else n_tokens
    kv = tokens(n_tokens)
    nbytes = sum(part.nbytes for part in kv)
    with um.KVCache(1, *SHAPE, n * n_tokens) as cache:
        cache.warm()
        places = [cache.address(0, "k"), cache.address(0, "v")]
        ours = appending(cache, kv, n)
        limit = memcpy(n, *zip(places, kv, strict=True))
        for name, side in (("unimem", ours), ("C memcpy", limit)):
            for place in places:
                plain.fill(place, n * kv[0].nbytes, 0)
            side()
            check_holds(name, stored(cache), kv)
        measure.compare(
            ours={"unimem": in_gb_s(nbytes, ours)},
            limits={"C memcpy": in_gb_s(nbytes, limit)},
            rounds=101 if n > 1 else 31,
            quick_rounds=15,
        )


SUITE.case(
    "batch",
    "How fast are 512 tokens appended, 1 MiB of K and of V?",
    unit="GB/s",
    targets=[costs("C memcpy", 1.05, issue=4)],
)(partial(batch, n_tokens=512, n=8, quick_tokens=512))

SUITE.case(
    "batch-large",
    "How fast are 32768 tokens appended, 64 MiB of K and of V (a quick run: 16 MiB)?",
    unit="GB/s",
    targets=[costs("C memcpy", 1.05, issue=4)],
)(partial(batch, n_tokens=32768, n=1, quick_tokens=8192))


# ---- rings ----

# Rings and their peers that fit into a CPU cache: at its edge, luck would decide.
for _name, _question, _n_tokens, _n_rows in (
    ("ring-append", "one token, 2 KiB of K and of V, to a ring of 64", 1, N_ROWS),
    ("ring-append-batch", "256 tokens, 512 KiB of K and of V, to a ring of 1024", 256, 1024),
):
    SUITE.case(
        _name,
        f"What does it cost to append {_question}?",
        unit="ns",
        targets=[costs(PLAIN, 1.05, side=RING, issue=4)],
    )(partial(kv_rings.append, n_tokens=_n_tokens, n_rows=_n_rows))

SUITE.case(
    "ring-read",
    "How fast is a window read that goes on beyond the last row, 64 MiB (a quick run: 16 MiB)?",
    unit="GB/s",
    targets=[costs("plain memory", 1.05, side=RING, issue=4)],
)(kv_rings.read)

SUITE.case(
    "trim",
    "How long does it take to keep the last 6144 of 8192 tokens of 4 layers "
    "(a quick run: 1536 of 2048)?",
    unit="ms",
)(kv_rings.trim)

SUITE.case(
    "trim-moved",
    "How many bytes does trimming a ring move?",
    unit="bytes",
    targets=[at_most(0.0, side=RING, issue=4)],
)(kv_rings.count_moved)


# ---- sequences in blocks ----


def sequence_length(quick: bool) -> int:
    """Return the number of tokens of a sequence in blocks of 16."""
    return 2048 if quick else 8192


@SUITE.case(
    "gather",
    "How fast are 8192 tokens, 32 MiB (a quick run: 2048, 8 MiB), gathered from blocks of 16?",
    unit="GB/s",
    targets=[faster("C memcpy", 0.85, issue=4)],
)
def gather(measure: Measure) -> None:
    """Compare with NumPy and torch that gather blocks of the same size, and with memcpy."""
    n = sequence_length(measure.quick)
    kv = tokens(n)
    blocks = [part.reshape(-1, BLOCK_TOKENS, *SHAPE) for part in kv]
    n_blocks = len(blocks[0])
    in_speed = partial(in_gb_s, sum(part.nbytes for part in kv))
    by_heads = tuple(np.zeros((N_HEADS, n, HEAD_DIM), np.float16) for _ in kv)
    held = {name: zeros(1, blocks) for name in ("NumPy", "torch", "C memcpy")}
    # Every other block, as in a sequence that grows beside another one.
    pools = [np.repeat(part, 2, axis=0) for part in blocks]
    given = {"keys": pools[0], "values": pools[1], "table": np.arange(0, 2 * n_blocks, 2)}

    def names(side: str) -> dict[str, Array]:
        k, v = (array[0] for array in held[side])
        return given | {"k": k, "v": v}

    taking = "take(keys, table, 0, k, 'clip'); take(values, table, 0, v, 'clip')"
    selecting = "select(keys, 0, table, out=k); select(values, 0, table, out=v)"
    peers = {"NumPy": warm_stopwatch(taking, 1, names("NumPy") | {"take": np.take})}
    if tensors := torch_names(measure, names("torch")):
        import torch

        peers["torch"] = warm_stopwatch(selecting, 1, tensors | {"select": torch.index_select})
    else:
        del held["torch"]
    with (
        um.PagedKVCache(1, *SHAPE, n_blocks=2 * n_blocks) as pool,
        pool.sequence() as ours,
        pool.sequence() as other,
    ):
        for k, v in zip(*blocks, strict=True):
            for sequence in (ours, other):
                sequence.append(0, k, v)
        gathering = {"gather": ours.gather, "out": by_heads}
        measure.compare(
            ours={"unimem": in_speed(warm_stopwatch("gather(0, out)", 1, gathering))},
            peers={name: in_speed(side) for name, side in peers.items()},
            limits={"C memcpy": in_speed(memcpy_to(held["C memcpy"], blocks))},
        )
    check_holds("unimem", [part.swapaxes(0, 1) for part in by_heads], kv)
    for name, arrays in held.items():
        check_holds(name, arrays, blocks)


@SUITE.case(
    "fork",
    "What does a fork of 8192 tokens (a quick run: 2048) cost for each block of 16 that it shares?",
    unit="ns",
)
def fork(measure: Measure) -> None:
    """Compare with copying the tokens, and with memcpy of the table of blocks."""
    n, n_forks = sequence_length(measure.quick), 16
    kv = tokens(n)
    room = zeros(1, kv)
    with (
        um.PagedKVCache(1, *SHAPE, n_blocks=n // BLOCK_TOKENS) as pool,
        pool.sequence() as sequence,
    ):
        sequence.append(0, *kv)
        table = sequence.block_table
        tables = zeros(n_forks, [table])
        children = [sequence.fork() for _ in range(n_forks)]

        def close() -> None:
            for child in children:
                child.close()

        def for_each_block(side: Side) -> Side:
            return lambda: side() / len(table)

        names = {"fork": sequence.fork, "children": children}
        forking = warm_stopwatch("children[i] = fork()", n_forks, names, close)
        measure.compare(
            ours={"unimem": for_each_block(forking)},
            peers={"C memcpy of the tokens": for_each_block(memcpy_to(room, kv))},
            limits={"C memcpy of the table": for_each_block(memcpy_to(tables, [table]))},
        )
        check_holds("unimem", [np.concatenate([child.block_table for child in children])], [table])
        check_holds("C memcpy of the table", tables, [table])
        close()
    check_holds("C memcpy of the tokens", room, kv)
