"""Files on servers, read by ranges and written whole: objects of stores, and files of the web.

Only this module uses obstore and fsspec, which it imports when a URL is opened: obstore for S3,
Google Cloud Storage and Azure; fsspec for the web, and as the fallback for other file systems. Each
request is one try: `unimem.remote.transfers` repeats them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias, TypeGuard
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from unimem.base.install_hint import install_hint
from unimem.errors import ClosedError
from unimem.remote.hashes import find_digest, request_digest
from unimem.remote.url_errors import in_own_words

Data: TypeAlias = bytes | bytearray | memoryview

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_HF = re.compile(r"hf://(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?/(?P<file>[^/].*)")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
# Characters that stay in a URL; others are escaped, and escapes stay.
_URL_CHARS = "%/:=&?~#+!$,;'@()*[]"

WAIT_S = 30.0  # for a connection, and for each next byte
TOTAL_S = 600  # for a whole answer of a web server
_STREAM_BYTES = 256 << 10  # lost at most when an answer is cut
# Parts of an object that is written to a store: S3 takes 10,000 of them.
_PART_BYTES, _MOST_PARTS, _PART_TRIES = 16 << 20, 9_000, 8
_INSTEAD = "download the file, and give its path"
_FORKED = (
    "a forked child cannot use the connections of its parent: begin the process by 'spawn', or "
    "open no URL before the fork"
)


def is_url(path: object) -> TypeGuard[str]:
    """Whether this is the URL of a file instead of a path."""
    return isinstance(path, str) and _URL.match(path) is not None


def shown(path: str) -> str:
    """Return a path, or a URL without the user and the query, which may be secret."""
    if not is_url(path):
        return path
    scheme, _, rest = path.partition("://")
    host, slash, name = rest.partition("?")[0].partition("#")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{name}"


def url_key(path: str) -> str:
    """Return a hash of a URL that is not shown completely; "" for other URLs and paths."""
    return "" if shown(path) == path else hashlib.sha256(path.encode()).hexdigest()


class Answer(ABC):
    """A server's answer to a request for a range of a file. For one thread.

    `tag` is the ETag of the file, or else the time of its last change; "" without either. `nbytes`
    is the size of the whole file, and `end` the end of the range.
    """

    has_ranges = True  # whether the server sends parts of a file
    digest = ""  # the server's hash of the whole file, for `find_hashes`

    def __init__(self, nbytes: int, tag: str, end: int) -> None:
        self.nbytes, self.tag, self.end = nbytes, tag, min(end, nbytes)

    @abstractmethod
    def read(self, n: int) -> Data:
        """Return at most the next `n` bytes; none at the end of the answer."""

    @abstractmethod
    def close(self) -> None:
        """End the request."""


class Server(ABC):
    """A server, or a bucket of one. Any number of threads may use it; one may close it.

    Its paths are URLs as they are shown. Errors are OSErrors with this URL. No wait takes longer
    than `wait_s` seconds.
    """

    can_write = False

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s
        self._pid = os.getpid()

    def get(self, path: str, first: int, end: int) -> Answer:
        """Request a range of a file, of at least one byte."""
        self._check()
        with in_own_words(path, self.wait_s):
            return self._get(path, first, end)

    def put(self, path: str, data: Data, *, create: bool = False) -> bool:
        """Write an object, whole or not at all.

        With `create`, an existing object stays as it is, and False is returned. The request has a
        condition for this if the server knows such; otherwise the object is looked up first.
        """
        self._check_writable(path)
        with in_own_words(path, self.wait_s):
            return self._put(path, data, create)

    def put_parts(self, path: str, parts: Iterable[Data], nbytes: int) -> None:
        """Write an object of `nbytes` from its parts, one after the other."""
        self._check_writable(path)
        with in_own_words(path, self.wait_s):
            self._put_parts(path, parts, nbytes)

    def ask_digest(self, path: str, tag: str) -> str:
        """Request the hash of the version `tag` of a file, if answers to `get` have none."""
        self._check()
        return ""

    def remove(self, path: str) -> None:
        """Remove an object."""
        self._check_writable(path)
        with in_own_words(path, self.wait_s):
            self._remove(path)

    def escape(self, name: str) -> str:
        """Return the name of a file, escaped for a URL."""
        return name

    def unescape(self, name: str) -> str:
        """Return the name of a file from the end of its URL."""
        return name

    def close(self) -> None:  # noqa: B027 - connections to stores end with their objects
        """End the connections."""

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(_FORKED)

    def _check_writable(self, path: str) -> None:
        self._check()
        if not self.can_write:
            raise OSError(errno.EROFS, "A web server is read-only: give the URL of a store", path)

    @abstractmethod
    def _get(self, path: str, first: int, end: int) -> Answer: ...

    # Servers that can write have these, too.
    _put: Callable[[str, Data, bool], bool]
    _put_parts: Callable[[str, Iterable[Data], int], None]
    _remove: Callable[[str], None]


class _StreamAnswer(Answer):
    """An answer from a stream of buffers."""

    def __init__(self, nbytes: int, tag: str, end: int, stream: Iterator[Data]) -> None:
        super().__init__(nbytes, tag, end)
        self._stream, self._rest = stream, memoryview(b"")

    def read(self, n: int) -> memoryview:
        if not self._rest:
            self._rest = memoryview(next(self._stream, b""))
        found, self._rest = self._rest[:n], self._rest[n:]
        return found

    def close(self) -> None:
        self._stream, self._rest = iter(()), memoryview(b"")


class _StoreServer(Server):
    """A bucket, by obstore, which reads the same settings from the environment as other tools."""

    can_write = True

    def __init__(self, scheme: str, bucket: str, wait_s: float) -> None:
        super().__init__(wait_s)
        with _needs_extra():
            import obstore
            from obstore import exceptions
        self._obstore, self._errors = obstore, exceptions
        self._prefix, self._has_md5 = f"{scheme}://{bucket}/", scheme == "s3"
        with in_own_words(self._prefix, wait_s):
            self._kind, self._options = _store_options(obstore, scheme, bucket)
            self._store = self._connect(0)

    def _connect(self, retries: int) -> Any:
        return self._kind(
            retry_config={"max_retries": retries},
            client_options={
                # For a whole answer: a slow one is cut, and the next request asks for the rest.
                "timeout": timedelta(seconds=self.wait_s),
                "connect_timeout": timedelta(seconds=self.wait_s),
                "allow_http": True,  # if the server's address says so
            },
            **self._options,
        )

    def _key(self, path: str) -> str:
        return path.removeprefix(self._prefix)

    def _get(self, path: str, first: int, end: int) -> Answer:
        found = self._obstore.get(self._store, self._key(path), options={"range": (first, end)})
        meta = found.meta
        begin, stop = found.range
        if begin != first:
            raise OSError(errno.EIO, "The server sends another range than it was asked for")
        stream = iter(found.stream(min_chunk_size=_STREAM_BYTES))
        answer = _StreamAnswer(meta["size"], meta["e_tag"] or "", stop, stream)
        if self._has_md5:
            answer.digest = answer.tag
        return answer

    def _put(self, path: str, data: Data, create: bool) -> bool:
        mode = "create" if create else "overwrite"
        try:
            self._obstore.put(
                self._store, self._key(path), memoryview(data), mode=mode, use_multipart=False
            )
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            return False
        return True

    def _put_parts(self, path: str, parts: Iterable[Data], nbytes: int) -> None:
        self._obstore.put(
            self._connect(_PART_TRIES),  # repeats a part instead of the whole
            self._key(path),
            iter(parts),
            use_multipart=True,
            chunk_size=max(_PART_BYTES, nbytes // _MOST_PARTS),
            max_concurrency=4,
        )

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._obstore.delete(self._store, self._key(path))

    def ask_digest(self, path: str, tag: str) -> str:
        self._check()
        if self._has_md5:  # every answer has had it
            return ""
        try:
            address = self._address(self._key(path))
        except self._errors.BaseError:  # these credentials cannot sign
            return ""
        return request_digest(address, tag, self.wait_s)

    def _address(self, key: str) -> str:
        """Return the address of an object, signed if needed."""
        scheme, _, rest = self._prefix.partition("://")
        public = _public_address(scheme, rest + quote(key))
        if public:
            return public
        # In Azure, the right to read a blob includes the right to its headers.
        method = "GET" if scheme == "az" else "HEAD"
        signed: str = self._obstore.sign(self._store, method, key, timedelta(minutes=5))
        return signed


def _public_address(scheme: str, name: str) -> str:
    """Return the address of an object that is requested without a signature; "" for others."""
    maker = "AZURE" if scheme == "az" else "GOOGLE"
    if os.environ.get(f"{maker}_SKIP_SIGNATURE", "").lower() not in ("true", "1", "yes", "on"):
        return ""
    if scheme == "az":
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        base = os.environ.get("AZURE_ENDPOINT") or f"https://{account}.blob.core.windows.net"
    else:
        base = os.environ.get("GOOGLE_BASE_URL") or "https://storage.googleapis.com"
    return f"{base}/{name}"


def _store_options(obstore: Any, scheme: str, bucket: str) -> tuple[Any, dict[str, Any]]:
    if scheme == "s3":
        return obstore.store.S3Store, {"bucket": bucket} | _aws_options()
    if scheme == "az":
        return obstore.store.AzureStore, {"container_name": bucket}
    return obstore.store.GCSStore, {"bucket": bucket}


def _aws_options() -> dict[str, Any]:
    """Return the settings that AWS's own tools use: profiles, roles and expiring credentials."""
    found: dict[str, Any] = {}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        found["endpoint"] = endpoint
    try:
        from botocore.session import get_session
    except ImportError:  # obstore reads the environment
        return found
    session = get_session()
    region = session.get_config_variable("region")
    if region:
        found["region"] = region
    credentials = session.get_credentials()
    if credentials is None:  # only public files can be read
        return found | {"skip_signature": True}

    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": getattr(credentials, "_expiry_time", None),
        }

    return found | {"credential_provider": provide}


class _FsspecServer(Server):
    """A file system that fsspec knows."""

    can_write = True

    def __init__(self, url: str, wait_s: float) -> None:
        super().__init__(wait_s)
        with _needs_extra():
            import fsspec
        scheme = url.partition("://")[0]
        try:
            kind = fsspec.get_filesystem_class(scheme)
        except ValueError:
            raise ValueError(
                f"path: expected the path of a file, or a URL of s3://, gs://, az://, hf://, "
                f"https:// or what fsspec knows, got {url!r:.200}"
            ) from None
        except ImportError as error:
            raise ImportError(f"{scheme}:// is read by fsspec, which says: {error}") from None
        with in_own_words(url, wait_s):
            self._fs = kind(**kind._get_kwargs_from_urls(url), skip_instance_cache=True)
        self._name: Callable[[str], str] = self._fs._strip_protocol

    def _get(self, path: str, first: int, end: int) -> Answer:
        name = self._name(path)
        with suppress(AttributeError):
            self._fs.invalidate_cache(self._fs._parent(name))
        info = self._fs.info(name)
        keys = ("ETag", "etag", "mtime", "created", "LastModified")
        tag = next((str(info[key]) for key in keys if info.get(key)), "")
        data = self._fs.cat_file(name, first, end)
        return _StreamAnswer(info["size"], tag, end, iter((data,)))

    def _put(self, path: str, data: Data, create: bool) -> bool:
        if create and self._fs.exists(self._name(path)):
            return False
        self._put_parts(path, (data,), len(data))
        return True

    def _put_parts(self, path: str, parts: Iterable[Data], nbytes: int) -> None:
        name = self._name(path)
        with suppress(FileExistsError, NotImplementedError):
            self._fs.makedirs(self._fs._parent(name), exist_ok=True)
        with self._fs.transaction, self._fs.open(name, "wb") as file:
            for part in parts:
                file.write(part)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._name(path))


class _HttpAnswer(Answer):
    def __init__(self, body: Any, nbytes: int, end: int, close: Callable[[], object]) -> None:
        headers = body.r.headers
        super().__init__(nbytes, headers.get("ETag") or headers.get("Last-Modified", ""), end)
        self._body, self._end = body, close

    def read(self, n: int) -> bytes:
        found: bytes = self._body.read(n)
        return found

    def close(self) -> None:
        self._end()
        self._body.close()  # does not wait for the rest


class _HttpServer(Server):
    """A web server; `secrets` are the user and the query, which no path shows."""

    def __init__(self, wait_s: float, secrets: tuple[str, str] = ("", "")) -> None:
        super().__init__(wait_s)
        with _needs_extra():
            import aiohttp
            import fsspec
            from fsspec.implementations.http import HTTPFileSystem
        self._user, self._query = secrets
        timeout = aiohttp.ClientTimeout(total=TOTAL_S, connect=wait_s, sock_read=wait_s)
        self._sync = fsspec.asyn.sync
        self._fs = HTTPFileSystem(
            # Without raise_for_status, fsspec would keep the connection of an error.
            client_kwargs={"timeout": timeout, "trust_env": True, "raise_for_status": True},
            encoded=True,
            skip_instance_cache=True,
        )

    def _get(self, path: str, first: int, end: int) -> Answer:
        """Request a range; a server without ranges sends the whole file."""
        headers = {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
        # A size and no blocks: fsspec makes no request of its own.
        body = self._fs.open(
            self._address(path), block_size=0, size=1, headers=headers | self._headers()
        )

        def close() -> None:
            self._sync(self._fs.loop, body._close)

        try:
            answer = _http_answer(body, first, end, close)
            answer.digest = self._digest(body)
            return answer
        except BaseException:
            close()
            raise

    def _address(self, path: str) -> str:
        scheme, host, name, _, _ = urlsplit(path)
        return quote(urlunsplit((scheme, self._user + host, name, self._query, "")), _URL_CHARS)

    def _headers(self) -> dict[str, str]:
        return {}

    def _digest(self, body: Any) -> str:
        """Return the hash in an answer; an ETag of the web is not a hash."""
        return find_digest(body.r.headers.items(), is_whole=body.r.status == 200)

    def ask_digest(self, path: str, tag: str) -> str:
        self._check()
        if not tag:
            return ""
        address, headers = self._address(path), self._headers()
        scheme, host, *rest = urlsplit(address)
        user, _, bare = host.rpartition("@")
        if user:
            text = b64encode(unquote(user).encode()).decode()
            headers = headers | {"Authorization": f"Basic {text}"}
        return request_digest(urlunsplit((scheme, bare, *rest)), tag, self.wait_s, headers)

    def escape(self, name: str) -> str:
        return quote(name)

    def unescape(self, name: str) -> str:
        return unquote(name)

    def close(self) -> None:
        self._fs.close_session(self._fs.loop, self._sync(self._fs.loop, self._fs.set_session))


def _http_answer(body: Any, first: int, end: int, close: Callable[[], object]) -> Answer:
    headers = body.r.headers
    found = _RANGE.fullmatch(headers.get("Content-Range", ""))
    if body.r.status == 206:
        if found is None or int(found[1]) != first:
            raise OSError(errno.EIO, "The server sends another range than it was asked for")
        return _HttpAnswer(body, int(found[3]), end, close)
    nbytes = body.r.content_length
    if first:
        raise OSError(errno.EOPNOTSUPP, f"The server sends no ranges of files: {_INSTEAD}")
    if nbytes is None or "Content-Encoding" in headers:
        raise OSError(errno.EIO, "The server does not say how long the file is")
    answer = _HttpAnswer(body, nbytes, nbytes, close)
    answer.has_ranges = nbytes <= end
    return answer


class _HfServer(_HttpServer):
    """Hugging Face: files of repositories, by the links to them."""

    def __init__(self, wait_s: float) -> None:
        with _needs_extra():
            import huggingface_hub
        self._hub = huggingface_hub
        super().__init__(wait_s)

    def _address(self, path: str) -> str:
        found = _HF.fullmatch(path)
        assert found is not None  # `open_server` has checked it
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

    def _digest(self, body: Any) -> str:
        answers = (*body.r.history, body.r)  # the hub's own redirect is the first
        tags = (each.headers.get("X-Linked-ETag", "").strip('"') for each in answers)
        return next((tag for tag in tags if _SHA256.fullmatch(tag)), super()._digest(body))

    def ask_digest(self, path: str, tag: str) -> str:
        return ""  # the hub has sent it, or has none

    escape, unescape = Server.escape, Server.unescape


def open_server(url: str, wait_s: float = 0.0) -> tuple[Server, str]:
    """Return the server of a URL, and the URL as it is shown: without user and query.

    `wait_s` is the longest wait for an answer of a store, or the next byte of the web; by default
    `WAIT_S`. ValueError says that the URL is of another kind, ImportError what to install.
    """
    wait_s = wait_s or WAIT_S
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if scheme in ("s3", "gs", "gcs", "az"):
        bucket, _, key = rest.partition("/")
        if not bucket or "@" in bucket:
            raise ValueError(f"path: expected {scheme}://bucket/key, got one without a bucket")
        return _StoreServer(scheme, bucket, wait_s), f"{scheme}://{bucket}/{key}"
    if scheme == "hf":
        if _HF.fullmatch(url) is None:
            raise ValueError(f"path: expected hf://owner/repository/file, got {url!r}")
        return _HfServer(wait_s), url
    try:
        _, host, name, query, _ = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"path: {url!r} is no URL: {error}") from None
    user, at, bare = host.rpartition("@")
    address = urlunsplit((scheme, bare, name, "", ""))
    if scheme in ("http", "https"):
        return _HttpServer(wait_s, (user + at, query)), address
    return _FsspecServer(url, wait_s), address


@contextmanager
def _needs_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f"a file on a server needs {error.name}: {install_hint('remote')}", name=error.name
        ) from None
