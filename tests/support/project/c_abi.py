"""The binary interface of the C library, as text.

``PYTHONPATH=tests python -m support.project.c_abi`` prints it; with ``--record`` it is written to
native/abi, in the file of UM_SOVERSION. Recorded lines must stay, since programs rely on them: a
changed interface, unlike a larger one, needs another UM_SOVERSION and so another file.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support.project.building import run, tool
from support.project.checkout import ROOT

HEADERS = ("unimem.h", "unimem_kv.h", "unimem_formats.h", "unimem_pieces.h")
RECORDS = ROOT / "native" / "abi"


def headers_of(folder: Path) -> str:
    """Return the text of the headers, without comments."""
    text = "".join((folder / name).read_text() for name in HEADERS)
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def soversion_of(headers: str) -> int:
    found = re.search(r"^#define UM_SOVERSION (\d+)$", headers, re.M)
    assert found is not None
    return int(found[1])


def functions_of(headers: str) -> Iterator[tuple[str, str]]:
    """Yield the name and declaration of each exported function."""
    for text in re.findall(r"^UM_API (?:UM_CHECKED )?([^;]*);", headers, re.M):
        declared = re.sub(r"\s+", " ", text)
        name = re.search(r"\b(um_\w+)\(", declared)
        assert name is not None, declared
        yield name[1], declared


def structs_of(headers: str) -> dict[str, list[str]]:
    """Return the fields of each struct that callers allocate."""
    found = {}
    for body, name in re.findall(r"^typedef struct \w+ \{(.*?)^\} (\w+);", headers, re.M | re.S):
        parts = (part for line in body.split(";") for part in line.split(",") if part.strip())
        names = (re.search(r"(\w+)\s*(\[[^]]*\])?\s*$", part) for part in parts)
        found[name] = [field[1] for field in names if field is not None]
    return found


def constants_of(headers: str) -> list[str]:
    """Return the names of enumerators, and of macros that are numbers."""
    enums = re.findall(r"\benum(?: \w+)? \{(.*?)\}", headers, re.S)
    named = [name for body in enums for name in re.findall(r"\b(UM_[A-Z0-9_]+)\b", body)]
    macros = re.findall(r"^#define (UM_(?!VERSION)\w+) \d+$", headers, re.M)
    return list(dict.fromkeys(named + macros))


def describe(folder: Path) -> list[str]:
    """Return a line for each function, struct and constant of the headers in a folder."""
    headers = headers_of(folder)
    lines = [f"function {declared}" for _, declared in sorted(functions_of(headers))]
    callbacks = re.findall(r"^typedef \w+ um_\w+\([^;]*\);", headers, re.M)
    lines += ["callback " + re.sub(r"\s+", " ", text) for text in sorted(callbacks)]
    program = ["#include <stdio.h>", "#include <stddef.h>", *(f"#include <{h}>" for h in HEADERS)]
    program += ["int main(void) {"]
    for name, fields in sorted(structs_of(headers).items()):
        program.append(f'printf("struct {name}, %zu bytes:", sizeof({name}));')
        program += [
            f'printf(" {f} %zu+%zu", offsetof({name}, {f}), sizeof((({name} *)0)->{f}));'
            for f in fields
        ]
        program.append('puts("");')
    for name in sorted(constants_of(headers)):
        program.append(f'printf("constant {name} %lld\\n", (long long){name});')
    with tempfile.TemporaryDirectory() as built:
        source, binary = Path(built, "abi.c"), Path(built, "abi")
        source.write_text("\n".join([*program, "return 0;", "}", ""]))
        run(tool("cc"), "-std=c17", f"-I{folder}", source, "-o", binary)
        lines += run(binary).splitlines()
    return lines


def record_of(soversion: int) -> Path:
    return RECORDS / f"{soversion}.txt"


def lost(recorded: list[str], found: list[str]) -> list[str]:
    """Return the lines of a record that no longer hold."""
    return sorted(set(recorded) - set(found))


def main(arguments: list[str]) -> str | None:
    folder = ROOT / "native" / "include"
    found = describe(folder)
    if arguments != ["--record"]:
        print("\n".join(found))
        return None
    path = record_of(soversion_of(headers_of(folder)))
    if path.exists() and (gone := lost(path.read_text().splitlines(), found)):
        return "\n".join([f"{path.name} has lines that no longer hold: raise UM_SOVERSION", *gone])
    path.write_text("\n".join(found) + "\n")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
