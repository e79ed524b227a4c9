"""llama.cpp in a process of its own: ``PYTHON llama_cpp_side.py OPTIONS``.

`unimem_bench.decoders` starts it by its path, with a Python that has llama-cpp-python and no
unimem. It needs only the standard library, NumPy, llama-cpp-python and ``side_server.py`` beside
it.
"""

from __future__ import annotations

import ctypes
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from unimem_bench.side_server import Logits


class LlamaCpp:
    """A conversation through llama.cpp's C API, without the Python classes around it."""

    compute_s: float | None = None

    def __init__(self, model: str, *, ctx: int, threads: int, repack: bool) -> None:
        self._api = api = import_module("llama_cpp")
        self._silence = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._silence, None)
        api.llama_backend_init()
        start = time.perf_counter()
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
        self._start_s = time.perf_counter() - start
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
        return {"start_s": self._start_s}


if __name__ == "__main__":
    import_module("side_server").serve(LlamaCpp, "llama_cpp")
