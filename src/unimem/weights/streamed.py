"""Opening a model whose pieces are streamed: what stays is read, and the rest gets slots."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

from unimem.base.descriptors import Descriptors
from unimem.system import limits
from unimem.system.placement import PlacementOptions
from unimem.weights.files import ModelFiles, check_version
from unimem.weights.gguf import GGUFHeader, tensor_type
from unimem.weights.loading import (
    ALIGN,
    FileSlot,
    LoadChoice,
    Loaded,
    LoadMemory,
    LoadRequest,
    NoDirectReadsError,
    RoomFacts,
    read_model,
)
from unimem.weights.stream.budget import SlotBudget, make_pools, plan_budget, rounded_bytes
from unimem.weights.stream.piece_table import PieceTable, TensorRow, find_pieces
from unimem.weights.stream.stream import Stream, StreamedFiles


class StreamPlan(NamedTuple):
    """What a model takes when it is streamed, before anything is read.

    Attributes
    ----------
    table : PieceTable
        Its pieces.
    budget : SlotBudget
        The memory, and the number of slots.
    types : dict of str to int
        Bytes of the tensors that stay, by type.
    kept : list of FileSlot
        What is read of the files at first.
    kept_bytes : int
        Bytes of the block for that, before they are rounded to pages.
    """

    table: PieceTable
    budget: SlotBudget
    types: dict[str, int]
    kept: list[FileSlot]
    kept_bytes: int

    def rows(self) -> dict[str, int]:
        """Return the bytes of memory by the categories of a report."""
        rows = {f"weights:{kind}": nbytes for kind, nbytes in self.types.items()}
        padding = self.budget.kept_bytes - sum(rows.values())
        return rows | {"weights:slots": self.budget.slot_bytes, "weights:padding": padding}


def plan_streamed(
    model: ModelFiles,
    budget: int | str | None,
    placement: PlacementOptions,
    facts: RoomFacts = limits,
) -> StreamPlan:
    """Plan how a model is streamed, by its headers. The budget is that of `open_weights`.

    Raises
    ------
    ValueError
        It has nothing that could be streamed, or is not a GGUF file.
    CapacityError
        The budget is below the least that works.
    """
    file = model.files[0]
    if file.memory is not None:
        raise ValueError(
            f"load='stream' of {file.path}: it is in memory already: load='map' views it"
        )
    if not isinstance(file.header, GGUFHeader):
        raise ValueError(
            f"load='stream' of {file.path}: expected GGUF, in which the experts of a layer are one "
            "tensor, got safetensors: llama.cpp's convert_hf_to_gguf.py converts it, and "
            "load='map' maps it as it is"
        )
    rows = list(_tensor_rows(model))
    table = find_pieces(rows, _used_experts(file.header))
    if not table.blocks:
        raise ValueError(
            f"load='stream' of {file.path}: it has no experts and no blocks ('blk.N.*') that could "
            "be read one by one: load='map' reads what is used"
        )
    rows = [row for row in rows if row.name not in table.places]
    types: dict[str, int] = {}
    for row in rows:
        types[row.type] = types.get(row.type, 0) + row.nbytes
    kept, nbytes = _lay_out(rows)
    pools = make_pools(table, placement, facts)
    divided = plan_budget(file.path, budget, rounded_bytes(nbytes, placement, facts), pools, facts)
    return StreamPlan(table, divided, types, kept, nbytes)


def load_streamed(model: ModelFiles, request: LoadRequest, undo: ExitStack) -> Loaded:
    """Read what stays of a model, and make slots for the rest; as `load_model`."""
    plan = plan_streamed(model, request.budget, request.placement)
    stream = Stream(_keep_open(model), plan.table, plan.budget, request.placement)
    undo.callback(stream._close)
    kept_bytes = sum(slot.nbytes for slot in plan.kept)
    total = kept_bytes + stream._pinned_bytes

    def tell(done: int, _: int = 0) -> None:
        if request.progress is not None and done < total:
            request.progress(done, total)

    layout = plan.kept, plan.kept_bytes
    reading = replace(request, progress=tell)
    with ExitStack() as first:
        try:
            loaded = read_model(model, reading, LoadChoice("direct", ""), first, layout)
        except NoDirectReadsError:
            first.close()
            loaded = read_model(model, reading, LoadChoice("copy", ""), first, layout)
        undo.enter_context(first.pop_all())
    stream._pin(lambda done: tell(kept_bytes + done))
    model.check_versions()
    if request.progress is not None:
        request.progress(total, total)
    by_file: list[list[LoadMemory]] = [[] for _ in model.files]
    for slot, memory in zip(plan.kept, loaded.memory, strict=True):
        by_file[slot.file].append(memory)
    nowhere = LoadMemory(loaded.blocks[0], 0, 0, 0, loaded.lifetime)
    return replace(
        loaded,
        memory=(nowhere,) * len(model.files),
        blocks=(*loaded.blocks, *stream._blocks),
        choice=LoadChoice("stream", "it was asked for"),
        stream=stream,
        kept=tuple(map(tuple, by_file)),
    )


def _tensor_rows(model: ModelFiles) -> Iterator[TensorRow]:
    for i, file in enumerate(model.files):
        for name, number in file.header.tensor_names().items():
            ne, kind, ggml_type, offset, nbytes = file.header.tensor(number)
            yield TensorRow(name, kind, ne, offset, nbytes, i, _is_known(ggml_type))


def _is_known(ggml_type: int | None) -> bool:
    """Whether the size of a tensor is known, and not only where the next one begins."""
    try:
        return ggml_type is not None and tensor_type(ggml_type) is not None
    except ValueError:
        return False


def _used_experts(header: GGUFHeader) -> int | None:
    """Return how many experts a token uses, if the metadata says so."""
    keys = header.keys()
    arch = keys.get("general.architecture")
    number = None if arch is None else keys.get(f"{header.value(arch)}.expert_used_count")
    used = None if number is None else header.value(number)
    return used if isinstance(used, int) and used > 0 else None


def _lay_out(rows: Iterable[TensorRow]) -> tuple[list[FileSlot], int]:
    """Lay out tensors in runs of their files; return the runs and their total size."""
    runs: list[tuple[int, int, int]] = []  # file, first byte, end
    for row in sorted(rows, key=lambda row: (row.file, row.offset)):
        begin, end = row.offset // ALIGN * ALIGN, row.offset + row.nbytes
        last = runs[-1] if runs else (-1, 0, 0)
        if last[0] == row.file and begin <= -(-last[2] // ALIGN) * ALIGN:
            runs[-1] = (row.file, last[1], max(last[2], end))
        else:
            runs.append((row.file, begin, end))
    slots = []
    at = 0
    for file, begin, end in runs:
        slots.append(FileSlot(begin, end - begin, at, file))
        at += max(1, -(-(end - begin) // ALIGN)) * ALIGN
    return slots, max(at, ALIGN)


def _keep_open(model: ModelFiles) -> StreamedFiles:
    """Keep the files of a model open for its pieces."""
    fds = Descriptors()
    for fd in model.fds:
        fds.add(fcntl.fcntl, fd, fcntl.F_DUPFD_CLOEXEC, 0)
    files = tuple(model.files)

    def check() -> None:
        for file, fd in zip(files, fds, strict=True):
            check_version(file, os.fstat(fd))

    return StreamedFiles(tuple(file.path for file in files), fds, check)
