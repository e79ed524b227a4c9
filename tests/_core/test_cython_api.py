"""A Cython module of a user's, compiled against the installed package, takes memory without
Python."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.kernel import proc_maps
from support.kernel.os_faults import os_faults
from support.project.building import run, tool
from support.project.checkout import ROOT

PAGE = ROOT / "docs" / "native.md"
SOURCE = Path(__file__).parent / "cython_user" / "user.pyx"


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    pytest.importorskip("Cython", reason="Cython is needed to build a user's module")
    folder = tmp_path_factory.mktemp("cython_user")
    c_file, module = folder / "user.c", folder / f"user{sysconfig.get_config_var('EXT_SUFFIX')}"
    # The folder with the package unimem, where its .pxd files are: site-packages, unless the
    # install is editable.
    packages, library = Path(um.__file__).parent.parent, Path(um.get_library())
    # Where Python has no lock, it stays off.
    cython = [sys.executable, "-m", "cython", "-3", "-X", "freethreading_compatible=True"]
    run(*cython, "-I", packages, SOURCE, "-o", c_file)
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


# ---- what docs/native.md promises ----


def test_the_methods_stay_as_they_are() -> None:
    """The declarations of the page are those of the .pxd files, and all are of public classes."""
    (text,) = [x for x in re.findall(r"```cython\n(.*?)```", PAGE.read_text(), re.S) if "# of" in x]
    folder = ROOT / "src" / "unimem"
    face = (folder / "__init__.pxd").read_text()
    promised = 0
    for part in re.split(r"^# of ", text, flags=re.M)[1:]:
        name, *methods = part.strip().splitlines()
        (module,) = re.findall(rf"^from unimem\.([\w.]+) cimport {name}$", face, re.M)
        declared = (folder / f"{module.replace('.', '/')}.pxd").read_text()
        declared = re.sub(r"\s+", " ", declared)
        assert [each for each in methods if f" {each} " not in f"{declared} "] == []
        promised += len(methods)
    assert promised == 8


def test_taking_without_the_lock(user: ModuleType) -> None:
    with um.Tape(4096) as tape:
        assert user.take_unlocked(tape, 4096) == tape.block.address
        with pytest.raises(um.TapeFull):
            user.take_unlocked(tape, 1)
    with pytest.raises(um.ClosedError):
        user.take_unlocked(tape, 1)


def test_cells_without_the_lock(user: ModuleType) -> None:
    with um.Grid(100, 3) as grid:
        found = user.fill_cells(grid, 3, [])
        assert len({address for _, address in found}) == 3
        assert all(grid.tape.block.address <= address for _, address in found)
        with pytest.raises(um.GridFull):
            user.fill_cells(grid, 1, [])
        user.fill_cells(grid, 0, [number for number, _ in found])
        assert grid.n_available == 3
        for number in (0, 3):
            with pytest.raises(ValueError, match="cell_id"):
                user.fill_cells(grid, 0, [number])
    with pytest.raises(um.ClosedError):
        user.fill_cells(grid, 1, [])


def tokens(n: int) -> tuple[np.ndarray, np.ndarray]:
    k = np.arange(n * 8, dtype="float32").reshape(n, 2, 4) % 1024
    return k, -k


def agrees(kv: um.KVCache, layer: int, k: np.ndarray, v: np.ndarray) -> None:
    for found, given in zip(kv.layer(layer), (k, v), strict=True):
        np.testing.assert_array_equal(found[0].astype("float32"), given.transpose(1, 0, 2))


def test_a_cache_grows_without_the_lock(user: ModuleType) -> None:
    k, v = tokens(3000)
    with um.KVCache(2, 2, 4, 3000, grow=True) as kv:
        user.append_unlocked(kv, 0, k, v)
        assert kv.n_growths > 1
        user.append_together(kv, 1, k, v)
        for layer in range(2):
            agrees(kv, layer, k, v)
        with pytest.raises(um.CacheFull):
            user.append_unlocked(kv, 0, k[:1], v[:1])
        with pytest.raises(ValueError, match="layer"):
            user.append_unlocked(kv, 2, k[:1], v[:1])
        with pytest.raises(ValueError, match="layer"):
            user.append_unlocked(kv, 2**32 - 1, k[:1], v[:1])
        assert kv.seq_len == 3000
        kv.trim_to(10)
        lane, rows, n = user.where(kv, 0, True)
        assert (lane, n) == (kv.address(0, "v"), 10)
        assert rows == lane + kv.v_row_bytes * kv.row_of(2990)
        assert user.where(kv, 5, False)[:2] == (0, 0)
    with pytest.raises(um.ClosedError):
        user.append_unlocked(kv, 0, k[:1], v[:1])


def test_rows_that_are_reserved_are_not_appended_to(user: ModuleType) -> None:
    k, v = tokens(1)
    with um.KVCache(1, 2, 4, 8) as kv:
        kv.reserve(1)
        with pytest.raises(RuntimeError):
            user.append_unlocked(kv, 0, k, v)
        kv.rollback()
        user.append_unlocked(kv, 0, k, v)
        agrees(kv, 0, k, v)


def test_layers_that_differ_take_rows(user: ModuleType) -> None:
    k, v = tokens(20)
    layers = [um.LayerKV(2, 4), um.LayerKV(2, 4, window=5), um.LayerKV(2, 4, share_of=0)]
    with um.KVCache(layers=layers, max_seq_len=32) as kv:
        for layer in range(2):
            user.append_unlocked(kv, layer, k, v)
        agrees(kv, 0, k, v)
        agrees(kv, 1, k[-5:], v[-5:])
        assert user.where(kv, 2, False) == user.where(kv, 0, False)
        assert user.where(kv, 1, False)[2] == 5
        assert user.where(kv, 3, False) == (0, 0, 0)
        for layer, reason in ((2, "append to that one"), (3, "layer")):
            with pytest.raises(ValueError, match=reason):
                user.append_unlocked(kv, layer, k[:1], v[:1])


@pytest.mark.parametrize("options", [{"window": 16}, {"order": "head"}, {"dtype": "f32"}])
def test_every_kind_of_cache_takes_rows(user: ModuleType, options: dict[str, Any]) -> None:
    k, v = tokens(40)
    with um.KVCache(1, 2, 4, 64, **options) as kv:
        user.append_unlocked(kv, 0, k, v)
        n = kv.seq_len
        agrees(kv, 0, k[-n:], v[-n:])
        assert user.where(kv, 0, True)[2] == n


def test_a_restored_cache_takes_rows(user: ModuleType, tmp_path: Path) -> None:
    k, v = tokens(40)
    with um.KVCache(1, 2, 4, 64) as kv:
        user.append_unlocked(kv, 0, k[:20], v[:20])
        kv.save(tmp_path / "kv")
    with um.KVCache.restore(tmp_path / "kv") as restored:
        user.append_unlocked(restored, 0, k[20:], v[20:])
        agrees(restored, 0, k, v)
