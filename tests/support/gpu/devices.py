"""Main memory and a GPU's, for tests of both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import unimem as um
from support.kernel import proc_maps
from unimem._core.status import counters, device_ledger, ledger

if TYPE_CHECKING:
    from support.gpu.host_gpu import HostDriver


class Device(ABC):
    """The memory that a test is about.

    Attributes
    ----------
    name : str
        The name in tests.
    package : module
        Whose classes are tested: `unimem` or `unimem.cuda`.
    align : int
        The default alignment of tapes, in bytes.
    """

    name: str
    package: Any
    align: int

    @abstractmethod
    def address_of(self, array: Any) -> int:
        """Address of an array's first element."""

    @abstractmethod
    def seen(self, array: Any) -> NDArray[Any]:
        """View an array's memory as a NumPy array."""

    @abstractmethod
    def is_there(self, address: int) -> bool:
        """Whether the library has memory at this address."""

    @abstractmethod
    def held(self) -> dict[str, int]:
        """Bytes of the library's memory by category."""

    @abstractmethod
    def costs(self) -> dict[str, Any]:
        """Return the library's calls of the system or the driver so far."""


class Host(Device):
    """Main memory."""

    name = "host"
    package = um
    align = 64

    def address_of(self, array: Any) -> int:
        return proc_maps.address_of(array)

    def seen(self, array: Any) -> NDArray[Any]:
        assert isinstance(array, np.ndarray)
        return array

    def is_there(self, address: int) -> bool:
        return proc_maps.is_mapped(address)

    def held(self) -> dict[str, int]:
        return {name: row["mapped_bytes"] for name, row in ledger().items() if row["mapped_bytes"]}

    def costs(self) -> dict[str, Any]:
        return {**counters()}


class Gpu(Device):
    """Device memory, simulated by a driver over main memory."""

    name = "cuda"
    align = 256

    def __init__(self, driver: HostDriver) -> None:
        from unimem import cuda

        self.package = cuda
        self.driver = driver

    def address_of(self, array: Any) -> int:
        return int(array.data.ptr)

    def seen(self, array: Any) -> NDArray[Any]:
        from support.gpu.host_gpu import numpy_of

        return numpy_of(array)

    def is_there(self, address: int) -> bool:
        allocated = self.driver.allocated.items()
        return any(first <= address < first + nbytes for first, nbytes in allocated)

    def held(self) -> dict[str, int]:
        rows = device_ledger().items()
        return {category: row["nbytes"] for (_, category), row in rows if row["nbytes"]}

    def costs(self) -> dict[str, Any]:
        own = {"n_device_allocations": self.driver.n_allocations, "calls": list(self.driver.calls)}
        return {**counters(), **own}
