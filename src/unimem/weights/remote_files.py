"""Model files on a server: their headers are read first, and of a load the rest by ranges."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from time import monotonic
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from unimem.base.text import format_bytes
from unimem.errors import FormatError
from unimem.remote import transfers
from unimem.remote.arrivals import Arrivals
from unimem.remote.client import TOTAL_S, Answer, Server, is_url, open_server
from unimem.remote.transfers import (
    PATIENT_TRIES,
    Progress,
    RemoteBytes,
    Version,
    read_wanted,
    retried,
)
from unimem.remote.url_errors import in_own_words
from unimem.weights import files as model_files
from unimem.weights.files import (
    Header,
    ModelFile,
    ModelFiles,
    add_files,
    is_name,
    open_model,
    read_header,
)

__all__ = ["RemoteFiles", "is_url", "open_files", "open_remote"]

_HTML = re.compile(rb"\s*<(?:!doctype|html|\?xml)", re.IGNORECASE)
_INSTEAD = "download the file, and give its path"

FIRST_BYTES = 256 << 10  # of each file; headers without a vocabulary are mostly shorter
MOST_BYTES = 64 << 20  # of a header; the longest known has 20 MB
# Of all files. A server may name a hundred thousand parts; the longest models known have 200.
MOST_MODEL_BYTES = 256 << 20
# The parsers read no more of a file, however long it is.
_PARSED_BYTES = 256 << 20
# The magic number, the version or the length: no later byte changes what a parser says of them.
_MAGIC_BYTES = 8


def open_files(path: str | os.PathLike[str]) -> ModelFiles:
    """Open all files of a model, here or on a server: see `open_model` and `open_remote`."""
    if is_url(path):
        return open_remote(path, transfers.TRIES)
    return open_model(path)


def open_remote(url: str, tries: int = 1, server: Server | None = None) -> RemoteFiles:
    """Read and check the headers of all files of a model on a server.

    Parameters
    ----------
    url : str
        See `objects.open_server`; of a file as `open_model` takes it. The model's other files are
        those beside it. Messages and results leave out a user, and what stands behind a ``?``,
        which may be secret.
    tries : int
        How often a header is asked for.
    server : Server, optional
        What has the files, by `url` as it is shown; by default the URL says.

    Returns
    -------
    RemoteFiles

    Raises
    ------
    GGUFError, SafetensorsError
        A file breaks a rule of its format, or is a part of another model.
    FormatError
        The server sends a page of HTML instead.
    OSError
        The server cannot be reached, refuses, or is too slow (`TimeoutError`); the file is missing,
        or ends early; its header is longer than 64 MiB, or all headers than 256 MiB; the files
        before the last have taken 10 minutes (`TimeoutError`).
    ValueError
        A URL of another kind.
    ImportError
        The extra ``remote`` is not installed, or what the URL needs beside it.
    """
    model = RemoteFiles(url, tries, server)
    add_files(model, model.path)
    return model


class _Started(NamedTuple):
    """What is known of a file whose header was read: what hash its server tells, and our own."""

    version: Version
    digest: str
    start: bytes


class RemoteFiles(ModelFiles):
    """The headers of a model's files on a server: `ModelFiles` without descriptors.

    Parameters
    ----------
    url : str
        Of one of its files, or of its index.
    tries : int
        How often a header is asked for.
    server : Server, optional
        As for `open_remote`.

    Attributes
    ----------
    path : str
        The same, as it is shown.
    read_bytes : int
        What was read of the files, and of what lies beside them.
    data_tries, data_threads : int
        How often a range of the data is asked for, and how many ranges at once.
    """

    data_tries, data_threads = PATIENT_TRIES, transfers.THREADS

    def __init__(self, url: str, tries: int = 1, server: Server | None = None) -> None:
        super().__init__()
        self._server, self.path = open_server(url) if server is None else (server, url)
        self._tries = tries
        self._known: dict[str, ModelFile] = {}
        self._started: dict[str, _Started] = {}
        self._begun_s = monotonic()
        self.read_bytes = 0

    def add(self, path: str) -> ModelFile:
        """Read as much of a file as its header needs, and check the header."""
        if path not in self._known:
            self._check_limits(path)
            try:
                self._known[path] = retried(lambda: self._read(path), self._tries)
            except FormatError:
                if self._tries == 1:
                    raise
                self._known[path] = self._read(path)  # it may have been damaged on its way
        self.files.append(self._known[path])
        return self.files[-1]

    def _read(self, path: str) -> ModelFile:
        with self._open(path) as file:
            header = _read_header(file)
        start = xxhash.xxh3_128_digest(bytes(file.start[: header.nbytes]))
        version = Version(file.nbytes, file.tag)
        self._started[path] = _Started(version, file.digest, start)
        return ModelFile(path, path, _file_version(version), file.nbytes, header, False)

    def read_data(
        self,
        ranges: Sequence[tuple[int, NDArray[np.uint8]]],
        *,
        verify: bool,
        threads: int | None = None,
        progress: Progress | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        """Read bytes of each file into memory, and compare them with what the server tells of it.

        Parameters
        ----------
        ranges : sequence of (int, numpy.ndarray)
            Of each file, in their order: the first byte, and where it and the next ones go.
        verify : bool
            Whether a hash that the server tells of a file is compared, which reads its header
            again, too.
        threads, progress, arrivals
            As `read_wanted`.

        Raises
        ------
        OSError
            As `read_wanted`.
        """
        sources, starts = [], []
        for file, (first, out) in zip(self.files, ranges, strict=True):
            started = self._started[file.path]
            digest = self._digest(file.path) if verify else ""
            end = first + out.nbytes
            given = [(first, out)]
            if digest:  # of the whole file
                given.insert(0, (0, np.empty(first, np.uint8)))
                given.append((end, np.empty(file.nbytes - end, np.uint8)))
                starts.append((file, given[0][1], out))
            sources += [
                RemoteBytes(file.path, started.version, digest, at, rows)
                for at, rows in given
                if rows.nbytes
            ]
        self._read_all(sources, threads, progress, arrivals)
        for file, head, out in starts:
            self._check_start(file, head, out)

    def read_file(
        self,
        file: ModelFile,
        out: NDArray[np.uint8],
        *,
        verify: bool,
        progress: Progress | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        """Read a whole file into memory, and compare it with what is known of it.

        Parameters
        ----------
        file : ModelFile
            One of `files`.
        out : numpy.ndarray
            ``uint8``: as many as it has.
        verify, progress, arrivals
            As for `read_data`; the header that was parsed is compared in any case.

        Raises
        ------
        OSError
            As `read_wanted`.
        """
        started = self._started[file.path]
        digest = self._digest(file.path) if verify else ""
        source = RemoteBytes(file.path, started.version, digest, 0, out)
        self._read_all([source], None, progress, arrivals)
        self._check_start(file, out[:0], out)

    def _digest(self, path: str) -> str:
        """Return the hash that the server tells of a file, and ask once where it has told none."""
        started = self._started[path]
        if not started.digest:
            digest = self._server.ask_digest(path, started.version.tag)
            started = self._started[path] = started._replace(digest=digest)
        return started.digest

    def _read_all(
        self,
        sources: Sequence[RemoteBytes],
        threads: int | None,
        progress: Progress | None,
        arrivals: Arrivals | None,
    ) -> None:
        read_wanted(
            self._server,
            sources,
            threads=threads or self.data_threads,
            progress=progress,
            tries=self.data_tries,
            arrivals=arrivals,
        )

    def _check_start(
        self, file: ModelFile, head: NDArray[np.uint8], out: NDArray[np.uint8]
    ) -> None:
        """Raise OSError where the header that was parsed is not that of the bytes with the hash."""
        found = xxhash.xxh3_128(head[: file.header.nbytes].data)
        found.update(out[: max(0, file.header.nbytes - head.nbytes)].data)
        if found.digest() != self._started[file.path].start:
            raise OSError(
                errno.EIO, "The header was damaged on its way: open the file again", file.path
            )

    def _check_limits(self, path: str) -> None:
        """Raise OSError where the files before this one were too much."""
        if self.read_bytes >= MOST_MODEL_BYTES:
            raise OSError(
                errno.EFBIG,
                f"The headers before this one have {format_bytes(self.read_bytes)}, and no more is "
                f"read of one model: {_INSTEAD}",
                path,
            )
        if monotonic() - self._begun_s > TOTAL_S:
            raise OSError(
                errno.ETIMEDOUT,
                f"The headers before this one were not read within {TOTAL_S} s: try again "
                f"later, or {_INSTEAD}",
                path,
            )

    def beside(self, path: str, name: str) -> str:
        """Return the URL of a file that lies beside another."""
        return f"{path.rpartition('/')[0]}/{self._server.escape(name)}"

    def read_start(self, path: str, nbytes: int) -> bytes:
        """Read the first bytes of a file that is no part of the model: at most so many."""
        with self._open(path) as file:
            while len(file.start) < min(nbytes, file.nbytes):
                file.read_to(min(nbytes, max(FIRST_BYTES, 2 * len(file.start))))
            version = Version(file.nbytes, file.tag)
            self._started.setdefault(path, _Started(version, file.digest, b""))
            return bytes(file.start)

    def name_of(self, path: str) -> str:
        """Return the name of a file, which no other file of the model has."""
        escaped = path.rpartition("/")[2]
        names = (self._server.unescape(escaped), escaped)
        return next(filter(is_name, names), "model")

    def version_of(self, path: str) -> model_files.Version:
        """Return what is known of the version of a file that was read, an index among them."""
        return _file_version(self._started[path].version)

    def known_version(self, path: str) -> Version:
        """Return size and ETag of a file that was read."""
        return self._started[path].version

    def check_versions(self) -> None:
        """Do nothing: each answer of a server has said of which version of a file it is."""

    def close(self) -> None:
        """End the connections."""
        self._server.close()

    @contextmanager
    def _open(self, path: str) -> Iterator[_FileStart]:
        with closing(_FileStart(self._server, path)) as file:
            try:
                yield file
            finally:
                self.read_bytes += len(file.start)


def _file_version(version: Version) -> model_files.Version:
    """Return a version as files here have one: of no device, and a hash of the ETag as its time."""
    tag = xxhash.xxh3_64_intdigest(version.tag.encode()) if version.tag else 0
    return (0, 0, version.nbytes, tag)


def _read_header(file: _FileStart) -> Header:
    """Read a file until its header is whole.

    A parser reads files. It gets one as long as the server's, with zeros for what was not read: a
    header that ends before these is right, and of any other more is read.
    """
    path, wanted = file.path, FIRST_BYTES
    with open(os.memfd_create("unimem header", os.MFD_CLOEXEC), "w+b", buffering=0) as copy:
        while True:
            written = len(file.start)
            file.read_to(wanted)
            if _HTML.match(file.start):
                raise FormatError(
                    "an HTML page, and no model file: give the link to the file itself (at Hugging "
                    "Face it has /resolve/ in the place of /blob/)",
                    path=path,
                )
            os.pwrite(copy.fileno(), bytes(file.start[written:]), written)
            copy.truncate(min(file.nbytes, _PARSED_BYTES))
            is_whole = len(file.start) == file.nbytes
            try:
                header = read_header(copy.fileno(), file.nbytes, path)
                if header.nbytes <= len(file.start):
                    return header
            except FormatError as error:
                if is_whole or (error.offset is not None and error.offset < _MAGIC_BYTES):
                    raise
            if wanted >= MOST_BYTES:
                why = "" if file.has_ranges else ", which sends no ranges but the whole file"
                raise OSError(
                    errno.EFBIG,
                    f"The header does not end within {format_bytes(MOST_BYTES)}, and no more is "
                    f"read from the server{why}: {_INSTEAD}",
                    path,
                )
            wanted = min(2 * wanted, MOST_BYTES)


# ---- the start of a file --------------------------------------------------------------------


class _FileStart:
    """The first bytes of a file on a server, as many as were read. For one thread.

    Attributes
    ----------
    path : str
        As it is shown.
    nbytes : int
        Size of the whole file.
    tag, digest : str
        Its ETag, and a hash of it that the server tells.
    start : bytearray
        What was read.
    has_ranges : bool
        Whether the server sends parts of a file.
    """

    def __init__(self, server: Server, path: str) -> None:
        self._server, self.path = server, path
        self.start = bytearray()
        self._answer: Answer | None = None
        answer = self._request(FIRST_BYTES)
        self.nbytes, self.tag, self.digest = answer.nbytes, answer.tag, answer.digest
        self.has_ranges = answer.has_ranges

    def _request(self, end: int) -> Answer:
        """Ask for a range; of a server without ranges, the whole file comes."""
        self.close()
        self._answer = self._server.get(self.path, len(self.start), end)
        return self._answer

    def read_to(self, end: int) -> None:
        """Read on, up to this byte or the file's last."""
        end = min(end, self.nbytes)
        while (at := len(self.start)) < end:
            answer = self._answer
            if answer is None or at >= answer.end:
                answer = self._request(end)
                if (answer.nbytes, answer.tag) != (self.nbytes, self.tag):
                    raise OSError(
                        errno.ESTALE,
                        "The file was replaced while its header was read: try again, or "
                        f"{_INSTEAD}",
                        self.path,
                    )
            with in_own_words(self.path, self._server.wait_s):
                # A server that sends more than a range is not listened to.
                found = answer.read(min(end, answer.end) - at)
            if not len(found):
                raise OSError(
                    errno.EIO,
                    f"The server ended the file after {at} of {self.nbytes} bytes: "
                    f"try again, or {_INSTEAD}",
                    self.path,
                )
            self.start += found

    def close(self) -> None:
        """End what is under way."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None
