"""Identities and bytes of chunks on an emulated aarch64: ``make test-aarch64``.

Python and its libraries for aarch64 are Debian's packages, unpacked in build/aarch64 and never
installed, with wheels of NumPy and xxhash; QEMU runs them, as a program of this user. Ends with
status 1 where a chunk is another one there, and with 69 where what it needs cannot be had.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from apt_packages import UnavailableError, apt
from chunk_vectors import make

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "build/aarch64"
QEMU = "qemu-user-static"
WHEELS = ("numpy", "xxhash")
UNAVAILABLE = 69


def options() -> list[str]:
    """Return options of apt for packages of aarch64, with lists of their own."""
    state = CACHE / "apt"
    for folder in (state / "lists/partial", state / "archives/partial"):
        folder.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    found = {
        **{"APT::Architecture": "arm64", "APT::Architectures": "arm64"},
        **{"Dir::State": state, "Dir::State::status": state / "status", "Dir::Cache": state},
    }
    return [part for name, value in found.items() for part in ("-o", f"{name}={value}")]


def packages(*names: str) -> list[str]:
    """List packages of aarch64 and all that they depend on."""
    command = ["apt-cache", *options(), "depends", "--recurse", "--important", *names]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return sorted(set(re.findall(r"^([a-z0-9][a-z0-9.+-]+)$", answer.stdout, re.M)))


def unpack(names: list[str], how: list[str], root: Path) -> None:
    """Fetch packages and unpack them below a folder."""
    fetched = CACHE / "fetched"
    shutil.rmtree(fetched, ignore_errors=True)
    fetched.mkdir(parents=True)
    before = os.getcwd()
    os.chdir(fetched)  # apt-get downloads to where it is
    try:
        apt(*how, "download", *names)
    finally:
        os.chdir(before)
    for archive in sorted(fetched.glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", archive, root], check=True)


def prepare() -> tuple[Path, Path, Path]:
    """Return QEMU, the root of aarch64 and the folder of its wheels; fetch what is missing."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise UnavailableError("it takes Python for aarch64 from Debian's packages: no apt-get")
    host, root, wheels = CACHE / "host", CACHE / "root", CACHE / "wheels"
    qemu = host / "usr/bin/qemu-aarch64-static"
    if not (CACHE / ".done").exists():
        apt("update")
        unpack([QEMU], [], host)
        apt(*options(), "update")
        unpack(packages("python3", "libstdc++6"), options(), root)
        (python,) = (root / "usr/bin").glob("python3.[0-9]*[0-9]")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(wheels)]
        command += ["--python-version", python.name.removeprefix("python")]
        command += ["--only-binary=:all:", "--no-deps", "--implementation", "cp", "--upgrade"]
        for glibc in ("manylinux_2_28_aarch64", "manylinux2014_aarch64"):
            command += ["--platform", glibc]
        if subprocess.run([*command, *WHEELS], check=False).returncode != 0:
            raise UnavailableError(f"pip has no wheels of {' and '.join(WHEELS)} for aarch64")
        (CACHE / ".done").touch()
    return qemu, root, wheels


def main() -> int:
    """Compare, and print how many chunks are the same."""
    try:
        qemu, root, wheels = prepare()
    except UnavailableError as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE
    (python,) = (root / "usr/bin").glob("python3.[0-9]*[0-9]")
    script = ROOT / "tests/support/chunk_vectors.py"
    answer = subprocess.run(
        [qemu, "-L", root, python, script, ROOT / "src/unimem"],
        env={"PYTHONPATH": str(wheels), "PYTHONHASHSEED": "3", "PYTHONHOME": str(root / "usr")},
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
