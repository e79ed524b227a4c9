"""Plans: the memory needed, whether it fits, and the longest context."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files import gguf_files as gf
from unimem._core.status import ledger
from unimem.base.text import format_bytes
from unimem.planning.needs import PREFILL_BATCH, token_bytes
from unimem.system.limits import Limit

DIMS = um.ModelDims(2048, 5632, 32, 4, 64, 32000, 22, 8192)
GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
    from support.models.make import SMALL, write_model

    return write_model(tmp_path / "m.gguf", shape=SMALL)


def rows(plan: um.Plan) -> dict[str, int]:
    return {row.category: row.nbytes for row in plan.rows}


def weights_bytes(plan: um.Plan) -> int:
    return sum(nbytes for name, nbytes in rows(plan).items() if name.startswith("weights"))


def in_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


@pytest.mark.usefixtures("available")
def test_dims() -> None:
    plan = um.plan(DIMS, threads=4)
    names = ["weights:f16", "kv", "scratch", "logits", "tokens", "diagnostics"]
    assert list(rows(plan)) == names
    assert (plan.ctx, plan.max_ctx, plan.fits, plan.advice) == (4096, 8192, True, ())
    assert rows(plan)["logits"] == 4 * 32000
    kv = um.KVCache.storage_bytes(22, 4, 64, 4096)
    assert plan.history_bytes == kv
    assert 0 <= rows(plan)["kv"] - kv < 2 << 20  # in whole pages, transparent huge ones
    # K and V, layers, tokens, heads, their size, bytes of a float16; then alignment.
    assert 0 <= kv - 2 * 22 * 4096 * 4 * 64 * 2 < 64 * 44
    assert rows(plan)["tokens"] == token_bytes(4096) == 128 * 16 + 4 + 4 * 4096
    tape = sum(rows(plan)[name] for name in ("scratch", "logits", "tokens"))
    assert tape == -(-plan.scratch_bytes // (2 << 20)) * (2 << 20)
    assert "estimate" in plan.unknown[0]
    assert plan.total_bytes == sum(rows(plan).values())
    # 1.1 billion parameters.
    assert rows(plan)["weights:f16"] == pytest.approx(2 * 1.1e9, rel=0.02)
    quantized = um.plan(replace(DIMS, quantized=True), threads=4)
    assert rows(quantized)["weights:q8_0"] == pytest.approx(1.1e9 * 34 / 32, rel=0.02)


@pytest.mark.usefixtures("available")
def test_each_option_changes_its_figures() -> None:
    base = rows(um.plan(DIMS, ctx=1000, threads=2, pages="4k"))
    for options in ({"kv_dtype": "f32"}, {"batch": 2}, {"ctx": 2000}):
        asked: Any = {"ctx": 1000, "threads": 2, "pages": "4k"} | options
        assert rows(um.plan(DIMS, **asked))["kv"] == pytest.approx(2 * base["kv"], rel=1e-3)
    many = um.plan(DIMS, ctx=1000, threads=64, pages="4k")
    assert rows(many)["scratch"] > base["scratch"]
    twice = rows(um.plan(DIMS, ctx=1000, threads=2, pages="4k", sessions=2))
    once = {name for name in base if name.startswith(("weights", "diagnostics"))}
    assert twice == {name: n if name in once else 2 * n for name, n in base.items()}


@pytest.mark.usefixtures("available")
def test_types_of_the_cache() -> None:
    values = 2 * 22 * 1024 * 4 * 64
    halves = dict.fromkeys(("f16", "float16", "bf16"), 2 * values)
    blocks = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18, "iq4_nl": 18}
    quantized = {kv_dtype: values // 32 * nbytes for kv_dtype, nbytes in blocks.items()}
    for kv_dtype, nbytes in ({"f32": 4 * values} | quantized | halves).items():
        plan = um.plan(DIMS, ctx=1024, kv_dtype=kv_dtype, pages="4k")
        assert rows(plan)["kv"] == in_pages(nbytes)
        assert plan.kv_dtype == kv_dtype.replace("float", "f")
    plan = um.plan(DIMS, ctx=1024, kv_dtype="q8_0,iq4_nl", pages="4k")
    assert rows(plan)["kv"] == in_pages(values // 64 * (34 + 18))
    assert plan.kv_dtype == "q8_0,iq4_nl"
    assert um.plan(DIMS, ctx=1024, kv_dtype="float16,f16").kv_dtype == "f16"
    for kv_dtype in ("q8_0", "f16,q8_0"):
        with pytest.raises(ValueError, match="head_dim"):
            um.plan(replace(DIMS, head_dim=48), kv_dtype=kv_dtype)
    for kv_dtype in ("q8_0,", ",q8_0", "q8_0,q4_0,q4_0", "q8_0 q4_0"):
        with pytest.raises(ValueError, match="kv_dtype: expected one of f32"):
            um.plan(DIMS, kv_dtype=kv_dtype)


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(
    ("kv_dtype", "window", "ctx"),
    [
        ("f32", 1, 100),
        ("f16", 77, 100),
        ("q8_0", 77, 100),
        ("bf16", 1000, 5000),
        ("q8_0", 1000, 5000),
        ("q8_0,q4_0", 1000, 5000),
    ],
)
def test_a_window_is_planned_as_its_ring(kv_dtype: str, window: int, ctx: int) -> None:
    dims = replace(DIMS, num_layers=2, num_attention_heads=9, num_kv_heads=3)
    plan = um.plan(dims, ctx=ctx, window=window, kv_dtype=kv_dtype, threads=2)
    spare = min(ctx, PREFILL_BATCH)
    types = dict(zip(("k_dtype", "v_dtype"), 2 * kv_dtype.split(","), strict=False))
    rest: Any = {"window": window, "spare_rows": spare, **types}
    with um.KVCache.for_dims(dims, max_seq_len=ctx, **rest) as ring:
        assert rows(plan)["kv"] - 4096 == ring.capacity_bytes  # and the history tape's page
        assert ring.capacity_bytes % mmap.PAGESIZE == 0
        assert ring.n_rows >= window + spare
    assert plan.history_bytes == 4096
    assert plan.total_bytes == sum(rows(plan).values())


@pytest.mark.usefixtures("available")
def test_a_window_takes_the_same_for_every_context() -> None:
    base, longer = (
        um.plan(DIMS, ctx=ctx, window=500, threads=2, pages="4k") for ctx in (1000, 9000)
    )
    assert rows(longer)["kv"] == rows(base)["kv"]
    # An id for each token.
    assert rows(longer)["tokens"] - rows(base)["tokens"] == 4 * 8000
    assert rows(longer)["scratch"] == pytest.approx(rows(base)["scratch"], abs=4096)
    ring = rows(base)["kv"] - 4096
    assert rows(um.plan(DIMS, ctx=1000, window=500, batch=2))["kv"] == 2 * ring + 4096
    huge = um.plan(DIMS, ctx=1000, window=500, pages="2m", strict=True)
    assert rows(huge)["kv"] == (2 * 22 + 1) * (2 << 20)
    assert um.plan(DIMS, window=5000).ctx == 5000  # more than the context would be without it
    with pytest.raises(ValueError, match="window: expected at most the context, 499, got 500"):
        um.plan(DIMS, ctx=499, window=500)


def test_a_window_fits_if_a_context_does_not(available: Any) -> None:
    options: dict[str, Any] = {"pages": "4k", "load": "copy"}
    available(um.plan(DIMS, ctx=1000, **options).total_bytes)
    assert um.plan(DIMS, **options).ctx == 1000
    assert um.plan(DIMS, window=500, **options).max_ctx == DIMS.max_seq_len
    available(um.plan(DIMS, ctx=200, **options).total_bytes)
    with pytest.raises(ValueError, match="window"):
        um.plan(DIMS, window=500, **options)


def test_the_context_is_the_longest_that_fits(available: Any) -> None:
    options: dict[str, Any] = {"pages": "4k", "load": "copy"}
    whole = um.plan(DIMS, ctx=3000, **options)
    available(whole.total_bytes)
    found = um.plan(DIMS, **options)
    assert found.ctx == found.max_ctx == 3000
    assert found.fits
    assert whole.total_bytes == found.total_bytes == found.required_bytes == found.available_bytes
    available(whole.total_bytes - 1)
    assert um.plan(DIMS, **options).ctx == 2999
    too_long = um.plan(DIMS, ctx=3000, **options)
    assert not too_long.fits
    with pytest.raises(um.CapacityError, match="memory of the machine") as caught:
        too_long.require_fits()
    assert caught.value.asked == too_long.total_bytes
    assert caught.value.limit == too_long.total_bytes - 1
    too_long.require_fits(taken_bytes=1)  # which is there already
    longer = um.plan(DIMS, ctx=20_000, **options)
    room = f"{format_bytes(caught.value.limit + GIB // 4)} are available"
    with pytest.raises(um.CapacityError, match=room) as caught:
        longer.require_fits(taken_bytes=GIB // 4)
    assert caught.value.limit == too_long.total_bytes - 1 + GIB // 4
    available(1000)
    nothing = um.plan(DIMS, **options)
    assert (nothing.fits, nothing.max_ctx, nothing.ctx) == (False, 0, 1)
    assert "none fits" in str(nothing)


def test_an_oversized_mapped_file_spills(available: Any) -> None:
    """A mapped file may be read again; memory that must stay in RAM has to fit."""
    whole = um.plan(DIMS, ctx=3000, pages="4k")
    assert whole.load == "map"
    assert whole.required_bytes == whole.total_bytes - weights_bytes(whole)
    available(whole.total_bytes)
    assert um.plan(DIMS, pages="4k").ctx == 3000
    assert um.plan(DIMS, ctx=3000, pages="4k").advice == ()
    available(whole.total_bytes - 4096)
    spills = um.plan(DIMS, ctx=3000, pages="4k")
    assert spills.fits
    assert spills.verdict == "reads from disk"
    assert "Reads from disk: 4.0 KiB with every token." in str(spills)
    assert spills.spilled_bytes == 4096
    assert spills.max_ctx is not None
    assert 2990 < spills.max_ctx < 3000
    assert spills.advice
    # For a file that spills anyway, the longest context is the longest that fits.
    available(whole.required_bytes)
    least = um.plan(DIMS, pages="4k", ctx=3000)
    assert least.fits
    assert least.spilled_bytes == weights_bytes(least)
    assert least.max_ctx == 3000
    available(whole.required_bytes - 1)
    assert not um.plan(DIMS, ctx=3000, pages="4k").fits
    assert um.plan(DIMS, pages="4k").ctx == 2999


@pytest.mark.usefixtures("available")
def test_a_remedy_makes_room_for_files_if_the_rest_fits(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit_of(room: int) -> Limit:
        return Limit("cgroup /a", 2 * GIB, 2 * GIB - room, "more", path="memory.max")

    with um.open_weights(model, load="map") as weights:

        def remedy(room: int) -> tuple[um.Plan, int, str]:
            monkeypatch.setattr("unimem.system.limits.memory_limits", lambda: (limit_of(room),))
            plan = um.plan(weights, ctx=64, pages="4k")
            (check,) = plan.checks
            there = check.available_bytes - room  # the headers of the open file
            return plan, check.needed_bytes - there, check.remedy

        plan, rest, _ = remedy(GIB)
        files = plan.total_bytes - plan.required_bytes
        assert 0 < rest < plan.required_bytes
        assert files > 2 * mmap.PAGESIZE
        assert remedy(rest)[2] == limit_of(rest).remedy_for(rest + files)
        for lacks in (1, mmap.PAGESIZE):  # a whole page, and no byte more
            assert remedy(rest - lacks)[2] == limit_of(rest - lacks).remedy_for(rest)


@pytest.mark.usefixtures("available")
def test_a_short_model_bounds_the_context() -> None:
    assert um.plan(replace(DIMS, max_seq_len=300)).ctx == 300
    # A context beyond the model's own is allowed and marked.
    plan = um.plan(replace(DIMS, max_seq_len=300), ctx=400)
    assert (plan.ctx, plan.max_ctx, plan.model_ctx) == (400, 400, 300)
    assert "400 tokens (beyond the model's own: 300, fits: 400)" in str(plan)
    # If it does not fit, the search ends at the model's own context.
    assert um.plan(replace(DIMS, max_seq_len=300), ctx=2**31 - 1, load="copy").max_ctx == 300


@pytest.mark.usefixtures("available")
def test_a_file(model: Path) -> None:
    plan = um.plan(model, threads=2)
    with um.open_weights(model) as weights:
        assert um.plan(weights, threads=2).rows == plan.rows
        types = {f"weights:{kind}": nbytes for kind, nbytes in weights.by_type().items()}
        assert {k: v for k, v in rows(plan).items() if k in types} == types
    # The mapping is the file.
    assert weights_bytes(plan) == in_pages(model.stat().st_size)
    assert plan.ctx == 1024
    assert plan.unknown == ()
    assert plan.facts["architecture"] == "llama"


@pytest.fixture
def not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("the file was read")

    monkeypatch.setattr("unimem.weights.loading.read_parts", read)


LOADS: Any = ["auto", "map", "copy", "direct"]


@pytest.mark.parametrize("pages", ["auto", "4k", "thp"])
@pytest.mark.parametrize("load", LOADS)
def test_a_file_takes_what_was_planned(model: Path, load: Any, pages: Any) -> None:
    for path in (model, gf.split(model, 7)[0]):
        check_planned(path, load, pages)


def check_planned(path: Path, load: Any, pages: Any) -> None:
    before = ledger()
    planned = um.plan(path, load=load, pages=pages)
    assert ledger()["weights"]["mapped_bytes"] == before["weights"]["mapped_bytes"]
    # A mapping lacks these, and says so.
    given: Any = {} if load == "map" and pages == "thp" else {"pages": pages}
    with um.open_weights(path, load=load, **given) as weights:
        sizes = [path.stat().st_size for path in map(Path, weights.files)]
        mapped = weights.load == "map"
        nbytes = sum(map(in_pages, sizes)) if mapped else weights.mapped_bytes
        assert weights_bytes(planned) == nbytes
        assert weights_bytes(planned) - rows(planned)["weights:padding"] == weights.nbytes
        # Memory already taken counts neither twice nor as missing.
        again = um.plan(weights, pages=pages)
        assert again.rows == planned.rows


@pytest.mark.parametrize(
    "options", [{"load": "copy"}, pytest.param({"lock": True}, marks=pytest.mark.locks)]
)
def test_permanent_memory_need_not_fit_again(model: Path, available: Any, options: Any) -> None:
    with um.open_weights(model, **options) as weights:
        before = um.plan(weights, ctx=100)
        taken = sum(block.granted.resident_bytes for block in weights.blocks)
        rest = before.required_bytes - min(taken, sum(block.nbytes for block in weights.blocks))
        rest -= rows(before)["other"]  # the header's copy
        available(rest)
        assert um.plan(weights, ctx=100).fits
        available(rest - 1)
        assert not um.plan(weights, ctx=100).fits


def test_this_process_is_counted_once(
    model: Path, available: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends gives back its private memory, which has its copies of files."""
    available(GIB)
    monkeypatch.setattr("unimem.planning.plan.own_bytes", lambda: 5 << 20)
    with um.open_weights(model, load="copy") as weights:
        taken = sum(block.nbytes for block in weights.blocks)
        assert um.plan(weights).checks[0].available_bytes > GIB + taken
        assert um.plan(weights, process=True).checks[0].available_bytes == GIB + (5 << 20)
    assert um.plan(model, process=True).checks[0].available_bytes == GIB + (5 << 20)
    elsewhere = um.plan(model, machine={"memory": "64M"}, load="stream").checks[0]
    assert elsewhere.available_bytes == elsewhere.limit_bytes == 64 << 20


def test_file_pages_are_dropped_when_needed(model: Path, available: Any) -> None:
    with um.open_weights(model, load="map", warm=True) as weights:
        needed = um.plan(weights, ctx=100).required_bytes
        available(needed)
        plan = um.plan(weights, ctx=100)
        assert plan.fits
        # The header's copy already exists.
        assert plan.spilled_bytes == weights_bytes(plan) - rows(plan)["other"]


@pytest.mark.usefixtures("not_read", "available")
def test_planning_reads_headers_only(model: Path) -> None:
    for load in LOADS:
        assert um.plan(model, load=load).fits
    with pytest.raises(AssertionError, match="was read"):
        um.open_weights(model, load="copy")
    with pytest.raises(ValueError, match="load: expected one of auto, map, copy, direct"):
        um.plan(model, load="mmap")  # type: ignore[arg-type]


@pytest.mark.usefixtures("not_read")
def test_a_model_that_does_not_fit_is_not_read(model: Path, available: Any) -> None:
    available(1 << 16)
    for load in LOADS:
        with pytest.raises(um.CapacityError, match="memory of the machine"):
            um.Layout.for_model(model, load=load)
    assert ledger()["scratch"]["mapped_bytes"] == 0


@pytest.mark.usefixtures("gives_memory_back")
def test_a_layout_has_the_requested_weights(model: Path) -> None:
    told: list[tuple[int, int]] = []
    for load in ("copy", "direct"):
        options: Any = {"ctx": 100, "load": load, "pages": "4k"}
        tell: Any = {"progress": lambda *n: told.append(n)}
        with um.Layout.for_model(model, **options, **tell) as layout:
            weights = layout.weights
            assert isinstance(weights, um.Weights)
            assert weights.load == load
            assert weights.blocks[0].requested["pages"] == "4k"
            assert layout.stat().weights_used == weights.mapped_bytes
            assert layout.plan is not None
            assert layout.plan.rows == um.plan(model, **options).rows
            assert told[-1][0] == told[-1][1] >= weights.nbytes
        assert weights.closed
    # Requests that a mapping cannot meet are a reason to copy.
    with um.Layout.for_model(model, ctx=100, numa="preferred:0") as layout:
        assert isinstance(layout.weights, um.Weights)
        assert layout.weights.load != "map"
        assert layout.weights.blocks[0].requested["numa"] == "preferred:0"


def test_a_layout_matches_its_plan(model: Path) -> None:
    plan = um.plan(model, ctx=200)
    with um.Layout.for_model(model, ctx=200) as layout:
        assert layout.scratch.total_bytes == plan.scratch_bytes
        assert layout.history.total_bytes == plan.history_bytes
        assert layout.plan is not None
        assert layout.plan.rows == plan.rows


@pytest.mark.usefixtures("available")
def test_small_models_take_few_threads(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr("unimem.system.limits.thread_count", lambda: 16)
    wide = um.ModelDims(1024, 2816, 16, 16, 64, 2000, 2, 512)  # 57 MiB
    for dims, expected in ((wide, 1), (replace(wide, num_layers=3), 2), (DIMS, 16)):
        assert um.plan(dims).threads == expected
    assert um.plan(wide, threads=7).threads == 7
    # The rule is the same for every source of a model.
    with um.open_weights(model) as weights, um.Layout.for_model(model) as layout:
        assert layout.plan is not None
        assert um.plan(model).threads == um.plan(weights).threads == layout.plan.threads == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ctx", [0, -5, 2**31, 1.5]),
        ("window", [0, True, "all", 2**31]),
        ("batch", [0]),
        ("threads", [0, True]),
        ("load", ["mmap"]),
        ("kv_dtype", ["q9"]),
    ],
)
def test_options_out_of_range(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name.removeprefix("kv_")):
            um.plan(DIMS, **{name: value})
