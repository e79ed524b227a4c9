"""Arrays of JAX, in and out. In a process of its own, since JAX warns of each later fork."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

SCRIPT = """
import gc
import jax.numpy as jnp
import numpy as np
import unimem as um

def address(array):
    return array.unsafe_buffer_pointer()

for kind, dtype in {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.items():
    k = jnp.linspace(-1, 1, 3 * 2 * 32).reshape(3, 2, 32).astype(dtype)
    with (
        um.KVCache(1, 2, 32, 8, dtype=kind) as kv,
        um.KVCache(3, 2, 32, 8, dtype=kind) as layers,
        um.PagedKVCache(1, 2, 32, n_blocks=2, dtype=kind) as pool,
        pool.sequence() as sequence,
        um.Scratchpad(8, 32, dtype) as pad,
    ):
        kv.append(0, k, k)
        layers.append_all(k, k)
        sequence.append(0, k, k)
        pad.append_batch(k[:, 0])
        found = [jnp.from_dlpack(view, copy=False) for view in kv.layer(0)]
        for array, view in zip(found, kv.layer(0), strict=True):
            assert address(array) == view.ctypes.data and array.dtype == dtype
            assert (array[0].swapaxes(0, 1) == k).all()
        assert (jnp.from_dlpack(layers.layer(2)[1])[0, :, 0] == k[2]).all()
        assert (jnp.asarray(sequence.gather(0)[0]).swapaxes(0, 1) == k).all()
        assert address(jnp.from_dlpack(pad.as_array(), copy=False)) == pad.as_array().ctypes.data
        del view
        gc.collect()
        try:
            kv.close()
        except BufferError:
            pass
        else:
            raise AssertionError
        # JAX's arrays never change, and so are no place for copies.
        out = jnp.zeros((1, 2, 3, 32), dtype), jnp.zeros((1, 2, 3, 32), dtype)
        try:
            kv.layer(0, dtype, out=out)
        except ValueError as error:
            assert "expected two writable arrays" in str(error), error
        else:
            raise AssertionError
        assert not out[0].any()

with um.Tape(4096) as tape:
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        view = tape.take((2, 3), dtype)
        assert address(jnp.from_dlpack(view, copy=False)) == view.ctypes.data
        taken = tape.take((2, 3), dtype, like=jnp)
        assert (taken.dtype, taken.shape) == (dtype, (2, 3)) and tape.owns(taken)
    del view, taken
"""


@pytest.mark.slow  # importing JAX takes seconds
def test_arrays_of_jax_go_in_and_out(run_python: Any) -> None:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed")
    answer = run_python(SCRIPT, JAX_PLATFORMS="cpu")
    assert (answer.returncode, answer.stderr) == (0, "")
