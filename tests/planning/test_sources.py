"""What a plan says beforehand of a model's text, and of the hash of its weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")

import unimem as um
from support.models.tokenizer_models import write_model
from support.terminal.screens import show
from unimem.weights import whole_hash as module
from unimem.weights.whole_hash import whole_hash

SAID = "tokenizer.ggml.model: the file has model 'bert' (WordPiece)"
WORKS = "plan, stage, exec and report work all the same, and so does Decoder with token ids"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder, for files that count as settled at once."""
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_STEP_NS", -1)
    monkeypatch.setattr(module, "_by_key", {})


def model_of(folder: Path, kind: str) -> Path:
    """Write a model with this kind of tokenizer, of a few tokens."""
    found = {"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": [f"t{i}" for i in range(9)]}
    return write_model(folder / f"{kind}.gguf", found)


def on_screen(path: Path, *options: str) -> str:
    return " ".join(show("plan", path, *options).out.split())


def test_text_that_cannot_be_tokenized_is_said_beforehand(tmp_path: Path) -> None:
    path = model_of(tmp_path, "bert")
    plan = um.plan(path, ctx=64)
    assert plan.no_tokenizer is not None
    assert plan.no_tokenizer.startswith(SAID)
    assert (plan.verdict, plan.engine) == ("fits", "unimem")
    page = on_screen(path, "--ctx", "64")
    assert f"text {SAID}" in page
    assert WORKS in page
    document = json.loads(show("plan", path, "--json").out)
    assert document["no_tokenizer"] == plan.no_tokenizer
    with um.open_weights(path) as weights:
        assert um.plan(weights).no_tokenizer == plan.no_tokenizer
    # llama.cpp has a tokenizer of its own.
    assert um.plan(path, engine="llama.cpp").no_tokenizer is None
    assert um.plan(model_of(tmp_path, "llama")).no_tokenizer is None


def test_run_refuses_such_text_before_it_reads_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> Any:
        raise AssertionError("it loads the model")

    monkeypatch.setattr(um.Layout, "for_model", load)
    screen = show("run", model_of(tmp_path, "bert"), "-p", "a")
    assert (screen.code, screen.out) == (1, "")
    assert SAID in screen.err
    assert WORKS in screen.err


def test_a_plan_says_what_a_hash_costs_until_it_is_known(tmp_path: Path) -> None:
    path = model_of(tmp_path, "llama")
    with um.open_weights(path) as weights:
        nbytes = weights.nbytes
        plan = um.plan(path)
        assert plan.unhashed_bytes == um.plan(weights).unhashed_bytes == nbytes
        assert json.loads(show("plan", path, "--json").out)["unhashed_bytes"] == nbytes
        whole_hash(weights)
        assert um.plan(path).unhashed_bytes == um.plan(weights).unhashed_bytes == 0
    # It is known here alone, and nothing of llama.cpp is bound to it.
    assert um.plan(path, machine={"memory": "1G"}).unhashed_bytes == nbytes
    assert um.plan(path, machine={"memory": "1G"}, engine="llama.cpp").unhashed_bytes == 0
    # A page leaves out what takes no time.
    said = "hash      not known yet: a session or store first reads 3.0 GiB of weights"
    assert said in str(replace(plan, unhashed_bytes=3 << 30)).splitlines()
    assert "hash " not in str(plan)
