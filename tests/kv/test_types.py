"""The table of KV types: one row a type, in the order of files and of the core."""

from __future__ import annotations

from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest

import unimem as um
from unimem.kv import types


def test_numbers_stay_those_of_files() -> None:
    names = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
    assert names == types.KV_TYPES == get_args(types.DType)
    assert list(types.GGML_TYPES.values()) == [0, 1, 30, 8, 2, 3, 6, 7, 20]


@pytest.mark.parametrize("name", types.KV_TYPES)
def test_sizes_are_those_of_numpy(name: str) -> None:
    """The core has the sizes, and NumPy the fields of blocks."""
    n = types.block_values(name)
    assert n == (1 if name in {"f32", "f16", "bf16"} else 32)
    with um.KVCache(1, 1, 32, 8, dtype=name) as kv:
        assert kv.layer(0)[0].dtype.itemsize == types.block_bytes(name)
        assert kv.row_bytes == types.row_bytes_of(1, 32, name) == 32 // n * types.block_bytes(name)


@pytest.mark.parametrize(
    ("dtype", "pair"),
    [
        ("q8_0,q4_0", ("q8_0", "q4_0")),
        ("bf16", ("bf16", "bf16")),
        (np.float16, ("f16", "f16")),
        (np.dtype("f4"), ("f32", "f32")),
        ("bfloat16", ("bf16", "bf16")),
        ("float32,f16", ("f32", "f16")),
        (ml_dtypes.bfloat16, ("bf16", "bf16")),
    ],
)
def test_a_name_gives_the_types_of_k_and_v(dtype: Any, pair: tuple[str, str]) -> None:
    assert types.kv_pair(dtype) == pair
    assert types.kv_pair(types.kv_name(*pair)) == pair


@pytest.mark.parametrize("dtype", ["q3_K", "q8_0,", ",f16", "f16,f16,f16", "float64", 3, None])
def test_an_unknown_type_is_refused_with_all_that_are_known(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"kv_dtype: expected one of f32, f16, bf16, q8_0, q4_0"):
        types.kv_pair(dtype)


def test_sizes_are_rounded_up() -> None:
    assert [types.round_up(n, 64) for n in (0, 1, 64, 65, 2**70)] == [0, 64, 64, 128, 2**70]
