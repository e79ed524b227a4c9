"""An element type has the same names in every call that takes one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import unimem as um
from support.contracts.things import DIMS, MODEL, Things
from unimem.kv.types import kv_type


def torch_dtype(name: str) -> Any:
    """Imitate a dtype of torch."""
    members = {"__module__": "torch", "__repr__": lambda self: f"torch.{name}"}
    return type("dtype", (), members)()


# The spellings that all calls accept, by NumPy's name.
NAMES: dict[str, tuple[Any, ...]] = {
    "float16": ("f16", "float16", "half", np.float16, np.dtype("float16"), torch_dtype("float16")),
    "float32": ("f32", "float32", np.float32, np.dtype("float32"), torch_dtype("float32")),
    "bfloat16": (
        "bf16",
        "bfloat16",
        ml_dtypes.bfloat16,
        np.dtype(ml_dtypes.bfloat16),
        torch_dtype("bfloat16"),
    ),
}
SHORT = {"float16": "f16", "float32": "f32", "bfloat16": "bf16"}
# Calls that take a dtype; each returns NumPy's name of the result.
CALLS: dict[str, Callable[[Things, Any], str]] = {
    "Block.as_array": lambda t, d: t.block().as_array(d, 2).dtype.name,
    "Cell.as_array": lambda t, d: t.grid().take().as_array(d, 2).dtype.name,
    "DecodeBuffers": lambda t, d: (
        t.undo.enter_context(um.DecodeBuffers(DIMS, dtype=d)).logits.dtype.name
    ),
    "KVCache.layer": lambda t, d: t.kv().layer(0, dtype=d)[1].dtype.name,
    "PagedScratchpad": lambda t, d: t.undo.enter_context(um.PagedScratchpad(2, 2, d)).dtype.name,
    "Scratchpad": lambda t, d: t.undo.enter_context(um.Scratchpad(2, 2, d)).dtype.name,
    "Tape.take": lambda t, d: t.tape().take((2, 2), d).dtype.name,
}
# Calls that take a KV type; each returns its short name.
KV_CALLS: dict[str, Callable[[Things, Any], str]] = {
    "KVCache": lambda t, d: t.kv(dtype=d).dtype,
    "KVCache.for_dims": lambda t, d: t.undo.enter_context(um.KVCache.for_dims(DIMS, dtype=d)).dtype,
    "PagedKVCache": lambda t, d: (
        t.undo.enter_context(um.PagedKVCache(1, 1, 8, n_blocks=1, dtype=d)).dtype
    ),
    "plan": lambda t, d: um.plan(DIMS, kv_dtype=d).kv_dtype,
    "Layout.for_model": lambda t, d: getattr(
        t.undo.enter_context(um.Layout.for_model(MODEL, ctx=8, kv_dtype=d)).plan, "kv_dtype", ""
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_knows_every_name(call: str, tmp_path: Path) -> None:
    for name, spellings in NAMES.items():
        for spelling in spellings:
            with ExitStack() as undo:
                assert CALLS[call](Things(tmp_path, undo), spelling) == name, spelling


@pytest.mark.parametrize("call", KV_CALLS)
def test_every_cache_knows_every_name(call: str, tmp_path: Path) -> None:
    for name, spellings in NAMES.items():
        for spelling in spellings:
            with ExitStack() as undo:
                assert KV_CALLS[call](Things(tmp_path, undo), spelling) == SHORT[name], spelling


def test_the_twin_on_a_gpu_knows_them_too(cuda: Any) -> None:
    with cuda.Tape(1 << 12) as tape, cuda.KVCache(1, 1, 8, 4, dtype=np.float16) as kv:
        assert tape.take(2, "f16").dtype == tape.take(2, torch_dtype("float16")).dtype == np.float16
        assert tape.block.as_array("bf16", 2).dtype == ml_dtypes.bfloat16
        assert kv.dtype == "f16"


@pytest.mark.parametrize("spelling", ["f16", "float16", np.float16])
def test_the_engine_knows_them(spelling: Any) -> None:
    engine = pytest.importorskip("unimem.engine", reason="the engine needs the extra 'run'")
    with engine.Decoder(MODEL, ctx=8, threads=1, kv_dtype=spelling) as decoder:
        assert decoder.kv.dtype == "f16"


def test_types_that_only_one_room_has() -> None:
    with um.Tape(1 << 12) as tape:
        assert tape.take(1, "f64").dtype == np.float64
        assert tape.take(1, "float8_e4m3fn").dtype == ml_dtypes.float8_e4m3fn
        # NumPy's own names keep their meaning.
        assert tape.take(1, "f2").dtype == np.float16
        assert tape.take(1, "f8").dtype == np.float64
        assert tape.take(1, "longdouble").dtype == np.longdouble
    assert kv_type("q8_0") == "q8_0"


@pytest.mark.parametrize(
    "dtype", [None, "f17", b"f16", 16, object(), [], ["f16"], "finfo", torch_dtype("quint8")]
)
def test_what_is_no_type(dtype: Any, tmp_path: Path) -> None:
    with ExitStack() as undo:
        things = Things(tmp_path, undo)
        for calls in (CALLS, KV_CALLS):
            for name, call in calls.items():
                if dtype is None and name == "KVCache.layer":
                    continue  # it returns views
                with pytest.raises((TypeError, ValueError), match=r"dtype: expected|in raw memory"):
                    call(things, dtype)
