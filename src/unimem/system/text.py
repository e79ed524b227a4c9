"""How sizes and tables are written, wherever text is made."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_bytes", "table"]

_KIB = 1024


def format_bytes(nbytes: float) -> str:
    """Write a size in the largest unit that keeps it at 1 or above.

    Examples
    --------
    >>> format_bytes(1536), format_bytes(3 * 2**30), format_bytes(0)
    ('1.5 KiB', '3.0 GiB', '0 B')
    """
    if nbytes < _KIB:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= _KIB
        if nbytes < _KIB:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / _KIB:.1f} TiB"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Lay out texts in columns: the first to the left, the others to the right.

    Examples
    --------
    >>> print(table(("category", "size"), [("kv", "1 B"), ("scratch", "20 B")]))
    category  size
    kv         1 B
    scratch   20 B
    """
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (head, *lines)
    )
