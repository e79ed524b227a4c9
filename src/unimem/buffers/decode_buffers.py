"""The buffers of a forward pass: named arrays that are taken once and never move, on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, NoReturn, SupportsIndex, TypeVar, Unpack

import numpy as np
import numpy.typing as npt

from unimem._core.arrays import as_dtype
from unimem._core.tape import Tape
from unimem.base.arguments import flag, integer, string
from unimem.buffers.buffer_plan import BufferPlan, BufferUse
from unimem.buffers.buffer_set import (
    BufferSet,
    Spec,
    check_dims,
    pack,
    refuse_pickling,
    total_bytes,
)
from unimem.models.dims import MAX_SPLITS, ModelDims
from unimem.system.placement import PlacementOptions

A = TypeVar("A")
"""The device's arrays: `numpy.ndarray` or `cupy.ndarray`."""

_DTYPES = ("float16", "bfloat16", "float32")


class DecodeBatch(Generic[A]):
    """Views of `DecodeBuffers` for a batch, by the same names.

    Buffers with a row for each sequence have the shape ``[m, width]`` (pointers, lengths and
    positions ``[m]``). The others have their own: `flash_partial_out` ``[heads, 32, head_dim]``,
    `flash_partial_m` and `flash_partial_l` ``[heads, 32]``, `temp_dequant` ``[hidden, 2 * inter]``,
    `scratch_attn` ``[q_size]``. Threads and forks as for `DecodeBuffers`.
    """

    temp_dequant: A | None

    def __init__(self, buffers: DecodeBufferSet[A], m: int) -> None:
        self.m = m
        self.name = buffers.name
        self._buffers = buffers
        specs = buffers._opened().specs
        if "temp_dequant" not in specs:
            self.temp_dequant = None
        for place in specs:
            self._view(place)

    def _view(self, place: str) -> A:
        """Return the view of a place, which is made once."""
        found: A | None = self.__dict__.get(place)
        if found is None:
            opened = self._buffers._opened()
            flat, spec = opened.array(place), opened.specs[place]
            found = (
                flat.reshape(spec.shape)
                if spec.rows is None
                else flat[: self.m * spec.row_values].reshape((self.m, *spec.shape))
            )
            self.__dict__[place] = found
        return found

    @property
    def residual(self) -> A:
        """The buffer that the next layer reads."""
        return self._view(self._buffers._opened().place("residual"))

    @property
    def post_norm_residual(self) -> A:
        """The buffer that the layer writes."""
        return self._view(self._buffers._opened().place("post_norm_residual"))

    def __getattr__(self, name: str) -> A:
        # Python calls this for missing attributes only.
        buffers = self.__dict__.get("_buffers")
        if buffers is not None and name in buffers._range.specs:
            return self._view(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _drop(self, places: Iterable[str]) -> None:
        for place in places:
            self.__dict__.pop(place, None)

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)


def _dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    found = as_dtype(dtype, _DTYPES)
    return as_dtype(found.name)  # in this machine's byte order


def _decode_specs(dims: ModelDims, dtype: np.dtype[Any]) -> dict[str, Spec]:
    n, hidden, inner = dims.max_batch_size, dims.hidden_size, dims.intermediate_size
    q, kv, heads = dims.q_size, dims.kv_size, dims.num_attention_heads
    widths = {
        "embed_out": hidden,
        "norm_out": hidden,
        "qkv_out": dims.qkv_size,
        "q_rotated": q,
        "k_rotated": kv,
        "rope_q_temp": q,
        "rope_k_temp": kv,
        "attn_out": q,
        "o_proj_out": hidden,
        "residual": hidden,
        "post_norm_out": hidden,
        "post_norm_residual": hidden,
        "gate_up_out": 2 * inner,
        "mlp_act": inner,
        "down_out": hidden,
        "final_norm_out": hidden,
        "logits": dims.vocab_size,
    }
    specs = {name: Spec(n, (width,), dtype) for name, width in widths.items()}
    if dims.quantized:
        specs["temp_dequant"] = Spec(None, (hidden, 2 * inner), dtype)
    f32, i32, u64 = (np.dtype(name) for name in ("float32", "int32", "uint64"))
    return specs | {
        "scratch_attn": Spec(None, (q,), dtype),
        "batched_k_ptrs": Spec(n, (), u64),
        "batched_v_ptrs": Spec(n, (), u64),
        "batched_kv_lens": Spec(n, (), i32),
        "batched_positions": Spec(n, (), i32),
        "flash_partial_out": Spec(None, (heads, MAX_SPLITS, dims.head_dim), f32),
        "flash_partial_m": Spec(None, (heads, MAX_SPLITS), f32),
        "flash_partial_l": Spec(None, (heads, MAX_SPLITS), f32),
    }


class DecodeBufferSet(BufferSet, Generic[A]):
    """The buffers of a decode step on any device; see `DecodeBuffers`."""

    embed_out: A
    norm_out: A
    qkv_out: A
    q_rotated: A
    k_rotated: A
    rope_q_temp: A
    rope_k_temp: A
    attn_out: A
    o_proj_out: A
    post_norm_out: A
    gate_up_out: A
    mlp_act: A
    down_out: A
    final_norm_out: A
    logits: A
    temp_dequant: A | None
    scratch_attn: A
    batched_k_ptrs: A
    batched_v_ptrs: A
    batched_kv_lens: A
    batched_positions: A
    flash_partial_out: A
    flash_partial_m: A
    flash_partial_l: A
    MAX_SPLITS: ClassVar[int] = MAX_SPLITS
    dtype: np.dtype[Any]

    def _make(
        self,
        dims: ModelDims,
        dtype: npt.DTypeLike,
        name: str | None,
        tape: Any,
        new_tape: Callable[[int], Any],
    ) -> None:
        self._begin(dims, string(name, "name", "decode buffers"))
        self.dtype = _dtype(dtype)
        self._batches: dict[int, DecodeBatch[A]] = {}
        specs = _decode_specs(dims, self.dtype)
        if "temp_dequant" not in specs:
            self.temp_dequant = None
        sizes = {name: spec.nbytes for name, spec in specs.items()}
        self._nbytes = total_bytes("decode buffers", sizes)
        self._owns_tape = tape is None
        self._take(
            new_tape(self._nbytes) if tape is None else tape, specs, pack(sizes), self._nbytes
        )

    @property
    def residual(self) -> A:
        """The buffer that the next layer reads."""
        return self._named("residual")

    @property
    def post_norm_residual(self) -> A:
        """The buffer that the layer writes."""
        return self._named("post_norm_residual")

    def _named(self, name: str) -> A:
        array: A = self._array(self._opened().place(name))
        return array

    @staticmethod
    def bytes_needed(dims: ModelDims, dtype: npt.DTypeLike = "float16") -> int:
        """Return the `memory_bytes` of buffers for these dimensions.

        Parameters
        ----------
        dims : ModelDims
            The model.
        dtype : {"float16", "bfloat16", "float32"}
            Type of the activations.

        Returns
        -------
        int

        Raises
        ------
        ValueError, TypeError
            As the class.
        """
        specs = _decode_specs(check_dims(dims), _dtype(dtype))
        return total_bytes("decode buffers", {name: spec.nbytes for name, spec in specs.items()})

    @property
    def memory_bytes(self) -> int:
        """Bytes of all buffers, which is what was taken from the tape."""
        return self._nbytes

    def batch(self, m: SupportsIndex) -> DecodeBatch[A]:
        """Return views for a batch of m sequences, made once for each m.

        Parameters
        ----------
        m : int
            From 1 to ``dims.max_batch_size``.

        Returns
        -------
        DecodeBatch
            The buffers by the same names: ``[m, width]`` if each sequence has a row, and the others
            in their own shapes. `swap_residual` swaps its names too.

        Raises
        ------
        ValueError, TypeError
            m is out of range, or no integer.
        ClosedError
        """
        self._check_open()
        m = integer(m, "m", 1, self.dims.max_batch_size)
        found = self._batches.get(m)
        if found is None:
            found = self._batches[m] = DecodeBatch(self, m)
        return found

    def swap_residual(self) -> None:
        """Exchange the names `residual` and `post_norm_residual`, without a copy.

        A layer reads one and writes the sum into the other; after a swap, the next layer finds its
        input under the same name. No byte moves: `addresses` has the new addresses of the names,
        and earlier views still show the same memory.

        Raises
        ------
        ClosedError

        Notes
        -----
        A captured CUDA graph holds addresses, not names. A step that swaps an even number of times
        ends as it began, and can be captured once and replayed. After an odd number the graph still
        reads the memory that was `residual` when it was captured.
        """
        opened = self._check_open()
        # The names of batches, and `addresses`, follow from this flag.
        opened.is_swapped = not opened.is_swapped

    def _drop(self) -> None:
        for batch in self._batches.values():
            batch._drop(self._range.specs if self._range is not None else ())
        super()._drop()

    def _figures(self) -> str:
        batch = f", batch {self.dims.max_batch_size}" if self.dims.max_batch_size > 1 else ""
        return f"{super()._figures()} of {self.dtype}{batch}"


class DecodeBuffers(DecodeBufferSet[npt.NDArray[Any]]):
    """The 26 buffers of one decode step, taken once, at addresses that never change.

    Each is a flat, uninitialised array by its name. Rows for ``dims.max_batch_size`` sequences lie
    one behind the other; `batch` returns the same with shapes.

    One thread at a time makes a step. A forked child has its own copy, but not of shared memory:
    using that raises ClosedError there.

    Parameters
    ----------
    dims : ModelDims
        The model.
    tape : Tape, optional
        The tape to take the buffers from, such as ``layout.scratch``, where ``keep()`` keeps them;
        by default a tape of their own.
    dtype : {"float16", "bfloat16", "float32"}
        Type of the activations. The partial results of flash decoding are always float32, the
        pointers uint64, lengths and positions int32.
    name : str, optional
        The name in messages.
    **placement
        See `PlacementOptions`; only without `tape`.

    Attributes
    ----------
    dims : ModelDims
        The model's dimensions.
    dtype : numpy.dtype
        Type of the activations.
    tape : Tape
        The tape that holds the buffers.
    name : str
        The name in messages.
    MAX_SPLITS : int
        The most parts of a context that flash decoding reads at once: 32.
    embed_out, norm_out, o_proj_out, residual : numpy.ndarray
        ``[B * hidden]``.
    post_norm_out, post_norm_residual, down_out, final_norm_out : numpy.ndarray
        ``[B * hidden]``.
    qkv_out : numpy.ndarray
        ``[B * (q + 2 * kv)]``.
    q_rotated, rope_q_temp, attn_out : numpy.ndarray
        ``[B * q]``.
    k_rotated, rope_k_temp : numpy.ndarray
        ``[B * kv]``.
    gate_up_out, mlp_act : numpy.ndarray
        ``[B * 2 * inter]`` and ``[B * inter]``.
    logits : numpy.ndarray
        ``[B * vocab]``.
    temp_dequant : numpy.ndarray or None
        ``[hidden * 2 * inter]``; None unless the weights are quantized.
    scratch_attn : numpy.ndarray
        ``[q]``.
    batched_k_ptrs, batched_v_ptrs, batched_kv_lens, batched_positions : numpy.ndarray
        ``[B]``.
    flash_partial_out : numpy.ndarray
        ``[heads * 32 * head_dim]``, float32.
    flash_partial_m, flash_partial_l : numpy.ndarray
        ``[heads * 32]``, float32.

    Raises
    ------
    ValueError, TypeError
        An unknown dtype, too large buffers, or `dims` of another type.
    TapeFull, FrozenError, ClosedError
        As `Tape.take`; nothing was taken then.
    MemoryError, PlacementError
        As `Block`.

    Notes
    -----
    The buffers are one take of exactly `memory_bytes` at a multiple of 256 bytes. They lie one
    behind the other in descending order of the largest power of two, up to 256, that divides their
    sizes, and are aligned to that power. No byte is lost to alignment.

    Examples
    --------
    >>> import unimem as um
    >>> dims = um.ModelDims(64, 176, 8, 4, 8, 512, 5, 512, max_batch_size=4)
    >>> with um.DecodeBuffers(dims) as db:
    ...     two = db.batch(2)
    ...     db.memory_bytes == db.tape.used_bytes, db.qkv_out.shape, two.qkv_out.shape
    (True, (512,), (2, 128))
    """

    def __init__(
        self,
        dims: ModelDims,
        *,
        tape: Tape | None = None,
        dtype: npt.DTypeLike = "float16",
        name: str | None = None,
        **placement: Unpack[PlacementOptions],
    ) -> None:
        if tape is not None:
            Tape._require(tape)
            if placement:
                raise ValueError(
                    f"a tape is placed already: {', '.join(placement)} not accepted beside tape="
                )

        def new_tape(nbytes: int) -> Tape:
            return Tape(nbytes, name=self.name, category="scratch", **placement)

        self._make(dims, dtype, name, tape, new_tape)
        self._enter()


class ForwardScratch(BufferSet):
    """The float32 buffers of a forward pass of one token, and the one vector of logits.

    They are taken once and serve every layer and every token. Only `residual` and `logits` hold
    values from one transformer block to the next.

    One thread at a time makes a pass. A forked child has its own copy, but not of shared memory:
    using that raises ClosedError there.

    Parameters
    ----------
    dims : ModelDims
        The model, for one sequence whatever its `max_batch_size`.
    tape : Tape
        The tape to take the buffers from, such as ``layout.scratch``, where ``keep()`` keeps them.
    overlap : bool, default False
        Let buffers share memory if no step needs them together, by a `BufferPlan` of `USES`.

    Attributes
    ----------
    dims : ModelDims
        The model's dimensions.
    tape : Tape
        The tape that holds the buffers.
    name : str
        The name in messages.
    peak_scratch_bytes : int
        The bytes taken, without the logits: the sum of the buffers or, with `overlap`, their plan's
        total.
    USES : dict
        The first and the last step of a block that needs each buffer.
    residual, normalized, projected, ffn_normalized, ffn_out : numpy.ndarray
        ``[hidden]``.
    q, attention : numpy.ndarray
        ``[q_size]``.
    k, v : numpy.ndarray
        ``[kv_size]``.
    gate, up, gated : numpy.ndarray
        ``[inter]``.
    scores : numpy.ndarray
        ``[max_seq_len]``, of one head.
    logits : numpy.ndarray
        ``[vocab]``.

    Raises
    ------
    TypeError
        `dims` or `tape` is of another type.
    TapeFull, FrozenError, ClosedError
        As `Tape.take`; nothing was taken then.

    Examples
    --------
    >>> import unimem as um
    >>> dims = um.ModelDims(64, 172, 8, 4, 8, 512, 5, 512)
    >>> with um.Tape(1 << 20) as tape:
    ...     fs = um.ForwardScratch(dims, tape=tape)
    ...     fs.peak_scratch_bytes, tape.used_bytes - fs.peak_scratch_bytes == fs.logits.nbytes
    (6160, True)
    """

    residual: npt.NDArray[Any]
    normalized: npt.NDArray[Any]
    q: npt.NDArray[Any]
    k: npt.NDArray[Any]
    v: npt.NDArray[Any]
    attention: npt.NDArray[Any]
    projected: npt.NDArray[Any]
    ffn_normalized: npt.NDArray[Any]
    gate: npt.NDArray[Any]
    up: npt.NDArray[Any]
    gated: npt.NDArray[Any]
    ffn_out: npt.NDArray[Any]
    scores: npt.NDArray[Any]
    logits: npt.NDArray[Any]

    # The steps: 0 norm; 1 q, k and v; 2 attention; 3 projection; 4 sum; 5 norm; 6 gate and up;
    # 7 product; 8 ffn_out; 9 sum.
    USES: ClassVar[dict[str, tuple[int, int]]] = {
        "residual": (0, 9),
        "normalized": (0, 1),
        "q": (1, 2),
        "k": (1, 2),
        "v": (1, 2),
        "attention": (2, 3),
        "projected": (3, 4),
        "ffn_normalized": (5, 6),
        "gate": (6, 7),
        "up": (6, 7),
        "gated": (7, 8),
        "ffn_out": (8, 9),
        "scores": (2, 2),
    }

    def __init__(self, dims: ModelDims, *, tape: Tape, overlap: bool = False) -> None:
        self._begin(dims, "forward scratch")
        Tape._require(tape)
        specs, offsets, self.peak_scratch_bytes = self._place(dims, overlap)
        self._take(tape, specs, offsets, self.peak_scratch_bytes + specs["logits"].nbytes)
        self._enter()

    @classmethod
    def bytes_needed(cls, dims: ModelDims, *, overlap: bool = False) -> int:
        """Return the bytes taken for these dimensions: the peak and the logits.

        Parameters
        ----------
        dims : ModelDims
            The model.
        overlap : bool, default False
            As for the class.

        Returns
        -------
        int
        """
        specs, _, peak_bytes = cls._place(check_dims(dims), overlap)
        return peak_bytes + specs["logits"].nbytes

    @classmethod
    def _place(cls, dims: ModelDims, overlap: bool) -> tuple[dict[str, Spec], dict[str, int], int]:
        """Return the spec and the offset of each buffer, and the peak."""
        hidden, q, kv = dims.hidden_size, dims.q_size, dims.kv_size
        inner = dims.intermediate_size
        widths = dict.fromkeys(cls.USES, hidden)
        widths |= {"q": q, "k": kv, "v": kv, "attention": q, "scores": dims.max_seq_len}
        widths |= {"gate": inner, "up": inner, "gated": inner, "logits": dims.vocab_size}
        f32 = np.dtype("float32")
        specs = {name: Spec(None, (width,), f32) for name, width in widths.items()}
        sizes = {name: spec.nbytes for name, spec in specs.items()}
        if flag(overlap, "overlap"):
            plan = BufferPlan(BufferUse(name, sizes[name], *use) for name, use in cls.USES.items())
            return specs, dict(plan.offsets) | {"logits": plan.total_bytes}, plan.total_bytes
        return specs, pack(sizes), sum(sizes.values()) - sizes["logits"]
