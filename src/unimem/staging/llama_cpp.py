"""The weights of a mapped model that llama.cpp copies, since it repacks them.

Its code for CPUs needs some types in an order of its own. By default each process makes a private
copy of these tensors, which are then not shared. The kernels of each CPU, and the number of rows
that they take at a time, are ggml's of 2026 (``ggml-cpu/repack.cpp``, ``ggml-cpu/amx``).
"""

from __future__ import annotations

from typing import NamedTuple

from unimem.base import kernel_files
from unimem.weights.files import ModelFiles
from unimem.weights.repack.arrangement import EMBEDDING, LOOKED_UP

# CPU features by the kernel's names: types, each with the divisor of its number of rows.
_KERNELS: dict[str, dict[str, int]] = {
    "avx2": {"q4_0": 8, "q4_K": 8, "iq4_nl": 8, "mxfp4": 8},
    "avx512f": {"q2_K": 8},
    "amx_int8": dict.fromkeys(("q4_0", "q4_1", "q8_0", "q4_K", "q5_K", "q6_K", "iq4_xs"), 32),
    "asimd": {"iq4_nl": 4},
    "asimddp": {"q4_0": 4, "q4_K": 8, "q5_K": 8, "q6_K": 8, "q8_0": 4, "mxfp4": 4},
}


class RepackedByLlamaCpp(NamedTuple):
    """How much of a model llama.cpp repacks, and thus copies."""

    nbytes: int
    total_bytes: int  # of all tensors


def cpu_features() -> frozenset[str]:
    """Return the kernel's names for the features of this machine's CPU."""
    info = kernel_files.read_fields("/proc/cpuinfo")
    return frozenset(f"{info.get('flags', '')} {info.get('Features', '')}".split())


def find_repacked(model: ModelFiles, features: frozenset[str]) -> RepackedByLlamaCpp:
    """Count the bytes that llama.cpp repacks of an opened model, on a CPU with these features.

    Only headers are read. Safetensors types have other names, and are not repacked.
    """
    kernels = [types for feature, types in _KERNELS.items() if feature in features]
    rows = [
        (name, *file.header.tensor(i))
        for file in model.files
        for name, i in file.header.tensor_names().items()
    ]
    looked_up = LOOKED_UP
    if not any(name == "output.weight" for name, *_ in rows):
        looked_up = LOOKED_UP - {EMBEDDING}  # which is multiplied with, too
    nbytes = sum(
        nbytes
        for name, ne, kind, _, _, nbytes in rows
        if name not in looked_up
        and len(ne) in (2, 3)
        and any(kind in types and ne[1] % types[kind] == 0 for types in kernels)
    )
    return RepackedByLlamaCpp(nbytes, sum(nbytes for *_, nbytes in rows))
