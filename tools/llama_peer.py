"""The newest llama.cpp as the peer, from the library that the wheel of `xllamacpp` bundles.

A Python that has the wheel runs this file: ``PYTHON tools/llama_peer.py COMMAND < JSON > JSON``. It
needs nothing else, and is a process of its own, since the library brings another ggml.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int32, c_uint32, c_void_p
from pathlib import Path
from typing import Any

_DISABLED, _ENABLED = 0, 1  # llama_flash_attn_type


class _ModelParams(Structure):  # llama_model_params of include/llama.h, build 11549
    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        *((name, c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "lazy_mode")),
        ("main_gpu", c_int32),
        *((name, c_void_p) for name in ("tensor_split", "progress", "progress_data", "kv")),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts", "no_host")),
        *((name, c_bool) for name in ("no_alloc", "load_mtp")),
    )


class _ContextParams(Structure):  # llama_context_params
    _fields_ = (
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope")),
        *((name, c_int32) for name in ("pooling", "attention", "flash_attn")),
        ("rest", ctypes.c_char * 256),
    )


class _Batch(Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        *((name, c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


def _library() -> Any:
    found = importlib.util.find_spec("xllamacpp")
    if found is None or found.origin is None:
        raise SystemExit("no llama.cpp to compare with: pip install xllamacpp")
    library = ctypes.CDLL(str(next(Path(found.origin).parent.glob("*.so"))))
    library.llama_model_default_params.restype = _ModelParams
    library.llama_context_default_params.restype = _ContextParams
    library.llama_batch_get_one.restype = _Batch
    library.llama_get_logits_ith.restype = POINTER(c_float)
    for name in ("load_from_file", "get_vocab"):
        getattr(library, f"llama_model_{name}").restype = c_void_p
    library.llama_model_load_from_file.argtypes = [c_char_p, _ModelParams]
    library.llama_init_from_model.restype = c_void_p
    library.llama_init_from_model.argtypes = [c_void_p, _ContextParams]
    library.llama_decode.argtypes = [c_void_p, _Batch]
    library.llama_get_logits_ith.argtypes = [c_void_p, c_int32]
    for name in ("vocab_is_eog", "vocab_get_add_bos"):
        getattr(library, f"llama_{name}").restype = c_bool
    library.llama_backend_init()
    return library


def _load(library: Any, path: str, *, vocab_only: bool) -> tuple[Any, Any]:
    params = library.llama_model_default_params()
    params.n_gpu_layers, params.vocab_only = 0, vocab_only
    model = library.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp does not load {path}")
    return c_void_p(model), c_void_p(library.llama_model_get_vocab(c_void_p(model)))


def _tokenize(library: Any, vocab: Any, text: str, special: bool, add: bool = True) -> list[int]:
    data = text.encode()
    ids = (c_int32 * (len(data) + 8))()
    n = library.llama_tokenize(vocab, data, len(data), ids, len(ids), c_bool(add), c_bool(special))
    assert n >= 0
    return ids[:n]


def _piece(library: Any, vocab: Any, token: int) -> bytes:
    buffer = ctypes.create_string_buffer(4096)
    n = library.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, c_bool(True))
    return buffer.raw[:n]


def tokenize(model: str, texts: list[str]) -> dict[str, Any]:
    """Return the ids of every text, and the facts of the vocabulary."""
    library = _library()
    _, vocab = _load(library, model, vocab_only=True)
    ids = range(library.llama_vocab_n_tokens(vocab))
    return {
        "version": importlib.metadata.version("xllamacpp"),
        "add_bos": library.llama_vocab_get_add_bos(vocab),
        "eog": [i for i in ids if library.llama_vocab_is_eog(vocab, i)],
        "pieces": [_piece(library, vocab, i).decode("latin-1") for i in ids],
        "plain": [_tokenize(library, vocab, text, False) for text in texts],
        "special": [_tokenize(library, vocab, text, True) for text in texts],
    }


def greedy(
    model: str, prompts: list[list[int]], n: int, flash_attention: bool, ctx: int = 1024
) -> dict[str, Any]:
    """Return up to `n` greedy ids behind each prompt, which an end token ends."""
    library = _library()
    opened, vocab = _load(library, model, vocab_only=False)
    params = library.llama_context_default_params()
    params.n_ctx = params.n_batch = ctx
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn = _ENABLED if flash_attention else _DISABLED
    n_vocab = library.llama_vocab_n_tokens(vocab)

    def answer(prompt: list[int]) -> Iterator[int]:
        context = c_void_p(library.llama_init_from_model(opened, params))
        try:
            batch = prompt
            for _ in range(n):
                ids = (c_int32 * len(batch))(*batch)
                if library.llama_decode(context, library.llama_batch_get_one(ids, len(batch))):
                    raise SystemExit("llama.cpp does not decode")
                logits = library.llama_get_logits_ith(context, -1)[:n_vocab]
                token = logits.index(max(logits))
                yield token
                if library.llama_vocab_is_eog(vocab, token):
                    return
                batch = [token]
        finally:
            library.llama_free(context)

    return {"ids": [list(answer(prompt)) for prompt in prompts]}


def ask(python: str, command: str, **asked: Any) -> Any:
    """Have another Python, which has the wheel, run a command of this file."""
    done = subprocess.run(
        [python, __file__, command],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"llama.cpp failed ({done.returncode}): {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    commands: dict[str, Callable[..., Any]] = {"tokenize": tokenize, "greedy": greedy}
    print(json.dumps(commands[sys.argv[1]](**json.load(sys.stdin))))
