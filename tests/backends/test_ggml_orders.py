"""Weights in ggml's own orders, in memory of unimem: products and errors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.files.quantized import quantize

pytest.importorskip(
    "unimem.backends.ggml",
    reason="the engine needs ggml: pip install ./ggml '.[run]'",
    exc_type=ImportError,
)

from unimem.backends import ggml, ggml_orders
from unimem.models.shapes import TILED_TYPES

ALL_KINDS = tuple(ggml.MATMUL_TYPES)
KINDS = [kind for kind in ALL_KINDS if ggml_orders.find_order(kind, (256, 64))]
if not KINDS:
    pytest.skip("this build of ggml has no orders of its own on this CPU", allow_module_level=True)
EXPERT_KINDS = [kind for kind in KINDS if ggml_orders.find_order(kind, (256, 64, 4))]
N_IN, N_OUT, N_EXPERTS = 512, 96, 3


def name_of(kind: int) -> str:
    return ggml.MATMUL_TYPES[kind]


def quantized(kind: int, ne: tuple[int, ...]) -> NDArray[np.uint8]:
    """Normal values as ggml quantizes them."""
    shape = int(np.prod(ne[1:])), ne[0]
    return quantize(np.random.default_rng(1).standard_normal(shape, dtype=np.float32), kind).ravel()


@pytest.fixture
def tape() -> Iterator[um.Tape]:
    with um.Tape(8 << 20, pages="4k") as tape:
        yield tape


class Products:
    """Products of one weight in ggml, on a tape of unimem."""

    def __init__(self, tape: um.Tape, kind: int, ne: tuple[int, ...]) -> None:
        self.tape, self.kind, self.ne = tape, kind, ne
        self.context = ggml.new_context(tape.take_address(1 << 16), 1 << 16)
        self.weight = ggml.new_tensor(self.context, kind, *ne)

    def __enter__(self) -> Products:
        return self

    def __exit__(self, *_: object) -> None:
        ggml.free(self.context)

    def _put(self, tensor: int, values: NDArray[Any] | None = None) -> NDArray[Any]:
        nbytes = ggml.Tensor.at(tensor).nbytes
        block = self.tape.take(nbytes // 4, "float32")
        if values is not None:
            block.view(values.dtype)[:] = values.ravel()
        ggml.Tensor.at(tensor).data = block.ctypes.data
        return block

    def of(self, n: int, threads: int) -> NDArray[Any]:
        """Multiply n tokens, each with all experts but one."""
        rng, context = np.random.default_rng(2), self.context
        if len(self.ne) == 2:
            values = ggml.new_tensor(context, ggml.F32, self.ne[0], n)
            product = ggml.mul_mat(context, self.weight, values)
        else:
            n_used = self.ne[2] - 1
            ids = ggml.new_tensor(context, ggml.I32, n_used, n)
            chosen = [rng.permutation(self.ne[2])[:n_used] for _ in range(n)]
            self._put(ids, np.array(chosen, np.int32))
            values = ggml.new_tensor(context, ggml.F32, self.ne[0], 1, n)
            product = ggml.mul_mat_id(context, self.weight, values, ids)
        self._put(values, rng.standard_normal(self.ne[0] * n, dtype=np.float32))
        result = self._put(product)
        result[:] = np.nan
        graph = ggml.new_graph(context, 8)
        ggml.expand(graph, product)
        plan = self.tape.take_address(ggml.PLAN_BYTES)
        work = self.tape.take_address(ggml.plan(plan, graph, threads) + 64)
        ggml.plan(plan, graph, threads, 0, work)
        assert ggml.compute(graph, plan, threads) == 0
        return result


@pytest.mark.parametrize("n", [1, 3, 70])
@pytest.mark.parametrize(
    ("kind", "ne"),
    [(kind, (N_IN, N_OUT)) for kind in KINDS]
    + [(kind, (N_IN, N_OUT, N_EXPERTS)) for kind in EXPERT_KINDS],
    ids=lambda value: name_of(value) if isinstance(value, int) else f"{len(value)}d",
)
def test_products_are_those_of_the_file_s_order(
    kind: int, ne: tuple[int, ...], n: int, tape: um.Tape
) -> None:
    data = quantized(kind, ne)
    with Products(tape, kind, ne) as plain:
        ggml.Tensor.at(plain.weight).data = data.ctypes.data
        expected = plain.of(n, threads=1)
    order = ggml_orders.find_order(kind, ne)
    assert order is not None
    assert order.nbytes >= data.nbytes
    repacked = tape.take_bytes(order.nbytes + 64)
    repacked[-64:] = 0x5A
    with ggml_orders.Buffer(order.buffer_type, repacked.ctypes.data, order.nbytes) as buffer:
        buffer.write(kind, ne, data.ctypes.data, repacked.ctypes.data)
        with Products(tape, kind, ne) as ours:
            buffer.adopt(ours.weight, repacked.ctypes.data)
            got = ours.of(n, threads=1)
            np.testing.assert_array_equal(got, ours.of(n, threads=2))
    assert (repacked[-64:] == 0x5A).all()
    assert not np.array_equal(repacked[: data.nbytes], data)
    assert np.abs(got - expected).max() <= 0.01 * expected.std()

    # A copy of written bytes can be adopted instead of written.
    copy = tape.take_bytes(order.nbytes)
    copy[:] = repacked[:-64]
    with (
        ggml_orders.Buffer(order.buffer_type, copy.ctypes.data, order.nbytes) as buffer,
        Products(tape, kind, ne) as ours,
    ):
        buffer.adopt(ours.weight, copy.ctypes.data)
        np.testing.assert_array_equal(ours.of(n, threads=1), got)


def test_tiles_keep_the_file_s_order_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for features, expected in (
        ({"AVX2"}, TILED_TYPES - {"q4_K"}),
        ({"AVX2", "AVX512", "AVX512_VNNI"}, TILED_TYPES),
        ({"NEON"}, set()),
    ):
        monkeypatch.setattr(ggml, "features", lambda found=features: dict.fromkeys(found, "1"))
        kinds = ggml.MATMUL_TYPES.items()
        assert {name for kind, name in kinds if ggml_orders._is_tiled(kind)} == expected


def test_a_type_or_shape_without_an_order_has_none() -> None:
    assert ggml_orders.find_order(ggml.F32, (256, 64)) is None
    for ne in ((256,), (256, 63), (256, 64, 1), (256, 64, 2, 2)):
        assert ggml_orders.find_order(KINDS[0], ne) is None
    assert ggml_orders.find_order(99, (256, 64)) is None


def test_unsuitable_tensors_are_refused(tape: um.Tape) -> None:
    kind, ne = KINDS[0], (256, 64)
    order = ggml_orders.find_order(kind, ne)
    assert order is not None
    at = tape.take_address(order.nbytes)
    with (
        Products(tape, kind, ne) as fits,
        Products(tape, kind, (256, 63)) as other,
        ggml_orders.Buffer(order.buffer_type, at, order.nbytes) as buffer,
    ):
        for data in (at - 64, at + 64, at + 1):
            with pytest.raises(ValueError, match=f"expected {order.nbytes} bytes .*got address"):
                buffer.adopt(fits.weight, data)
        with pytest.raises(ValueError, match=f"{name_of(kind)}, shape .*has no order"):
            buffer.adopt(other.weight, at)
        for weight in (fits.weight, other.weight):
            header = ggml.Tensor.at(weight)
            assert (header.buffer, header.data, header.extra) == (0, 0, 0)


def test_a_type_that_fails_its_trial_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    types = ggml_orders.all_types()
    assert ggml_orders.buffer_types.__wrapped__() == types
    monkeypatch.setattr(ggml_orders, "_SOUND", frozenset())
    assert ggml_orders.buffer_types.__wrapped__() == types  # they pass the trial
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert ggml_orders.buffer_types.__wrapped__() == ()
    monkeypatch.setattr(sys, "executable", "/none")
    assert ggml_orders.buffer_types.__wrapped__() == ()


def test_the_build_is_known_by_its_files_and_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ggml_orders.build()
    assert json.loads(json.dumps(found)) == found
    assert found["version"] == ggml.facts()["ggml"]
    assert len(found["libraries"]) == 64
    assert found["features"]
    assert found["buffer_types"] == [each.name for each in ggml_orders.buffer_types()]
    monkeypatch.setattr(ggml, "LIBRARIES", ggml.LIBRARIES[:1])
    assert ggml_orders.build.__wrapped__()["libraries"] != found["libraries"]
