"""The caches of the GPU twin pass the contract of all caches, over a driver in main memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from support.contracts.cache_kinds import Array, CudaBridge, OnDevice, all_kinds, own_counters, span
from support.contracts.conformance import suites
from support.contracts.states import state_suites
from support.gpu.host_gpu import HostDriver, array_of, numpy_of
from unimem.backends import cuda_driver

pytestmark = pytest.mark.usefixtures("cuda", "gives_memory_back")


class HostBridge(CudaBridge):
    """Main memory as a device's."""

    @property
    def driver(self) -> HostDriver:
        """The driver of this test."""
        found = cuda_driver.driver(0)
        assert isinstance(found, HostDriver)
        return found

    def up(self, a: Array) -> OnDevice:
        memory, first = span(a)
        return array_of(np.ndarray(a.shape, a.dtype, memory.data, first, a.strides))

    def down(self, a: OnDevice) -> Array:
        return numpy_of(a).copy()

    def zero(self, a: OnDevice) -> None:
        numpy_of(a)[...] = 0

    def is_mapped(self, address: int) -> bool:
        allocated = self.driver.allocated.items()
        return any(first <= address < first + nbytes for first, nbytes in allocated)

    def counters(self) -> Mapping[str, int]:
        calls: list[tuple[Any, ...]] = self.driver.calls
        n_waits = sum(call[0] in ("synchronize", "wait") for call in calls)
        return own_counters() | {"allocated": self.driver.n_allocations, "waited": n_waits}


KINDS = all_kinds(HostBridge())

globals().update(suites(KINDS) | state_suites(KINDS))
