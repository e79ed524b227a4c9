"""Hashes that servers report for whole files: which count, and that wrong bytes are noticed."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.servers.model_server import serving
from support.servers.object_server import ObjectServer, serving_objects
from unimem.engine import embedded_model
from unimem.remote import transfers
from unimem.remote.hashes import find_digest, find_hashes, request_digest

DATA = b"123456789"
CRC = "e3069283"  # of these bytes, by RFC 3720 (check value of CRC-32C)
TINY = Path(embedded_model())

needs_crc32c = pytest.mark.skipif(
    importlib.util.find_spec("crc32c") is None, reason="crc32c is missing: pip install '.[remote]'"
)


def base64_of(kind: str, data: bytes = DATA) -> str:
    return base64.b64encode(hashlib.new(kind, data).digest()).decode()


MD5, SHA256, SHA512 = (hashlib.new(kind, DATA).hexdigest() for kind in ("md5", "sha256", "sha512"))
MD5_64, SHA256_64, SHA512_64 = map(base64_of, ("md5", "sha256", "sha512"))
CRC_64 = base64.b64encode(bytes.fromhex(CRC)).decode()


@pytest.mark.parametrize(
    ("headers", "of_part", "of_whole"),
    [
        ([("Repr-Digest", f"sha-256=:{SHA256_64}:")], SHA256, SHA256),
        ([("Repr-Digest", f"sha-512=:{SHA512_64}:, sha-256=:{SHA256_64}:;q=1")], SHA256, SHA256),
        ([("repr-digest", f"sha-512=:{SHA512_64}:")], SHA512, SHA512),
        ([("Digest", f"SHA-256={SHA256_64},md5={MD5_64}")], SHA256, SHA256),
        ([("Digest", f"unixsum=1,MD5={MD5_64}")], MD5, MD5),
        ([("x-goog-hash", f"md5={MD5_64}")], MD5, MD5),
        ([("x-ms-blob-content-md5", MD5_64), ("Content-MD5", base64_of("md5", b""))], MD5, None),
        ([("Content-MD5", MD5_64)], "", MD5),
        ([("Content-Digest", f"sha-256=:{SHA256_64}:")], "", SHA256),
        ([("x-goog-hash", f"md5={MD5_64}"), ("x-goog-stored-content-encoding", "gzip")], "", ""),
        ([("Repr-Digest", "sha-256=:AAAA:")], "", ""),
        ([("Repr-Digest", "sha-256=:???:"), ("Digest", ",,=")], "", ""),
        ([("ETag", f'"{MD5}"')], "", ""),
    ],
)
def test_which_headers_count(
    headers: list[tuple[str, str]], of_part: str, of_whole: str | None
) -> None:
    assert find_digest(headers, is_whole=False) == of_part
    if of_whole is not None:
        assert find_digest(headers, is_whole=True) == of_whole


@needs_crc32c
def test_crc32c_goes_before_md5_and_after_what_is_stronger() -> None:
    both = [("x-goog-hash", f"crc32c={CRC_64}"), ("x-goog-hash", f"md5={MD5_64}")]
    assert find_digest(both, is_whole=False) == f"crc32c={CRC}"
    stronger = [*both, ("Repr-Digest", f"sha-256=:{SHA256_64}:")]
    assert find_digest(stronger, is_whole=False) == SHA256


def test_without_the_package_crc32c_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert find_digest([("x-goog-hash", f"crc32c={CRC_64}")], is_whole=True) == ""
    both = [("x-goog-hash", f"crc32c={CRC_64},md5={MD5_64}")]
    assert find_digest(both, is_whole=True) == MD5


@pytest.mark.parametrize(
    "digest", [MD5, SHA256, SHA512, pytest.param(f"crc32c={CRC}", marks=needs_crc32c)]
)
def test_each_is_computed(digest: str) -> None:
    (found,) = find_hashes(digest, len(DATA))
    hasher = found.new()
    hasher.update(memoryview(DATA)[:4])
    hasher.update(memoryview(bytearray(DATA))[4:])
    assert found.matches([hasher])
    hasher.update(b"\0")
    assert not found.matches([hasher])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    pytest.importorskip("obstore", reason="obstore reads gs:// and az://: pip install '.[remote]'")
    monkeypatch.setattr(transfers, "FIRST_WAIT_S", 0.001)
    with serving_objects(monkeypatch) as state:
        state.serve_other_stores(monkeypatch)
        yield state


def wrong(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


GOOD = TINY.read_bytes()
SKIP = {"AZURE_SKIP_SIGNATURE": "true"}
KEY = {"AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"k" * 32).decode()}


def crc_of(data: bytes) -> str:
    crc32c = pytest.importorskip("crc32c", reason="crc32c is missing: pip install '.[remote]'")
    return base64.b64encode(crc32c.crc32c(data).to_bytes(4, "big")).decode()


@pytest.mark.parametrize(
    ("url", "header", "environment"),
    [
        ("gs://bucket/tiny.gguf", "md5", {}),
        ("gs://bucket/tiny.gguf", "crc32c", {}),
        ("az://bucket/tiny.gguf", "Content-MD5", SKIP),
        ("az://bucket/tiny.gguf", "Content-MD5", KEY),
    ],
)
def test_wrong_bytes_of_stores_are_detected(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch, url: str, header: str, environment: Any
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    told = crc_of(GOOD) if header == "crc32c" else base64_of("md5", GOOD)
    named = {"Content-MD5": told} if url.startswith("az") else {"x-goog-hash": f"{header}={told}"}
    for path in ("/bucket/tiny.gguf", "/account/bucket/tiny.gguf"):
        store.add(path, GOOD, "tag")
        store.headers[path] = named
    with um.open_weights(url) as weights, um.open_weights(TINY) as file:
        assert weights.content_hash() == file.content_hash()
    assert [method for method, *_ in store.asked].count("HEAD") == 1
    for path in list(store.objects):
        store.add(path, wrong(GOOD), "tag")
    with pytest.raises(OSError, match="not those of the hash") as caught:
        um.open_weights(url)
    assert caught.value.filename == url
    um.open_weights(url, verify=False).close()
    store.headers.clear()  # a server that tells none
    um.open_weights(url).close()


def test_damage_in_transit_from_a_store_is_healed(store: ObjectServer) -> None:
    store.add("/bucket/tiny.gguf", GOOD, "tag")
    store.headers["/bucket/tiny.gguf"] = {"x-goog-hash": f"md5={base64_of('md5', GOOD)}"}
    gets = iter(range(10**6))
    store.choose_fault = lambda method, _: (
        "wrong bytes" if method == "GET" and next(gets) == 1 else ""
    )
    with um.open_weights("gs://bucket/tiny.gguf") as weights, um.open_weights(TINY) as file:
        assert weights.content_hash() == file.content_hash()


@pytest.mark.parametrize("header", ["Repr-Digest", "Digest", "Content-MD5"])
def test_wrong_bytes_of_the_web_are_detected(monkeypatch: pytest.MonkeyPatch, header: str) -> None:
    pytest.importorskip("aiohttp", reason="aiohttp reads URLs: pip install '.[remote]'")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    told = {
        "Repr-Digest": f"sha-256=:{base64_of('sha256', GOOD)}:",
        "Digest": f"sha-512={base64_of('sha512', GOOD)}",
        "Content-MD5": base64_of("md5", GOOD),
    }
    with serving() as server:
        url = server.add(TINY)
        server.headers |= {"ETag": '"tag"', header: told[header]}
        um.open_weights(url).close()
        server.files["/tiny.gguf"] = wrong(GOOD)
        with pytest.raises(OSError, match="not those of the hash"):
            um.open_weights(url)
        server.headers.pop(header)
        um.open_weights(url).close()


def test_requests_for_headers_follow_no_redirects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as first, serving() as second:
        second.add(TINY)
        second.headers |= {"ETag": "tag", "Content-MD5": base64_of("md5", GOOD)}
        first.redirects["/tiny.gguf"] = f"{second.url}/tiny.gguf"
        secret = {"Authorization": "Bearer s3cret"}
        assert request_digest(f"{first.url}/tiny.gguf", "tag", 5, secret) == ""
        assert second.asked == []
        direct = f"{second.url}/tiny.gguf"
        assert request_digest(direct, "tag", 5) == hashlib.md5(GOOD).hexdigest()
        assert request_digest(direct, "another", 5) == ""
        assert request_digest(f"{second.url}/none", "tag", 5) == ""
    assert request_digest(direct, "tag", 5) == ""


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


@pytest.mark.parametrize(
    ("digest", "nbytes", "parts"),
    [
        (f'"{md5(b"")}"', 100, [[(0, 100)]]),
        ("f" * 64, 100, [[(0, 100)]]),
        (f"{md5(b'')}-1", 100, [[(0, 100)]]),
        (f"{md5(b'')}-2", 20 << 20, None),
        (f"{md5(b'')}-3", 100, []),
        ('"5f-abc"', 100, []),
        ("", 100, []),
    ],
)
def test_tags_that_are_hashes(digest: str, nbytes: int, parts: list[Any] | None) -> None:
    found = [each.parts for each in find_hashes(digest, nbytes)]
    if parts is None:  # all that it may be
        assert [(0, 10 << 20), (10 << 20, 20 << 20)] in found
        assert all(len(each) == 2 for each in found)
    else:
        assert found == parts


def test_a_hash_of_parts() -> None:
    mib = 1 << 20
    data = bytes(range(256)) * (12 * mib // 256)
    pieces = [data[i : i + 5 * mib] for i in range(0, len(data), 5 * mib)]
    digests = [hashlib.md5(piece) for piece in pieces]
    tag = f"{md5(b''.join(each.digest() for each in digests))}-3"
    first, *_ = (each for each in find_hashes(tag, len(data)) if each.part_bytes == 5 * mib)
    assert first.matches(digests)
    assert not first.matches([*digests[:2], hashlib.md5(b"")])
