"""Repacked images: found again, shared, checked, and never computed with when they are damaged."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files import gguf_files as gf
from support.files.weight_bytes import cached_bytes, drop_from_cache, leaves_nothing
from support.processes.at_once import at_once
from support.processes.forks import fork
from unimem.base.atomic_file import NewFile
from unimem.base.cache_folder import cache_folder
from unimem.weights.files import version_of
from unimem.weights.repack import image_identity, image_search, image_writer, repack
from unimem.weights.repack.arrangement import arrange
from unimem.weights.repack.image import IMAGE_NAME, Image, write_image
from unimem.weights.repack.image_cache import ImageCache
from unimem.weights.repack.image_format import key_of

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")
pytest.importorskip(
    "unimem.backends.ggml",
    reason="the engine needs ggml: pip install '.[run]'",
    exc_type=ImportError,
)

import gguf

from unimem.backends import ggml, ggml_orders

__all__ = ["leaves_nothing"]  # a fixture

KINDS = [kind for kind in ggml.MATMUL_TYPES if ggml_orders.find_order(kind, (256, 64))]
if not KINDS:
    pytest.skip("this build of ggml has no orders of its own on this CPU", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_nothing")

Patch = pytest.MonkeyPatch


def write(path: Path, seed: int = 0) -> Path:
    """A model of random bytes: two matrices, experts, and a table that stays as it is."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (256, 64),
        "up.weight": (512, 160),
        "down.weight": (256, 64),
        "down_exps.weight": (256, 96, 3),
    }
    data = {}
    for i, (name, ne) in enumerate(shapes.items()):
        shape = (*ne[:0:-1], int(ggml.row_size(KINDS[0], ne[0])))
        values = gf.random_bytes(int(np.prod(shape)), seed + i).reshape(shape)
        data[name] = (values, gguf.GGMLQuantizationType(KINDS[0]))
    gf.write_with_gguf_py(path, {}, data)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return write(folder / "model.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: Patch) -> ImageCache:
    folder = tmp_path / "cache"
    monkeypatch.setenv("UNIMEM_CACHE", str(folder))
    monkeypatch.setenv("UNIMEM_CACHE_BYTES", "1G")
    return ImageCache(str(folder), create=True)


@pytest.fixture
def repacks(monkeypatch: Patch) -> list[str]:
    """The models that were repacked, each time."""
    found: list[str] = []
    plain = repack.repack_into

    def counted(weights: um.Weights, *rest: Any) -> None:
        found.append(weights.files[0])
        plain(weights, *rest)

    monkeypatch.setattr(repack, "repack_into", counted)
    return found


def repacked_bytes(path: Path | str, **options: Any) -> tuple[str | None, dict[str, bytes]]:
    """Where the repacked bytes of a model are from, and these."""
    with um.open_weights(path, load="map") as weights, um.repack(weights, **options) as made:
        found = {
            name: ctypes.string_at(tensor.address, tensor.nbytes)
            for name, tensor in made.tensors.items()
        }
        return made.image, found


def expected_bytes(path: Path) -> dict[str, bytes]:
    image, found = repacked_bytes(path, cache=False)
    assert image is None
    return found


def only(cache: ImageCache) -> Path:
    (image,) = cache.images()
    return Path(image.path)


# ---- the ways back ------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["mapped", "mapped, cold", "thp", "tape", "numa"])
def test_a_second_start_has_the_same_bytes(
    way: str, model: Path, cache: ImageCache, repacks: list[str]
) -> None:
    expected = expected_bytes(model)
    assert repacked_bytes(model) == (None, expected)
    assert len(repacks) == 2
    path = only(cache)
    drop_from_cache(path)
    told: list[tuple[int, int]] = []
    options: dict[str, Any] = {"progress": lambda *done: told.append(done)}
    if way == "mapped":
        path.read_bytes()
    if way in ("numa", "thp"):
        options |= {"numa": "bind:0"} if way == "numa" else {"pages": "thp"}
    with um.Tape(4 << 20) as tape:
        if way == "tape":
            tape.take_bytes(100)
            options["tape"] = tape
        assert repacked_bytes(model, **options) == (str(path), expected)
    assert len(repacks) == 2
    with um.open_weights(model) as weights:
        total = sum(weights.tensors[name].nbytes for name in expected)
    assert told[-1] == (total, total)
    assert all(done < total for done, _ in told[:-1])
    assert told == sorted(told)
    # A mapping leaves it in the page cache, for the next start and for others; a copy does not.
    assert (cached_bytes(path) > path.stat().st_size / 2) == way.startswith("mapped")


def test_a_staged_image_is_mapped_by_all(
    model: Path, cache: ImageCache, repacks: list[str], monkeypatch: Patch
) -> None:
    monkeypatch.setenv("UNIMEM_CACHE", "off")
    expected = expected_bytes(model)
    try:
        staged = um.stage(model, repack=True)
    except um.PlacementError as error:
        pytest.skip(f"neither tmpfs nor /dev/shm: {error}")
    repacks.clear()
    with staged:
        (image,) = staged.paths
        assert repacked_bytes(model) == (image, expected)  # it need not be opened by the link
        assert Path(staged.path).read_bytes() == model.read_bytes()
        # Where a mapping is what was asked for, nothing is hashed again.
        with monkeypatch.context() as patch:
            patch.setattr(Image, "_check", None)
            assert repacked_bytes(staged.path) == (image, expected)
        # Elsewhere it is read, and checked.
        assert repacked_bytes(staged.path, numa="bind:0") == (image, expected)
        assert repacks == []
        write(model, seed=9)  # and is no longer of this model
        assert repacked_bytes(staged.path)[0] is None


def test_staging_takes_what_is_kept(model: Path, cache: ImageCache, monkeypatch: Patch) -> None:
    expected = repacked_bytes(model)[1]
    monkeypatch.setattr("unimem.staging.stage.repack_into", None)
    with um.stage(model, repack=True, backing="shm") as staged:
        assert repacked_bytes(staged.path) == (staged.paths[0], expected)
    # Damaged, it is repacked: what would do that is none here.
    path = only(cache)
    raw = bytearray(path.read_bytes())
    raw[-5000] ^= 1
    path.write_bytes(raw)
    with pytest.warns(um.PlacementWarning, match="hash"), pytest.raises(TypeError):
        um.stage(model, repack=True, backing="shm")
    assert cache.images() == []


def test_an_image_on_disk_beside_a_model_is_not_trusted(
    model: Path, cache: ImageCache, repacks: list[str]
) -> None:
    _, expected = repacked_bytes(model)
    shutil.copy(only(cache), model.with_name(IMAGE_NAME))
    only(cache).unlink()
    assert repacked_bytes(model) == (None, expected)
    assert len(repacks) == 2


@pytest.mark.locks
def test_a_mapping_is_locked_as_it_was_asked(model: Path, cache: ImageCache) -> None:
    repacked_bytes(model)
    only(cache).read_bytes()
    with um.open_weights(model, load="map") as weights, um.repack(weights, lock=True) as made:
        assert made.image == str(only(cache))
        assert made.blocks[0].granted.locked_bytes >= made.nbytes


# ---- damages ------------------------------------------------------------------------------------


def flip(raw: bytearray, at: int) -> bytearray:
    raw[at] ^= 1
    return raw


# What a header can have is in test_image_format.py.
DAMAGES: dict[str, tuple[Callable[[bytearray], bytes | bytearray], str]] = {
    "empty": (lambda raw: b"", "does not begin with UNIMEMRP"),
    "cut in the table": (lambda raw: raw[:200], "cut off"),
    "cut in the data": (lambda raw: raw[:-1], "cut off"),
    "a bit of the header": (lambda raw: flip(raw, 33), "header's checksum"),
    "a bit of a tensor": (lambda raw: flip(raw, len(raw) - 5000), "hash of"),
    "half written": (lambda raw: raw[:4096] + bytes(len(raw) - 4096), "hash of"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_removed_and_made_anew(
    damage: str, model: Path, cache: ImageCache, repacks: list[str]
) -> None:
    _, expected = repacked_bytes(model)
    path = only(cache)
    raw, (change, rule) = path.read_bytes(), DAMAGES[damage]
    path.write_bytes(change(bytearray(raw)))  # in the page cache: it would be mapped
    with pytest.warns(um.PlacementWarning, match=rule):
        assert repacked_bytes(model) == (None, expected)
    assert len(repacks) == 2
    assert path.read_bytes() == raw


@pytest.mark.parametrize("way", ["mapped", "thp", "tape"])
def test_a_flipped_bit_is_found_however_it_is_loaded(
    way: str, model: Path, cache: ImageCache
) -> None:
    _, expected = repacked_bytes(model)
    path = only(cache)
    path.write_bytes(flip(bytearray(path.read_bytes()), path.stat().st_size - 5000))
    if way != "mapped":
        drop_from_cache(path)
    with um.Tape(4 << 20) as tape:
        ways: dict[str, dict[str, Any]] = {"thp": {"pages": "thp"}, "tape": {"tape": tape}}
        with pytest.warns(um.PlacementWarning, match="hash of"):
            assert repacked_bytes(model, **ways.get(way, {})) == (None, expected)


# ---- of something else --------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["model", "model of the same size", "build", "cpu", "probe"])
def test_an_image_of_something_else_is_never_met(
    other: str, model: Path, cache: ImageCache, repacks: list[str], monkeypatch: Patch
) -> None:
    repacked_bytes(model)
    path = only(cache)
    if other.startswith("model"):
        second = write(model.with_name("second.gguf"), seed=7 if other == "model" else 8)
        os.replace(second, model)
        os.utime(model, ns=(0, 0))  # of another time, as of another inode
        # Under the name that an image of it would have.
        with um.open_weights(model) as weights:
            identity = image_identity.identify(weights, arrange(weights))
        shutil.copy(path, cache.path_of(key_of(identity)))
        with pytest.warns(um.PlacementWarning, match="not of what its name says"):
            image, found = repacked_bytes(model)
        assert (image, found) == (None, expected_bytes(model))
        return
    build = ggml_orders.build()
    if other == "build":
        build = build | {"libraries": "0"}
    elif other == "cpu":
        build = build | {"features": {}}
    else:
        monkeypatch.setattr(image_identity, "_hash_pattern", lambda *_: "0")
    monkeypatch.setattr(ggml_orders, "build", lambda: build)
    assert repacked_bytes(model)[0] is None
    assert len(repacks) == 2
    assert len(cache.images()) == 2


def test_a_model_of_the_same_size_and_time_is_another(
    model: Path, cache: ImageCache, repacks: list[str]
) -> None:
    repacked_bytes(model)
    before = model.stat()
    model.write_bytes(write(model.with_name("other.gguf"), seed=5).read_bytes())
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert version_of(model.stat()) == version_of(before)
    assert repacked_bytes(model) == (None, expected_bytes(model))


def test_the_probe_is_the_order(model: Path) -> None:
    """Equal for equal code, and another one where a byte lies elsewhere."""
    with um.open_weights(model) as weights:
        found = arrange(weights)
        first = image_identity.identify(weights, found)
        image_identity._hash_pattern.cache_clear()
        assert image_identity.identify(weights, found) == first
        assert all(len(digest) == 32 for digest in first["probe"].values())
        shape = image_identity._pattern_shape(KINDS[0], (512, 160))
        assert image_identity._hash_pattern(KINDS[0], shape) in first["probe"].values()


# ---- whose it is --------------------------------------------------------------------------------


@pytest.mark.parametrize("stranger", ["file", "folder", "owner", "owner of the folder"])
def test_models_of_strangers_are_kept_only_when_asked(
    stranger: str, model: Path, cache: ImageCache
) -> None:
    what = model.parent if "folder" in stranger else model
    if stranger.startswith("owner"):
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(what, 65534, 65534)
    else:
        what.chmod(what.stat().st_mode | 0o002)
    repacked_bytes(model)
    assert cache.images() == []
    _, expected = repacked_bytes(model, cache=True)
    assert repacked_bytes(model, cache=True) == (str(only(cache)), expected)


def test_folders_of_strangers_are_not_used(model: Path, cache: ImageCache) -> None:
    os.chmod(cache.folder, 0o777)
    assert repacked_bytes(model)[0] is None
    assert os.listdir(cache.folder) == []
    for choice in (True, cache.folder):
        with pytest.raises(PermissionError, match="may write"):
            repacked_bytes(model, cache=choice)


def test_what_is_no_image_is_left_alone(model: Path, cache: ImageCache, tmp_path: Path) -> None:
    _, expected = repacked_bytes(model)
    path, elsewhere = only(cache), tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert repacked_bytes(model) == (None, expected)
    assert not path.is_symlink()
    path.unlink()
    os.mkfifo(path)
    assert repacked_bytes(model) == (None, expected)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"UNIMEM_CACHE": "off"}, None),
        ({"UNIMEM_CACHE": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/unimem"),
        ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/unimem"),
    ],
)
def test_the_folder(variables: dict[str, str], folder: str | None, monkeypatch: Patch) -> None:
    monkeypatch.delenv("UNIMEM_CACHE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == folder


# ---- room ---------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_first(
    model: Path, cache: ImageCache, monkeypatch: Patch
) -> None:
    models = [write(model.with_name(f"{i}.gguf"), seed=i) for i in range(3)]
    for i, path in enumerate(models[:2]):
        repacked_bytes(path)
        os.utime(cache.images()[0].path, (i + 1, i + 1))
    first = next(image for image in cache.images() if image.model == str(models[0]))
    repacked_bytes(models[0])  # which is used again
    monkeypatch.setenv("UNIMEM_CACHE_BYTES", str(2 * first.nbytes))
    repacked_bytes(models[2])
    assert {image.model for image in cache.images()} == {str(models[0]), str(models[2])}
    monkeypatch.setenv("UNIMEM_CACHE_BYTES", str(first.nbytes - 1))
    with pytest.warns(um.PlacementWarning, match="UNIMEM_CACHE_BYTES"):
        repacked_bytes(models[1], cache=True)
    repacked_bytes(models[1])  # not asked for: nothing is said
    assert len(cache.images()) == 2
    monkeypatch.setenv("UNIMEM_CACHE_BYTES", "much")
    with pytest.raises(ValueError, match="expected a size as 20G, got 'much'"):
        repacked_bytes(models[1])


def test_a_full_disk_leaves_nothing(model: Path, cache: ImageCache, monkeypatch: Patch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "image")

    monkeypatch.setattr("unimem.base.atomic_file.NewFile.write", full)
    with pytest.warns(um.PlacementWarning, match="No space left"):
        assert repacked_bytes(model, cache=True)[0] is None
    assert os.listdir(cache.folder) == []


# ---- while it is used already -------------------------------------------------------------------


@pytest.mark.parametrize("waiter", ["closing", "the end of the process"])
def test_what_is_repacked_is_ready_before_it_is_kept(
    waiter: str, model: Path, cache: ImageCache, monkeypatch: Patch
) -> None:
    is_ready, writing, plain = threading.Event(), [], write_image

    def write_later(*arguments: Any) -> None:
        assert is_ready.wait(60)
        writing.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        plain(*arguments)

    monkeypatch.setattr(image_search, "write_image", write_later)
    with um.open_weights(model, load="map") as weights:
        made = um.repack(weights)
        assert made.image is None
        assert cache.images() == []
        is_ready.set()
        if waiter == "closing":
            made.close()
        else:
            image_writer._end_all()
        (first,) = cache.images()
        made.close()
    assert writing == [10]
    assert repacked_bytes(model)[0] == first.path


@pytest.mark.parametrize("why", ["an exception", "an interrupt", "closed under it"])
def test_what_is_not_kept_leaves_nothing(
    why: str, model: Path, cache: ImageCache, monkeypatch: Patch
) -> None:
    main = threading.get_ident()

    def write_for_ever(*arguments: Any) -> None:
        *_, block, base, check = arguments
        if why == "an interrupt":
            signal.pthread_kill(main, signal.SIGINT)
        while True:
            check()
            block.as_array("uint8", 1, base)

    monkeypatch.setattr(image_search, "write_image", write_for_ever)
    raised: dict[str, type[BaseException]] = {
        "an exception": ZeroDivisionError,
        "an interrupt": KeyboardInterrupt,
        "closed under it": um.PlacementWarning,
    }

    def use(weights: um.Weights) -> None:
        with warnings.catch_warnings(action="error"), um.repack(weights, cache=True) as made:
            if why == "an exception":
                raise ZeroDivisionError
            if why == "closed under it":
                made.blocks[0].__exit__()

    with um.open_weights(model, load="map") as weights, pytest.raises(raised[why]):
        use(weights)
    assert os.listdir(cache.folder) == []


@pytest.mark.slow
def test_the_end_of_a_process_waits(
    model: Path, cache: ImageCache, run_python: Callable[..., Any]
) -> None:
    script = f"import unimem as um; um.repack(um.open_weights({str(model)!r}, load='map'))"
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    assert os.listdir(cache.folder) == [only(cache).name]


def test_a_forked_child_does_not_keep_others_waiting(cache: ImageCache) -> None:
    with cache.making({"of": "it"}):
        (name,) = os.listdir(cache.folder)
        path = os.path.join(cache.folder, name)
        fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
        (fd,) = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")
                 and os.path.samefile(f"/proc/self/fd/{fd}", path)]  # fmt: skip
        of_child, waiting = os.dup(fd), os.open(path, os.O_RDWR)
    try:
        fcntl.flock(waiting, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(of_child)
        os.close(waiting)


def test_a_lock_that_cannot_be_given_back_is_closed(cache: ImageCache, monkeypatch: Patch) -> None:
    def fails(fd: int, kind: int) -> None:
        if kind == fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, "No locks available")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(fcntl, "flock", fails)
    with cache.making({"of": "it"}):
        pass
    assert os.listdir("/proc/self/fd") == before
    assert os.listdir(cache.folder) == []


# ---- several processes --------------------------------------------------------------------------


def test_two_at_once_have_one_result(
    model: Path, cache: ImageCache, repacks: list[str], monkeypatch: Patch
) -> None:
    expected = expected_bytes(model)
    repacks.clear()
    asked = 0
    second_waits = threading.Event()
    counted, flock = repack.repack_into, fcntl.flock

    def ask(fd: int, how: int) -> None:
        nonlocal asked
        asked += how == fcntl.LOCK_EX
        if asked == 2:
            second_waits.set()
        flock(fd, how)

    def repack_slowly(*arguments: Any) -> None:
        assert second_waits.wait(60)
        counted(*arguments)

    monkeypatch.setattr("unimem.weights.repack.image_cache.fcntl.flock", ask)
    monkeypatch.setattr(repack, "repack_into", repack_slowly)
    found: list[Any] = [None, None]

    def start(number: int) -> None:
        found[number] = repacked_bytes(model)

    at_once(2, start)
    assert len(repacks) == 1
    assert sorted(image is None for image, _ in found) == [False, True]
    assert [data for _, data in found] == [expected, expected]
    assert os.listdir(cache.folder) == [only(cache).name]


def kill_after(call: Callable[..., Any]) -> Callable[..., Any]:
    def once(*arguments: Any) -> None:
        call(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    return once


@pytest.mark.parametrize("when", ["write", "publish"])
def test_a_killed_writer_leaves_nothing_that_is_used(
    when: str, model: Path, cache: ImageCache, repacks: list[str]
) -> None:
    child = fork()
    if child == 0:
        call = kill_after(NewFile.write if when == "write" else lambda _: None)
        setattr(NewFile, when, call)
        repacked_bytes(model)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert cache.images() == []
    assert len(os.listdir(cache.folder)) == 2  # a lock and a half
    image, found = repacked_bytes(model)
    assert (image, found) == (None, expected_bytes(model))
    assert os.listdir(cache.folder) == [only(cache).name]
    # What is left of another model goes as well, also where nothing is written.
    Path(cache.folder, ".other.repacked.01234567.unimem-tmp").touch()
    assert repacked_bytes(model)[0] == str(only(cache))
    assert os.listdir(cache.folder) == [only(cache).name]


def test_an_interrupt_leaves_nothing(model: Path, cache: ImageCache) -> None:
    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repacked_bytes(model, progress=stop)
    assert os.listdir(cache.folder) == []
    repacked_bytes(model)
    for cached in (True, False):
        if not cached:
            drop_from_cache(only(cache))
        with pytest.raises(KeyboardInterrupt):
            repacked_bytes(model, progress=stop)
    assert len(cache.images()) == 1
