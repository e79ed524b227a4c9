"""Which layers share a part of a cache, and where the rows of each layer are."""

from __future__ import annotations

import pytest

import unimem as um
from unimem.kv.layer_specs import check_layers, kinds_of, places_of, states_of

FULL, SLIDING, STATE = um.LayerKV(2, 64), um.LayerKV(2, 64, window=8), um.LayerState((3, 4))


def test_layers_of_a_kind_share_a_part() -> None:
    shared = um.LayerKV(2, 64, share_of=1)
    layers = check_layers([SLIDING, FULL, STATE, SLIDING, shared], 64, "f16")
    kinds = kinds_of(layers)
    assert [(kind.window, n) for kind, n in kinds.items()] == [(None, 1), (8, 2)]
    full, sliding = kinds
    assert places_of(layers) == [
        (sliding, 0, True),
        (full, 0, True),
        (None, 0, False),
        (sliding, 1, True),
        (full, 0, False),
    ]
    assert states_of(layers) == (STATE,)


def test_a_window_of_all_tokens_is_no_window() -> None:
    layers = check_layers([SLIDING, FULL], 8, "f32")
    assert layers == (um.LayerKV(2, 64, dtype="f32"),) * 2


@pytest.mark.parametrize("share_of", [0, 1, 9])
def test_a_layer_shares_rows_of_another_layer_only(share_of: int) -> None:
    layers = [um.LayerKV(2, 64, share_of=share_of), um.LayerKV(2, 64, share_of=0), FULL]
    with pytest.raises(ValueError, match=r"layers\[0\].share_of: expected the number of another"):
        check_layers(layers, 64, "f16")
