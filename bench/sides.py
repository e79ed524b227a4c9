"""The two sides of `bench.decode`, each in a process of its own that waits between requests.

Both libraries bring a copy of ggml that they load globally, so they cannot share a process. A side
is started by ``python -m bench.sides KIND MODEL THREADS CTX`` with the interpreter that has the
library, reads one JSON request a line from standard input and answers each with one line. KIND is
``unimem``, ``llama.cpp`` (its defaults) or ``llama.cpp-mapped`` (its weights used as they lie in
the file: ``use_extra_bufts`` off). ``python -m bench.sides quantize F16 OUT FTYPE`` makes a file.

This file runs under the interpreter of the peer as well and needs nothing but NumPy and the one
library that it measures.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]

# The OpenMP threads of a side go on polling for a while after their work. They must be asleep when
# the answer lets the other side start.
SETTLE_S = 0.05


class Side(Protocol):
    """One conversation of one library."""

    def prefill(self, tokens: list[int]) -> Logits:
        """Start anew with `tokens`; return the logits after the last."""

    def step(self) -> int:
        """Take the likeliest token, compute the logits after it, and return it."""

    def facts(self) -> dict[str, Any]:
        """Say what the library's ggml is, see `ggml_facts`."""


class Unimem:
    """unimem's decoder."""

    def __init__(self, model: str, threads: int, ctx: int) -> None:
        from unimem.engine import Decoder

        self._decoder = Decoder(model, ctx=ctx, threads=threads, kv_dtype="f16")
        self.step: Callable[[], int] = self._decoder.generate_next_token

    def prefill(self, tokens: list[int]) -> Logits:
        """As `Side.prefill`."""
        self._decoder.reset()
        return cast(Logits, self._decoder.prefill(tokens))

    def facts(self) -> dict[str, Any]:
        """As `Side.facts`."""
        return ggml_facts("ggml")

    def overhead(self, n: int) -> list[float]:
        """Share of a token's time that is not spent in ggml's compute call, for `n` tokens."""
        from unimem.engine import ggml as binding

        compute = binding.graph_compute
        inside = 0.0

        def timed(*arguments: Any) -> Any:
            nonlocal inside
            start = time.perf_counter()
            result = compute(*arguments)
            inside = time.perf_counter() - start
            return result

        shares = []
        binding.graph_compute = timed
        try:
            for _ in range(n):
                start = time.perf_counter()
                self.step()
                shares.append(1 - inside / (time.perf_counter() - start))
        finally:
            binding.graph_compute = compute
        return shares


class LlamaCpp:
    """llama.cpp through the C API that llama-cpp-python binds, without its Python classes."""

    def __init__(self, model: str, threads: int, ctx: int, *, repack: bool) -> None:
        self._api = api = importlib.import_module("llama_cpp")
        self._silence = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._silence, None)
        api.llama_backend_init()
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        options.use_extra_bufts = repack
        self._model = api.llama_model_load_from_file(model.encode(), options)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        context = api.llama_context_default_params()
        context.n_ctx = ctx
        context.n_threads = context.n_threads_batch = threads
        context.flash_attn_type = 1  # on, as in unimem; the default lets llama.cpp decide
        self._context = api.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot make a context of {ctx} tokens")
        self._n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._one = (ctypes.c_int32 * 1)()

    def prefill(self, tokens: list[int]) -> Logits:
        """As `Side.prefill`."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        return self._decode((ctypes.c_int32 * len(tokens))(*tokens))

    def step(self) -> int:
        """As `Side.step`."""
        token = int(self._logits.argmax())
        self._one[0] = token
        self._decode(self._one)
        return token

    def _decode(self, tokens: ctypes.Array[ctypes.c_int32]) -> Logits:
        batch = self._api.llama_batch_get_one(tokens, len(tokens))
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode answers {status}")
        logits = self._api.llama_get_logits_ith(self._context, -1)
        self._logits: Logits = np.ctypeslib.as_array(logits, (self._n_vocab,))
        return self._logits

    def facts(self) -> dict[str, Any]:
        """As `Side.facts`."""
        return ggml_facts("llama_cpp")


class _Feature(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


def ggml_facts(package: str) -> dict[str, Any]:
    """Return the version and the CPU features of the ggml that `package` brings.

    The features are those that this copy was compiled with, as it says itself
    (``ggml_backend_get_features`` of its CPU backend), tinyBLAS ("LLAMAFILE") among them.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{sys.executable} has no package {package}")
    library = ctypes.CDLL(str(Path(spec.submodule_search_locations[0], "lib", "libggml-cpu.so")))
    library.ggml_version.restype = ctypes.c_char_p
    library.ggml_backend_cpu_reg.restype = ctypes.c_void_p
    find = library.ggml_backend_reg_get_proc_address
    find.argtypes, find.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
    registry = library.ggml_backend_cpu_reg()
    address = find(registry, b"ggml_backend_get_features")
    if not address:
        raise RuntimeError(f"the ggml of {package} does not name its features")
    get = ctypes.CFUNCTYPE(ctypes.POINTER(_Feature), ctypes.c_void_p)(address)
    features = {}
    for feature in get(registry):
        if not feature.name:
            break
        features[feature.name.decode()] = feature.value.decode()
    return {"ggml": library.ggml_version().decode(), "features": features}


def anonymous_bytes() -> int:
    """Memory of this process that is not a mapped file: a repacked copy of the weights shows."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no line 'Anonymous'")


def quantize(source: str, target: str, ftype: int) -> None:
    """Let llama.cpp quantize an F16 file; `ftype` is a number of its ``llama_ftype``."""
    api = importlib.import_module("llama_cpp")
    options = api.llama_model_quantize_default_params()
    options.ftype = ftype
    status = api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(options))
    if status:
        raise RuntimeError(f"llama_model_quantize answers {status} for {source}")


def answer(side: Side, request: dict[str, Any]) -> dict[str, Any]:
    """Do what one request asks."""
    match request["do"]:
        case "facts":
            return side.facts() | {"anonymous_bytes": anonymous_bytes()}
        case "prefill":
            start = time.perf_counter()
            logits = side.prefill(request["tokens"])
            seconds = time.perf_counter() - start
            if "save" in request:
                np.save(request["save"], logits)
            return {"seconds": seconds}
        case "decode":
            start = time.perf_counter()
            tokens = [side.step() for _ in range(request["n"])]
            return {"seconds": time.perf_counter() - start, "tokens": tokens}
        case "overhead":
            return {"shares": cast(Unimem, side).overhead(request["n"])}
        case other:
            raise ValueError(f"no request is called {other!r}")


def open_side(kind: str, model: str, threads: int, ctx: int) -> Side:
    """Start the library that `kind` names."""
    if kind == "unimem":
        return Unimem(model, threads, ctx)
    return LlamaCpp(model, threads, ctx, repack=kind == "llama.cpp")


def main(arguments: list[str]) -> None:
    if arguments[0] == "quantize":
        quantize(arguments[1], arguments[2], int(arguments[3]))
    else:
        serve(*arguments)


def serve(kind: str, model: str, threads: str, ctx: str) -> None:
    """Answer requests until standard input ends."""
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = open_side(kind, model, int(threads), int(ctx))
    waiting_since, used_before = time.perf_counter(), time.process_time()
    for line in sys.stdin:
        # CPU time used while waiting: threads that poll would slow down the other side.
        waited = {
            "wait_s": time.perf_counter() - waiting_since,
            "wait_cpu_s": time.process_time() - used_before,
        }
        reply = answer(side, json.loads(line)) | waited
        time.sleep(SETTLE_S)
        waiting_since, used_before = time.perf_counter(), time.process_time()
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
