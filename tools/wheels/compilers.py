"""Compilers whose modules run on every Linux with glibc 2.28, as toolchain files for CMake."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

from pythons import Packages, UnavailableError

GLIBC = "2.28"
# The oldest available release. Its glibc is 2.31, but unimem uses nothing that 2.28 lacks, as
# auditwheel confirms for each wheel.
RELEASE = "bullseye"

COMMON = """\
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR {machine})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# Without symbols for debuggers: strip knows modules of its own machine only.
foreach(kind EXE SHARED MODULE)
  set(CMAKE_${{kind}}_LINKER_FLAGS_INIT "-s {options}")
endforeach()
"""
GCC = """\
set(CMAKE_C_COMPILER {gcc})
set(CMAKE_SYSROOT {sysroot})
"""
# gcc looks beside itself first, where the libc of this machine is.
LINK = "-B{sysroot}/usr/lib/{triple} -L{sysroot}/usr/lib/{triple} -L{sysroot}/lib/{triple}"
ZIG = """\
set(CMAKE_C_COMPILER {zig} cc)
set(CMAKE_C_COMPILER_TARGET {machine}-linux-gnu.{glibc})
"""


def toolchain(machine: str, folder: Path, zig: Path) -> Path:
    """Write the toolchain file for a machine: gcc with an old libc for x86-64, else zig."""
    if machine == "x86_64":
        gcc, sysroot = _gcc(), _sysroot(folder)
        own = GCC.format(gcc=gcc, sysroot=sysroot)
        options = LINK.format(sysroot=sysroot, triple="x86_64-linux-gnu")
    else:
        own, options = ZIG.format(zig=zig, machine=machine, glibc=GLIBC), ""
    path = folder / f"{machine}.cmake"
    path.write_text(COMMON.format(machine=machine, options=options) + own)
    return path


def _gcc() -> str:
    found = shutil.which("gcc")
    if platform.machine() != "x86_64" or found is None:
        raise UnavailableError("wheels for x86-64 are compiled by gcc on x86-64, which is not here")
    return found


def _sysroot(folder: Path) -> Path:
    root = folder / "sysroot"
    if not root.exists():
        half = folder / "sysroot.half"
        shutil.rmtree(half, ignore_errors=True)
        packages = Packages(folder / f"lists-{RELEASE}", "amd64", RELEASE)
        packages.unpack(["libc6", "libc6-dev", "libgcc-s1", "linux-libc-dev"], half)
        half.rename(root)
    return root
