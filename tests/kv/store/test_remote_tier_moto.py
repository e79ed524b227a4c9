"""The semantics of S3 as moto implements them, in case our own test server is wrong."""

from __future__ import annotations

import errno
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from unimem.remote import client, transfers
from unimem.remote.client import Server, open_server
from unimem.remote.transfers import Version, read_range
from unimem.staging.unfinished import find_unfinished
from unimem.weights.remote_files import RemoteFiles
from unimem_bench.suites.remote import BUCKET, moto

pytestmark = pytest.mark.slow

MODEL = Path(um.__file__).parent / "engine/models/tiny.gguf"

for module in ("obstore", "moto", "flask", "flask_cors"):
    if importlib.util.find_spec(module) is None:
        pytest.skip(
            f"{module} is missing: pip install '.[remote,servers]'", allow_module_level=True
        )

ROOT = f"s3://{BUCKET}"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture
def server(s3: str) -> Iterator[Server]:
    opened, _ = open_server(ROOT + "/any")
    yield opened
    opened.close()


def test_conditions_ranges_and_versions(server: Server) -> None:
    url = ROOT + "/one"
    data = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    assert server.put(url, data.data, create=True)
    assert not server.put(url, b"other", create=True)
    answer = server.get(url, 0, 1)
    version = Version(answer.nbytes, answer.tag)
    out = np.zeros(50_000, np.uint8)
    read_range(server, url, 25_000, out, version)
    assert np.array_equal(out, data[25_000:75_000])
    assert server.put(url, data[::-1].copy().data)
    with pytest.raises(OSError, match="replaced while it was read") as caught:
        read_range(server, url, 25_000, out, version)
    assert caught.value.errno == errno.ESTALE
    server.remove(url)
    with pytest.raises(FileNotFoundError, match="no such file.*" + url):
        server.get(url, 0, 1)


@pytest.mark.parametrize("in_parts", [False, True])
def test_weights_are_compared_with_the_etag(server: Server, in_parts: bool) -> None:
    data, url = MODEL.read_bytes(), f"{ROOT}/{in_parts}.gguf"
    if in_parts:
        server.put_parts(url, iter([data]), len(data))
    else:
        server.put(url, data)
    with um.open_weights(MODEL) as file, um.open_weights(url, pages="thp") as weights:
        assert weights.content_hash() == file.content_hash()
    answer = server.get(url, 0, 1)
    assert answer.digest.strip('"').endswith("-1") == in_parts


def test_a_model_is_staged_and_an_interrupted_stage_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(RemoteFiles, "data_threads", 1)  # so that the order is known
    data, url = MODEL.read_bytes(), ROOT + "/staged.gguf"
    server.put(url, data)
    asked: list[tuple[int, int]] = []
    get = client._StoreServer._get

    def noted(self: Any, path: str, first: int, end: int) -> Any:
        asked.append((first, end))
        if len(asked) == 6:
            raise KeyboardInterrupt
        return get(self, path, first, end)

    monkeypatch.setattr(client._StoreServer, "_get", noted)
    with pytest.raises(KeyboardInterrupt):
        um.stage(url, resume=True)
    (held,) = find_unfinished(url)
    there = {first for _, first, _, _ in held.arrived}
    del asked[:]
    asked += [(-1, -1)] * 6
    with um.stage(url, resume=True) as staged:
        assert Path(staged.path).read_bytes() == data
        assert find_unfinished(url) == []
    ranges = {first for first, end in asked[6:] if end - first <= 100_000}
    assert ranges == set(range(0, len(data), 100_000)) - there


def test_a_snapshot_and_chunks(s3: str, tmp_path: Path) -> None:
    ids = list(range(100))
    with um.KVCache(2, 2, 64, 128, pages="4k") as kv:
        rows = np.random.default_rng(1).standard_normal((2, 2, 100, 2, 64)).astype("f4")
        for layer, (k, v) in enumerate(rows):
            kv.append(layer, k, v)
        kv.save(ROOT + "/session.kv", tokens=ids)
        with um.KVCache.restore(ROOT + "/session.kv", tokens=ids) as again:
            assert all(
                np.array_equal(a, b)
                for i in (0, 1)
                for a, b in zip(kv.layer(i), again.layer(i), strict=True)
            )
        options: dict[str, Any] = {"ram_bytes": 0, "disk_bytes": 0, "chunk_tokens": 32}
        with um.KVStore(ROOT + "/kv", **options) as store:
            assert store.put(kv, ids, model="m") == 96
            assert store.put(kv, ids, model="m") == 96
            assert (store.stat().put_chunks, store.stat().known_chunks) == (3, 3)
        kept = [layer[..., :96, :].copy() for i in (0, 1) for layer in kv.layer(i)]
        kv.clear()
        with um.KVStore(ROOT + "/kv", **options) as store:
            assert store.restore_into(kv, ids, model="m") == 96
        found = [layer for i in (0, 1) for layer in kv.layer(i)]
        assert all(np.array_equal(a, b) for a, b in zip(kept, found, strict=True))
        del found


def test_a_missing_bucket_raises(s3: str) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        um.open_weights("s3://no-such-bucket/a.gguf")
    with (
        um.KVCache(1, 1, 8, 64, pages="4k") as kv,
        pytest.raises(OSError, match="s3://no-such-bucket/a"),
    ):
        kv.save("s3://no-such-bucket/a")
