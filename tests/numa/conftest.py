"""The tests of this folder run in the machine of vm.py, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

IN_MACHINE = os.environ.get("UNIMEM_NUMA_VM") == "1"


@pytest.fixture(autouse=True)
def several_nodes() -> None:
    """Skip where there are not the nodes that the tests are written for."""
    if not IN_MACHINE:
        pytest.skip("needs several NUMA nodes: make test-numa")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In the machine nothing is missing, so that a test that skips there has failed."""
    report = yield
    if IN_MACHINE and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be: {report.longrepr}"
    return report
