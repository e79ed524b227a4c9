"""Environments of engines with this checkout's unimem: what their builders have in common."""

from __future__ import annotations

import os
import zipfile
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

# torch's CPU build is in this index, unless pip is configured with another place for it.
TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel requires without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    return [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]


def share_unimem(packages: Path) -> None:
    """Let the environment import the unimem of this one, which is installed in place."""
    ours = find_spec("_editable_skbc_unimem_llm")
    if ours is None:
        raise ImportError("unimem-llm is not installed in place: make install")
    load = (
        "import importlib.util as u; "
        f"s = u.spec_from_file_location({ours.name!r}, {ours.origin!r}); "
        "m = u.module_from_spec(s); s.loader.exec_module(m)\n"
    )
    (packages / "unimem.pth").write_text(load)
