"""Operations that run while system calls fail: each can be repeated."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import unimem as um
from support.files.streamed_models import mixture, write
from unimem.accounting import published
from unimem.staging.keeper import drop, hold
from unimem.weights.staged import Held

__all__ = ["OPERATIONS", "Absent", "Call", "Operation"]

PAGE = os.sysconf("SC_PAGESIZE")
MODEL = Path(um.__file__).parent / "engine" / "models" / "tiny.gguf"
TOKENS = list(range(40))


class Absent(Exception):  # noqa: N818 - as that of pytest
    """A package that an operation needs is not installed."""


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Call:
    """An operation that is ready.

    `run` performs it, and returns a value that must be the same each time. `undo` reverts it.
    `facts` returns what a failed call must not change. `in_parts` says whether parts that were done
    before the failure may stay until they are reverted.
    """

    run: Callable[[], Any]
    undo: Callable[[], Any] = _nothing
    facts: Callable[[], Any] = _nothing
    in_parts: bool = False


@dataclass(frozen=True)
class Operation:
    """An operation: its name, and a function that prepares it in a folder."""

    name: str
    prepare: Callable[[Path], AbstractContextManager[Call]]


OPERATIONS: list[Operation] = []


def operation(
    name: str,
) -> Callable[[Callable[[Path], Iterator[Call]]], Callable[[Path], Iterator[Call]]]:
    """Enter a generator that yields one call into the table."""

    def enter(prepare: Callable[[Path], Iterator[Call]]) -> Callable[[Path], Iterator[Call]]:
        OPERATIONS.append(Operation(name, contextmanager(prepare)))
        return prepare

    return enter


def checksum(*arrays: Any) -> int:
    """Return a checksum of arrays."""
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
    return value


# ---- blocks, tapes, grids ----


def _block(**options: Any) -> Callable[[Path], Iterator[Call]]:
    def prepare(_: Path) -> Iterator[Call]:
        def run() -> int:
            with um.Block(64 * PAGE, **options) as block:
                some = block.as_array(shape=64 * PAGE)  # a huge page may be larger
                some[:] = 1
                return int(some.sum())

        yield Call(run)

    return prepare


operation("Block")(_block(pages="4k", warm=True))
operation("Block, transparent huge pages, two threads")(_block(pages="thp", warm=2))
operation("Block, locked")(_block(pages="4k", lock=True))
operation("Block, on a node")(_block(pages="4k", numa="bind:0", warm=True))


@operation("Block, shared and attached")
def _(_: Path) -> Iterator[Call]:
    def run() -> int:
        with um.Block(16 * PAGE, pages="4k", shared=True) as block:
            block.as_array()[:] = 3
            with um.Block.attach(block.fileno()) as other:
                return int(other.as_array().sum())

    yield Call(run)


@operation("Block, mapped from a file")
def _(folder: Path) -> Iterator[Call]:
    path = folder / "file"
    path.write_bytes(bytes(range(256)) * 64)

    def run() -> int:
        with um.Block.map(path) as block:
            block.warm()
            return int(block.as_array().sum())

    yield Call(run)


@operation("Block, commit and release")
def _(_: Path) -> Iterator[Call]:
    with um.Block(PAGE, pages="4k", reserve=256 * PAGE) as block:

        def run() -> int:
            block.commit(200 * PAGE)
            block.as_array()[:] = 1
            return block.committed_bytes

        def undo() -> None:
            block.release(PAGE)

        yield Call(run, undo, lambda: (block.committed_bytes, int(block.as_array()[0])))


@operation("Block, verify, repair, collapse")
def _(_: Path) -> Iterator[Call]:
    with um.Block(4 << 20, pages="thp", numa="bind:0", warm=True) as block:

        def run() -> int:
            block.verify()
            block.repair()
            block.collapse()
            return block.nbytes

        yield Call(run)


@operation("Tape, Grid, Layout")
def _(_: Path) -> Iterator[Call]:
    def run() -> int:
        with (
            um.Tape(64 * PAGE, pages="4k", warm=True) as tape,
            um.Grid(256, 16, pages="4k") as grid,
            um.Layout(PAGE, PAGE, PAGE, pages="4k") as layout,
        ):
            tape.take((16, 16))
            cell = grid.take()
            grid.give(cell)
            layout.freeze()
            return tape.used_bytes + grid.n_available + layout.total_bytes

    yield Call(run)


# ---- KV caches ----


def _rows(n: int, seed: int = 0) -> tuple[Any, Any]:
    values = np.random.default_rng(seed).standard_normal((2, n, 2, 32), np.float32)
    return values[0], values[1]


def _fill(kv: um.KVCache, n: int) -> None:
    for layer in range(kv.n_layers):
        kv.append(layer, *_rows(n, layer))


def _held(kv: um.KVCache) -> int:
    return checksum(*(array for layer in range(kv.n_layers) for array in kv.layer(layer)))


@operation("KVCache")
def _(_: Path) -> Iterator[Call]:
    def run() -> int:
        with um.KVCache(2, 2, 32, 64, pages="4k") as kv:
            _fill(kv, 40)
            kv.trim_to(20)
            with kv.copy() as other:
                return _held(other)

    yield Call(run)


@operation("KVCache, growing, trimmed")
def _(_: Path) -> Iterator[Call]:
    with um.KVCache(2, 2, 32, 4096, pages="4k", grow=True) as kv:

        def run() -> int:
            kv.clear()
            _fill(kv, 300)
            kv.trim_to(100)
            return _held(kv)

        yield Call(run, kv.clear, in_parts=True)


@operation("KVCache, growth of one append")
def _(_: Path) -> Iterator[Call]:
    with um.KVCache(2, 2, 32, 4096, pages="4k", grow=True) as kv:
        _fill(kv, 8)
        k, v = _rows(600)

        def run() -> int:
            kv.append(0, k, v)
            return kv.seq_len

        def undo() -> None:
            kv.rollback()
            kv.enforce_memory_limit(1 << 30)

        yield Call(run, undo, lambda: (kv.seq_len, _held(kv)))


@operation("KVCache, a ring")
def _(_: Path) -> Iterator[Call]:
    def run() -> int:
        with um.KVCache(2, 2, 32, 4096, window=32, pages="4k") as kv:
            for _ in range(10):
                _fill(kv, 10)
            return _held(kv)

    yield Call(run)


@operation("PagedKVCache")
def _(_: Path) -> Iterator[Call]:
    def run() -> int:
        with um.PagedKVCache(2, 2, 32, n_blocks=16, pages="4k") as paged:
            first = paged.sequence(TOKENS)
            for layer in range(2):
                first.append(layer, *_rows(40, layer))
            other = first.fork()
            for layer in range(2):
                other.append(layer, *_rows(3, layer))
            found = checksum(*first.gather(0), *other.gather(1))
            other.close()
            first.close()
            return found

    yield Call(run)


@operation("Snapshot, save")
def _(folder: Path) -> Iterator[Call]:
    path = folder / "session"
    with um.KVCache(2, 2, 32, 64, pages="4k") as kv:
        _fill(kv, 20)
        kv.save(path)
        old = path.read_bytes()
        _fill(kv, 20)

        def run() -> int:
            kv.save(path, tokens=TOKENS, model="m")
            return zlib.crc32(path.read_bytes())

        def undo() -> None:
            path.write_bytes(old)

        # If only the last step fails, the new file exists.
        yield Call(run, undo, lambda: um.KVCache.restore(path, mode="copy").close())


def _restoring(mode: str) -> Callable[[Path], Iterator[Call]]:
    def prepare(folder: Path) -> Iterator[Call]:
        path = folder / "session"
        with um.KVCache(2, 2, 32, 64, pages="4k") as kv:
            _fill(kv, 40)
            kv.save(path, tokens=TOKENS)

        def run() -> int:
            how: Any = {"mode": mode, "verify": True}
            with um.KVCache.restore(path, **how) as restored:
                if mode == "map":
                    restored.verify()
                return _held(restored)

        yield Call(run)

    return prepare


operation("Snapshot, restore by mapping")(_restoring("map"))
operation("Snapshot, restore by reading")(_restoring("copy"))


# ---- models ----


def _opening(load: str) -> Callable[[Path], Iterator[Call]]:
    def prepare(_: Path) -> Iterator[Call]:
        def run() -> int:
            with um.open_weights(MODEL, load=load, warm=True) as weights:  # type: ignore[arg-type]
                return checksum(*(each.as_array() for each in weights.tensors.values()))

        yield Call(run)

    return prepare


for way in ("map", "copy", "direct"):
    operation(f"open_weights, {way}")(_opening(way))


@operation("open_weights, streamed")
def _(folder: Path) -> Iterator[Call]:
    path = write(folder / "mixture.gguf", mixture(1), 2)
    budget = int(path.stat().st_size * 0.7)  # so that pieces are read, and read again

    def run() -> list[int]:
        with um.open_weights(path, load="stream", budget=budget) as weights:
            experts: list[Any] = [t for t in weights.tensors.values() if hasattr(t, "ensure")]
            return [
                checksum(each.pool[each.ensure(range(first, first + 2))])
                for first in (0, 4)
                for each in experts
            ]

    yield Call(run)


@operation("Weights, residency, lock, evict")
def _(_: Path) -> Iterator[Call]:
    with um.open_weights(MODEL, load="map") as weights:

        def run() -> int:
            weights.warm()
            weights.residency()
            weights.lock()
            weights.lock(False)
            weights.content_hash()
            return weights.nbytes

        yield Call(run)


def _staging(backing: str) -> Callable[[Path], Iterator[Call]]:
    def prepare(_: Path) -> Iterator[Call]:
        def run() -> int:
            with um.stage(MODEL, backing=backing) as staged:  # type: ignore[arg-type]
                assert staged.backing == backing, "it fell back"
                return zlib.crc32(Path(staged.path).read_bytes())

        with suppress(um.PlacementError):
            run()
            yield Call(run)
            return
        raise Absent(f"backing={backing!r} cannot be had here")

    return prepare


operation("stage, a mount of its own")(_staging("tmpfs"))
operation("stage, a memfd")(_staging("memfd"))
operation("stage, /dev/shm")(_staging("shm"))


@operation("stage, whichever can be had")
def _(_: Path) -> Iterator[Call]:
    def run() -> int:
        with um.stage(MODEL) as staged, um.open_weights(staged.path) as weights:
            return weights.nbytes

    yield Call(run)


@operation("stage, kept by a process, and dropped")
def _(_: Path) -> Iterator[Call]:
    asked = {"pages": "auto", "numa": None, "lock": False, "backing": "memfd"}
    keeping: list[Held] = []

    def run() -> tuple[int, bool]:
        with hold(um.stage(MODEL, backing="memfd"), str(MODEL), asked, []) as held:
            keeping.append(held)
        found = zlib.crc32(Path(held.path).read_bytes())
        drop(held)
        return found, os.path.exists(held.path)

    def undo() -> None:
        while keeping:
            drop(keeping.pop())

    yield Call(run, undo)


def _repackable(folder: Path) -> Path:
    """Write a model that this CPU repacks."""
    try:
        from support.models.make import TINY, write_model
        from unimem.backends import ggml_orders
    except ImportError as error:
        raise Absent(f"{error.name} is not installed") from None
    if ggml_orders.find_order(2, (256, 64)) is None:
        raise Absent("this build of ggml has no order for q4_0 on this CPU")
    (folder / "models").mkdir()
    return write_model(folder / "models" / "q4_0.gguf", shape=TINY, kind="q4_0")


@operation("repack, written to the cache")
def _(folder: Path) -> Iterator[Call]:
    model, cache = _repackable(folder), folder / "cache"
    cache.mkdir(0o700)

    def undo() -> None:
        for path in cache.glob("*.repacked"):
            path.unlink()

    with um.open_weights(model) as weights:

        def run() -> int:
            with um.repack(weights, cache=cache) as repacked:
                return repacked.nbytes

        yield Call(run, undo, in_parts=True)


@operation("repack, from the cache")
def _(folder: Path) -> Iterator[Call]:
    model, cache = _repackable(folder), folder / "cache"
    with um.open_weights(model) as weights:
        um.repack(weights, cache=cache).close()

        def run() -> int:
            with um.repack(weights, cache=cache) as repacked:
                return repacked.nbytes

        yield Call(run)


# ---- stores, sessions ----


@contextmanager
def _store(folder: Path, **tiers: Any) -> Iterator[tuple[um.KVStore, um.KVCache]]:
    with (
        um.KVStore(folder / "store", chunk_tokens=16, **tiers) as store,
        um.KVCache(2, 2, 32, 64, pages="4k") as kv,
    ):
        yield store, kv


DISK, RAM = {"ram_bytes": 0, "disk_bytes": 1 << 20}, {"ram_bytes": 1 << 20, "disk_bytes": 0}


def _opening_store(**tiers: Any) -> Callable[[Path], Iterator[Call]]:
    def prepare(folder: Path) -> Iterator[Call]:
        def run() -> int:
            with um.KVStore(folder / "store", chunk_tokens=16, **tiers) as store:
                return len(store.stat().tiers)

        run()
        yield Call(run, in_parts=True)  # the next call removes an empty folder of shared memory

    return prepare


def _putting(**tiers: int) -> Callable[[Path], Iterator[Call]]:
    def prepare(folder: Path) -> Iterator[Call]:
        with _store(folder, **tiers) as (store, kv):
            _fill(kv, 40)

            def undo() -> None:
                for path in Path(store.stat().tiers[0].path).glob("*.kv"):
                    path.unlink()
                store.give_back()

            def run() -> bool:
                # There may be fewer without room.
                return store.put(kv, TOKENS, model="m") in (0, 16, 32)

            yield Call(run, undo, in_parts=True)

    return prepare


def _getting(**tiers: int) -> Callable[[Path], Iterator[Call]]:
    def prepare(folder: Path) -> Iterator[Call]:
        with _store(folder, **tiers) as (store, kv):
            _fill(kv, 40)

            def run() -> bool:
                # An unreadable chunk has no tokens.
                return store.restore_into(kv, TOKENS, model="m") in (0, 16, 32)

            def undo() -> None:
                kv.clear()
                _fill(kv, 40)
                store.put(kv, TOKENS, model="m")
                kv.clear()

            undo()
            yield Call(run, undo, lambda: kv.seq_len)

    return prepare


for where, tiers in (("on a disk", DISK), ("in RAM", RAM)):
    operation(f"KVStore {where}, opened and closed")(_opening_store(**tiers))
    operation(f"KVStore {where}, put")(_putting(**tiers))
    operation(f"KVStore {where}, restore")(_getting(**tiers))


@contextmanager
def _decoder() -> Iterator[Any]:
    try:
        from unimem.engine import Decoder
    except ImportError as error:
        raise Absent(f"{error.name} is not installed") from None
    with Decoder(MODEL, ctx=64, threads=1) as decoder:
        decoder.prefill([1, 5, 9])
        yield decoder


@operation("Decoder, save and resume a session")
def _(folder: Path) -> Iterator[Call]:
    with _decoder() as decoder:

        def run() -> tuple[int, int]:
            # A failed resume leaves a new conversation.
            decoder.reset()
            decoder.prefill([1, 5, 9])
            decoder.save_session(folder / "session")
            return checksum(decoder.resume(folder / "session")), decoder.kv.seq_len

        yield Call(run, lambda: (folder / "session").unlink(missing_ok=True), in_parts=True)


@operation("Decoder")
def _(_: Path) -> Iterator[Call]:
    def run() -> int:
        with _decoder() as decoder:
            return checksum(decoder.logits)

    yield Call(run)


# ---- planning, reports ----


@operation("plan")
def _(_: Path) -> Iterator[Call]:
    yield Call(lambda: um.plan(MODEL, ctx=64).total_bytes)


@operation("report")
def _(_: Path) -> Iterator[Call]:
    with um.Block(16 * PAGE, pages="4k", warm=True):
        yield Call(lambda: len(um.report().rows) > 0)


@operation("doctor")
def _(_: Path) -> Iterator[Call]:
    yield Call(lambda: len(str(um.doctor())) > 0)


@operation("ledger, shown to others")
def _(_: Path) -> Iterator[Call]:
    def run() -> bool:
        published._unpublish()
        published.publish()
        published.published(os.getpid())
        # The ledger says why it cannot be shown.
        return published._shared is not None or published.failure() is not None

    was_shown = published._shared is not None
    yield Call(run, published._unpublish, in_parts=True)
    if was_shown:
        published.publish()


@operation("exec, up to the program")
def _(_: Path) -> Iterator[Call]:
    import unimem_exec as launch

    def run() -> bool:
        program = launch.find_program(sys.executable)
        library = launch.find_library()
        launch.obstacle(program or sys.executable)
        launch.environment(library or "", launch.settings(pages="auto"))
        return True

    yield Call(run)
