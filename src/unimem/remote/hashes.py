"""Hashes that servers tell of whole objects: of what parts they are made, and whether they match.

S3's ETag of an object that was written at once is its MD5; of one that was written in parts, the
MD5 of the parts' MD5s, ``-`` and their number (Amazon S3 API Reference, "Object"). Objects that AWS
encrypts by KMS, or by a key of the user, have other ETags. Hugging Face tells the SHA-256 of a file
of its LFS (header ``X-Linked-ETag``). Others tell hashes as `digest_headers` finds them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

__all__ = ["ObjectHash", "find_hashes"]

_MIB = 1 << 20
_CRC32C = "crc32c="
# In which parts tools write: boto3, the AWS command line, obstore, s3fs and rclone among them.
_PART_BYTES = (
    *(n * _MIB for n in (5, 6, 7, 8, 10, 15, 16, 20, 25, 32, 50, 64, 100, 128, 256, 512, 1024)),
    *(n * 1000**2 for n in (5, 10, 50, 100)),
)
_MD5 = re.compile(r"[0-9a-f]{32}")
_MD5_OF_PARTS = re.compile(r"[0-9a-f]{32}-([1-9]\d{0,4})")
_OF_WHOLE = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}|crc32c=[0-9a-f]{8}")


class ObjectHash:
    """What the hash of an object is made of.

    Parameters
    ----------
    digest : str
        As the server tells it, without quotation marks.
    nbytes : int
        Of the object.
    part_bytes : int
        Of each part but the last.
    """

    def __init__(self, digest: str, nbytes: int, part_bytes: int) -> None:
        self.digest, self.nbytes, self.part_bytes = digest, nbytes, part_bytes

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The first byte of each part, and the first behind it."""
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
        """Whether these hashes of all parts are those of the object."""
        if "-" not in self.digest:
            return bool(hashes[0].digest().hex() == self.digest.removeprefix(_CRC32C))
        whole = hashlib.md5(b"".join(each.digest() for each in hashes), usedforsecurity=False)
        return f"{whole.hexdigest()}-{len(hashes)}" == self.digest


def find_hashes(digest: str, nbytes: int) -> list[ObjectHash]:
    """Find what the hash of an object may be made of; nothing for what is no hash.

    Parameters
    ----------
    digest : str
        The ETag of S3; or the MD5, SHA-256 or SHA-512 of the whole, or ``crc32c=`` and its CRC-32C
        (RFC 3720), in hexadecimal.
    nbytes : int
        Of the object.

    Returns
    -------
    list of ObjectHash
        More than one where its parts may be of several sizes.
    """
    digest = digest.strip('"').lower()
    if _MD5.fullmatch(digest) or _OF_WHOLE.fullmatch(digest):
        return [ObjectHash(digest, nbytes, nbytes)]
    found = _MD5_OF_PARTS.fullmatch(digest)
    if found is None:
        return []
    n = int(found[1])
    if n == 1:
        return [ObjectHash(digest, nbytes, nbytes)]
    return [ObjectHash(digest, nbytes, size) for size in _PART_BYTES if -(-nbytes // size) == n]
