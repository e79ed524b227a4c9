"""What objects on a server cost: read into placed memory, and the first token of a known prefix.

The server is moto, in another process of this machine, for lack of a network; it takes half of the
CPU. So ratios mean something here, rates do not.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import unimem as um
from unimem.base.install_hint import install_hint
from unimem.planning.needs import PREFILL_BATCH
from unimem_bench import decoding
from unimem_bench.rounds import Side, milliseconds
from unimem_bench.suite import Measure, NotMeasured, Suite, faster, faster_than_best
from unimem_bench.suites.snapshot import require_engine
from unimem_bench.suites.store import PREFILL, QUESTION_TOKENS, QUICK_SHARE, SETTLE_S, prompt_of

SUITE = Suite("remote", "What do models and prefixes on a server cost?", in_quick=False)

MIB = 1 << 20
OBJECT_BYTES, QUICK_OBJECT_BYTES = 128 * MIB, 32 * MIB
PIECE_BYTES, N_PIECES = 8 * MIB, 16  # of a range, and how many at once, on all sides
BUCKET = "bench"
ONE_REQUEST = "obstore, one request"
IN_S3, CHECKED = "unimem, S3", "unimem, MD5"
NO_PROXY = "127.0.0.1"


def require_clients() -> None:
    """Raise NotMeasured unless the server and all clients are installed."""
    for module in ("moto", "flask", "flask_cors", "s3fs", "obstore"):
        if importlib.util.find_spec(module) is None:
            raise NotMeasured(f"wants {module}: {install_hint('remote', 'servers')}")


@contextmanager
def moto() -> Iterator[str]:
    """Serve S3 on this machine, make it the S3 of this process, and yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    named = {
        "AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "NO_PROXY": NO_PROXY,
        "AWS_CONFIG_FILE": "/dev/null", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in named}
    run = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(run, **silent) as server:  # type: ignore[call-overload]
        try:
            wait_for(url, server)
            os.environ.update(named)
            yield url
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            server.terminate()


def wait_for(url: str, server: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """Wait until a server makes the bucket."""
    end = time.monotonic() + seconds
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            opener.open(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(0.05)


# ---- ranges -----------------------------------------------------------------------------------


def obstore_store() -> Any:
    """Open the bucket with obstore."""
    from obstore.store import S3Store

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    return S3Store(BUCKET, endpoint=endpoint, client_options={"allow_http": True})


def obstore_gets(nbytes: int) -> Any:
    """Return a function that gets the object with obstore: ranges, several at once, in threads.

    Its `asyncio` interface took ten times as long, and its `get_ranges` makes one request of
    adjacent ranges.
    """
    import obstore

    store = obstore_store()

    def one(start: int) -> Any:
        end = min(start + PIECE_BYTES, nbytes)
        return obstore.get_range(store, "object", start=start, end=end)

    def run() -> list[Any]:
        with ThreadPoolExecutor(N_PIECES) as pool:
            return list(pool.map(one, range(0, nbytes, PIECE_BYTES)))

    return run


def obstore_gets_whole() -> Any:
    """Return a function that gets the object with obstore in one request."""
    import obstore

    store = obstore_store()
    return lambda: obstore.get(store, "object").bytes()


def s3fs_gets(nbytes: int) -> Any:
    """Return a function that gets the object by s3fs."""
    import s3fs

    fs = s3fs.S3FileSystem(skip_instance_cache=True)
    starts = list(range(0, nbytes, PIECE_BYTES))
    ends = [min(start + PIECE_BYTES, nbytes) for start in starts]
    return lambda: fs.cat_ranges(
        [f"{BUCKET}/object"] * len(starts), starts, ends, batch_size=N_PIECES
    )


@SUITE.case(
    "get",
    "How fast do 128 MiB (a quick run: 32 MiB) come from a server into huge pages?",
    unit="GB/s",
    targets=[faster_than_best(0.8, issue=21)],
)
def get(measure: Measure) -> None:
    """Compare ranges read into a block of huge pages with those that clients return as bytes."""
    require_clients()
    from unimem.remote.client import open_server
    from unimem.remote.transfers import RemoteBytes, Version, read_wanted

    nbytes = QUICK_OBJECT_BYTES if measure.quick else OBJECT_BYTES
    measure.pin(None)
    data: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    with moto(), um.Block(nbytes, pages="thp", warm=True) as block:
        server, url = open_server(f"s3://{BUCKET}/object")
        server.put(url, data.data)
        answer = server.get(url, 0, 1)
        answer.close()
        version = Version(answer.nbytes, answer.tag)
        measure.fact("object_bytes", nbytes)
        measure.fact("huge_bytes", block.verify().huge_bytes)

        def ours(digest: str) -> None:
            out = block.as_array("uint8", nbytes)
            read_wanted(server, [RemoteBytes(url, version, digest, 0, out)], threads=N_PIECES)

        def rate(work: Any) -> Side:
            return lambda: nbytes / milliseconds(work) / 1e6

        measure.compare(
            ours={"unimem": rate(partial(ours, "")), CHECKED: rate(partial(ours, answer.digest))},
            peers={"obstore": rate(obstore_gets(nbytes)), "s3fs": rate(s3fs_gets(nbytes))},
            limits={ONE_REQUEST: rate(obstore_gets_whole())},
            rounds=7,
            quick_rounds=5,
            warmup=1,
        )
        if not np.array_equal(block.as_array("uint8", nbytes), data):
            raise AssertionError("the bytes read differ")


# ---- the first token ----------------------------------------------------------------------------


@SUITE.case(
    "first-token, 2k",
    "How soon is the first token of a prompt whose first 2k tokens are on a server?",
    unit="ms",
    targets=[faster(PREFILL, 3.0, issue=21, side=IN_S3)],
)
def first_token(measure: Measure) -> None:
    """Compare with computing the prompt; no part of it is in RAM or on disk."""
    require_clients()
    require_engine()
    from unimem.engine import Decoder
    from unimem.engine.stored_prefixes import Prefixes, model_name

    n = (2 << 10) // (QUICK_SHARE if measure.quick else 1)
    path, cpus = decoding.prepared(measure, "q4_k_m", 2)
    ids = prompt_of(n)
    with ExitStack() as undo:
        undo.enter_context(moto())
        decoder = undo.enter_context(
            Decoder(path, ctx=len(ids) + 8, kv_dtype="f16", threads=len(cpus))
        )
        where = f"s3://{BUCKET}/prefixes"
        store = undo.enter_context(um.KVStore(where, ram_bytes=0, disk_bytes=0))
        prefixes = Prefixes(store, decoder.weights, PREFILL_BATCH)
        decoder.prefill(ids)
        token = decoder.generate_next_token()
        store.put(decoder.kv, ids, model=model_name(decoder.weights))
        measure.fact("tokens", n)
        measure.fact("prefix_bytes", decoder.kv.memory_usage_bytes * n // decoder.kv.seq_len)

        def arriving(used: Prefixes | None) -> Side:
            def arrive() -> None:
                decoder.prefill(ids)
                if (found := decoder.generate_next_token()) != token:
                    raise AssertionError(f"it goes on with token {found}, not {token}")

            def run() -> float:
                decoder._prefixes = used
                decoder.reset()
                time.sleep(SETTLE_S)
                elapsed = milliseconds(arrive)
                if used and used.n_restored != len(ids) - QUESTION_TOKENS:
                    raise AssertionError(f"{used.n_restored} tokens were restored")
                return elapsed

            return run

        measure.compare(
            ours={IN_S3: arriving(prefixes)},
            peers={PREFILL: arriving(None)},
            rounds=5,
            quick_rounds=3,
            warmup=0,
        )
