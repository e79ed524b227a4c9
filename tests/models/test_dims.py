"""Dimensions: checked, and read from a model's metadata."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files import gguf_files as gf
from unimem.weights.gguf import tensor_type

DIMS = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)


def test_the_names_and_what_is_derived() -> None:
    names = tuple(
        """
        hidden_size intermediate_size num_attention_heads num_kv_heads head_dim vocab_size
        num_layers max_seq_len quantized max_batch_size
    """.split()
    )
    values = (64, 172, 8, 4, 8, 512, 5, 512, False, 1)
    assert asdict(DIMS) == dict(zip(names, values, strict=True))
    assert (DIMS.q_size, DIMS.kv_size, DIMS.qkv_size) == (64, 32, 128)
    assert replace(DIMS, num_layers=6) != DIMS
    assert hash(replace(DIMS)) == hash(DIMS)
    with pytest.raises(FrozenInstanceError):
        DIMS.hidden_size = 1  # type: ignore[misc]


OUT_OF_RANGE: list[tuple[str, Any]] = [
    *((field.name, 0) for field in fields(um.ModelDims)),
    ("intermediate_size", -1),
    ("vocab_size", 2**31),
    ("num_layers", 1.0),
    ("max_seq_len", None),
    ("max_batch_size", True),
    ("hidden_size", np.True_),
    ("quantized", 1),
    ("num_kv_heads", 3),
    ("head_dim", 7),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must|multiple of {name}"):
        replace(DIMS, **{name: value})


def test_numpys_integers_are_integers() -> None:
    values: Any = [np.int64(value) for value in (64, 172, 8, 4, 8, 512, 5, 512)]
    same = um.ModelDims(*values)
    assert same == DIMS
    assert {type(getattr(same, field.name)) for field in fields(same)} == {int, bool}


MOST = 2**31 - 1


@pytest.mark.parametrize(
    ("product", "large"),
    [
        ("max_batch_size * hidden_size", {"max_batch_size": MOST, "hidden_size": 2**30 + 2}),
        ("max_batch_size * qkv_size", {"max_batch_size": MOST, "head_dim": 2**30}),
        (
            "max_batch_size * 2 * intermediate_size",
            {"max_batch_size": 2**30, "intermediate_size": 2**30},
        ),
        ("max_batch_size * vocab_size", {"max_batch_size": MOST, "vocab_size": MOST}),
        ("q_size * 32", {"num_attention_heads": 2**26, "head_dim": 2**30}),
        (
            "hidden_size * 2 * intermediate_size",
            {"hidden_size": 2**30, "intermediate_size": 2**30, "quantized": True},
        ),
        (
            "2 * num_layers * max_batch_size * max_seq_len * kv_size",
            {"num_layers": 2**15, "max_batch_size": 2**15, "max_seq_len": 2**30 - 1},
        ),
    ],
)
def test_products_that_do_not_fit(product: str, large: dict[str, Any]) -> None:
    one = um.ModelDims(1, 1, 1, 1, 2, 1, 1, 1)
    with pytest.raises(ValueError, match=r"bytes, but a size must be below 2\*\*63") as caught:
        replace(one, **large)
    assert str(caught.value).startswith(f"{product} values of 4 bytes are ")


def test_products_that_just_fit() -> None:
    # 4 * 2**30 * 2 * 2**30 bytes are 2**63.
    fits = um.ModelDims(2**30, 2**30 - 1, 1, 1, 2, 1, 1, 1, quantized=True)
    with pytest.raises(ValueError, match=f"are {2**63} bytes"):
        replace(fits, intermediate_size=2**30)
    # Only weights that are quantized are dequantized.
    assert replace(fits, intermediate_size=2**30, quantized=False).hidden_size == 2**30


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_from_weights(arch: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
    from support.models.make import small, write_model

    shape = small(layers=2, head_dim=48 if arch in ("qwen3", "gemma3") else None)
    for kind in ("f16", "q8_0"):
        path = write_model(tmp_path / f"{kind}.gguf", arch, shape, kind)
        with um.open_weights(path) as weights:
            dims = um.ModelDims.from_weights(weights)
        expected = um.ModelDims(256, 768, 8, 2, shape.head, 1024, 2, 1024)
        assert dims == replace(expected, quantized=kind == "q8_0")


def gguf(arch: str, *layers: str, kind: int = gf.F32, **keys: int | list[int]) -> bytes:
    """A model with a token embedding and, in each layer, small tensors of these names.

    Keys are metadata, with "__" for a dot; a list is written as an array. The tensors of layers are
    of a kind.
    """
    counts: dict[str, int | list[int]] = {
        **{"block_count": 2, "embedding_length": 32, "context_length": 128},
        **{"attention__head_count": 4, "attention__head_count_kv": 2},
        **keys,
    }
    entries: list[gf.Part] = [gf.kv("general.architecture", gf.STRING, gf.string(arch))]
    for name, n in counts.items():
        key = f"{arch}.{name.replace('__', '.')}"
        if isinstance(n, list):
            numbers = gf.values(gf.UINT32, n)
            entries.append(gf.kv(key, gf.ARRAY, gf.array(gf.UINT32, len(n), numbers)))
        else:
            entries.append(gf.kv(key, gf.UINT32, gf.u32(n)))
    names = [f"blk.{i}.{name}" for i in range(2) for name in layers]
    tensors: list[gf.Part] = [gf.tensor("token_embd.weight", (32, 2), gf.F32, 0)]
    tensors += [gf.tensor(name, (64,), kind, 256 + 512 * i) for i, name in enumerate(names)]
    _, values, block_bytes = tensor_type(kind)
    nbytes = 256 + 512 * (len(names) - 1) + 64 // values * block_bytes if names else 256
    return gf.with_data(gf.head(len(tensors), len(entries)), *entries, *tensors, nbytes=nbytes)[0]


def dims_of(path: Path, raw: bytes) -> um.ModelDims:
    path.write_bytes(raw)
    with um.open_weights(path) as weights:
        return um.ModelDims.from_weights(weights)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("f32", 0),
        ("f16", 1),
        ("bf16", 30),
        ("f64", 28),
        ("i8", 24),
        ("i16", 25),
        ("i32", 26),
        ("i64", 27),
        ("q8_0", 8),
        ("mxfp4", 39),
        ("nvfp4", 40),
    ],
)
def test_what_counts_as_quantized(name: str, kind: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    dims = dims_of(path, gguf("llama", "ffn_up.weight", kind=kind, feed_forward_length=50))
    with um.open_weights(path) as weights:
        assert weights.by_type().keys() == {"f32", name}
    assert dims.quantized == (name in ("q8_0", "mxfp4", "nvfp4"))


EXPERTS = ("ffn_up_exps.weight", "ffn_gate_exps.weight", "ffn_down_exps.weight")


def keys_of(
    dense: int | None = None,
    expert: int | None = None,
    shared: int | None = None,
    *,
    n: tuple[int, int] | None = (8, 2),
) -> dict[str, Any]:
    """Metadata: the feed-forward lengths, and how many experts there are and are used."""
    keys = {
        **{"feed_forward_length": dense, "expert_feed_forward_length": expert},
        "expert_shared_feed_forward_length": shared,
        **dict(zip(("expert_count", "expert_used_count"), n or (), strict=False)),
    }
    return {name: value for name, value in keys.items() if value is not None}


# The figures of published models.
MIXTURES: dict[str, tuple[str, dict[str, Any], int]] = {
    "Mixtral 8x7B": ("llama", keys_of(14336), 2 * 14336),
    "Mixtral, an expert width that llama.cpp does not read": ("llama", keys_of(100, 7), 200),
    "Qwen1.5 MoE A2.7B, as first converted": ("qwen2moe", keys_of(5632, n=(60, 4)), 5632),
    "Qwen1.5 MoE A2.7B": ("qwen2moe", keys_of(5632, 1408, 5632, n=(60, 4)), 5632),
    "Qwen2 57B A14B": ("qwen2moe", keys_of(18944, 2560, 20480, n=(64, 8)), 20480),
    "a wide shared expert": ("qwen2moe", keys_of(None, 10, 50), 50),
    "a shared expert as wide as the feed-forward length": ("qwen2moe", keys_of(60, 10), 60),
    "Qwen3 30B A3B": ("qwen3moe", keys_of(6144, 768, n=(128, 8)), 8 * 768),
    "gpt-oss 20B": ("gpt-oss", keys_of(2880, 2880, n=(32, 4)), 4 * 2880),
    "Qwen3 with half of its experts": ("qwen3moe", keys_of(6144, 768, n=(128, 4)), 4 * 768),
    "no width of an expert": ("qwen3moe", keys_of(1001, 0, n=(8, 4)), 1000),
    "no feed-forward length": ("qwen3moe", keys_of(None, 768, n=(128, 8)), 6144),
}


@pytest.mark.parametrize(("arch", "keys", "expected"), MIXTURES.values(), ids=MIXTURES)
def test_mixtures_of_experts(
    arch: str, keys: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    dims = dims_of(tmp_path / "m.gguf", gguf(arch, *EXPERTS, **keys))
    assert dims == um.ModelDims(32, expected, 4, 2, 8, 2, 2, 128)


def test_dense_layers_count(tmp_path: Path) -> None:
    mixture = gguf("qwen3moe", *EXPERTS, "ffn_up.weight", **keys_of(18944, 768, n=(128, 8)))
    assert dims_of(tmp_path / "m.gguf", mixture).intermediate_size == 18944
    dense = gguf("llama", "ffn_up.weight", feed_forward_length=50, expert_count=0)
    assert dims_of(tmp_path / "m.gguf", dense).intermediate_size == 50


ABOVE_1 = "intermediate_size must be from 1"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no count": ("qwen3moe", {"expert_used_count": 2}, r"no 'qwen3moe\.expert_count'"),
    "no experts": ("qwen2moe", {"expert_count": 0}, "'qwen2moe.expert_count' must be an int"),
    "more than 32 bits": (
        "qwen3moe",
        {"expert_count": 2**32 - 1},
        r"an integer above 0 and below 2\*\*31, .*, not 4294967295: convert the model again",
    ),
    "none used": ("llama", {"expert_count": 8}, r"no 'llama\.expert_used_count'"),
    "too many used": ("llama", keys_of(n=(8, 9)), "is 9, more than .*expert_count', 8"),
    "no width": ("qwen3moe", keys_of(), "no 'qwen3moe.feed_forward"),
    "no width for each": ("qwen3moe", keys_of(7, n=(9, 8)), ABOVE_1),
    "too wide": ("qwen3moe", keys_of(None, 2**30, n=(9, 8)), ABOVE_1),
    **{
        f"{arch}: an array for {name}": (
            arch,
            keys_of(50) | {name: [8, 8]},
            rf"'{arch}\.{name}' must be an integer .*, not array",
        )
        for arch, name in (
            ("llama", "expert_count"),
            ("llama", "expert_shared_feed_forward_length"),
            ("qwen3moe", "expert_count"),
            ("qwen3moe", "expert_feed_forward_length"),
        )
    },
    "another architecture": ("gpt2", {}, r"gpt2.*llama, qwen2, qwen3, gemma3, qwen3moe, gpt-oss"),
}


@pytest.mark.parametrize(("arch", "keys", "what"), REFUSED.values(), ids=REFUSED)
def test_models_that_are_refused(
    arch: str, keys: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=what):
        dims_of(tmp_path / "m.gguf", gguf(arch, *EXPERTS, **keys))


def test_an_architecture_that_is_an_array() -> None:
    weights: Any = SimpleNamespace(metadata={"general.architecture": np.array([1, 2])})
    with pytest.raises(ValueError, match=r"architecture array\(\[1, 2\]\) are not known"):
        um.ModelDims.from_weights(weights)


@pytest.mark.parametrize(
    "name", ["feed_forward_length", "attention.head_count", "attention.head_count_kv"]
)
def test_layers_that_differ_are_refused_by_name(name: str, tmp_path: Path) -> None:
    def dims(counts: list[int]) -> um.ModelDims:
        keys: dict[str, Any] = {"feed_forward_length": 16, name.replace(".", "__"): counts}
        return dims_of(tmp_path / "m.gguf", gguf("llama", **keys))

    assert dims([4, 4]).num_layers == 2
    for counts in ([4, 2], [4], [4, 4, 4], []):
        with pytest.raises(ValueError, match=f"'llama.{name}' differs between layers"):
            dims(counts)


@pytest.mark.parametrize("arch", ["qwen2moe", "qwen3moe"])
def test_a_mixture_is_planned_as_its_file_is(arch: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(arch, *EXPERTS, **keys_of(64, 16)))
    plan = um.plan(path, ctx=100, engine="unimem")
    rows = {row.category: row.nbytes for row in plan.rows}
    with um.open_weights(path) as weights:
        assert rows["weights:f32"] == weights.nbytes
    in_file = rows["weights:f32"] + rows["weights:padding"]
    assert in_file == -(-path.stat().st_size // 4096) * 4096
    assert plan.history_bytes == um.KVCache.storage_bytes(2, 2, 8, 100)
    # The engine runs one of them.
    assert any("mixture of experts" in text for text in plan.unknown) == (arch == "qwen2moe")


@pytest.mark.parametrize("arch", ["llama", "qwen2moe"])
def test_the_engine_refuses_mixtures_by_name(arch: str, tmp_path: Path) -> None:
    pytest.importorskip("unimem_ggml", reason="unimem-ggml (extra run) is not installed")
    from unimem.engine import Decoder, UnsupportedModel

    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(arch, *EXPERTS, expert_count=8, expert_used_count=2))
    what = "mixtures of experts" if arch == "llama" else f"'{arch}' is not supported"
    with pytest.raises(UnsupportedModel, match=what):
        Decoder(path)


def test_more_heads_than_values(tmp_path: Path) -> None:
    """The file has no key_length that could be wrong."""
    keys = {"feed_forward_length": 50, "attention__head_count": 64}
    with pytest.raises(ValueError, match=r"head_count' is 64, more than the 32 of 'llama.embeddi"):
        dims_of(tmp_path / "m.gguf", gguf("llama", **keys))
    dims = dims_of(tmp_path / "m.gguf", gguf("llama", **keys, attention__key_length=2))
    assert (dims.hidden_size, dims.q_size) == (32, 128)
