"""CUDA kernels on the CPU: the same source, compiled by the C++ compiler, a thread after another.

It serves kernels whose threads do not work together: no shared memory, no barrier, no warp-wide
operation.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Launcher = Callable[[tuple[int, ...], tuple[int, ...], tuple[Any, ...], int], None]

# The parts of CUDA that C++ lacks. Operations that name their rounding round as the CPU does, as
# long as nothing is fused.
PRELUDE = r"""
#include <cstring>

#define __global__
#define __device__

struct Three { unsigned x, y, z; };
static thread_local Three gridDim, blockDim, blockIdx, threadIdx;

static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static inline double __longlong_as_double(long long bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
"""

# Calls a kernel of one parameter for each thread of a grid.
LAUNCH = r"""
template <class A>
static int launch(void (*kernel)(A), const unsigned *grid, const unsigned *block,
                  const void *given, std::size_t nbytes) {
    A arguments;
    if (nbytes != sizeof arguments) {
        return sizeof arguments;
    }
    std::memcpy(&arguments, given, nbytes);
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (unsigned z = 0; z < gridDim.z; z++)
    for (unsigned y = 0; y < gridDim.y; y++)
    for (unsigned x = 0; x < gridDim.x; x++)
    for (unsigned tz = 0; tz < blockDim.z; tz++)
    for (unsigned ty = 0; ty < blockDim.y; ty++)
    for (unsigned tx = 0; tx < blockDim.x; tx++) {
        blockIdx = {x, y, z};
        threadIdx = {tx, ty, tz};
        kernel(arguments);
    }
    return 0;
}

#define LAUNCHES(NAME)                                                                      \
    extern "C" int launch_##NAME(const unsigned *grid, const unsigned *block,              \
                                 const void *given, std::size_t nbytes) {                   \
        return launch(NAME, grid, block, given, nbytes);                                    \
    }
"""

# CUDA's limits.
MOST_BLOCKS = (2**31 - 1, 65535, 65535)
MOST_THREADS = 1024


def module(source: str, names: Sequence[str]) -> dict[str, Launcher]:
    """Compile CUDA C++, and return its kernels by name; a launch returns when it is done."""
    library = compiled(source, tuple(names))
    return {name: launcher_of(name, library[f"launch_{name}"]) for name in names}


@functools.cache
def compiled(source: str, names: tuple[str, ...]) -> ctypes.CDLL:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler (c++): the kernels cannot be run on the CPU")
    launches = "".join(f"LAUNCHES({name})\n" for name in names)
    options = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        file, built = Path(folder, "kernels.cpp"), Path(folder, "kernels.so")
        file.write_text(f'{PRELUDE}#line 1 "rows.cu"\n{source}{LAUNCH}{launches}')
        command = [compiler, *options, "-o", str(built), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(built))


class DriversCall:
    """A substitute for cuLaunchKernel, at `address`: it launches kernels by their handles."""

    _KIND = ctypes.CFUNCTYPE(
        *(ctypes.c_int, ctypes.c_size_t, *[ctypes.c_uint] * 7, ctypes.c_size_t),
        *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p),
    )

    def __init__(self) -> None:
        self.status = self.n_launches = 0  # what it returns: 0 if it launches
        self._kernels: list[tuple[str, Launcher]] = []
        self._call = self._KIND(self._launch)
        self.address = ctypes.cast(self._call, ctypes.c_void_p).value or 0

    def with_handle(self, name: str, launch: Launcher) -> Launcher:
        """Give a kernel a handle."""
        self._kernels.append((name, launch))
        handled = functools.partial(launch)
        handled.__dict__["handle"] = len(self._kernels)
        return handled

    def _launch(self, handle: int, *given: Any) -> int:
        *shapes, _shared, stream, parameters, _extra = given
        if self.status == 0:
            self.n_launches += 1
            name, launch = self._kernels[handle - 1]
            nbytes = 240 if name.startswith("append") else 72  # the structures of the kernels
            structure = np.dtype((np.void, nbytes))
            arguments = np.frombuffer(ctypes.string_at(parameters[0], nbytes), structure)
            launch(tuple(shapes[:3]), tuple(shapes[3:6]), (arguments,), stream)
        return self.status


def launcher_of(name: str, function: Callable[..., int]) -> Launcher:
    def launch(
        grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], _stream: int
    ) -> None:
        blocks, threads = ((*shape, 1, 1)[:3] for shape in (grid, block))
        assert all(0 < n <= most for n, most in zip(blocks, MOST_BLOCKS, strict=True)), blocks
        assert 0 < threads[0] * threads[1] * threads[2] <= MOST_THREADS, threads
        # As CuPy passes a structure: an array of one element.
        (given,) = args
        assert isinstance(given, np.ndarray)
        assert given.size == 1
        shapes = ((ctypes.c_uint * 3)(*shape) for shape in (blocks, threads))
        at, nbytes = ctypes.c_void_p(given.ctypes.data), ctypes.c_size_t(given.nbytes)
        n_expected = function(*shapes, at, nbytes)
        assert n_expected == 0, f"{name} takes {n_expected} bytes, got {given.nbytes}"

    return launch
