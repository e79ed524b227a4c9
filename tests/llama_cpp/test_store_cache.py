from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import unimem as um
from support.files.llama_states import Q8_0, cells, state
from support.models import make
from unimem.errors import PlacementWarning
from unimem.llama_cpp.state import LlamaKV, kv_to_state
from unimem.llama_cpp.store_cache import LlamaStoreCache

from .test_identity import USUAL

IDS = [7 * i % 101 for i in range(20)]
CONTEXT = struct.pack("<I", 5) + b"llama"


class State(NamedTuple):
    """As `llama_cpp.LlamaState`."""

    input_ids: Any
    scores: Any
    n_tokens: int
    llama_state: bytes
    llama_state_size: int
    seed: int


class Llama:
    """What the cache uses of a `llama_cpp.Llama`."""

    def __init__(self, model: Path, kinds: Any = ((1, 32), (1, 32))) -> None:
        self.model_path, self.kinds = str(model), kinds
        self.context_params = SimpleNamespace(**USUAL)
        self.lora_path = self.kv_overrides = self.chat_handler = None
        self.lora_scale, self._seed, self.n_tokens = 1.0, 7, 0
        self.input_ids, self.scores = np.zeros(64, np.intc), np.zeros((32, 320), np.single)

    def n_ctx(self) -> int:
        return 64

    def token_bos(self) -> int:
        return 1

    def eval(self, tokens: list[int]) -> None:
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)

    def reset(self) -> None:
        self.n_tokens = 0

    def save_state(self) -> State:
        n = self.n_tokens
        blob = kv_to_state(state(cells(n, kinds=self.kinds), head=CONTEXT, n_streams=2))
        return State(self.input_ids.copy(), self.scores[:n], n, blob, len(blob), self._seed)


def first(n: int) -> LlamaKV:
    kv = state(cells(20), head=CONTEXT, n_streams=2)
    parts: Any = kv.parts
    return kv._replace(parts=tuple(part.take(0, n) for part in parts))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make.write_model(tmp_path_factory.mktemp("model") / "m.gguf", shape=make.TINY)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[um.KVStore]:
    with um.KVStore(tmp_path / "kv", ram_bytes=0, disk_bytes=1 << 26, chunk_tokens=8) as store:
        yield store


def test_a_state_is_taken_from_the_longest_prefix(store: um.KVStore, model: Path) -> None:
    llama = Llama(model)
    cache = LlamaStoreCache(llama, store)
    assert llama.n_tokens == 0
    assert IDS not in cache
    with pytest.raises(KeyError):
        cache[IDS]
    llama.eval(IDS)
    cache[IDS] = llama.save_state()
    assert IDS in cache
    assert 0 < cache.cache_size <= cache.capacity_bytes == 1 << 26

    found = LlamaStoreCache(Llama(model), store)[[*IDS[:17], 5]]
    assert isinstance(found, State)
    assert (found.n_tokens, found.seed) == (16, 7)
    assert found.input_ids[:16].tolist() == IDS[:16]
    assert found.llama_state == kv_to_state(first(16))
    assert found.llama_state_size == len(found.llama_state)
    np.zeros((16, 320))[:16, :] = found.scores  # as load_state does


def test_the_last_token_is_left_to_compute(store: um.KVStore, model: Path) -> None:
    llama = Llama(model)
    cache = LlamaStoreCache(llama, store)
    llama.eval(IDS)
    cache[IDS] = llama.save_state()
    assert cache[IDS[:16]].n_tokens == 8


def test_a_llama_with_tokens_keeps_them(store: um.KVStore, model: Path) -> None:
    llama = Llama(model)
    llama.eval(IDS[:3])
    LlamaStoreCache(llama, store)
    assert llama.n_tokens == 3


def test_others_have_their_own(store: um.KVStore, model: Path, tmp_path: Path) -> None:
    llama = Llama(model)
    llama.eval(IDS)
    LlamaStoreCache(llama, store)[IDS] = llama.save_state()
    retrained = make.write_model(tmp_path / "m.gguf", shape=make.TINY, seed=1)
    others = [Llama(retrained), Llama(model, (Q8_0, Q8_0)), Llama(model)]
    others[2].context_params.rope_freq_base = 1e6
    assert [IDS in LlamaStoreCache(other, store) for other in others] == [False] * 3


def test_nothing_is_put_while_images_are_possible(store: um.KVStore, model: Path) -> None:
    """A chat handler gives an image positions, and leaves the ids there of an earlier prompt."""
    llama = Llama(model)
    cache = LlamaStoreCache(llama, store)
    llama.eval(IDS)
    llama.chat_handler = print  # type: ignore[assignment]
    with pytest.warns(PlacementWarning, match="chat handler"):
        cache[IDS] = llama.save_state()
    assert IDS not in cache
    llama.chat_handler = None
    cache[IDS] = llama.save_state()
    assert IDS in cache


def test_a_failure_is_a_warning(store: um.KVStore, model: Path) -> None:
    llama = Llama(model)
    cache = LlamaStoreCache(llama, store)
    llama.eval(IDS)
    whole = llama.save_state()
    with pytest.warns(PlacementWarning, match="tokens were not put"):
        cache[IDS] = whole._replace(llama_state=whole.llama_state[:-1])
    assert IDS not in cache
