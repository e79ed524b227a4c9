"""llama.cpp, built from the pinned sources of ``ggml/`` for this CPU: what the suites compare with.

``python -m unimem_bench.llama_build`` builds it, which takes some minutes, and prints the library's
path. It is kept below ``build/peer`` in the repository, in a folder named by the sources, the CPU
and the way to build. ``--portable`` builds it as wheels are: for any x86 with AVX2, or any Arm.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

Variant = Literal["native", "portable"]

ROOT = Path(__file__).resolve().parents[2]
# Programs that pip has installed lie beside Python.
PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
COMMAND = "python -m unimem_bench.llama_build"
_TAIL_LINES = 12  # of a build that failed


class NoPeer(Exception):  # noqa: N818 - it is an answer
    """There is no llama.cpp to compare with; the text says what to do."""


def library(variant: Variant = "native", *, build: bool = False) -> Path:
    """Return the built library, and build it if it is missing and `build` says so.

    NoPeer if it is missing and cannot be built, or is not to be.
    """
    sources = ROOT / "bench/peer"
    if not sources.is_dir():
        raise NoPeer(f"wants unimem's repository, whose bench/peer builds it; {ROOT} is none")
    folder = ROOT / "build/peer" / _key(sources, variant)
    built = folder / "libunimem-peer.so"
    stamp = folder / ".built"
    if stamp.exists():
        return built
    if not build:
        option = "" if variant == "native" else f" --{variant}"
        raise NoPeer(f"not built on this machine: '{COMMAND}{option}' builds it in some minutes")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            _build(sources, folder, variant)
            stamp.write_text(
                _run([sys.executable, "-P", "-m", "unimem_bench.llama_cpp", str(built)])
            )
    return built


def facts(library: Path) -> dict[str, Any]:
    """Return the versions of a built library, and the CPU features that it was built with."""
    found: dict[str, Any] = json.loads((library.parent / ".built").read_text())
    return found


def _build(sources: Path, folder: Path, variant: Variant) -> None:
    fetch = _fetch()
    sys.stderr.write(f"building llama.cpp ({variant}), which is kept in {folder}\n")
    try:
        unpacked = fetch.unpack(
            fetch.cache() / f"llama-{fetch.pinned()['sha256'][:16]}", llama=True
        )
    except (OSError, SystemExit) as error:
        raise NoPeer(f"its sources cannot be had: {error}") from None
    ccache = shutil.which("ccache", path=PROGRAMS)
    configure = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DLLAMA_SOURCE={unpacked}"]
    configure.append(f"-DLLAMA_NAME={fetch.pinned()['llama_cpp']}")
    configure.append(f"-DGGML_NATIVE={'ON' if variant == 'native' else 'OFF'}")
    configure += [f"-DCMAKE_{kind}_COMPILER_LAUNCHER={ccache}" for kind in ("C", "CXX") if ccache]
    for words in (
        ["-S", str(sources), "-B", str(folder), *configure],
        ["--build", str(folder), "--target", "unimem-peer"],
    ):
        _run(["nice", "-n", "5", "cmake", *words])


def _run(words: list[str]) -> str:
    """Run a command, and return what it prints; NoPeer if it fails."""
    environment = os.environ | {"PATH": PROGRAMS}
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    except OSError as error:
        raise NoPeer(f"{words[0]} cannot be started: {error}") from None
    if done.returncode:
        tail = "\n".join(f"{done.stdout}\n{done.stderr}".splitlines()[-_TAIL_LINES:])
        raise NoPeer(f"'{' '.join(words)}' fails with status {done.returncode}: {tail}")
    return done.stdout


def _key(sources: Path, variant: Variant) -> str:
    """Name a build by what it is made of: the sources, how they are built, and this CPU."""
    digest = hashlib.sha256(variant.encode())
    for path in (ROOT / "ggml/source.json", *sorted(sources.iterdir())):
        digest.update(path.read_bytes())
    digest.update(_cpu_flags().encode())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    """Return the features of the first CPU, as the kernel names them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return value.strip()
    return os.uname().machine


def _fetch() -> ModuleType:
    """Import ``ggml/fetch.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location("unimem_ggml_fetch", ROOT / "ggml/fetch.py")
    if spec is None or spec.loader is None:
        raise NoPeer(f"{ROOT}/ggml/fetch.py cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Build it, and print where it is."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--portable", action="store_true", help="as wheels are built")
    options = parser.parse_args()
    try:
        found = library("portable" if options.portable else "native", build=True)
    except NoPeer as error:
        raise SystemExit(f"llama.cpp: {error}") from None
    sys.stdout.write(f"{found}\n")


if __name__ == "__main__":
    main()
