# cython: language_level=3, boundscheck=False, wraparound=False, nonecheck=True
"""Paged KV memory: sequences that share blocks of tokens.

      pool      | block 0 | block 1 | block 2 | block 3 | ...     K and V of 16 tokens, all layers
      sequence  table [2, 0, 3]          40 tokens: block 3, its tail, is not full
      fork      table [2, 0, 3]          shares all blocks until one of both appends

A block is free, held by sequences, or cached: its token ids are known, no sequence holds it, and it
waits to be found again or evicted. `PrefixIndex` finds cached blocks by their tokens.
"""
import warnings

import numpy as np

from unimem.errors import CacheFull, ClosedError
from unimem.base.arguments import flag, string
from unimem.base.text import format_bytes
from unimem.kv.cache_html import paged_html
from unimem.kv.prefix import PrefixIndex
from unimem.kv.token_ids import token_ids
from unimem.system.placement import check_placement

cimport cython
cimport numpy as cnp
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy

from unimem._core cimport native as um
from unimem._core.arrays cimport new_array, size_of
from unimem._core.block cimport Block
from unimem.kv.inputs cimport (
    Given, check_token, check_tokens, contiguous, layer_number, out_type, pair_of, units,
)
from unimem.kv.types cimport check_head_dim, kv_types, number_of_type, numpy_type
from unimem._core.region cimport Region, enter_holder, new_window, n_references
from unimem._core.status cimport raise_status

#: from collections.abc import Sequence as AnySequence
#: from unimem._core.foreign import AnyArray
#: from unimem.kv.types import DType
#: from unimem.system.placement import Placement, PlacementOptions
#: _Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]
#: _ArrayT = TypeVar("_ArrayT", bound=AnyArray)

cnp.import_array()

# Releasing the interpreter's lock costs more than copying this many rows.
cdef uint64_t MANY_ROWS = 64
cdef size_t ID_BYTES = sizeof(int32_t)


cdef class PagedKVCache:
    """A pool of blocks of tokens, K and V of all layers, for many sequences.

    A sequence is a table of blocks. Forked sequences share their blocks, and so do sequences that
    begin with the same tokens, if their ids are known (`sequence`, `Sequence.extend`). A shared
    block is copied before it is written. A block whose ids are known stays in the pool after its
    last sequence, until its memory is needed; the block released first is evicted first.

    One thread writes (makes sequences, appends, forks, crops, closes); other threads may gather
    from a sequence meanwhile, unless it is cropped or closed. Any thread may drop a sequence. A
    forked process has its own copy. A page faults with its first token, unless ``warm=True`` or
    `warm` has touched it.

    Parameters
    ----------
    n_layers, n_kv_heads, head_dim : int
        The model's dimensions.
    n_blocks : int
        Blocks in the pool, all taken at once.
    block_tokens : int, default 16
        Tokens of a block.
    dtype : {"f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"}
        The stored type, as for `KVCache`. A pair such as ``"q8_0,q4_0"`` names those of K and V.
    k_dtype, v_dtype : str, optional
        The types of K and V, if they differ from `dtype`.
    prefix_cache : bool, default True
        Whether to find blocks by their tokens.
    name : str, optional
        Its name in messages.
    **placement
        See `PlacementOptions`.

    Attributes
    ----------
    block : Block or None
        What the pool lies on; None when closed.
    dtype, v_dtype : str
        The types of K and V, such as ``"f16"``.
    name : str
        Its name in messages.

    Raises
    ------
    ValueError
        A dimension below 1, an unknown dtype, or sizes whose product is too large.
    MemoryError, PlacementError
        As `Block`.

    Examples
    --------
    >>> import numpy as np
    >>> import unimem as um
    >>> prompt = list(range(40))
    >>> with um.PagedKVCache(1, 2, 8, n_blocks=8) as pg:
    ...     with pg.sequence(prompt) as first:
    ...         first.append(0, np.ones((40, 2, 8), "f4"), np.ones((40, 2, 8), "f4"))
    ...     with pg.sequence(prompt) as second:
    ...         second.n_cached, pg.n_blocks_in_use
    (32, 2)
    """
    #: block: Block | None
    #: dtype: DType
    #: v_dtype: DType

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int, *, n_blocks: int,
                 block_tokens: int = 16, dtype: npt.DTypeLike = "f16",
                 k_dtype: npt.DTypeLike | None = None, v_dtype: npt.DTypeLike | None = None,
                 prefix_cache: bool = True, name: str | None = None,
                 **placement: Unpack[PlacementOptions]) -> None:
        cdef um.um_error err
        cdef um.um_paged_spec spec
        cdef size_t nbytes
        # A flag, set first: converting the arguments may call this again.
        if self._begun:
            raise RuntimeError("the PagedKVCache is made already")
        self._begun = True
        check_placement("PagedKVCache", placement)
        cdef bint has_index = flag(prefix_cache, "prefix_cache")
        self.dtype, self.v_dtype = kv_types(dtype, k_dtype, v_dtype)
        for what, n in (("n_layers", n_layers), ("n_kv_heads", n_kv_heads), ("head_dim", head_dim),
                        ("n_blocks", n_blocks), ("block_tokens", block_tokens)):
            if size_of(n, what, 1) >= 2**31 - 1:
                raise ValueError(f"{what}: expected at most 2**31 - 2, got {n}")
        check_head_dim(self.dtype, head_dim)
        check_head_dim(self.v_dtype, head_dim)
        spec.n_layers, spec.n_kv_heads, spec.head_dim = n_layers, n_kv_heads, head_dim
        spec.n_blocks, spec.block_tokens = n_blocks, block_tokens
        spec.type, spec.v_type = number_of_type(self.dtype), number_of_type(self.v_dtype)
        self._given = spec.type if spec.type == spec.v_type else um.UM_F32
        self.name = string(name, "name", "paged")
        if um.um_paged_storage_bytes(&spec, &nbytes, &err) != um.UM_OK:
            self.fail(&err)
        self._dtype, self._v_dtype = numpy_type(spec.type), numpy_type(spec.v_type)
        cdef Block block = Block(nbytes, name=self.name, category="kv", **placement)
        block._is_part = True
        cdef Region region = block.region()
        index = PrefixIndex() if has_index else None
        if um.um_paged_init(&self.paged, &spec, region.block.base, &err) != um.UM_OK:
            self.fail(&err)
        self.block, self._region, self._index = block, region, index
        enter_holder(self)

    def __dealloc__(self):
        # Sequences hold the cache, and go before it.
        um.um_paged_free(&self.paged)

    cdef object fail(self, um.um_error *err):
        raise_status(err.status, err, f"PagedKVCache '{self.name}'", CacheFull, "blocks")

    @cython.final
    cdef uint32_t most_in_use(self) noexcept:
        return max(self._most_in_use, um.um_paged_n_in_use(&self.paged))

    @cython.critical_section
    def _ledger_parts(self):
        cdef Region region = self._region
        cdef size_t size = self.paged.block_bytes
        if region is None:
            return ()
        return (("kv", <uintptr_t>region.block.base, region.memory_bytes(),
                 um.um_paged_n_in_use(&self.paged) * size, self.most_in_use() * size),)

    cdef Region open_region(self):
        if self._region is None:
            raise ClosedError(f"PagedKVCache '{self.name}' is closed")
        return self.block.region()

    @cython.critical_section
    def sequence(self, tokens: AnySequence[int] | npt.NDArray[Any] = ()) -> Sequence:
        """Make a sequence, which begins with the cached blocks that hold its first tokens.

        Parameters
        ----------
        tokens : sequence of int
            The ids of its first tokens, as far as they are known, from 0 to 2**31 - 1.

        Returns
        -------
        Sequence
            `n_cached` is the number of tokens that it already has: whole blocks, and never all of
            `tokens`, since the last one has to be computed to continue. Append the other tokens;
            they are then cached.

        Raises
        ------
        ValueError, TypeError
            `tokens` are not token ids.
        """
        cdef um.um_error err
        cdef Sequence s = Sequence.__new__(Sequence)
        cdef bytes ids = token_ids(tokens).tobytes()
        cdef list found = []
        cdef int32_t[::1] blocks
        cdef uint32_t n = 0
        self.open_region()
        size = self.paged.spec.block_tokens * ID_BYTES
        if self._index is not None:
            found = self._index.find(
                self, [ids[i:i + size] for i in range(0, len(ids) - size, size)])
        blocks = np.empty(len(found) + 1, np.int32)
        for node in found:  # some may be evicted by now; from here on no other thread runs
            blocks[n] = node.block
            if not um.um_paged_is_cached(&self.paged, <uint32_t>blocks[n]):
                break
            n += 1
        if um.um_paged_seq_init(&s.seq, &self.paged, &blocks[0], n, &err) != um.UM_OK:
            self.fail(&err)
        s.cache, s._ids, s._n_indexed = self, bytearray(ids), n
        s.n_cached = n * self.paged.spec.block_tokens
        if self._index is not None:
            s._node = found[n - 1] if n else self._index.root
        return s

    # ---- for unimem.kv.prefix ----

    def _is_cached(self, uint32_t block) -> bool:
        return um.um_paged_is_cached(&self.paged, block)

    def _cache(self, uint32_t block) -> None:
        cdef um.um_error err
        if um.um_paged_cache(&self.paged, block, &err) != um.UM_OK:
            self.fail(&err)

    def _uncache(self, uint32_t block) -> None:
        um.um_paged_uncache(&self.paged, block)

    def _n_holders(self, uint32_t block) -> int:
        return um.um_paged_n_holders(&self.paged, block)

    # ---- the pool ----

    cdef object _view(self, Region region, uint32_t layer, bint v):
        cdef um.um_paged_spec *s = &self.paged.spec
        cdef object kind = self._v_dtype if v else self._dtype
        cdef size_t item = kind.itemsize, head = (
            self.paged.v_head_bytes if v else self.paged.head_bytes)
        cdef char *data = <char *>um.um_paged_lane(&self.paged, 0, layer, v)
        cdef cnp.npy_intp *sizes = [s.n_blocks, s.block_tokens, s.n_kv_heads, head // item]
        cdef cnp.npy_intp *strides = [self.paged.block_bytes, head, s.block_tokens * head, item]
        window = new_window(region, data - <char *>region.block.base,
                            (s.n_blocks - 1) * self.paged.block_bytes
                            + head * s.block_tokens * s.n_kv_heads)
        return new_array(data, 4, sizes, strides, kind, window, True)

    @cython.critical_section
    def layer(self, i: int) -> _Pair:
        """View K and V of a layer in all blocks, as kernels with block tables take them.

        Parameters
        ----------
        i : int
            The layer's number.

        Returns
        -------
        k, v : numpy.ndarray
            ``[n_blocks, block_tokens, n_kv_heads, head_dim]`` without a copy, with strides: a block
            holds the tokens of one head side by side. Elements of a quantized type are blocks of 32
            values, as `KVCache.layer` shows them.

        Raises
        ------
        ValueError
            A wrong layer.
        """
        layer = layer_number(i, self.paged.spec.n_layers, "i")
        cdef Region region = self.open_region()
        return self._view(region, layer, False), self._view(region, layer, True)

    @property
    def n_blocks(self) -> int:
        """Blocks in the pool."""
        return self.paged.spec.n_blocks

    @property
    @cython.critical_section
    def n_blocks_in_use(self) -> int:
        """Blocks that sequences hold."""
        self.open_region()
        return um.um_paged_n_in_use(&self.paged)

    @property
    @cython.critical_section
    def n_blocks_available(self) -> int:
        """Blocks that can be taken: free ones, and cached ones that no sequence holds."""
        self.open_region()
        return self.paged.n_free + self.paged.n_evictable

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.paged.spec.block_tokens

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: K and V of its tokens in all layers, rounded up to 64."""
        return self.paged.block_bytes

    @property
    def n_layers(self) -> int:
        """Layers."""
        return self.paged.spec.n_layers

    @property
    def n_kv_heads(self) -> int:
        """KV heads of a layer."""
        return self.paged.spec.n_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.paged.spec.head_dim

    @property
    def memory_usage_bytes(self) -> int:
        """Bytes of the blocks that sequences hold."""
        return self.n_blocks_in_use * self.paged.block_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.paged.spec.n_blocks * self.paged.block_bytes

    @property
    @cython.critical_section
    def resident_bytes(self) -> int:
        """Bytes of the pool that are in RAM, in whole pages (Pss)."""
        self.open_region()
        return self.block.verify().pss_bytes

    @property
    @cython.critical_section
    def granted(self) -> Placement:
        """The placement of the pool's memory, as the kernel reports it."""
        self.open_region()
        return self.block.granted

    def warm(self, threads: int | None = None) -> None:
        """Bring the pool into RAM, as `Block.warm` does."""
        self.open_region()
        self.block.warm(threads)

    @cython.critical_section
    def give_back(self) -> int:
        """Give back the memory of blocks that no sequence holds, and forget prefixes cached there.

        Any thread may call it. The blocks stay in the pool: their pages return when written to.

        Returns
        -------
        int
            The bytes of RAM that were given back; 0 if the cache is closed, or if the memory is
            locked or in hugetlb pages, and the prefixes stay.
        """
        cdef um.um_error err
        cdef uint32_t first, block = 0
        cdef size_t size = self.paged.block_bytes
        cdef Region region = self._region
        cdef Block held = self.block
        # Discarding no bytes tells whether the memory can be discarded.
        if region is None or um.um_block_discard(&region.block, 0, 0, NULL, &err) != um.UM_OK:
            return 0
        before = held.verify().pss_bytes
        if self._region is None:
            return 0  # another thread may have run meanwhile; from here on none does
        while block < self.paged.spec.n_blocks:
            first = block
            while (block < self.paged.spec.n_blocks
                   and um.um_paged_n_holders(&self.paged, block) == 0):
                um.um_paged_uncache(&self.paged, block)
                block += 1
            if um.um_block_discard(&region.block, first * size, (block - first) * size, NULL,
                                   &err) != um.UM_OK:
                raise_status(err.status, &err, f"PagedKVCache '{self.name}'")
            block += 1
        self._most_in_use = self.most_in_use()
        return max(0, before - held.verify().pss_bytes)

    @property
    def closed(self) -> bool:
        """Whether the cache was closed."""
        return self._region is None

    @cython.critical_section
    def close(self) -> None:
        """Close the cache and give its memory back; its sequences can no longer be used.

        Raises
        ------
        BufferError
            Views still use it, or another thread gathers from it; it stays open.
        """
        if self._region is None:
            return
        # The cache and its block hold the region; other references are views or copy.
        n_views = n_references(<PyObject *>self._region) - 2
        if n_views > 0:
            raise BufferError(f"PagedKVCache '{self.name}' has {n_views} live views: drop them "
                              "first, or leave a 'with'")
        self._release()

    def _release(self):
        block, self.block, self._region, self._index = self.block, None, None, None
        if block is not None:
            block.__exit__()

    def __enter__(self) -> Self:
        self.open_region()
        return self

    @cython.critical_section
    def __exit__(self, *exc_info: object) -> None:
        self._release()

    def __del__(self):
        if self._region is not None:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def __reduce__(self):
        raise TypeError("a PagedKVCache cannot be pickled: it is memory of this process. "
                        "Save what Sequence.gather returns")

    def __repr__(self):
        s = self.paged.spec
        if self._region is None:
            return f"PagedKVCache('{self.name}', closed)"
        types = self.dtype if self.dtype == self.v_dtype else f"{self.dtype} and {self.v_dtype}"
        return (f"PagedKVCache('{self.name}', {self.n_blocks_in_use} of {s.n_blocks} blocks of "
                f"{s.block_tokens} tokens, {s.n_layers} layers, {s.n_kv_heads} heads of "
                f"{s.head_dim} {types}, {format_bytes(self.capacity_bytes)})")

    _repr_html_ = paged_html


@cython.no_gc_clear
cdef class Sequence:
    """The tokens of one conversation in the blocks of a `PagedKVCache`.

    `PagedKVCache.sequence` and `fork` make it. A token counts (``len``) once every layer holds it.

    Attributes
    ----------
    cache : PagedKVCache
        The cache whose blocks it uses.
    n_cached : int
        The tokens that it, or the sequence it was forked from, took from the prefix cache.
    """

    def __init__(self):
        raise TypeError("a Sequence is made by PagedKVCache.sequence()")

    def __dealloc__(self):
        # Any thread may drop a sequence, which returns its blocks to the pool.
        with cython.critical_section(self.cache):
            self.note_use()
            um.um_paged_seq_free(&self.seq)

    cdef void note_use(self) noexcept:
        if self.cache is not None:
            self.cache._most_in_use = self.cache.most_in_use()

    cdef Region open_region(self):
        if self._closed:
            raise ClosedError(f"the Sequence of PagedKVCache '{self.cache.name}' is closed")
        return self.cache.open_region()

    cdef Region held(self):
        with cython.critical_section(self.cache):
            return self.open_region()

    cdef Region begin(self):
        self.check_idle()
        return self.open_region()

    cdef int check_idle(self) except -1:
        if self._appending:
            raise RuntimeError(f"Sequence of PagedKVCache '{self.cache.name}': another thread "
                               "appends to it: one writes at a time")
        return 0

    cdef int finish(self, const um.um_paged_pending *pending, bint releases) except -1:
        """Write tokens into blocks that were taken, perhaps with the lock released."""
        if releases:
            self._appending = True
            with nogil:
                um.um_paged_append_write(pending)
            self._appending = False
        else:
            um.um_paged_append_write(pending)
        um.um_paged_append_end(pending)
        return 0

    def append(self, layer: int, k: AnyArray, v: AnyArray) -> None:
        """Append tokens to one layer.

        Parameters
        ----------
        layer : int
            The layer's number.
        k, v : array
            Arrays of one shape and dtype, ``[n, n_kv_heads, head_dim]`` or ``[1, n_kv_heads, n,
            head_dim]``; otherwise as for `KVCache.append`.

        Raises
        ------
        CacheFull
            The pool has too few blocks for the tokens, or for the copy of a shared block. The
            error's figures are in blocks.
        ValueError, TypeError
            A wrong layer, shape or dtype.
        RuntimeError
            Another thread appends to this sequence.
        ClosedError

        Notes
        -----
        When it raises, nothing was changed.
        """
        cdef um.um_error err
        cdef um.um_paged_pending pending
        cdef Region _held
        cdef cnp.ndarray ka = contiguous(k, "k"), va = contiguous(v, "v")
        cdef um.um_paged_spec *s = &self.cache.paged.spec
        cdef uint32_t index = layer_number(layer, s.n_layers, "layer")
        cdef Given given
        cdef bint releases
        check_tokens(&given, ka, va, self.cache._given, 1, s.n_kv_heads, s.head_dim, s.head_dim,
                     "Sequence.append")
        with cython.critical_section(self.cache):
            # Until blocks are taken no other thread runs; later none can close the cache.
            _held = self.begin()
            releases = given.n > MANY_ROWS or um.um_paged_will_copy(&self.seq, index)
            if um.um_paged_append_begin(&pending, &self.seq, index, cnp.PyArray_DATA(ka),
                                        cnp.PyArray_DATA(va), given.type, given.order, given.n,
                                        &err) != um.UM_OK:
                self.cache.fail(&err)
            self.finish(&pending, releases)
            if (um.um_paged_layer_len(&self.seq, index) // s.block_tokens
                    > <uint64_t>self._n_indexed):
                self.index_blocks()

    def _append_stored(self, layer: int, const uint8_t[:, ::1] k: npt.NDArray[np.uint8],
                       const uint8_t[:, ::1] v: npt.NDArray[np.uint8]) -> None:
        """Append rows ``[n, row bytes]`` of the stored type to one layer; for kv.store."""
        cdef um.um_error err
        cdef um.um_paged_pending pending
        cdef um.um_paged *p = &self.cache.paged
        cdef size_t heads = p.spec.n_kv_heads, n = len(k)
        cdef uint32_t index = layer_number(layer, p.spec.n_layers, "layer")
        cdef Region _held
        if len(v) != n or k.nbytes != n * heads * p.head_bytes or v.nbytes != (
                n * heads * p.v_head_bytes):
            raise ValueError("rows: expected those of as many tokens of K and of V")
        with cython.critical_section(self.cache):
            _held = self.begin()
            if um.um_paged_append_stored_begin(&pending, &self.seq, index, &k[0, 0] if n else NULL,
                                               &v[0, 0] if n else NULL, um.UM_KV_TOKEN_MAJOR, n,
                                               &err) != um.UM_OK:
                self.cache.fail(&err)
            self.finish(&pending, True)
            self.index_blocks()

    def append_all(self, k: AnyArray, v: AnyArray) -> None:
        """Append one token to all layers.

        Parameters
        ----------
        k, v : array
            ``[n_layers, n_kv_heads, head_dim]``, float32, float16 or bfloat16; otherwise as for
            `append`.

        Raises
        ------
        CacheFull, ValueError, TypeError, RuntimeError, ClosedError
            As `append`; RuntimeError also if layers differ in length.
        """
        cdef um.um_error err
        cdef um.um_paged_pending pending
        cdef Region _held
        cdef cnp.ndarray ka = contiguous(k, "k"), va = contiguous(v, "v")
        cdef um.um_paged_spec *s = &self.cache.paged.spec
        cdef Given given
        check_token(&given, ka, va, self.cache._given, s.n_layers, s.n_kv_heads, s.head_dim,
                    s.head_dim, "Sequence.append_all")
        with cython.critical_section(self.cache):
            _held = self.begin()
            if um.um_paged_append_all_begin(&pending, &self.seq, cnp.PyArray_DATA(ka),
                                            cnp.PyArray_DATA(va), given.type, &err) != um.UM_OK:
                self.cache.fail(&err)
            self.finish(&pending, True)
            self.index_blocks()

    def extend(self, ids: AnySequence[int] | npt.NDArray[Any]) -> None:
        """Tell the ids of the next tokens without known ids, appended or not.

        `PagedKVCache.sequence` finds blocks whose ids are known.

        Parameters
        ----------
        ids : sequence of int
            From 0 to 2**31 - 1.

        Raises
        ------
        ValueError, TypeError
            `ids` are not token ids.
        ClosedError
        """
        cdef bytes told = token_ids(ids, "ids").tobytes()
        with cython.critical_section(self.cache):
            self.open_region()
            self._ids += told
            self.index_blocks()

    def _told_ids(self) -> npt.NDArray[np.int32]:
        """Return the known ids of its first tokens, int32; for kv.store."""
        with cython.critical_section(self.cache):
            self.open_region()
            return np.frombuffer(bytes(self._ids), np.int32)

    cdef int index_blocks(self) except -1:
        """Cache the full blocks whose ids are known."""
        cdef Py_ssize_t size = self.cache.paged.spec.block_tokens * ID_BYTES
        cdef Py_ssize_t n_known = len(self._ids) // size, n_full
        index = self.cache._index
        if index is None or n_known <= self._n_indexed:
            return 0
        n_full = um.um_paged_seq_len(&self.seq) // self.cache.paged.spec.block_tokens
        while self._n_indexed < min(n_known, n_full):
            at = self._n_indexed * size
            node = index.add(self.cache, self._node, bytes(self._ids[at:at + size]),
                             self.seq.table[self._n_indexed])
            if node is not None:
                self._node = node
                self._n_indexed += 1
            elif index.holds(self._node):
                break  # another block has the hash
            else:
                # Other blocks with the same tokens were evicted: now its own blocks are cached.
                self._node, self._n_indexed = index.root, 0
        return 0

    def fork(self) -> Sequence:
        """Make a sequence with the same tokens, which shares all blocks.

        It costs a copy of the block table. A tail block that is not full is copied by the sequence
        that appends to it first.

        Returns
        -------
        Sequence

        Raises
        ------
        RuntimeError
            Layers differ in length, or another thread appends to this sequence.
        ClosedError
        """
        cdef um.um_error err
        cdef Sequence s = Sequence.__new__(Sequence)
        with cython.critical_section(self.cache):
            self.begin()
            if um.um_paged_seq_fork(&s.seq, &self.seq, &err) != um.UM_OK:
                self.cache.fail(&err)
            s.cache, s.n_cached = self.cache, self.n_cached
            s._ids, s._node, s._n_indexed = self._ids[:], self._node, self._n_indexed
            return s

    def crop(self, n: int) -> None:
        """Keep the first n tokens and their ids, and return the blocks behind them to the pool.

        Raises
        ------
        ValueError
            There are fewer tokens.
        RuntimeError
            Layers differ in length, or another thread appends to this sequence.
        ClosedError
        """
        cdef um.um_error err
        cdef uint64_t kept = size_of(n, "n")
        with cython.critical_section(self.cache):
            self.begin()
            self.note_use()
            if um.um_paged_crop(&self.seq, kept, &err) != um.UM_OK:
                if err.status == um.UM_E_INVALID:
                    raise ValueError(f"Sequence.crop: expected n of at most {len(self)}, the "
                                     f"tokens that are there, got {n}")
                self.cache.fail(&err)
            del self._ids[kept * ID_BYTES:]
            while self._n_indexed > <Py_ssize_t>(kept // self.cache.paged.spec.block_tokens):
                self._node = self._node.parent
                self._n_indexed -= 1

    def rollback(self) -> None:
        """Drop tokens that not all layers hold. Their ids stay.

        Raises
        ------
        RuntimeError
            Another thread appends to this sequence.
        ClosedError
        """
        with cython.critical_section(self.cache):
            self.begin()
            self.note_use()
            um.um_paged_rollback(&self.seq)

    #: @overload
    #: def gather(self, layer: int, out: None = None) -> _Pair: ...
    #: @overload
    #: def gather(self, layer: int, out: tuple[_ArrayT, _ArrayT]) -> tuple[_ArrayT, _ArrayT]: ...
    def gather(self, layer, out=None):
        """Copy the tokens that a layer holds to contiguous memory.

        Parameters
        ----------
        layer : int
            The layer's number.
        out : tuple of array, optional
            Two arrays of any library for K and V, of the shape below. They may be parts of larger
            arrays as long as the tokens of a head are contiguous. Their dtype is float32, float16
            or bfloat16, converted to if need be, or the stored type.

        Returns
        -------
        k, v : numpy.ndarray
            ``[n_kv_heads, n, head_dim]`` with the n tokens that this layer holds now: `out`, or new
            arrays of the stored type. Elements of a quantized type are
            ``[n_kv_heads, n, head_dim / 32]`` blocks.

        Raises
        ------
        ValueError, TypeError
            A wrong layer, or an `out` that does not fit.
        ClosedError
        """
        cdef um.um_error err
        cdef um.um_status status
        cdef um.um_paged_spec *s = &self.cache.paged.spec
        cdef uint32_t index = layer_number(layer, self.cache.paged.spec.n_layers, "layer")
        # No other thread can close the cache while the lock is released.
        cdef Region _held = self.held()
        cdef uint64_t n = um.um_paged_layer_len(&self.seq, index)
        cdef um.um_dtype k_type, v_type
        cdef cnp.ndarray k, v
        if out is None:
            out = (np.empty((s.n_kv_heads, n, units(s.type, s.head_dim)), self.cache._dtype),
                   np.empty((s.n_kv_heads, n, units(s.v_type, s.head_dim)), self.cache._v_dtype))
        out, (k_out, v_out) = pair_of(out)
        k_type = out_type(k_out, s.type, s.n_kv_heads, n, s.head_dim)
        v_type = out_type(v_out, s.v_type, s.n_kv_heads, n, s.head_dim)
        k, v = k_out, v_out
        with nogil:
            status = um.um_paged_gather(&self.seq, index, 0, n, cnp.PyArray_DATA(k),
                                        cnp.PyArray_STRIDES(k)[0], k_type, &err)
            if status == um.UM_OK:
                status = um.um_paged_gather(&self.seq, index, 1, n, cnp.PyArray_DATA(v),
                                            cnp.PyArray_STRIDES(v)[0], v_type, &err)
        if status != um.UM_OK:
            self.cache.fail(&err)
        return out

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """The numbers of its blocks in the order of the tokens, as a new int32 array."""
        cdef cnp.ndarray table
        with cython.critical_section(self.cache):
            self.open_region()
            table = np.empty(self.seq.n_blocks, np.int32)
            memcpy(cnp.PyArray_DATA(table), self.seq.table, cnp.PyArray_NBYTES(table))
            return table

    @property
    def closed(self) -> bool:
        """Whether the sequence, or its cache, was closed."""
        return self._closed or self.cache.closed

    def close(self) -> None:
        """Return the blocks to the pool. Closing twice is no error.

        Raises
        ------
        RuntimeError
            Another thread appends to this sequence; it stays open.
        """
        with cython.critical_section(self.cache):
            if not self._closed and self.cache is not None:
                self.check_idle()
                self._closed = True
                self.note_use()
                um.um_paged_seq_clear(&self.seq)
                self._ids = self._node = None

    def __enter__(self) -> Self:
        self.held()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self):
        if self.cache is not None and not self.closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, stacklevel=1, source=self)

    def __reduce__(self):
        raise TypeError("a Sequence cannot be pickled: it is memory of this process. "
                        "Save what gather() returns")

    def __len__(self) -> int:
        self.held()
        return um.um_paged_seq_len(&self.seq)

    def __repr__(self):
        if self.closed:
            return f"Sequence('{self.cache.name}', closed)"
        return f"Sequence('{self.cache.name}', {len(self)} tokens, {self.seq.n_blocks} blocks)"
