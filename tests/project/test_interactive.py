"""What someone at a prompt sees and types: short reprs, tables in notebooks, sizes as text."""

from typing import Any

import pytest

import unimem as um
from unimem.engine import embedded_model

SHAPE = 2, 2, 8, 16


def results() -> dict[str, Any]:
    with um.measure() as measured:
        pass
    return {
        "report": um.report(),
        "plan": um.plan(embedded_model()),
        "machine": um.doctor(),
        "measured": measured,
    }


def test_results_are_short_and_have_tables() -> None:
    for name, result in results().items():
        assert len(repr(result)) < 200, name
        assert len(str(result).splitlines()) > 5, name
        assert "<" in result._repr_html_(), name


def test_sizes_are_given_as_text() -> None:
    with um.Block("64K", reserve="1M") as block, um.Tape("1.5M") as tape:
        assert (block.nbytes, block.reserved_bytes) == (64 << 10, 1 << 20)
        assert tape.total_bytes == 3 << 19
    with um.Layout("1M", "64 KiB", "1G") as layout:
        assert layout.stat().history_total == 1 << 30
    with um.KVCache(*SHAPE, budget_bytes="1M") as kv:
        assert kv.budget_bytes == 1 << 20
        assert kv.enforce_memory_limit("1G") == kv.enforce_memory_limit(1 << 30)


@pytest.mark.parametrize("size", ["1X", "", "50%", "-1M", "0"])
def test_texts_that_are_no_sizes(size: str) -> None:
    for make in (um.Block, um.Tape):
        with pytest.raises(ValueError, match=r"nbytes.*: expected a"):
            make(size)
