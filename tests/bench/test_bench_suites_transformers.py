"""The suite transformers: its cases measure what they declare, and say what they lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.project.bench_cases import case_of, cases_of, check_case, run_case, uninstall
from unimem_bench.suite import Case, NotMeasured
from unimem_bench.suites import transformers as suite


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uninstall(monkeypatch, "transformers", "torch")
    with pytest.raises(NotMeasured, match="install unimem-llm with the extra"):
        run_case(case_of("transformers/resume"), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_of("transformers"))
def test_every_case(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the extra transformers needs torch")
    pytest.importorskip("transformers.cache_utils", reason="the extra transformers")
    monkeypatch.setattr(suite, "CONTEXTS_QUICK", (64, 128, 256))
    check_case(case, run_case(case, tmp_path, monkeypatch))
