"""Arrays that caches accept, and those that they refuse with what was expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import unimem as um

ROWS = np.arange(3 * 2 * 8, dtype="float32").reshape(3, 2, 8)


@pytest.mark.parametrize(
    "k",
    [
        ROWS,
        ROWS.astype("f2"),
        ROWS.swapaxes(0, 1)[None],
        np.asfortranarray(ROWS),
        ROWS.astype(">f4"),
        ROWS.view(np.recarray),
        ROWS.data,
    ],
    ids=["usual", "half", "by head", "Fortran", "swapped", "subclass", "buffer"],
)
def test_arrays_of_any_layout_store_the_same(k: Any) -> None:
    with um.KVCache(1, 2, 8, 4, dtype="f32") as kv:
        kv.append(0, k, k)
        assert np.array_equal(kv.layer(0)[0][0], ROWS.swapaxes(0, 1))


@pytest.mark.parametrize(
    ("layer", "k", "v", "error", "rule"),
    [
        (2, ROWS, ROWS, ValueError, "layer: expected a layer from 0 to 1, got 2"),
        (-1, ROWS, ROWS, ValueError, "layer: expected a layer from 0 to 1, got -1"),
        (2**70, ROWS, ROWS, ValueError, "layer: expected a layer from 0 to 1"),
        (0.0, ROWS, ROWS, TypeError, "layer"),
        (0, ROWS, ROWS[:2], ValueError, r"k and v of one shape, \[n, 2, 8\] or \[1, 2, n, 8\]"),
        (0, ROWS[:, :1], ROWS[:, :1], ValueError, "k and v of one shape"),
        (
            0,
            ROWS[0],
            ROWS[0],
            ValueError,
            r"got \(2, 8\) and \(2, 8\); one token has n = 1, as k\[None\]",
        ),
        (0, ROWS, ROWS.astype("f2"), TypeError, "k and v of one dtype"),
        (0, ROWS.astype("f8"), ROWS, TypeError, "k: expected float32, float16 or bfloat16"),
        (0, ROWS, 3, TypeError, "v"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_appended(
    layer: Any, k: Any, v: Any, error: type[Exception], rule: str
) -> None:
    with um.KVCache(2, 2, 8, 4) as kv:
        with pytest.raises(error, match=rule):
            kv.append(layer, k, v)
        kv.append(0, ROWS, ROWS)  # the same cache still takes right ones
        assert len(kv.layer(1)[0][0, 0]) == 0
