"""Builds the fuzz targets with clang and runs them: `make fuzz`. docs/fuzzing.md says what they do.

Targets run side by side where there are CPUs for it. What is found by them stays in build/fuzz, and
the next run goes on from there: `inputs` has an input for each way through a parser, `broken` those
that broke it. --minimize renews native/fuzz/corpus: the seeds, which are what the tests attack the
parsers with, and the smallest inputs that go other ways.

What is missing of clang is installed by apt, by root only.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build/fuzz"
FORMATS = ("gguf", "safetensors")
PACKAGES = ("clang", "libclang-rt-dev")
# What the tests import that write the seeds.
MODULES = ("gguf", "hypothesis", "numpy", "pytest", "unimem")
# A larger input than the tests', and a smaller one than a vocabulary.
MAX_NBYTES = 4096
# Kept in the repository: small ones, which are also replayed in each test run.
MAX_KEPT_NBYTES = 2048

UNAVAILABLE = 69  # EX_UNAVAILABLE


class UnavailableError(Exception):
    """The targets cannot be built here; the text says what to do."""


# ---- building ----


def has_fuzzer() -> bool:
    """Whether clang is there, with libFuzzer and the sanitizers."""
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
    """Install it when it is missing, which only root may do."""
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


def build() -> None:
    """Build the targets."""
    options = ["-DUNIMEM_FUZZ=ON", "-DCMAKE_C_COMPILER=clang", "-DCMAKE_BUILD_TYPE=Debug"]
    targets = [f"fuzz_{name}" for name in FORMATS]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", *options],
        ["cmake", "--build", str(BUILD), "--target", *targets],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# ---- running ----


def folder(kind: str, name: str) -> Path:
    """Return a folder of inputs of a format, which is there."""
    path = BUILD / kind / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def corpus(name: str) -> Path:
    """Return the folder of the inputs that are kept."""
    return ROOT / "native/fuzz/corpus" / name


def target(name: str, *arguments: object) -> Sequence[str]:
    """Return the command that runs a target."""
    options = ["-timeout=10", "-rss_limit_mb=2048", f"-artifact_prefix={folder('broken', name)}/"]
    options.append(f"-dict={ROOT / f'native/fuzz/{name}.dict'}")
    return [str(BUILD / f"native/fuzz/fuzz_{name}"), *options, *map(str, arguments)]


def run(name: str, seconds: int) -> bool:
    """Run a target and print its figures; False when it broke."""
    command = target(
        name,
        f"-max_total_time={seconds}",
        f"-max_len={MAX_NBYTES}",
        "-print_final_stats=1",
        *(folder("inputs", name), corpus(name), folder("seeds", name)),
    )
    log = BUILD / f"{name}.log"
    with log.open("wb") as output:
        status = subprocess.run(command, stdout=output, stderr=output, check=False).returncode
    text = log.read_text(errors="replace")
    executions = re.search(r"number_of_executed_units: (\d+)", text)
    edges = re.findall(r" cov: (\d+) ", text)
    if status != 0 or executions is None:
        print(f"{name}: broken; {log} ends:", *text.splitlines()[-40:], sep="\n")
        return False
    took = re.search(r"Done \d+ runs in (\d+) second", text)
    print(
        f"{name}: {int(executions[1]):,} executions in {took[1] if took else '?'} s,"
        f" {edges[-1] if edges else '?'} edges, nothing found"
    )
    return True


def minimize(name: str) -> None:
    """Keep the seeds, and the smallest inputs that go other ways than they do."""
    with tempfile.TemporaryDirectory(dir=BUILD) as kept:
        shutil.copytree(folder("seeds", name), kept, dirs_exist_ok=True)
        sources = (corpus(name), folder("inputs", name))
        arguments = ("-merge=1", f"-max_len={MAX_KEPT_NBYTES}", kept, *sources)
        subprocess.run(target(name, *arguments), check=True, stderr=subprocess.DEVNULL)
        shutil.rmtree(corpus(name))
        corpus(name).mkdir()
        for path in Path(kept).iterdir():
            shutil.copyfile(path, corpus(name) / f"{path.stem}.{name}")
    sizes = [path.stat().st_size for path in corpus(name).iterdir()]
    print(f"{name}: {len(sizes)} inputs, {sum(sizes)} bytes, are kept")


def main() -> int:
    """Run the targets."""
    parser = argparse.ArgumentParser(
        description="Build and run the fuzz targets.",
        epilog=f"Exit status: 1 when one broke, {UNAVAILABLE} when they cannot be built.",
    )
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--minimize", action="store_true", help="afterwards, what is kept")
    arguments = parser.parse_args()
    try:
        require_modules()
        install_clang()
    except UnavailableError as error:
        print(f"fuzz.py: no fuzzing: {error}", file=sys.stderr)
        return UNAVAILABLE
    build()
    for name in FORMATS:
        seeds = [sys.executable, str(ROOT / "tools/fuzz_seeds.py"), name]
        subprocess.run([*seeds, str(folder("seeds", name))], check=True)
    n_at_once = min(len(FORMATS), len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(n_at_once) as pool:
        whole = list(pool.map(lambda name: run(name, arguments.seconds), FORMATS))
    if arguments.minimize and all(whole):
        for name in FORMATS:
            minimize(name)
    return 0 if all(whole) else 1


if __name__ == "__main__":
    sys.exit(main())
