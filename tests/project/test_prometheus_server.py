"""A real Prometheus scrapes `unimem metrics`, answers the dashboard, and evaluates the alerts."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from project.test_example_pictures import METRIC, queries
from support.project.checkout import ROOT
from unimem.staging.staging_folder import open_staging_folder

pytest.importorskip("prometheus_client", reason="metrics need it: pip install '.[metrics]'")
pytest.importorskip("unimem_ggml", reason="the engine needs ggml: pip install ./ggml '.[run]'")

from unimem.engine import Decoder, embedded_model

MAIN = "import sys; from unimem.cli import main; sys.exit(main())"
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: unimem
    static_configs: [{{targets: ["{target}"]}}]
"""
WAIT_S = 300  # for a few scrapes, on a busy machine


@contextmanager
def started(*words: object, **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([*map(str, words)], text=True, **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def answer_of(api: str, query: str) -> list[Any]:
    """Ask as Grafana does; nothing as long as the server starts."""
    if found := re.fullmatch(r"label_values\((\w+), (\w+)\)", query):
        path, words = f"label/{found[2]}/values", {"match[]": found[1]}
    else:
        path, words = "query", {"query": query.replace("$pid", ".*")}
    with suppress(ConnectionError, urllib.error.URLError):
        found = asked(f"{api}/{path}?{urllib.parse.urlencode(words)}")
        return list(found if isinstance(found, list) else found["result"])
    return []


def asked(url: str) -> Any:
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)["data"]


@pytest.mark.slow
def test_each_query_of_the_dashboard_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which("prometheus"):
        pytest.skip("prometheus (Debian's package of that name) is missing")
    monkeypatch.setenv("UNIMEM_STAGING", str(tmp_path / "staging"))
    folder = open_staging_folder(create=True)
    assert folder is not None
    folder.set_budget(1 << 30)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    metrics = (sys.executable, "-c", MAIN, "metrics", os.getpid(), "--port", 0)
    with (
        um.stage(embedded_model()) as staged,
        Decoder(staged.path, ctx=256) as decoder,
        started(*metrics, stdout=subprocess.PIPE) as serving,
    ):
        assert serving.stdout is not None
        page = serving.stdout.readline().strip()
        config, rules = tmp_path / "prometheus.yml", ROOT / "examples" / "deploy" / "alerts.yaml"
        config.write_text(CONFIG.format(rules=rules, target=page.split("/")[2]))
        words = (f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}")
        with started("prometheus", *words, f"--web.listen-address={address}", "--log.level=error"):
            with urllib.request.urlopen(page) as answer:
                served = set(re.findall(r"^(\w+)[ {]", answer.read().decode(), re.M))
            open_ = {query: {name for name, _ in METRIC.findall(query)} for query in queries()}
            if not Path("/proc/pressure").exists():
                served.add("unimem_pressure_ratio")
                open_ = {q: names for q, names in open_.items() if "pressure" not in q}
            assert set().union(*open_.values()) <= served
            end = time.monotonic() + WAIT_S
            while open_ and time.monotonic() < end:
                "".join(decoder.generate("Once upon a time", 8))
                open_ = {
                    q: n for q, n in open_.items() if not answer_of(f"http://{address}/api/v1", q)
                }
            assert not open_
            (group,) = asked(f"http://{address}/api/v1/rules")["groups"]
            assert {rule.get("lastError", "") for rule in group["rules"]} == {""}
            assert len(group["rules"]) == 5
