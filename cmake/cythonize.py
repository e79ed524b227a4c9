"""Cython that writes signatures: into docstrings of classes, and into errors about arguments.

It takes the arguments of `cython`. Cython embeds the signature of a method where `inspect` finds it,
but not that of a class, and says of a wrong call only how many arguments there should have been.
Where its internals have changed, both stay as Cython has them; tests/project/test_signatures.py
notices.
"""

import inspect
import re
import sys
from pathlib import Path

from Cython.Compiler import AutoDocTransforms, Main, Nodes
from Cython.Compiler.StringEncoding import EncodedString

TEXTS = {
    "%s() got an unexpected keyword argument '%U'": "%s: unexpected argument '%U'",
    "%s() got multiple values for keyword argument '%U'": "%s: two values for argument '%U'",
    "%s() needs keyword-only argument %U": "%s: missing argument '%U'",
}
# `func_name` is a signature, or a name: the argument of a number is found by counting commas.
RAISE = r"""{
    const char *at = strchr(func_name, '('), *end;
    Py_ssize_t i;
    CYTHON_UNUSED_VAR(exact);
    if (num_found >= num_min) {
        PyErr_Format(PyExc_TypeError, "%s: expected at most %zd positional arguments, got %zd",
                     func_name, num_max, num_found);
        return;
    }
    for (i = 0; at != NULL && i < num_found; i++)
        at = strchr(at + 1, ',');
    if (at == NULL) {
        PyErr_Format(PyExc_TypeError, "%s: expected at least %zd arguments", func_name, num_min);
        return;
    }
    at += at[1] == ' ' ? 2 : 1;
    end = at + strcspn(at, ",)");
    {
        PyObject *name = PyUnicode_FromStringAndSize(at, end - at);
        if (name != NULL)
            PyErr_Format(PyExc_TypeError, "%s: missing argument '%U'", func_name, name);
        Py_XDECREF(name);
    }
}
"""


def embed(transform, node):
    """Note the signature of a function; write it into the docstring of the class it makes."""
    is_method = transform.class_node is not None
    n_self = int(is_method and not node.is_staticmethod)
    args = node.args[n_self:]
    n_keywords = getattr(node, "num_kwonly_args", 0)
    n_positional = max(0, getattr(node, "num_posonly_args", 0) - n_self)
    is_init = is_method and node.name == "__init__"
    name = ".".join([transform.class_name] * is_method + [node.name] * (not is_init))
    transform._setup_format()
    text = transform._fmt_signature(
        None, name, args, n_positional, len(args) - n_keywords - n_positional, node.star_arg,
        n_keywords, node.starstar_arg,
    )  # fmt: skip
    if is_init or not node.name.startswith("_"):
        node.signature_text = EncodedString(text)
    if is_init and transform.is_format_clinic:
        scope = transform.class_node.entry.type.scope
        scope.doc = EncodedString(f"{text}\n--\n\n{inspect.cleandoc(scope.doc or '')}")


def patch():
    """Extend Cython's transforms."""
    visit = AutoDocTransforms.EmbedSignature.visit_DefNode

    def visit_with_class(self, node):
        if self.current_directives["embedsignature"] and not self.current_directives["binding"]:
            embed(self, node)
        return visit(self, node)

    def name_by_signature(generate):
        def named(self, *args):
            name = self.name
            self.name = getattr(self.target, "signature_text", name)
            try:
                return generate(self, *args)
            finally:
                self.name = name

        return named

    AutoDocTransforms.EmbedSignature.visit_DefNode = visit_with_class
    for method in ("generate_tuple_and_keyword_parsing_code", "generate_stararg_copy_code",
                   "generate_keyword_unpacking_code"):  # fmt: skip
        original = getattr(Nodes.DefNodeWrapper, method)
        setattr(Nodes.DefNodeWrapper, method, name_by_signature(original))


def reword(path):
    """Put our errors about arguments into a C file."""
    text = path.read_text(encoding="utf-8")
    new = text
    for old, ours in TEXTS.items():
        new = new.replace(f'"{old}"', f'"{ours}"')
    new = re.sub(
        r"(static void __Pyx_RaiseArgtupleInvalid\([^;{]*\)\n)\{.*?\n\}\n",
        lambda found: found[1] + RAISE,
        new,
        flags=re.S,
    )
    if new != text:
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    patch()
    Main.main(command_line=1)
    # The last argument is the file or the folder that was written.
    output = Path(sys.argv[-1].partition("=")[2] or sys.argv[-1])
    for file in [output] if output.suffix == ".c" else output.glob("*.c"):
        reword(file)
