"""Weights in the orders that ggml's extra buffer types multiply fastest, in memory of the caller.

A build of ggml has such types for the CPUs that it knows: AMX, KleidiAI, and its own interleaving
of rows ("CPU_REPACK"). Their buffers write a tensor in the type's order when its data are set, and
mark it so that products use the type's kernel. ggml would allocate the memory of such a buffer
itself; here they lie in memory of the caller.

Facts of ggml 0.26: ``ggml-cpu/repack.cpp``, ``ggml-cpu/amx/amx.cpp``, and ``make_cpu_buft_list`` of
llama.cpp, whose order of types is kept.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import random
from ctypes import c_char
from pathlib import Path
from typing import Any, NamedTuple

from unimem.backends import ggml
from unimem.backends.ggml_trial import passes_trial
from unimem.models.shapes import TILED_TYPES

_REPACK = "CPU_REPACK"
_SOUND = frozenset({_REPACK})
_TINY_BYTES = 4096
_MOST_TENSORS = 4  # in the context of a question: a weight, its input, ids, and the product


class BufferType(NamedTuple):
    """One of ggml's extra buffer types, for this build and CPU."""

    name: str  # ggml's: "CPU_REPACK", "AMX"
    alignment: int  # of each tensor's data, in bytes
    address: int  # ggml's struct, which lives as long as the process


class Order(NamedTuple):
    """How a tensor is stored for the fastest product."""

    buffer_type: BufferType
    nbytes: int
    kernel: int  # ggml's mark: the same for tensors with the same code, in this process alone


@functools.cache
def buffer_types() -> tuple[BufferType, ...]:
    """List the extra buffer types of this build and CPU, in the order in which to ask them.

    Types whose buffers cannot lie in memory of the caller, or that fail a trial, are left out: some
    compilers build AMX code that ends the process. The first trial starts a process. ggml's own
    interleaving, which is plain code, needs none.
    """
    return tuple(
        one for one in all_types() if one.name in _SOUND or passes_trial(one.name, _facts())
    )


@functools.cache
def all_types() -> tuple[BufferType, ...]:
    """List the extra buffer types that can lie in memory of the caller, before any trial."""
    return tuple(BufferType(*found) for found in ggml.extra_buffer_types())


@functools.lru_cache(maxsize=1024)  # a model has few shapes
def find_order(kind: int, ne: tuple[int, ...]) -> Order | None:
    """Return the order that multiplies a weight fastest; None for the file's.

    It is that of the first buffer type that has one, unless ggml's newer kernels are faster with
    the file's.

    Parameters
    ----------
    kind : int
        ggml's number of the type.
    ne : tuple of int
        Shape in ggml's order: 2-d for `MUL_MAT`, 3-d with the number of experts last for
        `MUL_MAT_ID`.
    """
    found = (
        order_of(one, kind, ne)
        for one in buffer_types()
        if not (one.name == _REPACK and _is_tiled(kind))
    )
    return next(filter(None, found), None)


def _is_tiled(kind: int) -> bool:
    """Return whether ggml multiplies a type fastest tile by tile, from the file's order, here.

    With VNNI of AVX-512, batches take 0.4 to 0.6 of the time of interleaved rows. Without it they
    take the same time, and tokens more, in the one such type that AVX2 interleaves
    (docs/repack.md).
    """
    name, found = ggml.MATMUL_TYPES.get(kind), ggml.features()
    is_faster = "AVX512_VNNI" in found or name != "q4_K"
    return "AVX2" in found and name in TILED_TYPES and is_faster


@functools.lru_cache(maxsize=1024)
def order_of(buffer_type: BufferType, kind: int, ne: tuple[int, ...]) -> Order | None:
    """Return the order of one buffer type for a weight: see `find_order`."""
    if len(ne) not in (2, 3) or kind not in ggml.MATMUL_TYPES:
        return None
    size = _MOST_TENSORS * ggml.tensor_overhead()
    memory = (c_char * (size + 16))()
    context = ggml.new_context(-(-ctypes.addressof(memory) // 16) * 16, size)
    try:
        weight = ggml.new_tensor(context, kind, *ne)
        if len(ne) == 2:
            product = ggml.mul_mat(context, weight, ggml.new_tensor(context, ggml.F32, ne[0], 1))
        else:
            ids = ggml.new_tensor(context, ggml.I32, 1, 1)
            values = ggml.new_tensor(context, ggml.F32, ne[0], 1, 1)
            product = ggml.mul_mat_id(context, weight, values, ids)
        header = ggml.Tensor.at(weight)
        with Buffer(buffer_type, ctypes.addressof(memory), size) as buffer:
            header.buffer = buffer.address
            ggml.init_tensor(buffer.address, weight)
            # AMX also marks weights without a kernel; repack does not.
            if not header.extra or not ggml.supports(product):
                return None
            nbytes = ggml.alloc_size(buffer_type.address, weight)
            return Order(buffer_type, nbytes, header.extra)
    finally:
        ggml.free(context)


@functools.lru_cache(maxsize=1024)
def are_rows_apart(kind: int, ne: tuple[int, ...], n_rows: int) -> bool:
    """Return whether a tensor may be written in pieces, each a 2-d tensor of `n_rows` rows.

    ggml does not promise that. So pieces must have the same kernel and add up to the same bytes,
    and a small tensor of this row length, written in pieces, must have the same bytes as when it is
    written whole.

    Parameters
    ----------
    kind, ne
        As for `find_order`, of a tensor that has an order.
    n_rows : int
        Rows of a piece, counted through all experts.
    """
    whole, total = find_order(kind, ne), ne[1] * (ne[2] if len(ne) > 2 else 1)
    parts = {n_rows, total % n_rows or n_rows}
    found = {n: find_order(kind, (ne[0], n)) for n in parts}
    probe = (ne[0], 2 * n_rows) if len(ne) == 2 else (ne[0], n_rows, 2)
    both = find_order(kind, probe)
    if whole is None or both is None or whole.nbytes % total:
        return False
    row_bytes = whole.nbytes // total
    for n, order in (*found.items(), (2 * n_rows, both)):
        if order is None or (order.kernel, order.nbytes) != (whole.kernel, n * row_bytes):
            return False
    data = random.Random(0).randbytes(2 * n_rows * ggml.row_size(kind, ne[0]))
    held = ctypes.create_string_buffer(data, len(data))
    source = ctypes.addressof(held)
    memory = [(c_char * (both.nbytes + _TINY_BYTES))() for _ in range(2)]
    at = [-(-ctypes.addressof(one) // _TINY_BYTES) * _TINY_BYTES for one in memory]
    for place, pieces in zip(at, (1, 2), strict=True):
        with Buffer(whole.buffer_type, place, both.nbytes) as buffer:
            for i in range(pieces):
                shape = probe if pieces == 1 else (ne[0], n_rows)
                done = i * len(data) // 2, i * both.nbytes // 2
                buffer.write(kind, shape, source + done[0], place + done[1])
    return ctypes.string_at(at[0], both.nbytes) == ctypes.string_at(at[1], both.nbytes)


class Buffer:
    """Memory of the caller, as a ggml buffer of one type.

    ggml reads the buffer of a weight with each product: buffer and memory must outlive the graphs
    that use its tensors. Any number of threads may write different tensors. `address` is that of
    ggml's struct, or 0 once it is freed.
    """

    def __init__(self, buffer_type: BufferType, address: int, nbytes: int) -> None:
        self.buffer_type = buffer_type
        self._range = range(address, address + nbytes)
        self.address = ggml.new_buffer(buffer_type.address, address, nbytes)

    def adopt(self, tensor: int, data: int) -> None:
        """Point a header of ggml at repacked bytes, which may be written already or later.

        Parameters
        ----------
        tensor : int
            A header of a type and shape for which `order_of` finds an order of this type.
        data : int
            Address of its bytes, a multiple of the type's alignment.

        Raises
        ------
        ValueError
            There is no such order, or the bytes are not inside the memory. The header is unchanged.
        """
        header = ggml.Tensor.at(tensor)
        ne = header.ne
        order = order_of(self.buffer_type, header.type, ne[: 3 if ne[2] > 1 else 2])
        if order is None:
            name = ggml.MATMUL_TYPES.get(header.type, f"type {header.type}")
            raise ValueError(
                f"a tensor of {name}, shape {ne}: {self.buffer_type.name} has no order for it here"
            )
        self._adopt_as(order, tensor, data)

    def _adopt_as(self, order: Order, tensor: int, data: int) -> None:
        inside = data in self._range and data + order.nbytes <= self._range.stop
        if not inside or data % self.buffer_type.alignment:
            raise ValueError(
                f"data: expected {order.nbytes} bytes at a multiple of "
                f"{self.buffer_type.alignment} in {self._range.start:#x} to {self._range.stop:#x}, "
                f"got address {data:#x}"
            )
        header = ggml.Tensor.at(tensor)
        header.buffer, header.data = self.address, data
        ggml.init_tensor(self.address, tensor)

    def write(self, kind: int, ne: tuple[int, ...], source: int, data: int) -> None:
        """Write a whole tensor at `data` in the type's order, with the interpreter's lock released.

        `source` is the address of its bytes in the file's order; `kind` and `ne` are as for
        `find_order`.
        """
        self.write_as(order_of(self.buffer_type, kind, ne), kind, ne, source, data)

    def write_as(
        self, order: Order | None, kind: int, ne: tuple[int, ...], source: int, data: int
    ) -> None:
        """Write a tensor whose order is known: see `write`."""
        if order is None or order.buffer_type != self.buffer_type:
            raise ValueError(f"{self.buffer_type.name} has no order for type {kind}, shape {ne}")
        size = ggml.tensor_overhead()
        memory = (c_char * (size + 16))()
        context = ggml.new_context(-(-ctypes.addressof(memory) // 16) * 16, size)
        try:
            tensor = ggml.new_tensor(context, kind, *ne)
            self._adopt_as(order, tensor, data)
            ggml.set_tensor(tensor, source, ggml.Tensor.at(tensor).nbytes)
        finally:
            ggml.free(context)

    def free(self) -> None:
        """Free ggml's struct; the memory stays. Freeing twice is no error."""
        if self.address:
            ggml.free_buffer(self.address)
            self.address = 0

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


@functools.cache
def build() -> dict[str, Any]:
    """Identify the build of ggml and the CPU for which repacked bytes are valid.

    Returns
    -------
    dict
        ``version`` and ``commit`` of ggml, ``libraries`` (SHA-256 of ggml's files), ``features``
        (name and value of each CPU feature) and ``buffer_types`` (names).
    """
    return _facts() | {"buffer_types": [one.name for one in buffer_types()]}


def _facts() -> dict[str, Any]:
    digest = hashlib.sha256()
    for path in ggml.LIBRARIES:
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return {**ggml.version(), "libraries": digest.hexdigest(), "features": ggml.features()}
