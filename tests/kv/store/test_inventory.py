"""What lies on a store's disk: conversations, their beginnings in common, and damage."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from conftest import Run
from support.files.prefix_stores import CHUNK, MODEL, TOKENS, cache, files_of, needs_notes, opened
from unimem.kv.store import notes
from unimem.kv.store.inventory import Inventory, find_damaged, total_of
from unimem.kv.store.store import KVStore
from unimem.kv.store.tiers import DiskTier


def disk_of(store: KVStore) -> DiskTier:
    assert store._disk is not None
    return store._disk


def put_two(store: KVStore, model: str = MODEL) -> None:
    """Two conversations of four chunks, with two chunks in common."""
    for tail in (0, 1000):
        tokens = [token + tail * (i >= 2 * CHUNK) for i, token in enumerate(TOKENS[: 4 * CHUNK])]
        with cache(4 * CHUNK) as kv:
            store.put(kv, tokens, model=model)


def test_conversations_have_ends_and_a_beginning_in_common(tmp_path: Path) -> None:
    needs_notes(tmp_path)
    with opened(tmp_path / "kv", salt="secret") as store:
        put_two(store)
        found = Inventory(disk_of(store))
        ends = found.ends()
        assert sorted((node.end, len(node.children)) for node in ends) == [
            (2 * CHUNK, 2),
            (4 * CHUNK, 0),
            (4 * CHUNK, 0),
        ]
        (shared,) = [node for node in ends if node.children]
        one, other = [node for node in ends if not node.children]
        assert len(found.path(shared)) == 2
        assert len(found.path(one)) == 4
        assert len(found.only(one)) == 2
        assert len(found.only(shared)) == len(found.chunks) == 6
        assert {chunk.namespace[:2] for chunk in found.chunks.values()} == {("unimem", MODEL)}
        assert all(chunk.tenant and chunk.made for chunk in found.chunks.values())
        assert {*found.only(one)}.isdisjoint(found.only(other))


def test_windows_belong_to_the_tokens_they_end_with(tmp_path: Path) -> None:
    needs_notes(tmp_path)
    layers = [um.LayerKV(2, 64, window=20), um.LayerKV(2, 64)]
    with (
        opened(tmp_path / "kv") as store,
        um.KVCache(layers=layers, max_seq_len=64, spare_rows=2 * CHUNK) as kv,
    ):
        kv.reserve(32)
        kv.commit(32)
        store.put(kv, TOKENS[:32], model=MODEL)
        found = Inventory(disk_of(store))
        (end,) = found.ends()
        assert (end.end, len(end.chunks)) == (32, 2)
        assert len(found.path(end)) == len(found.chunks) > 4
        assert all(fault is None for *_, fault in find_damaged(disk_of(store)))


def test_hits_count_what_was_restored(tmp_path: Path) -> None:
    needs_notes(tmp_path)
    with opened(tmp_path / "kv") as store, cache() as kv:
        put_two(store)
        store.restore_into(kv, TOKENS[: 3 * CHUNK], model=MODEL)
        hits = sorted(chunk.hits for chunk in Inventory(disk_of(store)).chunks.values())
    assert hits == [0, 0, 0, 1, 1, 1]


def test_sums_of_conversations_are_those_of_their_chunks(tmp_path: Path) -> None:
    needs_notes(tmp_path)
    with opened(tmp_path / "kv") as store:
        put_two(store)
        with cache(0) as kv:
            store.restore_into(kv, TOKENS[: 3 * CHUNK], model=MODEL)
        found = Inventory(disk_of(store))
        assert len(found.nodes) == 6
        for node in found.nodes.values():
            assert found.total(node) == total_of(found.path(node))


def test_a_damaged_note_ends_no_walk(tmp_path: Path) -> None:
    needs_notes(tmp_path)
    with opened(tmp_path / "kv") as store:
        put_two(store)
        disk = disk_of(store)
        for chunk in Inventory(disk).chunks.values():  # all follow each other in a circle
            with open(disk.path_of(bytes.fromhex(chunk.key))) as file:
                note = notes.read_note(file.fileno()) | {"parent": chunk.at}
                notes.write_note(file.fileno(), note)
        found = Inventory(disk)
        for node in found.nodes.values():
            assert found.path(node) == found.only(node) == node.chunks
            assert found.total(node) == total_of(node.chunks)
        for chunk in found.chunks.values():
            text = json.dumps({"made": 1 << 60, "end": -1, "model": ["m"]}).encode()
            os.setxattr(disk.path_of(bytes.fromhex(chunk.key)), "user.unimem", text)
        for chunk in Inventory(disk).chunks.values():
            assert (chunk.made, chunk.end, chunk.model) == (None, 0, "['m']")


def test_a_pinned_chunk_makes_no_room(tmp_path: Path) -> None:
    needs_notes(tmp_path)
    with opened(tmp_path / "kv", disk_bytes=16384 * 8) as store, cache(40) as kv:
        store.put(kv, TOKENS[: 2 * CHUNK], model=MODEL)
        disk = disk_of(store)
        pinned = {bytes.fromhex(key) for key in Inventory(disk).chunks}
        for key in pinned:
            notes.pin(disk.path_of(key), notes.FOR_EVER)
        for model in "abc":  # more than there is room for
            assert store.put(kv, TOKENS, model=model) == 40
        assert all(disk.has(key) for key in pinned)
        assert [disk.drop(key) for key in pinned] == [0, 0]
        disk.give_back()
        assert disk.stat().n_chunks == 2
        disk.remove(pinned.pop())  # as a damaged one is
        assert disk.stat().n_chunks == 1


@pytest.mark.parametrize("differ", [False, True])
def test_each_damaged_chunk_is_found(tmp_path: Path, differ: bool) -> None:
    needs_notes(tmp_path)
    chance = random.Random(1)
    layers = [um.LayerKV(2, 64, window=20), um.LayerKV(3, 32)]
    with opened(tmp_path / "kv") as store:
        with (
            um.KVCache(layers=layers, max_seq_len=512, spare_rows=500)
            if differ
            else um.KVCache(2, 2, 32, 512)
        ) as kv:
            kv.reserve(400)
            kv.commit(400)
            store.put(kv, range(400), model=MODEL)
        disk = disk_of(store)
        before = {path: path.stat().st_mtime_ns for path in files_of(tmp_path / "kv")}
        assert {fault for *_, fault in find_damaged(disk)} == {None}
        assert before == {path: path.stat().st_mtime_ns for path in before}
        damaged = chance.sample(sorted(before), 50)
        for i, path in enumerate(damaged):
            _damage(path, chance, i)
        found = {key for key, _, fault in find_damaged(disk) if fault is not None}
    assert found == {path.stem for path in damaged}


def test_what_others_put_anew_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "kv") as store:
        put_two(store)
        disk, read, locked = disk_of(store), DiskTier.read, DiskTier._locked
        before, seen, gone = {*disk.chunks()}, list[bytes](), list[bytes]()

        def late(tier: DiskTier, key: bytes, *of: Any, **options: Any) -> int:
            if not seen:
                seen.append(key)
                tier.drop(key)
                gone.append(key)
            return read(tier, key, *of, **options)

        @contextmanager
        def brief(tier: DiskTier) -> Iterator[None]:
            try:
                with locked(tier):
                    yield
            finally:
                if gone:
                    gone.clear()
                    put_two(store)

        monkeypatch.setattr(DiskTier, "read", late)
        monkeypatch.setattr(DiskTier, "_locked", brief)
        found = list(find_damaged(disk))
        assert {fault for *_, fault in found} == {None}
        assert len(found) == len(before) - 1
        assert {file.name for file in disk.chunks()} == {file.name for file in before}


def _damage(path: Path, chance: random.Random, i: int) -> None:
    """Flip a bit of the header, of all bytes or of the numbers of rows; cut off, or lengthen."""
    raw = bytearray(path.read_bytes())
    first, end = [(0, 96), (0, len(raw)), (80, 96), (0, 0), (0, 0)][i % 5]
    if end:
        raw[chance.randrange(first, end)] ^= 1 << chance.randrange(8)
    elif i % 5 == 3:
        del raw[chance.randrange(len(raw)) :]
    else:
        raw += bytes(chance.randrange(1, 5000))
    with open(path, "r+b") as file:  # its note stays
        file.truncate(len(raw))
        file.write(raw)


def test_four_processes_put_and_get_meanwhile(tmp_path: Path, run_python: Run) -> None:
    # In a process of its own with one thread, so that it may fork.
    done = run_python(
        f"""
        import multiprocessing, warnings
        import unimem as um
        from unimem.kv.store.inventory import Inventory, find_damaged, total_of
        warnings.simplefilter("error")

        def opened():
            options = dict(ram_bytes=0, disk_bytes=1 << 20, chunk_tokens=8)
            return um.KVStore({str(tmp_path)!r}, **options)

        def work(seed):
            with opened() as store, um.KVCache(2, 2, 32, 64, pages="4k") as kv:
                for i in range(25):
                    tokens = [seed * (i % 7), i % 5, *range(38)]
                    kv.clear()
                    if store.restore_into(kv, tokens, model="m") < 40:
                        kv.clear()
                        kv.reserve(40)
                        kv.commit(40)
                        store.put(kv, tokens, model="m")

        fork = multiprocessing.get_context("fork")
        others = [fork.Process(target=work, args=(n,)) for n in range(4)]
        [each.start() for each in others]
        n_seen = 0
        with opened() as store:
            is_last = False
            while not is_last:
                is_last = not any(each.is_alive() for each in others)
                found = Inventory(store._disk)
                n_seen = max(n_seen, len(found.chunks))
                for node in found.ends()[:3]:
                    for chunk in found.only(node):
                        store._disk.drop(bytes.fromhex(chunk.key))
                assert not [fault for *_, fault in find_damaged(store._disk) if fault]
            [each.join() for each in others]
            store._disk.give_back()
            left = store.stat().tiers[0].n_chunks
        print(n_seen > 0, left, [each.exitcode for each in others])
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "True 0 [0, 0, 0, 0]\n"
