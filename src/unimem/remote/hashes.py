"""Hashes of whole files that servers report: parsing, computing and comparing them.

S3's ETag of an object that was written at once is its MD5. For an object written in parts it is the
MD5 of the parts' MD5s, ``-`` and their number (Amazon S3 API Reference, "Object"). Objects that AWS
encrypts by KMS, or by a key of the user, have other ETags. Hugging Face sends the SHA-256 of a file
of its LFS (header ``X-Linked-ETag``).

``Repr-Digest`` (RFC 9530) and ``Digest`` (RFC 3230) cover the whole file, even in an answer with a
part of it; so do ``x-goog-hash`` (Google Cloud Storage, XML API) and ``x-ms-blob-content-md5``
(Azure, Get Blob). ``Content-MD5`` and ``Content-Digest`` cover the contents of the answer.
"""

from __future__ import annotations

import binascii
import hashlib
import importlib.util
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_MIB = 1 << 20
_CRC32C = "crc32c="
# Part sizes of common tools: boto3, the AWS command line, obstore, s3fs and rclone among them.
_PART_BYTES = [n * _MIB for n in (5, 6, 7, 8, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 256, 512)]
_PART_BYTES += [1024 * _MIB, *(n * 1000**2 for n in (5, 10, 50, 100))]
_MD5_OF_PARTS = re.compile(r"[0-9a-f]{32}-([1-9]\d{0,4})")
_OF_WHOLE = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}|[0-9a-f]{128}|crc32c=[0-9a-f]{8}")
# A member of a list: a name, and bytes in base64, with colons around them in newer headers.
_MEMBER = re.compile(r"\s*([A-Za-z0-9-]+)\s*=\s*:?([A-Za-z0-9+/]+=*):?\s*(?:;.*)?")
# Sizes of hashes, the strongest first; CRC-32C is faster than MD5, and detects damage as well.
_BYTES = {"sha-256": 32, "sha-512": 64, "crc32c": 4, "md5": 16}
_OF_FILE = ("repr-digest", "digest", "x-goog-hash")
_OF_CONTENT = ("content-digest",)
_MD5_OF_FILE, _MD5_OF_CONTENT = "x-ms-blob-content-md5", "content-md5"


class ObjectHash:
    """A server's hash of an object, without quotation marks, and the size of the hashed parts."""

    def __init__(self, digest: str, nbytes: int, part_bytes: int) -> None:
        self.digest, self.nbytes, self.part_bytes = digest, nbytes, part_bytes

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The begin and end of each part."""
        starts = range(0, max(self.nbytes, 1), max(self.part_bytes, 1))
        return [(start, min(start + self.part_bytes, self.nbytes)) for start in starts]

    def new(self) -> Any:
        """Begin the hash of a part."""
        if self.digest.startswith(_CRC32C):
            from crc32c import CRC32CHash

            return CRC32CHash()
        for new in (hashlib.sha256, hashlib.sha512):
            if len(self.digest) == 2 * new().digest_size:
                return new()
        return hashlib.md5(usedforsecurity=False)

    def matches(self, hashes: Sequence[Any]) -> bool:
        """Whether these hashes of all parts give the hash of the object."""
        if "-" not in self.digest:
            return bool(hashes[0].digest().hex() == self.digest.removeprefix(_CRC32C))
        whole = hashlib.md5(b"".join(each.digest() for each in hashes), usedforsecurity=False)
        return f"{whole.hexdigest()}-{len(hashes)}" == self.digest


def find_hashes(digest: str, nbytes: int) -> list[ObjectHash]:
    """Return the possible meanings of a hash: several if its parts may have one of several sizes.

    The hash is an ETag of S3; or the MD5, SHA-256 or SHA-512 of the whole, or ``crc32c=`` and its
    CRC-32C (RFC 3720), in hexadecimal. Other texts give no meaning.
    """
    digest = digest.strip('"').lower()
    found = _MD5_OF_PARTS.fullmatch(digest)
    n = int(found[1]) if found else int(_OF_WHOLE.fullmatch(digest) is not None)
    sizes = [nbytes] if n == 1 else [size for size in _PART_BYTES if -(-nbytes // size) == n > 0]
    return [ObjectHash(digest, nbytes, size) for size in sizes]


def find_digest(headers: Iterable[tuple[str, str]], *, is_whole: bool) -> str:
    """Return the strongest hash of a whole file in the headers of an answer; "" without one.

    `is_whole` says that the answer has the whole file. Only hashes that can be computed here count.
    """
    rows = [(name.lower(), value) for name, value in headers]
    stored = next((value for name, value in rows if name == "x-goog-stored-content-encoding"), "")
    if stored not in ("", "identity"):  # the stored bytes are hashed, and others are sent
        return ""
    found = dict(_members(rows, is_whole=is_whole))
    for kind in _BYTES:
        if kind in found and (kind != "crc32c" or importlib.util.find_spec("crc32c")):
            return f"{_CRC32C if kind == 'crc32c' else ''}{found[kind].hex()}"
    return ""


def _members(rows: list[tuple[str, str]], *, is_whole: bool) -> Iterator[tuple[str, bytes]]:
    """Yield the kind and the bytes of each valid hash of the whole file."""
    lists = _OF_FILE + _OF_CONTENT * is_whole
    single = (_MD5_OF_FILE, _MD5_OF_CONTENT)[: 1 + is_whole]
    for name, value in rows:
        members = value.split(",") if name in lists else []
        if name in single:
            members = [f"md5={value}"]
        for match in filter(None, map(_MEMBER.fullmatch, members)):
            try:
                data = b64decode(match[2], validate=True)
            except binascii.Error:
                continue
            if len(data) == _BYTES.get(kind := match[1].lower()):
                yield kind, data


def request_digest(
    address: str, tag: str, wait_s: float, headers: Mapping[str, str] | None = None
) -> str:
    """Request the headers of a file (HEAD), and return its hash; "" without one, or on an error.

    The address and `headers` have the credentials for the request, so redirects are not followed.
    `tag` is the ETag of the file, or the time of its last change: the hash of another version is
    ignored.
    """
    from http.client import HTTPException
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class NoRedirects(HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    try:
        asked = Request(address, method="HEAD", headers=dict(headers or {}))
        with build_opener(NoRedirects).open(asked, timeout=wait_s) as answer:
            if tag not in (answer.headers["ETag"], answer.headers["Last-Modified"]):
                return ""
            return find_digest(answer.headers.items(), is_whole=True)
    except (OSError, ValueError, HTTPException):
        return ""
