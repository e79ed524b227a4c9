"""A plain NumPy model of the KV cache, and what its tests share."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import unimem as um
from support.kernel import proc_maps

Array = NDArray[Any]

KV_DTYPES = ("f32", "f16", "bf16", "q8_0")
GIVEN_DTYPES = ("float32", "float16", "bfloat16")
Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", (32,))])
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "q8_0": Q8_0,
}
# ggml's types of fewer bits: their numbers in unimem.h, and the fields of a block.
FEWER_BITS: dict[str, tuple[int, Any]] = {
    "q4_0": (4, [("d", "<f2"), ("qs", "u1", (16,))]),
    "q4_1": (5, [("d", "<f2"), ("m", "<f2"), ("qs", "u1", (16,))]),
    "q5_0": (6, [("d", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))]),
    "q5_1": (7, [("d", "<f2"), ("m", "<f2"), ("qh", "u1", (4,)), ("qs", "u1", (16,))]),
    "iq4_nl": (8, [("d", "<f2"), ("qs", "u1", (16,))]),
}
ALL_DTYPES = NUMPY_DTYPES | {name: np.dtype(fields) for name, (_, fields) in FEWER_BITS.items()}


# ---- conversion ----

# By its name, or `make mutants`, which loads a library from elsewhere, would have two.
um_convert = ctypes.CDLL(Path(um.get_library()).name).um_convert
um_convert.argtypes = (
    *(ctypes.c_void_p, ctypes.c_int),
    *(ctypes.c_void_p, ctypes.c_int),
    *(ctypes.c_size_t, ctypes.c_void_p),
)


def given(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 8) -> Array:
    """Return random tokens of a dtype that caches take."""
    floats: Array = rng.normal(scale=scale, size=shape).astype(np.float32)
    return floats.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def quantized(floats: Array) -> Array:
    """Return ggml's Q8_0 of the last axis, as its format is described.

    A block has 32 values. The largest becomes 127, and halves are rounded away from 0.
    """
    blocks = floats.astype(np.float32).reshape(*floats.shape[:-1], floats.shape[-1] // 32, 32)
    scale = np.abs(blocks).max(axis=-1) / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    scaled = (blocks * inverse[..., None]).astype(np.float64)
    out = np.empty(blocks.shape[:-1], Q8_0)
    out["d"] = scale.astype(np.float16)
    out["qs"] = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
    return out


def blocks_of(floats: Array, dtype: str) -> Array:
    """Return blocks of fewer bits by the library's conversion, which tests/_core checks."""
    floats = np.ascontiguousarray(floats)
    out = np.empty((*floats.shape[:-1], floats.shape[-1] // 32), ALL_DTYPES[dtype])
    number = FEWER_BITS[dtype][0]
    assert um_convert(out.ctypes.data, number, floats.ctypes.data, 0, floats.size, None) == 0
    return out


def floats_of(stored: Array, dtype: str) -> Array:
    """Return the numbers that stored tokens of any dtype represent."""
    if dtype not in FEWER_BITS:
        return as_float32(stored)
    blocks, number = np.ascontiguousarray(stored), FEWER_BITS[dtype][0]
    out = np.empty((*blocks.shape[:-1], blocks.shape[-1] * 32), np.float32)
    assert um_convert(out.ctypes.data, 0, blocks.ctypes.data, number, out.size, None) == 0
    return out


def stored(values: Array, dtype: str) -> Array:
    """Return given tokens as a cache of this dtype stores them: quantized ones in blocks."""
    floats = values.astype(np.float32)
    if dtype == "q8_0":
        return quantized(floats)
    if dtype in FEWER_BITS:
        return blocks_of(floats, dtype)
    with np.errstate(all="ignore"):
        return floats.astype(NUMPY_DTYPES[dtype])


def kept(values: Array, part: Literal["k", "v"], dtype: str, rotate: bool) -> Array:
    """Return given K or V as a cache keeps it: blocks stay as they are."""
    if values.dtype == Q8_0:
        return values
    return stored(um.rotate_heads(values, part) if rotate and values.size else values, dtype)


def as_float32(array: Array) -> Array:
    """Return the numbers that stored tokens represent."""
    if array.dtype != Q8_0:
        return array.astype(np.float32)
    values = array["d"].astype(np.float32)[..., None] * array["qs"].astype(np.float32)
    return values.reshape(*array.shape[:-1], array.shape[-1] * 32)


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# ---- memory ----


def memory(address: int, nbytes: int) -> Array:
    """View the bytes at an address, unknown to any cache."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def lane_row_bytes(kv: um.KVCache) -> int:
    """Return the bytes of a row of a lane: all heads of a token, or one head."""
    return kv.row_bytes // (kv.n_kv_heads if kv.order == "head" else 1)


def lane_address(kv: um.KVCache, layer: int, part: int, lane: int) -> int:
    """Return where a lane of K (0) or V (1) of a layer begins, of a stream or a head."""
    k, v = kv.address(layer, "k"), kv.address(layer, "v")
    n_lanes = kv.batch * (kv.n_kv_heads if kv.order == "head" else 1)
    return (k, v)[part] + lane * ((v - k) // n_lanes)


def write_rows(kv: um.KVCache, layer: int, part: int, row: int, tokens: Array) -> None:
    """Write stored tokens [batch, heads, n, dim] into rows from `row` on, as an engine does."""
    n, row_bytes = tokens.shape[2], lane_row_bytes(kv)
    lanes = tokens.swapaxes(1, 2)
    if kv.order == "head":
        lanes = tokens.reshape(-1, n, tokens.shape[3])
    for lane, rows in enumerate(lanes):
        at = lane_address(kv, layer, part, lane) + row * row_bytes
        memory(at, n * row_bytes)[:] = np.frombuffer(rows.tobytes(), np.uint8)


def first_row(kv: um.KVCache, layer: int) -> int:
    """Return the row of the first token that a layer shows."""
    at = proc_maps.address_of(kv.layer(layer)[0]) - kv.address(layer, "k")
    assert at % lane_row_bytes(kv) == 0
    return at // lane_row_bytes(kv)


def rows_of_pages(row_bytes: int, n: int) -> int:
    """n rows, rounded up to whole pages: what a ring has for a window of n."""
    unit = math.lcm(row_bytes, proc_maps.PAGE) // row_bytes
    return -(-n // unit) * unit


# ---- the model ----


class Model:
    """The tokens of each layer, by position; a ring forgets what its rows no longer hold.

    Its methods are called for what the cache accepts, and do not refuse.
    """

    def __init__(
        self,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        batch: int,
        dtype: str,
        n_rows: int,
        window: int | None = None,
    ) -> None:
        self.n_layers, self.batch = n_layers, batch
        self.shape = (batch, n_kv_heads, head_dim // 32 if dtype == "q8_0" else head_dim)
        self.dtype, self.n_rows, self.window = dtype, n_rows, window
        self.row_bytes = math.prod(self.shape[1:]) * NUMPY_DTYPES[dtype].itemsize
        self.clear()

    def clear(self) -> None:
        self.first = self.reserved = 0
        self.end = [0] * self.n_layers
        self.top = [0] * self.n_layers
        self.tokens: list[dict[int, tuple[Array, Array]]] = [{} for _ in range(self.n_layers)]

    # What can be seen.

    @property
    def is_whole(self) -> bool:
        """Whether all layers hold the same tokens, and nothing is reserved."""
        return len(set(self.end)) == 1 and not self.reserved

    @property
    def next_position(self) -> int:
        return min(self.end)

    def oldest(self, layer: int) -> int:
        """The first position that a layer still has."""
        return max(self.first, self.top[layer] - self.n_rows) if self.window else self.first

    def _first_shown(self, oldest: int, end: int) -> int:
        return min(end, max(oldest, end - self.window) if self.window else oldest)

    def shown(self, layer: int) -> range:
        """The positions that a layer shows."""
        return range(self._first_shown(self.oldest(layer), self.end[layer]), self.end[layer])

    @property
    def first_position(self) -> int:
        oldest = max(self.oldest(layer) for layer in range(self.n_layers))
        return self._first_shown(oldest, self.next_position)

    @property
    def seq_len(self) -> int:
        return self.next_position - self.first_position

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in one layer, K and V, all streams."""
        return 2 * self.batch * self.row_bytes

    @property
    def memory_usage_bytes(self) -> int:
        return sum(len(self.shown(layer)) for layer in range(self.n_layers)) * self.token_bytes

    def layer(self, layer: int) -> tuple[Array, Array]:
        """K and V that a layer shows: [batch, heads, seq, dim]."""
        batch, heads, dim = self.shape
        shown = self.shown(layer)
        out = []
        for part in range(2):
            array = np.empty((batch, heads, len(shown), dim), NUMPY_DTYPES[self.dtype])
            for i, position in enumerate(shown):
                array[:, :, i] = self.tokens[layer][position][part]
            out.append(array)
        return out[0], out[1]

    def least_crop(self) -> int:
        """The smallest n that crop takes."""
        for n in range(self.seq_len):
            cropped = self.first_position + n
            oldest = max(self.oldest(layer) for layer in range(self.n_layers))
            if self._first_shown(self.first, cropped) >= oldest:
                return n
        return self.seq_len

    # What changes it.

    def append(self, layer: int, k: Array, v: Array) -> None:
        """Stored tokens [batch, heads, n, dim]."""
        for i in range(k.shape[2]):
            self.tokens[layer][self.end[layer]] = (k[:, :, i].copy(), v[:, :, i].copy())
            self.end[layer] += 1
        self.top[layer] = max(self.top[layer], self.end[layer])

    def reserve(self, n: int) -> None:
        self.reserved = n
        self.top = [max(top, end + n) for top, end in zip(self.top, self.end, strict=True)]

    def rollback(self) -> None:
        end = self.next_position
        if self.window:
            self.top = [max(self.top)] * self.n_layers
            if self.top[0] - end >= self.n_rows:
                # All rows of some layer were written, or may be: nothing is left of what it had.
                self.first, self.top = end, [end] * self.n_layers
        self.end = [end] * self.n_layers
        self.reserved = 0

    def crop(self, n: int) -> None:
        self.end = [self.first_position + n] * self.n_layers

    def trim_to(self, n: int, keep_first: int = 0) -> bool:
        if n + keep_first >= self.seq_len:
            return False
        first, kept = self.first_position, self.next_position - n - keep_first
        for tokens in self.tokens:
            moved = [tokens[first + i] for i in range(keep_first)]
            tokens.update({kept + i: token for i, token in enumerate(moved)})
        self.first = kept
        return True


def assert_same(kv: um.KVCache, model: Model) -> None:
    """All that a cache shows is the model's."""
    assert kv.seq_len == len(kv) == model.seq_len
    assert kv.next_position == model.next_position
    assert kv.is_empty is (model.seq_len == 0)
    assert kv.memory_usage_bytes == model.memory_usage_bytes
    for layer in range(model.n_layers):
        for ours, expected in zip(kv.layer(layer), model.layer(layer), strict=True):
            assert same_bits(ours, expected)


class Talk:
    """A cache and its model, to which the same random tokens are appended."""

    def __init__(self, kv: um.KVCache) -> None:
        self.kv = kv
        dims = kv.n_layers, kv.n_kv_heads, kv.head_dim
        options = {name: getattr(kv, name) for name in ("batch", "dtype", "n_rows", "window")}
        self.model = Model(*dims, **options)
        self.rng = np.random.default_rng(0)

    def append(self, n: int, layers: Iterable[int] | None = None) -> None:
        """n tokens in all layers, or in some."""
        shape = (self.kv.batch, self.kv.n_kv_heads, n, self.kv.head_dim)
        for layer in range(self.kv.n_layers) if layers is None else layers:
            k, v = given(self.rng, shape, "float32"), given(self.rng, shape, "float32")
            self.kv.append(layer, k, v)
            self.model.append(layer, stored(k, self.kv.dtype), stored(v, self.kv.dtype))

    def crop(self, n: int) -> None:
        self.kv.crop(n)
        self.model.crop(n)

    def trim_to(self, n: int, keep_first: int = 0) -> None:
        assert self.kv.trim_to(n, keep_first=keep_first) is self.model.trim_to(n, keep_first)

    def check(self) -> None:
        assert_same(self.kv, self.model)
