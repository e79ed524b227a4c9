"""Process metrics for Prometheus, and the cost of reading them."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import unimem as um
from support.processes.running import running
from support.project.checkout import ROOT
from support.terminal.watch_samples import CGROUP, GIB, MACHINE, MIB, report, sample
from unimem.accounting import prometheus
from unimem.accounting.prometheus import (
    FAMILIES,
    LLAMA_FAMILIES,
    MetricsCollector,
    serve,
    write_metrics,
)
from unimem.accounting.samples import Sample
from unimem.system.pressure import Pressure

pytest.importorskip(
    "prometheus_client", reason="metrics need prometheus_client: pip install '.[metrics]'"
)

NOW = sample(
    2.0, report(name="server", pid=4711), faults=(3000, 5), read=3 * MIB, cpu=1.5,
    pressure=(Pressure("machine", 50.0, 25.0),), limits=(MACHINE, CGROUP),
)  # fmt: skip
WHO = ("4711", "server")
COMPUTE = "print('ready', flush=True)\nwhile True: pass"


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """Invent processes: samples, or an error when one is read."""
    there: dict[int, Any] = {4711: NOW}

    class Invented:
        def __init__(self, pid: int) -> None:
            self.pid = pid

        def sample(self) -> Sample:
            found = there[self.pid]
            if isinstance(found, Exception):
                raise found
            assert isinstance(found, Sample)
            return found

    monkeypatch.setattr(prometheus, "Sampler", Invented)
    return there


def values(*pids: int, **options: Any) -> dict[tuple[str, ...], float]:
    return {(n, *labels): x for n, labels, x in MetricsCollector(lambda: pids, **options).values()}


def parsed(text: str) -> dict[str, list[Any]]:
    """Parse metrics by Prometheus's own parser; return them by name."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(text)
    return {
        name: [each for each in family.samples if each.name == name]
        for family in families
        for name in {each.name for each in family.samples}
    }


@pytest.mark.usefixtures("invented")
@pytest.mark.parametrize(("key", "value"), [
    (("unimem_process_up", "4711"), 1.0),
    (("unimem_memory_bytes", *WHO, "weights:q8_0", "host"), 1100 * MIB),
    (("unimem_memory_bytes", *WHO, "kv", "cuda:0"), 64 * MIB),
    (("unimem_memory_resident_bytes", *WHO, "kv", "host"), 130 * MIB),
    (("unimem_memory_active_bytes", *WHO, "scratch", "host"), 11 * MIB),
    (("unimem_memory_high_water_bytes", *WHO, "scratch", "host"), 11 * MIB),
    (("unimem_memory_node_bytes", *WHO, "kv", "0"), 130 * MIB),
    (("unimem_memory_swapped_bytes", *WHO, "kv", "host"), 0),
    (("unimem_page_faults_total", *WHO, "minor"), 3000),
    (("unimem_page_faults_total", *WHO, "major"), 5),
    (("unimem_read_bytes_total", *WHO), 3 * MIB),
    (("unimem_cpu_seconds_total", *WHO), 1.5),
    (("unimem_tokens_total", *WHO, "generated"), 500),
    (("unimem_kv_tokens", *WHO), 0),
    (("unimem_pieces_total", *WHO, "hit"), 900),
    (("unimem_pieces_total", *WHO, "miss"), 100),
    (("unimem_piece_read_bytes_total", *WHO), 5 * MIB),
    (("unimem_piece_wait_seconds_total", *WHO), 2.5),
    (("unimem_pressure_ratio", "machine", "some"), 0.5),
    (("unimem_limit_bytes", MACHINE.name), 24 * GIB),
    (("unimem_limit_used_bytes", CGROUP.name), 3800 * MIB),
    (("unimem_room_bytes", *WHO), 296 * MIB),
    (("unimem_report_age_seconds", *WHO), 0.0),
])  # fmt: skip
def test_metrics_have_the_report_s_values(key: tuple[str, ...], value: float) -> None:
    assert values(4711)[key] == value


@pytest.mark.usefixtures("invented")
def test_page_sizes_add_up_to_resident_memory() -> None:
    found = {key[-1]: x for key, x in values(4711).items() if key[0] == "unimem_memory_page_bytes"}
    placed = [mapping.granted for mapping in NOW.report.mappings]
    assert found["thp"] == sum(each.huge_bytes for each in placed) > 0
    assert sum(found.values()) == sum(each.resident_bytes for each in placed)


@pytest.mark.usefixtures("invented")
def test_each_name_has_its_labels_and_follows_the_rules() -> None:
    staged = [name for name in FAMILIES if name.startswith("unimem_staged_")]
    values = [(name, FAMILIES[name].labels, 1.0) for name in staged]
    collector = MetricsCollector(lambda: [4711], llama_names=True, more=lambda: values)
    text = write_metrics(collector)
    found = parsed(text)
    known = FAMILIES | LLAMA_FAMILIES
    # No row of this process has known requested bytes.
    assert set(known) - set(found) == {"unimem_memory_requested_bytes"}
    assert set(found) <= set(known)
    for name, samples in found.items():
        assert {frozenset(each.labels) for each in samples} == {frozenset(known[name].labels)}
        assert name.endswith("_total") == (known[name].kind == "counter")
        assert f"# HELP {name} " in text
    assert parsed(write_metrics(MetricsCollector(lambda: [4711]))).keys().isdisjoint(LLAMA_FAMILIES)


def test_the_document_has_every_metric_with_its_labels() -> None:
    table = (ROOT / "docs/metrics.md").read_text().partition("| metric |")[2].partition("\n\n")[0]
    for line in table.splitlines()[2:]:
        names, labels, _ = line.strip().strip("|").split("|")
        for name in re.findall(r"`(\w+)`", names):
            own = set(re.findall(r"`(\w+)`", labels.partition(":")[0])) - {"process"}
            wanted = set(FAMILIES[name].labels)
            assert own == (wanted if "only" in labels else wanted - {"pid", "process"}), name
    assert set(re.findall(r"`(unimem_\w+)`", table)) == set(FAMILIES)


@pytest.mark.usefixtures("invented")
def test_names_of_llama_cpp() -> None:
    found = values(4711, llama_names=True)
    assert found["llamacpp:memory_model_bytes", *WHO, "Host"] == 1103 * MIB
    assert found["llamacpp:memory_context_bytes", *WHO, "cuda:0"] == 64 * MIB
    assert found["llamacpp:memory_compute_bytes", *WHO, "Host"] == 40 * MIB + (128 << 10)


@pytest.mark.parametrize("why", [
    ProcessLookupError(), PermissionError(), ValueError(), OSError(), OverflowError(),
    replace(NOW, published={"kv_tokens": 10**400}),
])  # fmt: skip
def test_an_unreadable_process_is_not_up(invented: dict[int, Any], why: Any) -> None:
    invented[7] = why
    found = values(4711, 7)
    assert (found["unimem_process_up", "7"], found["unimem_process_up", "4711"]) == (0.0, 1.0)
    assert not [key for key in found if key[1] == "7" and key[0] != "unimem_process_up"]


def test_a_reused_pid_is_read_again(invented: dict[int, Any]) -> None:
    collector = MetricsCollector(lambda: [4711])
    collector.values()
    first = collector._watched[4711].sampler
    collector.values()
    assert collector._watched[4711].sampler is first
    invented[4711] = replace(NOW, counters=replace(NOW.counters, started=8))
    collector.values()
    assert collector._watched[4711].sampler is not first
    invented[4711] = ProcessLookupError()
    collector.values()
    assert collector._watched == {}


def test_odd_names_are_one_label(invented: dict[int, Any]) -> None:
    odd = 'a"\\b\n\udcff'
    invented[4711] = replace(NOW, report=report(name=odd))
    names = {each.labels["process"] for each in parsed(served_text())["unimem_memory_bytes"]}
    assert names == {'a"\\b\\n?'}


def served_text() -> str:
    server, _ = serve(MetricsCollector(lambda: [4711]), 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            text: str = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
    return text


@pytest.mark.usefixtures("invented")
def test_the_served_text_equals_the_written_file() -> None:
    assert parsed(served_text()) == parsed(write_metrics(MetricsCollector(lambda: [4711])))


@pytest.mark.usefixtures("invented")
def test_a_taken_port_is_named() -> None:
    server, _ = serve(MetricsCollector(lambda: []), 0)
    try:
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(OSError, match="in use") as caught:
            serve(MetricsCollector(lambda: []), server.server_port)
        assert caught.value.filename == f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_scrapes_from_several_threads() -> None:
    collector = MetricsCollector(lambda: [os.getpid()])
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(write_metrics(collector))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([text for text in texts if "unimem_memory_bytes{" in text]) == 4


def test_metrics_of_this_process_match_its_report() -> None:
    with um.Block(MIB, category="scratch", warm=True):
        found = values(os.getpid())
        made = um.report()
    rows = {key[3:]: x for key, x in found.items() if key[0] == "unimem_memory_bytes"}
    assert rows["scratch", "host"] == made["scratch"].nbytes
    asked = {key[3:]: x for key, x in found.items() if key[0] == "unimem_memory_requested_bytes"}
    assert MIB <= asked["scratch", "host"] <= rows["scratch", "host"]


@pytest.fixture
def waiting() -> Iterator[int]:
    with running() as pid:
        yield pid


def test_a_scrape_costs_the_process_nothing(waiting: int) -> None:
    """The sleeping process gets no CPU time, no fault and no signal."""
    while spent(waiting)["state"] != "S":
        time.sleep(0.001)
    before = spent(waiting)
    for _ in range(3):
        assert values(waiting)["unimem_process_up", str(waiting)] == 1.0
    assert spent(waiting) == before


def test_a_computing_process_does_not_wait_for_a_scrape() -> None:
    def scraped() -> list[Any]:
        before = spent(pid)
        assert values(pid)["unimem_process_up", str(pid)] == 1.0
        after = spent(pid)
        names = ("faults", "voluntary_ctxt_switches")
        return [(name, before[name], after[name]) for name in names if before[name] != after[name]]

    # The kernel may cause faults itself, for example when it moves pages between nodes.
    with running(COMPUTE) as pid:
        seen = [scraped() for _ in range(5)]
    assert [] in seen, seen


def spent(pid: int) -> dict[str, Any]:
    """Return the kernel's counts for a process."""
    with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/status") as status:
        fields = stat.read().rpartition(")")[2].split()
        switches = dict(re.findall(r"(\w+ctxt_switches):\s+(\d+)", status.read()))
    return {"state": fields[0], "faults": fields[7:11], "cpu": fields[11:15], **switches}


def test_a_process_that_ends_between_scrapes() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        collector = MetricsCollector(lambda: [process.pid])
        up = ("unimem_process_up", (str(process.pid),))
        assert (*up, 1.0) in collector.values()
        process.kill()
        process.wait()
        assert collector.values() == [(*up, 0.0)]
