"""The notebook runs and shows its results; the dashboard's queries exist."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import unimem as um
from support.project.checkout import ROOT
from support.terminal.html_pages import HtmlPage
from unimem.accounting.prometheus import FAMILIES, MetricsCollector

EXAMPLES = ROOT / "examples"
MIB = 1 << 20


# ---- the notebook ----


def run_cells(notebook: Any) -> Iterator[tuple[Any, str]]:
    """Run the cells in order; return the last value of each, and its HTML, as Jupyter does."""
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        *body, last = ast.parse("".join(cell["source"])).body
        value = None
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(body, []), "cell", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        else:
            exec(compile(ast.Module([*body, last], []), "cell", "exec"), names)
        if value is not None:
            yield value, value._repr_html_()


@pytest.mark.usefixtures("gives_memory_back")
def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("unimem_ggml", reason="the engine needs ggml: pip install ./ggml '.[run]'")
    notebook = json.loads((EXAMPLES / "memory.ipynb").read_text())
    assert notebook["nbformat"] == 4
    shown = {type(value): HtmlPage(html) for value, html in run_cells(notebook)}
    assert capsys.readouterr().out.startswith(", there was")
    outputs = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    kept = ["".join(one["data"]["text/html"]) for each in outputs for one in each if "data" in one]
    assert [len(HtmlPage(html).tables) for html in kept] == [len(p.tables) for p in shown.values()]
    assert list(shown) == [um.Plan, um.Block, um.KVCache, um.Layout, um.Report]
    plan, block, cache, layout, report = shown.values()
    assert all(f"{os.uname().nodename}, 20" in page.text for page in shown.values())
    assert plan.text.startswith("Fits: ")
    (granted,) = block.tables
    assert granted.column("requested")["size"] == granted.column("granted")["in RAM"] == 8 * MIB
    assert cache.tables[0].rows[0][:3] == ["tokens", "100", "512"]
    assert layout.tables[0].column("active")["scratch"] == 4 * 4096
    held = report.table("memory", "in RAM", "high water").column("size")
    assert {"kv", "scratch", "weights:q8_0", "libraries", "total"} <= set(held)


def test_what_is_closed_says_so() -> None:
    with ExitStack() as stack:
        things: list[Any] = [
            stack.enter_context(um.Block(MIB, name="a <b>")),
            stack.enter_context(um.KVCache(1, 1, 64, 8)),
            stack.enter_context(um.PagedKVCache(1, 1, 64, n_blocks=4)),
            stack.enter_context(um.Layout(MIB, MIB, MIB)),
        ]
        open_ = [HtmlPage(thing._repr_html_()) for thing in things]
    assert [len(page.tables) for page in open_] == [1] * 4
    closed = [HtmlPage(thing._repr_html_()) for thing in things]
    assert [len(page.tables) for page in closed] == [0] * 4
    assert [page.text for page in closed] == [repr(thing) for thing in things]


# ---- the dashboard ----

METRIC = re.compile(r"\b(unimem_\w+)(?:\{([^}]*)\})?")


def queries() -> list[str]:
    dashboard = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    variables = [each["query"] for each in dashboard["templating"]["list"]]
    asked = [each["query"] for each in variables if isinstance(each, dict)]
    asked += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    legends = [
        target["legendFormat"] for panel in dashboard["panels"] for target in panel["targets"]
    ]
    assert len(asked) == len(legends) + 1 >= 10
    return asked


def test_the_dashboard_asks_for_metrics_and_labels_that_there_are() -> None:
    for query in queries():
        found = METRIC.findall(query)
        assert found, query
        for name, selector in found:
            labels = set(FAMILIES[name].labels)
            assert set(re.findall(r"(\w+)=", selector)) <= labels, query
            for grouped in re.findall(r"by \(([^)]*)\)", query):
                assert set(grouped.split(", ")) <= labels, query
            is_rate = f"rate({name}" in query
            assert is_rate == (FAMILIES[name].kind == "counter"), query


def test_a_legend_names_labels_that_its_query_keeps() -> None:
    dashboard = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            kept = re.findall(r"by \(([^)]*)\)", target["expr"])
            labels = set(kept[0].split(", ")) if kept else set()
            if "sum" not in target["expr"] and "min" not in target["expr"] and not kept:
                labels = set(FAMILIES[METRIC.findall(target["expr"])[0][0]].labels)
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels


def test_a_query_of_the_dashboard_gives_the_report_s_sum() -> None:
    """The first panel, computed of one scrape: ``sum(NAME{pid=~"$pid",device="host"})``."""
    (query,) = (each for each in queries() if re.fullmatch(r"sum\(\w*resident_bytes\{.*\}\)", each))
    name, selector = METRIC.findall(query)[0]
    wanted = dict(re.findall(r'(\w+)="(\w+)"', selector))
    assert wanted == {"device": "host"}

    collector = MetricsCollector(lambda: [os.getpid()])
    values = collector.values()
    total = sum(
        value
        for found, labels, value in values
        if found == name
        and dict(zip(FAMILIES[name].labels, labels, strict=True))["device"] == "host"
    )
    sampled = collector._watched[os.getpid()].sampler
    assert sampled._report is not None
    assert total == sampled._report.resident_bytes
