"""The program that tries one of ggml's extra buffer types.

``python -m unimem.backends.ggml_trial_process NAME`` exits with 0 if its products equal those of
the file's order, else with `ggml_trial.UNSOUND`. Some builds have kernels that end the process
instead: GCC 12.2 removes the stores that set AMX's tiles up (llama.cpp pull request 26954).
"""

from __future__ import annotations

import ctypes
import random
import sys
from array import array
from collections.abc import Sequence

from unimem.backends import ggml, ggml_orders
from unimem.backends.ggml_trial import UNSOUND

_NE = (256, 64)
_COLUMNS = (1, 32)  # one token, and several, which use other code
_MOST = 0.02  # the largest error, as a part of the largest product: rounding differs
_ROOM = 1 << 18


def is_sound(name: str) -> bool:
    """Return whether products by a type of this name are right; wrong code may end the process."""
    (found,) = [one for one in ggml_orders.all_types() if one.name == name]
    for kind in ggml.MATMUL_TYPES:
        order = ggml_orders.order_of(found, kind, _NE)
        if order is None:
            continue
        # Bytes of this range are small, positive scales.
        rng = random.Random(kind)
        nbytes = ggml.row_size(kind, _NE[0]) * _NE[1]
        data = ctypes.create_string_buffer(bytes(rng.choices(range(32), k=nbytes)), nbytes)
        memory = ctypes.create_string_buffer(order.nbytes + 64)
        at = -(-ctypes.addressof(memory) // 64) * 64
        with ggml_orders.Buffer(found, at, order.nbytes) as buffer:
            buffer.write_as(order, kind, _NE, ctypes.addressof(data), at)
            for n in _COLUMNS:
                plain = _multiply(kind, n, ctypes.addressof(data), None)
                other = _multiply(kind, n, at, buffer)
                worst = max(abs(a - b) for a, b in zip(plain, other, strict=True))
                if not worst <= _MOST * max(map(abs, plain)):
                    return False
    return True


def _multiply(kind: int, n: int, data: int, buffer: ggml_orders.Buffer | None) -> Sequence[float]:
    """Multiply a weight with n random columns, in ggml."""
    memory = ctypes.create_string_buffer(_ROOM)
    context = ggml.new_context(-(-ctypes.addressof(memory) // 64) * 64, _ROOM - 64)
    weight = ggml.new_tensor(context, kind, *_NE)
    header = ggml.Tensor.at(weight)
    header.data = data
    if buffer is not None:
        header.buffer = buffer.address
        ggml.init_tensor(buffer.address, weight)
    inputs = ggml.new_tensor(context, ggml.F32, _NE[0], n)
    product = ggml.mul_mat(context, weight, inputs)
    rng = random.Random(n)
    numbers = array("f", (rng.uniform(-1, 1) for _ in range(_NE[0] * n)))
    result = array("f", bytes(4 * _NE[1] * n))
    ggml.Tensor.at(inputs).data = numbers.buffer_info()[0]
    ggml.Tensor.at(product).data = result.buffer_info()[0]
    graph = ggml.new_graph(context, 8)
    ggml.expand(graph, product)
    plan = ctypes.create_string_buffer(ggml.PLAN_BYTES)
    at = ctypes.addressof(plan)
    work = ctypes.create_string_buffer(ggml.plan(at, graph, 1) + 64)
    ggml.plan(at, graph, 1, 0, -(-ctypes.addressof(work) // 64) * 64)
    ggml.compute(graph, at, 1)
    ggml.free(context)
    return result


if __name__ == "__main__":
    sys.exit(0 if is_sound(sys.argv[1]) else UNSOUND)
