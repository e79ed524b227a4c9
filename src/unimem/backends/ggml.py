"""ggml, as the engine uses it: the functions of `unimem_ggml.binding`, and rules about them.

Tensors, graphs and contexts are plain addresses (`int`). A wrong shape, or too little room for
headers, raises `GgmlError`. A kernel that fails ends the process, so callers check types first.
"""

from __future__ import annotations

import ctypes
import os
from importlib import resources
from typing import Any

from unimem.base.install_hint import install_hint
from unimem.errors import ClosedError
from unimem.system import limits
from unimem.system.cpu_features import cpu_features, missing_cpu_features

__all__ = [
    "ALL_THREADS",
    "DATA_OFFSET",
    "F16",
    "F32",
    "I32",
    "I64",
    "LIBRARIES",
    "MATMUL_TYPES",
    "NB_OFFSET",
    "NE_OFFSET",
    "N_TYPES",
    "PLAN_BYTES",
    "Q8_0",
    "ROPE_NEOX",
    "ROPE_NORMAL",
    "GgmlError",
    "Tensor",
    "add",
    "add_id",
    "alloc_size",
    "argsort_top_k",
    "block_size",
    "clamp",
    "compute",
    "compute_address",
    "cont",
    "div",
    "expand",
    "extra_buffer_types",
    "facts",
    "features",
    "flash_attn_ext",
    "free",
    "free_buffer",
    "free_threadpool",
    "geglu_split",
    "get_rows",
    "graph_overhead",
    "has_to_float",
    "init_tensor",
    "map_custom1_inplace",
    "mul",
    "mul_mat",
    "mul_mat_id",
    "multiplies",
    "n_nodes",
    "new_buffer",
    "new_context",
    "new_graph",
    "new_tensor",
    "new_threadpool",
    "nodes",
    "own_bytes",
    "permute",
    "plan",
    "quantize",
    "require_threads",
    "reset",
    "reshape_2d",
    "reshape_3d",
    "rms_norm",
    "rope_ext",
    "row_size",
    "scale",
    "set_input",
    "set_output",
    "set_rows",
    "set_tensor",
    "soft_max",
    "sum_rows",
    "supports",
    "swiglu_oai",
    "swiglu_split",
    "take_log",
    "team_address",
    "tensor_overhead",
    "to_float",
    "type_name",
    "type_size",
    "version",
    "view_2d",
    "view_3d",
]

INSTALL = install_hint("run")
VERSION = "0.26"
ALL_THREADS = -1


def _check_cpu() -> None:
    """Raise ImportError if ggml was built for another CPU: its code would end the process."""
    needed = resources.files("unimem_ggml").joinpath("built_for.txt").read_text().split()
    missing = missing_cpu_features(needed)
    if missing and cpu_features():
        raise ImportError(
            f"it was built for another CPU, and this one lacks {', '.join(missing)}; build it here"
        )


_before = limits.cpus()
try:
    _check_cpu()
    from unimem_ggml import binding
except ImportError as error:
    raise ImportError(
        f"the engine needs ggml, which cannot be loaded ({error}): {INSTALL}"
    ) from None
limits.note_binding(_before)

from unimem_ggml.binding import (  # noqa: E402 - the thread's CPUs are noted first
    DATA_OFFSET,
    F16,
    F32,
    I32,
    I64,
    LIBRARIES,
    N_TYPES,
    NB_OFFSET,
    NE_OFFSET,
    PLAN_BYTES,
    Q8_0,
    ROPE_NEOX,
    ROPE_NORMAL,
    GgmlError,
    Tensor,
    add,
    add_id,
    alloc_size,
    argsort_top_k,
    block_size,
    clamp,
    compute_address,
    cont,
    div,
    expand,
    extra_buffer_types,
    features,
    flash_attn_ext,
    free,
    free_buffer,
    geglu_split,
    get_rows,
    graph_overhead,
    has_to_float,
    init_tensor,
    map_custom1_inplace,
    mul,
    mul_mat,
    mul_mat_id,
    multiplies,
    n_nodes,
    new_buffer,
    new_context,
    new_graph,
    new_tensor,
    nodes,
    permute,
    plan,
    quantize,
    reset,
    reshape_2d,
    reshape_3d,
    rms_norm,
    rope_ext,
    row_size,
    scale,
    set_input,
    set_output,
    set_rows,
    set_tensor,
    soft_max,
    sum_rows,
    supports,
    swiglu_oai,
    swiglu_split,
    take_log,
    tensor_overhead,
    to_float,
    type_name,
    type_size,
    version,
    view_2d,
    view_3d,
)

if not version()["version"].startswith(f"{VERSION}."):
    raise ImportError(
        f"the engine needs ggml {VERSION}, but {version()['version']} is installed: {INSTALL}"
    )


class _Team(ctypes.Structure):
    """Whether threads are kept for the next graph, were made, or were lost in a fork.

    libgomp keeps them for the process, and ggml for a decoder. A forked child would wait for them
    for ever. Other builds of OpenMP handle forks.
    """

    _fields_ = (
        ("is_kept", ctypes.c_bool),
        ("is_made", ctypes.c_bool),
        ("is_lost", ctypes.c_bool),
    )
    is_kept: bool
    is_made: bool
    is_lost: bool

    def lose(self) -> None:
        """Note in a forked child that the threads are lost."""
        self.is_lost = self.is_lost or self.is_made


_HAS_OWN_THREADS = "OPENMP" not in features()
_team = _Team(is_kept=binding.USES_GOMP or _HAS_OWN_THREADS)
team_address = ctypes.addressof(_team)
os.register_at_fork(after_in_child=_team.lose)


def require_threads(n_threads: int) -> None:
    """Raise ClosedError in a forked child whose parent computed with several threads."""
    if _team.is_lost and n_threads > 1:
        raise ClosedError(
            f"threads={n_threads}: this is a forked child, which has none of the threads that its "
            "parent made for ggml: start it by spawn "
            "(multiprocessing.set_start_method('spawn')), or take threads=1"
        )


_pools: dict[int, int] = {}  # and the processes that made them


def new_threadpool(n_threads: int) -> int:
    """Make the threads that compute graphs; free them with `free_threadpool`."""
    pool = binding.new_threadpool(n_threads)
    _pools[pool] = os.getpid()
    if n_threads > 1 and _HAS_OWN_THREADS:
        _team.is_made = True
    return pool


def free_threadpool(pool: int) -> None:
    """End the threads of a pool; in a forked child there are none to wait for."""
    if _pools.pop(pool) == os.getpid():
        binding.free_threadpool(pool)


def compute(graph: int, plan_address: int, n_threads: int) -> int:
    """Compute a graph by its plan; return ggml's status, which is 0 for success."""
    if n_threads > 1:
        _team.is_made = _team.is_kept
    return int(binding.compute(graph, plan_address, n_threads))


MATMUL_TYPES: dict[int, str] = {
    number: type_name(number)
    for number in range(N_TYPES)
    if block_size(number) and multiplies(number)
}
"""Number and name of each type of matrices and embeddings."""


def own_bytes(n_threads: int) -> int:
    """Return a bound of what ggml takes from malloc for one decoder.

    It covers three contexts, whose headers and graphs lie elsewhere, and the pool of threads,
    without their stacks.
    """
    return 4096 + 4096 * n_threads


def facts() -> dict[str, Any]:
    """Describe this build of ggml.

    Returns
    -------
    dict
        ``ggml`` (version), ``cpu_features`` (names of those in use) and ``tinyblas`` (bool).
    """
    found = {name.lower() for name, value in features().items() if value != "0"}
    return {
        "ggml": version()["version"],
        "cpu_features": sorted(found - {"llamafile", "openmp", "repack"}),
        "tinyblas": "llamafile" in found,
    }
