"""Errors of servers: which errno they become, and that no secret is in them."""

from __future__ import annotations

import errno

import pytest

from unimem.errors import ClosedError
from unimem.remote.url_errors import in_own_words, is_final


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Generic error: GET https://h/x?sig=s3cret in 3ms - HTTP error\nurl: s3cret", errno.EIO),
        ("GET https://h/x?sig=s3cret: status code: 503 Slow", errno.EIO),
        ("https://h/x?sig=s3cret: operation timed out", errno.ETIMEDOUT),
        ("https://h/x?sig=s3cret: dns error", errno.EHOSTUNREACH),
        ("https://h/x?sig=s3cret: status: 403 Forbidden", errno.EACCES),
        ("Received redirect without LOCATION", errno.EINVAL),
    ],
)
def test_errors_of_libraries_keep_secrets(text: str, number: int) -> None:
    with pytest.raises(OSError, match="az://box/a") as caught, in_own_words("az://box/a", 1):
        raise RuntimeError(text)
    assert caught.value.errno == number
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("error", "number", "final"),
    [
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC, False),
        (FileNotFoundError("gone"), errno.ENOENT, True),
        (TimeoutError(), errno.ETIMEDOUT, False),
        (type("TooManyRedirects", (Exception,), {})("s3cret"), errno.ELOOP, True),
        (type("InvalidURL", (Exception,), {})("s3cret"), errno.EINVAL, True),
        (type("Answer", (Exception,), {"status": 412})(), errno.ESTALE, True),
    ],
)
def test_kinds_of_errors(error: Exception, number: int, final: bool) -> None:
    with pytest.raises(OSError, match="az://box/a") as caught, in_own_words("az://box/a", 1):
        raise error
    assert (caught.value.errno, is_final(caught.value)) == (number, final)


def test_errors_of_this_package_pass() -> None:
    for error in (MemoryError(), ClosedError("closed"), OSError(errno.EIO, "words", "az://box/a")):
        with pytest.raises(type(error)) as caught, in_own_words("az://box/a", 1):
            raise error
        assert caught.value is error
