"""Snapshots of KV caches: files written whole or not at all, and checked when they are read."""

from unimem.kv.snapshot.reader import (
    LayersSnapshot,
    OpenSnapshot,
    Snapshot,
    check,
    describe,
    opened,
    read_into,
    restore,
    save,
    save_layers,
    verify,
)

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
