"""Put faults into the core and count which the tests notice: `make mutants`.

Each fault is tried against the fast tier; survivors, against both. A survivor without a reason in
``alive.toml`` fails the run, and so do too many survivors. The results replace the last ones of the
same files in ``result.json`` and in docs/testing.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import c_faults
import python_faults
from table import C_FILES, PYTHON_FILES

from recorded import commit, put

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mutants"
ALIVE = Path(__file__).parent / "alive.toml"
RESULT = Path(__file__).parent / "result.json"
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- made by make mutants -->", "<!-- end of the mutants -->"
# The required shares of noticed faults: by the fast tier, and by both.
FAST, BOTH = 0.90, 0.95
# A run that takes this much longer than one without a fault loops or waits: it noticed the fault.
TIMES_LONGER, SECONDS_LONGER, C_SECONDS, GREEN_SECONDS = 3.0, 20.0, 60.0, 2400.0
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider")
EVERY = [*C_FILES, *PYTHON_FILES]


@dataclass(frozen=True)
class Verdict:
    """Which tier noticed a fault: ``"fast"``, ``"all"``, or ``"alive"`` for none."""

    file: str
    key: str
    tier: str


# ---- C ----


@dataclass(frozen=True)
class Program:
    """A test in C: its name, its command line, and its environment."""

    name: str
    command: list[str]
    environment: dict[str, str]

    def fails(self, environment: dict[str, str]) -> bool:
        """Say whether the program fails, or loops."""
        return fails(self.command, C_SECONDS, environment | self.environment)


def prepare_c(names: Iterable[str], n: int) -> dict[int, c_faults.Fault]:
    """Build the library and its tests with all faults in them; return the faults by number."""
    tree = FOLDER / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("native", "cmake", "CMakeLists.txt"):
        source = ROOT / name
        if source.is_dir():
            # Without the files' times, a file that had faults in the last run is built again.
            shutil.copytree(source, tree / name, copy_function=shutil.copy)
        else:
            shutil.copy(source, tree / name)
    faults: dict[int, c_faults.Fault] = {}
    for name in names:
        (path,) = (tree / "native" / "src").rglob(name)
        text = path.read_bytes()
        found = possible(path, text, c_faults.find_faults(name, text))
        found = differing(path, text, c_faults.choose(found, n))
        chosen = dict(enumerate(found, len(faults) + 1))
        path.write_bytes(c_faults.put_in(text, chosen))
        faults |= chosen
    configure = ["cmake", "-S", str(tree), "-B", str(FOLDER / "c"), "-G", "Ninja"]
    configure += ["-DUNIMEM_TESTS=ON", "-DCMAKE_C_FLAGS=-w"]
    for command in (configure, ["cmake", "--build", str(FOLDER / "c")]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return faults


def possible(path: Path, text: bytes, faults: list[c_faults.Fault]) -> list[c_faults.Fault]:
    """Return the faults that the compiler accepts."""
    command = [*gcc_for(path), "-fsyntax-only", str(path)]
    while True:
        path.write_bytes(c_faults.put_in(text, dict(enumerate(faults, 1))))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        prefix = f"{path}:"
        lines = {
            int(line.removeprefix(prefix).split(":")[0])
            for line in done.stderr.splitlines()
            if line.startswith(prefix) and " error: " in line
        }
        if not lines:
            if done.returncode != 0:
                raise SystemExit(f"{path.name} does not compile with faults in it: {done.stderr}")
            return faults
        faults = [fault for fault in faults if fault.line not in lines]


def gcc_for(path: Path) -> list[str]:
    """Return the beginning of a command that compiles a file of native/src."""
    source = next(folder for folder in path.parents if folder.name == "src")
    return ["gcc", "-std=gnu17", "-w", f"-I{source}", f"-I{source.parent / 'include'}"]


def differing(path: Path, text: bytes, faults: list[c_faults.Fault]) -> list[c_faults.Fault]:
    """Leave out changes that compile to the same code: they are no faults.

    Trivial compiler equivalence: Papadakis et al., ICSE 2015, doi:10.1109/ICSE.2015.103.
    """
    command = [*gcc_for(path), "-O2", "-S", "-x", "c", "-", "-o", "-"]

    def compiled(source: bytes) -> bytes:
        return subprocess.run(command, input=source, capture_output=True, check=True).stdout

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = pool.map(compiled, [c_faults.replaced(text, fault) for fault in faults])
        same = compiled(text)
        return [fault for fault, code in zip(faults, codes, strict=True) if code != same]


def find_programs() -> list[Program]:
    """Return the tests in C, with the environments that ctest gives them."""
    command = ["ctest", "--test-dir", str(FOLDER / "c"), "--show-only=json-v1"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    programs = []
    for test in json.loads(shown)["tests"]:
        properties = {entry["name"]: entry["value"] for entry in test["properties"]}
        pairs = (line.partition("=") for line in properties.get("ENVIRONMENT", []))
        environment = {name: value for name, _, value in pairs}
        programs.append(Program(test["name"], test["command"], environment))
    return programs


def try_c(
    number: int, fault: c_faults.Fault, programs: list[Program], seconds: float
) -> list[Verdict]:
    """Run the tests with one fault of the C library, until one fails; Python's for `seconds`."""
    prefix = f"test_{fault.file.removesuffix('.c')}"
    own = [program for program in programs if program.name.startswith(prefix)]
    others = [program for program in programs if program not in own]
    environment = os.environ | {"UM_FAULT": str(number)}

    def c_fails(programs: Iterable[Program]) -> bool:
        return any(program.fails(environment) for program in programs)

    def python_fails(*options: str) -> bool:
        # The package finds the faulty library before its own.
        library = environment | {"LD_LIBRARY_PATH": str(FOLDER / "c")}
        return fails([*PYTEST, *tests_of(fault.file), *options], seconds, library)

    if c_fails(own) or python_fails() or c_fails(others):
        tier = "fast"
    else:
        tier = "all" if python_fails("--all") else "alive"
    return [Verdict(fault.file, fault.key, tier)]


def tests_of(name: str) -> list[str]:
    """Return the tests of a file, as paths from the root."""
    patterns = (C_FILES | PYTHON_FILES)[name]
    found = []
    for pattern in patterns:
        paths = [str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)]
        if not paths:
            raise SystemExit(f"{pattern}, which {name} names in table.py, matches no test")
        found += paths
    # Programs with the file's name first: most faults end there.
    stem = Path(name).stem
    return sorted(found, key=lambda path: (not Path(path).name.startswith(f"test_{stem}"), path))


def fails(command: Sequence[str | Path], seconds: float, environment: dict[str, str]) -> bool:
    """Say whether a command fails, or takes so long that it must be ended."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    # A fault may ask for all memory; the kernel kills this process first.
    Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
    try:
        return process.wait(seconds) != 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return True


# ---- Python ----


def try_python(name: str, n: int, folders: Queue[Path], seconds: float) -> list[Verdict]:
    """Run the tests of one module with its faults, one after the other, each for `seconds`."""
    folder = folders.get()
    try:
        python_faults.copy_package(folder)
        tests = tests_of(name)
        results = python_faults.run_faults(folder, name, tests, seconds, n)
        alive = {result.place for result in results if not result.killed}
        tiers = {result.place: "fast" for result in results}
        if alive:
            again = python_faults.run_faults(folder, name, [*tests, "--all"], seconds, alive)
            tiers |= {result.place: "all" if result.killed else "alive" for result in again}
        return [Verdict(name, result.key, tiers[result.place]) for result in results]
    finally:
        folders.put(folder)


# ---- both ----


def check_green(names: list[str], programs: list[Program], n_workers: int) -> dict[str, float]:
    """Return how long the tests of each file may take; end if one fails without a fault."""
    environment = os.environ | {"UM_FAULT": "0", "LD_LIBRARY_PATH": str(FOLDER / "c")}
    for program in programs:
        if program.fails(environment):
            raise SystemExit(f"without any fault, {program.name} fails, or takes {C_SECONDS:.0f} s")

    def limit_of(name: str) -> float:
        command = [*PYTEST, *tests_of(name), "--all"]
        begin = time.monotonic()
        if fails(command, GREEN_SECONDS, environment):
            raise SystemExit(f"without any fault, a test of {name} fails: {' '.join(command)}")
        return TIMES_LONGER * (time.monotonic() - begin) + SECONDS_LONGER

    with ThreadPoolExecutor(n_workers) as pool:
        limits = dict(zip(names, pool.map(limit_of, names), strict=True))
    maps = "import unimem; print(open('/proc/self/maps').read())"
    seen = subprocess.run(
        [sys.executable, "-c", maps], env=environment, capture_output=True, text=True, check=True
    )
    if str(FOLDER / "c" / "libunimem.so") not in seen.stdout:
        raise SystemExit("the package does not take the library that has the faults")
    return limits


def try_all(
    names: list[str], n: int, n_workers: int, report: Callable[[str], None]
) -> list[Verdict]:
    """Put in the faults and run the tests; `report` receives the survivors of the fast tier."""
    faults = prepare_c([name for name in names if name in C_FILES], n)
    report(f"{len(faults)} faults in C")
    programs = find_programs() if faults else []
    limits = check_green(names, programs, n_workers)
    report("all tests pass without a fault")
    folders: Queue[Path] = Queue()
    for i in range(n_workers):
        folders.put(FOLDER / f"python{i}")
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(n_workers) as pool:
        python_names = [name for name in names if name in PYTHON_FILES]
        jobs = [pool.submit(try_python, name, n, folders, limits[name]) for name in python_names]
        jobs += [
            pool.submit(try_c, number, fault, programs, limits[fault.file])
            for number, fault in faults.items()
        ]
        for job in as_completed(jobs):
            for verdict in job.result():
                verdicts.append(verdict)
                if verdict.tier != "fast":
                    report(f"{verdict.tier}: {verdict.key}")
    return verdicts


def state() -> str:
    """Return the commit that is tried, with its day; end if the files differ from git's."""
    command = ["git", "status", "--porcelain", "--", "native", "src", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    if done.stdout:
        raise SystemExit(f"what is tried has to be committed, and to stay so:\n{done.stdout}")
    return commit()


def result_of(verdicts: list[Verdict], tried: str) -> dict[str, dict[str, Any]]:
    """Return, by file, the number of faults, and the survivors of the fast tier."""
    result: dict[str, dict[str, Any]] = {}
    for verdict in sorted(verdicts, key=lambda verdict: verdict.key):
        empty = {"commit": tried, "n_faults": 0, "all": [], "alive": []}
        row = result.setdefault(verdict.file, empty)
        row["n_faults"] += 1
        if verdict.tier != "fast":
            row[verdict.tier].append(verdict.key)
    return result


def shares(rows: Iterable[dict[str, Any]]) -> tuple[int, float, float, int]:
    """Return the number of faults, the share that either tier notices, and the survivors."""
    n = n_all = n_alive = 0
    for row in rows:
        n += row["n_faults"]
        n_all += len(row["all"])
        n_alive += len(row["alive"])
    return n, 1 - (n_all + n_alive) / n, 1 - n_alive / n, n_alive


def table_of(result: dict[str, dict[str, Any]]) -> str:
    """Write the results by file."""
    lines = ["| file | faults | fast tier | both | alive | commit |", "|---|---|---|---|---|---|"]
    for name in [*(name for name in EVERY if name in result), "all"]:
        rows = [row for file, row in result.items() if name in (file, "all")]
        n, fast, both, n_alive = shares(rows)
        tried = "" if name == "all" else rows[0]["commit"]
        lines.append(f"| {name} | {n} | {fast:.1%} | {both:.1%} | {n_alive} | {tried} |")
    return "\n".join(lines)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Count the faults that the tests notice.")
    parser.add_argument("files", nargs="*", help=f"of {', '.join(EVERY)}; all if none is given")
    parser.add_argument("--faults", type=int, default=40, help="the most faults of a file")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    names = arguments.files or EVERY
    if unknown := set(names) - set(EVERY):
        parser.error(f"no faults are put into {', '.join(unknown)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    tried = state()
    verdicts = try_all(
        names, arguments.faults, arguments.workers, lambda line: print(line, flush=True)
    )
    if state() != tried:
        raise SystemExit(f"{tried} was tried, and another commit is checked out now: run it again")
    result = json.loads(RESULT.read_text()) | result_of(verdicts, tried)
    RESULT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    table = table_of(result)
    put(PAGE, BEGIN, f"\n{table}\n", END)
    print(table)
    reasons = tomllib.loads(ALIVE.read_text())["alive"]
    unlisted = [key for name in names for key in result[name]["alive"] if key not in reasons]
    for key in unlisted:
        print(f"alive, and not in {ALIVE.name}: {key}")
    _, fast, both, _ = shares(result.values())
    return 1 if unlisted or fast < FAST or both < BOTH else 0


if __name__ == "__main__":
    sys.exit(main())
