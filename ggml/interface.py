"""What the binding uses of ggml's headers, and how two versions of them differ.

A declaration is its text without comments, with single blanks. The compiler has the last word: this
says what to look at before a build.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = (
    HERE / "src/unimem_ggml/binding.pyx",
    HERE / "src/unimem_ggml/guard.h",
)
NAME = re.compile(r"\b(?:ggml|GGML)_\w+\b")
GUARDED = re.compile(r"^(?:GUARDED|UNARY|BINARY|TERNARY)\((\w+)", re.M)
# Their names begin as ggml's do, and they are our own.
OWN = {"ggml_expanded", "ggml_planned", "ggml_with_sinks", "ggml_name"}
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(GGML_\w+)[ \t]+([^\n]+)$", re.M)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$|extern \"C\" *\{", re.M)
TYPE = re.compile(r"(?:typedef )?(?:struct|union) (ggml_\w+) \{")
ENUM = re.compile(r"(?:typedef )?enum \w* ?\{(.*)\}")
FUNCTION = re.compile(r"\b(ggml_\w+)\(")
ALIAS = re.compile(r"typedef .*?(?:\(\* ?(ggml_\w+)\)|\b(ggml_\w+)$)")


def used(texts: Iterable[str]) -> set[str]:
    """Return the names of ggml that the binding's sources have."""
    found: set[str] = set()
    for text in texts:
        plain = COMMENT.sub("", text)
        found |= set(NAME.findall(plain))
        found |= {f"ggml_{name}" for name in GUARDED.findall(plain)}
    return found - OWN


def _statements(text: str) -> Iterator[str]:
    """Yield the declarations of a header; bodies of functions are cut off."""
    depth = begin = 0
    for found in re.finditer(r"[{};]", text):
        depth = max(0, depth + {"{": 1, "}": -1, ";": 0}[found[0]])
        whole = text[begin : found.start()]
        head = whole.partition("{")[0]
        is_body = found[0] == "}" and ")" in head
        if depth == 0 and (found[0] == ";" or is_body):
            plain = " ".join((head if is_body else whole).split()).lstrip("} ")
            yield re.sub(r" ?\( ?", "(", plain)
            begin = found.end()


def _values(enumerators: str) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each constant of an enum."""
    after, n = "-1", 0
    for each in filter(None, map(str.strip, enumerators.split(","))):
        name, _, value = map(str.strip, each.partition("="))
        after, n = (value, 0) if value else (after, n + 1)
        try:
            yield name, str(int(after, 0) + n)
        except ValueError:
            yield name, f"{after} + {n}" if n else after


def declared(text: str) -> dict[str, str]:
    """Return what headers declare: functions, structs, aliases, constants and macros, by name."""
    plain = COMMENT.sub(" ", text)
    found = {name: f"{name} = {' '.join(value.split())}" for name, value in DEFINE.findall(plain)}
    for each in _statements(DIRECTIVE.sub("", plain)):
        if enum := ENUM.match(each):
            found |= {name: f"{name} = {value}" for name, value in _values(enum[1])}
        elif name := TYPE.match(each) or ALIAS.match(each) or FUNCTION.search(each):
            found[next(filter(None, name.groups()))] = each
    return found


def changes(old: Mapping[str, str], new: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Describe what differs between the declarations of some names, a line each."""
    lines = []
    for name in sorted(names):
        was, is_now = old.get(name), new.get(name)
        if was != is_now:
            lines.append(f"{name}\n    was {was or 'not there'}\n    is  {is_now or 'gone'}")
    return lines
