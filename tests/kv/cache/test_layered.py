"""A cache of layers that differ: what each keeps, what it costs, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_caches import each_call_fails
from support.contracts.kv_model import as_float32
from unimem._core.status import ledger
from unimem.kv import snapshot
from unimem.kv.cache.layered import LayeredKVCache
from unimem.kv.cache.one_kind import OneKindCache

pytestmark = pytest.mark.usefixtures("gives_memory_back")

FULL, SLIDING = um.LayerKV(2, 64), um.LayerKV(4, 64, window=16)
# Rows of a page each: a ring has no more of them than its window.
WIDE = um.LayerKV(4, 512, window=4)


def made(*layers: um.LayerKV, most: int = 64, **options: Any) -> Any:
    return um.KVCache(layers=layers, max_seq_len=most, **{"pages": "4k"} | options)


def fill(kv: Any, n: int, layers: Any = None) -> None:
    """Tokens whose values say their layer and position."""
    for i in range(kv.n_layers) if layers is None else layers:
        spec = kv.layers[i]
        if spec.share_of is None:
            shown = kv.layer(i)[0].shape[2]
            first = kv.next_position + shown * (layers is not None and shown < 0)
            at = np.arange(first, first + n, dtype="f4")[:, None, None]
            rows = np.broadcast_to(at + 1000 * i, (n, spec.n_kv_heads, spec.head_dim))
            kv.append(i, rows, -rows)


def positions(kv: Any, layer: int) -> list[int]:
    """The positions of the tokens that a layer shows."""
    k, v = (as_float32(part)[0, 0, :, 0] for part in kv.layer(layer))
    assert (k == -v).all()
    source = kv.layers[layer].share_of
    return [int(x) - 1000 * (layer if source is None else source) for x in k]


# ---- what each layer keeps ----


def test_each_layer_keeps_its_own() -> None:
    with made(SLIDING, FULL, um.LayerKV(4, 64, share_of=0), dtype="f32") as kv:
        assert um.KVCache in type(kv).__mro__
        fill(kv, 40)
        assert (kv.seq_len, kv.next_position, kv.is_empty, kv.batch) == (40, 40, False, 1)
        for layer, kept in ((0, range(24, 40)), (1, range(40)), (2, range(24, 40))):
            assert positions(kv, layer) == list(kept)
        assert kv.n_kv_heads == (4, 2, 4)
        assert kv.window == (16, None, 16)
        assert kv.row_bytes == (1024, 512, 1024)
        assert kv.address(2, "v") == kv.address(0, "v")
        assert [kv.row_of(39, i) for i in range(3)] == [39 % kv.n_rows[0], 39, 39 % kv.n_rows[0]]
        assert kv.memory_usage_bytes == 2 * (16 * 1024 + 40 * 512)
        assert "3 layers: 1 of 2 heads of 64 f32, 1 of 4 heads of 64 f32 with a window" in repr(kv)


def test_a_window_of_all_tokens_is_none() -> None:
    with made(um.LayerKV(2, 64, window=64), FULL) as kv:
        assert kv.window == (None, None)
        assert len(kv._body._parts) == 1


def test_layers_that_are_alike_are_named_the_same_way() -> None:
    with um.KVCache(3, 2, 64, 64, window=16, dtype="q8_0") as kv:
        layers = kv.layers
    assert layers == 3 * (um.LayerKV(2, 64, window=16, dtype="q8_0"),)
    with made(*layers) as kv:
        assert kv.layers == layers


def test_both_bodies_have_all_that_is_public() -> None:
    of_the_face = {*"append for_dims is_empty restore save storage_bytes verify".split()}
    shown = {name for name in vars(um.KVCache) if not name.startswith("_")} - of_the_face
    for body in (OneKindCache, LayeredKVCache):
        assert shown <= set(dir(body)), body


# ---- what is refused ----

MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no layers": (made, ValueError, "at least one that has rows of its own"),
    "no LayerKV": (
        lambda: um.KVCache(layers=[FULL, 3], max_seq_len=8),  # type: ignore[list-item]
        TypeError,
        r"layers\[1\]: expected a LayerKV or LayerState, got 3",
    ),
    "no sequence": (
        lambda: um.KVCache(layers=FULL, max_seq_len=8),  # type: ignore[call-overload]
        TypeError,
        "layers: expected a sequence of LayerKV or LayerState",
    ),
    "spare rows of none": (lambda: made(FULL, spare_rows=8), ValueError, "with a window"),
    "blocks that do not fit": (
        lambda: made(um.LayerKV(2, 40, dtype="q8_0")),
        ValueError,
        "head_dim: expected a multiple of 32",
    ),
    "sharing itself": (
        lambda: made(FULL, um.LayerKV(2, 64, share_of=1)),
        ValueError,
        r"layers\[1\].share_of: expected the number of another layer",
    ),
    "sharing nobody": (lambda: made(FULL, um.LayerKV(2, 64, share_of=2)), ValueError, "another"),
    "sharing a sharer": (
        lambda: made(FULL, um.LayerKV(2, 64, share_of=0), um.LayerKV(2, 64, share_of=1)),
        ValueError,
        "with rows of its own, got 1",
    ),
    "sharing what differs": (
        lambda: made(FULL, um.LayerKV(4, 64, share_of=0)),
        ValueError,
        r"layers\[1\]: expected what layer 0 is",
    ),
    "no heads": (lambda: um.LayerKV(0, 64), ValueError, "n_kv_heads: expected an integer from 1"),
    "no window": (lambda: um.LayerKV(2, 64, window=0), ValueError, "window: expected"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    call, error, said = MISTAKES[name]
    with pytest.raises(error, match=said):
        call()


def test_nothing_is_appended_to_a_layer_that_shares() -> None:
    with made(FULL, um.LayerKV(2, 64, share_of=0)) as kv:
        rows = np.zeros((1, 2, 64), "f4")
        with pytest.raises(ValueError, match="layer 1 shows the rows of layer 0: append to that"):
            kv.append(1, rows, rows)
        kv.append(0, rows, rows)
        assert kv.seq_len == 1


def test_one_token_of_all_layers() -> None:
    shapes = [(4, 64), (2, 64)]
    with made(SLIDING, FULL, um.LayerKV(2, 64, share_of=1), dtype="f32") as kv:
        k, v = ([np.full(shape, x, "f4") for shape in shapes] for x in (7, -7))
        kv.append_all(k, v)
        for wrong, said in (
            ((k[:1], v), "k: expected an array of each of the 2 layers that have rows"),
            ((k, [v[0], v[1][:1]]), "layer 1: expected k and v of shape"),
            ((k, 3.0), "v: expected"),
        ):
            with pytest.raises((ValueError, TypeError), match=said):
                kv.append_all(*wrong)
        assert (kv.seq_len, positions(kv, 0), kv.layer(1)[1][0, 1, 0, 63]) == (1, [7], -7)
    with made(um.LayerKV(2, 64, window=16), FULL) as kv:
        kv.append_all(np.ones((2, 2, 64), "f2"), np.ones((2, 2, 64), "f2"))
        assert kv.seq_len == 1


# ---- going back, and forgetting ----


def test_crop_says_how_far_back_it_can_go() -> None:
    with made(WIDE, FULL, spare_rows=3) as kv:
        fill(kv, 20)
        assert kv.n_rows[0] == 7
        with pytest.raises(ValueError, match=r"expected n of at least 17, got 16; spare_rows="):
            kv.crop(16)
        assert (kv.seq_len, positions(kv, 0)) == (20, [16, 17, 18, 19])
        kv.crop(17)
        assert (kv.seq_len, positions(kv, 0)) == (17, [13, 14, 15, 16])
        with pytest.raises(ValueError, match="at most 17, the tokens that are there, got 18"):
            kv.crop(18)


def test_a_full_layer_refuses_for_all() -> None:
    """The windows of a full cache forget nothing for a token that others have no room for."""
    with made(WIDE, FULL, most=20) as kv:
        fill(kv, 20)
        rows = np.zeros((1, 4, 512), "f4")
        with pytest.raises(um.CacheFull, match="20 of 20"):
            kv.append(0, rows, rows)
        assert positions(kv, 0) == [16, 17, 18, 19]
        kv.trim_to(19)
        fill(kv, 1)
        assert (kv.seq_len, positions(kv, 0)) == (20, [17, 18, 19, 20])


def test_a_rollback_shows_no_window_with_a_hole() -> None:
    for spare, kept in ((0, 3), (1, 20)):
        with made(WIDE, FULL, spare_rows=spare) as kv:
            fill(kv, 20)
            rows = np.zeros((1, 4, 512), "f4")
            kv.append(0, rows, rows)
            assert kv.seq_len == kept
            kv.rollback()
            assert (kv.seq_len, kv.next_position) == (kept, 20)
            assert positions(kv, 0) == list(range(20 - min(kept, 4), 20))
            assert positions(kv, 1) == list(range(20 - kept, 20))


def test_first_tokens_are_kept_where_no_window_needs_them() -> None:
    with made(WIDE, FULL, dtype="f32") as kv:
        fill(kv, 20)
        with pytest.raises(ValueError, match="keep_first: expected 0, or n of at least 4"):
            kv.trim_to(3, keep_first=2)
        assert kv.trim_to(6, keep_first=2)
        assert (kv.seq_len, kv.next_position) == (8, 20)
        assert positions(kv, 1) == [0, 1, *range(14, 20)]
        assert positions(kv, 0) == [16, 17, 18, 19]
        assert not kv.trim_to(8)


# ---- memory ----

GEMMA3 = [um.LayerKV(4, 256, window=None if i % 6 == 5 else 1024) for i in range(26)]


def test_gemma3_of_32k_tokens() -> None:
    """Planned bytes are those of the formula, and less than a fifth of equal layers."""
    ctx, token = 32 * 1024, 2 * 4 * 256 * 2
    formula = sum(token * (layer.window or ctx) for layer in GEMMA3)
    planned = um.KVCache.storage_bytes(layers=GEMMA3, max_seq_len=ctx)
    before = ledger()["history"]["mapped_bytes"]
    with um.KVCache(layers=GEMMA3, max_seq_len=ctx) as kv:
        assert formula <= planned <= 1.02 * formula
        assert kv.capacity_bytes == planned
        assert um.report()["kv"].nbytes == planned
        assert ledger()["history"]["mapped_bytes"] > before
    assert planned < 0.2 * um.KVCache.storage_bytes(26, 4, 256, ctx)


@pytest.mark.parametrize("grow", [False, True])
def test_a_budget_is_for_all_layers(grow: bool) -> None:
    layers = (SLIDING, FULL, um.LayerKV(2, 32))
    needed = um.KVCache.storage_bytes(layers=layers, max_seq_len=4096, pages="4k")
    budget = needed // 2
    with made(*layers, most=4096, budget_bytes=budget, grow=grow) as kv:
        while True:
            try:
                fill(kv, 50)
            except um.CacheFull:
                break
            assert kv.capacity_bytes <= budget
        kv.rollback()
        # The window is whole: it did not go on alone.
        assert (budget - 300_000) // 800 <= kv.seq_len < 4096
        assert len(positions(kv, 0)) == 16
        assert kv.budget_bytes == budget
    for too_little in (1, 17_000):
        with pytest.raises(um.CacheFull, match=r"budget_bytes[= ]"):
            made(*layers, budget_bytes=too_little, grow=grow)


def test_making_it_may_fail() -> None:
    before = ledger()["history"]["mapped_bytes"]
    for _, outcome in each_call_fails(lambda: made(SLIDING, FULL, um.LayerKV(2, 32), grow=True)):
        if isinstance(outcome, Exception):
            assert ledger()["history"]["mapped_bytes"] == before
    outcome.close()


def test_memory_goes_back() -> None:
    with made(um.LayerKV(4, 512), WIDE, most=1000, grow=True) as kv:
        fill(kv, 500)
        n_tokens, capacity = 10, kv.capacity_bytes
        assert kv.enforce_memory_limit(n_tokens * 8192 + 4 * 8192)
        assert (kv.seq_len, positions(kv, 1)) == (n_tokens, [496, 497, 498, 499])
        assert kv.capacity_bytes < capacity / 2
        assert kv.give_back() == 0
        view = kv.layer(1)[0]
        with pytest.raises(BufferError, match="views"):
            kv.enforce_memory_limit(0)
        with pytest.raises(BufferError, match="1 live views"):
            kv.close()
        assert kv.seq_len == n_tokens
        del view


def test_a_frozen_layout_holds_it() -> None:
    with um.Layout(1 << 12, 1 << 12, 1 << 12, pages="4k") as layout, made(FULL, SLIDING) as kv:
        layout.attach(kv)
        layout.freeze()
        assert kv.resident_bytes == kv.capacity_bytes
        fill(kv, 30)
        layout.thaw()
        layout.clear_talk()
        assert kv.is_empty


# ---- snapshots ----


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with made(WIDE, FULL, um.LayerKV(2, 64, share_of=1), um.LayerKV(3, 32, dtype="q8_0")) as kv:
        fill(kv, 20)
        kv.save(tmp_path / "session", tokens=list(range(20)), model="tiny")
    return tmp_path / "session"


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_a_snapshot_has_all_layers(saved: Path, mode: Any) -> None:
    with um.KVCache.restore(saved, mode=mode, model="tiny", tokens=list(range(30))) as kv:
        assert isinstance(kv._body, LayeredKVCache)
        assert (kv.seq_len, kv.next_position, kv.max_seq_len) == (20, 20, 64)
        assert kv.layers[2] == um.LayerKV(2, 64, dtype="f16", share_of=1)
        assert positions(kv, 0) == [16, 17, 18, 19]
        assert positions(kv, 1) == positions(kv, 2) == list(range(20))
        # What was not saved cannot be shown again.
        with pytest.raises(ValueError, match="at least 20"):
            kv.crop(19)
        if mode == "map":
            kv.verify()
        fill(kv, 30)
        assert positions(kv, 0) == [46, 47, 48, 49]
    with pytest.raises(um.SnapshotError, match="expected a snapshot of model 'other'"):
        um.KVCache.restore(saved, model="other")


def test_a_snapshot_describes_its_layers(saved: Path) -> None:
    for described in (snapshot.describe(saved), snapshot.check(saved)):
        assert isinstance(described, snapshot.LayersSnapshot)
        assert (described.n_layers, described.seq_len, described.next_position) == (4, 20, 20)
        assert (described.model, described.batch, described.order) == ("tiny", 1, "token")
        assert described.tokens is not None
        assert described.tokens.tolist() == list(range(20))
        assert described.file_bytes == saved.stat().st_size
        assert str(described).startswith("4 layers, 20 tokens, ")


def test_a_snapshot_is_read_into_a_cache_of_the_same_layers(saved: Path) -> None:
    described: Any = snapshot.describe(saved)
    wide, full, shared, q8 = described.layers
    with made(wide, full, shared, q8, most=200, grow=True, spare_rows=9) as kv:
        snapshot.read_into(kv, saved, model="tiny")
        assert (kv.seq_len, positions(kv, 0)) == (20, [16, 17, 18, 19])
        with pytest.raises(ValueError, match="at least 20"):
            kv.crop(19)
    with made(wide, full, most=200) as kv, pytest.raises(um.SnapshotError, match="layers="):
        snapshot.read_into(kv, saved)
    said = "20 tokens, and the cache has room for 10"
    with made(wide, full, shared, q8, most=10) as kv, pytest.raises(um.CacheFull, match=said):
        snapshot.read_into(kv, saved)
    with um.KVCache(4, 2, 64, 64) as equal:
        with pytest.raises(um.SnapshotError, match="of layers that differ, and this one is of"):
            snapshot.read_into(equal, saved)
        equal.save(saved)
    with made(full) as kv, pytest.raises(um.SnapshotError, match="layers that are alike, and"):
        snapshot.read_into(kv, saved)


def test_every_byte_of_a_snapshot_counts(saved: Path) -> None:
    whole = saved.read_bytes()
    described: Any = snapshot.describe(saved)
    begins = [part.base for part in described.parts]
    for at in (0, 9, 13, 20, 24, 40, 60, 90, begins[0] - 1, begins[1] + 3, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        saved.write_bytes(damaged)
        with pytest.raises(um.SnapshotError):
            snapshot.check(saved)
        with pytest.raises(um.SnapshotError):
            um.KVCache.restore(saved, mode="copy")
    for n in (0, 7, 30, 100, begins[0], begins[1] + 5, len(whole) - 1):
        saved.write_bytes(whole[:n])
        with pytest.raises(um.SnapshotError):
            um.KVCache.restore(saved)
    saved.write_bytes(whole + b"x")
    with pytest.raises(um.SnapshotError, match="longer"):
        um.KVCache.restore(saved)


@pytest.mark.parametrize("call", ["append_all", "trim_to", "copy", "save"])
def test_what_touches_lost_rows_changes_nothing(call: str, tmp_path: Path) -> None:
    """Of two mapped parts the second one's file is gone."""
    path, n = tmp_path / "session", 60
    with made(um.LayerKV(2, 128), um.LayerKV(2, 64), WIDE, most=n * 2, dtype="f32") as kv:
        fill(kv, n)
        kv.save(path)
    described: Any = snapshot.describe(path)
    restored: Any = um.KVCache.restore(path)
    with restored as kv:
        calls: dict[str, Callable[[], Any]] = {
            "append_all": lambda: kv.append_all(
                *(2 * [[np.ones((2, 128), "f4"), np.ones((2, 64), "f4"), np.ones((4, 512), "f4")]])
            ),
            "trim_to": lambda: kv.trim_to(20, keep_first=3),
            "copy": kv.copy,
            "save": lambda: kv.save(tmp_path / "other"),
        }
        os.truncate(path, described.parts[1].base + 4096)
        with pytest.raises(OSError, match=str(path)):
            calls[call]()
        with pytest.raises(um.SnapshotError, match="truncated"):
            kv.verify()
        assert (kv.seq_len, kv.next_position) == (n, n)
        assert positions(kv, 0) == list(range(n))
        assert positions(kv, 2) == list(range(n - 4, n))
        assert not (tmp_path / "other").exists()
