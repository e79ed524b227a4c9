"""Model files on a server: headers are read first, and data by ranges when it is loaded."""

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
from unimem.remote.client import TOTAL_S, Answer, Server, is_url, open_server, shown, url_key
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
    FileRange,
    Header,
    ModelFile,
    ModelFiles,
    Source,
    add_files,
    check_end,
    is_name,
    open_model,
    read_header,
)

_HTML = re.compile(rb"\s*<(?:!doctype|html|\?xml)", re.IGNORECASE)
_INSTEAD = "download the file, and give its path"

FIRST_BYTES = 256 << 10  # read of each file; most headers without a vocabulary are shorter
MOST_BYTES = 64 << 20  # of a header; the longest known has 20 MB
# Of all headers: a server may name a hundred thousand parts; the largest models have 200.
MOST_MODEL_BYTES = 256 << 20
# The parsers read no more of a file.
_PARSED_BYTES = 256 << 20
# The magic number, the version or the length: more bytes do not heal an error in them.
_MAGIC_BYTES = 8


def open_files(path: Source, tries: int = 0, part: FileRange | None = None) -> ModelFiles:
    """Open all files of a model, here or on a server: see `open_model` and `open_remote`.

    For a URL, `tries` is how often a header is requested; by default `transfers.TRIES`.
    """
    if not is_url(path):
        return open_model(path, part)
    if part not in (None, FileRange()):
        raise ValueError(
            f"offset, nbytes: expected a file, a descriptor or a buffer, got {shown(path)}"
        )
    return open_remote(path, tries or transfers.TRIES)


def open_remote(url: str, tries: int = 1, server: Server | None = None) -> RemoteFiles:
    """Read and check the headers of all files of a model on a server.

    The URL is that of a file that `open_model` takes, with the model's other files beside it. By
    default it says which server has the files. Messages and results omit user and query, which may
    be secret. A header may have 64 MiB, and all of them 256 MiB and 10 minutes.

    Raises
    ------
    GGUFError, SafetensorsError
        A file breaks a rule of its format, or is a part of another model.
    FormatError
        The server sends an HTML page instead.
    OSError
        The server cannot be reached, refuses, or is too slow (`TimeoutError`); a file is missing or
        ends early; a limit is exceeded.
    ValueError, ImportError
        A URL of another kind; or a package that it needs is not installed.
    """
    model = RemoteFiles(url, tries, server)
    add_files(model, model.path)
    return model


class _Started(NamedTuple):
    """The version of a file whose header was read, the server's hash, and a hash of the header."""

    version: Version
    digest: str
    start: bytes


class RemoteFiles(ModelFiles):
    """The headers of a model's files on a server: `ModelFiles` without descriptors.

    Attributes
    ----------
    path : str
        The URL as it is shown.
    key : str
        The `url_key` of the URL: with other secret parts, it may lead to another file.
    read_bytes : int
        Bytes read of the files, and of files beside them.
    data_tries, data_threads : int
        How often a range of the data is requested, and how many ranges at once.
    """

    data_tries, data_threads = PATIENT_TRIES, transfers.THREADS

    def __init__(self, url: str, tries: int = 1, server: Server | None = None) -> None:
        super().__init__()
        self._server, self.path = open_server(url) if server is None else (server, url)
        self.key = url_key(url)
        self._tries = tries
        self._known: dict[str, ModelFile] = {}
        self._started: dict[str, _Started] = {}
        self._begun_s = monotonic()
        self.read_bytes = 0

    def add(self, path: str, *_: object) -> ModelFile:
        """Read and check the header of a file."""
        if path not in self._known:
            self._check_limits(path)
            try:
                self._known[path] = retried(lambda: self._read(path), self._tries)
            except FormatError:
                if self._tries == 1:
                    raise
                self._known[path] = self._read(path)  # it may have been damaged in transit
        self.files.append(self._known[path])
        return self.files[-1]

    def _read(self, path: str) -> ModelFile:
        with self._open(path) as file:
            header = _read_header(file)
            check_end(header, file.nbytes, path)
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
        """Read a range of each file into memory, and check the files by the server's hashes.

        `ranges` has the first byte and the memory for each file, in order. With `verify`, a file
        with a hash is read completely, its header included. The rest is as for `read_wanted`.
        """
        sources, starts = [], []
        for file, (first, out) in zip(self.files, ranges, strict=True):
            started = self._started[file.path]
            digest = self._digest(file.path) if verify else ""
            end = first + out.nbytes
            given = [(first, out)]
            if digest:  # it covers the whole file
                given.insert(0, (0, np.empty(first, np.uint8)))
                given.append((end, np.empty(file.nbytes - end, np.uint8)))
                starts.append((file, given[0][1], out))
            sources += [
                RemoteBytes(file.path, started.version, digest, at, rows)
                for at, rows in given
                if rows.nbytes
            ]
        self._read_all(sources, progress, arrivals, threads)
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
        """Read one of `files` into memory, and compare its header with the parsed one.

        The options are those of `read_data`.
        """
        started = self._started[file.path]
        digest = self._digest(file.path) if verify else ""
        source = RemoteBytes(file.path, started.version, digest, 0, out)
        self._read_all([source], progress, arrivals)
        self._check_start(file, out[:0], out)

    def _digest(self, path: str) -> str:
        """Return the server's hash of a file; request it once if no answer has had it."""
        started = self._started[path]
        if not started.digest:
            digest = self._server.ask_digest(path, started.version.tag)
            started = self._started[path] = started._replace(digest=digest)
        return started.digest

    def _read_all(
        self,
        sources: Sequence[RemoteBytes],
        progress: Progress | None,
        arrivals: Arrivals | None,
        threads: int | None = None,
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
        """Raise OSError if the bytes read now differ from the parsed header."""
        found = xxhash.xxh3_128(head[: file.header.nbytes].data)
        found.update(out[: max(0, file.header.nbytes - head.nbytes)].data)
        if found.digest() != self._started[file.path].start:
            raise OSError(
                errno.EIO, "The header was damaged on its way: open the file again", file.path
            )

    def _check_limits(self, path: str) -> None:
        """Raise OSError if earlier headers were too long, or took too long."""
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

    def absolute(self, path: str) -> str:
        """Return the URL itself."""
        return path

    def beside(self, path: str, name: str) -> str:
        """Return the URL of a file beside another."""
        return f"{path.rpartition('/')[0]}/{self._server.escape(name)}"

    def read_start(self, path: str, nbytes: int) -> bytes:
        """Read at most `nbytes` from the start of a file that is not a part of the model."""
        with self._open(path) as file:
            while len(file.start) < min(nbytes, file.nbytes):
                file.read_to(min(nbytes, max(FIRST_BYTES, 2 * len(file.start))))
            version = Version(file.nbytes, file.tag)
            self._started.setdefault(path, _Started(version, file.digest, b""))
            return bytes(file.start)

    def name_of(self, path: str) -> str:
        """Return the name of a file, unique in the model."""
        escaped = path.rpartition("/")[2]
        names = (self._server.unescape(escaped), escaped)
        return next(filter(is_name, names), "model")

    def version_of(self, path: str) -> model_files.Version:
        """Return the version of a file or index when it was read."""
        return _file_version(self._started[path].version)

    def known_version(self, path: str) -> Version:
        """Return size and ETag of a file when it was read."""
        return self._started[path].version

    def check_versions(self) -> None:
        """Do nothing: each answer of a server has reported the version of its file."""

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
    """Return a version as local files have one, with a hash of the ETag in place of the time."""
    tag = xxhash.xxh3_64_intdigest(version.tag.encode()) if version.tag else 0
    return (0, 0, version.nbytes, tag)


def _read_header(file: _FileStart) -> Header:
    """Read a file until its header is complete.

    The parser gets a file as long as the server's, with zeros in place of bytes that were not read.
    A header that ends before the zeros is right; otherwise more bytes are read.
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


class _FileStart:
    """The bytes that were read from the start of a file on a server. For one thread."""

    def __init__(self, server: Server, path: str) -> None:
        self._server, self.path = server, path
        self.start = bytearray()
        self._answer: Answer | None = None
        answer = self._request(FIRST_BYTES)
        self.nbytes, self.tag, self.digest = answer.nbytes, answer.tag, answer.digest
        self.has_ranges = answer.has_ranges

    def _request(self, end: int) -> Answer:
        """Request a range; a server without ranges sends the whole file."""
        self.close()
        self._answer = self._server.get(self.path, len(self.start), end)
        return self._answer

    def read_to(self, end: int) -> None:
        """Read up to this byte, or to the end of the file."""
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
                # Bytes beyond the range are ignored.
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
        """End the request."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None
