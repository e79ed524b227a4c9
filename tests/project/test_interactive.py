"""What someone at a prompt sees and types: short reprs, tables in notebooks, sizes as text."""

from pathlib import Path
from typing import Any

import pytest

import unimem as um
from unimem.engine import embedded_model
from unimem.engine.text.tokenizer import Tokenizer

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


def test_objects_are_a_line(tmp_path: Path) -> None:
    with (
        um.open_weights(embedded_model()) as weights,
        um.KVStore(tmp_path, ram_bytes=0) as store,
        um.Layout("1M", "1M", "1M") as layout,
        um.KVCache(layers=[um.LayerKV(2, 8)] * 100, max_seq_len=8) as kv,
        um.Grid("4K", 1000) as grid,
    ):
        uses = [um.BufferUse(str(i), 64, i, i + 1) for i in range(100)]
        tokenizer = Tokenizer.from_metadata(weights.metadata)
        things = [weights, weights.tensors, weights.metadata, store, layout, kv, grid, tokenizer]
        for thing in (*things, um.BufferPlan(uses), um.Governor(), layout.scratch.block):
            assert len(repr(thing)) < 200
            assert not repr(thing).endswith(f"{id(thing):x}>"), "figures, not an address"


def test_sizes_are_given_as_text() -> None:
    with um.Block("64K", reserve="1M") as block, um.Tape("1.5M") as tape:
        assert (block.nbytes, block.reserved_bytes) == (64 << 10, 1 << 20)
        assert tape.total_bytes == 3 << 19
    with um.Layout("1M", "64 KiB", "1G") as layout:
        assert layout.stat().history_total == 1 << 30
    with um.KVCache(*SHAPE, budget_bytes="1M") as kv:
        assert kv.budget_bytes == 1 << 20
        assert kv.enforce_memory_limit("1G") == kv.enforce_memory_limit(1 << 30)


def test_budgets_are_given_as_text(tmp_path: Path) -> None:
    with um.Governor("1G") as governor:
        assert governor.budget_bytes == 1 << 30
        assert governor.give_back("1M") == 0
    with um.KVStore(tmp_path, ram_bytes="0", disk_bytes="16M") as store:
        (tier,) = store.stat().tiers
        assert tier.budget_bytes == 16 << 20
    for wrong in ({"ram_bytes": "1X"}, {"ram_bytes": 0, "disk_bytes": "50%"}):
        with pytest.raises(ValueError, match=r"_bytes: expected a size such as '16G'"):
            um.KVStore(tmp_path, **wrong)


@pytest.mark.parametrize("size", ["1X", "", "50%", "-1M", "0"])
def test_texts_that_are_no_sizes(size: str) -> None:
    for make in (um.Block, um.Tape):
        with pytest.raises(ValueError, match=r"nbytes.*: expected a"):
            make(size)
