"""The suite remote: its cases measure what they declare."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.project.bench_cases import cases_of, check_case, run_case
from unimem_bench import decoding
from unimem_bench.suite import Case, NotMeasured
from unimem_bench.suites import remote as suite

SLOW = {"remote/get", "remote/first-token, 2k"}


@pytest.mark.parametrize("case", cases_of("remote", slow=SLOW))
def test_every_case(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        suite.require_clients()
    except NotMeasured as why:
        pytest.skip(str(why))
    monkeypatch.setattr(decoding, "QUICK_SHAPE", "15m")
    monkeypatch.setattr(suite, "QUICK_OBJECT_BYTES", 10 * suite.MIB)
    check_case(case, run_case(case, tmp_path, monkeypatch))
