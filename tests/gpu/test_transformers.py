"""transformers on a GPU: the tokens of its own cache, and conversations that change memory."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from gpu.machine import MIB, cuda, cupy

pytest.importorskip("transformers.cache_utils", reason="needs transformers 5.23 or 5.24")

ARCHITECTURES = (
    "llama mistral qwen2 qwen3 gemma2 phi3 mixtral gpt_neox starcoder2 olmo2 gpt_oss lfm2"
).split()


@pytest.fixture(autouse=True)
def small_caches(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let caches be replaced soon; the device's products are exact enough to compare tokens."""
    from unimem.transformers import on_device

    monkeypatch.setattr(on_device, "_SPARE_ROWS", 4)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def model(name: str, device: str = "cuda") -> Any:
    from support.models import architectures

    return architectures.model(name).to(device)


def ids(batch: int, n: int, device: str = "cuda") -> Any:
    from support.models import architectures

    return architectures.ids(batch, n).to(device)


def talk(model: Any, cache: Any, given: Any, n: int = 12, **options: Any) -> Any:
    from support.models import architectures

    how = {"do_sample": False, "pad_token_id": 0, architectures.cache_name(model): cache} | options
    return model.generate(given, max_new_tokens=n, **how)


@pytest.mark.parametrize("options", [{}, {"max_seq_len": 64}], ids=["replaced", "fixed"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_are_those_of_a_dynamic_cache(name: str, options: dict[str, Any]) -> None:
    import transformers

    from unimem.transformers import KVCache

    made, given = model(name), ids(2, 20)
    for way in ({}, {"num_beams": 3}):
        theirs = transformers.DynamicCache(config=made.config)
        with KVCache.for_model(made, **options) as cache:
            found = talk(made, cache, given, **way)
            assert found.tolist() == talk(made, theirs, given, **way).tolist()
            assert {type(kv).__module__ for kv in cache.caches} == {"unimem.cuda.kv"}


@pytest.mark.parametrize("order", [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_conversation_goes_on_in_the_other_memory(order: tuple[str, str], tmp_path: Path) -> None:
    from unimem.transformers import KVCache

    first, second = (model("llama", device) for device in order)
    given = ids(1, 40, "cpu")
    path = tmp_path / "chat.kv"
    with um.KVStore(tmp_path / "s", ram_bytes=0, disk_bytes=64 * MIB, chunk_tokens=16) as store:
        with KVCache.for_model(first) as cache:
            said = talk(first, cache, given.to(order[0]))
            expected = talk(first, cache, said).tolist()
            cache.crop(said.shape[1] - 1 - cache.get_seq_length())
            cache.save(path, tokens=said)
            assert cache.put_into(store, said) == 48
        with KVCache.restore(path, model=second, tokens=said) as cache:
            assert talk(second, cache, said.to(order[1])).tolist() == expected
        with KVCache.for_model(second) as cache:
            assert cache.restore_from(store, said) == 48
            assert talk(second, cache, said.to(order[1])).tolist() == expected


@pytest.fixture
def compiling(torch: Any) -> Iterator[Any]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield torch.compile
    torch._dynamo.reset()


def test_a_compiled_step_has_no_break(torch: Any, compiling: Any) -> None:
    from support.models import architectures
    from unimem.transformers import KVCache

    made, expected = model("llama"), None
    name = architectures.cache_name(made)
    for call in (made, compiling(made, backend="aot_eager", fullgraph=True)):
        with KVCache.for_model(made, 64) as cache:
            given, said = ids(2, 5), []
            for _ in range(9):
                given = call(given, **{name: cache}).logits[:, -1:].argmax(-1)
                said += given.flatten().tolist()
        expected = expected or said
        assert said == expected


@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs"])
def test_steps_of_fixed_shapes_are_one_graph(torch: Any, compiling: Any, backend: str) -> None:
    import transformers

    from support.models.architectures import cache_name
    from unimem.transformers import KVCache

    made, given = model("llama"), ids(2, 5)
    expected = talk(made, transformers.DynamicCache(config=made.config), given)
    step = compiling(made, backend=backend, fullgraph=True, dynamic=False)
    with KVCache.for_model(made, 64, static=True) as cache:
        found = [given]
        for call in (made, *[step] * 11):
            logits = call(found[-1], **{cache_name(made): cache}).logits
            found.append(logits[:, -1:].argmax(-1).clone())
        assert torch.equal(torch.cat(found, 1), expected)
        assert cache.get_seq_length() == 16


def test_a_graph_writes_another_row_each_time(torch: Any) -> None:
    import unimem.transformers.operator  # registers it

    assert unimem.transformers.operator.append_at
    half = {"device": "cuda", "dtype": torch.float16}
    with cuda.KVCache(1, 2, 64, 8, dtype="f16", order="head", arrays="torch") as kv:
        empty = torch.zeros(1, 2, 8, 64, **half)
        kv.append(0, empty, empty)
        rows: tuple[Any, ...] = kv.layer(0)
        row = torch.zeros(1, dtype=torch.int32, device="cuda")
        token = torch.zeros(1, 2, 1, 64, **half)

        def step() -> None:
            token.add_(1)
            torch.ops.unimem.append_at(*rows, token, -token, row)
            row.add_(1)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # its kernels are loaded before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
        expected = [1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0]
        assert rows[0][0, 1, :, 63].tolist() == expected
        assert rows[1][0, 0, :, 0].tolist() == [-x for x in expected]
        rows = ()


def test_reports_count_what_nvidia_smi_shows(torch: Any) -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi")
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    with cuda.Block(256 * MIB):
        cupy.cuda.runtime.deviceSynchronize()
        shown = int(subprocess.run(query, capture_output=True, text=True, check=True).stdout) * MIB
        (device,) = um.report().facts["devices"]
        assert device["own_bytes"] >= 256 * MIB
        assert abs(device["used_bytes"] - shown) < 1024 * MIB  # nvidia-smi adds the driver's own
