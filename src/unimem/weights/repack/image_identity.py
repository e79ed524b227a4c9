"""The identity of a repacked image: a model, a build of ggml, a CPU, and the order of bytes.

Equal identities mean equal bytes. The model is identified by its fingerprint (headers and sizes),
and by each file's device, inode, size, and times of the last change of its data and its inode. None
of its data is read. ggml is identified by its version and the hash of its files, and the CPU by the
features that ggml finds. The probe is the hash of a known pattern in each order.
"""

from __future__ import annotations

import ctypes
import functools
import random
from math import prod
from typing import Any

import xxhash

from unimem.weights.repack.arrangement import Arrangement
from unimem.weights.tensors import Contents

_ALIGN = 4096
_WIDTH, _ROWS = 512, 64  # of a pattern: multiples of what any order interleaves


def identify(contents: Contents, found: Arrangement) -> dict[str, Any]:
    """Return the identity that an image of a model has to have, here and now.

    It has ``model``, ``files``, ``ggml`` and ``probe``, as JSON can hold them. Only headers of the
    model are read.
    """
    from unimem.backends import ggml_orders

    return {
        "model": contents.fingerprint,
        "files": [list(part.file.identity) for part in contents._parts],
        "ggml": ggml_orders.build(),
        "probe": _probe(found),
    }


def _probe(found: Arrangement) -> dict[str, str]:
    """Hash a known pattern in each order: one pattern for all tensors of the same kernel."""
    shapes: dict[tuple[int, int, int], tuple[int, ...]] = {}
    names: dict[tuple[int, int, int], str] = {}
    for tensor, order, _ in found.slots:
        assert tensor.ggml_type is not None  # or it had no order
        group = tensor.ggml_type, order.kernel, len(tensor.ne)
        if group not in shapes:
            shapes[group] = _pattern_shape(tensor.ggml_type, tensor.ne)
            names[group] = f"{len(names)} {tensor.type} {order.buffer_type.name}"
    return {names[group]: _hash_pattern(group[0], ne) for group, ne in shapes.items()}


@functools.lru_cache(maxsize=1024)
def _pattern_shape(kind: int, ne: tuple[int, ...]) -> tuple[int, ...]:
    """Return a small shape that the same code orders, or else the tensor's shape."""
    from unimem.backends.ggml_orders import find_order

    wanted = find_order(kind, ne)
    assert wanted is not None
    for width in (_WIDTH, ne[0]):
        for rows in (_ROWS, ne[1]):
            shape = (width, rows, *(2 for _ in ne[2:]))
            order = find_order(kind, shape) if prod(shape) < prod(ne) else None
            if order is not None and order.kernel == wanted.kernel:
                return shape
    return ne


@functools.lru_cache(maxsize=1024)
def _hash_pattern(kind: int, ne: tuple[int, ...]) -> str:
    from unimem.backends import ggml
    from unimem.backends.ggml_orders import Buffer, find_order

    order = find_order(kind, ne)
    assert order is not None
    data = random.Random(0).randbytes(prod(ne[1:]) * ggml.row_size(kind, ne[0]))
    held = ctypes.create_string_buffer(data, len(data))
    memory = (ctypes.c_char * (order.nbytes + _ALIGN))()
    at = -(-ctypes.addressof(memory) // _ALIGN) * _ALIGN
    with Buffer(order.buffer_type, at, order.nbytes) as buffer:
        buffer.write(kind, ne, ctypes.addressof(held), at)
    return xxhash.xxh3_128_hexdigest(ctypes.string_at(at, order.nbytes))
