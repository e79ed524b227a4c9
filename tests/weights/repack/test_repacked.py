"""Repacked weights: described by type, usable until they are closed, and gone with their tape."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import unimem as um
from support.models.image_models import KINDS, uses_images
from unimem.backends import ggml_orders

pytestmark = uses_images


def test_tensors_and_types_are_described(model: Path) -> None:
    with um.open_weights(model) as weights, um.repack(weights, cache=False) as repacked:
        names = {"up.weight", "down.weight", "down_exps.weight"}
        assert set(repacked.tensors) == names
        assert repacked.nbytes == sum(repacked.types.values())
        (kind,) = repacked.types
        for tensor in repacked.tensors.values():
            source = weights.tensors[tensor.name]
            assert (tensor.type, tensor.ne, tensor.ggml_type) == (kind, source.ne, KINDS[0])
            order = ggml_orders.find_order(KINDS[0], source.ne)
            assert order is not None
            assert tensor.nbytes == order.nbytes
        assert repr(repacked) == (
            f"Repacked('{model}', 3 tensors, bytes: {kind} {repacked.nbytes:,})"
        )
        rows = {row.category: row.nbytes for row in um.report().rows}
        assert rows[f"weights:{kind} repacked"] == repacked.nbytes
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(repacked)


def test_users_keep_the_memory(model: Path) -> None:
    with um.open_weights(model) as weights:
        repacked = um.repack(weights, cache=False)
    (block,) = repacked.blocks
    view = block.as_array("uint8")
    with pytest.raises(BufferError):
        repacked.close()
    del view
    repacked.close()
    repacked.close()
    assert repr(repacked).endswith("closed)")
    for use in (
        lambda: repacked.blocks,
        repacked.__enter__,
        lambda: repacked._adopt(0, "up.weight"),
        lambda: repacked.tensors["up.weight"].address,
    ):
        with pytest.raises(um.ClosedError):
            use()


def test_a_tape_takes_the_memory_back(model: Path) -> None:
    with um.Tape(4 << 20) as tape, um.open_weights(model) as weights:
        mark = tape.mark()
        repacked = um.repack(weights, tape=tape, cache=False)
        used = tape.used_bytes
        assert all(tape.owns(tensor.address) for tensor in repacked.tensors.values())
        tape.rewind(mark)
        assert repacked.closed
        with pytest.raises(um.ClosedError, match="tape"):
            repacked._adopt(0, "up.weight")
        again = um.repack(weights, tape=tape, cache=False)
        again.close()
        assert tape.used_bytes == used
