"""A GPU through CuPy, which is imported here alone, and only when a GPU is used."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import numpy as np

from unimem.base.arguments import integer
from unimem.base.install_hint import install_hint
from unimem.base.text import format_bytes
from unimem.errors import CapacityError, ClosedError, PlacementError

Launcher = Callable[[tuple[int, ...], tuple[int, ...], tuple[Any, ...], int], None]
"""Launches a kernel: grid, block, arguments, stream. An array of one element goes by value."""

_LEGACY = 1  # cudaStreamLegacy: the default stream, as the array interface names it
_COPY_ANY = 4  # cudaMemcpyDefault: the addresses say which way
_REGISTER = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_NOT_REGISTERED = 713  # cudaErrorHostMemoryNotRegistered
_CUDA = 2  # kDLCUDA
_ON_GPU = (_CUDA, 3, 13)  # and kDLCUDAHost, kDLCUDAManaged

_drivers: dict[int, Driver] = {}
# The processes that have used CUDA: this one, and those that it was forked from.
_users: set[int] = set()


def require() -> None:
    """Raise ImportError without CuPy or a device, and say what to do."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"unimem.cuda needs CuPy: {install_hint('cuda13')}; or with the extra 'cuda12', if the "
            f"driver supports no more (nvidia-smi shows it); importing CuPy said: {error}"
        ) from error
    try:
        n_devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ImportError(
            f"unimem.cuda needs an NVIDIA GPU and its driver, and CUDA says: {error}. The rest of "
            "unimem works without one"
        ) from error
    if n_devices == 0:
        raise ImportError(
            "unimem.cuda needs an NVIDIA GPU, and CUDA sees none (CUDA_VISIBLE_DEVICES may hide "
            "it). The rest of unimem works without one"
        )
    _users.add(os.getpid())


def torch() -> Any:
    """Import PyTorch, or raise ImportError that says what to do."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"arrays='torch' needs torch: {install_hint('torch')}; importing it said: {error}"
        ) from error
    return torch


def driver(device: int) -> Driver:
    """Return the driver of a device; the same object every time.

    Raises
    ------
    ImportError
        As `require`.
    TypeError, ValueError
        There is no such device.
    ClosedError
        The parent of this forked process used CUDA.
    """
    number = integer(device, "device")
    found = _drivers.get(number)
    if found is None:
        if _users - {os.getpid()}:
            raise ClosedError(
                f"cuda:{number}: a forked child has no CUDA once its parent has used it: start the "
                "child by spawn (multiprocessing.get_context('spawn'))"
            )
        _users.add(os.getpid())
        # Threads that race all get the first driver.
        found = _drivers.setdefault(number, Driver(number))
    return found


def in_use() -> list[Driver]:
    """List the drivers of the devices that this process has used, by number."""
    return [_drivers[number] for number in sorted(_drivers)]


class _StreamAt:
    """A stream for CuPy's launches: an object with an address."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class _Kernel:
    """A `Launcher` of a kernel; `handle` is its CUfunction."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.handle = int(function.ptr)

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], stream: int
    ) -> None:
        self._function(grid, block, args, stream=_StreamAt(stream))


class _Event:
    """A point in a stream to wait for."""

    def __init__(self, runtime: Any, event: Any) -> None:
        self._runtime = runtime
        self._event = event

    def record(self, stream: int) -> None:
        """Move the event to the current end of a stream."""
        self._runtime.eventRecord(self._event.ptr, stream)

    def synchronize(self) -> None:
        """Wait for the event, with the interpreter's lock released."""
        self._runtime.eventSynchronize(self._event.ptr)

    def delay(self, stream: int) -> None:
        """Let later work in another stream wait for the event."""
        self._runtime.streamWaitEvent(stream, self._event.ptr)


class Driver:
    """One device, through CuPy.

    Any number of threads may use it. As in CuPy, launches go to the current device: with several
    devices make this one current (``with cupy.cuda.Device(1):``). A forked child has no CUDA.

    Attributes
    ----------
    id : int
        CUDA's number of the device.
    name : str
        The name in reports: ``"cuda:0"``.
    device_type : int
        DLPack's number of its kind.
    budget_bytes : int or None
        The most device memory that unimem may have there.
    copy_address, launch_address : int
        Where the driver's cuMemcpyAsync and cuLaunchKernel are, or 0: they cost less than a call of
        `copy`, or of a `Launcher`, whose `handle` is the function to launch.
    """

    device_type = _CUDA
    copy_address = launch_address = 0
    budget_bytes: int | None = None

    def __init__(self, device: int) -> None:
        require()
        import cupy

        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._error = cupy.cuda.runtime.CUDARuntimeError
        n_devices = self._runtime.getDeviceCount()
        if not 0 <= device < n_devices:
            raise ValueError(f"device: expected 0 to {n_devices - 1}, got {device}")
        self.id = device
        self.name = f"cuda:{device}"
        self._device = cupy.cuda.Device(device)
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL("libcuda.so.1")
            self.copy_address, self.launch_address = (
                ctypes.cast(call, ctypes.c_void_p).value or 0
                for call in (library.cuMemcpyAsync, library.cuLaunchKernel)
            )

    def use(self) -> None:
        """Make the device this thread's current one; a new thread's is device 0."""
        self._device.use()

    # ---- memory ----

    def allocate(self, nbytes: int) -> Any:
        """Allocate device memory (cudaMalloc), not from CuPy's pool; raise CapacityError if full.

        Returns
        -------
        cupy.cuda.Memory
            Its address is `ptr`, a multiple of 256; it is freed with the object.
        """
        with self._saying_full(nbytes), self._device:
            return self._cupy.cuda.Memory(nbytes)

    @contextmanager
    def _saying_full(self, nbytes: int) -> Iterator[None]:
        """Raise CapacityError with figures where CUDA is out of memory."""
        try:
            yield
        except RuntimeError as error:  # of CUDA's runtime, or of its driver
            if getattr(error, "status", None) != _OUT_OF_MEMORY:
                raise
            raise self._full(nbytes) from error

    def check_budget(self, own_bytes: int, nbytes: int) -> None:
        """Raise CapacityError if unimem, which has some bytes, would exceed the budget."""
        budget = self.budget_bytes
        if budget is not None and own_bytes + nbytes > budget:
            asked, taken, most = map(format_bytes, (nbytes, own_bytes, budget))
            raise CapacityError(
                f"{self.name}: asked for {asked}, but {taken} of a budget of {most} are taken: a "
                "smaller size, or a larger unimem.cuda.set_budget",
                budget,
                own_bytes,
                nbytes,
            )

    def room(self, own_bytes: int) -> tuple[int, int]:
        """Return the bytes that unimem, which has some, can still take, and could in all."""
        free, total = self.mem_info()
        if self.budget_bytes is None:
            return free, total
        return min(free, max(0, self.budget_bytes - own_bytes)), min(total, self.budget_bytes)

    def _full(self, nbytes: int) -> CapacityError:
        free, total = self.mem_info()
        return CapacityError(
            f"{self.name}: asked for {format_bytes(nbytes)}, but {format_bytes(free)} of "
            f"{format_bytes(total)} are free: a smaller size, or free what others hold "
            "(cupy.get_default_memory_pool().free_all_blocks())",
            total,
            total - free,
            nbytes,
        )

    def free_bytes(self) -> int:
        """Return the free bytes of device memory."""
        return self.mem_info()[0]

    def mem_info(self) -> tuple[int, int]:
        """Return the free bytes and all bytes of device memory."""
        with self._device:
            free, total = self._runtime.memGetInfo()
        return int(free), int(total)

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that the GPU sees it at the same address (cudaHostRegister).

        Raises
        ------
        PlacementError
            The driver refuses, or the device sees such memory at other addresses.
        """
        runtime = self._runtime
        try:
            with self._device:
                runtime.hostRegister(address, nbytes, _REGISTER)
        except self._error as error:
            raise PlacementError(
                errno.ENOMEM,
                f"{self.name}: {format_bytes(nbytes)} of host memory cannot be pinned, CUDA says: "
                f"{error}. Memory that is locked may be limited (ulimit -l), or not there",
            ) from error
        same = runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        if not runtime.deviceGetAttribute(same, self.id):
            self.unregister(address)
            raise PlacementError(
                errno.ENOTSUP,
                f"{self.name} sees pinned host memory at other addresses than the CPU, which is "
                "not supported: use device memory",
            )

    def unregister(self, address: int) -> None:
        """Undo `register`, if the memory is registered, after all queued work is done."""
        with self._device:
            self._runtime.deviceSynchronize()
            try:
                self._runtime.hostUnregister(address)
            except self._error as error:
                if error.status != _NOT_REGISTERED:
                    raise

    def memory(self, address: int, nbytes: int, owner: object) -> Any:
        """Return a cupy.cuda.UnownedMemory for arrays over foreign memory; it keeps `owner`."""
        return self._cupy.cuda.UnownedMemory(address, nbytes, owner, self.id)

    def array(
        self,
        memory: Any,
        offset: int,
        shape: tuple[int, ...],
        dtype: Any,
        strides: tuple[int, ...] | None = None,
    ) -> Any:
        """Return a cupy.ndarray that keeps its memory alive; strides are in bytes."""
        pointer = self._cupy.cuda.MemoryPointer(memory, offset)
        return self._cupy.ndarray(shape, dtype, pointer, strides)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an uninitialised cupy.ndarray in memory of CuPy's pool, or raise CapacityError."""
        try:
            return self._cupy.empty(shape, dtype)
        except self._cupy.cuda.memory.OutOfMemoryError as error:
            raise self._full(prod(shape) * np.dtype(dtype).itemsize) from error

    # ---- foreign arrays ----

    def to_tensor(self, array: Any) -> Any:
        """View a cupy.ndarray as a tensor of torch, which keeps its memory alive."""
        library = torch()
        with library.inference_mode(False):  # else it could not be written in another mode
            return library.from_dlpack(array)

    def new_tensor(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an uninitialised tensor of torch, or raise CapacityError."""
        library, kind = torch(), np.dtype(dtype)
        try:
            device = library.device("cuda", self.id)
            return library.empty(shape, dtype=getattr(library, kind.name), device=device)
        except library.OutOfMemoryError as error:
            raise self._full(prod(shape) * kind.itemsize) from error

    def is_array(self, x: object) -> bool:
        """Return whether it is a cupy.ndarray."""
        return isinstance(x, self._cupy.ndarray)

    def to_array(self, x: Any) -> Any:
        """Return an array on the device as a cupy.ndarray, without a copy.

        It may be of CuPy, of torch, or of another library that has ``__dlpack__`` or
        ``__cuda_array_interface__``. Only CuPy's current stream waits for the stream that the array
        names.

        Raises
        ------
        TypeError
            It is no such array.
        ValueError
            It is on another device.
        """
        if isinstance(x, self._cupy.ndarray):
            return x if x.data.device_id == self.id else self._checked(x)
        if isinstance(x, type):
            raise self._no_array(x)
        if hasattr(x, "__dlpack_device__"):
            kind, number = x.__dlpack_device__()
            if kind not in _ON_GPU:
                raise self._no_array(x)
            if kind == _CUDA and number != self.id:
                raise self._elsewhere(number)
            return self._cupy.from_dlpack(x)
        if hasattr(x, "__cuda_array_interface__"):
            return self._of_interface(x)
        raise self._no_array(x)

    def _checked(self, array: Any) -> Any:
        # An array without elements has no device.
        if array.data.device_id != self.id and array.size > 0:
            raise self._elsewhere(array.data.device_id)
        return array

    def _no_array(self, x: object) -> TypeError:
        return TypeError(
            f"expected an array on the GPU, got {type(x).__name__}: cupy.asarray(x) copies it there"
        )

    def _elsewhere(self, number: int) -> ValueError:
        return ValueError(
            f"expected an array on {self.name}, got one on cuda:{number}: copy it there "
            f"(with cupy.cuda.Device({self.id}): cupy.array(x))"
        )

    def _of_interface(self, x: Any) -> Any:
        """View an array by its interface: CuPy would make this thread wait for the stream."""
        interface = x.__cuda_array_interface__
        if interface.get("mask") is not None:
            raise TypeError("expected an array on the GPU, got a masked one: fill it")
        shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
        strides = interface.get("strides")
        nbytes = prod(shape) * dtype.itemsize
        if strides is not None and nbytes > 0:
            steps = zip(shape, strides, strict=True)
            nbytes = sum((n - 1) * abs(step) for n, step in steps) + dtype.itemsize
        # -1 asks CUDA for the device of the memory.
        number = -1 if nbytes > 0 else self.id
        memory = self._cupy.cuda.UnownedMemory(interface["data"][0], nbytes, x, number)
        array = self._checked(self.array(memory, 0, shape, dtype, strides))
        maker, here = interface.get("stream"), self.stream()
        if maker is not None and maker != (here or _LEGACY):
            made = self.new_event()
            made.record(maker)
            made.delay(here)
        return array

    # ---- streams ----

    def stream(self, stream: Any = None) -> int:
        """Return the cudaStream_t of a stream, by default of CuPy's current one.

        It may be of CuPy, of torch, of another library that has ``__cuda_stream__``, or the number
        itself; anything else is a TypeError.
        """
        if stream is None:
            return int(self._cupy.cuda.get_current_stream().ptr)
        if isinstance(stream, int) and not isinstance(stream, bool):
            return stream
        for attribute in ("ptr", "cuda_stream"):
            found = getattr(stream, attribute, None)
            if isinstance(found, int):
                return found
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            return int(protocol()[1])
        raise TypeError(f"stream: expected a CUDA stream, got {type(stream).__name__}")

    def torch_stream(self) -> int:
        """Return the cudaStream_t of torch's current stream."""
        return int(torch().cuda.current_stream(self.id).cuda_stream)

    def new_stream(self) -> Any:
        """Make a stream that does not wait for the default stream."""
        with self._device:
            return self._cupy.cuda.Stream(non_blocking=True)

    def new_event(self) -> _Event:
        """Make an event."""
        with self._device:
            return _Event(self._runtime, self._cupy.cuda.Event(disable_timing=True))

    def synchronize(self, stream: int) -> None:
        """Wait for a stream, with the interpreter's lock released."""
        self._runtime.streamSynchronize(stream)

    def copy(self, to: int, from_: int, nbytes: int, stream: int) -> None:
        """Queue a copy in any direction. Ranges on the device must not overlap."""
        self._runtime.memcpyAsync(to, from_, nbytes, _COPY_ANY, stream)

    def copy_rows(
        self, to: int, to_step: int, from_: int, from_step: int, shape: tuple[int, int], stream: int
    ) -> None:
        """Queue a copy of rows ``[n, bytes]`` that lie apart, in any direction."""
        n, nbytes = shape
        queue = self._runtime.memcpy2DAsync
        queue(to, to_step, from_, from_step, nbytes, n, _COPY_ANY, stream)

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        """Queue filling memory with a byte."""
        self._runtime.memsetAsync(address, byte, nbytes, stream)

    # ---- kernels ----

    def module(self, source: str, names: Sequence[str]) -> Mapping[str, Launcher]:
        """Compile CUDA C++ for the device by NVRTC, which takes about a second.

        Parameters
        ----------
        source : str
            Kernels that are ``extern "C"``. They round as on the CPU: products and sums are not
            fused, and denormals are kept.
        names : sequence of str
            Names of the kernels.

        Returns
        -------
        mapping
            A launcher for each name.
        """
        cuda = self._cupy.cuda
        with self._saying_full(len(source)), self._device:
            # RawModule would append -ftz=true to our options.
            binary, _ = cuda.compiler.compile_using_nvrtc(source, ("-std=c++17", "-fmad=false"))
            module = cuda.function.Module()
            module.load(binary)
            return {name: _Kernel(module.get_function(name)) for name in names}


# In a forked child: freeing a driver would free its kernels, which needs CUDA.
_left_out: list[Driver] = []


def _forget_after_fork() -> None:
    _left_out.extend(_drivers.values())
    _drivers.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
