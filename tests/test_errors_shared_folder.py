"""Errors of a folder on a server: calls work or raise OSError, and nothing there is lost."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files.prefix_stores import MODEL, TOKENS, bytes_of, cache, opened
from support.files.weight_bytes import MIB, write
from support.models.image_fixtures import cache as images
from support.models.image_fixtures import model
from support.models.image_models import expected_bytes, repacked_bytes
from support.processes.forks import in_child
from unimem.weights.repack.image_cache import ImageCache

__all__ = ["images", "model"]  # fixtures

FAULTS = [
    *((fcntl, "flock", number) for number in (errno.ENOTSUP, errno.ENOLCK, errno.EBADF)),
    (fcntl, "fcntl", errno.ENOTSUP),
    *((os, "replace", number) for number in (errno.EEXIST, errno.ESTALE)),
    *((os, "open", number) for number in (errno.ESTALE, errno.EIO)),
    *((os, "stat", number) for number in (errno.ESTALE, errno.EIO)),
    *((os, "fstat", number) for number in (errno.ESTALE,)),
    (os, "fsync", errno.EIO),
    (os, "posix_fallocate", errno.EOPNOTSUPP),
    *((os, "preadv", number) for number in (errno.ESTALE,)),
    (os, "pwrite", errno.ESTALE),
    (os, "utime", errno.EPERM),
    (os, "unlink", errno.ESTALE),
    (os, "listdir", errno.ESTALE),
]
EACH = pytest.mark.parametrize(
    ("module", "name", "number"),
    [pytest.param(*row, id=f"{row[1]} {errno.errorcode[row[2]]}") for row in FAULTS],
)


@contextmanager
def failing(module: Any, name: str, number: int) -> Iterator[None]:
    """Have each call of a function fail."""

    real = getattr(module, name)

    def fail(*given: Any, **options: Any) -> Any:
        if given[0] == "/":
            return real(*given, **options)
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", um.PlacementWarning)
        patch.setattr(module, name, fail)
        yield


@EACH
def test_a_store_keeps_its_chunks(tmp_path: Path, module: Any, name: str, number: int) -> None:
    with opened(tmp_path) as store, cache(45) as kv, cache() as out:
        assert store.put(kv, TOKENS, model=MODEL) == 40
        with failing(module, name, number):
            with suppress(OSError):
                assert store.restore_into(out, TOKENS, model=MODEL) in range(0, 48, 8)
            with suppress(OSError):
                store.put(kv, [7, *TOKENS[1:]], model=MODEL)
            with suppress(OSError), opened(tmp_path) as again:
                again.stat()
        assert bytes_of(out, out.seq_len) == bytes_of(kv, out.seq_len)
        out.clear()
        if number == errno.EIO:  # a chunk that the disk has lost was removed
            store.put(kv, TOKENS, model=MODEL)
        else:
            assert store.stat().damaged_chunks == 0
        assert store.restore_into(out, TOKENS, model=MODEL) == 40
        assert bytes_of(out, 40) == bytes_of(kv, 40)
        assert store.put(kv, [7, *TOKENS[1:]], model=MODEL) == 40


@EACH
def test_a_session_is_the_old_or_the_new_one(
    tmp_path: Path, module: Any, name: str, number: int
) -> None:
    path = tmp_path / "talk"
    with cache(45, 1) as one, cache(45, 2) as other:
        one.save(path)
        with failing(module, name, number), suppress(OSError):
            other.save(path)
        with um.KVCache.restore(path, verify=True) as kv:
            assert bytes_of(kv, 45) in (bytes_of(one, 45), bytes_of(other, 45))
        other.save(path)
        with um.KVCache.restore(path, verify=True) as kv:
            assert bytes_of(kv, 45) == bytes_of(other, 45)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("is_there", [False, True])
def test_a_model_is_repacked_with_or_without_an_image(
    model: Path, images: ImageCache, is_there: bool, module: Any, name: str, number: int
) -> None:
    expected = expected_bytes(model)
    if is_there:
        repacked_bytes(model)
    with (
        um.open_weights(model, load="map") as weights,
        failing(module, name, number),
        suppress(OSError),
        um.repack(weights) as made,
    ):
        assert made.nbytes
    assert repacked_bytes(model)[1] == expected
    path, found = repacked_bytes(model)
    assert (path is None, found) == (False, expected)


@pytest.mark.slow
@EACH
def test_a_stage_is_made_or_refused(model: Path, module: Any, name: str, number: int) -> None:
    with failing(module, name, number), suppress(OSError), um.stage(model) as stage:
        pass
    with um.stage(model) as stage:
        assert Path(stage.path).read_bytes() == model.read_bytes()


def test_a_store_names_a_folder_without_locks(tmp_path: Path) -> None:
    match = "flock.*local disk.*" + tmp_path.name
    failed = pytest.raises(OSError, match=match)
    with opened(tmp_path) as store, failing(fcntl, "flock", errno.ENOTSUP), failed:
        store.stat()


def is_true_of(user: int, use: Callable[[], bool]) -> bool:
    """Tell whether a call returns true in a process of a user."""

    def become() -> bool:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: as if it had begun so
        return use()

    return in_child(become)


ONE, OTHER = 65534, 65533


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@EACH
def test_two_users_of_a_folder(open_folder: Path, module: Any, name: str, number: int) -> None:
    """Each has a store of its own; what fails for one loses nothing of the other."""
    open_folder.chmod(0o1777)
    path = write(open_folder / "model.gguf", MIB)

    def store(folder: str, *, puts: bool = True) -> bool:
        with opened(open_folder / folder) as store, cache(45) as kv, cache() as out:
            if puts:
                store.put(kv, TOKENS, model=MODEL)
            n = store.restore_into(out, TOKENS, model=MODEL)
            return n == 40 and bytes_of(out, 40) == bytes_of(kv, 40)

    def stage() -> bool:
        with um.stage(path, backing="shm", pages="4k") as stage:
            return Path(stage.path).read_bytes() == path.read_bytes()

    def is_refused() -> bool:
        with pytest.raises(PermissionError, match="another folder"):
            store("one")
        return True

    def fails_alone() -> bool:
        uses: tuple[Callable[[], bool], ...] = (lambda: store("one"), lambda: store("other"), stage)
        for use in uses:
            with failing(module, name, number), suppress(OSError):
                use()
        return True

    assert is_true_of(ONE, lambda: store("one"))
    assert is_true_of(OTHER, is_refused)
    assert is_true_of(OTHER, fails_alone)
    assert is_true_of(ONE, lambda: store("one", puts=False) and stage())
    assert is_true_of(OTHER, lambda: store("other") and stage())
