"""Rotated heads: the same attention, and the rows of llama.cpp."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.models import llama_cpp
from support.models.decoders import logits_of, tokens
from support.models.make import Shape, small, write_model
from support.project.checkout import ROOT
from unimem.engine import Decoder, UnsupportedModel
from unimem.errors import SnapshotError

import gguf  # isort: skip  # `decoders` skips these tests without it

PROMPT = tokens(150, first=259)


def shape_of(head_dim: int, layers: int = 2) -> Shape:
    return small(layers=layers, heads=4, kv_heads=2, inner=256, head_dim=head_dim)


def write(path: Path, head_dim: int, arch: str = "llama", layers: int = 2) -> Path:
    return write_model(path, arch, shape_of(head_dim, layers), "f32")


def write_whole_numbers(path: Path, head_dim: int) -> Path:
    """Write a model of one layer whose keys and values are whole numbers.

    Their sums, divided by a root that is a power of two, are exact in any order.
    """
    write_model(
        path, shape=shape_of(head_dim, layers=1), kind="f32", rope_factors=True,
        metadata={"attention.layer_norm_rms_epsilon": 1e-12},
    )  # fmt: skip
    rng = np.random.default_rng(head_dim)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name == "token_embd.weight":
            tensor.data[:] = rng.choice([-1, 1], tensor.data.shape)
        elif "norm" in tensor.name:
            tensor.data[:] = 1
        elif tensor.name == "rope_freqs.weight":
            tensor.data[:] = 1e30  # no angle: keys are not rotated
        elif "attn_k" in tensor.name or "attn_v" in tensor.name:
            tensor.data[:] = rng.integers(-2, 3, tensor.data.shape)
    return path


def rows_of(kv: um.KVCache) -> list[NDArray[Any]]:
    """K and V of the first layer: uint8 [tokens, bytes]."""
    parts = (part[0].swapaxes(0, 1) for part in kv.layer(0))
    return [np.ascontiguousarray(part).view("u1").reshape(len(part), -1) for part in parts]


# ---- llama.cpp ---------------------------------------------------------------------------


def rows_of_llama_cpp(
    path: Path, head_dim: int
) -> tuple[list[NDArray[Any]], dict[str, tuple[NDArray[Any], NDArray[Any]]]]:
    """Return K and V of the prompt from the model, and in quantized caches."""
    n = 2 * head_dim
    sizes = {"f32": 4 * n, "q8_0": n // 32 * 34, "q4_0": n // 32 * 18}
    (plain, *quantized) = llama_cpp.rows(path, PROMPT, list(sizes), list(sizes.values()))
    given = [rows.view("f4").reshape(len(PROMPT), 2, head_dim) for rows in plain]
    return given, dict(zip(list(sizes)[1:], quantized, strict=True))


def appended(head_dim: int, dtype: str, given: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return the rows of K and V in a cache."""
    with um.KVCache(1, 2, head_dim, len(PROMPT), dtype=dtype, rotate=True) as kv:
        kv.append(0, *given)
        return rows_of(kv)


@pytest.mark.parametrize("head_dim", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_rows_are_those_of_llama_cpp(head_dim: int, tmp_path: Path) -> None:
    """They are equal byte for byte if no rounding depends on the order of sums."""
    path = write_whole_numbers(tmp_path / "m.gguf", head_dim)
    given, quantized = rows_of_llama_cpp(path, head_dim)
    assert all((rows == rows.round()).mean() > 0.9 for rows in given)
    for kv_dtype, expected in quantized.items():
        with Decoder(path, ctx=len(PROMPT), threads=1, kv_dtype=kv_dtype) as decoder:
            decoder.prefill(PROMPT)
            for ours, theirs in zip(rows_of(decoder.kv), expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    rows = appended(head_dim, "q4_0", given)
    for ours, theirs in zip(rows, quantized["q4_0"], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_rows_differ_where_the_last_bit_of_a_sum_does(head_dim: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", head_dim, layers=1)
    given, quantized = rows_of_llama_cpp(path, head_dim)
    for dtype, expected in quantized.items():
        for ours, theirs in zip(appended(head_dim, dtype, given), expected, strict=True):
            n = np.count_nonzero(ours != theirs)
            print(f"heads of {head_dim}, {dtype}: {n} of {ours.size} bytes differ")
            assert n <= 1e-3 * ours.size


# ---- attention ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "head_dim", "options"),
    [("llama", 64, {}), ("qwen2", 192, {"window": 50}), ("gemma3", 128, {}), ("qwen3moe", 64, {})],
)
def test_attention_makes_the_same_of_rotated_heads(
    arch: str, head_dim: int, options: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "m.gguf", head_dim, arch)
    logits, rows = [], []
    for rotate, threads in ((False, 1), (True, 1), (True, 3)):
        with Decoder(
            path, ctx=300, threads=threads, kv_dtype="f32", rotate=rotate, **options
        ) as decoder:
            logits.append(logits_of(decoder, PROMPT, 9)[1])
            rows.append(rows_of(decoder.kv))
            assert decoder.report().facts["rotate"] is decoder.kv.rotate is rotate
    plain, turned, with_threads = logits
    assert 0 < np.abs(turned - plain).max() <= 1e-4 * plain.std()
    np.testing.assert_array_equal(with_threads, turned)
    # A graph rotates to the same bits as `append`.
    given = [part.view("f4").reshape(len(part), 2, head_dim) for part in rows[0]]
    parts: list[Literal["k", "v"]] = ["k", "v"]
    for part, heads, turned_rows in zip(parts, given, rows[1], strict=True):
        expected = um.rotate_heads(heads, part)
        np.testing.assert_array_equal(turned_rows, expected.view("u1").reshape(len(heads), -1))


def test_outliers_cost_a_rotated_cache_less(tmp_path: Path) -> None:
    """Biases give keys some large channels, as in qwen2."""
    path = write_model(tmp_path / "m.gguf", "qwen2", shape_of(64), "f32")
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.endswith("attn_k.bias"):
            tensor.data[::16] = 20
    logits = []
    for options in (
        {"kv_dtype": "f16"},
        {"kv_dtype": "q4_0", "rotate": False},
        {"kv_dtype": "q4_0"},
    ):
        with Decoder(path, ctx=300, threads=1, **options) as decoder:
            logits.append(logits_of(decoder, PROMPT, 1)[1])
    exact, plain, rotated = logits
    assert np.linalg.norm(rotated - exact) < 0.7 * np.linalg.norm(plain - exact)


# ---- the option --------------------------------------------------------------------------


def test_quantized_caches_rotate_by_default(tmp_path: Path) -> None:
    wide, narrow = (write(tmp_path / f"{n}.gguf", n) for n in (64, 96))
    for path, kv_dtype, rotate in (
        (wide, "f16", False),
        (wide, "bf16", False),
        (wide, "q8_0", True),
        (wide, "q5_1", True),
        (wide, "f16,q4_0", True),
        (wide, "q8_0,q4_0", True),
        (narrow, "q8_0", False),
    ):
        with Decoder(path, ctx=16, threads=1, kv_dtype=kv_dtype) as decoder:
            assert decoder.kv.rotate is rotate


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    narrow = write(tmp_path / "narrow.gguf", 96)
    with pytest.raises(
        UnsupportedModel, match=r"rotate: .* multiple of 64 .* have 96: leave it out"
    ):
        Decoder(narrow, ctx=16, rotate=True)
    with pytest.raises(ValueError, match="rotate: expected False or True, got 'no'"):
        Decoder(narrow, ctx=16, rotate="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_session_of_other_heads_is_refused(arch: str, tmp_path: Path) -> None:
    path, saved = write(tmp_path / "m.gguf", 64, arch), tmp_path / "talk.session"
    options: dict[str, Any] = {"ctx": 300, "threads": 1, "kv_dtype": "q8_0"}
    with Decoder(path, **options) as decoder:
        decoder.prefill(PROMPT)
        decoder.save_session(saved)
        logits = decoder.logits.copy()
    with Decoder(path, rotate=False, **options) as other:
        with pytest.raises(SnapshotError, match="with rotate=True, and this one has False"):
            other.resume(saved)
        assert other.kv.is_empty
    with Decoder(path, **options) as again:
        again.resume(saved)
        assert np.abs(again.logits - logits).max() <= 0.01 * logits.std()


def test_the_example_compares_types(tmp_path: Path) -> None:
    path, text = write(tmp_path / "m.gguf", 64), tmp_path / "text"
    text.write_text("Once upon a time. " * 4)
    example = ROOT / "examples" / "kv_types.py"
    command = [sys.executable, str(example), str(path), str(text), "-n", "30"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    _, _, *rows = done.stdout.splitlines()
    names = [row[:16].strip() for row in rows]
    assert names == ["f16", "q8_0", "q8_0 rotated", "q4_0", "q4_0 rotated"]
    off = [float(row[16:].split()[0]) for row in rows]
    assert off[0] == 0 < min(off[1:])
