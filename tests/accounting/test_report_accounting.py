"""Planned, reported and mapped memory of a decoder are equal."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files import gguf_files as gf
from support.kernel import proc_maps
from support.kernel.proc_maps import PAGE
from support.project.tiers import slow_after

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
pytest.importorskip("unimem_ggml", reason="the engine needs ggml: pip install ./ggml '.[run]'")

from support.models.make import SMALL, TINY, Shape, write_model
from support.processes.warm_python import run_script
from support.project.checkout import ROOT
from unimem.engine import Decoder

pytestmark = pytest.mark.usefixtures("gives_memory_back")

# Heads that blocks of 32 values fit into.
WIDE = Shape(hidden=64, layers=2, heads=4, kv_heads=2, inner=128, vocab=320, ctx=2000, head_dim=64)
SHAPES = {"tiny": TINY, "small": SMALL, "wide": WIDE, "deep": replace(WIDE, hidden=256, layers=7)}

# Architecture, type and shape of the model, and options of the decoder.
# The fast tier has each architecture, type, shape, size and option once.
DECODERS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("llama", "bf16", "tiny", {"ctx": 1}),
    ("gemma3", "q8_0", "deep", {"ctx": 500, "kv_dtype": "q8_0,q4_0"}),
    ("llama", "q4_0", "tiny", {"ctx": 127, "kv_dtype": "f32"}),
    ("llama", "f16", "wide", {"ctx": 2000}),
    ("qwen2", "q8_0", "wide", {"ctx": 333, "kv_dtype": "bf16"}),
    ("llama", "q8_0", "wide", {"ctx": 500, "window": 77, "kv_dtype": "q8_0"}),
    ("qwen3", "q8_0", "wide", {"ctx": 500, "window": 500, "kv_dtype": "bf16"}),
    ("qwen2", "f16", "small", {"ctx": 700, "load": "copy"}),
    ("qwen3", "f32", "small", {"ctx": 700, "load": "direct"}),
    ("qwen3", "f16", "small", {"ctx": 900, "threads": 7}),
    ("llama", "q4_0", "small", {"ctx": 700, "load": "repack"}),
    ("qwen2", "q4_0", "small", {"ctx": 300, "load": "repack", "window": 20}),
    ("qwen3moe", "q4_0", "small", {"ctx": 300, "load": "repack"}),
    *(("llama", kind, "tiny", {"ctx": 64}) for kind in ("f16", "bf16", "q8_0", "q4_0")),
    ("qwen2", "q8_0", "wide", {"ctx": 100}),
    ("qwen3", "q8_0", "wide", {"ctx": 100}),
    *(
        ("llama", "q8_0", "wide", {"ctx": 333, "kv_dtype": kind})
        for kind in ("f32", "bf16", "f16", "q8_0")
    ),
    *(("llama", "f16", "wide", {"ctx": ctx}) for ctx in (1, 2, 127, 128, 129, 1500)),
    ("llama", "q8_0", "wide", {"ctx": 500, "window": 1, "kv_dtype": "f16"}),
    ("qwen2", "q8_0", "wide", {"ctx": 500, "window": 200, "kv_dtype": "f32"}),
    *(("llama", "q8_0", "small", {"ctx": 700, "load": load}) for load in ("map", "copy", "direct")),
    *(("qwen3", "f16", "small", {"ctx": 900, "threads": n}) for n in (1, 2)),
    # Layers that slide over more tokens than there are, over as many, and over one less.
    *(("gemma3", "f16", "deep", {"ctx": ctx}) for ctx in (1, 47, 48, 49, 2000)),
    ("gemma3", "q8_0", "deep", {"ctx": 500, "kv_dtype": "q8_0"}),
    ("gemma3", "f16", "deep", {"ctx": 400, "window": 48}),
    ("gemma3", "q4_0", "deep", {"ctx": 300, "load": "repack", "window": 60}),
    ("gemma3", "f16", "deep", {"ctx": 400, "window": 400}),
    ("gemma3", "f16", "wide", {"ctx": 400}),  # no layer keeps all tokens
    *(("qwen3moe", "f16", "wide", {"ctx": ctx, "window": ctx}) for ctx in (1, 600)),
]


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")

    def make(arch: str, kind: str, shape: str) -> Path:
        path = folder / f"{arch}-{kind}-{shape}.gguf"
        return path if path.exists() else write_model(path, arch, SHAPES[shape], kind)

    return make


BESIDE = {"other", "diagnostics"}  # headers' copies, and what a process shows of itself


def rows_of(things: Any) -> dict[str, int]:
    return {row.category: row.nbytes for row in things.rows}


def parts_of(block: um.Block) -> list[proc_maps.Mapping]:
    return proc_maps.mappings(block.address, block.reserved_bytes)


def smaps_sizes(blocks: list[um.Block]) -> int:
    """Return the kernel's sizes for these blocks, half of a double mapping."""
    total = 0
    for block in blocks:
        parts = [part for part in parts_of(block) if part.access[0] == "r"]
        assert parts[0].start == block.address
        size = sum(part.end - part.start for part in parts)
        twice = block.requested["shared"] is True and size == 2 * block.requested["nbytes"]
        total += size // 2 if twice else size
    return total


def in_smaps(blocks: list[um.Block]) -> int:
    parts = [part for block in blocks for part in parts_of(block)]
    return sum(part.fields["Pss"] + proc_maps.hugetlb_bytes(part) for part in parts)


def blocks_of(decoder: Decoder) -> list[um.Block]:
    layout = decoder.layout
    blocks = [*decoder._memory.blocks, layout.scratch.block, layout.history.block]
    return blocks + decoder._history.blocks


def weights_of(layout: um.Layout) -> um.Weights:
    assert isinstance(layout.weights, um.Weights)
    return layout.weights


def assert_is_planned(plan: um.Plan, decoder: Decoder) -> None:
    report = decoder.report()
    assert rows_of(report) == rows_of(plan)
    # The rest is in no block of the decoder; another test checks a process with nothing else.
    rows = [row for row in report.rows if row.category not in BESIDE]
    assert report.total_bytes == plan.total_bytes
    assert sum(row.nbytes for row in rows) == smaps_sizes(blocks_of(decoder))
    assert sum(row.resident_bytes or 0 for row in rows) == in_smaps(blocks_of(decoder))


@pytest.mark.parametrize(("arch", "kind", "shape", "options"), slow_after(6, DECODERS), ids=str)
def test_planned_is_reported_is_mapped(
    make_model: Any, arch: str, kind: str, shape: str, options: dict[str, Any]
) -> None:
    path = make_model(arch, kind, shape)
    options = {"threads": 2} | options
    plan = um.plan(path, **options)
    assert plan.fits
    assert plan.unknown == ()
    with Decoder(path, **options) as decoder:
        assert_is_planned(plan, decoder)
        decoder.prefill([1])
        assert rows_of(decoder.report()) == rows_of(plan)
        assert decoder.ctx == plan.ctx


@pytest.mark.parametrize(("load", "pages", "window"), [
    ("map", "thp", None), ("map", "4k", 100), ("copy", "4k", 100),
    ("copy", "thp", None), ("direct", "4k", None),
])  # fmt: skip
def test_on_a_layout_of_other_pages(make_model: Any, load: Any, pages: Any, window: Any) -> None:
    path = make_model("llama", "q8_0", "small")
    options: dict[str, Any] = {"ctx": 640, "threads": 1, "window": window}
    plan = um.plan(path, load=load, pages=pages, **options)
    is_refused = load == "map" and pages == "thp"
    with pytest.warns(um.PlacementWarning, match="page cache") if is_refused else nullcontext():
        layout = um.Layout.for_model(path, load=load, pages=pages, **options)
    with layout, Decoder(weights_of(layout), layout=layout, **options) as decoder:
        assert layout.plan is not None
        assert rows_of(layout.plan) == rows_of(plan)
        assert_is_planned(plan, decoder)


@pytest.mark.usefixtures("eight_huge_pages")
@pytest.mark.parametrize("pages", ["auto", "2m"])
def test_on_reserved_pages(make_model: Any, pages: Any) -> None:
    # The weights take two of eight pages, and the rest is enough for everything else.
    path = make_model("llama", "q8_0", "small")
    options: dict[str, Any] = {"ctx": 640, "threads": 1, "load": "copy"}
    plan = um.plan(path, pages=pages, **options)
    assert plan.fits
    with um.Layout.for_model(path, pages=pages, **options) as layout:
        options = {"ctx": 640, "threads": 1}
        assert weights_of(layout).blocks[0].granted.pages == "2m"
        with Decoder(weights_of(layout), layout=layout, **options) as decoder:
            assert_is_planned(plan, decoder)


def test_several_sessions_share_the_weights(make_model: Any) -> None:
    path = make_model("llama", "q8_0", "wide")
    plan = um.plan(path, ctx=200, threads=1, sessions=3, load="copy")
    with (
        um.open_weights(path, load="copy") as weights,
        Decoder(weights, ctx=200, threads=1) as first,
        Decoder(weights, ctx=200, threads=1) as second,
        Decoder(weights, ctx=200, threads=1) as third,
    ):
        three = [rows_of(decoder.report()) for decoder in (first, second, third)]
        shared = {name for name in three[0] if name.startswith("weights")} | BESIDE
        total = {
            name: nbytes if name in shared else sum(rows[name] for rows in three)
            for name, nbytes in three[0].items()
        }
        assert total == rows_of(plan)
        blocks = {block.address: block for d in (first, second, third) for block in blocks_of(d)}
        beside = sum(rows_of(plan)[name] for name in BESIDE)
        assert smaps_sizes(list(blocks.values())) == plan.total_bytes - beside


@pytest.mark.parametrize("batch", [1, 5])
def test_a_batch_of_streams(make_model: Any, batch: int) -> None:
    path = make_model("qwen2", "f16", "wide")
    plan = um.plan(path, ctx=150, batch=batch, threads=1, kv_dtype="q8_0")
    with um.Layout.for_model(path, ctx=150, batch=batch, threads=1, kv_dtype="q8_0") as layout:
        weights = weights_of(layout)
        dims = um.ModelDims.from_weights(weights)
        cache = um.KVCache.for_dims(
            dims, max_seq_len=150, batch=batch, dtype="q8_0", order="head", tape=layout.history
        )
        assert layout.history.available_bytes == 0
        assert cache.capacity_bytes == plan.history_bytes
        blocks = [*weights.blocks, layout.scratch.block, layout.history.block]
        assert rows_of(plan)["kv"] == layout.history.block.nbytes
        beside = sum(rows_of(plan)[name] for name in BESIDE)
        assert smaps_sizes(blocks) == plan.total_bytes - beside


@pytest.mark.parametrize("load", ["map", "copy"])
def test_a_split_model(make_model: Any, tmp_path: Path, load: Any) -> None:
    whole = shutil.copy(make_model("llama", "q8_0", "wide"), tmp_path)
    first, *_ = gf.split(Path(whole), 5)
    plan = um.plan(first, ctx=100, threads=1, load=load)
    with Decoder(first, ctx=100, threads=1, load=load) as decoder:
        assert_is_planned(plan, decoder)


def test_weights_on_a_tape(make_model: Any) -> None:
    path = make_model("llama", "q8_0", "wide")
    with um.open_weights(path, load="copy", pages="4k") as weights:
        nbytes = weights.mapped_bytes
    with (
        um.Tape(nbytes, category="weights", pages="4k") as tape,
        um.open_weights(path, tape=tape) as weights,
    ):
        plan = um.plan(weights, ctx=100, threads=1)
        with Decoder(weights, ctx=100, threads=1) as decoder:
            assert_is_planned(plan, decoder)
            assert nbytes % PAGE == 0


ALONE = """
import sys
sys.path.insert(0, {tests!r})
from support.kernel import proc_maps
import unimem as um
from unimem.engine import Decoder
from unimem._core.ledger import entries

path, load, pages, window = {path!r}, {load!r}, {pages!r}, {window!r}
options = dict(ctx=300, threads=2, window=window)
plan = um.plan(path, load=load, pages=pages, **options)
with (
    um.Layout.for_model(path, load=load, pages=pages, **options) as layout,
    Decoder(layout.weights, layout=layout, **options) as decoder,
):
    planned = {{row.category: row.nbytes for row in plan.rows}}
    of_decoder = {{row.category: row.nbytes for row in decoder.report().rows}}
    of_process = {{
        row.category: row.nbytes
        for row in um.report().rows
        if row.category in planned or row.category.startswith("weights")
        or row.category in ("staging", "diagnostics", "other")
    }}
    assert planned == of_decoder == of_process, (planned, of_decoder, of_process)
    total = 0
    for entry in entries():
        start, end = entry.address, entry.address + entry.reserved_bytes
        size = sum(
            min(part.end, end) - max(part.start, start)
            for part in proc_maps.mappings(start, entry.reserved_bytes)
            if part.access[0] == "r"
        )
        total += size // 2 if entry.reserved_bytes == 2 * entry.nbytes else size
    assert total == plan.total_bytes, (total, plan.total_bytes)
    print("equal", len(planned))
"""


@pytest.mark.parametrize(("load", "pages", "window"), [
    ("map", "auto", 100), ("copy", "4k", None),
    pytest.param("map", "auto", None, marks=pytest.mark.slow),
    pytest.param("direct", "thp", None, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_process_with_one_decoder_has_just_what_was_planned(
    make_model: Any, load: str, pages: str, window: int | None
) -> None:
    path, tests = str(make_model("llama", "q8_0", "small")), str(ROOT / "tests")
    script = ALONE.format(tests=tests, path=path, load=load, pages=pages, window=window)
    done = run_script(script, strict=True)
    assert done.stdout == "equal 9\n", done.stderr
