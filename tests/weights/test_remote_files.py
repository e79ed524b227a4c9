"""Weights from a URL: read by ranges into placed memory, equal to those from a file."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.models.make import write_model
from support.servers.model_server import serving
from support.servers.object_server import ObjectServer, serving_objects
from unimem.engine import Decoder, embedded_model
from unimem.engine.stored_prefixes import model_name
from unimem.remote import transfers
from unimem.system import limits

pytest.importorskip("obstore", reason="obstore reads s3://: pip install '.[remote]'")

TINY = Path(embedded_model())
URL, PATH = "s3://bucket/tiny.gguf", "/bucket/tiny.gguf"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    monkeypatch.setattr(transfers, "FIRST_WAIT_S", 0.001)
    with serving_objects(monkeypatch) as state:
        state.add(PATH, TINY.read_bytes())
        yield state


def bytes_of(weights: um.Weights) -> dict[str, bytes]:
    return {name: tensor.as_array().tobytes() for name, tensor in weights.tensors.items()}


@pytest.mark.parametrize(
    "options", [{}, {"load": "direct", "pages": "thp"}, {"load": "copy", "verify": False}]
)
def test_a_url_gives_the_bytes_of_the_file(store: ObjectServer, options: dict[str, Any]) -> None:
    with um.open_weights(TINY) as file, um.open_weights(URL, **options) as weights:
        assert bytes_of(weights) == bytes_of(file)
        assert (weights.load, weights.load_reason) == ("direct", "it is read from a server")
        assert weights.fingerprint == file.fingerprint
        assert weights.content_hash() == file.content_hash()
        assert weights.files == (URL,)
        assert len(weights.blocks) == 1


def test_a_url_onto_a_tape(store: ObjectServer) -> None:
    with um.Tape(2 << 20, pages="4k") as tape, um.open_weights(TINY) as file:
        with um.open_weights(URL, tape=tape) as weights:
            assert bytes_of(weights) == bytes_of(file)
        tape.clear()
        store.choose_fault = lambda *_: "503" if len(store.asked) > 1 else ""
        used = tape.used_bytes
        with pytest.raises(OSError, match="503"):
            um.open_weights(URL, tape=tape)
        assert tape.used_bytes == used, "nothing stays taken"


def test_a_web_server(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp reads URLs: pip install '.[remote]'")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as server, um.open_weights(TINY) as file:
        with um.open_weights(server.add(TINY)) as weights:
            assert bytes_of(weights) == bytes_of(file)
        server.has_ranges = False
        with pytest.raises(OSError, match="sends no ranges"):
            um.open_weights(server.url + "/tiny.gguf")


def test_hugging_face_is_checked_by_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub", reason="for hf://: pip install '.[remote]'")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", "")
    with serving() as hub, serving() as cdn:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.redirects["/me/stories/resolve/main/tiny.gguf"] = cdn.add(TINY)
        hub.headers["X-Linked-ETag"] = hashlib.sha256(TINY.read_bytes()).hexdigest()
        with um.open_weights("hf://me/stories/tiny.gguf") as weights:
            assert weights.content_hash()
        hub.headers["X-Linked-ETag"] = "0" * 64
        with pytest.raises(OSError, match="not those of the hash"):
            um.open_weights("hf://me/stories/tiny.gguf")


@pytest.mark.parametrize("is_format", [False, True])
def test_a_header_damaged_in_transit(store: ObjectServer, is_format: bool) -> None:
    data = TINY.read_bytes()
    at = 0 if is_format else data.index(b"llama.context_length") + 24  # its value
    starts = iter([data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]])

    def change(*_: str) -> str:
        store.objects[PATH] = next(starts, data)  # with the ETag of the right one
        return ""

    store.choose_fault = change
    if is_format:  # it is read again
        with um.open_weights(URL) as weights:
            assert weights.content_hash()
    else:
        with pytest.raises(OSError, match="header was damaged on its way: open the file again"):
            um.open_weights(URL)


def test_refusals(store: ObjectServer) -> None:
    with pytest.raises(ValueError, match=r"load='map' of s3://.*load='direct'"):
        um.open_weights(URL, load="map")
    with pytest.raises(ValueError, match="verify"):
        um.open_weights(URL, verify="no")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no such file: look at the address: 's3://b/no'"):
        um.open_weights("s3://b/no")
    answered = iter(range(9))

    def replaced(*_: str) -> str:
        if next(answered) == 1:
            store.add(PATH, TINY.read_bytes()[::-1])
        return ""

    store.choose_fault = replaced
    with pytest.raises(OSError, match="replaced while it was read") as caught:
        um.open_weights(URL)
    assert caught.value.errno == errno.ESTALE


def test_an_engine_of_a_url(store: ObjectServer) -> None:
    found = []
    for path in (str(TINY), URL):
        with um.open_weights(path) as weights, Decoder(weights, ctx=32, threads=1) as dec:
            found.append(("".join(dec.generate("Once upon", 8)), model_name(weights)))
    assert found[0] == found[1]
    with Decoder(URL, ctx=32, threads=1) as dec:
        assert "".join(dec.generate("Once upon", 8)) == found[0][0]
    with um.Layout.for_model(URL, ctx=32) as layout:
        assert isinstance(layout.weights, um.Weights)
        assert layout.plan is not None
        assert (layout.plan.load, layout.weights.load) == ("direct", "direct")


@pytest.mark.parametrize("by_layout", [False, True])
def test_an_engine_repacks_weights_of_a_url(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_layout: bool
) -> None:
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path))
    model = write_model(tmp_path / "q4.gguf", kind="q4_0")
    store.add(PATH, model.read_bytes())
    options: Any = {"ctx": 32, "threads": 1, "load": "repack"}
    with Decoder(model, **options) as dec:
        if dec._memory.load != "repack":
            pytest.skip("this CPU repacks nothing")
        logits = dec.prefill([1, 2, 3]).copy()
    kept = sorted(tmp_path.rglob("*"))
    planned = um.plan(URL, **options)
    with ExitStack() as undo:
        source: Any = URL
        if by_layout:
            layout = undo.enter_context(um.Layout.for_model(URL, **options))
            assert layout.plan is not None
            assert layout.plan.load == "repack"
            source, options = layout.weights, {"ctx": 32, "threads": 1, "layout": layout}
        dec = undo.enter_context(Decoder(source, **options))
        assert dec._memory.load == "repack"
        assert np.array_equal(dec.prefill([1, 2, 3]), logits)
        if not by_layout:
            assert rows_of(planned) == rows_of(dec.report()), "planned as it is taken"
    assert sorted(tmp_path.rglob("*")) == kept, "nothing lies on a disk"


def rows_of(report: Any) -> dict[str, int]:
    return {row.category: row.nbytes for row in report.rows if row.category.startswith("weights")}


@pytest.mark.parametrize("load", ["auto", "repack"])
def test_an_engine_of_a_url_that_does_not_fit_reads_no_data(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch, load: Any
) -> None:
    limit = limits.Limit("memory of the machine", 1 << 20, 0, "a larger one")
    monkeypatch.setattr(limits, "memory_limits", lambda: (limit,))
    monkeypatch.setattr(limits, "available_bytes", lambda: 1 << 20)
    with pytest.raises(um.CapacityError):
        Decoder(URL, ctx=32, load=load)
    assert {asked for _, _, asked in store.asked} == {"0-262143"}


def break_off(store: ObjectServer, tape: um.Tape, **options: Any) -> None:
    """Load onto a tape while the server fails after the header and six ranges."""
    answered = iter(range(10**6))
    store.choose_fault = lambda *_: "503" if next(answered) >= 7 else ""
    with pytest.raises(OSError, match="503"):
        um.open_weights(URL, tape=tape, threads=1, **options)
    store.choose_fault = lambda *_: ""


def test_a_load_onto_a_tape_goes_on(store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 100_000)
    with um.Tape(2 << 20, pages="4k") as tape, um.open_weights(TINY) as file:
        break_off(store, tape, verify=False)
        assert tape.used_bytes == 0, "nothing stays taken"
        had = sorted(set(store.begins()))
        with um.open_weights(URL, tape=tape, threads=1, verify=False) as weights:
            assert bytes_of(weights) == bytes_of(file)
            rest = store.begins()
            assert rest[0] == 0, "the header"
            assert set(rest[1:]).isdisjoint(had[1:-1]), "what was there was not read again"
            assert len(rest) + len(had) - 2 == 12, "and nothing else was left out"


def test_overwritten_pieces_are_read_again(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 100_000)
    with um.Tape(2 << 20, pages="4k") as tape, um.open_weights(TINY) as file:
        break_off(store, tape)
        had = store.begins()
        tape.take(250_000, "uint8")[:] = 1
        tape.clear()
        with um.open_weights(URL, tape=tape, threads=1) as weights:
            assert bytes_of(weights) == bytes_of(file)
        assert len(store.begins()) > 12 - len(set(had)), "some of it came twice"
        tape.clear()
        break_off(store, tape)
        changed = bytearray(TINY.read_bytes())
        changed[-1] ^= 1
        store.add(PATH, bytes(changed))
        store.asked.clear()
        with um.open_weights(URL, tape=tape, threads=1) as weights:
            assert bytes_of(weights) != bytes_of(file), "another version is another file"
        assert len(store.begins()) == 13
