"""Programs of ``tools/``, which are in no package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from support.project.checkout import ROOT

FOLDER = ROOT / "tools"


def load_tool(name: str) -> ModuleType:
    """Import a tool anew; it finds what it imports beside itself."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(FOLDER))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module
