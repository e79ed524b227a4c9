"""Each argument of each public call gets wrong values: the error names it and the expected one."""

from __future__ import annotations

import importlib
import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
import unimem.llama_cpp as llama
from support.contracts.things import DIMS, MODEL, Things
from support.contracts.wrong_arguments import Call, calls_of, unclear
from support.files import llama_states
from support.project.public_names import python_names
from unimem.kv import snapshot
from unimem.kv.store.engine_store import EngineStore

ROWS = np.zeros((1, 2, 8), np.float32)
TOKEN = np.zeros((2, 2, 8), np.float32)
PLACEMENT: dict[str, Any] = {"pages": "4k", "numa": None, "lock": False, "warm": 1, "strict": False}
KV: dict[str, Any] = {"n_layers": 1, "n_kv_heads": 2, "head_dim": 8, "max_seq_len": 16}
NAMES = {"DIMS": DIMS, "KV": KV, "MODEL": MODEL, "PLACEMENT": PLACEMENT, "ROWS": ROWS}
NAMES |= {"TOKEN": TOKEN, "np": np, "os": os, "snapshot": snapshot, "um": um}

# The name of each call, and a correct call.
TABLE = """
Block: um.Block(nbytes=4096, shared=False, reserve=None, name='b', category='other', **PLACEMENT)
Block.advise: t.block().advise(advice='willneed')
Block.as_array: t.block().as_array(dtype='f2', shape=2, offset=0)
Block.attach: um.Block.attach(fd_or_path=t.saved(), writable=False, name='b', category='other')
Block.commit: t.block().commit(nbytes=4096)
Block.map: um.Block.map(path=t.saved(), offset=0, nbytes=64, mode='r', name='b', category='other')
Block.release: t.block().release(offset=0, nbytes=4096)
Block.sealed_copy: t.block().sealed_copy(pages='4k', name='b')
Block.warm: t.block().warm(threads=1, progress=None)
BufferPlan: um.BufferPlan(uses=[um.BufferUse('a', 8, 0, 1)], align=64)
BufferUse: um.BufferUse(name='a', nbytes=8, first=0, last=1)
Cell.as_array: t.grid().take().as_array(dtype='u1', shape=8)
DecodeBuffers: um.DecodeBuffers(dims=DIMS, tape=None, dtype='float16', name='b', **PLACEMENT)
DecodeBuffers.batch: t.buffers().batch(m=1)
DecodeBuffers.bytes_needed: um.DecodeBuffers.bytes_needed(dims=DIMS, dtype='f16')
ForwardScratch: um.ForwardScratch(dims=DIMS, tape=t.tape(), overlap=False)
ForwardScratch.bytes_needed: um.ForwardScratch.bytes_needed(dims=DIMS, overlap=False)
Governor: um.Governor(budget_bytes=1 << 40, on_pressure=print)
Governor.add: t.governor().add(what=t.kv(), priority=1)
Governor.give_back: t.governor().give_back(nbytes=1)
Grid: um.Grid(cell_bytes=64, n_cells=2, name='g', **PLACEMENT)
Grid.give: t.grid().give(cell=None)
KVCache: um.KVCache(**KV, batch=1, dtype='f16', window=None, spare_rows=0, budget_bytes=None,
    grow=False, rotate=False, v_head_dim=8, tape=None, name='kv', **PLACEMENT)
KVCache of layers: um.KVCache(layers=[um.LayerKV(2, 8)], max_seq_len=16, batch=1, dtype='f16',
    order='token', spare_rows=0, budget_bytes=None, grow=False, name='kv', **PLACEMENT)
KVCache of states: um.KVCache(layers=[um.LayerState((2,))], max_seq_len=16, batch=1, order='token',
    checkpoints=1, checkpoint_every=2, rotate=False, name='kv')
KVCache.address: t.kv().address(layer=0, part='k')
KVCache.append: t.kv().append(layer=0, k=ROWS, v=ROWS)
KVCache.append_all: t.kv().append_all(k=TOKEN, v=TOKEN)
KVCache.commit: t.reserved().commit(n=1)
KVCache.crop: t.kv().crop(n=1)
KVCache.enforce_memory_limit: t.kv().enforce_memory_limit(max_bytes=512)
KVCache.for_dims: um.KVCache.for_dims(dims=DIMS, max_seq_len=8)
KVCache.layer: t.kv().layer(i=0, dtype='f16', out=None)
KVCache.reserve: t.kv().reserve(n=1)
KVCache.restore: um.KVCache.restore(path=t.saved(), mode='copy', tokens=None, model=None,
    verify=False, **PLACEMENT)
KVCache.row_of: t.kv().row_of(position=0, layer=0)
KVCache.save: t.kv().save(path=t.folder / 'other.kv', tokens=[1, 2, 3], model='m')
KVCache.storage_bytes: um.KVCache.storage_bytes(**KV, batch=1, dtype='f16')
KVCache.state: t.states().state(layer=0)
KVCache.trim_to: t.kv().trim_to(n=1, keep_first=0)
KVCache.warm: t.kv().warm(threads=1)
LayerKV: um.LayerKV(n_kv_heads=2, head_dim=8, v_head_dim=4, window=4, dtype='f16', share_of=None)
LayerState: um.LayerState(shape=(2, 3), dtype='f32')
KVStore: um.KVStore(where=t.folder / 'store', ram_bytes=0, disk_bytes=1 << 20, chunk_tokens=2,
    pages='4k', numa=None, salt='s')
KVStore.longest: t.store().longest(tokens=[1, 2], model='m', kv=t.kv())
KVStore.put: t.store().put(kv=t.kv(), tokens=[1, 2], model='m')
KVStore.restore_into: t.store().restore_into(kv=t.empty_kv(), tokens=[1, 2], model='m')
Layout: um.Layout(weights=4096, scratch=4096, history=4096, **PLACEMENT)
Layout.attach: t.layout().attach(cache=t.kv())
Layout.for_model: um.Layout.for_model(path_or_weights=MODEL, ctx=16, batch=1, kv_dtype='f16',
    window=None, threads=1, load='map', progress=None, **PLACEMENT)
ModelDims: um.ModelDims(hidden_size=64, intermediate_size=64, num_attention_heads=4, num_kv_heads=2,
    head_dim=16, vocab_size=32, num_layers=2, max_seq_len=16, quantized=False, max_batch_size=1)
ModelDims.from_weights: um.ModelDims.from_weights(weights=t.weights())
PagedKVCache: um.PagedKVCache(n_layers=1, n_kv_heads=2, head_dim=8, n_blocks=2, block_tokens=4,
    dtype='f16', k_dtype=None, v_dtype='bf16', prefix_cache=True, name='p', **PLACEMENT)
PagedKVCache.layer: t.paged().layer(i=0)
PagedKVCache.sequence: t.paged().sequence(tokens=[1, 2])
PagedKVCache.warm: t.paged().warm(threads=1)
PagedScratchpad: um.PagedScratchpad(max_tokens=4, dim=4, dtype='f32', block_tokens=2, name='p',
    **PLACEMENT)
PagedScratchpad.append: t.paged_pad().append(vec=np.zeros(4, 'f4'))
PagedScratchpad.append_batch: t.paged_pad().append_batch(rows=np.zeros((2, 4), 'f4'))
PagedScratchpad.crop: t.paged_pad().crop(n=1)
PagedScratchpad.get_token: t.paged_pad().get_token(i=0)
Plan.require_fits: um.plan(DIMS).require_fits(strict=True, taken_bytes=0)
Scratchpad: um.Scratchpad(max_seq_len=4, dim=4, dtype='f32', tape=None, name='p', **PLACEMENT)
Scratchpad.append: t.pad().append(vec=np.zeros(4, 'f4'))
Scratchpad.append_batch: t.pad().append_batch(rows=np.zeros((2, 4), 'f4'))
Scratchpad.crop: t.pad().crop(n=1)
Sequence.append: t.sequence().append(layer=0, k=ROWS, v=ROWS)
Sequence.append_all: t.sequence().append_all(k=TOKEN, v=TOKEN)
Sequence.crop: t.sequence().crop(n=1)
Sequence.extend: t.sequence().extend(ids=[1])
Sequence.gather: t.sequence().gather(layer=0, out=None)
StreamedTensor.ensure: t.streamed().ensure(ids=[0])
StreamedTensor.prefetch: t.streamed().prefetch(ids=[0])
Tape: um.Tape(nbytes_or_block=4096, name='t', category='scratch', **PLACEMENT)
Tape.owns: t.tape().owns(array_or_address=0)
Tape.rewind: t.tape().rewind(mark=0)
Tensor.dequantize: t.weights().tensors['blk.0.ffn_up.weight'].dequantize(out=None)
Tape.take: t.tape().take(shape=2, dtype='f16', align=64)
Tape.take_address: t.tape().take_address(nbytes=64, align=64)
Tape.take_bytes: t.tape().take_bytes(nbytes=64, align=64)
Tape.warm: t.tape().warm(threads=1)
Weights.content_hash: t.weights().content_hash(threads=1, progress=None)
Weights.lock: t.weights().lock(how=False)
Weights.on: t.weights().on(node=None)
Weights.to_device: t.weights().to_device(tape=t.tape())
Weights.warm: t.weights().warm(threads=1, progress=None)
doctor: um.doctor(disk=None)
measure: um.measure()(function=len)
open_weights: um.open_weights(path=MODEL, load='map', progress=None, tape=None, threads=1,
    advice=None, verify=True, **PLACEMENT)
open_weights of a stream: um.open_weights(path=MODEL, load='stream', budget='1G', tape=None)
plan: um.plan(path_or_dims=DIMS, ctx=16, batch=1, kv_dtype='f16', window=None, threads=1,
    load='auto', sessions=1, device=None, **PLACEMENT)
repack: um.repack(weights=t.weights(), tape=None, cache=None, progress=None, **PLACEMENT)
report: um.report(pid=os.getpid())
snapshot.check: snapshot.check(path=t.saved())
snapshot.describe: snapshot.describe(path=t.saved())
rotate_heads: um.rotate_heads(x=np.zeros((2, 64), np.float32), part='k', out=None)
stage: um.stage(path=MODEL, backing='memfd', repack=False, progress=None, **PLACEMENT)
"""


CALLS = calls_of(TABLE, NAMES)


def of_decoder(member: str, **arguments: Any) -> Callable[[Things], Call]:
    """Return a row for a method of a decoder that has computed something."""

    def make(t: Things) -> Call:
        decoder = t.decoder() if t.kept is None else t.kept
        decoder.reset()
        decoder.prefill([1, 2])
        right = {name: value(t) if callable(value) else value for name, value in arguments.items()}
        return getattr(decoder, member), right

    return make


SAMPLING: dict[str, Any] = {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 1}
ENGINE_CALLS: dict[str, Callable[[Things], Call]] = {
    "Decoder": lambda t: (
        importlib.import_module("unimem.engine").Decoder,
        {"path_or_weights": t.weights(), "ctx": 16, "kv_dtype": "f16", "rotate": None}
        | {"window": None, "threads": 1, "layout": None, "load": "map", "progress": None}
        | {"store": None},
    ),
    "Decoder.detokenize": of_decoder("detokenize", tokens=[1, 2]),
    "Decoder.generate": of_decoder(
        "generate", prompt_or_tokens=[1], n=1, stop_at_eog=True, **SAMPLING
    ),
    "Decoder.generate_next_token": of_decoder("generate_next_token", **SAMPLING),
    "Decoder.prefill": of_decoder("prefill", tokens=[1]),
    "Decoder.put_aside": of_decoder("put_aside", store=lambda t: t.store()),
    "Decoder.resume": of_decoder("resume", path=lambda t: t.saved()),
    "Decoder.save_session": of_decoder("save_session", path=lambda t: t.folder / "session"),
    "Decoder.set_tokens": of_decoder("set_tokens", tokens=[1]),
    "Decoder.tokenize": of_decoder("tokenize", text="a", add_bos=False, special=False),
}
STATE = llama_states.state()


def engine_store(**options: Any) -> EngineStore:
    """Take options as LMCache's and SGLang's doors do."""
    return EngineStore("engine", "1", options)


LLAMA_NAMES = {"MODEL": MODEL, "STATE": STATE, "BLOB": llama.kv_to_state(STATE), "llama": llama} | {
    "HEADERS": Message()
}
LLAMA_CALLS = calls_of(
    """
LlamaPrefixes: llama.LlamaPrefixes(store=t.store(), model='m', layout=STATE, options='o')
LlamaPrefixes.agrees: t.prefixes(STATE).agrees(tokens=[1, 2], kv=STATE)
LlamaPrefixes.longest: t.prefixes(STATE).longest(tokens=[1, 2])
LlamaPrefixes.put: t.prefixes(STATE).put(tokens=range(20), kv=STATE, checkpoints=())
LlamaPrefixes.restore: t.prefixes(STATE).restore(tokens=[1, 2])
LlamaServer: llama.LlamaServer(url='http://localhost:1', folder=t.folder)
LlamaServer.admits: t.no_server().admits(headers=HEADERS)
LlamaServer.ask: t.no_server().ask(path='/props', question={})
LlamaServer.erase: t.no_server().erase(slot=0)
LlamaServer.request: t.no_server().request(method='GET', path='/props', body=None, headers={})
LlamaServer.restore: t.no_server().restore(slot=0, tokens=np.arange(20), kv=STATE)
LlamaServer.save: t.no_server().save(slot=0)
LlamaServer.tokenize: t.no_server().tokenize(text='text')
LlamaStoreCache: llama.LlamaStoreCache(llama=None, store=t.store())
SlotProxy: llama.SlotProxy(store=t.store(), model=MODEL, server=t.no_server(),
    address=('localhost', 0), options='', log=print)
kv_to_state: llama.kv_to_state(kv=STATE)
model_hash: llama.model_hash(path=MODEL)
read_slot_file: llama.read_slot_file(path=t.slot_file(STATE))
state_to_kv: llama.state_to_kv(blob=BLOB, version=4)
stored_prefixes: llama.stored_prefixes(store=t.store(), model='m')
write_slot_file: llama.write_slot_file(path=t.folder / 'slot', tokens=np.arange(20), kv=STATE)
""",
    LLAMA_NAMES | {"np": np},
)
DOOR_CALLS = LLAMA_CALLS | calls_of(
    """
EngineStore: engine_store(where=t.folder / 'store', ram_bytes=0, disk_bytes=1 << 24, model='m',
    n_threads=1, salt='s')
""",
    NAMES | {"engine_store": engine_store},
)
# Other calls make these, or they hold plain values without checks.
DATA = set(
    """
    Machine Measured Placement PlacementOptions Report Stage Stat Tensor Weights Plan Cell
    Sequence Repacked StreamedTensor LlamaKV SlotFile StoredPrefix
""".split()
)


@pytest.mark.parametrize(
    ("room", "rows"),
    [("unimem", CALLS), ("unimem.engine", ENGINE_CALLS), ("unimem.llama_cpp", LLAMA_CALLS)],
    ids=["", "engine", "llama_cpp"],
)
def test_each_public_call_has_a_row(room: str, rows: Collection[str]) -> None:
    missing = set()
    package = pytest.importorskip(room, reason="the engine needs the extra 'run'")
    for name, members in python_names()[room].items():
        thing = getattr(package, name)
        if inspect.isclass(thing):
            if not issubclass(thing, Exception):
                missing |= {name} - DATA
        elif inspect.signature(thing).parameters:
            missing.add(name)
        for member in members:
            found = getattr(thing, member, None)
            if callable(found) and set(inspect.signature(found).parameters) - {"self"}:
                missing.add(f"{name}.{member}")
    missing -= {"StreamedTensor.dequantize"}  # always refused
    assert missing - set(rows) == set()


@pytest.fixture
def things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Things]:
    monkeypatch.chdir(tmp_path)  # `save` writes to strange paths there
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about placement and unclosed objects
        yield Things(tmp_path, undo)


@pytest.mark.parametrize("name", sorted(CALLS | DOOR_CALLS))
def test_a_wrong_argument_is_named_with_what_was_expected(name: str, things: Things) -> None:
    assert unclear(things, (CALLS | DOOR_CALLS)[name]) == []


@pytest.mark.parametrize("name", sorted(ENGINE_CALLS))
def test_so_is_one_of_the_engine(name: str, things: Things) -> None:
    things.kept = things.decoder()  # skips without ggml
    assert unclear(things, ENGINE_CALLS[name]) == []
