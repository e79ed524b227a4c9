"""Build an environment with LMCache and SGLang's definitions on CPUs: 1.7 GB, 2 minutes.

    .venv/bin/python tools/lmcache_env.py FOLDER

``FOLDER`` gets LMCache without what only GPUs need, torch's CPU build, pytest, this checkout's
unimem, and the definitions from SGLang's wheel. The packages above those are empty here, since
SGLang's own import hundreds of others.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from environments import TORCH_INDEX, requirements, share_unimem

LMCACHE, SGLANG = "lmcache==0.5.6", "sglang==0.5.23"
TORCH = "torch==2.13.0+cpu"
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


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
