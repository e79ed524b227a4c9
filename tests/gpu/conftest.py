"""Fixtures of the tests that need a GPU; without one the modules skip themselves."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The library's calls of the driver; errors of the device fail the test."""
    from gpu.machine import Counted, bridge, cupy

    counted = bridge.counted = Counted(monkeypatch)
    with counted:
        yield counted
    cupy.cuda.runtime.deviceSynchronize()


@pytest.fixture(scope="session")
def torch() -> Any:
    """PyTorch, on the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages, about each other
        torch = pytest.importorskip("torch", reason="needs torch for CUDA")
        if not torch.cuda.is_available():
            pytest.skip("needs torch for CUDA")
        torch.zeros(1, device="cuda")
    return torch
