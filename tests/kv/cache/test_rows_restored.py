"""What a cache says that it still has, whatever way its tokens came.

A window is shown whole, or the call that would show less of it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_model import as_float32
from unimem.kv import snapshot

pytestmark = pytest.mark.usefixtures("gives_memory_back")

# Rows of a page each: a ring has no more of them than its window and spare rows.
HEADS, DIM, WINDOW, N = 4, 512, 16, 40
IDS = list(range(N))
LAYERS = [um.LayerKV(HEADS, DIM, window=WINDOW), um.LayerKV(HEADS, DIM, window=5)]
STATE = um.LayerState((3,))
FULL = um.LayerKV(HEADS, DIM)
KINDS: dict[str, dict[str, Any]] = {
    "ring": {"n_layers": 2, "n_kv_heads": HEADS, "head_dim": DIM, "window": WINDOW},
    "layers of one window": {"layers": LAYERS[:1]},
    "layers of two windows": {"layers": LAYERS},
    "windows and a full layer": {"layers": [*LAYERS, FULL]},
    "windows and states": {"layers": [LAYERS[0], STATE], "checkpoints": 8},
}


def made(kind: str, **options: Any) -> Any:
    given: dict[str, Any] = {"max_seq_len": 100, "pages": "4k", "spare_rows": 8}
    return um.KVCache(**given | KINDS[kind] | options)


def append(kv: Any, n: int) -> None:
    """Append tokens whose values say their position, with a checkpoint behind each."""
    for _ in range(n):
        rows = np.full((1, HEADS, DIM), kv.next_position, "f4")
        for layer, spec in enumerate(kv.layers):
            if isinstance(spec, um.LayerKV):
                kv.append(layer, rows, rows)
        if STATE in kv.layers:
            kv.checkpoint()


def positions(kv: Any, layer: int) -> list[int]:
    return [int(x) for x in as_float32(kv.layer(layer)[0])[0, 0, :, 0]]


def windows_are_whole(kv: Any, begin: int = 0) -> bool:
    """Whether each layer shows all tokens of its window, from the beginning on."""
    end = kv.next_position
    return all(
        positions(kv, layer) == list(range(max(begin, end - (spec.window or end)), end))
        for layer, spec in enumerate(kv.layers)
        if isinstance(spec, um.LayerKV)
    )


def by_copy(kv: Any, path: Path) -> Any:
    return kv.copy()


def by_map(kv: Any, path: Path) -> Any:
    kv.save(path)
    return um.KVCache.restore(path)


def by_read(kv: Any, path: Path) -> Any:
    kv.save(path)
    return um.KVCache.restore(path, mode="copy")


def by_read_into(kv: Any, path: Path) -> Any:
    kv.save(path)
    like = {"layers": kv.layers} if isinstance(kv.window, tuple) else {"window": kv.window}
    if STATE in kv.layers:
        like["checkpoints"] = 8
    dims = () if "layers" in like else (2, HEADS, DIM)
    other: Any = um.KVCache(*dims, max_seq_len=100, pages="4k", spare_rows=8, **like)
    snapshot.read_into(other, path)
    return other


def by_store(kv: Any, path: Path) -> Any:
    other = kv.copy()
    with um.KVStore(path, ram_bytes=0, disk_bytes=1 << 26, chunk_tokens=8) as store:
        assert store.put(kv, IDS, model="tiny") == N
        other.clear()
        assert store.restore_into(other, IDS, model="tiny") == N
    return other


WAYS: dict[str, Callable[[Any, Path], Any]] = {
    **{"copy": by_copy, "map": by_map, "read": by_read, "read_into": by_read_into},
    "store": by_store,
}


# A store takes no ring that has dropped tokens, and no states.
CASES = [
    (kind, way)
    for kind in KINDS
    for way in WAYS
    if way != "store" or kind not in ("ring", "windows and states")
]


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_a_window_that_did_not_come_is_not_shown_short(tmp_path: Path, kind: str, way: str) -> None:
    with made(kind) as kv:
        append(kv, N)
        with WAYS[way](kv, tmp_path / "kept") as other:
            assert windows_are_whole(other)
            said = f"expected n of at least {other.seq_len}"
            if STATE in other.layers:
                assert other.checkpoints == (N,)
                said = "n of 16 goes back|" + said
            for n in (0, 1, other.seq_len - 5, other.seq_len - 1):
                with pytest.raises(ValueError, match=said):
                    other.crop(n)
                assert windows_are_whole(other)
            for layer, spec in enumerate(other.layers):
                if isinstance(spec, um.LayerKV) and spec.window:
                    other.row_of(N - spec.window, layer)
                    with pytest.raises(ValueError, match=f"from {N - spec.window} on, before"):
                        other.row_of(N - spec.window - 1, layer)
            # Later tokens can be dropped again, and no more than these.
            append(other, 3)
            other.crop(other.seq_len - 3)
            assert other.next_position == N
            assert windows_are_whole(other)
            append(other, 50)
            other.crop(other.seq_len - 4)
            assert windows_are_whole(other)


@pytest.mark.parametrize("way", ["copy", "map", "read", "read_into"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_were_trimmed_stay_dropped(tmp_path: Path, kind: str, way: str) -> None:
    """What was dropped on purpose leaves a short window, before and after."""
    with made(kind) as kv:
        append(kv, N)
        kv.trim_to(4)
        with WAYS[way](kv, tmp_path / "kept") as other:
            for one in (kv, other):
                assert windows_are_whole(one, N - 4)
                if STATE not in one.layers:
                    one.crop(3)
                    assert positions(one, 0) == [N - 4, N - 3, N - 2]


def test_a_copy_of_a_trimmed_ring_that_is_full_again_goes_back_as_far() -> None:
    for kind in ("ring", "layers of one window"):
        with made(kind) as kv:
            append(kv, N)
            kv.trim_to(4)
            append(kv, WINDOW - 4)
            with kv.copy() as copy:
                for one in (kv, copy):
                    one.crop(6)
                    assert positions(one, 0) == list(range(N - 4, N + 2))
