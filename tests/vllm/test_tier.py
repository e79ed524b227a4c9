"""The tier for vLLM with vLLM's own definitions: tests/support/servers/vllm_definitions.py."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.contracts.things import Things
from support.contracts.wrong_arguments import unclear
from support.files import safetensors_files as st
from support.project.checkout import ROOT
from support.servers.vllm_definitions import imported
from unimem.engine import embedded_model
from unimem.errors import ClosedError

pytestmark = pytest.mark.slow
N, CHUNK = 6, 5000
KEYS = [bytes([i]) * 32 + (0).to_bytes(4, "big") for i in range(N)]


@pytest.fixture(scope="module")
def vllm() -> Iterator[types.SimpleNamespace]:
    """vLLM's modules, and unimem.vllm."""
    with imported():
        theirs = "vllm.v1.kv_offload"
        yield types.SimpleNamespace(
            base=import_module(f"{theirs}.base"),
            config=import_module(f"{theirs}.config"),
            tiering=import_module(f"{theirs}.tiering.base"),
            factory=import_module(f"{theirs}.tiering.factory"),
            unimem=import_module("unimem.vllm"),
            tier=import_module("unimem.vllm.tier"),
        )


def spec(vllm: types.SimpleNamespace, **changes: Any) -> types.SimpleNamespace:
    """Describe an offloaded group of two layers."""
    c, changed = vllm.config, {"name": "m/llama", "rank": 0} | changes
    values = {
        "groups": (c.OffloadingGroupConfig(16, ("0", "1"), 0),),
        "worker_kv_bytes_per_block": CHUNK,
        "enable_kv_cache_events": False,
        "extra_config": {},
        "engine_id": "e",
        "model": c.OffloadingModelConfig(changed["name"], "float16"),
        "cache": c.OffloadingCacheConfig(16, 1),
        "parallel": c.OffloadingParallelConfig(
            changed["rank"], 2, 2, 1, 1, 1, 0, 1, None, changed.get("is_agnostic", False)
        ),
    }
    values["kv_cache_layout"] = changed.get("layout", "LBHNC")
    return types.SimpleNamespace(config=c.OffloadingConfig(**values), blocks_per_chunk=1)


class Engine:
    """A tier as vLLM makes it, its CPU memory, and its scheduler."""

    def __init__(self, vllm: types.SimpleNamespace, folder: Path, **options: Any) -> None:
        self.vllm = vllm
        given = options.pop("spec", None) or spec(vllm)
        self.rows = np.zeros((N, CHUNK), np.int8)
        self.view = self.rows.data
        config = {"type": "KVStoreTier", "module_path": "unimem.vllm", "where": str(folder)}
        self.tier: Any = vllm.factory.SecondaryTierFactory.create_secondary_tier(
            config | {"disk_bytes": 1 << 20} | options, self.view, given
        )
        self.request = vllm.base.ReqContext("r")
        self.n_jobs = 0

    def run(self, keys: list[bytes], chunks: list[int], *, load: bool) -> Any:
        """Do a job, and return its result."""
        self.n_jobs += 1
        job = self.vllm.tiering.TransferJob(
            self.n_jobs, keys, np.array(chunks, np.int64), load, self.request
        )
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self.n_jobs
        assert list(self.tier.get_finished_jobs()) == []
        return result

    def look(self, keys: list[bytes]) -> list[str]:
        """Look keys up as the scheduler does, step by step."""
        while True:
            found = [self.tier.lookup(key, self.request).name for key in keys]
            self.tier.on_schedule_end(self.vllm.base.ScheduleEndContext([], []))
            if "RETRY" not in found:
                return found


@contextmanager
def engine(vllm: types.SimpleNamespace, folder: Path, **options: Any) -> Iterator[Engine]:
    made = Engine(vllm, folder, **options)
    try:
        yield made
    finally:
        made.tier.shutdown()
        made.tier.shutdown()
        made.view.release()  # as vLLM does; it raises if a view is alive
        with pytest.raises(ClosedError):
            made.tier._store.stat()
        assert not [t for t in threading.enumerate() if t.name.startswith("unimem-vllm")]


def filled(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-128, 128, (N, CHUNK), np.int8)


def test_it_is_what_vllm_defines(vllm: types.SimpleNamespace) -> None:
    ours, theirs = vllm.unimem.KVStoreTier, vllm.tiering.SecondaryTierManager
    assert issubclass(ours, theirs)
    assert ours.__abstractmethods__ == frozenset()
    for name, value in vars(ours).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            assert list(inspect.signature(value).parameters) == list(
                inspect.signature(getattr(theirs, name)).parameters
            ), name
    tier = {"type": "KVStoreTier", "module_path": "unimem.vllm"}
    assert vllm.factory.SecondaryTierFactory.get_tier_class(tier) is ours
    made = set(inspect.signature(ours).parameters)
    assert set(inspect.signature(theirs).parameters) <= made
    # Every tier of vLLM takes these.
    assert "locality" in made


def test_options_of_every_tier_are_taken(vllm: types.SimpleNamespace, tmp_path: Path) -> None:
    with engine(
        vllm,
        tmp_path,
        locality="REMOTE",
        backpressure={"backpressure_cls": "EMABackpressureDetector"},
    ) as one:
        assert one.tier.locality is vllm.base.Locality.REMOTE
        assert type(one.tier.bp_detector).__name__ == "EMABackpressureDetector"
        assert one.tier.medium is vllm.base.Medium.STORAGE
        assert one.tier.block_size_bytes == CHUNK


@pytest.mark.parametrize("ram_bytes", [0, 1 << 20])
def test_chunks_come_back_in_another_engine(
    vllm: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ram_bytes: int
) -> None:
    monkeypatch.setattr("unimem.system.limits.SHM", str(tmp_path))
    folder = tmp_path / "store"
    with engine(vllm, folder, ram_bytes=ram_bytes) as one:
        one.rows[:] = filled(1)
        assert one.look(KEYS) == ["MISS"] * N
        result = one.run(KEYS[:4], [5, 0, 1, 2], load=False)
        assert (result.success, result.successful_keys) == (True, None)
        one.tier.on_request_finished(one.request)
        assert one.look(KEYS) == ["HIT"] * 4 + ["MISS"] * 2
    with engine(vllm, folder, ram_bytes=ram_bytes) as two:
        assert two.run(KEYS[:3], [3, 4, 0], load=True).success
        np.testing.assert_array_equal(two.rows[[3, 4, 0]], filled(1)[[5, 0, 1]])
        assert not two.rows[[1, 2, 5]].any(), "and nothing else is written"
        two.tier.touch(KEYS[:2], two.request)


@pytest.mark.parametrize(
    "change", [{"name": "m/other"}, {"rank": 1}, {"layout": "BLHNC"}, {"model": "revision 2"}]
)
def test_other_models_ranks_and_layouts_have_other_chunks(
    vllm: types.SimpleNamespace, tmp_path: Path, change: dict[str, Any]
) -> None:
    with engine(vllm, tmp_path) as one:
        assert one.run(KEYS, list(range(N)), load=False).success
    options = {"model": change["model"]} if "model" in change else {"spec": spec(vllm, **change)}
    with engine(vllm, tmp_path, **options) as other:
        assert other.look(KEYS) == ["MISS"] * N


@pytest.mark.parametrize("changed", ["version", "device", "kernels"])
def test_other_vllms_and_devices_have_other_chunks(
    vllm: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    torch = types.SimpleNamespace(
        cpu=types.SimpleNamespace(_is_amx_tile_supported=lambda: changed == "kernels")
    )
    with engine(vllm, tmp_path) as one:
        assert one.run(KEYS, list(range(N)), load=False).success
    if changed == "version":
        monkeypatch.setattr(vllm.tier.vllm, "__version__", "0.33.1")
    elif changed == "device":
        gpu = types.SimpleNamespace(is_cpu=lambda: False, device_type="cuda")
        monkeypatch.setattr(vllm.tier, "current_platform", gpu)
    else:
        has = not vllm.tier.torch.cpu._is_amx_tile_supported()
        torch.cpu._is_amx_tile_supported = lambda: has
        monkeypatch.setattr(vllm.tier, "torch", torch)
    with engine(vllm, tmp_path) as other:
        assert other.look(KEYS) == ["MISS"] * N


def flip_last(path: Path) -> None:
    """Change the last byte of a file, and set the time of the write back."""
    info = path.stat()
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize("changed", ["a.safetensors", "b.safetensors", "config.json", "m.gguf"])
def test_another_model_in_the_same_place_has_other_chunks(
    vllm: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("a", "b"):
        path = folder / f"{name}.safetensors"
        path.write_bytes(st.write({name: ("F32", (1 << 16,))}))
    (folder / "config.json").write_text("{} ")
    shutil.copy(embedded_model(), folder / "m.gguf")
    name = str(folder / changed) if changed == "m.gguf" else str(folder)
    given = spec(vllm, name=name)

    def found() -> list[str]:
        with engine(vllm, tmp_path / "store", spec=given) as one:
            return one.look(KEYS)

    with engine(vllm, tmp_path / "store", spec=given) as one:
        one.run(KEYS, list(range(N)), load=False)
    assert found() == ["HIT"] * N
    flip_last(folder / changed)
    assert found() == ["MISS"] * N
    flip_last(folder / changed)
    assert found() == ["HIT"] * N


@pytest.mark.parametrize("file", ["pytorch_model.bin", "broken.safetensors"])
def test_a_model_that_cannot_be_read_is_known_by_its_name(
    vllm: types.SimpleNamespace, tmp_path: Path, file: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / file).write_bytes(b"no header")
    given = spec(vllm, name=str(folder))
    with (
        pytest.warns(um.PlacementWarning, match=f"{folder}: .*by its name only"),
        engine(vllm, tmp_path / "store", spec=given) as one,
    ):
        assert one.run(KEYS[:1], [0], load=False).success


def test_ranks_share_chunks_where_vllm_says_that_these_are_alike(
    vllm: types.SimpleNamespace, tmp_path: Path
) -> None:
    with engine(vllm, tmp_path, spec=spec(vllm, is_agnostic=True)) as one:
        one.run(KEYS, list(range(N)), load=False)
    with engine(vllm, tmp_path, spec=spec(vllm, is_agnostic=True, rank=1)) as other:
        assert other.look(KEYS) == ["HIT"] * N


def test_a_damaged_chunk_is_computed_anew_and_not_asked_for_again(
    vllm: types.SimpleNamespace, tmp_path: Path
) -> None:
    with engine(vllm, tmp_path) as one:
        one.rows[:] = filled(1)
        one.run(KEYS, list(range(N)), load=False)
        path = tmp_path / f"{one.tier._chunks.identity(KEYS[1]).hex()}.kv"
        data = bytearray(path.read_bytes())
        data[4100] ^= 1
        path.write_bytes(data)
        one.rows[:] = 7
        assert one.look(KEYS) == ["HIT"] * N
        with pytest.warns(um.PlacementWarning, match="was removed"):
            result = one.run(KEYS, list(range(N)), load=True)
        assert (result.success, set(result.successful_keys)) == (False, {*KEYS} - {KEYS[1]})
        assert (one.rows[1] == 7).all()
        assert one.look(KEYS) == ["HIT", "MISS"] + ["HIT"] * 4
        result = one.run([KEYS[1]], [0], load=True)
        assert (result.success, result.successful_keys) == (False, None)
        # It may be put again.
        assert one.run([KEYS[1]], [0], load=False).success


def a_room_for(n: int) -> int:
    """Return `disk_bytes` of n chunks: docs/store.md."""
    return 16384 + n * (12288 + 8192)


def test_the_first_chunks_of_a_prompt_stay(vllm: types.SimpleNamespace, tmp_path: Path) -> None:
    room = {"disk_bytes": a_room_for(4)}
    with engine(vllm, tmp_path, **room) as one:
        for i in (3, 5, 0, 1, 4, 2):
            one.request.set_offload_key_position(KEYS[i], 16 * (i + 1))
        # As vLLM gives them: in steps, and within one in any order.
        for keys in ([3, 1, 0], [5, 2, 4]):
            one.run([KEYS[i] for i in keys], keys, load=False)
        assert one.look(KEYS) == ["HIT"] * 4 + ["MISS"] * 2
        one.tier.on_request_finished(one.request)
    with engine(vllm, tmp_path, **room) as other:
        other.request = vllm.base.ReqContext("has two of them")
        other.request.set_offload_key_position(KEYS[3], 16)
        other.request.set_offload_key_position(KEYS[5], 32)
        other.run([KEYS[5]], [0], load=False)
        assert other.look(KEYS) == ["HIT", "MISS", "MISS", "HIT", "MISS", "HIT"]


def test_a_prompt_that_vllm_had_itself_counts_as_used(
    vllm: types.SimpleNamespace, tmp_path: Path
) -> None:
    with engine(vllm, tmp_path, disk_bytes=a_room_for(4)) as one:
        one.run(KEYS[:4], [0, 1, 2, 3], load=False)
        for name, key in (("first", KEYS[0]), ("last", KEYS[4])):
            one.request = vllm.base.ReqContext(name)
            one.request.set_offload_key_position(key, 16)
            if name == "last":
                one.run([key], [4], load=False)
            one.tier.on_request_finished(one.request)
            one.tier.drain_jobs()
        assert one.look(KEYS[:1] + KEYS[4:5]) == ["HIT", "HIT"]


def test_full_and_failing_stores_are_reported(
    vllm: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(vllm, tmp_path, disk_bytes=a_room_for(4)) as small:
        assert not small.run(KEYS, list(range(N)), load=False).success
        assert small.run([], [], load=False).success

        def fail(*_: Any) -> bool:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("unimem.kv.store.tiers.FolderTier.write", fail)
        with pytest.warns(um.PlacementWarning, match="Input/output error"):
            assert not small.run(KEYS[4:5], [0], load=False).success


def test_no_row_is_touched_after_jobs_were_drained(
    vllm: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(vllm, tmp_path, n_threads=2) as one:
        one.run(KEYS, list(range(N)), load=False)
        begun, go = threading.Event(), threading.Event()
        load: Callable[..., Any] = um.KVStore._load

        def slow(*arguments: Any) -> Any:
            begun.set()
            assert go.wait(60)
            return load(*arguments)

        monkeypatch.setattr(um.KVStore, "_load", slow)
        job = vllm.tiering.TransferJob(9, KEYS, np.arange(N), True, one.request)
        one.tier.submit_load(job)
        assert begun.wait(60)
        assert list(one.tier.get_finished_jobs()) == []
        threading.Timer(0.05, go.set).start()
        one.tier.drain_jobs()
        assert [result.success for result in one.tier.get_finished_jobs()] == [True]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"n_threads": 0}, ValueError, "n_threads"),
        ({"model": 3}, TypeError, "model: expected a string"),
        ({"disk_bytes": 0}, ValueError, "ram_bytes, disk_bytes"),
        ({"disk_bytes": 9096}, ValueError, "disk_bytes: expected 0, or at least 70536 for one"),
        ({"ram_bytes": 1}, ValueError, "ram_bytes: expected 0, or at least"),
        ({"where": 3}, TypeError, "where"),
        ({"locality": "HERE"}, ValueError, "HERE"),
    ],
)
def test_arguments(
    vllm: types.SimpleNamespace,
    tmp_path: Path,
    options: dict[str, Any],
    error: type[Exception],
    match: str,
) -> None:
    n_threads = threading.active_count()
    with pytest.raises(error, match=match):
        Engine(vllm, tmp_path, **options)
    assert threading.active_count() == n_threads


def test_each_wrong_argument_is_named(
    vllm: types.SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    right = {"where": str(tmp_path / "s"), "ram_bytes": 0, "disk_bytes": 1 << 24, "model": "m"}
    right |= {"n_threads": 1}

    def take(**options: Any) -> None:
        Engine(vllm, tmp_path, **options).tier.shutdown()

    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about placement
        assert unclear(Things(tmp_path, undo), lambda _: (take, right)) == []


def test_the_configuration_of_the_page_is_what_the_class_takes(vllm: types.SimpleNamespace) -> None:
    page = (ROOT / "docs/engines.md").read_text()
    text = page.split("--kv-transfer-config '")[1].split("'\n```")[0]
    (tier,) = json.loads(text)["kv_connector_extra_config"]["secondary_tiers"]
    assert vllm.factory.SecondaryTierFactory.get_tier_class(tier) is vllm.unimem.KVStoreTier
    known = inspect.signature(vllm.unimem.KVStoreTier).parameters
    assert set(tier) - {"type", "module_path"} <= set(known)
    assert all(f"| `{name}` |" in page for name in list(known)[3:-1])


def test_the_manager_of_vllm_stores_and_promotes_through_it(
    vllm: types.SimpleNamespace, tmp_path: Path
) -> None:
    manager = import_module("vllm.v1.kv_offload.tiering.manager")
    end = vllm.base.ScheduleEndContext([], [])

    def made(one: Engine) -> Any:
        region = types.SimpleNamespace(create_kv_memoryview=lambda: one.view, cleanup=lambda: None)
        primary = manager.CPUPrimaryTierOffloadingManager(N, region)
        return manager.TieringOffloadingManager(primary, [one.tier])

    one = Engine(vllm, tmp_path)
    stores = made(one)
    stores.on_new_request(one.request)
    prepared = stores.prepare_store(KEYS[:3], one.request)
    chunks = [int(i) for i in prepared.store_spec.block_ids]
    one.rows[chunks] = filled(1)[:3]
    stores.complete_store(KEYS[:3], one.request)
    one.tier.drain_jobs()
    stores.on_schedule_end(end)
    stores.on_request_finished(one.request)
    stores.shutdown()  # releases the memory; no view of it is alive

    two = Engine(vllm, tmp_path)
    loads = made(two)
    loads.on_new_request(two.request)
    found: list[str] = []
    while "HIT" not in found or "RETRY" in found or "HIT_PENDING" in found:
        found = [loads.lookup(key, two.request).name for key in KEYS[:4]]
        loads.on_schedule_end(end)
        two.tier.drain_jobs()
    assert found == ["HIT"] * 3 + ["MISS"]
    chunks = [int(i) for i in loads.prepare_load(KEYS[:3], two.request).block_ids]
    np.testing.assert_array_equal(two.rows[chunks], filled(1)[:3])
    loads.complete_load(KEYS[:3], two.request)
    loads.on_request_finished(two.request)
    loads.shutdown()
    assert two.tier._store.closed
