"""Compute with an installed unimem-ggml, with the Python that it is installed for.

``python -I -S smoke_ggml.py FOLDER`` imports the binding from FOLDER, multiplies two matrices, and
prints the Python and the chosen build of the CPU backend as JSON.
"""

from __future__ import annotations

import ctypes
import json
import platform
import sys
import sysconfig
from pathlib import Path

N = 64


def check(folder: str) -> str:
    """Multiply matrices by the binding in a folder; return the level of the chosen build."""
    from unimem_ggml import binding

    assert binding.__file__.startswith(folder), binding.__file__
    room = ctypes.create_string_buffer(1 << 20)
    context = binding.new_context(ctypes.addressof(room), len(room))
    arrays = [(ctypes.c_float * (N * N))(*[value] * (N * N)) for value in (2.0, 3.0, 0.0)]
    a, b = (binding.new_tensor(context, binding.F32, N, N) for _ in range(2))
    product = binding.mul_mat(context, a, b)
    for tensor, array in zip((a, b, product), arrays, strict=True):
        binding.Tensor.at(tensor).data = ctypes.addressof(array)
    graph = binding.new_graph(context, 16)
    binding.expand(graph, product)
    plan = ctypes.create_string_buffer(binding.PLAN_BYTES)
    work = ctypes.create_string_buffer(1 << 20)
    needed = binding.plan(ctypes.addressof(plan), graph, 1, 0, ctypes.addressof(work))
    assert needed <= len(work), needed
    assert binding.compute(graph, ctypes.addressof(plan), 1) == 0
    assert set(arrays[2]) == {N * 6.0}, arrays[2][:4]
    try:
        binding.mul_mat(context, a, binding.new_tensor(context, binding.F32, 3))
    except binding.GgmlError:
        pass
    else:
        raise AssertionError("a wrong shape is no error: expected GgmlError")
    binding.free(context)
    return Path(binding.CPU_LIBRARY).stem.removeprefix("libunimem-ggml-cpu-")


def main() -> None:
    """Check, and print what was found."""
    sys.path.insert(0, sys.argv[1])
    build = check(sys.argv[1])
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        is_on: bool = getattr(sys, "_is_gil_enabled")()  # noqa: B009 - no type checker knows it
        assert not is_on, "the binding turned the interpreter's lock on: expected it to stay off"
    print(json.dumps({"python": platform.python_version(), "build": build}))


if __name__ == "__main__":
    main()
