"""The name of a model: every byte of its weights counts, however it was written and is stored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch
from torch import nn
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

import unimem as um
from support.models import tiny_transformers as tiny
from support.models.architectures import CACHE
from unimem.errors import SnapshotError
from unimem.transformers import KVCache, model_name
from unimem.weights.content_hash import hash_in_threads

pytestmark = pytest.mark.slow

Part = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def flip(tensor: Any) -> None:
    """Change the lowest bit of the first number, in a way that torch does not count."""
    tensor.data[:1].view(torch.uint8)[0] ^= 1


def name_of(module: nn.Module) -> str:
    return model_name.weights_hash(module)


class LoRA(nn.Module):  # type: ignore[misc]
    """A projection with an adapter, with the names of PEFT's layers."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ParameterDict({"one": torch.randn(2, base.weight.shape[1])})
        self.lora_B = nn.ParameterDict({"one": torch.randn(base.weight.shape[0], 2)})
        self.scaling = {"one": 0.5}
        self.active_adapters = ["one"]
        self.merged_adapters: list[str] = []
        self.disable_adapters = False

    def forward(self, x: Any) -> Any:
        y = self.base_layer(x)
        if self.disable_adapters:
            return y
        return y + x @ self.lora_A["one"].T @ self.lora_B["one"].T * self.scaling["one"]


def adapted() -> Any:
    """A model whose first query projection has an adapter."""
    model = copy.deepcopy(tiny.model("llama"))
    attention = model.model.layers[0].self_attn
    torch.manual_seed(1)
    attention.q_proj = LoRA(attention.q_proj)
    return model.eval()


PARTS: dict[str, Part] = {
    "a row of the embedding": lambda m: m.model.embed_tokens.weight[5, 1:],
    "a column of o_proj": lambda m: m.model.layers[1].self_attn.o_proj.weight[3, 3:],
    "a norm": lambda m: m.model.norm.weight[-1:],
    "the last number": lambda m: m.lm_head.weight[-1, -1:],
    "a number that is in no file": lambda m: m.model.rotary_emb.inv_freq[1:],
    "an adapter": lambda m: m.model.layers[0].self_attn.q_proj.lora_B["one"][-1, -1:],
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_changed_bit_is_another_model(part: Part, dtype: str, tmp_path: Path) -> None:
    model, ids = adapted().to(getattr(torch, dtype)), tiny.prompts(1, 24)
    path = tmp_path / "chat.kv"

    def restored(store: um.KVStore) -> int:
        with KVCache.for_model(model) as cache:
            return cache.restore_from(store, ids)

    with um.KVStore(tmp_path / "s", ram_bytes=0, disk_bytes=1 << 24, chunk_tokens=16) as store:
        with KVCache.for_model(model) as cache:
            model(ids, **{CACHE: cache})
            cache.save(path, tokens=ids)
            assert cache.put_into(store, ids) == 16 == restored(store)
        flip(part(model))
        with pytest.raises(SnapshotError, match="expected a conversation of model"):
            KVCache.restore(path, model=model, tokens=ids)
        assert restored(store) == 0
        flip(part(model))
        KVCache.restore(path, model=model, tokens=ids).close()
        assert restored(store) == 16


def set_scaling(layer: Any) -> None:
    layer.scaling["one"] = 0.25


def disable(layer: Any) -> None:
    layer.disable_adapters = True


def merge(layer: Any) -> None:
    """Merge as PEFT does, which leaves torch's count of writes as it was."""
    weight, before = layer.base_layer.weight, layer.base_layer.weight._version
    weight.data += layer.lora_B["one"] @ layer.lora_A["one"] * layer.scaling["one"]
    assert weight._version == before
    layer.merged_adapters.append("one")


@pytest.mark.parametrize("change", [set_scaling, disable, merge])
def test_how_an_adapter_is_applied_counts(change: Callable[[Any], None]) -> None:
    model = adapted()
    before = model_name.model_name(model)
    assert model_name.model_name(adapted()) == before
    assert model_name.model_name(tiny.model("llama")) != before
    change(model.model.layers[0].self_attn.q_proj)
    assert model_name.model_name(model) != before


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_of_peft_count() -> None:
    peft = pytest.importorskip("peft", reason="a test with PEFT itself")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(tiny.model("llama")), config)
    model.add_adapter("other", config)
    names = [model_name.model_name(model), model_name.model_name(model)]
    model.set_adapter("other")
    names.append(model_name.model_name(model))
    with model.disable_adapter():
        names.append(model_name.model_name(model))
    model.merge_adapter()
    names.append(model_name.model_name(model))
    assert len(set(names)) == 4
    assert names[0] == names[1]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_that_learn_a_prompt_are_refused() -> None:
    peft = pytest.importorskip("peft", reason="a test with PEFT itself")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(copy.deepcopy(tiny.model("llama")), config)
    with pytest.raises(ValueError, match="got one of PEFT that learns a prompt"):
        model_name.model_name(model)


def test_a_loaded_model_has_the_name_of_the_saved_one(tmp_path: Path) -> None:
    model = tiny.model("gemma", "bfloat16")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    # to() converts the tables of positions, too, and loading does not.
    for kind in ("inv_freq", "original_inv_freq"):
        setattr(again.model.rotary_emb, kind, getattr(model.model.rotary_emb, kind))
    assert model_name.model_name(again) == model_name.model_name(model)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_positions_that_grow_with_a_conversation_do_not_count(rope: str) -> None:
    sizes = {"original_max_position_embeddings": 16, "factor": 4.0, "rope_theta": 1e4}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if rope == "longrope" else {}
    config = tiny.config("llama", rope_parameters={"rope_type": rope, **sizes, **factors})
    config.max_position_embeddings = 16
    model = type(tiny.model("llama"))(config).eval()
    table, before = model.model.rotary_emb.inv_freq.clone(), model_name.model_name(model)
    model(tiny.prompts(1, 64))
    assert not torch.equal(model.model.rotary_emb.inv_freq, table)
    assert model_name.model_name(model) == before
    flip(model.model.rotary_emb.original_inv_freq)
    assert model_name.model_name(model) != before


def test_hash_is_as_defined() -> None:
    layer = nn.Linear(1024, 4099)
    weight = layer.weight.numpy().tobytes()
    assert name_of(layer) == xxh3_128_hexdigest(
        b"bias (4099,) torch.float32\n"
        + xxh3_128_digest(layer.bias.numpy().tobytes())
        + b"weight (4099, 1024) torch.float32\n"
        + xxh3_128_digest(weight[: 8 << 20])
        + xxh3_128_digest(weight[8 << 20 : 16 << 20])
        + xxh3_128_digest(weight[16 << 20 :])
    )


def test_layout_and_ties_do_not_count() -> None:
    weight = torch.randn(40, 30)
    plain, turned, tied = nn.Linear(30, 40), nn.Linear(30, 40), nn.Linear(30, 40)
    for layer in (plain, turned, tied):
        layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(weight[:, 0].clone())
    turned.weight = nn.Parameter(weight.T.contiguous().T)
    assert not turned.weight.is_contiguous()
    assert name_of(turned) == name_of(plain)
    both, one = nn.ModuleList([plain, turned]), nn.ModuleList([plain, plain])
    assert name_of(both) == name_of(one)
    flip(turned.weight.T[7, 7:8])
    assert name_of(both) != name_of(one)


def test_views_of_the_same_memory_differ() -> None:
    square = torch.complex(torch.randn(4, 4), torch.randn(4, 4))
    names = set()
    for view in (square, square.T, square.conj(), square.T.conj()):
        module = nn.Module()
        module.register_buffer("one", square)
        module.register_buffer("two", view)
        names.add(name_of(module))
    assert len(names) == 4


def test_weights_are_hashed_where_they_are_and_once() -> None:
    seen: list[tuple[int, int]] = []

    def spy(work: Any, *arguments: Any) -> Any:
        seen.extend((each.data.ctypes.data, each.data.nbytes) for each in work)
        return hash_in_threads(work, *arguments)

    layer = nn.Linear(1024, 4099, dtype=torch.bfloat16)
    tied = nn.ModuleList([layer, layer])
    with patch.object(model_name, "hash_in_threads", spy):
        name_of(tied)
    first, size = layer.weight.data_ptr(), 2 * 1024 * 4099
    assert sorted(seen) == sorted(
        [(first, 8 << 20), (first + (8 << 20), size - (8 << 20)), (layer.bias.data_ptr(), 2 * 4099)]
    )


def odd_tensors() -> dict[str, Any]:
    dense = torch.arange(1.0, 13.0).view(3, 4)
    return {
        "quantized": torch.quantize_per_tensor(dense, 0.5, 3, torch.qint8),
        "sparse": dense.to_sparse(),
        "conjugate": torch.complex(dense, dense).conj(),
        "negative": torch.complex(dense, dense).conj().imag,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "float8": dense.to(torch.float8_e4m3fn),
        "bool": dense > 3,
    }


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_tensors_of_all_kinds_count() -> None:
    names = []
    for made in (odd_tensors(), odd_tensors()):
        for kind, value in made.items():
            module = nn.Module()
            module.register_buffer("it", value)
            names.append((kind, name_of(module)))
    half = len(names) // 2
    assert names[:half] == names[half:]
    assert len(set(names[:half])) == half


def test_state_that_is_no_tensor_counts() -> None:
    class Packed(nn.Module):  # type: ignore[misc]
        def get_extra_state(self) -> Any:
            return (torch.ones(3), self.scale)

        def set_extra_state(self, state: Any) -> None:
            raise NotImplementedError

    module = Packed()
    module.scale = 1.0
    before = name_of(module)
    assert name_of(module) == before
    module.scale = 2.0
    assert name_of(module) != before


def test_weights_that_are_elsewhere_are_refused() -> None:
    model = copy.deepcopy(tiny.model("llama"))
    model.model.norm.to("meta")
    with pytest.raises(ValueError, match=r"model\.norm\.weight.* on meta: .*without offloading"):
        model_name.model_name(model)


def dynamic(model: Any, folder: Path) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)


def torchao(model: Any, folder: Path) -> Any:
    made = pytest.importorskip("torchao.quantization", reason="a test with torchao itself")
    made.quantize_(model, made.Int8WeightOnlyConfig())
    return model


def on_disk(model: Any, folder: Path) -> Any:
    made = pytest.importorskip("accelerate", reason="a test with Accelerate itself")
    return made.disk_offload(model, folder / f"of {id(model)}")


@pytest.mark.filterwarnings("ignore")  # of packages that are deprecated, or lack a GPU
@pytest.mark.parametrize("change", [dynamic, torchao, on_disk])
def test_weights_that_are_kept_otherwise_are_read(
    change: Callable[[Any, Path], Any], tmp_path: Path
) -> None:
    plain, ids, path = tiny.model("llama"), tiny.prompts(1, 24), tmp_path / "chat.kv"
    model, again = (change(copy.deepcopy(plain), tmp_path) for _ in range(2))
    other = copy.deepcopy(plain)
    other.model.layers[1].self_attn.o_proj.weight.data[3] *= 2
    assert (model_name.model_name(plain) == model_name.model_name(model)) is (change is on_disk)
    with (
        um.KVStore(tmp_path / "s", ram_bytes=0, disk_bytes=1 << 24, chunk_tokens=16) as store,
        KVCache.for_model(model) as cache,
    ):
        model(ids, **{CACHE: cache})
        cache.save(path, tokens=ids)
        assert cache.put_into(store, ids) == 16
        with KVCache.for_model(again) as another:
            assert another.restore_from(store, ids) == 16
    with KVCache.restore(path, model=again, tokens=ids) as cache:
        assert cache.get_seq_length() == 24
    with pytest.raises(SnapshotError, match="expected a conversation of model"):
        KVCache.restore(path, model=change(other, tmp_path), tokens=ids)


def test_configuration_counts() -> None:
    model = tiny.model("llama")
    changed = copy.deepcopy(model)
    changed.config.rms_norm_eps *= 2
    names = {model_name.model_name(one) for one in (model, changed, copy.deepcopy(model))}
    assert len(names) == 2
