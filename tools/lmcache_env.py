"""Build an environment with LMCache and SGLang's definitions on CPUs: 1.7 GB, 2 minutes.

    .venv/bin/python tools/lmcache_env.py FOLDER

``FOLDER`` gets LMCache without what only GPUs need, torch's CPU build, pytest, this checkout's
unimem, and the definitions from SGLang's wheel. The packages above those are empty here, since
SGLang's own import hundreds of others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

LMCACHE, SGLANG = "lmcache==0.5.6", "sglang==0.5.23"
TORCH = "torch==2.13.0+cpu"
# torch's CPU build is in this index, unless pip is configured with another place for it.
TORCH_INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
FOR_GPUS = ("cupy", "cuda-python", "cufile", "nvtx")
FOR_TESTS = ("pytest>=8,<9.2", "hypothesis>=6.100", "xxhash>=3.4")
DEFINITIONS = (
    "sglang/version.py",
    "sglang/_version.py",
    "sglang/srt/environ.py",
    "sglang/srt/mem_cache/hicache_storage.py",
    "sglang/srt/mem_cache/storage/backend_factory.py",
)


def main(folder: Path) -> None:
    """Build it, unless it is there."""
    mark = folder / f".{LMCACHE}-{SGLANG}"
    if mark.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    pip = [str(folder / "bin/python"), "-m", "pip"]
    quiet = ["--quiet", "--no-cache-dir"]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        download = [*pip, "download", *quiet, "--no-deps", "--dest", name, LMCACHE, SGLANG]
        subprocess.run(download, check=True)
        (lmcache,), (sglang,) = Path(name).glob("lmcache*"), Path(name).glob("sglang*")
        wanted = [need for need in requirements(lmcache) if not need.startswith(FOR_GPUS)]
        install = [*pip, "install", *quiet, "--extra-index-url", TORCH_INDEX]
        subprocess.run([*install, TORCH, *FOR_TESTS, *wanted], check=True)
        subprocess.run([*pip, "install", *quiet, "--no-deps", str(lmcache)], check=True)
        with zipfile.ZipFile(sglang) as archive:
            archive.extractall(packages, [*DEFINITIONS])
    share_unimem(packages)
    mark.touch()


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


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
