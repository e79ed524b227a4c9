"""How far the kernel reads ahead in files of a disk, set for the time of a measurement."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unimem_bench.suite import NotMeasured

# Where the kernel has it, by the number of a file's device; a partition's is that of its disk.
_PLACES = (
    "/sys/class/bdi/{}/read_ahead_kb",
    "/sys/dev/block/{}/queue/read_ahead_kb",
    "/sys/dev/block/{}/../queue/read_ahead_kb",
)


@contextmanager
def read_ahead(path: Path, kib: int | None) -> Iterator[int]:
    """Set the read-ahead of the disk that has a file, yield it in KiB, and put it back.

    None leaves it as it is. It holds for files that are opened from then on. NotMeasured if the
    disk has none, or it cannot be written, which needs root.
    """
    place = _place(path)
    before = int(place.read_text())
    if kib is None or kib == before:
        yield before
        return
    try:
        place.write_text(f"{kib}\n")
    except OSError as error:
        raise NotMeasured(f"wants to set {place}, which needs root: {error.strerror}") from None
    try:
        yield int(place.read_text())
    finally:
        place.write_text(f"{before}\n")


def _place(path: Path) -> Path:
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for place in _PLACES:
        found = Path(place.format(number))
        if found.exists():
            return found
    raise NotMeasured(f"wants a disk with a read-ahead, {path} is on none (device {number})")
