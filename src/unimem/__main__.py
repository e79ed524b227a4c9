"""`python -m unimem`: the command `unimem`, and the options of a build with the C library.

``python -m unimem --cflags --libs`` prints these.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import unimem_command
from unimem._core.library import get_include, get_library


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


def main() -> int:
    """Run the command line, or print the requested values of a build in one line.

    Returns
    -------
    int
        The exit code.
    """
    flags, words = _flags(), sys.argv[1:]
    if words[:1] and words[0].removeprefix("--") in flags:
        parser = argparse.ArgumentParser(prog="python -m unimem", allow_abbrev=False)
        for name, (_, text) in flags.items():
            parser.add_argument(
                f"--{name}", action="append_const", dest="asked", const=name, help=text
            )
        print(*(flags[name][0] for name in parser.parse_args().asked))
        return 0
    return unimem_command.main()


if __name__ == "__main__":
    sys.exit(main())
