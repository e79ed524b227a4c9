"""Errors of public operations under falling limits: each ends right, or says what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from conftest import Run
from support.files.prefix_stores import MODEL, TOKENS, cache, opened

pytest.importorskip(
    "unimem.backends.ggml",
    reason="the engine needs ggml: pip install ./ggml '.[run]'",
    exc_type=ImportError,
)

# Each gets files that are there (`given`) and an empty `folder`.
OPERATIONS = {
    "block": "int(um.Block(8 * MIB).as_array('uint8', 8).sum())",
    "tape": "um.Tape(8 * MIB).take_bytes(100).nbytes",
    "scratchpad": "um.Scratchpad(512, 64).capacity",
    "paged cache": "um.PagedKVCache(1, 2, 32, n_blocks=64).n_blocks",
    "save": "filled().save(folder / 'a') or snapshot.describe(folder / 'a').seq_len",
    "map": "um.KVCache.restore(given / 'talk', verify=True).seq_len",
    "copy": "um.KVCache.restore(given / 'talk', mode='copy').seq_len",
    "put": "store(folder, 0).put(filled(), TOKENS, model=MODEL)",
    "put in RAM": "store(folder, 4 * MIB).put(filled(), TOKENS, model=MODEL)",
    "restore": "store(given / 'store', 0).restore_into(empty(), TOKENS, model=MODEL)",
    "weights": "len(um.open_weights(model).tensors)",
    "hash": "um.open_weights(model, load='map').content_hash()",
    "plan": "um.plan(model).ctx",
    "repack": "um.repack(um.open_weights(model, load='map'), cache=folder).nbytes",
    "stage": "staged()",
    "report": "type(um.report()).__name__",
    "decoder": "''.join(Decoder(model, ctx=64, threads=2).generate('Once', 4))",
    "session": "session()",
}

SCRIPT = """
    import json, os, pathlib, resource, signal, sys, tempfile, warnings
    sys.path[:0] = {path!r}
    import unimem as um
    from support.files.prefix_stores import CHUNK, DIM, HEADS, MODEL, N_LAYERS, TOKENS, rows
    from unimem.engine import Decoder, embedded_model
    from unimem.kv import snapshot

    MIB = 1 << 20
    warned = []
    warnings.showwarning = lambda warning, *_: warned.append(str(warning))
    given, model = pathlib.Path({given!r}), embedded_model()

    def empty():
        return um.KVCache(N_LAYERS, HEADS, DIM, 64, pages="4k")

    def filled():
        kv = empty()
        for layer, (k, v) in enumerate(rows(45)):
            kv.append(layer, k, v)
        return kv

    def store(folder, ram_bytes):
        return um.KVStore(folder, ram_bytes=ram_bytes, disk_bytes=16 * MIB, chunk_tokens=CHUNK)

    def staged():
        with um.stage(model) as stage:
            return os.path.getsize(stage.path)

    def session():
        with Decoder(model, ctx=64, threads=1) as decoder:
            decoder.prefill([1, 5])
            decoder.save_session(folder / "talk")
            return len(decoder.resume(folder / "talk"))

    def vm_bytes():
        return int(open("/proc/self/statm").read().split()[0]) * 4096

    def run(kind, spare):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            if kind == "AS":
                limit = vm_bytes() + spare
            else:
                limit = spare + len(os.listdir("/proc/self/fd")) - 1
            if kind:
                resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (limit, limit))
            try:
                said = "gave", {use}
            except (MemoryError, OSError, ImportError) as error:
                said = "raised", str(error)
            os.write(theirs, json.dumps([*said, *warned]).encode())
            os._exit(0)
        os.close(theirs)
        said = os.read(ours, 65536)
        os.close(ours)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return kind, spare, status, json.loads(said or "null")

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        ends = [run("", 0)]
        ends += [run("AS", kib << 10) for kib in (1 << 18, 30000, 12000, 4000, 1500, 700, 200, 0)]
        ends += [run("NOFILE", n) for n in range(7)]
        print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a snapshot and a store."""
    folder = tmp_path_factory.mktemp("given")
    with cache(45) as kv, opened(folder / "store") as store:
        kv.save(folder / "talk")
        store.put(kv, TOKENS, model=MODEL)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_end_under_falling_limits(given: Path, name: str, run_python: Run) -> None:
    script = SCRIPT.format(path=sys.path, given=str(given), use=OPERATIONS[name])
    done = run_python(script, "-W", "ignore::ResourceWarning")
    assert done.returncode == 0, done.stderr
    whole, *ends = json.loads(done.stdout)
    assert whole[:3] == ["", 0, 0]
    for kind, spare, status, said in ends:
        where = name, kind, spare, said, done.stderr
        assert status == 0, where
        # A chunk of a store that cannot be read now is a miss with a warning.
        assert said[0] == "raised" or said[:2] == whole[3][:2] or said[2:], where
