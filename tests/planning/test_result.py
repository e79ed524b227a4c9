"""A plan as text."""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from typing import Any

import pytest

import unimem as um
from support.models.plans import validated
from unimem.accounting.row import Row
from unimem.base.text import Surface
from unimem.models.families import KeptRows, KeptState
from unimem.planning.result import Advice, Check, find_worst_check, plan_lines
from unimem.planning.streaming import Reading

FULL = (Check("memory of the machine", 2, 1, 3, "take less"),)
GIB = 1 << 30
DIMS = um.ModelDims(2048, 5632, 32, 4, 64, 32000, 22, 8192)


@pytest.mark.usefixtures("available")
def test_str() -> None:
    plan = um.plan(DIMS, ctx=100)
    verdict, facts, memory, checks, unknown = str(plan).split("\n\n")
    assert [line.split()[0] for line in facts.splitlines()] == ["model", "context", "load"]
    assert facts.startswith("model     architecture unknown, dimensions\n")
    assert "100 tokens (model's own: 8,192, fits: 8,192), KV f16" in facts
    first = [line.split()[0] for line in memory.splitlines()]
    assert first == ["memory", *(row.category for row in plan.rows), "total", "must"]
    head, *rows = checks.splitlines()
    assert head.split() == ["limit", "needed", "available", "fits"]
    assert [row.partition("  ")[0] for row in rows] == [check.name for check in plan.checks]
    assert unknown.startswith("Not known:\n-  ")
    assert verdict == "Fits: 2.1 of 64.0 GiB. Largest context 8k."


VERDICTS: list[tuple[dict[str, Any], str, bool | None, str]] = [
    ({}, "fits", True, "Fits: 2.1 of 64.0 GiB. "),
    ({"engine": "llama.cpp"}, "fits", True, "Fits: 2.1 of 64.0 GiB, compute buffers not counted. "),
    (
        {"spilled_bytes": 4096},
        "reads from disk",
        True,
        "Reads from disk: 4.0 KiB with every token.",
    ),
    (
        {"is_counted": False},
        "at least",
        None,
        "At least 2.1 of 64.0 GiB: the cache of this file is ",
    ),
    (
        {"load": "stream", "reading": Reading(9 * GIB, GIB, 9 * GIB)},
        "streams",
        True,
        "Streams: 2.0 of 9.0 GiB in RAM. Largest context 8k.",
    ),
    ({"load": "stream", "reading": Reading(GIB, 0, GIB)}, "fits", True, "Fits: "),
    (
        {
            "load": "stream",
            "reading": Reading(9 * GIB, GIB, 1000 * GIB, "vda", None, GIB, 9 * GIB, "2026-11-28"),
        },
        "streams",
        True,
        "Streams: 2.0 of 1000.0 GiB in RAM, 0.5 tokens/s. Largest context 8k.",
    ),
    (
        {
            "spilled_bytes": 4096,
            "reading": Reading(GIB, GIB, GIB, "vda", None, 10 * GIB, 10 * GIB, "2026-11-28"),
        },
        "reads from disk",
        True,
        "Reads from disk: 4.0 KiB with every token.",
    ),
    ({"is_counted": False, "spilled_bytes": 4096}, "at least", None, "At least "),
    ({"is_counted": False, "checks": FULL}, "does not fit", False, "Does not fit: "),
    ({"spilled_bytes": 4096, "checks": FULL}, "does not fit", False, "Does not fit: "),
]


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(("changes", "verdict", "fits", "start"), VERDICTS)
def test_the_first_that_applies_is_the_verdict(
    changes: dict[str, Any], verdict: str, fits: bool | None, start: str
) -> None:
    plan = replace(um.plan(DIMS, ctx=100), **changes)
    assert (plan.verdict, plan.fits) == (verdict, fits)
    document = validated(plan)
    assert (document["verdict"], document["fits"]) == (verdict, fits)
    lines = str(plan).split("\n")
    assert lines[0].startswith(start)
    assert len(lines[0]) <= 80
    assert escape(lines[0].partition(":")[0]) in plan._repr_html_()


def checked(*checks: Check) -> um.Plan:
    return replace(um.plan(DIMS, ctx=100), checks=checks)


@pytest.mark.usefixtures("available")
def test_the_worst_check_is_the_one_that_lacks_the_most() -> None:
    small, large = Check("small", 10, 2, 9, ""), Check("large", 100, 96, 99, "")
    soft, met = Check("soft", 50, 20, 20, "", is_hard=False), Check("met", 90, 90, 90, "")
    plan = checked(large, small, met, soft)
    assert (find_worst_check(plan), find_worst_check(plan, strict=False)) == (soft, small)
    assert find_worst_check(checked(met)) is None


@pytest.mark.usefixtures("available")
def test_what_is_taken_already_counts_as_available() -> None:
    plan = checked(Check("memory of the machine", 10, 6, 8, "take less"))
    plan.require_fits(taken_bytes=4)
    with pytest.raises(
        um.CapacityError, match=r"needs 10 B with .* but 9 B .* in memory .* 8 B\): take less$"
    ) as caught:
        plan.require_fits(taken_bytes=3)
    found = caught.value
    assert (found.limit, found.used, found.asked) == (9, 0, 10)
    advised = replace(plan, advice=tuple(Advice(text, 1, {}, True) for text in "abc"))
    with pytest.raises(um.CapacityError, match=r"\): a; b$"):
        advised.require_fits()
    soft = checked(Check("node 0", 2, 1, 1, "free it", is_hard=False))
    soft.require_fits(strict=False)
    with pytest.raises(um.CapacityError, match="node 0"):
        soft.require_fits()
    checked(Check("node 0", 2, 2, 2, "")).require_fits()


@pytest.mark.usefixtures("available")
def test_layers_that_no_cache_has_are_refused() -> None:
    plan = um.plan(DIMS, ctx=100)
    rows, state = KeptRows(0, 2, 64, 32, window=8), KeptState(1, (4, 5))
    assert replace(plan, layers=(rows, state)).cache_layers() == [
        um.LayerKV(2, 64, 32, window=8),
        um.LayerState((4, 5)),
    ]
    with pytest.raises(ValueError, match="not known, or nothing"):
        replace(plan, layers=()).cache_layers()
    with pytest.raises(ValueError, match="rows of several tokens"):
        replace(plan, layers=(state, rows._replace(every=4))).cache_layers()


def text_of(plan: um.Plan, width: int = 80) -> str:
    return "\n".join(plan_lines(Surface(width), plan))


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(
    ("n_per_second", "text"),
    [(2000, "2,000"), (10, "10"), (9.96, "10"), (9.9, "9.9"), (0.123, "0.12")],
)
def test_a_rate_has_two_digits_or_is_whole(n_per_second: float, text: str) -> None:
    rate = round(1000 * n_per_second)
    reading = Reading(1000, 1000, GIB, "vda", None, 2 * rate, 2 * rate, "2026-11-28")
    plan = replace(um.plan(DIMS, ctx=100), load="stream", reading=reading)
    assert f" in RAM, {text} tokens/s. Largest" in str(plan)


@pytest.mark.usefixtures("available")
def test_what_a_token_reads_is_timed_if_both_speeds_are_known() -> None:
    plan = replace(um.plan(DIMS, ctx=100), load="stream", facts={"model": "a b.gguf"})
    known = Reading(1 << 20, 1 << 19, GIB, "vda", None, 1 << 25, 1 << 28, "2026-11-28")
    text = " ".join(text_of(replace(plan, reading=known)).split())
    assert "15.6 ms at 32.0 MiB/s, as measured on 2026-11-28, beside 3.9 ms for" in text
    assert "unimem doctor" not in text
    for reading in (
        replace(known, bytes_per_second=None),
        replace(known, memory_bytes_per_second=None),
    ):
        text = text_of(replace(plan, reading=reading))
        assert "whose speed is not known. This measures it:\n" in " ".join(text.split(" "))
        assert "\n   unimem doctor --disk 'a b.gguf'\n" in text


SMALL: dict[str, Any] = {
    "rows": (
        *(Row("kv", 30), Row("scratch", 10), Row("tokens", 0)),
        Row("kv", 9, device="cuda:0"),
    ),
    "checks": (Check("half", 5, 10, 10, ""), Check("no room", 5, 0, 0, "")),
    "required_bytes": 40,
}


@pytest.mark.usefixtures("available")
def test_bars_show_the_share_of_each_row_and_limit() -> None:
    plan = replace(um.plan(DIMS, ctx=100), **SMALL)
    bars = {
        line.partition("  ")[0]: line.split()[-1] for line in text_of(plan, 60).splitlines() if line
    }
    assert {name: bar for name, bar in bars.items() if bar[0] in "#."} == {
        "kv": "#" * 28,
        "scratch": "#" * 9,
        "kv on cuda:0": "#" * 37,
        "half": "#" * 13 + "." * 13,
        "no room": "#" * 26,
    }
    assert (bars["tokens"], bars["total"], bars["total on cuda:0"]) == ("B", "B", "B")
    widths = re.findall(r'class="bar"><i style="width:([0-9.]+)%', plan._repr_html_())
    assert widths == ["75.0", "25.0", "0.0", "50.0", "100.0"]
    fits = re.findall(r"<td>(yes|no)</td>", plan._repr_html_())
    assert fits == ["yes", "no"]
    assert replace(plan, rows=())._repr_html_().count('class="bar"') == 2


@pytest.mark.usefixtures("available")
def test_a_line_that_says_nothing_is_left_out() -> None:
    plan = replace(um.plan(DIMS, ctx=100), **SMALL)
    for text in (str(plan), plan._repr_html_()):
        assert "must stay in RAM" not in text
        assert "beside the model" not in text
        assert "container limit" not in text
    part = replace(plan, required_bytes=39, process_bytes=7 << 20, container_bytes=0)
    for text in (str(part), part._repr_html_()):
        assert re.search(r"must stay in RAM\D+39 ", text.replace('value="39"', ""))
        assert "beside the model" in text
        assert "container limit" in text
    assert "\nhash " not in str(replace(plan, unhashed_bytes=(64 << 20) - 1))
    assert "first reads 64.0 MiB of weights" in str(replace(plan, unhashed_bytes=64 << 20))


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(
    ("max_ctx", "text"),
    [
        *((None, "Largest context unknown."), (0, "No context fits.")),
        *((1, "Largest context 1."), (8192, "Largest context 8k."), (8193, "context 8,193.")),
        *((10_239, "Largest context 10,239."), (10_241, "Largest context 10k.")),
    ],
)
def test_the_largest_context_is_exact_or_in_units_of_1024(max_ctx: int | None, text: str) -> None:
    assert str(replace(um.plan(DIMS, ctx=100), max_ctx=max_ctx)).split("\n")[0].endswith(text)


@pytest.mark.usefixtures("available")
def test_a_long_name_of_a_limit_leaves_room_for_its_bar() -> None:
    plan = checked(Check("cgroup /" + "a" * 100, 5, 10, 10, ""))
    (line,) = [line for line in text_of(plan).splitlines() if line.startswith("cgroup")]
    assert len(line.split("  ")[0]) == 40
    assert line.endswith(".")


@pytest.mark.usefixtures("available")
def test_advice_has_what_is_typed_on_a_line_of_its_own() -> None:
    advice = (
        Advice("take less", 1 << 20, {"min_ctx": 5, "lock": True, "numa": None}, True),
        Advice("raise it: echo 1 > memory.max", 0, {}, False),
    )
    check = Check("cgroup /a", 2, 1, 1, "echo 1 > memory.max")
    plan = replace(checked(check), advice=advice)
    assert str(plan).split("What helps, the cheapest first:\n")[1].split("\n\n")[0] == (
        "1. Take less (saves 1.0 MiB, then it fits):\n   --min-ctx 5 --lock\n"
        "2. Raise it:\n   echo 1 > memory.max"
    )
    for text in (
        "<li>Take less (saves 1.0 MiB, then it fits): --min-ctx 5 --lock</li>",
        "<li>Raise it: echo 1 &gt; memory.max</li>",
    ):
        assert text in plan._repr_html_()
