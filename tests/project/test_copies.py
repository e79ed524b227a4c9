"""A copy or a pickle of each public object is equal, or refused by a sentence: never wrong."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.things import DIMS, MODEL, Things
from unimem.accounting.published import Tally


def measured() -> um.Measured:
    with um.measure() as made:
        return made


MAKERS: dict[str, Callable[[Things], Any]] = {
    "Block": Things.block,
    "BufferPlan": lambda t: um.BufferPlan([um.BufferUse("a", 8, 0, 1)]),
    "BufferUse": lambda t: um.BufferUse("a", 8, 0, 1),
    "Cell": lambda t: t.grid().take(),
    "DecodeBuffers": Things.buffers,
    "ForwardScratch": lambda t: um.ForwardScratch(DIMS, tape=t.tape()),
    "Governor": Things.governor,
    "Grid": Things.grid,
    "KVCache": Things.kv,
    "KVStore": Things.store,
    "LayerKV": lambda t: um.LayerKV(2, 8),
    "LayerState": lambda t: um.LayerState((2, 3)),
    "Layout": Things.layout,
    "Machine": lambda t: um.doctor(),
    "Measured": lambda t: measured(),
    "ModelDims": lambda t: DIMS,
    "PagedKVCache": Things.paged,
    "PagedScratchpad": Things.paged_pad,
    "Placement": lambda t: t.block().granted,
    "PlacementOptions": lambda t: um.PlacementOptions(pages="4k"),
    "Plan": lambda t: um.plan(DIMS),
    "Repacked": lambda t: t.undo.enter_context(um.repack(t.weights())),
    "Report": lambda t: um.report(),
    "Scratchpad": Things.pad,
    "Sequence": Things.sequence,
    "Stage": lambda t: t.undo.enter_context(um.stage(MODEL)),
    "Stat": lambda t: t.layout().stat(),
    "StreamedTensor": Things.streamed,
    "Tape": Things.tape,
    "Tensor": lambda t: next(iter(t.weights().values())),
    "Weights": Things.weights,
    # What these have, and other kinds of them.
    "DecodeBatch": lambda t: t.buffers().batch(1),
    "Decoder": Things.decoder,
    "Measured that goes on": lambda t: t.undo.enter_context(um.measure()),
    "KVCache of states": Things.states,
    "KVCache with a window": lambda t: t.kv(window=4),
    "Stream": lambda t: t.weights(load="stream").stream,
    "Tally": lambda t: Tally(),
    "Weights.metadata": lambda t: t.weights().metadata,
    "Weights.tensors": lambda t: t.weights().tensors,
}
USES: list[Callable[[Any], Any]] = [
    copy.copy,
    copy.deepcopy,
    lambda x: pickle.loads(pickle.dumps(x)),
]
CLASSES = [name for name in um.__all__ if inspect.isclass(getattr(um, name))]


def maker_of(name: str) -> Callable[[Things], Any]:
    kind = getattr(um, name, None)
    if inspect.isclass(kind) and issubclass(kind, Exception):
        return lambda t: kind("a sentence", 1)
    return MAKERS[name]


@pytest.fixture
def things(tmp_path: Path) -> Iterator[Things]:
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore", um.PlacementWarning)
        yield Things(tmp_path, undo)


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return [*one] == [*other] and all(np.array_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and (one == other or repr(one) == repr(other))


@pytest.mark.parametrize("use", USES, ids=["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("name", sorted(MAKERS | dict.fromkeys(CLASSES)))
def test_a_copy_is_equal_or_refused(name: str, use: Callable[[Any], Any], things: Things) -> None:
    made, said = maker_of(name)(things), ""
    try:
        other = use(made)
    except TypeError as error:
        said = str(error)
    if said:
        refused = rf"(an? )?(Tensor|{type(made).__name__}) cannot be pickled( or copied)?: \w.+"
        assert re.fullmatch(refused, said)
    else:
        assert not hasattr(made, "close")  # what holds memory would end twice
        assert is_equal(made, other)
        del other
        gc.collect()
    assert not getattr(made, "closed", False)
