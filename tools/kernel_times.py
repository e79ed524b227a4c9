"""Times of ggml's kernels on this CPU: which order of weights and of the KV cache is faster.

``python tools/kernel_times.py`` multiplies matrices of 2048 x 5632 of each type, as they lie in a
file and repacked, with one column (a token) and with 128, 256 and 512 (a batch). ``--attention``
attends over caches whose rows lie token by token, and head by head. ``--experts`` multiplies with 8
of 64 matrices of 1024 x 1536, and prints the time for one of the 8, the time of repacking it, and
the uses by a token that pay for that. All print Markdown, in CPU time of one thread, so that
neighbours count little. ``UNIMEM_GGML_CPU=haswell`` takes the kernels of another CPU, if ggml was
built for all.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median

import numpy as np

import unimem as um
from unimem.backends import ggml, ggml_orders

N_IN, N_OUT = 2048, 5632
COLUMNS = 1, 128, 256, 512
TYPES = "q4_0 q8_0 q2_K q3_K q4_K q5_K q6_K iq4_nl iq4_xs mxfp4 f16 bf16 q2_0".split()
WEIGHT, EXPERTS, N_USED = (N_IN, N_OUT), (1024, 1536, 64), 8
MORE_THAN_CACHES = 64_000_000
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 64  # TinyLlama's
CACHE_TYPES = {"f16": ggml.F16, "q8_0": ggml.Q8_0, "q4_0": 2}
LENGTHS = 2048, 8192, 32768
BUFFER_TYPES = ggml_orders.all_types()
RNG = np.random.default_rng(0)


@contextmanager
def graph_of(nodes: Callable[[int], Iterator[int]]) -> Iterator[Callable[[], float]]:
    """Build a graph of nodes in memory of its own; yield what computes it, in seconds."""
    with um.Tape(64 << 20) as tape:
        context = ggml.new_context(tape.take_address(1 << 18), 1 << 18)
        graph = ggml.new_graph(context, 64)
        for node in nodes(context):
            ggml.expand(graph, node)
        plan = tape.take_address(ggml.PLAN_BYTES)
        ggml.plan(plan, graph, 1, 0, tape.take_address(ggml.plan(plan, graph, 1) + 64))

        def compute() -> float:
            start = time.thread_time()
            ggml.compute(graph, plan, 1)
            return time.thread_time() - start

        yield compute
        ggml.free(context)


def put(tape: um.Tape, tensor: int, fill: bool = False) -> int:
    """Give a tensor memory."""
    header = ggml.Tensor.at(tensor)
    values = tape.take(header.nbytes // 4 + 1, "float32")
    if fill:
        values[:] = RNG.standard_normal(values.size, np.float32)
    header.data = values.ctypes.data
    return tensor


def product(context: int, tape: um.Tape, weight: int, n: int, n_used: int) -> int:
    """Multiply a weight with n columns, or the matrices that these choose."""
    n_in = ggml.Tensor.at(weight).ne[0]
    if not n_used:
        values = put(tape, ggml.new_tensor(context, ggml.F32, n_in, n), fill=True)
        return int(ggml.mul_mat(context, weight, values))
    chosen = tape.take((n, n_used), "int32")
    for row in chosen:
        row[:] = RNG.permutation(EXPERTS[2])[:n_used]
    ids = ggml.new_tensor(context, ggml.I32, n_used, n)
    ggml.Tensor.at(ids).data = chosen.ctypes.data
    values = put(tape, ggml.new_tensor(context, ggml.F32, n_in, 1, n), fill=True)
    return int(ggml.mul_mat_id(context, weight, values, ids))


def product_times(
    kind: int, order: ggml_orders.Order | None, ne: tuple[int, ...], n_used: int
) -> list[float]:
    """Return the seconds of a column, for each number of columns."""
    nbytes = ggml.row_size(kind, ne[0]) * math.prod(ne[1:])
    size = order.nbytes if order else nbytes
    copies, each = max(1, MORE_THAN_CACHES // size), max(1, n_used)
    found = []
    with um.Tape(nbytes + copies * (size + 128) + (192 << 20)) as tape, ExitStack() as stack:
        source = tape.take_bytes(nbytes)
        source[:] = RNG.integers(0, 32, nbytes, np.uint8)  # small, positive scales
        weights: list[tuple[int, ggml_orders.Buffer | None]] = []
        for _ in range(copies):
            place, buffer = tape.take_bytes(size), None
            if order is None:
                place[:] = source
            else:
                address = place.ctypes.data
                buffer = ggml_orders.Buffer(order.buffer_type, address, size)
                stack.enter_context(buffer)
                buffer.write_as(order, kind, ne, source.ctypes.data, address)
            weights.append((place.ctypes.data, buffer))
        for n in COLUMNS:

            def nodes(context: int, n: int = n) -> Iterator[int]:
                result = tape.take(ne[1] * n * each, "float32")  # of all products
                for place, buffer in weights:
                    weight = ggml.new_tensor(context, kind, *ne)
                    if buffer is None:
                        ggml.Tensor.at(weight).data = place
                    else:
                        buffer.adopt(weight, place)
                    made = product(context, tape, weight, n, n_used)
                    ggml.Tensor.at(made).data = result.ctypes.data
                    yield made

            mark = tape.mark()
            with graph_of(nodes) as compute:
                found.append(
                    median(compute() for _ in range(9 if n == 1 else 3)) / copies / n / each
                )
            tape.rewind(mark)
    return found


def repack_time(kind: int, order: ggml_orders.Order, ne: tuple[int, ...]) -> float:
    """Return the seconds of repacking one of the matrices, which no cache of the CPU holds."""
    nbytes, found = ggml.row_size(kind, ne[0]) * ne[1], []
    with um.Tape(2 * (MORE_THAN_CACHES + nbytes)) as tape:
        for _ in range(MORE_THAN_CACHES // nbytes):
            source, place = tape.take_bytes(nbytes), tape.take_bytes(nbytes)
            source[:] = RNG.integers(0, 32, nbytes, np.uint8)
            place[:] = 0
            address = place.ctypes.data
            with ggml_orders.Buffer(order.buffer_type, address, nbytes) as buffer:
                start = time.thread_time()
                buffer.write(kind, ne[:2], source.ctypes.data, address)
                found.append(time.thread_time() - start)
    return median(found)


def print_products(ne: tuple[int, ...] = WEIGHT, n_used: int = 0) -> None:
    """Print the table of matrix products, or of those with chosen experts."""
    columns = [*map(str, COLUMNS), *(("repacking", "uses that pay") if n_used else ())]
    print("| type | order | " + " | ".join(columns) + " |")
    print("|---|---|" + "--:|" * len(columns))
    numbers = {name: number for number, name in ggml.MATMUL_TYPES.items()}
    for name in TYPES:
        kind = numbers[name]
        orders = [None, *(ggml_orders.order_of(t, kind, ne) for t in BUFFER_TYPES)]
        as_filed = 0.0  # of a token
        for order in orders[:1] + [order for order in orders[1:] if order]:
            what = "as in the file" if order is None else order.buffer_type.name
            times = product_times(kind, order, ne, n_used)
            row = [f"{1e6 * t:.0f} µs" for t in times]
            if order is None:
                as_filed = times[0]
                row += ["", ""] if n_used else []
            elif n_used:
                repacking, gain = repack_time(kind, order, ne), as_filed - times[0]
                row += [f"{1e6 * repacking:.0f} µs", f"{repacking / gain:.1f}" if gain > 0 else "-"]
            print(f"| {name} | {what} | " + " | ".join(row) + " |", flush=True)


def attention_time(kind: int, n_rows: int, by_head: bool) -> float:
    """Return the seconds of attention of one token over three caches of `n_rows` rows."""
    row = ggml.row_size(kind, HEAD_DIM)
    strides = (row, row * n_rows) if by_head else (row * KV_HEADS, row)
    nbytes, n_layers = row * n_rows * KV_HEADS, 3
    with um.Tape(2 * n_layers * (nbytes + 64) + 8 * HEAD_DIM * KV_HEADS * n_rows) as tape:
        values = tape.take((n_rows * KV_HEADS, HEAD_DIM), "float32")
        values[:] = RNG.standard_normal(values.shape, np.float32)

        def cache(context: int) -> int:
            at = tape.take_address(nbytes)
            ggml.quantize(kind, values.ctypes.data, at, n_rows * KV_HEADS, HEAD_DIM)
            tensor = ggml.new_tensor(context, kind, HEAD_DIM, n_rows, KV_HEADS)
            header = ggml.Tensor.at(tensor)
            header.data, header.nb = at, (header.nb[0], *strides, nbytes)
            return tensor

        def nodes(context: int) -> Iterator[int]:
            query = put(tape, ggml.new_tensor(context, ggml.F32, HEAD_DIM, 1, HEADS), fill=True)
            mask = put(tape, ggml.new_tensor(context, ggml.F16, n_rows, 1))
            for _ in range(n_layers):
                lanes = cache(context), cache(context)
                attended = ggml.flash_attn_ext(context, query, *lanes, mask, 0.125, 0, 0)
                yield put(tape, attended)

        with graph_of(nodes) as compute:
            return median(compute() for _ in range(7)) / n_layers


def print_attention() -> None:
    """Print the table of attention."""
    print("| rows | type | token by token | head by head | |\n|--:|---|--:|--:|--:|")
    for n in LENGTHS:
        for name, kind in CACHE_TYPES.items():
            token, head = (attention_time(kind, n, by_head) for by_head in (False, True))
            times = f"{1e3 * token:.2f} ms | {1e3 * head:.2f} ms | {token / head:.2f}x"
            print(f"| {n} | {name} | {times} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--experts", action="store_true")
    given = parser.parse_args()
    print(f"ggml {ggml.version()['version']}, {' '.join(ggml.facts()['cpu_features'])}\n")
    if given.attention:
        print_attention()
    else:
        print_products(*((EXPERTS, N_USED) if given.experts else ()))
