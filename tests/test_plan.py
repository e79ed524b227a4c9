"""Plans: what will be needed, whether it fits, and how long a context may be."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gguf_files as gf
import unimem as um
from unimem._core.status import ledger
from unimem.plan import PREFILL_BATCH

DIMS = um.ModelDims(2048, 5632, 32, 4, 64, 32000, 22, 8192)
GIB = 1 << 30


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_available(nbytes: int) -> None:
        monkeypatch.setattr("unimem.limits.available_bytes", lambda: nbytes)

    set_available(64 * GIB)
    return set_available


@pytest.fixture
def model(tmp_path: Path) -> Path:
    pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
    from models.make import SMALL, write_model

    return write_model(tmp_path / "m.gguf", shape=SMALL)


def rows(plan: um.Plan) -> dict[str, int]:
    return {row.category: row.nbytes for row in plan.rows}


@pytest.mark.usefixtures("available")
def test_dims() -> None:
    plan = um.plan(DIMS, threads=4)
    assert list(rows(plan)) == ["weights:f16", "kv", "scratch", "logits"]
    assert plan.ctx == 4096
    assert plan.max_ctx == 8192
    assert rows(plan)["logits"] == 4 * 32000
    kv = um.KVCache.storage_bytes(22, 4, 64, 4096)
    assert rows(plan)["kv"] == plan.history_bytes == kv
    # K and V, layers, tokens, heads, their size, bytes of a float16; then alignment.
    assert 0 <= kv - 2 * 22 * 4096 * 4 * 64 * 2 < 64 * 44
    assert plan.scratch_bytes == rows(plan)["scratch"] + rows(plan)["logits"]
    assert plan.total_bytes == sum(rows(plan).values())
    assert plan.fits
    assert plan.advice == ()
    # 1.1 billion parameters.
    assert rows(plan)["weights:f16"] == pytest.approx(2 * 1.1e9, rel=0.02)
    quantized = um.plan(replace(DIMS, quantized=True), threads=4)
    assert rows(quantized)["weights:q8_0"] == pytest.approx(1.1e9 * 34 / 32, rel=0.02)


@pytest.mark.usefixtures("available")
def test_options_change_what_they_should() -> None:
    base = rows(um.plan(DIMS, ctx=1000, threads=2))
    for options in ({"kv_dtype": "f32"}, {"batch": 2}):
        assert rows(um.plan(DIMS, ctx=1000, threads=2, **options))["kv"] == pytest.approx(
            2 * base["kv"], rel=1e-3
        )
    assert rows(um.plan(DIMS, ctx=2000, threads=2))["kv"] == pytest.approx(2 * base["kv"], rel=1e-3)
    assert rows(um.plan(DIMS, ctx=1000, threads=64))["scratch"] > base["scratch"]


@pytest.mark.usefixtures("available")
def test_types_of_the_cache() -> None:
    values = 2 * 22 * 1024 * 4 * 64
    for kv_dtype, nbytes in (
        ("f32", 4 * values),
        ("f16", 2 * values),
        ("float16", 2 * values),
        ("bf16", 2 * values),
        ("q8_0", values // 32 * 34),
    ):
        assert rows(um.plan(DIMS, ctx=1024, kv_dtype=kv_dtype))["kv"] == nbytes
    with pytest.raises(ValueError, match="head_dim"):
        um.plan(replace(DIMS, head_dim=48), kv_dtype="q8_0")


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize("kv_dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize(("window", "ctx"), [(1, 100), (77, 100), (1000, 5000)])
def test_a_window_is_planned_as_its_ring_will_be(kv_dtype: str, window: int, ctx: int) -> None:
    dims = replace(DIMS, num_layers=2, num_attention_heads=9, num_kv_heads=3)
    plan = um.plan(dims, ctx=ctx, window=window, kv_dtype=kv_dtype, threads=2)
    spare = min(ctx, PREFILL_BATCH)
    with um.KVCache.for_dims(
        dims, max_seq_len=ctx, window=window, spare_rows=spare, dtype=kv_dtype
    ) as ring:
        assert rows(plan)["kv"] == ring.capacity_bytes
        assert ring.capacity_bytes % mmap.PAGESIZE == 0
        assert ring.n_rows >= window + spare
    # What is left of the history tape.
    assert rows(plan)["other"] == plan.history_bytes == 4096
    assert plan.total_bytes == sum(rows(plan).values())


@pytest.mark.usefixtures("available")
def test_a_window_takes_the_same_for_every_context() -> None:
    base, longer = (um.plan(DIMS, ctx=ctx, window=500, threads=2) for ctx in (1000, 9000))
    assert rows(longer)["kv"] == rows(base)["kv"]
    # An id for each token.
    assert rows(longer)["scratch"] - rows(base)["scratch"] == pytest.approx(4 * 8000, abs=4096)
    assert rows(um.plan(DIMS, ctx=1000, window=500, batch=2))["kv"] == 2 * rows(base)["kv"]
    assert rows(um.plan(DIMS, ctx=1000, window=500, pages="2m"))["kv"] == 2 * 22 * (2 << 20)
    with pytest.raises(ValueError, match="window: expected at most the context, 499, got 500"):
        um.plan(DIMS, ctx=499, window=500)


def test_a_window_fits_where_a_context_does_not(available: Any) -> None:
    available(um.plan(DIMS, ctx=1000).total_bytes)
    assert um.plan(DIMS).ctx == 1000
    assert um.plan(DIMS, window=500).max_ctx == DIMS.max_seq_len
    available(um.plan(DIMS, ctx=200).total_bytes)
    with pytest.raises(ValueError, match="window"):
        um.plan(DIMS, window=500)


def test_the_context_is_what_fits(available: Any) -> None:
    whole = um.plan(DIMS, ctx=3000)
    available(whole.total_bytes)
    assert um.plan(DIMS).ctx == um.plan(DIMS).max_ctx == 3000
    assert whole.total_bytes == um.plan(DIMS).total_bytes
    assert um.plan(DIMS).fits
    available(whole.total_bytes - 1)
    assert um.plan(DIMS).ctx == 2999
    too_long = um.plan(DIMS, ctx=3000)
    assert not too_long.fits
    assert [advice.options for advice in too_long.advice] == [{"ctx": 2999}]
    with pytest.raises(um.CapacityError, match="2999") as caught:
        too_long.require_fits()
    assert caught.value.asked == too_long.total_bytes
    assert caught.value.limit == too_long.total_bytes - 1
    available(1000)
    nothing = um.plan(DIMS)
    assert (nothing.fits, nothing.max_ctx, nothing.ctx) == (False, 0, 1)
    assert "smaller model" in nothing.advice[0].text
    assert "none fits" in str(nothing)


def test_a_short_model_bounds_the_context(available: Any) -> None:
    available(64 * GIB)
    assert um.plan(replace(DIMS, max_seq_len=300)).ctx == 300
    # More than the model was made for may be asked for.
    assert um.plan(replace(DIMS, max_seq_len=300), ctx=400).ctx == 400


@pytest.mark.usefixtures("available")
def test_a_file(model: Path) -> None:
    plan = um.plan(model, threads=2)
    with um.open_weights(model) as weights:
        assert um.plan(weights, threads=2).rows == plan.rows
        types = {f"weights:{kind}": nbytes for kind, nbytes in weights.by_type().items()}
        assert {k: v for k, v in rows(plan).items() if k in types} == types
    # What is mapped is the file.
    assert sum(types.values()) + rows(plan)["other"] == model.stat().st_size
    assert plan.ctx == 1024


@pytest.fixture
def not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("the file was read")

    monkeypatch.setattr("unimem.loading.read_parts", read)


LOADS: Any = ["auto", "map", "copy", "direct"]


@pytest.mark.parametrize("pages", ["auto", "4k", "thp"])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("split", [False, True], ids=["one file", "split"])
def test_what_is_planned_of_a_file_is_what_it_takes(
    model: Path, load: Any, pages: Any, split: bool
) -> None:
    path = gf.split(model, 7)[0] if split else model
    before = ledger()
    planned = um.plan(path, load=load, pages=pages)
    assert ledger()["weights"]["mapped_bytes"] == before["weights"]["mapped_bytes"]
    if load == "map" and pages == "thp":
        pages = "auto"  # which a mapping has not, and says so
    with um.open_weights(path, load=load, pages=pages) as weights:
        nbytes = sum(n for name, n in rows(planned).items() if name.startswith("weights:"))
        assert nbytes == weights.nbytes
        assert nbytes + rows(planned)["other"] == weights.mapped_bytes
        # What lies in memory already counts neither twice nor as missing.
        again = um.plan(weights, pages=pages)
        assert again.rows == planned.rows


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"load": "copy"}, True),
        ({"lock": True}, True),
        ({"warm": True}, False),  # the page cache has it, and gives it back
    ],
)
def test_what_is_in_memory_for_good_need_not_fit_once_more(
    model: Path, available: Any, options: Any, counts: bool
) -> None:
    with um.open_weights(model, **options) as weights:
        rest = um.plan(weights, ctx=100).total_bytes - weights.mapped_bytes
        available(rest)
        assert um.plan(weights, ctx=100).fits == counts
        available(rest - 1)
        assert not um.plan(weights, ctx=100).fits


@pytest.mark.usefixtures("not_read", "available")
def test_planning_reads_headers_only(model: Path) -> None:
    for load in LOADS:
        assert um.plan(model, load=load).fits
    with pytest.raises(AssertionError, match="was read"):
        um.open_weights(model, load="copy")
    with pytest.raises(ValueError, match="load: expected 'auto', 'map', 'copy' or 'direct'"):
        um.plan(model, load="mmap")  # type: ignore[arg-type]


@pytest.mark.usefixtures("not_read")
def test_what_does_not_fit_is_not_read(model: Path, available: Any) -> None:
    available(1 << 20)
    for load in LOADS:
        with pytest.raises(um.CapacityError):
            um.Layout.for_model(model, load=load)


@pytest.mark.usefixtures("gives_memory_back")
def test_a_layout_has_the_weights_as_they_are_asked_for(model: Path) -> None:
    told: list[tuple[int, int]] = []
    for load in ("copy", "direct"):
        with um.Layout.for_model(
            model,
            ctx=100,
            load=load,
            pages="4k",
            progress=lambda *n: told.append(n),
        ) as layout:
            weights = layout.weights
            assert isinstance(weights, um.Weights)
            assert weights.load == load
            assert weights.blocks[0].requested["pages"] == "4k"
            assert layout.stat().weights_used == weights.mapped_bytes
            assert layout.plan is not None
            assert layout.plan.rows == um.plan(model, ctx=100, load=load, pages="4k").rows
            assert told[-1][0] == told[-1][1] >= weights.nbytes
        assert weights.closed
    # Memory that a mapping cannot be is a reason to copy.
    with um.Layout.for_model(model, ctx=100, numa="preferred:0") as layout:
        assert isinstance(layout.weights, um.Weights)
        assert layout.weights.load != "map"
        assert layout.weights.blocks[0].requested["numa"] == "preferred:0"


def test_a_layout_is_what_was_planned(model: Path) -> None:
    plan = um.plan(model, ctx=200)
    with um.Layout.for_model(model, ctx=200) as layout:
        assert layout.scratch.total_bytes == plan.scratch_bytes
        assert layout.history.total_bytes == plan.history_bytes
        assert layout.plan is not None
        assert layout.plan.rows == plan.rows


def test_for_model_refuses_what_does_not_fit(model: Path, available: Any) -> None:
    available(1 << 20)
    with pytest.raises(MemoryError):
        um.Layout.for_model(model)


@pytest.mark.parametrize(
    "options",
    [
        {"ctx": 0},
        {"ctx": -5},
        {"ctx": 2**31},
        {"ctx": 1.5},
        {"batch": 0},
        {"threads": 0},
        {"threads": True},
        {"load": "mmap"},
        {"kv_dtype": "q9"},
        {"window": 0},
        {"window": True},
        {"window": "all"},
        {"window": 2**31},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    name = "dtype" if "kv_dtype" in options else next(iter(options))
    with pytest.raises(ValueError, match=name):
        um.plan(DIMS, **options)


def test_str(available: Any) -> None:
    available(64 * GIB)
    lines = str(um.plan(DIMS, ctx=100)).splitlines()
    assert [line.split()[0] for line in lines] == [
        "category",
        "weights:f16",
        "kv",
        "scratch",
        "logits",
        "total",
        "available",
        "context:",
    ]
