"""The tier of a store of KV chunks on a server: an object for each chunk."""

from __future__ import annotations

import errno
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unimem.kv.store.tiers import TierStat
from unimem.remote.client import open_server
from unimem.remote.transfers import RemoteBytes, Version, read_wanted, retried
from unimem.system import policy

# A server that failed is not asked for this long, so that prompts do not wait again and again.
REST_S = 60.0
# Shorter than for a model, since the tokens can be computed instead.
WAIT_S, TRIES = 5.0, 3
_THREADS = 16
_FIRST_LOOK = 4
_MOST_KNOWN = 1 << 17
# S3 answers EACCES for a missing object if the bucket may not be listed.
_MISSING = {errno.ENOENT, errno.EACCES}


class RemoteTier:
    """Chunks as objects below a URL. Any number of threads, processes and machines may use them.

    No object is listed or dropped: the server's own rules expire old ones. A chunk is written only
    if it is missing. An error of the server is a warning and a miss, and the server is then left
    alone for a minute. `path` is the URL without secrets.
    """

    def __init__(self, url: str) -> None:
        self._server, self.path = open_server(url, WAIT_S)
        self.path = self.path.rstrip("/")
        self._lock = threading.Lock()
        self._there: OrderedDict[bytes, Version] = OrderedDict()  # known objects
        self._resting_until = 0.0

    def _path_of(self, key: bytes) -> str:
        return f"{self.path}/{key.hex()}.kv"

    # ---- chunks ----

    def has(self, key: bytes) -> bool:
        """Whether there is an object of this identity; an existing object is asked for once."""
        return self._version_of(key) is not None

    def look_up(self, keys: Sequence[bytes]) -> None:
        """Ask for the chunks of a prefix, many at once, up to the first missing chunk."""
        asked = [key for key in keys if key not in self._there]
        n = _FIRST_LOOK
        with ThreadPoolExecutor(_THREADS) as pool:
            while asked and all(pool.map(self.has, asked[:n])):
                asked, n = asked[n:], min(2 * n, 8 * _THREADS)

    def _version_of(self, key: bytes) -> Version | None:
        with self._lock:
            known = self._there.get(key)
        if known is not None or self._is_resting():
            return known
        path = self._path_of(key)

        def ask() -> Version:
            answer = self._server.get(path, 0, 1)
            answer.close()
            return Version(answer.nbytes, answer.tag)

        try:
            version = retried(ask, TRIES)
        except OSError as error:
            if error.errno not in _MISSING:
                self._rest(error)
            return None
        self._remember(key, version)
        return version

    def read(self, key: bytes, out: NDArray[np.uint8]) -> int:
        """Read an object of the size of `out`; return its size in any case, 0 without an object."""
        version = self._version_of(key)
        if version is None or self._is_resting():
            return 0
        if version.nbytes != out.nbytes:
            return version.nbytes
        source = RemoteBytes(self._path_of(key), version, "", 0, out)
        try:
            read_wanted(self._server, [source], threads=_THREADS, tries=TRIES)
        except OSError as error:
            self._forget(key)
            if error.errno not in _MISSING | {errno.ESTALE}:
                self._rest(error)
            return 0
        return out.nbytes

    def write(
        self, key: bytes, data: NDArray[np.uint8], used_ns: int, note: dict[str, Any] | None = None
    ) -> bool:
        """Write an object, unless it exists; return False if the server takes none."""
        if not self._server.can_write or self._is_resting():
            return False
        path = self._path_of(key)
        try:
            retried(lambda: self._server.put(path, data.data, create=True), TRIES)
        except OSError as error:
            self._rest(error)
            return False
        return True

    def sync(self) -> None:
        """Do nothing: the server has what it has confirmed."""

    def remove(self, key: bytes) -> None:
        """Remove an object, if that is allowed."""
        self._forget(key)
        self._server.remove(self._path_of(key))

    def touch(self, keys: Sequence[bytes], used_ns: int) -> None:
        """Do nothing: the server has times of its own."""

    def give_back(self) -> int:
        """Drop nothing: objects take no memory."""
        return 0

    def stat(self) -> TierStat:
        """Count the known objects, since none are listed."""
        with self._lock:
            sizes = [version.nbytes for version in self._there.values()]
        return TierStat("remote", self.path, sum(sizes), 0, len(sizes))

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    # ---- known objects ----

    def _remember(self, key: bytes, version: Version) -> None:
        with self._lock:
            self._there[key] = version
            if len(self._there) > _MOST_KNOWN:
                self._there.popitem(last=False)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._there.pop(key, None)

    def _is_resting(self) -> bool:
        return time.monotonic() < self._resting_until

    def _rest(self, error: OSError) -> None:
        with self._lock:
            was_resting = self._is_resting()
            self._resting_until = time.monotonic() + REST_S
        if not was_resting:
            policy.warn(f"the store goes on without its server for {REST_S:g} s: {error}")
