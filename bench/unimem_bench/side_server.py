"""The loop of a process that decodes: requests on standard input, answers, a line of JSON each.

It also runs under the peer's interpreter, beside ``llama_cpp_side.py``, and needs only the standard
library and NumPy.
"""

from __future__ import annotations

import base64
import ctypes
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]

# OpenMP threads poll for some milliseconds after their work. They must be asleep when the answer
# lets the other side start.
SETTLE_S = 0.05


class Side(Protocol):
    """One conversation of one library."""

    @property
    def compute_s(self) -> float | None:
        """Seconds in ggml's compute call so far; None if unknown."""

    def prefill(self, tokens: list[int]) -> Logits:
        """Start anew with `tokens`; return the logits after the last."""

    def step(self) -> int:
        """Take the likeliest token, compute the logits after it, and return it."""

    def facts(self) -> dict[str, Any]:
        """Return the facts needed to read the figures, ``start_s`` among them."""


def serve(open_side: Callable[..., Side], package: str) -> None:
    """Open the side that the command line describes, and answer until standard input ends.

    The only argument of the command line is JSON, the options of `open_side`. `package` has the
    library's copy of ggml.
    """
    # A library's own output must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side: Side | None = None

    def answer(line: str) -> dict[str, Any]:
        nonlocal side
        try:
            request = json.loads(line)
            if side is None:
                side = open_side(**request)
                return side.facts() | ggml_facts(package) | memory_facts()
            return _ACTIONS[request.pop("do")](side, **request)
        except Exception as error:  # any: the answer names it
            return {"error": f"{type(error).__name__}: {error}"}

    waits = {"wait_s": 0.0, "wait_cpu_s": 0.0}
    line = sys.argv[1]
    while line:
        answers.write(json.dumps(answer(line) | waits) + "\n")
        answers.flush()
        waiting_since, used_before = time.perf_counter(), time.process_time()
        line = sys.stdin.readline()
        # CPU time used while waiting: threads that poll would slow down the other side.
        waits = {
            "wait_s": time.perf_counter() - waiting_since,
            "wait_cpu_s": time.process_time() - used_before,
        }


def _prefill(side: Side, tokens: list[int]) -> dict[str, Any]:
    start = time.perf_counter()
    side.prefill(tokens)
    return _settled({"seconds": time.perf_counter() - start})


def _decode(side: Side, n: int) -> dict[str, Any]:
    before = side.compute_s
    start = time.perf_counter()
    for _ in range(n):
        side.step()
    seconds = time.perf_counter() - start
    compute = None if before is None or side.compute_s is None else side.compute_s - before
    return _settled({"seconds": seconds, "compute_s": compute})


def _greedy(side: Side, tokens: list[int], n: int) -> dict[str, Any]:
    logits = base64.b64encode(side.prefill(tokens).tobytes()).decode()
    return _settled({"logits": logits, "tokens": [side.step() for _ in range(n)]})


_ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "prefill": _prefill,
    "decode": _decode,
    "greedy": _greedy,
}


def _settled(answer: dict[str, Any]) -> dict[str, Any]:
    time.sleep(SETTLE_S)
    return answer


class _Feature(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("value", ctypes.c_char_p))


def ggml_facts(package: str) -> dict[str, Any]:
    """Return the version and the CPU features of the ggml in a package.

    The features are those that this copy was compiled with, as it reports them
    (``ggml_backend_get_features`` of its CPU backend), tinyBLAS ("LLAMAFILE") among them.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{sys.executable} has no package {package}")
    library = ctypes.CDLL(str(Path(spec.submodule_search_locations[0], "lib", "libggml-cpu.so")))
    library.ggml_version.restype = ctypes.c_char_p
    library.ggml_backend_cpu_reg.restype = ctypes.c_void_p
    find = library.ggml_backend_reg_get_proc_address
    find.argtypes, find.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
    registry = library.ggml_backend_cpu_reg()
    address = find(registry, b"ggml_backend_get_features")
    if not address:
        raise RuntimeError(f"the ggml of {package} does not name its features")
    get = ctypes.CFUNCTYPE(ctypes.POINTER(_Feature), ctypes.c_void_p)(address)
    features = {}
    for feature in get(registry):
        if not feature.name:
            break
        features[feature.name.decode()] = feature.value.decode()
    return {"ggml": library.ggml_version().decode(), "features": features}


def memory_facts() -> dict[str, int]:
    """Return the peak of this process's memory, and its anonymous part, which shows copies."""
    return {
        "peak_rss_bytes": _kib("/proc/self/status", "VmHWM:") * 1024,
        "anonymous_bytes": _kib("/proc/self/smaps_rollup", "Anonymous:") * 1024,
    }


def _kib(path: str, field: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise RuntimeError(f"{path} has no line {field!r}")
