"""The one check of token ids, for sequences, snapshots and the store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from unimem.kv.token_ids import n_common, token_ids


@pytest.mark.parametrize("given", [[], (0, 2**31 - 1), range(3), np.arange(4, dtype="u8")[::2]])
def test_ids_are_a_new_array_of_int32(given: Any) -> None:
    ids = token_ids(given)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(given)
    assert ids.flags.owndata


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (7, TypeError),
        ([1.5], TypeError),
        ([True], TypeError),
        (["1"], TypeError),
        ([None], TypeError),
        (np.array([2**40]), ValueError),
        ([[1, 2]], ValueError),
        ([-1], ValueError),
        ([2**31], ValueError),
        ([[1], [2, 3]], ValueError),
    ],
)
def test_other_things_are_refused_by_the_arguments_name(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^ids: expected"):
        token_ids(given, "ids")


def test_common_first_tokens() -> None:
    pairs = [((), (1,)), ((1, 2), (1, 2, 3)), ((1, 2, 3), (1, 5, 3)), ((4,), (5,))]
    assert [n_common(token_ids(a), token_ids(b)) for a, b in pairs] == [0, 2, 1, 0]
