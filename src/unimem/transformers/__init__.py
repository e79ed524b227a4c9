"""Caches for transformers' `generate`, in memory of unimem (extra ``transformers``).

Importing this package registers the attention ``"unimem"``: see `unimem.transformers.attention`.
"""

from unimem.transformers.attention import register as _register
from unimem.transformers.cache import KVCache

__all__ = ["KVCache"]

_register()
