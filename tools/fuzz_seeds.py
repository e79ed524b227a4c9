"""Write the inputs with which the tests attack the parsers, for the fuzzers: `make fuzz` runs it.

    python tools/fuzz_seeds.py TARGET FOLDER

One file each; those of more than 4 KiB are left out, since small inputs are tried most often.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import random
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import fuzz_python

TESTS = Path(__file__).parent.parent / "tests"
MAX_NBYTES = 4096


def halved(whole: Iterable[bytes]) -> Iterator[bytes]:
    """Yield files that are read, and the first half of each."""
    for raw in whole:
        yield raw
        yield raw[: len(raw) // 2]


def gguf_files() -> Iterator[bytes]:
    """Yield files that are read, in full and cut, and those for each way to break a rule."""
    yield from halved(import_module("test_gguf_mutation").VALID)
    yield from (raw for _, _, (raw, _) in import_module("test_gguf").RULES)
    # Files that a small error in a bound would let pass.
    gf = import_module("support.files.gguf_files")
    i8, iq1_s = 24, 19
    for kind, ne, nbytes in ((i8, (256,), 255), (iq1_s, (2**63,), 256), (gf.F32, (1,) * 5, 256)):
        yield gf.with_data(gf.head(1, 0), gf.tensor("t", ne, kind, 0), nbytes=nbytes)[0]
    for key in (b"\xc0\x80", b"\xe0\x80\x80", b"\xf0\x80\x80\x80", b"\xf4\x90\x80\x80", b"a\xc3"):
        yield gf.join(gf.head(0, 1), gf.kv(key, gf.UINT8, b"\0"))[0]
        yield gf.join(gf.head(0, 1), gf.string(key))[0]


def safetensors_files() -> Iterator[bytes]:
    """Yield files that are read, in full and cut, and those for each way to break a rule."""
    files = import_module("support.files.safetensors_files")
    yield from halved([files.everything(), files.everything(pad=3), files.write({})])
    yield from (case.raw for case in import_module("test_safetensors").RULES.values())
    # Files that a small error in a bound would let pass.
    for dtype, dim in (("F4", 1), ("F6_E2M3", 1), ("F6_E3M2", 3)):
        yield files.write({"t": (dtype, (dim,))})
    for text in (r"\udc00\udc00", r"\ud800\ud800", r"\udbff\udfff", r"\ue000", "\x7f"):
        yield files.file(f'{{"__metadata__":{{"{text}":"{text}"}}}}')
    for raw in (
        rb"\u123",
        rb"\ud83d\ude0",
        rb"\ud83d\u",
        rb"\ud83d",
        b"\\",
        b"\xc3",
        b"\xf0\x9f\x98",
    ):
        yield files.file(b'{"' + raw)


# ---- programs of calls, and texts of the kernel ----


def paged_programs() -> Iterator[bytes]:
    """Yield programs of random calls, in pools of several sizes."""
    rng = random.Random(0)
    for sizes in (0x00, 0x13, 0x3B, 0x7A, 0x4B):
        for types in range(4):
            yield bytes([sizes, types]) + rng.randbytes(rng.choice((40, 120, 300)))


def _smaps(start: int, nbytes: int, rss: int, *lines: str, access: str = "rw-p") -> str:
    head = f"{start:x}-{start + nbytes:x} {access} 00000000 00:01 42   /memfd:kv (deleted)\n"
    fields = (f"Rss: {rss} kB", f"Pss: {rss // 2} kB", "KernelPageSize: 4 kB", *lines)
    return head + "".join(f"{line}\n" for line in fields)


def proc_texts() -> Iterator[bytes]:
    """Write what the kernel may say of the target's invented block."""
    base, piece = 0x7F0000000000, 1 << 20
    thp = ("AnonHugePages: 2048 kB", "ShmemPmdMapped: 2048 kB", "THPeligible: 1")
    hugetlb = ("Shared_Hugetlb: 2048 kB", "Private_Hugetlb: 4096 kB")
    last = "VmFlags: rd wr mr mw me lo ac"
    smaps = [
        _smaps(base, 4 * piece, 512, "Swap: 8 kB", "VmFlags: rd wr"),
        _smaps(base, piece, 1024, *thp, last) + _smaps(base + piece, piece, 1000, *thp, last),
        _smaps(base - piece, 2 * piece, 64, "FilePmdMapped: 4 kB", last, access="---p"),
        _smaps(base, 4 * piece, 0, *hugetlb, last).replace("Size: 4 kB", "Size: 2048 kB"),
        _smaps(base, 4 * piece, 0, *hugetlb, last).replace("Size: 4 kB", "Size: 1048576 kB"),
        _smaps(base, 4 * piece, 0, "THPeligible: 1", "VmFlags: rd wr") + "90000000000-",
    ]
    nodes = [
        f"{base:x} bind:1 anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4\n",
        f"{base:x} default file=/memfd:x\\040N9=9 huge N1=1 kernelpagesize_kB=2048\n",
        f"{base:x} default N1024=1 N1023=7\n{base + piece:x} default N1=3\n",
    ]
    stat = "4242 (a ) b) S 1 2 3 4 5 4194304 6 7 8 9 10 11 12 13 14 15 3 17 8899 20\n"
    for areas, pages, more in itertools.product(smaps, nodes, ("0-1\n", "1\n", stat)):
        yield "\0".join((areas, pages, more)).encode()


# ---- files of unimem's own ----


def snapshot_files() -> Iterator[bytes]:
    """Yield snapshots of each version, of zeros, and the first half of each."""
    um = import_module("unimem")
    layers = (um.LayerKV(2, 64), um.LayerKV(2, 64, window=4), um.LayerKV(2, 64, share_of=0))
    kinds: list[dict[str, Any]] = [
        {"grow": True},
        {"window": 8, "spare_rows": 3},
        {"order": "head", "batch": 2},
        {"dtype": "q8_0", "v_dtype": "q4_0", "rotate": True},
        {"v_head_dim": 32},
        {"layers": layers},
        {"layers": (*layers, um.LayerState((3, 5))), "checkpoints": 2},
    ]
    for kind in kinds:
        dims = () if "layers" in kind else (2, 2, 64, 32)
        with um.KVCache(*dims, **kind, **({"max_seq_len": 32} if not dims else {})) as kv:
            for n in (0, 5):
                if n:
                    kv.reserve(n)
                    kv.commit(n)
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder, "snapshot")
                    kv.save(path, tokens=range(n), model="tiny")
                    yield from halved([fuzz_python.pack(path.read_bytes())])


def ledger_files() -> Iterator[bytes]:
    """Yield ledgers of this process, and tables of `unimem exec`."""
    shown = import_module("unimem.accounting.published")
    ledger = import_module("unimem._core.ledger")
    requested = {"nbytes": 5, "pages": "2m", "numa": None, "lock": True}
    part = ledger.Part("kv", 8192, 4096, 100, 200)
    entries = [
        ledger.Entry("scratch", "mine\x1b[2J", 4096, 4096, 4096, None, "/model.gguf"),
        ledger.Entry("kv", "cache", 8192, 4096, 8192, requested, None, (part,)),
    ]
    text = shown._to_text(entries)
    head = shown._HEAD.pack(shown._MAGIC, 1, 7, 11, 5, 3, len(text), zlib.crc32(text))
    head = head.ljust(64, b"\0") + struct.pack("=15Q", *(1, 2, 50, 3, 8192) * 3)
    for body in (text, text.replace(b"8192", b"4097"), text.replace(b"[", b"[[", 1)):
        yield from halved([fuzz_python.pack(head.ljust(4096, b"\0") + body)])
    placed = import_module("test_exec_table")
    for table in (placed.table(), placed.table(n_changes=5), placed.table([])):
        yield from halved([fuzz_python.pack(table)])


def note_files() -> Iterator[bytes]:
    """Write notes of staged models, one of them nested deeper than Python's stack."""
    text = gzip.decompress((TESTS / "upgrades/0.1.0/stage.gz").read_bytes())
    yield from halved([text, text.replace(b"{}", b'{"9": 1}'), text.replace(b"[", b"[[[")])
    yield b'{"schema":' + b"[" * 3000


def image_files() -> Iterator[bytes]:
    """Write headers of images."""
    fmt = import_module("unimem.weights.repack.image_format")
    slots = [
        fmt.ImageTensor(f"b{i}", "q4_0", (32, 4, 2)[: 2 + i], "CPU_REPACK", 128 * i, 72, "0" * 32)
        for i in range(2)
    ]
    for tensors in (slots, slots[:1], slots[::-1], slots[:1] * 2):
        raw = fmt.pack({"model": "m", "files": [[1, 2]]}, "model.gguf", tensors, 4096)
        yield from halved([raw.rstrip(b"\0")])


def index_files() -> Iterator[bytes]:
    """Yield indexes that are read, and those that are refused."""
    for where in (
        {"a": "model-1.safetensors", "b": "model-2.safetensors"},
        {"a": "../x"},
        {"a": "\ud800"},
        {"a": ""},
        {"a": 1},
        {},
    ):
        yield from halved([json.dumps({"metadata": {"n": 1}, "weight_map": where}).encode()])


TARGETS: dict[str, Callable[[], Iterator[bytes]]] = {
    "gguf": gguf_files,
    "safetensors": safetensors_files,
    "paged": paged_programs,
    "proc": proc_texts,
    "snapshot": snapshot_files,
    "ledger": ledger_files,
    "note": note_files,
    "process": proc_texts,
    "image": image_files,
    "index": index_files,
}


def main() -> int:
    """Write the files, named after their contents."""
    parser = argparse.ArgumentParser(description="Write the tests' files as inputs for a fuzzer.")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    sys.path[:0] = [str(TESTS / folder) for folder in ("", "weights", "accounting")]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for raw in TARGETS[arguments.target]():
        if len(raw) <= MAX_NBYTES:
            name = hashlib.sha1(
                raw, usedforsecurity=False
            ).hexdigest()  # the name that libFuzzer gives
            (arguments.folder / f"{name}.{arguments.target}").write_bytes(raw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
