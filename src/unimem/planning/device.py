"""What a model takes of a GPU's memory, and which parts of its files go there."""

from __future__ import annotations

from typing import NamedTuple

from unimem.weights.files import ModelFile
from unimem.weights.opened import Contents

__all__ = [
    "ALIGN",
    "N_SLOTS",
    "RESERVE_BYTES",
    "STAGING_BYTES",
    "Transfer",
    "bytes_needed",
    "list_transfers",
    "round_to_pages",
]

# What an allocation takes of the device's memory is a multiple of this: cudaMalloc maps pages of
# 2 MiB.
_PAGE_BYTES = 2 << 20
# What a context that is chosen leaves free: CUDA loads kernels when they are first launched, cuBLAS
# takes a workspace of 32 MiB for each stream and thread that multiplies (on Hopper), and CuPy's
# pool has what a step makes beside the layout.
RESERVE_BYTES = 512 << 20
# By estimate (bench.gpu measures the whole): a slot of 2 MiB is 40 us of PCIe 5, and looking after
# it about 10 us of Python and CUDA. The ring is pinned anew at each call, for 0.1 to 0.2 ms a MiB,
# where 4 GB are copied in 75 ms: it is no larger than it must be.
N_SLOTS = 16
STAGING_BYTES = N_SLOTS * (2 << 20)
ALIGN = 256
"""What the data of each file is aligned to on the device, in bytes."""


def round_to_pages(nbytes: int) -> int:
    """Round a size up to what its allocation takes of the device's memory."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


class Transfer(NamedTuple):
    """A range of a file that is brought to the device, and where it goes in what is taken there."""

    file: ModelFile
    begin: int
    nbytes: int
    at: int

    @property
    def end(self) -> int:
        """Where it ends in what is taken."""
        return self.at + self.nbytes


def list_transfers(weights: Contents) -> list[Transfer]:
    """Lay the files' data out one behind the other."""
    ends = {part.file.path: part.file.header.data_offset for part in weights._parts}
    for tensor in weights.tensors.values():
        ends[tensor.file] = max(ends[tensor.file], tensor.offset + tensor.nbytes)
    transfers: list[Transfer] = []
    for part in weights._parts:
        begin = part.file.header.data_offset
        at = -(-transfers[-1].end // ALIGN) * ALIGN if transfers else 0
        transfers.append(Transfer(part.file, begin, ends[part.file.path] - begin, at))
    return transfers


def bytes_needed(weights: Contents) -> int:
    """Tell how much `Weights.to_device` takes of a tape that is aligned."""
    return list_transfers(weights)[-1].end
