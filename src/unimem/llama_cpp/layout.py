"""What the bytes of llama.cpp's states have in common: the layout, as a text that is hashed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from unimem.llama_cpp.state import CellRows, LlamaKV, Part, Recurrent, StateLane


def layout_of(kv: LlamaKV) -> str:
    """Return the layout of a state as JSON: the version, and of each part all but the tokens."""
    facts = {"version": kv.version, "parts": [_facts(part) for part in kv.parts]}
    return json.dumps(facts, separators=(",", ":"))


def empty_cells(layout: str, n: int) -> CellRows | None:
    """Return the first part of a layout with n cells of zeros; None if it has states only."""
    facts = json.loads(layout)["parts"][0]
    if "k" not in facts:
        return None
    keys, values = (
        tuple(
            StateLane(kind, np.zeros((n, row_bytes), np.uint8)) for kind, row_bytes in facts[part]
        )
        for part in ("k", "v")
    )
    extra = np.zeros((n, 12), np.uint8) if facts["extra"] else None
    head = np.zeros(n, np.int32), extra, facts["transposed"], tuple(facts["rotations"])
    return CellRows(*head, keys, values)


def _facts(part: Part) -> dict[str, Any]:
    if isinstance(part, Recurrent):
        return {"layers": part.n_layers, "states": [(t.type, t.rows.size) for t in part.tensors]}
    return {
        "extra": part.extra is not None,
        "transposed": part.is_transposed,
        "rotations": part.rotations,
        "k": [(lane.type, lane.rows.shape[1]) for lane in part.keys],
        "v": [(lane.type, lane.rows.shape[1]) for lane in part.values],
    }
