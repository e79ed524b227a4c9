"""The state that all tests begin from, their two tiers, fixtures, and what a run did not test."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from support.kernel import known_state
from support.kernel.huge_pages import sharing_the_pool
from support.project import in_threads, tiers
from support.project.checkout import ROOT
from unimem._core.status import device_ledger, ledger
from unimem.accounting import published
from unimem.system import limits

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist
        session.config.workeroutput["n_left_out"] = tiers.n_left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker knows: each has seen all tests."""
    tiers.n_left_out = getattr(node, "workeroutput", {}).get("n_left_out", 0)


# Fixtures that take what all processes of the machine share, or look at it; and modules that do.
MACHINE = {"cgroup_1gb", "cgroup_512mb", "eight_huge_pages", "no_huge_pages", "leaves_nothing"}
MACHINE_MODULES = {
    "_core/test_block_cgroup",
    "_core/test_block_grow",
    "_core/test_block_lock",
    "_core/test_block_pages",
    "accounting/test_mapped_models",
    "accounting/test_published",
    "accounting/test_report",
    "accounting/test_report_accounting",
    "accounting/test_report_llama_cpp",
    "bench/test_bench_repack",
    "cli/test_processes",
    "cli/test_report",
    "cli/test_stage",
    "cli/test_stage_url",
    "cli/test_watch",
    "engine/test_model_memory",
    "engine/test_model_memory_images",
    "kv/cache/test_storage",
    "kv/cache/test_storage_grow",
    "planning/test_plan_limits",
    "project/test_demo",
    "staging/test_stage",
    "staging/test_stage_interrupt",
    "staging/test_stage_url",
    "staging/test_unfinished",
    "system/test_limits",
    "system/test_pressure",
    "system/test_pressure_watches",
    "system/test_process",
    "test_governor",
    "test_governor_cgroup",
    "weights/test_loading",
    "weights/test_residency",
}

# What tests lock at most that are marked `locks`; the usual limit of a user.
LOCKED_BYTES = 8 << 20

# Modules whose tests reserve huge pages by themselves.
POOL_MODULES = {
    "_core/test_block_pages",
    "bench/test_bench_decoders",
    "bench/test_bench_plain",
    "bench/test_bench_suites_load",
}

# Folders that are in the larger tier as a whole: what they import takes longer than most tests.
SLOW_FOLDERS = {ROOT / "tests/transformers"}


def module_of(path: Path) -> str:
    """Return the path of a test file below `tests`, without its suffix."""
    return path.relative_to(ROOT / "tests").with_suffix("").as_posix()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("unimem's own tests")
    group.addoption("--all", action="store_true", help="everything there is: make test-all")
    group.addoption("--explore", action="store_true", help="random examples: tools/explore.py")


def pytest_configure(config: pytest.Config) -> None:
    known_state.begin()
    # Where pytest-xdist is not installed, as on a machine that is lent for its GPU.
    config.addinivalue_line("markers", "xdist_group(name): in one worker, one after the other")
    config.addinivalue_line("markers", "locks: locks some MiB of memory")
    config.addinivalue_line("markers", "slow: not in the fast tier; make test-all runs it")
    config.addinivalue_line("markers", "uncounted: fails where `make coverage` counts lines")
    tiers.everything = config.getoption("--all") or config.getoption("--explore")
    random = config.getoption("--explore")
    # The same examples in each run: what was red is red again, and what is green stays so.
    hypothesis.settings.register_profile(
        "unimem", derandomize=not random, deadline=None, database=None, print_blob=True
    )
    hypothesis.settings.load_profile("unimem")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path in SLOW_FOLDERS and not tiers.everything else None


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if MACHINE & fixtures or module_of(item.path) in MACHINE_MODULES:
            item.add_marker(pytest.mark.xdist_group("machine"))
    if str(getattr(config.option, "parallel_threads", 1)) != "1":  # under pytest-run-parallel
        for item in items:
            if reason := in_threads.why_in_one_thread(item):
                item.add_marker(pytest.mark.thread_unsafe(reason=reason))
    if not tiers.everything:
        slow = [item for item in items if item.get_closest_marker("slow")]
        tiers.n_left_out = len(slow)
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Leave out of collections what is there for good: modules, and the tests themselves.

    Many tests collect, and each collection would look at hundreds of thousands of objects.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("uncounted") and "COVERAGE_RCFILE" in os.environ:
        pytest.skip("counting lines changes what the test compares, or where the package lies")
    if item.get_closest_marker("locks") is None:
        return
    limit = limits.memlock()
    if limit is not None and limit.limit_bytes < LOCKED_BYTES:
        pytest.skip(f"this user may lock {limit.limit_bytes >> 10} KiB of memory: ulimit -l")


@pytest.fixture(autouse=True)
def pool_of_huge_pages(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nobody else takes the huge pages that a test reserves."""
    with sharing_the_pool(alone=module_of(request.node.path) in POOL_MODULES):
        yield


@pytest.fixture(autouse=True)
def cpus_of_the_process() -> Iterator[None]:
    """Benchmarks pin their thread; the tests behind them run on all CPUs again."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture(scope="session", autouse=True)
def in_the_checkout() -> None:
    """Relative paths mean the same wherever pytest was started."""
    os.chdir(ROOT)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """For tests that compare `counters`, which are the process's: nothing is unmapped meanwhile
    that an earlier test has left in a cycle."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def gives_memory_back() -> Iterator[None]:
    """What a test maps is unmapped at its end."""

    def mapped() -> dict[Any, tuple[int, int]]:
        host = {name: (row["n_mappings"], row["mapped_bytes"]) for name, row in ledger().items()}
        device = {
            key: (row["n_allocations"], row["nbytes"]) for key, row in device_ledger().items()
        }
        return host | device

    published.publish()  # what a process shows others begins with its first engine, and stays
    before = mapped()
    yield
    if mapped() != before:
        gc.collect()  # which takes longer than most tests
    # Less than before is what an earlier test had left to the collector.
    assert {key: row for key, row in mapped().items() if row > before.get(key, (0, 0))} == {}


@pytest.fixture
def host_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver over main memory in the place of device 0: tests/support/gpu/host_gpu.py."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from support.gpu import host_gpu

    return host_gpu.install(monkeypatch)


@pytest.fixture
def cuda(host_gpu: Any) -> Any:
    """`unimem.cuda` over that driver."""
    from unimem import cuda

    return cuda


@pytest.fixture(params=["host", "cuda"])
def device(request: pytest.FixtureRequest) -> Any:
    """Main memory, then a GPU's: tests/support/gpu/devices.py."""
    from support.gpu import devices

    gc.collect()  # memory that earlier tests have left
    if request.param == "host":
        return devices.Host()
    return devices.Gpu(request.getfixturevalue("host_gpu"))


@pytest.fixture
def run_python() -> Run:
    """Run a script in an interpreter of its own, with these options and environment variables."""

    def run(script: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *options, "-c", textwrap.dedent(script)],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end what was not tested, by reason."""
    tests_of: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        tests_of[reason.removeprefix("Skipped: ")].append(report.nodeid)
    if tests_of:
        terminalreporter.section("not tested in this run")
        for reason, tests in sorted(tests_of.items()):
            more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
            terminalreporter.write_line(f"{reason}: {tests[0]}{more}")
    if not tiers.everything:
        terminalreporter.write_line(
            f"This was the fast tier. `make test-all` has {tiers.n_left_out} slow tests beside it, "
            "and its searches try ten times as many examples."
        )
