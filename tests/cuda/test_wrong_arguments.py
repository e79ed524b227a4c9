"""Errors of the GPU twin name the wrong argument and what was expected."""

from __future__ import annotations

import gc
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.contracts.things import DIMS, Things
from support.contracts.wrong_arguments import calls_of, unclear
from support.gpu.host_gpu import HostDriver, array_of


def rows(*shape: int) -> Any:
    return array_of(np.zeros(shape, np.float32))


class DeviceThings(Things):
    """The same on a device."""

    def __init__(self, folder: Path, undo: ExitStack, kept: Any) -> None:
        super().__init__(folder, undo, kept)
        self.cuda = kept  # the package

    def kv(self, **options: Any) -> Any:
        kv = self.undo.enter_context(self.cuda.KVCache(2, 2, 8, 16))
        for layer in range(2):
            kv.append(layer, rows(3, 2, 8), rows(3, 2, 8))
        return kv

    def pad(self) -> Any:
        made = self.undo.enter_context(self.cuda.Scratchpad(8, 4))
        made.append_batch(rows(3, 4))
        return made

    def tape(self) -> Any:
        return self.undo.enter_context(self.cuda.Tape(4096))


NAMES = {"DIMS": DIMS, "DEVICE": {"device": 0, "pinned": False}, "rows": rows}
TABLE = """
Block: t.cuda.Block(nbytes=4096, name='b', category='other', **DEVICE)
DecodeBuffers: t.cuda.DecodeBuffers(dims=DIMS, tape=None, dtype='f16', name='b', **DEVICE)
Grid: t.cuda.Grid(cell_bytes=64, n_cells=2, name='g', **DEVICE)
KVCache: t.cuda.KVCache(n_layers=1, n_kv_heads=2, head_dim=8, max_seq_len=8, batch=1, dtype='f16',
    v_head_dim=8, budget_bytes=None, tape=None, arrays='cupy', name='k', **DEVICE)
KVCache.append: t.kv().append(layer=0, k=rows(1, 2, 8), v=rows(1, 2, 8))
KVCache.append_all: t.kv().append_all(k=rows(2, 2, 8), v=rows(2, 2, 8))
KVCache.crop: t.kv().crop(n=1)
KVCache.enforce_memory_limit: t.kv().enforce_memory_limit(max_bytes=1 << 20)
KVCache.layer: t.kv().layer(i=0, dtype='f16', out=None)
Layout: t.cuda.Layout(weights=4096, scratch=4096, history=4096, **DEVICE)
Scratchpad: t.cuda.Scratchpad(max_seq_len=4, dim=4, dtype='f32', tape=None, name='p', **DEVICE)
Scratchpad.append: t.pad().append(vec=rows(4))
Scratchpad.append_batch: t.pad().append_batch(rows=rows(1, 4))
Tape: t.cuda.Tape(nbytes_or_block=4096, name='t', category='scratch', **DEVICE)
Tape.take: t.tape().take(shape=2, dtype='f16', align=256)
set_budget: t.cuda.set_budget(nbytes=1 << 30, device=0)
Tape.take_bytes: t.tape().take_bytes(nbytes=2, align=256)
"""
CALLS = calls_of(TABLE, NAMES)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_named_with_what_was_expected(
    name: str, cuda: Any, tmp_path: Path, host_gpu: HostDriver
) -> None:
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects are collected unclosed
        assert unclear(DeviceThings(tmp_path, undo, cuda), CALLS[name]) == []
    gc.collect()
    assert host_gpu.allocated == {}
