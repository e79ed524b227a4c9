"""What a watch makes of samples and keys, and what it shows: of an invented process."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("rich", reason="the command line needs rich: pip install '.[run]'")

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType

from support.terminal.watch_samples import (
    CGROUP,
    DECODER,
    GIB,
    KIB,
    MACHINE,
    MIB,
    SIZES,
    report,
    sample,
)
from unimem.accounting.samples import Rates, rates
from unimem.cli import watch
from unimem.cli.watch_state import INTERVALS, State
from unimem.cli.watch_view import frame, whole
from unimem.system.pressure import Pressure

DATA = Path(__file__).parent / "data"

BEFORE = sample(10.0, report())
GROWN = SIZES | {
    "kv": (256 * MIB, 140 * MIB, 139 * MIB),
    "allocator": (80 * MIB, 29 * MIB, None),
    "staging": (512 * MIB, 4 * MIB, None),
}
NOW = sample(
    12.0, report(GROWN), faults=(3000, 5), read=3 * MIB, cpu=3.0,
    published=DECODER | {"n_generated_tokens": 701, "kv_tokens": 812, "kv_active_bytes": 139 * MIB},
    paged_in_bytes=10 * MIB,
    pressure=(Pressure("machine", 0.25, 0.0), Pressure("cgroup /a", 12.5, 3.0)),
    limits=(MACHINE, CGROUP),
)  # fmt: skip


def state_of(*samples: object, **chosen: object) -> State:
    state = State(4711)
    for each in samples or (BEFORE, NOW):
        state.take(each)  # type: ignore[arg-type]
    for name, value in chosen.items():
        setattr(state, name, value)
    return state


def rendered(parts: Sequence[RenderableType], width: int, **options: Any) -> str:
    console = Console(width=width, **{"color_system": None} | options)
    with console.capture() as capture:
        console.print(Group(*parts))
    return capture.get().removesuffix("\n")


def text_of(state: State, width: int = 80, height: int = 24, *, blocks: bool = True) -> str:
    text = rendered(frame(state, width, height, blocks=blocks), width)
    return "\n".join(line.rstrip() for line in text.split("\n"))


def test_rates_are_differences_by_time() -> None:
    assert rates(BEFORE, NOW) == Rates(1500.0, 2.5, 1.5 * MIB, 5 * MIB, 1.5, 0.0, 100.5)


def test_nothing_is_known_of_the_first_sample_nor_where_time_stands_still() -> None:
    assert rates(None, NOW) == rates(NOW, NOW) == rates(NOW, BEFORE) == Rates()
    assert set(Rates()) == {None}


def test_what_went_back_or_is_not_told_is_not_known() -> None:
    counters = replace(NOW.counters, minor_faults=0, read_bytes=None)
    odd = replace(NOW, seconds=14.0, counters=counters, published={}, paged_in_bytes=None)
    assert rates(NOW, odd) == Rates(major_faults=0.0, cpu_seconds=0.0)


def test_another_process_with_the_number_is_not_this_one() -> None:
    state = state_of(BEFORE, NOW, sample(13.0, report(), started=8))
    assert "another process's" in state.ended
    assert (state.now, state.n_samples) == (NOW, 2)
    assert "another process's" in text_of(state, 120)


def test_growth_is_since_the_last_report_and_since_the_first() -> None:
    again = replace(NOW, seconds=13.0)  # the report was not read again
    state = state_of(BEFORE, sample(11.0, report(SIZES | {"kv": (256 * MIB, 0, 0)})), NOW, again)
    growth = {line.category: (line.change_bytes, line.since_start_bytes) for line in state.lines()}
    assert growth["kv"] == (140 * MIB, 10 * MIB)
    assert growth["allocator"] == (-MIB + 12 * KIB, -MIB + 12 * KIB)
    assert growth["staging"] == (4 * MIB, 4 * MIB)  # it is new
    assert growth["kv on cuda:0"] == growth["libraries"] == (0, 0)
    total = state.total()
    assert total.since_start_bytes == sum(since for _, since in growth.values())
    assert total.change_bytes == sum(change for change, _ in growth.values())
    assert total.resident_bytes == sum(held for _, held, _ in GROWN.values())


def test_the_first_report_has_not_grown() -> None:
    assert {line[-2:] for line in state_of(BEFORE).lines()} == {(0, 0)}


@pytest.mark.parametrize(("sort", "first"), [
    ("category", ["weights:q8_0", "weights:f32", "kv"]),
    ("size", ["weights:q8_0", "staging", "libraries"]),
    ("resident", ["weights:q8_0", "kv", "kv on cuda:0"]),
    ("growth", ["kv", "staging", "weights:q8_0"]),
])  # fmt: skip
def test_orders(sort: str, first: list[str]) -> None:
    assert [line.category for line in state_of(sort=sort).lines()][:3] == first


def test_mappings_are_lines_too() -> None:
    lines = state_of(shows_mappings=True, sort="size").lines()
    assert len(lines) == len(GROWN) - 1
    assert lines[0].name == "/models/Llama-3-8B-Instruct-Q8_0.gguf"
    assert lines[0].address == 0x7F00_0000_0000


def test_mappings_are_in_the_order_of_their_categories_whatever_their_addresses() -> None:
    now = NOW.report
    mixed = replace(now, mappings=(*reversed(now.mappings), *now.mappings))
    lines = state_of(replace(NOW, report=mixed), shows_mappings=True).lines()
    names = [line.category for line in lines]
    assert names == [name for each in now.mappings for name in [each.category] * 2]


def test_lines_are_made_once_for_each_report() -> None:
    state = state_of()
    lines = state.lines()
    state.take(replace(NOW, seconds=13.0))  # the report was not read again
    assert state.lines() is lines
    for key in "sm":
        state.press(key)
        assert state.lines() is not lines
    state = state_of()
    lines = state.lines()
    state.take(sample(13.0, report()))
    assert state.lines() is not lines


def test_keys() -> None:
    state = state_of()
    sorts = []
    for _ in range(4):
        state.press("s")
        sorts.append(state.sort)
    assert sorts == ["size", "resident", "growth", "category"]
    for key, name in (("m", "shows_mappings"), ("p", "is_paused")):
        state.press(key)
        assert getattr(state, name)
        state.press(key)
        assert not getattr(state, name)
    state.press("x")
    assert not state.has_quit
    state.press("q")
    assert state.has_quit


def test_nothing_is_read_while_it_is_paused() -> None:
    state, events, sampler = state_of(is_paused=True), SimpleQueue[Any](), Mock()
    shown = []
    for key in "msq":
        events.put(key)
    watch._run(state, sampler, events, None, lambda *now: shown.append(now))
    assert [event for _, event in shown] == ["m", "s", "q"]
    sampler.sample.assert_not_called()


def test_keys_change_the_interval_step_by_step() -> None:
    state = State(1, interval=1.5)
    state.press("+")
    assert state.interval == 2.0
    for _ in range(20):
        state.press("-")
    assert state.interval == INTERVALS[0]
    for _ in range(20):
        state.press("=")
    assert state.interval == INTERVALS[-1]
    state = State(1, interval=0.1)
    state.press("-")
    assert state.interval == 0.1


@pytest.mark.parametrize("key", ["h", "?"])
def test_any_key_leaves_the_help_and_does_no_more(key: str) -> None:
    state = state_of()
    state.press(key)
    assert text_of(state).startswith("Keys\n")
    state.press("s")
    assert (state.shows_help, state.sort) == (False, "category")
    state.press(key)
    state.press("q")
    assert state.has_quit


def test_nothing_of_the_help_is_cut_in_a_usual_terminal() -> None:
    state = state_of(shows_help=True)
    assert text_of(state, 80, 24) == text_of(state, 200, 60)


def test_scrolling_ends_where_the_lines_do() -> None:
    state = state_of()

    def first_line(*keys: str) -> str:
        for key in keys:
            state.press(key)
        rows = text_of(state, 80, 16).splitlines()
        return rows[next(i for i, row in enumerate(rows) if row.startswith("memory")) + 1]

    assert first_line().startswith("weights:q8_0")
    assert first_line("down").startswith("weights:f32")
    assert first_line("up", "up").startswith("weights:q8_0")
    assert first_line("end").startswith("logits")
    assert first_line("page down", "down").startswith("logits")
    assert first_line("up").startswith("scratch")
    assert first_line("home").startswith("weights:q8_0")


@pytest.mark.parametrize(("name", "chosen"), [
    ("80x24", {}),
    ("80x24_mappings", {"shows_mappings": True, "late_seconds": 5.0}),
    ("60x15_ascii", {"sort": "growth", "is_paused": True}),
    ("120x24", {"sort": "size"}),
])  # fmt: skip
def test_pictures(name: str, chosen: dict[str, object]) -> None:
    width, height = map(int, name.partition("_")[0].split("x"))
    shown = text_of(state_of(**chosen), width, height, blocks=not name.endswith("_ascii"))
    assert shown + "\n" == (DATA / f"watch_{name}.txt").read_text()


def test_a_terminal_that_is_too_small_is_told_so() -> None:
    assert text_of(state_of(), 40, 10) == "40x10 is too small:\n60x12 at least.\nq quits."


@pytest.mark.parametrize("width", [1, 10, 59, 60, 61, 79, 80, 81, 99, 100, 101, 119, 140, 250])
def test_no_line_is_too_long_and_none_too_many(width: int) -> None:
    odd = "\x1b[2J\n漢字" * 40
    counters = replace(NOW.counters, minor_faults=10**15, cpu_seconds=1e9, n_threads=10**6)
    strange = replace(
        NOW,
        report=report(GROWN | {odd: (5 * GIB, 4096, 1)}, command=odd, problem=odd, swapped=1),
        counters=counters,
        published={"kv_tokens": 10**12, "kv_active_bytes": 10**15},
        limits=(MACHINE, replace(CGROUP, name=odd)),
        up_seconds=1e9,
    )
    choices: list[dict[str, Any]]
    choices = [{}, {"shows_mappings": True}, {"shows_help": True}, {"late_seconds": 1e6}]
    for height, chosen in product((1, 2, 11, 12, 13, 24, 60), choices):
        parts = frame(state_of(BEFORE, strange, **chosen), width, height)
        lines = rendered(parts, width).split("\n")
        assert len(lines) <= height
        assert all(cell_len(line) <= width for line in lines)
        assert all(line.isprintable() for line in lines)


def test_before_the_first_sample_there_is_something_to_see() -> None:
    state = State(4711)
    assert text_of(state).startswith("Reading the memory of process 4711 ...\n")
    state.late_seconds = 3.0
    assert text_of(state).startswith("Reading the memory of process 4711 for 3 s ...\n")


def test_what_is_not_known_is_said() -> None:
    bare = sample(10.0, report(source="kernel"), published={}, pressure=(), limits=(), read=None)
    shown = text_of(state_of(bare))
    assert "from the kernel" in shown
    assert "tokens/s" not in shown
    assert "pressure  not available" in shown
    assert re.search(r"^page-ins  own +-  +machine +-  ", shown, re.M)


def test_memory_that_takes_long_to_read_is_read_less_often() -> None:
    shown = text_of(state_of(replace(NOW, report_rest=2.4)), 120)
    assert "every 1 s, memory every 3 s" in shown
    assert "memory every" not in text_of(state_of(replace(NOW, report_rest=0.9)), 120)


def test_what_is_worth_a_look_has_a_colour_and_needs_none() -> None:
    def drawn(state: State) -> str:
        colors = {"color_system": "standard", "force_terminal": True, "no_color": False}
        return rendered(frame(state, 80, 24), 80, **colors)

    colored = drawn(state_of())
    yellow = "\x1b[33m"
    for notice in ("2.5", "0.25%", "cgroup 12.50%, 3.00%", "+10.0 MiB"):
        assert re.search(rf"\x1b\[33m *{re.escape(notice)}\x1b\[0m", colored), notice
    assert f"{yellow}296.0 MiB of 4.0 GiB\x1b[0m{yellow} in cgroup" in colored
    assert "\x1b[36m█" in colored
    assert "\x1b[1mtotal" in colored
    calm = drawn(state_of(BEFORE))
    assert yellow not in calm.replace(f"{yellow}953.0 MiB of 1.1 GiB in RAM", "")
    assert "\x1b" not in rendered(frame(state_of(), 80, 24), 80)


def test_the_whole_has_every_line_and_no_keys() -> None:
    lines = rendered(whole(state_of(), 80), 80).splitlines()
    assert sum(line.startswith(tuple(GROWN)) for line in lines) == len(GROWN) + 1
    assert lines[-1].startswith("total")
    assert whole(State(1), 80) == []


def test_the_document_has_figures_in_units() -> None:
    document = json.loads(json.dumps(state_of().document(), allow_nan=False))
    assert (document["pid"], document["seconds"]) == (4711, 2.0)
    assert document["rates"] == {
        "minor_faults_per_second": 1500.0, "major_faults_per_second": 2.5,
        "read_bytes_per_second": 1.5 * MIB, "paged_in_bytes_per_second": 5.0 * MIB,
        "cpu_seconds_per_second": 1.5, "prompt_tokens_per_second": 0.0,
        "generated_tokens_per_second": 100.5,
    }  # fmt: skip
    assert document["decoders"]["kv_tokens"] == 812
    expected = {"source": "cgroup /a", "some_percent": 12.5, "full_percent": 3.0}
    assert document["pressure"][1] == expected
    assert document["limits"][1]["room_bytes"] == CGROUP.room_bytes
    assert document["report"]["rows"][0]["category"] == "weights:q8_0"
    first = json.loads(json.dumps(state_of(BEFORE).document()))
    assert first["seconds"] is None
    assert set(first["rates"].values()) == {None}
