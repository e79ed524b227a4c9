"""Put faults into a C file: all of them at once, each behind a number.

The file is compiled once. The variable ``UM_FAULT`` chooses the active fault when the library is
loaded, so that another fault needs no other build. An expression ``a < b`` becomes ``(um_fault == 7
? (a <= b) : (a < b))``, and stays on its line.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import tree_sitter
import tree_sitter_c

# Code before the file, on its first line, and after it.
_BEGIN = "static int um_fault; "
_END = """
#include <stdlib.h>

__attribute__((constructor)) static void read_fault(void) {
  const char *number = getenv("UM_FAULT");
  um_fault = number != NULL ? atoi(number) : 0;
}
"""

# Each operator, and its replacement below it.
_OPERATORS = dict(
    zip(
        "< <= > >= == != + - * / % << >> && || & | += -=".split(),
        "<= < >= > != == - + / * * >> << || && | & -= +=".split(),
        strict=True,
    )
)
# Constants of the language, and expressions that the compiler evaluates.
_CONSTANT = set(
    """
    array_declarator bitfield_clause case_statement enumerator preproc_def preproc_function_def
    preproc_if sizeof_expression static_assert
""".split()
)
_PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_c.language()))


@dataclass(frozen=True)
class Fault:
    """One change at one place of a file.

    `file` is a name such as ``kv.c``, `function` the function around it, and `line` is counted from
    1. `before` is replaced by `after`, or left out if that is "". `start` and `end` are the bytes
    of `before` in the file; `nth` numbers equal texts in the function.
    """

    file: str
    function: str
    line: int
    before: str
    after: str
    start: int
    end: int
    nth: int = 1

    @property
    def key(self) -> str:
        """Name it by its text, so that lines before it may change."""
        after = self.after or "nothing"
        nth = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.file}: {self.function}: {_one_line(self.before)} -> {_one_line(after)}{nth}"


def find_faults(name: str, text: bytes) -> list[Fault]:
    """Return every fault that can be put into a file, in order."""
    faults: list[Fault] = []
    for node in _PARSER.parse(text).root_node.children:
        if node.type == "function_definition":
            body = node.child_by_field_name("body")
            assert body is not None
            faults += _of_node(name, _function_name(node), text, body)
    seen: Counter[str] = Counter()
    for i, fault in enumerate(faults):
        seen[fault.key] += 1
        faults[i] = replace(fault, nth=seen[fault.key])
    return faults


def choose(faults: list[Fault], n: int) -> list[Fault]:
    """Return at most `n` of them: the same in every run, and from all parts of the file."""
    if len(faults) <= n:
        return faults
    rng = random.Random(faults[0].file)
    width = len(faults) / n
    return [faults[int(i * width + rng.random() * width)] for i in range(n)]


def put_in(text: bytes, faults: dict[int, Fault]) -> bytes:
    """Return the file with all of these faults, each behind its number."""
    in_order = sorted(faults.items(), key=lambda item: (item[1].start, -item[1].end))
    return _BEGIN.encode() + _written(text, 0, len(text), in_order) + _END.encode()


def replaced(text: bytes, fault: Fault) -> bytes:
    """Return the file with one fault, and the same number of lines."""
    after = f"({fault.after})" if fault.after else ";"
    lines = fault.before.count("\n") - after.count("\n")
    return text[: fault.start] + after.encode() + b"\n" * lines + text[fault.end :]


def _written(text: bytes, start: int, end: int, faults: list[tuple[int, Fault]]) -> bytes:
    """Write text[start:end]; faults in parts of an expression stay in both of its forms."""
    out = b""
    at = start
    while faults:
        number, fault = faults[0]
        inside = [item for item in faults if item[1].start < fault.end]
        faults = faults[len(inside) :]
        same = [item for item in inside if (item[1].start, item[1].end) == (fault.start, fault.end)]
        inner = [item for item in inside if item not in same]
        whole = _written(text, fault.start, fault.end, inner)
        for number, fault in same:
            whole = _choice(number, fault, whole)
        out += text[at : fault.start] + whole
        at = fault.end
    return out + text[at:end]


def _choice(number: int, fault: Fault, whole: bytes) -> bytes:
    if not fault.after:
        return b"if (um_fault != %d) { %s }" % (number, whole)
    after = fault.after.replace("\n", " ").encode()
    return b"(um_fault == %d ? (%s) : (%s))" % (number, after, whole)


def _of_node(name: str, function: str, text: bytes, node: tree_sitter.Node) -> list[Fault]:
    if node.type in _CONSTANT or _is_static(node):
        # Only the statements of a case can be changed.
        children = node.named_children[1:] if node.type == "case_statement" else []
        return [fault for child in children for fault in _of_node(name, function, text, child)]
    found = [
        Fault(
            name,
            function,
            node.start_point[0] + 1,
            text[node.start_byte : node.end_byte].decode(),
            after,
            node.start_byte,
            node.end_byte,
        )
        for after in _after(text, node)
    ]
    for child in node.named_children:
        found += _of_node(name, function, text, child)
    return found


def _after(text: bytes, node: tree_sitter.Node) -> list[str]:
    """Return possible replacements of this node."""

    def source(part: tree_sitter.Node) -> str:
        return text[part.start_byte : part.end_byte].decode()

    if node.type == "binary_expression":
        left, operator, right = node.children
        other = _OPERATORS.get(source(operator))
        return [f"{source(left)} {other} {source(right)}"] if other else []
    if node.type == "number_literal" and source(node).isdigit():
        return [str(int(source(node)) + 1)]
    if node.type == "expression_statement" and node.named_children:
        # Only statements that the compiler can do without are left out: a call, or a change of a
        # value.
        kinds = {"call_expression", "assignment_expression", "update_expression"}
        parent = node.parent
        if node.named_children[0].type in kinds and parent and parent.type == "compound_statement":
            return [""]
    return []


def _is_static(node: tree_sitter.Node) -> bool:
    return node.type == "declaration" and any(
        child.type == "storage_class_specifier" and child.text == b"static"
        for child in node.children
    )


def _function_name(node: tree_sitter.Node) -> str:
    declarator = node
    while declarator.type != "identifier":
        inner = declarator.child_by_field_name("declarator")
        assert inner is not None
        declarator = inner
    assert declarator.text is not None
    return str(declarator.text.decode())


def _one_line(text: str) -> str:
    return " ".join(text.split())
