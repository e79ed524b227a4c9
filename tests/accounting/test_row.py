"""Rows of plans and reports: found by category, or refused by name."""

from __future__ import annotations

import pickle

import pytest

import unimem as um
from unimem.accounting.row import Row, explain, in_order
from unimem.errors import CategoryError

DIMS = um.ModelDims(2048, 5632, 32, 4, 64, 32000, 22, 8192)


def test_a_row_by_its_category() -> None:
    for rows in (
        um.plan(DIMS),
        um.Report((Row("kv", 1), Row("other", 2), Row("kv", 3, device="d"))),
    ):
        assert rows["kv"] is next(row for row in rows.rows if row.category == "kv")
        for name in ("history", 3):
            with pytest.raises(
                CategoryError, match=rf"its rows \(.*kv.*\), got {name!r}"
            ) as caught:
                rows[name]  # type: ignore[index]
            assert isinstance(caught.value, KeyError)
            assert "kv" in caught.value.categories
            assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_rows_whose_names_say_little_are_explained() -> None:
    rows = (Row("kv", 1), Row("other", 2), Row("diagnostics", 3))
    assert [name for name, _ in explain(rows)] == ["diagnostics", "other"]
    assert explain((Row("kv", 1), Row("other", 0))) == []
    plan, report = um.plan(DIMS), um.Report(rows)
    for page in (str(plan), plan._repr_html_()):
        assert "diagnostics (for unimem report)" in page
    for page in (str(report), report._repr_html_()):
        assert "the figures that the process publishes" in page


def test_rows_are_in_the_order_of_their_purpose() -> None:
    rows = [Row("kv", 1, device="cuda:0"), Row("other", 9), Row("weights:padding", 7)]
    rows += [Row("weights:f32", 2), Row("unheard of", 9), Row("kv", 1)]
    names = ["weights:f32", "weights:padding", "kv", "other", "unheard of", "kv"]
    assert [row.category for row in sorted(rows, key=in_order)] == names
