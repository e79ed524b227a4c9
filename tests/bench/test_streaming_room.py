"""`tools/streaming_room.py` streams a model in cgroups with limits around what its plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.models.make import Shape, write_model
from support.project.tools import load_tool
from unimem_bench.cgroup import limited_cgroup
from unimem_bench.suite import NotMeasured

MIXTURE = Shape(hidden=512, layers=4, heads=8, kv_heads=4, inner=1024, vocab=320, ctx=600)
RUN = {"own_bytes": 30, "planned_bytes": 100, "peak_bytes": 129, "status": 0, "tokens": [1, 2]}
REFUSED = {"status": 0, "refused": "no room", "percent": 90}


@pytest.fixture
def tool() -> Any:
    return load_tool("streaming_room")


@pytest.mark.slow
def test_no_run_is_killed_or_takes_more_than_its_plan(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        with limited_cgroup(1 << 30):
            pass
    except NotMeasured as reason:
        pytest.skip(str(reason))
    path = write_model(tmp_path / "m.gguf", "qwen3moe", MIXTURE, "q8_0")
    page, record = tmp_path / "page.md", tmp_path / "record.json"
    page.write_text(f"{tool.BEGIN}old\n{tool.END}\n")
    monkeypatch.setattr(tool, "PAGE", page)
    assert tool.main(["--runs", "3", "--model", str(path), "--record", str(record)]) == 0
    found = json.loads(record.read_text())["runs"]
    assert [each["percent"] for each in found] == [90, 100, 110]
    # A model this small needs less beside its plan than the tool leaves, so that none is refused.
    assert [len(each.get("tokens", ())) for each in found] == [24, 24, 24]
    assert "| killed | 0 |" in page.read_text()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"status": -9}, "killed"),
        ({"tokens": [1, 3]}, "other tokens"),
        ({"peak_bytes": 131 + (4 << 20)}, "above the plan"),
        (REFUSED | {"percent": 100}, "refused"),
    ],
)
def test_a_run_that_ends_otherwise_is_an_error(tool: Any, other: dict[str, Any], why: str) -> None:
    good = [RUN, REFUSED, RUN | {"peak_bytes": 130 + (4 << 20)}]
    tool.check(good)
    with pytest.raises(AssertionError, match=f"^{why}"):
        tool.check([*good, (REFUSED if "refused" in other else RUN) | other])
