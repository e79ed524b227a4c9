"""The suite `pressure`: its figures, and that it measures processes in a cgroup."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support.project import tiers
from support.project.bench_cases import case_of, run_case
from unimem.engine import embedded_model
from unimem_bench import decoding, llama_build, timed, timed_side
from unimem_bench.llama_build import NoPeer
from unimem_bench.record import CaseRecord, SideRecord
from unimem_bench.suite import NotMeasured
from unimem_bench.suites import load_suite, pressure
from unimem_bench.suites.pressure import COPIED, EXEC, PRESSED, QUIET, STAGED, WAYS, Tokens
from unimem_bench.timed import TimedProcessError

Patch = pytest.MonkeyPatch


@pytest.fixture
def invented(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Measure all ways but two; under pressure the last token is slower."""
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1000))
    monkeypatch.setattr(pressure, "_found", {})
    monkeypatch.setattr(decoding, "model", lambda measure, kind: path)
    monkeypatch.setattr(pressure, "_own_bytes", lambda kind, path, cpus: 500)
    monkeypatch.setattr(pressure, "_noise_file", lambda folder, nbytes: path)
    monkeypatch.setattr(pressure, "_missing", lambda _, way: "no exec" if way.is_exec else "")

    def measure(m: Any, way: Any, *rest: Any) -> Any:
        if way == WAYS[STAGED]:
            raise TimedProcessError("killed")
        slowest = 12.0 if way == WAYS[COPIED] else 50.0
        pressed = Tokens([10.0] * 999 + [slowest], 100)
        return "copy: why", {QUIET: Tokens([10.0] * 1000, 0), PRESSED: pressed}

    monkeypatch.setattr(pressure, "_measure", measure)
    return tmp_path


def test_what_the_cases_make_of_tokens(invented: Path, monkeypatch: Patch) -> None:
    cases = load_suite("pressure").cases
    found = {case.name: run_case(case, invented, monkeypatch) for case in cases}
    token = found["token"]
    assert {side.name for side in token.sides} == {
        f"{name}, {phase}" for name in set(WAYS) - {STAGED, EXEC} for phase in (QUIET, PRESSED)
    }
    assert token.left_out == {STAGED: "killed", EXEC: "no exec"}
    assert token.facts["figures_ms"]["llama.cpp, mapped"][PRESSED]["worst"] == 50
    assert token.facts["cgroup_bytes"]["unimem"] == 1500 + pressure.NEIGHBOUR_BYTES
    ratios = {side.name: side.passes[0][0] for side in found["p99.9"].sides}
    assert ratios[COPIED] == pytest.approx(1.0002)  # of 1000 tokens, nearly the slowest but one
    assert ratios["unimem"] == pytest.approx(1.004)
    means = {side.name: side.passes[0][0] for side in found["mean"].sides}
    assert means[COPIED] == pytest.approx((9990 + 12) / 10000)
    faults = {side.name: side.passes[0][0] for side in found["major-faults"].sides}
    assert set(faults.values()) == {0.1}
    roles = {side.name: side.role for side in found["mean"].sides}
    assert (roles["unimem"], roles["llama.cpp"]) == ("unimem", "peer")


def test_without_a_cgroup_nothing_is_measured(monkeypatch: Patch, tmp_path: Path) -> None:
    from unimem_bench import cgroup

    monkeypatch.setattr(cgroup, "cgroups_above", lambda name: iter(()))
    with (
        pytest.raises(NotMeasured, match=r"needs root: no memory controller is mounted"),
        cgroup.limited_cgroup(1 << 30),
    ):
        pass


class InventedSide:
    load, start_s = "map: so", 0.5

    def __init__(self, *_: Any, **__: Any) -> None:
        self.begun = self.n = 0

    def begin(self) -> None:
        self.begun += 1

    def compute(self, tokens: list[int]) -> None:
        self.n += len(tokens)

    def counts(self) -> dict[str, int]:
        return {"tokens": self.n}


def test_conversations_of_a_side_are_alike() -> None:
    side = InventedSide()
    found = timed_side.measure(side, 300, 60)
    assert len(found["ms"]) == 300
    assert (side.begun, side.n) == (1 + 3, 300 + 1)  # one before, and the first untimed
    assert len(timed_side.measure(side, 300, 0)["ms"]) == 1


SIDE = """
import sys
from unimem_bench import timed_side
class Side:
    load, start_s = "map: so", 0.5
    def __init__(self, model, **options): print(model, options)
    def begin(self): pass
    def compute(self, tokens): print("a library speaks")
    def counts(self): return {"experts": 5}
timed_side.TimedUnimem = Side
sys.argv = ["side", "unimem", "m.gguf", '{"load": "map"}']
timed_side.main()
"""


def test_what_a_side_answers() -> None:
    asked = '{"n": 2, "seconds": 9}\n'
    done = subprocess.run(
        [sys.executable, "-c", SIDE], input=asked, capture_output=True, text=True, check=True
    )
    first, second = map(json.loads, done.stdout.splitlines())
    assert first == {"load": "map: so", "start_s": 0.5, "counts": {"experts": 5}}
    assert len(second["ms"]) == 2
    assert "m.gguf {'load': 'map'}" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="making a cgroup needs root")
def test_processes_in_a_cgroup(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(pressure, "_found", {})
    # A copy, since other processes may map the model in the package.
    model, folder = Path(shutil.copy(embedded_model(), tmp_path)), tmp_path / "measured"
    folder.mkdir()
    monkeypatch.setattr(decoding, "model", lambda measure, kind: model)
    monkeypatch.setattr(decoding, "require_room", lambda n, path: None)
    monkeypatch.setattr(pressure, "N_QUICK_TOKENS", 5)
    ways = {"unimem", COPIED, STAGED, "unimem, mapped"}
    with suppress(NoPeer):
        llama_build.library(build=tiers.everything)
        ways |= {EXEC, "llama.cpp, mapped"}
    for name in set(WAYS) - ways:
        monkeypatch.delitem(pressure.WAYS, name)
    record = run_case(case_of("pressure/token"), folder, monkeypatch)
    assert record.left_out == {}
    names = {side.name for side in record.sides}
    assert names == {f"{name}, {phase}" for name in WAYS for phase in (QUIET, PRESSED)}
    assert all(len(side.passes[0]) == 10 for side in record.sides)
    assert record.facts["load"][COPIED] == "copy: it was asked for"
    assert [path.name for path in folder.iterdir()] == ["neighbour.bin"]
    shown = subprocess.run(
        [*timed.UNIMEM, "stage", "--list"], capture_output=True, text=True, check=True
    )
    assert str(model) not in shown.stdout, "the staged model stays"


def test_the_plot_shows_pairs() -> None:
    plots = pytest.importorskip("unimem_bench.plots", reason="matplotlib is not installed")
    sides = [
        SideRecord("unimem, quiet", "unimem", [[1.0, 2.0, 1.5]]),
        SideRecord("unimem, pressed", "unimem", [[1.0, 2.0, 1.5]]),
        SideRecord("llama.cpp, quiet", "peer", [[1.0, 2.0]]),
        SideRecord("llama.cpp, pressed", "peer", [[100.0, 800.0, 900.0]]),
        SideRecord("alone, quiet", "peer", [[1.0]]),
    ]
    case = CaseRecord("pressure", "token", "What?", "ms", sides=sides)
    assert list(plots._pairs(case)) == ["unimem", "llama.cpp"]
    with plots._style():
        figure = plots._sheet("pressure", [case], lambda case: case.name)
        svg = io.StringIO()
        figure.savefig(svg, format="svg")
    text = svg.getvalue()
    for word in ("alone", "unimem, beside neighbours", "worst 450x", "up to the slowest"):
        assert word in text, word
    assert "worst 1x" not in text
    assert "5 to 95 %" not in text
