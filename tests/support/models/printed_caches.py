"""What llama.cpp printed of its caches, and files like those that it printed them of."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from support.project.checkout import ROOT

__all__ = ["RECORD", "write"]

RECORD: dict[str, Any] = json.loads(
    (ROOT / "tests/planning/data/llama_cpp_caches.json").read_text()
)
"""As ``tools/llama_cpp_caches.py`` has recorded it."""

_spec = importlib.util.spec_from_file_location("caches", ROOT / "tools/llama_cpp_caches.py")
assert _spec is not None
assert _spec.loader is not None
_caches = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_caches)


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
