"""Errors of servers in our own words: an OSError with the URL as it is shown, and no secret."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from unimem.errors import ClosedError

__all__ = ["in_own_words", "is_final"]

_AGAIN = "try again later"
_STATUS = re.compile(r"\bstatus(?: code)?\W{1,3}(\d{3})\b")
_OF_URL = re.compile(r"[a-z]+://\S+")
_MOST_DETAIL = 160
# What another try does not change.
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
    """Whether another try would end alike."""
    return error.errno in _FINAL


@contextmanager
def in_own_words(path: str, wait_s: float) -> Iterator[None]:
    """Make an OSError with the URL of what fsspec and obstore, and what they use, raise.

    Their own texts have whole URLs, with what may be secret.
    """
    try:
        yield
    except OSError as error:
        if error.filename == path and error.strerror:  # as they are raised here
            raise
        raise _translate(error, path, wait_s) from None
    except (MemoryError, ImportError, ClosedError):
        raise
    except Exception as error:
        raise _translate(error, path, wait_s) from None


_Reason = tuple[object, int, str]


def _translate(error: Exception, path: str, wait_s: float) -> OSError:
    # By name, for what defines them is imported for some URLs only.
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
    """Say what a server has answered; the first that is true holds."""
    return (
        (
            status in (404, 410) or isinstance(error, FileNotFoundError),
            errno.ENOENT,
            "The server has no such file: look at the address",
        ),
        (
            status in (401, 403)
            or isinstance(error, PermissionError)
            or kinds & {"UnauthenticatedError", "NoCredentialsError"},
            errno.EACCES,
            "The server refuses access: the link has expired, a login is needed (hf:// takes "
            "HF_TOKEN, and s3:// the credentials of AWS), or there is no such file",
        ),
        (
            status in (409, 412) or "PreconditionError" in kinds,
            errno.ESTALE,
            "The file was replaced meanwhile: open it again",
        ),
        (
            "TooManyRedirects" in kinds,
            errno.ELOOP,
            "The server redirects in a circle: look at the address",
        ),
        (
            "redirect without LOCATION" in text or status == 301,
            errno.EINVAL,
            "The bucket is in another region: set AWS_REGION",
        ),
        (
            status is not None,
            errno.EIO,
            f"The server answers with HTTP status {status}: {_AGAIN}",
        ),
    )


def _silences(error: Exception, kinds: set[str], text: str, wait_s: float) -> tuple[_Reason, ...]:
    """Say why there is no answer; the first that is true holds, and the last always does."""
    is_refused = getattr(error, "errno", None) in (None, errno.ECONNREFUSED)
    return (
        (
            isinstance(error, TimeoutError)
            or kinds & {"ConnectTimeoutError", "ReadTimeoutError"}
            or re.search(r"\bTimedOut\b|timed out|deadline has elapsed", text),
            errno.ETIMEDOUT,
            f"The server did not answer within {wait_s:g} s: {_AGAIN}",
        ),
        (
            kinds & {"ClientConnectorError", "EndpointConnectionError"},
            errno.ECONNREFUSED if is_refused else errno.EHOSTUNREACH,
            f"The server cannot be reached: look at the address and the network ({_detail(text)})",
        ),
        (
            re.search(r"ConnectionRefused|Connection refused", text),
            errno.ECONNREFUSED,
            "The server cannot be reached: look at the address and the network",
        ),
        (
            "dns error" in text,
            errno.EHOSTUNREACH,
            "The server cannot be found: look at the address and the network",
        ),
        ("InvalidURL" in kinds, errno.EINVAL, "This is no URL that can be opened"),
        (True, errno.EIO, f"The request to the server failed: {_named(error, text)}: {_AGAIN}"),
    )


def _detail(text: str) -> str:
    first = text.partition("\n")[0]
    return _OF_URL.sub("...", first)[:_MOST_DETAIL]


def _named(error: Exception, text: str) -> str:
    name = type(error).__name__
    return f"{name} ({_detail(text)})" if text else name
