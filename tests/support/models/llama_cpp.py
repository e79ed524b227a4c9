"""llama.cpp as the peer, through the cyllama wheel, in a process of its own.

Both libraries bring a ggml whose symbols must not meet, so tests start this file:
``python tests/support/models/llama_cpp.py greedy|follow|rows|quantize|hold|repack JSON``.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

# NumPy is imported late: the peer's process must have llama.cpp's memory alone.
if TYPE_CHECKING:
    from numpy.typing import NDArray

Q4_K_M = 15  # llama_ftype
# ggml_type
KV_KINDS = {
    **{"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20},
    "bf16": 30,
}


def greedy(
    model: Path,
    prompt: list[int],
    n: int,
    *,
    ctx: int = 1024,
    kv_dtype: str = "f16",
    rotate: bool | None = None,
    repack: bool = False,
) -> tuple[list[int], NDArray[Any]]:
    """Generate `n` tokens; returns them and the logits [n, vocab] each was chosen by.

    Weights are used as they lie in the file, or with `repack` as is llama.cpp's default. Attention
    is flash attention. Heads of a quantized cache are rotated as is llama.cpp's default, or with
    ``rotate=False`` not.
    """
    import numpy as np

    options = {"model": str(model), "prompt": prompt, "n": n, "ctx": ctx, "kv": kv_dtype}
    options |= {"repack": repack}
    with tempfile.TemporaryDirectory() as folder:  # the model's may be read-only
        out = f"{folder}/out.npz"
        _run("greedy", options | {"out": out}, rotate)
        with np.load(out) as data:
            return [int(token) for token in data["tokens"]], data["logits"]


def follow(model: Path, steps: list[list[Any]], *, ctx: int, kv_dtype: str = "f16") -> NDArray[Any]:
    """Compute what the steps say; returns the logits [n, vocab] behind each token or batch.

    Steps are ``["batch", tokens]``, ``["each", tokens]`` one by one, and ``["remove", first, end]``
    for tokens at these positions, behind which the others keep theirs. Nothing is overwritten that
    a layer that slides could show again.
    """
    import numpy as np

    options = {"model": str(model), "steps": steps, "ctx": ctx, "kv": kv_dtype}
    with tempfile.TemporaryDirectory() as folder:
        _run("follow", options | {"out": f"{folder}/out.npy"})
        return np.asarray(np.load(f"{folder}/out.npy"))


def rows(
    model: Path, prompt: list[int], kv_dtypes: list[str], sizes: list[int]
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Compute a prompt with each of these caches; return K and V of the first layer of each.

    They are uint8 [tokens, bytes], as they lie in the cache, rotated where llama.cpp does so; a row
    has the bytes that `sizes` says for the cache.
    """
    import numpy as np

    options = {"model": str(model), "prompt": prompt, "kv": kv_dtypes}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        _run("rows", options | {"out": f"{folder}/out"})
        for kv_dtype, row_bytes in zip(kv_dtypes, sizes, strict=True):
            state = Path(f"{folder}/out-{kv_dtype}").read_bytes()
            # A state of one layer ends with K's type and size of a row, its rows, and V's.
            n = len(prompt) * row_bytes
            head = struct.pack("<iQ", KV_KINDS[kv_dtype], row_bytes)
            v, k = len(state) - n, len(state) - 2 * n - len(head)
            if state[v - len(head) : v] != head or state[k - len(head) : k] != head:
                raise RuntimeError(f"a state of {kv_dtype} is laid out in another way")
            lanes = (np.frombuffer(state, np.uint8, n, at) for at in (k, v))
            keys, values = (lane.reshape(len(prompt), row_bytes) for lane in lanes)
            found.append((keys, values))
    return found


def quantize(source: Path, target: Path, ftype: int = Q4_K_M) -> Path:
    """Quantize a model with llama.cpp's own quantizer."""
    _run("quantize", {"source": str(source), "target": str(target), "ftype": ftype})
    return target


@contextmanager
def holding(model: Path | str) -> Iterator[int]:
    """Start a process that has generated a token of the model, from its file; return its number."""
    with subprocess.Popen(
        [sys.executable, __file__, "hold", json.dumps({"model": str(model)})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready %d\n" % process.pid:
                raise RuntimeError("llama.cpp could not load the model")
            yield process.pid
        finally:
            process.kill()


def repacked_mib(model: Path) -> float:
    """Return how many MiB of a model llama.cpp repacks by default."""
    said = _run("repack", {"model": str(model)})
    return sum(
        float(each) for each in re.findall(r"CPU_REPACK model buffer size = +(\S+) MiB", said)
    )


def _run(command: str, options: dict[str, Any], rotate: bool | None = None) -> str:
    done = subprocess.run(
        [sys.executable, __file__, command, json.dumps(options)],
        capture_output=True,
        text=True,
        env=os.environ | {"LLAMA_ATTN_ROT_DISABLE": str(int(rotate is False))},
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"llama.cpp failed ({done.returncode}): {done.stderr[-2000:]}")
    return done.stderr


def open_model(
    model: str,
    ctx: int,
    kv_dtype: str,
    *,
    repack: bool = False,
    threads: int = 1,
    keeps_all: bool = False,
) -> tuple[Any, Any]:
    """A model, as it lies in its file or repacked, and a context of it.

    With `keeps_all`, sliding layers also keep tokens that they no longer see.
    """
    from cyllama.llama import llama_cpp

    class Model(llama_cpp.LlamaModel):  # type: ignore[misc]
        @property
        def n_vocab(self) -> int:  # the wheel's context asks its model for this attribute
            return int(self.get_vocab().n_vocab)

    params = llama_cpp.LlamaModelParams()
    params.n_gpu_layers = 0
    params.use_extra_bufts = repack
    opened = Model(model, params)
    params = llama_cpp.LlamaContextParams()
    params.n_ctx = params.n_batch = ctx
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = 1
    params.swa_full = keeps_all
    k, _, v = kv_dtype.partition(",")
    params.type_k, params.type_v = KV_KINDS[k], KV_KINDS[v or k]
    return opened, llama_cpp.LlamaContext(opened, params)


def _greedy(options: dict[str, Any]) -> None:
    import numpy as np
    from cyllama.llama import llama_cpp

    repack = options["repack"]
    _model, context = open_model(options["model"], options["ctx"], options["kv"], repack=repack)
    batch, past = options["prompt"], 0
    tokens: list[int] = []
    rows = []
    while len(tokens) < options["n"]:
        if context.decode(llama_cpp.llama_batch_get_one(batch, past)):
            raise RuntimeError("decode failed")
        past += len(batch)
        rows.append(np.array(context.get_logits_ith(-1), np.float32))
        tokens.append(int(rows[-1].argmax()))
        batch = [tokens[-1]]
    np.savez(options["out"], tokens=tokens, logits=rows)


def _follow(options: dict[str, Any]) -> None:
    import numpy as np
    from cyllama.llama import llama_cpp

    model, ctx, kv = options["model"], options["ctx"], options["kv"]
    _model, context = open_model(model, ctx, kv, keeps_all=True)
    position, rows = 0, []
    for kind, *given in options["steps"]:
        if kind == "remove":
            if not context.memory_seq_rm(0, *given):
                raise RuntimeError(f"llama.cpp does not remove {given}")
            if given[1] == position:
                position = given[0]
            continue
        (tokens,) = given
        for batch in [tokens] if kind == "batch" else ([token] for token in tokens):
            if context.decode(llama_cpp.llama_batch_get_one(batch, position)):
                raise RuntimeError("decode failed")
            position += len(batch)
            rows.append(np.array(context.get_logits_ith(-1), np.float32))
    np.save(options["out"], np.array(rows))


def _rows(options: dict[str, Any]) -> None:
    from cyllama.llama import llama_cpp

    for kv_dtype in options["kv"]:
        prompt = options["prompt"]
        _model, context = open_model(options["model"], 256, kv_dtype)
        if context.decode(llama_cpp.llama_batch_get_one(prompt, 0)):
            raise RuntimeError("decode failed")
        Path(f"{options['out']}-{kv_dtype}").write_bytes(context.get_state_seq_data(0))


def _quantize(options: dict[str, Any]) -> None:
    from cyllama.llama import llama_cpp

    params = llama_cpp.LlamaModelQuantizeParams()
    params.ftype = options["ftype"]
    params.nthread = 2
    if llama_cpp.model_quantize(options["source"], options["target"], params):
        raise RuntimeError("quantizing failed")


def _repack(options: dict[str, Any]) -> None:
    from cyllama.llama import llama_cpp

    params = llama_cpp.LlamaModelParams()
    params.n_gpu_layers = 0
    params.use_extra_bufts = True
    llama_cpp.LlamaModel(options["model"], params)


def _start(model: str) -> None:
    from cyllama.llama import llama_cpp

    params = llama_cpp.LlamaModelParams()
    params.n_gpu_layers = 0
    params.use_extra_bufts = False
    begin = time.perf_counter()
    opened = llama_cpp.LlamaModel(model, params)
    print(time.perf_counter() - begin, flush=True)
    sys.stdin.read()
    opened.close()


def _hold(options: dict[str, Any]) -> None:
    from cyllama.llama import llama_cpp

    _model, context = open_model(options["model"], 256, "f16")
    if context.decode(llama_cpp.llama_batch_get_one([1], 0)):
        raise RuntimeError("decode failed")
    print("ready", os.getpid(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "start":  # as `unimem_bench.llama_start`
        _start(sys.argv[2])
        raise SystemExit
    commands = {"greedy": _greedy, "follow": _follow, "rows": _rows, "quantize": _quantize}
    commands |= {"hold": _hold, "repack": _repack}
    commands[sys.argv[1]](json.loads(sys.argv[2]))
