"""`python -m unimem --cflags --libs`: the options of a build with the C library."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from unimem._core.library import get_include, get_library
from unimem._core.status import VERSION


def _flags() -> dict[str, tuple[str, str]]:
    """List the output of each option, and its help."""
    library = Path(get_library())
    folder = library.parent
    link = f"-L{shlex.quote(str(folder))} -l:{library.name} -Wl,-rpath,{shlex.quote(str(folder))}"
    return {
        "prefix": (str(folder.parent), "the folder that has include and lib"),
        "cflags": (f"-I{shlex.quote(get_include())}", "options for a C or C++ compiler"),
        "libs": (link, "options for its linker; the program finds the library by itself then"),
        "cmake-dir": (str(folder / "cmake" / "unimem"), "for CMake: -Dunimem_DIR="),
    }


def main() -> None:
    """Print the requested values in one line."""
    flags = _flags()
    parser = argparse.ArgumentParser(
        prog="python -m unimem",
        description="What a build in C, C++ or Cython needs to know. The command line is 'unimem'.",
        allow_abbrev=False,
    )
    for name, (_, text) in flags.items():
        parser.add_argument(f"--{name}", action="append_const", dest="asked", const=name, help=text)
    parser.add_argument("--version", action="version", version=VERSION)
    asked = parser.parse_args().asked
    if not asked:
        parser.error(f"expected at least one of {', '.join(f'--{name}' for name in flags)}")
    print(*(flags[name][0] for name in asked))


if __name__ == "__main__":
    main()
