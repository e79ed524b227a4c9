"""What the KV memory costs, against NumPy, torch and C that do the same with plain memory.

Appending one token and many, converting on the way, rings, paged sequences, snapshots, and sessions
that go on after a restart. What is compared runs alternately on the same kind of memory, touched
before. `bench/README.md` says how each figure is taken.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unimem as um
from bench.harness import Bench, pin, ratios, stopwatch

ROOT = Path(__file__).resolve().parent.parent
SHAPE = N_HEADS, HEAD_DIM = 8, 128  # 2 KB of K and 2 KB of V a token, as float16
N_VALUES = N_HEADS * HEAD_DIM
N_ROWS = 64  # where a call is measured: of all sides together they stay in a second-level cache
MB = 1 << 20

C_SIDE = """
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct piece { void *to; const void *from; size_t nbytes; } piece;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* CPU seconds of n memcpys. */
double copy(const piece *pieces, size_t n) {
    double start = now();
    for (size_t i = 0; i < n; i++) {
        memcpy(pieces[i].to, pieces[i].from, pieces[i].nbytes);
        __asm__ volatile("" : : "r"(pieces[i].to) : "memory");
    }
    return now() - start;
}

/* CPU seconds of reading n words once; their sum keeps the compiler from leaving it. */
double sum(const uint64_t *words, size_t n, uint64_t *out) {
    double start = now();
    uint64_t total = 0;
    for (size_t i = 0; i < n; i++) {
        total += words[i];
    }
    *out = total;
    return now() - start;
}
"""


class InC:
    """memcpy and reading, measured inside of C in the CPU time of the thread."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, module = Path(folder, "side.c"), Path(folder, "side.so")
            source.write_text(C_SIDE)
            run = ["cc", "-std=gnu17", "-O3", "-fPIC", "-shared", "-o", str(module), str(source)]
            subprocess.run(run, check=True)
            library = ctypes.CDLL(str(module))
        self._copy, self._sum = library.copy, library.sum
        self._copy.restype = self._sum.restype = ctypes.c_double
        self._copy.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._sum.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def copy(self, pieces: Sequence[tuple[int, int, int]], n: int) -> Callable[[], float]:
        """One nth of the nanoseconds of these memcpys: (to, from, bytes) each."""
        table = np.array(pieces, np.uint64)

        def run() -> float:
            for _ in range(2):  # as warm_stopwatch
                seconds = self._copy(table.ctypes.data, len(table))
            return float(seconds) / n * 1e9

        return run

    def read(self, address: int, nbytes: int) -> Callable[[], float]:
        """GB/s of reading so many bytes."""
        total = np.zeros(1, np.uint64)

        def run() -> float:
            seconds = self._sum(address, nbytes // 8, total.ctypes.data)
            return float(nbytes / seconds / 1e9)

        return run


def token(dtype: str = "float16") -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V of one token."""
    k = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float16)
    return k.astype(dtype), (k + np.float16(1)).astype(dtype)


def tokens(n: int, dtype: str = "float16") -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V of n tokens, which differ."""
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((n, *SHAPE), np.float32).astype(np.float16) for _ in range(2))
    return k.astype(dtype), v.astype(dtype)


def check(stored: NDArray[Any], want: NDArray[Any], what: str) -> None:
    """Raise unless a view of K or V, of one stream, holds these tokens."""
    if not np.array_equal(stored[0].swapaxes(0, 1), want):
        raise AssertionError(f"{what}: the cache does not hold what was appended")


def warm_stopwatch(
    statement: str, n: int, names: Mapping[str, object], before: Callable[[], object] | None = None
) -> Callable[[], float]:
    """As `stopwatch`, of the second of two equal runs.

    The first brings code and rows back into the caches, from where the other sides, torch before
    all, have driven them.
    """
    first = stopwatch(statement, n, names, before)

    def again() -> None:
        first()
        if before is not None:
            before()

    return stopwatch(statement, n, names, again)


# ---- one token ----


def one_token(bench: Bench) -> None:
    """Compare one token of float16 with NumPy's and torch's ways to write it to a row."""
    n = N_ROWS
    k, v = token()
    keys, values = (np.zeros((n, *SHAPE), np.float16) for _ in range(2))
    with um.KVCache(1, *SHAPE, n) as cache, um.Scratchpad(n, N_VALUES, "float16") as pad:
        ours = {"append": cache.append, "k": k[None], "v": v[None]}
        theirs = {"keys": keys, "values": values, "k": k, "v": v}
        title = "one token, 2 KB of K and 2 KB of V"
        sides = {
            "KVCache.append": warm_stopwatch("append(0, k, v)", n, ours, cache.clear),
            "NumPy, keys[i] = k": warm_stopwatch("keys[i] = k; values[i] = v", n, theirs),
        } | torch_sides(n, k, v)
        samples = bench.compare(title, sides, unit="ns")
        for part, want in zip(cache.layer(0), (k, v), strict=True):
            check(part, np.repeat(want[None], n, axis=0), title)
        for name, limit in (("NumPy, keys[i] = k", 3.5), ("torch, keys[i] = k", 20.0)):
            if name in samples:
                faster = ratios(samples[name], samples["KVCache.append"])
                bench.at_least(title, f"{name} / KVCache.append", faster, limit)
        row = k.reshape(-1)
        bench.compare(
            "one vector of 2 KB",
            {
                "Scratchpad.append": warm_stopwatch(
                    "append(k)", n, {"append": pad.append, "k": row}, pad.clear
                ),
                "NumPy, rows[i] = k": warm_stopwatch(
                    "rows[i] = k", n, {"rows": keys.reshape(n, -1), "k": row}
                ),
            },
            unit="ns",
        )


def torch_sides(n: int, k: NDArray[Any], v: NDArray[Any]) -> dict[str, Callable[[], float]]:
    """Return three ways of torch to write a row; none where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        print("\ntorch is not installed: not compared with it")
        return {}
    import torch

    torch.set_num_threads(1)
    names = {
        "keys": torch.zeros(n, *SHAPE, dtype=torch.float16),
        "values": torch.zeros(n, *SHAPE, dtype=torch.float16),
        "k": torch.from_numpy(k.copy()),
        "v": torch.from_numpy(v.copy()),
        "at": [torch.tensor([i]) for i in range(n)],
    }
    with_index = "keys.index_copy_(0, at[i], k[None]); values.index_copy_(0, at[i], v[None])"
    return {
        "torch, keys[i] = k": warm_stopwatch("keys[i] = k; values[i] = v", n, names),
        "torch, copy_": warm_stopwatch("keys[i].copy_(k); values[i].copy_(v)", n, names),
        "torch, index_copy_": warm_stopwatch(with_index, n, names),
    }


# ---- many tokens ----


def conversion(bench: Bench, c: InC) -> None:
    """Compare appending float32 to a float16 cache with NumPy's cast, and with memcpy."""
    for n_batch, n in ((1, N_ROWS), (256, 4)):
        k, v = tokens(n_batch, "float32")
        keys, values = (np.zeros((n, n_batch, *SHAPE), np.float16) for _ in range(2))
        room = um.Block(2 * n * k.nbytes)
        room.warm()
        with room, um.KVCache(1, *SHAPE, n * n_batch) as cache:
            cache.warm()
            ours = {"append": cache.append, "k": k, "v": v}
            theirs = {"keys": keys, "values": values, "k": k, "v": v}
            pieces = []
            for i in range(n):
                for j, source in enumerate((k, v)):
                    to = room.address + (2 * i + j) * k.nbytes
                    pieces.append((to, source.ctypes.data, k.nbytes))
            title = f"float32 to float16, {size(k.nbytes)} of K and as much of V"
            samples = bench.compare(
                title,
                {
                    "KVCache.append": warm_stopwatch("append(0, k, v)", n, ours, cache.clear),
                    "NumPy, keys[i] = k": warm_stopwatch("keys[i] = k; values[i] = v", n, theirs),
                    "C, memcpy of the float32": c.copy(pieces, n),
                },
                unit="ns",
                rounds=101,
            )
            stored = cache.layer(0)[0]
            check(stored, np.tile(k.astype(np.float16), (n, 1, 1)), title)
            del stored
        ours_ns = samples["KVCache.append"]
        faster = ratios(samples["NumPy, keys[i] = k"], ours_ns)
        bench.at_least(title, "NumPy / KVCache.append", faster, 15.0)
        if n_batch > 1:
            times = ratios(ours_ns, samples["C, memcpy of the float32"])
            bench.at_most(title, "KVCache.append / memcpy of its input", times, 1.3)


def size(nbytes: int) -> str:
    return f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes >> 10} KB"


def batch(bench: Bench, c: InC) -> None:
    """Compare batches of float16 with memcpy to the very rows that they are appended to."""
    for n_batch, n in ((512, 8), (32768, 1)):
        k, v = tokens(n_batch)
        with um.KVCache(1, *SHAPE, n * n_batch) as cache:
            cache.warm()
            bases = cache.address(0, "k"), cache.address(0, "v")
            pieces = [
                (base + i * k.nbytes, source.ctypes.data, k.nbytes)
                for i in range(n)
                for base, source in zip(bases, (k, v), strict=True)
            ]
            names = {"append": cache.append, "k": k, "v": v}
            title = f"a batch of {n_batch} tokens, {size(k.nbytes)} of K and as much of V"
            samples = bench.compare(
                title,
                {
                    "KVCache.append": warm_stopwatch("append(0, k, v)", n, names, cache.clear),
                    "C, memcpy": c.copy(pieces, n),
                },
                unit="ns",
                rounds=101 if n_batch == 512 else 31,
            )
            check(cache.layer(0)[1], np.tile(v, (n, 1, 1)), title)
        times = ratios(samples["KVCache.append"], samples["C, memcpy"])
        bench.at_most(title, "KVCache.append / memcpy", times, 1.05)


# ---- rings ----


def ring_append(bench: Bench) -> None:
    """Compare appends that go round a ring with appends to a plain cache of the same pages."""
    for n_batch, n_rows in ((1, N_ROWS), (256, 4096)):
        k, v = tokens(n_batch)
        n = n_rows // n_batch
        with (
            um.KVCache(1, *SHAPE, n_rows, window=n_rows, pages="4k") as ring,
            um.KVCache(1, *SHAPE, n_rows, pages="4k") as plain,
        ):
            ring.warm()
            plain.warm()
            half = tokens(n_batch // 2 or n_rows // 2)
            ring.append(0, *half)  # so that the end of the rows comes in the middle
            into_ring: dict[str, object] = {"append": ring.append, "k": k, "v": v}
            into_plain = into_ring | {"append": plain.append}
            title = f"append of {n_batch} to a ring of {n_rows} tokens"
            samples = bench.compare(
                title,
                {
                    "ring": warm_stopwatch("append(0, k, v)", n, into_ring),
                    "plain": warm_stopwatch("append(0, k, v)", n, into_plain, plain.clear),
                },
                unit="ns",
            )
            if ring.row_of(ring.next_position) in (0, n_rows):
                raise AssertionError("the ring's tokens do not go on beyond its last row")
            check(ring.layer(0)[0], np.tile(k, (n, 1, 1)), title)
        bench.at_most(title, "ring / plain", ratios(samples["ring"], samples["plain"]), 1.05)


def ring_read(bench: Bench, c: InC) -> None:
    """Compare reading a window that goes on beyond the last row with reading plain memory."""
    n = 32768
    k, v = tokens(n)
    with (
        um.KVCache(1, *SHAPE, n, window=n, pages="4k") as ring,
        um.KVCache(1, *SHAPE, n, pages="4k") as plain,
    ):
        ring.append(0, k[: n // 2], v[: n // 2])
        for cache in (ring, plain):
            cache.append(0, k, v)
        views = {"ring, wrapped": ring.layer(0)[0], "plain": plain.layer(0)[0]}
        if ring.row_of(ring.next_position) != n // 2:
            raise AssertionError("the window does not wrap")
        for view in views.values():
            check(view, k, "reading")
        title = f"reading a window of {size(k.nbytes)}"
        sides = {name: c.read(view.ctypes.data, k.nbytes) for name, view in views.items()}
        samples = bench.compare(title, sides, unit="GB/s", rounds=51)
        del view, views
    slower = ratios(samples["plain"], samples["ring, wrapped"])
    bench.at_most(title, "time of the ring / plain", slower, 1.05)


def rows_of_last(cache: um.KVCache, n: int) -> NDArray[np.int64]:
    """Where the last n tokens are: of each layer, and of K and of V, the row of each token."""
    found = []
    for layer in range(cache.n_layers):
        k, v = cache.layer(layer)
        for view, base in ((k, cache.address(layer, "k")), (v, cache.address(layer, "v"))):
            address = view[:, :, cache.seq_len - n :].ctypes.data
            first = (address - base) // cache.row_bytes
            found.append((first + np.arange(n)) % cache.n_rows)
    return np.stack(found)


def ring_trim(bench: Bench) -> None:
    """Count the bytes that trimming moves, and show how long it takes.

    A byte has moved when the token that it belongs to lies in another row afterwards. What the
    tokens hold is compared, too.
    """
    n, kept, n_layers = 8192, 6144, 4
    k, v = tokens(n)
    plain = [part.copy() for part in (k, v) * n_layers]
    moved: list[float] = []

    def trim_ring() -> float:
        with um.KVCache(n_layers, *SHAPE, n, window=n) as ring:
            for layer in range(n_layers):
                ring.append(layer, k[: n // 2], v[: n // 2])
                ring.append(layer, k, v)
            before = rows_of_last(ring, kept)
            start = time.perf_counter()
            ring.trim_to(kept)
            elapsed = time.perf_counter() - start
            moved.append(int((rows_of_last(ring, kept) != before).sum()) * ring.row_bytes)
            check(ring.layer(n_layers - 1)[0], k[-kept:], "trimming")
        return elapsed * 1e3

    def move() -> float:
        start = time.perf_counter()
        for part in plain:
            part[:kept] = part[-kept:]
        return (time.perf_counter() - start) * 1e3

    title = f"keeping the last {kept} of {n} tokens, {size(len(plain) * k.nbytes)}"
    bench.compare(title, {"ring, trim_to": trim_ring, "NumPy, moved": move}, unit="ms", rounds=11)
    bench.show(f"{title}: moved", {"ring, trim_to": moved}, unit="bytes")
    bench.at_most(title, "bytes that the ring moves", moved, 0)


# ---- paged ----


def paged(bench: Bench, c: InC) -> None:
    """Compare gathering a sequence, whose blocks lie between others', with memcpy; time forks."""
    n, block_tokens = 8192, 16
    k, v = tokens(n)
    out = (
        np.zeros_like(k, shape=(N_HEADS, n, HEAD_DIM)),
        np.zeros_like(v, shape=(N_HEADS, n, HEAD_DIM)),
    )
    with um.PagedKVCache(1, *SHAPE, n_blocks=2 * n // block_tokens + 64) as pool:
        ours, other = pool.sequence(), pool.sequence()
        for i in range(0, n, block_tokens):
            for sequence in (ours, other):
                sequence.append(0, k[i : i + block_tokens], v[i : i + block_tokens])
        pieces = [
            (target.ctypes.data, source.ctypes.data, source.nbytes)
            for target, source in zip(out, (k, v), strict=True)
        ]
        title = f"gathering {n} tokens in blocks of {block_tokens}, {size(2 * k.nbytes)}"

        def gather() -> float:
            for _ in range(2):
                start = time.thread_time()
                ours.gather(0, out=(out[0], out[1]))
                elapsed = time.thread_time() - start
            return elapsed * 1e9

        sides = {"gather": gather, "C, memcpy": c.copy(pieces, 1)}
        samples = bench.compare(title, sides, unit="ns", rounds=51)
        gather()
        if not np.array_equal(out[0].swapaxes(0, 1), k):
            raise AssertionError("what is gathered is not what was appended")
        faster = ratios(samples["C, memcpy"], samples["gather"])
        bench.at_least(title, "speed of gather / memcpy", faster, 0.85)
        other.close()
        fork(bench, ours, block_tokens)
        ours.close()


def fork(bench: Bench, sequence: Any, block_tokens: int) -> None:
    """Show what a fork costs for each block that it shares."""

    def forked(n: int) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter_ns()
            child = shorter[n].fork()
            elapsed = time.perf_counter_ns() - start
            child.close()
            return elapsed / (n // block_tokens)

        return run

    shorter = {8192: sequence, 1024: sequence.fork()}
    shorter[1024].crop(1024)
    sides = {f"{n} tokens, {n // block_tokens} blocks": forked(n) for n in shorter}
    bench.compare("fork, for each block", sides, unit="ns")
    shorter[1024].close()


# ---- snapshots ----


def written(path: Path, arrays: Sequence[NDArray[Any]]) -> None:
    """Write arrays as one does: write() into the page cache, then fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        for array in arrays:
            data: Any = array.reshape(-1).view(np.uint8)
            for begin in range(0, data.size, 8 * MB):
                os.write(fd, data[begin : begin + 8 * MB])
        os.fsync(fd)
    finally:
        os.close(fd)


def remove(path: Path) -> None:
    """Delete a file, and let the disk know, which the next fsync would wait for otherwise."""
    path.unlink(missing_ok=True)
    os.sync()


def read_into(path: Path, out: NDArray[np.uint8]) -> None:
    """Read a file whole; one read() gives 2 GB at most."""
    rest: Any = out
    with open(path, "rb", buffering=0) as file:
        while got := file.readinto(rest):
            rest = rest[got:]


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def snapshots(bench: Bench, folder: Path, nbytes: int) -> None:
    """Compare saving with a buffered write, and restoring with reading the file."""
    n_layers = 8
    n = nbytes // (n_layers * 2 * N_VALUES * 2)
    k, v = tokens(n)
    path, plain = folder / "kv.snapshot", folder / "kv.plain"
    with um.KVCache(n_layers, *SHAPE, n) as cache:
        for layer in range(n_layers):
            cache.append(layer, k, v)
        views = (view for layer in range(n_layers) for view in cache.layer(layer))
        parts = [view[0].swapaxes(0, 1) for view in views]

        def save() -> float:
            remove(path)
            return seconds(partial(cache.save, path)) * 1e3

        def write() -> float:
            remove(plain)
            return seconds(partial(written, plain, parts)) * 1e3

        title = f"saving {size(cache.memory_usage_bytes)}"
        sides = {"KVCache.save": save, "write and fsync": write}
        samples = bench.compare(title, sides, unit="ms", rounds=11, warmup=1)
        faster = ratios(samples["write and fsync"], samples["KVCache.save"])
        bench.at_least(title, "write and fsync / KVCache.save", faster, 1.7)
        plain.unlink()
        parts.clear()
    restore(bench, path, k)
    path.unlink()


def restore(bench: Bench, path: Path, k: NDArray[Any]) -> None:
    """Show how soon a snapshot in the page cache is there, against reading the file."""
    nbytes = path.stat().st_size
    room = um.Block(nbytes)
    room.warm()
    into = room.as_array("uint8", nbytes)

    def read() -> None:
        read_into(path, into)

    def restored(mode: Any, verify: bool | None = None) -> float:
        start = time.perf_counter()
        with um.KVCache.restore(path, mode=mode, verify=verify) as cache:
            first = cache.layer(0)[0][0, :, 0].copy()
            elapsed = time.perf_counter() - start
        if not np.array_equal(first, k[0]):
            raise AssertionError("what is restored is not what was saved")
        return elapsed * 1e3

    with room:
        read()  # saved past the page cache: brings the file in
        bench.compare(
            f"restoring {size(nbytes)} that are in the page cache",
            {
                "restore, map": partial(restored, "map"),
                "restore, map, verify": partial(restored, "map", True),
                "restore, copy": partial(restored, "copy"),
                "reading the file": lambda: seconds(read) * 1e3,
            },
            unit="ms",
            rounds=11,
            warmup=1,
        )


# ---- sessions ----


def session(bench: Bench, model: Path, n: int, folder: Path, rounds: int) -> None:
    """Compare the way to the first token: from a saved session, by prefilling it, and reading it.

    The decoder is there, its memory is warm, and the file is in the page cache.
    """
    from unimem.engine import Decoder

    path = folder / "session.kv"
    ids = np.random.default_rng(0).integers(3, 1000, n).tolist()
    with Decoder(model, ctx=n + 8, kv_dtype="f16") as decoder:

        def prefill() -> float:
            decoder.reset()
            start = time.perf_counter()
            decoder.prefill(ids)
            first.append(decoder.generate_next_token())
            return (time.perf_counter() - start) * 1e3

        def resume() -> float:
            decoder.reset()  # over a conversation the file is read twice, to be checked before
            start = time.perf_counter()
            decoder.resume(path)
            first.append(decoder.generate_next_token())
            return (time.perf_counter() - start) * 1e3

        first: list[int] = []
        decoder.prefill(ids)
        decoder.save_session(path)
        room = np.zeros(path.stat().st_size, np.uint8)

        def read() -> float:
            return seconds(partial(read_into, path, room)) * 1e3

        read()
        title = f"first token of a session of {n} tokens, {path.stat().st_size / MB:.3g} MB"
        samples = bench.compare(
            f"{title}, {model.name}",
            {"resume": resume, "prefill": prefill, "reading the file": read},
            unit="ms",
            rounds=rounds,
            warmup=0,  # all was prefilled once, and saved
        )
        if len(set(first)) != 1:
            raise AssertionError(f"the first tokens differ: {first}")
    path.unlink()
    faster = ratios(samples["prefill"], samples["resume"])
    bench.at_least(title, "prefill / resume", faster, 1.0)


def wide_model(folder: Path) -> Path:
    """Make the small model that has the KV cache of a large one, where it is missing."""
    path = folder / "wide.gguf"
    if not path.exists():
        part = path.with_suffix(".part")
        make = [sys.executable, ROOT / "tests" / "models" / "make.py", part, "llama", "wide"]
        subprocess.run(list(map(str, make)), check=True)
        part.rename(path)
    return path


def main() -> int:
    bench = Bench("kv", __doc__)
    option = bench.parser.add_argument
    option("--folder", type=Path, default=ROOT / "build" / "bench", help="for files, 3 GB")
    option("--nbytes", type=int, default=1 << 30, help="of what is saved and restored")
    option("--session-tokens", type=int, default=8192, help="128 KiB each, all of them prefilled")
    options = bench.parse()
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    everywhere = os.sched_getaffinity(0)
    bench.facts = {"numpy": np.__version__, "cpu": pin(1), "folder": file_system(folder)}
    with suppress(ImportError):
        bench.facts["torch"] = importlib.import_module("torch").__version__
    c = InC()
    one_token(bench)
    conversion(bench, c)
    batch(bench, c)
    ring_append(bench)
    ring_read(bench, c)
    ring_trim(bench)
    paged(bench, c)
    os.sched_setaffinity(0, everywhere)
    with tempfile.TemporaryDirectory(dir=folder) as files:
        snapshots(bench, Path(files), options.nbytes)
        from unimem.engine import embedded_model

        session(bench, embedded_model(), 500, Path(files), 11)
        session(bench, wide_model(folder), options.session_tokens, Path(files), 3)
    return bench.finish()


def file_system(folder: Path) -> str:
    """Name the file system that a folder lies on."""
    run = ["stat", "--file-system", "--format=%T", str(folder)]
    return subprocess.run(run, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
