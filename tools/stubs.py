"""Stubs of compiled modules: `python tools/stubs.py SOURCE.pyx... [--to FOLDER]`.

A stub has the definitions of its .pyx whose results are annotated, the attributes that a .pxd makes
readable, and what a comment ``#: ...`` says, as it is. Such a comment replaces the next definition
where it defines the same name. A member that is ``call(Class.member)`` or ``figure(Class.member)``
is that of a class in the same folder. Imports are found by the names that are used.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Definition", "arguments", "definitions", "stub"]

STRINGS = re.compile(
    r'#[^\n]*|"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])*'", re.S
)
DEFINITION = re.compile(r" *(?:(?:cdef )?class |def |cpdef (?:\w+ )?)(\w+)")
KEPT_DECORATORS = re.compile(r"@(property|staticmethod|classmethod|contextmanager|\w+\.setter)$")
INTEGERS = "int long unsigned size_t Py_ssize_t int32_t int64_t uint8_t uint32_t uint64_t uintptr_t"
C_TYPES = dict.fromkeys(INTEGERS.split(), "int") | {
    "bint": "bool",
    "dict": "dict[str, Any]",
    "double": "float",
    "list": "list[Any]",
    "object": "Any",
    "tuple": "tuple[Any, ...]",
}
HEAD = "# Written by tools/stubs.py"
MODULES = {
    "collections.abc": "Callable Collection Iterable Iterator Mapping Sequence",
    "contextlib": "AbstractContextManager contextmanager",
    "os": "PathLike",
    "types": "ModuleType TracebackType",
    "typing": "Any ClassVar Generic Literal Protocol Self SupportsIndex TypeAlias TypedDict "
    "TypeVar Unpack overload",
    "numpy.typing": "ArrayLike DTypeLike NDArray",
    "typing_extensions": "Buffer",
}
STANDARD = {
    name: f"from {module} import {name}"
    for module, names in MODULES.items()
    for name in names.split()
} | {"np": "import numpy as np", "npt": "import numpy.typing as npt"}


@dataclass
class Definition:
    """A class or function of a .pyx, without its body."""

    name: str
    indent: int
    header: str
    """From `def` or `class` on, in one line and without the colon at its end."""
    first: int
    last: int
    """The lines of the header, from 0 on; `first` is that of the first decorator."""
    decorators: list[str]
    comments: list[str] = field(default_factory=list)
    """What stands in front of it for the stub."""

    @property
    def is_class(self) -> bool:
        """Whether it is a class."""
        return re.match(r"(cdef )?class ", self.header) is not None


def mask(text: str) -> str:
    """Take the text out of docstrings and comments, and the newlines out of neither."""

    def blank(found: re.Match[str]) -> str:
        if found[0].startswith('"""'):
            return '""' + "\n" * found[0].count("\n")
        return "" if found[0].startswith("#") and not found[0].startswith("#: ") else found[0]

    return STRINGS.sub(blank, text)


def definitions(text: str) -> Iterator[Definition]:
    """Find the definitions of a module and of its classes, and stray text for its stub."""
    lines = mask(text).split("\n")
    decorators: list[str] = []
    comments: list[str] = []
    first = number = 0
    inside = -1  # the indentation of the function around
    while number < len(lines):
        line = lines[number].strip()
        indent = len(lines[number]) - len(lines[number].lstrip())
        start, number = number, number + 1
        if not line or (inside >= 0 and indent > inside):
            continue
        inside = -1
        if not decorators and not comments:
            first = start
        if line.startswith("#: "):
            comments.append(" " * indent + line[3:])
            continue
        if line.startswith("@"):
            decorators.append(line)
            continue
        if found := DEFINITION.match(lines[start]):
            header, number = join(lines, start)
            each = Definition(found[1], indent, header, first, number - 1, decorators, comments)
            yield each
            inside = -1 if each.is_class else indent
            comments = []
        elif line.endswith(":"):
            inside = indent
        if comments:
            yield Definition("", indent, "", start, start, [], comments)
        decorators, comments = [], []
    if comments:
        yield Definition("", 0, "", number, number, [], comments)


def is_code(comments: list[str]) -> bool:
    """Whether comments are text for a stub, and no sentences about what follows them."""
    text = textwrap.dedent("\n".join(comments))
    try:
        parsed = ast.parse(text + " ..." * text.endswith(":")).body
    except SyntaxError:
        return False
    return not any(isinstance(each, ast.Expr) for each in parsed)


def join(lines: list[str], start: int) -> tuple[str, int]:
    """Join the lines of a header, up to its colon; return where the next line is, too."""
    header, number = lines[start].strip(), start + 1
    while header.count("(") > header.count(")") or not header.endswith(":"):
        header += " " + lines[number].strip()
        number += 1
    return re.sub(r"\s+", " ", header).replace("( ", "(")[:-1], number


def split(text: str, at: str = ",") -> list[str]:
    """Split a text where no bracket or string is open."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        depth += (character in "([{") - (character in ")]}")
        if character == at and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def arguments(header: str) -> tuple[list[tuple[str, str, str, str]], str]:
    """Return the C type, name, annotation and default of each argument, and what is returned."""
    begin = header.index("(") + 1
    depth, end = 1, begin
    while depth:
        depth += {"(": 1, ")": -1}.get(header[end], 0)
        end += 1
    found = []
    for part in split(header[begin : end - 1]):
        declared, *default = split(part, "=") if "=" in part else [part]
        declared, annotation = [*split(declared, ":"), ""][:2]
        words = declared.removesuffix(" not None").removesuffix(" or None").split()
        found.append((" ".join(words[:-1]), words[-1], annotation, " = ".join(default)))
    return found, header[end:].partition("->")[2].strip()


def argument(c_type: str, name: str, annotation: str, default: str) -> str:
    """Write an argument as Python does."""
    annotation = annotation or (C_TYPES.get(c_type, c_type) if c_type else "")
    text = f"{name}: {annotation}" if annotation else name
    return f"{text} = {default}" if default and annotation else text + f"={default}" * bool(default)


def body_of(text: str, attributes: dict[str, list[tuple[str, str]]]) -> list[str]:
    """Write the definitions of a stub."""
    lines: list[str] = []
    for each in definitions(text):
        pad = " " * each.indent
        comments = each.comments if is_code(each.comments) else []
        lines += comments
        said = re.findall(r"^ *(?:class|def) (\w+)", "\n".join(comments), re.M)
        if each.is_class:
            if each.name not in said:
                bases = re.search(r"\(.*\)", each.header)
                lines.append(f"{pad}class {each.name}{bases[0] if bases else ''}:")
            if not lines[-1].endswith("..."):
                commented = re.findall(r"^    #: (\w+):", text, re.M)
                lines += [
                    f"{pad}    {name}: {C_TYPES.get(kind, kind)}"
                    for kind, name in attributes.get(each.name, ())
                    if name not in commented
                ]
                lines.append(f"{pad}    ...")
        elif each.name and each.name not in said:
            found, result = arguments(each.header)
            if not result:
                continue
            lines += [pad + d for d in each.decorators if KEPT_DECORATORS.match(d)]
            written = ", ".join(argument(*each) for each in found)
            lines.append(f"{pad}def {each.name}({written}) -> {result}: ...")
    return lines


def attributes_of(*texts: str) -> dict[str, list[tuple[str, str]]]:
    """Find what can be read of the instances of each class."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for line in "\n".join(texts).splitlines():
        if match := re.match(r"cdef class (\w+)", line):
            name = match[1]
        elif match := re.match(r"    cdef (?:readonly|public) ((?:\w+ )+)(.+?)(?: *#.*)?$", line):
            found.setdefault(name, []).extend(
                (match[1].split()[-1], each) for each in split(match[2])
            )
    return found


def imports_of(text: str) -> dict[str, str]:
    """Find how a .pyx imports each name, from Python's or from Cython's modules."""
    found = {}
    for module, names in re.findall(
        r"^from (unimem[\w.]*|numpy[\w.]*) c?import (\([^)]*\)|[^\n(]+)", text, re.M
    ):
        for name in split(re.sub(r"#[^\n]*", "", names).strip("()\n ").replace("\n", " ")):
            found[name.split()[-1]] = f"from {module} import {name}"
    return found


def read(source: Path) -> tuple[str, dict[str, list[tuple[str, str]]]]:
    """Return the text of a .pyx, and the attributes of its classes."""
    text, pxd = source.read_text(encoding="utf-8"), source.with_suffix(".pxd")
    declared = pxd.read_text(encoding="utf-8") if pxd.exists() else ""
    return text, attributes_of(declared, text)


def with_forwarded(text: str, folder: Path) -> str:
    """Write members of other classes, which a class forwards to, as comments for its stub."""
    classes: dict[str, tuple[str, str]] = {}  # the base of each, and its stub

    def member(found: re.Match[str]) -> str:
        owner, name = found[1], found[2]
        while owner in classes:
            owner, lines = classes[owner]
            said = re.search(
                rf"(    @property\n)?    (def {name}\(.*(\n {{8}}.*)*|{name}: .*)", lines
            )
            if said:
                return re.sub("^    ", "    #: ", said[0], flags=re.M)
        return found[0]

    forwards = re.compile(r"^    \w+ = (?:call|figure)\((\w+)\.(\w+).*\)$", re.M)
    for source in folder.glob("*.pyx") if forwards.search(text) else ():
        body = "\n".join(body_of(*read(source)))
        for name, base, lines in re.findall(
            r"^class (\w+)\(?(\w*).*\n((?:    .*\n?)*)", body, re.M
        ):
            classes[name] = base, lines
    return forwards.sub(member, text)


def stub(source: Path) -> str:
    """Write the stub of a .pyx."""
    text, attributes = read(source)
    lines = body_of(with_forwarded(text, source.parent), attributes)
    written = [line for line in lines if line.startswith(("import ", "from "))]
    lines = [line for line in lines if line not in written]
    body = "\n".join(lines)
    there = set(re.findall(r"^(?:class |def )?(\w+)\b", body, re.M))
    there |= {line.split()[-1] for line in written}
    names = set(re.findall(r"(?<![\w.])([A-Za-z_]\w*)", re.sub(r'"[^"]*"', "", body))) - there
    known = STANDARD | imports_of(text)
    imports = sorted({known[name] for name in names & known.keys()} | set(written))
    return "\n".join([f"{HEAD} from {source.name}.", *imports, "", body, ""])


def main() -> None:
    """Write stubs beside their sources, or into a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    for source in options.sources:
        output = (options.to or source.parent) / f"{source.stem}.pyi"
        output.write_text(stub(source), encoding="utf-8")


if __name__ == "__main__":
    main()
