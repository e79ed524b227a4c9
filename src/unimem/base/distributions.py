"""Installed distributions that have the import name of this package as well."""

from __future__ import annotations

import os
import sys
import warnings
from glob import escape, glob

NAMESAKE = (
    "it is another project's, and has the same import name; this package, the memory layer for LLM "
    "inference, is unimem-llm. Files of one may have replaced those of the other: "
    "'pip uninstall unimem', and install unimem-llm again"
)


def other_distributions() -> list[str]:
    """Name the distributions that bring a package ``unimem``, beside this one. It reads all."""
    from importlib.metadata import packages_distributions

    found = packages_distributions().get("unimem", ())
    return sorted(set(found) - {"unimem-llm", "unimem_llm"})


def warn_of_namesake() -> None:
    """Warn if the distribution ``unimem`` is installed; this looks at names of folders only."""
    for folder in sys.path:
        if found := glob(os.path.join(escape(folder), "unimem-[0-9]*.dist-info")):
            warnings.warn(f"{found[0]}: {NAMESAKE}", RuntimeWarning, stacklevel=3)
            return
