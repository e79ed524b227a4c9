"""The hash of a model's content: as defined, in every mode, with progress, and when stopped."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from conftest import Run
from support.files import gguf_files as gf
from support.processes import interrupts
from support.processes.forks import needs_fork
from unimem.engine import embedded_model
from unimem.errors import ClosedError
from unimem.weights import content_hash
from unimem.weights.loading import Load
from unimem.weights.opened import Weights, open_weights

MIB = 1 << 20
SMALL = bytes(range(240))
LIST = gf.kv("list", gf.ARRAY, gf.array(gf.STRING, 1, gf.string("x")))


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def by_definition(metadata: dict[str, bytes], tensors: list[tuple[str, str, Any, bytes]]) -> str:
    """The hash, from the raw values of the keys and the name, type, ne and data of each tensor."""
    out = b"unimem content 1\n" + u64(len(metadata))
    for key, value in sorted(metadata.items()):
        out += u64(len(key.encode())) + key.encode() + u64(len(value)) + value
    out += u64(len(tensors))
    for name, kind, ne, data in sorted(tensors):
        out += u64(len(name.encode())) + name.encode() + u64(len(kind)) + kind.encode()
        out += u64(len(ne), *ne, len(data))
        for at in range(0, len(data), 8 * MIB):
            out += xxhash.xxh3_128_digest(data[at : at + 8 * MIB])
    return xxhash.xxh3_128_hexdigest(out)


def write(path: Path, data: bytes, *parts: gf.Part) -> Path:
    """A file of a header of these parts, and data behind it."""
    raw, _ = gf.join(*parts)
    path.write_bytes(raw + bytes(-len(raw) % 32) + data)
    return path


def model(path: Path, data: bytes, *, key: bytes = b"\x07", name: str = "b") -> Path:
    """A file of three tensors, one of them empty; `data` belongs to the tensor `name`."""
    return write(
        path,
        bytes(range(32)) + data,
        gf.head(3, 2),
        gf.kv("z", gf.UINT8, key),
        LIST,
        gf.tensor(name, (len(data) // 4,), gf.F32, 32),
        gf.tensor("a", (4, 2), gf.F32, 0),
        gf.tensor("none", (0,), gf.F32, 0),
    )


def hash_of(path: Path) -> str:
    with open_weights(path) as w:
        return w.content_hash()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a tensor of two whole chunks and a part of one."""
    path = tmp_path_factory.mktemp("hash") / "large.gguf"
    return model(path, gf.random_bytes(17 * MIB + 12).tobytes())


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return model(tmp_path / "file.gguf", SMALL)


@pytest.fixture(autouse=True)
def leaves_no_thread() -> Iterator[None]:
    yield
    assert interrupts.others_in(content_hash) == []


def test_hash_is_as_defined(small: Path, large: Path) -> None:
    metadata = {
        "z": struct.pack("<IB", gf.UINT8, 7),
        "list": struct.pack("<IIQQ", gf.ARRAY, gf.STRING, 1, 1) + b"x",
    }
    others = [("a", "f32", (4, 2), bytes(range(32))), ("none", "f32", (0,), b"")]
    for path in (small, large):
        with open_weights(path) as w:
            data = w.tensors["b"].as_array().tobytes()
            tensors = [("b", "f32", (len(data) // 4,), data), *others]
            assert w.content_hash() == by_definition(metadata, tensors)


def test_hash_of_safetensors_is_as_defined(tmp_path: Path) -> None:
    header = (
        b'{"__metadata__":{"format":"p\\u0074"},'
        b'"\xc3\xb6":{"dtype":"F8_E4M3","shape":[2,3],"data_offsets":[0,6]},'
        b'"a":{"dtype":"I16","shape":[],"data_offsets":[6,8]}}'
    )
    path = tmp_path / "model.safetensors"
    path.write_bytes(u64(len(header)) + header + bytes(range(8)))
    tensors: list[Any] = [("ö", "f8_e4m3", (3, 2), bytes(range(6))), ("a", "i16", (), b"\6\7")]
    assert hash_of(path) == by_definition({"format": b"str\0pt"}, tensors)


def test_known_hash() -> None:
    with open_weights(embedded_model()) as w:
        assert w.content_hash() == "0d9b02bc8200363980d629087d4e09cc"


def test_every_mode_and_number_of_threads_gives_the_same(large: Path) -> None:
    found = set()
    modes: tuple[Load, ...] = ("map", "copy", "direct")
    for mode in modes:
        with open_weights(large, load=mode) as w:
            found |= {w.content_hash(threads=n) for n in (1, 3, 20)}
    assert len(found) == 1


def test_a_split_model_hashes_as_the_whole(tmp_path: Path) -> None:
    def split(no: int, count: int) -> list[gf.Part]:
        numbers = {"no": no, "count": count, "tensors.count": 2}
        kind = gf.UINT16
        return [gf.kv(f"split.{k}", kind, gf.values(kind, [n])) for k, n in numbers.items()]

    key = gf.kv("general.name", gf.STRING, gf.string("n"))
    a, b = gf.tensor("a", (8,), gf.F32, 0), gf.tensor("b", (8,), gf.F32, 0)
    both = [a, gf.tensor("b", (8,), gf.F32, 32)]
    data_a, data_b = bytes(range(32)), bytes(range(100, 132))
    whole = write(tmp_path / "w.gguf", data_a + data_b, gf.head(2, 1), key, *both)
    merged = write(tmp_path / "g.gguf", data_a + data_b, gf.head(2, 4), *split(0, 0), key, *both)
    part = write(tmp_path / "m-00001-of-00002.gguf", data_b, gf.head(1, 4), *split(0, 2), key, b)
    write(tmp_path / "m-00002-of-00002.gguf", data_a, gf.head(1, 3), *split(1, 2), a)
    assert hash_of(whole) == hash_of(merged) == hash_of(part)


def test_any_change_changes_the_hash(tmp_path: Path, small: Path) -> None:
    path = tmp_path / "other.gguf"
    hashes = [
        hash_of(small),
        hash_of(model(path, SMALL[:-1] + b"\0")),
        hash_of(model(path, SMALL, key=b"\x08")),
        hash_of(model(path, SMALL, name="c")),
        hash_of(model(path, SMALL[:-4])),
    ]
    assert len(set(hashes)) == len(hashes)
    # The order of the file and the padding between tensors do not matter.
    write(
        path,
        SMALL + b"\xff" * 16 + bytes(range(32)),
        gf.head(3, 2),
        LIST,
        gf.kv("z", gf.UINT8, b"\x07"),
        gf.tensor("none", (0,), gf.F32, 0),
        gf.tensor("a", (4, 2), gf.F32, 256),
        gf.tensor("b", (60,), gf.F32, 0),
    )
    assert hash_of(path) == hashes[0]


# ---- changed files ----


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda path: os.truncate(path, 9 * MIB), errno.EIO),
        (lambda path: Path(shutil.copy(path, f"{path}.new")).replace(path), errno.ESTALE),
    ],
    ids=["truncated", "replaced"],
)
def test_a_changed_mapped_file_raises(
    tmp_path: Path,
    large: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], object],
    code: int,
) -> None:
    path = Path(shutil.copy(large, tmp_path))
    ran: list[None] = []
    hash_all = content_hash.hash_in_threads

    def hash_later(*arguments: Any) -> list[bytes]:
        ran.append(None)
        change(path)
        return hash_all(*arguments)

    monkeypatch.setattr(content_hash, "hash_in_threads", hash_later)
    with open_weights(path, load="map") as w:
        for expected in (code, errno.ESTALE):  # while it is hashed, and the second time at once
            with pytest.raises(OSError, match=path.name) as caught:
                w.content_hash()
            assert caught.value.errno == expected
            assert len(ran) == 1
        w.close()  # the error keeps nothing


@pytest.mark.parametrize("mode", ["copy", "direct"])
def test_copied_weights_are_hashed_without_their_file(small: Path, mode: Load) -> None:
    with open_weights(small, load=mode) as w:
        expected = w.content_hash()
        small.unlink()
        assert w.content_hash() == expected


def test_an_intact_mapping_is_hashed(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small.parent)
    with small.open("rb") as file:
        w = open_weights(small.name, load="map")
        by_descriptor = open_weights(f"/proc/self/fd/{file.fileno()}", load="map")
    with w, by_descriptor:
        assert w.files == (small.name,)
        expected = w.content_hash()
        monkeypatch.chdir("/")
        assert w.content_hash() == by_descriptor.content_hash() == expected
        small.unlink()
        assert w.content_hash() == expected


# ---- progress, and stopping ----


@pytest.mark.parametrize("mode", ["map", "copy"])
def test_progress_grows_and_ends_with_all(tmp_path: Path, large: Path, mode: Load) -> None:
    empty = tmp_path / "file.gguf"
    empty.write_bytes(gf.head(0, 0))
    for path in (large, empty):
        calls: list[tuple[int, int]] = []
        with open_weights(path, load=mode) as w:
            found = w.content_hash(progress=lambda *now: calls.append(now))  # noqa: B023
            nbytes = w.nbytes
        assert {total for _, total in calls} == {nbytes}
        assert calls[-1] == (nbytes, nbytes)
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert (found, calls) == (by_definition({}, []), [(0, 0)])


def hold(patch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
    """Let threads wait before they hash a piece."""

    class Hasher:
        def __init__(self, *of: Any) -> None:
            self.hasher = hasher(*of)

        def update(self, data: Any) -> None:
            wait()
            self.hasher.update(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.hasher, name)

    hasher = xxhash.xxh3_128
    patch.setattr("unimem.weights.content_hash.xxhash.xxh3_128", Hasher)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """After a piece, no data is hashed until this is set: by the first call of progress."""
    event, first = threading.Event(), iter([True])
    hold(monkeypatch, lambda: next(first, False) or event.wait(60))
    return event


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_of_progress_stops_the_hash(
    large: Path, told: threading.Event, error: type[BaseException]
) -> None:
    def progress(done: int, total: int) -> None:
        assert done < total
        told.set()
        if error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        raise error

    with open_weights(large) as w:
        with pytest.raises(error) as caught:
            w.content_hash(threads=2, progress=progress)
        w.close()  # no thread uses it
        assert caught.traceback


def test_an_interrupt_leaves_no_thread(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_hash, "_PIECE_BYTES", 8 * MIB)
    hold(monkeypatch, lambda: time.sleep(0.002))  # so that threads are still running
    with open_weights(large) as w:
        for _ in interrupts.at_each_line(lambda: w.content_hash(threads=2), "unimem/"):
            assert interrupts.others_in(content_hash) == []
            w._check_unused()


@needs_fork
def test_a_forked_child_raises_closed_error(large: Path, run_python: Run) -> None:
    script = f"""
        import os, signal, threading
        import pytest
        import unimem as um
        from weights.test_content_hash import hold

        child, told = None, threading.Event()
        def progress(done, total):
            global child
            if child is None:
                child = os.fork()
                told.set()
            if child == 0:
                signal.alarm(100)
        with pytest.MonkeyPatch.context() as patch:
            hold(patch, lambda: told.wait(60))
            weights = um.open_weights({str(large)!r})
            try:
                weights.content_hash(threads=2, progress=progress)
            except um.ClosedError as error:
                assert child == 0 and "forked child" in str(error)
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    """
    done = run_python(script, "-W", "ignore", PYTHONPATH=str(Path(__file__).parents[1]))
    assert done.returncode == 0, done.stderr


def test_weights_cannot_be_closed_while_they_are_hashed(large: Path, told: threading.Event) -> None:
    refused: list[bool] = []

    def progress(done: int, total: int) -> None:
        if done < total:
            with pytest.raises(BufferError):
                w.close()
            refused.append(True)
        told.set()

    with open_weights(large) as w:
        w.content_hash(progress=progress)
        assert refused


def test_closed_weights_have_none(large: Path) -> None:
    with open_weights(large) as w:
        pass
    with pytest.raises(ClosedError):
        Weights.content_hash(w)
