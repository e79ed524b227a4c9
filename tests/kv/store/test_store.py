"""The store of prefixes: any process restores what was put, for the same tokens only."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files.prefix_stores import (
    CHUNK,
    DIM,
    HEADS,
    MODEL,
    N_LAYERS,
    TOKENS,
    bytes_of,
    cache,
    files_of,
    of_v,
    opened,
    rows,
    shm,
)
from support.processes.forks import in_child, refuses
from unimem.kv.store.engine_chunks import EngineChunks

__all__ = ["shm"]  # a fixture


KINDS: dict[str, dict[str, Any]] = {
    **{dtype: {"dtype": dtype} for dtype in ("f32", "f16", "bf16", "q8_0")},
    "grow": {"grow": True},
    "ring": {"window": 48, "spare_rows": 8},
    **{f"head, {dtype}": {"dtype": dtype, "order": "head"} for dtype in ("f16", "q8_0")},
    "head, grow": {"order": "head", "grow": True},
    "two types": {"k_dtype": "q8_0", "v_dtype": "q4_0"},
    "head, two types, grow": {"v_dtype": "q5_1", "order": "head", "grow": True},
    "two types, ring": {"v_dtype": "q4_0", "window": 48},
    "head, ring": {"order": "head", "window": 48},
    "short V": {"v_head_dim": 16},
    "long V": {"v_head_dim": 64, "dtype": "q8_0"},
    "no V": {"v_head_dim": 0},
    "no V, head, quantized": {"v_head_dim": 0, "order": "head", "dtype": "q4_0"},
    "no V, ring": {"v_head_dim": 0, "window": 48},
    "short V, head, ring": {"v_head_dim": 16, "order": "head", "window": 48},
    "long V, head, two types, grow": {
        **{"v_head_dim": 64, "order": "head", "v_dtype": "q5_1", "grow": True}
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ram_bytes", [0, 1 << 22])
def test_put_tokens_are_restored_bit_for_bit(
    tmp_path: Path, shm: Path, kind: str, ram_bytes: int
) -> None:
    with cache(45, **KINDS[kind]) as kv:
        expected = bytes_of(kv, 40)
        with opened(tmp_path / "s", ram_bytes=ram_bytes) as store:
            assert store.put(kv, TOKENS, model=MODEL) == 40
    with opened(tmp_path / "s", ram_bytes=ram_bytes) as store, cache(**KINDS[kind]) as kv:
        assert store.longest(TOKENS, model=MODEL, kv=kv) == 40
        assert store.restore_into(kv, TOKENS, model=MODEL) == 40
        assert (kv.seq_len, kv.next_position) == (40, 40)
        assert bytes_of(kv, 40) == expected
        k, v = rows(1).transpose(1, 2, 0, 3, 4)[:, 0]
        kv.append_all(k, of_v(kv, v))
        assert kv.seq_len == 41


@pytest.mark.parametrize(
    ("tokens", "n"),
    [
        (TOKENS[:39], 32),
        (TOKENS[:7], 0),
        ([], 0),
        ([*TOKENS[:20], 5, *TOKENS[21:]], 16),
        ([5, *TOKENS[1:]], 0),
        ([*TOKENS, *range(40)], 40),
    ],
)
def test_a_hit_may_be_partial(tmp_path: Path, tokens: list[int], n: int) -> None:
    with opened(tmp_path / "s") as store, cache(45) as kv, cache() as other:
        store.put(kv, TOKENS, model=MODEL)
        assert store.longest(tokens, model=MODEL, kv=other) == n
        assert store.restore_into(other, tokens, model=MODEL) == n
        assert other.seq_len == other.next_position == n
        assert bytes_of(other, n) == bytes_of(kv, n)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"dtype": "bf16"},
        {"v_dtype": "bf16"},
        {"chunk_tokens": 4},
        {"v_head_dim": 16},
        {"v_head_dim": 0},
    ],
)
def test_other_models_and_kinds_get_no_chunks(tmp_path: Path, change: dict[str, Any]) -> None:
    with opened(tmp_path / "s") as store, cache(45) as kv:
        store.put(kv, TOKENS, model=MODEL)
    chunk = {"chunk_tokens": change.get("chunk_tokens", CHUNK)}
    kind = {key: change[key] for key in ("dtype", "v_dtype", "v_head_dim") if key in change}
    with opened(tmp_path / "s", **chunk) as store, cache(**kind) as kv:
        assert store.restore_into(kv, TOKENS, model=change.get("model", MODEL)) == 0
        assert kv.is_empty


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("order", ["token", "head"])
def test_orders_share_their_chunks(tmp_path: Path, dtype: str, order: Any) -> None:
    with (
        opened(tmp_path / "s") as store,
        cache(45, dtype=dtype, order=order) as kv,
        cache(45, dtype=dtype, order="head" if order == "token" else "token") as other,
    ):
        store.put(kv, TOKENS, model=MODEL)
        assert store.put(other, TOKENS, model=MODEL) == 40
        assert store.stat().known_chunks == 5
        expected = bytes_of(other, 40)
        other.clear()
        assert store.restore_into(other, TOKENS, model=MODEL) == 40
        assert bytes_of(other, 40) == expected


def test_chunks_are_kept_once(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store, opened(tmp_path / "s") as again, cache(45) as kv:
        store.put(kv, TOKENS, model=MODEL)
        assert again.put(kv, [*TOKENS[:16], *range(29)], model=MODEL) == 40
        stat = again.stat()
        assert (stat.known_chunks, stat.put_chunks) == (2, 3)
        assert stat.tiers[0].n_chunks == 8


@pytest.mark.parametrize("room", [17, 24])
def test_only_what_fits_is_restored(tmp_path: Path, room: int) -> None:
    with opened(tmp_path / "s") as store, cache(45) as kv:
        store.put(kv, TOKENS, model=MODEL)
        with um.KVCache(N_LAYERS, HEADS, DIM, room, pages="4k") as small:
            assert store.restore_into(small, TOKENS, model=MODEL) == room // CHUNK * CHUNK


def test_a_chunk_of_other_heads_is_refused(tmp_path: Path) -> None:
    """A chunk of the same size, for a cache without V and with heads of K of twice the size."""
    with (
        opened(tmp_path / "s") as store,
        cache(CHUNK) as kv,
        um.KVCache(N_LAYERS, HEADS, 2 * DIM, 64, v_head_dim=0, pages="4k") as other,
    ):
        store.put(kv, TOKENS, model=MODEL)
        (written,) = files_of(tmp_path / "s")
        for layer in range(N_LAYERS):
            other.append(layer, *np.split(np.ones((CHUNK, HEADS, 2 * DIM), "f4"), [2 * DIM], -1))
        store.put(other, TOKENS, model=MODEL)
        (path,) = {*files_of(tmp_path / "s")} - {written}
        assert path.stat().st_size == written.stat().st_size
        shutil.copy(written, path)
        other.clear()
        with pytest.warns(um.PlacementWarning, match="it is another chunk than its name says"):
            assert store.restore_into(other, TOKENS, model=MODEL) == 0
        assert other.is_empty
        assert files_of(tmp_path / "s") == [written]


# ---- paged caches ----


@contextmanager
def pool(n_blocks: int = 16, **types: Any) -> Iterator[um.PagedKVCache]:
    with um.PagedKVCache(
        N_LAYERS, HEADS, DIM, n_blocks=n_blocks, block_tokens=4, pages="4k", **types
    ) as pg:
        yield pg


@pytest.mark.parametrize(
    "types",
    [*({"dtype": dtype} for dtype in ("f32", "f16", "bf16", "q8_0")), {"v_dtype": "q4_0"}],
    ids=lambda types: "-".join(types.values()),
)
def test_caches_and_sequences_read_each_other(tmp_path: Path, types: dict[str, Any]) -> None:
    with opened(tmp_path / "s") as store, cache(45, **types) as kv, pool(**types) as pg:
        store.put(kv, TOKENS, model=MODEL)
        with pg.sequence(TOKENS) as s:
            assert store.restore_into(s, TOKENS, model=MODEL) == 40 == len(s)
            assert store.put(s, TOKENS, model="again") == 40
    with opened(tmp_path / "s") as store, cache(45, **types) as kv, cache(**types) as out:
        assert store.restore_into(out, TOKENS, model="again") == 40
        assert bytes_of(out, 40) == bytes_of(kv, 40)


def test_a_sequence_continues_after_cached_blocks(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store, cache(45) as kv, pool() as pg:
        store.put(kv, TOKENS, model=MODEL)
        with pg.sequence(TOKENS[:13]) as first:
            for layer, (k, v) in enumerate(rows(45)[:, :, :13]):
                first.append(layer, k, v)
        with pg.sequence(TOKENS) as s:
            assert s.n_cached == 12
            assert store.restore_into(s, TOKENS, model=MODEL) == 40 == len(s)
            k, _ = s.gather(1)
            expected = kv.layer(1)[0][0][:, :40]
            assert np.array_equal(k, expected)
        with pg.sequence(TOKENS) as s:  # its ids were known
            assert s.n_cached == 40


def test_a_sequence_takes_no_rows_of_other_tokens(tmp_path: Path) -> None:
    # Its pool would share them as blocks of the ids that it was given.
    with opened(tmp_path / "s") as store, cache(45) as kv, pool() as pg:
        store.put(kv, TOKENS, model=MODEL)
        with pg.sequence([*TOKENS[:9], 5]) as s:
            for call in (store.restore_into, store.put):
                with pytest.raises(ValueError, match="told 5 for position 9, got 109"):
                    call(s, TOKENS, model=MODEL)
            assert len(s) == 0
            assert store.restore_into(s, TOKENS[:9], model=MODEL) == 8


def test_a_full_pool_takes_what_fits(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store, cache(45) as kv, pool(n_blocks=5) as pg:
        store.put(kv, TOKENS, model=MODEL)
        with pg.sequence(TOKENS) as s:
            assert store.restore_into(s, TOKENS, model=MODEL) == 16 == len(s)
            s.append(0, *rows(1)[0])  # it is whole and continues


# ---- refusals ----


def trimmed(kv: um.KVCache) -> um.KVCache:
    kv.trim_to(20)
    return kv


def reserved(kv: um.KVCache) -> um.KVCache:
    kv.reserve(1)
    return kv


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (trimmed, ValueError, "were dropped"),
        (reserved, RuntimeError, "reserved"),
        (lambda _: object(), TypeError, "kv: expected a KVCache or a Sequence"),
    ],
)
def test_a_cache_that_cannot_be_put_is_refused(
    tmp_path: Path, make: Callable[[um.KVCache], Any], error: type[Exception], match: str
) -> None:
    with opened(tmp_path / "s") as store, cache(45) as kv:
        with pytest.raises(error, match=match):
            store.put(make(kv), TOKENS, model=MODEL)
        assert store.stat().tiers[0].n_chunks == 0


@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("v_dim", [0, 16, DIM])
def test_a_cache_mapped_from_a_file_is_put(tmp_path: Path, order: Any, v_dim: int) -> None:
    with opened(tmp_path / "s") as store, cache(45, order=order, v_head_dim=v_dim) as kv:
        kv.save(tmp_path / "talk.kv")
        with um.KVCache.restore(tmp_path / "talk.kv") as mapped, cache(v_head_dim=v_dim) as out:
            store.put(mapped, TOKENS, model=MODEL)
            assert store.restore_into(out, TOKENS, model=MODEL) == 40
            for restored, part in zip(out.layer(1), kv.layer(1), strict=True):
                assert np.array_equal(restored, part[:, :, :40])


def test_a_cache_with_tokens_is_not_restored_into(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store, cache(45) as kv:
        store.put(kv, TOKENS, model=MODEL)
        before = bytes_of(kv, 45)
        with pytest.raises(ValueError, match="clear"):
            store.restore_into(kv, TOKENS, model=MODEL)
        assert bytes_of(kv, 45) == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ram_bytes": 0, "disk_bytes": 0}, "not 0"),
        ({"ram_bytes": -1}, "ram_bytes"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"pages": "1g"}, "pages: expected one of 4k, thp, 2m, got '1g'"),
        ({"numa": "node 1"}, "numa"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match), opened(tmp_path / "s", **options):
        pass
    with pytest.raises(ValueError, match="where: expected a folder or a URL"):
        um.KVStore("", ram_bytes=0)


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s").chmod(0o777)
    with pytest.raises(PermissionError, match="another folder"), opened(tmp_path / "s"):
        pass


# ---- damage ----


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3000] ^= 16
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, 5000)


def lengthen(path: Path) -> None:
    os.truncate(path, 1 << 14)


def swap(path: Path) -> None:
    other = next(each for each in files_of(path.parent) if each != path)
    shutil.copy(other, path)


def mix(path: Path) -> None:
    """Leave the identity, and replace the hash and the data."""
    other = next(each for each in files_of(path.parent) if each != path)
    path.write_bytes(path.read_bytes()[:64] + other.read_bytes()[64:])


@pytest.mark.parametrize("damage", [flip, cut, lengthen, swap, mix])
def test_a_damaged_chunk_is_a_miss_and_is_removed(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with opened(tmp_path / "s") as store, cache(45) as kv, cache() as out:
        store.put(kv, TOKENS[:16], model=MODEL)
        first = files_of(tmp_path / "s")
        store.put(kv, TOKENS, model=MODEL)
        third = next(path for path in files_of(tmp_path / "s") if path not in first)
        damage(third)
        with pytest.warns(um.PlacementWarning, match=third.stem):
            n = store.restore_into(out, TOKENS, model=MODEL)
        assert n in (16, 24, 32)
        assert bytes_of(out, n) == bytes_of(kv, n)
        assert not third.exists()
        assert store.stat().damaged_chunks == 1
        # It is put again, and found again.
        out.clear()
        assert store.put(kv, TOKENS, model=MODEL) == 40
        assert store.restore_into(out, TOKENS, model=MODEL) == 40


def test_a_chunk_damaged_in_ram_is_read_from_disk(tmp_path: Path, shm: Path) -> None:
    with opened(tmp_path / "s", ram_bytes=1 << 22) as store, cache(45) as kv, cache() as out:
        store.put(kv, TOKENS, model=MODEL)
        (folder,) = shm.iterdir()
        first, nbytes = store._tiers[0].extents()[0]  # type: ignore[attr-defined]
        data = bytearray((folder / "pool").read_bytes())
        data[first + nbytes - 3000] ^= 16
        (folder / "pool").write_bytes(data)
        with pytest.warns(um.PlacementWarning, match="was removed"):
            assert store.restore_into(out, TOKENS, model=MODEL) == 40
        assert bytes_of(out, 40) == bytes_of(kv, 40)
        assert store.stat().tiers[0].n_chunks == 5  # it was read from disk


# ---- closing ----


def test_a_closed_store_and_a_forked_child_raise(tmp_path: Path, shm: Path) -> None:
    with opened(tmp_path / "s", ram_bytes=1 << 22) as store, cache(45) as kv:
        store.put(kv, TOKENS, model=MODEL)

        def is_closed() -> bool:
            refused = refuses(lambda: store.longest(TOKENS, model=MODEL, kv=kv), "fork")
            store.close()
            return refused and store.closed

        assert in_child(is_closed)
        assert store.longest(TOKENS, model=MODEL, kv=kv) == 40
        store.close()
        store.close()
        assert store.closed
        assert store.give_back() == 0
        with pytest.raises(um.ClosedError):
            store.longest(TOKENS, model=MODEL, kv=kv)


def test_a_chunk_stays_if_it_cannot_be_opened_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a process may open no more files, the chunk is not damaged."""

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with opened(tmp_path) as store, cache(40) as kv, cache() as out:
        assert store.put(kv, TOKENS, model=MODEL) == 40
        with monkeypatch.context() as context:
            context.setattr(os, "open", refuse)
            with pytest.warns(um.PlacementWarning, match="cannot be read now: Too many open"):
                assert store.restore_into(out, TOKENS, model=MODEL) == 0
        assert store.stat().damaged_chunks == 0
        assert store.restore_into(out, TOKENS, model=MODEL) == 40
        assert bytes_of(out, 40) == bytes_of(kv, 40)


def test_a_tenant_finds_its_own_chunks_alone(tmp_path: Path, shm: Path) -> None:
    salts, out = ("", "a", "b"), np.zeros(64, np.uint8)
    with cache(16) as kv:
        for i, salt in enumerate(salts):
            with opened(tmp_path, ram_bytes=1 << 20, salt=salt) as store:
                engine = EngineChunks(store, "engine", 64)
                assert store.longest(TOKENS, model=MODEL, kv=kv) == 0
                assert not engine.has(b"key")
                assert store.put(kv, TOKENS, model=MODEL) == 16
                engine.put(b"key", out)
                assert store.stat().tiers[-1].n_chunks == 3 * (i + 1)
                assert "salt" not in repr(store)
        for salt in salts:
            with opened(tmp_path, salt=salt) as store:
                assert store.longest(TOKENS, model=MODEL, kv=kv) == 16
                assert EngineChunks(store, "engine", 64).get(b"key", out)
    with pytest.raises(TypeError, match="salt: expected a string"):
        um.KVStore(tmp_path, ram_bytes=0, salt=b"a")  # type: ignore[arg-type]
