"""`unimem bench --advise`: what wins among decoders of invented speeds, and a run of real ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from support.project.documents import check_document
from support.terminal.screens import CONTROL, show
from unimem.engine import embedded_model
from unimem.errors import CapacityError
from unimem.planning.plan import plan
from unimem.planning.result import Plan
from unimem.system import limits
from unimem.system.limits import Node
from unimem_bench import advise as module
from unimem_bench import rounds, states
from unimem_bench.advise import Advised, Effort, Speeds, advise, candidates, effort
from unimem_bench.cli.advise import page
from unimem_bench.decoders import SideError
from unimem_bench.stats import Ratio
from unimem_bench.suite import NotMeasured

Patch = pytest.MonkeyPatch
MODEL = embedded_model()

# By option and value: how many times as fast decode, prefill and start are.
Effects = Mapping[tuple[str, str], tuple[float, float, float]]
THP_DECODES_FASTER: Effects = {("pages", "thp"): (1.3, 1.0, 0.5)}
Q8_DECODES_FASTER: Effects = {("kv_dtype", "q8_0"): (1.5, 1.0, 1.0)}
NO_ORDER = "nothing has another order"


class FakeDecoder:
    """A decoder with invented speeds, and noise of a few percent."""

    effects: ClassVar[Effects]
    noise: ClassVar[float]
    refuses: ClassVar[str]
    interrupt_after: ClassVar[int]
    started: ClassVar[list[FakeDecoder]]
    rng: ClassVar[np.random.Generator]

    def __init__(self, model: Path, *, ctx: int, threads: int, **options: str) -> None:
        if self.refuses in options.values():
            raise SideError("the unimem side: it does not start")
        self.options = options
        self.pid = 2**22 + len(self.started)  # no such process
        self.is_open = True
        self.started.append(self)
        found = [self.effects.get(each, (1.0, 1.0, 1.0)) for each in options.items()]
        self._decode, self._prefill, start = (
            math.prod(column) for column in zip((20.0, 100.0, 1.0), *found, strict=True)
        )
        pages = options.get("pages", "4k")
        part = {"pages": "4k" if pages == "auto" else pages}
        self.facts = {
            "start_s": self._noisy(1.0) / start,
            "load": options.get("load", "map"),
            "granted": {"weights": part, "kv": part, "scratch": part},
        }

    def _noisy(self, value: float) -> float:
        return float(value * math.exp(self.rng.normal(0, self.noise)))

    def prefill(self, tokens: list[int]) -> float:
        assert tokens
        return self._noisy(self._prefill)

    def decode(self, n: int) -> float:
        assert n >= 1
        FakeDecoder.interrupt_after -= 1
        if FakeDecoder.interrupt_after == 0:
            raise KeyboardInterrupt
        return self._noisy(self._decode)

    def require_idle(self) -> None:
        assert self.is_open

    def close(self) -> None:
        self.is_open = False

    def __enter__(self) -> FakeDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Machine:
    """An invented machine, which logs its pool of huge pages."""

    def __init__(self) -> None:
        self.pool: list[str] = []
        self.has_pool = True

    @contextmanager
    def reserved(self, nbytes: int) -> Iterator[None]:
        assert nbytes > 0
        if not self.has_pool:
            raise NotMeasured("wants huge pages")
        self.pool.append("taken")
        try:
            yield
        finally:
            assert not any(each.is_open for each in FakeDecoder.started)
            self.pool.append("given back")


@pytest.fixture
def machine(monkeypatch: Patch) -> Machine:
    """Install invented decoders, and rounds that nothing disturbs."""
    invented = Machine()
    fresh: dict[str, Any] = {"effects": {}, "noise": 0.01, "refuses": "", "started": []}
    fresh |= {"interrupt_after": 0, "rng": np.random.default_rng(8)}
    for name, value in fresh.items():
        monkeypatch.setattr(FakeDecoder, name, value, raising=False)
    monkeypatch.setattr(module, "DecoderProcess", FakeDecoder)
    monkeypatch.setattr(module, "reserved", invented.reserved)
    monkeypatch.setattr(module, "plan", plan_without_order)
    monkeypatch.setattr(module, "nodes", lambda: {0: _node(0)})
    # Otherwise plans would use pages that this machine has reserved.
    pools = limits.huge_pools().items()
    empty = {name: replace(pool, total=0, free=0, reserved=0) for name, pool in pools}
    monkeypatch.setattr(limits, "huge_pools", lambda: empty)
    monkeypatch.setattr(rounds.Uses, "taken_since", lambda *_: 0.0)
    return invented


def plan_without_order(*arguments: Any, load: str = "auto", **options: Any) -> Plan:
    """Plan as on a CPU that multiplies no type faster in another order."""
    if load != "repack":
        return plan(*arguments, load=load, **options)  # type: ignore[arg-type]
    return replace(plan(*arguments, load="map", **options), load_reason=NO_ORDER)


def _node(number: int, total_bytes: int = 1 << 30) -> Node:
    return Node(number, total_bytes, total_bytes, total_bytes, (number,), (10, 20), True)


def make(effects: Effects) -> Advised:
    FakeDecoder.effects = effects
    FakeDecoder.rng = np.random.default_rng(8)
    advice = advise(MODEL, quick=True)
    assert FakeDecoder.started
    assert not any(each.is_open for each in FakeDecoder.started)
    return advice


@pytest.mark.usefixtures("machine")
def test_what_wins_is_advised_with_the_margin_of_all_of_it() -> None:
    advice = make({
        **THP_DECODES_FASTER,
        ("pages", "2m"): (1.1, 1.0, 1.0),
        ("kv_dtype", "q8_0"): (1.2, 0.9, 1.0),
        ("kv_dtype", "f32"): (0.8, 1.0, 1.0),
    })  # fmt: skip
    assert advice.flags == ("--pages", "thp", "--kv-dtype", "q8_0")
    assert advice.by == "decode"
    assert advice.margin is not None
    assert advice.margin.value == pytest.approx(1.3 * 1.2, rel=0.03)
    assert advice.margin.low > 1.4
    winners = {"pages": "thp", "load": None, "kv_dtype": "q8_0"}
    assert {factor.name: factor.winner for factor in advice.factors} == winners
    together = FakeDecoder.started[-1].options, FakeDecoder.started[-2].options
    assert {"pages": "thp", "kv_dtype": "q8_0"} in together
    assert {} in together
    costs = " ".join(advice.trade_offs)
    assert "thp the weights are copied" in costs
    assert "halves the KV cache" in costs
    assert "prefill has 0.9" in costs
    assert "the start has 0.5" in costs


@pytest.mark.usefixtures("machine")
def test_noise_is_no_advice_and_what_equals_the_defaults_is_not_measured() -> None:
    FakeDecoder.noise = 0.05
    advice = make({})
    assert (advice.flags, advice.margin, advice.by, advice.trade_offs) == ((), None, None, ())
    last = list(page(advice))[-1]
    assert last == "Nothing differs by more than noise: the defaults are as good as any here."
    assert advice.left_out.pop("--load repack") == NO_ORDER
    same = {name for name, reason in advice.left_out.items() if "the defaults do" in reason}
    assert same == {"--pages 4k", "--load map"}
    names = [each.name for each in advice.factors[0].variants]
    assert names == ["default", "--pages thp", "--pages 2m"]


@pytest.mark.usefixtures("machine")
def test_weights_stay_repacked_on_other_pages(monkeypatch: Patch) -> None:
    def plan_repacked(*arguments: Any, load: str = "auto", **options: Any) -> Plan:
        # `auto` copies if pages are requested.
        as_planned: Any = "copy" if load == "auto" and options.get("pages") else load
        made = plan_without_order(*arguments, load="map", **options)
        return replace(made, load="repack" if as_planned == "auto" else as_planned)

    monkeypatch.setattr(module, "plan", plan_repacked)
    advice = make({("pages", "thp"): (1.3, 1.0, 1.0)})
    assert advice.flags == ("--load", "repack", "--pages", "thp")
    costs = " ".join(advice.trade_offs)
    assert "repacked weights take RAM of their own" in costs
    assert "are copied" not in costs
    names = [each.name for each in advice.factors[0].variants]
    assert names[1:] == [f"--load repack --pages {pages}" for pages in ("4k", "thp", "2m")]
    # An explicit winner is kept.
    effects = {("pages", "thp"): (1.3, 1.0, 1.0), ("load", "copy"): (1.2, 1.0, 1.0)}
    assert make(effects).flags == ("--load", "copy", "--pages", "thp")


@pytest.mark.usefixtures("machine")
def test_what_wins_by_luck_does_not_win_twice(monkeypatch: Patch) -> None:
    measure = module._Bench._measure

    def lucky_once(bench: Any, group: Mapping[str, Any]) -> Any:
        result = measure(bench, group)
        FakeDecoder.effects = {}
        return result

    monkeypatch.setattr(module._Bench, "_measure", lucky_once)
    advice = make({("pages", "4k"): (1.2, 1.0, 1.0), ("pages", "thp"): (1.3, 1.0, 1.0)})
    assert advice.factors[0].winner == "thp"
    assert (advice.flags, advice.margin) == ((), None)


@pytest.mark.usefixtures("machine")
def test_a_faster_start_counts_where_nothing_else_differs() -> None:
    advice = make({("load", "copy"): (1.0, 1.0, 2.0), ("pages", "thp"): (1.0, 1.0, 3.0)})
    assert (advice.flags, advice.by) == (("--load", "copy"), "start")
    assert advice.margin is not None
    assert advice.margin.value == pytest.approx(2, rel=0.05)
    assert make({("load", "copy"): (0.8, 1.0, 2.0)}).flags == ()


def test_huge_pages_are_reserved_and_given_back(machine: Machine) -> None:
    make({("pages", "2m"): (1.3, 1.0, 1.0)})
    assert machine.pool == ["taken", "given back"] * 2  # once more with all that won
    order = [each.options.get("pages") for each in FakeDecoder.started[1:5]]
    assert order[0] == "2m", "the defaults would take the pages"


def test_what_cannot_be_had_or_does_not_start_is_left_out(machine: Machine) -> None:
    machine.has_pool = False
    FakeDecoder.refuses = "bf16"
    advice = make({**Q8_DECODES_FASTER, ("pages", "2m"): (9.0, 9.0, 9.0)})
    assert advice.left_out["--pages 2m"] == "wants huge pages"
    assert machine.pool == []
    assert advice.left_out["--kv-dtype bf16"] == "the unimem side: it does not start"
    assert advice.flags == ("--kv-dtype", "q8_0")


def test_decoders_without_room_together_run_in_pairs(machine: Machine, monkeypatch: Patch) -> None:
    total = plan(MODEL).total_bytes
    monkeypatch.setattr(states, "available_bytes", lambda: 3 * total)
    most = 0
    with_pool: set[str] = set()

    class Counting(FakeDecoder):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            nonlocal most
            super().__init__(*arguments, **options)
            most = max(most, sum(each.is_open for each in FakeDecoder.started))
            if len(machine.pool) % 2:
                with_pool.add(str(self.options.get("pages")))

    monkeypatch.setattr(module, "DecoderProcess", Counting)
    advice = make(Q8_DECODES_FASTER)
    assert most == 2
    assert with_pool == {"2m", "None"}, "other defaults would take the huge pages"
    assert advice.flags == ("--kv-dtype", "q8_0")
    names = [each.name for each in advice.factors[2].variants]
    assert names == ["default", "--kv-dtype f32", "--kv-dtype bf16", "--kv-dtype q8_0"]
    # Nor beside the defaults.
    monkeypatch.setattr(states, "available_bytes", lambda: 1)
    advice = make(THP_DECODES_FASTER)
    no_room = "there is no room for it beside the defaults"
    assert set(advice.left_out.values()) == {no_room, NO_ORDER}
    assert all(factor.variants == () for factor in advice.factors)
    assert list(page(advice))[-1].startswith("Nothing differs")


def test_an_interrupt_ends_all_processes_and_gives_the_pages_back(machine: Machine) -> None:
    FakeDecoder.interrupt_after = 12
    with pytest.raises(KeyboardInterrupt):
        advise(MODEL, quick=True)
    assert len(FakeDecoder.started) > 3
    assert not any(each.is_open for each in FakeDecoder.started)
    assert machine.pool == ["taken", "given back"]


@pytest.mark.usefixtures("machine")
def test_policies_are_tried_where_there_are_nodes(monkeypatch: Patch) -> None:
    def plan_anywhere(*arguments: Any, numa: str | None = None, **options: Any) -> Any:
        return plan(*arguments, **options)

    monkeypatch.setattr(module, "nodes", lambda: {0: _node(0), 1: _node(1), 2: _node(2, 0)})
    monkeypatch.setattr(module, "plan", plan_anywhere)
    advice = make({("numa", "interleave"): (1.4, 1.0, 1.0)})
    assert advice.flags == ("--numa", "interleave")
    policies = [each.options.get("numa") for each in advice.factors[3].variants]
    assert policies == [None, "interleave", "bind:0", "bind:1"]
    assert "numa" not in candidates([0])


def test_the_effort_suits_the_speed() -> None:
    slow, fast = Speeds(50.0, 10.0, 2.0), Speeds(20_000.0, 2000.0, 0.02)
    full = effort(slow, 4096, quick=False)
    assert (full.n_prompt, full.n_decode) == (150, 2)
    assert effort(slow, 4096, quick=True).n_prompt == 32
    assert full.passes * full.seconds * 13 < 600  # 11 sides, and two of the end
    quick = effort(fast, 512, quick=True)
    assert quick.passes * quick.seconds * 13 < 60
    assert quick.n_prompt + 4 * quick.n_decode <= 512
    smallest = effort(fast, 2, quick=True)
    assert (smallest.n_prompt, smallest.n_decode) == (1, 1)


@pytest.mark.usefixtures("machine")
def test_the_document_and_the_page(tmp_path: Path) -> None:
    for effects in ({}, THP_DECODES_FASTER):
        advice = make(effects)
        document = json.loads(advice.to_json())
        check_document(document)
        assert document["flags"] == list(advice.flags)
        assert (document["margin"] is None) == (not advice.flags)
    FakeDecoder.rng = np.random.default_rng(8)
    screen = show("bench", "--advise", MODEL, "--quick")
    assert screen.code == 0
    assert screen.lines[-1] == f"unimem run {MODEL} --pages thp"
    assert "it decodes 1.3" in screen.lines[-2]
    assert any(line.startswith("--kv-dtype") for line in screen.lines)
    assert max(map(len, screen.lines[:-1])) <= 80
    assert "about" in screen.err.splitlines()[0]
    assert not CONTROL.search(screen.out)
    assert json.loads(show("bench", "--advise", MODEL, "--json").out)["flags"]
    # A path with spaces can be copied.
    spaced = replace(advice, model="/models/my model.gguf", margin=Ratio(1.2, 1.1, 1.3), by="start")
    *_, speed, command = page(spaced)
    assert command == "unimem run '/models/my model.gguf' --pages thp"
    assert "it starts 1.20x" in speed


@pytest.mark.usefixtures("machine")
def test_a_model_that_does_not_fit_is_refused(monkeypatch: Patch) -> None:
    made = plan(MODEL)
    checks = tuple(replace(each, available_bytes=1) for each in made.checks)
    monkeypatch.setattr(module, "plan", lambda *_, **__: replace(made, checks=checks))
    with pytest.raises(CapacityError):
        advise(MODEL)
    assert FakeDecoder.started == []
    assert show("bench", "--advise", MODEL).code == 3


@pytest.mark.slow
def test_real_decoders(monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "candidates", lambda _: {"kv_dtype": ["q8_0"]})
    monkeypatch.setattr(module, "effort", lambda *_, **__: Effort(1, 8, 2, 3, 0.1))
    lines: list[str] = []
    advice = advise(MODEL, ctx=64, threads=1, progress=lines.append)
    (factor,) = advice.factors
    default, q8_0 = factor.variants
    assert (default.name, q8_0.options) == ("default", {"kv_dtype": "q8_0"})
    assert q8_0.nbytes < default.nbytes
    assert set(q8_0.ratios) == set(default.medians) == {"decode", "prefill", "start"}
    assert min(*default.medians.values(), *q8_0.medians.values()) > 0
    assert lines[:2] == [
        "1 thread, 8 tokens of prompt, 1 process for each value: about 0 seconds",
        "--kv-dtype: q8_0",
    ]
    assert advice.left_out == {}
