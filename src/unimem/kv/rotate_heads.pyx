# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""The rotation of heads, for attention over a cache that stores them rotated."""
import numpy as np

from unimem.base.arguments import one_of

cimport numpy as cnp

from unimem._core cimport native as um
from unimem._core.status cimport raise_status
from unimem.kv.inputs cimport contiguous, shape_of
from unimem._core.foreign cimport target_of

#: from unimem._core.foreign import AnyArray
#: _ArrayT = TypeVar("_ArrayT", bound=AnyArray)

cnp.import_array()


#: @overload
#: def rotate_heads(x: AnyArray, part: Literal["k", "v"] = "k", *,
#:                  out: None = None) -> NDArray[np.float32]: ...
#: @overload
#: def rotate_heads(x: AnyArray, part: Literal["k", "v"] = "k", *, out: _ArrayT) -> _ArrayT: ...
def rotate_heads(x, part="k", *, out=None):
    """Rotate heads as a cache with ``rotate=True`` does when they are appended.

    Attention over such a cache takes queries that are rotated as K, after RoPE, and its output is
    rotated as V. The matrix is symmetric and its own inverse, so this function also rotates back.

    Parameters
    ----------
    x : array
        ``[..., head_dim]``, float32, float16 or bfloat16; head_dim is a multiple of 64.
    part : {"k", "v"}
        ``"k"`` for queries and keys: in blocks of the largest power of two, up to 4096, that
        divides head_dim. ``"v"`` for values and the output of attention: in blocks of 64.
    out : array, optional
        The result: float32, C-contiguous, of the shape of x, or x itself. Nothing is then
        allocated.

    Returns
    -------
    numpy.ndarray
        float32, of the shape of x; or `out`.

    Raises
    ------
    ValueError, TypeError
        Heads of another size, another dtype, or an `out` that does not fit.

    Notes
    -----
    Each block is multiplied by the Hadamard matrix of Sylvester's construction, divided by the
    square root of its size, as llama.cpp rotates what it quantizes (ggml-org/llama.cpp#21038,
    `build_input_k_rot`, `build_input_v_rot`). The sums in float32 have another order than those of
    a matrix product, so the last bits of the results differ.

    Examples
    --------
    >>> import numpy as np
    >>> import unimem as um
    >>> q = np.eye(64, dtype="float32")
    >>> bool(np.allclose(um.rotate_heads(um.rotate_heads(q)), q))
    True
    """
    cdef um.um_error err
    cdef cnp.ndarray given = contiguous(x, "x"), to
    cdef size_t n = given.size, block = 0
    cdef um.um_status status
    cdef bint v = one_of(part, "part", ("k", "v")) == "v"
    if given.dtype.name not in ("float32", "float16", "bfloat16"):
        raise TypeError(f"x: expected float32, float16 or bfloat16, got {given.dtype}")
    dim = given.shape[given.ndim - 1] if given.ndim else 0
    if 0 < dim < 2**32:
        block = um.um_rotation_block(dim, v)
    if block == 0:
        raise ValueError(f"x: expected heads of a multiple of {um.UM_ROTATION_LEAST} values in the "
                         f"last dimension, got shape {shape_of(given)}")
    if out is None:
        to = out = given.astype(np.float32)
    else:
        to = target_of(out, "out")
        if (to.dtype != np.float32 or shape_of(to) != shape_of(given)
                or not cnp.PyArray_ISCARRAY(to)):
            raise ValueError("out: expected a writable C-contiguous array of float32 of shape "
                             f"{shape_of(given)}, got {to.dtype} of {shape_of(to)}")
        if cnp.PyArray_DATA(to) != cnp.PyArray_DATA(given) or to.dtype != given.dtype:
            np.copyto(to, given)
    with nogil:
        status = um.um_rotate(<float *>cnp.PyArray_DATA(to), n, block, &err)
    if status != um.UM_OK:
        raise_status(status, &err, "rotate_heads")
    return out
