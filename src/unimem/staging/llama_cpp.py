"""What llama.cpp copies of a model although it is mapped: the weights that it repacks.

Its code for CPUs wants some types in an order of its own. By default each process makes a private
copy of these tensors, so that they are no longer shared. The kernels of each CPU, and how many
rows they take at a time, are ggml's of 2026 (``ggml-cpu/repack.cpp``, ``ggml-cpu/amx``).
"""

from __future__ import annotations

from typing import NamedTuple

from unimem.base import kernel_files
from unimem.weights.files import ModelFiles
from unimem.weights.repack.arrangement import EMBEDDING, LOOKED_UP

__all__ = ["RepackedByLlamaCpp", "cpu_features", "find_repacked"]

# By the kernel's name of a CPU feature: types, and the number that divides their rows.
_KERNELS: dict[str, dict[str, int]] = {
    "avx2": {"q4_0": 8, "q4_K": 8, "iq4_nl": 8, "mxfp4": 8},
    "avx512f": {"q2_K": 8},
    "amx_int8": dict.fromkeys(("q4_0", "q4_1", "q8_0", "q4_K", "q5_K", "q6_K", "iq4_xs"), 32),
    "asimd": {"iq4_nl": 4},
    "asimddp": {"q4_0": 4, "q4_K": 8, "q5_K": 8, "q6_K": 8, "q8_0": 4, "mxfp4": 4},
}


class RepackedByLlamaCpp(NamedTuple):
    """What of a model is repacked.

    Attributes
    ----------
    nbytes : int
        Bytes of the tensors that llama.cpp copies.
    total_bytes : int
        Bytes of all tensors.
    """

    nbytes: int
    total_bytes: int


def cpu_features() -> frozenset[str]:
    """Return the features of this machine's CPU, by the kernel's names."""
    info = kernel_files.read_fields("/proc/cpuinfo")
    return frozenset(f"{info.get('flags', '')} {info.get('Features', '')}".split())


def find_repacked(model: ModelFiles, features: frozenset[str]) -> RepackedByLlamaCpp:
    """Find what llama.cpp repacks of a model that it computes on a CPU.

    Parameters
    ----------
    model : ModelFiles
        Opened; its headers are all that is read. Types of safetensors have other names.
    features : frozenset of str
        Of the CPU, as `cpu_features` has them.

    Returns
    -------
    RepackedByLlamaCpp
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
