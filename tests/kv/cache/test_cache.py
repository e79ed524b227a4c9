"""The KV cache holds what NumPy would hold, and a call that fails leaves it as it was.

What it shares with all caches is in the contract: tests/support/contracts/conformance.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.kv_model import NUMPY_DTYPES, Array, same_bits
from support.kernel import proc_maps
from unimem._core.status import ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")


@pytest.fixture
def kv() -> Iterator[um.KVCache]:
    with um.KVCache(2, 3, 4, 8) as kv:
        yield kv


def tokens(n: int, seed: int = 0, dtype: str = "float32") -> tuple[Array, Array]:
    """K and V of n tokens of the fixture's cache."""
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, n, 3, 4)).astype(dtype)
    return k, v


def held(kv: um.KVCache) -> list[bytes]:
    """All that can be seen of the contents."""
    return [part.tobytes() for layer in range(kv.n_layers) for part in kv.layer(layer)]


def state(kv: um.KVCache) -> tuple[Any, ...]:
    return kv.seq_len, kv.next_position, kv.is_empty, kv.memory_usage_bytes, held(kv)


# ---- appending ----


def test_the_storage_is_batch_seq_heads_dim() -> None:
    with um.KVCache(2, 3, 4, 8, batch=2, dtype="f32") as kv:
        k = np.random.default_rng(0).normal(size=(2, 3, 5, 4)).astype("float32")
        for layer in range(2):
            kv.append(layer, k, -k)
        whole, _ = kv.layer(0)
        assert same_bits(np.ascontiguousarray(whole), k)
        assert whole.strides == (8 * 12 * 4, 4 * 4, 12 * 4, 4)
        assert proc_maps.address_of(whole) == kv.address(0, "k")
        assert kv.row_bytes == 48
        _, values = kv.layer(1)
        assert proc_maps.address_of(values) == kv.address(1, "v")
        del whole, values


def test_the_rows_of_a_head_lie_side_by_side() -> None:
    """Heads and streams have lanes; what is given and shown is as in the other order."""
    k = np.random.default_rng(0).normal(size=(2, 3, 5, 4)).astype("float32")
    options: Any = {"batch": 2, "dtype": "f32"}
    with (
        um.KVCache(2, 3, 4, 8, order="head", **options) as kv,
        um.KVCache(2, 3, 4, 8, **options) as other,
    ):
        for cache, layer in itertools.product((kv, other), range(2)):
            cache.append(layer, k[:, :, :4], -k[:, :, :4])
            cache.append(layer, k[:, :, 4:], -k[:, :, 4:])
        lane = 8 * 4 * 4  # 8 rows of a head
        assert (kv.order, other.order) == ("head", "token")
        whole, values = kv.layer(1)
        assert whole.strides == (3 * lane, lane, 4 * 4, 4)
        assert same_bits(np.ascontiguousarray(whole), k)
        assert proc_maps.address_of(values) == kv.address(1, "v") == kv.address(1, "k") + 6 * lane
        for name in ("batch", "n_kv_heads", "row_bytes", "memory_usage_bytes", "n_rows"):
            assert getattr(kv, name) == getattr(other, name), name
        assert kv.capacity_bytes == um.KVCache.storage_bytes(2, 3, 4, 8, order="head", **options)
        assert "batch 2, rows by head" in repr(kv)
        with kv.copy() as copy:
            assert copy.order == "head"
            assert state(copy) == state(kv) == state(other)
        del whole, values


def wrong_calls() -> dict[str, tuple[type[Exception], Callable[[um.KVCache], Any]]]:
    """Beside those of the contract."""
    k, v = tokens(2)
    one, _ = tokens(1)
    zeros = partial(np.zeros, dtype="f4")
    return {
        "shapes differ": (ValueError, lambda kv: kv.append(0, k, one)),
        "dimensions differ": (ValueError, lambda kv: kv.append(0, k, v[0])),
        "batch": (ValueError, lambda kv: kv.append(0, *[zeros((2, 3, 1, 4))] * 2)),
        "heads of four": (ValueError, lambda kv: kv.append(0, *[zeros((1, 2, 1, 4))] * 2)),
        "object": (TypeError, lambda kv: kv.append(0, k.astype(object), v.astype(object))),
        "all: shape": (ValueError, lambda kv: kv.append_all(k[:1], v[:1])),
        "all: shapes differ": (ValueError, lambda kv: kv.append_all(k, v[:, :2])),
        "all: dtype": (TypeError, lambda kv: kv.append_all(k.astype("i4"), v.astype("i4"))),
        "all: dtypes differ": (TypeError, lambda kv: kv.append_all(k, v.astype("f2"))),
        "all: lists": (TypeError, lambda kv: kv.append_all(k.tolist(), v.tolist())),
        "reserve nothing": (ValueError, lambda kv: kv.reserve(0)),
        "reserve less": (ValueError, lambda kv: kv.reserve(-1)),
        "reserve a half": (TypeError, lambda kv: kv.reserve(0.5)),
        "reserve too many": (um.CacheFull, lambda kv: kv.reserve(9)),
        "reserve far too many": (um.CacheFull, lambda kv: kv.reserve(2**63 - 1)),
        "reserve beyond": (ValueError, lambda kv: kv.reserve(2**70)),
        "commit nothing": (RuntimeError, lambda kv: kv.commit(1)),
        "commit less": (ValueError, lambda kv: kv.commit(-1)),
        "trim below": (ValueError, lambda kv: kv.trim_to(-1)),
        "trim to a half": (TypeError, lambda kv: kv.trim_to(0.5)),
        "keep less": (ValueError, lambda kv: kv.trim_to(1, keep_first=-1)),
        "limit below": (ValueError, lambda kv: kv.enforce_memory_limit(-1)),
        "limit of no type": (TypeError, lambda kv: kv.enforce_memory_limit(None)),
        "part": (ValueError, lambda kv: kv.address(0, "q")),
        "layer's address": (ValueError, lambda kv: kv.address(2, "k")),
        "out alone": (ValueError, lambda kv: kv.layer(0, out=(k, v))),
        "out's shape": (ValueError, lambda kv: kv.layer(0, "float32", out=(k, v))),
    }


@pytest.mark.parametrize(("error", "call"), wrong_calls().values(), ids=wrong_calls())
def test_a_call_that_fails_changes_nothing(
    kv: um.KVCache, error: type[Exception], call: Callable[[um.KVCache], Any]
) -> None:
    k, v = tokens(3, seed=7)
    for layer in range(2):
        kv.append(layer, k, v)
    before, capacity = state(kv), kv.capacity_bytes
    with pytest.raises(error):
        call(kv)
    assert state(kv) == before
    assert kv.capacity_bytes == capacity
    kv.append_all(k[:2], v[:2])  # nothing is reserved, nothing torn


# ---- making one ----


MOST = 2**32 - 1
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"n_layers": 0}, ValueError, "n_layers"),
    ({"n_kv_heads": -1}, ValueError, "n_kv_heads"),
    ({"head_dim": 2**32}, ValueError, "head_dim"),
    ({"max_seq_len": 0}, ValueError, "max_seq_len"),
    ({"max_seq_len": 1.5}, TypeError, "integer"),
    ({"batch": 0}, ValueError, "batch"),
    ({"order": "heads"}, ValueError, "order: expected one of token, head, got 'heads'"),
    ({"n_kv_heads": 1 << 16, "batch": 1 << 16, "order": "head"}, ValueError, "got 4294967296"),
    ({"n_layers": 2**31, "n_kv_heads": 2**31, "head_dim": 2**31}, ValueError, "KVCache|kv"),
    ({"n_layers": 2**31, "head_dim": 2**31, "batch": 2**31}, ValueError, "KVCache|kv"),
    ({"n_layers": 2**20, "n_kv_heads": 170592, "head_dim": 25781083}, ValueError, "KVCache|kv"),
    ({"max_seq_len": 2**31, "head_dim": 2**20}, MemoryError, "."),
    ({"grow": True, "n_layers": MOST, "n_kv_heads": MOST, "head_dim": MOST}, ValueError, "kv|KV"),
    ({"grow": True, "n_layers": 2**12, "head_dim": 2**12, "max_seq_len": 2**31}, ValueError, "m"),
    ({"grow": True, "n_layers": 64, "head_dim": 2**13, "max_seq_len": MOST}, ValueError, "max_seq"),
    *(({"dtype": "q8_0", "head_dim": n}, ValueError, "dtype|head_dim") for n in (4, 48)),
    ({"dtype": "int8"}, ValueError, "dtype"),
    *(({"window": n}, ValueError, "window") for n in (0, -1, 9)),
    ({"window": 1.5}, TypeError, "integer"),
    ({"window": 4, "grow": True}, ValueError, "grow"),
    ({"window": 4, "spare_rows": -1}, ValueError, "spare_rows"),
    ({"window": 2**31, "max_seq_len": MOST, "spare_rows": 2**52 - 1}, ValueError, "KVCache|kv"),
    ({"spare_rows": 1}, ValueError, "spare_rows"),
    ({"budget_bytes": -1}, ValueError, "budget_bytes"),
    ({"budget_bytes": 0.5}, TypeError, "integer"),
    *(({"budget_bytes": 31} | ring, um.CacheFull, "budget_bytes") for ring in ({}, {"window": 4})),
    ({"pages": "3k"}, ValueError, "pages"),
    *(
        (kind | {option: True}, TypeError, option)
        for option in ("shared", "reserve", "category", "page")
        for kind in ({}, {"grow": True}, {"window": 4})
    ),
]


@pytest.mark.parametrize(
    ("options", "error", "match"), REFUSED, ids=[str(options) for options, *_ in REFUSED]
)
def test_a_refused_cache_leaves_nothing(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    options = {"n_layers": 1, "n_kv_heads": 2, "head_dim": 4, "max_seq_len": 8} | options
    before = ledger()["history"]["mapped_bytes"]
    with pytest.raises(error, match=match):
        um.KVCache(**options)
    with um.Tape(1 << 16) as tape:
        with pytest.raises((error, um.TapeFull, ValueError)):
            um.KVCache(**options, tape=tape)
        assert tape.used_bytes == 0
    assert ledger()["history"]["mapped_bytes"] == before


@pytest.mark.parametrize("dtype", ["f16", "f32", "bf16"])
def test_storage_bytes_is_what_is_taken(dtype: Any) -> None:
    for dims in ((1, 1, 1, 1), (2, 3, 4, 8), (5, 2, 33, 7)):
        n_layers, heads, head_dim, seq = dims
        expected = um.KVCache.storage_bytes(*dims, batch=2, dtype=dtype)
        lane = -(-seq * heads * head_dim * NUMPY_DTYPES[dtype].itemsize // 64) * 64
        assert expected == n_layers * 2 * 2 * lane
        with um.Tape(expected) as tape:
            kv = um.KVCache(*dims, batch=2, dtype=dtype, tape=tape)
            assert tape.used_bytes == tape.total_bytes == kv.capacity_bytes == expected
            assert kv.memory_usage_bytes == 0
    for wrong in ((0, 1, 1, 1), (-1, 1, 1, 1), (1, 1, 1, 2**32)):
        with pytest.raises(ValueError, match="expected"):
            um.KVCache.storage_bytes(*wrong)


def test_for_dims() -> None:
    dims = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)
    with um.KVCache.for_dims(dims, max_seq_len=16, dtype="f32") as kv:
        assert (kv.n_layers, kv.n_kv_heads, kv.head_dim, kv.max_seq_len) == (5, 4, 8, 16)
        assert (kv.dtype, kv.batch) == ("f32", 1)
    with um.KVCache.for_dims(dims) as kv:
        assert kv.max_seq_len == 512


def test_residency() -> None:
    with um.KVCache(2, 8, 64, 256, pages="4k") as kv:
        assert kv.capacity_bytes >= 2 * 2 * 8 * 64 * 256 * 2
        assert kv.block is not None
        assert kv.resident_bytes == kv.block.verify().resident_bytes == 0
        kv.append(0, *[np.ones((16, 8, 64), "float16")] * 2)
        assert kv.resident_bytes == kv.block.verify().resident_bytes == 2 * 16 * 1024
        kv.warm(2)
        assert kv.resident_bytes == kv.capacity_bytes == kv.block.nbytes


# ---- lifetime ----


@pytest.mark.parametrize("options", [{}, {"grow": True}, {"window": 4}])
def test_the_block_under_a_cache_is_the_caches(options: dict[str, Any]) -> None:
    with um.KVCache(2, 3, 4, 8, **options) as kv:
        for layer in range(2):
            kv.append(layer, *tokens(3))
        before = state(kv)
        assert kv.block is not None
        for use in (kv.block.close, kv.block.release):
            with pytest.raises(BufferError):
                use()
        assert state(kv) == before
        assert kv.granted == kv.block.granted


def test_a_closed_cache_says_so() -> None:
    """Beside the uses of the contract."""
    kv = um.KVCache(2, 3, 4, 8)
    kv.close()
    calls = {"row_of": 0, "reserve": 1, "commit": 1, "trim_to": 1, "enforce_memory_limit": 1}
    uses: list[Callable[[], Any]] = [
        *(partial(getattr(kv, name), n) for name, n in calls.items()),
        *(partial(kv.append_all, *tokens(2)), kv.copy, kv.warm, kv.rollback),
        *(partial(getattr, kv, name) for name in "next_position memory_usage_bytes".split()),
        lambda: kv.resident_bytes,
    ]
    for use in uses:
        with pytest.raises(um.ClosedError, match=r"KVCache .*is closed"):
            use()
    assert repr(kv) == "KVCache(closed)"


def test_a_cache_on_a_tape_of_somebody_else() -> None:
    with um.Tape(1 << 16) as tape:
        for options in ({"pages": "4k"}, {"window": 4}, {"grow": True}):
            with pytest.raises(ValueError, match="tape"):
                um.KVCache(2, 3, 4, 8, tape=tape, **options)
        with pytest.raises(um.TapeFull):
            um.KVCache(2, 3, 4, 10_000, tape=tape)
        assert tape.used_bytes == 0
        kv = um.KVCache(2, 3, 4, 8, tape=tape)
        assert kv.tape is tape
        assert tape.owns(kv.address(1, "v"))
    assert kv.closed
    with pytest.raises(um.ClosedError):
        kv.append(0, *tokens(1))


def test_repr(kv: um.KVCache) -> None:
    kv.append_all(*[np.zeros((2, 3, 4), "f2")] * 2)
    assert repr(kv) == "KVCache(1 of 8 tokens, 2 layers, 3 heads of 4 f16, 768 B)"
