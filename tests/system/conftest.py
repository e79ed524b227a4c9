"""Fixtures for this room: an invented machine and an invented cgroup tree."""

from support.kernel.cgroup_tree import tree
from support.kernel.invented_machine import machine

__all__ = ["machine", "tree"]
