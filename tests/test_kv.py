"""The KV cache holds what NumPy would hold, and a call that fails leaves it as it was."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

import proc_maps
import unimem as um
from unimem._core.status import counters, ledger

pytestmark = pytest.mark.usefixtures("gives_memory_back")

Array = NDArray[Any]
PARTS: tuple[tuple[Literal["k", "v"], int], ...] = (("k", 1), ("v", -1))


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


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- conversion ----


def f32_of_bits(bits: Array) -> Array:
    return bits.astype(np.uint32).view(np.float32)


@pytest.fixture(params=[15, 64])
def dim(request: pytest.FixtureRequest) -> int:
    """Elements that are converted at once: too few for the widest instructions, and enough."""
    return int(request.param)


def through_the_cache(values: Array, dtype: str, dim: int) -> Array:
    """What a cache of this dtype makes of values, `dim` at once."""
    n = -(-values.size // dim)
    rows = np.zeros(n * dim, values.dtype)
    rows[: values.size] = values
    with um.KVCache(1, 1, dim, max_seq_len=n, dtype=dtype) as kv:
        kv.append(0, *[rows.reshape(1, 1, n, dim)] * 2)
        k, v = kv.layer(0)
        assert k.tobytes() == v.tobytes()
        return np.ascontiguousarray(k).reshape(-1)[: values.size]


def numpy_f16(values: Array) -> Array:
    with np.errstate(all="ignore"):
        return values.astype(np.float16)


def assert_same_floats(ours: Array, theirs: Array) -> None:
    assert ours.size == theirs.size
    nan = np.isnan(theirs)
    assert (np.isnan(ours) == nan).all()
    assert same_bits(ours[~nan], theirs[~nan])  # signed zeros as well


def test_every_float16_comes_back(dim: int) -> None:
    every = np.arange(65536, dtype=np.uint16).view(np.float16)
    assert through_the_cache(every, "f16", dim).tobytes() == every.tobytes()  # NaNs bit by bit
    wide = through_the_cache(every, "f32", dim)
    assert_same_floats(wide, every.astype(np.float32))
    assert_same_floats(through_the_cache(wide, "f16", dim), every)


def test_float32_is_rounded_as_numpy_rounds(dim: int) -> None:
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    # Midway between neighbours, where the even one wins, and one step to either side of it.
    middle = ((finite[:-1].astype(np.float64) + finite[1:]) / 2).astype(np.float32)
    bits = middle.view(np.uint32).astype(np.int64)
    cases = np.concatenate([f32_of_bits(bits + step) for step in (-1, 0, 1)])
    cases = np.concatenate([cases, -cases])
    assert_same_floats(through_the_cache(cases, "f16", dim), numpy_f16(cases))


def test_any_bits_of_float32_convert_as_in_numpy(dim: int) -> None:
    rng = np.random.default_rng(1)
    random = rng.integers(0, 2**32, 400_000, dtype=np.uint64)
    edges = [0, 1, 0x007FFFFF, 0x00800000, 0x32FFFFFF, 0x33000000, 0x33000001, 0x387FFFFF]
    edges += [0x38800000, 0x477FEFFF, 0x477FF000, 0x477FFFFF, 0x47800000, 0x7F7FFFFF]
    edges += [0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    special = np.array(edges * 16, dtype=np.uint64)
    bits = np.concatenate([special, special | 0x80000000, random])
    values = f32_of_bits(bits)
    assert_same_floats(through_the_cache(values, "f16", dim), numpy_f16(values))


def test_numbers_survive_in_f32() -> None:
    bits = np.random.default_rng(2).integers(0, 2**32, 3700, dtype=np.uint64)
    values = f32_of_bits(bits)
    assert through_the_cache(values, "f32", 37).tobytes() == values.tobytes()


# ---- appending ----


@pytest.mark.parametrize("dtype", ["f16", "f32", "float16", "float32", np.float16, np.dtype("f4")])
@pytest.mark.parametrize("given", ["float16", "float32"])
@pytest.mark.parametrize("n", [0, 1, 2, 8])
def test_both_shapes_hold_the_same(dtype: Any, given: str, n: int) -> None:
    k, v = tokens(n, dtype=given)
    with um.KVCache(2, 3, 4, 8, dtype=dtype) as kv:
        kv.append(0, k, v)
        kv.append(1, k.transpose(1, 0, 2)[None], v.transpose(1, 0, 2)[None])
        stored = kv.layer(0)[0].dtype
        assert stored == (np.float32 if kv.dtype == "f32" else np.float16)
        for layer in range(2):
            for part, expected in zip(kv.layer(layer), (k, v), strict=True):
                assert part.shape == (1, 3, n, 4)
                assert same_bits(part[0].transpose(1, 0, 2), expected.astype(stored))
        assert kv.seq_len == kv.next_position == len(kv) == n
        assert kv.is_empty == (n == 0)
        assert kv.memory_usage_bytes == 2 * 2 * n * 12 * stored.itemsize
        del part


def test_the_storage_is_batch_seq_heads_dim() -> None:
    with um.KVCache(2, 3, 4, 8, batch=2, dtype="f32") as kv:
        k = np.random.default_rng(0).normal(size=(2, 3, 5, 4)).astype("float32")
        kv.append(0, k, -k)
        kv.append(1, k, -k)
        whole, _ = kv.layer(0)
        assert same_bits(np.ascontiguousarray(whole), k)
        assert whole.strides == (8 * 12 * 4, 4 * 4, 12 * 4, 4)
        assert proc_maps.address_of(whole) == kv.address(0, "k")
        assert kv.row_bytes == 48
        _, values = kv.layer(1)
        assert proc_maps.address_of(values) == kv.address(1, "v")
        del whole, values


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "every second of a larger one": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: a[::-1].copy()[::-1],
    "Fortran order": np.asfortranarray,
    "a column of another": lambda a: np.stack([a, -a], axis=-1)[..., 0],
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "big-endian and strided": lambda a: np.repeat(a.astype(">" + a.dtype.str[1:]), 2, axis=0)[::2],
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "not aligned": lambda a: (
        np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape)
    ),
    "a subclass": lambda a: a.view(np.recarray),
}


@pytest.mark.parametrize("lay_out", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("given", ["float16", "float32"])
def test_any_layout_in_memory_is_read(
    kv: um.KVCache, lay_out: Callable[[Array], Array], given: str
) -> None:
    k, v = tokens(5, dtype=given)
    kv.append(0, lay_out(k), lay_out(v))
    kv.append(0, lay_out(k[:3].transpose(1, 0, 2)[None]), v[:3].transpose(1, 0, 2)[None])
    for part, expected in zip(kv.layer(0), (k, v), strict=True):
        assert same_bits(
            part[0].transpose(1, 0, 2),
            np.concatenate([expected, expected[:3]]).astype(np.float16),
        )
    del part


def test_append_all_is_one_token_of_every_layer(kv: um.KVCache) -> None:
    for n in range(8):
        k, v = (part[:2] for part in tokens(2, seed=n))
        kv.append_all(k, v)
        assert kv.seq_len == n + 1
        for layer in range(2):
            for part, expected in zip(kv.layer(layer), (k, v), strict=True):
                assert same_bits(part[0, :, n], expected[layer].astype(np.float16))
    del part
    with pytest.raises(um.CacheFull):
        kv.append_all(k, v)
    assert kv.seq_len == 8


def test_a_long_append_runs_without_the_gil() -> None:
    with um.KVCache(1, 3, 4, 1000) as kv:
        k, v = tokens(1000)
        kv.append(0, k, v)
        assert same_bits(kv.layer(0)[0][0].transpose(1, 0, 2), k.astype(np.float16))


def wrong_appends() -> list[tuple[str, type[Exception], Callable[[um.KVCache], Any]]]:
    k, v = tokens(2)
    one, _ = tokens(1)
    many, _ = tokens(9)
    return [
        ("layer below", ValueError, lambda kv: kv.append(-1, k, v)),
        ("layer above", ValueError, lambda kv: kv.append(2, k, v)),
        ("layer of no type", TypeError, lambda kv: kv.append(0.5, k, v)),
        ("layer None", TypeError, lambda kv: kv.append(None, k, v)),
        ("shapes differ", ValueError, lambda kv: kv.append(0, k, one)),
        ("dimensions differ", ValueError, lambda kv: kv.append(0, k, v[0])),
        ("two dimensions", ValueError, lambda kv: kv.append(0, k[0], v[0])),
        ("no dimension", ValueError, lambda kv: kv.append(0, k[0, 0, 0, ...], v[0, 0, 0, ...])),
        ("heads", ValueError, lambda kv: kv.append(0, k[:, :2], v[:, :2])),
        ("head_dim", ValueError, lambda kv: kv.append(0, k[..., :3], v[..., :3])),
        ("batch", ValueError, lambda kv: kv.append(0, *[np.zeros((2, 3, 1, 4), "f4")] * 2)),
        ("heads of four", ValueError, lambda kv: kv.append(0, *[np.zeros((1, 2, 1, 4), "f4")] * 2)),
        ("five dimensions", ValueError, lambda kv: kv.append(0, k[None, None], v[None, None])),
        ("dtypes differ", TypeError, lambda kv: kv.append(0, k, v.astype("float16"))),
        ("float64", TypeError, lambda kv: kv.append(0, k.astype("float64"), v.astype("float64"))),
        ("int32", TypeError, lambda kv: kv.append(0, k.astype("int32"), v.astype("int32"))),
        ("uint16", TypeError, lambda kv: kv.append(0, k.astype("uint16"), v.astype("uint16"))),
        ("object", TypeError, lambda kv: kv.append(0, k.astype(object), v.astype(object))),
        ("lists", TypeError, lambda kv: kv.append(0, k.tolist(), v.tolist())),
        ("None", TypeError, lambda kv: kv.append(0, k, None)),
        ("too many", um.CacheFull, lambda kv: kv.append(0, many, many)),
        ("all: shape", ValueError, lambda kv: kv.append_all(k[:1], v[:1])),
        ("all: shapes differ", ValueError, lambda kv: kv.append_all(k, v[:, :2])),
        ("all: dtype", TypeError, lambda kv: kv.append_all(k.astype("i4"), v.astype("i4"))),
        ("all: dtypes differ", TypeError, lambda kv: kv.append_all(k, v.astype("f2"))),
        ("all: lists", TypeError, lambda kv: kv.append_all(k.tolist(), v.tolist())),
        ("reserve nothing", ValueError, lambda kv: kv.reserve(0)),
        ("reserve less", ValueError, lambda kv: kv.reserve(-1)),
        ("reserve a half", TypeError, lambda kv: kv.reserve(0.5)),
        ("reserve too many", um.CacheFull, lambda kv: kv.reserve(9)),
        ("reserve far too many", um.CacheFull, lambda kv: kv.reserve(2**63 - 1)),
        ("reserve beyond", ValueError, lambda kv: kv.reserve(2**70)),
        ("commit nothing", RuntimeError, lambda kv: kv.commit(1)),
        ("commit less", ValueError, lambda kv: kv.commit(-1)),
        ("crop above", ValueError, lambda kv: kv.crop(4)),
        ("crop below", ValueError, lambda kv: kv.crop(-1)),
        ("layer to see", ValueError, lambda kv: kv.layer(2)),
        ("part", ValueError, lambda kv: kv.address(0, "q")),
        ("layer's address", ValueError, lambda kv: kv.address(2, "k")),
        ("out alone", ValueError, lambda kv: kv.layer(0, out=(k, v))),
        ("out's shape", ValueError, lambda kv: kv.layer(0, "float32", out=(k, v))),
    ]


@pytest.mark.parametrize("case", wrong_appends(), ids=lambda case: case[0])
def test_a_call_that_fails_changes_nothing(
    kv: um.KVCache, case: tuple[str, type[Exception], Callable[[um.KVCache], Any]]
) -> None:
    k, v = tokens(3, seed=7)
    for layer in range(2):
        kv.append(layer, k, v)
    before, row = state(kv), kv.tape.used_bytes
    with pytest.raises(case[1]):
        case[2](kv)
    assert state(kv) == before
    assert kv.tape.used_bytes == row
    kv.append_all(k[:2], v[:2])  # nothing is reserved, nothing torn


def test_a_full_cache_keeps_its_tokens_and_names_the_figures(kv: um.KVCache) -> None:
    k, v = tokens(6)
    for layer in range(2):
        kv.append(layer, k, v)
    before = state(kv)
    with pytest.raises(um.CacheFull, match=r"3 tokens.*6 of 8") as caught:
        kv.append(0, k[:3], v[:3])
    assert (caught.value.limit, caught.value.used, caught.value.asked) == (8, 6, 3)
    assert state(kv) == before
    kv.append(0, k[:2], v[:2])  # what fits, fits


def test_a_token_counts_when_every_layer_holds_it(kv: um.KVCache) -> None:
    k, v = tokens(3)
    kv.append(0, k, v)
    assert kv.seq_len == 0
    assert kv.layer(0)[0].shape == (1, 3, 3, 4)
    assert kv.memory_usage_bytes == 2 * 3 * 24
    for refused in (lambda: kv.append_all(k[:2], v[:2]), lambda: kv.reserve(1), lambda: kv.crop(0)):
        with pytest.raises(RuntimeError, match="roll back"):
            refused()
    kv.append(1, k[:1], v[:1])
    assert kv.seq_len == 1
    kv.rollback()
    assert kv.seq_len == 1
    assert [kv.layer(layer)[0].shape[2] for layer in range(2)] == [1, 1]


def test_reserve_write_commit(kv: um.KVCache) -> None:
    k, v = tokens(3)
    kv.append(0, k, v)
    kv.append(1, k, v)
    before = state(kv)
    row = kv.reserve(4)
    assert row == 3
    assert state(kv) == before  # not a token yet
    refused: list[Callable[[], Any]] = [
        lambda: kv.reserve(1),
        lambda: kv.append(0, k, v),
        lambda: kv.append_all(k[:2], v[:2]),
        lambda: kv.crop(1),
    ]
    for call in refused:
        with pytest.raises(RuntimeError, match="reserved"):
            call()
    with pytest.raises(ValueError, match="above what was reserved"):
        kv.commit(5)
    for layer in range(2):
        for name, sign in PARTS:
            at = kv.address(layer, name) + row * kv.row_bytes - kv.tape.block.address
            rows = kv.tape.block.as_array("float16", (4, 3, 4), at)
            rows[:] = sign * (layer + 1)
    del rows
    kv.commit(2)
    assert kv.seq_len == 5
    for layer in range(2):
        assert (kv.layer(layer)[0][:, :, 3:] == layer + 1).all()
        assert (kv.layer(layer)[1][:, :, 3:] == -layer - 1).all()
    with pytest.raises(RuntimeError, match="nothing is reserved"):
        kv.commit(0)
    kv.reserve(3)
    kv.rollback()
    assert kv.seq_len == 5
    kv.reserve(3)
    kv.commit(0)
    assert kv.seq_len == 5
    kv.reserve(1)
    kv.clear()
    assert kv.is_empty
    assert kv.reserve(8) == 0


def test_crop_and_clear_keep_the_memory(kv: um.KVCache) -> None:
    addresses = {kv.address(layer, part) for layer in range(2) for part in ("k", "v")}
    k, v = tokens(8)
    for layer in range(2):
        kv.append(layer, k, v)
    kv.crop(3)
    assert kv.seq_len == 3
    assert same_bits(kv.layer(1)[1][0].transpose(1, 0, 2), v[:3].astype("f2"))
    kv.append(0, k[3:], v[3:])
    kv.append(1, k[3:], v[3:])
    kv.crop(8)
    kv.crop(0)
    assert kv.is_empty
    kv.clear()
    assert addresses == {kv.address(layer, part) for layer in range(2) for part in ("k", "v")}


def test_converted_copies(kv: um.KVCache) -> None:
    k, v = tokens(5)
    kv.append(0, k, v)
    wide, _ = kv.layer(0, dtype="float32")
    assert wide.flags.c_contiguous
    assert same_bits(wide[0].transpose(1, 0, 2), k.astype("f2").astype("f4"))
    wide[:] = 0
    assert kv.layer(0)[0].any()  # a copy
    out = np.empty((1, 3, 5, 4), "float64"), np.empty((1, 3, 5, 4), "float64")
    assert kv.layer(0, dtype="float64", out=out) == out
    assert (out[1][0].transpose(1, 0, 2) == v.astype("f2")).all()
    untouched = out[0].copy()
    with pytest.raises(ValueError, match="out"):
        kv.layer(0, dtype="float64", out=(out[0], out[1][:, :2]))
    with pytest.raises(ValueError, match="out"):
        kv.layer(0, dtype="float32", out=out)
    with pytest.raises(ValueError, match="argument"):
        kv.layer(0, dtype="float64", out=(*out, out[0]))  # type: ignore[arg-type]
    assert (out[0] == untouched).all()


class CacheAgainstModel(RuleBasedStateMachine):
    """The same calls on a cache and on NumPy arrays that are concatenated."""

    N_LAYERS, HEADS, DIM, MAX = 2, 2, 5, 12

    @initialize(batch=st.sampled_from([1, 1, 2]), dtype=st.sampled_from(["f16", "f32"]))
    def make(self, batch: int, dtype: str) -> None:
        self.kv = um.KVCache(
            self.N_LAYERS, self.HEADS, self.DIM, self.MAX, batch=batch, dtype=dtype
        )
        self.batch = batch
        self.numpy_dtype = np.float16 if dtype == "f16" else np.float32
        empty = np.empty((batch, self.HEADS, 0, self.DIM), self.numpy_dtype)
        self.model = [[empty, empty] for _ in range(self.N_LAYERS)]
        self.reserved = 0
        self.rng = np.random.default_rng(0)
        self.addresses = self.all_addresses()

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            self.kv.close()

    def all_addresses(self) -> list[int]:
        return [self.kv.address(i, part) for i in range(self.N_LAYERS) for part in ("k", "v")]

    def lens(self) -> list[int]:
        return [k.shape[2] for k, _ in self.model]

    def values(self, *shape: int, given: str) -> Array:
        return self.rng.normal(scale=1000, size=shape).astype(given)

    def expect(self, ok: bool, *errors: type[Exception]) -> Any:
        return pytest.raises(errors) if not ok else _Fine()

    @rule(
        layer=st.integers(0, 1),
        n=st.integers(0, 5),
        given=st.sampled_from(["float16", "float32"]),
        token_major=st.booleans(),
        strided=st.booleans(),
    )
    def append(self, layer: int, n: int, given: str, token_major: bool, strided: bool) -> None:
        rows = [self.values(self.batch, self.HEADS, n, self.DIM, given=given) for _ in range(2)]
        arguments = [
            row[0].transpose(1, 0, 2) if token_major and self.batch == 1 else row for row in rows
        ]
        if not strided:
            arguments = [np.ascontiguousarray(a) for a in arguments]
        ok = not self.reserved and self.lens()[layer] + n <= self.MAX
        with self.expect(ok, RuntimeError if self.reserved else um.CacheFull):
            self.kv.append(layer, *arguments)
        if ok:
            for part in range(2):
                self.model[layer][part] = np.concatenate(
                    [self.model[layer][part], rows[part].astype(self.numpy_dtype)], axis=2
                )

    @rule(given=st.sampled_from(["float16", "float32"]))
    def append_all(self, given: str) -> None:
        shape = (self.N_LAYERS, self.HEADS, self.DIM)
        k, v = self.values(*shape, given=given), self.values(*shape, given=given)
        lens = self.lens()
        even = len(set(lens)) == 1
        ok = self.batch == 1 and not self.reserved and even and lens[0] < self.MAX
        with self.expect(ok, ValueError, RuntimeError, um.CacheFull):
            self.kv.append_all(k, v)
        if ok:
            for layer in range(self.N_LAYERS):
                for part, given_part in enumerate((k, v)):
                    new = given_part[layer][None, :, None].astype(self.numpy_dtype)
                    self.model[layer][part] = np.concatenate([self.model[layer][part], new], axis=2)

    @rule(n=st.integers(1, 14))
    def reserve(self, n: int) -> None:
        lens = self.lens()
        ok = not self.reserved and len(set(lens)) == 1 and lens[0] + n <= self.MAX
        with self.expect(ok, RuntimeError, um.CacheFull):
            assert self.kv.reserve(n) == lens[0]
            self.reserved = n

    @rule(n=st.integers(0, 6))
    def commit(self, n: int) -> None:
        ok = self.reserved > 0 and n <= self.reserved
        rows: list[list[Array]] = []
        if ok:
            rows = self.write_reserved()
        with self.expect(ok, RuntimeError, ValueError):
            self.kv.commit(n)
        if ok:
            self.reserved = 0
            for layer in range(self.N_LAYERS):
                for part in range(2):
                    self.model[layer][part] = np.concatenate(
                        [self.model[layer][part], rows[layer][part][:, :, :n]], axis=2
                    )

    def write_reserved(self) -> list[list[Array]]:
        row = self.lens()[0]
        written: list[list[Array]] = []
        for layer in range(self.N_LAYERS):
            written.append([])
            for part in ("k", "v"):
                at = self.kv.address(layer, part) - self.kv.tape.block.address
                shape = (self.batch, self.MAX, self.HEADS, self.DIM)
                storage = self.kv.tape.block.as_array(self.numpy_dtype, shape, at)
                new = self.values(self.batch, self.HEADS, self.reserved, self.DIM, given="float16")
                new = new.astype(self.numpy_dtype)
                storage[:, row : row + self.reserved] = new.transpose(0, 2, 1, 3)
                written[-1].append(new)
        return written

    @rule()
    def rollback(self) -> None:
        self.kv.rollback()
        self.reserved = 0
        self.cut(min(self.lens()))

    @rule(n=st.integers(0, 13))
    def crop(self, n: int) -> None:
        lens = self.lens()
        ok = not self.reserved and len(set(lens)) == 1 and n <= lens[0]
        with self.expect(ok, RuntimeError, ValueError):
            self.kv.crop(n)
            self.cut(n)

    @rule()
    def clear(self) -> None:
        self.kv.clear()
        self.reserved = 0
        self.cut(0)

    def cut(self, n: int) -> None:
        self.model = [[part[:, :, :n] for part in layer] for layer in self.model]

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "kv"):
            return
        lens = self.lens()
        assert self.kv.seq_len == min(lens)
        row = self.batch * self.HEADS * self.DIM * np.dtype(self.numpy_dtype).itemsize
        assert self.kv.memory_usage_bytes == 2 * sum(lens) * row
        for layer in range(self.N_LAYERS):
            for part, expected in zip(self.kv.layer(layer), self.model[layer], strict=True):
                assert same_bits(np.ascontiguousarray(part), np.ascontiguousarray(expected))
        assert self.all_addresses() == self.addresses


class _Fine:
    """The other side of pytest.raises."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


TestCacheAgainstModel = CacheAgainstModel.TestCase
TestCacheAgainstModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# ---- making one ----


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"n_layers": 0}, ValueError),
        ({"n_kv_heads": -1}, ValueError),
        ({"head_dim": 2**32}, ValueError),
        ({"max_seq_len": 0}, ValueError),
        ({"max_seq_len": 1.5}, TypeError),
        ({"batch": 0}, ValueError),
        ({"n_layers": 2**31, "n_kv_heads": 2**31, "head_dim": 2**31}, ValueError),
        ({"max_seq_len": 2**31, "head_dim": 2**20}, MemoryError),
        ({"dtype": "q8_0"}, ValueError),
        ({"dtype": "bfloat16"}, ValueError),
        ({"dtype": "int8"}, ValueError),
        ({"pages": "3k"}, ValueError),
    ],
)
def test_a_refused_cache_leaves_nothing(options: dict[str, Any], error: type[Exception]) -> None:
    before = ledger()["history"]["mapped_bytes"]
    with pytest.raises(error):
        um.KVCache(**{"n_layers": 1, "n_kv_heads": 2, "head_dim": 4, "max_seq_len": 8} | options)
    with um.Tape(1 << 16) as tape:
        if "pages" in options or error is MemoryError:
            options, error = {"max_seq_len": 10_000}, um.TapeFull
        with pytest.raises(error):
            um.KVCache(
                **{"n_layers": 1, "n_kv_heads": 2, "head_dim": 4, "max_seq_len": 8} | options,
                tape=tape,
            )
        assert tape.used_bytes == 0
    assert ledger()["history"]["mapped_bytes"] == before


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("dims", [(1, 1, 1, 1), (2, 3, 4, 8), (5, 2, 33, 7)])
def test_storage_bytes_is_what_is_taken(dims: tuple[int, int, int, int], dtype: Any) -> None:
    n_layers, heads, head_dim, seq = dims
    expected = um.KVCache.storage_bytes(*dims, batch=2, dtype=dtype)
    item = 2 if dtype == "f16" else 4
    part = -(-2 * seq * heads * head_dim * item // 64) * 64
    assert expected == n_layers * (2 * part + 8)
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
        cold = kv.resident_bytes
        assert cold <= 2 * 4096  # the lengths
        assert kv.tape.block.verify().resident_bytes == cold
        kv.append(0, *[np.ones((16, 8, 64), "float16")] * 2)
        assert kv.resident_bytes == kv.tape.block.verify().resident_bytes
        assert cold < kv.resident_bytes < kv.capacity_bytes
        kv.warm(2)
        assert kv.resident_bytes == kv.tape.block.nbytes


def test_appending_makes_no_system_call_and_no_allocation() -> None:
    with um.KVCache(2, 3, 4, 100, warm=True) as kv:
        k, v = tokens(1)
        before = counters()
        for _ in range(20):
            kv.append(0, k, v)
            kv.append(1, k, v)
            kv.append_all(np.zeros((2, 3, 4), "f2"), np.zeros((2, 3, 4), "f2"))
            kv.reserve(2)
            kv.commit(1)
            kv.layer(0)
        kv.crop(10)
        kv.clear()
        assert counters() == before


def test_readers_see_whole_tokens_while_one_thread_writes() -> None:
    n_tokens, n_at_once = 4000, 80  # so many at once are copied without the GIL
    torn: list[int] = []
    with um.KVCache(1, 2, 32, n_tokens, dtype="f32") as kv:

        def read() -> None:
            while (seen := kv.seq_len) < n_tokens:
                k, v = kv.layer(0)
                whole = k[0, :, :seen, 0] == np.arange(seen), v[0, :, :seen, -1] == np.arange(seen)
                if not all(part.all() for part in whole):
                    torn.append(seen)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for first in range(0, n_tokens, n_at_once):
            rows = np.arange(first, first + n_at_once, dtype="float32")[:, None, None]
            rows = np.ascontiguousarray(np.broadcast_to(rows, (n_at_once, 2, 32)))
            kv.append(0, rows, rows)
        for reader in readers:
            reader.join()
    assert torn == []


# ---- lifetime ----


def test_views_keep_the_memory(kv: um.KVCache) -> None:
    kv.append(0, *tokens(3))
    address = kv.address(0, "k")
    view = kv.layer(0)[0][:, 1:]
    contents = view.tobytes()
    with pytest.raises(BufferError, match="live"):
        kv.close()
    assert not kv.closed
    kv.append(1, *tokens(3))  # nothing was closed
    with kv:
        pass
    assert kv.closed
    assert proc_maps.is_mapped(address)
    assert view.tobytes() == contents
    del view
    gc.collect()
    assert not proc_maps.is_mapped(address)


def test_a_closed_cache_says_so() -> None:
    kv = um.KVCache(2, 3, 4, 8)
    kv.close()
    kv.close()
    k, v = tokens(2)
    uses: list[Callable[[], Any]] = [
        lambda: kv.append(0, k, v),
        lambda: kv.append_all(k, v),
        lambda: kv.layer(0),
        lambda: kv.address(0, "k"),
        lambda: kv.reserve(1),
        lambda: kv.commit(1),
        kv.rollback,
        lambda: kv.crop(0),
        kv.clear,
        kv.warm,
        kv.__enter__,
        lambda: kv.seq_len,
        lambda: kv.next_position,
        lambda: kv.is_empty,
        lambda: kv.memory_usage_bytes,
        lambda: kv.resident_bytes,
        lambda: len(kv),
    ]
    for use in uses:
        with pytest.raises(um.ClosedError, match="KVCache is closed"):
            use()
    assert repr(kv) == "KVCache(closed)"


def test_a_cache_on_a_tape_of_somebody_else() -> None:
    with um.Tape(1 << 16) as tape:
        kv = um.KVCache(2, 3, 4, 8, tape=tape)
        assert kv.tape is tape
        assert tape.owns(kv.address(1, "v"))
        with pytest.raises(ValueError, match="pages"):
            um.KVCache(2, 3, 4, 8, tape=tape, pages="4k")
        view = kv.layer(0)[0]
        kv.close()  # the memory is the tape's
        assert kv.closed
        assert not tape.closed
        del view
        other = um.KVCache(2, 3, 4, 8, tape=tape)
    assert other.closed
    with pytest.raises(um.ClosedError):
        other.append(0, *tokens(1))


def test_a_cache_that_is_dropped_open_warns_and_gives_the_memory_back() -> None:
    kv = um.KVCache(2, 3, 4, 8, name="forgotten")
    address = kv.address(0, "k")
    with pytest.warns(ResourceWarning, match="forgotten"):
        del kv
    assert not proc_maps.is_mapped(address)


@pytest.mark.parametrize("use", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_cache_does_not_pickle(kv: um.KVCache, use: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="memory of this process"):
        use(kv)


def test_repr(kv: um.KVCache) -> None:
    kv.append_all(*[np.zeros((2, 3, 4), "f2")] * 2)
    assert repr(kv) == "KVCache(1 of 8 tokens, 2 layers, 3 heads of 4 f16, 784 B)"
