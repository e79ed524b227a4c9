from __future__ import annotations

import os
import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from support.files.llama_states import cells, recurrent, same, state
from unimem.errors import FormatError
from unimem.llama_cpp.slot_file import read_slot_file, write_slot_file
from unimem.llama_cpp.state import kv_to_state

IDS = np.arange(20, dtype=np.int32)
SEQUENCE = struct.pack("<Ii", 0xAF143CD8, 0)


def test_a_slot_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    write_slot_file(path, IDS, state(n_streams=2, head=SEQUENCE))
    found = read_slot_file(path)
    assert path.read_bytes()[:4] == b"qsgg"
    assert same(found.kv, state(n_streams=2))
    assert list(found.tokens) == list(IDS)
    assert found.checkpoints == ()


def test_tokens_and_checkpoints_of_the_newest_servers(tmp_path: Path) -> None:
    kv, window = state(cells(), recurrent()), state(recurrent(8), head=SEQUENCE)
    saved = kv_to_state(window)
    packed = np.array([-1, 1, 20, *IDS, 0], "<i4")
    path = tmp_path / "slot"
    path.write_bytes(
        struct.pack("<III", 0x67677371, 4, len(packed)) + packed.tobytes() + kv_to_state(kv)
        + b"SCKP" + struct.pack("<II", 1, 1)
        + struct.pack("<qiiQ", 8, 0, 7, len(saved)) + saved + bytes(16)
    )  # fmt: skip
    found = read_slot_file(path)
    assert list(found.tokens) == list(IDS)
    assert same(found.kv, kv)
    ((n, checkpoint),) = found.checkpoints
    assert n == 8
    assert same(checkpoint, window)
    data = path.read_bytes()
    for n in range(len(data) - 1, data.index(b"SCKP") + 7, -1):
        path.write_bytes(data[:n])
        with pytest.raises(FormatError, match="cut off inside its checkpoints"):
            read_slot_file(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda data: data[:7], "cut off inside its header"),
        (lambda data: b"GGUF" + data[4:], "no slot file of llama.cpp"),
        (lambda data: data[:4] + struct.pack("<I", 5) + data[8:], "version 5 .* is not known"),
        (lambda data: data[:4] + struct.pack("<I", 2) + data[8:], "version 2 .* is not known"),
        (lambda data: data[:50], "cut off inside its 20 tokens"),
        (lambda data: data[:-1], "the state of one sequence"),
        (lambda data: data[:12] + struct.pack("<i", -1) + data[16:], "images or sound"),
        (lambda data: data[:16] + struct.pack("<i", -7) + data[20:], "a negative number"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, change: object, match: str) -> None:
    path = tmp_path / "slot"
    write_slot_file(path, IDS, state())
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(FormatError, match=match) as caught:
        read_slot_file(path)
    assert caught.value.path == str(path)


def test_what_is_no_file_is_neither_read_nor_written(tmp_path: Path) -> None:
    """A FIFO would wait for another process; a large file of zeros would be read whole."""
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    large.touch()
    os.truncate(large, 1 << 42)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match="Expected a regular file"):
            read_slot_file(path)
        with pytest.raises(OSError, match="Is not a regular file"):
            write_slot_file(path, IDS, state())
    with pytest.raises(FormatError, match="does not begin with ggsq"):
        read_slot_file(large)


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    write_slot_file(path, IDS, state())
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    with pytest.raises(TypeError, match="kv: expected a LlamaKV"):
        write_slot_file(path, IDS, b"")  # type: ignore[arg-type]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_slot_file(path, IDS, state(cells(40)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
