"""Settings for this folder, whose tests run only in the machine of vm.py."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

IN_MACHINE = os.environ.get("UNIMEM_NUMA_VM") == "1"


@pytest.fixture(autouse=True)
def several_nodes() -> None:
    """Skip the tests unless this machine has their nodes."""
    if not IN_MACHINE:
        pytest.skip("needs several NUMA nodes: make test-numa")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure in the machine, which lacks nothing."""
    report = yield
    if IN_MACHINE and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be: {report.longrepr}"
    return report
