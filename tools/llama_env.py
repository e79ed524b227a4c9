"""Build an environment with llama.cpp's servers and bindings: 1 GB; the binding is compiled.

    .venv/bin/python tools/llama_env.py FOLDER

``FOLDER`` gets `xllamacpp`, which has llama-server, and llama-cpp-python, which is compiled from
its sources in some minutes. The tests look for ``build/llama``, or for LLAMA_PYTHON.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

XLLAMACPP, BINDING = "xllamacpp==2026.10.11549", "llama-cpp-python==0.3.36"


def main(folder: Path) -> None:
    """Build it, unless it is there."""
    mark = folder / f".{XLLAMACPP}-{BINDING}"
    if mark.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, XLLAMACPP, BINDING], check=True)
    mark.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
