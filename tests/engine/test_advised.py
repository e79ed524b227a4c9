"""Mapped weights without room: the kernel is asked for them, and logits stay the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import unimem as um
from support.kernel.proc_maps import mappings
from support.models.decoders import greedy, logits_of, tokens
from support.models.make import TINY, write_model
from unimem._core.status import counters
from unimem.engine import Decoder, advised, model_memory
from unimem.engine.advice_op import FileAdvice
from unimem.system import limits

PROMPT = tokens(150)


@pytest.mark.parametrize(("arch", "n_calls"), [("qwen3moe", range(2 * 10, 2 * 14)), ("llama", [3])])
def test_weights_without_room_are_asked_for(
    arch: str, n_calls: range | list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", arch, TINY, "f32")

    def run() -> tuple[list[int], np.ndarray, int]:
        with Decoder(path, ctx=200, threads=1, load="map") as decoder:
            chosen, logits = logits_of(decoder, PROMPT, 5)
            before = counters()["os_calls"]
            greedy(decoder, 1)
            return chosen, logits, counters()["os_calls"] - before

    chosen, logits, n = run()
    assert n == 0
    monkeypatch.setattr(model_memory, "has_room", lambda _: False)
    without = run()
    assert without[0] == chosen
    np.testing.assert_array_equal(without[1], logits)
    assert without[2] in n_calls


@pytest.mark.parametrize("arch", ["qwen3moe", "llama", "gemma3"])  # gemma3's head is its embedding
def test_all_that_a_token_reads_is_asked_for(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", arch, TINY, "f32")
    asked: list[advised.Range] = []

    def advice(ranges: list[advised.Range], n_experts: int = 1) -> FileAdvice:
        asked.extend(ranges)
        return FileAdvice(ranges, n_experts)

    monkeypatch.setattr(advised, "FileAdvice", advice)
    monkeypatch.setattr(model_memory, "has_room", lambda _: False)
    with Decoder(path, ctx=200, threads=1, load="map") as decoder:
        tensors = decoder.weights.tensors
        missing = {
            name
            for name, tensor in tensors.items()
            if not any(
                at <= tensor._block_offset and tensor._block_offset + tensor.nbytes <= at + n
                for _, at, n in asked
            )
        }
        assert missing <= {"token_embd.weight"}
        assert not missing or "output.weight" in tensors  # else the embedding is the head
        assert "rr" in mappings(decoder.weights.blocks[0].address)[0].flags  # MADV_RANDOM


def test_room_is_what_the_limits_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", TINY, "f32")
    with um.open_weights(path, load="map") as weights:
        assert advised.has_room(weights)
        none = limits.Limit("none", 1, 1, "none")
        monkeypatch.setattr(limits, "memory_limits", lambda: (none,))
        weights.evict()
        assert not advised.has_room(weights)
