"""A saved conversation goes on, also in another process, and only with its model and tokens."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="the extra transformers needs torch")
pytest.importorskip("transformers.cache_utils", reason="the extra transformers")

import torch

from support.models import tiny_transformers as tiny
from support.models.architectures import CACHE
from support.project.checkout import ROOT
from unimem.errors import CacheFull, SnapshotError
from unimem.transformers import KVCache

pytestmark = pytest.mark.slow

N = 30


def talk(model: Any, cache: Any, ids: Any, n: int = 6) -> Any:
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{CACHE: cache},
        max_new_tokens=n,
        do_sample=False,
        pad_token_id=0,
    )


@pytest.fixture(params=["llama", "mistral", "gemma"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_conversation_goes_on_with_the_same_tokens(
    kind: str, batch: int, dtype: str, tmp_path: Path
) -> None:
    model, path = tiny.model(kind, dtype), tmp_path / "chat.kv"
    with KVCache.for_model(model) as cache:
        first = talk(model, cache, tiny.prompts(batch, N))
        cache.save(path, tokens=first)
        expected = talk(model, cache, first).tolist()
    for mode in ("map", "copy"):
        with KVCache.restore(path, model=model, tokens=first, mode=mode) as again:
            assert again.get_seq_length() == first.shape[1] - 1
            assert talk(model, again, first).tolist() == expected


def test_saving_again_leaves_one_conversation(kind: str, tmp_path: Path) -> None:
    model, path = tiny.model(kind), tmp_path / "chat.kv"
    with KVCache.for_model(model) as cache:
        ids = talk(model, cache, tiny.prompts(1, N))
        cache.save(path, tokens=ids)
        n_files = len(os.listdir(tmp_path))
        ids = talk(model, cache, ids)
        cache.save(path, tokens=ids[0].tolist())
        assert len(os.listdir(tmp_path)) == n_files == (2 if kind == "gemma" else 1)
    with KVCache.restore(path, model=model, tokens=ids) as again:
        assert again.get_seq_length() == ids.shape[1] - 1


def test_a_restored_cache_has_the_options_that_were_given(kind: str, tmp_path: Path) -> None:
    model, path = tiny.model(kind), tmp_path / "chat.kv"
    with KVCache.for_model(model) as cache:
        ids = talk(model, cache, tiny.prompts(1, N))
        cache.save(path, tokens=ids)
        expected, n_bytes = talk(model, cache, ids).tolist(), cache.capacity_bytes
    most = n_bytes + (1 << 24)
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"spare_rows": 0, "mode": "map"}, None),
        ({"spare_rows": 700, "mode": "copy"}, None),
        ({"max_seq_len": N + 6, "mode": "copy"}, "max_seq_len= makes room for more"),
        ({"max_seq_len": N + 11, "mode": "copy"}, None),
        ({"budget_bytes": most, "mode": "copy"}, None),
        ({"budget_bytes": f"{most}", "mode": "copy"}, None),
    ]
    for options, full in cases:
        with KVCache.restore(path, model=model, tokens=ids, **options) as again:
            if full and kind != "mistral":  # a window alone is never full
                with pytest.raises(CacheFull, match=full):
                    talk(model, again, ids)
                continue
            assert talk(model, again, ids).tolist() == expected
            assert again.capacity_bytes <= most
            spare, ring = options.get("spare_rows", 128), again.caches[0]
            assert ring.window is None or ring.n_rows >= tiny.WINDOW + spare
    there = sorted(os.listdir("/proc/self/fd"))
    for options, error, said in (
        ({"max_seq_len": 64}, ValueError, "max_seq_len not accepted with mode='map'"),
        ({"budget_bytes": 1 << 30}, ValueError, "budget_bytes not accepted with mode='map'"),
        ({"pages": "4k"}, ValueError, "pages not accepted with mode='map'"),
        ({"max_seq_len": 0, "mode": "copy"}, ValueError, "max_seq_len: expected an integer"),
        ({"budget_bytes": 1, "mode": "copy"}, CacheFull, "budget_bytes"),
        ({"budget_bytes": -1, "mode": "copy"}, ValueError, "budget_bytes"),
        ({"spare_rows": -1}, ValueError, "spare_rows: expected an integer from 0"),
        ({"spare_rows": "many"}, TypeError, "spare_rows: expected an integer"),
        ({"mode": "move"}, ValueError, "mode: expected"),
        ({"window": 3, "mode": "copy"}, TypeError, "window"),
    ):
        with pytest.raises(error, match=said):
            KVCache.restore(path, model=model, tokens=ids, **options)
    assert sorted(os.listdir("/proc/self/fd")) == there


def test_foreign_sessions_are_refused(kind: str, tmp_path: Path) -> None:
    model, path = tiny.model(kind), tmp_path / "chat.kv"
    with KVCache.for_model(model) as cache:
        with pytest.raises(ValueError, match="expected a cache with tokens"):
            cache.save(path)
        ids = talk(model, cache, tiny.prompts(2, N))
        with pytest.raises(ValueError, match=f"ids of all {N + 5} tokens, got {N}"):
            cache.save(path, tokens=ids[:, :N])
        with pytest.raises(ValueError, match=r"of shape \[2, n\], got int64 of shape \[1, 36\]"):
            cache.save(path, tokens=ids[:1])
        assert os.listdir(tmp_path) == []
        cache.save(path, tokens=ids)
    other = ids.clone()
    other[1, 3] += 1
    another = ids.clone()
    another[0, 3] += 1
    cases: dict[str, dict[str, Any]] = {
        "expected a conversation of model": {"model": tiny.model(kind, seed=7)},
        "a conversation of model": {"model": tiny.model(kind, "bfloat16")},
        "of its second stream": {"tokens": other},
        "are no prefix": {"tokens": another},
        "expected 2 streams of tokens, got 1": {"tokens": ids[0]},
    }
    for said, given in cases.items():
        with pytest.raises(SnapshotError, match=said):
            KVCache.restore(path, **({"model": model, "tokens": ids} | given))
    KVCache.restore(path, model=model).close()
    with KVCache(model.config) as nobodys, pytest.raises(ValueError, match="expected model="):
        nobodys.save(path)


def test_a_session_of_an_earlier_version_says_what_to_do(tmp_path: Path) -> None:
    """Earlier versions knew a model by 16 numbers of each tensor, in 32 digits."""
    model, path, ids = tiny.model("llama"), tmp_path / "chat.kv", tiny.prompts(1, N)
    with KVCache.for_model(model) as cache:
        talk(model, cache, ids)
        with patch("unimem.transformers.cache.model_name", return_value="ab" * 16):
            cache.save(path)
        with pytest.raises(SnapshotError, match="knew it by samples: compute it again"):
            KVCache.restore(path, model=model, tokens=ids)
        cache.caches[0].save(path, model="ab" * 16)  # a decoder's
    with pytest.raises(SnapshotError, match=f"got one of '{'ab' * 16}': restore it with its own"):
        KVCache.restore(path, model=model, tokens=ids)


def test_the_document_has_examples_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs/transformers.md").read_text().replace("cache=cache", f"{CACHE}=cache")
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    monkeypatch.chdir(tmp_path)
    exec("\n".join(examples), {})
    assert capsys.readouterr().out.splitlines() == [
        "11 tokens",
        "19 tokens",
        "0 tokens were known, 32 are now",
        "32 tokens were known, 32 are now",
    ]
