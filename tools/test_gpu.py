"""Run everything that needs a GPU, with the Python that has CuPy: `make test-gpu PYTHON=...`.

It builds unimem from source for this Python into build/gpu/site, and runs the tests of tests/gpu,
the suite `gpu` of the benchmarks, and the tests of the twin over host memory: all of them, even if
one fails, within 8 minutes. Its last lines say how each ended. The status is the worst: 1 if tests
failed or a target of the benchmark was missed, 5 if there was no GPU.

The benchmark is run by ``python tools/test_gpu.py bench SECONDS``, not by `unimem bench`, since
requirements of the command line and the plots may be missing. It leaves a record in bench/results,
even if the time was not enough. ``python tools/test_gpu.py page`` puts a record there into
docs/cuda.md.

Nothing is fetched or installed elsewhere. Tools that this Python lacks come from build/gpu-wheels,
which ``python tools/test_gpu.py wheels 3.12`` (`make gpu-wheels`) fills on a connected machine, for
Python 3.12 on x86-64.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from recorded import put

ROOT = Path(__file__).parent.parent
SITE = ROOT / "build/gpu/site"
WHEELS = ROOT / "build/gpu-wheels"

# Module to the wheels that bring it. The first group has to be there: it is large, or belongs to
# the machine's driver.
GIVEN = ("numpy", "cupy", "pip")
TOOLS = {
    "scikit_build_core": ("scikit-build-core>=0.11", "packaging", "pathspec"),
    "Cython": ("cython==3.3.1",),
    "cmake": ("cmake>=3.24",),
    "ninja": ("ninja>=1.5",),
    "pytest": ("pytest>=8", "iniconfig", "packaging", "pluggy", "pygments"),
    "hypothesis": ("hypothesis>=6.100", "sortedcontainers"),
    "psutil": ("psutil>=6",),
    "xxhash": ("xxhash>=3.4",),
    "ml_dtypes": ("ml_dtypes>=0.5",),
}
# Brought as well, with what it imports; without it its tests and cases are skipped.
TRANSFORMERS = "transformers>=5.23,<5.25"
OPTIONAL = {
    "transformers": tuple(
        """
        transformers annotated-doc annotated-types anyio click filelock fsspec h11 hf-xet httpcore2
        httpx2 huggingface-hub idna markdown-it-py mdurl packaging pydantic pydantic-core pygments
        pyyaml regex rich safetensors shellingham tokenizers tqdm truststore typer
        typing-extensions typing-inspection
        """.split()
    ),
}
# pip takes a platform's name as it is written, and wheels have the oldest one that they run on.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64"]

# Seconds after which a step is ended, so that the others are run where one hangs. None should take
# half of it, also where torch is imported and CuPy compiles for the first time.
BUILD_S, GPU_S, BENCH_S, HOST_S = 200, 200, 160, 120
ENDING_S = 15  # what the benchmark has to end in order
# All end before this.
END = time.monotonic() + 475

RECORD, PAGE = ROOT / "bench/results/gpu-nvidia-h200.json", ROOT / "docs/cuda.md"
BEGIN, END_MARK = "<!-- figures: tools/test_gpu.py page -->\n", "<!-- /figures -->"
TESTS, BENCH = "Tests on the GPU", "Benchmark"
NOTHING_COLLECTED = 5  # pytest's status where all modules skip themselves


def main(arguments: Sequence[str]) -> int:
    """Run everything, and return the worst status."""
    if arguments and arguments[0] == "wheels":
        return download(arguments[1])
    if arguments and arguments[0] == "bench":
        return bench(int(arguments[1]))
    if arguments and arguments[0] == "page":
        return write_page()
    environment = prepare()
    if environment is None:
        return 2
    python = [sys.executable, "-m"]
    tests = [*python, "pytest", "-q", "-o", "faulthandler_timeout=60"]
    tests += ["-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin"]
    host = [ROOT / "tests/cuda"]
    host += [ROOT / "tests/backends/test_cuda_driver.py", ROOT / "tests/bench/test_bench_gpu.py"]
    begin = time.time()
    statuses = {TESTS: step(TESTS, [*tests, "tests/gpu"], environment, GPU_S)}
    if statuses[TESTS] != NOTHING_COLLECTED:
        seconds = str(int(max(1, min(BENCH_S, END - time.monotonic()) - ENDING_S)))
        command = [sys.executable, str(Path(__file__)), "bench", seconds]
        statuses[BENCH] = step(BENCH, command, environment, BENCH_S)
    title = "The twin over host memory"
    statuses[title] = step(title, [*tests, *map(str, host)], environment, HOST_S)
    for title, status in statuses.items():
        print(f"{title}: {meaning(title, status)}")
    for path in sorted(ROOT.glob("bench/results/gpu-*.json")):
        if path.stat().st_mtime >= begin:
            print(f"Recorded in {path}")
    return max(statuses.values())


def meaning(title: str, status: int) -> str:
    """Explain the status of a step."""
    if title == TESTS and status == NOTHING_COLLECTED:
        return "no GPU: nothing was run on one (status 5)"
    if title == BENCH and status == 1:
        return "a target is missed, or a case failed: see above (status 1)"
    known = {0: "passed", 1: "failed (status 1)", 124: "took too long and was ended (status 124)"}
    return known.get(status, f"failed (status {status})")


def prepare() -> dict[str, str] | None:
    """Build unimem; return the environment that finds it, or None if that failed."""
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        print(f"building needs the headers of {sys.executable} (Python.h)")
        return None
    # Those that CMake looks for.
    compilers = shlex.split(os.environ.get("CC", ""))[:1] or ["cc", "gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        print(f"building needs a C compiler, and there is no {' or '.join(compilers)}")
        return None
    shutil.rmtree(SITE, ignore_errors=True)
    scripts = [str(SITE / "bin"), sysconfig.get_path("scripts"), str(Path(sys.executable).parent)]
    environment = os.environ | {
        "PATH": os.pathsep.join([*scripts, os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
        "PYTHONDONTWRITEBYTECODE": "1",
        # Of a machine's many plugins some warn, which is an error here: only ours is loaded.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    install += ["--disable-pip-version-check", "--target", str(SITE)]
    absent = [module for module in (*GIVEN, *TOOLS) if is_missing(module)]
    optional = [module for module in OPTIONAL if is_missing(module)] if WHEELS.is_dir() else []
    if (absent or optional) and WHEELS.is_dir() and not set(absent) & set(GIVEN):
        wanted = [name for module in (*absent, *optional) for name in (TOOLS | OPTIONAL)[module]]
        command = [*install, "--find-links", str(WHEELS), *dict.fromkeys(wanted)]
        if step("Tools from build/gpu-wheels", command, environment, BUILD_S):
            return None
    elif absent:
        print(
            f"{sys.executable} lacks {', '.join(absent)}, or has old ones. make gpu-wheels, on a "
            f"machine that is connected, downloads to {WHEELS.relative_to(ROOT)} what may be "
            f"missing of {', '.join(TOOLS)}; {', '.join(GIVEN)} have to be there"
        )
        return None
    command = [*install, "--no-build-isolation", "-C", "build-dir=build/gpu/build", "."]
    return None if step("Build", command, environment, BUILD_S) else environment


def is_missing(module: str) -> bool:
    """Say whether this Python lacks a module, or has one that is too old."""
    if importlib.util.find_spec(module) is None:
        return True
    name, _, least = TOOLS.get(module, ("",))[0].partition(">=")
    try:
        return bool(least) and numbers(importlib.metadata.version(name)) < numbers(least)
    except importlib.metadata.PackageNotFoundError:  # a folder of that name
        return True


def numbers(version: str) -> list[int]:
    """Return the first two numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def step(title: str, command: Sequence[str], environment: dict[str, str], limit_s: float) -> int:
    """Run a command from the repository; return its status, 124 if it took too long."""
    print(f"== {title}", flush=True)
    start = time.monotonic()
    limit_s = max(0, min(limit_s, END - start))
    try:
        status = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=limit_s, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        status = 124
    status = 128 - status if status < 0 else status  # a signal, as shells write it
    print(f"== {title}: status {status}, {time.monotonic() - start:.0f} s\n", flush=True)
    return status


def bench(seconds: int) -> int:
    """Run the suite `gpu`, record it, and report its targets.

    Returns 0, 1 if a target was missed or a case failed, 124 if the time was not enough.
    """
    from unimem_bench.markdown import record_lines
    from unimem_bench.run import Interrupted, run
    from unimem_bench.stats import verdicts

    folder = ROOT / "build/gpu/bench"
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(seconds)
    status = 0
    try:
        record = run(["gpu"], quick=False, folder=folder, progress=print)
    except Interrupted as interrupt:
        record, status = interrupt.record, 124
    finally:
        signal.alarm(0)
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(record_lines(record)))
    for case in record.cases():
        left_out = "".join(f"; without {name}: {why}" for name, why in case.left_out.items())
        print(f"{case.suite}/{case.name}: {case.failed or 'measured'}{left_out}")
    names = [case.facts["gpu"] for case in record.cases() if "gpu" in case.facts]
    if names:
        name = re.sub(r"\W+", "-", names[0].lower()).strip("-")
        path = ROOT / f"bench/results/gpu-{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(record.to_json() + "\n")
    if status:
        return status
    is_bad = any(case.failed for case in record.cases())
    is_bad |= any(verdict.met is False for verdict in verdicts(record))
    return int(is_bad)


def figures() -> str:
    """Return the table of a device's record: a row a case, with the medians of all sides."""
    from unimem_bench.markdown import escape, table_lines
    from unimem_bench.record import Record
    from unimem_bench.tables import case_table, targets

    lines = ["", "| case | ours | others |", "|---|---|---|"]
    record = Record.read(RECORD)
    for case in record.cases():
        table = case_table(case).table
        if table is not None:
            ours, *others = (f"{row.cells[0]} {row.cells[2]}" for row in table.rows)
            cells = f"{case.suite}/{case.name}", ours, "; ".join(others)
            lines.append(f"| {' | '.join(map(escape, cells))} |")
    return "\n".join([*lines, "", *table_lines(targets(record).table), "", ""])


def write_page() -> int:
    """Put the figures of the record into the page."""
    put(PAGE, BEGIN, figures(), END_MARK)
    return 0


def download(version: str) -> int:
    """Fetch all wheels that a machine with this version of Python may lack."""
    platforms = [f"--platform={name}" for name in PLATFORMS]
    tools = dict.fromkeys(name for names in TOOLS.values() for name in names)
    command = [sys.executable, "-m", "pip", "download", "--quiet", f"--dest={WHEELS}"]
    command += ["--only-binary=:all:", f"--python-version={version}", "--implementation=cp"]
    command += platforms
    # One resolves what belongs together; tools are few and need nothing else.
    each = (["--no-deps", *tools], [TRANSFORMERS])
    runs = [subprocess.run([*command, *names], cwd=ROOT, check=False) for names in each]
    return max(run.returncode for run in runs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
