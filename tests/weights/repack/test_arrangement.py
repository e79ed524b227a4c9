"""Arrangements: which tensors are repacked, and that their places do not overlap."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import unimem as um
from support.models.image_models import KINDS, uses_images
from unimem.weights.repack.arrangement import LOOKED_UP, arrange, new_buffers

pytestmark = uses_images


def test_places_are_aligned_and_do_not_overlap(model: Path) -> None:
    with um.open_weights(model) as weights:
        found = arrange(weights)
    end = 0
    for _, order, at in found.slots:
        assert at % 64 == 0
        assert end <= at < end + 64
        end = at + order.nbytes
    assert end <= found.nbytes < end + 64
    assert found.source_bytes == sum(tensor.nbytes for tensor, _, _ in found.slots)
    assert sum(found.types.values()) == sum(order.nbytes for _, order, _ in found.slots)


def test_tables_and_stacks_without_experts_keep_their_order(model: Path) -> None:
    with um.open_weights(model) as weights:
        names = {slot.tensor.name for slot in arrange(weights).slots}
        assert names == set(weights.tensors) - LOOKED_UP
        experts = weights.tensors["down_exps.weight"]
    for name, n in (("down_exps.weight", 1), ("attn_k_b.weight", 0), ("token_embd.weight", 0)):
        contents: Any = SimpleNamespace(tensors={name: replace(experts, name=name)})
        assert len(arrange(contents).slots) == n, name


def test_buffers_cover_the_memory(model: Path) -> None:
    with um.open_weights(model) as weights, um.Tape(4 << 20) as tape:
        found = arrange(weights)
        address = tape.take_address(found.nbytes)
        buffers = new_buffers(found, address)
        for tensor, order, at in found.slots:
            buffer = buffers[order.buffer_type.name]
            buffer.write(KINDS[0], tensor.ne, tensor.address, address + at)
            assert ctypes.string_at(address + at, order.nbytes) != bytes(order.nbytes)
        for buffer in buffers.values():
            buffer.free()
