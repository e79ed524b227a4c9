"""What commands that compute say of a model's way into memory."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("unimem_ggml", reason="the engine needs ggml: pip install ./ggml '.[run]'")

from support.terminal.screens import show
from unimem.system import limits


@pytest.mark.filterwarnings("always::unimem.PlacementWarning")
@pytest.mark.parametrize(("words", "said"), [
    ("--pages 2m", "hugetlb pool of 2m pages has 0 B of"),
    ("--numa bind:99", "node 99 has 0 B of"),
    ("--pages 2m --numa bind:99 --window 100", "not as asked for: hugetlb pool"),
    ("--pages thp --load map", "pages='thp'"),
])  # fmt: skip
def test_a_fallback_is_one_line_and_cuts_nothing(
    monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.setattr(limits, "huge_pools", dict)
    screen = show("run", *words.split(), "--threads", "1", "-n", "1", "--json")
    (line,) = screen.err.splitlines()
    assert line.startswith("unimem: warning: ")
    assert line.endswith(" (--verbose says more)")
    assert len(line) <= 120
    assert said in line
    document = json.loads(screen.out)
    assert (screen.code, document["options"]["ctx"], document["plan"]["verdict"]) == (
        0, 512, "fits",
    )  # fmt: skip
    verbose = show("run", *words.split(), "--threads", "1", "-n", "1", "--json", "--verbose")
    assert verbose.code == 0
    assert "--verbose" not in verbose.err
    assert len(verbose.err) > len(screen.err)
