"""What the GPU twin costs, against CuPy and torch on the same device.

The suites of main memory differ in one point: here calls queue work and return, so the cost is
measured until the device has done all of it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import unimem as um
from unimem.backends import cuda_driver
from unimem.base.text import format_bytes
from unimem_bench.empty_call import EmptyCall
from unimem_bench.rounds import Side, stopwatch
from unimem_bench.states import read_through
from unimem_bench.suite import Measure, NotMeasured, Suite, costs, faster
from unimem_bench.weight_files import TENSOR_BYTES, tensors_that_fit, weight_file

SUITE = Suite("gpu", "What does the GPU twin cost?", passes=2)

N_FLOATS = 4096
SHAPE = N_HEADS, HEAD_DIM = 8, 128  # 2 KiB of K and 2 KiB of V a token, as float16
ROW_BYTES = N_HEADS * HEAD_DIM * 2
N_TOKENS = 128  # with two launches each, below the queue length at which the host waits
BATCH_TOKENS = 16384  # 64 MiB of K and V
DIMS = um.ModelDims(2048, 5632, 32, 8, 128, 32000, 22, 2048)
PINNED_BYTES = 1 << 30
N_TENSORS, QUICK_TENSORS = 60, 4  # 4 GB and 256 MiB
CUPY, TORCH = "CuPy slices", "torch slices"
TORCH_UPLOAD = "torch, a mapping"
PINNED, COPY = "pinned copy", "cudaMemcpyAsync"
CUPY_TOKENS, INDEX_COPY, CAT = "unimem, CuPy arrays", "torch index_copy_", "torch cat"
N_STEP_LAYERS = 16
DYNAMIC, STATIC = "DynamicCache", "StaticCache"


def require_gpu(measure: Measure) -> None:
    """Check that there is a GPU, and make CUDA's context.

    Its threads keep the CPUs that this process may use when they start, so it is pinned to one only
    afterwards.
    """
    measure.pin(None)
    try:
        cuda_driver.require()
    except ImportError as error:
        raise NotMeasured(str(error)) from None
    cuda_driver.driver(0).free_bytes()
    measure.pin(1)
    for name, value in device_facts().items():
        measure.fact(name, value)


def device_facts() -> dict[str, Any]:
    """Return the device's name, and the versions of CUDA."""
    import cupy

    runtime = cupy.cuda.runtime
    return {
        "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": runtime.driverGetVersion(),
        "cuda": runtime.runtimeGetVersion(),
    }


def torch_for(measure: Measure, peer: str) -> Any:
    """Return PyTorch if it is installed and sees the GPU; otherwise leave a peer out."""
    if not measure.installed("torch", peer):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # packages warn about each other
        import torch

        if torch.cuda.is_available():
            return torch
    measure.leave_out(peer, "torch is installed, but without CUDA, or sees no GPU")
    return None


# ---- taking -------------------------------------------------------------------------------------


@SUITE.case(
    "take",
    "What does an array of 16 KiB on the device cost?",
    unit="ns",
    targets=[faster("cupy.empty", 3.0, issue=5)],
)
def take(measure: Measure) -> None:
    """Compare ``Tape.take`` with ``cupy.empty``, which takes the same chunk of its pool anew."""
    require_gpu(measure)
    import cupy

    n = 300
    with ExitStack() as stack:
        peers = {
            "cupy.empty": stopwatch(
                f"empty({N_FLOATS}, dtype)", n, {"empty": cupy.empty, "dtype": np.dtype("float32")}
            )
        }
        torch = torch_for(measure, "torch.empty")
        if torch is not None:
            names = {"empty": torch.empty, "dtype": torch.float32, "device": torch.device("cuda")}
            statement = f"empty({N_FLOATS}, dtype=dtype, device=device)"
            peers["torch.empty"] = stopwatch(statement, n, names)
        call = stopwatch("call(64, 64)", n, {"call": EmptyCall().call})
        measure.compare(takes(stack, n), peers, {"empty Cython call": call}, rounds=201)


def takes(stack: ExitStack, n: int) -> dict[str, Side]:
    """Measure taking again what `clear` gave back, whose arrays exist, and taking anew."""
    from unimem import cuda

    class First:
        """Takes from a new tape."""

        def renew(self) -> None:
            self.tape = cuda.Tape(block)
            self.take = self.tape.take

    block = stack.enter_context(cuda.Block(n * N_FLOATS * 4))
    tape = stack.enter_context(cuda.Tape(block))
    first = First()
    stack.callback(vars(first).clear)  # the last tape holds the block
    dtype = np.dtype("float32")
    again = {"take": tape.take, "dtype": dtype}
    return {
        "unimem": stopwatch(f"take({N_FLOATS}, dtype)", n, again, tape.clear),
        "unimem, the first time": stopwatch(
            f"first.take({N_FLOATS}, dtype)", n, {"first": first, "dtype": dtype}, first.renew
        ),
    }


# ---- appending ----------------------------------------------------------------------------------


class Statement(NamedTuple):
    """The statement that a side runs `N_TOKENS` times."""

    source: str  # Python; it sees the number of the run as ``i``
    names: Mapping[str, object]
    clear: Callable[[], object] | None = None  # empties what it fills, before a measurement


def call_time(statement: Statement) -> Side:
    """Measure a call alone, which queues its work, on an idle device."""
    return stopwatch(statement.source, N_TOKENS, statement.names, partial(idle, statement.clear))


def until_done(statement: Statement) -> Side:
    """Measure a call and its part of the wait until the device has done all calls."""
    scope: dict[str, Any] = {}
    arguments = ", ".join(f"{name}={name}" for name in statement.names)
    source = (
        f"def loop({arguments}):\n    for i in range({N_TOKENS}):\n        {statement.source}\n"
    )
    exec(source, dict(statement.names), scope)

    def run() -> float:
        idle(statement.clear)
        start = time.perf_counter()
        scope["loop"]()
        synchronize()
        return (time.perf_counter() - start) / N_TOKENS * 1e9

    return run


def idle(clear: Callable[[], object] | None = None) -> None:
    """Empty what a side fills, and wait until the device is idle."""
    if clear is not None:
        clear()
    synchronize()


def synchronize() -> None:
    """Wait until the device has done all queued work, which is in the default stream."""
    cuda_driver.driver(0).synchronize(0)


def append_token(measure: Measure, timed: Callable[[Statement], Side]) -> None:
    """Compare one token, K and V of a layer, with assignments to slices."""
    require_gpu(measure)
    import cupy

    from unimem import cuda

    k = cupy.asarray(np.random.default_rng(0).standard_normal(SHAPE).astype(np.float16))
    v = k + np.float16(1)
    keys, values = (cupy.zeros((N_TOKENS, *SHAPE), "float16") for _ in range(2))
    copies = "; ".join(
        f"copy({to.data.ptr} + i * {ROW_BYTES}, {from_.data.ptr}, {ROW_BYTES}, 3, 0)"
        for to, from_ in ((keys, k), (values, v))
    )
    assign = "keys[i] = k; values[i] = v"
    arrays = {"keys": keys, "values": values, "k": k, "v": v}
    with cuda.KVCache(1, *SHAPE, N_TOKENS, dtype="f16") as kv:
        names = {"append": kv.append, "k": k[None], "v": v[None]}
        ours = Statement("append(0, k, v)", names, kv.clear)
        compare_appends(measure, timed, ours, assign, arrays, copies)
        for stored, want in zip(kv.layer(0), (k, v), strict=True):
            check(stored[0].swapaxes(0, 1), want)
        for stored, want in ((keys, k), (values, v)):
            check(stored, want)


def append_row(measure: Measure, timed: Callable[[Statement], Side]) -> None:
    """Compare one vector with an assignment to a row."""
    require_gpu(measure)
    import cupy

    from unimem import cuda

    row = cupy.asarray(np.random.default_rng(0).standard_normal(ROW_BYTES // 2).astype(np.float16))
    rows = cupy.zeros((N_TOKENS, row.size), "float16")
    copies = f"copy({rows.data.ptr} + i * {ROW_BYTES}, {row.data.ptr}, {ROW_BYTES}, 3, 0)"
    with cuda.Scratchpad(N_TOKENS, row.size, "float16") as pad:
        ours = Statement("append(k)", {"append": pad.append, "k": row}, pad.clear)
        arrays = {"rows": rows, "k": row}
        compare_appends(measure, timed, ours, "rows[i] = k", arrays, copies)
        check(pad.as_array(), row)
        check(rows, row)


def compare_appends(
    measure: Measure,
    timed: Callable[[Statement], Side],
    ours: Statement,
    assign: str,
    arrays: Mapping[str, Any],
    copies: str,
) -> None:
    """Compare appends with assignments of CuPy and torch, and with plain copies.

    All sides but ours write to the same memory.
    """
    import cupy

    peers = {CUPY: timed(Statement(assign, arrays))}
    torch = torch_for(measure, TORCH)
    if torch is not None:
        tensors = {name: torch.from_dlpack(array) for name, array in arrays.items()}
        peers[TORCH] = timed(Statement(assign, tensors))
    copy = Statement(copies, {"copy": cupy.cuda.runtime.memcpyAsync})
    measure.compare({"unimem": timed(ours)}, peers, {COPY: timed(copy)}, rounds=101)


def check(stored: Any, want: Any) -> None:
    """Raise AssertionError unless there are `N_TOKENS` rows that all equal `want`."""
    if len(stored) != N_TOKENS or not bool((stored == want[None]).all()):
        raise AssertionError("a side did not write what it was given")


for name, what, run in (
    ("append", "one token, 2 KiB of K and 2 KiB of V,", append_token),
    ("append a vector", "a vector of 2 KiB", append_row),
):
    SUITE.case(
        name,
        f"What does {what} cost until the device has it?",
        unit="ns",
        targets=[faster(CUPY, 2.0, issue=5), faster(TORCH, 2.0, issue=5)],
    )(partial(run, timed=until_done))
    SUITE.case(
        f"{name}, the call", f"What does the call alone cost for {what.rstrip(',')}?", unit="ns"
    )(partial(run, timed=call_time))


@SUITE.case("append a batch", "How fast are 64 MiB of K and V appended at once?", unit="GB/s")
def append_batch(measure: Measure) -> None:
    """Compare a batch with slices, and with ``cudaMemcpyAsync`` of the same bytes."""
    require_gpu(measure)
    import cupy

    from unimem import cuda

    shape = (BATCH_TOKENS, *SHAPE)
    k = cupy.asarray(np.random.default_rng(0).integers(0, 99, shape).astype(np.float16))
    v = k + np.float16(1)
    keys, values = cupy.zeros(shape, "float16"), cupy.zeros(shape, "float16")
    with cuda.KVCache(1, *SHAPE, BATCH_TOKENS, dtype="f16") as kv:

        def append() -> None:
            kv.append(0, k, v)

        def slices() -> None:
            keys[:] = k
            values[:] = v

        def copy() -> None:
            for to, from_ in ((keys, k), (values, v)):
                to.data.copy_from_device_async(from_.data, from_.nbytes)

        nbytes = k.nbytes + v.nbytes
        peers = {CUPY: rate(slices, nbytes)}
        torch = torch_for(measure, TORCH)
        if torch is not None:
            t_keys, t_values, t_k, t_v = map(torch.from_dlpack, (keys, values, k, v))

            def torch_slices() -> None:
                t_keys[:] = t_k
                t_values[:] = t_v

            peers[TORCH] = rate(torch_slices, nbytes)
        ours = rate(append, nbytes, kv.clear)
        measure.compare({"unimem": ours}, peers, {COPY: rate(copy, nbytes)}, rounds=51)
        for stored, other, want in zip(kv.layer(0), (keys, values), (k, v), strict=True):
            if not bool((stored[0].swapaxes(0, 1) == want).all() & (other == want).all()):
                raise AssertionError("a side did not write what it was given")


def rate(run: Callable[[], object], nbytes: int, clear: Callable[[], object] | None = None) -> Side:
    """Measure GB/s of a call that moves `nbytes`, until the device has them."""

    def measure() -> float:
        idle(clear)
        start = time.perf_counter()
        run()
        synchronize()
        return nbytes / (time.perf_counter() - start) / 1e9

    return measure


# ---- a decode step ------------------------------------------------------------------------------


@SUITE.case(
    "graph",
    "What does a decode step of 22 layers cost without its products, captured or launched anew?",
    unit="us",
)
def graph(measure: Measure) -> None:
    """Compare a captured step with the same step launched anew.

    For each layer the step computes K and V from the buffers and appends them at a position that it
    reads from device memory and increments at its end. No matrix is multiplied: only launches are
    measured.
    """
    require_gpu(measure)
    import cupy

    from unimem import cuda

    n_steps = 50
    with (
        cuda.DecodeBuffers(DIMS) as buffers,
        cuda.KVCache(DIMS.num_layers, *SHAPE, DIMS.max_seq_len, dtype="f16") as kv,
    ):
        stream = cupy.cuda.Stream(non_blocking=True)
        position = buffers.batched_positions[:1]
        k, v = (a.reshape(1, *SHAPE) for a in (buffers.k_rotated, buffers.rope_k_temp))

        def step() -> None:
            for layer in range(DIMS.num_layers):
                cupy.multiply(buffers.residual, 0.5, out=buffers.norm_out)
                cupy.add(buffers.norm_out, 1, out=buffers.residual)
                cupy.add(k, 1, out=k)
                cupy.subtract(v, 1, out=v)
                kv.append_at(layer, k, v, position)
            cupy.add(position, 1, out=position)

        def restart() -> None:
            for buffer in (buffers.residual, buffers.k_rotated, buffers.rope_k_temp, position):
                buffer.fill(0)
            stream.synchronize()

        def step_time(run: Callable[[], object]) -> Side:
            def microseconds() -> float:
                restart()
                start = time.perf_counter()
                for _ in range(n_steps):
                    run()
                stream.synchronize()
                elapsed = time.perf_counter() - start
                if int(position[0]) != n_steps:
                    raise AssertionError("a side has not counted its steps")
                return elapsed / n_steps * 1e6

            return microseconds

        with stream:
            restart()
            step()  # compiles the kernels
            stream.begin_capture()
            step()
            captured = stream.end_capture()
            sides = {"unimem, replayed": captured.launch, "unimem, launched anew": step}
            measure.compare({name: step_time(run) for name, run in sides.items()}, rounds=21)


# ---- torch on both sides -------------------------------------------------------------------------


def torch_or_nothing(measure: Measure) -> Any:
    """Return PyTorch on the GPU, or end the case."""
    require_gpu(measure)
    torch = torch_for(measure, TORCH)
    if torch is None:
        raise NotMeasured("wants torch with CUDA")
    return torch


@SUITE.case(
    "append, torch",
    "What does one token cost until the device has it, as tensors of torch?",
    unit="ns",
    targets=[costs(CUPY_TOKENS, 1.1, issue=47), costs(COPY, 1.3, issue=47)],
)
def append_torch(measure: Measure) -> None:
    """Compare tensors of torch with CuPy's arrays, with slices, and with plain copies."""
    torch = torch_or_nothing(measure)
    import cupy

    from unimem import cuda

    k = torch.randn(1, *SHAPE, device="cuda", dtype=torch.float16)
    v = k + 1
    keys, values = (torch.zeros(N_TOKENS, *SHAPE, device="cuda").half() for _ in range(2))
    copies = "; ".join(
        f"copy({to.data_ptr()} + i * {ROW_BYTES}, {from_.data_ptr()}, {ROW_BYTES}, 3, 0)"
        for to, from_ in ((keys, k), (values, v))
    )
    tensors = {"keys": keys, "values": values, "k": k[0], "v": v[0]}
    with cuda.KVCache(1, *SHAPE, N_TOKENS, dtype="f16", arrays="torch") as kv:

        def append(k: Any, v: Any) -> Side:
            names = {"append": kv.append, "k": k, "v": v}
            return until_done(Statement("append(0, k, v)", names, kv.clear))

        ours = {"unimem": append(k, v), CUPY_TOKENS: append(cupy.asarray(k), cupy.asarray(v))}
        peers = {TORCH: until_done(Statement("keys[i] = k; values[i] = v", tensors))}
        copy = Statement(copies, {"copy": cupy.cuda.runtime.memcpyAsync})
        measure.compare(ours, peers, {COPY: until_done(copy)}, rounds=101)
        for stored, want in zip(kv.layer(0), (k, v), strict=True):
            check(stored[0].swapaxes(0, 1), want[0])


class TorchStep:
    """A decode step of torch's attention over 16 layers, with caches of several kinds.

    Each side appends a token to all layers, and attends; `alone` only attends.
    """

    def __init__(self, torch: Any, kv: Any, n_tokens: int, n_steps: int) -> None:
        self.torch, self.kv, self.n_tokens, self.n_steps = torch, kv, n_tokens, n_steps
        self.attend = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
        half = {"device": torch.device("cuda"), "dtype": torch.float16}
        self.q = torch.randn(1, 4 * N_HEADS, 1, HEAD_DIM, **half)
        self.k, self.v = torch.randn(2, 1, *SHAPE, **half)
        shape = (2, N_STEP_LAYERS, 1, N_HEADS, n_tokens + n_steps, HEAD_DIM)
        self.keys, self.values = torch.zeros(shape, **half)
        self.prompt = torch.zeros(n_tokens, *SHAPE, **half)
        self.position = torch.zeros(1, device="cuda", dtype=torch.long)
        self.row = torch.zeros(1, device="cuda", dtype=torch.int32)
        self.mask = torch.zeros(1, 1, 1, n_tokens + n_steps, **half)
        self.whole: list[tuple[Any, Any]] = []  # all rows of our cache, by layer

    def restart(self) -> None:
        """Hold the prompt alone."""
        self.kv.clear()
        for layer in range(N_STEP_LAYERS):
            self.kv.append(layer, self.prompt, self.prompt)
        self.joined = [
            [part[layer, :, :, : self.n_tokens].clone() for part in (self.keys, self.values)]
            for layer in range(N_STEP_LAYERS)
        ]
        self.position.fill_(self.n_tokens)
        self.row.fill_(self.n_tokens)
        self.torch.cuda.synchronize()

    def ours(self, _: int) -> None:
        """Append to our cache."""
        for layer in range(N_STEP_LAYERS):
            self.kv.append(layer, self.k, self.v)
            self.attend(self.q, *self.kv.layer(layer))

    def slices(self, i: int) -> None:
        """Assign to slices."""
        at = self.n_tokens + i
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[0, :, at], values[0, :, at] = self.k[0], self.v[0]
            self.attend(self.q, keys[:, :, : at + 1], values[:, :, : at + 1])

    def index_copy(self, i: int) -> None:
        """Write at a position in device memory, as StaticCache does."""
        n = self.n_tokens + i + 1
        for keys, values in zip(self.keys, self.values, strict=True):
            self._write(keys, values)
            self.attend(self.q, keys[:, :, :n], values[:, :, :n])
        self.position += 1

    def _write(self, keys: Any, values: Any) -> None:
        keys.index_copy_(2, self.position, self.k.transpose(0, 1)[None])
        values.index_copy_(2, self.position, self.v.transpose(0, 1)[None])

    def cat(self, _: int) -> None:
        """Join, as DynamicCache does."""
        for pair in self.joined:
            for part, token in enumerate((self.k, self.v)):
                pair[part] = self.torch.cat([pair[part], token.transpose(0, 1)[None]], 2)
            self.attend(self.q, *pair)

    def alone(self, i: int) -> None:
        """Attend, without a cache's work."""
        n = self.n_tokens + i + 1
        for keys, values in zip(self.keys, self.values, strict=True):
            self.attend(self.q, keys[:, :, :n], values[:, :, :n])

    def ours_fixed(self) -> None:
        """Append at a row in device memory, and attend to all rows."""
        for layer, (keys, values) in enumerate(self.whole):
            self.kv.append_at(layer, self.k, self.v, self.row)
            self.attend(self.q, keys, values, attn_mask=self.mask)

    def index_copy_fixed(self) -> None:
        """Write at a position in device memory, and attend to all rows."""
        for keys, values in zip(self.keys, self.values, strict=True):
            self._write(keys, values)
            self.attend(self.q, keys, values, attn_mask=self.mask)

    def alone_fixed(self) -> None:
        """Attend to all rows."""
        for keys, values in zip(self.keys, self.values, strict=True):
            self.attend(self.q, keys, values, attn_mask=self.mask)

    def captured(self, run: Callable[[], None]) -> Callable[[int], None]:
        """Return a replay of a step."""
        cuda = self.torch.cuda
        with cuda.stream(cuda.Stream()):  # its kernels are loaded before the capture
            run()
        cuda.synchronize()
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            run()
        return lambda _: graph.replay()

    def own_part(
        self, run: Callable[[int], None], alone: Callable[[int], None] | None = None
    ) -> Side:
        """Measure what a side costs beyond attention, in microseconds a step."""

        def microseconds() -> float:
            return self._time(run) - self._time(alone or self.alone)

        return microseconds

    def _time(self, run: Callable[[int], None]) -> float:
        self.restart()
        start = time.perf_counter()
        for i in range(self.n_steps):
            run(i)
        self.torch.cuda.synchronize()
        return (time.perf_counter() - start) / self.n_steps * 1e6


@SUITE.case(
    "step, torch",
    "What does the cache itself cost in an eager decode step of torch, 16 layers and 2048 tokens?",
    unit="us",
    targets=[costs(name, 0.6, issue=47) for name in (TORCH, INDEX_COPY, CAT)],
)
def step_torch(measure: Measure) -> None:
    """Compare steps, less the same attention without a cache."""
    torch = torch_or_nothing(measure)
    from unimem import cuda

    n_tokens, n_steps = 2048, 64
    with (
        torch.inference_mode(),
        cuda.KVCache(N_STEP_LAYERS, *SHAPE, n_tokens + n_steps, dtype="f16", arrays="torch") as kv,
    ):
        step = TorchStep(torch, kv, n_tokens, n_steps)
        peers = {TORCH: step.slices, INDEX_COPY: step.index_copy, CAT: step.cat}
        measure.compare(
            {"unimem": step.own_part(step.ours)},
            {name: step.own_part(run) for name, run in peers.items()},
            rounds=7,
        )
        step.restart()
        step.ours(0)
        want = kv.layer(0)[0][0, :, -1]
        if not bool((want == step.k[0]).all()):
            raise AssertionError("a side did not write what it was given")
        del want


@SUITE.case(
    "step, torch, captured",
    "What does the cache itself cost in a captured step of torch, 16 layers and 2048 tokens?",
    unit="us",
    targets=[costs(INDEX_COPY, 0.5, issue=47)],
)
def step_torch_captured(measure: Measure) -> None:
    """Compare replays of graphs, less that of the same attention without a cache."""
    torch = torch_or_nothing(measure)
    from unimem import cuda

    n_tokens, n_steps = 2048, 64
    with (
        torch.inference_mode(),
        cuda.KVCache(N_STEP_LAYERS, *SHAPE, n_tokens + n_steps, dtype="f16", arrays="torch") as kv,
    ):
        step = TorchStep(torch, kv, n_tokens, n_steps)
        filler = torch.zeros(n_tokens + n_steps, *SHAPE, device="cuda").half()
        for layer in range(N_STEP_LAYERS):
            kv.append(layer, filler, filler)
        step.whole = [kv.layer(layer) for layer in range(N_STEP_LAYERS)]
        step.restart()
        ours, theirs, alone = map(
            step.captured, (step.ours_fixed, step.index_copy_fixed, step.alone_fixed)
        )
        measure.compare(
            {"unimem": step.own_part(ours, alone)},
            {INDEX_COPY: step.own_part(theirs, alone)},
            rounds=7,
        )
        for part, token in zip(step.whole[0], (step.k, step.v), strict=True):
            if not bool((part[0, :, n_tokens] == token[0]).all()):
                raise AssertionError("a side did not write what it was given")
        step.whole.clear()


# ---- transformers --------------------------------------------------------------------------------


def transformers_or_nothing(measure: Measure) -> tuple[Any, Any]:
    """Return PyTorch on the GPU and transformers, or end the case."""
    torch = torch_or_nothing(measure)
    if not measure.installed("transformers", DYNAMIC, STATIC):
        raise NotMeasured("wants transformers")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    return torch, transformers


def generate(measure: Measure, n_tokens: int) -> None:
    """Compare tokens of `generate` after a prompt, and record the memory that caches take."""
    torch, transformers = transformers_or_nothing(measure)
    from unimem.transformers import KVCache
    from unimem_bench.suites.transformers import given

    config = transformers.LlamaConfig(
        **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": N_STEP_LAYERS},
        **{"num_attention_heads": 16, "num_key_value_heads": N_HEADS, "head_dim": HEAD_DIM},
        **{"vocab_size": 32000, "max_position_embeddings": 16384, "eos_token_id": None},
        **{"bos_token_id": None, "pad_token_id": 0},
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.randint(1, 32000, (1, n_tokens), device="cuda")
    n_new, said, room = 32, {}, n_tokens + 32

    def side(name: str, make: Callable[[], Any]) -> Side:
        def milliseconds() -> float:
            cache = make()
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            start = time.perf_counter()
            how = {"do_sample": False, "disable_compile": True, **given(model, cache)}
            said[name] = model.generate(ids, max_new_tokens=n_new, min_new_tokens=n_new, **how)
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
            measure.fact(f"{name}_bytes", free - torch.cuda.mem_get_info()[0])
            if hasattr(cache, "close"):
                cache.close()
            del cache
            torch.cuda.empty_cache()
            return elapsed / n_new * 1e3

        return milliseconds

    measure.compare(
        {"unimem": side("unimem", lambda: KVCache.for_model(model, room))},
        {
            DYNAMIC: side(DYNAMIC, lambda: transformers.DynamicCache(config=config)),
            STATIC: side(
                STATIC, lambda: transformers.StaticCache(config=config, max_cache_len=room)
            ),
        },
        rounds=3,
        warmup=1,
    )
    if not bool((said["unimem"] == said[DYNAMIC]).all()):
        measure.fact("tokens", "not those of DynamicCache")


for _n_tokens in (2048, 8192):
    SUITE.case(
        f"generate, {_n_tokens} tokens",
        f"What does a token of transformers' generate cost after a prompt of {_n_tokens}?",
        unit="ms",
        targets=[costs(name, 1.0, issue=47) for name in (DYNAMIC, STATIC)],
    )(partial(generate, n_tokens=_n_tokens))


# ---- a model file -------------------------------------------------------------------------------


@SUITE.case(
    "upload",
    "How fast does a model file in the page cache come to the device?",
    unit="GB/s",
    targets=[faster(PINNED, 0.9, issue=5), faster(TORCH_UPLOAD, 1.0, issue=5)],
)
def upload(measure: Measure) -> None:
    """Compare with torch's way, and with copying pinned memory, which is the speed of the bus.

    Sides that read the file begin with its path, and end with its bytes on the device.
    """
    require_gpu(measure)
    import cupy

    from unimem import cuda

    measure.pin(None)
    wanted = QUICK_TENSORS if measure.quick else N_TENSORS
    on_device = cuda_driver.driver(0).free_bytes() // (3 * TENSOR_BYTES)
    n_tensors = min(tensors_that_fit(measure.folder, wanted), on_device)
    if n_tensors < 1:
        raise NotMeasured(f"wants {format_bytes(3 * TENSOR_BYTES)} of free memory on the device")
    file = weight_file(measure.folder, "gguf", n_tensors)
    read_through(file.path)
    nbytes = n_tensors * TENSOR_BYTES
    measure.fact("file_bytes", file.nbytes)
    piece = min(nbytes, PINNED_BYTES)
    pinned = cupy.cuda.alloc_pinned_memory(piece)
    np.frombuffer(pinned, np.uint8, piece)[...] = 1
    with cuda.Tape(file.nbytes) as tape:
        address = tape.block.address

        def ours() -> dict[str, Any]:
            tape.clear()
            with um.open_weights(file.path) as weights:
                return weights.to_device(tape)

        def plain() -> None:
            for at in range(0, nbytes, piece):
                size = min(piece, nbytes - at)
                cupy.cuda.runtime.memcpyAsync(address + at, pinned.ptr, size, 1, 0)

        peers = {}
        torch = torch_for(measure, TORCH_UPLOAD)
        if torch is not None:

            def of_torch() -> None:
                mapped = np.memmap(file.path, np.uint8, "c", file.data_offset, nbytes)
                torch.from_numpy(mapped).cuda()

            peers[TORCH_UPLOAD] = rate(of_torch, nbytes)
        limits = {PINNED: rate(plain, nbytes)}
        measure.compare({"unimem": rate(ours, nbytes)}, peers, limits, rounds=7, warmup=1)
        file.check(sum_of(ours().values()))


def sum_of(arrays: Iterable[Any]) -> int:
    """Add up all words of 8 bytes, as `WeightFile.sum` does."""
    return sum(int(array.view("u8").sum()) for array in arrays) % (1 << 64)
