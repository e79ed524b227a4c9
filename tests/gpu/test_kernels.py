"""The kernels of ``rows.cu``, run on a GPU, give the bits that main memory gets."""

from __future__ import annotations

import pytest

from cache_kinds import Array, OnDevice
from gpu.machine import bridge, gpu
from row_contract import Place, RowContract


class Device(Place):
    """The GPU."""

    def __init__(self) -> None:
        self.driver = gpu.driver(0)

    def up(self, a: Array) -> OnDevice:
        return bridge.up(a)

    def down(self, a: OnDevice) -> Array:
        return bridge.down(a)

    def address(self, a: OnDevice) -> int:
        return int(a.data.ptr)


class TestRows(RowContract):
    """On the GPU."""

    @pytest.fixture
    def place(self) -> Place:
        return Device()
