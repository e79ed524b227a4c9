"""Hashes that servers tell of whole files in the headers of an answer.

``Repr-Digest`` (RFC 9530) and ``Digest`` (RFC 3230) are of the whole file, also where an answer has
a part of it; so are ``x-goog-hash`` (Google Cloud Storage, XML API) and ``x-ms-blob-content-md5``
(Azure, Get Blob). ``Content-MD5`` and ``Content-Digest`` are of what the answer has.
"""

from __future__ import annotations

import binascii
import importlib.util
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["find_digest", "request_digest"]

# A member of a list: a name, and bytes in base64, with colons around them in newer headers.
_MEMBER = re.compile(r"\s*([A-Za-z0-9-]+)\s*=\s*:?([A-Za-z0-9+/]+=*):?\s*(?:;.*)?")
_BYTES = {"sha-256": 32, "sha-512": 64, "crc32c": 4, "md5": 16}
# The strongest first; crc32c is faster than MD5, and notices damage as well.
_ORDER = ("sha-256", "sha-512", "crc32c", "md5")
_OF_FILE = ("repr-digest", "digest", "x-goog-hash")
_OF_CONTENT = ("content-digest",)
_MD5_OF_FILE, _MD5_OF_CONTENT = "x-ms-blob-content-md5", "content-md5"


def find_digest(headers: Iterable[tuple[str, str]], *, is_whole: bool) -> str:
    """Find a hash of a whole file.

    Parameters
    ----------
    headers : iterable of (str, str)
        Names and values, of which several may have one name.
    is_whole : bool
        Whether the answer is of the whole file.

    Returns
    -------
    str
        As `object_hash.find_hashes` takes it; "" where there is none that can be computed here.
    """
    rows = [(name.lower(), value) for name, value in headers]
    stored = next((value for name, value in rows if name == "x-goog-stored-content-encoding"), "")
    if stored not in ("", "identity"):  # which is hashed as it is stored, and sent otherwise
        return ""
    found = dict(_members(rows, is_whole=is_whole))
    for kind in _ORDER:
        if kind in found and (kind != "crc32c" or importlib.util.find_spec("crc32c")):
            digest = found[kind].hex()
            return f"crc32c={digest}" if kind == "crc32c" else digest
    return ""


def request_digest(
    address: str, tag: str, wait_s: float, headers: Mapping[str, str] | None = None
) -> str:
    """Ask for the headers of a file (HEAD), and return the hash of it that they tell.

    Parameters
    ----------
    address : str
        With what the request needs to be allowed. It is not followed elsewhere, for what it is
        allowed with is this server's.
    tag : str
        The ETag of the file, or the time of its last change: another file's hash is none.
    wait_s : float
        The longest wait, in seconds.
    headers : mapping of str to str, optional
        More headers of the request.

    Returns
    -------
    str
        As `find_digest`; "" also where there is no such answer.
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


def _members(rows: list[tuple[str, str]], *, is_whole: bool) -> Iterator[tuple[str, bytes]]:
    lists = _OF_FILE + _OF_CONTENT * is_whole
    single = (_MD5_OF_FILE, _MD5_OF_CONTENT)[: 1 + is_whole]
    for name, value in rows:
        members = value.split(",") if name in lists else []
        if name in single:
            members = [f"md5={value}"]
        for member in members:
            match = _MEMBER.fullmatch(member)
            kind = match[1].lower() if match else ""
            if match is None or kind not in _BYTES:
                continue
            try:
                data = b64decode(match[2], validate=True)
            except binascii.Error:
                continue
            if len(data) == _BYTES[kind]:
                yield kind, data
