"""The store of prefixes with caches whose layers differ: windows are restored whole, or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_model import as_float32, same_bits
from support.project.tiers import examples
from unimem.kv.snapshot import read_into
from unimem.kv.store.chunk import LayerRows, MixedLayers, chunk_keys
from unimem.kv.store.store import KVStore

CHUNK, MODEL = 8, "tiny"
# A page holds one row of the sliding layers in f32, so that a ring has no superfluous row.
FULL, WIDE = um.LayerKV(2, 32), um.LayerKV(4, 256, window=20)
NARROW, SHARED = um.LayerKV(4, 256, window=5, dtype="f32"), um.LayerKV(4, 256, share_of=0)
LAYERS = [WIDE, FULL, NARROW, SHARED]
# Heads of V that differ in size from those of K, and no V.
OTHER_V = [replace(one, v_head_dim=v) for one, v in zip(LAYERS, (0, 64, 128, 0), strict=True)]


@contextmanager
def opened(folder: Path) -> Iterator[KVStore]:
    with um.KVStore(folder, ram_bytes=0, disk_bytes=1 << 26, chunk_tokens=CHUNK) as store:
        yield store


def made(layers: Sequence[um.LayerKV] = LAYERS, **options: Any) -> Any:
    given: dict[str, Any] = {"max_seq_len": 128, "pages": "4k", "dtype": "f32", "spare_rows": 16}
    return um.KVCache(layers=layers, **given | options)


def value(ids: Sequence[int], position: int, layer: int) -> float:
    """The rows of a token in a layer, which depend on all tokens up to it."""
    return float(sum((i + 1) * token for i, token in enumerate(ids[: position + 1])) % 999 + layer)


def fill(kv: Any, ids: Sequence[int], step: int = 7) -> None:
    """Append the tokens that the cache does not hold yet, in several passes."""
    while (first := kv.next_position) < len(ids):
        end = min(first + step, len(ids))
        for layer, spec in enumerate(kv.layers):
            if spec.share_of is None:
                rows = np.array([value(ids, at, layer) for at in range(first, end)], np.float32)
                k, v = (
                    np.broadcast_to(rows[:, None, None], (end - first, spec.n_kv_heads, dim))
                    for dim in (spec.head_dim, spec.v_head_dim)
                )
                kv.append(layer, k, -v)


def check(kv: Any, ids: Sequence[int], n: int) -> None:
    """Check that each layer shows the rows of the first n tokens."""
    assert kv.next_position == n
    for layer, spec in enumerate(kv.layers):
        source = layer if spec.share_of is None else spec.share_of
        first = max(0, n - spec.window) if spec.window else 0
        k, v = (as_float32(part) for part in kv.layer(layer))
        assert k.shape[2:] == (n - first, spec.head_dim)
        assert v.shape[2:] == (n - first, spec.v_head_dim)
        want = np.array([value(ids, at, source) for at in range(first, n)], np.float32)
        want = want[None, None, :, None]
        assert same_bits(k, np.broadcast_to(want, k.shape))
        assert same_bits(v, np.broadcast_to(-want, v.shape))


@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize("n", [7, 8, 20, 45, 64])
@pytest.mark.parametrize("layers", [LAYERS, OTHER_V], ids=["alike", "other V"])
def test_put_layers_are_restored(
    tmp_path: Path, layers: list[um.LayerKV], n: int, grow: bool, order: Any
) -> None:
    ids, end = list(range(3, n + 3)), n // CHUNK * CHUNK
    with opened(tmp_path / "s") as store, made(layers, order=order, grow=grow) as kv:
        fill(kv, ids)
        assert store.put(kv, ids, model=MODEL) == end
    with opened(tmp_path / "s") as store, made(layers, grow=grow) as kv:  # orders share chunks
        assert store.longest(ids, model=MODEL, kv=kv) == end
        assert store.restore_into(kv, ids, model=MODEL) == end
        check(kv, ids, end)
        fill(kv, [*ids, 1, 2, 3])
        check(kv, [*ids, 1, 2, 3], n + 3)
        assert kv.seq_len == n + 3
        assert store.put(kv, ids, model=MODEL) == end
        assert store.stat().put_chunks == 0


def test_a_ring_that_was_trimmed_is_not_put(tmp_path: Path) -> None:
    """Its later tokens saw less than a window: they are not those of the conversation."""
    ids = list(range(8 * CHUNK))
    with (
        opened(tmp_path / "s") as store,
        um.KVCache(1, 4, 256, 128, window=20, spare_rows=16, dtype="f32") as kv,
    ):
        fill(kv, ids[: 4 * CHUNK])
        assert store.put(kv, ids[: 4 * CHUNK], model=MODEL) > 0
        assert kv.trim_to(5)
        fill(kv, ids[: 6 * CHUNK])
        with pytest.raises(ValueError, match=r"in which \d+ were dropped"):
            store.put(kv, ids[: 6 * CHUNK], model=MODEL)


@pytest.mark.parametrize("windows", [(3 * CHUNK, 3 * CHUNK), (3 * CHUNK, 8)])
def test_a_ring_that_was_trimmed_stays_known_as_such_in_copies_and_files(
    windows: tuple[int, int], tmp_path: Path
) -> None:
    """The ring has filled again since, and its rows do not show that they saw less."""
    ids, file = list(range(9 * CHUNK)), tmp_path / "kv"
    layers = [um.LayerKV(4, 256, window=n, dtype="f32") for n in windows]
    with (
        opened(tmp_path / "s") as store,
        um.KVCache(layers=layers, max_seq_len=128, spare_rows=16) as kv,
    ):
        fill(kv, ids[: 6 * CHUNK])
        kv.save(file)
        with um.KVCache.restore(file, mode="copy") as whole:
            assert store.put(whole, ids[: 6 * CHUNK], model=MODEL) == 6 * CHUNK
        assert kv.trim_to(5)
        fill(kv, ids)
        kv.save(file)
        kv.clear()
        read_into(kv, file)
        for each in (
            kv,
            kv.copy(),
            um.KVCache.restore(file),
            um.KVCache.restore(file, mode="copy"),
        ):
            assert each.seq_len == max(windows)
            with each, pytest.raises(ValueError, match=r"in which \d+ were dropped"):
                store.put(each, ids, model=MODEL)


@pytest.mark.parametrize("other", [None, 64])
def test_a_file_of_trimmed_rings_keeps_what_wider_layers_hold(
    other: int | None, tmp_path: Path
) -> None:
    layers = [um.LayerKV(1, 64, window=16), um.LayerKV(1, 64, window=other)]
    with um.KVCache(layers=layers, max_seq_len=256) as kv:
        fill(kv, list(range(50)))
        kv.trim_to(40)
        fill(kv, list(range(100)))
        kv.save(tmp_path / "kv")
        with um.KVCache.restore(tmp_path / "kv") as made, kv.copy() as copied:
            assert made.seq_len == copied.seq_len == kv.seq_len == (64 if other else 90)
            for each in (made, copied):
                with pytest.raises(ValueError, match="cannot be dropped"):
                    each.crop(each.seq_len - 6)  # the window of the small ring was overwritten


def test_a_hit_never_ends_without_its_window(tmp_path: Path) -> None:
    """45 tokens end 5 after a chunk: with few spare rows, the window before that is gone."""
    ids = list(range(45))
    with opened(tmp_path / "s") as store, made(spare_rows=CHUNK - 5) as kv:
        assert (kv.n_rows[0], kv.n_rows[2]) == (23, 8)
        fill(kv, ids, step=1)
        assert store.put(kv, ids, model=MODEL) == 0
        assert store.stat().put_chunks > 0  # chunks of the other layers
        kv.clear()
        assert store.restore_into(kv, ids, model=MODEL) == 0
        assert kv.is_empty
        fill(kv, ids[:40], step=1)
        assert store.put(kv, ids[:40], model=MODEL) == 0  # the window begins inside of a chunk
        kv.clear()
        for end in range(CHUNK, 41, CHUNK):  # put after each chunk
            fill(kv, ids[:end], step=1)
            assert store.put(kv, ids, model=MODEL) == end
        kv.clear()
        assert store.restore_into(kv, ids, model=MODEL) == 40
        check(kv, ids, 40)


def test_two_spare_chunks_of_rows_suffice(tmp_path: Path) -> None:
    for n in range(3 * CHUNK + 2, 5 * CHUNK, 2):
        ids = [n, *range(n - 1)]
        with opened(tmp_path / "s") as store, made(spare_rows=2 * CHUNK) as kv:
            fill(kv, ids)
            assert store.put(kv, ids, model=MODEL) == n // CHUNK * CHUNK


def test_a_hit_ends_at_the_last_whole_window(tmp_path: Path) -> None:
    first = list(range(64))
    second = first[:50] + [99] * 14
    with opened(tmp_path / "s") as store, made() as kv:
        fill(kv, first[:26])
        assert store.put(kv, first, model=MODEL) == 24
        fill(kv, first)
        assert store.put(kv, first, model=MODEL) == 64
        # 48 tokens are the same, but the windows before them were overwritten when it was put.
        assert store.longest(second, model=MODEL, kv=kv) == 24
        kv.clear()
        assert store.restore_into(kv, second, model=MODEL) == 24
        check(kv, second, 24)


def name_of(ids: Sequence[int], number: int, window: int | None) -> str:
    """Return the name of a chunk's file."""
    wide = LayerRows(4, 256, "f32", "f32", 20)
    full, narrow = LayerRows(2, 32, "f32", "f32"), wide._replace(window=5)
    kind = MixedLayers((wide, full, narrow, wide._replace(share_of=0)))
    key = list(chunk_keys(kind, MODEL, np.array(ids, np.int32), CHUNK))[number]
    return next(group.key(key) for group in kind.groups if group.window == window).hex() + ".kv"


@pytest.mark.parametrize(
    ("number", "window", "left"),
    [(7, None, 56), (5, None, 40), (0, None, 0), (6, 20, 48), (7, 5, 56), (5, 20, 40), (4, 20, 64)],
)
def test_a_damaged_chunk_ends_a_hit_before_it(
    tmp_path: Path, number: int, window: int | None, left: int
) -> None:
    ids = list(range(64))
    with opened(tmp_path / "s") as store, made() as kv:
        for end in range(CHUNK, 65, CHUNK):
            fill(kv, ids[:end])
            store.put(kv, ids, model=MODEL)
        path = tmp_path / "s" / name_of(ids, number, window)
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
        kv.clear()
        if left == 64:  # a window that is no longer needed is not read
            assert store.restore_into(kv, ids, model=MODEL) == 64
        else:
            with pytest.warns(um.PlacementWarning, match="was removed"):
                found = store.restore_into(kv, ids, model=MODEL)
            assert found == left
            assert store.longest(ids, model=MODEL, kv=kv) == left
        check(kv, ids, left)


def test_layers_with_windows_need_no_first_chunks(tmp_path: Path) -> None:
    layers, ids = [WIDE, NARROW], [i % 50 for i in range(200)]
    with opened(tmp_path / "s") as store, made(layers, max_seq_len=64) as kv:
        fill(kv, ids)
        assert store.put(kv, ids, model=MODEL) == 200
        assert 3 <= store.stat().put_chunks <= 12
        kv.clear()
        assert store.restore_into(kv, ids, model=MODEL) == 200
        check(kv, ids, 200)
        fill(kv, [*ids, 7])
        check(kv, [*ids, 7], 201)
        assert store.put(kv, ids, model=MODEL) == 200
        kv.trim_to(10)
        with pytest.raises(ValueError, match="were dropped"):
            store.put(kv, ids, model=MODEL)


def test_what_is_refused(tmp_path: Path) -> None:
    ids = list(range(60))
    with opened(tmp_path / "s") as store, made() as kv:
        fill(kv, ids)
        kv.append(0, *np.zeros((2, 1, 4, 256), "f4"))
        with pytest.raises(RuntimeError, match="layers differ in length"):
            store.put(kv, ids, model=MODEL)
        kv.rollback()
        with pytest.raises(ValueError, match="expected a cleared cache"):
            store.restore_into(kv, ids, model=MODEL)
        kv.trim_to(30)
        with pytest.raises(ValueError, match="were dropped"):
            store.put(kv, ids, model=MODEL)
        assert kv.seq_len == 30
    with (
        made(batch=2) as kv,
        opened(tmp_path / "s") as store,
        pytest.raises(ValueError, match="one stream"),
    ):
        store.put(kv, ids, model=MODEL)


def test_other_heads_of_v_have_chunks_of_their_own(tmp_path: Path) -> None:
    ids = list(range(2 * CHUNK))
    with opened(tmp_path / "s") as store, made(OTHER_V) as kv, made() as alike:
        fill(kv, ids)
        assert store.put(kv, ids, model=MODEL) == len(ids)
        assert store.restore_into(alike, ids, model=MODEL) == 0
        assert alike.is_empty


def test_a_cache_with_states_is_refused(tmp_path: Path) -> None:
    said = "got a state in layer 1: save"
    layers: list[Any] = [FULL, um.LayerState((4, 8))]
    with opened(tmp_path / "s") as store, made(layers, spare_rows=0) as kv:
        with pytest.raises(ValueError, match=said):
            store.put(kv, range(CHUNK), model=MODEL)
        with pytest.raises(ValueError, match=said):
            store.restore_into(kv, range(CHUNK), model=MODEL)


def test_rotated_heads_have_chunks_of_their_own(tmp_path: Path) -> None:
    layers, ids = [um.LayerKV(2, 64), um.LayerKV(2, 64, window=20)], list(range(2 * CHUNK))
    with opened(tmp_path / "s") as store, made(layers) as plain, made(layers, rotate=True) as kv:
        fill(kv, ids)
        assert store.put(kv, ids, model=MODEL) == len(ids)
        assert store.restore_into(plain, ids, model=MODEL) == 0
        before = [part.copy() for layer in range(2) for part in kv.layer(layer)]
        kv.clear()
        assert store.restore_into(kv, ids, model=MODEL) == len(ids)
        after = [part for layer in range(2) for part in kv.layer(layer)]
        assert all(map(same_bits, after, before))


def test_only_what_fits_is_restored(tmp_path: Path) -> None:
    ids = list(range(60))
    with opened(tmp_path / "s") as store, made() as kv, made(max_seq_len=30) as small:
        for end in (20, 30, 60):
            fill(kv, ids[:end])
            store.put(kv, ids, model=MODEL)
        assert store.restore_into(small, ids, model=MODEL) == 24
        check(small, ids, 24)


def test_random_conversations(tmp_path: Path) -> None:
    """Conversations share their beginnings, and chunks disappear: every row is checked."""
    random = np.random.default_rng(1)
    restored = 0
    with opened(tmp_path / "s") as store, made() as kv:
        for _ in range(examples(300)):
            ids = [0] * int(random.integers(0, 70)) + [int(random.integers(2))] * 50
            ids = ids[: int(random.integers(1, 100))]
            kv.clear()
            known = store.longest(ids, model=MODEL, kv=kv)
            n = store.restore_into(kv, ids, model=MODEL)
            assert n == known
            check(kv, ids, n)
            restored += n
            fill(kv, ids, step=int(random.integers(1, 17)))
            check(kv, ids, len(ids))
            assert store.put(kv, ids, model=MODEL) == len(ids) // CHUNK * CHUNK
            for path in (tmp_path / "s").glob("*.kv"):
                if random.random() < 0.05:
                    path.unlink()
    assert restored > 0
