"""Caches for transformers' `generate`, in memory of unimem (extra ``transformers``).

Importing this package registers the attention ``"unimem"``: see `unimem.transformers.attention`.
"""

try:
    from unimem.transformers.attention import register as _register
    from unimem.transformers.cache import KVCache
except ImportError as error:
    from importlib.metadata import PackageNotFoundError, version

    try:
        _found = f"got {version('transformers')}"
    except PackageNotFoundError:
        _found = "and it is not installed"
    raise ImportError(
        f"unimem.transformers: expected transformers 5.23 or 5.24, {_found}: "
        f"pip install 'transformers>=5.23,<5.25'; importing it said: {error}"
    ) from error

__all__ = ["KVCache"]

_register()
