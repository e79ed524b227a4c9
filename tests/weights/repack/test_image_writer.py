"""Writing an image while its model is in use: waited for, given up, or killed."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files.weight_bytes import drop_from_cache
from support.models.image_models import expected_bytes, only, repacked_bytes, uses_images
from support.processes.forks import fork
from unimem.base.atomic_file import NewFile
from unimem.weights.repack import image_search, image_writer
from unimem.weights.repack.image import write_image
from unimem.weights.repack.image_cache import ImageCache

pytestmark = uses_images

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("waiter", ["closing", "the end of the process"])
def test_weights_are_ready_before_their_image_is_written(
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
def test_a_cancelled_image_leaves_nothing(
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
def test_a_process_waits_at_its_end(
    model: Path, cache: ImageCache, run_python: Callable[..., Any]
) -> None:
    script = f"import unimem as um; um.repack(um.open_weights({str(model)!r}, load='map'))"
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    assert os.listdir(cache.folder) == [only(cache).name]


def kill_after(call: Callable[..., Any]) -> Callable[..., Any]:
    def once(*arguments: Any) -> None:
        call(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    return once


@pytest.mark.parametrize("when", ["write", "publish"])
def test_remains_of_a_killed_writer_are_removed(
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
    assert len(os.listdir(cache.folder)) == 2  # a lock and an unfinished file
    image, found = repacked_bytes(model)
    assert (image, found) == (None, expected_bytes(model))
    assert os.listdir(cache.folder) == [only(cache).name]
    # Remains of another model are removed as well, even if nothing is written.
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
