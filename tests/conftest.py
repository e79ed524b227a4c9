"""The state and tiers of all tests, their fixtures, and a summary of skipped tests."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from support.kernel import known_state
from support.kernel.cgroups import cgroup_1gb, cgroup_512mb
from support.kernel.huge_pages import eight_huge_pages, no_huge_pages, sharing_the_pool
from support.project import in_threads, peaks, tiers
from support.project.checkout import ROOT
from unimem._core.status import device_ledger, ledger
from unimem.accounting import published
from unimem.system import limits

__all__ = ["cgroup_1gb", "cgroup_512mb", "eight_huge_pages", "no_huge_pages"]  # fixtures

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # a worker of pytest-xdist
        session.config.workeroutput["n_left_out"] = tiers.n_left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the count of slow tests from a worker, which has seen all tests."""
    tiers.n_left_out = getattr(node, "workeroutput", {}).get("n_left_out", 0)


# Fixtures and modules that use a resource of the whole machine.
MACHINE = {"cgroup_1gb", "cgroup_512mb", "eight_huge_pages", "no_huge_pages", "leaves_nothing"}
MACHINE_MODULES = {
    "_core/test_block_cgroup",
    "_core/test_block_lock",
    "_core/test_block_pages",
    "_core/test_mapping_grow",
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
    "planning/test_hosts_cgroup",
    "planning/test_plan_limits",
    "project/test_demo",
    "staging/test_backings",
    "staging/test_keeper",
    "staging/test_mount_process",
    "staging/test_stage",
    "staging/test_stage_interrupt",
    "staging/test_stage_url",
    "staging/test_unfinished",
    "system/test_limits",
    "system/test_pressure",
    "system/test_process",
    "test_governor",
    "test_governor_cgroup",
    "weights/test_loading",
    "weights/test_residency",
}

# The most memory that a test marked `locks` locks; the usual limit of a user.
LOCKED_BYTES = 8 << 20

# Modules whose tests reserve huge pages without a fixture.
POOL_MODULES = {
    "_core/test_block_pages",
    "bench/test_bench_decoders",
    "bench/test_bench_plain",
    "bench/test_bench_suites_load",
}

# Folders of the larger tier: their imports take longer than most tests.
SLOW_FOLDERS = {ROOT / "tests/transformers"}


def module_of(path: Path) -> str:
    """Return the path of a test file below `tests`, without its suffix."""
    return path.relative_to(ROOT / "tests").with_suffix("").as_posix()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("unimem's own tests")
    group.addoption("--all", action="store_true", help="everything there is: make test-all")
    group.addoption("--peaks", metavar="FILE", help="note tests that take much memory")
    group.addoption("--explore", action="store_true", help="random examples: tools/explore.py")


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist read the options of the environment themselves.
    known_state.begin({"PYTEST_ADDOPTS"} if getattr(config.option, "numprocesses", 0) else ())
    # A machine with a GPU may lack pytest-xdist.
    config.addinivalue_line("markers", "xdist_group(name): in one worker, one after the other")
    config.addinivalue_line("markers", "locks: locks some MiB of memory")
    config.addinivalue_line("markers", "slow: not in the fast tier; make test-all runs it")
    config.addinivalue_line("markers", "uncounted: fails where `make coverage` counts lines")
    tiers.everything = config.getoption("--all") or config.getoption("--explore")
    random = config.getoption("--explore")
    # Each run uses the same examples, so that a failure repeats.
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
    """Exclude all existing objects, hundreds of thousands, from garbage collection.

    Many tests collect garbage.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    file = item.config.getoption("--peaks")
    with peaks.noted(item.nodeid, Path(file)) if file else nullcontext():
        return (yield)


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
    """Keep other tests away from the huge pages that a test reserves."""
    with sharing_the_pool(alone=module_of(request.node.path) in POOL_MODULES):
        yield


@pytest.fixture(autouse=True)
def cpus_of_the_process() -> Iterator[None]:
    """Undo the pinning of benchmarks after each test."""
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture(scope="session", autouse=True)
def in_the_checkout() -> None:
    """Run in the root of the checkout, for relative paths."""
    os.chdir(ROOT)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Switch garbage collection off for tests that compare `counters` of the whole process."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def gives_memory_back() -> Iterator[None]:
    """Check that a test unmaps all of its memory."""

    def mapped() -> dict[Any, tuple[int, int]]:
        host = {name: (row["n_mappings"], row["mapped_bytes"]) for name, row in ledger().items()}
        device = {
            key: (row["n_allocations"], row["nbytes"]) for key, row in device_ledger().items()
        }
        return host | device

    published.publish()  # the first engine would publish it, and it stays
    before = mapped()
    yield
    if mapped() != before:
        gc.collect()  # slower than most tests
    # There may be less than before, if an earlier test had left garbage.
    assert {key: row for key, row in mapped().items() if row > before.get(key, (0, 0))} == {}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may read, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.fixture
def host_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a driver over main memory as device 0: tests/support/gpu/host_gpu.py."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from support.gpu import host_gpu

    return host_gpu.install(monkeypatch)


@pytest.fixture
def cuda(host_gpu: Any) -> Any:
    """Return `unimem.cuda` over that driver."""
    from unimem import cuda

    return cuda


@pytest.fixture(params=["host", "cuda"])
def device(request: pytest.FixtureRequest) -> Any:
    """Return main memory, then a GPU's: tests/support/gpu/devices.py."""
    from support.gpu import devices

    gc.collect()  # garbage of earlier tests
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
