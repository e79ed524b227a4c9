"""The contracts of caches and kernels, and the examples, on a GPU."""

from __future__ import annotations

import inspect

import pytest

from gpu.machine import bridge, cuda, cuda_driver
from support.contracts.cache_kinds import Array, OnDevice, all_kinds
from support.contracts.conformance import suites
from support.contracts.states import state_suites
from support.gpu.row_contract import Place, RowContract
from support.project.doc_examples import check_docs

pytestmark = pytest.mark.usefixtures("gives_memory_back")

KINDS = all_kinds(bridge)
CLASSES = sorted(name for name in cuda.__all__ if inspect.isclass(getattr(cuda, name)))

globals().update(suites(KINDS) | state_suites(KINDS))


class Device(Place):
    """The GPU."""

    def __init__(self) -> None:
        self.driver = cuda_driver.driver(0)

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


@pytest.mark.parametrize("name", CLASSES)
def test_example(name: str) -> None:
    check_docs(getattr(cuda, name), name)
