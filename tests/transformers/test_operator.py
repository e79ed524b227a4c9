"""Compiled models: few graphs, none of them broken, and the tokens of a model as it is."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch

from support.models import tiny_transformers as tiny
from support.models.architectures import CACHE
from unimem.errors import CacheFull, ClosedError
from unimem.transformers import KVCache

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Graphs:
    """A backend that counts graphs, and runs them as they are or as autograd's."""

    def __init__(self, autograd: bool = False) -> None:
        self.count, self.autograd = 0, autograd

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.count += 1
        lookup = torch._dynamo.lookup_backend("aot_eager")
        return lookup(module, inputs) if self.autograd else module


def compiled(model: Any, graphs: Graphs, **options: Any) -> Any:
    return torch.compile(model, backend=graphs, **options)


def chosen(call: Any, cache: Any, steps: int = 9, prompt: int = 5) -> list[int]:
    """Return the tokens that a model chooses greedily, in several streams at once."""
    ids, made = tiny.prompts(2, prompt), []
    for _ in range(steps):
        ids = call(ids, **{CACHE: cache}).logits[:, -1:].argmax(-1)
        made += ids.flatten().tolist()
    return made


def as_it_is(model: Any, cache: Any) -> list[int]:
    with cache:
        return chosen(model, cache)


@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("gemma", "unimem")])
def test_there_are_no_more_graphs_than_with_a_dynamic_cache(kind: str, attention: str) -> None:
    model = copy.deepcopy(tiny.model(kind))  # others use it as it is
    model.set_attn_implementation(attention)
    ours, theirs = Graphs(), Graphs()
    _, dynamic = tiny.both(kind)
    expected = chosen(compiled(model, theirs), dynamic)
    torch._dynamo.reset()
    call = compiled(model, ours, fullgraph=True)
    with KVCache.for_model(model) as cache:
        assert chosen(call, cache) == expected
    first = ours.count
    assert first <= theirs.count
    with KVCache.for_model(model) as another:  # the same graphs serve it
        assert chosen(call, another) == expected
    assert ours.count <= first + 1


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "copies": ("llama", {"dtype": "f16"}),
    "fixed": ("llama", {"grow": False}),
    "window": ("mistral", {"spare_rows": 0}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_compiled_steps_give_the_tokens_of_plain_ones(case: str) -> None:
    kind, options = OPTIONS[case]
    model = tiny.model(kind)
    expected = as_it_is(model, KVCache.for_model(model, **options))
    call = compiled(model, Graphs(autograd=True), fullgraph=True)
    assert as_it_is(call, KVCache.for_model(model, **options)) == expected


def test_tokens_are_dropped_between_compiled_steps() -> None:
    model = tiny.model("llama")
    call = compiled(model, Graphs(), fullgraph=True)

    def dropping(call: Any) -> list[int]:
        with KVCache.for_model(model, grow=False) as cache:
            made = chosen(call, cache, 6)
            cache.crop(-4)
            ids = torch.tensor([[7, 8, 9], [3, 2, 1]])
            made += call(ids, **{CACHE: cache}).logits[:, -1].argmax(-1).tolist()
            cache.reset()
            return made + chosen(call, cache, 3)

    assert dropping(call) == dropping(model)


def test_failures_of_compiled_steps_are_those_of_plain_ones() -> None:
    model = tiny.model("llama")
    call = compiled(model, Graphs())
    with KVCache.for_model(model, 8) as cache:
        with pytest.raises(CacheFull, match="max_seq_len= makes room"):
            chosen(call, cache)
        assert cache.get_seq_length() == 8
        cache.crop(-2)
        assert chosen(call, cache, 1, prompt=2)
    with pytest.raises(ClosedError):
        chosen(call, cache)


def test_operator_is_known_to_torch() -> None:
    """torch's own checks of an operator: its schema, its fake tensors, and its mutations."""
    cache = KVCache(tiny.config("llama"))
    states = tiny.states(4)
    layer = cache.layers[0]
    for n_copied in itertools.accumulate([4] * 3):
        torch.library.opcheck(
            torch.ops.unimem.append.default,
            (layer._place, *states, [], n_copied),
            test_utils=("test_schema",),
        )
    assert layer.get_seq_length() == 12
