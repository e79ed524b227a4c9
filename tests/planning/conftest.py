"""Fixtures for this room: machines with invented amounts of memory."""

from support.kernel.cgroup_tree import tree
from support.models.plans import available, memory, room

__all__ = ["available", "memory", "room", "tree"]
