"""Snapshots and chunks on a server: the same as in files, and no harm if the server fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files.prefix_stores import CHUNK, DIM, HEADS, MODEL, TOKENS, bytes_of, cache
from support.servers.object_server import FAULTS, Handler, ObjectServer, serving_objects
from unimem.kv.store import remote_tier
from unimem.remote import transfers

pytest.importorskip("obstore", reason="obstore reads s3://: pip install '.[remote]'")

URL = "s3://bucket/kv"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ObjectServer]:
    monkeypatch.setattr(transfers, "FIRST_WAIT_S", 0.001)
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
    with serving_objects(monkeypatch) as state:
        yield state


@contextmanager
def opened(**options: Any) -> Iterator[um.KVStore]:
    given = {"ram_bytes": 0, "disk_bytes": 0, "chunk_tokens": CHUNK} | options
    with um.KVStore(given.pop("where", URL), **given) as kv_store:
        yield kv_store


# ---- snapshots ----


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("s3", {}), ("memory", {"dtype": "q8_0"}), ("s3", {"window": 32, "grow": False})],
)
def test_a_snapshot_is_restored_bit_for_bit(
    store: ObjectServer, tmp_path: Path, scheme: str, options: dict[str, Any]
) -> None:
    url = f"{scheme}://bucket/one.kv"
    with cache(45, **options) as kv:
        kv.save(url, tokens=TOKENS, model=MODEL)
        kv.save(tmp_path / "one.kv", tokens=TOKENS, model=MODEL)
        n = kv.seq_len
        for mode in ("map", "copy"):
            with um.KVCache.restore(url, mode=mode, tokens=TOKENS, model=MODEL) as again:
                assert (again.seq_len, again.next_position) == (n, 45)
                assert bytes_of(again, n) == bytes_of(kv, n)
    if scheme == "s3":
        assert store.objects["/bucket/one.kv"] == (tmp_path / "one.kv").read_bytes()


def test_a_snapshot_of_layers_that_differ(store: ObjectServer, tmp_path: Path) -> None:
    url, layers = "s3://bucket/layers.kv", [um.LayerKV(HEADS, DIM), um.LayerKV(1, DIM, window=8)]
    with um.KVCache(layers=layers, max_seq_len=64, pages="4k") as kv:
        rows = np.random.default_rng(0).standard_normal((2, 45, HEADS, DIM)).astype("f4")
        kv.append(0, *rows)
        kv.append(1, *rows[:, :, :1])
        kv.save(url, tokens=TOKENS, model=MODEL)
        kv.save(tmp_path / "layers.kv", tokens=TOKENS, model=MODEL)
        with (
            um.KVCache.restore(url, tokens=TOKENS, model=MODEL) as again,
            um.KVCache.restore(tmp_path / "layers.kv", mode="copy") as here,
        ):
            assert (again.seq_len, again.layers) == (45, kv.layers)
            for layer in range(2):
                for there, ours in zip(again.layer(layer), here.layer(layer), strict=True):
                    assert there.tobytes() == ours.tobytes()


def test_a_damaged_remote_snapshot_is_refused(store: ObjectServer) -> None:
    with cache(45) as kv:
        kv.save("s3://bucket/one.kv")
        expected = bytes_of(kv, 45)
    whole = store.objects["/bucket/one.kv"]
    rows = whole.index(expected[:64])
    for at, rule in ((rows + 5, "checksum does not match"), (40, "")):
        store.add("/bucket/one.kv", whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(um.SnapshotError, match=f"s3://bucket/one.kv: .*{rule}"):
            um.KVCache.restore("s3://bucket/one.kv")
    store.add("/bucket/one.kv", whole[:-1])
    with pytest.raises(um.SnapshotError):
        um.KVCache.restore("s3://bucket/one.kv")
    # Bytes damaged in transit are read again; a read that was cut off continues.
    store.add("/bucket/one.kv", whole)
    faults = chain(["503", "", "wrong bytes", "", "", "short", "reset", "wrong bytes"], repeat(""))
    store.choose_fault = lambda *_: next(faults)
    with um.KVCache.restore("s3://bucket/one.kv") as again:
        assert bytes_of(again, 45) == expected


def test_wrong_remote_snapshots_are_refused(store: ObjectServer) -> None:
    with pytest.raises(FileNotFoundError, match="s3://bucket/none"):
        um.KVCache.restore("s3://bucket/none")
    with cache(45) as kv:
        with pytest.raises(OSError, match="read-only"):
            kv.save(f"http://127.0.0.1:{store.port}/bucket/one.kv")
        store.choose_fault = lambda method, _: "closed" if method == "PUT" else ""
        with pytest.raises(ValueError, match="tokens"):
            kv.save("s3://bucket/one.kv", tokens=[1])
    assert not store.objects


# ---- chunks ----


def test_chunks_are_the_files_of_a_folder(store: ObjectServer, tmp_path: Path) -> None:
    with cache(45) as kv, opened() as there:
        assert there.put(kv, TOKENS, model=MODEL) == 40
        with opened(where=tmp_path / "s", disk_bytes=1 << 24) as here:
            here.put(kv, TOKENS, model=MODEL)
        files = {f"/bucket/kv/{path.name}": path.read_bytes() for path in tmp_path.glob("s/*.kv")}
        assert store.objects == files
        assert len(files) == 5
        with opened() as other, cache() as out:
            assert other.longest(TOKENS, model=MODEL, kv=out) == 40
            assert other.restore_into(out, TOKENS[:30], model=MODEL) == 24
            assert bytes_of(out, 24) == bytes_of(kv, 24)
            assert other.put(kv, TOKENS, model=MODEL) == 40
            tier = other.stat().tiers[-1]
            assert (tier.name, tier.path, tier.n_chunks) == ("remote", URL, 5)
            assert (other.url, other.folder) == (URL, "")
    written = [asked for asked in store.asked if asked[0] == "PUT"]
    assert len(written) == 5
    assert not any(path == "/bucket" for _, path, _ in store.asked), "nothing is listed"


def test_a_disk_in_front_of_a_server_serves_hits(store: ObjectServer, tmp_path: Path) -> None:
    with cache(45) as kv, opened() as there:
        there.put(kv, TOKENS, model=MODEL)
        expected = bytes_of(kv, 40)
    for round_ in range(2):
        store.asked.clear()
        with opened(disk_bytes=1 << 24) as both, cache() as out:
            assert both.folder.startswith(str(tmp_path / "cache" / "kv"))
            assert [tier.name for tier in both.stat().tiers] == ["disk", "remote"]
            assert both.restore_into(out, TOKENS, model=MODEL) == 40
            assert bytes_of(out, 40) == expected
        assert bool(store.asked) == (round_ == 0), "then all of it is on disk"


def test_a_web_server_is_read(store: ObjectServer) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp reads URLs: pip install '.[remote]'")
    with cache(45) as kv, opened() as there, cache() as out:
        there.put(kv, TOKENS[:16], model=MODEL)
        with opened(where=f"http://me:s3cret@127.0.0.1:{store.port}/bucket/kv?k=s3cret") as web:
            assert "s3cret" not in repr(web)
            assert web.restore_into(out, TOKENS, model=MODEL) == 16
            assert web.put(kv, TOKENS, model=MODEL) == 16
            assert web.stat().refused_chunks == 1


def damage_file(data: bytes) -> bytes:
    return data[:-3000] + bytes([data[-3000] ^ 16]) + data[-2999:]


@pytest.mark.parametrize("change", [damage_file, lambda data: data[:5000], lambda data: data * 2])
def test_a_damaged_chunk_is_a_miss_and_is_removed(store: ObjectServer, change: Any) -> None:
    with cache(45) as kv, cache() as out, opened() as there:
        there.put(kv, TOKENS[:16], model=MODEL)
        first = set(store.objects)
        there.put(kv, TOKENS, model=MODEL)
        third = next(path for path in store.objects if path not in first)
        store.add(third, change(store.objects[third]))
        with opened() as other:
            with pytest.warns(um.PlacementWarning, match=URL):
                n = other.restore_into(out, TOKENS, model=MODEL)
            assert bytes_of(out, n) == bytes_of(kv, n)
            assert n in (16, 24, 32)
            assert third not in store.objects
            out.clear()
            assert other.put(kv, TOKENS, model=MODEL) == 40
            assert other.restore_into(out, TOKENS, model=MODEL) == 40


def test_damage_in_transit_removes_nothing(store: ObjectServer) -> None:
    with cache(45) as kv, cache() as out, opened() as there:
        there.put(kv, TOKENS[:8], model=MODEL)
        faults = chain(["", "wrong bytes"], repeat(""))
        store.choose_fault = lambda *_: next(faults)
        with opened() as other:
            assert other.restore_into(out, TOKENS, model=MODEL) == 8
        assert len(store.objects) == 1


@pytest.mark.parametrize("disk_bytes", [0, 1 << 24])
def test_a_failing_server_costs_one_warning(store: ObjectServer, disk_bytes: int) -> None:
    expected = 40 if disk_bytes else 0
    with cache(45) as kv, cache() as out, opened(disk_bytes=disk_bytes) as there:
        store.choose_fault = lambda *_: "503"
        with pytest.warns(um.PlacementWarning, match=f"without its server.*503.*{URL}"):
            assert there.put(kv, TOKENS, model=MODEL) == expected
        n_asked = len(store.asked)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert there.put(kv, TOKENS, model=MODEL) == expected
            assert there.restore_into(out, TOKENS, model=MODEL) == expected
        assert len(store.asked) == n_asked, "it is left alone"


def test_without_the_right_to_list(store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 refuses a missing object, unless the bucket may be listed."""
    plain = Handler.answer

    def refuse(self: Any, status: int, body: bytes = b"", **headers: str) -> None:
        plain(self, 403 if status == 404 else status, body, **headers)

    monkeypatch.setattr(Handler, "answer", refuse)
    with cache(45) as kv, cache() as out, opened() as there:
        assert there.restore_into(out, TOKENS, model=MODEL) == 0
        assert there.put(kv, TOKENS, model=MODEL) == 40
        assert there.restore_into(out, TOKENS, model=MODEL) == 40


@pytest.mark.parametrize("n", [20, pytest.param(300, marks=pytest.mark.slow)])
def test_nothing_wrong_is_restored(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr(remote_tier, "REST_S", 0.0)
    monkeypatch.setattr(remote_tier, "WAIT_S", 0.3)
    store.slow_s = 0.6
    rng = np.random.default_rng(3)
    with cache(45) as kv, cache() as out, warnings.catch_warnings():
        warnings.simplefilter("ignore", um.PlacementWarning)
        while store.n_faults < n:
            store.choose_fault = lambda *_: (
                str(rng.choice([name for name in FAULTS if name != "slow" or rng.random() < 0.2]))
                if rng.random() < 0.4
                else ""
            )
            with opened() as there:
                there.put(kv, TOKENS, model=MODEL)
                out.clear()
                done = there.restore_into(out, TOKENS, model=MODEL)
            assert bytes_of(out, done) == bytes_of(kv, done)
        store.choose_fault = lambda *_: ""
        with opened() as there:
            there.put(kv, TOKENS, model=MODEL)
            out.clear()
            assert there.restore_into(out, TOKENS, model=MODEL) == 40


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"disk_bytes": 1 << 20}, "UNIMEM_CACHE=off leaves no folder"),
        ({"ram_bytes": 1 << 20}, "UNIMEM_CACHE=off leaves no folder"),
        ({"where": "nosuch://a/b"}, "got 'nosuch://a/b'"),
    ],
)
def test_wrong_options_of_a_remote_store_are_refused(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], text: str
) -> None:
    monkeypatch.setenv("UNIMEM_CACHE", "off")
    with pytest.raises(ValueError, match=text), opened(**options):
        pass
    with opened(disk_bytes=None) as there:
        assert there.folder == ""
