"""What llama.cpp printed of its caches, and files like those that it printed them of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from support.project.checkout import ROOT
from support.project.tools import load_tool

RECORD: dict[str, Any] = json.loads(
    (ROOT / "tests/planning/data/llama_cpp_caches.json").read_text()
)
"""As ``tools/llama_cpp_caches.py`` has recorded it."""

_caches = load_tool("llama_cpp_caches")


def write(
    path: Path,
    arch: str,
    values: dict[str, Any],
    n_tensors: int = 80,
    recorded: Iterable[Sequence[Any]] = (),
) -> Path:
    """Write a file with these keys, of small tensors, or of those that were recorded."""
    tensors = [("token_embd.weight", [4, 256]), *((f"t{i}", [1]) for i in range(n_tensors - 1))]
    _caches.write(path, arch, values, _caches.unpacked(recorded) or tensors)
    return path
