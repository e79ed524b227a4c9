"""One of each thing that unimem makes, small, for tests of what all of them refuse."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
import unimem.llama_cpp as llama

DIMS = um.ModelDims(64, 176, 8, 4, 8, 512, 2, 64)
MODEL = Path(um.__file__).parent / "engine/models/tiny.gguf"


class Things:
    """Makes what calls are made on; `undo` closes it."""

    def __init__(self, folder: Path, undo: ExitStack, kept: Any = None) -> None:
        self.folder, self.undo = folder, undo
        self.kept = kept  # a decoder that calls share, which each resets

    def block(self) -> um.Block:
        return self.undo.enter_context(um.Block(1 << 16, reserve=1 << 20, pages="4k"))

    def tape(self) -> um.Tape:
        return self.undo.enter_context(um.Tape(1 << 16, pages="4k"))

    def kv(self, **options: Any) -> um.KVCache:
        cache = self.undo.enter_context(um.KVCache(2, 2, 8, 16, pages="4k", **options))
        rows = np.zeros((3, 2, 8), np.float32)
        for layer in range(2):
            cache.append(layer, rows, rows)
        return cache

    def states(self) -> um.KVCache:
        made: um.KVCache = um.KVCache(
            layers=[um.LayerState((2, 3)), um.LayerKV(2, 8)],
            max_seq_len=16,
            checkpoints=1,
            pages="4k",
        )
        return self.undo.enter_context(made)

    def empty_kv(self) -> um.KVCache:
        return self.undo.enter_context(um.KVCache(2, 2, 8, 16, pages="4k"))

    def reserved(self) -> um.KVCache:
        cache = self.kv()
        cache.reserve(2)
        return cache

    def saved(self) -> Path:
        path = self.folder / "cache.kv"
        if not path.exists():
            self.kv().save(path)
        return path

    def paged(self) -> um.PagedKVCache:
        return self.undo.enter_context(um.PagedKVCache(2, 2, 8, n_blocks=4, pages="4k"))

    def sequence(self) -> um.Sequence:
        s = self.undo.enter_context(self.paged().sequence())
        s.append_all(np.zeros((2, 2, 8), np.float32), np.zeros((2, 2, 8), np.float32))
        return s

    def pad(self) -> um.Scratchpad:
        pad = self.undo.enter_context(um.Scratchpad(8, 4, pages="4k"))
        pad.append_batch(np.zeros((3, 4), np.float32))
        return pad

    def paged_pad(self) -> um.PagedScratchpad:
        pad = self.undo.enter_context(um.PagedScratchpad(8, 4, block_tokens=2, pages="4k"))
        pad.append_batch(np.zeros((3, 4), np.float32))
        return pad

    def layout(self) -> um.Layout:
        return self.undo.enter_context(um.Layout(1 << 12, 1 << 12, 1 << 12, pages="4k"))

    def weights(self, **options: Any) -> um.Weights:
        return self.undo.enter_context(um.open_weights(MODEL, **options))

    def streamed(self) -> um.StreamedTensor:
        tensor = self.weights(load="stream").tensors["blk.0.ffn_up.weight"]
        assert isinstance(tensor, um.StreamedTensor)
        return tensor

    def buffers(self) -> um.DecodeBuffers:
        return self.undo.enter_context(um.DecodeBuffers(DIMS, pages="4k"))

    def decoder(self) -> Any:
        engine = pytest.importorskip("unimem.engine", reason="the engine needs the extra 'run'")
        return self.undo.enter_context(engine.Decoder(MODEL, ctx=16, threads=1, load="map"))

    def governor(self) -> um.Governor:
        return self.undo.enter_context(um.Governor())

    def store(self) -> um.KVStore:
        store = um.KVStore(self.folder / "store", ram_bytes=0, disk_bytes=1 << 24, chunk_tokens=2)
        return self.undo.enter_context(store)

    def prefixes(self, state: llama.LlamaKV) -> llama.LlamaPrefixes:
        return llama.LlamaPrefixes(self.store(), "model", state)

    def no_server(self) -> llama.LlamaServer:
        return llama.LlamaServer("http://localhost:1", self.folder)

    def slot_file(self, state: llama.LlamaKV) -> Path:
        llama.write_slot_file(
            self.folder / "slot.bin", np.arange(state.n_tokens, dtype=np.int32), state
        )
        return self.folder / "slot.bin"

    def grid(self) -> um.Grid:
        return self.undo.enter_context(um.Grid(64, 4, pages="4k"))
