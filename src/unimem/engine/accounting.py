"""What a decoder's memory is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unimem.engine import ggml
from unimem.placement import together
from unimem.report import Report, Row

if TYPE_CHECKING:
    from unimem.engine.decoder import Decoder

__all__ = ["report_of"]


def report_of(decoder: Decoder) -> Report:
    """Report on an open decoder: see `Decoder.report`."""
    weights, kv = decoder.weights, decoder.kv
    scratch, history = decoder.layout.scratch, decoder.layout.history
    placed = together([block.verify() for block in weights.blocks])
    resident = dict.fromkeys(weights.by_type(), 0)
    for tensor in weights.tensors.values():
        in_ram = tensor._memory.block._resident_range(tensor._block_offset, tensor.nbytes)
        resident[tensor.type] += min(tensor.nbytes, in_ram)
    rows = [
        Row(f"weights:{kind}", nbytes, placed, nbytes, resident[kind], nbytes)
        for kind, nbytes in weights.by_type().items()
    ]
    size = kv.capacity_bytes
    longest = max(decoder._longest, kv.seq_len)
    rows.append(
        Row(
            "kv",
            size,
            (history.block if kv.block is None else kv.block).verify(),
            kv.memory_usage_bytes,
            min(size, kv.resident_bytes),
            2 * decoder.dims.num_layers * kv.row_bytes * longest,
        )
    )
    logits = 4 * decoder.dims.vocab_size
    placed = scratch.block.verify()
    rows += [
        Row(
            "scratch",
            scratch.block.nbytes - logits,
            placed,
            scratch.used_bytes - logits,
            placed.resident_bytes - logits,
            scratch.high_water_bytes - logits,
        ),
        Row("logits", logits, placed, logits, logits, logits),
    ]
    on_history = size if kv.tape is history else 0
    other = weights.mapped_bytes - weights.nbytes + history.block.nbytes - on_history
    rows.append(Row("other", other))
    facts = {
        "model": ", ".join(weights.files),
        "load": weights.load,
        "load_reason": weights.load_reason,
        "architecture": decoder._model.arch,
        "ctx": decoder.ctx,
        "kv_dtype": kv.dtype,
        "window": kv.window,
        "threads": decoder.threads,
    }
    return Report(tuple(rows), facts | ggml.facts())
