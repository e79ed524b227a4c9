"""What the layers of each family keep, held against llama.cpp's own caches and transformers."""

from __future__ import annotations

import json
import mmap
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.models.family_models import FAMILIES, FamilyModel, write_family
from support.project.checkout import ROOT
from support.terminal.screens import show
from unimem.models import families, shapes
from unimem.models.dims import ArchMetadata
from unimem.models.families import KeptLayer, KeptRows, KeptState
from unimem.models.fields import MetadataFields
from unimem.planning.needs import PREFILL_BATCH


def kept(model: FamilyModel) -> tuple[KeptLayer, ...]:
    """Return the layers of a family's model."""
    own = {"block_count": model.layers, "embedding_length": model.hidden} | model.keys
    meta = ArchMetadata({f"{model.arch}.{key}": value for key, value in own.items()}, model.arch)
    family = families.of_architecture(model.arch)
    assert family is not None
    return families.layers_of(family, MetadataFields(meta, model.arch))


@pytest.mark.parametrize(
    ("name", "own", "shown"),
    [
        # Blocks behind the last with rows of its own show those of the last one like them.
        ("gemma3n", 20, {None: 19, 512: 18}),
        ("gemma4", 6, {None: 5, 512: 4}),
    ],
)
def test_later_layers_show_the_rows_of_others(
    name: str, own: int, shown: dict[int | None, int]
) -> None:
    for layer in kept(FAMILIES[name]):
        assert isinstance(layer, KeptRows)
        assert layer.share_of == (None if layer.block < own else shown[layer.window])


def test_what_is_planned_is_what_a_cache_takes(tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", FAMILIES["gemma3"])
    for ctx in (700, 4000):  # within the window, and past it
        plan = um.plan(path, ctx=ctx, pages="4k", kv_dtype="q8_0")
        layers = plan.cache_layers()
        assert [getattr(layer, "window", None) for layer in layers[:6]] == [1024] * 5 + [None]
        with um.KVCache(
            layers=layers,
            max_seq_len=ctx,
            dtype="q8_0",
            spare_rows=PREFILL_BATCH if ctx > 1024 else 0,
            pages="4k",
        ) as kv:
            mapped = sum(
                row.nbytes for row in um.report().rows if row.category == "kv" and row.nbytes
            )
            # The engine has a tape of a page beside its rings.
            assert plan["kv"].nbytes == mapped + (mmap.PAGESIZE if ctx > 1024 else 0)
            assert kv.n_layers == 14
    # One window for all keeps less, all tokens in all layers more.
    whole = um.KVCache.storage_bytes(14, 4, 256, 32_768)
    assert um.plan(path, ctx=32_768)["kv"].nbytes < 0.25 * whole


def test_the_commands_say_what_layers_keep(tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", FAMILIES["falcon-h1"])
    told = r"layers +4 keep all tokens, 8 states of 12\.2 MiB in all"
    for words in (["plan", path], ["inspect", path]):
        code, out, _ = show(*words)
        assert code == 0
        assert re.search(rf"^{told}$", out, re.M), out
        code, out, _ = show(*words, "--json")
        layers = json.loads(out)["layers"]
        assert [(one["block"], one["kind"]) for one in layers[:4]] == [
            *((0, kind) for kind in ("kv", "state", "state")), (1, "kv"),
        ]  # fmt: skip
        assert layers[2]["shape"] == [48, 64, 256]


@pytest.mark.parametrize("name", ["falcon-h1", "deepseek2"])
def test_states_and_compressed_keys_are_layers_of_a_cache(name: str, tmp_path: Path) -> None:
    plan = um.plan(write_family(tmp_path / "m.gguf", FAMILIES[name]), ctx=512, pages="4k")
    layers = plan.cache_layers()
    with um.KVCache(layers=layers, max_seq_len=512, pages="4k") as kv:
        assert kv.n_layers == len(plan.layers)
        assert kv.capacity_bytes == um.KVCache.storage_bytes(layers=layers, max_seq_len=512)


@pytest.mark.parametrize(
    ("name", "keys", "window"),
    [("deepseek2", {}, 300), ("gemma4", {"attention.value_length_swa": 128}, None)],
)
def test_rings_of_other_heads_of_v_are_planned(
    tmp_path: Path, name: str, keys: dict[str, Any], window: int | None
) -> None:
    family = replace(FAMILIES[name], keys=FAMILIES[name].keys | keys)
    path = write_family(tmp_path / "m.gguf", family)
    plan = um.plan(path, ctx=1000, pages="4k", window=window, kv_dtype="q8_0", engine="unimem")
    layers: Any = plan.cache_layers()
    if window is not None:
        layers = [replace(layer, window=window) for layer in layers]
    rings = [layer for layer in layers if layer.window is not None]
    assert rings
    assert all(layer.v_head_dim != layer.head_dim for layer in rings)
    options: dict[str, Any] = {"dtype": "q8_0", "spare_rows": PREFILL_BATCH, "pages": "4k"}
    with um.KVCache(layers=layers, max_seq_len=1000, **options):
        assert um.report()["kv"].nbytes == plan["kv"].nbytes


def test_a_window_of_ones_own_is_for_layers_that_keep_more(tmp_path: Path) -> None:
    path = write_family(tmp_path / "m.gguf", FAMILIES["gemma3"])
    sizes = [
        um.plan(path, ctx=8192, pages="4k", window=window)["kv"].nbytes
        for window in (512, 1024, 2048, None)
    ]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4


def test_the_page_has_every_family() -> None:
    page = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    table = page[page.index("| family | GGUF |") : page.index("- A `config.json` may list")]
    named = set(re.findall(r"`([\w-]+)`", table))
    own = {name for one in families.FAMILIES for name in one.architectures}
    # Of model types, those whose layers all keep all tokens are in the table of the code.
    own |= {name for one in families.FAMILIES[4:] for name in one.model_types}
    assert own - named == set()


# ---- config.json ------------------------------------------------------------------------------

# What the config.json of published models says of their layers, each with the model of `FAMILIES`
# that llama.cpp holds, and whose layers are the same but for their number. The last ones are small.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "google/gemma-2-2b": (
        "gemma2",
        {"model_type": "gemma2", "hidden_size": 2304, "num_attention_heads": 8, "head_dim": 256,
         "num_key_value_heads": 4, "num_hidden_layers": 26, "sliding_window": 4096},
    ),
    "google/gemma-3-4b-it": (
        "gemma3",
        {"model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "sliding_window": 1024}},
    ),
    "google/gemma-3n-E4B-it": (
        "gemma3n",
        {"model_type": "gemma3n", "text_config": {
            "model_type": "gemma3n_text", "hidden_size": 2048, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 35,
            "num_kv_shared_layers": 15, "sliding_window": 512,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7}},
    ),
    "openai/gpt-oss-20b": (
        "gpt-oss",
        {"model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64,
         "num_key_value_heads": 8, "num_hidden_layers": 24, "sliding_window": 128,
         "layer_types": ["sliding_attention", "full_attention"] * 12},
    ),
    "meta-llama/Llama-4-Scout-17B-16E": (
        "llama4",
        {"model_type": "llama4", "text_config": {
            "model_type": "llama4_text", "hidden_size": 5120, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 48,
            "attention_chunk_size": 8192}},
    ),
    "Qwen/Qwen3-30B-A3B": (
        "qwen3moe",
        {"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128,
         "num_key_value_heads": 4, "num_hidden_layers": 48, "sliding_window": None,
         "use_sliding_window": False, "max_window_layers": 48},
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        "qwen3next",
        {"model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16,
         "num_key_value_heads": 2, "head_dim": 256, "num_hidden_layers": 48,
         "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
    ),
    "deepseek-ai/DeepSeek-V2-Lite": (
        "deepseek2",
        {"model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16,
         "num_key_value_heads": 16, "num_hidden_layers": 27, "kv_lora_rank": 512,
         "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    ),
    "state-spaces/mamba-130m-hf": (
        "mamba",
        {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16,
         "conv_kernel": 4, "expand": 2, "intermediate_size": 1536, "time_step_rank": 48},
    ),
    "tiiuae/Falcon-H1-1.5B-Base": (
        "falcon-h1",
        {"model_type": "falcon_h1", "hidden_size": 2048, "num_attention_heads": 8, "head_dim": 128,
         "num_key_value_heads": 2, "num_hidden_layers": 24, "mamba_d_ssm": 3072,
         "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_n_groups": 1,
         "mamba_d_conv": 4, "mamba_expand": 2},
    ),
    "CohereForAI/c4ai-command-r7b-12-2024": (
        "cohere2",
        {"model_type": "cohere2", "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8, "num_hidden_layers": 32, "sliding_window": 4096,
         "sliding_window_pattern": 4},
    ),
    "olmo3": (
        "olmo2",
        {"model_type": "olmo3", "hidden_size": 1024, "num_attention_heads": 8,
         "num_key_value_heads": 8, "num_hidden_layers": 8, "sliding_window": 4096},
    ),
    "mamba2": (
        "mamba2",
        {"model_type": "mamba2", "hidden_size": 768, "num_heads": 24, "head_dim": 64, "expand": 2,
         "state_size": 128, "n_groups": 1, "conv_kernel": 4, "num_hidden_layers": 4},
    ),
    "granitemoehybrid": (
        "granitehybrid",
        {"model_type": "granitemoehybrid", "hidden_size": 768, "num_attention_heads": 12,
         "num_key_value_heads": 4, "num_hidden_layers": 4, "mamba_d_conv": 4, "mamba_d_state": 128,
         "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_d_head": 32, "mamba_expand": 2,
         "layer_types": ["mamba", "attention"] * 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_says_the_same_as_metadata(name: str) -> None:
    family, config = CONFIGS[name]
    n = config.get("text_config", config)["num_hidden_layers"]
    shape = shapes.from_config(config, "")
    assert shape.layers == kept(replace(FAMILIES[family], layers=n))
    assert {one.block for one in shape.layers} == set(range(n))
    assert not any(text.startswith("the KV cache:") for text in shape.unknown)


# What transformers slides over and llama.cpp keeps whole.
SLIDING: dict[str, dict[str, Any]] = {
    "mistralai/Mistral-7B-v0.1": {
        "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 32, "sliding_window": 4096,
    },
    "mistralai/Mistral-7B-v0.3": {
        "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_hidden_layers": 32, "sliding_window": None,
    },
    "microsoft/Phi-3-mini-4k-instruct": {
        "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32,
        "num_key_value_heads": 32, "num_hidden_layers": 32, "sliding_window": 2047,
    },
    "microsoft/phi-4": {
        "model_type": "phi3", "hidden_size": 5120, "num_attention_heads": 40,
        "num_key_value_heads": 10, "num_hidden_layers": 40, "sliding_window": None,
    },
    "qwen2 that slides": {
        "model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28,
        "num_key_value_heads": 4, "num_hidden_layers": 28, "sliding_window": 32768,
        "use_sliding_window": True, "max_window_layers": 21,
    },
}  # fmt: skip
LISTED = {name: config for name, (_, config) in CONFIGS.items()} | SLIDING


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTED)
def test_transformers_keeps_the_same(name: str) -> None:
    """As its configuration lists the layers, from which `DynamicCache` makes its own."""
    # Without it, `transformers` is the folder of that name beside this one.
    pytest.importorskip("transformers.cache_utils", reason="pip install '.[transformers]'")
    import transformers

    given = dict(LISTED[name])
    made = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    text = made.get_text_config(decoder=True)
    layers = shapes.from_config(LISTED[name], "").layers
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    types = getattr(text, "layer_types", None)
    if types is None:  # so does `DynamicCache`
        types = ["sliding_attention" if window else "full_attention"] * text.num_hidden_layers
    assert len(types) == text.num_hidden_layers == len({one.block for one in layers})
    shared = getattr(text, "num_kv_shared_layers", 0)
    for i, kind in enumerate(types):
        rows = [one for one in layers if one.block == i and isinstance(one, KeptRows)]
        states = [one for one in layers if one.block == i and isinstance(one, KeptState)]
        is_state = kind in ("linear_attention", "mamba", "mamba2", "hybrid")
        assert bool(states) == is_state, kind
        assert bool(rows) == (not is_state or kind == "hybrid"), kind
        for one in rows:
            slides = kind in ("sliding_attention", "chunked_attention")
            assert one.window == (window if slides else None)
            assert (one.share_of is not None) == (i >= len(types) - shared)
            if one.v_size:
                assert one.n_kv_heads == text.num_key_value_heads
                heads = text.num_attention_heads
                assert one.k_size == (getattr(text, "head_dim", 0) or text.hidden_size // heads)
