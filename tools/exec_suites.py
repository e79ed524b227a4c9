"""Run other projects' programs with and without `unimem exec`, and compare.

CPython's own tests of modules that allocate, map, fork and start; NumPy's test suite; redis-server
under redis-benchmark; llama.cpp's server in the wheel cyllama, which answers chats. All allocations
of at least 4 KiB are placed. Missing programs are reported. This prints the table of docs/exec.md.

    python tools/exec_suites.py [cpython] [numpy] [redis] [server] [--python PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen
from xml.etree import ElementTree

CPYTHON = ("mmap", "array", "bytes", "threading", "subprocess")
# Tests of multiprocessing, by start method. Some Pythons lack these three files.
STARTS = ("fork", "spawn", "forkserver")
NUMPY = tuple(
    """
    numpy._core numpy.lib numpy.linalg numpy.fft numpy.random numpy.ma numpy.polynomial
    numpy.matrixlib numpy.testing
""".split()
)
SHIM = """
from test._test_multiprocessing import install_tests_in_module_dict as install
install(globals(), {!r})
"""
# Tests that read long lists are left out: with elements of 20 KB they take hours.
REDIS = "ping,set,get,incr,lpush,rpush,lpop,rpop,sadd,hset,spop,zadd,zpopmin,mset"
REDIS_BYTES = 20000  # per value
MODEL = Path(__file__).parent.parent / "src/unimem/engine/models/tiny.gguf"
# The server of cyllama 0.2.18 leaves a chat's tokens in the cache, and answers only once.
SERVER = """
import sys
from cyllama.llama.server import __main__, python
def reset(slot, plain=python.ServerSlot.reset):
    plain(slot)
    slot.context.kv_cache_clear()
python.ServerSlot.reset = reset
sys.exit(__main__.main())
"""
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
    # Only the summary has the results of tests that print or are slow.
    for kind, test in re.findall(r"^(FAIL|ERROR): (\w+ \([\w.]+\))", done.stderr, re.M):
        found[test] = kind
    return found | {"exit code": str(done.returncode)}


def numpy(python: str, name: str, prefix: list[str]) -> dict[str, str]:
    """Return the result of each test of a package or module of NumPy."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.xml"
        words = [*prefix, python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        subprocess.run(
            [*words, f"--junitxml={path}", "--pyargs", name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            # Some of NumPy's tests take all memory, and a minute for each GB.
            env=os.environ | {"NPY_AVAILABLE_MEM": "2 GB"},
            check=False,
            timeout=7200,
        )
        found = {}
        for case in ElementTree.parse(path).iter("testcase"):
            kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            found[f"{case.get('classname')}.{case.get('name')}"] = (kinds or ["ok"])[0]
        return found


@contextmanager
def serving(words: list[str], folder: str) -> Iterator[int]:
    """Run a server that takes ``--port`` last; yield the port, and end it by SIGTERM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    server = subprocess.Popen(
        [*words, "--port", str(port)],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield port
    finally:
        server.terminate()
        server.wait()


def redis(prefix: list[str], n: int) -> dict[str, str]:
    """Return redis-server's answers to redis-benchmark."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving([*prefix, "redis-server", "--save", ""], folder) as port,
    ):
        sizes = ("-p", str(port), "-n", str(n), "-d", str(REDIS_BYTES))
        done = subprocess.run(
            ["redis-benchmark", "-q", "-t", REDIS, *sizes],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    kinds = re.findall(r"(\w+): [\d.]+ requests per second", done.stdout)
    return dict.fromkeys(kinds, "ok") | {"exit code": str(done.returncode)}


def server(python: str, prefix: list[str], n: int) -> dict[str, str]:
    """Return the answer of llama.cpp's server to each chat."""
    words = [*prefix, python, "-c", SERVER, "-m", str(MODEL), "--ctx-size", "256"]
    found = {}
    with tempfile.TemporaryDirectory() as folder, serving(words, folder) as port:
        for i in range(n):
            chat = {
                "messages": [{"role": "user", "content": f"Tell story {i} of a cat"}],
                "max_tokens": 16,
                "seed": i,
            }
            request = Request(
                f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(chat).encode()
            )
            with urlopen(request, timeout=60) as answer:
                text = json.load(answer)["choices"][0]["message"]["content"]
            found[f"chat {i}"] = text
    return found


def compare(name: str, plain: dict[str, str], under: dict[str, str]) -> bool:
    """Print a row of the table, and the differences; an answer is good if it has a text."""
    differ = {key for key in plain.keys() | under.keys() if plain.get(key) != under.get(key)}
    good = sum(
        result == "ok" or (key.startswith("chat") and result != "") for key, result in under.items()
    )
    print(f"| {name} | {len(under)} | {good} | {len(differ)} |", flush=True)
    for key in sorted(differ):
        print(f"    {key}: {plain.get(key)} without, {under.get(key)} under it", flush=True)
    return not differ and good > 0


def main() -> int:
    """Run the named suites, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("suites", nargs="*", default=["cpython", "numpy", "redis", "server"])
    parser.add_argument("--python", default=sys.executable, help="that runs the tests")
    parser.add_argument("--requests", type=int, default=20000, help="of each kind, of redis")
    parser.add_argument("--chats", type=int, default=200, help="with llama.cpp's server")
    parser.add_argument("--numpy-tests", nargs="*", default=NUMPY, help="packages or modules of it")
    asked = parser.parse_args()
    print("| suite | results | ok | differ |\n|---|---|---|---|")
    good = True
    if "cpython" in asked.suites:
        for name in CPYTHON + STARTS:
            pair = [cpython(asked.python, name, prefix) for prefix in ([], EXEC)]
            good &= compare(f"multiprocessing, {name}" if name in STARTS else name, *pair)
    if "numpy" in asked.suites:
        for name in asked.numpy_tests:
            good &= compare(name, *(numpy(asked.python, name, prefix) for prefix in ([], EXEC)))
    if "redis" in asked.suites:
        if shutil.which("redis-server") and shutil.which("redis-benchmark"):
            good &= compare("redis-benchmark", *(redis(p, asked.requests) for p in ([], EXEC)))
        else:
            print("NOT TESTED: redis-server and redis-benchmark are not installed")
    if "server" in asked.suites:
        pair = [server(asked.python, prefix, asked.chats) for prefix in ([], EXEC)]
        good &= compare(f"llama.cpp's server, {asked.chats} chats", *pair)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
