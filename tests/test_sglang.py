"""The storage for SGLang: with SGLang's own classes if its wheel is here, or with stand-ins.

`make test-lmcache` runs this file with SGLang's wheel and torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.servers.engine_definitions import SGLANG, imported

PAGE, WIDTH, N = 4, 1024, 6
KEYS = [f"{i:064x}" for i in range(N)]


class Tensor:
    """The few things that the storage asks of a tensor of torch."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array))

    def view(self, dtype: Any) -> Tensor:
        return Tensor(self.array.view(np.uint8))

    def numpy(self) -> Any:
        return self.array

    def tolist(self) -> list[int]:
        return list(self.array.tolist())


class HostPool:
    """Host memory of SGLang in the layout "layer_first", of one layer."""

    layout, dtype, page_size, layer_num = "layer_first", "float16", PAGE, 1

    def __init__(self, make: Any, **changes: Any) -> None:
        self.rows = np.zeros((N * PAGE, WIDTH), np.float16)
        self._make = make
        vars(self).update(changes)

    def get_data_page(self, index: int, flat: bool = True) -> Any:
        assert flat
        return self._make(self.rows[index : index + PAGE].flatten())

    def get_dummy_flat_data_page(self) -> Any:
        return self._make(np.zeros(PAGE * WIDTH, np.float16))

    def set_from_flat_data_page(self, index: int, page: Any) -> None:
        self.rows[index : index + PAGE] = page.numpy().reshape(PAGE, WIDTH)


@pytest.fixture(scope="module")
def door() -> Iterator[Any]:
    with imported("sglang", "unimem.sglang", SGLANG):
        yield import_module("unimem.sglang")


@pytest.fixture
def make(door: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.from_numpy, or a stand-in."""
    try:
        return import_module("torch").from_numpy
    except ImportError:
        monkeypatch.setitem(import_module("sys").modules, "torch", SimpleNamespace(uint8=None))
        return Tensor


def config(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    store = {"where": str(folder), "disk_bytes": 1 << 20} | options
    values: dict[str, Any] = dict.fromkeys("pp_rank attn_cp_rank dcp_rank tp_rank".split(), 0)
    values |= {"pp_size": 1, "attn_cp_size": 1, "dcp_size": 1, "tp_size": 2, "model_name": "m"}
    values |= {"is_mla_model": False, "logical_page_size": None}
    values["extra_config"] = {"store": store, "interface_v1": 1}
    return SimpleNamespace(**values | (changes or {}))


class Opened:
    """A storage with a pool whose rows have the number of their page."""

    def __init__(self, door: Any, make: Any, given: Any, **pool: Any) -> None:
        self.storage, self._make = door.KVStoreStorage(given, {}), make
        self.pool = HostPool(make, **pool)
        self.pool.rows[:] = np.repeat(np.arange(1, N + 1), PAGE)[:, None]
        try:
            self.storage.register_mem_pool_host(self.pool)
        except ValueError:
            self.storage.close()  # as SGLang does
            raise

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.storage.close()

    def indices(self, first: int, n: int) -> Any:
        return self._make(np.arange(first * PAGE, (first + n) * PAGE))

    def put(self, first: int = 0, n: int = N) -> list[bool]:
        extra = SimpleNamespace(prefix_keys=KEYS[:first], extra_info=None)
        keys = KEYS[first : first + n]
        return list(self.storage.batch_set_v1(keys, self.indices(first, n), extra))


def test_pages_come_back_after_a_restart_under_the_same_identity_only(
    door: Any, make: Any, tmp_path: Path
) -> None:
    with Opened(door, make, config(tmp_path)) as it:
        assert it.storage.batch_exists(KEYS) == 0
        assert it.put(n=4) == [True] * 4
    with Opened(door, make, config(tmp_path)) as it:
        assert (it.storage.batch_exists(KEYS), it.storage.exists(KEYS[3])) == (4, True)
        expected = it.pool.rows[: 4 * PAGE].copy()
        it.pool.rows[:] = 0
        got = it.storage.batch_get_v1(KEYS, it.indices(0, N))
        assert got == [True] * 4 + [False] * 2
        np.testing.assert_array_equal(it.pool.rows[: 4 * PAGE], expected)
        assert not it.pool.rows[4 * PAGE :].any()
    others: list[dict[str, Any]] = [{"tp_rank": 1}, {"pp_size": 2}, {"model_name": "n"}]
    for changes in others:
        with Opened(door, make, config(tmp_path, changes)) as it:
            assert it.storage.batch_exists(KEYS) == 0, changes
    for pool in ({"layout": "page_first"}, {"dtype": "bfloat16"}):
        with Opened(door, make, config(tmp_path), **pool) as it:
            assert it.storage.batch_exists(KEYS) == 0, pool
    with Opened(door, make, config(tmp_path, model="revision 2")) as it:
        assert it.storage.batch_exists(KEYS) == 0


def test_ranks_of_mla_share_their_pages(door: Any, make: Any, tmp_path: Path) -> None:
    with Opened(door, make, config(tmp_path, {"is_mla_model": True})) as it:
        it.put(n=1)
    with Opened(door, make, config(tmp_path, {"is_mla_model": True, "tp_rank": 1})) as it:
        assert it.storage.batch_exists(KEYS) == 1


def test_pages_are_given_as_tensors_without_the_zero_copy_interface(
    door: Any, make: Any, tmp_path: Path
) -> None:
    with Opened(door, make, config(tmp_path)) as it:
        pages = [it.pool.get_data_page(i * PAGE) for i in range(2)]
        assert it.storage.batch_set(KEYS[:2], pages)
        assert it.storage.set(KEYS[2], pages[0])
        outs = [it.pool.get_dummy_flat_data_page() for _ in range(2)]
        found = it.storage.batch_get([KEYS[1], KEYS[3]], outs)
        assert (found[0] is outs[0], found[1]) == (True, None)
        np.testing.assert_array_equal(outs[0].numpy(), pages[1].numpy())
        assert it.storage.get(KEYS[2], outs[1]) is outs[1]


def test_a_prompt_keeps_its_beginning_in_too_small_a_room(
    door: Any, make: Any, tmp_path: Path
) -> None:
    with Opened(door, make, config(tmp_path, disk_bytes=(1 << 16) + 4 * (PAGE * WIDTH * 2))) as it:
        it.storage.batch_exists(KEYS)
        for first in range(0, N, 2):  # SGLang's batches
            it.put(first, 2)
        held = [it.storage.exists(key) for key in KEYS]
    assert held == sorted(held, reverse=True)
    assert sum(held) > 0


def test_pools_beside_the_pages_count(door: Any, make: Any, tmp_path: Path) -> None:
    names, policies = door.PoolName, door.PoolHitPolicy

    def transfer(n: int, policy: Any = policies.ALL_PAGES, first: int = 0) -> Any:
        indices = it.indices(first, n)
        keys = KEYS[first : first + n]
        return SimpleNamespace(name=names.MAMBA, keys=keys, host_indices=indices, hit_policy=policy)

    with Opened(door, make, config(tmp_path)) as it:
        states = HostPool(make)
        states.rows[:] = 7
        it.storage.register_mem_host_pool_v2(states, names.MAMBA)
        it.put()
        assert it.storage.batch_set_v2([transfer(2)]) == {names.MAMBA: [True] * 2}
        assert it.storage.batch_set_v2([transfer(1, first=4)]) == {names.MAMBA: [True]}
        found = it.storage.batch_exists_v2(KEYS, [transfer(N)])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (2, [1, 2])
        found = it.storage.batch_exists_v2(KEYS, [transfer(1, policies.TRAILING_PAGES)])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [1, 2, 5])
        assert found.extra_pool_hit_pages == {names.KV: N, names.MAMBA: 5}
        states.rows[:] = 0
        assert it.storage.batch_get_v2([transfer(3)]) == {names.MAMBA: [True, True, False]}
        assert (states.rows[: 2 * PAGE] == 7).all()
        with pytest.raises(ValueError, match="hit_policy: expected all_pages"):
            it.storage.batch_exists_v2(KEYS, [transfer(1, policies.BLOCK_GROUPS)])


@pytest.mark.parametrize(
    ("changes", "options", "match"),
    [
        ({"extra_config": None}, {}, "options: expected where, .* got None"),
        ({}, {"disk_byte": 1}, "options: expected where"),
        ({}, {"disk_bytes": 5000}, "disk_bytes: expected 0, or at least .* of SGLang"),
    ],
)
def test_wrong_options_are_refused(
    door: Any,
    make: Any,
    tmp_path: Path,
    changes: dict[str, Any],
    options: dict[str, Any],
    match: str,
) -> None:
    with pytest.raises(ValueError, match=match):
        Opened(door, make, config(tmp_path, changes, **options))


def test_indices_of_another_number_are_refused(door: Any, make: Any, tmp_path: Path) -> None:
    with (
        Opened(door, make, config(tmp_path)) as it,
        pytest.raises(ValueError, match=r"host_indices: expected 8 of pool .* got 4"),
    ):
        it.storage.batch_set_v1(KEYS[:2], it.indices(0, 1))


def test_sglangs_factory_loads_it_by_its_name(door: Any, make: Any, tmp_path: Path) -> None:
    factory = pytest.importorskip(
        "sglang.srt.mem_cache.storage.backend_factory",
        reason="SGLang's wheel is not here: `make test-lmcache` fetches it",
    )
    given = config(tmp_path)
    names = {"module_path": "unimem.sglang", "class_name": "KVStoreStorage"}
    given.extra_config |= {"backend_name": "unimem"} | names
    made = factory.StorageBackendFactory.create_backend("dynamic", given, HostPool(make))
    assert type(made) is door.KVStoreStorage
    made.close()
