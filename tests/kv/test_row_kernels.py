"""Kernels of rows are launched by the driver's own call, or by theirs if it refuses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from support.gpu import host_kernels
from support.gpu.row_contract import Place, RowContract, append, expected, tokens_of
from unimem.backends import cuda_driver


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the twin be imported without a GPU and CuPy."""
    monkeypatch.setattr(cuda_driver, "require", lambda: None)


class LaunchingDriver:
    """A driver whose kernels run on the CPU, and have handles."""

    def __init__(self) -> None:
        self.call = host_kernels.DriversCall()
        self.launch_address = self.call.address

    def module(self, source: str, names: Sequence[str]) -> dict[str, host_kernels.Launcher]:
        kernels = host_kernels.module(source, names)
        return {name: self.call.with_handle(name, launch) for name, launch in kernels.items()}


class Launched(Place):
    """Main memory."""

    def __init__(self) -> None:
        self.driver = LaunchingDriver()

    def up(self, a: NDArray[np.generic]) -> NDArray[np.generic]:
        return a

    def down(self, a: NDArray[np.generic]) -> NDArray[np.generic]:
        return a

    def address(self, a: NDArray[np.generic]) -> int:
        return a.ctypes.data


@pytest.mark.slow  # the quick tier runs the contract by the kernels' own calls
class TestRows(RowContract):
    """By the driver's own call."""

    @pytest.fixture
    def place(self) -> Place:
        return Launched()


@pytest.mark.parametrize("status", [0, 201])
def test_a_launch_is_the_drivers_own_call(status: int) -> None:
    place = Launched()
    place.driver.call.status = status
    k, v = (tokens_of("f32", (2, 1, 3, 4, 64), seed) for seed in (0, 1))
    found = append(place, k, v, "f32", "q8_0", row=1, n_rows=6)
    assert place.driver.call.n_launches == (status == 0)
    for lanes, tokens in zip(found, (k, v), strict=True):
        want = expected(tokens, "f32", "q8_0", row=1, n_rows=6)
        assert lanes.tobytes() == want.tobytes()
    assert append(place, k[..., :0, :], v[..., :0, :], "f32", "q8_0", n_rows=6)[0].size
    assert place.driver.call.n_launches == (status == 0)
