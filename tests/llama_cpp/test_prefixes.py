from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files.llama_states import Q8_0, cells, recurrent, same, state
from support.files.prefix_stores import files_of
from support.models import llama_cpp, make
from support.models.recurrent_models import write_recurrent
from unimem.errors import FormatError, PlacementWarning
from unimem.llama_cpp.prefixes import _HEAD, LlamaPrefixes
from unimem.llama_cpp.state import LlamaKV, kv_to_state, state_to_kv
from unimem.llama_cpp.stored import stored_prefixes

IDS = [7 * i % 101 for i in range(20)]
SIZE = 8


@pytest.fixture
def store(tmp_path: Path) -> Iterator[um.KVStore]:
    with um.KVStore(tmp_path / "kv", ram_bytes=0, disk_bytes=1 << 26, chunk_tokens=SIZE) as store:
        yield store


def first(kv: LlamaKV, n: int) -> LlamaKV:
    parts: Any = kv.parts
    return kv._replace(parts=tuple(part.take(0, n) for part in parts))


@pytest.mark.parametrize(
    "kv",
    [state(), state(cells(extra=True)), state(cells(is_transposed=True, kinds=((1, 32),) * 2))],
)
def test_whole_chunks_are_restored(store: um.KVStore, kv: LlamaKV) -> None:
    prefixes = LlamaPrefixes(store, "m", kv)
    assert prefixes.restore(IDS) is None
    assert prefixes.put([*IDS, 5], kv._replace(n_streams=3, head=b"x")) == 16
    assert prefixes.put(IDS, kv) == 16
    assert len(files_of(Path(store.folder))) == 2  # kept once
    found = prefixes.restore(IDS)
    assert found is not None
    assert same(found, first(kv, 16))
    assert prefixes.longest(IDS[:15]) == prefixes.longest([*IDS[:8], 0, *IDS[9:]]) == 8
    assert prefixes.longest([1, *IDS[1:]]) == 0


WINDOW, STATES = cells(5, 15, seed=1), recurrent(20)


@pytest.mark.parametrize(
    ("rest", "early"),
    [
        ((WINDOW,), (cells(5, 6),)),
        ((STATES,), (recurrent(11),)),
        ((WINDOW, STATES), (cells(5, 6), recurrent(11))),
    ],
    ids=["window", "states", "both"],
)
def test_windows_and_states_are_restored_where_they_end(
    store: um.KVStore, rest: Any, early: Any
) -> None:
    kv, prefixes = state(cells(), *rest), LlamaPrefixes(store, "m", state(cells(), *rest))
    # The last one is of another number of tokens than it says.
    assert prefixes.put(IDS, kv, [(11, state(*early)), (12, state(*early))]) == 20
    found = [prefixes.restore(ids) for ids in ([*IDS, 5, 6], IDS[:19], IDS[:10])]
    assert same(found[0], kv)
    assert same(found[1], state(cells().take(0, 11), *early))
    assert found[2] is None


def test_states_alone_are_restored(store: um.KVStore) -> None:
    kv = state(recurrent(20))
    prefixes = LlamaPrefixes(store, "m", kv)
    assert prefixes.put(IDS, kv) == 20
    found = prefixes.restore([*IDS, 1])
    assert found is not None
    assert same(found, kv)
    assert prefixes.restore(IDS[:-1]) is None


def test_nothing_is_given_to_another(store: um.KVStore) -> None:
    LlamaPrefixes(store, "m", state()).put(IDS, state())
    others = [
        LlamaPrefixes(store, "n", state()),
        LlamaPrefixes(store, "m", state(), options="an adapter"),
        LlamaPrefixes(store, "m", state(cells(is_transposed=True))),
        LlamaPrefixes(store, "m", state(cells(rotations=()), version=3)),
        LlamaPrefixes(store, "m", state(cells(kinds=(Q8_0, Q8_0)))),
    ]
    assert [other.restore(IDS) for other in others] == [None] * len(others)


@pytest.mark.parametrize(
    ("kv", "ids", "match"),
    [
        (state(cells(layers=3)), IDS, "expected a state with the layout"),
        (state(cells(rotations=()), version=3), IDS, "expected a state with the layout"),
        (state(cells(kinds=(Q8_0, Q8_0))), IDS, "expected a state with the layout"),
        (state(), IDS[:19], "expected the ids of 20 tokens, got 19"),
        (state(cells(20, 4)), [*IDS, *IDS], "got one that lost some"),
    ],
)
def test_other_states_are_not_put(
    store: um.KVStore, kv: LlamaKV, ids: list[int], match: str
) -> None:
    prefixes = LlamaPrefixes(store, "m", state())
    with pytest.raises(FormatError, match=match):
        prefixes.put(ids, kv)
    assert files_of(Path(store.folder)) == []


def test_a_damaged_chunk_is_missing(store: um.KVStore) -> None:
    prefixes = LlamaPrefixes(store, "m", state())
    prefixes.put(IDS, state())
    for path in files_of(Path(store.folder)):
        data = bytearray(path.read_bytes())
        data[-5000] ^= 1
        path.write_bytes(data)
    with pytest.warns(PlacementWarning, match="its bytes are not those"):
        assert prefixes.restore(IDS) is None
    assert prefixes.put(IDS, state()) == 16


@pytest.mark.parametrize(
    "packed",
    [b"damaged", zlib.compress(b"[1]"), zlib.compress(b"[" * 3000), zlib.compress(bytes(1 << 22))],
    ids=["not packed", "a list", "deep", "a bomb"],
)
def test_a_head_with_damaged_facts_is_no_list(store: um.KVStore, packed: bytes) -> None:
    LlamaPrefixes(store, "m", state()).put(IDS, state())
    for path in files_of(Path(store.folder)):
        data = bytearray(path.read_bytes())
        begin = data.index(b"UNIMEMLL") + _HEAD.size
        data[begin - 4 : begin + len(packed)] = len(packed).to_bytes(4, "little") + packed
        path.write_bytes(data)
    assert list(stored_prefixes(store)) == []


def test_a_small_budget_ends_a_prefix(tmp_path: Path) -> None:
    kv = state(cells(80))
    with um.KVStore(tmp_path, ram_bytes=0, disk_bytes=1 << 16, chunk_tokens=SIZE) as store:
        n = LlamaPrefixes(store, "m", kv).put(list(range(80)), kv)
    assert 0 < n < 80


def test_a_probe_finds_other_computations(store: um.KVStore) -> None:
    kv, prefixes = state(cells(3)), LlamaPrefixes(store, "m", state())
    values = np.random.default_rng(0).standard_normal((3, 16)).astype("f2")

    def probe(change: float) -> LlamaKV:
        rows = (values + np.float16(change)).view(np.uint8)
        cells: Any = kv.parts[0]
        keys = tuple(lane._replace(rows=rows) for lane in cells.keys)
        return state(kv.parts[0]._replace(keys=keys))  # type: ignore[call-arg]

    found = [prefixes.agrees([1, 2, 3], probe(change)) for change in (0, 0, 1e-3, 0.5, 0)]
    assert found == [True, True, True, False, True]


def test_wrong_arguments(store: um.KVStore) -> None:
    with pytest.raises(TypeError, match="store: expected a"):
        LlamaPrefixes("kv", "m", state())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model"):
        LlamaPrefixes(store, 5, state())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": make.write_model(folder / "llama.gguf", shape=make.TINY),
        "gemma3": make.write_model(folder / "g.gguf", "gemma3", make.small(layers=7, ctx=600)),
        "mamba": write_recurrent(folder / "mamba.gguf", "mamba"),
        "lfm2": write_recurrent(folder / "lfm2.gguf", "lfm2"),
    }


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"kv_dtype": "f32,bf16"}),
        ("llama", {"flash": False}),
        ("gemma3", {"kv_dtype": "q8_0,q4_0"}),
        ("mamba", {}),
        ("lfm2", {}),
    ],
)
def test_llama_cpp_goes_on_as_if_it_had_computed_the_tokens(
    store: um.KVStore, models: dict[str, Path], model: str, options: dict[str, Any]
) -> None:
    ids = [37 * i % 300 + 3 for i in range(200)]
    n = 128
    real = llama_cpp.states(models[model], ids, n, **options)
    kv = state_to_kv(real.blob)
    assert kv_to_state(kv) == real.blob.tobytes()
    prefixes = LlamaPrefixes(store, model, kv)
    assert prefixes.put(ids[:n], kv) == n
    found = prefixes.restore(ids)
    assert found is not None
    blob = kv_to_state(found._replace(head=kv.head, n_streams=kv.n_streams))
    logits = llama_cpp.continued(models[model], blob, ids[n:], **options)
    np.testing.assert_array_equal(logits, real.logits)


def test_llama_cpp_refuses_the_state_of_another_cache(models: dict[str, Path]) -> None:
    ids = list(range(3, 40))
    real = llama_cpp.states(models["llama"], ids, 30)
    options = {"kv_dtype": "f32"}
    assert llama_cpp.continued(models["llama"], real.blob.tobytes(), ids[30:], **options) is None
