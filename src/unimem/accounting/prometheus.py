"""The memory of processes as metrics of Prometheus, read at each scrape.

The text format and the rules for names are Prometheus's
(https://prometheus.io/docs/practices/naming/); ``prometheus_client`` writes and serves it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from unimem.accounting.report import Report
from unimem.accounting.row import Row
from unimem.accounting.samples import Sample, Sampler
from unimem.base.text import escape

HOST = "host"  # the device of main memory
_PROCESS = ("pid", "process")
_STAGED = ("pid", "source")
_ROW = (*_PROCESS, "category", "device")


class MetricFamily(NamedTuple):
    """Metrics of one name.

    Attributes
    ----------
    name : str
        As it is scraped; a counter's ends in ``_total``.
    kind : {"gauge", "counter"}
        Whether it may decrease while the process lives.
    text : str
        Its help.
    labels : tuple of str
        Names of the labels of each value.
    """

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    labels: tuple[str, ...]


# The labels and the help of each family; counters end in _total.
_TEXTS: dict[str, tuple[tuple[str, ...], str]] = {
    "unimem_process_up": (("pid",), "Whether the process is there and can be read."),
    "unimem_memory_bytes": (_ROW, "Size: memory that is mapped."),
    "unimem_memory_resident_bytes": (
        _ROW,
        "In RAM: a page that n mappings share counts 1/n (Pss).",
    ),
    "unimem_memory_requested_bytes": (
        _ROW,
        "Requested memory, before it was rounded to pages, if unimem knows it.",
    ),
    "unimem_memory_active_bytes": (_ROW, "Active: memory that is used now, if unimem knows it."),
    "unimem_memory_high_water_bytes": (
        _ROW,
        "High water: the highest use so far, if unimem knows it.",
    ),
    "unimem_memory_locked_bytes": (_ROW, "Memory that is locked in RAM."),
    "unimem_memory_swapped_bytes": (_ROW, "Memory that is swapped out."),
    "unimem_memory_page_bytes": (
        (*_PROCESS, "pages"),
        "Memory in RAM by the size of its pages: base pages (4k), transparent huge pages (thp), "
        "hugetlb pages (2m, 1g); each mapping's (Rss).",
    ),
    "unimem_memory_node_bytes": (
        (*_PROCESS, "category", "node"),
        "Memory in RAM by NUMA node; each mapping's (Rss).",
    ),
    "unimem_page_faults_total": (
        (*_PROCESS, "kind"),
        "Page faults: minor ones, and major ones, which wait for a disk.",
    ),
    "unimem_read_bytes_total": (_PROCESS, "Bytes read from disks for the process."),
    "unimem_cpu_seconds_total": (_PROCESS, "Time on CPUs."),
    "unimem_tokens_total": (
        (*_PROCESS, "kind"),
        "Tokens that engines on unimem have computed: of prompts, and generated ones.",
    ),
    "unimem_kv_tokens": (_PROCESS, "Tokens in the KV caches of these engines."),
    "unimem_pieces_total": (
        (*_PROCESS, "kind"),
        "Pieces of streamed weights that these engines have used: hits were in RAM, misses had "
        "to be read.",
    ),
    "unimem_piece_read_bytes_total": (_PROCESS, "Bytes read for them."),
    "unimem_piece_wait_seconds_total": (_PROCESS, "Time that threads have waited for them."),
    "unimem_pressure_ratio": (
        ("source", "kind"),
        "Share of the last 10 seconds in which some, or all, threads waited for memory (PSI).",
    ),
    "unimem_limit_bytes": (("limit",), "Limits on memory: the machine's, cgroups'."),
    "unimem_limit_used_bytes": (("limit",), "Use of a limit, without droppable file pages."),
    "unimem_room_bytes": (
        _PROCESS,
        "Bytes that a process can still take: the least room of any of its limits.",
    ),
    "unimem_report_age_seconds": (
        _PROCESS,
        "Age of the figures of memory: large processes are read less often.",
    ),
    "unimem_staged_bytes": ((*_STAGED, "backing"), "Models that `unimem stage` keeps in memory."),
    "unimem_staged_readers": (_STAGED, "Processes that have a staged model open or mapped."),
    "unimem_staged_unused_seconds": (_STAGED, "Time since a staged model was last used."),
    "unimem_staged_budget_bytes": ((), "The most that all staged models take, if that is set."),
}
FAMILIES = {
    name: MetricFamily(name, "counter" if name.endswith("_total") else "gauge", text, labels)
    for name, (labels, text) in _TEXTS.items()
}
"""The families that are always there, by name."""

# As proposed for llama.cpp's server: https://github.com/ggml-org/llama.cpp/issues/26129
_LLAMA_KINDS = {
    "llamacpp:memory_model_bytes": ("weights",),
    "llamacpp:memory_context_bytes": ("kv",),
    "llamacpp:memory_compute_bytes": ("scratch", "logits", "tokens"),
}
_LLAMA_TEXTS = ("Memory of the model.", "Memory of the context.", "Memory for computing.")
LLAMA_FAMILIES = {
    name: MetricFamily(name, "gauge", text, (*_PROCESS, "device"))
    for name, text in zip(_LLAMA_KINDS, _LLAMA_TEXTS, strict=True)
}
"""The same memory, by the names of llama.cpp."""

_Value = tuple[str, tuple[str, ...], float]


@dataclass(slots=True)
class _Watched:
    """A process that is scraped repeatedly."""

    sampler: Sampler
    started: int | None = None


class MetricsCollector:
    """The collector for ``prometheus_client``. Any number of threads may use it.

    It does nothing between scrapes. A scrape reads the kernel's figures of each process, and sends
    the process nothing; a large process is read less often, so that reading takes at most 4 % of a
    core.

    Parameters
    ----------
    pids : callable
        Returns the numbers of the processes, at each scrape.
    llama_names : bool, default False
        Whether to add the names of llama.cpp (`LLAMA_FAMILIES`).
    more : callable, optional
        Returns further values of `FAMILIES`, at each scrape.

    Examples
    --------
    >>> import os
    >>> collector = MetricsCollector(lambda: [os.getpid()])
    >>> found = {name for name, labels, value in collector.values()}
    >>> "unimem_memory_resident_bytes" in found
    True
    """

    def __init__(
        self,
        pids: Callable[[], Iterable[int]],
        *,
        llama_names: bool = False,
        more: Callable[[], Iterable[_Value]] = tuple,
    ) -> None:
        self._pids, self._more = pids, more
        self._families = FAMILIES | (LLAMA_FAMILIES if llama_names else {})
        self._watched: dict[int, _Watched] = {}
        self._lock = threading.Lock()

    def values(self) -> list[_Value]:
        """Return the name, the labels and the value of each metric.

        A process that has ended, or is unreadable, has only the metric that it is not up.
        """
        with self._lock:
            numbers = list(dict.fromkeys(self._pids()))
            rows = {pid: self._sample(pid) for pid in numbers}
            self._watched = {pid: one for pid, one in self._watched.items() if rows[pid]}
        found: list[_Value] = []
        for pid, own in rows.items():
            found += [("unimem_process_up", (str(pid),), float(own is not None)), *(own or ())]
        with suppress(OSError):
            found += self._more()
        return [each for each in found if each[0] in self._families]

    def collect(self) -> Iterator[Any]:
        """Yield the metrics as ``prometheus_client`` objects."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        by_name: dict[str, dict[tuple[str, ...], float]] = {}
        for name, labels, value in self.values():
            # Several processes may have the same limits and pressure.
            by_name.setdefault(name, {})[labels] = value
        for name, family in self._families.items():
            make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = make(name, family.text, labels=family.labels)
            for labels, value in by_name.get(name, {}).items():
                metric.add_metric([escape(label) for label in labels], value)
            if metric.samples:
                yield metric

    def _sample(self, pid: int) -> list[_Value] | None:
        """Read a process; whatever it publishes costs its own rows, and no other's."""
        watched = self._watched.setdefault(pid, _Watched(Sampler(pid)))
        try:
            sample = watched.sampler.sample()
            if watched.started not in (None, sample.counters.started):
                # The number is another process's now.
                watched.sampler = Sampler(pid)
                sample = watched.sampler.sample()
            watched.started = sample.counters.started
            return [(name, labels, float(value)) for name, labels, value in _of_sample(sample)]
        except (OSError, ValueError, ArithmeticError):
            return None


def serve(collector: MetricsCollector, port: int, address: str = "127.0.0.1") -> tuple[Any, Any]:
    """Serve metrics by HTTP, in threads.

    Parameters
    ----------
    collector : MetricsCollector
        Read at each scrape.
    port : int
        0 takes a free one, which ``server.server_port`` names.
    address : str
        By default only this machine can reach it.

    Returns
    -------
    server, thread
        ``server.shutdown()`` ends it.

    Raises
    ------
    OSError
        The address or the port is unavailable; `filename` has both.
    ImportError
        ``prometheus_client`` is not installed.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{address}:{port}") from None
    return server, thread


def write_metrics(collector: MetricsCollector) -> str:
    """Write one scrape as text; ImportError without ``prometheus_client``."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    text: str = generate_latest(registry).decode()
    return text


# ---- what is in a sample ------------------------------------------------------------------------


def _of_sample(sample: Sample) -> Iterator[_Value]:
    report, done = sample.report, sample.counters
    who = (str(done.pid), str(report.facts.get("name", "")))
    yield from _of_rows(who, report)
    for pages, nbytes in _by_pages(report).items():
        yield "unimem_memory_page_bytes", (*who, pages), nbytes
    yield "unimem_page_faults_total", (*who, "minor"), done.minor_faults
    yield "unimem_page_faults_total", (*who, "major"), done.major_faults
    if done.read_bytes is not None:
        yield "unimem_read_bytes_total", who, done.read_bytes
    yield "unimem_cpu_seconds_total", who, done.cpu_seconds
    for kind in ("prompt", "generated"):
        if (n := sample.published.get(f"n_{kind}_tokens")) is not None:
            yield "unimem_tokens_total", (*who, kind), n
    if (n := sample.published.get("kv_tokens")) is not None:
        yield "unimem_kv_tokens", who, n
    for kind, name in (("hit", "piece_hits"), ("miss", "piece_misses")):
        if (n := sample.published.get(name)) is not None:
            yield "unimem_pieces_total", (*who, kind), n
    if (n := sample.published.get("piece_read_bytes")) is not None:
        yield "unimem_piece_read_bytes_total", who, n
    if (n := sample.published.get("piece_waited_ns")) is not None:
        yield "unimem_piece_wait_seconds_total", who, n / 1e9
    for each in sample.pressure:
        yield "unimem_pressure_ratio", (each.source, "some"), each.some_percent / 100
        yield "unimem_pressure_ratio", (each.source, "full"), each.full_percent / 100
    for limit in sample.limits:
        yield "unimem_limit_bytes", (limit.name,), limit.limit_bytes
        yield "unimem_limit_used_bytes", (limit.name,), limit.used_bytes
    if sample.limits:
        yield "unimem_room_bytes", who, min(limit.room_bytes for limit in sample.limits)
    yield "unimem_report_age_seconds", who, sample.seconds - sample.report_seconds


def _of_rows(who: tuple[str, str], report: Report) -> Iterator[_Value]:
    for row in report.rows:
        labels = (*who, row.category, row.device or HOST)
        sizes = {
            "": row.nbytes,
            "_resident": row.resident_bytes,
            "_requested": row.requested_bytes,
            "_active": row.active_bytes,
            "_high_water": row.high_water_bytes,
        }
        if row.granted is not None:
            sizes["_locked"] = row.granted.locked_bytes
            sizes["_swapped"] = row.granted.swapped_bytes
            for node, nbytes in row.granted.nodes.items():
                yield "unimem_memory_node_bytes", (*who, row.category, str(node)), nbytes
        for what, size in sizes.items():
            if size is not None:
                yield f"unimem_memory{what}_bytes", labels, size
    for name, kinds in _LLAMA_KINDS.items():
        for device, size in _sum_kinds(report.rows, kinds).items():
            yield name, (*who, device), size


def _sum_kinds(rows: Iterable[Row], kinds: tuple[str, ...]) -> dict[str, int]:
    """Sum up rows of some kinds by device; llama.cpp calls main memory "Host"."""
    found: Counter[str] = Counter()
    for row in rows:
        if row.category.partition(":")[0] in kinds:
            found[row.device or "Host"] += row.nbytes
    return found


def _by_pages(report: Report) -> dict[str, int]:
    """Sum up memory in RAM by the size of its pages."""
    found = Counter({"4k": 0})
    for placed in (mapping.granted for mapping in report.mappings):
        if placed.huge_bytes:
            found["thp" if placed.pages == "4k" else placed.pages] += placed.huge_bytes
        found["4k"] += placed.resident_bytes - placed.huge_bytes
    return found
