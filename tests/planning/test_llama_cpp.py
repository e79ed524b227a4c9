"""Planned memory of llama.cpp, held against what it printed (tools/llama_cpp_caches.py)."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

import unimem as um
from support.models.printed_caches import RECORD, write
from support.project.checkout import ROOT
from unimem.models.families import FAMILIES
from unimem.planning.llama_cpp import MOST_SLOTS, Slots

FILES: dict[str, Any] = RECORD["files"]
PLAN_PAGE = (ROOT / "docs/plan.md").read_text()
MIB = 1 << 20


@pytest.mark.parametrize("name", FILES)
def test_llama_cpp_prints_what_is_planned(tmp_path: Path, name: str) -> None:
    one = FILES[name]
    path = write(tmp_path / "m.gguf", one["arch"], one["values"], recorded=one["tensors"])
    if "refused" in one:
        assert len(one["refused"]) > 20  # llama.cpp's own words
        assert um.plan(path, ctx=4096).engine == "llama.cpp"
    for (ctx, n, unified, mtp), printed in zip(
        RECORD["asked"], one.get("printed", ()), strict=False
    ):
        plan = um.plan(
            path,
            ctx=ctx,
            slots=n if unified or n == 1 else f"{n}:divided",
            draft="mtp" if mtp else None,
            engine="llama.cpp",
        )
        assert (plan.is_counted, plan.ctx) == (True, ctx)
        numbers = printed["kv"] + printed["states"]
        category = "kv:draft" if mtp else "kv"
        planned = sum(row.nbytes for row in plan.rows if row.category == category)
        # It prints two digits of each.
        assert abs(planned / MIB - sum(numbers)) <= 0.005 * len(numbers) + 1e-9, (ctx, n, printed)
        assert (planned == 0) == (not numbers)
        computed = plan["compute:draft" if mtp else "compute"].nbytes / MIB
        assert computed >= sum(printed["compute"]), (ctx, n, unified)


@pytest.mark.parametrize("name", [name for name, one in FILES.items() if "back" in one])
def test_a_draft_that_reads_states_makes_more_of_them(tmp_path: Path, name: str) -> None:
    one, draft = FILES[name], FILES["dflash"]
    path = write(tmp_path / "m.gguf", one["arch"], one["values"], recorded=one["tensors"])
    reader = write(tmp_path / "draft.gguf", draft["arch"], draft["values"])
    plan = um.plan(path, ctx=4096, slots="4:divided", draft=reader)
    assert plan["compute"].nbytes / MIB >= sum(one["back"]["compute"])
    numbers = one["back"]["kv"] + one["back"]["states"]
    assert abs(plan["kv"].nbytes / MIB - sum(numbers)) <= 0.005 * len(numbers) + 1e-9


WIDE = [name for name in FILES if " as " in name or " with heads" in name]


def test_compute_buffers_are_not_bounded_too_loosely(tmp_path: Path) -> None:
    shares = []
    for name in WIDE:
        one = FILES[name]
        path = write(tmp_path / "m.gguf", one["arch"], one["values"], recorded=one["tensors"])
        for (ctx, n, unified, _), printed in zip(RECORD["asked"], one["printed"], strict=False):
            slots = n if unified or n == 1 else f"{n}:divided"
            plan = um.plan(path, ctx=ctx, slots=slots, engine="llama.cpp")
            if printed["compute"]:
                shares.append(sum(printed["compute"]) * MIB / plan["compute"].nbytes)
    assert len(WIDE) == 27
    assert f"median of the wide files | {median(shares):.2f} |" in PLAN_PAGE
    assert 0.2 < min(shares) < max(shares) <= 1


# MiB of compute buffers that llama.cpp b11549 printed with 131,072 tokens, and with 4,096 that 64
# conversations share, of a cache of float32, which is cast, or q8_0, which is rotated.
OF_TYPES = {
    ("llama", "f32"): (195.02, 9.52),
    ("llama as 8B", "f32"): (688.02, 294.52),
    ("llama as 8B", "q8_0"): (418.6, 294.6),
    ("gemma3 as 27B", "f32"): (1214.03, 572.53),
    ("gemma3 as 27B", "q8_0"): (694.19, 572.69),
    ("deepseek2", "f32"): (412.52, 24.52),
    ("qwen35", "f32"): (195.53, 155.03),
    ("qwen35", "q8_0"): (148.59, 155.56),
    ("gemma4", "f32"): (197.03, 14.03),
    ("mimo2", "f32"): (295.03, 18.53),
    ("deepseek4", "f32"): (188.53, 91.58),
    ("minimax-01", "f32"): (198.54, 16.1),
    ("glm5-next", "f32"): (684.66, 590.48),
}


@pytest.mark.parametrize(("name", "kv_dtype"), OF_TYPES)
def test_other_types_of_the_cache_are_not_below(tmp_path: Path, name: str, kv_dtype: Any) -> None:
    one = FILES[name]
    path = write(tmp_path / "m.gguf", one["arch"], one["values"], recorded=one["tensors"])
    asked = (131072, 1), (4096, 64)
    for (ctx, slots), printed in zip(asked, OF_TYPES[name, kv_dtype], strict=True):
        plan = um.plan(path, ctx=ctx, slots=slots, kv_dtype=kv_dtype, engine="llama.cpp")
        assert printed <= plan["compute"].nbytes / MIB < 6 * printed + 16


def test_a_file_without_widths_never_fits(tmp_path: Path) -> None:
    values = FILES["llama"]["values"]
    path = write(tmp_path / "m.gguf", "llama", values, recorded=[["t", [4, 4], []]])
    plan = um.plan(path, ctx=4096, engine="llama.cpp", machine={"memory": "64G"})
    assert (plan.verdict, plan.fits, plan.is_counted) == ("at least", None, False)
    assert "compute" not in {row.category for row in plan.rows}
    assert any("compute buffers follow from" in text for text in plan.unknown)
    assert str(plan).startswith("At least ")
    assert "what is computed for llama is not known" in str(plan)


def test_every_architecture_of_llama_cpp_is_in_the_table() -> None:
    archs = {one["arch"] for one in FILES.values()}
    assert len(archs) == 156
    assert archs == {name for family in FAMILIES for name in family.architectures}
    printed = {one["arch"] for one in FILES.values() if "printed" in one}
    assert len(printed) >= 140
    with_states = {
        one["arch"]
        for one in FILES.values()
        if any(sizes["states"] for sizes in one.get("printed", ()))
    }
    assert len(with_states) == 24
    all_printed = [sizes for one in FILES.values() for sizes in one.get("printed", ())]
    n_contexts = len(all_printed)
    for line in (
        f"| loaded, and their sizes printed | {len(printed)}, 24 of them with states",
        f"| planned as printed | {n_contexts} |",
        f"| compute buffers printed | {sum(bool(sizes['compute']) for sizes in all_printed)} |",
        *(f"| `{one['arch']}` | {one['refused']} |" for one in FILES.values() if "refused" in one),
    ):
        assert line in PLAN_PAGE


@pytest.mark.parametrize("name", [name for name in FILES if " " not in name])
def test_no_cache_is_left_out(tmp_path: Path, name: str) -> None:
    one = FILES[name]
    path = write(tmp_path / "m.gguf", one["arch"], one["values"])
    assert um.plan(path, ctx=4096, machine={"memory": "64G"}).verdict == "fits"
    # A file that lacks what the cache follows from is known to be one.
    values = {key: value for key, value in one["values"].items() if key != "block_count"}
    plan = um.plan(write(path, one["arch"], values), ctx=4096, machine={"memory": "64G"})
    has_cache = any(sizes["kv"] or sizes["states"] for sizes in one.get("printed", ()))
    if has_cache:
        assert (plan.verdict, plan.fits) == ("at least", None)


def attention(
    layers: int, heads: int, n_kv: int, size: int = 128, v_size: int | None = None
) -> dict[str, Any]:
    return {
        "block_count": layers,
        "embedding_length": heads * size,
        "attention.head_count": heads,
        "attention.head_count_kv": n_kv,
        "attention.key_length": size,
        "attention.value_length": size if v_size is None else v_size,
        "context_length": 1 << 18,
        "vocab_size": 256,
    }


def slides(window: int, listed: list[int] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"attention.sliding_window": window}
    return found if listed is None else found | {"attention.sliding_window_pattern": listed}


SSM = {
    **{"ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128},
    **{"ssm.time_step_rank": 32, "ssm.group_count": 16},
}
INDEX = {"attention.indexer.key_length": 128, "attention.indexer.top_k": 2048}
GEMMA4 = {"attention.key_length_swa": 256, "attention.value_length_swa": 256}
# What public bug reports are about, and MiB of the cache with 32k tokens, or those named.
CASES: dict[str, tuple[str, dict[str, Any], int, float]] = {
    "linear attention": ("minimax-01", attention(8, 64, 8), 32768, 156),
    "an index with values": (
        "minimax-m3",
        attention(4, 64, 4) | INDEX | {"leading_dense_block_count": 1},
        32768,
        304,
    ),
    "K and V of other sizes": (
        "mimo2", attention(5, 64, 8, 192, 128) | slides(128, [1, 1, 0, 1, 1]), 32768, 175,
    ),
    "the first of four": ("laguna", attention(4, 48, 8) | slides(512), 32768, 140),
    "the first of four, of eight": (
        "cohere2moe", attention(8, 64, 8) | slides(4096), 32768, 364,
    ),
    "listed": ("granite_swa", attention(8, 32, 8) | slides(4096, [1, 1, 1, 0] * 2), 32768, 364),
    "the last of four": ("afmoe", attention(4, 32, 8) | slides(2048), 32768, 158),
    "a window that is not the file's": (
        "smallthinker", attention(4, 32, 8) | slides(1), 32768, 182,
    ),
    # 1 GiB of four layers, and twelve states of 2.09 MiB.
    "every fourth": ("qwen35", attention(16, 16, 2, 256) | SSM, 131072, 1024 + 12 * 2.09375),
    # 40 layers of 1,024 + 512 cells, and 8 of all; reported as 360 for the 480 MiB.
    "gguf-parser-go #31, ollama37 #451": (
        "gemma4",
        attention(48, 16, 8, 512) | GEMMA4 | slides(1024, [1, 1, 1, 1, 1, 0] * 8),
        32768,
        480 + 8 * 512,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_was_planned_wrong(tmp_path: Path, name: str) -> None:
    arch, values, ctx, mib = CASES[name]
    plan = um.plan(write(tmp_path / "m.gguf", arch, values), ctx=ctx, machine={"memory": "1G"})
    assert plan["kv"].nbytes == pytest.approx(mib * MIB, rel=1e-9)
    assert (plan.engine, plan.verdict) == ("llama.cpp", "fits" if mib < 800 else "does not fit")


@pytest.mark.parametrize("text", [1, 4, "4", "256", "4:divided", "1:divided"])
def test_slots_are_read(text: Any) -> None:
    found = Slots.parse(text)
    assert str(found) == str(text)
    assert found.is_divided == ("divided" in str(text))


@pytest.mark.parametrize("text", [0, -1, True, 1.5, "", "4:", "4:unified", "x", MOST_SLOTS + 1])
def test_other_slots_are_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"slots: expected a number from 1 to 256.*'4:divided'"):
        Slots.parse(text)


def test_streams_sessions_and_slots_multiply_differently(tmp_path: Path) -> None:
    values = attention(8, 8, 8) | slides(1024) | SSM
    path = write(tmp_path / "m.gguf", "gemma3", values)

    def kv(**options: Any) -> int:
        return um.plan(path, ctx=8192, engine="llama.cpp", **options)["kv"].nbytes

    row = 2 * 2 * 8 * 128
    assert kv() == row * (8192 + 7 * 1536)
    assert kv(batch=4) == kv(sessions=4) == 4 * kv()
    assert kv(slots=4) == row * (8192 + 7 * (4 * 1024 + 512))
    assert kv(slots="4:divided") == row * (8192 + 7 * 4 * 1536)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"engine": "vllm"}, "engine: expected unimem or llama.cpp, got 'vllm'"),
    ({"engine": "unimem", "slots": 4}, "slots: unimem has no such option"),
    ({"engine": "unimem", "draft": "mtp"}, "mmproj and draft: unimem has no such option"),
    ({"engine": "llama.cpp", "window": 8}, "window=8: llama.cpp has no such option"),
    ({"slots": 4, "window": 8}, "window=8: llama.cpp has no such option"),
    ({"slots": "x"}, "slots: expected a number"),
]


@pytest.mark.parametrize(("options", "why"), WRONG)
def test_an_engine_has_its_own_options(options: dict[str, Any], why: str) -> None:
    from unimem.engine import embedded_model

    with pytest.raises(ValueError, match=why):
        um.plan(embedded_model(), **options)


def test_the_engine_is_ours_where_it_runs_the_file(tmp_path: Path) -> None:
    from unimem.engine import embedded_model

    own = um.plan(embedded_model(), ctx=100)
    assert (own.engine, own.unknown) == ("unimem", ())
    other = um.plan(embedded_model(), ctx=100, engine="llama.cpp", load="map")
    assert other["kv"].nbytes == um.KVCache.storage_bytes(
        layers=own.cache_layers(), max_seq_len=256
    )
    assert {row.category for row in own.rows} - {row.category for row in other.rows} == {
        *("scratch", "tokens", "diagnostics"),
    }
    assert any("compute buffers" in text for text in other.unknown)
    assert um.plan(embedded_model(), slots=2).engine == "llama.cpp"
    path = write(tmp_path / "m.gguf", "qwen35", CASES["every fourth"][1])
    assert um.plan(path).engine == "llama.cpp"
    assert um.plan(path, engine="unimem", ctx=100).engine == "unimem"


def test_what_slides_in_our_engine_alone_bounds_no_other(tmp_path: Path) -> None:
    values = attention(2, 8, 8, 8) | slides(64) | {"feed_forward_length": 8}
    path = write(tmp_path / "m.gguf", "llama", values)
    assert um.plan(path, engine="unimem").max_ctx == 64
    assert um.plan(path, engine="llama.cpp").max_ctx == 1 << 18


def test_advice_for_llama_cpp_is_what_it_has(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen35", CASES["every fourth"][1])
    plan = um.plan(path, ctx=131072, machine={"memory": "600M"}, sessions=2)
    assert plan.verdict == "does not fit"
    asked = {name for one in plan.advice for name in one.options}
    assert {"ctx", "sessions", "kv_dtype"} <= asked
    assert "window" not in asked
    assert "ggml" not in plan.facts


def test_advice_on_earlier_prompts_is_of_one_server(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen35", CASES["every fourth"][1])

    def advised(memory: str, **options: Any) -> tuple[str, Any]:
        machine = {"memory": memory}
        plan = um.plan(path, engine="llama.cpp", ctx=256, process=True, machine=machine, **options)
        (found,) = (one for one in plan.advice if "cache_ram" in one.options)
        assert found.fits
        return found.text, found.options["cache_ram"]

    text, size = advised("12G", sessions=2)
    assert "instead of 8,192" in text
    assert 5000 < int(size.removesuffix("M")) < 6144
    needed = um.plan(path, engine="llama.cpp", ctx=256, cache_ram=0).total_bytes
    assert advised(f"{needed + (1 << 19)}")[1] == "0"
    with pytest.raises(ValueError, match="cache_ram: expected a size, as in 8G, got '50%'"):
        um.plan(path, engine="llama.cpp", cache_ram="50%", machine={"memory": "128G"})
