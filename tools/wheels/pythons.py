"""Pythons that wheels are made for: their headers, and how to run them.

A Python of this machine serves if it has one: on the path, of pyenv, or the one without the
interpreter's lock that `tools/free_threaded.py` built. Otherwise both come from Debian's packages,
unpacked in build/pythons and never installed; QEMU runs those of other machines.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from threading import Lock

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support.project.apt_packages import Packages, UnavailableError

__all__ = [
    "CACHE",
    "Packages",
    "UnavailableError",
    "abi",
    "executable",
    "headers",
    "is_emulated",
    "local",
    "suffix",
]

BUILD = Path(__file__).parents[2] / "build"
CACHE = BUILD / "pythons"
# Debian has one Python in each release.
RELEASES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}
QEMU_RELEASE = "trixie"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
LOADERS = {"x86_64": "lib64/ld-linux-x86-64.so.2", "aarch64": "lib/ld-linux-aarch64.so.1"}
# Wheels for two machines are made at once, of the same files.
_FETCHING = Lock()
ASK = """
import json, sys, sysconfig
threads = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
version = f"{sys.version_info[0]}.{sys.version_info[1]}{threads}"
print(json.dumps([version, sysconfig.get_path("include")]))
"""


def abi(version: str) -> str:
    """Return the tag of a version: ``"cp313t"`` of ``"3.13t"``."""
    return f"cp{version.replace('.', '')}"


def suffix(version: str, machine: str) -> str:
    """Return the end of the names of modules."""
    return f".cpython-{version.replace('.', '')}-{machine}-linux-gnu.so"


def headers(version: str) -> Path:
    """Return the folder with ``Python.h``; UnavailableError if it cannot be had.

    Headers of a version are the same files on both machines, and pyconfig.h has the same sizes.
    Those of a free-threaded Python differ in one line of pyconfig.h.
    """
    with _FETCHING:
        return _headers(version)


def _headers(version: str) -> Path:
    if (found := _local(version)) is not None:
        return found[1]
    if not version.endswith("t"):
        return _headers_of_debian(version)
    with_lock = _headers(version[:-1])
    target = CACHE / f"headers-{version}"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(with_lock, target)
    with (target / "pyconfig.h").open("a") as file:
        file.write("\n#undef Py_GIL_DISABLED\n#define Py_GIL_DISABLED 1\n")
    return target


def executable(version: str, machine: str) -> Path:
    """Return the program that runs a Python here; UnavailableError if it cannot be had.

    Debian's is behind a script that starts it, with its own libraries, or by QEMU, so that tests
    start it by its path like any Python.
    """
    if (found := local(version, machine)) is not None:
        return found
    with _FETCHING:
        return _script(version, machine)


def _script(version: str, machine: str) -> Path:
    root = _debian(version, machine)
    python = root / f"usr/bin/python{version}"
    include = root / f"usr/include/python{version}"  # for what tests compile
    if not include.exists():
        include.parent.mkdir(parents=True, exist_ok=True)
        include.symlink_to(_headers(version))
    if machine == platform.machine():  # a newer libc than the one of this machine
        libraries = ":".join(
            str(root / f"{each}/{machine}-linux-gnu") for each in ("usr/lib", "lib")
        )
        start = f'{root / LOADERS[machine]} --library-path {libraries} --argv0 "$0"'
    else:
        start = f'{_emulator(machine)} -L {root} -0 "$0"'
    script = root / "usr/bin/started-python"  # beside Python, which finds its library from there
    text = f'#!/bin/sh\nexec {start} {python} "$@"\n'
    if not script.exists() or script.read_text() != text:
        script.write_text(text)
        script.chmod(0o755)
    return script


def local(version: str, machine: str) -> Path | None:
    """Return a Python of this machine; None if it has none for such a machine."""
    found = _local(version) if machine == platform.machine() else None
    return None if found is None else Path(found[0])


def is_emulated(machine: str) -> bool:
    """Say whether binaries for a machine run under QEMU here."""
    return machine != platform.machine()


def _candidates(version: str) -> Iterator[str]:
    """Yield where a Python of this machine may be."""
    found = shutil.which(f"python{version}")
    if found is not None:
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    number = version.removesuffix("t")
    yield from map(str, sorted(pyenv.glob(f"versions/{number}.*/bin/python{version}")))
    yield str(BUILD / f"free-threaded/python/bin/python{version}")


@cache
def _local(version: str) -> tuple[str, Path] | None:
    """Return a Python of this machine and the folder of its headers."""
    for path in filter(os.path.exists, _candidates(version)):
        # pyenv's names on the path end with an error where no version is chosen.
        answer = subprocess.run([path, "-c", ASK], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            found, folder = json.loads(answer.stdout)
            if found == version and (Path(folder) / "Python.h").exists():
                return path, Path(folder)
    return None


def _release(version: str) -> str:
    if version not in RELEASES:
        raise UnavailableError(f"no Python {version} on this machine, and none in Debian")
    return RELEASES[version]


def _headers_of_debian(version: str) -> Path:
    """Fetch the headers of a Python. Debian's pyconfig.h includes the machine's."""
    release, target = _release(version), CACHE / f"headers-{version}"
    if not target.exists():
        root = CACHE / f"dev-{version}"
        packages = Packages(CACHE / f"lists-{release}-amd64", "amd64", release)
        packages.unpack([f"libpython{version}-dev"], root)
        folder = root / "usr/include"
        shutil.copy(
            folder / f"x86_64-linux-gnu/python{version}/pyconfig.h",
            folder / f"python{version}/pyconfig.h",
        )
        (folder / f"python{version}").rename(target)
    return target


def _debian(version: str, machine: str) -> Path:
    """Fetch a Python of Debian's with its dependencies; return its root."""
    release, root = _release(version), CACHE / f"root-{version}-{machine}"
    if not root.exists():
        architecture = ARCHITECTURES[machine]
        packages = Packages(CACHE / f"lists-{release}-{architecture}", architecture, release)
        half = root.with_suffix(".half")
        shutil.rmtree(half, ignore_errors=True)
        for name in ("lib", "lib64"):  # as an installed Debian has them since 2023
            (half / "usr" / name).mkdir(parents=True)
            (half / name).symlink_to(f"usr/{name}")
        packages.unpack(packages.needed_by(f"python{version}", "libstdc++6"), half)
        half.rename(root)
    return root


def _emulator(machine: str) -> Path:
    """Fetch QEMU, as a user program without libraries.

    Version 8 and newer: older ones keep a record of each page of reserved address space.
    """
    target = CACHE / f"qemu-{QEMU_RELEASE}"
    found = target / f"usr/bin/qemu-{machine}"
    if not found.exists():
        own = ARCHITECTURES.get(platform.machine(), platform.machine())
        packages = Packages(CACHE / f"lists-{QEMU_RELEASE}-{own}", own, QEMU_RELEASE)
        packages.unpack(["qemu-user"], target)
    return found
