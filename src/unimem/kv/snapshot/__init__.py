"""Snapshots of KV caches: files written whole or not at all, and checked when they are read."""

from unimem.kv.snapshot.format_layers import LayersSnapshot
from unimem.kv.snapshot.format_rows import Snapshot
from unimem.kv.snapshot.reader import (
    OpenSnapshot,
    check,
    describe,
    opened,
    read_into,
    restore,
    verify,
)
from unimem.kv.snapshot.writer import save, save_layers

__all__ = [
    "LayersSnapshot",
    "OpenSnapshot",
    "Snapshot",
    "check",
    "describe",
    "opened",
    "read_into",
    "restore",
    "save",
    "save_layers",
    "verify",
]
