"""Memory for copies is used again, and never while a tensor shows it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch

from support.models import tiny_transformers as tiny
from unimem.transformers import KVCache
from unimem.transformers.layers import as_tensor
from unimem.transformers.scratch import Scratch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[0].mT, lambda t: t.view(torch.uint8)])
def test_memory_is_used_again_once_no_tensor_shows_it(dtype: str, view: Any) -> None:
    scratch = Scratch()
    shown = view(as_tensor(scratch.take((2, 3, 4), dtype)))
    place = shown.untyped_storage().data_ptr()
    other = scratch.take((2, 3, 4), dtype)
    assert other.ctypes.data != place
    del shown
    assert scratch.take((2, 3, 5), dtype).ctypes.data == place
    assert scratch.take((2, 3, 4), dtype).ctypes.data == place
    assert scratch.take((20, 3, 4), dtype).ctypes.data not in (place, other.ctypes.data)
    assert len(scratch._parts) == 2  # what was too small is gone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotate", [False, True])
def test_shown_tokens_stay_while_other_layers_and_tokens_come(dtype: Any, rotate: bool) -> None:
    config = tiny.config("llama", head_dim=64)
    torch.manual_seed(0)
    with KVCache(config, dtype="q8_0", rotate=rotate) as cache:
        held: list[tuple[Any, Any]] = []
        places = set()
        for n in (9, 1, 3, 1, 1):
            for layer in range(tiny.LAYERS):
                k, v = torch.randn(2, 1, tiny.HEADS, n, 64).to(dtype)
                shown = cache.update(k, v, layer)
                assert [torch.equal(a[:, :, -n:], b) for a, b in zip(shown, (k, v), strict=True)]
                stored = cache.layers[layer].keys, cache.layers[layer].values
                for part, wanted in zip(shown, stored, strict=True):
                    assert torch.allclose(part[:, :, :-n].float(), wanted[:, :, :-n], atol=0.02)
                if layer == 0:
                    held.append((shown, [part.clone() for part in shown]))
                places.add(shown[0].data_ptr())
                del shown
        for shown, then in held:
            assert all(map(torch.equal, shown, then))
        assert len(places) < 5 * tiny.LAYERS
