"""Programs that others wrote, with and without `unimem exec`: the same results? `make test-exec`.

CPython's own tests of what allocates, maps, forks and starts; NumPy's test suite; redis-server
under redis-benchmark. All allocations from 4 KiB on are placed. What is not installed is said. The
table of docs/exec.md is what this prints.

    python tools/exec_suites.py [cpython] [numpy] [redis] [--python PATH]
"""

from __future__ import annotations

import argparse
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

CPYTHON = ("mmap", "array", "bytes", "threading", "subprocess")
# Of multiprocessing, by the way that it starts processes. Some Pythons lack these three files.
STARTS = ("fork", "spawn", "forkserver")
SHIM = """
from test._test_multiprocessing import install_tests_in_module_dict as install
install(globals(), {!r})
"""
# Not those that read long lists: of elements of 20 KB they take hours.
REDIS = "ping,set,get,incr,lpush,rpush,lpop,rpop,sadd,hset,spop,zadd,zpopmin,mset"
N_REDIS = ("-n", "20000", "-d", "20000")  # requests of each kind, and the bytes of a value
EXEC = [sys.executable, "-c", "import sys; from unimem_command import main; sys.exit(main())"]
EXEC += ["exec", "--min-bytes", "4096", "--"]
RESULT = re.compile(r"^(\w+ \([\w.]+\)).*?\.\.\. .*?(ok|FAIL|ERROR|skipped|expected failure)\b")


def cpython(python: str, name: str, prefix: list[str]) -> dict[str, str]:
    """Return the result of each test of a module."""
    with tempfile.TemporaryDirectory() as folder:
        module = f"test.test_{name}"
        if name in STARTS:
            module = f"multiprocessing_{name}"
            (Path(folder) / f"{module}.py").write_text(SHIM.format(name))
        done = subprocess.run(
            [*prefix, python, "-m", "unittest", "-v", module],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            cwd=folder,
            timeout=1800,
        )
    matches = (RESULT.match(line) for line in done.stderr.splitlines())
    found = {match[1]: match[2] for match in matches if match}
    # Tests that print or take long have their results in the summary alone.
    for kind, test in re.findall(r"^(FAIL|ERROR): (\w+ \([\w.]+\))", done.stderr, re.M):
        found[test] = kind
    return found | {"exit code": str(done.returncode)}


def numpy(python: str, name: str, prefix: list[str]) -> dict[str, str]:
    """Return the result of each test of NumPy's suite, or of a module of it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.xml"
        words = [*prefix, python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        subprocess.run(
            [*words, f"--junitxml={path}", "--pyargs", name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            check=False,
            timeout=7200,
        )
        found = {}
        for case in ElementTree.parse(path).iter("testcase"):
            kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            found[f"{case.get('classname')}.{case.get('name')}"] = (kinds or ["ok"])[0]
        return found


def redis(prefix: list[str]) -> dict[str, str]:
    """Return what redis-server answered to redis-benchmark."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [*prefix, "redis-server", "--port", port, "--save", "", "--dir", folder],
            stdout=subprocess.DEVNULL,
        )
        try:
            for _ in range(100):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", int(port))) == 0:
                        break
                time.sleep(0.1)
            done = subprocess.run(
                [*("redis-benchmark", "-p", port, "-t", REDIS), "-q", *N_REDIS],
                capture_output=True,
                text=True,
                check=False,
                timeout=600,
            )
        finally:
            server.terminate()
            code = server.wait()
    kinds = re.findall(r"(\w+): [\d.]+ requests per second", done.stdout)
    return dict.fromkeys(kinds, "ok") | {"exit codes": f"{done.returncode}, {code}"}


def compare(name: str, plain: dict[str, str], under: dict[str, str]) -> bool:
    """Print a row of the table, and what differs."""
    differ = {key for key in plain.keys() | under.keys() if plain.get(key) != under.get(key)}
    good = sum(result == "ok" for result in under.values())
    print(f"| {name} | {len(under)} | {good} | {len(differ)} |", flush=True)
    for key in sorted(differ):
        print(f"    {key}: {plain.get(key)} without, {under.get(key)} under it", flush=True)
    return not differ and good > 0


def main() -> int:
    """Run the suites that were named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suites", nargs="*", default=["cpython", "numpy", "redis"])
    parser.add_argument("--python", default=sys.executable, help="that runs the tests")
    parser.add_argument("--numpy-tests", default="numpy", help="the package or module to test")
    asked = parser.parse_args()
    print("| suite | results | ok | differ |\n|---|---|---|---|")
    good = True
    if "cpython" in asked.suites:
        for name in CPYTHON + STARTS:
            pair = [cpython(asked.python, name, prefix) for prefix in ([], EXEC)]
            good &= compare(f"multiprocessing, {name}" if name in STARTS else name, *pair)
    if "numpy" in asked.suites:
        pair = [numpy(asked.python, asked.numpy_tests, prefix) for prefix in ([], EXEC)]
        good &= compare(asked.numpy_tests, *pair)
    if "redis" in asked.suites:
        if shutil.which("redis-server") and shutil.which("redis-benchmark"):
            good &= compare("redis-benchmark", redis([]), redis(EXEC))
        else:
            print("NOT TESTED: redis-server and redis-benchmark are not installed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
