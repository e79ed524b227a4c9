"""Repacking: the same bytes in every way, no memory twice, and nothing left after an error."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files import gguf_files as gf
from support.files.weight_bytes import cached_bytes, drop_from_cache
from support.models.image_models import KINDS, write_tensors
from support.processes import interrupts
from unimem._core.status import ledger
from unimem.backends import ggml, ggml_orders
from unimem.base.threads import wait_until
from unimem.system import limits
from unimem.weights.repack import repack as repacking
from unimem.weights.repack.arrangement import arrange
from unimem.weights.repack.repack import repack, warm_rest
from unimem.weights.residency import Dropper

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_no_thread")

MIB = 1 << 20


@pytest.fixture
def leaves_no_thread() -> Iterator[None]:
    """Check that no descriptor and no thread is left, whatever is raised."""
    gc.collect()  # descriptors that earlier tests have left
    before = os.listdir("/proc/self/fd"), len(os.listdir("/proc/self/task"))
    yield
    assert os.listdir("/proc/self/fd") == before[0]
    # The kernel may list an ended thread a moment longer.
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= before[1])


def name_of(kind: int) -> str:
    return ggml.MATMUL_TYPES[kind]


def write(path: Path, tensors: dict[str, tuple[int, tuple[int, ...]]]) -> Path:
    """Write a model that is on the disk alone."""
    write_tensors(path, tensors)
    drop_from_cache(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of every type that is repacked here, and of other types, as in models."""
    tensors: dict[str, tuple[int, tuple[int, ...]]] = {"token_embd.weight": (KINDS[0], (256, 640))}
    for kind in KINDS:
        tensors |= {
            f"norm.{kind}.weight": (ggml.F16, (1000,)),
            f"up.{kind}.weight": (kind, (512, 2 * 64 + 32)),
            f"wide.{kind}.weight": (kind, (256, 4 * 64)),
            f"down_exps.{kind}.weight": (kind, (256, 96, 5)),
            f"odd.{kind}.weight": (kind, (256, 33)),
            f"attn_k_b.{kind}.weight": (kind, (256, 96, 5)),  # no experts, though 3-d
        }
    tensors["output.weight"] = (ggml.F16, (256, 640))
    return write(tmp_path_factory.mktemp("model") / "model.gguf", tensors)


REPACKED = {
    f"{part}.{kind}.weight"
    for kind in KINDS
    for part in ("up", "wide", "down_exps")
    if "exps" not in part or ggml_orders.find_order(kind, (256, 96, 5))
}


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, bytes]:
    """The bytes of each tensor, written whole by ggml."""
    found = {}
    with um.open_weights(model, load="copy") as weights, um.Tape(4 * MIB) as tape:
        for name in REPACKED:
            tensor = weights.tensors[name]
            assert tensor.ggml_type is not None
            order = ggml_orders.find_order(tensor.ggml_type, tensor.ne)
            assert order is not None
            at = tape.take_address(order.nbytes)
            with ggml_orders.Buffer(order.buffer_type, at, order.nbytes) as buffer:
                buffer.write(tensor.ggml_type, tensor.ne, tensor.address, at)
            found[name] = ctypes.string_at(at, order.nbytes)
    return found


def bytes_of(repacked: um.Repacked) -> dict[str, bytes]:
    return {
        name: ctypes.string_at(tensor.address, tensor.nbytes)
        for name, tensor in repacked.tensors.items()
    }


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 rows, in more threads than there are CPUs."""
    monkeypatch.setattr(repacking, "_MOST_BYTES", 4096)
    monkeypatch.setattr(repacking, "_LEAST_BYTES", 4096)
    monkeypatch.setattr(repacking, "STAGING_SHARE", 1)
    monkeypatch.setattr(limits, "thread_count", lambda: 5)


# ---- the bytes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["map", "map, cached", "copy", "split"])
@pytest.mark.parametrize("by", ["tensors", "pieces"])
def test_repacked_bytes_are_those_that_ggml_writes(
    model: Path, expected: dict[str, bytes], load: str, by: str, tmp_path: Path, request: Any
) -> None:
    if by == "pieces":
        request.getfixturevalue("small_pieces")
    path = model
    if load == "split":
        path = tmp_path / "m.gguf"
        path.symlink_to(model)
        path = gf.split(path, 9)[1]
    if load == "map, cached":
        model.read_bytes()
    with um.open_weights(path, load="copy" if load == "copy" else "map") as weights:
        with repack(weights, pages="4k") as repacked:
            assert bytes_of(repacked) == expected
            tensor = repacked.tensors[min(REPACKED)]
            assert (tensor.name, tensor.type) == (min(REPACKED), weights.tensors[tensor.name].type)
            assert (
                repacked.nbytes == sum(repacked.types.values()) == sum(map(len, expected.values()))
            )
            # Arrays of tensors still have the bytes of the file.
            for name in REPACKED:
                with open(weights.tensors[name].file, "rb") as file:
                    file.seek(weights.tensors[name].offset)
                    data = file.read(weights.tensors[name].nbytes)
                assert weights.tensors[name].as_array().tobytes() == data
        assert repacked.closed


def test_orders_of_whole_tensors_get_whole_tensors(
    model: Path, expected: dict[str, bytes], small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ggml_orders, "are_rows_apart", lambda *_: False)
    with um.open_weights(model) as weights:
        most = max(tensor.nbytes for tensor in weights.tensors.values())
        assert {piece.ne for piece in repacking._cut(arrange(weights), 5)} == {
            weights.tensors[name].ne for name in REPACKED
        }
        seen: list[int] = []
        with repack(weights, progress=lambda *_: seen.append(staging_bytes())) as repacked:
            assert bytes_of(repacked) == expected
        assert max(seen) <= 5 * (most + 3 * 4096)


def test_pieces_need_the_same_kernel_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, find = KINDS[0], ggml_orders.find_order

    def apart() -> bool:
        return ggml_orders.are_rows_apart.__wrapped__(kind, (256, 256), 64)

    assert apart()

    def other(field: str) -> Any:
        def found(kind: int, ne: tuple[int, ...]) -> Any:
            order = find(kind, ne)
            change = {field: getattr(order, field) + 64}
            return order._replace(**change) if order and ne[1] == 64 else order

        return found

    for field in ("kernel", "nbytes"):
        monkeypatch.setattr(ggml_orders, "find_order", other(field))
        assert not apart()
    monkeypatch.setattr(ggml_orders, "find_order", find)
    write = ggml_orders.Buffer.write

    def by_columns(self: Any, kind: int, ne: Any, source: int, data: int) -> None:
        write(self, kind, ne, source, data)
        ctypes.memset(data, ne[1] % 251, 1)

    monkeypatch.setattr(ggml_orders.Buffer, "write", by_columns)
    assert not apart()


def test_a_type_without_an_order_is_not_repacked(tmp_path: Path) -> None:
    path = write(tmp_path / "f16.gguf", {"up.weight": (ggml.F16, (64, 64))})
    with um.open_weights(path) as weights:
        with pytest.warns(um.PlacementWarning, match=r"no tensor has an order .*\(types: f16\)"):
            nothing = repack(weights)
        assert (dict(nothing.tensors), nothing.nbytes, nothing.blocks) == ({}, 0, ())
        nothing.close()


# ---- memory ------------------------------------------------------------------------------------


def staging_bytes() -> int:
    return int(ledger()["staging"]["mapped_bytes"])


@pytest.mark.parametrize("is_cached", [False, True])
def test_memory_is_not_doubled(tmp_path: Path, is_cached: bool) -> None:
    tensors = {f"{i}.weight": (KINDS[0], (1024, 4096)) for i in range(8)}
    path = write(tmp_path / "m.gguf", tensors | {"norm.weight": (ggml.F16, (1000,))})
    size = path.stat().st_size
    if is_cached:
        path.read_bytes()
    most = 0

    def look(*_: int) -> None:
        nonlocal most
        most = max(most, cached_bytes(path) * (not is_cached) + staging_bytes())

    with contextlib.ExitStack() as closing:
        weights = closing.enter_context(um.open_weights(path))
        ahead = cached_bytes(path) * (not is_cached)  # opening reads the header
        repacked = closing.enter_context(repack(weights, progress=look, pages="4k"))
        # Besides the result there is staging memory, and no further page of a cold file.
        n_threads = limits.thread_count()
        piece = max(repacking._LEAST_BYTES, size // (repacking.STAGING_SHARE * n_threads))
        assert most <= ahead + n_threads * (piece + 3 * 4096)
        assert staging_bytes() == 0
        assert repacked.blocks[0].nbytes - repacked.nbytes < 4096
        assert cached_bytes(path) <= 2 * 4096  # of the norm
        warm_rest(weights, repacked, 1)
        assert weights.residency().tensors["norm.weight"].mapped_bytes == 2000
        assert cached_bytes(path) <= 32 * 4096  # faults map pages around it
        rows = {row.category: row.nbytes for row in um.report().rows}
        assert rows[f"weights:{name_of(KINDS[0])} repacked"] == repacked.nbytes


def test_files_mapped_by_others_stay_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf", {f"{i}.weight": (KINDS[0], (1024, 2048)) for i in range(8)})
    size = -(-path.stat().st_size // 4096) * 4096
    path.read_bytes()
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as theirs,
        um.open_weights(path) as weights,
    ):
        # Only half: the kernel would drop the other half.
        touched = np.frombuffer(theirs, np.uint8, size // 2)[::4096].sum()
        repack(weights).close()
        assert cached_bytes(path) == size
        del touched
    # A start from an image keeps cached pages, too, and reads none ahead.
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
    for left in (0, size):
        with um.open_weights(path) as weights:
            repacking.repack_and_warm(weights, 1).close()
        assert cached_bytes(path) == left
        path.read_bytes()


@pytest.mark.parametrize("order", ["forwards", "backwards", "shuffled"])
def test_repacked_ranges_leave_the_page_cache(
    tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pieces of the page cache of up to 2 MiB are dropped whole or not at all.
    folio, piece, kept, small = 2 * MIB, 300_000, (6 * MIB, 8 * MIB), (MIB, MIB + 4096)
    path = tmp_path / "file"
    path.write_bytes(gf.random_bytes(14 * MIB).tobytes())
    drop_from_cache(path)
    path.read_bytes()
    pieces = [
        (begin, min(begin + piece, end))
        for first, end in ((0, small[0]), (small[1], kept[0]), (kept[1], 14 * MIB))
        for begin in range(first, end, piece)
    ]
    if order != "forwards":
        pieces.reverse()
    if order == "shuffled":
        np.random.default_rng(0).shuffle(pieces)
    true = os.posix_fadvise

    def spare_what_is_kept(fd: int, begin: int, nbytes: int, advice: int) -> None:
        assert begin + nbytes <= kept[0] or kept[1] <= begin
        true(fd, begin, nbytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", spare_what_is_kept)
    with path.open("rb") as file:
        dropper = Dropper(file.fileno(), [small, kept])
        assert dropper.kept == [kept]
        left = 14 * MIB
        for begin, end in pieces:
            dropper.drop(begin, end)
            left -= end - begin
            if order != "shuffled":
                assert cached_bytes(path) <= left + 3 * folio
        # The kernel may also drop kept pages.
        assert cached_bytes(path) <= kept[1] - kept[0] + 2 * folio


def test_tensors_are_repacked_on_a_tape(model: Path, expected: dict[str, bytes]) -> None:
    with um.Tape(8 * MIB) as tape, um.open_weights(model) as weights:
        tape.take_bytes(100)
        repacked = repack(weights, tape=tape)
        assert bytes_of(repacked) == expected
        repacked.close()
        with pytest.raises(um.ClosedError, match="are closed"):
            bytes_of(repacked)


# ---- progress and refusals --------------------------------------------------------------------


def test_progress_and_threads(
    model: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    pinned = []
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, cpus: pinned.append((threading.get_ident(), cpus))
    )
    with um.open_weights(model) as weights:
        repack(weights, progress=lambda *n: told.append(n)).close()
        total = sum(weights.tensors[name].nbytes for name in REPACKED)
    assert told == sorted(told)
    assert told.count((total, total)) == 1
    assert told[-1] == (total, total)
    assert {total for _, total in told} == {total}
    assert threading.get_ident() not in dict(pinned)
    assert len(dict(pinned)) == 5  # and no more than this process may have
    assert {cpu for _, (cpu,) in pinned} <= os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("numa", "expected"),
    [
        (None, [0, 1, 4, 5, 0]),
        ("bind:1", [4, 5, 4, 5, 4]),
        ("preferred:0", [0, 1, 0, 1, 0]),
        ("interleave:0-1", [0, 4, 1, 5, 0]),
        ("bind:2", [0, 1, 4, 5, 0]),  # a node without CPUs
    ],
)
def test_threads_are_on_the_nodes_of_the_memory(
    numa: str | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = {i: SimpleNamespace(cpus=cpus) for i, cpus in enumerate(((0, 1, 2), (3, 4, 5), ()))}
    monkeypatch.setattr(limits, "nodes", lambda: nodes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 4, 5})
    placed: Any = SimpleNamespace(requested={"numa": numa})
    assert repacking._cpus(placed, 5) == expected


@pytest.mark.parametrize("load", ["map", "copy"])
def test_an_interrupt_in_the_middle_leaves_nothing(
    model: Path,
    expected: dict[str, bytes],
    load: Any,
    small_pieces: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Any] = []
    work = repacking._Repacking._repack

    def repack_some(self: Any, piece: Any, number: int) -> None:
        begun.append(piece)
        if len(begun) > 3:
            wait_until(lambda: self._stopped)
        work(self, piece, number)

    def interrupt(done: int, total: int) -> None:
        assert done < total
        if done:
            raise KeyboardInterrupt

    monkeypatch.setattr(repacking._Repacking, "_repack", repack_some)
    with um.Tape(8 * MIB) as tape, um.open_weights(model, load=load) as weights:
        n_pieces = len(repacking._cut(arrange(weights), 5))
        for where in (None, tape):
            begun.clear()
            with pytest.raises(KeyboardInterrupt):
                repack(weights, tape=where, progress=interrupt)
            assert len(begun) <= 3 + 5 < n_pieces
            assert tape.used_bytes == staging_bytes() == 0
        monkeypatch.undo()
        with repack(weights) as repacked:
            assert bytes_of(repacked) == expected


def test_too_little_staging_memory_raises(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with um.open_weights(model) as weights, um.Tape(8 * MIB, warm=True) as tape:
        limit = limits.Limit("a cgroup", 2000, 1000, "more")
        monkeypatch.setattr(limits, "_memory", lambda *_: ((1000, lambda: limit),))
        with pytest.raises(um.CapacityError, match=r"'repacking'.*a cgroup"):
            repack(weights, tape=tape)
        assert tape.used_bytes == staging_bytes() == 0


def test_an_interrupt_leaves_nothing(model: Path) -> None:
    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    before = {name: row["mapped_bytes"] for name, row in ledger().items()}
    with um.Tape(8 * MIB) as tape, um.open_weights(model) as weights:
        with pytest.raises(KeyboardInterrupt):
            repack(weights, progress=interrupt)
        with pytest.raises(KeyboardInterrupt):
            repack(weights, tape=tape, progress=interrupt)
        assert tape.used_bytes == 0
        weights.close()
    assert {name: row["mapped_bytes"] for name, row in ledger().items()} == before


@pytest.mark.slow  # each line once
@pytest.mark.filterwarnings("ignore:unclosed Block:ResourceWarning")
def test_an_interrupt_anywhere_leaves_the_tape_as_it_was(model: Path) -> None:
    with um.Tape(8 * MIB) as tape, um.open_weights(model) as weights:
        left: list[int] = []
        for _ in interrupts.at_each_line(
            lambda: repack(weights, tape=tape), "weights/repack/repack.py", "weights/loading.py"
        ):
            assert not interrupts.others_in(repacking)
            left.append(tape.used_bytes)
            tape.clear()
        assert len(left) > 40
        assert not any(left[:-2])  # at the last lines, all is done


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A model that a test may change."""
    return write(tmp_path / "own.gguf", {"a.weight": (KINDS[0], (256, 4096))})


def test_replaced_files_are_refused(own: Path, model: Path) -> None:
    with um.open_weights(own) as weights:
        own.rename(own.with_suffix(".old"))
        with pytest.raises(FileNotFoundError):
            repack(weights)
        own.write_bytes(model.read_bytes())
        with pytest.raises(OSError, match="replaced or written to") as caught:
            repack(weights)
        assert caught.value.errno == errno.ESTALE
        assert caught.value.filename == str(own)


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_file_that_shrinks_while_it_is_repacked_raises(
    own: Path, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_direct:
        own.read_bytes()
    true = os.preadv

    def cut(fd: int, buffers: Any, offset: int) -> int:
        os.truncate(own, own.stat().st_size // 2 + 100)
        return true(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut)
    with um.open_weights(own) as weights, pytest.raises(OSError, match="become shorter"):
        repack(weights)


def test_a_file_system_without_direct_reads(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no writes, either, as squashfs: nothing can be brought to the disk."""
    true = os.preadv

    def without(fd: int, *rest: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return true(fd, *rest)

    def no_writes(_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    drop_from_cache(own)
    monkeypatch.setattr(os, "preadv", without)
    monkeypatch.setattr(os, "fdatasync", no_writes)
    with um.open_weights(own) as weights, repack(weights) as repacked:
        got = bytes_of(repacked)
        monkeypatch.undo()
        with repack(weights) as again:
            assert bytes_of(again) == got


def test_what_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with um.open_weights(own) as weights, um.Tape(MIB // 4) as tape:
        for options, error, text in (
            ({"tape": tape, "pages": "4k"}, ValueError, "placed already"),
            ({"tape": tape}, um.TapeFull, "262144"),
            ({"colour": 1}, TypeError, "colour"),
        ):
            with pytest.raises(error, match=text):
                repack(weights, **options)
        limit = limits.Limit("a cgroup", 2000, 1000, "more")
        monkeypatch.setattr(limits, "_memory", lambda *_: ((1000, lambda: limit),))
        monkeypatch.setattr(limits, "huge_pools", dict)
        with pytest.raises(um.CapacityError, match="a cgroup"):
            repack(weights)
    with pytest.raises(um.ClosedError):
        repack(weights)
