"""`unimem bench`: its arguments, its output, and how it ends."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from support.project.bench_records import (
    Rounds,
    case,
    failed_case,
    levels,
    record,
    remember_intervals,
    sample_record,
    suite,
)
from support.project.checkout import ROOT
from support.project.documents import check_document
from support.terminal.screens import CONTROL, HOSTILE, Screen, show
from unimem.base.install_hint import install_hint
from unimem_bench import markdown
from unimem_bench.answers import answers
from unimem_bench.cli.run import read_records
from unimem_bench.compare import compare, summary
from unimem_bench.questions import QUESTIONS
from unimem_bench.record import Record
from unimem_bench.run import QUICK_S, Interrupted
from unimem_bench.stats import figures
from unimem_bench.suites import NAMES, load_suite
from unimem_bench.tables import case_table, machine_facts, targets

Patch = pytest.MonkeyPatch
jsonschema = pytest.importorskip("jsonschema", reason="for documents: pip install '.[test]'")

command = importlib.import_module("unimem_bench.cli.run")

CLI = (ROOT / "docs/cli.md").read_text()
MAIN = [sys.executable, "-c", "import sys; from unimem.cli import main; sys.exit(main())", "bench"]
SAMPLE = sample_record()

Measured = Callable[[Record], dict[str, Any]]
needs_matplotlib = pytest.mark.skipif(
    not importlib.util.find_spec("matplotlib"),
    reason="plots need matplotlib: pip install '.[bench]'",
)


@pytest.fixture(autouse=True)
def intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    remember_intervals(monkeypatch)


@pytest.fixture
def measured(monkeypatch: Patch) -> Measured:
    """Make the run return this record, and return the run's arguments."""

    def give(made: Record) -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def run(suites: Sequence[str], **options: Any) -> Record:
            asked.update(options, suites=list(suites), existed=options["folder"].is_dir())
            return made

        monkeypatch.setattr(command, "run", run)
        return asked

    return give


def without(*suites: str) -> Record:
    return replace(SAMPLE, suites=[each for each in SAMPLE.suites if each.name not in suites])


SMALL = without(*{each.name for each in SAMPLE.suites} - {"calls", "gpu"})
"""Some suites of the record, whose plots are made quickly."""


def written(folder: Path, made: Record = SAMPLE, name: str = "record.json") -> Path:
    path = folder / name
    path.write_text(made.to_json())
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return written(tmp_path)


@pytest.mark.parametrize(("words", "text"), [
    ("nonsense", "no suite 'nonsense': there are calls, "),
    ("calls --case nonsense", "no case of calls has 'nonsense' in its name"),
    ("calls --json --markdown", "expected one of --json and --markdown, got both"),
    ("--from a --compare b c", "expected one of --list, --from, --compare, --advise"),
    ("calls --from a", "SUITE is not for --from"),
    ("--output a --from b", "--output is not for --from"),
    ("--compare a b --json", "--json is not for --compare"),
    ("--list --plots a", "--plots is not for --list"),
    ("--advise a --case b", "--case is not for --advise"),
    ("--compare a", "--compare"),
    ("--quick --nonsense", "--nonsense"),
])  # fmt: skip
def test_wrong_usage_ends_with_2(words: str, text: str) -> None:
    screen = show("bench", *words.split())
    assert (screen.code, screen.out) == (2, "")
    assert text in " ".join(screen.err.split())


def test_help_is_short_and_all_that_it_names_is_in_the_document() -> None:
    screen = show("bench", "--help", columns=80)
    assert screen.code == 0
    assert len(screen.lines) < 40
    assert all(name in screen.out for name in NAMES)
    table = CLI.split("\n## unimem bench\n")[1].split("|---|---|---|\n")[1].split("\n\n")[0]
    options = re.findall(r"--[a-z-]+", show("bench", "--help").out)
    assert {option for option in options if f"| `{option}" not in table} == {"--help"}
    assert all(f"`{name}`" in table for name in NAMES)


@pytest.mark.parametrize(("text", "sentence"), [
    (None, "No such file or directory"),
    ("{", "Expecting property name"),
    ('{"schema": "unimem.plan/1"}', "expected the schema 'unimem.bench/1'"),
    ("[]", "expected the schema 'unimem.bench/1'"),
])  # fmt: skip
def test_files_that_are_no_records(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "none.json"
    if text is not None:
        path.write_text(text)
    for words in (("--from", path), ("--compare", path, path)):
        screen = show("bench", *words)
        assert (screen.code, screen.out) == (1, "")
        assert "none.json: " in screen.err
        assert sentence in screen.err
        assert screen.err.count("\n") == 1


def test_a_record_on_a_terminal_and_without_one(file: Path) -> None:
    screen = show("bench", "--from", file, columns=80)
    assert (screen.code, screen.err) == (0, "")
    assert screen.widest <= 80
    assert screen.lines[-1] == f"{targets(SAMPLE).summary}."
    text = " ".join(screen.plain.split())
    shown, left_out = 0, 0
    for each in SAMPLE.cases():
        made = case_table(each)
        is_shown = f" {made.name}: {' '.join(each.question.split())} " in text
        if made.table is None and not made.is_error:  # cases of one reason share a sentence
            assert not is_shown
            assert re.search(
                rf" not measured, {re.escape(made.problem or '')}: [^:]*{re.escape(each.name)}",
                text,
            )
            left_out += 1
            continue
        assert is_shown
        assert made.table is None or all(r.cells[0].split()[0] in text for r in made.table.rows)
        shown += 1
    assert shown > 5
    assert left_out > 0
    colours = dict(re.findall(r"^(\x1b\[\d+m)(.*)\x1b\[0m$", screen.out, re.M)[::-1])
    assert {"\x1b[1m", "\x1b[2m", "\x1b[33m", "\x1b[36m"} <= colours.keys()
    piped = show("bench", "--from", file)
    assert "\x1b" not in piped.out
    assert piped.widest <= 80
    assert show("bench", "--from", file, columns=80, NO_COLOR="1").out == piped.out
    wide = show("bench", "--from", file, columns=160)
    assert 80 < wide.widest <= 160
    row = next(line for line in wide.lines if "gguf/open: at least 5x as fast as ggml" in line)
    assert row.endswith("met")


def test_the_example_of_the_document(tmp_path: Path) -> None:
    documented = case(
        "calls/append", "What does one token of 2 KiB of K and 2 KiB of V cost?", "ns",
        levels(152, {"keys[i] = k": 311}, {"C memcpy": 61}), Rounds(noise=0.06),
        left_out={"torch": "torch is not installed"}, rounds_dropped=3,
    )  # fmt: skip
    path = written(tmp_path, record(suite("calls", "What do calls cost?", documented)))
    example = CLI.split("\n### What bench shows\n")[1].split("```text\n")[1].split("```")[0]
    assert example in show("bench", "--from", path).out


def test_nothing_of_a_record_is_obeyed(tmp_path: Path) -> None:
    rest: Any = {"facts": {HOSTILE: HOSTILE}, "left_out": {"c": HOSTILE}}
    made = case("calls/take", HOSTILE, "ns", levels({HOSTILE: 1}, {"b": 2}), **rest)
    failed = failed_case("calls/gone", "What?", "ns", HOSTILE, is_error=True)
    path = written(tmp_path, record(suite("calls", HOSTILE, made, failed)))
    screen = show("bench", "--from", path)
    assert screen.code == 0
    assert not CONTROL.search(screen.out)
    assert screen.widest <= 80


def test_a_record_as_markdown_and_as_json(file: Path) -> None:
    screen = show("bench", "--from", file, "--markdown", columns=80)
    assert (screen.code, screen.err) == (0, "")
    assert screen.out.splitlines() == list(markdown.record_lines(SAMPLE))
    screen = show("bench", "--from", file, "--json")
    assert (screen.code, screen.err) == (0, "")
    document = json.loads(screen.out)
    check_document(document)
    assert Record.from_dict(document) == SAMPLE


def test_two_records(file: Path, tmp_path: Path) -> None:
    made = sample_record(1, quick=True)
    other = written(tmp_path, replace(made, suites=made.suites[1:]), "other.json")
    screen = show("bench", "--compare", file, other, columns=80)
    assert (screen.code, screen.err) == (0, "")
    assert screen.widest <= 80
    assert screen.lines[0] == "warning: a whole run and a quick one: sizes and rounds differ"
    assert screen.lines[1] == "only in A: calls/take, calls/append"
    found = compare(SAMPLE, Record.read(other))
    assert screen.lines[-1] == f"{summary(found)}."
    screen = show("bench", "--compare", file, other, "--markdown")
    assert screen.out.splitlines() == list(markdown.difference_lines(found))


def test_the_list_has_every_case_and_claim() -> None:
    screen = show("bench", "--list", "calls", columns=80)
    assert (screen.code, screen.err) == (0, "")
    assert screen.widest <= 80
    wide = show("bench", "--list", "calls", columns=250)
    for each in load_suite("calls").cases:
        (line,) = (line for line in wide.lines if line.startswith(f"{each.name}  "))
        assert each.question in line
        assert line.endswith(".") == bool(each.targets)
    only = show("bench", "--list", "calls", "--case", "address", "--quick")
    assert len(only.lines) < len(wide.lines)


def test_what_is_asked_for(measured: Measured, tmp_path: Path) -> None:
    asked = measured(record())
    folder = tmp_path / "a" / "b"
    words = ("calls", "kv", "calls", "--quick", "--case", "take", "--dir", folder)
    assert show("bench", *words).code == 0
    asked.pop("progress")
    options = {"quick": True, "case": "take", "folder": folder, "bounded": False}
    assert asked == {"suites": ["calls", "kv"], "existed": True, **options}
    assert folder.is_dir()


def test_a_quick_run_of_all_suites_has_its_time_and_says_what_is_left(
    measured: Measured, monkeypatch: Patch
) -> None:
    asked = measured(record())
    code, _, said = show("bench", "--quick")
    assert (code, asked["bounded"]) == (0, True)
    left_out = set(NAMES) - {*asked["suites"], "pressure"}
    assert left_out == {name for name in NAMES if not load_suite(name).in_quick} != set()
    assert all(name in said for name in left_out)
    assert {each.case.partition("/")[0] for each in QUESTIONS} <= {*asked["suites"]}
    progress = command._Progress(command.schedule(NAMES, quick=True), bounded=True)
    progress._begins = [0.0, 5.0]
    assert progress._left() == QUICK_S - 5
    progress._begins = [0.0, 2 * QUICK_S]
    n_suites = sum(each.number == 1 for each in progress._passes)
    assert progress._left() == 3.0 * (n_suites - 1), "on a slow machine"


@pytest.mark.parametrize(("uid", "left_out"), [(1000, []), (0, ["pressure"])])
def test_all_suites_in_a_new_folder(
    measured: Measured, tmp_path: Path, monkeypatch: Patch, uid: int, left_out: list[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    monkeypatch.setattr(command, "schedule", lambda *_, **__: [])
    monkeypatch.setattr(tempfile, "tempdir", None)
    asked = measured(record())
    assert show("bench", TMPDIR=str(tmp_path)).code == 0
    suites = [name for name in NAMES if name not in left_out]
    assert (asked["suites"], asked["existed"]) == (suites, True)
    assert asked["folder"].parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_written_and_shown(measured: Measured, tmp_path: Path) -> None:
    measured(good := without("load"))
    path = tmp_path / "record.json"
    screen = show("bench", "calls", "--output", path)
    assert screen.code == 0, "a target that is missed is no failure"
    assert Record.read(path) == good
    assert screen.out == show("bench", "--from", path).out


def test_an_error_of_a_case_ends_with_1(measured: Measured, tmp_path: Path) -> None:
    assert any(each.is_error for each in SAMPLE.cases())
    measured(SAMPLE)
    screen = show("bench", "calls", "--output", tmp_path / "record.json", "--json")
    assert screen.code == 1
    assert json.loads(screen.out) == SAMPLE.to_dict()
    assert Record.read(tmp_path / "record.json") == SAMPLE


def test_an_interrupt_keeps_what_was_measured(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "run", Mock(side_effect=Interrupted(SAMPLE)))
    out = tmp_path / "record.json"
    screen = show("bench", "calls", "--output", out, "--page", tmp_path / "page.md")
    assert screen.code == 130
    assert screen.lines[-1] == f"{targets(SAMPLE).summary}."
    assert Record.read(out) == SAMPLE
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(("option", "place", "says"), [
    ("--output", "file/below", "file"),
    ("--page", "file/below", "file"),
    ("--plots", "file/below", "file"),
    ("--dir", "file", "file: expected a folder, got a file\n"),
    ("--plots", "file", "file: expected a folder, got a file\n"),
])  # fmt: skip
def test_what_cannot_be_written_is_refused_before(
    option: str, place: str, says: str, measured: Measured, tmp_path: Path
) -> None:
    asked = measured(SAMPLE)
    (tmp_path / "file").touch()
    screen = show("bench", "calls", option, tmp_path / place)
    assert (screen.code, screen.out) == (1, "")
    assert says in screen.err
    assert asked == {}


@pytest.mark.parametrize("option", ["--output", "--page", "--plots"])
def test_what_cannot_be_written_in_the_end_is_shown_nevertheless(
    option: str, measured: Measured, tmp_path: Path, monkeypatch: Patch
) -> None:
    measured(record())
    fail = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "there"))
    monkeypatch.setattr(command, "write_record" if option == "--output" else "draw", fail)
    screen = show("bench", "calls", option, tmp_path / "x", "--json")
    assert (screen.code, screen.err) == (1, "unimem: there: No space left on device\n")
    assert json.loads(screen.out) == record().to_dict()


def test_missing_packages_are_named(measured: Measured, tmp_path: Path, monkeypatch: Patch) -> None:
    asked = measured(SAMPLE)
    absent = {"matplotlib", "gguf"}
    monkeypatch.setattr(command, "find_spec", lambda name: None if name in absent else object())
    needs = f"unimem: plots need matplotlib: {install_hint('bench')}\n"
    for option in ("--plots", "--page"):
        assert show("bench", "calls", option, tmp_path / "x") == (1, "", needs)
    assert asked == {}
    screen = show("bench", "calls")
    assert f"gguf: not installed; {install_hint('bench')}" in screen.err
    assert asked


class _Clock:
    now = 0.0

    def monotonic(self) -> float:
        self.now += 10
        return self.now


def _progress(monkeypatch: Patch, columns: int | None) -> Screen:
    """Show two suites, of two passes and of one; each pass takes 10 seconds."""
    suites = [load_suite("calls"), replace(load_suite("gguf"), name="other")]
    passes = [(suites[0], 1, 2), (suites[1], 1, 1), (suites[0], 2, 2)]
    scheduled = [command.Pass(*each) for each in passes]
    monkeypatch.setattr(command, "schedule", lambda *_, **__: scheduled)
    monkeypatch.setattr(command, "time", _Clock())

    def run(*_: object, progress: Callable[[str], None], **__: object) -> Record:
        for each in scheduled:
            progress(str(each))
        return record()

    monkeypatch.setattr(command, "run", run)
    return show("bench", "calls", columns=columns)


def test_progress_is_a_line_a_pass_and_on_a_terminal_one_line(monkeypatch: Patch) -> None:
    assert _progress(monkeypatch, None).err.splitlines() == [
        "calls, pass 1 of 2 (1 of 3 passes), 0:00 so far",
        "other (2 of 3 passes), 0:10 so far",
        "calls, pass 2 of 2 (3 of 3 passes), 0:20 so far, about 0:10 to go",
    ]
    parts = _progress(monkeypatch, 50).err.split("\r\x1b[K")
    assert len(parts) == 5
    assert (parts[0], parts[-1]) == ("", "")
    assert "\n" not in "".join(parts)
    assert max(map(len, parts)) == 49
    assert parts[3].endswith("to go")


@pytest.mark.parametrize("words", [(), ("--quick", "--json")])
def test_advice_is_asked_for(words: tuple[str, ...], monkeypatch: Patch) -> None:
    show_advice = Mock()
    monkeypatch.setattr("unimem_bench.cli.advise.show_advice", show_advice)
    assert show("bench", "--advise", "m.gguf", *words) == (0, "", "")
    show_advice.assert_called_once_with(Path("m.gguf"), quick=bool(words), as_json=bool(words))


@needs_matplotlib
def test_plots_are_written(measured: Measured, tmp_path: Path) -> None:
    measured(SMALL)
    assert show("bench", "calls", "--plots", tmp_path / "plots").code == 0
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert names == {"overview.svg", "targets.svg", "calls.svg"}


@needs_matplotlib
def test_a_page_is_the_same_of_the_same_record(tmp_path: Path, monkeypatch: Patch) -> None:
    pictured = {"calls": (SMALL.suites[0].cases[0].name,), "gpu": ("take",)}
    monkeypatch.setattr("unimem_bench.page.PICTURES", pictured)
    file = written(tmp_path, SMALL)
    pages = [tmp_path / name / "page.md" for name in "ab"]
    for path in pages:
        path.parent.mkdir()
        assert show("bench", "--from", file, "--page", path).code == 0
    first, second = (
        {path.relative_to(page.parent): path.read_bytes() for path in page.parent.rglob("*.*")}
        for page in pages
    )
    assert first == second
    text = pages[0].read_text()
    images = re.findall(r"^!\[.+\]\(<(.+)>\)$", text, re.M)
    assert images == [str(name) for name in first if name.suffix == ".svg"] == ["page/calls.svg"]
    assert f"**{targets(SMALL).summary}.**" in text
    assert "\n".join(markdown.target_lines(SMALL)) in text
    heads = re.findall(r"^## (.*)$", text, re.M)
    assert heads[0] == "Ten questions"
    assert heads[4:] == [*(each.name for each in SMALL.suites), "All targets"]
    for each in SMALL.cases():
        problem = case_table(each).problem
        begins = f"- not measured, {markdown.escape(problem)}: " if problem else "| "
        rows = [line for line in text.splitlines() if line.startswith(begins)]
        assert any(markdown.escape(each.name) in line for line in rows), each.name


RESULTS, PAGE = ROOT / "bench/results", ROOT / "docs/benchmarks.md"
RECORDED = [RESULTS / "unimem-bench.json", RESULTS / "decode.json"]  # as `make bench-docs` has them
is_recorded = pytest.mark.skipif(not RECORDED[0].exists(), reason=f"there is no {RECORDED[0]}")


@is_recorded
def test_the_page_of_the_documents_is_short_and_of_the_recorded_runs() -> None:
    text = PAGE.read_text()
    assert text.count("\n") < 450
    record = read_records(RECORDED)
    runs = dict.fromkeys([None, *(suite.run for suite in record.suites)])
    questions = ["\n".join(markdown.table_lines(answers(record, run))) for run in runs]
    assert text.partition(questions[0])[0].count("\n") < 10, "they are not on the first screen"
    assert [table for table in questions if table not in text] == []
    assert sum(len(answers(record, run).rows) for run in runs) == 10
    for _, fact in machine_facts(record):
        assert markdown.escape(fact) in text
    pictures = list(PAGE.with_suffix("").iterdir())
    assert len(pictures) <= 3
    assert all(each.stat().st_size <= 60_000 for each in pictures)


@is_recorded
def test_each_case_is_recorded_once() -> None:
    cases = Counter(
        f"{case.suite}/{case.name}"
        for path in RESULTS.glob("*.json")
        if b'"unimem.bench/1"' in path.read_bytes()
        for case in Record.read(path).cases()
        if any(map(figures, case.sides))
    )
    assert [name for name, n in cases.items() if n > 1] == []


@is_recorded
@needs_matplotlib
@pytest.mark.slow
def test_the_page_of_the_documents_is_of_the_record(tmp_path: Path) -> None:
    made = tmp_path / PAGE.name
    sources = [word for path in RECORDED for word in ("--from", path)]
    assert show("bench", *sources, "--page", made).code == 0
    again = "make bench-docs"
    assert made.read_text() == PAGE.read_text(), f"make it again: {again}"
    there, wanted = (sorted(os.listdir(page.with_suffix(""))) for page in (PAGE, made))
    assert there == wanted


def test_a_case_is_measured_and_nothing_is_imported_from_the_current_folder(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "unimem_bench.py").write_text("raise SystemExit('not this one')")
    (here / "json.py").write_text("raise SystemExit('nor this one')")
    monkeypatch.chdir(here)
    path = tmp_path / "record.json"
    words = ("calls", "--quick", "--case", "take_address", "--output", path, "--json")
    made = show("bench", *words, "--dir", tmp_path / "files")
    assert made.code == 0, made.err
    assert made.out == path.read_text()
    document = json.loads(made.out)
    check_document(document)
    (only,) = Record.from_dict(document).cases()
    assert (only.suite, only.name, only.failed) == ("calls", "take_address", None)
    assert only.sides[0].role == "unimem"
    assert all(min(each) > 0 for side in only.sides for each in side.passes)
    assert made.err.startswith("calls, pass 1 of ")


def test_a_run_is_interrupted(tmp_path: Path) -> None:
    """As at a terminal, where the signal reaches all processes of the group."""
    path = tmp_path / "record.json"
    words = ["calls", "--case", "take_address", "--output", str(path), "--dir", str(tmp_path)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*MAIN, *words], start_new_session=True, **pipes) as child:
        try:
            assert child.stderr is not None
            assert child.stderr.readline().startswith("calls, pass 1 of ")
            os.killpg(child.pid, signal.SIGINT)
            out, err = child.communicate()
        finally:
            child.kill()
    assert (child.returncode, err) == (130, "")
    assert "the run was interrupted before" in out
    check_document(json.loads(path.read_text()))


def test_the_documents_of_invented_records_are_valid() -> None:
    for made in (SAMPLE, record(), record(suite("calls", "What?"))):
        check_document(json.loads(made.to_json()))
    with pytest.raises(jsonschema.ValidationError):
        check_document(record().to_dict() | {"quick": 1})
