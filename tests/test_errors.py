"""Errors carry the figures that their messages name, and pickle; what holds memory does not."""

from __future__ import annotations

import contextlib
import copy
import errno
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import unimem as um

ERRORS: list[tuple[BaseException, str, dict[str, Any]]] = [
    *(
        (kind("a message", 10, 8, 3), "a message", {"limit": 10, "used": 8, "asked": 3})
        for kind in (um.CapacityError, um.TapeFull, um.GridFull, um.CacheFull)
    ),
    (um.TapeFull("only a message"), "only a message", {"limit": 0, "used": 0, "asked": 0}),
    (um.GGUFError("r", 5, "a"), "a: r (at byte 5)", {"rule": "r", "offset": 5, "path": "a"}),
    (um.FormatError("r", 7), "r (at byte 7)", {"rule": "r", "offset": 7, "path": None}),
    (um.FormatError("r", path="a"), "a: r", {"rule": "r", "offset": None, "path": "a"}),
    (um.FormatError("r", 2**64 - 1), f"r (at byte {2**64 - 1})", {"offset": 2**64 - 1}),
    (um.PlacementError(errno.EPERM, "mlock: no"), "[Errno 1] mlock: no", {"errno": errno.EPERM}),
    (um.PlacementError("not granted"), "not granted", {"errno": None}),
    (um.ClosedError("the Tape is closed"), "the Tape is closed", {}),
    (um.FrozenError("frozen"), "frozen", {}),
    (um.PlacementWarning("granted 4k"), "granted 4k", {}),
]


@pytest.mark.parametrize("case", ERRORS, ids=lambda case: type(case[0]).__name__)
@pytest.mark.parametrize(
    "passed_on", [lambda e: e, lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy]
)
def test_fields_and_message_survive(case: Any, passed_on: Callable[[Any], Any]) -> None:
    error, message, fields = case
    got = passed_on(error)
    assert type(got) is type(error)
    assert str(got) == message
    assert {name: getattr(got, name) for name in fields} == fields


BASES: dict[Any, tuple[Any, ...]] = {
    MemoryError: (um.CapacityError,),
    um.CapacityError: (um.TapeFull, um.GridFull, um.CacheFull),
    OSError: (um.PlacementError,),
    ValueError: (um.FormatError,),
    um.FormatError: (um.GGUFError,),
    RuntimeError: (um.ClosedError, um.FrozenError),
    UserWarning: (um.PlacementWarning,),
}


@pytest.mark.parametrize("base", BASES)
def test_errors_are_caught_as_what_they_are(base: Any) -> None:
    assert all(issubclass(error, base) for error in BASES[base])


def test_a_model_that_does_not_fit_says_what_to_do() -> None:
    plan = um.plan(um.ModelDims(64, 172, 8, 4, 8, 512, 5, 2**31 - 1), ctx=2**31 - 1)
    assert not plan.fits
    with pytest.raises(um.CapacityError) as caught:
        plan.require_fits()
    assert caught.value.asked == plan.required_bytes > caught.value.limit == plan.available_bytes
    assert plan.advice
    assert plan.advice[0].text in str(caught.value)


ROW = np.zeros((1, 1, 1), "float32")
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("take", "take_bytes", "take_address", "rewind", "owns"), (1,)),
    **dict.fromkeys(("reserve", "commit", "crop", "layer", "attach"), (0,)),
    "give": (um.Cell.__new__(um.Cell),),
    "append": (0, ROW, ROW),
    "append_all": (ROW, ROW),
    "address": (0, "k"),
}


def use_unmade(kind: type, arguments: Mapping[str, tuple[Any, ...]]) -> None:
    """A subclass whose constructor forgets ours gets exceptions, not a dead process."""
    forgetful = type("Forgetful", (kind,), {"__init__": lambda self: None})
    refusals = (um.ClosedError, AttributeError, TypeError, ValueError, NotImplementedError)
    for name in [*dir(kind), "__enter__", "__exit__", "__repr__"]:
        thing = forgetful()
        if not name.startswith("_") or name in ("__enter__", "__exit__", "__repr__"):
            with contextlib.suppress(*refusals):
                value = getattr(thing, name)
                if callable(value):
                    value(*arguments.get(name, ()))


OF_PADS = {"append": (ROW[0, 0],), "append_batch": (ROW[0],)}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, {}) for kind in (um.Block, um.Tape, um.Grid, um.Cell, um.KVCache, um.Layout)),
        *((kind, OF_PADS) for kind in (um.Scratchpad, um.PagedScratchpad)),
    ],
)
def test_what_was_not_made_is_refused(kind: type, more: dict[str, Any]) -> None:
    use_unmade(kind, ARGUMENTS | more)


@pytest.mark.parametrize("name", ["Block", "Tape", "Grid", "KVCache", "Layout", "DecodeBuffers"])
def test_what_was_not_made_on_a_gpu_is_refused(cuda: Any, name: str) -> None:
    from support.gpu.host_gpu import array_of

    row, at = array_of(ROW), array_of(np.zeros(1, "int32"))
    given = {"append": (0, row, row), "append_all": (row, row), "append_at": (0, row, row, at)}
    use_unmade(getattr(cuda, name), ARGUMENTS | given)
