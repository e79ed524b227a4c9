"""Streamed weights in a plan, and what tokens have to read from the disk."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from unimem.planning.needs import Budget, Need, Storage
from unimem.system.disks import Disk
from unimem.system.sizes import parse_size
from unimem.weights.files import ModelFiles
from unimem.weights.stream.budget import choose_budget, plan_budget
from unimem.weights.stream.piece_table import WINDOW
from unimem.weights.streamed import StreamPlan, plan_streamed
from unimem.weights.tensors import Contents

if TYPE_CHECKING:
    from unimem.system.limits import Limit
    from unimem.system.placement import PlacementOptions
    from unimem.weights.opened import Weights

WHY_STREAMED = "mapped, it would not stay in memory"
_PADDING, _SLOTS = "weights:padding", "weights:slots"
_ALL = 1 << 62  # a budget for any model


@dataclass(frozen=True, slots=True)
class Reading:
    """What a token is expected to read from the disk. Any number of threads may use it.

    Which experts a token uses is not known before: each is taken to be as likely as the others. If
    some are used more often, it reads less.

    Attributes
    ----------
    used_bytes : int
        Bytes of the weights that a token uses.
    token_bytes : int
        Bytes that it reads from the disk: of the weights that have no room, and for a mapped file
        what the kernel's read-ahead brings beside them.
    whole_bytes : int
        The budget for weights from which on no token reads any.
    disk : str or None
        The disk's name, as `unimem.doctor` gives it; None if unknown.
    read_ahead_bytes : int or None
        Its read-ahead.
    bytes_per_second, memory_bytes_per_second : int or None
        The remembered speeds of the disk and of memory; None before ``doctor(disk=...)``.
    measured : str or None
        The day when they were measured.
    """

    used_bytes: int
    token_bytes: int
    whole_bytes: int
    disk: str | None = None
    read_ahead_bytes: int | None = None
    bytes_per_second: int | None = None
    memory_bytes_per_second: int | None = None
    measured: str | None = None

    @property
    def read_seconds(self) -> float | None:
        """The time in which a token reads from the disk; None if the speed is unknown."""
        return None if self.bytes_per_second is None else self.token_bytes / self.bytes_per_second

    @property
    def compute_seconds(self) -> float | None:
        """The time in which a token reads its weights in memory; None if the speed is unknown."""
        rate = self.memory_bytes_per_second
        return None if rate is None else self.used_bytes / rate

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of tokens that read first and compute then; None if a speed is unknown."""
        if self.read_seconds is None or self.compute_seconds is None:
            return None
        seconds = self.read_seconds + self.compute_seconds
        return 1 / seconds if seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and texts."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}

    def on(self, disk: Disk | None) -> Reading:
        """Return a copy for a disk."""
        if disk is None:
            return self
        found = replace(self, disk=disk.name, read_ahead_bytes=disk.read_ahead_bytes)
        if (speed := disk.speed) is None:
            return found
        return replace(
            found,
            bytes_per_second=speed.bytes_per_second,
            memory_bytes_per_second=speed.memory_bytes_per_second,
            measured=speed.measured,
        )


class StreamedWeights:
    """The weights of a streamed model in a plan: what stays, and the slots. For one thread.

    It begins with the least number of slots. `is_open` says whether the weights are in memory, with
    their budget.
    """

    def __init__(self, contents: Contents, planned: StreamPlan, *, is_open: bool = False) -> None:
        self._path, self._plan, self.is_open = contents.files[0], planned, is_open
        self.division = planned.budget
        self._used = [0] * len(planned.table.kinds)  # pieces that a token uses
        for block in planned.table.blocks:
            n = min(block.n, planned.table.kinds[block.kind].least_slots)
            self._used[block.kind] += n if planned.table.has_experts else block.n
        # Of this table, a token uses a row, unless it computes the outputs as well.
        names = ("token_embd.weight", "output.weight")
        rows = contents.tensors[names[0]].nbytes if all(n in contents.tensors for n in names) else 0
        self.used_bytes = sum(planned.types.values()) - rows + self._sum(self._used)

    @classmethod
    def of_files(
        cls, contents: Contents, model: ModelFiles, placement: PlacementOptions, budget: Budget
    ) -> StreamedWeights:
        """Plan files; ValueError says why they cannot be streamed."""
        planned = plan_streamed(model, _ALL, placement, budget)
        least = tuple(pool.kind.least_slots for pool in planned.budget.pools)
        return cls(contents, planned._replace(budget=planned.budget._replace(slots=least)))

    @classmethod
    def of_weights(cls, weights: Weights) -> StreamedWeights | None:
        """Return what opened weights stream; None if they are not streamed."""
        stream = weights.stream
        if stream is None:
            return None
        types = weights._types_in_memory()
        del types["slots"]
        return cls(weights, StreamPlan(stream._table, stream._budget, types, [], 0), is_open=True)

    def _sum(self, counts: list[int]) -> int:
        """Return the bytes of the counted pieces of each kind."""
        kinds = self._plan.table.kinds
        return sum(n * kind.piece_bytes for n, kind in zip(counts, kinds, strict=True))

    @property
    def whole_bytes(self) -> int:
        """The budget with a slot for each piece."""
        return self.division.kept_bytes + sum(pool.most_bytes for pool in self.division.pools)

    def divide(self, asked: int | str | None, found: tuple[Limit, ...], rest_bytes: int) -> None:
        """Choose the number of slots: by a budget, or what limits have room for beside the rest.

        CapacityError is raised if the budget that was asked for is too small. The least number of
        slots is planned even if there is no room for it.
        """
        now = self.division
        if asked is None:
            rest = (replace(one, used_bytes=one.used_bytes + rest_bytes) for one in found)
            room = choose_budget(_Limits(tuple(rest)))
            nbytes = max(now.least_bytes, min(self.whole_bytes, room))
        else:
            nbytes = parse_size(asked, "weights_budget", _Limits(found))
        self.division = plan_budget(self._path, nbytes, now.kept_bytes, now.pools)

    @property
    def most_slots(self) -> int:
        """The most slots that a pool of experts may have; 0 for a model without experts."""
        table = self._plan.table
        return max(kind.n_pieces for kind in table.kinds) if table.has_experts else 0

    def needs(self, storage: Storage, budget: Budget) -> list[Need]:
        """List the blocks: of what stays, and of the slots of each pool."""
        types = {f"weights:{kind}": n for kind, n in self._plan.types.items() if n}
        found = [storage.block(self._plan.kept_bytes, _PADDING, budget, types)]
        division = self.division
        for pool, n in zip(division.pools, division.slots, strict=True):
            found.append(storage.block(pool.nbytes(n), _SLOTS, budget))
        return found

    def reading(self) -> Reading:
        """Return what a token reads of the pieces that have no slot."""
        table = self._plan.table
        read = 0.0
        for kind, used, n in zip(table.kinds, self._used, self.division.slots, strict=True):
            if n < kind.n_pieces:
                # Blocks are used in a circle, and some slots are for those that pass through.
                n_there = n if table.has_experts else max(0, n - WINDOW)
                read += used * kind.piece_bytes * (1 - n_there / kind.n_pieces)
        return Reading(self.used_bytes, round(read), self.whole_bytes)

    def mapped_reading(self, spilled_bytes: int, read_ahead_bytes: int) -> Reading:
        """Return what a token reads of a mapped file that has not enough room.

        What every token uses is taken to stay, as far as it can. Each part of an expert that is
        read brings a read-ahead more than is used.
        """
        kinds = self._plan.table.kinds
        whole = self._sum([kind.n_pieces for kind in kinds])
        parts = sum(n * len(kind.part_bytes) for n, kind in zip(self._used, kinds, strict=True))
        share = min(spilled_bytes, whole) / whole
        read = share * (self._sum(self._used) + parts * read_ahead_bytes)
        read += max(0, spilled_bytes - whole)
        return Reading(self.used_bytes, round(read), self.whole_bytes)


class _Limits(NamedTuple):
    """Limits on memory, as `limits.memory_limits` returns them."""

    found: tuple[Limit, ...]

    def memory_limits(self) -> tuple[Limit, ...]:
        """Return them."""
        return self.found
