"""Write a file of each format of unimem, for later versions to read.

    python tools/upgrade_files.py [FOLDER]

``tests/upgrades`` has a folder for each published version, and ``tests/project/test_upgrades.py``
reads all of them. This program makes the folder of this version, before it is published. A later
change of a format adds a folder, and changes no existing file. The files depend only on the
version. Each is compressed; ``contents.json`` describes their contents.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import unimem as um
from unimem._core import ledger
from unimem.accounting import exec_table, published
from unimem.system.placement import Placement
from unimem.weights import staged
from unimem.weights.repack import image_format

FOLDER = Path(__file__).parent.parent / "tests/upgrades"
N_TOKENS, MODEL = 6, "upgraded"
TOKENS = list(range(100, 100 + N_TOKENS))

_LAYERS = (um.LayerKV(2, 64), um.LayerKV(2, 64, window=4), um.LayerKV(2, 64, share_of=0))
_STATES = (um.LayerState((3, 5)), um.LayerState((7,), "bf16"))
_MIXED: dict[str, Any] = {"layers": _LAYERS, "max_seq_len": 16}
CACHES: dict[str, dict[str, Any]] = {
    "fixed": {"dtype": "f32"},
    "grow": {"dtype": "bf16", "grow": True},
    "ring": {"window": 4, "spare_rows": 2},
    "by-head": {"order": "head", "batch": 2},
    "quantized": {"dtype": "q8_0", "v_dtype": "q4_0"},
    "rotated": {"dtype": "q5_1", "v_dtype": "iq4_nl", "rotate": True},
    "v-head-dim": {"v_head_dim": 32},
    "layers": _MIXED,
    "states": {**_MIXED, "layers": (*_LAYERS, *_STATES), "checkpoints": 2},
}


def make_cache(kind: str) -> Any:
    """Return an empty cache of a kind in `CACHES`."""
    options: Any = CACHES[kind]
    return um.KVCache(*(() if "layers" in options else (2, 2, 64, 16)), pages="4k", **options)


def rows_of(kv: Any) -> str:
    """Return a hash of all content of a cache: its stored tokens, and its states."""
    digest = hashlib.sha256()
    for part in _parts_of(kv):
        for lane in part._lanes():
            digest.update(part._rows(*lane).tobytes())
    for i, layer in enumerate(getattr(kv, "layers", None) or ()):
        if isinstance(layer, um.LayerState):
            digest.update(kv.state(i).tobytes())
    return digest.hexdigest()


def _parts_of(kv: Any) -> list[Any]:
    return getattr(kv._body, "_parts", None) or [kv._body]


def _layers_of(kv: Any) -> list[Any]:
    return [*(getattr(kv, "layers", None) or ())]


def fill(kv: Any, n_tokens: int = N_TOKENS) -> None:
    """Give an empty cache tokens: unconverted bytes that compress well."""
    states = [i for i, layer in enumerate(_layers_of(kv)) if isinstance(layer, um.LayerState)]
    for n in (n_tokens - 2, 2):
        kv.reserve(n)
        for i in states:
            kv.state(i)[...] = kv.next_position + i
        kv.commit(n)
        if states:
            kv.checkpoint()
    for part in _parts_of(kv):
        for number, lane in enumerate(part._lanes()):
            rows = part._rows(*lane)
            rows[...] = (np.arange(rows.size) // 64 % 7 * 8 + number).reshape(rows.shape)


def _snapshots(folder: Path) -> dict[str, Any]:
    said = {}
    for kind in CACHES:
        with make_cache(kind) as kv:
            fill(kv)
            kv.save(folder / f"snapshot-{kind}", tokens=TOKENS, model=MODEL)
            said[kind] = {"seq_len": kv.seq_len, "rows": rows_of(kv)}
    return said


def _session(folder: Path) -> dict[str, Any]:
    from unimem.engine import Decoder, embedded_model

    with Decoder(embedded_model(), ctx=16, threads=1) as decoder:
        fill(decoder.kv)
        model = decoder.weights.content_hash()
        decoder.kv.save(folder / "session", tokens=TOKENS, model=model)
        return {"model": model, "rows": rows_of(decoder.kv)}


def _chunk(folder: Path) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as store_folder,
        um.KVStore(store_folder, ram_bytes=0, disk_bytes=1 << 22, chunk_tokens=4) as store,
        make_cache("fixed") as kv,
    ):
        fill(kv)
        store.put(kv, TOKENS, model=MODEL)
        (path,) = Path(store_folder).glob("*.kv")
        (folder / "chunk").write_bytes(path.read_bytes())
        kv.crop(4)
        return {"name": path.name, "chunk_tokens": 4, "rows": rows_of(kv)}


def _image(folder: Path) -> dict[str, Any]:
    data = bytes(range(64)) * 4
    tensors = [
        image_format.ImageTensor(
            f"blk.{i}.weight",
            "q4_0",
            (32, 4),
            "CPU_REPACK",
            128 * i,
            72,
            hash=xxhash.xxh3_128_hexdigest(data[128 * i : 128 * i + 72]),
        )
        for i in range(2)
    ]
    identity = {"model": "f" * 32, "files": [[1, 2, 3, 4, 5]], "ggml": "0.15", "probe": {}}
    head = image_format.pack(identity, "/models/model.gguf", tensors, len(data))
    (folder / "image").write_bytes(head + data.ljust(image_format.ALIGN, b"\0"))
    return {"key": image_format.key_of(identity), "tensors": [asdict(one) for one in tensors]}


def _stage(folder: Path) -> dict[str, Any]:
    placement = Placement("2m", 2 << 20, 4 << 20, 4 << 20, 0, 0, 4 << 20, {0: 4 << 20})
    note = {
        **{"schema": staged.SCHEMA, "path": "fd/3", "paths": ["fd/3"]},
        **{"source": "/models/model.gguf", "versions": [["/models/model.gguf", [1, 2, 3, 4]]]},
        **{"asked": {"pages": "2m", "numa": None}, "backing": "memfd", "nbytes": 4 << 20},
        **{"granted": asdict(placement), "warnings": []},
    }
    (folder / "stage").write_text(json.dumps(note))
    return {"source": "/models/model.gguf", "nbytes": 4 << 20, "pages": "2m"}


def _ledger(folder: Path) -> dict[str, Any]:
    part = ledger.Part("kv", 8192, 4096, 100, 200)
    requested = {"nbytes": 4000, "pages": "thp", "numa": None, "lock": True}
    entries = [
        ledger.Entry("weights:q8_0", "weights", 4096, 4096, 4096, None, "/models/model.gguf"),
        ledger.Entry("kv", "cache", 8192, 4096, 8192, requested, None, (part,)),
    ]
    text = published._to_text(entries)
    sizes = len(published._COLUMNS), 1, len(text), zlib.crc32(text)
    head = published._HEAD.pack(published._MAGIC, published._VERSION, 7, 11, *sizes)
    values = 5, 3, 100, 2, 40, 8, 4096, 900
    row = struct.pack("=9Q", *values, 8192)
    raw = (head.ljust(published._ROWS_AT, b"\0") + row).ljust(published._TEXT_AT, b"\0") + text
    (folder / "ledger").write_bytes(raw.ljust(published.NBYTES, b"\0"))
    counters = dict(zip(published.COUNTERS, values, strict=True))
    return {"pid": 7, "started": 11, "names": ["weights", "cache"], "counters": counters}


def _placed(folder: Path) -> dict[str, Any]:
    head = exec_table._HEAD.pack(
        published._MAGIC, exec_table.FORMAT, 7, 11, 1, exec_table._RECORD.size, 0, 1, 2
    )
    head += struct.pack("=9Q", *range(1, 10)) + b"1 pages=2m min=65536 lock=1".ljust(1024, b"\0")
    raw = head.ljust(exec_table._HEAD_BYTES, b"\0")
    raw += exec_table._RECORD.pack(64 << 20, 4 << 20, 3 << 20, 0, 2)
    (folder / "placed").write_bytes(raw.ljust(published.NBYTES, b"\0"))
    return {"pid": 7, "started": 11, "names": ["malloc"], "n_placed": 1}


MAKERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "snapshots": _snapshots,
    "session": _session,
    "chunk": _chunk,
    "image": _image,
    "stage": _stage,
    "ledger": _ledger,
    "placed": _placed,
}


def make() -> Iterator[tuple[str, bytes]]:
    """Give the name and the bytes of each file, and at last ``contents.json``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contents: dict[str, Any] = {kind: maker(folder) for kind, maker in MAKERS.items()}
        for path in sorted(folder.iterdir()):
            yield path.name, path.read_bytes()
    contents |= {"tokens": TOKENS, "model": MODEL}
    yield "contents.json", (json.dumps(contents, indent=1) + "\n").encode()


def main() -> None:
    """Write the files of this version."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / um.__version__
    folder.mkdir(parents=True, exist_ok=True)
    nbytes = 0
    for name, raw in make():
        is_text = name.endswith(".json")
        path = folder / (name if is_text else f"{name}.gz")
        path.write_bytes(raw if is_text else gzip.compress(raw, mtime=0))
        nbytes += path.stat().st_size
    print(f"{folder}: {nbytes} bytes")


if __name__ == "__main__":
    main()
