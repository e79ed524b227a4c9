"""Convert every float32 to float16 and bfloat16 and back, and compare with NumPy and ml_dtypes.

It takes minutes, so it is no test: ``tools/exhaust.sh`` runs it. It calls ``um_convert`` of the
installed library, with the fastest code for this CPU; ``native/tests/exhaust_convert.c``, which
that script runs as well, compares the other codes. A NaN need only stay a NaN. Ends with status 1
if a bit differs.
"""

from __future__ import annotations

import ctypes
import sys

import ml_dtypes
import numpy as np
import numpy.typing as npt

import unimem as um

CHUNK = 1 << 24
F32 = 0
FORMATS: dict[str, tuple[int, npt.DTypeLike]] = {
    "float16": (1, np.float16),
    "bfloat16": (2, ml_dtypes.bfloat16),
}
LIBRARY = ctypes.CDLL(um.get_library())
LIBRARY.um_convert.argtypes = [
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_size_t,
    ctypes.c_void_p,
]
LIBRARY.um_convert_isa.restype = ctypes.c_char_p


def convert(
    out: npt.NDArray[np.generic], out_type: int, values: npt.NDArray[np.generic], in_type: int
) -> None:
    """Convert all of `values`, by the numbers of the types in ``unimem.h``."""
    arguments = (out.ctypes.data, out_type, values.ctypes.data, in_type, values.size, None)
    if LIBRARY.um_convert(*arguments) != 0:
        raise RuntimeError("um_convert refused")


def count_wrong(got: npt.NDArray[np.generic], want: npt.NDArray[np.generic], name: str) -> int:
    """Count items whose bits differ, except pairs of NaNs."""
    bits = np.uint32 if got.itemsize == 4 else np.uint16
    wrong = got.view(bits) != want.view(bits)
    wrong &= ~(np.isnan(got) & np.isnan(want))
    n = int(np.count_nonzero(wrong))
    for i in np.flatnonzero(wrong)[:3]:
        print(f"WRONG: {name}: {got.view(bits)[i]:#x}, expected {want.view(bits)[i]:#x}")
    return n


def main() -> int:
    """Return the exit status."""
    np.seterr(all="ignore")
    print(f"code: {LIBRARY.um_convert_isa().decode()}")
    total = 0
    for name, (number, dtype) in FORMATS.items():
        wrong = 0
        out = np.empty(CHUNK, dtype)
        for first in range(0, 1 << 32, CHUNK):
            values = np.arange(first, first + CHUNK, dtype=np.uint32).view(np.float32)
            convert(out, number, values, F32)
            wrong += count_wrong(out, values.astype(dtype), f"float32 to {name}")
        codes = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        wide = np.empty(codes.size, np.float32)
        convert(wide, F32, codes, number)
        wrong += count_wrong(wide, codes.astype(np.float32), f"{name} to float32")
        print(f"{name}: 2^32 values there, 2^16 back, {wrong} wrong")
        total += wrong
    return total != 0


if __name__ == "__main__":
    sys.exit(main())
