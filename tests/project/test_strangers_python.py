"""What strangers try from Python: wrong and unusual inputs, and the answer that each one gets.

None may end in a traceback without words. A row is a name, a call, the error that it ends with
(None where it is right), and words of its message.
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

um: Any = unimem  # what is called wrongly is nothing for a type checker
F32 = np.float32
Row = tuple[str, Callable[[Any], Any], type[BaseException] | None, str]


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


def other_fork(use: Callable[[], Any]) -> bool:
    """In a forked child a call works, or says that it cannot; the parent goes on."""

    def attempt() -> bool:
        try:
            use()
        except um.ClosedError as error:
            return "fork" in str(error)
        return True

    return in_child(attempt)


SIZES: tuple[Row, ...] = (
    ("a block of nothing", lambda t: um.Block(0), ValueError, "nbytes: expected an integer from 1"),
    ("a block of -1", lambda t: um.Block(-1), ValueError, "nbytes: expected"),
    ("a block of 1.5", lambda t: um.Block(1.5), TypeError, "nbytes: expected an integer, got 1.5"),
    ("a block of nan", lambda t: um.Block(float("nan")), TypeError, "nbytes: .*got nan"),
    ("a block of infinity", lambda t: um.Block(float("inf")), TypeError, "nbytes: .*got inf"),
    ("a block of 2**80", lambda t: um.Block(2**80), ValueError, "nbytes: expected"),
    ("a block of 2**62", lambda t: um.Block(2**62), um.CapacityError, "does not fit"),
    ("a block of True", lambda t: um.Block(True), TypeError, "nbytes: expected an integer, got Tr"),
    ("a cache of True layers", lambda t: um.KVCache(True, 1, 8, 8), TypeError, "n_layers: .*True"),
    ("strict='no'", lambda t: um.Block(64, strict="no"), ValueError, "strict: expected False or T"),
    ("grow='no'", lambda t: t.kv(grow="no"), ValueError, "grow: expected False or True, got 'no'"),
    ("grow=1", lambda t: t.kv(grow=1), ValueError, "grow: expected False or True, got 1"),
    ("grow of NumPy", lambda t: t.kv(grow=np.True_).grow, None, ""),
    (
        "prefix_cache='no'",
        lambda t: um.PagedKVCache(1, 2, 8, n_blocks=2, prefix_cache="no"),
        ValueError,
        "prefix_cache: expected False or True",
    ),
    (
        "overlap='no'",
        lambda t: um.ForwardScratch.bytes_needed(DIMS, overlap="no"),
        ValueError,
        "overlap: expected False or True",
    ),
    ("verify=0", lambda t: um.KVCache.restore(t.saved(), verify=0), ValueError, "verify: expected"),
    ("writable=1", lambda t: um.Block.attach(0, writable=1), ValueError, "writable: expected"),
    ("a block of text", lambda t: um.Block("1 MiB"), TypeError, "nbytes: .*'1 MiB'"),
    (
        "a block of a NumPy integer",
        lambda t: t.undo.enter_context(um.Block(np.int64(64))),
        None,
        "",
    ),
    ("a block of a 0-d array", lambda t: t.undo.enter_context(um.Block(np.array(64))), None, ""),
    ("a block of a 1-d array", lambda t: um.Block(np.array([64])), TypeError, "nbytes: expected"),
    (
        "a reserve below the size",
        lambda t: um.Block(64, reserve=8),
        ValueError,
        "reserve: expected",
    ),
    ("pages of 3m", lambda t: um.Block(64, pages="3m"), ValueError, "pages: expected one of auto"),
    ("pages in a list", lambda t: um.Block(64, pages=["4k"]), ValueError, "pages: expected"),
    ("a node that is none", lambda t: um.Block(64, numa="bind:x"), ValueError, "numa: expected"),
    ("a node as a number", lambda t: um.Block(64, numa=0), TypeError, "numa: expected"),
    ("lock=1", lambda t: um.Block(64, lock=1), ValueError, "lock: expected False, True"),
    ("warm=-1", lambda t: um.Block(64, warm=-1), ValueError, "warm: expected"),
    ("a name of bytes", lambda t: um.Block(64, name=b"x"), TypeError, "name: expected a string"),
    ("half a character", lambda t: um.Block(64, name="\ud800"), ValueError, "name: .*surrogate"),
    (
        "a unicode name",
        lambda t: t.undo.enter_context(um.Block(64, name="Gedächtnis 記憶")),
        None,
        "",
    ),
    ("a shared name with a slash", lambda t: um.Block(64, shared="a/b"), ValueError, "shared:"),
    ("an option that is none", lambda t: um.Block(64, page="4k"), TypeError, "page"),
    ("a category of one's own", lambda t: um.Block(64, category="mine"), ValueError, "category:"),
    ("a grid of no cells", lambda t: um.Grid(64, 0), ValueError, "n_cells: expected"),
    ("a grid of 2**40 cells", lambda t: um.Grid(64, 2**40), ValueError, "n_cells: expected"),
    ("a layout of text", lambda t: um.Layout("a", 1, 1), TypeError, "Tape 'weights'.*'a'"),
    ("a layout of None", lambda t: um.Layout(1, 1, None), TypeError, "Tape 'history'.*got None"),
    ("dims of a float", lambda t: um.ModelDims(64.0, *[2] * 7), ValueError, "hidden_size must be"),
    ("dims below 1", lambda t: um.ModelDims(64, 0, *[2] * 6), ValueError, "intermediate_size must"),
)
TAKES: tuple[Row, ...] = (
    ("more than there is", lambda t: t.tape().take(2**20), um.TapeFull, "65536 left"),
    (
        "more of scratch",
        lambda t: t.layout().scratch.take(9999),
        um.TapeFull,
        "'scratch'.*4096 left",
    ),
    (
        "more of history",
        lambda t: t.layout().history.take(9999),
        um.TapeFull,
        "'history'.*4096 left",
    ),
    (
        "more of weights",
        lambda t: t.layout().weights.take(9999),
        um.TapeFull,
        "'weights'.*4096 left",
    ),
    ("2**70 values", lambda t: t.tape().take(2**70), um.TapeFull, "asked for"),
    ("a shape of text", lambda t: t.tape().take("ab"), TypeError, "shape: expected an integer"),
    ("a shape of None", lambda t: t.tape().take(None), TypeError, "shape: expected an integer"),
    ("a shape of floats", lambda t: t.tape().take((1.0, 2)), TypeError, "shape: .*got 1.0"),
    ("a negative shape", lambda t: t.tape().take((2, -1)), ValueError, "shape: expected"),
    ("a shape of 33 dimensions", lambda t: t.tape().take((1,) * 33), ValueError, "at most 32"),
    (
        "a shape of a NumPy array",
        lambda t: t.tape().take(np.array([2, 3])).shape == (2, 3),
        None,
        "",
    ),
    ("no values", lambda t: t.tape().take(0).shape == (0,), None, ""),
    ("a shape of True", lambda t: t.tape().take(True), TypeError, "shape: expected an integer"),
    ("a scalar", lambda t: t.tape().take(()).shape == (), None, ""),
    ("float16 by a short name", lambda t: t.tape().take(2, "f16").itemsize == 2, None, ""),
    ("big-endian values", lambda t: t.tape().take(2, ">f4").dtype == ">f4", None, ""),
    ("Python objects", lambda t: t.tape().take(2, object), ValueError, "cannot lie in raw memory"),
    ("no dtype", lambda t: t.tape().take(2, None), TypeError, "dtype: expected"),
    ("align=3", lambda t: t.tape().take(2, align=3), ValueError, "power of two"),
    ("align=0", lambda t: t.tape().take(2, align=0), ValueError, "power of two"),
    ("align of text", lambda t: t.tape().take(2, align="64"), TypeError, "align: expected"),
    ("align=2**70", lambda t: t.tape().take(2, align=2**70), ValueError, "align: expected"),
    ("-1 bytes", lambda t: t.tape().take_bytes(-1), ValueError, "nbytes: expected"),
    ("bytes of None", lambda t: t.tape().take_address(None), TypeError, "nbytes: expected"),
    (
        "a mark of the future",
        lambda t: t.tape().rewind(99),
        ValueError,
        "mark: expected at most the 0",
    ),
    ("who owns text", lambda t: t.tape().owns("x"), TypeError, "array_or_address: expected"),
    ("who owns -1", lambda t: t.tape().owns(-1) is False, None, ""),
    (
        "a frozen tape",
        lambda t: (tape := t.tape()).freeze() or tape.take(1),
        um.FrozenError,
        "frozen",
    ),
    ("a closed tape", lambda t: closed(t.tape()).take(1), um.ClosedError, "Tape 'tape' is closed"),
    ("a view that is used", lambda t: (t.tape().take(1).fill(1), True)[1], None, ""),
    (
        "more cells than there are",
        lambda t: [t.undo and g.take() for g in [t.grid()] * 5],
        um.GridFull,
        "4 of 4 are used: 0 left",
    ),
    ("a cell of None", lambda t: t.grid().give(None), TypeError, "cell"),
    (
        "a cell of another grid",
        lambda t: t.grid().give(t.grid().take()),
        ValueError,
        "another grid",
    ),
    ("a cell too large", lambda t: t.grid().take().as_array("f8", 9), ValueError, "needs 72 bytes"),
    (
        "a view beyond the block",
        lambda t: t.block().as_array("u1", None, 2**40),
        ValueError,
        "offset",
    ),
    ("advice of one's own", lambda t: t.block().advise("faster"), ValueError, "advice: expected"),
    (
        "a copy as another dtype",
        lambda t: np.asarray(t.block(), "f4", copy=False),
        ValueError,
        "copy",
    ),
)
CACHES: tuple[Row, ...] = (
    ("appending a list", lambda t: append(t.kv(), [[1.0]]), TypeError, "k: expected a NumPy array"),
    ("appending None", lambda t: append(t.kv(), None), TypeError, "k: expected a NumPy array"),
    ("appending no tokens", lambda t: append(t.kv(), rows(0)), None, ""),
    ("appending big-endian", lambda t: append(t.kv(), rows(2, ">f4")), None, ""),
    ("appending every second row", lambda t: append(t.kv(), rows(4)[::2]), None, ""),
    ("appending Fortran order", lambda t: append(t.kv(), np.asfortranarray(rows(3))), None, ""),
    ("appending bfloat16", lambda t: append(t.kv(), rows(1, ml_dtypes.bfloat16)), None, ""),
    ("appending doubles", lambda t: append(t.kv(), rows(1, "f8")), TypeError, "k: .*got float64"),
    ("appending bools", lambda t: append(t.kv(), rows(1, bool)), TypeError, "k: .*got bool"),
    ("appending objects", lambda t: append(t.kv(), rows(1, object)), TypeError, "k: .*got object"),
    ("appending a 0-d array", lambda t: append(t.kv(), np.array(F32(1))), ValueError, "k and v"),
    ("k and v of two shapes", lambda t: append(t.kv(), rows(1), rows(2)), ValueError, "one shape"),
    (
        "k and v of two dtypes",
        lambda t: append(t.kv(), rows(), rows(1, "f2")),
        TypeError,
        "one dtype",
    ),
    ("a layer of text", lambda t: t.kv().append("0", rows(), rows()), TypeError, "layer: expected"),
    ("a layer below 0", lambda t: t.kv().append(-1, rows(), rows()), ValueError, "layer: expected"),
    ("a layer too high", lambda t: t.kv().layer(2), ValueError, "i: expected a layer from 0 to 1"),
    ("more tokens than fit", lambda t: append(t.kv(), rows(20)), um.CacheFull, "3 of 16.*13 left"),
    (
        "out of one array",
        lambda t: t.kv().layer(0, "f4", out=(1,)),
        ValueError,
        "out: expected two",
    ),
    ("out of a number", lambda t: t.kv().layer(0, "f4", out=1), TypeError, "out: expected two"),
    ("values as integers", lambda t: t.kv().layer(0, "int8"), ValueError, "dtype: expected"),
    ("cropping more", lambda t: t.kv().crop(4), ValueError, "expected n of at most 3"),
    ("cropping by a NumPy integer", lambda t: t.kv().crop(np.uint8(2)) is None, None, ""),
    ("keeping -1", lambda t: t.kv().trim_to(-1), ValueError, "n: expected an integer from 0"),
    ("committing nothing reserved", lambda t: t.kv().commit(1), RuntimeError, "reserve"),
    (
        "a limit of None",
        lambda t: t.kv().enforce_memory_limit(None),
        TypeError,
        "max_bytes: expected",
    ),
    (
        "a KV type of one's own",
        lambda t: t.kv(dtype="q3"),
        ValueError,
        "dtype: expected one of f32",
    ),
    (
        "a window above the length",
        lambda t: t.kv(window=17),
        ValueError,
        "window: expected at most",
    ),
    ("a window of 0", lambda t: t.kv(window=0), ValueError, "window: expected an integer from 1"),
    ("max_seq_len of 0", lambda t: um.KVCache(1, 1, 8, 0), ValueError, "max_seq_len: expected"),
    (
        "max_seq_len of 2**40",
        lambda t: um.KVCache(1, 1, 8, 2**40),
        ValueError,
        "max_seq_len: expec",
    ),
    ("batch 0", lambda t: um.KVCache(1, 1, 8, 8, batch=0), ValueError, "batch: expected"),
    ("a budget of 1 byte", lambda t: t.kv(budget_bytes=1), um.CacheFull, "budget_bytes=1"),
    ("a tape of text", lambda t: um.KVCache(1, 1, 8, 8, tape="t"), TypeError, "tape: expected a"),
    ("a tape that is full", lambda t: um.KVCache(9, 9, 64, 99, tape=t.tape()), um.TapeFull, "left"),
    (
        "a closed tape for a cache",
        lambda t: um.KVCache(1, 1, 8, 8, tape=closed(t.tape())),
        um.ClosedError,
        "Tape 'tape' is closed",
    ),
    (
        "a layout that is closed",
        lambda t: closed(t.layout()).attach(t.kv()),
        um.ClosedError,
        "Layout",
    ),
    ("attaching text", lambda t: t.layout().attach("kv"), TypeError, "cache: expected a KVCache"),
    ("a closed cache", lambda t: append(closed(t.kv()), rows()), um.ClosedError, "is closed"),
    ("dims of a dict", lambda t: um.KVCache.for_dims({}), TypeError, "dims: expected ModelDims"),
    ("token ids of text", lambda t: t.paged().sequence("hello"), TypeError, "tokens: expected"),
    ("token ids below 0", lambda t: t.paged().sequence([-5]), ValueError, "tokens: expected ids"),
    (
        "gathering into a list",
        lambda t: t.sequence().gather(0, [[], []]),
        TypeError,
        "out: expected",
    ),
    ("a closed sequence", lambda t: closed(t.sequence()).fork(), um.ClosedError, "is closed"),
    ("a vector too wide", lambda t: t.pad().append(np.ones(5, F32)), ValueError, "vec of shape"),
    (
        "a vector of integers",
        lambda t: t.pad().append(np.ones(4, int)),
        TypeError,
        "expected an array",
    ),
    (
        "rows beyond the end",
        lambda t: t.pad().append_batch(np.ones((6, 4), F32)),
        um.CacheFull,
        "3 of 8 are used: 5 left",
    ),
    (
        "a token that is not there",
        lambda t: t.paged_pad().get_token(3),
        IndexError,
        "expected i of",
    ),
)
PATHS: tuple[Row, ...] = (
    ("no path", lambda t: um.open_weights(None), TypeError, "path: expected the path of a file"),
    ("a number", lambda t: um.open_weights(3), TypeError, "path: expected the path of a file"),
    ("an open file", lambda t: um.open_weights(io.BytesIO(b"GGUF")), TypeError, "path: expected"),
    ("an empty path", lambda t: um.open_weights(""), FileNotFoundError, "No such file"),
    ("a NUL byte", lambda t: um.open_weights("a\0b"), ValueError, "path: .*NUL byte"),
    ("half a character", lambda t: um.open_weights("\udfff.gguf"), ValueError, "lone half"),
    (
        "a path of bytes",
        lambda t: t.undo.enter_context(um.open_weights(os.fsencode(MODEL))),
        None,
        "",
    ),
    ("a folder", lambda t: um.open_weights(t.folder), IsADirectoryError, "A directory"),
    ("an empty file", lambda t: um.open_weights(made(t.folder, "e")), um.GGUFError, "e: "),
    (
        "a text",
        lambda t: um.open_weights(made(t.folder, "t", b"hello")),
        um.GGUFError,
        "begin with GGUF",
    ),
    (
        "a beginning",
        lambda t: um.open_weights(made(t.folder, "m.gguf", MODEL.read_bytes()[:99])),
        um.GGUFError,
        "m.gguf",
    ),
    ("a FIFO", lambda t: um.open_weights(fifo(t.folder)), OSError, "regular file"),
    ("/dev/null", lambda t: um.open_weights("/dev/null"), OSError, "regular file"),
    (
        "a unicode name",
        lambda t: t.undo.enter_context(
            um.open_weights(made(t.folder, "Modell ü 模型.gguf", MODEL.read_bytes()))
        ),
        None,
        "",
    ),
    (
        "a way to load of one's own",
        lambda t: t.weights(load="fast"),
        ValueError,
        "load: expected one",
    ),
    ("half a thread", lambda t: t.weights(threads=0.5), TypeError, "threads: expected an integer"),
    ("progress of text", lambda t: t.weights(progress="bar"), TypeError, "progress: expected"),
    ("closed weights", lambda t: closed(t.weights()).tensors, um.ClosedError, "are closed"),
    (
        "a tensor that is none",
        lambda t: t.weights().tensors["lm_head"],
        KeyError,
        "none of the model",
    ),
    ("a key that is none", lambda t: t.weights().metadata["x"], KeyError, "none of the metadata"),
    (
        "a tensor as float32",
        lambda t: np.asarray(
            next(x for x in t.weights().tensors.values() if x.type == "q8_0"), F32
        ),
        TypeError,
        r"dequantize\(\)",
    ),
    (
        "writing to a tensor",
        lambda t: np.asarray(next(iter(t.weights().tensors.values()))).fill(0),
        ValueError,
        "read-only",
    ),
    ("mapping a folder", lambda t: um.Block.map(t.folder), OSError, "No such device|directory"),
    ("mapping nothing", lambda t: um.Block.map(made(t.folder, "e")), ValueError, "nbytes of"),
    ("mapping half a page on", lambda t: um.Block.map(MODEL, offset=1), ValueError, "multiple"),
    ("mapping past the end", lambda t: um.Block.map(MODEL, offset=2**40), ValueError, "nbytes of"),
    ("attaching to nobody", lambda t: um.Block.attach(10**6), OSError, "Bad file descriptor"),
    ("attaching to 2**70", lambda t: um.Block.attach(2**70), OSError, "Bad file descriptor"),
    ("restoring a model", lambda t: um.KVCache.restore(MODEL), um.SnapshotError, "tiny.gguf"),
    ("saving to a folder", lambda t: t.kv().save(t.folder), IsADirectoryError, "directory"),
    ("saving to /dev/null", lambda t: t.kv().save("/dev/null"), OSError, "regular file"),
    (
        "saving with too few ids",
        lambda t: t.kv().save(t.folder / "s", tokens=[1]),
        ValueError,
        "tokens: expected the ids of all 3",
    ),
    (
        "staging a text",
        lambda t: um.stage(made(t.folder, "t", b"hello")),
        um.GGUFError,
        "begin with",
    ),
    ("planning for nobody", lambda t: um.plan(None), TypeError, "path"),
    ("ctx 0", lambda t: um.plan(DIMS, ctx=0), ValueError, "ctx: expected an integer from 1 to"),
    ("ctx -1", lambda t: um.plan(DIMS, ctx=-1), ValueError, "ctx: expected"),
    ("ctx 2**40", lambda t: um.plan(DIMS, ctx=2**40), ValueError, "ctx: expected"),
    ("ctx nan", lambda t: um.plan(DIMS, ctx=float("nan")), ValueError, "ctx: expected"),
    ("ctx of a NumPy integer", lambda t: um.plan(DIMS, ctx=np.int32(8)).ctx == 8, None, ""),
    ("batch 0 of a plan", lambda t: um.plan(DIMS, batch=0), ValueError, "batch: expected"),
    ("a KV type of None", lambda t: um.plan(DIMS, kv_dtype=None), ValueError, "kv_dtype: expected"),
    (
        "a device of one's own",
        lambda t: um.plan(DIMS, device="gpu"),
        ValueError,
        "device: expected",
    ),
    ("a report of 0", lambda t: um.report(0), ValueError, "pid: expected"),
    ("a report of 2**22", lambda t: um.report(2**22 + 1), ProcessLookupError, "process"),
    ("a report of text", lambda t: um.report("me"), TypeError, "pid: expected an integer"),
    ("measuring a number", lambda t: um.measure()(5), TypeError, "expected a function"),
)
ENDS: tuple[Row, ...] = (
    ("closing a block twice", lambda t: twice(t.block()), None, ""),
    ("closing a tape twice", lambda t: twice(t.tape()), None, ""),
    ("closing a grid twice", lambda t: twice(t.grid()), None, ""),
    ("closing a cache twice", lambda t: twice(t.kv()), None, ""),
    ("closing paged memory twice", lambda t: twice(t.paged()), None, ""),
    ("closing a sequence twice", lambda t: twice(t.sequence()), None, ""),
    ("closing a pad twice", lambda t: twice(t.pad()), None, ""),
    ("closing a layout twice", lambda t: twice(t.layout()), None, ""),
    ("closing weights twice", lambda t: twice(t.weights()), None, ""),
    ("closing buffers twice", lambda t: twice(t.buffers()), None, ""),
    (
        "closing under a view",
        lambda t: (block := t.block(), block.as_array(), block.close()),
        BufferError,
        "1 live users",
    ),
    (
        "closing a cache under a view",
        lambda t: (kv := t.kv(), kv.layer(0), kv.close()),
        BufferError,
        "live views",
    ),
    ("pickling a block", lambda t: pickle.dumps(t.block()), TypeError, "cannot be pickled"),
    ("pickling a cache", lambda t: pickle.dumps(t.kv()), TypeError, "cannot be pickled"),
    ("copying a tape", lambda t: copy.copy(t.tape()), TypeError, "cannot be pickled"),
    ("a closed block", lambda t: closed(t.block()).as_array(), um.ClosedError, "is closed"),
    ("a closed layout", lambda t: closed(t.layout()).clear_pass(), um.ClosedError, "is closed"),
    ("closed buffers", lambda t: closed(t.buffers()).logits, um.ClosedError, "is closed"),
    ("a cache in a forked child", lambda t: other_fork(t.kv().clear), None, ""),
    ("a ring in a forked child", lambda t: other_fork(t.kv(window=4).clear), None, ""),
    ("a tape in a forked child", lambda t: other_fork(t.tape().clear), None, ""),
    (
        "shared memory in a forked child",
        lambda t: other_fork(t.undo.enter_context(um.Block(64, shared=True)).as_array),
        None,
        "",
    ),
)
TABLE = SIZES + TAKES + CACHES + PATHS + ENDS


@pytest.fixture
def things(tmp_path: Path) -> Iterator[Things]:
    with ExitStack() as undo, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.simplefilter("ignore", um.PlacementWarning)
        yield Things(tmp_path, undo)


@pytest.mark.parametrize(
    ("call", "error", "words"), [pytest.param(*row[1:], id=row[0]) for row in TABLE]
)
def test_a_stranger_gets_an_answer(
    things: Things, call: Callable[[Things], Any], error: type[Exception] | None, words: str
) -> None:
    if error is None:
        assert call(things)
        return
    with pytest.raises(error, match=words) as caught:
        call(things)
    # A bare error of Python's own says nothing to who did not write the code.
    assert len(str(caught.value)) > 10
    if error in {TypeError, ValueError}:
        assert type(caught.value) in {TypeError, ValueError, um.SnapshotError}


def test_the_table_is_long_and_names_no_row_twice() -> None:
    for part in (SIZES, TAKES, CACHES, PATHS, ENDS):
        assert len({row[0] for row in part}) == len(part)
    assert len(TABLE) >= 120


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
