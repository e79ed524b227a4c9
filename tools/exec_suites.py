"""Run other projects' programs with and without `unimem exec`, and compare.

CPython's own tests of modules that allocate, map, fork and start; NumPy's test suite; redis-server
under redis-benchmark; llama.cpp behind a server, which answers chats. All allocations of at least
4 KiB are placed. Missing programs are reported. This prints the table of docs/exec.md.

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

from unimem_bench import llama_build

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
# llama.cpp behind a server: each chat has a context of its own.
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from unimem_bench.llama_cpp import Conversation, Flags, Library, PeerModel, options

library, model, _, port = sys.argv[1:]
given = options(Flags(), n_ctx=256, n_threads=2)
opened = PeerModel(Library(library), model, given)

class Chats(BaseHTTPRequestHandler):
    def do_POST(self):
        batch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        talk, tokens = Conversation(opened, given), []
        while len(tokens) < 16:
            batch = [int(talk.decode(batch).argmax())]
            tokens += batch
        talk.close()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(tokens).encode())

HTTPServer(("127.0.0.1", int(port)), Chats).serve_forever()
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


def server(library: Path, prefix: list[str], n: int) -> dict[str, str]:
    """Return llama.cpp's answer to each chat."""
    words = [*prefix, sys.executable, "-P", "-c", SERVER, str(library), str(MODEL)]
    found = {}
    with tempfile.TemporaryDirectory() as folder, serving(words, folder) as port:
        for i in range(n):
            chat = [1, *range(300, 310 + i)][:100]
            request = Request(f"http://127.0.0.1:{port}/", json.dumps(chat).encode())
            with urlopen(request, timeout=60) as answer:
                found[f"chat {i}"] = answer.read().decode()
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
    parser.add_argument("--chats", type=int, default=200, help="with llama.cpp")
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
        try:
            library = llama_build.library()
        except llama_build.NoPeer as reason:
            print(f"NOT TESTED: llama.cpp: {reason}")
        else:
            pair = [server(library, prefix, asked.chats) for prefix in ([], EXEC)]
            good &= compare(f"llama.cpp behind a server, {asked.chats} chats", *pair)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
