"""Compilers whose modules run on every Linux with glibc 2.28, as toolchain files for CMake."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

from pythons import Packages, UnavailableError

GLIBC = "2.28"
# The oldest available release. Its glibc is 2.31, but what is made uses nothing that 2.28 lacks, as
# auditwheel confirms for each wheel.
RELEASE = "bullseye"
NEEDED = ["libc6", "libc6-dev", "libgcc-s1", "libstdc++-10-dev", "linux-libc-dev"]

COMMON = """\
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR {machine})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
# Without symbols for debuggers: strip knows modules of its own machine only.
foreach(kind EXE SHARED MODULE)
  set(CMAKE_${{kind}}_LINKER_FLAGS_INIT "-s {options}")
endforeach()
"""
# The C++ library of this machine asks for a newer libc, so the old one goes into what is made.
GCC = """\
set(CMAKE_C_COMPILER {gcc})
set(CMAKE_CXX_COMPILER {gxx})
set(CMAKE_SYSROOT {sysroot})
set(CMAKE_C_FLAGS_INIT "-include {old}")
set(CMAKE_CXX_FLAGS_INIT "-include {old} -nostdinc++ -isystem {sysroot}/usr/include/c++/10 \
-isystem {sysroot}/usr/include/{triple}/c++/10")
"""
# These functions got new versions in glibc 2.29, which differ in errno only.
RENEWED = ("exp", "exp2", "log", "log2", "pow")
OLD = '__asm__(".symver {name},{name}@GLIBC_2.2.5");\n'
# gcc looks beside itself first, where the libraries of this machine are.
LINK = (
    "-B{sysroot}/usr/lib/{triple} -L{sysroot}/usr/lib/gcc/{triple}/10 -L{sysroot}/usr/lib/{triple} "
    "-L{sysroot}/lib/{triple} -static-libstdc++ -static-libgcc"
)
ZIG = """\
set(CMAKE_C_COMPILER {folder}/cc)
set(CMAKE_CXX_COMPILER {folder}/c++)
"""
# zig has other names for levels of ARM: -mcpu=generic+v8_2a+fullfp16 is -march=armv8.2-a+fp16.
SCRIPT = """\
#!/bin/sh
for each; do
  shift
  case $each in
    -march=armv*) each=$(echo "$each" | sed \
      's/-march=armv/-mcpu=generic+v/; s/\\./_/; s/-a/a/; s/+fp16/+fullfp16/') ;;
  esac
  set -- "$@" "$each"
done
exec {zig} {language} -target {machine}-linux-gnu.{glibc} "$@"
"""


def toolchain(machine: str, folder: Path, zig: Path) -> Path:
    """Write the toolchain file for a machine: gcc with an old libc for x86-64, else zig."""
    if machine == "x86_64":
        names = {"sysroot": _sysroot(folder), "triple": "x86_64-linux-gnu"}
        old = folder / "old_libm.h"
        old.write_text("".join(OLD.format(name=name) for name in RENEWED))
        own = GCC.format(gcc=_compiler("gcc"), gxx=_compiler("g++"), old=old, **names)
        options = LINK.format(**names)
    else:
        own, options = ZIG.format(folder=cross_compilers(machine, folder, zig)), ""
    path = folder / f"{machine}.cmake"
    path.write_text(COMMON.format(machine=machine, options=options) + own)
    return path


def cross_compilers(machine: str, folder: Path, zig: Path) -> Path:
    """Return a folder of compilers for another machine, by the names that tests use."""
    found = folder / f"compilers-{machine}"
    found.mkdir(exist_ok=True)
    for language in ("cc", "c++"):
        script = found / language
        script.write_text(SCRIPT.format(zig=zig, language=language, machine=machine, glibc=GLIBC))
        script.chmod(0o755)
    return found


def _compiler(name: str) -> str:
    found = shutil.which(name)
    if platform.machine() != "x86_64" or found is None:
        raise UnavailableError(
            f"wheels for x86-64 are compiled by {name} on x86-64, which is not here"
        )
    return found


def _sysroot(folder: Path) -> Path:
    root = folder / "sysroot"
    if not root.exists():
        half = folder / "sysroot.half"
        shutil.rmtree(half, ignore_errors=True)
        packages = Packages(folder / f"lists-{RELEASE}", "amd64", RELEASE)
        packages.unpack(NEEDED, half)
        half.rename(root)
    return root
