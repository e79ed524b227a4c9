"""The purposes of llama.cpp's buffers under `unimem exec`, by function, order and size.

llama.cpp (2026) takes each buffer of a CPU by an aligned allocation: the weights that it repacks;
for each context its outputs, and its KV caches; then by `malloc` the table of its scheduler; then
the memory for computing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

from unimem._core.ledger import Entry
from unimem.accounting.exec_table import CATEGORY
from unimem.accounting.mapped_models import MappedModel

_ALIGNED, _MALLOC = "aligned_alloc", "malloc"
_TABLE_BYTES_MIN = 4 << 20  # 20 MiB for 1024 nodes, more for larger graphs
_LEAST_REPACKED = 2  # of the tensors of a type, at least a half is repacked
_MOST_TYPES = 6  # beside norms, a file has few


def name_buffers(entries: Sequence[Entry], models: Iterable[MappedModel]) -> list[Entry]:
    """Name the purpose of each buffer of llama.cpp; return all other entries unchanged.

    Parameters
    ----------
    entries : sequence of Entry
        Of a process.
    models : iterable of MappedModel
        Model files that it maps; without a GGUF file, nothing is llama.cpp's.
    """
    files = [model for model in models if model.format == "GGUF"]
    placed = [
        entry
        for entry in entries
        if entry.category == CATEGORY and entry.requested and entry.name in (_ALIGNED, _MALLOC)
    ]
    if not files or not placed:
        return list(entries)
    sizes = _sizes_of_weights(files)
    found: dict[int, str] = {}
    run: list[Entry] = []
    has_context = False
    for entry in sorted(placed, key=_number):
        if entry.name == _ALIGNED:
            run.append(entry)
        elif run and _nbytes(entry) >= _TABLE_BYTES_MIN:
            found |= {each.address: "scratch" for each in run[:has_context]}
            found |= _before_table(run[has_context:], sizes)
            run, has_context = [], True
    found |= {each.address: "scratch" for each in run if has_context}
    return [_with_category(entry, found.get(entry.address)) for entry in entries]


def _number(entry: Entry) -> int:
    assert entry.requested is not None
    return int(entry.requested["number"])


def _nbytes(entry: Entry) -> int:
    assert entry.requested is not None
    return int(entry.requested["nbytes"])


def _sizes_of_weights(files: Iterable[MappedModel]) -> Counter[str]:
    """Sum the mapped bytes of each type, without those that are never repacked."""
    sizes: Counter[str] = Counter()
    for model in files:
        for area in model.areas:
            for part in model.parts(area):
                if part.category.startswith("weights:") and "padding" not in part.category:
                    sizes[part.category] += part.nbytes
    for plain in ("weights:f32", "weights:f16", "weights:bf16"):
        sizes.pop(plain, None)
    return sizes


def _repacked(entry: Entry, sizes: Counter[str]) -> str | None:
    """Return the category of repacked weights if the size is that of most tensors of some types."""
    types = [name for name, _ in sizes.most_common(_MOST_TYPES)]
    for n in range(1, len(types) + 1):
        for some in combinations(types, n):
            whole = sum(sizes[name] for name in some)
            if whole <= _LEAST_REPACKED * _nbytes(entry) <= _LEAST_REPACKED * whole:
                return f"{some[0]} repacked"
    return None


def _before_table(run: Sequence[Entry], sizes: Counter[str]) -> dict[int, str]:
    """Name repacked weights, outputs, which are smaller than the KV cache behind them, and KV."""
    found = {}
    if len(run) > 1 and (kind := _repacked(run[0], sizes)):
        found[run[0].address] = kind
        run = run[1:]
    if len(run) > 1 and _nbytes(run[0]) < _nbytes(run[1]):
        found[run[0].address] = "logits"
        run = run[1:]
    return found | {each.address: "kv" for each in run}


def _with_category(entry: Entry, category: str | None) -> Entry:
    if category is None:
        return entry
    parts = tuple(part._replace(category=category) for part in entry.parts)
    return entry._replace(category=category, parts=parts)
