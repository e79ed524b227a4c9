"""Tests of `unimem.planning.new_process`, and of plans for a process that is not started yet."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unimem as um
from unimem.engine import embedded_model
from unimem.planning import new_process
from unimem.planning.new_process import NewProcess, measure_process, own_bytes
from unimem.system.limits import Limit

MIB = 1 << 20
MEASURED = NewProcess(40 * MIB, 600, 100)
VOCAB = 1024  # of the embedded model
Answers = Callable[[Any], list[Any]]


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Answers]:
    """Let the child answer so, and remember in a folder of its own; return what is asked."""
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
    asked: list[Any] = []

    def give(answer: Any) -> list[Any]:
        def run(*words: Any, **_: Any) -> Any:
            asked.append(words)
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(stdout=f"what run says\n{answer}\n")

        monkeypatch.setattr(new_process, "subprocess", SimpleNamespace(
            run=run, SubprocessError=subprocess.SubprocessError
        ))  # fmt: skip
        measure_process.cache_clear()
        return asked

    yield give
    measure_process.cache_clear()


def test_it_is_measured_once_and_remembered(answers: Answers, tmp_path: Path) -> None:
    asked = answers(json.dumps(MEASURED._asdict()))
    assert measure_process() == measure_process() == MEASURED
    measure_process.cache_clear()
    assert measure_process() == MEASURED
    assert len(asked) == 1
    (kept,) = (tmp_path / "cache" / "processes").iterdir()
    for damaged in ("", "{}", '{"base_bytes": 5, "token_bytes": 5}', "[1, 2]"):
        kept.write_text(damaged)
        measure_process.cache_clear()
        assert measure_process() == MEASURED
    assert len(asked) == 5


@pytest.mark.parametrize(("answer", "why"), [
    (OSError("no room"), "fails: no room"),
    (subprocess.CalledProcessError(1, "python", stderr="a\nImportError: ggml\n"), "Error: ggml"),
    ('{"base_bytes": 0, "token_bytes": 1, "making_bytes": 1}', "the kernel does not say"),
    ("nothing", "the kernel does not say"),
])  # fmt: skip
def test_a_plan_says_why_it_was_not_measured(answers: Answers, answer: Any, why: str) -> None:
    answers(answer)
    plan = um.plan(embedded_model(), machine={"memory": "1G"}, process=True)
    assert (plan.process_bytes, plan.container_bytes, plan.verdict) == (0, None, "fits")
    assert why in plan.unknown[0]


def test_a_process_of_its_own_is_measured() -> None:
    measure_process.cache_clear()
    found = measure_process()
    assert isinstance(found, NewProcess)
    assert 16 * MIB < found.base_bytes < 256 * MIB
    assert 100 < found.token_bytes < 4096
    assert 1 <= found.making_bytes < 4096
    assert own_bytes() > 16 * MIB


def test_the_container_limit_is_the_least_that_fits(answers: Answers) -> None:
    answers(json.dumps(MEASURED._asdict()))

    def plan(nbytes: int) -> um.Plan:
        return um.plan(embedded_model(), machine={"memory": nbytes}, process=True, min_ctx=512)

    large = plan(1 << 30)
    without = um.plan(embedded_model(), machine={"memory": "1G"})
    assert large.process_bytes > MEASURED.base_bytes
    assert large.rows == without.rows
    assert large.checks[0].needed_bytes == without.required_bytes + large.process_bytes
    least = large.container_bytes
    assert least is not None
    header = without["other"].nbytes
    assert plan(least).verdict == "fits"
    assert plan(least - header - MIB).verdict != "fits"
    assert "container limit" in str(large)
    assert "container limit" in large._repr_html_()
    small = plan(30 * MIB)
    assert small.verdict == "does not fit"
    assert any(item.text.endswith("a machine with 48 MiB") for item in small.advice)


def test_a_tokenizer_is_made_before_scratch_and_history_are_used(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(making: int) -> um.Plan:
        answers(json.dumps(NewProcess(40 * MIB, 600, making)._asdict()))
        monkeypatch.setenv("UNIMEM_CACHE", "off")
        return um.plan(embedded_model(), ctx=512, machine={"memory": "1G"}, process=True)

    small, large, larger = map(plan, (1, 40_000, 50_000))
    later = sum(large[row].nbytes for row in ("kv", "scratch", "logits", "tokens"))
    assert VOCAB < later < 40_000 * VOCAB
    assert large.process_bytes - small.process_bytes == 40_000 * VOCAB - later
    assert larger.process_bytes - large.process_bytes == 10_000 * VOCAB
    assert large.required_bytes == small.required_bytes


def test_a_context_that_is_too_short_is_no_answer(answers: Answers) -> None:
    answers(json.dumps(MEASURED._asdict()))
    dims = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 4096)
    room = um.plan(dims, ctx=100, machine={"memory": "1G"}).total_bytes
    short, refused = (um.plan(dims, machine={"memory": room}, min_ctx=least) for least in (1, 4000))
    assert 100 <= (short.max_ctx or 0) < 4000
    assert (short.verdict, short.ctx) == ("fits", short.max_ctx)
    assert (refused.ctx, refused.max_ctx) == (4000, short.max_ctx)
    assert refused.verdict in ("does not fit", "reads from disk")
    whole = um.plan(dims, load="copy", machine={"memory": room}, min_ctx=4000)
    assert str(whole).startswith("Does not fit with a context of 4,000: ")


def test_llama_server_keeps_prompts() -> None:
    def plan(**options: Any) -> um.Plan:
        return um.plan(embedded_model(), engine="llama.cpp", machine={"memory": "6G"}, **options)

    server = plan(process=True)
    assert (server["prompts"].nbytes, server.verdict) == (8 << 30, "does not fit")
    (advice,) = [item for item in server.advice if "cache_ram" in item.options]
    assert advice.fits
    n = int(advice.options["cache_ram"].removesuffix("M"))
    assert f"llama-server --cache-ram {n}" in advice.text
    assert plan(process=True, **advice.options).verdict == "fits"
    assert plan(cache_ram=(n + 1) * MIB).verdict != "fits"
    for options in ({}, {"process": True, "cache_ram": 0}):
        assert "prompts" not in {row.category for row in plan(**options).rows}
    with pytest.raises(ValueError, match="cache_ram: unimem has no such option"):
        um.plan(embedded_model(), engine="unimem", cache_ram="1G")
    with pytest.raises(ValueError, match="cache_ram: expected"):
        plan(cache_ram="much")


def test_what_others_have_read_counts_only_now(
    answers: Answers, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(json.dumps(MEASURED._asdict()))
    memory(64 << 30)
    plan = um.plan(embedded_model(), process=True, now=True)
    assert plan.spilled_now_bytes == plan.spilled_bytes == 0
    assert "this moment, all of the file stays" in str(plan)
    assert um.plan(embedded_model(), process=True).spilled_now_bytes is None
    # A cgroup without room for the whole file, which another one has in the page cache.
    monkeypatch.setattr("unimem.planning.plan.own_bytes", lambda: 0)
    monkeypatch.setattr("unimem.planning.sources.FileSource.cached_bytes", lambda _: 1 << 30)
    mapped: dict[str, Any] = {"process": True, "now": True, "ctx": plan.ctx, "load": "map"}
    room = (um.plan(embedded_model(), **mapped).container_bytes or 0) - MIB
    memory(64 << 30, Limit("cgroup /a", 9 << 30, (9 << 30) - room, ""))
    plan = um.plan(embedded_model(), **mapped)
    assert 0 < plan.spilled_bytes <= MIB
    assert plan.spilled_now_bytes == 0


@pytest.mark.usefixtures("available")
def test_this_process_makes_room_for_the_planned_one(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(json.dumps(MEASURED._asdict()))
    monkeypatch.setattr("unimem.planning.plan.own_bytes", lambda: 5 * MIB)
    model = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)
    here, later = (um.plan(model, process=process).checks[0] for process in (False, True))
    assert later.available_bytes - here.available_bytes == 5 * MIB


def test_a_process_is_counted_on_its_node(answers: Answers) -> None:
    answers(json.dumps(MEASURED._asdict()))
    machine = {"memory": "8G", "cpus": 2, "nodes": 2}
    here, later = (
        um.plan(embedded_model(), machine=machine, process=process) for process in (False, True)
    )
    assert here.spread is not None
    assert later.spread is not None
    alone = [plan.spread.nodes[1].alone_bytes or 0 for plan in (here, later) if plan.spread]
    assert alone[1] - alone[0] == later.process_bytes > 0
