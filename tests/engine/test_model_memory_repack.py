"""The decoder on repacked weights: llama.cpp's bits, when `auto` takes them, memory, and ends."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.files.weight_bytes import cached_bytes, drop_from_cache
from support.models import llama_cpp
from support.models.decoders import logits_of, sizes, tokens
from support.models.make import SMALL, Shape, small, write_model
from unimem.backends import ggml, ggml_orders
from unimem.engine import Decoder
from unimem.engine.graph import Headers
from unimem.planning import repack_gain as planned
from unimem.planning.streaming import WHY_STREAMED
from unimem.system import limits
from unimem.system.limits import Limit
from unimem.weights.loading import WHY_MAPPED

Q4_0 = 2
if ggml_orders.find_order(Q4_0, (256, 64)) is None:
    pytest.skip("this build of ggml has no order for q4_0 on this CPU", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("gives_memory_back")

KINDS = [
    name for kind, name in ggml.MATMUL_TYPES.items() if ggml_orders.find_order(kind, (256, 64))
]
CTX = 200
GAIN = 0.01  # so that the rounding of activations does not grow from layer to layer
PROMPT = [1, *tokens(140, seed=7, first=259, vocab=SMALL.vocab)]
OPTIONS: dict[str, Any] = {"ctx": CTX, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    path = write_model(folder / "q4_0.gguf", kind="q4_0", gain=GAIN)
    drop_from_cache(path)
    return path


@pytest.fixture
def gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models gain as large ones do."""
    monkeypatch.setattr(planned, "_LEAST_BYTES", 0)


def logits(decoder: Decoder) -> NDArray[Any]:
    return logits_of(decoder, PROMPT, 8)[1]


@pytest.fixture(scope="module")
def expected(model: Path) -> NDArray[Any]:
    with Decoder(model, load="repack", **OPTIONS) as decoder:
        return logits(decoder)


# ---- the same numbers --------------------------------------------------------------------------


def test_llama_cpp_s_defaults_to_the_bit(model: Path, tmp_path: Path) -> None:
    prompt = PROMPT[:40]
    _, theirs = llama_cpp.greedy(model, prompt, 12, ctx=512, repack=True)
    with Decoder(model, ctx=512, threads=1, load="repack") as decoder:
        np.testing.assert_array_equal(logits_of(decoder, prompt, 12)[1], theirs)
    # K-quants, which llama.cpp repacks, are in the file's order here: sums have another order.
    f16 = write_model(tmp_path / "f16.gguf", kind="f16", gain=GAIN)
    mixed = llama_cpp.quantize(f16, tmp_path / "q4_k_m.gguf")
    chosen, theirs = llama_cpp.greedy(mixed, prompt, 12, ctx=512, repack=True)
    with Decoder(mixed, ctx=512, threads=1) as decoder:
        assert decoder._memory.load == "map"
        ours = logits_of(decoder, prompt, 12)
    assert ours[0] == chosen
    assert np.abs(ours[1] - theirs).max() <= 0.01 * theirs.std()


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_computed_as_in_the_file_s_order(kind: str, tmp_path: Path) -> None:
    shape = small(layers=1, inner=256, vocab=512)
    path = write_model(tmp_path / "m.gguf", shape=shape, kind=kind, gain=GAIN)
    prompt = [token % shape.vocab for token in PROMPT]
    with Decoder(path, load="map", **OPTIONS) as plain:
        chosen, theirs = logits_of(plain, prompt, 8)
    with Decoder(path, load="repack", **OPTIONS) as decoder:
        assert decoder.report().facts["load"] == "repack"
        ours = logits_of(decoder, prompt, 8)
    assert ours[0] == chosen
    assert 0 < np.abs(ours[1] - theirs).max() <= 0.01 * theirs.std()


@pytest.mark.parametrize("load", ["map", "copy", "tape"])
def test_however_the_weights_were_opened(model: Path, expected: NDArray[Any], load: str) -> None:
    with um.Tape(8 << 20) as tape:
        way: dict[str, Any] = {"tape": tape} if load == "tape" else {"load": load}
        with um.open_weights(model, **way) as weights:
            before = weights.load
            with Decoder(weights, load="repack", **OPTIONS) as decoder:
                np.testing.assert_array_equal(logits(decoder), expected)
                if load != "tape":  # which holds more, and outlives weights
                    plan = um.plan(weights, load="repack", **OPTIONS)
                    assert sizes(decoder.report()) == sizes(plan)
                    with pytest.raises(BufferError):
                        weights.close()
                assert (weights.load, decoder.report().facts["load"]) == (before, "repack")
            weights.close()


@pytest.mark.parametrize("load", ["repack", "auto"])
def test_on_a_layout_that_was_made_for_it(
    model: Path, expected: NDArray[Any], load: Any, gains: None
) -> None:
    with um.Layout.for_model(model, load=load, pages="4k", **OPTIONS) as layout:
        plan = layout.plan
        assert plan is not None
        assert plan.rows == um.plan(model, load=load, pages="4k", **OPTIONS).rows
        assert isinstance(layout.weights, um.Weights)
        with Decoder(layout.weights, layout=layout, **OPTIONS) as decoder:
            (block,) = decoder._memory.blocks[1:]
            assert block.requested["pages"] == "4k"
            assert sizes(decoder.report()) == sizes(plan)
            facts = decoder.report().facts
            assert (facts["load"], facts["load_reason"]) == ("repack", plan.load_reason)
            layout.freeze()
            np.testing.assert_array_equal(logits(decoder), expected)


def test_pages_are_those_of_what_is_repacked(model: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layout = um.Layout.for_model(model, load="repack", pages="thp", numa="bind:0", **OPTIONS)
    assert not [text for one in caught if "a mapped file" in (text := str(one.message))]
    assert isinstance(layout.weights, um.Weights)
    with layout, Decoder(layout.weights, layout=layout, **OPTIONS) as decoder:
        (block,) = decoder._memory.blocks[1:]
        assert (block.requested["pages"], block.requested["numa"]) == ("thp", "bind:0")


def test_the_plan_bounds_what_ggml_works_in(model: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"ctx": 1, "threads": 1},
        {"ctx": 600, "threads": 3},
        {"ctx": 300, "threads": 1, "window": 20},
    ]
    for options in cases:
        with Decoder(model, load="repack", **options) as decoder:
            assert decoder.layout.scratch.used_bytes <= decoder.layout.scratch.total_bytes
            header = ggml.Tensor.at(
                next(made for made in decoder._made if isinstance(made, Headers)).weights[
                    "blk.0.ffn_up.weight"
                ]
            )
            assert header.extra


def test_each_decoder_has_what_it_repacks(model: Path) -> None:
    plan = um.plan(model, load="repack", sessions=2, **OPTIONS)
    with (
        um.open_weights(model) as weights,
        Decoder(weights, load="repack", **OPTIONS) as one,
        Decoder(weights, load="repack", **OPTIONS) as other,
    ):
        found = [decoder._memory.repacked for decoder in (one, other)]
        nbytes = sum(repacked.nbytes for repacked in found if repacked is not None)
        assert plan["weights:q4_0 repacked"].nbytes == nbytes
        assert plan["weights:q4_0"].nbytes == weights.by_type()["q4_0"]


# ---- what auto does ----------------------------------------------------------------------------


def test_auto_repacks_what_gains(model: Path, expected: NDArray[Any], gains: None) -> None:
    plan = um.plan(model, **OPTIONS)
    assert (plan.load, plan.verdict) == ("repack", "fits")
    assert "multiplies faster in another order" in plan.load_reason
    repacked = plan["weights:q4_0 repacked"].nbytes
    assert plan.unread_bytes == repacked
    assert f"Fits: {um.plan(model, load='map', **OPTIONS).total_bytes >> 20}" in str(plan)
    assert "not read, since repacked" in str(plan)
    with Decoder(model, **OPTIONS) as decoder:
        assert sizes(decoder.report()) == sizes(plan)
        assert decoder.report().facts["load_reason"] == plan.load_reason
        np.testing.assert_array_equal(logits(decoder), expected)
    # The weights that a token reads fit only once.
    assert plan.required_bytes + plan["weights:q4_0"].nbytes > plan.total_bytes - repacked


def test_auto_leaves_what_gains_nothing(model: Path, tmp_path: Path, gains: None) -> None:
    machine = {"memory": "16G"}
    q8_0 = write_model(tmp_path / "q8_0.gguf", kind="q8_0")
    # Other CPUs may repack it.
    kinds: list[tuple[Path, Any]] = [] if ggml_orders.find_order(8, (256, 64)) else [(q8_0, {})]
    for path, options in (*kinds, (model, {"lock": True}), (model, {"machine": machine})):
        plan = um.plan(path, **OPTIONS, **options)
        assert (plan.load, plan.load_reason, plan.unread_bytes) == ("map", WHY_MAPPED, 0)
    with um.stage(model) as stage:  # each process would have a copy
        assert um.plan(stage.path, **OPTIONS).load == "map"
    with um.open_weights(model) as weights, Decoder(weights, **OPTIONS) as decoder:
        assert decoder._memory.load == "map"
    assert um.plan(model, pages="thp", **OPTIONS).load in ("copy", "direct")


def test_auto_leaves_small_models(model: Path) -> None:
    assert um.plan(model, **OPTIONS).load == "map"


def test_auto_maps_where_a_copy_has_no_room_and_streams_where_nothing_has(
    model: Path, gains: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unimem.system.limits.huge_pools", dict)
    options = OPTIONS | {"ctx": 128}  # the batch of a prompt, streamed or not
    plan = um.plan(model, **options)
    # Data that are read and not yet repacked take a hundredth, or 256 KiB per thread.
    beside = plan.checks[0].needed_bytes - plan.required_bytes
    assert 0 < beside <= limits.thread_count() * (256 << 10)
    needed = plan.total_bytes - plan.unread_bytes + beside

    def leave(nbytes: int) -> None:
        limit = Limit("memory of the machine", 2 * nbytes, nbytes, "more")
        monkeypatch.setattr("unimem.system.limits.memory_limits", lambda: (limit,))

    leave(needed)
    assert um.plan(model, **options).load == "repack"
    leave(needed - plan["other"].nbytes - 1)  # headers exist already
    mapped = um.plan(model, **options)
    assert (mapped.load, mapped.load_reason) == ("map", f"{WHY_MAPPED}; {planned.NO_ROOM}")
    leave(plan.required_bytes - plan["other"].nbytes - 1)
    streamed = um.plan(model, **options)
    assert (streamed.load, streamed.verdict) == ("stream", "streams")
    assert streamed.load_reason == WHY_STREAMED
    refused = um.plan(model, load="repack", **options)
    assert refused.verdict == "does not fit"
    with pytest.raises(um.CapacityError, match="memory of the machine"):
        Decoder(model, load="repack", **options)


def test_a_model_without_an_order_is_mapped_with_a_warning(tmp_path: Path) -> None:
    path = write_model(tmp_path / "f32.gguf", kind="f32")
    with pytest.warns(um.PlacementWarning, match=r"f32\.gguf is not repacked: no tensor has"):
        decoder = Decoder(path, load="repack", **OPTIONS)
    assert decoder._memory.load == "map"
    decoder.close()
    plan = um.plan(path, load="repack", **OPTIONS)
    why = "no tensor has an order of its own on this CPU (types: f32)"
    assert (plan.load, plan.load_reason, why in str(plan)) == ("map", why, True)
    # The fixture checks that an error leaves nothing.
    with warnings.catch_warnings(action="error"), pytest.raises(um.PlacementWarning):
        Decoder(path, load="repack", **OPTIONS)
    with pytest.warns(um.PlacementWarning, match="is not repacked"):
        um.Layout.for_model(path, load="repack", **OPTIONS).close()
    with pytest.raises(ValueError, match="load='repack': expected a model file"):
        um.plan(um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512), load="repack")
    with pytest.raises(ValueError, match="load: expected one of"):
        um.open_weights(path, load="repack")  # type: ignore[arg-type]


# ---- memory, progress and ends -----------------------------------------------------------------


def test_a_model_is_in_ram_once(tmp_path: Path) -> None:
    shape = Shape(hidden=512, layers=3, heads=8, kv_heads=4, inner=2048, vocab=512, ctx=256)
    path = write_model(tmp_path / "m.gguf", shape=shape, kind="q4_0")
    drop_from_cache(path)
    with Decoder(path, load="repack", **OPTIONS) as decoder:
        weights, repacked = decoder.weights, decoder._memory.repacked
        assert repacked is not None
        assert repacked.nbytes > 0.9 * weights.nbytes
        # The table of embeddings and the norms, and what faulting maps around them.
        rest = weights.nbytes - repacked.nbytes
        assert cached_bytes(path) <= rest + 32 * 4096 * (2 * shape.layers + 2)
        tensors = weights.residency().tensors
        for name, tensor in weights.tensors.items():
            if name not in repacked.tensors:
                assert tensors[name].mapped_bytes == tensor.nbytes
        # An array has the file's bytes.
        name = "blk.1.ffn_up.weight"
        with path.open("rb") as file:
            file.seek(weights.tensors[name].offset)
            data = file.read(weights.tensors[name].nbytes)
        assert weights.tensors[name].as_array().tobytes() == data


def test_progress_and_interrupts(model: Path) -> None:
    told: list[tuple[int, int]] = []
    Decoder(model, load="repack", progress=lambda *n: told.append(n), **OPTIONS).close()
    total = told[-1][1]
    assert told == sorted(told)
    assert told.count((total, total)) == 1
    assert {of for _, of in told} == {total}

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with um.Layout.for_model(model, load="map", **OPTIONS) as layout:
        assert isinstance(layout.weights, um.Weights)
        for path in (model, layout.weights):
            with pytest.raises(KeyboardInterrupt):
                Decoder(path, load="repack", layout=layout, progress=interrupt, **OPTIONS)
            assert layout.scratch.used_bytes == layout.history.used_bytes == 0
