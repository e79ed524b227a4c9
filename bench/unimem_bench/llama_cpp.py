"""llama.cpp's C API, through the library that `unimem_bench.llama_build` builds.

It needs only the standard library and NumPy, so that a process that measures has llama.cpp's memory
alone. ``bench/peer/peer.c`` has the functions for which Python would need llama.cpp's structs.
``python -m unimem_bench.llama_cpp LIBRARY`` prints what the library is, in JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int32, c_size_t, c_uint32, c_void_p
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The numbers of ggml_type, llama_load_mode and llama_lazy_mode.
KV_TYPES = {
    **{"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20},
    "bf16": 30,
}
LOAD_MODES = {"none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "direct": 4}
LAZY_MODES = {"off": 0, "auto": 1, "on": 2}
DEFAULT = -1
_LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)
_OPTIONS = """
    repack load_mode vocab_only n_ctx n_ubatch n_threads flash type_k type_v keeps_all n_streams
    lazy sees_experts
""".split()


@dataclass(frozen=True, slots=True)
class Flags:
    """How llama.cpp is asked to work; None leaves its default.

    `huge_pages` asks the C library for transparent huge pages for whatever it allocates, in the
    environment of the process: see `environment`.
    """

    repack: bool | None = None  # weights that its CPU backend multiplies faster in another order
    load_mode: str | None = None  # of LOAD_MODES
    huge_pages: bool = False
    flash: bool | None = None  # attention
    ubatch: int | None = None  # tokens that are computed at once
    lazy: str | None = None  # of LAZY_MODES: rows of some tensors are read when they are used

    def environment(self) -> dict[str, str]:
        """Return what the environment of the process must have."""
        return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if self.huge_pages else {}

    def __str__(self) -> str:
        shown = {True: "on", False: "off"}
        given = asdict(self) | {"huge_pages": self.huge_pages or None}
        words = [f"{k}={shown.get(v, v)}" for k, v in given.items() if v is not None]
        return ", ".join(words) or "defaults"


class PeerOptions(ctypes.Structure):
    """`peer_options` of bench/peer/peer.c."""

    _fields_ = tuple((name, c_int32) for name in _OPTIONS)


def options(flags: Flags, **others: int | bool | None) -> PeerOptions:
    """Return flags and other members of `PeerOptions`; what is missing or None is llama.cpp's."""
    mode = None if flags.load_mode is None else LOAD_MODES[flags.load_mode]
    given = {"repack": flags.repack, "load_mode": mode, "flash": flags.flash}
    lazy = None if flags.lazy is None else LAZY_MODES[flags.lazy]
    given |= {"n_ubatch": flags.ubatch, "lazy": lazy, **others}
    values = (given.get(name) for name in _OPTIONS)
    return PeerOptions(*(DEFAULT if value is None else int(value) for value in values))


class _Feature(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("value", c_char_p))


class Library:
    """The library, with the types of its functions; silent unless `is_loud`.

    OSError if it cannot be loaded.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_loud: bool = False) -> None:
        self.c = c = ctypes.CDLL(os.fspath(path))
        sizes: tuple[Any, ...] = (c_void_p, c_void_p, c_size_t, c_int32)
        for name, result, *arguments in (
            ("peer_options_nbytes", c_size_t),
            ("peer_load", c_void_p, c_char_p, POINTER(PeerOptions)),
            ("peer_begin", c_void_p, c_void_p, POINTER(PeerOptions)),
            ("peer_decode", c_int, c_void_p, c_void_p, c_int32),
            ("peer_experts", c_int32),
            ("peer_quantize", c_int, c_char_p, c_char_p, c_int32, c_int32),
            ("peer_gguf", c_void_p, c_char_p),
            ("gguf_free", None, c_void_p),
            ("llama_free", None, c_void_p),
            ("llama_model_free", None, c_void_p),
            ("llama_get_memory", c_void_p, c_void_p),
            ("llama_memory_clear", None, c_void_p, c_bool),
            ("llama_memory_seq_rm", c_bool, c_void_p, c_int32, c_int32, c_int32),
            ("llama_get_logits_ith", POINTER(c_float), c_void_p, c_int32),
            ("llama_model_get_vocab", c_void_p, c_void_p),
            ("llama_vocab_n_tokens", c_int32, c_void_p),
            ("llama_n_ctx", c_uint32, c_void_p),
            ("llama_state_seq_get_size", c_size_t, c_void_p, c_int32),
            ("llama_state_seq_get_data", c_size_t, *sizes),
            ("llama_state_seq_set_data", c_size_t, *sizes),
            ("peer_version", c_char_p),
            ("ggml_version", c_char_p),
            ("ggml_backend_cpu_reg", c_void_p),
            ("ggml_backend_reg_get_proc_address", c_void_p, c_void_p, c_char_p),
        ):
            function = getattr(c, name)
            function.restype, function.argtypes = result, arguments
        if c.peer_options_nbytes() != ctypes.sizeof(PeerOptions):
            raise OSError(f"{path} is not built from this version of bench/peer/peer.c")
        if not is_loud:
            self._silence = _LOG(lambda level, text, data: None)
            c.llama_log_set(self._silence, None)
        c.llama_backend_init()

    def facts(self) -> dict[str, Any]:
        """Return the versions, and the CPU features that ggml was built with, as it names them."""
        c = self.c
        registry = c.ggml_backend_cpu_reg()
        address = c.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_get_features")
        features: dict[str, str] = {}
        found = ctypes.CFUNCTYPE(POINTER(_Feature), c_void_p)(address)(registry)
        while found[len(features)].name:
            feature = found[len(features)]
            features[feature.name.decode()] = feature.value.decode()
        versions = {"llama_cpp": c.peer_version().decode(), "ggml": c.ggml_version().decode()}
        return versions | {"features": features}

    def quantize(self, source: str, target: str, ftype: int, threads: int = 2) -> None:
        """Quantize a model with llama.cpp's own quantizer; `ftype` is a number of llama_ftype."""
        if self.c.peer_quantize(source.encode(), target.encode(), ftype, threads):
            raise RuntimeError(f"llama.cpp cannot quantize {source}")


class PeerModel:
    """A model of llama.cpp; RuntimeError if it cannot be loaded."""

    def __init__(self, library: Library, path: str, given: PeerOptions) -> None:
        self.library = library
        self.address = library.c.peer_load(path.encode(), ctypes.byref(given))
        if not self.address:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab = library.c.llama_model_get_vocab(self.address)
        self.n_vocab: int = library.c.llama_vocab_n_tokens(self.vocab)

    def close(self) -> None:
        """Free it."""
        self.library.c.llama_model_free(self.address)


class Conversation:
    """A context of a model, with one sequence; RuntimeError if there is no room for it."""

    def __init__(self, model: PeerModel, given: PeerOptions) -> None:
        self._model, self._c = model, model.library.c
        self.address = self._c.peer_begin(model.address, ctypes.byref(given))
        if not self.address:
            raise RuntimeError(f"llama.cpp cannot make a context of {given.n_ctx} tokens")
        self._memory = self._c.llama_get_memory(self.address)

    def clear(self) -> None:
        """Forget all tokens."""
        self._c.llama_memory_clear(self._memory, False)

    def remove(self, first: int, end: int) -> bool:
        """Forget the tokens at positions from `first` to `end`; say whether that is possible."""
        return bool(self._c.llama_memory_seq_rm(self._memory, 0, first, end))

    def decode(self, tokens: Sequence[int] | NDArray[np.int32]) -> NDArray[np.float32]:
        """Compute tokens behind the others; return the logits after the last, valid until the next.

        RuntimeError if llama.cpp refuses them.
        """
        given = np.ascontiguousarray(tokens, np.int32)
        status = self._c.peer_decode(self.address, given.ctypes.data, len(given))
        if status:
            raise RuntimeError(f"llama_decode answers {status}")
        logits = self._c.llama_get_logits_ith(self.address, -1)
        return np.ctypeslib.as_array(logits, (self._model.n_vocab,))

    def state(self) -> NDArray[np.uint8]:
        """Return the sequence as llama.cpp saves it."""
        state = np.empty(self._c.llama_state_seq_get_size(self.address, 0), np.uint8)
        n = self._c.llama_state_seq_get_data(self.address, state.ctypes.data, state.nbytes, 0)
        return state[:n]

    def set_state(self, state: NDArray[np.uint8]) -> None:
        """Restore a sequence from what `state` returns; RuntimeError if llama.cpp refuses it."""
        if not self._c.llama_state_seq_set_data(self.address, state.ctypes.data, state.nbytes, 0):
            raise RuntimeError("llama.cpp does not take this state")

    def close(self) -> None:
        """Free it; the model stays."""
        self._c.llama_free(self.address)


def state_of(one: NDArray[np.uint8], n: int, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the state of a sequence of `n` tokens, given one of a single token and the rows.

    `rows` has all K and all V of each layer, as ggml stores them. ValueError if the state of one
    token is laid out in another way than that of build 11549: magic, sequence, streams, cells, a
    position with its sequences for each, whether V is transposed, layers, rotations, K of all
    layers with its type and row, and V.
    """
    words = one[:44].view(np.uint32)
    (n_streams, n_cells), is_transposed, n_layers = words[2:4], bool(words[7]), int(words[8])
    if (n_streams, n_cells) != (1, 1):
        raise ValueError(f"expected 1 stream with 1 token, got {n_streams} with {n_cells}")
    cells = np.zeros((n, 3), np.int32)
    cells[:, 0], cells[:, 1] = np.arange(n), 1
    pieces = [one[:12], np.array([n], np.uint32).view(np.uint8), cells.reshape(-1).view(np.uint8)]
    pieces.append(one[28:44])
    heads, sizes, at = [], [], 44
    for i in range(2 * n_layers):
        _, first, last = (int(word) for word in one[at : at + 12].view(np.uint32))
        heads.append(one[at : at + 12])
        sizes.append(first * last if is_transposed and i >= n_layers else first)
        at += 12 + sizes[-1]
    if at != one.size or rows.size != n * sum(sizes):
        raise ValueError(
            f"expected a state of {at} bytes, and {n * sum(sizes)} of rows for {n} tokens, got "
            f"{one.size} and {rows.size}"
        )
    # In the file a layer's K and V follow each other; in the state, K of all layers comes first.
    begin = 0
    lanes: list[list[NDArray[np.uint8]]] = [[], []]
    for layer in range(n_layers):
        for part in range(2):
            end = begin + n * sizes[layer + part * n_layers]
            lane = rows[begin:end]
            if part and is_transposed:
                itemsize = int(heads[n_layers + layer][4:8].view(np.uint32)[0])
                items = lane.view(f"V{itemsize}").reshape(n, -1)
                lane = np.ascontiguousarray(items.T).reshape(-1).view(np.uint8)
            lanes[part].append(lane)
            begin = end
    for head, lane in zip(heads, lanes[0] + lanes[1], strict=True):
        pieces += [head, lane]
    return np.concatenate(pieces)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(Library(sys.argv[1]).facts()) + "\n")
