"""ggml through ctypes: the functions and structs that the engine uses.

ggml has no stable binary interface, so the version is pinned and struct layouts are checked when
this module is loaded. Tensors, graphs and contexts are plain addresses (`int`). ggml aborts the
process for a wrong shape or too little room: callers check first.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from typing import Any

from unimem.base.install_hint import install_hint
from unimem.errors import ClosedError
from unimem.system import limits

PACKAGE_VERSION = "0.0.45"
INSTALL = install_hint("run")
REBUILD = (
    "CMAKE_ARGS=-DGGML_LLAMAFILE=ON pip install --no-cache-dir --force-reinstall --no-deps "
    f"ggml-python=={PACKAGE_VERSION}"
)

MAX_DIMS = 4
F32, F16, Q8_0, I32, I64, BF16 = 0, 1, 8, 26, 27, 30
ROPE_NORMAL, ROPE_NEOX = 0, 2
PREC_F32 = 10
ALL_THREADS = -1
OBJECT_BYTES = 32  # the header that ggml puts before each tensor and graph of a context


class InitParams(Structure):
    """`ggml_init_params`."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class TensorHeader(Structure):
    """`ggml_tensor`."""

    _fields_ = (
        ("type", c_int),
        ("buffer", c_void_p),
        ("ne", c_int64 * MAX_DIMS),
        ("nb", c_size_t * MAX_DIMS),
        ("op", c_int),
        ("op_params", c_int32 * 16),
        ("flags", c_int32),
        ("src", c_void_p * 10),
        ("view_src", c_void_p),
        ("view_offs", c_size_t),
        ("data", c_void_p),
        ("name", c_char * 64),
        ("extra", c_void_p),
        ("padding", c_char * 8),
    )


class ComputePlan(Structure):
    """`ggml_cplan`."""

    _fields_ = (
        ("work_size", c_size_t),
        ("work_data", c_void_p),
        ("n_threads", c_int),
        ("threadpool", c_void_p),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("use_ref", c_bool),
    )


class ThreadpoolParams(Structure):
    """`ggml_threadpool_params`."""

    _fields_ = (
        ("cpumask", c_bool * 512),
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


class BufferInterface(Structure):
    """`ggml_backend_buffer_i`."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in """
            free_buffer get_base init_tensor memset_tensor set_tensor get_tensor set_tensor_2d
            get_tensor_2d cpy_tensor clear reset
        """.split()
    )


class BufferHeader(Structure):
    """`ggml_backend_buffer`."""

    _fields_ = (
        ("iface", BufferInterface),
        ("buft", c_void_p),
        ("context", c_void_p),
        ("size", c_size_t),
        ("usage", c_int),
    )


class Feature(Structure):
    """`ggml_backend_feature`."""

    _fields_ = (("name", c_char_p), ("value", c_char_p))


class _CpuTraits(Structure):
    """`ggml_type_traits_cpu`."""

    _fields_ = (
        ("from_float", c_void_p),
        ("vec_dot", c_void_p),
        ("vec_dot_type", c_int),
        ("nrows", c_int64),
    )


class _Traits(Structure):
    """`ggml_type_traits`."""

    _fields_ = (
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", c_void_p),
        ("from_float_ref", c_void_p),
    )


def _load() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    try:
        version = importlib.metadata.version("ggml-python")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"the engine needs ggml, which is not installed: {INSTALL}") from None
    if version != PACKAGE_VERSION:
        raise ImportError(
            f"the engine needs ggml-python {PACKAGE_VERSION}, but {version} is installed: {INSTALL}"
        )
    # Importing the package would load every ggml function, and all symbols globally.
    spec = importlib.util.find_spec("ggml")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"ggml-python {version} has no package 'ggml': {INSTALL}")
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    cpus = limits.cpus()
    try:
        base = ctypes.CDLL(str(folder / "libggml-base.so"))
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
    except OSError as error:
        raise ImportError(f"ggml cannot be loaded ({error}): {INSTALL}") from None
    limits.note_binding(cpus)
    return base, cpu


_BASE, _CPU = _load()
LIBRARIES = (_BASE._name, _CPU._name)
"""Paths of ggml's files."""

_Function = Callable[..., Any]


def _base(name: str, restype: Any, *argtypes: Any, lib: ctypes.CDLL = _BASE) -> _Function:
    function = getattr(lib, f"ggml_{name}")
    function.restype, function.argtypes = restype, argtypes
    return function  # type: ignore[no-any-return]


def _cpu(name: str, restype: Any, *argtypes: Any) -> _Function:
    return _base(name, restype, *argtypes, lib=_CPU)


# Addresses are c_void_p: the default restype would truncate them to 32 bits.
_P = c_void_p
_version = _base("version", c_char_p)
_log_set = _base("log_set", None, _P, _P)
_commit = _base("commit", c_char_p)
_type_name = _base("type_name", c_char_p, c_int)
_blck_size = _base("blck_size", c_int64, c_int)
_get_type_traits = _base("get_type_traits", POINTER(_Traits), c_int)
row_size = _base("row_size", c_size_t, c_int, c_int64)
tensor_overhead = _base("tensor_overhead", c_size_t)
graph_overhead_custom = _base("graph_overhead_custom", c_size_t, c_size_t, c_bool)

init = _base("init", _P, InitParams)
reset = _base("reset", None, _P)
free = _base("free", None, _P)

_new_tensor = _base("new_tensor", _P, _P, c_int, c_int, POINTER(c_int64))
nbytes = _base("nbytes", c_size_t, _P)
set_input = _base("set_input", None, _P)
set_output = _base("set_output", None, _P)

get_rows = _base("get_rows", _P, _P, _P, _P)
set_rows = _base("set_rows", _P, _P, _P, _P, _P)
rms_norm = _base("rms_norm", _P, _P, _P, c_float)
mul = _base("mul", _P, _P, _P, _P)
add = _base("add", _P, _P, _P, _P)
mul_mat = _base("mul_mat", _P, _P, _P, _P)
mul_mat_id = _base("mul_mat_id", _P, _P, _P, _P, _P)
div = _base("div", _P, _P, _P, _P)
scale = _base("scale", _P, _P, _P, c_float)
clamp = _base("clamp", _P, _P, _P, c_float, c_float)
sum_rows = _base("sum_rows", _P, _P, _P)
soft_max = _base("soft_max", _P, _P, _P)
argsort_top_k = _base("argsort_top_k", _P, _P, _P, c_int)
swiglu_split = _base("swiglu_split", _P, _P, _P, _P)
geglu_split = _base("geglu_split", _P, _P, _P, _P)
cont = _base("cont", _P, _P, _P)
reshape_2d = _base("reshape_2d", _P, _P, _P, c_int64, c_int64)
reshape_3d = _base("reshape_3d", _P, _P, _P, c_int64, c_int64, c_int64)
view_2d = _base("view_2d", _P, _P, _P, c_int64, c_int64, c_size_t, c_size_t)
view_3d = _base("view_3d", _P, _P, _P, c_int64, c_int64, c_int64, c_size_t, c_size_t, c_size_t)
map_custom1_inplace = _base("map_custom1_inplace", _P, _P, _P, _P, c_int, _P)
permute = _base("permute", _P, _P, _P, c_int, c_int, c_int, c_int)
rope_ext = _base(
    "rope_ext", _P, _P, _P, _P, _P, c_int, c_int, c_int,
    c_float, c_float, c_float, c_float, c_float, c_float,
)  # fmt: skip
flash_attn_ext = _base("flash_attn_ext", _P, _P, _P, _P, _P, _P, c_float, c_float, c_float)
flash_attn_ext_set_prec = _base("flash_attn_ext_set_prec", None, _P, c_int)

new_graph_custom = _base("new_graph_custom", _P, _P, c_size_t, c_bool)
build_forward_expand = _base("build_forward_expand", None, _P, _P)
graph_n_nodes = _base("graph_n_nodes", c_int, _P)
graph_nodes = _base("graph_nodes", _P, _P)

cpu_reg = _cpu("backend_cpu_reg", _P)
reg_get_proc_address = _base("backend_reg_get_proc_address", _P, _P, c_char_p)
reg_dev_get = _base("backend_reg_dev_get", _P, _P, c_size_t)
dev_supports_op = _base("backend_dev_supports_op", c_bool, _P, _P)
buft_name = _base("backend_buft_name", c_char_p, _P)
buft_alloc_buffer = _base("backend_buft_alloc_buffer", _P, _P, c_size_t)
buft_get_alignment = _base("backend_buft_get_alignment", c_size_t, _P)
buft_get_alloc_size = _base("backend_buft_get_alloc_size", c_size_t, _P, _P)
buffer_init = _base("backend_buffer_init", _P, _P, BufferInterface, _P, c_size_t)
buffer_get_base = _base("backend_buffer_get_base", _P, _P)
buffer_init_tensor = _base("backend_buffer_init_tensor", c_int, _P, _P)
buffer_free = _base("backend_buffer_free", None, _P)
tensor_set = _base("backend_tensor_set", None, _P, _P, c_size_t, c_size_t)

graph_plan = _cpu("graph_plan", ComputePlan, _P, c_int, _P)
_graph_compute = _cpu("graph_compute", c_int, _P, POINTER(ComputePlan))
graph_compute_address = ctypes.cast(_CPU.ggml_graph_compute, c_void_p).value
"""int (*)(ggml_cgraph *, ggml_cplan *), for callers without the interpreter's lock."""
_threadpool_params_default = _base("threadpool_params_default", ThreadpoolParams, c_int)
_threadpool_new = _cpu("threadpool_new", _P, POINTER(ThreadpoolParams))
threadpool_free = _cpu("threadpool_free", None, _P)
_get_type_traits_cpu = _cpu("get_type_traits_cpu", POINTER(_CpuTraits), c_int)
_has_llamafile = _cpu("cpu_has_llamafile", c_int)


def new_tensor(context: int, kind: int, *ne: int) -> int:
    """Make a tensor header of type number `kind`; its `data` is NULL."""
    return int(_new_tensor(context, kind, len(ne), (c_int64 * len(ne))(*ne)))


def new_context(address: int, nbytes: int) -> int:
    """Make a context whose headers and graphs lie in [address, address + nbytes)."""
    return int(init(InitParams(mem_size=nbytes, mem_buffer=address, no_alloc=True)))


class _Team(Structure):
    """Whether libgomp keeps threads for the next graph, has made them, or lost them in a fork.

    A forked child would wait for them for ever. Other builds of OpenMP handle forks, and ggml's own
    threads belong to a decoder.
    """

    _fields_ = (("is_kept", c_bool), ("is_made", c_bool), ("is_lost", c_bool))
    is_kept: bool
    is_made: bool
    is_lost: bool

    def lose(self) -> None:
        """Note in a forked child that the threads are lost."""
        self.is_lost = self.is_lost or self.is_made


_team = _Team(is_kept=hasattr(_CPU, "GOMP_parallel"))
team_address = ctypes.addressof(_team)
os.register_at_fork(after_in_child=_team.lose)


def require_threads(n_threads: int) -> None:
    """Raise ClosedError in a forked child whose parent computed with several threads."""
    if _team.is_lost and n_threads > 1:
        raise ClosedError(
            f"threads={n_threads}: this is a forked child of a process that has computed, and has "
            "none of ggml's threads: start it by spawn "
            "(multiprocessing.set_start_method('spawn')), or take threads=1"
        )


def compute(graph: int, plan: ComputePlan) -> int:
    """Compute a graph; return ggml's status, which is 0 for success."""
    if plan.n_threads > 1:
        _team.is_made = _team.is_kept
    return int(_graph_compute(graph, ctypes.byref(plan)))


def new_threadpool(n_threads: int) -> int:
    """Make the threads that compute graphs; free them with `threadpool_free`."""
    params = _threadpool_params_default(n_threads)
    return int(_threadpool_new(ctypes.byref(params)))


# ggml writes warnings to standard error; a library must not.
_silence = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda _level, _text, _data: None)
_log_set(_silence, None)
_cpu("cpu_init", None)()


def _check_layout() -> None:
    room = (c_char * 2048)()
    address = -(-ctypes.addressof(room) // 16) * 16
    context = new_context(address, 1024)
    tensor = TensorHeader.from_address(new_tensor(context, F32, 3, 5))
    expected = (F32, [3, 5, 1, 1], [4, 12, 60, 60], None)
    found = (tensor.type, list(tensor.ne), list(tensor.nb), tensor.data)
    free(context)
    if (
        ctypes.sizeof(TensorHeader) + OBJECT_BYTES != tensor_overhead()
        or found != expected
        or ctypes.sizeof(ComputePlan) != 56
        or ctypes.sizeof(ThreadpoolParams) != 528
        or _get_type_traits(Q8_0).contents.type_size != 34
    ):
        raise ImportError(f"this build of ggml lays its structs out in another way: {INSTALL}")


_check_layout()


_N_TYPES = 42  # of ggml 0.15: it reads past its tables for a larger number


def _matmul_types() -> dict[int, str]:
    kinds = {}
    for number in range(_N_TYPES):
        if _blck_size(number) and _get_type_traits_cpu(number).contents.vec_dot:
            kinds[number] = _type_name(number).decode()
    return kinds


MATMUL_TYPES = _matmul_types()
"""Number and name of each type of matrices and embeddings."""


_ToFloat = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)


def to_float(number: int) -> _Function | None:
    """Return ggml's conversion of a type's blocks to float32, or None.

    It takes the addresses of the blocks and of the values, and the number of values. The
    interpreter's lock is released meanwhile.
    """
    if number >= _N_TYPES:
        return None
    address = _get_type_traits(number).contents.to_float
    return _ToFloat(address) if address else None


def own_bytes(n_threads: int) -> int:
    """Return a bound of what ggml takes from malloc for one decoder.

    It covers three contexts, whose headers and graphs lie elsewhere, and the pool of threads,
    without their stacks.
    """
    return 4096 + 2048 * n_threads


def version() -> dict[str, str]:
    """Return ggml's version and commit."""
    return {"version": _version().decode(), "commit": _commit().decode()}


def facts() -> dict[str, Any]:
    """Describe this build of ggml.

    Returns
    -------
    dict
        ``ggml`` (version), ``cpu_features`` (names of those in use), ``tinyblas`` (bool) and,
        without tinyBLAS, ``advice`` (how to rebuild).
    """
    arm = ("neon", "arm_fma", "fp16_va", "dotprod", "matmul_int8", "sve", "sme")
    x86 = (
        "sse3", "ssse3", "avx", "avx_vnni", "avx2", "f16c", "fma", "bmi2", "avx512",
        "avx512_vbmi", "avx512_vnni", "avx512_bf16", "amx_int8",
    )  # fmt: skip
    names = arm if platform.machine() == "aarch64" else x86
    result: dict[str, Any] = {
        "ggml": _version().decode(),
        "cpu_features": [name for name in names if _cpu(f"cpu_has_{name}", c_int)()],
        "tinyblas": bool(_has_llamafile()),
    }
    if not result["tinyblas"]:
        result["advice"] = f"prefill is slow, this ggml has no tinyBLAS; rebuild it: {REBUILD}"
    return result
