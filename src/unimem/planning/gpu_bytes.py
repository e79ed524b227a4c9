"""The arithmetic of a GPU: sizes in whole pages, and the parts of files to upload."""

from __future__ import annotations

from typing import NamedTuple

from unimem.weights.files import ModelFile
from unimem.weights.tensors import Contents

# cudaMalloc maps pages of 2 MiB: each allocation takes a multiple of this.
_PAGE_BYTES = 2 << 20
# Bytes that stay free if unimem chooses the context: CUDA loads kernels at first launch, cuBLAS
# takes a workspace of 32 MiB for each stream and thread that multiplies (on Hopper), and CuPy's
# pool holds memory of a step outside of the layout.
RESERVE_BYTES = 512 << 20
# An estimate (the suite `gpu` of the benchmarks measures the whole): a slot of 2 MiB keeps PCIe 5
# busy for 40 us, and costs about 10 us of Python and CUDA. Each call pins the ring anew, which
# takes 0.1 to 0.2 ms a MiB while 4 GB are copied in 75 ms: so the ring is as small as it can be.
N_SLOTS = 16
STAGING_BYTES = N_SLOTS * (2 << 20)
ALIGN = 256
"""The alignment of each file's data on the device, in bytes."""


def round_to_pages(nbytes: int) -> int:
    """Round a size up to the device memory of its allocation."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


class Transfer(NamedTuple):
    """A range of a file to upload, and its offset in the memory on the device."""

    file: ModelFile
    begin: int
    nbytes: int
    at: int

    @property
    def end(self) -> int:
        """The offset where it ends on the device."""
        return self.at + self.nbytes


def list_transfers(weights: Contents) -> list[Transfer]:
    """List the data of each file, one behind the other."""
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
    """Return the bytes that `Weights.to_device` takes from an aligned tape."""
    return list_transfers(weights)[-1].end
