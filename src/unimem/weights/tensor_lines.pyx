# cython: language_level=3, boundscheck=False, wraparound=False
"""The tensors of a header as lines of a table and as JSON: there may be a million."""
from json.encoder import encode_basestring_ascii

from unimem.base.text import escape, text_width

from libc.stdint cimport uint64_t
from libc.stdio cimport snprintf

from unimem._core cimport native as um
from unimem.weights.header_bytes cimport HeaderBytes, tensor_facts

cdef enum:
    NUMBER_NBYTES = 24  # the longest has 20 digits
    SHAPE_NBYTES = um.UM_SAFETENSORS_MAX_DIMS * NUMBER_NBYTES
    # One long name or shape is not to widen all lines: a header of 3 MB would become 4 GB.
    MOST_COLUMNS = 100
    PART = 256  # tensors that become text at once

cdef const char **UNITS = [b"B", b"KiB", b"MiB", b"GiB", b"TiB"]


def columns(HeaderBytes header) -> list[int]:
    """Return the widths of the columns of a table."""
    cdef uint64_t i
    cdef int name = 0, kind = 0, shape = 6, size = 0, offset = 0  # as long as "scalar"
    cdef char text[SHAPE_NBYTES]
    for i in range(header.n_tensors()):
        facts = header.facts(i)
        name = max(name, text_width(shown_name(header.name_at(i)[:MOST_COLUMNS])))
        kind = max(kind, len(header.type_name(facts.type)))
        shape = max(shape, write_shape(text, &facts, b"x"))
        size = max(size, write_size(text, facts.nbytes))
        offset = max(offset, snprintf(text, sizeof(text), b"%llu", header._begin + facts.offset))
    return [min(n, MOST_COLUMNS) for n in (name, kind, shape, size, offset)]


def lines(HeaderBytes header, list widths) -> Iterator[str]:
    """Yield the line of each tensor, its name to the left, and all others to the right."""
    cdef uint64_t i
    cdef int first = widths[0], kind = widths[1], shape = widths[2], size = widths[3]
    cdef int offset = widths[4], n
    cdef char shown[SHAPE_NBYTES]
    cdef char nbytes[NUMBER_NBYTES]
    cdef char text[2 * SHAPE_NBYTES]
    for i in range(header.n_tensors()):
        facts = header.facts(i)
        if write_shape(shown, &facts, b"x") == 0:
            snprintf(shown, sizeof(shown), b"scalar")
        write_size(nbytes, facts.nbytes)
        type_name = header.type_name(facts.type).encode()
        n = snprintf(text, sizeof(text), b"  %*s  %*s  %*s  %*llu", kind, <const char *>type_name,
                     shape, shown, size, nbytes, offset, header._begin + facts.offset)
        name = shown_name(header.name_at(i))
        yield name + " " * (first - <int>text_width(name)) + text[:n].decode("ascii")


def json_items(HeaderBytes header, str path) -> Iterator[str]:
    """Yield the JSON objects of the tensors, in pieces of many, with commas between these."""
    cdef uint64_t i
    cdef char shape[SHAPE_NBYTES]
    cdef int n
    file = encode_basestring_ascii(path)
    part = []
    for i in range(header.n_tensors()):
        facts = header.facts(i)
        n = write_shape(shape, &facts, b", ")
        part.append(
            f'{{"name": {encode_basestring_ascii(header.name_at(i))}, '
            f'"type": "{header.type_name(facts.type)}", "nbytes": {facts.nbytes}, '
            f'"offset": {header._begin + facts.offset}, "file": {file}, '
            f'"shape": [{shape[:n].decode("ascii")}]}}')
        if len(part) == PART:
            yield ", ".join(part)
            part.clear()
    if part:
        yield ", ".join(part)


cdef str shown_name(str name):
    return escape(name) or "''"


cdef int write_shape(char *to, const tensor_facts *facts, const char *between) noexcept:
    """Write the dimensions in NumPy's order."""
    cdef Py_ssize_t i
    cdef int n = 0
    cdef const char *before = b""
    to[0] = 0
    for i in range(facts.n_dims):
        n += snprintf(to + n, NUMBER_NBYTES, b"%s%llu", before, facts.dims[i * facts.step])
        before = between
    return n


cdef int write_size(char *to, uint64_t nbytes) noexcept:
    """Write a size as `format_bytes` does."""
    cdef double size = <double>nbytes
    cdef int unit = 0
    while size >= 1024 and unit < 4:
        size /= 1024
        unit += 1
    return snprintf(to, NUMBER_NBYTES, b"%.*f %s", 1 if unit else 0, size, UNITS[unit])
