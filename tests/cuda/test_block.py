"""Blocks of a GPU, over a driver in main memory."""

from __future__ import annotations

import ast
import gc
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import unimem as um
from support.gpu.host_gpu import HostDriver, numpy_of
from support.processes import interrupts
from support.processes.forks import in_child
from unimem._core.status import device_bytes, device_ledger, ledger
from unimem.backends import cuda_driver

pytestmark = pytest.mark.usefixtures("gives_memory_back")

MIB = 1 << 20


def held(category: str = "other") -> int:
    row = device_ledger().get(("cuda:0", category))
    return row["nbytes"] if row else 0


@pytest.mark.parametrize("category", ["kv", "history"])
def test_a_block_is_one_allocation(cuda: Any, host_gpu: HostDriver, category: str) -> None:
    with cuda.Block(MIB, category=category) as block:
        assert block.category == "kv"
        assert host_gpu.allocated == {block.address: MIB}
        assert (block.nbytes, block.device, held("history")) == (MIB, 0, MIB)
        assert block.address % 256 == 0
        assert block.requested == {"nbytes": MIB, "device": 0, "pinned": False}
        granted = block.granted
        assert (granted.pages, granted.resident_bytes) == ("device", MIB)
        assert str(granted).startswith("device, 1.0 MiB in RAM")
        block.warm()
    assert host_gpu.allocated == {}
    assert held("history") == 0
    assert device_ledger()[("cuda:0", "history")]["high_water_bytes"] >= MIB


@pytest.mark.parametrize("pinned", [False, True])
def test_views_are_over_its_memory(cuda: Any, pinned: bool) -> None:
    with cuda.Block(MIB, pinned=pinned) as block:
        view = block.as_array("float16", (4, 8), offset=64)
        assert (view.data.ptr, view.shape, view.dtype) == (block.address + 64, (4, 8), np.float16)
        whole = block.as_array()
        assert (whole.shape, whole.dtype) == ((block.nbytes,), np.uint8)
        rest = block.as_array("float64", offset=8)
        assert rest.shape == (block.nbytes // 8 - 1,)
        numpy_of(view)[...] = 7
        assert np.all(numpy_of(whole)[64 : 64 + 64].view(np.float16) == 7)
        assert block.__cuda_array_interface__["data"][0] == block.address
        del view, whole, rest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float32", (MIB,)), f"needs {4 * MIB} bytes of {MIB}"),
        (("uint8", None, MIB + 1), f"offset {MIB + 1} is outside {MIB} bytes"),
        (("uint8", 1, MIB), f"needs 1 bytes of {MIB}"),
        (("float32", 1, 2), "offset 2 is not aligned for float32"),
        (("<f16", 1), "expected 'float16'"),
        (("O", 1), "cannot lie in raw memory"),
        (("uint8", (-1,)), "dimensions of 0 or more"),
        (("uint8", 1, -1), "offset: expected an integer from 0"),
    ],
)
def test_views_that_do_not_fit(cuda: Any, arguments: tuple[Any, ...], message: str) -> None:
    with cuda.Block(MIB, name="b") as block:
        with pytest.raises(ValueError, match=message):
            block.as_array(*arguments)
        with pytest.raises(TypeError):
            block.as_array("uint8", "many")


@pytest.mark.parametrize("pinned", [False, True])
def test_memory_goes_with_the_last_view(cuda: Any, host_gpu: HostDriver, pinned: bool) -> None:
    with cuda.Block(MIB, pinned=pinned) as block:
        view = block.as_array()[10:20][::2]
    there = host_gpu.registered if pinned else host_gpu.allocated
    assert block.closed
    assert len(there) == 1
    numpy_of(view)[...] = 3  # still readable and writable
    del view
    gc.collect()
    assert there == {}
    assert held() == 0


def test_closing_with_views_is_refused(cuda: Any, host_gpu: HostDriver) -> None:
    block = cuda.Block(MIB, name="mine")
    view = block.as_array()
    part = view[5:]
    del view  # the part still refers to it
    with pytest.raises(BufferError, match=r"'mine' has 2 live views: drop them"):
        block.close()
    assert not block.closed
    assert numpy_of(part).shape == (MIB - 5,)
    del part
    block.close()
    block.close()
    assert host_gpu.allocated == {}
    uses = (block.as_array, block.__enter__, block.warm, block.verify, lambda: block.nbytes)
    for use in (lambda: block.address, *uses):
        with pytest.raises(um.ClosedError, match="Block 'mine' is closed"):
            use()
    assert repr(block) == "Block('mine', closed)"


def test_pinned_memory_is_a_block_that_both_see(cuda: Any, host_gpu: HostDriver) -> None:
    with cuda.Block(MIB + 1, pinned=True, pages="4k", category="staging") as block:
        assert isinstance(block.host, um.Block)
        assert block.address == block.host.address
        assert host_gpu.registered == {block.address: block.nbytes}
        assert block.nbytes == block.host.nbytes > MIB
        assert (block.granted.pages, block.requested["pages"]) == ("4k", "4k")
        with pytest.raises(BufferError):
            block.host.close()  # the GPU still sees it
        block.host.as_array()[:3] = (1, 2, 3)
        assert numpy_of(block.as_array("uint8", 3)).tolist() == [1, 2, 3]
        assert "pinned for cuda:0, 4k" in repr(block)
        assert held("staging") == 0  # host memory is in the host's ledger
    assert host_gpu.registered == {}


def test_memory_that_cannot_be_pinned_is_given_back(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_gpu, "register", Mock(side_effect=um.PlacementError(12, "no")))
    with pytest.raises(um.PlacementError):
        cuda.Block(MIB, pinned=True)


HOST_VIEWS: dict[str, Callable[[Any], Any]] = {
    **{"array": lambda host: host.as_array(), "part": lambda host: host.as_array()[5:]},
    **{"buffer": memoryview, "tape": um.Tape},
}


DIMS = um.ModelDims(64, 176, 8, 4, 8, 512, 2, 64)


def test_a_pinned_block_that_does_not_fit_is_refused_before_it_is_pinned(
    cuda: Any, host_gpu: HostDriver
) -> None:
    # CUDA would touch all of it, and where overcommit is 1 the kernel grants it.
    with pytest.raises(um.CapacityError, match="block 'huge'"):
        cuda.Block(1 << 46, pinned=True, name="huge")
    assert host_gpu.registered == {}


# Owners of pinned blocks, and their blocks.
OWNERS: dict[str, tuple[tuple[Any, ...], Callable[[Any], Any]]] = {
    "Block": ((MIB,), lambda block: block),
    "Tape": ((MIB,), lambda tape: tape.block),
    "Grid": ((64, 8), lambda grid: grid.tape.block),
    "Layout": ((8, 8, 8), lambda layout: layout.history.block),
    "DecodeBuffers": ((DIMS,), lambda buffers: buffers.tape.block),
    "Scratchpad": ((8, 8), lambda pad: pad.tape.block),
}


@pytest.mark.parametrize("owner", OWNERS)
def test_closing_under_a_view_of_the_host(cuda: Any, host_gpu: HostDriver, owner: str) -> None:
    arguments, block_of = OWNERS[owner]
    thing = getattr(cuda, owner)(*arguments, pinned=True)
    registered = dict(host_gpu.registered)
    for view in HOST_VIEWS.values():
        seen = view(block_of(thing).host)
        for _ in range(2):
            with pytest.raises(BufferError, match="1 live views"):
                thing.close()
            assert not thing.closed
            assert host_gpu.registered == registered
        del seen
    thing.close()
    assert host_gpu.registered == {}


def mapped(category: str = "other") -> int:
    return ledger()[category]["mapped_bytes"]


@pytest.mark.parametrize("view", ["array", "buffer"])
def test_a_view_of_the_host_outlives_the_with(cuda: Any, host_gpu: HostDriver, view: str) -> None:
    before = mapped()
    with cuda.Block(MIB, pinned=True, pages="4k") as block:
        seen: Any = HOST_VIEWS[view](block.host)
        seen[:3] = bytearray(b"abc") if view == "buffer" else (97, 98, 99)
    assert host_gpu.registered == {}
    assert (mapped(), bytes(seen[:3])) == (before + MIB, b"abc")
    del seen
    assert mapped() == before


def test_memory_is_unmapped_after_cuda_has_let_go_of_it(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, then = mapped(), []
    unregister = host_gpu.unregister

    def noted(address: int) -> None:
        unregister(address)
        then.append(mapped() - before)

    monkeypatch.setattr(host_gpu, "unregister", noted)
    block = cuda.Block(MIB, pinned=True, pages="4k")
    block.close()
    with cuda.Block(MIB, pinned=True, pages="4k") as block:
        seen = block.as_array()
    del seen
    assert (then, mapped()) == ([MIB, MIB], before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_memory_that_cuda_keeps_stays_mapped(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    refuse = Mock(side_effect=error("operation not permitted when stream is capturing"))
    before = mapped()
    host = None
    with monkeypatch.context() as patch:
        patch.setattr(host_gpu, "unregister", refuse)
        with cuda.Block(MIB, pinned=True, pages="4k") as block:
            host = block.host
        del block
        gc.collect()
        assert host is not None
        with pytest.raises(BufferError):
            host.close()
        host.__exit__()
        assert (mapped(), len(host_gpu.registered)) == (before + MIB, 1)
    # The next block frees both.
    cuda.Block(4096, pinned=True, pages="4k").close()
    assert (mapped(), host_gpu.registered) == (before, {})


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.parametrize("pinned", [False, True])
def test_an_interrupt_leaves_nothing_half_done(
    cuda: Any, host_gpu: HostDriver, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    def use() -> None:
        with cuda.Block(MIB, pinned=pinned) as block:
            block.as_array()

    # For errors in destructors; pytest's own hook would keep the object.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = mapped()
    n = 0
    for _ in interrupts.at_each_line(use, "cuda/block.py", also_ends=True):
        assert (host_gpu.allocated, held()) == ({}, 0)
        # Memory is mapped exactly as long as the GPU sees it.
        assert mapped() - before == sum(host_gpu.registered.values())
        for address in list(cuda.block._pinned):
            cuda.block._unpin(host_gpu, address)
        assert (host_gpu.registered, mapped()) == ({}, before)
        n += 1
    assert 30 < n < 200


def test_no_room(cuda: Any, host_gpu: HostDriver) -> None:
    host_gpu.total_bytes = 3 * MIB
    with cuda.Block(2 * MIB):
        with pytest.raises(um.CapacityError) as caught:
            cuda.Block(2 * MIB)
        error = caught.value
        assert (error.limit, error.used, error.asked) == (3 * MIB, 2 * MIB, 2 * MIB)
        assert held() == 2 * MIB


def test_a_budget_limits_blocks_and_plans(cuda: Any, host_gpu: HostDriver) -> None:
    with cuda.Block(2 * MIB):
        cuda.set_budget("3M")
        with cuda.Block(MIB):
            text = r"asked for 1 B, but 3\.0 MiB of a budget of 3\.0 MiB are taken: .*set_budget"
            with pytest.raises(um.CapacityError, match=text) as caught:
                cuda.Block(1)
            error = caught.value
            assert (error.limit, error.used, error.asked) == (3 * MIB, 3 * MIB, 1)
        assert host_gpu.room(device_bytes("cuda:0")) == (MIB, 3 * MIB)
        assert um.report().facts["devices"][0]["budget_bytes"] == 3 * MIB
        cuda.set_budget(MIB)
        assert host_gpu.room(device_bytes("cuda:0")) == (0, MIB)
        cuda.set_budget(None)
        assert host_gpu.room(device_bytes("cuda:0")) == host_gpu.mem_info()
        cuda.Block(2 * MIB).close()


def test_missing_features_are_declared(cuda: Any, tmp_path: Path) -> None:
    with cuda.Block(1) as block, cuda.KVCache(1, 1, 8, 8) as kv:
        calls: dict[str, Callable[[], Any]] = {
            "advise": lambda: block.advise("random"),
            "attach": lambda: cuda.Block.attach(0),
            "collapse": block.collapse,
            "commit": lambda: block.commit(1),
            "enforce_memory_limit": lambda: kv.enforce_memory_limit(0),
            "fileno": block.fileno,
            "grow": lambda: cuda.KVCache(1, 1, 8, 8, grow=True),
            "layers that differ": lambda: cuda.KVCache(layers=[um.LayerKV(1, 8)], max_seq_len=8),
            "map": lambda: cuda.Block.map("file"),
            "placement": lambda: cuda.Block(1, numa="bind:0"),
            "release": block.release,
            "repair": block.repair,
            "restore by mapping": lambda: cuda.KVCache.restore(tmp_path, mode="map"),
            "ring": lambda: cuda.KVCache(1, 1, 8, 8, window=4),
            "fewer bits": lambda: cuda.KVCache(1, 1, 32, 8, dtype="q4_0"),
            "rotation": lambda: cuda.KVCache(1, 1, 64, 8, rotate=True),
            "sealed_copy": block.sealed_copy,
            "states": lambda: cuda.KVCache(layers=[um.LayerState((8,))], max_seq_len=8),
        }
        assert sorted(calls) == [name for name, can in cuda.CAPABILITIES.items() if not can]
        for call in calls.values():
            with pytest.raises(NotImplementedError, match="is not supported on a GPU: "):
                call()


def test_only_missing_features_are_not_implemented(cuda: Any) -> None:
    named = set()
    for path in Path(cuda.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "unsupported":
                assert isinstance(node.args[0], ast.Constant)
                named.add(node.args[0].value)
            # Only `unsupported` raises it.
            is_error = isinstance(node, ast.Name) and node.id == "NotImplementedError"
            assert not is_error or path.name == "block.py"
    assert named == {name for name, can in cuda.CAPABILITIES.items() if not can}


@pytest.mark.parametrize(
    "option", [{"pages": "2m"}, {"numa": None}, {"lock": True}, {"warm": 2}, {"strict": True}]
)
def test_device_memory_cannot_be_placed(cuda: Any, option: dict[str, Any]) -> None:
    told = rf"placing device memory \({next(iter(option))}\).*pinned=True"
    with pytest.raises(NotImplementedError, match=told):
        cuda.Block(1, **option)


@pytest.mark.parametrize("owner", OWNERS)
def test_owners_without_memory_leave_nothing(cuda: Any, host_gpu: HostDriver, owner: str) -> None:
    make = partial(getattr(cuda, owner), *OWNERS[owner][0])
    with pytest.raises(NotImplementedError, match="placing device memory"):
        make(pages="4k")
    with pytest.raises(ValueError, match="device: expected 0 to 0, got 1"):
        make(device=1)
    host_gpu.total_bytes = 10
    with pytest.raises(um.CapacityError):
        make()
    assert host_gpu.allocated == {}


@pytest.mark.parametrize("pinned", [False, True])
def test_unknown_options_are_named(cuda: Any, host_gpu: HostDriver, pinned: bool) -> None:
    block = cuda.Block(1)
    makers = [partial(getattr(cuda, name), *arguments) for name, (arguments, _) in OWNERS.items()]
    makers.append(partial(cuda.Layout, block, block, block))
    for make in makers:
        with pytest.raises(TypeError, match=r"unexpected option 'foo', 'reserve'; placement is pa"):
            make(foo=1, pages="4k", reserve=2, pinned=pinned)
    block.close()
    assert (host_gpu.allocated, host_gpu.registered) == ({}, {})


@pytest.mark.parametrize("pinned", [False, True])
def test_sizes_are_those_of_a_block_that_does_not_grow(cuda: Any, pinned: bool) -> None:
    with cuda.Block(5000, pinned=pinned, pages="4k") if pinned else cuda.Block(5000) as block:
        n = 8192 if pinned else 5000
        assert (block.nbytes, block.committed_bytes, block.reserved_bytes) == (n, n, n)
        assert (block.step_bytes, block.path) == (n, None)


def test_a_dropped_block_warns(cuda: Any, host_gpu: HostDriver) -> None:
    block = cuda.Block(MIB, name="lost")
    with pytest.warns(ResourceWarning, match=r"unclosed Block\('lost', 1.0 MiB, cuda:0\)"):
        del block
    gc.collect()
    assert host_gpu.allocated == {}


def test_no_pickling(cuda: Any) -> None:
    with cuda.Block(1) as block, pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(block)


def uses_of_grid(grid: Any) -> list[Callable[[], Any]]:
    cell = grid.take()
    return [grid.take, lambda: cell.address, cell.as_array, lambda: grid.give(cell)]


# Calls that a forked child refuses. The contract of caches has those of caches.
USES: dict[str, Callable[[Any], list[Callable[[], Any]]]] = {
    "Block": lambda block: [block.as_array],
    "Tape": lambda tape: [
        lambda: tape.take(4),
        lambda: tape.take_address(4),
        lambda: tape.used_bytes,
        lambda: tape.block,
        tape.clear,
        tape.warm,
    ],
    "Grid": uses_of_grid,
    "Layout": lambda layout: [layout.clear_pass, layout.clear_talk, layout.stat, layout.freeze],
    "DecodeBuffers": lambda buffers: [buffers.addresses],
}


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("owner", USES)
def test_a_forked_child_has_none(cuda: Any, host_gpu: HostDriver, owner: str, pinned: bool) -> None:
    arguments, block_of = OWNERS[owner]
    with getattr(cuda, owner)(*arguments, pinned=pinned) as thing:
        uses, view = USES[owner](thing), block_of(thing).as_array()
        there = len(host_gpu.allocated), len(host_gpu.registered)

        def child() -> bool:
            for use in uses:
                with pytest.raises(um.ClosedError, match="of a GPU, which a forked child does not"):
                    use()
            assert thing.closed
            assert "closed" in repr(thing)
            thing.close()
            for make in (cuda.Block, cuda.Tape):
                with pytest.raises(
                    um.ClosedError, match=r"cuda:0: a forked child has no CUDA.*spa"
                ):
                    make(MIB)
            assert um.report().device_bytes == {}
            assert cuda_driver._left_out == [host_gpu]  # kernels are not unloaded
            # The driver was not called.
            return (len(host_gpu.allocated), len(host_gpu.registered)) == there

        assert in_child(child)
        assert not thing.closed
        for use in uses:
            use()
        del view
