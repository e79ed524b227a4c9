"""Reporting the memory of a decoder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from numpy.typing import NDArray

from unimem._core.ledger import Part, entries
from unimem.accounting.attribution import attribute
from unimem.accounting.published import NAME
from unimem.accounting.report import Report, add_use
from unimem.backends import ggml
from unimem.base.text import format_bytes, format_ranges
from unimem.engine.history import History
from unimem.engine.model import Model
from unimem.engine.model_memory import ModelMemory
from unimem.engine.put_aside import PutAside
from unimem.kv.types import kv_name
from unimem.layout import Layout
from unimem.system.process import read_process
from unimem.weights.opened import Weights, WeightsCopy

_SHOWN = ("diagnostics", NAME)  # the figures that the process publishes


class DecoderMemory(Protocol):
    """The parts of a decoder that a report reads."""

    weights: Weights
    layout: Layout
    ctx: int
    window: int | None
    threads: int
    _history: History
    _model: Model
    _memory: ModelMemory
    _aside: PutAside | None


def list_parts(tokens: Iterable[NDArray[Any]], logits: NDArray[Any]) -> list[Part]:
    """List the vectors of a decoder as parts of its memory; the rest is scratch."""
    vectors = [("tokens", array) for array in tokens] + [("logits", logits)]
    return [
        Part(category, array.ctypes.data, array.nbytes, array.nbytes, array.nbytes)
        for category, array in vectors
    ]


def _copies(decoder: DecoderMemory) -> str | None:
    """Describe the copies of mirrored weights, and which one is read."""
    copies, reader = decoder.weights.copies, decoder._memory.reader
    if not copies or reader is None or not isinstance(reader.contents, WeightsCopy):
        return None
    return (
        f"copies of the weights on nodes {format_ranges(copies)}; that on node "
        f"{reader.contents.node} is read"
    )


def make_report(decoder: DecoderMemory) -> Report:
    """Report on an open decoder: see `Decoder.report`."""
    weights, layout = decoder.weights, decoder.layout
    cache = decoder._history.parts[0]  # all parts have the same types
    blocks = [*decoder._memory.blocks, layout.scratch.block, layout.history.block]
    blocks += decoder._history.blocks
    addresses = {block.address for block in blocks}
    addresses |= {part.file.header.address for part in weights._parts}
    own = [
        entry
        for entry in entries()
        if entry.address in addresses or (entry.category, entry.name) == _SHOWN
    ]
    process = read_process()
    areas = tuple(
        area
        for area in process.areas
        if any(e.address <= area.start < e.address + e.reserved_bytes for e in own)
    )
    mappings, rows = attribute(replace(process, areas=areas), own)
    n = decoder.threads - 1  # beside the calling thread
    facts: dict[str, Any] = {
        "model": ", ".join(weights.files),
        "load": decoder._memory.load,
        "load_reason": decoder._memory.load_reason,
        "numa": _copies(decoder),
        "architecture": decoder._model.arch,
        "ctx": decoder.ctx,
        "kv_dtype": kv_name(cache.dtype, cache.v_dtype),
        "rotate": cache.rotate,
        "window": decoder.window,
        "put_aside": None if decoder._aside is None else str(decoder._aside),
        "threads": decoder.threads,
        "ggml_own": (
            f"at most {format_bytes(ggml.own_bytes(decoder.threads))} from malloc, for contexts "
            f"and threads, and the stacks of {n} thread{'s' * (n != 1)}; in none of these rows"
        ),
    }
    if weights.stream is not None:
        facts["streams"] = [weights.stream.to_dict()]  # as a report of the whole process
    return Report(add_use(rows, own), facts | ggml.facts(), mappings)
