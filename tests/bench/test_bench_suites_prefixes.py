"""The suites remote, store and transformers: their cases measure what they declare."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.project.bench_cases import case_of, cases_of, check_case, run_case, uninstall
from unimem_bench import decoding
from unimem_bench.suite import Case, NotMeasured
from unimem_bench.suites import remote, store, transformers

SLOW = {"remote/get", "remote/first-token, 2k", "store/first-token, 2k", "store/first-token, 8k"}
SLOW |= {str(case.id) for case in cases_of("transformers")}
SLOW |= {str(case.id) for case in cases_of("store") if "LMCache" in str(case.id)}


@pytest.mark.parametrize("case", cases_of("remote", "store", "transformers", slow=SLOW))
def test_every_case(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "QUICK_SHAPE", "15m")
    monkeypatch.setattr(remote, "QUICK_OBJECT_BYTES", 10 * remote.MIB)
    monkeypatch.setattr(store, "N_CHUNKS_QUICK", 20)
    monkeypatch.setattr(store, "N_LOOKUPS", 2)
    monkeypatch.setattr(store, "N_BESIDE_QUICK", 2)
    monkeypatch.setattr(transformers, "CONTEXTS_QUICK", (64, 128, 256))
    try:
        record = run_case(case, tmp_path, monkeypatch)
    except NotMeasured as why:
        if case.suite == "store" and "LMCache" not in case.name:
            raise
        pytest.skip(str(why))
    check_case(case, record)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_PYTHON", str(tmp_path / "none"))
    with pytest.raises(NotMeasured, match="none: 'make test-lmcache' makes it"):
        run_case(case_of("store/RAM put beside LMCache"), tmp_path, monkeypatch)
    uninstall(monkeypatch, "transformers", "torch")
    with pytest.raises(NotMeasured, match="install unimem-llm with the extra"):
        run_case(case_of("transformers/resume"), tmp_path, monkeypatch)
