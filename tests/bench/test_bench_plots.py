"""Plots of invented records: complete, legible, and reproducible."""

from __future__ import annotations

import functools
import itertools
import re
import resource
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conftest import Run
from support.project.bench_records import (
    EXACTLY_ONE,
    at_most,
    case,
    costs,
    counted_case,
    failed_case,
    faster,
    grows,
    levels,
    record,
    remember_intervals,
    sample_record,
    scaling_case,
    suite,
)
from support.project.tiers import slow_after
from unimem_bench import stats
from unimem_bench.record import CaseRecord, Record, SuiteRecord

NEEDS = "matplotlib (extra bench) draws the plots: pip install '.[bench]'"
matplotlib = pytest.importorskip("matplotlib", reason=NEEDS)
plots = pytest.importorskip("unimem_bench.plots", reason=NEEDS, exc_type=ImportError)

LONG = "how one does it with a library whose name is longer than the name of any other library"
SENTENCE = f"What is {'this ' * 40}for?"
SVG = "{http://www.w3.org/2000/svg}"


def plain(name: str, unit: str = "ns", ours: float = 5.0, **others: float) -> CaseRecord:
    """Make a case of unimem, with a peer and a limit if given."""
    peers, limits = ({n: at for n, at in others.items() if n == kind} for kind in ("peer", "limit"))
    return case(name, "What?", unit, levels({"ours": ours}, peers, limits))


def scaled(
    name: str,
    units: tuple[str, str],
    sizes: list[float],
    law: Callable[[float], float],
    **rest: Any,
) -> CaseRecord:
    return scaling_case(name, "How?", units, sizes, {"unimem": ("unimem", law)}, **rest)


def strange_names() -> SuiteRecord:
    """Make names, units and questions that are long, or look like formulas."""
    ours, wide = f"unimem, {LONG}", "x" * 70
    laws: Any = {
        ours: ("unimem", lambda n: 3 * n**0.5),
        LONG: ("peer", lambda n: 3.0),
        wide: ("limit", lambda n: 3 * n),
    }
    bars = case(
        f"names/{'a-name-' * 20}", SENTENCE, f"pieces of {LONG}",
        levels({ours: 5.0}, {LONG: 7e6}, {wide: 1.0}), EXACTLY_ONE,
        targets=[faster(LONG, 2.0, 3, side=ours)],
    )  # fmt: skip
    units = "bytes/s", f"bytes of {'a very ' * 9}long thing"
    lines = scaling_case("names/lines", SENTENCE, units, [1024.0, 2048.0, 1e9], laws)
    return suite("names", SENTENCE, bars, lines, plain("names/$x$ and $y_1$", peer=6.0))


def strange_figures() -> SuiteRecord:
    """Make figures of six decades, of zeros, and of one size."""
    units = "pages", "tokens"
    zeros: list[tuple[str, dict[str, list[float]], float]] = [
        ("zeros", {"unimem": [0], "b": [0, 0]}, 0),
        ("a zero", {"unimem": [0], "b": [5e8]}, 0.5),
        ("not zero", {"unimem": [3]}, 0),
    ]
    counted = [
        counted_case(f"figures/{name}", "Any?", "pages", values, targets=[at_most(limit, 3)])
        for name, values, limit in zeros
    ]
    return suite(
        "figures",
        "Which figures?",
        plain("figures/six decades", "us", ours=0.003, peer=3000, limit=0.001),
        plain("figures/bytes", "bytes", ours=3e8, peer=5e8),
        plain("figures/small", "s", ours=3e-5, peer=5e-5),
        *counted,
        scaled("figures/one size", ("us", "tokens"), [64], float, rounds=EXACTLY_ONE),
        scaled("figures/no figure but 0", units, [1, 64], lambda _: 0.0, targets=[grows(1)]),
        scaled("figures/threads", ("ms", "threads"), [1, 2, 3, 4, 6, 8, 16, 64], lambda n: 1e3 / n),
        failed_case("figures/failed", "None?", "us", "not here", targets=[faster("b", 2, 2)]),
    )


def many_cases() -> Iterator[CaseRecord]:
    return (plain(f"many/{i}", ours=4.0 + i, peer=9, limit=3) for i in range(16))


RECORDS: dict[str, Callable[[], Record]] = {
    "sample": sample_record,
    "strange": lambda: record(strange_names(), strange_figures()),
    "one": lambda: record(suite("one", "One?", plain("one/one"))),
    "many": lambda: record(suite("many", "How many?", *many_cases())),
}


@pytest.fixture(autouse=True)
def intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_intervals(monkeypatch)


@functools.cache
def drawings(name: str) -> list[Any]:
    return list(plots.draw(RECORDS[name]()))


@functools.cache
def sheets(name: str) -> dict[str, tuple[Any, list[Box]]]:
    """Return figures by name, laid out, with their texts."""
    return {each.name: (each.figure, texts_of(each.figure)) for each in drawings(name)}


def drawn(found: Record) -> dict[str, Any]:
    return {drawing.name: drawing.figure for drawing in plots.draw(found)}


def panel(found: CaseRecord) -> Any:
    (axes,) = drawn(record(suite(found.suite, "What?", found)))[found.suite].axes
    return axes


class Box(NamedTuple):
    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            min(self.right, other.right) - max(self.left, other.left) > 1
            and min(self.bottom, other.bottom) - max(self.top, other.top) > 1
        )


def texts_of(figure: Any) -> list[Box]:
    """Draw a figure, and record where each line of text goes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg

    boxes: list[Box] = []

    class Noting(RendererAgg):
        def draw_text(
            self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, *_: Any, **__: Any
        ) -> None:
            measure: Any = self.get_text_width_height_descent
            width, height, descent = measure(s, prop, False)
            assert angle in {0, 90}
            if angle == 0:
                boxes.append(Box(s, x, y - height + descent, x + width, y + descent))
            else:
                boxes.append(Box(s, x - height + descent, y - width, x + descent, y))

    width, height = FigureCanvasAgg(figure).get_width_height()
    figure.draw(Noting(width, height, figure.dpi))  # type: ignore[no-untyped-call]
    return boxes


@pytest.mark.parametrize("name", slow_after(1, RECORDS))
def test_no_text_is_cut_or_lies_over_another(name: str) -> None:
    for sheet, (figure, boxes) in sheets(name).items():
        assert len(boxes) > 5
        width, height = figure.bbox.size
        for box in boxes:
            assert min(box.left, box.top) >= -1, (sheet, box)
            assert box.right <= width + 1, (sheet, box)
            assert box.bottom <= height + 1, (sheet, box)
        for box, other in itertools.combinations(boxes, 2):
            assert not box.overlaps(other), (sheet, box, other)


@pytest.mark.parametrize("name", RECORDS)
def test_legends_cover_nothing_and_name_everything_and_axes_have_labels(name: str) -> None:
    for sheet, (figure, _) in sheets(name).items():
        assert figure.legends
        legends = legends_of(figure)
        assert len(legends) == 1 + sum(axes.get_ylabel() != "" for axes in figure.axes)
        panels = [axes.get_window_extent() for axes in figure.axes]
        for legend in legends:
            texts = [text.get_text() for text in legend.get_texts()]
            assert texts
            assert all(each and not each.startswith("_") for each in texts), sheet
            box = legend.get_window_extent()
            assert not any(box.overlaps(axes) for axes in panels), sheet
        assert not any(a.overlaps(b) for a, b in itertools.combinations(panels, 2)), sheet
        for axes in figure.axes:
            assert axes.get_xlabel(), sheet
            # The other axis of bars and targets has names.
            assert axes.get_ylabel() or names(axes) or sheet == "targets", sheet


def legends_of(figure: Any) -> list[Any]:
    return [*figure.legends, *(each for part in figure.subfigs for each in legends_of(part))]


def names(axes: Any) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def test_text_is_large_enough_and_paper_is_white() -> None:
    for figure, _ in sheets("sample").values():
        assert figure.get_facecolor() == (1, 1, 1, 1)
        assert figure.get_size_inches()[0] * 96 <= 830  # what GitHub shows without shrinking it
        for text in figure.findobj(matplotlib.text.Text):
            assert text.get_fontsize() >= 8


def test_bars_are_as_long_as_the_medians_and_the_limit_goes_through_all() -> None:
    found = plain("calls/take", ours=40.0, peer=110.0, limit=30.0)
    axes = panel(found)
    assert (axes.get_xlabel(), axes.get_xscale()) == ("ns (less is better)", "linear")
    assert axes.get_xlim()[0] == 0
    assert names(axes) == ["ours", "peer", "limit"]
    spreads = [stats.spread(side) for side in found.sides]
    assert [bar.get_width() for bar in axes.patches] == [each.median for each in spreads]
    whiskers = [tuple(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2]
    assert {(each.p5, each.p95) for each in spreads} < set(whiskers)
    assert [bar.get_hatch() is not None for bar in axes.patches] == [False, False, True]
    assert len({bar.get_facecolor() for bar in axes.patches}) == 3
    (limit,) = (each for each in axes.lines if each.get_linestyle() == "--")
    assert set(limit.get_xdata()) == {spreads[2].median}
    assert list(limit.get_ydata()) == [0, 1]  # of the axes


def test_bars_have_the_unit_that_suits_them() -> None:
    found = plain("calls/many", "ns", ours=46_000, peer=90_000)
    axes = panel(found)
    assert axes.get_xlabel() == "us (less is better)"
    want = [stats.spread(side).median / 1000 for side in found.sides]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(want)
    assert panel(plain("touch/thp", "GB/s")).get_xlabel() == "GB/s (more is better)"


def test_what_differs_too_much_for_bars_is_drawn_as_points() -> None:
    found = plain("gguf/open", "ms", ours=2.4, peer=7000, limit=1.3)
    axes = panel(found)
    assert axes.get_xscale() == "log"
    points = [line for line in axes.lines if line.get_marker() in {"o", "s", "D"}]
    assert [(line.get_xdata()[0], line.get_marker()) for line in points] == [
        (stats.spread(side).median, marker) for side, marker in zip(found.sides, "osD", strict=True)
    ]


def test_lines_are_over_logarithms_with_their_exponents() -> None:
    laws: Any = {"unimem": ("unimem", float), "C memcpy": ("limit", lambda n: 0.5 * n)}
    found = scaling_case("scaling/gather", "?", ("us", "tokens"), [10, 100, 1000], laws)
    axes = panel(found)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tokens", "us\n(less is better)")
    for text, side in zip(axes.figure.legends[0].get_texts(), laws, strict=True):
        assert text.get_text().startswith(f"{side}: n^{stats.growth(found, side).exponent:.2f} (")
    constant, proportional, ours, limit = axes.lines
    medians = [stats.spread(side).median for side in found.sides if side.name == "unimem"]
    assert list(ours.get_ydata()) == medians
    assert list(constant.get_ydata()) == [medians[0]] * 3
    assert list(proportional.get_ydata()) == pytest.approx([medians[0] * n for n in (1, 10, 100)])
    assert ours.get_color() != limit.get_color()
    assert ours.get_marker() != limit.get_marker()
    assert len(axes.collections) == 2  # bands


def test_the_exponent_of_speeds_is_as_it_is_drawn() -> None:
    found = scaled("a/b", ("GB/s", "bytes read"), [1024, 4096, 65536], lambda n: n**0.5)
    axes = panel(found)
    (text,) = axes.figure.legends[0].get_texts()
    assert text.get_text().startswith(f"unimem: n^{-stats.growth(found, 'unimem').exponent:.2f} (")
    assert {"1 KiB", "64 KiB"} <= {label.get_text() for label in axes.get_xticklabels()}


def test_what_is_constant_looks_so() -> None:
    low, high = panel(scaled("a/b", ("ns", "tokens"), [1, 10_000], lambda _: 46.0)).get_ylim()
    assert high / low >= 99


@pytest.mark.parametrize(("unit", "factors"), [("GB/s", [1, 2, 4]), ("ms", [1, 0.5, 0.25])])
def test_threads_are_held_against_the_ideal(unit: str, factors: list[float]) -> None:
    axes = panel(scaled("touch/threads", (unit, "threads"), [1, 2, 4], lambda n: n**0.8))
    assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "linear")
    assert (axes.get_xlim()[0], axes.get_ylim()[0]) == (0, 0)
    ideal, ours = axes.lines
    first = ours.get_ydata()[0]
    assert list(ideal.get_ydata()) == pytest.approx([first * factor for factor in factors])
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == ["unimem"]


def marks(figure: Any) -> Iterator[tuple[float, Any]]:
    (axes,) = figure.axes
    for line in axes.lines:
        if line.get_marker() in {"o", "X", "<", ">"}:
            yield line.get_xdata()[0], line


def test_targets_are_right_of_1_where_they_are_met() -> None:
    verdicts = sorted(stats.verdicts(sample_record()), key=lambda each: each.target.issue)
    figure, boxes = sheets("sample")["targets"]
    n_without = [box.text for box in boxes].count("not measured")
    assert n_without == sum(each.met is None for each in verdicts) == 3
    verdicts = [each for each in verdicts if each.measured is not None]
    every_kind = set(itertools.product((True, False), repeat=2))
    assert {(each.met, each.certain) for each in verdicts} == every_kind
    colours = set()
    for (x, line), verdict in zip(marks(figure), verdicts, strict=True):
        assert (x >= 1) == verdict.met
        if line.get_marker() not in {"<", ">"}:
            assert line.get_marker() == ("o" if verdict.met else "X")
        is_hollow = line.get_markerfacecolor() == "white"
        assert is_hollow == (not verdict.certain)
        colours.add((verdict.met, line.get_markeredgecolor()))
    assert len(colours) == len(dict(colours)) == 2


def test_every_target_is_over_its_limit() -> None:
    targets = [faster("b", 2.0, 2), costs("b", 0.25, 2), at_most(20.0, 2)]
    found = case("a/b", "What?", "ns", levels(10.0, {"b": 30.0}), EXACTLY_ONE, targets=targets)
    (ours,) = stats.figures(found.sides[0])
    grown = scaled("a/c", ("ns", "n"), [1, 100], lambda n: n**0.5, targets=[grows(0.7)])
    exponent = stats.growth(grown, "unimem").exponent
    kept = [x for x, _ in marks(drawn(record(suite("a", "What?", found, grown)))["targets"])]
    assert kept == pytest.approx([1.5, 0.75, 20 / ours, 10 ** (0.7 - exponent)], rel=1e-5)


def test_targets_of_nothing_and_beyond_the_axis() -> None:
    shown = {line.get_marker(): x for x, line in marks(sheets("strange")["targets"][0])}
    assert shown["o"] == 1  # 0 of 0
    assert shown[">"] > 1  # 0 of 0.5, and what is a million times as fast
    assert shown["<"] < 1  # 3 of 0


def test_a_panel_of_each_suite_in_the_overview() -> None:
    found = sample_record()
    overview, *rest = drawings("sample")
    assert overview.name == "overview"
    measured = [each.name for each in found.suites if each.name != "gpu"]
    assert len(overview.figure.axes) == len(measured)
    assert [drawing.name for drawing in rest] == ["targets", *measured]
    assert [drawing.suite for drawing in rest] == [None, *measured]
    # Not the first case, but the first with peers and a limit.
    cases = [plain("a/b", peer=2), plain("a/c", peer=2, limit=1)]
    overview, *_ = plots.draw(record(suite("a", "What?", *cases)))
    assert overview.alt == "A panel of each suite: a/c."


def test_nothing_measured_is_nothing_drawn() -> None:
    failed = failed_case("gpu/take", "What?", "ns", "there is no GPU", targets=[faster("b", 3, 5)])
    for suites in ([], [suite("a", "What?")], [suite("gpu", "What?", failed)]):
        assert plots.draw(record(*suites)) == []


def small_record() -> Record:
    wanted = {"calls", "scaling", "gpu"}
    return record(*(each for each in sample_record().suites if each.name in wanted))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("plots") / "new"
    return folder, plots.save(small_record(), folder)


def test_files(saved: tuple[Path, Any]) -> None:
    folder, returned = saved
    assert [(plot.name, plot.suite) for plot in returned] == [
        ("overview", None),
        ("targets", None),
        ("calls", "calls"),
        ("scaling", "scaling"),
    ]
    paths = [folder / f"{plot.name}.svg" for plot in returned]
    assert sorted(paths) == sorted(folder.iterdir())
    for plot, path in zip(returned, paths, strict=True):
        assert plot.alt
        assert "\n" not in plot.alt
        root = ET.parse(path).getroot()
        assert root.tag.endswith("svg")
        assert any("".join(each.itertext()).strip() for each in root.iter(f"{SVG}text"))


def test_names_in_a_file_do_not_depend_on_last_bits_of_the_layout(saved: tuple[Path, Any]) -> None:
    """The last bits vary between processes, and matplotlib puts them into names of clip paths."""
    for path in saved[0].iterdir():
        text = path.read_text()
        clips = re.findall(r'<clipPath id="(.+?)"', text)
        assert sorted(clips) == sorted(f"clip{i}" for i in range(len(clips)))
        assert set(re.findall(r"url\(#(clip\d+)\)", text)) == set(clips)
        assert "clip-path" in text
        assert "<dc:date>" not in text


def test_files_are_the_same_whatever_a_user_sets(saved: tuple[Path, Any], tmp_path: Path) -> None:
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "figure.facecolor": "black"}):
        before = dict(matplotlib.rcParams)
        plots.save(small_record(), tmp_path)
        assert dict(matplotlib.rcParams) == before
    first, again = (
        {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in (saved[0], tmp_path)
    )
    assert again == first


def test_files_of_some_names(tmp_path: Path) -> None:
    assert [plot.name for plot in plots.save(small_record(), tmp_path, {"calls", "load"})] == [
        "calls"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["calls.svg"]


def test_a_disk_that_is_full_is_named_and_leaves_no_half_of_a_file(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            plots.save(small_record(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value.filename).endswith(".svg")
    assert list(tmp_path.iterdir()) == []


def test_what_is_imported_and_what_the_error_says_without_matplotlib(run_python: Run) -> None:
    ran = run_python("""
        import sys
        import unimem_bench.plots
        print("matplotlib.pyplot" in sys.modules)  # its global state is not used
        for name in [name for name in sys.modules if name.startswith("matplotlib")]:
            sys.modules[name] = None
        del sys.modules["unimem_bench.plots"]
        try:
            import unimem_bench.plots
        except ImportError as error:
            print(error)
    """)
    used, error = ran.stdout.splitlines()
    assert used == "False"
    assert "install unimem-llm with the extra 'bench'" in error, ran.stderr
