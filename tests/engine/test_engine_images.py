"""Decoders on repacked images: the same numbers and rows from a staged one, and from the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from decoders import logits_of, sizes, tokens
from models.make import SMALL, write_model
from screens import show
from unimem.accounting import model_maps
from unimem.engine import Decoder
from unimem.system import ggml_repack
from unimem.system.process import read_process
from unimem.weights import repack
from unimem.weights.image import IMAGE_NAME
from unimem.weights.staging.held import holders
from weight_bytes import drop_from_cache

if ggml_repack.find_order(2, (256, 64)) is None:
    pytest.skip("this build of ggml has no order for q4_0 on this CPU", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("gives_memory_back")

PROMPT = [1, *tokens(20, seed=7, first=259, vocab=SMALL.vocab)]
OPTIONS: dict[str, Any] = {"ctx": 100, "threads": 1, "load": "repack"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return write_model(tmp_path / "models" / "q4_0.gguf", kind="q4_0")


def decode(path: Path | str) -> tuple[str | None, Any]:
    """Where the repacked weights are from, and the logits; the plan is what the report says."""
    with Decoder(path, **OPTIONS) as decoder:
        assert sizes(decoder.report()) == sizes(um.plan(path, **OPTIONS))
        repacked = decoder._memory.repacked
        assert repacked is not None
        return repacked.image, logits_of(decoder, PROMPT, 3)[1]


@pytest.mark.parametrize("way", ["mapped", "read"])
def test_from_the_cache(
    way: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = decode(model)[1]
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
    assert decode(model)[0] is None
    (path,) = (tmp_path / "cache").iterdir()
    drop_from_cache(path)
    if way == "mapped":
        path.read_bytes()
    image, found = decode(model)
    assert image == str(path)
    np.testing.assert_array_equal(found, expected)


def test_staged_by_the_command(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decode(model)[1]
    monkeypatch.setattr(repack, "repack_into", None)
    model.with_name(IMAGE_NAME).write_bytes(b"no image")  # which hides none
    code, out, err = show("stage", "--repack", model)
    assert code == 0, err
    path = out.rstrip("\n")
    try:
        assert "repacked" in err
        assert "makes a copy of its own" not in err
        (held,) = [one for one in holders() if one.path == path]
        # By the link, and by the model's own path.
        for opened in (path, str(model)):
            image, found = decode(opened)
            assert image == held.paths[0]
            np.testing.assert_array_equal(found, expected)
        assert json.loads(show("stage", "--repack", model, "--json")[1])["reused"] is True
        assert json.loads(show("stage", "--list", "--json")[1])[0]["current"] is True
        # What keeps it has it in a report as staged; who maps it, by its types.
        (kept,) = model_maps.models(read_process(held.pid))
        assert {part.category for area in kept.areas for part in kept.parts(area)} == {"staging"}
        image = held.paths[0]
        with um.Block.map(image) as block:
            block.as_array()[::4096].sum()
            (mapped,) = [m for m in model_maps.models(read_process()) if m.path == image]
            assert (mapped.state, mapped.source) == ("staged", str(model))
            rows = {part.category for area in mapped.areas for part in mapped.parts(area)}
            assert rows == {"weights:q4_0 repacked", "weights:padding"}
        model.touch()
        assert json.loads(show("stage", "--list", "--json")[1])[0]["current"] is False
    finally:
        assert show("stage", "--drop", path)[0] == 0
    assert [one for one in holders() if one.path == path] == []


def test_staged_by_a_program(model: Path) -> None:
    expected = decode(model)[1]
    with um.stage(model, repack=True) as staged:
        image, found = decode(model)
        assert image == staged.paths[0]
        np.testing.assert_array_equal(found, expected)
    assert decode(model)[0] is None


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--page-cache"], 2, "which no file has"),
        (["--backing", "memfd"], 1, "only tmpfs and shm give"),
    ],
)
def test_what_cannot_be_staged(arguments: list[str], code: int, said: str, model: Path) -> None:
    found = show("stage", "--repack", model, *arguments)
    assert found[0] == code
    assert said in found[2]


def test_a_model_without_such_weights(tmp_path: Path) -> None:
    path = write_model(tmp_path / "f16.gguf", kind="f16")
    if ggml_repack.find_order(1, (256, 64)) is not None:
        pytest.skip("this CPU has an order for f16")
    with pytest.raises(ValueError, match="no tensor has an order of its own"):
        um.stage(path, repack=True)
