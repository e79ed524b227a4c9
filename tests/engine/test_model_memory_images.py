"""Decoders on repacked images: the same numbers and rows from a staged one, and from the cache."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files.weight_bytes import drop_from_cache
from support.models.decoders import logits_of, sizes, tokens
from support.models.make import SMALL, Shape, write_model
from support.project.tiers import slow_after
from support.terminal.screens import show
from unimem.accounting import mapped_models
from unimem.backends import ggml_orders
from unimem.engine import Decoder
from unimem.planning import repack_gain as planned
from unimem.system import limits
from unimem.system.process import read_process
from unimem.weights.repack import image_search, repack
from unimem.weights.repack.image import IMAGE_NAME
from unimem.weights.staged import Held, holders

if ggml_orders.find_order(2, (256, 64)) is None:
    pytest.skip("this build of ggml has no order for q4_0 on this CPU", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("gives_memory_back")

PROMPT = [1, *tokens(20, seed=7, first=259, vocab=SMALL.vocab)]
OPTIONS: dict[str, Any] = {"ctx": 100, "threads": 1, "load": "repack"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return write_model(tmp_path / "models" / "q4_0.gguf", kind="q4_0")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several huge pages."""
    shape = Shape(hidden=512, layers=3, heads=8, kv_heads=4, inner=2048, vocab=512, ctx=256)
    path = tmp_path_factory.mktemp("large") / "q4_0.gguf"
    return write_model(path, shape=shape, kind="q4_0", random_bits=True)


def decode(path: Path | str) -> tuple[str | None, Any]:
    """Return the image of the repacked weights and the logits; the plan equals the report."""
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


SHARED = ", mapped: it is in RAM once for all processes"
OWN = ", read into memory of its own"
PLANNED = {
    # image, placement: the plan's words for it, and whether its bytes cannot be dropped
    "none": (None, {}, None, True),
    "staged": ("staged", {}, SHARED, True),
    "staged, huge pages": ("staged", {"pages": "thp"}, SHARED, True),
    "staged, on a node": ("staged", {"numa": "bind:0"}, OWN, True),
    "kept, hot": ("kept", {}, ", mapped from the page cache", False),
    "kept, hot, huge pages": ("kept", {"pages": "thp"}, OWN, True),
}


@pytest.mark.parametrize("case", PLANNED)
def test_a_plan_says_where_they_come_from(
    case: str, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the plan are the report's, for a private copy in huge pages or a mapping."""
    kind, placement, said, stays = PLANNED[case]
    monkeypatch.setattr(limits, "huge_pools", dict)  # memory of a pool needs no RAM
    monkeypatch.setattr(planned, "_LEAST_BYTES", 0)
    options: dict[str, Any] = OPTIONS | placement
    with ExitStack() as stack:
        path = str(large)
        if kind == "staged":
            path = stack.enter_context(um.stage(large, repack=True)).path
        if kind == "kept":
            monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
            Decoder(large, **OPTIONS).close()
            (image,) = (tmp_path / "cache").iterdir()
            image.read_bytes()
            os.utime(image, (1, 1))
        plan = um.plan(path, **options)
        assert plan.facts.get("image", "").endswith(said or "")
        where = {"staged": "staged", "kept": "in the cache"}.get(kind or "")
        why = "it was asked for" + (f"; a repacked image of it is {where}" if where else "")
        assert plan.load_reason == why
        assert ("image " in str(plan)) == (kind is not None)
        auto = um.plan(path, ctx=100, threads=1)
        assert auto.load == "repack"
        assert (where or "") in auto.load_reason
        elsewhere = um.plan(path, **OPTIONS, machine={"memory": "16G"})
        assert ("image" in elsewhere.facts, elsewhere.load_reason) == (False, "it was asked for")
        repacked = plan["weights:q4_0 repacked"].nbytes
        assert (plan.required_bytes >= repacked) == stays
        # A mapping has whole pages, a copy huge ones if possible.
        is_mapped = plan.facts.get("image", "copy").find("mapped") > 0
        if is_mapped:
            assert plan["weights:padding"].nbytes < elsewhere["weights:padding"].nbytes
        if kind == "kept":
            assert image.stat().st_mtime == 1  # planning does not count as use
        layout = stack.enter_context(um.Layout.for_model(path, **options))
        assert layout.plan is not None
        assert isinstance(layout.weights, um.Weights)
        with Decoder(layout.weights, layout=layout, ctx=100, threads=1) as decoder:
            assert sizes(decoder.report()) == sizes(plan) == sizes(layout.plan)
            assert decoder.report().facts["load_reason"] == why


def test_a_staged_image_needs_no_room_of_its_own(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "huge_pools", dict)
    copy = um.plan(large, **OPTIONS)
    room = copy.required_bytes - copy["weights:q4_0 repacked"].nbytes + (1 << 20)
    limit = limits.Limit("memory of the machine", 2 * room, room, "more")
    monkeypatch.setattr(limits, "memory_limits", lambda: (limit,))
    assert um.plan(large, **OPTIONS).verdict == "does not fit"
    with um.stage(large, repack=True) as staged:
        assert um.plan(staged.path, **OPTIONS).verdict == "fits"


def test_a_kept_image_has_to_fit_in_the_page_cache(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(planned, "_LEAST_BYTES", 0)
    Decoder(large, **OPTIONS).close()
    (image,) = (tmp_path / "cache").iterdir()
    image.read_bytes()
    plan = um.plan(large, **OPTIONS)
    room = plan.required_bytes + (1 << 20)
    limit = limits.Limit("memory of the machine", 2 * room, room, "more")
    monkeypatch.setattr(limits, "memory_limits", lambda: (limit,))
    refused = um.plan(large, **OPTIONS)
    assert refused.verdict == "does not fit"
    assert refused.spilled_bytes < 1 << 20  # of the rest
    assert "as it is instead of repacking it" in refused.advice[0].text
    with pytest.raises(um.CapacityError, match="memory of the machine"):
        Decoder(large, **OPTIONS)
    assert um.plan(large, ctx=100, threads=1).load == "map"


def test_a_plan_changes_nothing(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("UNIMEM_CACHE", str(folder))
    assert "image" not in um.plan(large, **OPTIONS).facts
    assert not folder.exists()
    Decoder(large, **OPTIONS).close()
    (image,) = folder.iterdir()
    os.truncate(image, 5000)  # the next start removes it
    assert "image" not in um.plan(large, **OPTIONS).facts
    assert list(folder.iterdir()) == [image]


def test_staged_models_are_listed_once(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
    asked: list[str] = []

    def nobody() -> list[Held]:
        asked.append("who stages")
        return []

    monkeypatch.setattr(image_search, "holders", nobody)
    with um.open_weights(large) as weights, um.repack(weights) as made:
        assert made.image is None
    assert len(asked) == 1


def is_current(path: str) -> bool:
    """Return whether the list calls the model staged at a path current."""
    listed = json.loads(show("stage", "--list", "--json")[1])
    (found,) = [each["current"] for each in listed if each["path"] == path]
    return bool(found)


def test_staged_by_the_command(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decode(model)[1]
    monkeypatch.setattr(repack, "repack_into", None)
    model.with_name(IMAGE_NAME).write_bytes(b"no image")  # does not hide an image
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
        assert is_current(path)
        # The keeper reports it as staged; a process that maps it, by its types.
        (kept,) = mapped_models.models(read_process(held.pid))
        assert {part.category for area in kept.areas for part in kept.parts(area)} == {"staging"}
        image = held.paths[0]
        with um.Block.map(image) as block:
            block.as_array()[::4096].sum()
            (mapped,) = [m for m in mapped_models.models(read_process()) if m.path == image]
            assert (mapped.state, mapped.source) == ("staged", str(model))
            rows = {part.category for area in mapped.areas for part in mapped.parts(area)}
            assert rows == {"weights:q4_0 repacked", "weights:padding"}
        model.touch()
        assert not is_current(path)
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
    slow_after(
        1,
        [
            (["--page-cache"], 2, "which no file has"),
            (["--backing", "memfd"], 1, "only tmpfs and shm give"),
        ],
    ),
)
def test_wrong_options_of_staging_are_refused(
    arguments: list[str], code: int, said: str, model: Path
) -> None:
    found = show("stage", "--repack", model, *arguments)
    assert found[0] == code
    assert said in found[2]


def test_a_model_without_such_weights(tmp_path: Path) -> None:
    path = write_model(tmp_path / "f16.gguf", kind="f16")
    if ggml_orders.find_order(1, (256, 64)) is not None:
        pytest.skip("this CPU has an order for f16")
    with pytest.raises(ValueError, match="no tensor has an order of its own"):
        um.stage(path, repack=True)
