"""The pieces of a model: which tensors are read when they are asked for, and which stay."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
# The experts that a router chooses among, not those that every token uses ("_shexp").
_EXPERTS = re.compile(r".+_exps\..+")
# Tensors of a block that lie closer to each other are read by one request.
_MOST_GAP = 4096
# One block is computed while the next one is read.
WINDOW = 2
# Experts that are alike are in several pools if there are many. ggml's product with chosen experts
# takes time and memory for each that could be chosen: here, for each slot of a pool.
_MOST_PIECES = 512
# A pool with slots for a quarter of its pieces still holds all experts of a block, for prompts.
_LEAST_BLOCKS = 4
MOST_PARTS = 8  # of a piece (UM_PIECES_MAX_PARTS); smaller tensors beyond stay in memory


class TensorRow(NamedTuple):
    """A row of a file's table of tensors.

    Attributes
    ----------
    name, type : str
        As of a `Tensor`.
    ne : tuple of int
        Dimensions, the contiguous one first.
    offset, nbytes : int
        The range of the file.
    file : int
        The number of the file.
    is_known : bool
        Whether `nbytes` is known by the type.
    """

    name: str
    type: str
    ne: tuple[int, ...]
    offset: int
    nbytes: int
    file: int
    is_known: bool = True


class PieceKind(NamedTuple):
    """Pieces that are alike, and share a pool of slots.

    Attributes
    ----------
    part_bytes : tuple of int
        The size of each part, which is one range of a file.
    n_pieces : int
        The number of pieces.
    least_slots : int
        The slots that computing a layer needs.
    block_slots : int
        The slots for all pieces of a block.
    """

    part_bytes: tuple[int, ...]
    n_pieces: int
    least_slots: int
    block_slots: int

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece."""
        return sum(self.part_bytes)


class BlockPieces(NamedTuple):
    """The pieces of one block of a model: its experts, or the whole block.

    Attributes
    ----------
    kind : int
        The number of their `PieceKind`.
    first, n : int
        The number of the first piece, and how many there are.
    parts : tuple of (int, int)
        The file and the offset of each part of the first piece. The parts of the others follow each
        other without gaps.
    """

    kind: int
    first: int
    n: int
    parts: tuple[tuple[int, int], ...]


class TensorPlace(NamedTuple):
    """The place of a streamed tensor in the slots.

    Attributes
    ----------
    kind, part : int
        The numbers of its `PieceKind`, and of its part.
    offset : int
        Where the tensor begins in the part.
    nbytes : int
        Bytes of the tensor in one piece.
    first, n : int
        The number of its first piece, and how many it has.
    """

    kind: int
    part: int
    offset: int
    nbytes: int
    first: int
    n: int


@dataclass(frozen=True, slots=True)
class PieceTable:
    """The pieces of a model.

    Attributes
    ----------
    kinds : tuple of PieceKind
        One for each pool of slots.
    blocks : tuple of BlockPieces
        All pieces, in the order of their numbers.
    places : mapping of str to TensorPlace
        The streamed tensors.
    has_experts : bool
        Whether pieces are experts; else they are whole blocks, which are used one after the other.
    """

    kinds: tuple[PieceKind, ...]
    blocks: tuple[BlockPieces, ...]
    places: Mapping[str, TensorPlace]
    has_experts: bool

    def pieces(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield the kind of each piece, and the file and the offset of each of its parts."""
        for block in self.blocks:
            sizes = self.kinds[block.kind].part_bytes
            for i in range(block.n):
                parts = zip(block.parts, sizes, strict=True)
                yield block.kind, [(file, at + i * nbytes) for (file, at), nbytes in parts]

    def groups(self) -> list[int]:
        """Return the number of the block of each piece: a call asks for pieces of one."""
        return [number for number, block in enumerate(self.blocks) for _ in range(block.n)]


class _Range(NamedTuple):
    """One part of the first piece of a block, with the tensors in it."""

    file: int
    offset: int
    nbytes: int
    tensors: tuple[tuple[TensorRow, int], ...]  # with the offset in the part


def find_pieces(rows: Iterable[TensorRow], n_used: int | None) -> PieceTable:
    """Find the pieces of a model by the names of GGUF's tensors.

    Routed experts (``blk.N.ffn_gate_exps.weight`` and others, the expert last among the dimensions)
    are pieces: all tensors of one expert of a block are one. In a model without any, each block is
    a piece. Everything else stays in memory. Experts of blocks far apart are of different kinds,
    though they may be alike.

    Parameters
    ----------
    rows : iterable of TensorRow
        All tensors.
    n_used : int or None
        The experts that a token uses, if the model says so.
    """
    experts: dict[int, list[TensorRow]] = {}
    blocks: dict[int, list[TensorRow]] = {}
    for row in rows:
        match = _BLOCK.fullmatch(row.name)
        if match is None or not row.nbytes or not row.is_known:
            continue
        number = int(match[1])
        blocks.setdefault(number, []).append(row)
        if _EXPERTS.fullmatch(match[2]) and len(row.ne) > 1 and row.nbytes % row.ne[-1] == 0:
            experts.setdefault(number, []).append(row)
    has_experts = bool(experts)
    kinds: dict[object, list[int]] = {}  # number, pieces, least slots, a block's, by what is alike
    sizes: list[tuple[int, ...]] = []
    found: list[BlockPieces] = []
    places: dict[str, TensorPlace] = {}
    first = 0
    pieces = [
        _pieces_of(tensors, has_experts) for _, tensors in sorted((experts or blocks).items())
    ]
    for alike, (n, ranges) in zip(_alike_in_pools(pieces, has_experts), pieces, strict=True):
        kind = kinds.setdefault(alike, [len(kinds), 0, 0, 0])
        if kind[0] == len(sizes):
            sizes.append(tuple(one.nbytes for one in ranges))
        kind[1] += n
        kind[2] = max(kind[2], min(n, n_used or n) if has_experts else min(kind[1], WINDOW))
        kind[3] = max(kind[3], n)
        found.append(BlockPieces(kind[0], first, n, tuple(one[:2] for one in ranges)))
        for part, one in enumerate(ranges):
            for row, at in one.tensors:
                places[row.name] = TensorPlace(kind[0], part, at, row.nbytes // n, first, n)
        first += n
    made = zip(sizes, kinds.values(), strict=True)
    return PieceTable(
        tuple(PieceKind(size, *kind[1:]) for size, kind in made),
        tuple(found),
        places,
        has_experts,
    )


def _pieces_of(tensors: list[TensorRow], has_experts: bool) -> tuple[int, list[_Range]]:
    """Return the number of pieces of a block, and the parts of the first."""
    # The rare tensors of another number of experts stay in memory.
    n = max(row.ne[-1] for row in tensors) if has_experts else 1
    ranges = _expert_ranges(tensors, n) if has_experts else _block_ranges(tensors)
    largest = sorted(ranges, key=lambda one: -one.nbytes)[:MOST_PARTS]
    return n, [one for one in ranges if one in largest]


def _alike_in_pools(
    pieces: list[tuple[int, list[_Range]]], has_experts: bool
) -> Iterator[tuple[object, int]]:
    """Yield for each block what its pieces are alike in, and which pool of these they are in."""
    alike = [
        tuple((one.nbytes, tuple(map(_alike, one.tensors))) for one in ranges)
        for _, ranges in pieces
    ]
    n_blocks, n_seen = Counter(alike), Counter[object]()
    for (n, _), key in zip(pieces, alike, strict=True):
        most = max(_MOST_PIECES // n, _LEAST_BLOCKS) if has_experts else len(pieces)
        n_pools = -(-n_blocks[key] // most)
        yield key, n_seen[key] * n_pools // n_blocks[key]
        n_seen[key] += 1


def _alike(tensor: tuple[TensorRow, int]) -> tuple[object, ...]:
    """Return the facts of a tensor that are the same in every piece of a kind."""
    row, at = tensor
    return row.name.split(".", 2)[2], row.type, row.ne, at


def _expert_ranges(tensors: Iterable[TensorRow], n: int) -> list[_Range]:
    """Return the parts of the first expert: one for each tensor, by name."""
    rows = sorted(row for row in tensors if row.ne[-1] == n)
    return [_Range(row.file, row.offset, row.nbytes // n, ((row, 0),)) for row in rows]


def _block_ranges(tensors: Iterable[TensorRow]) -> list[_Range]:
    """Return the parts of a block: runs of tensors that lie next to each other in a file."""
    runs: list[list[TensorRow]] = []
    for row in sorted(tensors, key=lambda row: (row.file, row.offset)):
        last = runs[-1][-1] if runs else None
        end = -1 if last is None or last.file != row.file else last.offset + last.nbytes
        if 0 <= row.offset - end <= _MOST_GAP and end >= 0:
            runs[-1].append(row)
        else:
            runs.append([row])
    ranges = []
    for run in runs:
        begin, end = run[0].offset, run[-1].offset + run[-1].nbytes
        inside = tuple((row, row.offset - begin) for row in run)
        ranges.append(_Range(run[0].file, begin, end - begin, inside))
    return ranges
