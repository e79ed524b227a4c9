"""Callers can read signatures: `inspect`, `help` and an IDE find them, and errors show them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import unimem as um
from unimem._core.grid import DeviceGrid
from unimem._core.load import load, move_pages

# Made by other calls, of a dict's kind, or with the constructor of Python's own exceptions.
WITHOUT = {"Cell", "ClosedError", "FrozenError", "PlacementError", "PlacementWarning"}
WITHOUT |= {"PlacementOptions"}
CALLS = {name: getattr(um, name) for name in um.__all__ if callable(getattr(um, name))}
CONSTRUCTORS: dict[str, Any] = {name: call for name, call in CALLS.items() if inspect.isclass(call)}


@pytest.mark.parametrize("name", sorted(CALLS.keys() - WITHOUT))
def test_every_public_call_has_a_signature(name: str) -> None:
    assert isinstance(inspect.signature(CALLS[name]), inspect.Signature)


@pytest.mark.parametrize("call", [DeviceGrid, load, move_pages, um.Block.map, um.Tape.take])
def test_so_has_what_is_compiled_inside(call: Any) -> None:
    parameters = inspect.signature(call).parameters
    assert parameters
    assert {"args", "kwargs"} & parameters.keys() == set()


def test_a_compiled_signature_has_names_kinds_and_defaults() -> None:
    text = str(inspect.signature(um.Tape))
    assert text == "(nbytes_or_block, *, name=None, category='scratch', **placement)"
    assert (um.Tape.__doc__ or "").startswith("A bump allocator")
    assert str(inspect.signature(um.Tape.take_bytes)) == "(self, /, nbytes, *, align=64)"


def required(call: Any) -> list[str]:
    """Return the names of the arguments that have to be given."""
    return [
        name
        for name, each in inspect.signature(call).parameters.items()
        if each.default is each.empty
        and each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY}
    ]


@pytest.mark.parametrize(
    "name", [name for name in sorted(CONSTRUCTORS.keys() - WITHOUT) if required(CONSTRUCTORS[name])]
)
def test_a_missing_argument_of_a_constructor_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=rf"\b{required(CONSTRUCTORS[name])[0]}\b") as raised:
        CONSTRUCTORS[name]()
    assert "takes exactly" not in str(raised.value)


@pytest.mark.parametrize("name", sorted(CONSTRUCTORS.keys() - WITHOUT))
def test_an_unknown_argument_of_a_constructor_is_named(name: str) -> None:
    given = dict.fromkeys(required(CONSTRUCTORS[name]), 1)
    with pytest.raises(TypeError, match=r"'surprise'|Expected an object|expected"):
        CONSTRUCTORS[name](**given | {"surprise": 1})


@pytest.mark.parametrize(
    ("call", "arguments", "options", "message"),
    [
        (um.Grid, (), {}, r"^Grid\(cell_bytes, .*\): missing argument 'cell_bytes'$"),
        (um.Grid, (64,), {}, r"missing argument 'n_cells'$"),
        (um.Grid, (), {"cell_bytes": 64}, r"missing argument 'n_cells'$"),
        (um.Grid, (64, 2, 3), {}, r"expected at most 2 positional arguments, got 3$"),
        (um.Grid, (64, 2), {"cell_bytes": 3}, r"^Grid\(.*\): two values for .*'cell_bytes'$"),
        (um.Grid, (64, 2), {"pagse": "4k"}, r"^Block\(.*unexpected argument 'pagse'$"),
        (um.PagedKVCache, (1, 1, 8), {}, r"^PagedKVCache\(.*\): missing argument 'n_blocks'$"),
        (um.KVCache, (), {"n_heads": 2}, r"^KVCache: unexpected option 'n_heads'; expected n_l"),
        (um.Block.map, (), {}, r"^Block.map\(path, .*missing argument 'path'$"),
        (um.rotate_heads, (), {"y": 1}, r"^rotate_heads\(x, .*(missing argument 'x'|'y')$"),
    ],
)  # fmt: skip
def test_a_wrong_call_of_compiled_code_says_what_there_is(
    call: Any, arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        call(*arguments, **options)
