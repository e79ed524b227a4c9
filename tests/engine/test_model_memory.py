"""The decoder over weights loaded in every way: the same bits, every byte accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

import unimem as um
from support.files import gguf_files as gf
from support.models import decoders, llama_cpp
from support.models.decoders import sizes, tokens
from support.models.make import SMALL, write_model
from unimem.engine import Decoder, UnsupportedModel
from unimem.system.limits import Limit

pytestmark = pytest.mark.usefixtures("gives_memory_back")

CTX = 200
PROMPT = [1, *tokens(140, seed=3, first=259, vocab=SMALL.vocab)]
LOADS: list[Any] = ["map", "copy", "direct"]
MIB = 1 << 20

Opens: TypeAlias = Callable[[Path], AbstractContextManager[um.Weights]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some MiB, so that a copy of it can lie in huge pages."""
    return write_model(tmp_path_factory.mktemp("model") / "small.gguf", kind="q8_0")


@pytest.fixture(scope="module")
def parts(model: Path) -> list[Path]:
    return gf.split(model, 9)


def logits_of(decoder: Decoder) -> NDArray[Any]:
    """The logits of a prompt of more than a batch, and of the tokens that follow."""
    return decoders.logits_of(decoder, PROMPT, 10)[1]


@pytest.fixture(scope="module")
def expected(model: Path) -> NDArray[Any]:
    with Decoder(model, ctx=CTX, threads=1) as decoder:
        return logits_of(decoder)


# ---- the same bits -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "load"),
    [
        *(("one", load) for load in ("auto", *LOADS)),
        *(("split", load) for load in LOADS),
        ("split without tensors in the first", "copy"),
        ("split without tensors in the first", "auto"),
    ],
)
def test_every_mode_and_split_files_give_identical_logits(
    model: Path, expected: NDArray[Any], tmp_path: Path, files: str, load: Any
) -> None:
    link = tmp_path / "m.gguf"
    link.symlink_to(model)
    paths = [link] if files == "one" else gf.split(link, 7, no_tensor_first=files != "split")
    with Decoder(paths[-1], ctx=CTX, threads=1, load=load) as decoder:
        assert decoder.weights.load == ("map" if load == "auto" else load)
        assert decoder.weights.files == tuple(map(str, paths))
        np.testing.assert_array_equal(logits_of(decoder), expected)


@contextmanager
def on_a_tape(path: Path) -> Iterator[um.Weights]:
    with um.Tape(16 * MIB, name="model") as tape:
        tape.take_bytes(100)
        with um.open_weights(path, tape=tape) as weights:
            assert all(tape.owns(tensor.address) for tensor in weights.tensors.values())
            yield weights


@contextmanager
def staged(path: Path) -> Iterator[um.Weights]:
    with um.stage(path) as stage, um.open_weights(stage.path) as weights:
        assert weights.load == "map"
        yield weights


WAYS: dict[str, Opens] = {
    "thp": partial(um.open_weights, pages="thp"),
    "direct in thp": partial(um.open_weights, load="direct", pages="thp"),
    "interleaved": partial(um.open_weights, numa="interleave"),
    "locked": partial(um.open_weights, load="copy", lock="onfault"),
    "tape": on_a_tape,
    "staged": staged,
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.locks] if way == "locked" else []) for way in WAYS]
)
def test_however_they_are_placed_the_logits_are_identical(
    model: Path, parts: list[Path], expected: NDArray[Any], way: str
) -> None:
    for path in (model, parts[0]):
        with WAYS[way](path) as weights, Decoder(weights, ctx=CTX, threads=1) as decoder:
            np.testing.assert_array_equal(logits_of(decoder), expected)


@pytest.mark.usefixtures("eight_huge_pages")
@pytest.mark.parametrize("load", LOADS[1:])
def test_identical_from_hugetlb_pages(model: Path, expected: NDArray[Any], load: Any) -> None:
    with (
        um.open_weights(model, load=load, pages="2m", strict=True) as weights,
        Decoder(weights, ctx=CTX, threads=1) as decoder,
    ):
        assert decoder.report().rows[0].granted.pages == "2m"  # type: ignore[union-attr]
        np.testing.assert_array_equal(logits_of(decoder), expected)


def test_on_the_layout_s_own_tape(parts: list[Path], expected: NDArray[Any]) -> None:
    planned = um.plan(parts[0], ctx=CTX, threads=1, load="copy", pages="4k")
    with um.Layout(16 * MIB, planned.scratch_bytes, planned.history_bytes) as layout:
        assert isinstance(layout.weights, um.Tape)
        with (
            um.open_weights(parts[0], tape=layout.weights) as weights,
            Decoder(weights, ctx=CTX, threads=1, layout=layout) as decoder,
        ):
            assert layout.stat().weights_used == weights.mapped_bytes
            layout.freeze()
            np.testing.assert_array_equal(logits_of(decoder), expected)
            with pytest.raises(BufferError):
                layout.close()


def test_llama_cpp_reads_the_same_split_files(tmp_path: Path) -> None:
    first = gf.split(write_model(tmp_path / "f16.gguf", kind="f16"), 10)[0]
    prompt = PROMPT[:12]
    expected, theirs = llama_cpp.greedy(first, prompt, 16, ctx=512)
    with Decoder(first, ctx=512, threads=1, load="copy") as decoder:
        chosen, ours = decoders.logits_of(decoder, prompt, 16)
    assert chosen == expected
    llama_cpp.assert_same_logits(ours, theirs)


# ---- every byte --------------------------------------------------------------------------------


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("is_split", [False, True], ids=["one file", "split"])
def test_the_plan_is_exact(model: Path, parts: list[Path], load: Any, is_split: bool) -> None:
    path = parts[0] if is_split else model
    with Decoder(path, ctx=CTX, threads=1, load=load) as decoder:
        report, blocks = decoder.report(), decoder.weights.blocks
        assert sizes(report) == sizes(um.plan(path, ctx=CTX, threads=1, load=load))
        assert len(blocks) == (len(parts) if is_split and load == "map" else 1)
        weights = [row for row in report.rows if row.category.startswith("weights:")]
        assert all(row.nbytes == row.resident_bytes for row in weights)
        # Over all blocks, as the kernel says.
        in_ram = sum(row.granted.resident_bytes for row in weights if row.granted is not None)
        assert in_ram == sum(block.verify().resident_bytes for block in blocks)
        assert in_ram >= decoder.weights.mapped_bytes
        assert report.facts["load"] == load
        assert report.facts["load_reason"] == decoder.weights.load_reason


def test_a_copy_that_is_there_need_not_fit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A copy in pages of a pool would need no room in the cgroup.
    monkeypatch.setattr("unimem.system.limits.huge_pools", dict)
    planned = um.plan(model, ctx=CTX, threads=1, load="copy")
    there = sum(r.nbytes for r in planned.rows if r.category.startswith(("weights:", "other")))
    rest = planned.total_bytes - there

    def leave(nbytes: int) -> None:
        limit = Limit("a cgroup", 2 * nbytes, nbytes, "")
        monkeypatch.setattr("unimem.system.limits.memory_limits", lambda: (limit,))

    with um.open_weights(model, load="copy") as weights, um.stage(model) as stage:
        leave(rest)
        Decoder(weights, ctx=CTX, threads=1).close()
        # A staged model needs no room, too: it is in RAM, but no droppable page cache.
        Decoder(stage.path, ctx=CTX, threads=1).close()
        with pytest.raises(um.CapacityError, match="available"):
            Decoder(model, ctx=CTX, threads=1, load="copy")
        leave(rest - 1)
        with pytest.raises(um.CapacityError, match="available"):
            Decoder(weights, ctx=CTX, threads=1)


# ---- progress, and what is refused -------------------------------------------------------------


@pytest.mark.parametrize("load", LOADS)
def test_progress(parts: list[Path], load: Any) -> None:
    told: list[tuple[int, int]] = []
    options: dict[str, Any] = {"ctx": CTX, "threads": 1, "load": load}
    with Decoder(parts[0], **options, progress=lambda *n: told.append(n)) as decoder:
        (total,) = {total for _, total in told}
        assert 0 < total - decoder.weights.nbytes < 64 * 1024
    assert told == sorted(told)
    assert told[-1] == (total, total)
    assert told.count((total, total)) == 1

    # An exception leaves nothing.
    with pytest.raises(KeyboardInterrupt):
        Decoder(parts[0], **options, progress=Mock(side_effect=KeyboardInterrupt))


def test_an_unsupported_model_is_refused_before_it_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(side_effect=AssertionError("it was read"))
    monkeypatch.setattr("unimem.weights.loading.read_parts", read)
    other = write_model(tmp_path / "window.gguf", metadata={"attention.sliding_window": 64})
    none = tmp_path / "none.gguf"
    none.write_bytes(gf.everything())
    for path, options, error, text in (
        (model, {"ctx": 2**30}, um.CapacityError, "a context of 1,073,741,824 tokens"),
        (other, {"ctx": 65}, UnsupportedModel, "64"),
        (none, {}, UnsupportedModel, "'none' is not supported"),
    ):
        with pytest.raises(error, match=text):
            Decoder(path, load="copy", **options)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="it was read"):
        Decoder(model, ctx=CTX, load="copy")


def test_safetensors_are_not_run(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    path = tmp_path / "model.safetensors"
    safetensors.save_file({"lm_head.weight": np.ones((2, 4), "float16")}, path)
    for load in LOADS:
        with pytest.raises(UnsupportedModel, match=r"safetensors.*GGUF files of llama"):
            Decoder(path, load=load)
    assert um.plan(path).unknown


def test_opened_weights_are_loaded_already(model: Path) -> None:
    with um.open_weights(model) as weights:
        with pytest.raises(ValueError, match="load='copy': the weights are opened already"):
            Decoder(weights, ctx=CTX, load="copy")
        with pytest.raises(ValueError, match="opened already"):
            um.Layout.for_model(weights, ctx=CTX, load="direct")
        Decoder(weights, ctx=CTX, threads=1, load="map").close()
