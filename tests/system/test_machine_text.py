"""A machine as text: short lines, and names without control characters."""

from __future__ import annotations

import re

import unimem as um
from support.kernel.invented_machine import GIB, Invented, node
from unimem.system import limits


def test_long_lists_of_cpus_are_counted(machine: Invented) -> None:
    machine.nodes[0] = node(0, cpus=tuple(range(0, 128, 2)))
    assert re.search(r"^0     64 of them  128", str(um.doctor()), re.M)


def test_names_cannot_control_a_terminal(machine: Invented) -> None:
    machine.more_limits = [limits.Limit("cgroup /a\x1b[2J", GIB, 0, "echo 1 > /a\x1b[2J\nb")]
    shown = str(um.doctor())
    assert "\x1b" not in shown
    assert r"echo 1 > /a\x1b[2J\nb" in shown
