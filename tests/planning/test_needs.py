"""Planned needs of a block, of any architecture's cache, and of foreign configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files import gguf_files as gf
from support.kernel.huge_pages import eight_huge_pages, no_huge_pages  # noqa: F401 - fixtures
from support.kernel.proc_maps import PAGE, huge_page_bytes
from unimem.models import shapes
from unimem.models.dims import Experts
from unimem.planning.needs import Budget, MachineBudget, Need, Storage, scratch_parts
from unimem.system import limits, policy

gguf = pytest.importorskip(
    "gguf", reason="gguf (extra test) writes the models: pip install '.[test]'"
)

MIB = 1 << 20
SIZES = [1, PAGE - 1, PAGE, PAGE + 1, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 5 * MIB, 7 * MIB + 99]


# ---- blocks -------------------------------------------------------------------------------------


def extent(nbytes: int, pages: Any, **request: Any) -> policy.Extent:
    asked = policy.Request(
        nbytes=nbytes, pages=pages, page_bytes=PAGE, thp_bytes=huge_page_bytes(), **request
    )
    return policy.extent(asked, limits)


@pytest.mark.filterwarnings("ignore::unimem.PlacementWarning")
@pytest.mark.parametrize("pages", ["auto", "4k", "thp", "2m"])
@pytest.mark.parametrize("pool", ["no_huge_pages", "eight_huge_pages"])
def test_an_extent_is_what_a_block_maps(
    pages: Any, pool: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(pool)
    for nbytes in SIZES:
        for reserve in (None, nbytes + 3 * MIB):
            found = extent(nbytes, pages, reserve=reserve or nbytes)
            with um.Block(nbytes, pages=pages, reserve=reserve) as block:
                assert found.nbytes == block.nbytes, (nbytes, reserve)
                assert found.is_hugetlb == (block.granted.pages == "2m")
        found = extent(nbytes, pages, shared=True)
        with um.Block(nbytes, pages=pages, shared=True) as block:
            assert found.nbytes == block.nbytes


@pytest.mark.usefixtures("eight_huge_pages")
def test_blocks_of_a_plan_share_one_pool() -> None:
    sizes = [5 * MIB, 5 * MIB, 9 * MIB, MIB, 3 * MIB]
    budget = Budget(MachineBudget(limits))
    planned = [Storage().block(nbytes, "scratch", budget) for nbytes in sizes]
    blocks = [um.Block(nbytes) for nbytes in sizes]
    for need, block in zip(planned, blocks, strict=True):
        assert need.nbytes == block.nbytes
        assert (need.ram_bytes == 0) == (block.granted.pages == "2m")
        block.close()
    assert {need.ram_bytes == 0 for need in planned} == {True, False}


def test_promised_pool_pages_count_in_cgroups_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = limits.Limit("hugetlb cgroup /a", 40 * MIB, 9 * MIB, "-")
    pool = limits.HugePool(2 * MIB, 20, 20, 5, 0, {0: (20, 20)}, (group,))
    monkeypatch.setattr(limits, "huge_pools", lambda: {"2m": pool})
    budget = Budget(MachineBudget(limits))
    for n_promised in (3, 6):
        need = Storage(pages="2m").block(5 * MIB, "scratch", budget)
        assert need.asked_bytes == {"2m": 6 * MIB}
        left = budget.huge_pools()["2m"]
        assert left.reserved == 5 + n_promised
        assert left.cgroups[0].used_bytes == (9 + 2 * n_promised) * MIB
    assert budget.copy().huge_pools() == budget.huge_pools()


def test_a_need_covers_only_its_own_memory() -> None:
    need = Need({"kv": 3, "logits": 4})
    assert (need.nbytes, need.room_bytes, need.ram_bytes, need.file_bytes) == (7, 0, 0, 0)
    assert (need.unread_bytes, need.kept_bytes, need.lock_bytes, need.taken_bytes) == (0, 0, 0, 0)


# ---- architectures ------------------------------------------------------------------------------


def write(path: Path, arch: str, keys: dict[str, Any], n_tensors: int = 8) -> Path:
    """Write a model with n small tensors; lists become arrays of unsigned integers."""
    import numpy as np

    writer = gguf.GGUFWriter(path, arch)
    for name, value in keys.items():
        key = f"{arch}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            (writer.add_uint32 if 0 <= value < 2**32 else writer.add_int64)(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_float32(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float16))
    for i in range(n_tensors - 1):
        writer.add_tensor(f"blk.{i}.x.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


BASE = {
    **{"context_length": 8192, "block_count": 4, "embedding_length": 64},
    **{"attention.head_count": 8, "attention.head_count_kv": 2},
    **{"attention.key_length": 32, "attention.value_length": 32},
}


STATES = {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16}
MLA = {
    **{"attention.kv_lora_rank": 512, "attention.key_length_mla": 192},
    "attention.value_length_mla": 128,
}
INDEX = {"attention.indexer.key_length": 16, "attention.indexer.top_k": 8}


def rows(plan: um.Plan) -> dict[str, int]:
    return {row.category: row.nbytes for row in plan.rows}


def in_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


@pytest.mark.parametrize(
    ("arch", "keys", "values_of_a_token", "n_states"),
    [
        # Of an architecture that nobody knows, what is certain.
        ("gemma9", {}, 4 * 2 * (32 + 32), 0),
        ("gemma9", {"attention.value_length": 64}, 4 * 2 * (32 + 64), 0),
        ("gemma9", {"attention.head_count_kv": [1, 2, 3, 4]}, 10 * (32 + 32), 0),
        ("gemma9", {"attention.head_count_kv": [0, 2, 0, 2], **STATES}, 4 * (32 + 32), 2),
        ("gemma9", {"attention.sliding_window_pattern": [0, 1, 0, 1]}, 4 * 2 * (32 + 32), 0),
        ("gemma9", {"full_attention_interval": 2, **STATES}, 4 * (32 + 32), 2),
        ("gemma9", {"attention.recurrent_layers": [1, 0, 1, 1], **STATES}, 2 * (32 + 32), 3),
        ("gemma9", {"nextn_predict_layers": 1}, 3 * 2 * (32 + 32), 0),
        ("gemma9", MLA, 4 * 2 * 32, 0),
        ("gemma9", INDEX, 4 * (2 * (32 + 32) + 16), 0),
        ("llama", {"attention.sliding_window": 512}, 4 * 2 * (32 + 32), 0),
        ("t5", {}, 4 * 2 * (32 + 32), 0),
        ("nanbeige", {"num_loops": 3}, 3 * 4 * 2 * (32 + 32), 0),
        ("gemma9", {"attention.head_count": [8, 4, 2, 1]}, 4 * 2 * (32 + 32), 0),
        ("bert", {}, 0, 0),
        ("clip", {"block_count": "none"}, 0, 0),
    ],
)
def test_the_cache_is_what_the_keys_of_a_file_say(
    tmp_path: Path, arch: str, keys: dict[str, Any], values_of_a_token: int, n_states: int
) -> None:
    path = write(tmp_path / "m.gguf", arch, BASE | keys)
    states = n_states * 4 * (3 * 64 + 64 * 16)
    for ctx in (64, 1000):
        plan = um.plan(path, ctx=ctx, batch=3, engine="llama.cpp")
        cells = -(-ctx // 256) * 256
        assert rows(plan).get("kv", 0) == 3 * (2 * values_of_a_token * cells + states)
    known = arch != "gemma9"
    assert (plan.verdict, plan.fits) == (("fits", True) if known else ("at least", None))
    assert any("that unimem does not know" in text for text in plan.unknown) != known
    assert "scratch" not in rows(plan)
    assert any(text.startswith("the scratch") for text in plan.unknown)
    assert plan.max_ctx == 8192
    assert um.plan(path).ctx == 4096


def test_a_window_without_a_list_is_that_of_all_layers(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "gemma9", BASE | {"attention.sliding_window": 512})
    assert rows(um.plan(path, ctx=4096))["kv"] == 2 * 4 * 2 * (32 + 32) * (512 + 512)


def test_states_take_whole_lanes_for_each_stream(tmp_path: Path) -> None:
    keys = {"block_count": 4, "embedding_length": 64, "context_length": 512}
    keys |= STATES | {"ssm.inner_size": 5, "ssm.state_size": 3}
    path = write(tmp_path / "m.gguf", "mamba", keys)
    # Three columns of the convolution and three values of a state for each of five channels, in
    # four bytes: 120 of 128 bytes. llama.cpp has no lanes.
    plan = um.plan(path, pages="4k", batch=300, engine="unimem")
    assert rows(plan)["kv"] == in_pages(300 * 4 * 128)
    assert rows(um.plan(path, batch=300))["kv"] == 300 * 4 * 120


# Worked out by hand, by the rules that `scratch_parts` states.
SCRATCH: dict[str, tuple[tuple[Any, ...], dict[str, int]]] = {
    "a batch is the most work": (
        (um.ModelDims(100, 300, 8, 2, 16, 500, 3, 2048), 1000, 1, [1000], None),
        {
            **{"headers": 368 * 62 + 2 * (136 * 436 + 4096), "inputs": 1024 + 259216 + 4384},
            **{"values": 4 * 128 * 1200 + 4096, "work": 256 * 300 + 128, "logits": 2000},
        },
    ),
    "tiles of attention are": (
        (um.ModelDims(128, 60, 4, 4, 512, 500, 1, 2048), 1, 5, [1, 7], None),
        {
            **{"headers": 368 * 26 + 2 * (56 * 436 + 4096), "inputs": 8 + 204 + 228 + 388},
            **{"values": 4 * 6528 + 4096, "work": 20 * (131072 + 8192) + 384, "logits": 2000},
        },
    ),
    "partial results are": (
        (um.ModelDims(64, 60, 2048, 2, 128, 500, 1, 2048), 1, 2, [1], None),
        {
            **{"headers": 368 * 26 + 2 * (56 * 436 + 4096), "inputs": 8 + 204 + 388},
            **{"values": 4 * (192 + 3 * 262144) + 4096, "work": 8 * (266240 + 384) + 192},
            "logits": 2000,
        },
    ),
    "a mixture of small experts": (
        (um.ModelDims(72, 80, 4, 4, 16, 500, 2, 2048), 200, 1, [200], Experts(60, 4, 80)),
        {
            **{"headers": 368 * 44 + 2 * (156 * 436 + 4096), "inputs": 1024 + 52816 + 1184},
            **{"values": 512 * (216 + 656 + 188) + 4096, "logits": 2000},
            "work": 256 * 80 + 8 * (60 * 513 + 4) + 64 * 61 + 128,
        },
    ),
    "a batch, and a tile for each thread": (
        (um.ModelDims(100, 300, 8, 2, 16, 500, 3, 2048), 1000, 2, [1000], None, True),
        {
            **{"headers": 368 * 62 + 2 * (136 * 436 + 4096), "inputs": 1024 + 259216 + 4384},
            **{"values": 4 * 128 * 1200 + 4096, "work": 256 * 300 + 2 * 524288 + 192},
            "logits": 2000,
        },
    ),
    "waves of streamed experts": (
        (
            *(um.ModelDims(64, 48, 4, 4, 16, 500, 2, 2048), 700, 1, [700]),
            *(Experts(60, 4, 48), False, 120),
        ),
        {
            "headers": 368 * 44 + (156 + 156 + 388) * 436 + 8192,
            "inputs": 4096 + (4096 + 1026 * 700 + 192) + 2800 + 384,
            **{"values": 2048 * (192 + 656 + 188) + 4096, "logits": 2000},
            "work": 1024 * 64 + 4096 * 64 + 8 * (120 * 2049 + 4) + 64 * 121 + 128,
        },
    ),
    "one of wide experts": (
        (um.ModelDims(64, 512, 4, 4, 16, 500, 2, 2048), 200, 1, [200], Experts(6, 2, 512)),
        {
            **{"headers": 368 * 44 + 2 * (148 * 436 + 4096), "inputs": 1024 + 52816 + 1184},
            **{"values": 512 * (192 + 1664 + 22) + 4096, "logits": 2000},
            "work": 256 * 512 + 8 * (6 * 257 + 4) + 64 * 7 + 128,
        },
    ),
}


@pytest.mark.parametrize("name", SCRATCH)
def test_each_term_of_planned_scratch(name: str) -> None:
    """tests/engine/test_graph.py shows that the terms bound the memory taken."""
    given, parts = SCRATCH[name]
    assert scratch_parts(*given) == parts


NOTHING_KNOWN: list[tuple[str, dict[str, Any]]] = [
    ("mamba", {"block_count": 4, "ssm.state_size": 16, "attention.head_count": 0}),
    ("rwkv7", {"block_count": 4, "wkv.head_size": 64}),
    ("gemma9", BASE | {"attention.kv_lora_rank": 512}),
    ("deepseek2", BASE | {"attention.kv_lora_rank": 512, "attention.key_length_mla": 192}),
    ("gemma3n", BASE | {"attention.shared_kv_layers": 4}),
    *(
        ("gemma4", BASE | {"attention.sliding_window_pattern": pattern})
        for pattern in ([1, 0], ["1", "0", "1", "0"], "1")
    ),
    ("falcon-h1", BASE | {"ssm.state_size": 16, "ssm.conv_kernel": 4, "ssm.inner_size": -64}),
    ("gemma9", BASE | {"attention.head_count_kv": 2} | STATES),
    ("qwen4exp", BASE | {"ple.layers": [0]}),
    ("nanbeige", BASE | {"num_loops": 2**31 - 1}),
    ("gemma9", BASE | {"ple.layers": list(range(100_000))}),
    ("deepseek4", BASE | INDEX | {"attention.compress_ratios": [4, 128]}),
    ("qwen3next", BASE | {"ssm.state_size": 16}),
    # Values that no model has.
    *(("gemma9", BASE | {"block_count": n}) for n in (2**31, -4, 2**40)),
    ("gemma9", BASE | {"block_count": "four"}),
    *(
        ("gemma9", BASE | {"attention.head_count_kv": heads})
        for heads in ([2, 2], ["2", "2", "2", "2"], "2", list(range(100_000)))
    ),
    *(("gemma9", BASE | {"attention.key_length": n}) for n in (0, 1.5)),
    ("llama", BASE | {"block_count": 100_000_000}),
    ("llama", {}),
]


@pytest.mark.usefixtures("host_gpu")
@pytest.mark.parametrize(("arch", "keys"), NOTHING_KNOWN)
def test_unknown_needs_are_named_without_a_figure(
    tmp_path: Path, arch: str, keys: dict[str, Any]
) -> None:
    path = write(tmp_path / "m.gguf", arch, keys)
    plan = um.plan(path)
    assert "kv" not in rows(plan)
    assert (plan.ctx, plan.max_ctx, plan.history_bytes) == (None, None, 0)
    assert any(text.startswith("the KV cache: ") for text in plan.unknown)
    assert (plan.verdict, plan.fits) == ("at least", None)
    weights = sum(nbytes for name, nbytes in rows(plan).items() if name.startswith("weights"))
    assert weights == in_pages(path.stat().st_size)
    assert um.plan(path, ctx=77).ctx == 77
    there = um.plan(path, device="cuda:0")
    assert (there.ctx, there.max_ctx, there.history_bytes) == (None, None, 0)
    assert plan.to_dict()["facts"]["architecture"] == arch
    with pytest.raises(ValueError, match=r"."):
        um.Layout.for_model(path)


def test_huge_but_possible_sizes_are_accepted(tmp_path: Path) -> None:
    keys = BASE | {"attention.key_length": 2**30, "context_length": 2**31 - 1}
    path = write(tmp_path / "m.gguf", "gemma9", keys)
    plan = um.plan(path, ctx=2**31 - 1, batch=2**20)
    assert not plan.fits
    assert plan.max_ctx is not None


def test_a_long_metadata_array_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    n = 10_000_000
    path.write_bytes(
        b"".join((gf.head(0, 2), gf.string("general.architecture"), gf.u32(gf.STRING)))
        + b"".join((gf.string("gemma9"), gf.string("gemma9.attention.head_count_kv")))
        + b"".join((gf.u32(gf.ARRAY), gf.u32(gf.UINT8), gf.u64(n), b"\1" * n))
    )
    plan = um.plan(path)
    assert plan.max_ctx is None


# ---- safetensors --------------------------------------------------------------------------------

CONFIG = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3},
    **{"max_position_embeddings": 2048, "vocab_size": 320, "torch_dtype": "bfloat16"},
}
WITHOUT_KV_HEADS = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}


@pytest.fixture
def safetensors(tmp_path: Path) -> Path:
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors writes the files")
    import numpy as np

    path = tmp_path / "model.safetensors"
    numpy.save_file({"a": np.zeros((64, 320), np.float16), "b": np.zeros(9, np.float32)}, path)
    return path


def test_safetensors_beside_a_config(safetensors: Path) -> None:
    beside = safetensors.with_name("config.json")
    alone = um.plan(safetensors)
    assert set(rows(alone)) == {"weights:f16", "weights:f32", "weights:padding", "other"}
    assert any("config.json" in text for text in alone.unknown)
    beside.write_text(json.dumps(CONFIG))
    plan = um.plan(safetensors, ctx=100, pages="4k")
    dims = um.ModelDims(64, 128, 4, 2, 16, 320, 3, 2048)
    made = um.plan(dims, ctx=100, pages="4k")
    for name in ("kv", "scratch", "logits", "tokens"):
        assert rows(plan)[name] == rows(made)[name]
    assert plan.unknown == ()
    assert plan.max_ctx == 2048
    assert plan.facts["format"] == "safetensors"
    assert plan.facts["architecture"] == "llama"


UNKNOWN_CONFIGS: list[dict[str, Any]] = [
    {"kv_lora_rank": 512},
    {"is_encoder_decoder": True},
    {"hidden_size": 2},
    {"num_hidden_layers": -3},
    {"num_hidden_layers": "3"},
    {"num_attention_heads": 10**30},
    {"layer_types": ["linear_attention", "full_attention"]},
    # Special fields, no cache, or omitted defaults.
    {"model_type": "falcon", "multi_query": True},
    {"model_type": "dbrx", "attn_config": {"kv_n_heads": 8}},
    {"model_type": "qwen3_next", "full_attention_interval": 4},
    *({"model_type": name} for name in ("bert", None, "gemma")),
    *({"layer_types": types} for types in (["full_attention"], 3 * ["moe"], [{}, [], 1])),
    *({"sliding_window": window, "model_type": "mistral"} for window in (-1, "4096", 2**40)),
    {"model_type": "mamba", "state_size": 16, "expand": 2**31 - 1},
    {"model_type": "llava", "text_config": WITHOUT_KV_HEADS},
]


@pytest.mark.parametrize(
    ("config", "cache"),
    [
        ({"model_type": "glm4", "head_dim": 32}, (3, 2, 32, 32, None)),
        ({"text_config": CONFIG, "model_type": "llava"}, (3, 2, 16, 16, None)),
        ({"num_local_experts": 8, "model_type": "mixtral"}, (3, 2, 16, 16, None)),
        *((config, None) for config in UNKNOWN_CONFIGS),
    ],
)
def test_configs(config: dict[str, Any], cache: Any) -> None:
    shape = shapes.from_config(CONFIG | config, "")
    assert shape.cache == (None if cache is None else (shapes.Layers(*cache),))
    assert shape.dims is None
    assert shape.no_scratch or shape.unknown
    assert shape.is_counted == (cache is not None)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"a": 1e999}', "x" * (5 << 20)])
def test_invalid_configs(safetensors: Path, text: str) -> None:
    safetensors.with_name("config.json").write_text(text)
    assert any("config.json" in sentence for sentence in um.plan(safetensors).unknown)


# ---- a GPU --------------------------------------------------------------------------------------


def test_a_gpu(cuda: Any, host_gpu: Any, tmp_path: Path) -> None:
    from support.models.make import TINY, write_model

    host_gpu.page_bytes = 2 * MIB
    path = write_model(tmp_path / "m.gguf", shape=TINY)
    free = host_gpu.free_bytes()
    plan = um.plan(path, ctx=64, batch=2, kv_dtype="f32", device="cuda:0")
    with cuda.Layout.for_model(path, ctx=64, batch=2, kv_dtype="f32") as layout:
        on_device = sum(row.nbytes for row in plan.rows if row.device == "cuda:0")
        assert on_device == free - host_gpu.free_bytes()
        assert plan.history_bytes == layout.history.total_bytes
        assert plan.scratch_bytes == layout.scratch.total_bytes
    (check,) = (check for check in plan.checks if check.name == "cuda:0")
    assert check.needed_bytes == on_device
    assert check.available_bytes == free
    assert [row.category for row in plan.rows if row.device is None] == ["staging"]
    assert plan.fits
    host_gpu.total_bytes = on_device - 2 * MIB
    small = um.plan(path, ctx=64, batch=2, kv_dtype="f32", device="cuda:0")
    assert not small.fits
    with pytest.raises(um.CapacityError, match="cuda:0"):
        small.require_fits()
    for advice in small.advice:
        if advice.options:
            options: Any = {"ctx": 64, "batch": 2, "kv_dtype": "f32"} | advice.options
            other = um.plan(path, **options, device="cuda:0")
            assert advice.fits == other.fits


@pytest.mark.parametrize("device", ["cuda", "cuda:x", "cpu", 0, "cuda:0:1"])
def test_invalid_devices(device: Any) -> None:
    with pytest.raises(ValueError, match="device"):
        um.plan(um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512), device=device)
