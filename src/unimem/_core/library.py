"""Where the C library and its headers are installed."""

from pathlib import Path

from unimem._core import block
from unimem._core.status import SOVERSION

# In an editable install only compiled modules know where the package is installed.
_INSTALLED = Path(block.__file__).parent.parent


def get_include() -> str:
    """Return the folder of ``unimem.h`` and the other headers, for C and Cython callers.

    Returns
    -------
    str
    """
    return str(_INSTALLED / "include")


def get_library() -> str:
    """Return the path of the C library, such as ``libunimem.so.0``, to link or load.

    Returns
    -------
    str
    """
    return str(_INSTALLED / "lib" / f"libunimem.so.{SOVERSION}")
