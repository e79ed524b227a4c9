"""The adapter for LMCache: with LMCache's own classes if it is installed, or with stand-ins.

`make test-lmcache` runs this file and real servers in LMCache's environment.
"""

from __future__ import annotations

import select
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.servers.engine_definitions import LMCACHE, imported
from unimem.errors import PlacementWarning

N, CHUNK = 6, 4096


@pytest.fixture(scope="module")
def door() -> Iterator[Any]:
    with imported("lmcache", "unimem.lmcache", LMCACHE):
        yield import_module("unimem.lmcache")


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes
    model_name: str = "m/llama"
    kv_rank: int = 1
    object_group_id: int = 0
    cache_salt: str = ""


class Size(tuple[int, ...]):
    """A shape, as torch has it."""

    def numel(self) -> int:
        return int(np.prod(self))


@dataclass(frozen=True)
class DType:
    name: str = "torch.float16"
    itemsize: int = 2

    def __str__(self) -> str:
        return self.name


class Object:
    """Memory of LMCache for one chunk."""

    def __init__(self, fill: int = 0, shape: Any = (2, 1024), dtype: Any = None) -> None:
        self.shapes, self.dtypes = [Size(shape)], [dtype or DType()]
        self.byte_array = memoryview(bytearray([fill]) * CHUNK)

    def get_shapes(self) -> list[Size]:
        return self.shapes

    def get_dtypes(self) -> list[DType]:
        return self.dtypes


KEYS = [Key(bytes([i]) * 32) for i in range(N)]


class Server:
    """Calls an adapter as LMCache's controllers do: submit, wait for the descriptor, ask."""

    def __init__(self, door: Any, folder: Path, **options: Any) -> None:
        given = {"where": str(folder), "disk_bytes": 1 << 20} | options
        self.adapter = door.KVStoreAdapter(given, l1_memory_desc=None)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.adapter.close()

    def wait(self, fd: int) -> None:
        assert select.select([fd], [], [], 60)[0], "no task has ended"

    def put(self, keys: list[Key], objects: list[Object]) -> Any:
        task = self.adapter.submit_store_task(keys, objects)
        self.wait(self.adapter.get_store_event_fd())
        done = {}
        while task not in done:
            done |= self.adapter.pop_completed_store_tasks()
        return done[task]

    def has(self, keys: list[Key], shape: Any = (2, 1024), dtype: Any = None) -> list[int]:
        layout = SimpleNamespace(shapes=[Size(shape)], dtypes=[dtype or DType()])
        task = self.adapter.submit_lookup_and_lock_task(keys, {0: layout})
        self.wait(self.adapter.get_lookup_and_lock_event_fd())
        return self.once(self.adapter.query_lookup_and_lock_result, task)

    def get(self, keys: list[Key], objects: list[Object]) -> list[int]:
        task = self.adapter.submit_load_task(keys, objects)
        self.wait(self.adapter.get_load_event_fd())
        return self.once(self.adapter.query_load_result, task)

    def once(self, query: Any, task: int) -> list[int]:
        result = None
        while result is None:
            result = query(task)
        assert query(task) is None, "a result is given once"
        return list(result.get_indices_list())


def test_chunks_come_back_after_a_restart_under_the_same_identity_only(
    door: Any, tmp_path: Path
) -> None:
    with Server(door, tmp_path) as server:
        assert server.has(KEYS) == []
        stored = server.put(KEYS, [Object(i + 1) for i in range(N)])
        assert (stored.is_successful(), stored.bytes_transferred()) == (True, N * CHUNK)
        again = server.put(KEYS, [Object(99) for _ in KEYS])
        assert (again.is_successful(), again.bytes_transferred()) == (True, 0)
    with Server(door, tmp_path) as server:
        assert server.has(KEYS) == [*range(N)]
        outs = [Object() for _ in KEYS]
        assert server.get(KEYS, outs) == [*range(N)]
        assert [bytes(out.byte_array) for out in outs] == [bytes([i + 1]) * CHUNK for i in range(N)]
        for other in (
            {"model_name": "n"},
            {"kv_rank": 2},
            {"cache_salt": "user"},
            {"chunk_hash": b"x" * 32},
        ):
            assert server.has([replace(KEYS[0], **other)]) == [], other  # type: ignore[arg-type]
        assert server.has(KEYS, shape=(1024, 2)) == []
        assert server.has(KEYS, dtype=DType("torch.bfloat16")) == []
        out = Object(dtype=DType("torch.bfloat16"))
        assert (server.get(KEYS[:1], [out]), bytes(out.byte_array)) == ([], bytes(CHUNK))
        assert server.adapter.report_status()["is_healthy"]
        assert server.adapter.get_usage().total_bytes_used >= N * CHUNK
        server.adapter.submit_unlock(KEYS)
    with Server(door, tmp_path, model="revision 2") as server:
        assert server.has(KEYS) == []


def test_listeners_hear_of_new_chunks_and_of_those_read(door: Any, tmp_path: Path) -> None:
    heard: list[Any] = []
    listener = SimpleNamespace(
        on_l2_keys_stored=lambda keys, sizes: heard.append((keys, sizes)),
        on_l2_keys_accessed=heard.append,
    )
    with Server(door, tmp_path) as server:
        server.adapter.register_listener(listener)
        server.put(KEYS[:1], [Object(1)])
        server.put(KEYS[:2], [Object(1), Object(2)])
        server.get(KEYS[1:3], [Object(), Object()])
    assert heard == [(KEYS[:1], [CHUNK]), (KEYS[1:2], [CHUNK]), KEYS[1:2]]


def test_a_prompt_keeps_its_beginning_in_too_small_a_room(door: Any, tmp_path: Path) -> None:
    room = 3 * (CHUNK + (1 << 13)) + (1 << 16)
    with Server(door, tmp_path, disk_bytes=room) as server:
        server.has(KEYS)
        for i in (1, 0, 4, 2, 5, 3):  # in any order, a task each
            server.put(KEYS[i : i + 1], [Object(i + 1)])
        found = server.has(KEYS)
    assert found == [*range(len(found))]
    assert 0 < len(found) <= N


def test_a_damaged_chunk_is_a_miss_and_copies_nothing(door: Any, tmp_path: Path) -> None:
    with Server(door, tmp_path) as server:
        server.put(KEYS[:1], [Object(1)])
        (file,) = tmp_path.glob("*.kv")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        out = Object()
        with pytest.warns(PlacementWarning, match="its bytes are not those"):
            assert server.get(KEYS[:1], [out]) == []
        assert bytes(out.byte_array) == bytes(CHUNK)


def test_a_task_that_fails_ends_and_says_why(door: Any, tmp_path: Path) -> None:
    for options, shape, match in (
        ({"disk_bytes": CHUNK}, (2, 1024), "disk_bytes: expected 0, or at least"),
        ({}, (7,), "leave out serde"),
    ):
        with (
            Server(door, tmp_path, **options) as server,
            pytest.warns(PlacementWarning, match=match),
        ):
            assert not server.put(KEYS[:1], [Object(1, shape)]).is_successful()


def test_options_that_are_not_known_are_refused(door: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="options: expected where"):
        door.KVStoreAdapter({"where": str(tmp_path), "disk_byte": 1})
