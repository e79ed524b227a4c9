"""Run LMCache's server with unimem's adapter: put, kill, restart, damage, another layout and model.

    build/lmcache/bin/python tools/lmcache_real.py --dir build/lmcache-run [--record FILE]

The Python is that of tools/lmcache_env.py. Servers and engines are processes of their own; the
engine is the client of LMCache's own benchmark, which stores from memory and retrieves into it.
With ``--vllm FOLDER``, that of tools/vllm_env.py, real vLLM puts a prompt through LMCache, too, and
finds it after both were started anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from sysconfig import get_path
from typing import Any

import unimem
import vllm_real
from recorded import short_commit

CHUNK_TOKENS, N_CHUNKS, BLOCK = 64, 8, 16
SHAPE = "(2,256,16,2,32):float16:2"  # 32 KiB a chunk
WAIT_S = 1200  # on a busy machine


def main() -> int:
    """Run all steps, or be the engine of one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path("build/lmcache-run"))
    parser.add_argument("--record", type=Path)
    parser.add_argument("--vllm", type=Path, help="the folder of tools/vllm_env.py")
    parser.add_argument("--engine", nargs=3, metavar=("PORT", "VERB", "SHAPE"))
    given = parser.parse_args()
    if given.engine:
        port, verb, shape = given.engine
        print(json.dumps(engine(int(port), verb, shape)))
        return 0
    shutil.rmtree(given.dir, ignore_errors=True)
    given.dir.mkdir(parents=True)
    engines = f"LMCache {version('lmcache')}, torch {version('torch')}"
    figures = steps(given.dir)
    rows = [row_of(engines, "server and engine as processes", figures)]
    name = "vLLM"
    through: dict[str, dict[str, Any]] = {}
    if given.vllm:
        name, through = under_vllm(given.vllm.absolute(), given.dir.absolute())
    rows.append(row_of(f"{engines}, {name}", "vLLM through LMCache's server", through))
    figures |= through
    print(json.dumps(figures, indent=1))
    if given.record:
        record = {
            "door": "LMCache: KVStoreAdapter",
            "module": "unimem.lmcache",
            "command": "make test-lmcache",
            "unimem": f"{unimem.__version__} ({short_commit()})",
            "rows": rows,
            "figures": {f"{name}_hit_chunks": figure["got"][0] for name, figure in figures.items()},
        }
        given.record.write_text(json.dumps(record, indent=1) + "\n")
    return any(row["result"].startswith("failed") for row in rows)


def row_of(engines: str, what: str, figures: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the row of some steps for tools/doors.py."""
    failed = [name for name, figure in figures.items() if figure["got"] != figure["expected"]]
    result = f"failed: {', '.join(failed)}" if failed else "passed"
    return {
        "version": engines,
        "ran": "real engine" if figures else "not run",
        "what": ": ".join(filter(None, [what, ", ".join(figures)])),
        "date": datetime.now(UTC).date().isoformat(),
        "result": result if figures else "missed: without --vllm",
    }


def steps(folder: Path) -> dict[str, dict[str, Any]]:
    """Return for each step the chunks that were hit, and whether their bytes were equal."""
    store, small = folder / "store", folder / "small"
    figures: dict[str, dict[str, Any]] = {}

    def step(name: str, hit: int, verb: str, shape: str = SHAPE, **options: Any) -> None:
        with server(folder / f"{name}.log", {"where": str(store)} | options) as port:
            command = [sys.executable, __file__, "--engine", str(port), verb, shape]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            if verb == "put":
                wait_for_chunks(
                    Path(options.get("where", store)), 3 if small.exists() else N_CHUNKS
                )
        got = json.loads(done.stdout.splitlines()[-1])
        figures[name] = {"expected": [hit, True], "got": got}

    step("put", 0, "put")
    step("restart", N_CHUNKS, "get")
    step("other_dtype", 0, "get", SHAPE.replace("float16", "bfloat16"))
    step("other_shape", 0, "get", SHAPE.replace("(2,256,16,2,32)", "(2,256,16,4,32)"))
    step("other_model", 0, "get", model="revision 2")
    files = sorted(store.glob("*.kv"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    data = bytearray(files[5].read_bytes())
    data[-1] ^= 1
    files[5].write_bytes(data)
    step("damage", 5, "get")
    small.mkdir(mode=0o700)
    room = 3 * (files[0].stat().st_size + (1 << 12)) + (1 << 15)
    step("small_budget_put", 0, "put", where=str(small), disk_bytes=room)
    step("small_budget", 3, "get", where=str(small), disk_bytes=room)
    return figures


def under_vllm(env: Path, folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return vLLM's version, and for each process the chunks hit, and if its text is right."""
    (folder / "packages").mkdir()  # what vLLM's environment lacks
    for name in ("lmcache", f"lmcache-{version('lmcache')}.dist-info", "sortedcontainers"):
        (folder / "packages" / name).symlink_to(Path(get_path("purelib"), name))
    run, n = vllm_real.Runs(env, folder, newer=False), vllm_real.PROMPT // CHUNK_TOKENS
    run.call("small", "small")
    alone, figures = run(), {}
    reference = alone["found"][0]
    for name, hit in (("vllm_put", 0), ("vllm_restart", n)):
        store = folder / "vllm-store"
        with server(folder / f"{name}.log", {"where": str(store)}) as port:
            found = run(lmcache=(port, str(folder / "packages")))["found"][0]
            wait_for_chunks(store, n)
        is_right = found["ids"] == reference["ids"]
        figures[name] = {
            "expected": [hit, True],
            "got": [found["cached"] // CHUNK_TOKENS, is_right],
        }
    return f"vLLM {alone['version']}", figures


def wait_for_chunks(store: Path, n: int) -> None:
    """Wait until LMCache has given the store all chunks, and the store has written them."""
    end = time.monotonic() + WAIT_S
    while len(list(store.glob("*.kv"))) < n:
        if time.monotonic() > end:
            raise TimeoutError(f"{store}: expected {n} chunks after {WAIT_S} s")
        time.sleep(0.1)
    time.sleep(1)  # a store that is too small refuses the others


@contextmanager
def server(log: Path, options: dict[str, Any]) -> Iterator[int]:
    """Run a server of LMCache; it is killed at the end, and closes nothing."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = int(free.getsockname()[1])
    adapter = {"type": "plugin", "module_path": "unimem.lmcache", "class_name": "KVStoreAdapter"}
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--port", str(port)]
    command += (
        "--supported-transfer-mode engine_driven --eviction-policy LRU --disable-metrics".split()
    )
    command += ["--shm-name", f"unimem-test-{os.getpid()}", "--l1-size-gb", "0.1"]
    command += ["--chunk-size", str(CHUNK_TOKENS)]
    command += ["--l2-adapter", json.dumps(adapter | {"adapter_params": options})]
    env = os.environ | {"LMCACHE_TRACK_USAGE": "false", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    try:
        end = time.monotonic() + WAIT_S
        while b"cache server is running..." not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"LMCache's server did not start: {log}")
            time.sleep(0.1)
        yield port
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def engine(port: int, verb: str, shape: str) -> list[Any]:
    """Put or get a prompt as an engine; return the chunks hit, and if their bytes are right."""
    import torch
    from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
    from lmcache.cli.commands.bench.server_bench.config import BenchConfig

    config = BenchConfig(
        rpc_url=f"tcp://localhost:{port}",
        http_url="",
        mode="cpu",
        transfer_mode="engine_driven",
        tp_size=1,
        use_mla=False,
        num_tokens=N_CHUNKS * CHUNK_TOKENS,
        kvcache_shape_spec=shape,
        num_blocks=256,
        block_size=BLOCK,
    )
    client = ServerBenchClient(config, lambda text: print(text, file=sys.stderr))
    client.start()
    caches = list(client._workers[0].kv_caches.values())
    random = torch.Generator().manual_seed(1)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=random))
    request = client.create_request(1, f"{verb} {time.time_ns()}", verb)
    n_tokens = request.num_full_tokens

    def digest(tokens: int) -> str:
        blocks = slice(request.block_offset, request.block_offset + tokens // BLOCK)
        parts = (cache[:, blocks].contiguous().view(torch.uint8).numpy() for cache in caches)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    found = client.lookup(request)
    hit_tokens = found.hit_chunks * CHUNK_TOKENS
    is_right = found.error is None
    if verb == "put":
        is_right &= client.store(request, 0, n_tokens).succeeded
    elif hit_tokens:
        expected = digest(hit_tokens)
        client.zero_destination(request, 0, n_tokens)
        is_right &= digest(hit_tokens) != expected
        is_right &= client.retrieve(request, 0, hit_tokens).succeeded
        is_right &= digest(hit_tokens) == expected
    client.end_session(request)
    client.close()
    return [found.hit_chunks, is_right]


if __name__ == "__main__":
    sys.exit(main())
