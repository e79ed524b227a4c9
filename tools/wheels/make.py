"""Build wheels and try each in an empty environment: ``make wheels``.

The wheels run on every Linux since 2018. Compilers and Pythons come from PyPI and from Debian's
packages; there is no container engine, and nothing is installed outside of build/. Wheels and the
sdist go to dist/. Unavailable parts are skipped, and the table says why. Ends with status 1 if a
wheel fails, and with 69 if none can be built.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pythons
from compilers import GLIBC, cross_compilers, toolchain
from pythons import UnavailableError

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/wheels"
DIST = ROOT / "dist"
VERSIONS = ("3.11", "3.12", "3.13", "3.13t", "3.14", "3.14t")
MACHINES = ("x86_64", "aarch64")
# Packages that [build-system] does not name.
TOOLS = ("cmake>=3.24", "ninja>=1.11", "auditwheel>=6", "ziglang>=0.13")
SDIST = "from scikit_build_core.build import build_sdist; print(build_sdist({folder!r}))"
TESTED = ("tests/_core", "tests/kv")
# Tests that ask the kernel are left out: QEMU answers for it.
NOT_EMULATED = Path(__file__).with_name("not_emulated.txt")
UNAVAILABLE = 69
GLIBC_MINOR = int(GLIBC.split(".")[1])


class FailedError(Exception):
    """A bad wheel; the message says why."""


@dataclass
class Row:
    """A wheel, as the table shows it."""

    name: str
    size: str = ""
    glibc: str = ""
    smoke: str = ""
    code: str = ""
    tests: str = ""
    failed: bool = False


def run(*command: str | Path, **environment: str) -> str:
    """Run a command; return its output, or raise FailedError."""
    # The environment must not find the checkout.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=ROOT, env=own | environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        text = f"{done.stdout}\n{done.stderr}".strip()
        raise FailedError(
            f"{' '.join(map(str, command[:4]))}… ended with {done.returncode}:\n{text}"
        )
    return done.stdout


def install_tools() -> Path:
    """Make the environment that builds; return its folder of programs."""
    programs = BUILD / "tools/bin"
    if not (BUILD / "tools/.done").exists():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        run(sys.executable, "-m", "venv", BUILD / "tools")
        needs = [*project["build-system"]["requires"], *TOOLS]
        run(programs / "pip", "install", "--quiet", *needs)
        (BUILD / "tools/.done").touch()
    return programs


def zig() -> Path:
    """Return the compiler for other machines."""
    return next((BUILD / "tools/lib").glob("python*/site-packages/ziglang/zig"))


def is_stable(version: str) -> bool:
    """Return whether a Python loads modules of older ones: it has the interpreter's lock."""
    return not version.endswith("t")


def build(version: str, machine: str, programs: Path, *, engine: bool = False) -> Path:
    """Build one wheel in the folder of its machine, where only modules are compiled again."""
    tag = pythons.abi(version)
    abi = "abi3" if engine and is_stable(version) else tag
    name = f"{tag.removesuffix('t')}-{abi}-manylinux_{GLIBC.replace('.', '_')}_{machine}"
    settings = {
        "build-dir": BUILD / (f"{machine}-ggml" if engine else machine),
        "wheel.tags": name,
        "install.strip": "false",
        "cmake.define.CMAKE_TOOLCHAIN_FILE": toolchain(machine, BUILD, zig()),
        "cmake.define.Python_INCLUDE_DIR": pythons.headers(version),
    }
    if engine:
        settings["cmake.define.UNIMEM_GGML_VARIANTS"] = "ON"
        settings["wheel.py-api"] = tag if is_stable(version) else ""
    options = [word for key, value in settings.items() for word in ("-C", f"{key}={value}")]
    run(
        programs / "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        DIST,
        *options,
        "./ggml" if engine else ".",
        PATH=f"{programs}:{os.environ['PATH']}",
        SETUPTOOLS_EXT_SUFFIX=pythons.suffix(version, machine),
    )
    (wheel,) = DIST.glob(f"{'unimem_ggml' if engine else 'unimem_llm'}-*-{name}.whl")
    return wheel


def judge(wheel: Path, programs: Path) -> str:
    """Return the oldest glibc that suffices for a wheel, by auditwheel."""
    text = run(programs / "auditwheel", "show", wheel)
    found = re.search(r'following platform tag:\s*"manylinux_2_(\d+)_', text)
    if found is None or int(found[1]) > GLIBC_MINOR:
        raise FailedError(f"auditwheel does not find {wheel.name} to be what it says:\n{text}")
    return f"2.{found[1]}"


def install(
    target: Path, wheel: Path, version: str, machine: str, programs: Path, *needs: str
) -> None:
    """Install a wheel and its dependencies into an empty folder, for any Python."""
    shutil.rmtree(target, ignore_errors=True)
    options = ["--quiet", "--no-compile", f"--target={target}"]
    if (python := pythons.local(version, machine)) is not None:
        # If the newest version has no wheel for this Python, an older one is taken.
        run(python, "-m", "pip", "install", "--prefer-binary", *options, wheel, *needs)
        return
    options += ["--only-binary=:all:", "--implementation=cp", f"--abi={pythons.abi(version)}"]
    options += [f"--python-version={version.removesuffix('t')}"]
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC_MINOR, 16, -1)]
    options += [f"--platform={each}" for each in (*platforms, f"manylinux2014_{machine}")]
    run(programs / "pip", "install", *options, wheel, *needs)


def smoke(version: str, machine: str, target: Path) -> tuple[str, str]:
    """Use the installed wheel; return the Python that ran, and the vector code that it chose."""
    python = pythons.executable(version, machine)
    found = json.loads(run(python, "-I", "-S", Path(__file__).parent / "smoke.py", target))
    how = ", emulated" if pythons.is_emulated(machine) else ""
    how += ", its lock off" if found["lock"] == "off" else ""
    return f"passed ({found['python']}{how})", found["code"]


def try_engine(version: str, machine: str, target: Path) -> tuple[str, str]:
    """Compute with ggml's installed wheel; return the Python that ran, and the chosen build."""
    python = pythons.executable(version, machine)
    found = json.loads(run(python, "-I", "-S", Path(__file__).parent / "smoke_ggml.py", target))
    how = ", emulated" if pythons.is_emulated(machine) else ""
    return f"{found['python']}{how}", found["build"]


def test(wheel: Path, version: str, machine: str, programs: Path) -> str:
    """Run the tests of the memory layer with the wheel; return their result."""
    target = BUILD / "tested" / wheel.stem
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [
        each
        for each in project["optional-dependencies"]["test"]
        if each.startswith(("pytest", "hypothesis", "cython", "setuptools"))
    ]
    install(target, wheel, version, machine, programs, *needs)
    options = ["-q", "-p", "no:cacheprovider", "--timeout=600"]
    path = os.environ["PATH"]
    if pythons.is_emulated(machine):
        names = NOT_EMULATED.read_text().splitlines()
        options += [f"--deselect={name}" for name in names if not name.startswith("#")]
        path = f"{cross_compilers(machine, BUILD, zig())}:{path}"
    python = pythons.executable(version, machine)
    text = run(python, "-m", "pytest", *options, *TESTED, PYTHONPATH=str(target), PATH=path)
    return text.splitlines()[-1].strip("= ")


@contextmanager
def reported(row: Row) -> Iterator[None]:
    """Build and try a wheel; if that is impossible or fails, its row says so."""
    try:
        yield
    except UnavailableError as error:
        row.smoke = f"SKIPPED: {error}"
    except FailedError as error:
        print(error, file=sys.stderr)
        row.smoke, row.failed = "FAILED: see above", True
    print(f"{row.name}: {row.smoke}", file=sys.stderr, flush=True)


def build_for(
    row: Row, version: str, machine: str, programs: Path, *, engine: bool = False
) -> Path:
    """Build one wheel, and enter it in its row."""
    wheel = build(version, machine, programs, engine=engine)
    row.name, row.size = wheel.name, f"{wheel.stat().st_size / 1e6:.2f} MB"
    row.glibc = judge(wheel, programs)
    return wheel


def make(version: str, machine: str, programs: Path, *, tests: bool) -> Row:
    """Build and try one wheel."""
    row = Row(f"{pythons.abi(version)} {machine}")
    with reported(row):
        wheel = build_for(row, version, machine, programs)
        target = BUILD / "site" / wheel.stem
        install(target, wheel, version, machine, programs)
        row.smoke, row.code = smoke(version, machine, target)
        if tests:
            row.tests = test(wheel, version, machine, programs)
    return row


def make_engine(versions: Sequence[str], machine: str, programs: Path) -> Row:
    """Build ggml's wheel for some Pythons that can share it, and try it with each."""
    row = Row(f"unimem-ggml {pythons.abi(versions[0])} {machine}")
    passed, skipped = [], ""
    with reported(row):
        wheel = build_for(row, versions[0], machine, programs, engine=True)
        for version in versions:
            target = BUILD / "site" / f"{wheel.stem}-{version}"
            try:
                install(target, wheel, version, machine, programs)
                told, row.code = try_engine(version, machine, target)
                passed.append(told)
            except UnavailableError as error:
                skipped = f"SKIPPED: {error}"
        row.smoke = f"passed ({'; '.join(passed)})" if passed else skipped
    return row


def make_all(
    versions: Sequence[str], machine: str, programs: Path, *, tests: bool
) -> Iterator[Row]:
    """Build and try the wheels of a machine. Pythons with the lock share one of ggml."""
    for version in versions:
        yield make(version, machine, programs, tests=tests)
    if stable := [version for version in versions if is_stable(version)]:
        yield make_engine(stable, machine, programs)
    for version in versions:
        if not is_stable(version):
            yield make_engine([version], machine, programs)


def table(rows: list[Row]) -> str:
    """Write the table in Markdown."""
    titles = ("wheel", "size", "glibc", "smoke test", "code", "tests")
    lines = [titles, tuple("---" for _ in titles)]
    lines += [(row.name, row.size, row.glibc, row.smoke, row.code, row.tests) for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> int:
    """Build the requested wheels, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--python", nargs="+", choices=VERSIONS, default=VERSIONS)
    parser.add_argument("--machine", nargs="+", choices=MACHINES, default=MACHINES)
    parser.add_argument(
        "--tests", action="store_true", help="run the tests of the memory layer, too"
    )
    asked = parser.parse_args()
    programs = install_tools()
    DIST.mkdir(exist_ok=True)
    sdist = DIST / run(programs / "python", "-c", SDIST.format(folder=str(DIST))).split()[-1]
    rows = [Row(sdist.name, f"{sdist.stat().st_size / 1e6:.2f} MB")]
    with ThreadPoolExecutor() as pool:  # a folder of builds for each machine
        made = pool.map(
            lambda machine: list(make_all(asked.python, machine, programs, tests=asked.tests)),
            asked.machine,
        )
        rows += [row for of_machine in made for row in of_machine]
    print(table(rows))
    if any(row.failed for row in rows):
        return 1
    return 0 if any(row.code for row in rows) else UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
