"""Test the memory layer on a Python without the interpreter's lock.

The Python is that of ``--python``, or built in build/free-threaded on the first run from Debian's
source, configured with --disable-gil: ten minutes on two cores. unimem is built for it, every
module is imported, and the tests of the memory layer run there, then again in several threads at
once, by pytest-run-parallel. ``--here`` only runs the latter, for more folders, on the running
Python.

Ends with status 1 if something fails, and with 69 if a requirement is not available.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.project.apt_packages import UnavailableError, apt

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "build/free-threaded"
# NumPy has wheels for a 3.13 without the lock; Debian 13 has the source.
SOURCE, SUITE = "python3.13", "trixie"
UNAVAILABLE = 69

BUILDERS = ("scikit-build-core>=0.11", "cython==3.3.1", "numpy>=2", "cmake", "ninja")
NEEDED = ("ml_dtypes", "psutil", "xxhash")
TESTERS = ("pytest>=8,<9.2", "pytest-timeout", "hypothesis", "jsonschema", "pytest-run-parallel")
# Packages that some tests need; without them the tests are skipped, and say so.
WANTED = ("gguf", "safetensors", "fsspec")

# Folders tested in several threads; tests/support/project/in_threads.py keeps some tests in one.
TESTED = ("tests/_core", "tests/kv", "tests/buffers")
# Folders tested in several threads on this Python, which has the extras.
TESTED_HERE = (*TESTED, "tests/weights", "tests/accounting", "tests/system")
THREADS = 4

IMPORTS = """
import importlib, pkgutil, sys
import unimem
failed = []
for module in pkgutil.walk_packages(unimem.__path__, "unimem."):
    if module.name == "unimem.__main__":
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:  # of an extra that is not installed
        failed.append(f"{module.name}: {error}")
    if sys._is_gil_enabled():
        sys.exit(f"{module.name} turned the interpreter's lock on")
compiled = [n for n, m in sys.modules.items()
            if n.startswith("unimem.") and (getattr(m, "__file__", None) or "").endswith(".so")]
print(f"{len(compiled)} compiled modules run without the lock")
for line in failed:
    print("not imported:", line)
sys.exit(len(compiled) == 0)
"""


def run(command: Sequence[str | Path], **options: Any) -> None:
    """Run a command, and raise if it fails."""
    subprocess.run([str(part) for part in command], check=True, **options)


# ---- the interpreter ----


def is_free_threaded(python: str | Path) -> bool:
    """Say whether a program is a Python that can run without its lock."""
    script = "import sys, sysconfig; sys.exit(not sysconfig.get_config_var('Py_GIL_DISABLED'))"
    try:
        return subprocess.run([python, "-c", script], check=False).returncode == 0
    except OSError:
        return False


def debian_sources() -> str:
    """Return a line for apt with the sources of the suite, from this machine's mirror."""
    texts = [
        path.read_text()
        for path in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*"))
        if path.is_file()
    ]
    for text in texts:
        found = re.search(r"^(?:URIs:|deb(?: \[.*?\])?)\s+(\S+/debian)/?(?:\s|$)", text, re.M)
        if found:
            key = "/usr/share/keyrings/debian-archive-keyring.gpg"
            return f"deb-src [signed-by={key}] {found[1]} {SUITE} main\n"
    raise UnavailableError("it takes Python's source from Debian, and here is no Debian's apt")


def fetch_source() -> Path:
    """Fetch and unpack the source; return its folder."""
    if shutil.which("apt-get") is None:
        raise UnavailableError("it takes Python's source from Debian, and here is no apt-get")
    state = CACHE / "apt"
    for folder in (state / "lists/partial", state / "archives/partial"):
        folder.mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    (state / "sources.list").write_text(debian_sources())
    places = {
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": "-",
    }
    options = [part for name, value in places.items() for part in ("-o", f"{name}={value}")]
    apt(*options, "update")
    fetched = CACHE / "source"
    shutil.rmtree(fetched, ignore_errors=True)
    fetched.mkdir(parents=True)
    before = os.getcwd()
    os.chdir(fetched)  # apt-get downloads to the working directory
    try:
        apt(*options, "source", "--download-only", "--tar-only", SOURCE)
    finally:
        os.chdir(before)
    (archive,) = fetched.glob("*.orig.tar.*")
    with tarfile.open(archive) as packed:
        packed.extractall(fetched, filter="data")
    (folder,) = (path for path in fetched.iterdir() if path.is_dir())
    return folder


def build_python() -> Path:
    """Return a Python without the lock; build it if it is missing."""
    prefix = CACHE / "python"
    python = prefix / "bin" / SOURCE
    if is_free_threaded(python):
        return python
    for tool in ("cc", "make"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"building Python takes {tool}, which is not here")
    source = fetch_source()
    print(f"building {source.name} without the interpreter's lock: some minutes", flush=True)
    log = CACHE / "build.log"
    steps = (
        ["./configure", "--disable-gil", "--disable-test-modules", f"--prefix={prefix}", "-q"],
        ["make", "-s", f"-j{len(os.sched_getaffinity(0))}"],
        ["make", "-s", "install"],
    )
    with log.open("w") as out:
        for step in steps:
            try:
                run(step, cwd=source, stdout=out, stderr=subprocess.STDOUT)
            except subprocess.CalledProcessError as error:
                raise UnavailableError(f"{' '.join(step)} failed: see {log}") from error
    shutil.rmtree(source)
    return python


# ---- what runs on it ----


def environment(python: Path) -> tuple[Path, dict[str, str]]:
    """Return a Python of an environment with unimem, and the variables to run it with."""
    venv, site = CACHE / "venv", CACHE / "site"
    inside = venv / "bin/python"
    # If the newest version has no wheel for this Python, an older one is taken.
    pip = [str(inside), "-m", "pip", "install", "--quiet", "--prefer-binary"]
    if not (venv / ".done").exists():
        run([python, "-m", "venv", "--clear", venv])
        try:
            run([*pip, *BUILDERS, *NEEDED, *TESTERS])
        except subprocess.CalledProcessError as error:
            raise UnavailableError("pip cannot install what the tests need") from error
        for package in WANTED:
            if subprocess.run([*pip, package], check=False).returncode != 0:
                print(f"*** {package} cannot be had: its tests will be SKIPPED", file=sys.stderr)
        (venv / ".done").touch()
    shutil.rmtree(site, ignore_errors=True)
    path = f"{venv / 'bin'}:{os.environ['PATH']}"
    build = ["--target", str(site), ".", "-C", f"build-dir={CACHE / 'build'}"]
    run(
        [*pip, "--no-build-isolation", "--no-deps", *build],
        cwd=ROOT,
        env=os.environ | {"PATH": path},
    )
    variables = os.environ | {"PATH": path, "PYTHONPATH": str(site)}
    variables.pop("PYTHON_GIL", None)  # only the modules keep the lock off
    return inside, variables


def pytest(python: Path, variables: dict[str, str], *arguments: str) -> bool:
    """Run tests, and say whether all passed."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600"]
    answer = subprocess.run([*command, *arguments], cwd=ROOT, env=variables, check=False)
    return answer.returncode == 0


def parallel(python: Path, variables: dict[str, str], folders: Sequence[str]) -> bool:
    """Run tests that make objects of their own, each in several threads at once."""
    options = (f"--parallel-threads={THREADS}", "--skip-thread-unsafe=true")
    return pytest(python, variables, *options, *folders)


def main() -> int:
    """Run the requested tests."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--python", type=Path, help="a Python that can run without its lock")
    parser.add_argument("--here", action="store_true", help="only in threads, on this Python")
    asked = parser.parse_args()
    if asked.here:
        return int(not parallel(Path(sys.executable), dict(os.environ), TESTED_HERE))
    try:
        if asked.python is not None and not is_free_threaded(asked.python):
            parser.error(f"{asked.python} cannot run without the interpreter's lock")
        python, variables = environment(asked.python or build_python())
    except UnavailableError as error:
        print(f"*** SKIPPED: {error}", file=sys.stderr)
        return UNAVAILABLE
    run([python, "-c", IMPORTS], env=variables, cwd=CACHE)
    whole = pytest(python, variables, *TESTED)
    return int(not (parallel(python, variables, TESTED) and whole))


if __name__ == "__main__":
    sys.exit(main())
