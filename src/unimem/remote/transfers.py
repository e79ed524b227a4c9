"""Reads of files on servers into existing memory: in parallel, with retries and checks.

Bytes that have arrived stay: after a cut or a timeout, a range continues where it stopped, and a
transfer with `Arrivals` continues an earlier one of the same files.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from unimem.base.threads import run_in_threads
from unimem.remote.arrivals import Arrivals, Piece
from unimem.remote.client import Answer, Server
from unimem.remote.hashes import ObjectHash, find_hashes
from unimem.remote.url_errors import in_own_words, is_final

#: Ranges under way at once, as S3's guidelines advise for a large object on a fast network.
THREADS = 16
#: Tries of a request that brings nothing, with pauses of up to 13 s in all.
TRIES = 8
#: Tries if a new start is expensive.
PATIENT_TRIES = 12
#: Seconds without progress in which another try may begin.
PATIENCE_S = 30.0
FIRST_WAIT_S, MOST_WAIT_S = 0.1, 6.4
#: Bytes of one request, which costs a round trip; a failure may cost all of them.
PIECE_BYTES = 8 << 20
# Fewer bytes are no progress: a server must not occupy a reader for ever.
_LEAST_BYTES = 64 << 10
_AGREEING = 2
_MOST_READS = 5

_T = TypeVar("_T")
Progress = Callable[[int, int], object]


class Version(NamedTuple):
    """The version of a file on a server."""

    nbytes: int
    tag: str  # the ETag; "" if the server sends none


class RemoteBytes(NamedTuple):
    """A range of a file on a server, and the memory to read it into."""

    path: str  # the URL as it is shown
    version: Version
    digest: str  # the server's hash of the whole file; "" for none, or to skip the check
    first: int
    out: NDArray[np.uint8]


def retried(work: Callable[[], _T], tries: int = 0, stop: threading.Event | None = None) -> _T:
    """Call a function that may fail for a moment, up to `tries` times (by default `TRIES`)."""
    tries, since = tries or TRIES, time.monotonic()
    for i in range(1, tries + 1):
        try:
            return work()
        except OSError as error:
            # A first try may have taken long because it brought much.
            has_time = _has_time(since, i) or (i == 1 and not isinstance(error, TimeoutError))
            is_last = i == tries or not has_time
            if is_final(error) or is_last or (stop is not None and stop.is_set()):
                raise _failure(error, i) from None
            _pause(i, stop)
    raise AssertionError  # not reached


def _failure(error: OSError, tries: int) -> OSError:
    """Return the error to raise; a function that raised it would be in a circle with it."""
    if tries == 1 or is_final(error):
        return error
    return OSError(error.errno, f"{error.strerror} ({tries} tries)", error.filename)


def _has_time(since: float, tries: int) -> bool:
    """Whether another try may begin, if there was progress last at `since`."""
    return time.monotonic() + _longest_pause(tries) <= since + PATIENCE_S


def _longest_pause(tries: int) -> float:
    return min(MOST_WAIT_S, FIRST_WAIT_S * 2.0 ** (tries - 1))


def _pause(tries: int, stop: threading.Event | None) -> None:
    # Random, so that clients that failed together do not return together.
    seconds = _longest_pause(tries) * random.uniform(0.5, 1)
    if stop is None:
        time.sleep(seconds)
    else:
        stop.wait(seconds)


def read_range(
    server: Server,
    path: str,
    first: int,
    out: NDArray[np.uint8],
    version: Version | None = None,
    stop: threading.Event | None = None,
    tries: int = 0,
) -> None:
    """Fill `out` with a range of a file; after a failure, continue where it stopped.

    `server` and `path` are those of `open_server`. Setting `stop` ends the read. OSError says that
    the file is gone, is not of this version (ESTALE), or that nothing came by `tries` requests in a
    row (by default `TRIES`), or for `PATIENCE_S` seconds.
    """
    most, since = tries or TRIES, time.monotonic()
    done = failed = 0
    while done < out.nbytes:
        before = done
        try:
            with closing(server.get(path, first + done, first + out.nbytes)) as answer:
                _check_version(answer, path, version, first + out.nbytes)
                while done < out.nbytes:
                    if stop is not None and stop.is_set():
                        return
                    with in_own_words(path, server.wait_s):
                        found = answer.read(out.nbytes - done)
                    if not len(found):
                        raise OSError(
                            errno.EIO,
                            f"The server ended its answer {out.nbytes - done} bytes early",
                            path,
                        )
                    out[done : done + len(found)] = np.frombuffer(found, np.uint8)
                    done += len(found)
                    if done - before >= _LEAST_BYTES:
                        since = time.monotonic()
        except OSError as error:
            failed = 1 if done - before >= _LEAST_BYTES else failed + 1
            is_last = failed == most or not _has_time(since, failed)
            if is_final(error) or is_last or (stop is not None and stop.is_set()):
                raise _failure(error, failed) from None
            _pause(failed, stop)


def _check_version(answer: Answer, path: str, version: Version | None, end: int) -> None:
    if version is not None and (answer.nbytes, answer.tag) != version:
        raise OSError(errno.ESTALE, "The file was replaced while it was read: open it again", path)
    if answer.nbytes < end:
        raise OSError(
            errno.ESTALE, f"The file has {answer.nbytes} bytes, expected {end} or more", path
        )


class _HashedPart:
    """Bytes of one file that are hashed together, in their order, as they arrive.

    One thread at a time hashes a part; other threads continue to read.
    """

    def __init__(self, hashing: ObjectHash | None) -> None:
        self.hasher: Any = None if hashing is None else hashing.new()
        self.pieces: list[_RangeRequest] = []
        self.n_hashed = 0
        self._busy = False
        self._lock = threading.Lock()

    def advance(self, stop: threading.Event) -> None:
        """Hash the bytes that have arrived, unless another thread does."""
        if self.hasher is None:
            return
        with self._lock:
            if self._busy:
                return
            self._busy = True
        while not stop.is_set():
            with self._lock:
                if self.n_hashed == len(self.pieces) or not self.pieces[self.n_hashed].is_there:
                    self._busy = False
                    return
            self.hasher.update(self.pieces[self.n_hashed].source.out.data)
            self.n_hashed += 1


class _RangeRequest:
    """The range of one request."""

    def __init__(self, source: RemoteBytes, part: _HashedPart) -> None:
        self.source, self.part, self.is_there = source, part, False
        part.pieces.append(self)

    @property
    def piece(self) -> Piece:
        """The range as `Arrivals` identify it."""
        path, version, _, first, out = self.source
        return Piece(path, version.nbytes, version.tag, first, out.nbytes)


class _Transfer:
    """A read of several sources. Its threads share it; one thread calls `run`."""

    def __init__(
        self, server: Server, sources: Sequence[RemoteBytes], tries: int, arrivals: Arrivals | None
    ) -> None:
        self._server, self._tries, self._arrivals = server, tries, arrivals
        self._files = [_FileTransfer(sources) for sources in _by_file(sources)]
        self.nbytes = sum(source.out.nbytes for source in sources)
        self._stop = threading.Event()
        self._done: deque[int] = deque()

    def run(self, threads: int, progress: Progress | None) -> None:
        done = 0

        def tick() -> None:
            nonlocal done
            while self._done:
                done += self._done.popleft()
            if progress is not None and done < self.nbytes:
                progress(done, self.nbytes)

        def each(pieces: Iterable[_RangeRequest], work: Callable[[_RangeRequest], None]) -> None:
            rest = list(pieces)
            following = iter(rest)

            def run() -> None:
                while not self._stop.is_set() and (piece := next(following, None)) is not None:
                    work(piece)

            self._stop.clear()  # earlier threads have set it at their end
            n = max(1, min(threads, len(rest)))
            try:
                run_in_threads(n, run, stop=self._stop.set, tick=tick)
            finally:
                rest.clear()

        pieces = [piece for file in self._files for piece in file.pieces]
        if self._arrivals:
            # Recalled before anything is fetched, so that no failure loses these pieces.
            each(pieces, self._recall)
        each((piece for piece in pieces if not piece.is_there), self._fetch)
        for file in self._files:
            if not file.matches():
                self._stop.clear()
                self._repair(file, threads, progress)
        if progress is not None:
            progress(self.nbytes, self.nbytes)

    def let_go(self) -> None:
        """Let go of the memory at once: a thread that is about to end may still refer to this."""
        for file in self._files:
            file.let_go()

    def _recall(self, piece: _RangeRequest) -> None:
        assert self._arrivals is not None
        if self._arrivals.recall(piece.piece, piece.source.out):
            self._have(piece)

    def _fetch(self, piece: _RangeRequest) -> None:
        out = piece.source.out
        self._read(piece.source, out)
        if self._stop.is_set():
            return
        if self._arrivals is not None:
            self._arrivals.note(piece.piece, out)
        self._have(piece)

    def _read(self, source: RemoteBytes, out: NDArray[np.uint8]) -> None:
        path, version, _, first, _ = source
        read_range(self._server, path, first, out, version, self._stop, self._tries)

    def _have(self, piece: _RangeRequest) -> None:
        piece.is_there = True
        self._done.append(piece.source.out.nbytes)
        piece.part.advance(self._stop)

    def _repair(self, file: _FileTransfer, threads: int, progress: Progress | None) -> None:
        """Read a file again whose hash does not match, piece by piece until two reads agree."""
        rest = iter(file.pieces)

        def work() -> None:
            while not self._stop.is_set() and (piece := next(rest, None)) is not None:
                self._agree(piece.source)

        def tick() -> None:
            if progress is not None:  # it may stop the read
                progress(self.nbytes - 1, self.nbytes)

        run_in_threads(min(threads, len(file.pieces)), work, stop=self._stop.set, tick=tick)
        if not file.hash_again():
            raise OSError(
                errno.EIO,
                f"Its bytes are not those of the hash that the server tells ({file.digest}), and "
                "two reads agree: write the file anew; where its ETag is no hash, as of a bucket "
                "that KMS encrypts, give verify=False",
                file.path,
            )

    def _agree(self, source: RemoteBytes) -> None:
        seen = [source.out.tobytes()]
        again = np.empty(source.out.nbytes, np.uint8)
        while not self._stop.is_set():
            self._read(source, again)
            seen.append(again.tobytes())
            if seen.count(seen[-1]) == _AGREEING:
                source.out[:] = again
                return
            if len(seen) == _MOST_READS:
                raise OSError(
                    errno.EIO,
                    f"The server sends other bytes each time, from byte {source.first} on: look at "
                    "what lies between, such as a proxy",
                    source.path,
                )


class _FileTransfer:
    """The pieces and the hash of one file."""

    def __init__(self, sources: Sequence[RemoteBytes]) -> None:
        self.path, self.digest = sources[0].path, sources[0].digest
        is_whole = sum(source.out.nbytes for source in sources) == sources[0].version.nbytes
        hashes = find_hashes(self.digest, sources[0].version.nbytes) if is_whole else []
        self._sources: Sequence[RemoteBytes] = sources
        self._hashes = hashes
        chosen = hashes[0] if hashes else None
        borders = [end for _, end in chosen.parts] if chosen else []
        self.parts = [_HashedPart(chosen) for _ in borders] or [_HashedPart(None)]
        self.pieces = list(self._cut(borders))

    def _cut(self, borders: list[int]) -> Any:
        ends, number = borders or [self._sources[-1].version.nbytes], 0
        for source in self._sources:
            at, end = source.first, source.first + source.out.nbytes
            while at < end:
                while at >= ends[number]:
                    number += 1
                stop = min(at + PIECE_BYTES, end, ends[number])
                out = source.out[at - source.first : stop - source.first]
                yield _RangeRequest(source._replace(first=at, out=out), self.parts[number])
                at = stop

    def let_go(self) -> None:
        """Let go of the memory."""
        for part in self.parts:
            part.pieces.clear()
        self.pieces.clear()
        self._sources = ()

    def matches(self) -> bool:
        """Whether the hash is the server's; True without a hash."""
        if not self._hashes:
            return True
        if self._hashes[0].matches([part.hasher for part in self.parts]):
            return True
        return any(self._is(other) for other in self._hashes[1:])

    def hash_again(self) -> bool:
        """Whether the bytes in memory have the server's hash."""
        return any(self._is(each) for each in self._hashes)

    def _is(self, hashing: ObjectHash) -> bool:
        hashers = []
        for begin, end in hashing.parts:
            hasher = hashing.new()
            for source in self._sources:
                low = max(begin, source.first) - source.first
                high = min(end, source.first + source.out.nbytes) - source.first
                if low < high:
                    hasher.update(source.out[low:high].data)
            hashers.append(hasher)
        return hashing.matches(hashers)


def _by_file(sources: Sequence[RemoteBytes]) -> list[list[RemoteBytes]]:
    found: dict[str, list[RemoteBytes]] = {}
    for source in sources:
        found.setdefault(source.path, []).append(source)
    return [sorted(each, key=lambda source: source.first) for each in found.values()]


def read_wanted(
    server: Server,
    sources: Sequence[RemoteBytes],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    tries: int = 0,
    arrivals: Arrivals | None = None,
) -> None:
    """Read ranges of files into memory, `threads` (by default `THREADS`) at a time.

    A file that is read completely is checked by the server's hash, if there is one. If it differs,
    the file is read again until two reads agree.

    Parameters
    ----------
    server, sources
        The server, and the ranges in the order of the requests.
    threads, tries
        How many ranges are under way at once; and as for `read_range`.
    progress : callable, optional
        Called in this thread as ``progress(done_bytes, total_bytes)``, at most 20 times a second,
        and at the end with both the same. If it raises, the read ends, as after Ctrl-C.
    arrivals : Arrivals, optional
        Pieces that have arrived before, which are not requested; new pieces are noted there.
    """
    transfer = _Transfer(server, sources, tries, arrivals)
    try:
        transfer.run(threads or THREADS, progress)
    finally:
        transfer.let_go()
