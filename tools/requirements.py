"""Print the requirements of the package and some of its extras, for `pip install -r`.

The package itself is left out: its build tools lie outside of the environment, where pip would take
what they bring for installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def requirements(extras: list[str]) -> Iterator[str]:
    """Yield the requirements of the package, of extras, and of extras that these name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield from project["dependencies"]
    own = re.compile(rf"{project['name']}\[(.*)\]")
    while extras:
        for line in project["optional-dependencies"][extras.pop()]:
            if found := own.fullmatch(line):
                extras += found[1].split(",")
            else:
                yield line


if __name__ == "__main__":
    print(*sorted(set(requirements(sys.argv[1:]))), sep="\n")
