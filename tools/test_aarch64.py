"""Compare identities and bytes of chunks on an emulated aarch64: ``tools/test_aarch64.py``.

Python for aarch64 is Debian's, unpacked in build/pythons and never installed, with wheels of NumPy
and xxhash; QEMU runs it as a user program. Ends with status 1 if a chunk differs there, and with 69
if a requirement is not available.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "wheels"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import pythons
from support.files.chunk_vectors import make

ROOT = Path(__file__).parents[1]
VERSION = "3.11"
WHEELS = ("numpy", "xxhash")
UNAVAILABLE = 69


def prepare() -> tuple[Path, Path]:
    """Return a Python for aarch64 and the folder of its wheels; fetch both."""
    python = pythons.executable(VERSION, "aarch64")
    wheels = pythons.CACHE / "wheels-aarch64"
    if not wheels.exists():
        options = ["--python-version", VERSION, "--implementation", "cp", "--only-binary=:all:"]
        for glibc in ("manylinux_2_28_aarch64", "manylinux2014_aarch64"):
            options += ["--platform", glibc]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *options]
        if subprocess.run([*pip, "--target", wheels, *WHEELS], check=False).returncode != 0:
            raise pythons.UnavailableError(
                f"pip has no wheels of {' and '.join(WHEELS)} for aarch64"
            )
    return python, wheels


def main() -> int:
    """Compare, and print how many chunks are the same."""
    try:
        python, wheels = prepare()
    except pythons.UnavailableError as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE
    answer = subprocess.run(
        [python, ROOT / "tests/support/files/chunk_vectors.py", ROOT / "src/unimem"],
        env={"PYTHONPATH": str(wheels), "PYTHONHASHSEED": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        print(answer.stderr, file=sys.stderr)
        return 1
    here, there = make(), json.loads(answer.stdout)
    if here != there:
        print(f"here: {here}\non aarch64: {there}", file=sys.stderr)
        return 1
    print(f"{sum(map(len, there.values()))} hashes are the same on aarch64")
    return 0


if __name__ == "__main__":
    sys.exit(main())
