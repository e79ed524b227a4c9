"""A KV cache of a GPU behaves as one in main memory, over a driver in main memory.

The contract tests the behaviour of all caches. Here both get the same calls, everything visible is
compared, and the calls of the driver are checked.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from numpy.typing import NDArray

import unimem as um
from support.contracts.kv_model import GIVEN_DTYPES, KV_DTYPES, given, memory, same_bits, stored
from support.gpu.host_gpu import HostDriver, array_of, numpy_of
from support.gpu.kv_twins import DIM, HEADS, LAYERS, ROWS, Twins
from support.project.tiers import examples
from unimem.kv import snapshot

pytestmark = pytest.mark.usefixtures("cuda", "gives_memory_back")

Array = NDArray[Any]
STREAM = 1234


# ---- both at once ----


TWINS = [
    *(("f32", 1, "token", DIM), ("f16", 2, "token", 12), ("bf16", 1, "head", DIM)),
    *(("bf16", 1, "head", 40), ("q8_0", 1, "token", DIM), ("q8_0", 2, "head", DIM)),
    *(("q8_0", 1, "token", 96), ("q8_0", 2, "head", 64)),
]


@pytest.fixture(params=TWINS, ids=str)
def twins(request: pytest.FixtureRequest, cuda: Any) -> Iterator[Twins]:
    dtype, batch, order, v_dim = request.param
    with Twins(batch=batch, dtype=dtype, order=order, v_head_dim=v_dim) as twins:
        yield twins


class TwinMachine(RuleBasedStateMachine):
    """Any calls in any order, with views that are held."""

    @initialize(
        batch=st.sampled_from([1, 2]),
        dtype=st.sampled_from(KV_DTYPES),
        order=st.sampled_from(["token", "head"]),
        v_head_dim=st.sampled_from([DIM, 0, 96]),
        rows=st.sampled_from([1, 7, ROWS, 100]),
    )
    def make(self, rows: int, **options: Any) -> None:
        budget = um.KVCache.storage_bytes(LAYERS, HEADS, DIM, rows, **options)
        self.twins = Twins(budget_bytes=budget, **options)
        self.views: list[Any] = []

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            self.views.clear()
            self.twins.close()

    @rule(
        n=st.sampled_from([0, 1, 1, 2, 3, 5, ROWS + 1]),
        layers=st.sampled_from([(0, 1), (0, 1), (1, 0), (0,), (1,)]),
        dtype=st.sampled_from(GIVEN_DTYPES),
    )
    def append(self, n: int, layers: tuple[int, ...], dtype: str) -> None:
        self.twins.append(n, dtype, layers)

    @precondition(lambda self: self.twins.batch == 1)
    @rule(n=st.integers(0, 4), dtype=st.sampled_from(GIVEN_DTYPES))
    def append_token_major(self, n: int, dtype: str) -> None:
        for layer in range(LAYERS):
            self.twins.do("append", layer, *self.twins.tokens(n, dtype, token_major=True))

    @rule(dtype=st.sampled_from(GIVEN_DTYPES))
    def append_all(self, dtype: str) -> None:
        # One token of all layers: there are as many layers as heads.
        self.twins.do("append_all", *self.twins.tokens(LAYERS, dtype, token_major=True))

    @rule(n=st.integers(0, 3), wrong=st.sampled_from([0, 0, 1]))
    def reserve(self, n: int, wrong: int) -> None:
        error, row = self.twins.do("reserve", n)
        if error is None:
            apart = HEADS if self.twins.host.order == "head" else 1
            n_lanes, there = self.twins.batch * apart, self.twins.cuda
            parts: list[tuple[Any, int, int]] = [("k", there.row_bytes, there.lane_stride)]
            if there.v_head_dim:
                parts.append(("v", there.v_row_bytes, there.v_lane_stride))
            for layer, (part, nbytes, lane), number in itertools.product(
                range(LAYERS), parts, range(n_lanes)
            ):
                rows = self.twins.rng.integers(0, 99, n * nbytes // apart, np.uint8)
                for cache in (self.twins.host, there):
                    at = cache.address(layer, part) + number * lane + row * nbytes // apart
                    memory(at, len(rows))[:] = rows
            self.twins.do("commit", n + wrong)

    @rule(name=st.sampled_from(["rollback", "rollback", "clear"]))
    def call(self, name: str) -> None:
        self.twins.do(name)

    @rule(n=st.integers(0, ROWS + 1))
    def crop(self, n: int) -> None:
        self.twins.do("crop", n)

    @rule(n=st.integers(0, 8), keep_first=st.sampled_from([0, 0, 1, 2, 4]))
    def trim(self, n: int, keep_first: int) -> None:
        self.twins.do("trim_to", n, keep_first=keep_first)

    @rule(position=st.integers(0, 30))
    def row_of(self, position: int) -> None:
        self.twins.do("row_of", position)

    @rule(layer=st.integers(0, LAYERS - 1))
    def hold(self, layer: int) -> None:
        self.views.append((self.twins.host.layer(layer), self.twins.cuda.layer(layer)))

    @rule()
    def let_go(self) -> None:
        self.views.clear()

    @rule(dtype=st.sampled_from(GIVEN_DTYPES), layer=st.integers(0, LAYERS - 1))
    def convert(self, dtype: str, layer: int) -> None:
        ours = self.twins.cuda.layer(layer, dtype)
        for there, here in zip(ours, self.twins.host.layer(layer, dtype), strict=True):
            assert same_bits(numpy_of(there), here)


def test_any_calls_in_any_order() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        TwinMachine,
        settings=settings(max_examples=examples(60), stateful_step_count=40, deadline=None),
    )


def test_the_same_is_refused_in_the_same_words(twins: Twins, tmp_path: Path) -> None:
    k, v = twins.tokens(2)
    twins.append(3)
    pairs = [
        (k[..., :-1], v),
        *((k[at], v[at]) for at in ((0, 0), (0, 0, 0), None)),
        (k.astype("float64"), v),
        (k, v.astype("float16")),
        twins.tokens(ROWS),
    ]
    wrong: dict[str, list[Sequence[Any]]] = {
        "append": [(layer, k, v) for layer in (-1, LAYERS, None)] + [(0, *p) for p in pairs],
        **{"append_all": [(k, v), twins.tokens(HEADS)], "layer": [(LAYERS,), (0, None, (k, v))]},
        **{"address": [(5, "k"), (0, "q")], "reserve": [(0,), (-1,), (ROWS,)], "commit": [(1,)]},
        **{"crop": [(4,)], "trim_to": [(-1,)], "row_of": [("0",)]},
    }
    for name, calls in wrong.items():
        for arguments in calls:
            assert twins.do(name, *arguments)[0] is not None, name
    twins.do("append", 0, *twins.tokens(1))
    for name, *arguments in (("crop", 1), ("trim_to", 1), ("reserve", 1), ("append_all", k, v)):
        assert twins.do(name, *arguments)[0] is not None
    assert "layers differ" in twins.do("copy")[1]
    twins.do("rollback")
    twins.do("reserve", 2)
    where = tmp_path / "session"
    assert "rows are reserved" in twins.append(1)[1]
    assert "rows are reserved" in twins.do("copy")[1]
    assert "rows are reserved" in twins.do("save", where)[1]
    assert not where.exists()


# ---- what is queued ----


def lane(kv: Any, layer: int, part: str, row: int = 0) -> int:
    return int(kv.address(layer, part) + row * (kv.row_bytes if part == "k" else kv.v_row_bytes))


@pytest.mark.parametrize("v_dim", [1 << 16, 64])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_many_tokens_of_its_type_are_two_copies(
    cuda: Any, host_gpu: HostDriver, dtype: str, v_dim: int
) -> None:
    dim, rng = 1 << 16, np.random.default_rng(0)  # more bytes than one launch copies
    tokens = [stored(given(rng, (3, HEADS, size), "float32"), dtype) for size in (dim, v_dim)]
    one = [part[:1].swapaxes(0, 1)[None] for part in tokens]  # [1, heads, 1, dim]
    with cuda.KVCache(LAYERS, HEADS, dim, ROWS, dtype=dtype, v_head_dim=v_dim) as kv:
        k, v = map(array_of, tokens)
        host_gpu.calls.clear()
        kv.append(1, k, v, stream=STREAM)
        kv.append(1, *map(array_of, one))
        kv.append(1, k[:0], v[:0])
        row, v_row = kv.row_bytes, kv.v_row_bytes
        copies = [call for call in host_gpu.calls if call[0] == "copy"]
        assert copies == host_gpu.calls
        assert copies[:2] == [
            ("copy", lane(kv, 1, "k"), k.data.ptr, 3 * row, STREAM),
            ("copy", lane(kv, 1, "v"), v.data.ptr, 3 * v_row, STREAM),
        ]
        assert [(call[1], call[3], call[4]) for call in copies[2:]] == [
            (lane(kv, 1, "k", 3), row, 0),
            (lane(kv, 1, "v", 3), v_row, 0),
        ]
        for part, there in zip(tokens, kv.layer(1), strict=True):
            assert same_bits(numpy_of(there), np.concatenate([part, part[:1]]).swapaxes(0, 1)[None])


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "in order": lambda a: a,
    "Fortran order": np.asfortranarray,
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "tokens reversed": lambda a: a[..., ::-1, :].copy()[..., ::-1, :],
    "of a larger one": lambda a: np.concatenate([a, a], axis=1)[:, : a.shape[1]],
}


def in_type(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, v_dim: int
) -> list[Array]:
    """K and V of these dimensions and sizes of heads, as numbers or as blocks of q8_0."""
    made = [given(rng, (*shape, dim), "float32") for dim in (DIM, v_dim)]
    return [stored(part, SHORT.get(dtype, dtype)) for part in made]


@pytest.mark.parametrize("v_dim", [DIM, 96])
@pytest.mark.parametrize(
    ("batch", "dtype", "given_dtype", "order"),
    [
        *((1, "f32", given_dtype, "token") for given_dtype in GIVEN_DTYPES),
        *((2, dtype, "float32", "token") for dtype in KV_DTYPES),
        *((2, dtype, "bfloat16", "token") for dtype in ("f16", "bf16")),
        *((batch, "q8_0", "q8_0", order) for batch in (1, 2) for order in ("token", "head")),
        *((batch, "f16", "float32", "head") for batch in (1, 2)),
    ],
)
def test_all_else_is_one_launch(
    cuda: Any,
    host_gpu: HostDriver,
    batch: int,
    dtype: str,
    given_dtype: str,
    order: str,
    v_dim: int,
) -> None:
    rng = np.random.default_rng(1)
    made: dict[str, Any] = {"batch": batch, "dtype": dtype, "order": order, "v_head_dim": v_dim}
    for k_layout, v_layout in itertools.product(LAYOUTS.values(), repeat=2):
        k, v = in_type(rng, (batch, HEADS, 3), given_dtype, v_dim)
        k, v = k_layout(k), v_layout(v)
        with cuda.KVCache(LAYERS, HEADS, DIM, ROWS, **made) as kv:
            for layer in (0, 1, 0):
                host_gpu.calls.clear()
                kv.append(layer, array_of(k), array_of(v), stream=STREAM)
                launched = [(call[0], call[2]) for call in host_gpu.calls]
                assert launched == [("launch", STREAM)]
            for layer, times in ((0, 2), (1, 1)):
                for part, there in zip((k, v), kv.layer(layer), strict=True):
                    rows = part if given_dtype == "q8_0" else stored(part, dtype)
                    assert same_bits(numpy_of(there), np.concatenate([rows] * times, axis=2))


SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
GIVEN_OF = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "float32"}


@pytest.mark.parametrize("strided", [0, 1])
def test_when_one_has_gaps_neither_is_a_plain_copy(host_gpu: HostDriver, strided: int) -> None:
    with Twins(dtype="f16") as twins:
        tokens = twins.tokens(3, "float16", token_major=True)
        tokens[strided] = LAYOUTS["every second"](tokens[strided])
        host_gpu.calls.clear()
        for layer in range(LAYERS):
            twins.host.append(layer, *tokens)
            twins.cuda.append(layer, *map(array_of, tokens))
        assert [call[0] for call in host_gpu.calls] == ["launch"] * LAYERS
        twins.check()


@pytest.mark.parametrize("v_dim", [DIM, 96])
@pytest.mark.parametrize("order", ["token", "head"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_a_token_of_all_layers_is_one_launch(
    cuda: Any, host_gpu: HostDriver, dtype: str, order: str, v_dim: int
) -> None:
    made: dict[str, Any] = {"dtype": dtype, "v_head_dim": v_dim}
    for given_dtype in GIVEN_DTYPES if dtype != "q8_0" else (*GIVEN_DTYPES, "q8_0"):
        k, v = in_type(np.random.default_rng(2), (3, HEADS), given_dtype, v_dim)
        with (
            cuda.KVCache(3, HEADS, DIM, ROWS, order=order, **made) as kv,
            um.KVCache(3, HEADS, DIM, ROWS, **made) as expected,
        ):
            for _ in range(2):
                host_gpu.calls.clear()
                kv.append_all(array_of(k), array_of(v), stream=STREAM)
                expected.append_all(k, v)
                assert [(call[0], call[2]) for call in host_gpu.calls] == [("launch", STREAM)]
            assert kv.seq_len == 2
            for layer in range(3):
                for there, here in zip(kv.layer(layer), expected.layer(layer), strict=True):
                    assert same_bits(numpy_of(there), here)


def test_conversion_into_arrays_that_are_there(host_gpu: HostDriver) -> None:
    with Twins(batch=2, dtype="bf16", v_head_dim=12) as twins:
        twins.append(4)
        twins.do("trim_to", 3)
        out = tuple(np.zeros((2, HEADS, 3, dim), "float16") for dim in (DIM, 12))
        arrays = tuple(map(array_of, out))
        host_gpu.calls.clear()
        found = twins.cuda.layer(1, "float16", arrays, stream=STREAM)
        assert all(a is b for a, b in zip(found, arrays, strict=True))
        assert [(call[0], call[2]) for call in host_gpu.calls] == [("launch", STREAM)] * 2
        for there, here in zip(out, twins.host.layer(1, "float16"), strict=True):
            assert same_bits(there, here)
        # CuPy's pool gives memory for its current stream.
        with pytest.raises(ValueError, match=r"out: expected together with a stream"):
            twins.cuda.layer(1, "float16", stream=STREAM)
        wrong: list[tuple[Any, Any, type[Exception], str]] = [
            ("float64", None, ValueError, "expected float32, float16 or bfloat16, got float64"),
            ("int8", None, ValueError, "expected float32, float16 or bfloat16, got int8"),
            ("<f16", None, ValueError, "expected 'float16'"),
            ("float32", arrays, ValueError, "expected two C-contiguous arrays of shape"),
            ("float16", arrays[:1], ValueError, "out: expected two CuPy arrays"),
            ("float16", out, TypeError, "expected two CuPy arrays, got ndarray"),
            ("float16", [a[:, :, :2] for a in arrays], ValueError, "expected two C-contiguous"),
            ("float16", [a[..., ::-1] for a in arrays], ValueError, "expected two C-contiguous"),
        ]
        for dtype, target, error, text in wrong:
            with pytest.raises(error, match=text):
                twins.cuda.layer(1, dtype, target)


# ---- rows that are read from device memory ----


def test_a_row_that_is_read_from_device_memory(twins: Twins, host_gpu: HostDriver) -> None:
    twins.append(2)
    at = np.zeros(1, "int32")
    row = array_of(at)
    for _ in range(5):
        tokens = [twins.tokens(1) for _ in range(LAYERS)]
        # The cache is not called: a graph replays the same work every time.
        at[0] = twins.cuda.reserve(1)
        host_gpu.calls.clear()
        for layer, (k, v) in enumerate(tokens):
            twins.cuda.append_at(layer, array_of(k), array_of(v), row, stream=STREAM)
            twins.host.append(layer, k, v)
        assert {call[0::2] for call in host_gpu.calls} == {("launch", STREAM)}
        twins.cuda.commit(1)
        assert at[0] == twins.cuda.next_position - 1
        twins.check()


def test_rows_that_are_not_there_are_not_written(cuda: Any) -> None:
    with cuda.KVCache(LAYERS, HEADS, DIM, ROWS, dtype="f16") as kv:
        whole = memory(kv.address(0, "k"), kv.capacity_bytes)
        before = whole.copy()
        k, v = (array_of(given(np.random.default_rng(3), (3, HEADS, DIM), "float32")) for _ in "kv")
        for row in (-1000, -3, ROWS, ROWS + 1, 2**31 - 1, -(2**31)):
            kv.append_at(0, k, v, array_of(np.array([row], "int32")))
            assert np.array_equal(whole, before)
        kv.append_at(0, k[:0], v[:0], array_of(np.zeros(1, "int32")))
        assert np.array_equal(whole, before)
        kv.append_at(0, k, v, array_of(np.full(1, ROWS - 1, "int32")))  # the first of three
        changed = np.flatnonzero(whole != before)
        lane = kv.lane_stride
        assert {int(i) // lane for i in changed} == {0, 1}
        assert {int(i) % lane // kv.row_bytes for i in changed} == {ROWS - 1}
        assert kv.is_empty


def test_wrong_rows_are_refused(cuda: Any) -> None:
    with cuda.KVCache(1, HEADS, DIM, ROWS) as kv:
        k = array_of(np.zeros((1, HEADS, DIM), "float32"))
        for row, text in (
            (3, "expected an array on the GPU, got int"),
            (array_of(np.zeros(1, "int64")), r"expected one int32, got int64 of shape \(1,\)"),
            (array_of(np.zeros(2, "int32")), r"expected one int32, got int32 of shape \(2,\)"),
        ):
            with pytest.raises(TypeError, match=text):
                kv.append_at(0, k, k, row)


# ---- what is refused ----


@pytest.mark.parametrize("given_dtype", ["float16", "float32"])
@pytest.mark.parametrize("use", ["append", "append_all"])
def test_when_the_device_refuses_nothing_is_appended(
    host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch, given_dtype: str, use: str
) -> None:
    refuse = Mock(side_effect=RuntimeError("an illegal memory access was encountered"))
    with Twins(dtype="f16") as twins:
        twins.append(2)
        k, v = (given(twins.rng, (LAYERS, HEADS, DIM), given_dtype) for _ in "kv")
        own = [array_of(k), array_of(v)]
        arguments = own if use == "append_all" else [0, *own]
        with monkeypatch.context() as patch:
            patch.setattr(host_gpu, "copy", refuse)
            patch.setattr(host_gpu, "launching", refuse)
            with pytest.raises(RuntimeError, match="illegal"):
                getattr(twins.cuda, use)(*arguments)
        twins.check()
        twins.do("append_all", k, v)
        twins.append(1)


WAYS = ("append", "append_at", "append_all")
VIEW = (ValueError, "got a view of this cache: append a copy", WAYS[:2])


def check_refusals(
    kv: Any, pair: Sequence[Any], error: type[Exception], text: str, ways: Sequence[str] = WAYS
) -> None:
    row = array_of(np.zeros(1, "int32"))
    calls = {"append": (0, *pair), "append_all": pair, "append_at": (0, *pair, row)}
    for way in ways:
        with pytest.raises(error, match=text):
            getattr(kv, way)(*calls[way])


def test_tokens_of_the_cache_itself(twins: Twins, host_gpu: HostDriver) -> None:
    twins.append(4)
    twins.do("crop", 3)
    k, v = twins.cuda.layer(0)
    host_gpu.calls.clear()
    others = list(map(array_of, twins.tokens(3, GIVEN_OF[twins.dtype])))
    if twins.dtype == "q8_0":
        others = [array_of(stored(numpy_of(a), "q8_0")) for a in others]
    parts = (k[:, :, 1:2], v[:, :, :1])
    pairs = [(k, v), parts, (k[:, :, ::-1], v), (k, others[1]), (others[0], v)]
    for pair in pairs:
        check_refusals(twins.cuda, pair, *VIEW)
    if twins.batch == 1:
        other = array_of(numpy_of(v)[0, :, :LAYERS].swapaxes(0, 1))
        pair = (k[0, :, :LAYERS].swapaxes(0, 1), other)
        check_refusals(twins.cuda, pair, *VIEW[:2], ("append_all",))
    assert host_gpu.calls == []
    twins.check()
    del k, v, pair, pairs, parts


def test_tokens_that_reach_into_the_cache(cuda: Any, host_gpu: HostDriver) -> None:
    """All bytes of an array count, not only the first."""
    with cuda.Tape(1 << 16) as tape:
        front = tape.take(1024, "float16")
        kv = cuda.KVCache(1, 1, 8, 16, tape=tape)
        behind = tape.take(1024, "float16")
        n_in_front = (kv.address(0, "k") - front.data.ptr) // 2
        n = (behind.data.ptr - front.data.ptr) // 2 + 1024
        memory_of_both = host_gpu.memory(front.data.ptr, 2 * n, tape)
        both = host_gpu.array(memory_of_both, 0, (n,), np.dtype("float16"))
        in_front = both[: n_in_front // 8 * 8].reshape(-1, 1, 8)[-4:]
        after = both[-32:].reshape(4, 1, 8)
        into = both[n_in_front - 8 : n_in_front + 24].reshape(4, 1, 8)
        across = both[:: n // 32][:32].reshape(4, 1, 8)
        backwards = both[-32:][::-1].reshape(4, 1, 8)
        from_behind = both[:: -(n // 32)][:32].reshape(4, 1, 8)
        for k in (into, across, from_behind):
            for pair in ((k, after), (after, k)):
                check_refusals(kv, pair, *VIEW)
        assert kv.is_empty
        for k in (in_front, after, backwards, into[:0], into[:1]):
            kv.append(0, k, k)
        del k, pair, front, behind, both, in_front, after, into, across, backwards
        del from_behind, memory_of_both


def test_tokens_of_another_device(cuda: Any, host_gpu: HostDriver) -> None:
    with cuda.KVCache(1, HEADS, DIM, ROWS) as kv:
        tokens = np.ones((1, HEADS, DIM), "float16")
        here, there, empty = array_of(tokens), array_of(tokens, 1), array_of(tokens[:0], 1)
        for pair in ((there, there), (here, there), (there, here)):
            check_refusals(kv, pair, ValueError, "array on cuda:0, got one on cuda:1")
        kv.append(0, empty, empty)
        assert (host_gpu.calls, len(kv)) == ([], 0)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_the_other_byte_order(cuda: Any, host_gpu: HostDriver, dtype: str) -> None:
    with cuda.KVCache(LAYERS, HEADS, DIM, ROWS, dtype=dtype) as kv:
        for swapped in (">f2", ">f4"):
            right = array_of(np.ones((LAYERS, HEADS, DIM), swapped[1:]))
            wrong = array_of(np.ones((LAYERS, HEADS, DIM), swapped))
            for pair in ((wrong, wrong), (right, wrong), (wrong, right)):
                check_refusals(kv, pair, TypeError, f"byte order, got {swapped}")
            with pytest.raises(TypeError, match="expected one int32, got >i4"):
                kv.append_at(0, right, right, array_of(np.zeros(1, ">i4")))
            with pytest.raises(ValueError, match=f"bfloat16, got {swapped}"):
                kv.layer(0, swapped)
        assert kv.is_empty
        assert host_gpu.calls == []


# ---- snapshots ----


@pytest.fixture
def talk(twins: Twins) -> Twins:
    """Tokens that do not begin at the first row, nor at the first position."""
    twins.append(7)
    twins.do("trim_to", 4, keep_first=1)
    twins.append(2)
    return twins


def test_snapshots_go_from_one_device_to_the_other(
    talk: Twins, cuda: Any, tmp_path: Path, host_gpu: HostDriver
) -> None:
    paths = tmp_path / "host", tmp_path / "cuda"
    ids = list(range(talk.host.next_position))
    talk.host.save(paths[0], tokens=ids, model="m")
    host_gpu.calls.clear()
    talk.cuda.save(paths[1], tokens=ids, model="m")
    assert ("synchronize", 0) in host_gpu.calls
    first, second = (snapshot.check(path) for path in paths)
    for name in ("seq_len", "next_position", "max_seq_len", "dtype", "grow", "window", "model"):
        assert getattr(first, name) == getattr(second, name)
    assert np.array_equal(first.checksums, second.checksums)
    for path in paths:
        with (
            um.KVCache.restore(path, mode="copy", tokens=ids, model="m") as here,
            cuda.KVCache.restore(path, tokens=ids, model="m", pinned=True) as there,
            talk.cuda.copy() as copied,
        ):
            for cache in (here, there, copied):
                assert cache.next_position == talk.host.next_position
                assert cache.max_seq_len == ROWS
            for layer in range(LAYERS):
                for expected, *others in zip(
                    *(c.layer(layer) for c in (talk.host, here, there, copied)), strict=True
                ):
                    for other in others:
                        found = other if isinstance(other, np.ndarray) else numpy_of(other)
                        assert same_bits(found, expected)
            del expected, other, others, found
            assert there.block.host is not None
            with pytest.raises(ValueError, match="not restored with mode='map'"):
                there.verify()


@pytest.mark.parametrize("order", ["token", "head"])
def test_a_cache_without_values(cuda: Any, tmp_path: Path, order: Any) -> None:
    with Twins(v_head_dim=0, order=order) as twins:
        twins.append(3)
        assert twins.cuda.capacity_bytes == twins.cuda.storage_bytes(
            LAYERS, HEADS, DIM, ROWS, v_head_dim=0, order=order
        )
        twins.cuda.save(tmp_path / "session")
        with cuda.KVCache.restore(tmp_path / "session") as there, twins.cuda.copy() as copied:
            for cache in (there, copied):
                k, v = cache.layer(1, "float32")
                assert v.shape == (1, HEADS, 3, 0)
                assert same_bits(numpy_of(k), twins.host.layer(1, "float32")[0])


def test_an_empty_cache_is_saved_and_copied(cuda: Any, tmp_path: Path) -> None:
    budget = 2 * 5 * HEADS * DIM * 2
    with cuda.KVCache(1, HEADS, DIM, ROWS, budget_bytes=budget, name="one", pinned=True) as kv:
        kv.save(tmp_path / "empty")
        with cuda.KVCache.restore(tmp_path / "empty") as restored, kv.copy() as copied:
            assert restored.is_empty
            assert copied.is_empty
            assert (copied.n_rows, copied.budget_bytes, copied.name) == (kv.n_rows, budget, "one")
            assert copied.block.host is not None  # also pinned


def test_unusable_snapshots_are_refused(cuda: Any, host_gpu: HostDriver, tmp_path: Path) -> None:
    path, ring, grown = (tmp_path / name for name in ("session", "ring", "grown"))
    tokens = given(np.random.default_rng(4), (2, 3, HEADS, DIM), "float16")
    for where, options in ((path, {}), (ring, {"window": 8}), (grown, {"grow": True})):
        with um.KVCache(1, HEADS, DIM, ROWS, **options) as kv:
            kv.append(0, *tokens)
            kv.save(where, tokens=[1, 2, 3])
    layered, damaged = tmp_path / "layered", tmp_path / "damaged"
    with um.KVCache(layers=[um.LayerKV(HEADS, DIM)], max_seq_len=ROWS) as kv:
        kv.save(layered)
    rotated = tmp_path / "rotated"
    with um.KVCache(1, HEADS, 64, ROWS, rotate=True) as kv:
        kv.save(rotated)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    refused: list[tuple[Path, dict[str, Any], type[Exception], str]] = [
        (ring, {}, NotImplementedError, "restore of a ring is not supported on a GPU"),
        (layered, {}, NotImplementedError, "layers that differ is not supported on a GPU"),
        (rotated, {}, NotImplementedError, "rotated heads is not supported on a GPU"),
        (path, {"mode": "map"}, NotImplementedError, "use|mode='copy'"),
        (path, {"mode": "read"}, ValueError, "expected 'copy', got 'read'"),
        (path, {"tokens": [1, 2]}, um.SnapshotError, "no prefix"),
        (path, {"model": "other"}, um.SnapshotError, "model"),
        (path, {"pages": "4k"}, NotImplementedError, "placing device memory"),
        (path, {"colour": "red"}, TypeError, "unexpected option 'colour'"),
        (path, {"device": 1}, ValueError, "device: expected 0 to 0"),
        (damaged, {}, um.SnapshotError, "checksum|damaged"),
        (tmp_path / "nowhere", {}, FileNotFoundError, "nowhere"),
    ]
    for where, options, error, text in refused:
        with pytest.raises(error, match=text):
            cuda.KVCache.restore(where, **options)
    gc.collect()
    assert host_gpu.allocated == {}
    with cuda.KVCache.restore(grown) as kv:
        assert (kv.grow, kv.seq_len, kv.max_seq_len) == (False, 3, ROWS)
