"""The suite store: its cases measure what they declare."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.project.bench_cases import cases_of, check_case, run_case
from unimem_bench import decoding
from unimem_bench.suite import Case
from unimem_bench.suites import store as suite

SLOW = {"store/first-token, 2k", "store/first-token, 8k"}


@pytest.mark.parametrize("case", cases_of("store", slow=SLOW))
def test_every_case(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "QUICK_SHAPE", "15m")
    monkeypatch.setattr(suite, "N_CHUNKS_QUICK", 20)
    monkeypatch.setattr(suite, "N_LOOKUPS", 2)
    check_case(case, run_case(case, tmp_path, monkeypatch))
