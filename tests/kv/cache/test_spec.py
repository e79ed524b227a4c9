"""The arguments of KVCache: its signature, and calls that miss or mistake one."""

from __future__ import annotations

import inspect
import pydoc
from typing import Any

import pytest

import unimem as um
from unimem.kv.cache.spec import KVSpec, LayersSpec, spec_of

LAYERS = [um.LayerKV(2, 8)]


def test_the_signature_names_all_arguments() -> None:
    parameters = inspect.signature(um.KVCache).parameters
    named = {*KVSpec._fields, *LayersSpec._fields}
    assert named == set(parameters)
    assert list(parameters)[:5] == ["n_layers", "n_kv_heads", "head_dim", "max_seq_len", "layers"]
    assert "KVCache(n_layers=None, n_kv_heads=None" in pydoc.plain(pydoc.render_doc(um.KVCache))


@pytest.mark.parametrize(
    ("dims", "options", "rule"),
    [
        ((2,), {}, "got no n_kv_heads, head_dim, max_seq_len"),
        ((), {"n_heads": 2, "n_layers": 1}, "unexpected option 'n_heads'; expected n_layers, "),
        ((2, 2, 8, 4, 1), {}, "max_seq_len by position and all else by name, got 5 arguments"),
        ((2, 2, 8, 4), {"n_layers": 2}, "got n_layers by position and by name"),
        ((2, 2, 8, 4), {"page": "4k"}, "unexpected option 'page'; .*; placement is pages, numa"),
        ((), {"layers": LAYERS}, "expected max_seq_len= beside layers="),
        ((2, 2, 8, 4), {"layers": LAYERS}, "or layers= and max_seq_len=, got both"),
        ((), {"layers": LAYERS, "max_seq_len": 4, "tape": None}, "'tape' beside layers="),
        ((2, 2, 8, 4), {"checkpoints": 1}, "unexpected option 'checkpoints'"),
    ],
)
def test_a_wrong_call_names_the_argument(
    dims: tuple[int, ...], options: dict[str, Any], rule: str
) -> None:
    with pytest.raises(TypeError, match=rf"^KVCache: .*{rule}"):
        um.KVCache(*dims, **options)


def test_placement_is_kept_apart() -> None:
    spec = spec_of((2, 2, 8), {"max_seq_len": 4, "pages": "4k", "grow": True})
    assert spec == KVSpec(2, 2, 8, 4, grow=True, placement={"pages": "4k"})
