"""dtypes, sizes and shapes as users give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unimem._core.arrays import array_within, as_dtype, checked_nbytes


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("f16", "float16"),
        ("bf16", "bfloat16"),
        ("float8_e5m2", "float8_e5m2"),
        (np.dtype(">f4"), "float32"),
        (float, "float64"),
    ],
)
def test_a_dtype_has_many_names(given: Any, name: str) -> None:
    assert as_dtype(given).name == name


@pytest.mark.parametrize(
    ("given", "error"), [(None, TypeError), (b"f4", TypeError), ("<f16", ValueError)]
)
def test_what_is_no_dtype_for_raw_memory_is_refused(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="dtype: expected"):
        as_dtype(given)
    with pytest.raises(ValueError, match="kv: expected one of float16, float32, got"):
        as_dtype(given, ("float16", "float32"), "kv")


def test_objects_cannot_lie_in_raw_memory() -> None:
    with pytest.raises(ValueError, match="cannot lie in raw memory"):
        as_dtype(object)


def test_a_size_is_an_integer_in_range() -> None:
    assert checked_nbytes(np.uint8(3), "n", 3) == 3
    wrongs: list[tuple[Any, type[Exception]]] = [
        (True, TypeError),
        (1.0, TypeError),
        (2, ValueError),
        (2**63, ValueError),
    ]
    for wrong, error in wrongs:
        with pytest.raises(error, match="n: expected an integer"):
            checked_nbytes(wrong, "n", 3)


def test_an_array_fits_into_memory_and_is_aligned() -> None:
    assert array_within("m", 64, 100, 4, None, "f32") == ((24,), np.dtype("f4"))
    assert array_within("m", 64, 100, 4, (2, 3), "f32")[0] == (2, 3)
    for offset, shape, message in (
        (101, None, "outside"),
        (4, 25, "needs 100 bytes"),
        (2, 1, "not"),
    ):
        with pytest.raises(ValueError, match=message):
            array_within("m", 64, 100, offset, shape, "f32")
