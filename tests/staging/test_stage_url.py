"""Staging from a server: straight into shared memory, and on from where a load was broken off."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.processes.staged_models import TINY, read_elsewhere
from support.servers.model_server import serving
from support.servers.object_server import BUCKET, TINY_PATH, TINY_URL, ObjectServer
from unimem.weights.staged import holders

pytest.importorskip("obstore", reason="obstore reads s3://: pip install '.[remote]'")

PIECE = 100_000
N_PIECES = -(-TINY.stat().st_size // PIECE)
HEADER = "0-262143"

pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_url_is_read_into_shared_memory(store: ObjectServer, backing: Any) -> None:
    told: list[tuple[int, int]] = []
    with um.stage(TINY_URL, backing=backing, progress=lambda *n: told.append(n)) as staged:
        assert (staged.source, staged.backing) == (TINY_URL, backing)
        assert read_elsewhere(staged.path) == TINY.read_bytes()
        assert os.stat(staged.path).st_mode & 0o777 == 0o400
        assert staged.granted.resident_bytes >= staged.nbytes == TINY.stat().st_size
        (held,) = (held for held in holders() if held.path == staged.path)
        assert (held.source, held.staleness()) == (TINY_URL, None)
    assert store.begins(HEADER) == list(range(0, N_PIECES * PIECE, PIECE))
    assert told[-1] == (TINY.stat().st_size,) * 2


def test_models_of_several_files(store: ObjectServer, split: list[Path], indexed: Path) -> None:
    for path in (*split, *indexed.parent.glob("model*")):
        store.add(f"/{BUCKET}/{path.name}", path.read_bytes())
    for path, url in ((split[0], f"s3://{BUCKET}/{split[1].name}"),
                      (indexed, f"s3://{BUCKET}/{indexed.name}")):  # fmt: skip
        with (
            um.stage(url) as staged,
            um.open_weights(staged.path) as there,
            um.open_weights(path) as here,
        ):
            assert there.content_hash() == here.content_hash()
            assert len(there.files) == len(here.files)


def test_a_name_from_the_web_stays_in_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp reads URLs: pip install '.[remote]'")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as server:
        for escaped, name in (("a%20b.gguf", "a b.gguf"), ("%2e%2e%2Fx.gguf", "%2e%2e%2Fx.gguf"),
                              ("", "model")):  # fmt: skip
            server.files[f"/m/{escaped}"] = TINY.read_bytes()
            with um.stage(f"{server.url}/m/{escaped}", backing="shm") as staged:
                assert os.path.basename(staged.path) == name
                assert read_elsewhere(staged.path) == TINY.read_bytes()


def test_wrong_bytes_are_detected(store: ObjectServer) -> None:
    store.add(TINY_PATH, TINY.read_bytes(), "0" * 32)
    with pytest.raises(OSError, match="not those of the hash"):
        um.stage(TINY_URL)
    with um.stage(TINY_URL, verify=False) as staged:
        assert read_elsewhere(staged.path) == TINY.read_bytes()


def test_refusals(store: ObjectServer) -> None:
    with pytest.raises(ValueError, match=r"repack=True: s3://.*stage it first"):
        um.stage(TINY_URL, repack=True)
    with pytest.raises(ValueError, match="verify: expected False or True"):
        um.stage(TINY_URL, verify=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="resume: expected False or True"):
        um.stage(TINY_URL, resume="no")  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no such file"):
        um.stage(f"s3://{BUCKET}/none.gguf", resume=True)
    assert store.begins(HEADER) == []
