"""What a user asks a KV cache to be: the arguments of `KVCache`, checked for their names alone."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from unimem.kv.layer_specs import Layer
from unimem.system.placement import PlacementOptions

_PLACEMENT = tuple(PlacementOptions.__annotations__)
_DIMS = "n_layers n_kv_heads head_dim max_seq_len".split()


class KVSpec(NamedTuple):
    """A cache whose layers are alike."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    max_seq_len: int
    batch: int = 1
    dtype: Any = "f16"
    k_dtype: Any = None
    v_dtype: Any = None
    v_head_dim: int | None = None
    order: str = "token"
    window: int | None = None
    spare_rows: int = 0
    budget_bytes: int | None = None
    grow: bool = False
    rotate: bool = False
    tape: Any = None
    name: str | None = None
    placement: Mapping[str, Any] = MappingProxyType({})


class LayersSpec(NamedTuple):
    """A cache whose layers differ."""

    layers: tuple[Layer, ...]
    max_seq_len: int
    batch: int = 1
    dtype: Any = "f16"
    order: str = "token"
    spare_rows: int = 0
    budget_bytes: int | None = None
    grow: bool = False
    rotate: bool = False
    checkpoints: int = 0
    checkpoint_every: int | None = None
    name: str | None = None
    placement: Mapping[str, Any] = MappingProxyType({})


def signature() -> inspect.Signature:
    """Return the signature of `KVCache`, whether its layers are alike or differ."""
    by_position = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in _DIMS
    ]
    defaults = {"layers": None, **KVSpec._field_defaults, **LayersSpec._field_defaults}
    del defaults["placement"]
    by_name = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in defaults.items()
    ]
    rest = inspect.Parameter("placement", inspect.Parameter.VAR_KEYWORD)
    return inspect.Signature([*by_position, *by_name, rest])


def spec_of(dims: tuple[Any, ...], options: dict[str, Any]) -> KVSpec | LayersSpec:
    """Return what the arguments of `KVCache` ask for.

    Raises
    ------
    TypeError
        An argument is missing, unknown or given twice; the message names it.
    """
    has_dims = bool(dims) or not options.keys().isdisjoint(_DIMS[:3])
    if options.get("layers") is not None or ("layers" in options and not has_dims):
        if has_dims:
            raise TypeError(
                "KVCache: expected n_layers, n_kv_heads, head_dim and max_seq_len, or layers= and "
                "max_seq_len=, got both"
            )
        if "max_seq_len" not in options:
            raise TypeError("KVCache: expected max_seq_len= beside layers=, got none")
        return LayersSpec(**_sorted(options, LayersSpec, " beside layers="))
    if len(dims) > len(_DIMS):
        raise TypeError(
            f"KVCache: expected {', '.join(_DIMS)} by position and all else by name, got "
            f"{len(dims)} arguments by position"
        )
    given = dict(zip(_DIMS, dims, strict=False))
    if twice := given.keys() & options.keys():
        raise TypeError(f"KVCache: got {', '.join(sorted(twice))} by position and by name")
    given |= {name: value for name, value in options.items() if name != "layers"}
    fields = _sorted(given, KVSpec, "")
    if missing := [name for name in _DIMS if name not in given]:
        raise TypeError(
            f"KVCache: expected {', '.join(_DIMS)} (or layers= and max_seq_len=), got no "
            f"{', '.join(missing)}"
        )
    return KVSpec(**fields)


def _sorted(options: dict[str, Any], kind: type[Any], where: str) -> dict[str, Any]:
    """Return the options with those of placement together; refuse unknown ones."""
    own = {name: value for name, value in options.items() if name in kind._fields}
    placement = {name: value for name, value in options.items() if name not in own}
    if unknown := [repr(name) for name in placement if name not in _PLACEMENT]:
        raise TypeError(
            f"KVCache: unexpected option {', '.join(unknown)}{where}; expected "
            f"{', '.join(kind._fields[:-1])}; placement is {', '.join(_PLACEMENT)}"
        )
    return own | {"placement": placement}
