"""The decoder over weights however they come: the same bits, every byte accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
pytest.importorskip(
    "unimem.system.ggml", reason="the engine needs ggml: pip install '.[run]'", exc_type=ImportError
)

import gguf_files as gf
import unimem as um
from huge_pages import eight_huge_pages  # noqa: F401 - a fixture
from models.make import SMALL, write_model
from unimem.engine import Decoder, UnsupportedModel
from unimem.system.limits import Limit

pytestmark = pytest.mark.usefixtures("gives_memory_back")

CTX = 200
PROMPT = [1, *(int(t) for t in np.random.default_rng(3).integers(259, SMALL.vocab, 140))]
LOADS = ["map", "copy", "direct"]
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
    rows = [decoder.prefill(PROMPT).copy()]
    for _ in range(16):
        decoder.generate_next_token()
        rows.append(decoder.logits.copy())
    return np.array(rows)


@pytest.fixture(scope="module")
def expected(model: Path) -> NDArray[Any]:
    with Decoder(model, ctx=CTX, threads=1) as decoder:
        return logits_of(decoder)


def assert_same(decoder: Decoder, expected: NDArray[Any]) -> None:
    assert np.array_equal(logits_of(decoder), expected)


# ---- the same bits -----------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["auto", *LOADS])
@pytest.mark.parametrize("files", ["one", "split", "split without tensors in the first"])
def test_every_mode_and_split_files_give_identical_logits(
    model: Path, expected: NDArray[Any], tmp_path: Path, files: str, load: Any
) -> None:
    link = tmp_path / "m.gguf"
    link.symlink_to(model)
    paths = [link] if files == "one" else gf.split(link, 7, no_tensor_first=files != "split")
    with Decoder(paths[-1], ctx=CTX, threads=1, load=load) as decoder:
        assert decoder.weights.load == ("map" if load == "auto" else load)
        assert decoder.weights.files == tuple(map(str, paths))
        assert_same(decoder, expected)


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


def opening(**options: Any) -> Opens:
    return lambda path: um.open_weights(path, **options)


WAYS: dict[str, Opens] = {
    "thp": opening(pages="thp"),
    "direct in thp": opening(load="direct", pages="thp"),
    "interleaved": opening(numa="interleave"),
    "locked": opening(load="copy", lock="onfault"),
    "tape": on_a_tape,
    "staged": staged,
}


@pytest.mark.parametrize("split", [False, True], ids=["one file", "split"])
@pytest.mark.parametrize("way", WAYS)
def test_however_they_are_placed_the_logits_are_identical(
    model: Path, parts: list[Path], expected: NDArray[Any], way: str, split: bool
) -> None:
    with (
        WAYS[way](parts[0] if split else model) as weights,
        Decoder(weights, ctx=CTX, threads=1) as decoder,
    ):
        assert_same(decoder, expected)


@pytest.mark.usefixtures("eight_huge_pages")
@pytest.mark.parametrize("load", ["copy", "direct"])
def test_identical_from_hugetlb_pages(model: Path, expected: NDArray[Any], load: Any) -> None:
    with (
        um.open_weights(model, load=load, pages="2m", strict=True) as weights,
        Decoder(weights, ctx=CTX, threads=1) as decoder,
    ):
        assert decoder.report().rows[0].granted.pages == "2m"  # type: ignore[union-attr]
        assert_same(decoder, expected)


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
            assert_same(decoder, expected)
            with pytest.raises(BufferError):
                layout.close()


def test_llama_cpp_reads_the_same_split_files(tmp_path: Path) -> None:
    pytest.importorskip("cyllama", reason="cyllama (extra test) is the peer: pip install '.[test]'")
    import llama_cpp

    first = gf.split(write_model(tmp_path / "f16.gguf", kind="f16"), 10)[0]
    prompt = PROMPT[:12]
    tokens, theirs = llama_cpp.greedy(first, prompt, 16, ctx=512)
    with Decoder(first, ctx=512, threads=1, load="copy") as decoder:
        decoder.prefill(prompt)
        for row, token in zip(theirs, tokens, strict=True):
            assert np.abs(decoder.logits - row).max() <= 0.01 * theirs.std()
            assert decoder.generate_next_token() == token


# ---- every byte --------------------------------------------------------------------------------


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("split", [False, True], ids=["one file", "split"])
def test_what_was_planned_is_what_is_there(
    model: Path, parts: list[Path], load: Any, split: bool
) -> None:
    path = parts[0] if split else model
    planned = um.plan(path, ctx=CTX, threads=1, load=load)
    with Decoder(path, ctx=CTX, threads=1, load=load) as decoder:
        report = decoder.report()
        rows = {row.category: row for row in report.rows}
        assert {name: row.nbytes for name, row in rows.items()} == {
            row.category: row.nbytes for row in planned.rows
        }
        blocks = decoder.weights.blocks
        assert len(blocks) == (len(parts) if split and load == "map" else 1)
        weights = [row for name, row in rows.items() if name.startswith("weights:")]
        assert all(row.nbytes == row.resident_bytes for row in weights)
        # Over all blocks, as the kernel says.
        placements = [block.verify() for block in blocks]
        in_ram = sum(row.granted.resident_bytes for row in weights if row.granted is not None)
        assert in_ram == sum(p.resident_bytes for p in placements)
        assert in_ram >= decoder.weights.mapped_bytes
        assert report.facts["load"] == load
        assert report.facts["load_reason"] == decoder.weights.load_reason


def test_a_copy_that_is_there_already_need_not_fit_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        # Nor what is staged: it is in RAM, and no page cache that could be dropped.
        Decoder(stage.path, ctx=CTX, threads=1).close()
        with pytest.raises(um.CapacityError, match="available"):
            Decoder(model, ctx=CTX, threads=1, load="copy")
        leave(rest - 1)
        with pytest.raises(um.CapacityError, match="available"):
            Decoder(weights, ctx=CTX, threads=1)


def test_borrowed_weights_cannot_be_closed_under_a_decoder(parts: list[Path]) -> None:
    for load in LOADS:
        with um.open_weights(parts[0], load=load) as weights:  # type: ignore[arg-type]
            decoder = Decoder(weights, ctx=CTX, threads=1)
            with pytest.raises(BufferError):
                weights.close()
            decoder.close()
            weights.close()


# ---- progress, and what is refused -------------------------------------------------------------


@pytest.mark.parametrize("load", LOADS)
def test_progress(parts: list[Path], load: Any) -> None:
    told: list[tuple[int, int]] = []
    with Decoder(
        parts[0], ctx=CTX, threads=1, load=load, progress=lambda *n: told.append(n)
    ) as decoder:
        (total,) = {total for _, total in told}
        assert 0 < total - decoder.weights.nbytes < 64 * 1024
    assert told == sorted(told)
    assert told[-1] == (total, total)
    assert told.count((total, total)) == 1


@pytest.mark.parametrize("load", LOADS)
def test_what_progress_raises_leaves_nothing(parts: list[Path], load: Any) -> None:
    def stop(done: int, total: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Decoder(parts[0], ctx=CTX, threads=1, load=load, progress=stop)


def test_what_cannot_run_is_refused_before_it_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("unimem.weights.loading.read_parts", read)
    other = write_model(tmp_path / "window.gguf", metadata={"attention.sliding_window": 64})
    none = tmp_path / "none.gguf"
    none.write_bytes(gf.everything())
    for path, options, error, text in (
        (model, {"ctx": 2**30}, um.CapacityError, "a context of 1073741824 tokens"),
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
            Decoder(path, load=load)  # type: ignore[arg-type]
    assert um.plan(path).unknown


def test_opened_weights_are_loaded_already(model: Path) -> None:
    with um.open_weights(model) as weights:
        with pytest.raises(ValueError, match="load='copy': the weights are opened already"):
            Decoder(weights, ctx=CTX, load="copy")
        with pytest.raises(ValueError, match="opened already"):
            um.Layout.for_model(weights, ctx=CTX, load="direct")
        Decoder(weights, ctx=CTX, threads=1, load="map").close()
