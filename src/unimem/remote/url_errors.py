"""Errors of servers in our own words: OSErrors with the shown URL, without secrets."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from unimem.errors import ClosedError

_AGAIN = "try again later"
_STATUS = re.compile(r"\bstatus(?: code)?\W{1,3}(\d{3})\b")
_OF_URL = re.compile(r"[a-z]+://\S+")
_MOST_DETAIL = 160
# Errors that another try does not change.
_FINAL = {
    errno.ENOENT,
    errno.EACCES,
    errno.ESTALE,
    errno.EINVAL,
    errno.ELOOP,
    errno.EROFS,
    errno.EOPNOTSUPP,
}


def is_final(error: OSError) -> bool:
    """Whether another try would fail in the same way."""
    return error.errno in _FINAL


@contextmanager
def in_own_words(path: str, wait_s: float) -> Iterator[None]:
    """Turn errors of fsspec, obstore and their libraries into OSErrors with the URL.

    Their own texts have whole URLs, which may contain secrets.
    """
    try:
        yield
    except OSError as error:
        if error.filename == path and error.strerror:  # as they are raised here
            raise
        raise _translate(_alone(error), path, wait_s) from None
    except (MemoryError, ImportError, ClosedError):
        raise
    except Exception as error:
        raise _translate(_alone(error), path, wait_s) from None


def _alone(error: Exception) -> Exception:
    """Take an error's traceback away: libraries keep errors in circles, and memory with them."""
    return error.with_traceback(None)


_Reason = tuple[object, int, str]
"""A condition, and the errno and words if it holds."""


def _translate(error: Exception, path: str, wait_s: float) -> OSError:
    # By name, since the libraries that define them are imported for some URLs only.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    if type(error) is OSError and error.strerror:  # raised here, or by the system
        number = error.errno or errno.EIO
        words = error.strerror if number in _FINAL else f"{error.strerror}: {_AGAIN}"
        return OSError(number, words, path)
    found = _STATUS.search(text)
    status = getattr(error, "status", None) or (int(found[1]) if found else None)
    reasons = (*_answers(error, kinds, text, status), *_silences(error, kinds, text, wait_s))
    chosen, words = next((number, words) for holds, number, words in reasons if holds)
    return OSError(chosen, words, path)


def _answers(
    error: Exception, kinds: set[str], text: str, status: int | None
) -> tuple[_Reason, ...]:
    """Return the reasons for an answer that is an error; the first that holds counts."""
    is_missing = status in (404, 410) or isinstance(error, FileNotFoundError)
    is_denied = status in (401, 403) or isinstance(error, PermissionError)
    is_denied = is_denied or bool(kinds & {"UnauthenticatedError", "NoCredentialsError"})
    is_replaced = status in (409, 412) or "PreconditionError" in kinds
    is_elsewhere = "redirect without LOCATION" in text or status == 301
    denied = (
        "The server refuses access: the link has expired, a login is needed (hf:// takes "
        "HF_TOKEN, and s3:// the credentials of AWS), or there is no such file"
    )
    circle = "The server redirects in a circle: look at the address"
    other = f"The server answers with HTTP status {status}: {_AGAIN}"
    return (
        (is_missing, errno.ENOENT, "The server has no such file: look at the address"),
        (is_denied, errno.EACCES, denied),
        (is_replaced, errno.ESTALE, "The file was replaced meanwhile: open it again"),
        ("TooManyRedirects" in kinds, errno.ELOOP, circle),
        (is_elsewhere, errno.EINVAL, "The bucket is in another region: set AWS_REGION"),
        (status is not None, errno.EIO, other),
    )


def _silences(error: Exception, kinds: set[str], text: str, wait_s: float) -> tuple[_Reason, ...]:
    """Return the reasons for a missing answer; the first that holds counts, the last always."""
    is_late = isinstance(error, TimeoutError) or bool(
        kinds & {"ConnectTimeoutError", "ReadTimeoutError"}
        or re.search(r"\bTimedOut\b|timed out|deadline has elapsed", text)
    )
    is_apart = kinds & {"ClientConnectorError", "EndpointConnectionError"}
    is_refused = getattr(error, "errno", None) in (None, errno.ECONNREFUSED)
    apart_number = errno.ECONNREFUSED if is_refused else errno.EHOSTUNREACH
    apart = "The server cannot be reached: look at the address and the network"
    unknown = "The server cannot be found: look at the address and the network"
    name = type(error).__name__
    other = f"{name} ({_detail(text)})" if text else name
    return (
        (is_late, errno.ETIMEDOUT, f"The server did not answer within {wait_s:g} s: {_AGAIN}"),
        (is_apart, apart_number, f"{apart} ({_detail(text)})"),
        (re.search("ConnectionRefused|Connection refused", text), errno.ECONNREFUSED, apart),
        ("dns error" in text, errno.EHOSTUNREACH, unknown),
        ("InvalidURL" in kinds, errno.EINVAL, "This is no URL that can be opened"),
        (True, errno.EIO, f"The request to the server failed: {other}: {_AGAIN}"),
    )


def _detail(text: str) -> str:
    return _OF_URL.sub("...", text.partition("\n")[0])[:_MOST_DETAIL]
