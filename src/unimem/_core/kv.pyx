# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""The KV cache: K and V of all layers of one conversation, in memory that never moves."""
import numpy as np

from unimem.errors import CacheFull, ClosedError
from unimem.placement import format_bytes

cimport numpy as cnp
from libc.stdint cimport uint32_t, uint64_t, uintptr_t

from unimem._core cimport native as um
from unimem._core.arrays cimport array_over, size_of
from unimem._core.status cimport raise_status
from unimem._core.tape cimport Tape

cnp.import_array()

# The names of KV types, and NumPy's for the same.
cdef dict _TYPES = {"f32": "f32", "float32": "f32", "f16": "f16", "float16": "f16"}


cdef int _float_of(cnp.ndarray a) except -1:
    """The native type of an array's elements."""
    cdef int number = cnp.PyArray_TYPE(a)
    if number == cnp.NPY_FLOAT32:
        return um.UM_F32
    if number == cnp.NPY_FLOAT16:
        return um.UM_F16
    raise TypeError(f"expected float32 or float16, got {a.dtype}")


cdef cnp.ndarray _contiguous(object a):
    """The array itself where its memory is in order, else a copy."""
    if cnp.PyArray_Check(a) and cnp.PyArray_ISCARRAY_RO(<cnp.ndarray>a):
        return <cnp.ndarray>a
    if not isinstance(a, np.ndarray):
        raise TypeError(f"expected a NumPy array, got {type(a).__name__}")
    if not a.dtype.isnative:
        a = a.astype(a.dtype.newbyteorder("="))
    return np.require(a, requirements="CA")


cdef size_t _storage_of(um.um_kv_spec *spec, object n_layers, object n_kv_heads, object head_dim,
                        object max_seq_len, object batch, object dtype) except 0:
    """Fills the spec of a cache and returns the bytes that it needs."""
    cdef um.um_error err
    cdef size_t nbytes
    named = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if named not in _TYPES:
        raise ValueError(f"dtype: expected one of {', '.join(_TYPES)}, got {dtype!r}")
    for what, n in (("n_layers", n_layers), ("n_kv_heads", n_kv_heads), ("head_dim", head_dim),
                    ("max_seq_len", max_seq_len), ("batch", batch)):
        if size_of(n, what, 1) >= 2**32:
            raise ValueError(f"{what}: expected at most 2**32 - 1, got {n}")
    spec.n_layers, spec.n_kv_heads, spec.head_dim = n_layers, n_kv_heads, head_dim
    spec.max_seq_len, spec.batch = max_seq_len, batch
    spec.type = um.UM_F16 if _TYPES[named] == "f16" else um.UM_F32
    if um.um_kv_storage_bytes(spec, &nbytes, &err) != um.UM_OK:
        raise_status(err.status, &err, "KVCache")
    return nbytes


cdef class KVCache:
    """K and V of all layers of one stream (optionally a batch), in fixed storage.

    The storage is taken once. For each layer it holds K, then V, each ``[batch, max_seq_len,
    n_kv_heads, head_dim]``; appending is a copy, or a conversion, into the next row, and no address
    ever changes. A token counts once every layer holds it.

    One thread writes; others may read views of tokens that are there. After a fork the child has
    its own copy.

    Parameters
    ----------
    n_layers, n_kv_heads, head_dim : int
        The model's dimensions.
    max_seq_len : int
        Tokens that fit.
    batch : int, default 1
        Streams that grow together.
    dtype : {"f16", "f32"}
        What is stored; NumPy's names are accepted.
    tape : Tape, optional
        Where the storage is taken, such as ``layout.history``; otherwise a tape of its own.
    **placement
        See `PlacementOptions`; only without `tape`.

    Raises
    ------
    ValueError
        A dimension below 1, an unknown dtype, sizes whose product does not fit.
    TapeFull
        `tape` has no room.
    MemoryError, PlacementError
        As `Block`.

    Examples
    --------
    >>> import numpy as np, unimem as um
    >>> with um.KVCache(2, 4, 8, max_seq_len=16) as kv:
    ...     for layer in range(2):
    ...         kv.append(layer, np.ones((3, 4, 8), "float32"), np.ones((3, 4, 8), "float32"))
    ...     k, v = kv.layer(0)
    ...     kv.seq_len, k.shape, k.dtype.name
    (3, (1, 4, 3, 8), 'float16')
    """

    def __init__(self, n_layers, n_kv_heads, head_dim, max_seq_len, *, batch=1, dtype="f16",
                 tape=None, name=None, **placement):
        cdef um.um_error err
        cdef um.um_kv_spec spec
        cdef size_t nbytes = _storage_of(&spec, n_layers, n_kv_heads, head_dim, max_seq_len, batch,
                                         dtype)
        self._storage_bytes = nbytes
        self.dtype = "f16" if spec.type == um.UM_F16 else "f32"
        self._numpy_dtype = np.dtype("float16" if spec.type == um.UM_F16 else "float32")
        if tape is None:
            self.tape = Tape(nbytes, name=name or "kv", category="history", **placement)
            self._owns_tape = True
        else:
            if placement:
                raise ValueError("a tape is placed already: "
                                 f"{', '.join(placement)} not accepted beside tape=")
            self.tape = tape
        storage = self.tape.take_raw(nbytes)
        if um.um_kv_init(&self.kv, &spec, storage, nbytes, &err) != um.UM_OK:
            raise_status(err.status, &err, "KVCache")

    @classmethod
    def for_dims(cls, dims, *, max_seq_len=None, **options):
        """Make a cache for a model.

        Parameters
        ----------
        dims : ModelDims
            The model's dimensions.
        max_seq_len : int, optional
            ``dims.max_seq_len`` by default.
        **options
            As for the class.

        Returns
        -------
        KVCache
        """
        return cls(dims.num_layers, dims.num_kv_heads, dims.head_dim,
                   dims.max_seq_len if max_seq_len is None else max_seq_len, **options)

    @staticmethod
    def storage_bytes(n_layers, n_kv_heads, head_dim, max_seq_len, *, batch=1, dtype="f16"):
        """Return the bytes that a cache of these dimensions takes from a tape.

        Returns
        -------
        int
            For each layer K and V, each rounded up to 64 bytes, and 8 bytes for its length.

        Raises
        ------
        ValueError
            As the class.
        """
        cdef um.um_kv_spec spec
        return _storage_of(&spec, n_layers, n_kv_heads, head_dim, max_seq_len, batch, dtype)

    cdef object fail(self, um.um_error *err, str doing):
        raise_status(err.status, err, f"KVCache.{doing}", CacheFull, "tokens")

    cdef object check_open(self):
        if self._closed or self.tape.closed:
            raise ClosedError("the KVCache is closed")

    cdef uint32_t _checked_layer(self, Py_ssize_t layer) except? 0xffffffff:
        if not 0 <= layer < self.kv.spec.n_layers:
            raise ValueError(f"layer: expected 0 to {self.kv.spec.n_layers - 1}, got {layer}")
        return <uint32_t>layer

    def append(self, layer, k, v):
        """Append tokens to one layer.

        Parameters
        ----------
        layer : int
            Which.
        k, v : numpy.ndarray
            Of one shape and dtype, float32 or float16: ``[n, n_kv_heads, head_dim]`` (batch 1), or
            ``[batch, n_kv_heads, n, head_dim]``. Converted to the cache's dtype, rounding to
            nearest even; arrays that are not C-contiguous are copied first.

        Raises
        ------
        CacheFull
            There is no room for all n.
        ValueError, TypeError
            A wrong layer, shape or dtype.
        RuntimeError
            Rows are reserved.

        Notes
        -----
        When it raises, no row was appended.
        """
        cdef um.um_error err
        cdef cnp.ndarray ka = _contiguous(k), va = _contiguous(v)
        cdef cnp.npy_intp *ks = cnp.PyArray_DIMS(ka)
        cdef cnp.npy_intp *vs = cnp.PyArray_DIMS(va)
        cdef int n_dims = cnp.PyArray_NDIM(ka), number = _float_of(ka)
        cdef um.um_kv_spec *s = &self.kv.spec
        cdef um.um_kv_order order
        cdef um.um_status status
        cdef uint64_t n
        cdef uint32_t index
        cdef bint fits
        if self._closed or self.tape._region is None:
            self.check_open()
        index = self._checked_layer(layer)
        if n_dims == 3 and s.batch == 1:
            order = um.UM_KV_TOKEN_MAJOR
            n = ks[0]
            fits = ks[1] == s.n_kv_heads and ks[2] == s.head_dim
        else:
            order = um.UM_KV_HEAD_MAJOR
            fits = (n_dims == 4 and ks[0] == s.batch and ks[1] == s.n_kv_heads
                    and ks[3] == s.head_dim)
            n = ks[2] if fits else 0
        fits = (fits and cnp.PyArray_NDIM(va) == n_dims
                and cnp.PyArray_CompareLists(ks, vs, n_dims))
        if not fits:
            raise ValueError(
                f"KVCache.append: expected k and v of one shape, {self._shapes()}, got {k.shape} "
                f"and {v.shape}")
        if _float_of(va) != number:
            raise TypeError("KVCache.append: expected k and v of one dtype, got "
                            f"{k.dtype} and {v.dtype}")
        if n > 64:
            with nogil:
                status = um.um_kv_append(&self.kv, index, cnp.PyArray_DATA(ka),
                                         cnp.PyArray_DATA(va), <um.um_float>number, order, n, &err)
        else:
            # Giving the GIL up and taking it again costs more than copying a few rows.
            status = um.um_kv_append(&self.kv, index, cnp.PyArray_DATA(ka), cnp.PyArray_DATA(va),
                                     <um.um_float>number, order, n, &err)
        if status != um.UM_OK:
            self.fail(&err, "append")

    def _shapes(self):
        s = self.kv.spec
        always = f"[{s.batch}, {s.n_kv_heads}, n, {s.head_dim}]"
        return f"[n, {s.n_kv_heads}, {s.head_dim}] or {always}" if s.batch == 1 else always

    def append_all(self, k, v):
        """Append one token to all layers (batch 1).

        Parameters
        ----------
        k, v : numpy.ndarray
            ``[n_layers, n_kv_heads, head_dim]``, float32 or float16.

        Raises
        ------
        CacheFull, ValueError, TypeError, RuntimeError
            As `append`; RuntimeError also when layers differ in length.
        """
        cdef um.um_error err
        cdef cnp.ndarray ka = _contiguous(k), va = _contiguous(v)
        cdef int number = _float_of(ka)
        self.check_open()
        expected = (self.kv.spec.n_layers, self.kv.spec.n_kv_heads, self.kv.spec.head_dim)
        if k.shape != expected or v.shape != expected:
            raise ValueError(f"KVCache.append_all: expected k and v of shape {expected}, got "
                             f"{k.shape} and {v.shape}")
        if _float_of(va) != number:
            raise TypeError("KVCache.append_all: expected k and v of one dtype, got "
                            f"{k.dtype} and {v.dtype}")
        if um.um_kv_append_all(&self.kv, cnp.PyArray_DATA(ka), cnp.PyArray_DATA(va),
                               <um.um_float>number, &err) != um.UM_OK:
            self.fail(&err, "append_all")

    cdef object _view(self, uint32_t layer, bint v, uint64_t n):
        s = self.kv.spec
        whole = array_over(um.um_kv_part(&self.kv, layer, v),
                           (s.batch, s.max_seq_len, s.n_kv_heads, s.head_dim), self._numpy_dtype,
                           self.tape._region, True)
        return whole[:, :n].transpose(0, 2, 1, 3)

    def layer(self, i, dtype=None, out=None):
        """View the tokens that one layer holds.

        Parameters
        ----------
        i : int
            Which layer.
        dtype : dtype-like, optional
            Converted copies in this dtype instead of views.
        out : tuple of numpy.ndarray, optional
            Where the converted copies go: two arrays of the view's shape and of `dtype`.

        Returns
        -------
        k, v : numpy.ndarray
            ``[batch, n_kv_heads, n, head_dim]`` with the n tokens that this layer holds now; views
            do not grow, and stay valid until their rows are written anew.

        Raises
        ------
        ValueError
            A wrong layer, or an `out` of another shape or dtype.
        """
        self.check_open()
        layer = self._checked_layer(i)
        n = um.um_kv_layer_len(&self.kv, layer)
        views = self._view(layer, False, n), self._view(layer, True, n)
        if dtype is None:
            if out is not None:
                raise ValueError("out: expected together with dtype")
            return views
        if out is None:
            return tuple(view.astype(dtype, order="C") for view in views)
        for view, target in zip(views, out, strict=True):
            if target.shape != view.shape or target.dtype != np.dtype(dtype):
                raise ValueError(f"out: expected two arrays of shape {view.shape} and dtype "
                                 f"{np.dtype(dtype)}, got {target.shape} and {target.dtype}")
        for view, target in zip(views, out, strict=True):
            np.copyto(target, view, casting="unsafe")
        return out

    def address(self, layer, part):
        """Return where a layer's K or V begins, for an engine that writes rows itself.

        Parameters
        ----------
        layer : int
            Which layer.
        part : {"k", "v"}
            Which part.

        Returns
        -------
        int
            Row r of the first stream begins `row_bytes` times r behind it. It never changes.
        """
        self.check_open()
        if part not in ("k", "v"):
            raise ValueError(f"part: expected 'k' or 'v', got {part!r}")
        return <uintptr_t>um.um_kv_part(&self.kv, self._checked_layer(layer), part == "v")

    def reserve(self, n):
        """Reserve n rows in every layer, to be written by the caller.

        Returns
        -------
        int
            The first row. The tokens are seen only after `commit`.

        Raises
        ------
        CacheFull
            There is no room.
        RuntimeError
            Rows are reserved already, or layers differ in length.
        """
        cdef um.um_error err
        cdef uint64_t row
        self.check_open()
        if um.um_kv_reserve(&self.kv, size_of(n, "n"), &row, &err) != um.UM_OK:
            self.fail(&err, "reserve")
        return row

    def commit(self, n):
        """Make the first n reserved rows tokens of all layers at once; the rest is dropped.

        Raises
        ------
        RuntimeError
            Nothing is reserved.
        ValueError
            More than was reserved.
        """
        cdef um.um_error err
        self.check_open()
        if um.um_kv_commit(&self.kv, size_of(n, "n"), &err) != um.UM_OK:
            self.fail(&err, "commit")

    def rollback(self):
        """Drop what is reserved, and tokens that not all layers hold."""
        self.check_open()
        um.um_kv_rollback(&self.kv)

    def crop(self, n):
        """Keep the first n tokens.

        Raises
        ------
        ValueError
            There are fewer.
        RuntimeError
            Rows are reserved, or layers differ in length.
        """
        cdef um.um_error err
        self.check_open()
        if um.um_kv_crop(&self.kv, size_of(n, "n"), &err) != um.UM_OK:
            self.fail(&err, "crop")

    def clear(self):
        """Forget all tokens, and what is reserved. The memory stays."""
        self.check_open()
        um.um_kv_clear(&self.kv)

    @property
    def seq_len(self):
        """Tokens that all layers hold."""
        self.check_open()
        return um.um_kv_seq_len(&self.kv)

    @property
    def next_position(self):
        """The position of the next token."""
        return self.seq_len

    @property
    def is_empty(self):
        """Whether there is no token."""
        return self.seq_len == 0

    @property
    def n_layers(self):
        """Layers."""
        return self.kv.spec.n_layers

    @property
    def n_kv_heads(self):
        """KV heads of a layer."""
        return self.kv.spec.n_kv_heads

    @property
    def head_dim(self):
        """Elements of a head."""
        return self.kv.spec.head_dim

    @property
    def batch(self):
        """Streams."""
        return self.kv.spec.batch

    @property
    def max_seq_len(self):
        """Tokens that fit."""
        return self.kv.spec.max_seq_len

    @property
    def row_bytes(self):
        """Bytes of one token's K (or V) in one layer of one stream."""
        return self.kv.row_bytes

    @property
    def memory_usage_bytes(self):
        """Bytes of the tokens that are there, over all layers, K and V."""
        self.check_open()
        cdef uint64_t rows = 0
        for layer in range(self.kv.spec.n_layers):
            rows += um.um_kv_layer_len(&self.kv, layer)
        return 2 * rows * self.kv.spec.batch * self.kv.row_bytes

    @property
    def capacity_bytes(self):
        """Bytes of the storage."""
        return self._storage_bytes

    @property
    def resident_bytes(self):
        """Bytes of the storage that are in RAM, in whole pages."""
        self.check_open()
        start = <uintptr_t>self.kv.base - <uintptr_t>self.tape._region.block.base
        return self.tape.block._resident_range(start, self._storage_bytes)

    @property
    def closed(self):
        """Whether the cache was closed."""
        return self._closed or self.tape.closed

    def warm(self, threads=None):
        """Bring the storage into RAM, as `Block.warm`."""
        self.check_open()
        start = <uintptr_t>self.kv.base - <uintptr_t>self.tape._region.block.base
        self.tape.block._warm_range(start, self._storage_bytes, threads)

    def close(self):
        """Close the cache; storage on a tape of its own is given back.

        Raises
        ------
        BufferError
            Views still use it; nothing is closed then.
        """
        if self._closed:
            return
        if self._owns_tape:
            self.tape.close()
        self._closed = True

    def __enter__(self):
        self.check_open()
        return self

    def __exit__(self, *exc_info):
        # Views that are still alive keep the memory; it goes with the last of them.
        self._closed = True
        if self._owns_tape:
            self.tape.__exit__()

    def __reduce__(self):
        raise TypeError("a KVCache cannot be pickled: it is memory of this process. "
                        "Save the arrays of layer(i)")

    def __len__(self):
        return self.seq_len

    def __repr__(self):
        if self.closed:
            return "KVCache(closed)"
        s = self.kv.spec
        batch = f", batch {s.batch}" if s.batch > 1 else ""
        return (f"KVCache({self.seq_len} of {s.max_seq_len} tokens, {s.n_layers} layers, "
                f"{s.n_kv_heads} heads of {s.head_dim} {self.dtype}{batch}, "
                f"{format_bytes(self.capacity_bytes)})")
