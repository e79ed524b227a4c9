"""Errors of the GPU twin name the wrong argument and what was expected."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.contracts.things import DIMS, Things
from support.contracts.wrong_arguments import Call, unclear
from support.gpu.host_gpu import HostDriver, array_of

DEVICE: dict[str, Any] = {"device": 0, "pinned": False}
SIZES = {"weights": 4096, "scratch": 4096, "history": 4096}


def rows(*shape: int) -> Any:
    return array_of(np.zeros(shape, np.float32))


def cache(t: Things, cuda: Any) -> Any:
    kv = t.undo.enter_context(cuda.KVCache(2, 2, 8, 16))
    for layer in range(2):
        kv.append(layer, rows(3, 2, 8), rows(3, 2, 8))
    return kv


def pad(t: Things, cuda: Any) -> Any:
    made = t.undo.enter_context(cuda.Scratchpad(8, 4))
    made.append_batch(rows(3, 4))
    return made


def tape(t: Things, cuda: Any) -> Any:
    return t.undo.enter_context(cuda.Tape(4096))


CALLS: dict[str, Callable[[Things, Any], Call]] = {
    "Block": lambda t, c: (c.Block, {"nbytes": 4096, "name": "b", "category": "other"} | DEVICE),
    "DecodeBuffers": lambda t, c: (
        c.DecodeBuffers,
        {"dims": DIMS, "tape": None, "dtype": "f16", "name": "b"} | DEVICE,
    ),
    "Grid": lambda t, c: (c.Grid, {"cell_bytes": 64, "n_cells": 2, "name": "g"} | DEVICE),
    "KVCache": lambda t, c: (
        c.KVCache,
        {"n_layers": 1, "n_kv_heads": 2, "head_dim": 8, "max_seq_len": 8, "batch": 1}
        | {"dtype": "f16", "budget_bytes": None, "tape": None, "name": "k"}
        | DEVICE,
    ),
    "KVCache.append": lambda t, c: (
        cache(t, c).append,
        {"layer": 0, "k": rows(1, 2, 8), "v": rows(1, 2, 8)},
    ),
    "KVCache.append_all": lambda t, c: (
        cache(t, c).append_all,
        {"k": rows(2, 2, 8), "v": rows(2, 2, 8)},
    ),
    "KVCache.crop": lambda t, c: (cache(t, c).crop, {"n": 1}),
    "KVCache.enforce_memory_limit": lambda t, c: (
        cache(t, c).enforce_memory_limit,
        {"max_bytes": 1 << 20},
    ),
    "KVCache.layer": lambda t, c: (cache(t, c).layer, {"i": 0, "dtype": "f16", "out": None}),
    "Layout": lambda t, c: (c.Layout, SIZES | DEVICE),
    "Scratchpad": lambda t, c: (
        c.Scratchpad,
        {"max_seq_len": 4, "dim": 4, "dtype": "f32", "tape": None, "name": "p"} | DEVICE,
    ),
    "Scratchpad.append": lambda t, c: (pad(t, c).append, {"vec": rows(4)}),
    "Scratchpad.append_batch": lambda t, c: (pad(t, c).append_batch, {"rows": rows(1, 4)}),
    "Tape": lambda t, c: (
        c.Tape,
        {"nbytes_or_block": 4096, "name": "t", "category": "scratch"} | DEVICE,
    ),
    "Tape.take": lambda t, c: (tape(t, c).take, {"shape": 2, "dtype": "f16", "align": 256}),
    "Tape.take_bytes": lambda t, c: (tape(t, c).take_bytes, {"nbytes": 2, "align": 256}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named_with_what_was_expected(
    name: str, cuda: Any, tmp_path: Path, host_gpu: HostDriver
) -> None:
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects are collected unclosed
        assert unclear(Things(tmp_path, undo), lambda t: CALLS[name](t, cuda)) == []
    gc.collect()
    assert host_gpu.allocated == {}
