"""The nodes that bring streamed weights into memory: products from slots, and what ends a graph."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.models import decoders  # noqa: F401 - skips where something is missing
from unimem._core.pieces import Pieces
from unimem.backends import ggml
from unimem.engine.pieces_op import PieceReader, experts_address, layer_address

N, K, M, N_USED = 9, 256, 40, 3  # experts [M, K]
TYPES = {name: number for number, name in ggml.MATMUL_TYPES.items()}
NEEDS_IMPORTANCE = ("iq1_s", "iq2_xs", "iq2_xxs")
QUANTIZED = [name for name in TYPES if name not in NEEDS_IMPORTANCE]


def quantize(kind: int, values: NDArray[np.float32]) -> bytes:
    """Convert rows of float32 to a type."""
    values = np.ascontiguousarray(values, np.float32)
    rows = values.reshape(-1, values.shape[-1])
    if kind == ggml.F32:
        return rows.tobytes()
    into = ctypes.create_string_buffer(ggml.row_size(kind, rows.shape[1]) * len(rows))
    ggml.quantize(kind, rows.ctypes.data, ctypes.addressof(into), *rows.shape)
    return into.raw


class Products:
    """A graph of `mul_mat_id` or `mul_mat`, computed in its own memory."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(1 << 20)
        self.context = ggml.new_context(-(-ctypes.addressof(self._memory) // 64) * 64, 1 << 19)
        self.graph = ggml.new_graph(self.context, 16)
        self._kept: list[Any] = []

    def tensor(self, kind: int, ne: tuple[int, ...], array: Any) -> int:
        """Make a header over an array, a buffer or an address."""
        header = ggml.new_tensor(self.context, kind, *ne)
        if isinstance(array, bytes):
            array = ctypes.create_string_buffer(array, len(array))
        self._kept.append(array)
        if isinstance(array, np.ndarray):
            array = array.ctypes.data
        elif not isinstance(array, int):
            array = ctypes.addressof(array)
        ggml.Tensor.at(header).data = array
        return int(header)

    def compute(self, node: int, shape: tuple[int, ...], threads: int) -> NDArray[np.float32]:
        """Compute a node, whose sources lie in place or are views."""
        result = np.zeros(shape, np.float32)
        ggml.Tensor.at(node).data = result.ctypes.data
        ggml.expand(self.graph, node)
        plan = ctypes.create_string_buffer(ggml.PLAN_BYTES)
        at = ctypes.addressof(plan)
        nbytes = ggml.plan(at, self.graph, threads)
        work = ctypes.create_string_buffer(nbytes + 64)
        ggml.plan(at, self.graph, threads, 0, -(-ctypes.addressof(work) // 64) * 64)
        assert ggml.compute(self.graph, at, threads) == 0
        return result

    def view(self, node: int) -> int:
        """Give a view the address of what it views."""
        tensor = ggml.Tensor.at(node)
        tensor.data = ggml.Tensor.at(tensor.view_src).data + tensor.view_offs
        return node

    def free(self) -> None:
        """Free what ggml holds."""
        ggml.free(self.context)


@pytest.fixture
def products() -> Iterator[Callable[[], Products]]:
    made: list[Products] = []

    def make() -> Products:
        made.append(Products())
        return made[-1]

    yield make
    for one in made:
        one.free()


def open_pieces(path: Path, sizes: list[int], n: int, slots: int, **options: Any) -> Pieces:
    """Make pieces of a file that has all first parts behind 5 bytes, then all second parts."""
    firsts = [5 + n * sum(sizes[:i]) for i in range(len(sizes))]
    fd = os.open(path, os.O_RDONLY)
    try:
        places = [
            (0, [(0, first + i * size) for first, size in zip(firsts, sizes, strict=True)])
            for i in range(n)
        ]
        return Pieces([(fd, str(path))], [sizes], places, slots=[slots], **options)
    finally:
        os.close(fd)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(("n_tokens", "slots"), [(1, 3), (40, 9)], ids=["a token", "a batch"])
def test_products_from_slots_have_the_bits_of_those_from_the_file(
    kind: str, n_tokens: int, slots: int, tmp_path: Path, products: Callable[[], Products]
) -> None:
    number, rng = TYPES[kind], np.random.default_rng(len(kind))
    try:
        data = quantize(number, rng.standard_normal((N, M, K), np.float32))
    except ValueError as error:
        pytest.skip(str(error))
    x = rng.standard_normal((n_tokens, 1, K), np.float32)
    # As the router's choice: the first columns of a wider array.
    order = np.array([rng.permutation(N) for _ in range(n_tokens)], np.int32)
    path = tmp_path / "experts"
    other = os.urandom(7 * N)  # a second part, whose size leaves slots at odd places
    path.write_bytes(b"front" + data + other)
    shape = n_tokens, N_USED, M
    with open_pieces(path, [len(data) // N, 7], N, slots) as pieces:
        reader = PieceReader(pieces, n_tokens * N_USED, print)
        for threads in (1, 2) if kind == "q4_K" else (1,):
            results = []
            for is_streamed in (False, True):
                graph = products()
                chosen = graph.tensor(ggml.I32, (N, n_tokens), order.copy())
                ids = ggml.view_2d(graph.context, chosen, N_USED, n_tokens, 4 * N, 0)
                graph.view(ids)
                if is_streamed:
                    at = pieces.address(0) + pieces.part_offset(0, 0)
                    experts = graph.tensor(number, (K, M, slots), at)
                    header, stride = ggml.Tensor.at(experts), pieces.stride(0)
                    header.nb = *header.nb[:2], stride, slots * stride
                    node, _ = reader.experts(0, 0, N)
                    ids = ggml.map_custom1_inplace(graph.context, ids, experts_address, 1, node)
                    graph.view(ids)
                else:
                    experts = graph.tensor(number, (K, M, N), data)
                values = graph.tensor(ggml.F32, (K, 1, n_tokens), x)
                product = ggml.mul_mat_id(graph.context, experts, values, ids)
                results.append(graph.compute(product, shape, threads))
            np.testing.assert_array_equal(results[1], results[0])
            assert np.isfinite(results[0]).all()
        reader.close()


def test_experts_are_foreseen_only_after_reads(
    tmp_path: Path, products: Callable[[], Products]
) -> None:
    path = tmp_path / "experts"
    path.write_bytes(bytes(5 + 100 * N))
    told, found = np.full(1, -1, np.int64), []
    with open_pieces(path, [100], N, N) as pieces:
        reader = PieceReader(pieces, 2, print)
        node, sizes = reader.experts(0, 0, N)
        sizes[0] = told.ctypes.data
        for chosen in ([0, 1], [0, 1], [1, 2], [2, 0]):
            graph = products()
            ids = graph.tensor(ggml.I32, (2, 1), np.array([chosen], np.int32))
            ids = ggml.map_custom1_inplace(graph.context, ids, experts_address, 1, node)
            rows = graph.tensor(ggml.F32, (1, N), np.zeros(N, np.float32))
            graph.compute(ggml.get_rows(graph.context, rows, graph.view(ids)), (2, 1), 1)
            found.append(int(told[0]))
        reader.close()
    assert found == [1, 0, 1, 0]


def test_a_layer_is_pointed_at_its_slot(tmp_path: Path, products: Callable[[], Products]) -> None:
    rng = np.random.default_rng(1)
    layers = rng.standard_normal((4, 2, M, K), np.float32)  # two matrices each
    path = tmp_path / "layers"
    path.write_bytes(b"front" + layers.tobytes())
    size = layers[0].nbytes
    x = rng.standard_normal((1, K), np.float32)
    with open_pieces(path, [size], 4, 2, policy="cycle") as pieces:
        reader = PieceReader(pieces, 1, print)
        pool, at = (pieces.address(0), pieces.stride(0)), pieces.part_offset(0, 0)
        for number in (0, 1, 3, 2, 0):
            graph = products()
            first, second = (graph.tensor(ggml.F32, (K, M), 8) for _ in range(2))
            offsets = {first: at, second: at + size // 2}
            node = reader.layer(number, pool, offsets, [(number + 1) % 4])
            values = graph.tensor(ggml.F32, (K, 1), x)
            values = ggml.map_custom1_inplace(graph.context, values, layer_address, 1, node)
            graph.view(values)
            product = ggml.mul_mat(graph.context, second, values)
            found = graph.compute(product, (1, M), 1)
            np.testing.assert_allclose(found, x @ layers[number, 1].T, rtol=1e-4, atol=1e-4)
        stat = pieces.stat()
        assert stat["prefetched"] > 0
        assert stat["hits"] + stat["misses"] == 5
        reader.close()


def test_a_reader_lets_pieces_go_with_its_end(tmp_path: Path) -> None:
    path = tmp_path / "pieces"
    path.write_bytes(bytes(1000))
    pieces = open_pieces(path, [100], 4, 2)
    reader = PieceReader(pieces, 3, print)
    with pytest.raises(BufferError, match="holder"):
        pieces.close()
    reader.close()
    pieces.close()
    with pytest.raises(um.ClosedError):
        PieceReader(pieces, 3, print)
