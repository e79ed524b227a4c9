"""The stream of a model: its pieces, the slots that they are read into, and its figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from unimem._core import ledger
from unimem._core.block import Block
from unimem._core.pieces import Holder, Pieces
from unimem.base.descriptors import Descriptors
from unimem.base.text import format_bytes
from unimem.errors import ClosedError
from unimem.system.placement import PlacementOptions
from unimem.weights.stream.budget import SlotBudget, move_slots, plan_budget
from unimem.weights.stream.piece_table import WINDOW, PieceTable, TensorPlace

_CATEGORY = "weights:slots"
# How long a smaller pool waits for threads that compute with pieces in its last slots.
_PATIENCE_SECONDS, _LOOK_SECONDS = 0.25, 0.002
# The shares of the memory beyond the least that are given back, the next if threads use too much.
_GIVEN_BACK = (1 / 4, 1 / 8, 1 / 16)
_FIGURES = "budget_bytes resident_bytes hits misses read_bytes waited_ns".split()


class StreamedFiles(NamedTuple):
    """The open files of a streamed model.

    Attributes
    ----------
    paths : tuple of str
        Their names, for errors.
    fds : Descriptors
        Open for reading.
    check : callable
        Raises OSError (ESTALE) if a file was written to since it was opened.
    """

    paths: tuple[str, ...]
    fds: Descriptors
    check: Callable[[], None]


class _ThreadHolder:
    """The holder of one thread; it ends with the thread."""

    def __init__(self, pieces: Pieces) -> None:
        self.holder = pieces.holder()


class _SlotRow:
    """The entry of the slots in the ledger, from one change of their number to the next."""

    def __init__(self, pieces: Pieces, nbytes: int) -> None:
        self._pieces = pieces
        ledger.enter(self, {_CATEGORY: nbytes})

    def _ledger_is_open(self) -> bool:
        return not self._pieces.closed

    def _ledger_parts(self) -> Sequence[ledger.Part]:
        parts = []
        for block in self._pieces.blocks:
            with suppress(ClosedError):  # another thread has just closed it
                nbytes = block.committed_bytes
                parts.append(ledger.Part(_CATEGORY, block.address, nbytes, nbytes, nbytes))
        return parts


class Stream:
    """The pieces of a streamed model in memory, as `Weights.stream`.

    Any number of threads may use it. In a forked child, what asks for pieces raises ClosedError.

    Attributes
    ----------
    path : str
        The model's first file.
    """

    def __init__(
        self,
        files: StreamedFiles,
        table: PieceTable,
        budget: SlotBudget,
        placement: PlacementOptions,
    ) -> None:
        self.path = files.paths[0]
        self._files, self._table, self._budget = files, table, budget
        self._resizing = threading.Lock()
        self._local = threading.local()
        self._holders: WeakSet[_ThreadHolder] = WeakSet()
        self._n_checked = 0
        self._n_fetched = [0] * len(table.kinds)  # when slots were divided
        placed = placement.copy()
        placed["warm"] = placement.get("warm") or True
        self._pieces = Pieces(
            list(zip(files.fds, files.paths, strict=True)),
            [kind.part_bytes for kind in table.kinds],
            table.pieces(),
            slots=budget.slots,
            policy="frequent" if table.has_experts else "cycle",
            groups=table.groups(),
            name=self.path,
            **placed,
        )
        self._pins: list[Holder] = []
        self._row: _SlotRow | None = _SlotRow(self._pieces, budget.slot_bytes)
        _streams.add(self)

    # ---- figures --------------------------------------------------------------------------------

    @property
    def budget_bytes(self) -> int:
        """The most memory that the weights take: what stays, and the slots."""
        return self._budget.nbytes

    @property
    def least_bytes(self) -> int:
        """The least budget: what stays, and the slots that computing one layer needs."""
        return self._budget.least_bytes

    @property
    def resident_bytes(self) -> int:
        """Memory of what stays, and bytes of the pieces that are in slots now."""
        return self._budget.kept_bytes + self._stat("resident_bytes")

    @property
    def slot_bytes(self) -> int:
        """Memory of the slots."""
        return sum(block.committed_bytes for block in self._blocks)

    @property
    def hits(self) -> int:
        """How often a piece was asked for that was in memory already, or on its way."""
        return self._stat("hits")

    @property
    def misses(self) -> int:
        """How often a piece was asked for that had to be read."""
        return self._stat("misses")

    @property
    def read_bytes(self) -> int:
        """Bytes read from the disk for pieces."""
        return self._stat("read_bytes")

    @property
    def waited_ns(self) -> int:
        """Nanoseconds that calls have waited for the disk, the sum over threads."""
        return self._stat("waited_ns")

    def to_dict(self) -> dict[str, Any]:
        """Return the path and the figures, plain numbers."""
        return {"path": self.path} | {name: getattr(self, name) for name in _FIGURES}

    def _stat(self, name: str) -> int:
        return int(self._pieces.stat()[name])  # type: ignore[literal-required]

    @property
    def _blocks(self) -> tuple[Block, ...]:
        return self._pieces.blocks

    # ---- pieces ---------------------------------------------------------------------------------

    def _ensure(self, place: TensorPlace, ids: Any, name: str) -> NDArray[np.int32]:
        slots = self._holder().ensure(ids, place.first, place.n, name)
        self.check_files()
        return slots

    def _prefetch(self, place: TensorPlace, ids: Any, name: str) -> None:
        self._pieces.prefetch(ids, place.first, place.n, name)

    def _view(
        self, place: TensorPlace, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> NDArray[Any]:
        """View a tensor in all slots, as an array of `dtype` and of `shape` in each."""
        part_bytes = self._table.kinds[place.kind].part_bytes[place.part]
        raw = self._pieces.array(place.kind, place.part, "uint8", (part_bytes,))
        raw = raw[:, place.offset : place.offset + place.nbytes]
        return raw.view(dtype).reshape(len(raw), *shape)

    def _holder(self) -> Holder:
        """Return the calling thread's holder."""
        mine: _ThreadHolder | None = getattr(self._local, "mine", None)
        if mine is None:
            mine = self._local.mine = _ThreadHolder(self._pieces)
            self._holders.add(mine)
        return mine.holder

    def check_files(self) -> None:
        """Raise OSError (ESTALE) if a file was written to since it was opened.

        It asks the kernel only if something was read since the last call.
        """
        n_reads = self._pieces.n_reads
        if n_reads != self._n_checked:
            self._files.check()
            self._n_checked = n_reads

    # ---- the budget -----------------------------------------------------------------------------

    def resize(self, budget: int | str | None = None) -> None:
        """Change the budget: slots go, with the pieces in them, or are added.

        What the calling thread has asked for may go, too. Other threads may compute meanwhile; a
        pool that gets smaller waits for those that use pieces in its last slots, a quarter of a
        second.

        Parameters
        ----------
        budget : int, str or None
            As for `open_weights`.

        Raises
        ------
        CapacityError, MemoryError, PlacementError
            It is below the least budget, or there is no memory for it; nothing changed.
        BufferError
            A thread keeps using a piece in a slot that would go; nothing changed.
        TypeError, ValueError
            It is not a size.
        ClosedError
            The weights were closed.
        """
        with self._resizing:
            taken = self._budget.kept_bytes + self.slot_bytes
            planned = plan_budget(
                self.path,
                budget,
                self._budget.kept_bytes,
                self._budget.pools,
                taken_bytes=taken,
            )
            self._unpin()
            self._holder().release()
            try:
                self._divide(planned, _PATIENCE_SECONDS)
            finally:
                self._pin()

    def _move_slots(self) -> None:
        """Let slots of experts move to pools where they save more reads.

        The budget stays, and a change of it divides it anew. Nothing moves if threads use pieces
        in slots that would go.
        """
        if not self._table.has_experts or not self._resizing.acquire(blocking=False):
            return
        try:
            now = [self._pieces.n_fetched(i) for i in range(len(self._n_fetched))]
            since = [n - before for n, before in zip(now, self._n_fetched, strict=True)]
            planned = move_slots(self._budget, since)
            if planned.slots != self._budget.slots:
                with suppress(BufferError, MemoryError):
                    self._divide(planned)
        finally:
            self._resizing.release()

    def _divide(self, planned: SlotBudget, patience: float = 0) -> None:
        """Give each pool its number of slots, or leave all as it was, and raise."""
        before = self._budget
        try:
            self._set_slots(planned, patience)
            self._budget = planned
        except BaseException:
            with suppress(BufferError, MemoryError, OSError):
                self._set_slots(before, patience)
            raise
        finally:
            self._n_fetched = [self._pieces.n_fetched(i) for i in range(len(before.slots))]
            self._row = None  # the ledger counts the bytes of each row
            self._row = _SlotRow(self._pieces, self.slot_bytes)

    def _set_slots(self, budget: SlotBudget, patience: float) -> None:
        """Set the numbers of slots, in pools that get smaller first; wait for users of pieces."""
        now = [self._pieces.n_slots(i) for i in range(len(budget.slots))]
        for i in sorted(range(len(now)), key=lambda i: budget.slots[i] - now[i]):
            end = time.monotonic() + patience
            while budget.slots[i] != self._pieces.n_slots(i):
                try:
                    self._pieces.resize(i, budget.slots[i])
                except BufferError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(_LOOK_SECONDS)
            if budget.slots[i] > now[i]:
                block, begin = self._blocks[i], now[i] * self._pieces.stride(i)
                block._warm_range(begin, block.committed_bytes - begin)

    def _pin(self, progress: Callable[[int], object] = lambda _: None) -> None:
        """Read the blocks of a model without experts that stay in memory, evenly spread.

        All stay if there are slots for all; else a window of slots is left for the others.
        `progress` is called with the bytes that were read.
        """
        ids, done = self._pinned_pieces(), 0
        for n, (piece, nbytes) in enumerate(ids, 1):
            self._pieces.prefetch([number for number, _ in ids[n : n + WINDOW]])
            self._pins.append(self._pieces.holder())
            self._pins[-1].ensure([piece])
            done += nbytes
            progress(done)

    def _unpin(self) -> None:
        while self._pins:
            self._pins.pop().close()

    @property
    def _pinned_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._pinned_pieces())

    def _pinned_pieces(self) -> list[tuple[int, int]]:
        """Return the numbers and the bytes of the blocks that stay."""
        found: list[tuple[int, int]] = []
        if self._table.has_experts:
            return found
        for number, kind in enumerate(self._table.kinds):
            pieces = [block.first for block in self._table.blocks if block.kind == number]
            n_slots = self._pieces.n_slots(number)
            n = len(pieces) if n_slots >= len(pieces) else max(0, n_slots - WINDOW)
            found += [(pieces[i * len(pieces) // n], kind.piece_bytes) for i in range(n)]
        return sorted(found)

    def give_back(self) -> int:
        """Give a quarter of the slots back that are not needed; return the bytes.

        It is less if threads use pieces in too many of them.
        """
        if self._pieces.closed:
            return 0
        now, before = self._budget, self.slot_bytes
        spare = before - sum(pool.least_bytes for pool in now.pools)
        for share in _GIVEN_BACK if spare > 0 else ():
            with suppress(BufferError):
                self.resize(now.kept_bytes + before - max(1, int(spare * share)))
                break
        return max(0, before - self.slot_bytes)

    def _close(self) -> None:
        """End it: wait for reads, and give the slots back. Twice is no error.

        BufferError: an engine has a holder of its own; the stream goes on.
        """
        for each in list(self._holders):
            each.holder.close()
        self._local, self._holders = threading.local(), WeakSet()
        self._unpin()
        try:
            self._pieces.close()
        except BufferError:
            self._pin()
            raise
        self._files.fds.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Stream cannot be pickled: open the file in the other process")

    def __repr__(self) -> str:
        if self._pieces.closed:
            return f"Stream('{self.path}', closed)"
        return (
            f"Stream('{self.path}', {format_bytes(self.resident_bytes)} in memory of a budget of "
            f"{format_bytes(self.budget_bytes)}, {self.hits:,} hits, {self.misses:,} misses)"
        )


_streams: WeakSet[Stream] = WeakSet()


def open_streams() -> list[Stream]:
    """Return the streams of this process that are open, by path."""
    found = [stream for stream in list(_streams) if not stream._pieces.closed]
    return sorted(found, key=lambda stream: stream.path)
