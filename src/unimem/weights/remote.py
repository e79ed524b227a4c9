"""Model files on a server: their headers are read by ranges, and nothing else of them.

Only this module uses fsspec, and imports what it needs for a URL where one is opened.
"""

from __future__ import annotations

import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from time import monotonic
from typing import Any, NoReturn, Protocol
from urllib.parse import quote, urlsplit, urlunsplit

from unimem.errors import FormatError
from unimem.system.text import format_bytes
from unimem.weights.files import Header, ModelFile, ModelFiles, add_files, read_header

__all__ = ["RemoteFiles", "is_url", "open_remote"]

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_HF = re.compile(r"hf://(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?/(?P<file>[^/].*)")
_HTML = re.compile(rb"\s*<(?:!doctype|html|\?xml)", re.IGNORECASE)
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_INSTEAD = "download the file, and give its path"

FIRST_BYTES = 256 << 10  # of each file; headers without a vocabulary are mostly shorter
MOST_BYTES = 64 << 20  # of a header; the longest known has 20 MB
WAIT_S = 30  # for a connection, and for each next byte
TOTAL_S = 600  # for an answer, and before the last file of a model is opened
# Of all files. A server may name a hundred thousand parts; the longest models known have 200.
MOST_MODEL_BYTES = 256 << 20
# The parsers read no more of a file, however long it is.
_PARSED_BYTES = 256 << 20
# The magic number, the version or the length: no later byte changes what a parser says of them.
_MAGIC_BYTES = 8
# What a URL may have as it is. All else is escaped, and what is escaped stays so.
_URL_CHARS = "%/:=&?~#+!$,;'@()*[]"


def is_url(path: str) -> bool:
    """Whether it is the URL of a file, and no path."""
    return _URL.match(path) is not None


def open_remote(url: str) -> RemoteFiles:
    """Read and check the headers of all files of a model on a server.

    Parameters
    ----------
    url : str
        ``https://`` or ``http://``, ``s3://bucket/key``, or
        ``hf://owner/repository[@revision]/file``, of a file as `open_model` takes it; the model's
        other files are those beside it. Messages and results leave out a user, and what stands
        behind a ``?``, which may be secret.

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
        The extra ``remote`` is not installed.
    """
    model = RemoteFiles(url)
    add_files(model, model.path)
    return model


class RemoteFiles(ModelFiles):
    """The headers of a model's files on a server: `ModelFiles` without descriptors.

    Parameters
    ----------
    url : str
        Of one of its files, or of its index.

    Attributes
    ----------
    path : str
        The same, as it is shown.
    read_bytes : int
        What was read of the files, and of what lies beside them.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._server, self.path = _server_of(url)
        self._known: dict[str, ModelFile] = {}
        self._begun_s = monotonic()
        self.read_bytes = 0

    def add(self, path: str) -> ModelFile:
        """Read as much of a file as its header needs, and check the header."""
        if path not in self._known:
            self._check_limits(path)
            with self._open(path) as file:
                header = _read_header(file)
            version = (0, 0, file.nbytes, 0)  # of no device
            self._known[path] = ModelFile(path, path, version, file.nbytes, header, False)
        self.files.append(self._known[path])
        return self.files[-1]

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
            return bytes(file.start)

    def close(self) -> None:
        """End the connections."""
        self._server.close()

    @contextmanager
    def _open(self, path: str) -> Iterator[_FileStart]:
        with _in_own_words(path):
            opened = self._server.open(path)
        with closing(opened) as file:
            try:
                yield file
            finally:
                self.read_bytes += len(file.start)


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


class _FileStart(ABC):
    """The first bytes of a file on a server, as many as were read. For one thread.

    Attributes
    ----------
    path : str
        As it is shown.
    nbytes : int
        Size of the whole file.
    start : bytearray
        What was read.
    has_ranges : bool
        Whether the server sends parts of a file.
    """

    has_ranges = True

    def __init__(self, path: str, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.start = bytearray()

    def read_to(self, end: int) -> None:
        """Read on, up to this byte or the file's last."""
        while len(self.start) < min(end, self.nbytes):
            with _in_own_words(self.path):
                found = self._fetch(min(end, self.nbytes))
            if not found:
                raise OSError(
                    errno.EIO,
                    f"The server ended the file after {len(self.start)} of {self.nbytes} bytes: "
                    f"try again, or {_INSTEAD}",
                    self.path,
                )
            self.start += found

    @abstractmethod
    def _fetch(self, end: int) -> bytes:
        """Return the next bytes, up to this one; some at least, where the file has not ended."""

    @abstractmethod
    def close(self) -> None:
        """End what is under way."""


class _HttpStart(_FileStart):
    def __init__(self, server: _HttpServer, path: str) -> None:
        self._server = server
        self._body: Any = None
        super().__init__(path, 0)
        self._tag = ""
        self._request(0, FIRST_BYTES)

    def _request(self, first: int, end: int) -> None:
        """Ask for a range; of a server without ranges, the whole file comes."""
        self._body = body = self._server.get(self.path, first, end)
        headers = body.r.headers
        found = _RANGE.fullmatch(headers.get("Content-Range", ""))
        self._end, nbytes = end, body.r.content_length
        if body.r.status == 206:
            if found is None or int(found[1]) != first:
                self._fail(errno.EIO, "The server sends another range than it was asked for")
            nbytes = int(found[3])
        elif first:
            self._fail(errno.EIO, "The server no longer sends ranges")
        elif nbytes is None or "Content-Encoding" in headers:
            self._fail(errno.EIO, "The server does not say how long the file is")
        else:
            self.has_ranges, self._end = False, nbytes
        tag = headers.get("ETag", "")
        if first and (nbytes, tag) != (self.nbytes, self._tag):
            self._fail(errno.ESTALE, "The file was replaced while its header was read")
        self.nbytes, self._tag = nbytes, tag

    def _fail(self, number: int, text: str) -> NoReturn:
        self.close()
        raise OSError(number, f"{text}: try again, or {_INSTEAD}", self.path)

    def _fetch(self, end: int) -> bytes:
        at = len(self.start)
        if self._body is None or at >= self._end:
            self.close()
            self._request(at, end)
        # A server that sends more than a range is not listened to.
        found: bytes = self._body.read(min(end, self._end) - at)
        return found

    def close(self) -> None:
        """End what is under way."""
        if self._body is not None:
            self._body.close()
            self._body = None


class _S3Start(_FileStart):
    def __init__(self, path: str, file: Any) -> None:
        super().__init__(path, file.size)
        self._file = file

    def _fetch(self, end: int) -> bytes:
        found: bytes = self._file.read(end - len(self.start))
        return found

    def close(self) -> None:
        """End what is under way."""
        self._file.close()


# ---- servers --------------------------------------------------------------------------------


class _Server(Protocol):
    def open(self, path: str) -> _FileStart:
        """Open a file by the URL that is shown."""

    def escape(self, name: str) -> str:
        """Return a file's name as a URL has it."""

    def close(self) -> None:
        """End the connections."""


class _HttpServer:
    """Files by their URLs; `secrets` are the user and the query, which no path shows."""

    def __init__(self, secrets: tuple[str, str] = ("", "")) -> None:
        with _needs_extra():
            import aiohttp
            import fsspec
            from fsspec.implementations.http import HTTPFileSystem
        self._user, self._query = secrets
        timeout = aiohttp.ClientTimeout(total=TOTAL_S, connect=WAIT_S, sock_read=WAIT_S)
        self._sync = fsspec.asyn.sync
        self._fs = HTTPFileSystem(
            client_kwargs={"timeout": timeout, "trust_env": True},
            encoded=True,
            skip_instance_cache=True,
        )

    def open(self, path: str) -> _FileStart:
        return _HttpStart(self, path)

    def get(self, path: str, first: int, end: int) -> Any:
        """Ask for a range of bytes, and give the answer as a file."""
        headers = {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
        # With a size there is no request for it, and without blocks none for another range.
        return self._fs.open(
            self._address(path), block_size=0, size=1, headers=headers | self._headers()
        )

    def _address(self, path: str) -> str:
        scheme, host, name, _, _ = urlsplit(path)
        return quote(urlunsplit((scheme, self._user + host, name, self._query, "")), _URL_CHARS)

    def _headers(self) -> dict[str, str]:
        return {}

    def escape(self, name: str) -> str:
        return quote(name)

    def close(self) -> None:
        self._fs.close_session(self._fs.loop, self._sync(self._fs.loop, self._fs.set_session))


class _HfServer(_HttpServer):
    """Files of repositories, by the links that Hugging Face has to them."""

    def __init__(self) -> None:
        with _needs_extra():
            import huggingface_hub
        self._hub = huggingface_hub
        super().__init__()

    def _address(self, path: str) -> str:
        found = _HF.fullmatch(path)
        assert found is not None  # which `_server_of` has seen to
        address: str = self._hub.hf_hub_url(
            found["repo"],
            found["file"],
            revision=found["revision"],
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
        return address

    def _headers(self) -> dict[str, str]:
        token = self._hub.get_token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def escape(self, name: str) -> str:
        return name


class _S3Server:
    def __init__(self) -> None:
        with _needs_extra():
            import s3fs
        self._s3fs = s3fs
        self._fs: Any = None

    def open(self, path: str) -> _FileStart:
        from botocore.exceptions import NoCredentialsError

        self._fs = self._fs or self._connect(anon=False)
        try:
            file = self._fs.open(path, cache_type="none")
        except NoCredentialsError:
            self._fs = self._connect(anon=True)
            file = self._fs.open(path, cache_type="none")
        return _S3Start(path, file)

    def escape(self, name: str) -> str:
        return name

    def close(self) -> None:
        self._fs = None  # which ends its connections

    def _connect(self, *, anon: bool) -> Any:
        config = {"connect_timeout": WAIT_S, "read_timeout": WAIT_S, "retries": {"max_attempts": 0}}
        fs = self._s3fs.S3FileSystem(anon=anon, config_kwargs=config, skip_instance_cache=True)
        fs.retries = 1  # it would wait five times as long
        return fs


def _server_of(url: str) -> tuple[_Server, str]:
    """Return the server of a URL, and the URL as it is shown."""
    scheme = url.partition("://")[0].lower()
    if scheme == "s3":
        return _S3Server(), url
    if scheme == "hf":
        if _HF.fullmatch(url) is None:
            raise ValueError(f"path: expected hf://owner/repository/file, got {url!r}")
        return _HfServer(), url
    if scheme not in ("http", "https"):
        raise ValueError(
            f"path: expected the path of a file, or https://, http://, s3:// or hf://, got {url!r}"
        )
    try:
        _, host, name, query, _ = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"path: {url!r} is no URL: {error}") from None
    user, at, host = host.rpartition("@")
    return _HttpServer((user + at, query)), urlunsplit((scheme, host, name, "", ""))


@contextmanager
def _needs_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"a model on a server needs {error.name}, which comes with: "
            "pip install 'unimem-llm[remote]'",
            name=error.name,
        ) from None


# ---- errors ---------------------------------------------------------------------------------


@contextmanager
def _in_own_words(path: str) -> Iterator[None]:
    """Make an OSError with the URL of what fsspec, and what it uses, raises."""
    try:
        yield
    except OSError as error:
        if error.filename == path and error.strerror:  # as this module raises them
            raise
        raise _translate(error, path) from None
    except (MemoryError, ImportError):
        raise
    except Exception as error:
        raise _translate(error, path) from None


def _translate(error: Exception, path: str) -> OSError:
    # By name, for what defines them is imported for some URLs only.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status", None)
    is_refused = getattr(error, "errno", None) in (None, errno.ECONNREFUSED)
    detail = f"{type(error).__name__} ({error})" if str(error) else type(error).__name__
    # The first that is true.
    reasons = (
        (
            status in (404, 410) or isinstance(error, FileNotFoundError),
            errno.ENOENT,
            "The server has no such file: look at the address",
        ),
        (
            status in (401, 403) or isinstance(error, PermissionError),
            errno.EACCES,
            "The server refuses access: the link has expired, a login is needed (hf:// takes "
            "HF_TOKEN, and s3:// the credentials of AWS), or there is no such file",
        ),
        (
            "TooManyRedirects" in kinds,
            errno.ELOOP,
            "The server redirects in a circle: look at the address",
        ),
        (
            status is not None,
            errno.EIO,
            f"The server answers with HTTP status {status}: try again later, or {_INSTEAD}",
        ),
        (
            isinstance(error, TimeoutError) or kinds & {"ConnectTimeoutError", "ReadTimeoutError"},
            errno.ETIMEDOUT,
            f"The server did not answer within {WAIT_S} s: try again later, or {_INSTEAD}",
        ),
        (
            kinds & {"ClientConnectorError", "EndpointConnectionError"},
            errno.ECONNREFUSED if is_refused else errno.EHOSTUNREACH,
            f"The server cannot be reached: look at the address and the network ({error})",
        ),
        # Its text has the whole URL, with what may be secret.
        ("InvalidURL" in kinds, errno.EINVAL, "This is no URL that can be opened"),
        (
            True,
            errno.EIO,
            f"Reading from the server failed: {detail}: try again, or {_INSTEAD}",
        ),
    )
    number, text = next((number, text) for holds, number, text in reasons if holds)
    return OSError(number, text, path)
