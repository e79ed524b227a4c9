"""The suite runtime: both sides are the example, and compute the decoder's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.project.bench_cases import case_of, check_case, run_case
from unimem.engine import embedded_model
from unimem_bench.suites import runtime as suite
from unimem_bench.suites.runtime import Runtime, runtimes


@pytest.mark.slow
@pytest.mark.parametrize("kind", suite.MEASURED)
def test_every_case(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="gguf (extra bench) writes the model")
    monkeypatch.setattr(suite, "N_TOKENS", 1)
    case = case_of(f"runtime/token, {kind}")
    check_case(case, run_case(case, tmp_path, monkeypatch))


def test_both_sides_go_on_alike() -> None:
    with runtimes(Path(embedded_model())) as both:
        (seconds, first), (_, second) = (side.talk(40) for side in both)
        assert first == second
        assert len(set(first)) > 10
        assert seconds > 0
        assert both[0].talk(40)[1] == first  # each conversation begins anew


@pytest.mark.parametrize("on_heap", [False, True])
def test_what_cannot_be_computed_is_said(tmp_path: Path, *, on_heap: bool) -> None:
    (tmp_path / "no.gguf").write_bytes(b"no model")
    with pytest.raises(OSError, match="expected a llama of F32, F16 and Q8_0: Invalid"):
        Runtime(tmp_path / "no.gguf", on_heap=on_heap)
    with pytest.raises(FileNotFoundError):
        Runtime(tmp_path / "nothing.gguf", on_heap=on_heap)
    runtime = Runtime(embedded_model(), on_heap=on_heap)
    try:
        with pytest.raises(OSError, match="expected a token of the model, and room"):
            runtime.talk(1, first=1 << 20)
        with pytest.raises(OSError, match="expected a token of the model, and room"):
            runtime.talk(600)
    finally:
        runtime.close()
