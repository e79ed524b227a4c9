"""Quantizing and reading back, beside ggml's own code for the same blocks, in one thread."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import numpy as np

import unimem as um
from unimem_bench.kv_sides import N_VALUES, SHAPE, Array, appending, in_gb_s, stored
from unimem_bench.rounds import warm_stopwatch
from unimem_bench.suite import Measure, NotMeasured

KINDS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
PEER = "ggml"
N_TOKENS = 256


def _function(measure: Measure, name: str) -> Any:
    """Return a function of ggml's base library for rows: from, to, number of values."""
    if not measure.installed("unimem_ggml", PEER):
        raise NotMeasured("unimem-ggml is not installed")
    from unimem_ggml import binding

    function = getattr(ctypes.CDLL(binding.BASE_LIBRARY), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    return function


def _values() -> tuple[Array, Array]:
    """Return normally distributed float32, similar to real keys and values."""
    k, v = np.random.default_rng(1).standard_normal((2, N_TOKENS, *SHAPE), np.float32)
    return k, v


def append(measure: Measure, *, kind: str) -> None:
    """Compare appending with ggml's reference quantizer, which makes the same blocks."""
    quantize = _function(measure, f"quantize_row_{kind}_ref")
    kv, n_values = _values(), N_TOKENS * N_VALUES
    with um.KVCache(1, *SHAPE, N_TOKENS, dtype=kind) as cache:
        cache.warm()
        held = [np.empty(N_TOKENS * cache.row_bytes, np.uint8) for _ in kv]
        names = {"quantize": quantize, "n": n_values}
        for name, part, to in zip("kv", kv, held, strict=True):
            names |= {name: part.ctypes.data, f"{name}_to": to.ctypes.data}
        calls = "quantize(k, k_to, n); quantize(v, v_to, n)"
        in_speed = partial(in_gb_s, sum(part.nbytes for part in kv))
        ours = {"unimem": in_speed(appending(cache, kv, 1))}
        peers = {PEER: in_speed(warm_stopwatch(calls, 1, names))}
        measure.compare(ours, peers, rounds=51, quick_rounds=7)
        for have, want in zip(stored(cache), held, strict=True):
            if have.tobytes() != want.tobytes():
                raise AssertionError(f"unimem's blocks of {kind} are not ggml's")


def read(measure: Measure, *, kind: str) -> None:
    """Compare a converted copy of a layer with ggml's reading of the same blocks."""
    dequantize = _function(measure, f"dequantize_row_{kind}")
    kv, n_values = _values(), N_TOKENS * N_VALUES
    with um.KVCache(1, *SHAPE, N_TOKENS, dtype=kind) as cache:
        cache.append(0, *kv)
        shape = (1, SHAPE[0], N_TOKENS, SHAPE[1])
        out, theirs = [[np.empty(shape, np.float32) for _ in kv] for _side in ("unimem", PEER)]
        names = {"dequantize": dequantize, "n": n_values}
        for i, name in enumerate("kv"):
            address = cache.address(0, "k" if name == "k" else "v")
            names |= {name: address, f"{name}_to": theirs[i].ctypes.data}
        in_speed = partial(in_gb_s, sum(part.nbytes for part in kv))
        reading = {"layer": cache.layer, "out": tuple(out)}
        ours = {"unimem": in_speed(warm_stopwatch("layer(0, 'float32', out)", 1, reading))}
        calls = "dequantize(k, k_to, n); dequantize(v, v_to, n)"
        peers = {PEER: in_speed(warm_stopwatch(calls, 1, names))}
        measure.compare(ours, peers, rounds=51, quick_rounds=7)
        for have, want in zip(out, theirs, strict=True):
            by_token = want.reshape(N_TOKENS, *SHAPE).swapaxes(0, 1)
            if have[0].tobytes() != by_token.tobytes():
                raise AssertionError(f"unimem does not read {kind} as ggml does")
