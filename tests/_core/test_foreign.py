"""Arrays of other libraries go into caches and scratchpads as NumPy's do, and views come out."""

from __future__ import annotations

import gc
import pickle
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.contracts.things import DIMS
from support.gpu import foreign_arrays as fa
from unimem._core.dlpack import ExportedArray

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"f32": np.dtype("f4"), "f16": np.dtype("f2"), "bf16": BF16}
N, HEADS, DIM = 3, 2, 32


def numbers(*shape: int, dtype: Any = "f4") -> Array:
    return np.linspace(-1, 1, int(np.prod(shape))).reshape(shape).astype(dtype)


def kv_append(given: Callable[[Array], Any], kind: str) -> Array:
    with um.KVCache(1, HEADS, DIM, 8, dtype=kind) as kv:
        k = numbers(N, HEADS, DIM, dtype=DTYPES[kind])
        kv.append(0, given(k), given(k))
        found: Array = kv.layer(0, "f4")[0][0].swapaxes(0, 1)
        return found


def kv_append_all(given: Callable[[Array], Any], kind: str) -> Array:
    with um.KVCache(N, HEADS, DIM, 8, dtype=kind) as kv:
        k = numbers(N, HEADS, DIM, dtype=DTYPES[kind])
        kv.append_all(given(k), given(k))
        return np.stack([kv.layer(i, "f4")[1][0, :, 0] for i in range(N)])


def paged_append(given: Callable[[Array], Any], kind: str) -> Array:
    with um.PagedKVCache(1, HEADS, DIM, n_blocks=2, dtype=kind) as pool, pool.sequence() as s:
        k = numbers(N, HEADS, DIM, dtype=DTYPES[kind])
        s.append(0, given(k), given(k))
        found: Array = s.gather(0)[0].swapaxes(0, 1)
        return found


def paged_append_all(given: Callable[[Array], Any], kind: str) -> Array:
    with um.PagedKVCache(N, HEADS, DIM, n_blocks=2, dtype=kind) as pool, pool.sequence() as s:
        k = numbers(N, HEADS, DIM, dtype=DTYPES[kind])
        s.append_all(given(k), given(k))
        return np.stack([s.gather(i)[1][:, 0] for i in range(N)])


def kv_out(given: Callable[[Array], Any], kind: str) -> Array:
    with um.KVCache(1, HEADS, DIM, 8, dtype=kind) as kv:
        k = numbers(N, HEADS, DIM, dtype=DTYPES[kind])
        kv.append(0, k, k)
        room = np.zeros((2, 1, HEADS, N, DIM), DTYPES[kind])
        out = given(room[0]), given(room[1])
        assert all(a is b for a, b in zip(kv.layer(0, DTYPES[kind], out=out), out, strict=True))
        found: Array = room[1][0].swapaxes(0, 1)
        return found


def paged_out(given: Callable[[Array], Any], kind: str) -> Array:
    with um.PagedKVCache(1, HEADS, DIM, n_blocks=2, dtype=kind) as pool, pool.sequence() as s:
        k = numbers(N, HEADS, DIM, dtype=DTYPES[kind])
        s.append(0, k, k)
        room = np.zeros((2, HEADS, N, DIM), DTYPES[kind])
        out = given(room[0]), given(room[1])
        assert all(a is b for a, b in zip(s.gather(0, out=out), out, strict=True))
        found: Array = room[0].swapaxes(0, 1)
        return found


def pad(cls: type[Any]) -> Callable[[Callable[[Array], Any], str], Array]:
    def use(given: Callable[[Array], Any], kind: str) -> Array:
        with cls(8, HEADS * DIM, DTYPES[kind].name) as pad:
            rows = numbers(N, HEADS, DIM, dtype=DTYPES[kind]).reshape(N, -1)
            pad.append(given(rows[0]))
            pad.append_batch(given(rows[1:]))
            found: Array = pad.as_array().astype("f4").reshape(N, HEADS, DIM)
            return found

    return use


INTO: dict[str, Callable[[Callable[[Array], Any], str], Array]] = {
    "KVCache.append": kv_append,
    "KVCache.append_all": kv_append_all,
    "Sequence.append": paged_append,
    "Sequence.append_all": paged_append_all,
    "Scratchpad": pad(um.Scratchpad),
    "PagedScratchpad": pad(um.PagedScratchpad),
}
OUT = {"KVCache.layer": kv_out, "Sequence.gather": paged_out}
# What says nothing of whether it may be written, or has another door, is for reading only.
READ_ONLY = {"DLPack before versions", "exchange API", "exchange API of later versions"}


@pytest.mark.parametrize("call", INTO)
@pytest.mark.parametrize("library", fa.KINDS)
def test_it_goes_in(library: str, call: str) -> None:
    for kind, dtype in DTYPES.items():
        found = INTO[call](fa.KINDS[library], kind)
        assert (found.astype("f4") == numbers(N, HEADS, DIM, dtype=dtype).astype("f4")).all()


@pytest.mark.parametrize("call", OUT)
@pytest.mark.parametrize("library", sorted(set(fa.KINDS) - READ_ONLY))
def test_copies_go_out_to_it(library: str, call: str) -> None:
    for kind, dtype in DTYPES.items():
        found = OUT[call](fa.KINDS[library], kind)
        assert (found.astype("f4") == numbers(N, HEADS, DIM, dtype=dtype).astype("f4")).all()


@pytest.mark.parametrize("call", OUT)
def test_nothing_is_written_where_that_is_not_allowed(call: str) -> None:
    for given in (fa.Unversioned, lambda a: fa.Versioned(read_only(a)), memoryview_of_read_only):
        with pytest.raises(ValueError, match="out: expected two writable arrays"):
            OUT[call](given, "f32")


def read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


def memoryview_of_read_only(array: Array) -> memoryview:
    return read_only(array).data


@pytest.mark.parametrize("library", ["DLPack", "exchange API", "a buffer"])
def test_strides_are_kept_and_nothing_else_is_read(library: str) -> None:
    wide = numbers(2 * N, HEADS, DIM)
    layouts = {
        "every second token": wide[::2],
        "another order": numbers(HEADS, N, DIM).swapaxes(0, 1),
        "backwards": numbers(N, HEADS, DIM)[::-1],
        "no token": numbers(0, HEADS, DIM),
        "one value for all": np.broadcast_to(np.float32(0.5), (N, HEADS, DIM)),
    }
    for layout in layouts.values():
        with um.KVCache(1, HEADS, DIM, 8, dtype="f32") as kv:
            kv.append(0, fa.KINDS[library](layout), fa.KINDS[library](layout))
            assert (kv.layer(0)[0][0].swapaxes(0, 1) == layout).all()


@pytest.mark.parametrize("library", fa.KINDS)
def test_nothing_is_copied_on_the_way(library: str) -> None:
    k = numbers(64, 16, 128)
    given = fa.KINDS[library](k)
    with um.KVCache(1, 16, 128, 64, dtype="f32") as kv:
        tracemalloc.start()
        try:
            kv.append(0, given, given)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kv.seq_len == 64
        assert peak < k.nbytes // 4


def test_an_offset_counts() -> None:
    whole = numbers(N + 1, HEADS, DIM)
    rest: Any = fa.Exchanged(
        whole[1:], data=whole.ctypes.data, byte_offset=whole.strides[0], strides=0
    )
    with um.KVCache(1, HEADS, DIM, 8, dtype="f32") as kv:
        kv.append(0, rest, rest)
        assert (kv.layer(0)[0][0].swapaxes(0, 1) == whole[1:]).all()


def test_what_has_no_elements_needs_no_address() -> None:
    none: Any = fa.Exchanged(numbers(0, HEADS, DIM), data=0)
    with um.KVCache(1, HEADS, DIM, 8, dtype="f32") as kv:
        kv.append(0, none, none)
        assert kv.seq_len == 0


# Each with a word of what is said.
REFUSED: dict[str, tuple[Callable[[Array], Any], str]] = {
    "a device by __dlpack_device__": (lambda a: fa.Versioned(a, device=2), r"main memory.*\.cpu"),
    "a device by the exchange API": (lambda a: fa.Exchanged(a, device_type=2), r"type 2.*\.cpu"),
    "more dimensions": (lambda a: fa.Exchanged(a, n_dims=65), "at most 64 dimensions"),
    "lanes": (lambda a: fa.Exchanged(a, lanes=2), "2 lanes"),
    "no memory": (lambda a: fa.Exchanged(a, data=0), "got one without memory"),
    "a type of nobody's": (lambda a: fa.Exchanged(a, code=99), "code 99 of 32 bits"),
    "four bits": (lambda a: fa.Exchanged(a, code=17, bits=4), "code 17 of 4 bits"),
    "an exporter that refuses": (fa.Refusing, r"says: lent already$"),
    "no capsule": (fa.Wrong, "a capsule of DLPack.*'capsule'"),
    "raw bytes": (lambda a: a.tobytes(), "got bytes"),
    "a released memoryview": (lambda a: released(a.data), "got a memoryview that says"),
    "a list": (lambda a: a.tolist(), "NumPy array, .*__dlpack__ or a buffer, got list"),
    "integers": (lambda a: fa.Exchanged(a.astype("i4")), "float32, float16 or bfloat16.*int32"),
    "booleans": (lambda a: fa.Exchanged(a.astype(bool)), "float32, float16 or bfloat16.*bool"),
}


def released(view: memoryview) -> memoryview:
    view.release()
    return view


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    change, said = REFUSED[case]
    k = numbers(N, HEADS, DIM)
    with um.KVCache(1, HEADS, DIM, 8, dtype="f32") as kv:
        for arguments, name in (((change(k), k), "k"), ((k, change(k)), "v")):
            with pytest.raises(TypeError, match=rf"^{name}: expected .*{said}"):
                kv.append(0, *arguments)
        assert kv.seq_len == 0


@pytest.mark.parametrize("given", [fa.Versioned, fa.Unversioned, fa.Exchanged])
def test_nothing_is_held_after_an_append(given: Callable[[Array], Any]) -> None:
    k = numbers(1, HEADS, DIM)
    with um.KVCache(1, HEADS, DIM, 8, dtype="f32") as kv:
        before = sys.getrefcount(k)
        for _ in range(3):
            kv.append(0, given(k), given(k))
        gc.collect()
        assert sys.getrefcount(k) == before


def test_a_tape_owns_what_lies_on_it() -> None:
    with um.Tape(4096) as tape, um.Tape(4096) as other:
        taken = tape.take(8)
        for thing in (fa.Versioned(taken), taken, taken.ctypes.data):
            assert (tape.owns(thing), other.owns(thing)) == (True, False)


# ---- out ----

F8 = "float8_e4m3fn"
# DLDataTypeCode.
TYPES = {"bfloat16": 4, F8: 10, "float32": 2}


def filled() -> um.KVCache:
    kv = um.KVCache(1, 2, 8, 4, dtype="bf16")
    kv.append(0, numbers(N, 2, 8), numbers(N, 2, 8))
    return kv


# Views of memory of each kind, of types that NumPy exports and of those that it does not.
VIEWS: dict[str, tuple[Callable[[], Any], Callable[[Any], Array]]] = {
    "KVCache.layer": (filled, lambda kv: kv.layer(0)[0]),
    "a part of it": (filled, lambda kv: kv.layer(0)[0][:, 1:, ::2]),
    "PagedKVCache.layer": (
        lambda: um.PagedKVCache(1, 2, 8, n_blocks=2, dtype="bf16"), lambda pool: pool.layer(0)[1]
    ),
    "Scratchpad.as_array": (
        lambda: um.Scratchpad(4, 8, "bfloat16"), lambda pad: pad.as_array()
    ),
    "Tape.take": (lambda: um.Tape(4096), lambda tape: tape.take((2, 3), F8)),
    "Block.as_array": (lambda: um.Block(4096), lambda block: block.as_array("bf16", (4, 5))),
    "float32": (lambda: um.Block(4096), lambda block: block.as_array("f4", (4, 5))),
}  # fmt: skip


@pytest.mark.parametrize("case", VIEWS)
def test_views_go_out_and_hold_their_memory(case: str) -> None:
    make, look = VIEWS[case]
    with make() as owner:
        view = look(owner)
        assert view.__dlpack_device__() == (1, 0)
        strides = tuple(step // view.itemsize for step in view.strides)
        kind, bits = TYPES[view.dtype.name], view.itemsize * 8
        said = fa.Described(1, view.ctypes.data, view.shape, strides, kind, bits, False)
        capsule = view.__dlpack__(max_version=(1, 0))
        assert fa.described(capsule) == said
        assert '"dltensor"' in repr(view.__dlpack__())
        del view
        gc.collect()
        with pytest.raises(BufferError):
            owner.close()
        del capsule
        gc.collect()
        owner.close()


def test_buffers_of_a_step_go_out() -> None:
    with um.DecodeBuffers(DIMS, dtype="bfloat16") as buffers:
        said = fa.described(buffers.qkv_out.__dlpack__(max_version=(1, 0)))
        assert (said.address, said.code) == (buffers.qkv_out.ctypes.data, TYPES["bfloat16"])


def test_read_only_views_say_so() -> None:
    with um.Block(4096) as block:
        view = block.as_array("bf16", 8)
        view.flags.writeable = False
        assert fa.described(view.__dlpack__(max_version=(1, 0))).read_only
        with pytest.raises(BufferError, match="readonly"):
            view.__dlpack__()
        copy = fa.described(view.__dlpack__(copy=True, max_version=(1, 0)))
        assert copy.address != view.ctypes.data
        assert (copy.code, copy.read_only) == (fa.BFLOAT, False)


def test_what_is_computed_of_them_is_as_numpy_makes_it() -> None:
    with um.Block(4096) as block:
        view = block.as_array("bf16", (2, 3))
        view[:] = [[1, 2, 3], [4, 5, 6]]
        assert isinstance(view[1], ExportedArray)
        assert type(view + view) is type(view == 1) is np.ndarray
        assert type(view.max()) is type(view[1, 2]) is ml_dtypes.bfloat16
        view += view
        assert view.tolist() == [[2, 4, 6], [8, 10, 12]]
        assert type(np.asarray(view)) is np.ndarray
        again = pickle.loads(pickle.dumps(view))
        assert (type(again), again.tolist()) == (np.ndarray, view.tolist())


# ---- Tape.take(like=) ----


class Library:
    """A module that has from_dlpack, and takes float32 only."""

    @staticmethod
    def from_dlpack(array: Any) -> Any:
        if array.dtype != np.float32:
            raise RuntimeError("no such type\nhere")
        return fa.Versioned(array)


def test_a_take_like_those_of_a_library() -> None:
    like: Any = Library
    with um.Tape(4096) as tape:
        taken = tape.take((2, 3), like=like, align=256)
        assert isinstance(taken, fa.Versioned)
        assert (taken.array.shape, tape.owns(taken.array)) == ((2, 3), True)
        assert taken.array.ctypes.data % 256 == 0
        used = tape.used_bytes, tape.n_takes
        with pytest.raises(TypeError, match=r"^like: expected .*bfloat16.*says: no such type$"):
            tape.take(4, "bf16", like=like)
        with pytest.raises(TypeError, match=r"^like: expected a module that .*, got 3"):
            tape.take(4, like=3)  # type: ignore[call-overload]
        assert (tape.used_bytes, tape.n_takes) == used
