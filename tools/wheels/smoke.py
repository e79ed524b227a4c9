"""Check an installed unimem, with the Python that it is installed for.

``python -I -S smoke.py FOLDER`` imports unimem from FOLDER, where it was installed with its
requirements alone. It prints the Python and the chosen vector code as JSON. A wheel that converts
without vector code works, but 15 times slower, so that is a failure, too. So is a module that turns
the interpreter's lock on, in a Python that can do without.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import platform
import runpy
import sys
import sysconfig
from pathlib import Path


def best_code() -> str:
    """Return the best vector code of this machine, according to the kernel."""
    if platform.machine() == "aarch64":
        return "neon"
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line for line in lines if line.startswith("flags")).split()
    if "f16c" not in flags:
        return "scalar"
    return "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags else "scalar"


def chosen_code(library: str) -> str:
    """Return the vector code that the library chose."""
    loaded = ctypes.CDLL(library)
    loaded.um_convert_isa.restype = ctypes.c_char_p
    found: bytes = loaded.um_convert_isa()
    return found.decode()


def lock() -> str:
    """Say whether the interpreter's lock is on, and fail if a module turned it on."""
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "on"
    is_on: bool = getattr(sys, "_is_gil_enabled")()  # noqa: B009 - no type checker knows it
    assert not is_on, "a module turned the interpreter's lock on: expected it to stay off"
    return "off"


def check(folder: str) -> str:
    """Use unimem from a folder; return the vector code."""
    import numpy as np

    import unimem as um

    assert um.__file__.startswith(folder), um.__file__
    modules = Path(um.__file__).parent.glob("*/*.cpython-*.so")
    for path in (each for each in modules if each.parent.name != "engine"):  # which needs an extra
        importlib.import_module(f"unimem.{path.parent.name}.{path.name.split('.')[0]}")
    with um.Block(1 << 20) as block, um.Tape(block) as tape:
        floats = tape.take((1000,), "float32")
        floats[:] = 1
        assert (floats.sum(), tape.used_bytes) == (1000, 4000), tape
        del floats
    values = np.linspace(-1, 1, 3 * 2 * 64, dtype="float32").reshape(3, 2, 64)
    errors = {"f32": 0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.005, "q4_0": 0.2}
    for dtype, error in errors.items():
        with um.KVCache(1, 2, 64, 16, dtype=dtype) as kv:
            kv.append(0, values, -values)
            for got, given in zip(kv.layer(0, dtype="float32"), (values, -values), strict=True):
                assert np.abs(got[0].transpose(1, 0, 2) - given).max() <= error, dtype
    with um.open_weights(Path(um.__file__).parent / "engine/models/tiny.gguf") as weights:
        assert weights.metadata["general.architecture"] == "llama"
        assert len(weights.tensors) > 0
    sys.argv[1:] = ["--cflags", "--libs"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        runpy.run_module("unimem", run_name="__main__")
    assert f"-I{um.get_include()} " in printed.getvalue(), printed.getvalue()
    assert (Path(um.get_include()) / "unimem.h").exists()
    return chosen_code(um.get_library())


def main() -> None:
    """Check, and print what was found."""
    folder = sys.argv[1]
    sys.path.insert(0, folder)
    code, best = check(folder), best_code()
    assert code == best, f"the code that converts is {code}: expected {best} on this machine"
    print(json.dumps({"python": platform.python_version(), "code": code, "lock": lock()}))


if __name__ == "__main__":
    main()
