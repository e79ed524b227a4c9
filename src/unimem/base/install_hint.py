"""How to install what is missing. No package index has unimem: there are checkouts and wheels."""

from __future__ import annotations

__all__ = ["install_hint"]


def install_hint(*extras: str) -> str:
    """Say how to install unimem with some of its extras.

    Parameters
    ----------
    *extras : str
        Names of extras, at least one.

    Returns
    -------
    str
        Words for the end of a message, without a full stop.
    """
    quoted = " and ".join(f"'{extra}'" for extra in extras)
    names = ",".join(extras)
    return (
        f"install unimem-llm with the extra{'s' * (len(extras) > 1)} {quoted}: "
        f"pip install '.[{names}]' in a checkout, or pip install './FILE.whl[{names}]' of its wheel"
    )
