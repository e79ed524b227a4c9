"""Wrong and unusual calls from Python, and the answer to each.

`test_wrong_arguments.py` passes the same wrong values to every argument of every public call.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import unimem
from support.contracts.things import DIMS, MODEL, Things
from support.processes.forks import in_child

um: Any = unimem  # not checked for types: the calls are wrong
F32 = np.float32
MODULES = {"copy": copy, "io": io, "ml_dtypes": ml_dtypes, "pickle": pickle}


def closed(thing: Any) -> Any:
    thing.close()
    return thing


def twice(thing: Any) -> bool:
    thing.close()
    thing.close()
    return bool(thing.closed)


def rows(n: int = 1, dtype: Any = F32) -> Any:
    return np.ones((n, 2, 8), dtype)


def append(kv: Any, k: Any, v: Any = None) -> bool:
    before = kv.seq_len
    for layer in range(2):
        kv.append(layer, k, k if v is None else v)
    return bool(kv.seq_len == before + np.asarray(k).shape[0])


def made(folder: Path, name: str, data: bytes = b"") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


def hidden(folder: Path) -> Path:
    path = made(folder, "hidden", b"GGUF")
    path.chmod(0)
    return path


def quantized(weights: Any) -> Any:
    return next(tensor for tensor in weights.tensors.values() if tensor.type == "q8_0")


def other_fork(use: Callable[[], Any]) -> bool:
    """Say whether a call works in a forked child, or says that it cannot."""

    def attempt() -> bool:
        try:
            use()
        except um.ClosedError as error:
            return "fork" in str(error)
        return True

    return in_child(attempt)


# Calls and their outcomes; "fine" means that the call returns a true value.
TABLE = r"""
# ---- sizes and options
um.Block(0) -> ValueError: nbytes: expected an integer from 1
um.Block(float('inf')) -> TypeError: nbytes: .*got inf
um.Block(2 ** 62) -> um.CapacityError: does not fit
um.Block(True) -> TypeError: nbytes: expected an integer, got Tr
um.KVCache(True, 1, 8, 8) -> TypeError: n_layers: .*True
t.kv(grow=1) -> ValueError: grow: expected False or True, got 1
t.kv(grow=np.True_).grow -> fine
keep(um.Block(np.int64(64))) -> fine
keep(um.Block(np.array(64))) -> fine
um.Block(64, name='\ud800') -> ValueError: name: .*surrogate
keep(um.Block(64, name='Gedächtnis 記憶')) -> fine
um.Block(64, page='4k') -> TypeError: page
um.Layout('a', 1, 1) -> ValueError: Tape 'weights'.*'a'
um.Layout(1, 1, None) -> TypeError: Tape 'history'.*got None
um.ModelDims(64.0, *[2] * 7) -> ValueError: hidden_size must be
um.ModelDims(64, 0, *[2] * 6) -> ValueError: intermediate_size must
# ---- takes
t.tape().take(2 ** 20) -> um.TapeFull: 65536 left
t.layout().scratch.take(9999) -> um.TapeFull: 'scratch'.*4096 left
t.layout().history.take(9999) -> um.TapeFull: 'history'.*4096 left
t.layout().weights.take(9999) -> um.TapeFull: 'weights'.*4096 left
t.tape().take(2 ** 70) -> um.TapeFull: asked for
t.tape().take((1.0, 2)) -> TypeError: shape: .*got 1.0
t.tape().take((2, -1)) -> ValueError: shape: expected
t.tape().take((1,) * 65) -> ValueError: at most 64
t.tape().take(np.array([2, 3])).shape == (2, 3) -> fine
t.tape().take(0).shape == (0,) -> fine
t.tape().take(True) -> TypeError: shape: expected an integer
t.tape().take(()).shape == () -> fine
t.tape().take(2, 'f16').itemsize == 2 -> fine
t.tape().take(2, '>f4').dtype == '>f4' -> fine
t.tape().take(2, object) -> ValueError: cannot lie in raw memory
t.tape().take(2, align=3) -> ValueError: power of two
t.tape().rewind(99) -> ValueError: mark: expected at most the 0
t.tape().owns(-1) is False -> fine
(tape := t.tape()).freeze() or tape.take(1) -> um.FrozenError: frozen
closed(t.tape()).take(1) -> um.ClosedError: Tape 'tape' is closed
(t.tape().take(1).fill(1), True)[1] -> fine
[t.undo and g.take() for g in [t.grid()] * 5] -> um.GridFull: 4 of 4 are used: 0 left
t.grid().give(t.grid().take()) -> ValueError: another grid
t.grid().take().as_array('f8', 9) -> ValueError: needs 72 bytes
t.block().as_array('u1', None, 2 ** 40) -> ValueError: offset
np.asarray(t.block(), 'f4', copy=False) -> ValueError: copy
# ---- caches
append(t.kv(), rows(2, '>f4')) -> fine
append(t.kv(), rows(4)[::2]) -> fine
append(t.kv(), np.asfortranarray(rows(3))) -> fine
append(t.kv(), rows(1, ml_dtypes.bfloat16)) -> fine
append(t.kv(), rows(1, object)) -> TypeError: k: .*got object
append(t.kv(), np.array(F32(1))) -> ValueError: k and v
append(t.kv(), rows(1), rows(2)) -> ValueError: one shape
append(t.kv(), rows(), rows(1, 'f2')) -> TypeError: one dtype
t.kv().layer(2) -> ValueError: i: expected a layer from 0 to 1
append(t.kv(), rows(20)) -> um.CacheFull: 3 of 16.*13 left
t.kv().layer(0, 'f4', out=(1,)) -> ValueError: out: expected two
t.kv().crop(np.uint8(2)) is None -> fine
t.kv().commit(1) -> RuntimeError: reserve
t.kv(window=17) -> ValueError: window: expected at most
t.kv(budget_bytes=1) -> um.CacheFull: budget_bytes=1
um.KVCache(9, 9, 64, 99, tape=t.tape()) -> um.TapeFull: left
um.KVCache(1, 1, 8, 8, tape=closed(t.tape())) -> um.ClosedError: Tape 'tape' is closed
closed(t.layout()).attach(t.kv()) -> um.ClosedError: Layout
t.paged().sequence([-5]) -> ValueError: tokens: expected ids
closed(t.sequence()).fork() -> um.ClosedError: is closed
t.pad().append_batch(np.ones((6, 4), F32)) -> um.CacheFull: 3 of 8 are used: 5 left
t.paged_pad().get_token(3) -> IndexError: expected i of
# ---- paths, plans and reports
um.open_weights(999_999) -> OSError: Bad file descriptor
um.open_weights(io.BytesIO(b'GGUF')) -> TypeError: path: expected
um.open_weights('') -> FileNotFoundError: No such file
um.open_weights('a\x00b') -> ValueError: path: .*NUL byte
um.open_weights('\udfff.gguf') -> ValueError: lone half
keep(um.open_weights(os.fsencode(MODEL))) -> fine
um.open_weights(t.folder) -> IsADirectoryError: A directory
um.open_weights(made(t.folder, 'e')) -> um.GGUFError: /e: .
um.open_weights(made(t.folder, 't', b'hello')) -> um.GGUFError: begin with GGUF
um.open_weights(made(t.folder, 'm.gguf', MODEL.read_bytes()[:99])) -> um.GGUFError: m.gguf
um.open_weights(fifo(t.folder)) -> OSError: regular file
um.open_weights('/dev/null') -> OSError: regular file
keep(um.open_weights(made(t.folder, 'Modell 模型.gguf', MODEL.read_bytes()))) -> fine
closed(t.weights()).tensors -> um.ClosedError: are closed
t.weights().tensors['lm_head'] -> KeyError: none of the model
t.weights().metadata['x'] -> KeyError: none of the metadata
np.asarray(quantized(t.weights()), F32) -> TypeError: dequantize\(\)
np.asarray(next(iter(t.weights().tensors.values()))).fill(0) -> ValueError: read-only
um.Block.map(t.folder) -> OSError: No such device|directory
um.Block.map(made(t.folder, 'e')) -> ValueError: nbytes of
um.Block.map(MODEL, offset=1) -> ValueError: multiple
um.Block.map(MODEL, offset=2 ** 40) -> ValueError: nbytes of
um.Block.attach(10 ** 6) -> OSError: Bad file descriptor
um.Block.attach(2 ** 70) -> OSError: Bad file descriptor
um.KVCache.restore(MODEL) -> um.SnapshotError: tiny.gguf
t.kv().save(t.folder) -> IsADirectoryError: directory
t.kv().save('/dev/null') -> OSError: regular file
t.kv().save(t.folder / 's', tokens=[1]) -> ValueError: tokens: expected the ids of all 3
um.stage(made(t.folder, 't', b'hello')) -> um.GGUFError: begin with
um.plan(DIMS, ctx=0) -> ValueError: ctx: expected an integer from 1 to
um.plan(DIMS, ctx=np.int32(8)).ctx == 8 -> fine
um.report(0) -> ValueError: pid: expected
um.report(2 ** 22 + 1) -> ProcessLookupError: process
# ---- ends
twice(t.block()) -> fine
twice(t.tape()) -> fine
twice(t.grid()) -> fine
twice(t.sequence()) -> fine
twice(t.layout()) -> fine
twice(t.weights()) -> fine
twice(t.buffers()) -> fine
((block := t.block()), block.as_array(), block.close()) -> BufferError: 1 live users
pickle.dumps(t.block()) -> TypeError: cannot be pickled
copy.copy(t.tape()) -> TypeError: cannot be pickled
closed(t.block()).as_array() -> um.ClosedError: is closed
closed(t.layout()).clear_pass() -> um.ClosedError: is closed
closed(t.buffers()).logits -> um.ClosedError: is closed
other_fork(t.kv(window=4).clear) -> fine
other_fork(t.tape().clear) -> fine
other_fork(keep(um.Block(64, shared=True)).as_array) -> fine
"""


@pytest.fixture
def things(tmp_path: Path) -> Iterator[Things]:
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("ignore", um.PlacementWarning)
        yield Things(tmp_path, undo)


@pytest.mark.parametrize("row", [row for row in TABLE.strip().splitlines() if row[0] != "#"])
def test_a_stranger_gets_an_answer(things: Things, row: str) -> None:
    call, _, answer = row.partition(" -> ")
    names = {**globals(), "t": things, "keep": things.undo.enter_context, **MODULES}
    if answer == "fine":
        assert eval(call, names)
        return
    kind, _, words = answer.partition(": ")
    error = eval(kind, names)
    with pytest.raises(error, match=words) as caught:
        eval(call, names)
    # A bare Python error does not help a caller.
    assert len(str(caught.value)) > 10
    if error in {TypeError, ValueError}:
        assert type(caught.value) in {TypeError, ValueError, um.SnapshotError}


def test_a_file_that_may_not_be_read(things: Things) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    path = hidden(things.folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0
    with pytest.raises(PermissionError, match="hidden"):
        um.open_weights(path)


def test_a_tape_of_another_device(things: Things, cuda: Any) -> None:
    with cuda.Tape(1 << 16) as far:
        takers = (um.DecodeBuffers, DIMS), (um.ForwardScratch, DIMS), (um.Scratchpad, 8, 8)
        for make, *sizes in (*takers, (um.KVCache, 1, 1, 8, 8)):
            with pytest.raises(TypeError, match=r"tape: expected a unimem\.Tape, got unimem\.cuda"):
                make(*sizes, tape=far)
        with pytest.raises(TypeError, match=r"tape: expected a unimem\.Tape"):
            um.open_weights(MODEL, tape=far)
    with pytest.raises(TypeError, match=r"tape: expected a .*cuda\.Tape, got"):
        cuda.KVCache(1, 1, 8, 8, tape=things.tape())
