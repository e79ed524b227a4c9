"""Build the fuzz targets and run them: `make fuzz`. docs/fuzzing.md says what they do.

Targets run side by side if there are CPUs. Their findings stay in build/fuzz for the next run:
`inputs` has an input for each way through a parser, `broken` those that broke it. --minimize renews
native/fuzz/corpus: the seeds, which the tests attack the parsers with, and the smallest inputs that
take other ways. --record adds the figures to docs/fuzzing.md.

Targets in C are built with clang, twice: with sanitizers, and with fences behind each allocation
(native/fuzz/fences.c), which runs ten times as many inputs. The fences come first. A quarter of the
time is for the sanitizers, which begin with all kept inputs. Missing parts of clang are installed
by apt, by root only. Targets in Python (fuzz_python.py) run under Atheris, which pip puts into
build/fuzz.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build/fuzz"
PAGE = ROOT / "docs/fuzzing.md"
IN_C = ("gguf", "safetensors", "paged", "proc")
IN_PYTHON = ("snapshot", "ledger", "note", "process", "image", "index")
# Targets that use another target's dictionary.
WORDS = {"process": "proc"}
PACKAGES = ("clang", "libclang-rt-dev")
# Modules of the tests that write the seeds.
MODULES = ("gguf", "hypothesis", "numpy", "pytest", "unimem", "xxhash")
# The builds of a target in C: their share of the time, and options of CMake.
FENCES, SANITIZERS, ATHERIS = "fences", "sanitizers", "Atheris"
SHARES = {FENCES: 0.75, SANITIZERS: 0.25}
BUILDS = {
    FENCES: (BUILD / FENCES, "-DUNIMEM_SANITIZE=OFF"),
    SANITIZERS: (BUILD, "-DUNIMEM_SANITIZE=ON"),
}
# Inputs may be larger than the tests', and are smaller than a vocabulary.
MAX_NBYTES = 4096
# A longer program of calls is only slower.
MAX_NBYTES_OF = {"paged": 400}
# The repository has small inputs, which each test run replays.
MAX_KEPT_NBYTES = 2048

UNAVAILABLE = 69  # EX_UNAVAILABLE


class UnavailableError(Exception):
    """The targets cannot be built here; the text says what to do."""


# ---- building ----


def has_fuzzer() -> bool:
    """Say whether clang has libFuzzer and the sanitizers."""
    if shutil.which("clang") is None:
        return False
    target = "int LLVMFuzzerTestOneInput(const char *, unsigned long); "
    target += "int LLVMFuzzerTestOneInput(const char *p, unsigned long n) { return 0 * (p && n); }"
    options = ("-x", "c", "-", "-fsanitize=fuzzer,address,undefined")
    with tempfile.TemporaryDirectory() as folder:
        command = ["clang", *options, "-o", f"{folder}/target"]
        answer = subprocess.run(command, input=target, text=True, capture_output=True, check=False)
    return answer.returncode == 0


def require_modules() -> None:
    """Refuse a Python that cannot write the seeds."""
    missing = [name for name in MODULES if find_spec(name) is None]
    if missing:
        raise UnavailableError(
            f"{sys.executable} has no {', '.join(missing)}, which the seeds need: 'make fuzz' runs "
            "one that has"
        )


def install_clang() -> None:
    """Install clang if it is missing, which only root may do."""
    if has_fuzzer():
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
    if shutil.which("apt-get") is None:
        raise UnavailableError("clang with libFuzzer and its sanitizers must be installed")
    if os.geteuid() != 0:
        raise UnavailableError(
            f"{' and '.join(PACKAGES)} must be installed, by root: {shlex.join(install)}"
        )
    print(f"installing {' and '.join(PACKAGES)}", file=sys.stderr)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], install):
        answer = subprocess.run(
            [*command, "-qq"], env=environment, capture_output=True, text=True, check=False
        )
    if answer.returncode != 0 or not has_fuzzer():
        raise UnavailableError(f"{shlex.join(install)} did not help:\n{answer.stderr.strip()}")


def install_atheris() -> None:
    """Install Atheris into the folder of the builds."""
    if (BUILD / "site/atheris").is_dir():
        return
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    install += ["--target", str(BUILD / "site"), "atheris"]
    answer = subprocess.run(install, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise UnavailableError(f"{shlex.join(install)} failed:\n{answer.stderr.strip()}")


def build(names: Sequence[str]) -> None:
    """Build targets in C."""
    options = ["-DUNIMEM_FUZZ=ON", "-DCMAKE_C_COMPILER=clang", "-DCMAKE_BUILD_TYPE=Debug"]
    options += ["-DCMAKE_C_FLAGS_DEBUG=-O2 -g"]  # with the asserts
    targets = [f"fuzz_{name}" for name in names]
    for place, option in BUILDS.values():
        for command in (
            ["cmake", "-S", str(ROOT), "-B", str(place), "-G", "Ninja", *options, option],
            ["cmake", "--build", str(place), "--target", *targets],
        ):
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def prepare(names: Sequence[str]) -> list[str]:
    """Build targets and write their seeds; return those that can run here, and report the rest."""
    ready: list[str] = []
    for group, install in ((IN_C, install_clang), (IN_PYTHON, install_atheris)):
        wanted = [name for name in names if name in group]
        if not wanted:
            continue
        try:
            install()
        except UnavailableError as error:
            print(f"fuzz.py: no fuzzing of {', '.join(wanted)}: {error}", file=sys.stderr)
            continue
        if group is IN_C:
            build(wanted)
        ready += wanted
    for name in ready:
        seeds = [sys.executable, str(ROOT / "tools/fuzz_seeds.py"), name]
        subprocess.run([*seeds, str(folder("seeds", name))], check=True)
    return ready


# ---- running ----


class Figures(NamedTuple):
    """The figures of a run of a target."""

    name: str
    build: str
    executions: int
    seconds: int
    edges: int

    @property
    def rate(self) -> int:
        """Executions a second."""
        return self.executions // max(self.seconds, 1)


def folder(kind: str, name: str) -> Path:
    """Return a folder of inputs of a target; make it if it is missing."""
    path = BUILD / kind / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def corpus(name: str) -> Path:
    """Return the folder of kept inputs; make it if it is missing."""
    path = ROOT / "native/fuzz/corpus" / name
    path.mkdir(exist_ok=True)
    return path


def target(name: str, build: str, *arguments: object) -> Sequence[str]:
    """Return the command that runs a target."""
    if name in IN_C:
        command = [str(BUILDS[build][0] / f"native/fuzz/fuzz_{name}")]
    else:
        site = f"PYTHONPATH={BUILD / 'site'}:{os.environ.get('PYTHONPATH', '')}"
        command = ["env", site, sys.executable, str(ROOT / "tools/fuzz_python.py"), name]
    options = ["-timeout=10", "-rss_limit_mb=2048", f"-artifact_prefix={folder('broken', name)}/"]
    words = ROOT / f"native/fuzz/{WORDS.get(name, name)}.dict"
    if words.exists():
        options.append(f"-dict={words}")
    return [*command, *options, *map(str, arguments)]


def run(name: str, seconds: int) -> list[Figures] | None:
    """Run a target of a build, and print its figures; None if it broke."""
    if name in IN_PYTHON:
        found = [_run(name, ATHERIS, seconds)]
    else:
        found = [_run(name, build, round(seconds * part)) for build, part in SHARES.items()]
    whole = [figures for figures in found if figures is not None]
    return whole if len(whole) == len(found) else None


def _run(name: str, build: str, seconds: int) -> Figures | None:
    command = target(
        name,
        build,
        f"-max_total_time={max(seconds, 1)}",  # 0 would never end
        f"-max_len={MAX_NBYTES_OF.get(name, MAX_NBYTES)}",
        "-print_final_stats=1",
        folder("inputs", name),
        corpus(name),
        folder("seeds", name),
    )
    log = BUILD / f"{name}.{build}.log"
    with log.open("wb") as output:
        status = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    text = log.read_text(errors="replace")
    done = re.search(r"Done (\d+) runs in (\d+) second", text)
    edges = re.findall(r" cov: (\d+) ", text)
    if status != 0 or done is None or not edges:
        print(f"{name}, {build}: broken; {log} ends:", *text.splitlines()[-40:], sep="\n")
        return None
    figures = Figures(name, build, int(done[1]), int(done[2]), int(edges[-1]))
    print(
        f"{name}, {build}: {figures.executions:,} executions in {figures.seconds} s "
        f"({figures.rate:,}/s), {figures.edges} edges, nothing found",
        flush=True,
    )
    return figures


def minimize(name: str) -> None:
    """Keep the seeds, and the smallest inputs that take other ways."""
    with tempfile.TemporaryDirectory(dir=BUILD) as kept:
        shutil.copytree(folder("seeds", name), kept, dirs_exist_ok=True)
        sources = (corpus(name), folder("inputs", name))
        arguments = ("-merge=1", f"-max_len={MAX_KEPT_NBYTES}", kept, *sources)
        command = target(name, SANITIZERS, *arguments)
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        shutil.rmtree(corpus(name))
        for path in Path(kept).iterdir():
            shutil.copyfile(path, corpus(name) / f"{path.stem}.{name}")
    sizes = [path.stat().st_size for path in corpus(name).iterdir()]
    print(f"{name}: {len(sizes)} inputs, {sum(sizes)} bytes, are kept")


# ---- the page ----

_RUNS, _SUMS, _END = "<!-- runs -->", "<!-- sums -->", "<!-- end -->"
# The fields of a run: target, executions, edges.
_ROW = re.compile(
    r"^\| \S+ \| \S+ \| (\w+) \| \w+ \| ([\d,]+) \| [\d,]+ \| [\d,]+ \| (\d+) \|$", re.MULTILINE
)


def record(page: str, made: Sequence[Figures], date: str, commit: str) -> str:
    """Add runs to the table of the page, and renew its sums."""
    for each in made:
        row = f"| {date} | {commit} | {each.name} | {each.build} | {each.executions:,} "
        row += f"| {each.seconds:,} | {each.rate:,} | {each.edges} |\n"
        before, _, rest = page.partition(_RUNS)
        table, _, after = rest.partition(_END)
        page = f"{before}{_RUNS}{table.rstrip()}\n{row}\n{_END}{after}"
    before, _, rest = page.partition(_SUMS)
    sums = "\n".join(_sums(page))
    return f"{before}{_SUMS}\n\n{sums}\n\n{_END}{rest.partition(_END)[2]}"


def _sums(page: str) -> list[str]:
    runs = [(name, int(n.replace(",", "")), edges) for name, n, edges in _ROW.findall(page)]
    lines = ["| target | executions | edges |", "|---|---|---|"]
    for name in (*IN_C, *IN_PYTHON):
        own = [(n, edges) for each, n, edges in runs if each == name]
        if own:
            lines.append(f"| {name} | {sum(n for n, _ in own):,} | {own[-1][1]} |")
    for what, names in (
        ("all in C", IN_C),
        ("all in Python", IN_PYTHON),
        ("all", (*IN_C, *IN_PYTHON)),
    ):
        lines.append(f"| {what} | {sum(n for each, n, _ in runs if each in names):,} | |")
    return lines


def main() -> int:
    """Run the targets."""
    parser = argparse.ArgumentParser(
        description="Build and run the fuzz targets.",
        epilog=f"Exit status: 1 when one broke, {UNAVAILABLE} when they cannot be built.",
    )
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--minimize", action="store_true", help="afterwards, what is kept")
    parser.add_argument("--record", action="store_true", help="add the figures to the page")
    parser.add_argument("targets", nargs="*", help="some of the targets; by default all")
    arguments = parser.parse_args()
    known = (*IN_C, *IN_PYTHON)
    names = arguments.targets or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no target {', '.join(unknown)}: there are {', '.join(known)}")
    try:
        require_modules()
    except UnavailableError as error:
        print(f"fuzz.py: no fuzzing: {error}", file=sys.stderr)
        return UNAVAILABLE
    ready = prepare(names)
    if not ready:
        return UNAVAILABLE
    from recorded import short_commit  # -I keeps this folder out of the path

    commit = short_commit()
    n_at_once = min(len(ready), len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(n_at_once) as pool:
        found = list(pool.map(lambda name: run(name, arguments.seconds), ready))
    whole = [figures for figures in found if figures is not None]
    if arguments.record:
        made = [each for figures in whole for each in figures]
        page = record(PAGE.read_text(), made, time.strftime("%Y-%m-%d", time.gmtime()), commit)
        PAGE.write_text(page)
    if arguments.minimize:
        for figures in whole:
            minimize(figures[0].name)
    if len(whole) < len(ready):
        return 1
    return 0 if len(ready) == len(names) else UNAVAILABLE


if __name__ == "__main__":
    sys.exit(main())
