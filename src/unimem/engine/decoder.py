"""The decoder: prompts in, logits and tokens out, on the tapes of one layout."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from unimem._core import ledger
from unimem.accounting.published import Tally, publish, refresh
from unimem.accounting.report import Report
from unimem.backends import ggml
from unimem.base.arguments import flag
from unimem.base.turns import Turn
from unimem.engine.forward import ForwardPass
from unimem.engine.graph import Arrays, Graph, Headers, view
from unimem.engine.history import History
from unimem.engine.memory_report import list_parts, make_report
from unimem.engine.model_memory import DecoderOptions, ModelMemory
from unimem.engine.put_aside import PutAside
from unimem.engine.sampling import Sampling, count
from unimem.engine.stored_prefixes import Prefixes, model_name
from unimem.engine.streamed import header_of
from unimem.engine.thread_count import ThreadCount
from unimem.errors import CacheFull, ClosedError, SnapshotError, TapeFull
from unimem.kv import snapshot
from unimem.kv.cache.cache import KVCache
from unimem.kv.cache.layered import LayeredKVCache
from unimem.kv.store.store import KVStore
from unimem.kv.token_ids import n_common
from unimem.kv.types import GGML_TYPES, kv_pair
from unimem.layout import Layout
from unimem.models.dims import ModelDims
from unimem.planning.needs import prompt_batch
from unimem.system import policy
from unimem.weights.loading import EngineLoad, Progress
from unimem.weights.opened import Weights

if TYPE_CHECKING:
    from unimem.engine.text.tokenizer import Tokenizer
    from unimem.kv.snapshot import LayersSnapshot, Snapshot

_TURN_SECONDS = 1.0  # `give_back` waits this long for the token of another thread
_IDLE_NS = 10 * 10**9  # a conversation without a token for this long is idle
_MOST_POSITIONS = 2**31 - 1  # ggml counts them in 32 bits


class Decoder:
    """Runs one model for one conversation.

    All memory is taken at the start; a step takes nothing. The KV cache lies on the layout's
    history tape. With a window it is a ring placed like that tape, and for models whose layers
    partly slide, such as gemma3, a ``KVCache(layers=...)`` placed like it. Graphs, values, inputs
    and logits lie on the scratch tape. ggml computes with threads of its own. A decoder has one
    conversation: threads that call it take turns, and closing waits for the token in flight. It is
    not for use after a fork.

    Parameters
    ----------
    path_or_weights : path-like or Weights
        A GGUF file (for a split model, any of its files) or its URL: it is opened, read into memory
        and closed with the decoder. Or opened weights, used as they are: cold pages of a mapping
        are read by the first tokens.
    ctx : int, optional
        Tokens of context; by default the smallest of the model's, 4096 and what fits.
    kv_dtype : str
        Type of the KV cache, as for `plan`.
    rotate : bool, optional
        Whether the KV cache stores heads rotated by a Hadamard matrix, as ``KVCache(rotate=True)``,
        so that quantizing changes logits less. Heads need a multiple of 64 values. By default a
        quantized cache does so if it can, as in llama.cpp.
    window : int, optional
        How many tokens attention sees, including the token itself. The KV cache is then a ring of
        this length, not of `ctx`. By default attention sees what the model's layers see.
    threads : int, optional
        Threads that compute, exactly. By default at most as many as `plan` says (one for a small
        model), and fewer while other work keeps them waiting, which changes the last bits of logits
        if attention reads 512 rows or more.
    layout : Layout, optional
        Where to take memory. It is borrowed, not closed, and taken memory stays taken. By default
        the decoder makes its own.
    load : {"auto", "map", "copy", "direct", "stream", "repack"}
        How a file comes into memory, as for `open_weights`. ``"repack"``, also for opened weights,
        keeps tensors in ggml's faster order, as `unimem.repack`, placed like the layout's history;
        ``"auto"`` does so if the model gains by it and all fits. ``"stream"`` reads the experts of
        a mixture, or the layers of another model, from the disk when tokens need them; ``"auto"``
        does so if the model would not stay in memory.
    weights_budget : int or str, optional
        The most memory that a streamed model's weights take, as `budget` of `open_weights`; with
        it, ``"auto"`` streams.
    numa : str, optional
        Where a file, the KV cache and scratch lie, as for `PlacementOptions`; not with a `layout`.
        Of mirrored weights (``"mirror"``) a decoder reads one copy: the one with the fewest readers
        on a node that the calling thread may run on. That thread is bound to the CPUs of the node
        until the decoder is closed, and ggml's threads compute there.
    store : KVStore, optional
        Where to look for the first tokens of a prompt, in whole chunks, and where to put prompts.
        If some layers slide, chunks may be at most as long as their window. It is borrowed, not
        closed. Its failures are a `PlacementWarning`, and the tokens are computed.
    progress : callable, optional
        Called while a file is read, with the bytes read and all bytes, as by `open_weights`. An
        exception that it raises stops the work, and nothing stays taken.

    Raises
    ------
    UnsupportedModel
        The engine does not run this model, or not with such a cache.
    GGUFError, SafetensorsError, OSError
        The file cannot be used.
    ValueError
        An option is out of range, or `load` is not how opened weights were loaded.
    CapacityError
        The model does not fit into available memory, or its weights not into their budget;
        `TapeFull` if `layout` is too small.
    ClosedError
        This is a forked child of a process that computed with several threads, and so does this.

    Attributes
    ----------
    weights, layout, dims : Weights, Layout, ModelDims
        The opened model, its memory and its dimensions.
    kv : KVCache
        The conversation so far. It may be cropped, trimmed or cleared between calls: attention
        sees the tokens that it holds, each at its own position.
    ctx, threads : int
        Tokens that fit in the cache, or with a window the most positions; the most threads.
    window : int or None
        As given.

    Examples
    --------
    >>> from unimem.engine import Decoder, embedded_model
    >>> with Decoder(embedded_model(), ctx=128) as decoder:
    ...     story = "".join(decoder.generate("Once upon a time", 8))
    ...     decoder.kv.seq_len > 8
    True
    """

    def __init__(
        self,
        path_or_weights: str | os.PathLike[str] | Weights,
        *,
        ctx: int | None = None,
        kv_dtype: str = "f16",
        rotate: bool | None = None,
        window: int | None = None,
        threads: int | None = None,
        layout: Layout | None = None,
        load: EngineLoad = "auto",
        weights_budget: int | str | None = None,
        numa: str | None = None,
        store: KVStore | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._closed = True
        self._turn = Turn()
        self._aside: PutAside | None = None
        self._store = store
        self._owns_layout = layout is None
        self.window = window
        asked = DecoderOptions(ctx, kv_dtype, rotate, window, threads, layout, numa, weights_budget)
        self._memory = ModelMemory(path_or_weights, load, progress, asked)
        self.weights, needed = self._memory.weights, self._memory.plan
        own_layout = None
        self._prefixes: Prefixes | None = None
        assert needed.ctx is not None  # known for every model that the engine runs
        self._batch = prompt_batch(needed.ctx, is_streamed=self.weights.stream is not None)
        try:
            if store is not None:
                self._prefixes = Prefixes(store, self.weights, self._batch)
                self._memory.model.check_store(store.chunk_tokens, needed.ctx, window)
            if layout is None:
                layout = own_layout = Layout.for_model(
                    self.weights,
                    ctx=needed.ctx,
                    kv_dtype=kv_dtype,
                    window=window,
                    threads=needed.threads,
                    numa=numa,
                )
            self.layout = layout
            self._model = self._memory.model
            self.dims: ModelDims = self._model.dims
            self.ctx, self.threads = needed.ctx, needed.threads
            reader = self._memory.reader
            if threads is None and reader is not None and reader.n_cores is not None:
                self.threads = min(self.threads, reader.n_cores)
            self._count = ThreadCount(self.threads, adapts=threads is None)
            self._set_up(asked, needed.scratch_bytes, progress)
        except BaseException as error:
            if own_layout is not None:
                own_layout.__exit__()
            self._memory.end(type(error))
            raise
        self._tokenizer: Tokenizer | None = None
        self._forward.tally = self._tally = Tally(self.kv.address(0, "k"))
        self._closed = False
        ledger.enter(self, ledger.sizes_of(self._parts))
        publish()

    def _set_up(self, asked: DecoderOptions, scratch_bytes: int, progress: Progress | None) -> None:
        scratch, history = self.layout.scratch, self.layout.history
        if scratch.available_bytes < scratch_bytes:
            raise TapeFull(
                f"Tape '{scratch.name}': the decoder needs {scratch_bytes} bytes of scratch; of "
                f"{scratch.total_bytes} bytes {scratch.available_bytes} are left",
                scratch.total_bytes,
                scratch.used_bytes,
                scratch_bytes,
            )
        marks = scratch.mark(), history.mark()
        self._threadpool = 0
        self._made: list[Headers | Graph] = []
        rotates = self._model.rotates(asked.rotate, *kv_pair(asked.kv_dtype))
        self._history = History(
            self._model, asked.kv_dtype, rotates, self.ctx, asked.window, self._batch, history
        )
        self.kv: KVCache = self._history.kv
        try:
            self.kv.warm(self.threads)
            scratch.warm(self.threads)
            self._memory.bring_in(self.layout, self.threads, progress)
            self._build()
        except BaseException:
            self._free()
            self.kv.close()
            scratch.rewind(marks[0])
            history.rewind(marks[1])
            raise
        scratch.keep()
        self.layout.attach(self.kv)
        self._hold_blocks()

    def _build(self) -> None:
        take, dims, model = self.layout.scratch.take_address, self.dims, self._model
        batch, history = self._batch, self._history
        history.fill_with_zeros()
        tensors = {name: header_of(tensor) for name, tensor in self._memory.tensors.items()}
        nbytes = Headers.bytes_needed(len(tensors), dims.num_layers)
        part = history.parts[0]  # all parts have the same types
        kinds = GGML_TYPES[part.dtype], GGML_TYPES[part.v_dtype]
        lanes, n_rows = history.lanes(), history.n_rows
        headers = Headers(model, tensors, lanes, n_rows, kinds, part.rotate, take(nbytes), nbytes)
        self._made.append(headers)
        self._memory.adopt(headers, batch)
        arrays = Arrays(
            tokens=take(4 * batch),
            positions=take(4 * batch),
            rows=tuple(take(8 * batch) for _ in n_rows),
            last=take(4),
            logits=take(4 * dims.vocab_size),
        )
        self._tokens = view(arrays.tokens, batch, "int32")
        self._positions = view(arrays.positions, batch, "int32")
        self._rows = [view(rows, batch, "int64") for rows in arrays.rows]
        self._logits_address = arrays.logits
        self._logits = view(arrays.logits, dims.vocab_size, "float32")
        self._logits[:] = 0
        ids = view(take(4 * self.ctx), self.ctx, "int32")  # by position
        vectors = [self._tokens, self._positions, *self._rows, view(arrays.last, 1, "int32"), ids]
        self._parts = list_parts(vectors, self._logits)
        graphs = []
        for n in (1, batch):
            masks = [take(2 * n * rows) for rows in n_rows]
            nbytes = Graph.bytes_needed(model, headers.n_waves if n > 1 else 0)
            graph = Graph(model, headers, arrays, n, masks, take(nbytes), nbytes)
            graphs.append(graph)
            self._made.append(graph)
        self._decode, self._prefill = graphs
        self._threadpool = ggml.new_threadpool(self.threads)
        arena = take(max(graph.values.total_bytes for graph in graphs))
        work = take(max(graph.work_bytes(self.threads, self._threadpool) for graph in graphs))
        for graph in graphs:
            graph.set_memory(arena, work, self.threads, self._threadpool)
        self._forward = ForwardPass(
            self._decode, self._prefill, history, arrays, self._logits, ids,
            threads=self._count, turn=self._turn, reader=self._memory.pieces,
        )  # fmt: skip
        self._forward.lifetime = self._memory.lifetime
        self._addresses = self._list_addresses()  # any thread may ask, and they never change

    # ---- memory -------------------------------------------------------------------------------

    def _hold_blocks(self) -> None:
        # These views keep a borrowed layout or weights from being closed. They are empty, so that
        # the cache may move tokens and give memory back.
        blocks = (*self._memory.blocks, self.layout.scratch.block, self.layout.history.block)
        self._held = [block.as_array("uint8", 0) for block in blocks]

    def _free(self) -> None:
        for made in self._made:
            made.free()
        self._made = []
        if self._threadpool:
            ggml.free_threadpool(self._threadpool)
            self._threadpool = 0

    def _ledger_is_open(self) -> bool:
        return not self._closed

    def _ledger_parts(self) -> list[ledger.Part]:
        return [] if self._closed else self._parts

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the Decoder is closed")

    @property
    def logits(self) -> NDArray[Any]:
        """float32 [vocab]: a view of the one logits vector, valid until the next token."""
        self._check_open()
        block = self.layout.scratch.block
        return block.as_array("float32", self.dims.vocab_size, self._logits_address - block.address)

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """int32 [n]: the ids of the tokens so far, by position; a copy.

        It ends before the first id that is unknown, such as that of a token whose K and V another
        writer appended to the cache, and where `kv` was cropped.
        """
        with self._turn:
            self._check_open()
            return self._forward.ids[: self._forward.n_known].copy()

    def addresses(self) -> dict[str, int]:
        """Return the address of every buffer that a step uses; addresses never change.

        Returns
        -------
        dict
            Addresses of logits, inputs, each layer's K and V, and each value of the decode graph.
        """
        self._check_open()
        return dict(self._addresses)

    def _list_addresses(self) -> dict[str, int]:
        named = {
            "logits": self._logits.ctypes.data,
            "tokens": self._tokens.ctypes.data,
            "positions": self._positions.ctypes.data,
        }
        for i, (rows, mask) in enumerate(zip(self._rows, self._decode.masks, strict=True)):
            of_part = f".part{i}" if i else ""
            named |= {f"rows{of_part}": rows.ctypes.data, f"mask{of_part}": mask.address}
        for layer in range(self.dims.num_layers):
            for part in ("k", "v"):
                named[f"{part}.{layer}"] = self.kv.address(layer, part)
        named |= {f"value.{i}": a for i, a in enumerate(self._decode.addresses())}
        return named

    def give_back(self) -> int:
        """Give back memory of the KV cache that holds no tokens.

        Any thread may call it; it waits at most a second for the token of another thread. Later
        tokens fault the pages in again, and are the same.

        Returns
        -------
        int
            As `KVCache.give_back`; 0 if the decoder computes on, or is closed.
        """
        if not self._turn.take(_TURN_SECONDS):
            return 0
        try:
            return 0 if self._closed else self.kv.give_back()
        finally:
            self._turn.give()

    def put_aside(self, store: KVStore | None = None) -> int:
        """Move the conversation to the disk of a store, and give the memory of the KV cache back.

        The next `prefill` or `generate_next_token`, and a `generate` that goes on, read it again by
        themselves, byte for byte; `kv` is empty meanwhile. If the store has dropped or lost it by
        then, its tokens are computed anew, with a `PlacementWarning`. A `Governor` puts idle
        conversations aside when memory is short.

        Parameters
        ----------
        store : KVStore, optional
            A store with a disk or a server, which stays open as long as the decoder; by default the
            decoder's own.

        Returns
        -------
        int
            Bytes that were given back, as of `KVCache.give_back`: 0 if views of the cache exist, or
            the conversation is put aside already.

        Raises
        ------
        ValueError, TypeError
            There is no store, or it has neither disk nor server.
        RuntimeError
            There are no tokens, or `kv` holds some that this decoder did not compute, or was
            trimmed. Nothing is put aside.
        CapacityError, OSError
            The store has no room, or fails. Nothing is put aside.
        """
        chosen = self._store if store is None else store
        if not isinstance(chosen, KVStore):
            raise TypeError(f"store: expected a unimem.KVStore, got {chosen!r:.60}")
        with self._turn:
            self._check_open()
            return self._put_aside(chosen)

    def _put_aside(self, store: KVStore) -> int:
        """Do so, in the decoder's turn."""
        if self._aside is not None:
            return 0
        self._forward.require_idle()
        n = self._known_tokens()
        if self._history.is_trimmed:
            raise RuntimeError("tokens were trimmed: the conversation cannot be put aside")
        model = model_name(self.weights)
        aside = PutAside(store, self._history, self._forward.ids[:n], model)
        try:
            self.kv.clear()
        except BaseException:
            aside.drop()
            raise
        self._set_aside(aside)
        self._tally.hold(0, 0)
        return self.kv.give_back()

    def _put_aside_if_idle(self) -> int:
        """Put the conversation aside if the decoder has a store and computes no token."""
        forward = self._forward
        if self._store is None or self._closed or self._store.closed:
            return 0
        if time.monotonic_ns() - forward.computed_ns < _IDLE_NS or not self._turn.take(0):
            return 0
        try:
            if self._closed or self.kv.is_empty or forward.n_known < self.kv.next_position:
                return 0
            # One that was trimmed could not be computed anew.
            return 0 if self._history.is_trimmed else self._put_aside(self._store)
        finally:
            self._turn.give()

    def _set_aside(self, aside: PutAside | None) -> None:
        self._aside = aside
        self._forward.bring_back = None if aside is None else self._bring_back

    def _bring_back(self) -> None:
        """Restore a conversation that was put aside, in the decoder's turn."""
        aside = self._aside
        if aside is None:
            return
        self._set_aside(None)
        try:
            if aside.restore(self._history):
                self._forward.note_ids(0, aside.ids)
            else:
                self.kv.clear()
                policy.warn(f"tokens that were put aside are lost, and computed anew: {aside}")
                self._compute(aside.ids, in_batches=True)
        except BaseException:
            self.kv.clear()
            self._set_aside(aside)
            raise
        aside.drop()
        self._tally.hold(self.kv.memory_usage_bytes, self.kv.seq_len)

    def _drop_aside(self) -> None:
        if self._aside is not None:
            self._aside.drop()
            self._set_aside(None)

    def report(self) -> Report:
        """Report what the decoder's memory is for, with facts of the model and of ggml.

        Returns
        -------
        Report
            The rows ``weights:TYPE``, ``weights:padding``, ``kv``, ``scratch``, ``logits`` and
            ``tokens`` sum up to the memory of weights, scratch, history and a ring. The row
            ``diagnostics`` is what the process publishes, and ``other`` the copies of the files'
            headers. Decoders over the same weights share the rows of weights, and all decoders of a
            process share ``diagnostics``.
        """
        self._check_open()
        return make_report(self)

    def close(self) -> None:
        """Give everything back. Closing twice is no error.

        Raises
        ------
        BufferError
            Views of the logits, of a ring or of the decoder's own layout are alive, or another
            thread computes; nothing is closed then.
        """
        if self._closed:
            return
        if not self._turn.take(0):
            raise BufferError("another thread computes with the Decoder: let it end first")
        try:
            if self._closed:  # by another thread, meanwhile
                return
            self._held = []
            try:
                if self._owns_layout:
                    self.layout._check_unused()
                self.kv.close()
            except BufferError:
                self._hold_blocks()
                raise
            if self._owns_layout:
                self.layout.close()
            self._end()
        finally:
            self._turn.give()

    def _end(self, kind: type[BaseException] | None = None) -> None:
        """End once: the first of the threads that close keeps the turn until all is given back."""
        self._turn.end()
        try:
            if self._closed:
                return
            self._closed = True
            self._drop_aside()
            self._forward.close()
            self._free()
            self._held = []
            self.kv.__exit__()
            try:
                self._memory.end(kind)
            finally:
                self._tally.end()
        finally:
            self._turn.give()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if self._closed:
            return
        try:
            self._end(kind)
        finally:
            if self._owns_layout:
                # Live views keep the memory; it goes with the last of them.
                self.layout.__exit__()
                refresh()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            text = f"unclosed Decoder of {', '.join(self.weights.files)}"
            warnings.warn(text, ResourceWarning, stacklevel=1, source=self)
            self.__exit__()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a Decoder cannot be pickled: make it in the other process")

    def __repr__(self) -> str:
        if self._closed:
            return "Decoder(closed)"
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        used = f"{self.kv.seq_len} of {self.ctx} tokens" if self._aside is None else "put aside"
        return f"Decoder({self._model.arch}, {self.dims.num_layers} layers, {used}, {threads})"

    # ---- text ---------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer, made when it is first asked for.

        Raises
        ------
        ValueError
            The file's tokenizer is not supported; token ids work nevertheless.
        """
        if self._tokenizer is None:
            from unimem.engine.text.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.from_metadata(self.weights.metadata)
        return self._tokenizer

    def tokenize(
        self, text: str, *, add_bos: bool | None = None, special: bool = False
    ) -> list[int]:
        """Turn text into token ids: see `Tokenizer.encode`."""
        return self.tokenizer.encode(text, add_bos=add_bos, special=special)

    def detokenize(self, tokens: Iterable[int]) -> str:
        """Turn token ids into text."""
        return self.tokenizer.decode(tokens)

    # ---- sessions -----------------------------------------------------------------------------

    def save_session(self, path: str | os.PathLike[str]) -> None:
        """Save the conversation for `resume`, in this process or another.

        Parameters
        ----------
        path : path-like
            A snapshot of `kv` with the ids of its tokens and the hash of all bytes of the weights;
            an existing file is replaced, whole or not at all.

        Raises
        ------
        RuntimeError
            There is nothing to save, or `kv` holds tokens that this decoder did not compute.
        OSError
            The file cannot be written, or the weights were replaced since they were opened.

        Notes
        -----
        Unless their hash is remembered (docs/identity.md), all weights are read for it.
        """
        with self._turn:
            self._bring_back()
            n = self._known_tokens()
            self.kv.save(path, tokens=self._forward.ids[:n], model=model_name(self.weights))

    def _known_tokens(self) -> int:
        """Return the position of the next token; refuse a cache with tokens of unknown ids."""
        n, known = self.kv.next_position, self._forward.n_known
        if self.kv.is_empty:
            raise RuntimeError("there is nothing to save: prefill tokens first")
        if n > known:
            raise RuntimeError(
                f"the ids of the tokens at positions {known} to {n - 1} are not known, since "
                "this decoder did not compute them: save them with kv.save(path, tokens=...)"
            )
        return n

    def resume(self, path: str | os.PathLike[str]) -> NDArray[Any]:
        """Replace the conversation by a saved one.

        The cache becomes the saved one, byte for byte. Only its last token is computed again, as
        one step of decoding, since the file has no logits.

        Parameters
        ----------
        path : path-like
            A file of `save_session`, for the same model, `kv_dtype`, `rotate` and `window`.

        Returns
        -------
        ndarray
            float32 [vocab]: the logits of the last token, a view of the one logits vector. If
            tokens were trimmed after the last one was computed, the logits are computed without
            them.

        Raises
        ------
        SnapshotError
            The file is damaged, without token ids, or for another model or kind of cache.
        CacheFull
            The conversation is longer than the context.
        OSError
            The file cannot be read.

        Notes
        -----
        A refused file leaves the conversation as it was: unless it is empty, the file is read
        twice, first to check all of it. The file is opened once, so a file that takes its name
        meanwhile changes nothing. An interrupt, or a failure of the second reading, leaves an empty
        conversation.
        """
        with self._turn, snapshot.opened(path) as file:
            ids = self._check_session(file.facts)
            if self._aside is not None or not self.kv.is_empty:
                file.check()
            self.reset()
            try:
                file.read_into(self.kv, tokens=ids)
                self._forward.note_ids(0, ids)
                last = [row.copy() for row in self._history.last_rows()]
                self._forward.step_again(int(ids[-1]))
                # Rows computed after a trim differ from the saved ones.
                for row, saved in zip(self._history.last_rows(), last, strict=True):
                    row[:] = saved
            except BaseException:
                self.reset()
                raise
            return self.logits

    def _check_session(self, saved: Snapshot | LayersSnapshot) -> NDArray[np.int32]:
        """Return the token ids of a saved session; refuse it if it does not fit here."""
        kv, name, model = self.kv, saved.path, model_name(self.weights)
        if saved.model != model:
            raise SnapshotError(
                f"expected a session of model {model!r}, the hash of all bytes of its weights, got "
                f"one of {saved.model!r}: open the weights that it was saved with, or compute its "
                "tokens anew",
                path=name,
            )
        keys = "n_layers n_kv_heads head_dim batch dtype v_dtype window order rotate".split()
        if isinstance(saved, snapshot.LayersSnapshot) != isinstance(kv._body, LayeredKVCache):
            there, ours = "differ", "do not"
            if isinstance(kv._body, LayeredKVCache):
                there, ours = "are alike", "differ"
            raise SnapshotError(f"its layers {there}, and those of this cache {ours}", path=name)
        if isinstance(saved, snapshot.LayersSnapshot):
            keys = ["layers", "batch", "order", "rotate"]
        for key in keys:
            there, ours = getattr(saved, key), getattr(kv, key)
            if there != ours:
                raise SnapshotError(
                    f"the snapshot is of a cache with {key}={there!r}, and this one has {ours!r}",
                    path=name,
                )
        if saved.tokens is None or not saved.seq_len:
            raise SnapshotError("it has no tokens to go on from", path=name)
        if saved.tokens.max() >= self.dims.vocab_size:
            raise SnapshotError(
                f"token {saved.tokens.max()} is not among the model's {self.dims.vocab_size}",
                path=name,
            )
        # With rings alone the context limits positions, not tokens.
        n = saved.next_position if self._history.parts[0].window else saved.seq_len
        if n > self.ctx or saved.next_position > _MOST_POSITIONS:
            raise CacheFull(
                f"{name}: a session of {n} token{'s' * (n > 1)} does not fit in the context of "
                f"{self.ctx}: take a larger ctx",
                self.ctx,
                0,
                n,
            )
        return saved.tokens

    # ---- computing ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Begin a new conversation. The memory stays.

        Raises
        ------
        RuntimeError
            This is a signal handler that interrupts a computation.
        """
        with self._turn:
            self._forward.require_idle()
            self._drop_aside()
            self.kv.clear()
            self._forward.forget()
            if self._prefixes is not None:
                self._prefixes.forget()
            self._tally.hold(0, 0)
        refresh()

    def prefill(self, tokens: Iterable[int]) -> NDArray[Any]:
        """Compute tokens at the end of the KV cache.

        Parameters
        ----------
        tokens : iterable of int
            At least one token id.

        Returns
        -------
        ndarray
            float32 [vocab]: the logits of the last token, a view of the one logits vector.

        Raises
        ------
        ValueError
            No tokens, or a token that the model does not have. Nothing was computed.
        CacheFull
            There is no room for all of them. Nothing was computed.
        OSError
            Streamed weights cannot be read, or their file was written to. Nothing was computed.
        BufferError
            Other decoders over the same streamed weights hold too many of them at this moment: try
            again, or give a larger budget. Nothing was computed.

        Notes
        -----
        After an interrupt none of the tokens counts. A ring cannot go back: with a window, or if
        layers slide, whole batches (128 tokens, or 512 if weights are streamed) count, up to
        ``kv.next_position``.
        """
        self._check_open()
        checked = _checked_tokens(tokens, self.dims.vocab_size)
        with self._turn:
            self._forward.require_room(len(checked))
            self._take_in(checked)
            return self.logits

    def set_tokens(self, tokens: Iterable[int]) -> NDArray[Any]:
        """Make tokens the whole conversation: those at its beginning stay, others are computed.

        A chat or a server passes all tokens of a conversation each time. The last one is computed
        in any case, for its logits. A conversation that was put aside is read again before.

        Parameters
        ----------
        tokens : iterable of int
            At least one token id.

        Returns
        -------
        ndarray
            As of `prefill`.

        Raises
        ------
        ValueError
            No tokens, or a token that the model does not have. The conversation is as before.
        CacheFull
            They are more than the context. The conversation is as before.
        OSError, BufferError
            As for `prefill`. The conversation ends with the tokens that stay.
        """
        self._check_open()
        checked = _checked_tokens(tokens, self.dims.vocab_size)
        if len(checked) > self.ctx:
            raise CacheFull(
                f"{len(checked)} tokens do not fit in the context of {self.ctx}: take fewer, or a "
                "larger ctx",
                self.ctx,
                0,
                len(checked),
            )
        with self._turn:
            self._bring_back()
            n_kept = self._keep_first(n_common(self.token_ids, checked[:-1]))
            return self.prefill(checked[n_kept:])

    def _keep_first(self, n: int) -> int:
        """Drop all tokens but the first n, or all if these cannot stay; return how many stay."""
        kv = self.kv
        if n and not self._history.is_trimmed:
            with suppress(ValueError, RuntimeError):  # a window does not reach back so far
                kv.crop(kv.seq_len - (kv.next_position - n))  # a window has dropped others
                self._forward.n_talks += 1
                return n
        self.reset()
        return 0

    def generate_next_token(
        self,
        *,
        temperature: float = Sampling.temperature,
        top_k: int = Sampling.top_k,
        top_p: float = Sampling.top_p,
        seed: int | None = Sampling.seed,
    ) -> int:
        """Choose a token by the logits, append it to the conversation and compute its logits.

        Parameters
        ----------
        temperature, top_k, top_p : float, int, float
            See `generate`.
        seed : int, optional
            Begins a sequence of choices, which continues while calls have the same seed. A new
            conversation begins it anew.

        Raises
        ------
        ValueError
            An option is out of range.
        CacheFull
            There is no room for a token.
        RuntimeError
            There are no logits: nothing was prefilled, or `kv` was cleared, cropped or appended to
            since.
        OSError
            Streamed weights cannot be read, or their file was written to. The token does not count;
            prefill it to go on.
        BufferError
            As for `prefill`. The token does not count.
        """
        return self._forward.next_token(temperature, top_k, top_p, seed)

    def generate(
        self,
        prompt_or_tokens: str | Iterable[int],
        n: int,
        *,
        temperature: float = 0.0,
        top_k: int = 40,
        top_p: float = 1.0,
        seed: int | None = None,
        stop_at_eog: bool = True,
    ) -> Iterator[str]:
        """Begin a new conversation and generate text.

        Parameters
        ----------
        prompt_or_tokens : str or iterable of int
            The prompt.
        n : int
            The most tokens to generate.
        temperature : float
            0 takes the likeliest token each time.
        top_k : int
            Choose among the `top_k` likeliest tokens; 0 for all.
        top_p : float
            Then among the fewest whose probabilities sum up to `top_p`.
        seed : int, optional
            Same seed, same text.
        stop_at_eog : bool
            Whether to stop at a token that ends a generation, as the file says.

        Returns
        -------
        iterator of str
            Pieces of text as they are made. It computes while it is iterated.

        Raises
        ------
        ValueError
            An option is out of range, or the prompt has no tokens. The conversation is as before.
        CacheFull
            Prompt and `n` tokens are more than the context. The conversation is as before.
        """
        self._check_open()
        options = Sampling(temperature, top_k, top_p, seed)
        stops = flag(stop_at_eog, "stop_at_eog")
        n = count(n, "n")
        if isinstance(prompt_or_tokens, str):
            prompt_or_tokens = self.tokenize(prompt_or_tokens)
        tokens = _checked_tokens(prompt_or_tokens, self.dims.vocab_size)
        # The last generated token is not computed.
        asked = len(tokens) + max(n - 1, 0)
        if asked > self.ctx:
            raise CacheFull(
                f"a prompt of {len(tokens)} token{'s' * (len(tokens) > 1)} and {n} more do not fit "
                f"in the context of {self.ctx}: take fewer, or a larger ctx",
                self.ctx,
                0,
                asked,
            )
        stop = self.tokenizer.eog_ids if stops else frozenset()
        return self._generate(tokens, n, options, stop)

    def _generate(
        self, tokens: NDArray[Any], n: int, options: Sampling, stop: frozenset[int]
    ) -> Iterator[str]:
        with self._turn:
            self.reset()
            talk = self._forward.n_talks
            self._take_in(tokens)
        stream, token = self.tokenizer.stream(), -1
        for _ in range(n):
            token = self._forward.advance(talk, token, options, stop)
            if token < 0:
                break
            if text := stream.push(token):
                yield text
        if text := stream.flush():
            yield text

    def _take_in(self, tokens: NDArray[Any]) -> None:
        """Make checked tokens part of the conversation, from the store or by computing them.

        The caller has the decoder's turn.
        """
        self._memory.check_files()
        begin = self.kv.seq_len
        n = 0
        try:
            if self._prefixes is not None and (n := self._prefixes.begin(self.kv, tokens)):
                self._forward.note_ids(0, tokens[:n])
            self._compute(tokens[n:], in_batches=n > 0)
            if self._prefixes is not None:
                self._prefixes.put(self.kv, self._forward.ids[: self.kv.next_position])
        except BaseException:
            # Computed tokens stay in a ring, as without a store.
            if not self._closed and not self._history.is_cut and self.kv.seq_len > begin:
                self.kv.crop(begin)
            raise
        self._tally.count(len(tokens) - n, 0)

    def _compute(self, tokens: NDArray[Any], in_batches: bool) -> None:
        """Compute checked tokens, in the decoder's turn: all count, or in a ring whole batches.

        The rest of a prompt is computed in batches, though it be a single token.
        """
        if len(tokens) == 1 and not in_batches:
            self._forward.step(int(tokens[0]))
            return
        # A ring has rows for one batch beside its window.
        most = self._batch if self._history.is_cut else len(tokens)
        talk, end = self._forward.n_talks, self.kv.next_position
        for start in range(0, len(tokens), most):
            batch = tokens[start : start + most]
            if self._prefixes is not None and self._history.is_cut:
                first_kept = self._history.first_kept(end + len(batch))
                self._prefixes.put_before(first_kept, self.kv, self._forward.ids[:end])
            if (self._forward.n_talks, self.kv.next_position) != (talk, end):
                raise RuntimeError(
                    "a signal handler began another conversation: the other tokens do not count"
                )
            self._forward.prefill(batch)
            end += len(batch)
            self._tally.hold(self.kv.memory_usage_bytes, self.kv.seq_len)


def _checked_tokens(tokens: Iterable[int], vocab_size: int) -> NDArray[Any]:
    """Return at least one token id, all of them known: an array that no caller changes."""
    try:
        array = np.array(tokens if isinstance(tokens, np.ndarray) else list(tokens))
    except (TypeError, ValueError):
        raise TypeError(f"tokens: expected token ids, got {tokens!r:.60}") from None
    if array.ndim != 1 or not len(array):
        raise ValueError(f"tokens: expected at least one token id, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"tokens: expected integers, got {array.dtype}")
    wrong = (array < 0) | (array >= vocab_size)
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(
            f"tokens: expected ids from 0 to {vocab_size - 1}, got {array[i]} at index {i}"
        )
    return array
