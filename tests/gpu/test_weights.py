"""Model files to the GPU: every byte arrives, or the tape is as before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from gpu.machine import MIB, Counted, bridge, cuda, cupy, held, new_stream
from support.files import gguf_files as gf
from support.processes.interrupts import others_in
from unimem._core.status import ledger
from unimem.cuda import upload

TENSORS: dict[str, tuple[tuple[int, ...], int, int]] = {
    "f32": ((1000, 3001), gf.F32, 4 * 3_001_000),
    "f16": ((2, 3, 5, 7), gf.F16, 2 * 210),
    "q8_0": ((4096, 4096), gf.Q8_0, 34 * 4096 * 4096 // 32),
    "empty": ((4, 0), gf.F32, 0),
    "i64": ((17,), gf.I64, 8 * 17),
    "large": ((8192, 4096), gf.F16, 2 * 8192 * 4096),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 97 MB of random bytes."""
    rows, offset = [], 0
    for name, (ne, kind, nbytes) in TENSORS.items():
        rows.append(gf.tensor(name, ne, kind, offset))
        offset += -(-nbytes // 32) * 32
    raw, _ = gf.join(gf.head(len(rows), 0), *rows)
    file = tmp_path_factory.mktemp("weights") / "model.gguf"
    with file.open("wb") as out:
        out.write(raw + bytes(-len(raw) % 32))
        gf.random_bytes(offset).tofile(out)
    return file


@pytest.fixture
def weights(path: Path) -> Iterator[um.Weights]:
    with um.open_weights(path) as weights:
        yield weights


def check(weights: um.Weights, arrays: dict[str, Any]) -> None:
    assert list(arrays) == list(weights.tensors)
    for name, array in arrays.items():
        here = weights.tensors[name].as_array()
        assert isinstance(array, cupy.ndarray)
        assert (array.dtype, array.shape) == (here.dtype, here.shape)
        assert bridge.down(array).tobytes() == here.tobytes(), name


@pytest.mark.parametrize(
    "options", [{}, {"threads": 1}, {"threads": 3}, {"threads": 16, "staging_bytes": 16 * 4096}]
)
def test_every_byte_arrives(weights: um.Weights, options: dict[str, int], counted: Counted) -> None:
    told: list[tuple[int, int]] = []
    with cuda.Tape(weights.mapped_bytes) as tape:
        arrays = weights.to_device(tape, progress=lambda *n: told.append(n), **options)
        check(weights, arrays)
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1] >= weights.nbytes
        assert tape.used_bytes <= weights.mapped_bytes
        del arrays
    assert (counted.calls["allocate"], counted.calls["pool"]) == (1, 0)
    assert counted.calls["register"] == counted.calls["unregister"] == 1
    assert ledger()["staging"]["n_mappings"] == 0


def test_any_stream_may_use_them_at_once(weights: um.Weights) -> None:
    with cuda.Tape(weights.mapped_bytes) as tape:
        stream = new_stream()
        arrays = weights.to_device(tape)
        with stream:
            total = int(arrays["i64"].sum())
        assert total == int(weights.tensors["i64"].as_array().sum())
        del arrays


def test_it_waits_for_those_who_use_the_memory(weights: um.Weights) -> None:
    stream = new_stream()
    with cuda.Tape(weights.mapped_bytes) as tape:
        done = threading.Event()
        found: dict[str, Any] = {}

        def run() -> None:
            found.update(weights.to_device(tape, stream=stream))
            done.set()

        thread = threading.Thread(target=run)
        with held(stream):
            thread.start()
            assert not done.wait(0.2)
        thread.join()
        check(weights, found)
        found.clear()


@pytest.mark.parametrize("after", [1, 30 * MIB])
def test_cancelled_it_leaves_nothing(weights: um.Weights, after: int, counted: Counted) -> None:
    def progress(done: int, _: int) -> None:
        if done >= after:
            raise KeyboardInterrupt

    with cuda.Tape(weights.mapped_bytes + MIB) as tape:
        before = tape.take(100)
        before.fill(7)
        mark, address = tape.mark(), before.data.ptr
        with pytest.raises(KeyboardInterrupt):
            weights.to_device(tape, progress=progress, threads=1, staging_bytes=16 * 4096)
        assert tape.mark() == mark
        assert counted.calls["register"] == counted.calls["unregister"]
        assert others_in(upload) == []
        again = tape.take(1000)
        again.fill(3)  # no copy is under way
        assert set(bridge.down(again).tolist()) == {3}
        tape.rewind(mark)
        check(weights, weights.to_device(tape))
        assert (before.data.ptr, set(bridge.down(before).tolist())) == (address, {7})
