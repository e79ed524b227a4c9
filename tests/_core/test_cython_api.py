"""A Cython module of a user's, compiled against the installed package, takes memory without
Python."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import proc_maps
import unimem as um
from building import run, tool
from os_faults import os_faults

SOURCE = Path(__file__).parent / "cython_user" / "user.pyx"


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    pytest.importorskip("Cython", reason="Cython is needed to build a user's module")
    folder = tmp_path_factory.mktemp("cython_user")
    c_file, module = folder / "user.c", folder / f"user{sysconfig.get_config_var('EXT_SUFFIX')}"
    # The folder with the package unimem, where its .pxd files are: site-packages, unless the
    # install is editable.
    packages, library = Path(um.__file__).parent.parent, Path(um.get_library())
    run(sys.executable, "-m", "cython", "-3", "-I", packages, SOURCE, "-o", c_file)
    folders = (sysconfig.get_path("include"), um.get_include(), np.get_include())
    options = ["-O0", "-shared", "-fPIC", "-DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION"]
    options += [f"-I{path}" for path in folders]
    link: list[str | Path] = [library, f"-Wl,-rpath,{library.parent}"]
    run(tool("cc"), *options, c_file, "-o", module, *link)
    spec = importlib.util.spec_from_file_location("user", module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_taking_without_python(user: ModuleType) -> None:
    with um.Tape(1 << 16) as tape:
        total, floats, doubles = user.sum_of_squares(tape, 100)
        assert total == sum(i * i for i in range(100))
        assert floats == tape.block.address
        assert doubles % 4096 == 0
        assert tape.owns(doubles + 799)
        assert (tape.used_bytes, tape.n_takes) == (doubles + 800 - tape.block.address, 2)
    with um.Block(4096) as block, um.Grid(100, 3) as grid:
        assert user.base_of(block) == block.address
        cell = grid.take()
        assert user.cell_of(grid, cell) == cell.address


def test_errors_come_through(user: ModuleType) -> None:
    with um.Tape(1000) as tape:
        with pytest.raises(um.TapeFull) as caught:
            user.raw(tape, 2000, 64)
        assert (caught.value.limit, caught.value.used, caught.value.asked) == (1000, 0, 2000)
        with pytest.raises(ValueError, match="power of two"):
            user.raw(tape, 8, 3)
        tape.freeze()
        with pytest.raises(um.FrozenError):
            user.raw(tape, 8, 64)
        with pytest.raises(um.FrozenError):
            user.keep_view(tape)
        assert tape.used_bytes == 0
    with pytest.raises(um.ClosedError):
        user.raw(tape, 8, 64)


def test_a_typed_memoryview_keeps_the_memory(user: ModuleType) -> None:
    with um.Tape(4096) as tape:
        address, view = tape.block.address, user.keep_view(tape)
        with pytest.raises(BufferError, match="live"):
            tape.close()
    assert proc_maps.is_mapped(address)
    view[3] = 5.0
    assert view[3] == 5.0
    del view
    gc.collect()
    assert not proc_maps.is_mapped(address)


@pytest.mark.parametrize("shared", [False, True])
def test_ranges_are_committed_together(user: ModuleType, *, shared: bool) -> None:
    ranges = [(n * 4096, 2 * 4096) for n in (2, 6, 10)]
    with um.Block(4096, pages="4k", reserve=16 * 4096, shared=shared) as block:
        block.as_array()[:] = 1
        with os_faults() as faults:
            for nth in itertools.count(1):
                faults.arm(nth)
                try:
                    user.commit(block, ranges)
                except (MemoryError, OSError):
                    assert faults.failed is not None
                else:
                    break
                finally:
                    faults.disarm()
                assert (block.nbytes, block.committed_bytes) == (4096, 4096)
                assert block.as_array().all()
        assert nth > len(ranges)
        assert (block.nbytes, block.committed_bytes) == (4096, 7 * 4096)
        for offset, nbytes in ranges:
            block.as_array(shape=nbytes, offset=offset)[:] = 2


def test_room_for_ranges_is_asked_once(user: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def require(nbytes: int, what: str) -> None:
        asked.append(nbytes)
        raise um.CapacityError(what)

    with um.Block(4096, pages="4k", reserve=16 * 4096, name="lanes") as block:
        monkeypatch.setattr("unimem.system.limits.require", require)
        with pytest.raises(um.CapacityError, match="growth of block 'lanes'"):
            user.commit(block, [(4096, 4096), (3 * 4096, 8192)])
        assert asked == [3 * 4096]
        assert block.committed_bytes == 4096


def test_a_cache_is_filled_without_python(user: ModuleType) -> None:
    with um.KVCache(3, 2, 4, 2) as kv:
        k = np.arange(8, dtype="float32").reshape(2, 4)
        assert user.append_token(kv, k, -k) == ("UM_OK", 1)
        for layer in range(3):
            for part, expected in zip(kv.layer(layer), (k, -k), strict=True):
                assert (part[0, :, 0] == expected).all()
        assert user.append_token(kv, k, k) == ("UM_OK", 2)
        assert user.append_token(kv, k, k) == ("UM_E_FULL", 2)
        assert kv.seq_len == 2
        del part
