"""What the GPU twin costs, against CuPy and torch on the same device.

Four questions: an array from a tape against one from ``cupy.empty``; one token appended to a KV
cache and to a scratchpad against slice assignments; a model file of 4 GB to the GPU against torch
and against a plain copy of pinned memory; and a decode step replayed as a CUDA graph against the
same step launched anew. Needs a GPU and CuPy.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import unimem as um
from bench.harness import Bench, pin, ratios, stopwatch
from unimem import gpu

RESULTS = Path(__file__).resolve().parent / "results"
MIB = 1 << 20
N_FLOATS = 4096
SHAPE = N_HEADS, HEAD_DIM = 8, 128  # 2 KB of K and 2 KB of V a token, as float16
TENSOR_BYTES = 64 * MIB
N_TOKENS = 128  # two launches each stay below what a stream queues before its host waits
DIMS = um.ModelDims(2048, 5632, 32, 8, 128, 32000, 22, 2048)


def main() -> int:
    bench = Bench("gpu", __doc__)
    bench.parser.add_argument(
        "--mib", type=int, default=4096, metavar="N", help="size of the model file (4096)"
    )
    bench.parse()
    try:
        gpu.require()
    except ImportError as error:
        print(f"bench.gpu measures a GPU, and there is none: {error}")
        return 2
    bench.facts = facts()
    print(", ".join(f"{key} {value}" for key, value in bench.facts.items()))
    if bench.options.json is None and not bench.options.quick:
        name = re.sub(r"\W+", "-", bench.facts["gpu"].lower()).strip("-")
        bench.options.json = RESULTS / f"gpu-{name}.json"
    # Makes CUDA's context, whose threads keep the CPUs that this one may use now.
    gpu.driver(0).free_bytes()
    cpus = os.sched_getaffinity(0)
    pin(1)
    take(bench)
    append(bench)
    graph(bench)
    os.sched_setaffinity(0, cpus)
    upload(bench)
    return bench.finish()


def facts() -> dict[str, Any]:
    """Return what the figures cannot be read without."""
    import cupy

    runtime = cupy.cuda.runtime
    found = {
        "gpu": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": runtime.driverGetVersion(),
        "cuda": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
    }
    torch = torch_or_none()
    if torch is None:
        print("torch is not installed for CUDA: not compared with it")
    else:
        found["torch"] = torch.__version__
    return found


def torch_or_none() -> Any:
    """Return PyTorch where it is there and sees the GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages, about each other
        import torch

        return torch if torch.cuda.is_available() else None


# ---- take ----


def take(bench: Bench) -> None:
    """Compare ``Tape.take`` with ``cupy.empty``, which takes the same chunk of its pool anew.

    The same take after `clear` finds the array of before; the first time at a place it is made.
    """
    import cupy

    from unimem import cuda

    n = 300
    dtype = np.dtype("float32")

    class First:
        """Takes from a tape that has taken nothing yet."""

        def renew(self) -> None:
            self.tape = cuda.Tape(block)
            self.take = self.tape.take

    with cuda.Block(n * N_FLOATS * 4) as block, cuda.Tape(block) as tape:
        first = First()
        title = f"an array of {N_FLOATS} float32"
        names = {"take": tape.take, "dtype": dtype}
        theirs = {"empty": cupy.empty, "dtype": dtype}
        samples = bench.compare(
            title,
            {
                "Tape.take": stopwatch(f"take({N_FLOATS}, dtype)", n, names, tape.clear),
                "Tape.take, the first time": stopwatch(
                    f"first.take({N_FLOATS}, dtype)",
                    n,
                    {"first": first, "dtype": dtype},
                    first.renew,
                ),
                "cupy.empty": stopwatch(f"empty({N_FLOATS}, dtype)", n, theirs),
            },
            unit="ns",
            rounds=201,
        )
        del first
        faster = ratios(samples["cupy.empty"], samples["Tape.take"])
        bench.at_least(title, "cupy.empty / Tape.take", faster, 3.0)


# ---- append ----


def append(bench: Bench) -> None:
    """Compare one token, K and V of a layer, and one row, with slice assignments.

    Claimed is what a caller pays in the end: so many calls and waiting for the GPU, divided by
    their number. The calls alone, which queue their work and return, are shown beside it.
    """
    import cupy

    from unimem import cuda

    k = cupy.asarray(np.random.default_rng(0).standard_normal(SHAPE).astype(np.float16))
    v = k + np.float16(1)
    keys, values = (cupy.zeros((N_TOKENS, *SHAPE), "float16") for _ in range(2))
    rows, row = keys.reshape(N_TOKENS, -1), k.reshape(-1)
    torch = torch_or_none()
    with (
        cuda.KVCache(1, *SHAPE, N_TOKENS, dtype="f16") as kv,
        cuda.Scratchpad(N_TOKENS, row.size, "float16") as pad,
    ):
        ours = {"append": kv.append, "k": k[None], "v": v[None]}
        theirs = {"keys": keys, "values": values, "k": k, "v": v}
        statement = "keys[i] = k; values[i] = v"
        token: dict[str, Statement] = {
            "KVCache.append": ("append(0, k, v)", ours, kv.clear),
            "CuPy, keys[i] = k": (statement, theirs, None),
        }
        vector: dict[str, Statement] = {
            "Scratchpad.append": ("append(k)", {"append": pad.append, "k": row}, pad.clear),
            "CuPy, rows[i] = k": ("rows[i] = k", {"rows": rows, "k": row}, None),
        }
        if torch is not None:
            tensors = {name: torch.from_dlpack(array) for name, array in theirs.items()}
            token["torch, keys[i] = k"] = (statement, tensors, None)
            names = {"rows": torch.from_dlpack(rows), "k": torch.from_dlpack(row)}
            vector["torch, rows[i] = k"] = ("rows[i] = k", names, None)
        compare_appends(bench, "one token, 2 KB of K and 2 KB of V", token)
        for stored, want in zip(kv.layer(0), (k, v), strict=True):
            check(stored[0].swapaxes(0, 1), want, "KVCache.append")
        compare_appends(bench, "one vector of 2 KB", vector)
        check(pad.as_array(), row, "Scratchpad.append")


Statement = tuple[str, Mapping[str, object], Callable[[], object] | None]


def compare_appends(bench: Bench, title: str, sides: Mapping[str, Statement]) -> None:
    """Compare the first of the sides with the others: calls, and calls until all are done."""
    ours, *others = sides
    calls = {name: call_time(*side) for name, side in sides.items()}
    bench.compare(f"{title}, the calls alone", calls, unit="ns a call", rounds=101)
    title = f"{title}, until all are done"
    whole = {name: until_done(*side) for name, side in sides.items()}
    samples = bench.compare(title, whole, unit="ns a call", rounds=101)
    for name in others:
        faster = ratios(samples[name], samples[ours])
        bench.at_least(title, f"{name} / {ours}", faster, 2.0)


def call_time(
    statement: str, names: Mapping[str, object], clear: Callable[[], object] | None
) -> Callable[[], float]:
    """Nanoseconds of a call, on a GPU that has nothing else to do."""
    return stopwatch(statement, N_TOKENS, names, lambda: idle(clear))


def until_done(
    statement: str, names: Mapping[str, object], clear: Callable[[], object] | None
) -> Callable[[], float]:
    """Nanoseconds of a call, with its part of waiting until the GPU has done all of them."""
    import cupy

    scope: dict[str, Any] = {}
    arguments = ", ".join(f"{name}={name}" for name in names)
    source = f"def loop({arguments}):\n    for i in range({N_TOKENS}):\n        {statement}\n"
    exec(source, dict(names), scope)
    synchronize = cupy.cuda.runtime.deviceSynchronize

    def run() -> float:
        idle(clear)
        start = time.perf_counter()
        scope["loop"]()
        synchronize()
        return (time.perf_counter() - start) / N_TOKENS * 1e9

    return run


def idle(clear: Callable[[], object] | None) -> None:
    """Wait until the GPU has nothing to do, and empty what the side fills."""
    import cupy

    if clear is not None:
        clear()
    cupy.cuda.runtime.deviceSynchronize()


def check(stored: Any, want: Any, what: str) -> None:
    """Raise unless every row is this token."""
    import cupy

    if not bool((stored == want[None]).all()) or len(stored) != N_TOKENS:
        raise AssertionError(f"{what}: not what was appended")
    cupy.cuda.runtime.deviceSynchronize()


# ---- a decode step ----


def graph(bench: Bench) -> None:
    """Compare a captured step with the same step launched anew.

    For each layer the step makes K and V of what is in the buffers and appends them at a position
    that it reads from device memory, and counts that up at its end. No matrix is multiplied: what
    is measured are launches.
    """
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

        with stream:
            restart()
            step()  # compiles the kernels
            stream.begin_capture()
            step()
            captured = stream.end_capture()

            def measure(run: Callable[[], object]) -> Callable[[], float]:
                def seconds() -> float:
                    restart()
                    start = time.perf_counter()
                    for _ in range(n_steps):
                        run()
                    stream.synchronize()
                    return (time.perf_counter() - start) / n_steps * 1e6

                return seconds

            bench.compare(
                f"a decode step of {DIMS.num_layers} layers without its products, 5 launches each",
                {"graph replay": measure(captured.launch), "launched anew": measure(step)},
                unit="us",
                rounds=21,
            )
            if int(position[0]) != n_steps:
                raise AssertionError("the graph does not count its steps")


# ---- upload ----


def upload(bench: Bench) -> None:
    """Compare a file in the page cache with torch's way, and with a copy of pinned memory.

    Both sides that read the file begin with its path and end with the bytes on the GPU.
    """
    import cupy

    from unimem import cuda

    wanted = bench.options.mib * MIB if not bench.options.quick else 256 * MIB
    with tempfile.TemporaryDirectory(prefix="unimem-bench-") as folder:
        room = {
            f"half of what is free in {folder}": shutil.disk_usage(folder).free // 2,
            "a third of the free memory": free_memory() // 3,
            "a third of the GPU's free memory": gpu.driver(0).free_bytes() // 3,
        }
        narrowest = min(room, key=room.__getitem__)
        nbytes = min(wanted, room[narrowest]) // TENSOR_BYTES * TENSOR_BYTES
        if nbytes < wanted:
            print(
                f"\nThe model file has {nbytes // MIB} MiB, not {wanted // MIB}: {narrowest} is "
                f"{room[narrowest] // MIB} MiB, and its tensors have {TENSOR_BYTES // MIB} MiB each"
            )
        if nbytes == 0:
            return
        path = Path(folder, "model.gguf")
        begin = write_model(path, nbytes)
        read_through(path)
        torch = torch_or_none()
        runtime = cupy.cuda.runtime
        pinned = cupy.cuda.alloc_pinned_memory(min(nbytes, 1 << 30))
        piece = min(nbytes, 1 << 30)
        np.frombuffer(pinned, np.uint8, piece)[...] = 1
        with cuda.Tape(nbytes + MIB) as tape:
            address = tape.block.address

            def ours() -> None:
                tape.clear()
                with um.open_weights(path) as weights:
                    weights.to_device(tape)

            def plain() -> None:
                for at in range(0, nbytes, piece):
                    size = min(piece, nbytes - at)
                    runtime.memcpyAsync(
                        address + at, pinned.ptr, size, runtime.memcpyHostToDevice, 0
                    )
                runtime.deviceSynchronize()

            def of_torch() -> None:
                mapped = np.memmap(path, np.uint8, "c", begin, nbytes)
                torch.from_numpy(mapped).cuda()
                torch.cuda.synchronize()

            sides = {"Weights.to_device": rate(ours, nbytes), "pinned copy": rate(plain, nbytes)}
            if torch is not None:
                sides["torch.from_numpy(memmap).cuda()"] = rate(of_torch, nbytes)
            title = f"a model file of {nbytes / 1e9:.1f} GB in the page cache"
            samples = bench.compare(title, sides, unit="GB/s", rounds=9, warmup=1)
            check_upload(path, tape)
            speed = samples.pop("Weights.to_device")
            for name, limit in (("pinned copy", 0.9), ("torch.from_numpy(memmap).cuda()", 1.0)):
                if name in samples:
                    ratio = ratios(speed, samples[name])
                    bench.at_least(title, f"Weights.to_device / {name}", ratio, limit)


def rate(run: Callable[[], object], nbytes: int) -> Callable[[], float]:
    """GB/s of what moves so many bytes."""

    def measure() -> float:
        start = time.perf_counter()
        run()
        return nbytes / (time.perf_counter() - start) / 1e9

    return measure


def free_memory() -> int:
    """Bytes that the page cache may take."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


def write_model(path: Path, nbytes: int) -> int:
    """Write a GGUF file of tensors, each of which begins with its number; return their begin."""
    n = nbytes // TENSOR_BYTES
    head = b"GGUF" + struct.pack("<IQQ", 3, n, 0)
    for i in range(n):
        name = f"t{i}".encode()
        head += struct.pack("<Q", len(name)) + name
        head += struct.pack("<IQIQ", 1, TENSOR_BYTES, 24, i * TENSOR_BYTES)  # int8
    head += bytes(-len(head) % 32)
    data = np.random.default_rng(0).integers(0, 256, TENSOR_BYTES, np.uint8)
    with path.open("wb") as out:
        out.write(head)
        for i in range(n):
            data[:MIB] = i % 128
            out.write(data.data)
    return len(head)


def read_through(path: Path) -> None:
    """Bring a file to the page cache."""
    buffer = bytearray(16 * MIB)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def check_upload(path: Path, tape: Any) -> None:
    """Raise unless the tensors are on the device, each in its place."""
    with um.open_weights(path) as weights:
        tape.clear()
        for i, array in enumerate(weights.to_device(tape).values()):
            here = weights.tensors[f"t{i}"].as_array()[:: MIB // 2]
            if not np.array_equal(array[:: MIB // 2].get(), here) or here[0] != i % 128:
                raise AssertionError(f"tensor t{i} is not what the file holds")


if __name__ == "__main__":
    raise SystemExit(main())
