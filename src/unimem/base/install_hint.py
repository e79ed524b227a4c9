"""How to install what is missing: from a checkout or a wheel, since no index has unimem."""

from __future__ import annotations

__all__ = ["install_hint"]


def install_hint(*extras: str) -> str:
    """Return how to install unimem with some extras, to end a message without a full stop."""
    quoted = " and ".join(f"'{extra}'" for extra in extras)
    names = ",".join(extras)
    return (
        f"install unimem-llm with the extra{'s' * (len(extras) > 1)} {quoted}: "
        f"pip install '.[{names}]' in a checkout, or pip install './FILE.whl[{names}]' of its wheel"
    )
