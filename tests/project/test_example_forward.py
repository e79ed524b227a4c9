"""The example of a forward pass computes the engine's numbers in memory taken once."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
pytest.importorskip(
    "unimem.backends.ggml",
    reason="the engine needs ggml: pip install ./ggml '.[run]'",
    exc_type=ImportError,
)

import gguf

import unimem as um
from support.models.make import TINY, write_model
from support.project.checkout import ROOT
from unimem._core.status import counters
from unimem.engine import Decoder, embedded_model

EXAMPLE = ROOT / "examples" / "numpy_forward.py"
N = 30
# The likeliest of each of the next 30 tokens leads by at least 0.07 deviations.
PROMPT = "Sam went to the park"


@pytest.fixture(scope="module")
def example() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE.parent)
        return importlib.import_module(EXAMPLE.stem)


@contextmanager
def opened(example: Any, path: Path) -> Iterator[Any]:
    with um.open_weights(path) as weights, example.layout_for(weights) as layout:
        yield example.Llama(weights, layout)


@pytest.fixture
def llama(example: Any) -> Iterator[Any]:
    with opened(example, embedded_model()) as llama:
        yield llama


def float32_copy(path: Path, tied: bool) -> Path:
    """Write the embedded model as float32, optionally without an output matrix."""
    source = gguf.GGUFReader(embedded_model())
    copy = gguf.GGUFWriter(path, "llama")
    for name, field in source.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            copy.add_key_value(name, field.contents(), *field.types[:2])
    for tensor in source.tensors:
        if not (tied and tensor.name == "output.weight"):
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            copy.add_tensor(tensor.name, values.astype(np.float32))
    copy.write_header_to_file()
    copy.write_kv_data_to_file()
    copy.write_tensors_to_file()
    copy.close()
    return path


def prompt_of(text: str = PROMPT) -> list[int]:
    with Decoder(embedded_model(), threads=1) as decoder:
        return decoder.tokenize(text)


# ---- the numbers ----

# The engine rounds activations to q8_0 before it multiplies by q8_0, four times a layer. The
# example rounds nothing, and neither does the engine with a float32 file; then only the order of
# sums differs. The largest measured difference of a logit, in standard deviations of the logits, is
# 0.10, and 0.000006 (`pytest -s` prints it).
BOUNDS = {"embedded": 0.25, "float32": 1e-4, "float32 tied": 1e-4}


@pytest.mark.usefixtures("gives_memory_back")
@pytest.mark.parametrize("name", BOUNDS)
def test_logits_and_tokens_of_the_engine(example: Any, tmp_path: Path, name: str) -> None:
    path = embedded_model()
    if name != "embedded":
        path = float32_copy(tmp_path / "float32.gguf", tied="tied" in name)
    prompt = prompt_of()
    with opened(example, path) as llama, Decoder(path, kv_dtype="f32", threads=1) as decoder:
        worst = 0.0
        ours, theirs = llama.prefill(prompt), decoder.prefill(prompt)  # views: each token's in turn
        for i in range(N + 1):
            worst = max(worst, float(np.abs(ours - theirs).max() / theirs.std()))
            if i < N:
                assert llama.generate_next_token() == decoder.generate_next_token()
        del theirs
    print(f"{name}: {worst:.2g} deviations")
    assert worst <= BOUNDS[name]


def test_dequantized_values_are_exact(example: Any, llama: Any) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(embedded_model()).tensors}
    for name, ours in (
        ("token_embd.weight", llama.embedding),
        ("output.weight", llama.output),
        ("output_norm.weight", llama.last_norm),
        ("blk.3.ffn_down.weight", llama.layers[3]["ffn_down"]),
    ):
        tensor = tensors[name]
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours, theirs.reshape(ours.shape))


def test_shared_buffers_change_no_logit(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, results, peaks = prompt_of(), [], []

    class Shared(um.ForwardScratch):
        def __init__(self, dims: um.ModelDims, *, tape: um.Tape) -> None:
            super().__init__(dims, tape=tape, overlap=True)

    for scratch in (um.ForwardScratch, Shared):
        with monkeypatch.context() as patch:
            patch.setattr(um, "ForwardScratch", scratch)
            with opened(example, embedded_model()) as llama:
                tokens = llama.generate(prompt, N)
                results.append((tokens, llama.buffers.logits.copy()))
                peaks.append(llama.buffers.peak_scratch_bytes)
    (tokens, logits), (tokens_shared, logits_shared) = results
    assert tokens == tokens_shared
    np.testing.assert_allclose(logits_shared, logits, atol=1e-4 * logits.std())
    assert peaks[1] < peaks[0]


# ---- the memory ----


def addresses(llama: Any) -> dict[str, int]:
    named = dict(llama.buffers.addresses())
    for i in range(llama.dims.num_layers):
        for part in ("k", "v"):
            named[f"{part}.{i}"] = llama.kv.address(i, part)
            named[f"view of {part}.{i}"] = llama.kv.layer(i)["kv".index(part)].ctypes.data
    return named


def test_every_address_stays(llama: Any) -> None:
    prompt = prompt_of()
    logits = llama.prefill(prompt)
    before, used = addresses(llama), llama.layout.scratch.used_bytes
    assert len(before) == 14 + 4 * llama.dims.num_layers
    assert logits.ctypes.data == before["logits"]

    steps: list[Callable[[], Any]] = [
        lambda: llama.prefill(prompt),
        llama.generate_next_token,
        lambda: llama.generate(prompt, 3),
        llama.layout.clear_pass,
        llama.generate_next_token,
    ]
    for step in steps:
        step()
        assert (addresses(llama), llama.layout.scratch.used_bytes) == (before, used)


def test_every_value_is_on_its_tape(llama: Any) -> None:
    llama.prefill(prompt_of())
    layout, weights = llama.layout, llama.layout.weights
    assert weights.used_bytes == weights.total_bytes
    for array in (llama.embedding, llama.output, llama.turns, llama.eps, llama.layers[0]["attn_q"]):
        assert weights.owns(array)
    for array in (llama.last_norm, llama.layers[0]["attn_norm"]):  # in the mapped file
        assert not weights.owns(array)
        assert not array.flags.owndata
        assert not array.flags.writeable
    buffers = [getattr(llama.buffers, name) for name in llama.buffers.addresses()]
    for array in (*buffers, llama.number, llama.chosen):
        assert layout.scratch.owns(array)
    assert all(layout.history.owns(part) for part in llama.kv.layer(0))


class _Handler(ctypes.Structure):
    """NumPy's `PyDataMem_Handler`: the four functions that manage the values of arrays.

    https://numpy.org/doc/stable/reference/c-api/data_memory.html
    """

    _malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _calloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
    _realloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", ctypes.c_void_p),
        ("malloc", _malloc),
        ("calloc", _calloc),
        ("realloc", _realloc),
        ("free", ctypes.c_void_p),
    )


class Counting:
    """Counts what NumPy allocates for values, in `sizes`: temporaries and single numbers, too.

    tracemalloc knows the same allocations (``numpy.lib.tracemalloc_domain``), but shows what is
    alive when it is asked, and a temporary is gone by then. Not counted are Python's objects:
    headers of views, integers, frames.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        api = ctypes.pythonapi
        api.PyCapsule_New.restype = ctypes.py_object
        api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
        numpy_c: Any = importlib.import_module("numpy._core._multiarray_umath")
        table = api.PyCapsule_GetPointer(numpy_c._ARRAY_API, None)
        functions = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))
        # Numbers 304 and 305 of NumPy's C API.
        self._set = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(functions[304])
        get = ctypes.PYFUNCTYPE(ctypes.py_object)(functions[305])
        usual = _Handler.from_address(api.PyCapsule_GetPointer(get(), b"mem_handler"))
        assert usual.version == 1

        def counted(take: Any, nbytes_of: Callable[..., int]) -> Any:
            def count(context: int, *sizes: int) -> Any:
                self.sizes.append(nbytes_of(*sizes))
                return take(context, *sizes)

            return count

        self._handler = _Handler(b"counting", 1, usual.context)
        self._handler.malloc = _Handler._malloc(counted(usual.malloc, lambda n: n))
        self._handler.calloc = _Handler._calloc(counted(usual.calloc, lambda n, each: n * each))
        self._handler.realloc = _Handler._realloc(counted(usual.realloc, lambda at, n: n))
        self._handler.free = usual.free
        self._name = ctypes.create_string_buffer(b"mem_handler")
        self._capsule = api.PyCapsule_New(ctypes.addressof(self._handler), self._name, None)

    def __enter__(self) -> Counting:
        self._usual = self._set(self._capsule)
        return self

    def __exit__(self, *_: object) -> None:
        self._set(self._usual)


@pytest.fixture(scope="session")
def counting() -> Counting:
    return Counting()


def test_allocations_are_counted(counting: Counting) -> None:
    row, out = np.ones(1000, np.float32), np.ones(1000, np.float32)
    with counting as counted:
        counted.sizes.clear()
        np.add(row, row, out=out)
        assert counted.sizes == []
        (row + row).sum(out=out[0, ...])  # a short-lived temporary
        assert 4000 in counted.sizes
        counted.sizes.clear()
        np.multiply(row, 0.5, out=out)  # a number becomes an array
        assert counted.sizes
        assert max(counted.sizes) <= 8


@pytest.mark.usefixtures("no_collection")
def test_nothing_is_allocated_after_start_up(llama: Any, counting: Counting) -> None:
    prompt = prompt_of()
    llama.generate(prompt, 2)
    layout = llama.layout
    before = counters(), layout.stat(), layout.scratch.n_takes, layout.history.n_takes
    with counting as counted:
        counted.sizes.clear()
        llama.prefill(prompt)
        for _ in range(N):
            llama.generate_next_token()
        llama.generate(prompt, N)
    assert counted.sizes == []
    assert llama.kv.seq_len == len(prompt) + N  # a conversation begins anew
    assert before == (counters(), layout.stat(), layout.scratch.n_takes, layout.history.n_takes)


# ---- what it refuses ----


def test_what_is_refused_changes_nothing(llama: Any) -> None:
    with pytest.raises(RuntimeError, match="prefill tokens first"):
        llama.generate_next_token()
    prompt = prompt_of()
    logits = llama.prefill(prompt).copy()
    vocab, limit = llama.dims.vocab_size, llama.dims.max_seq_len
    for tokens in ([], [5, -1], [5, vocab]):
        with pytest.raises(ValueError, match="expected ids below 1024"):
            llama.prefill(tokens)
    with pytest.raises(um.CacheFull) as caught:
        llama.prefill([5] * limit)
    full = caught.value
    assert (full.limit, full.used, full.asked) == (limit, len(prompt), limit)
    assert llama.kv.seq_len == len(prompt)
    np.testing.assert_array_equal(llama.buffers.logits, logits)


def test_all_of_the_context_can_be_used(llama: Any) -> None:
    limit = llama.dims.max_seq_len
    llama.prefill([1 + i % 1000 for i in range(limit - 1)])
    llama.generate_next_token()
    with pytest.raises(um.CacheFull, match="0 more tokens fit"):
        llama.generate_next_token()
    assert llama.kv.seq_len == limit


@pytest.mark.parametrize(("arch", "kind"), [("qwen2", "f32"), ("llama", "f16")])
def test_other_models_are_refused(example: Any, tmp_path: Path, arch: str, kind: str) -> None:
    path = write_model(tmp_path / "other.gguf", arch, TINY, kind)
    with (
        pytest.raises(ValueError, match=r"expected a llama of f32 and q8_0.*other\.gguf"),
        opened(example, path),
    ):
        pass


# ---- the text ----


def test_it_is_short_and_tells_a_story(tmp_path: Path) -> None:
    assert EXAMPLE.read_text().count("\n") <= 150
    command = [sys.executable, "-W", "error", str(EXAMPLE)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    story, figures = done.stdout.strip().split("\n")
    assert story.startswith("Once upon a time, there was a small girl named")
    assert figures == "10,368 bytes of scratch; no buffer moved: True"
