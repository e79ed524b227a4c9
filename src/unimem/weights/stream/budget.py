"""The budget of a streamed model: what stays in memory, and how many slots each pool has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unimem._core.pieces import strides
from unimem.base.text import format_bytes
from unimem.errors import CapacityError
from unimem.system import limits, policy
from unimem.system.placement import PlacementOptions
from unimem.system.pressure import wanted_room
from unimem.system.sizes import LimitFacts, parse_size
from unimem.weights.stream.piece_table import PieceKind, PieceTable

# The share of the room that stays free for what the process takes later.
_FREE_SHARE = 8
# Slots move, an eighth of a pool's at once, after this many reads a pool, if they save that many
# times more reads in the other pool. Routing without a preference differs less by chance.
_MOVED_SHARE, _LEAST_READS, _LEAST_GAIN = 8, 128, 1.5
_PAGE_BYTES = {"2m": 2 << 20, "1g": 1 << 30}


class Pool(NamedTuple):
    """The memory of a pool of slots.

    Attributes
    ----------
    kind : PieceKind
        Its pieces.
    slot_bytes : int
        From one slot to the next.
    step_bytes : int
        Memory is taken in whole steps.
    """

    kind: PieceKind
    slot_bytes: int
    step_bytes: int

    def nbytes(self, n_slots: int) -> int:
        """Return the memory of slots, in whole steps."""
        return -(-n_slots * self.slot_bytes // self.step_bytes) * self.step_bytes

    @property
    def least_bytes(self) -> int:
        """The memory of the slots that computing a layer needs."""
        return self.nbytes(self.kind.least_slots)

    @property
    def most_bytes(self) -> int:
        """The memory of a slot for each piece."""
        return self.nbytes(self.kind.n_pieces)

    def most_slots(self, nbytes: int) -> int:
        """Return the number of slots in memory of this size, at most one for each piece."""
        whole = nbytes // self.step_bytes * self.step_bytes
        return min(self.kind.n_pieces, whole // self.slot_bytes)


class SlotBudget(NamedTuple):
    """A budget, and its division.

    Attributes
    ----------
    nbytes : int
        The most memory that the weights take.
    kept_bytes : int
        Memory of what stays.
    pools : tuple of Pool
        The pools, and in `slots` the number of slots of each.
    """

    nbytes: int
    kept_bytes: int
    pools: tuple[Pool, ...]
    slots: tuple[int, ...]

    @property
    def slot_bytes(self) -> int:
        """Memory of all slots."""
        return sum(pool.nbytes(n) for pool, n in zip(self.pools, self.slots, strict=True))

    @property
    def least_bytes(self) -> int:
        """The least budget."""
        return self.kept_bytes + sum(pool.least_bytes for pool in self.pools)


def make_pools(
    table: PieceTable, placement: PlacementOptions, facts: policy.Facts = limits
) -> tuple[Pool, ...]:
    """Return the pools of a model's pieces, before memory is taken."""
    sizes = strides([kind.part_bytes for kind in table.kinds], table.pieces())
    return tuple(
        Pool(kind, nbytes, _step_bytes(kind.n_pieces * nbytes, placement, facts))
        for kind, nbytes in zip(table.kinds, sizes, strict=True)
    )


def _request(nbytes: int, placement: PlacementOptions) -> policy.Request:
    numa = policy.parse_numa(placement.get("numa"))
    return policy.Request(nbytes, placement.get("pages", "auto"), numa, reserve=nbytes)


def _step_bytes(nbytes: int, placement: PlacementOptions, facts: policy.Facts) -> int:
    """Return the steps in which a block takes memory that may grow to `nbytes`."""
    request = _request(nbytes, placement)
    pages = policy.decide(request, facts).pages
    is_huge = pages == "thp" or (pages == "auto" and nbytes >= request.thp_bytes)
    return _PAGE_BYTES.get(pages, request.thp_bytes if is_huge else request.page_bytes)


def rounded_bytes(nbytes: int, placement: PlacementOptions, facts: policy.Facts = limits) -> int:
    """Return the memory of a block of `nbytes` bytes."""
    return policy.extent(_request(nbytes, placement), facts).nbytes


def choose_budget(facts: LimitFacts = limits) -> int:
    """Return the bytes for which there is room.

    An eighth of the room stays free, and at least twice as much as a limit should have.
    """
    return min(
        limit.room_bytes - max(limit.room_bytes // _FREE_SHARE, 2 * wanted_room(limit.limit_bytes))
        for limit in facts.memory_limits()
    )


def plan_budget(
    path: str,
    asked: int | str | None,
    kept_bytes: int,
    pools: Sequence[Pool],
    facts: LimitFacts = limits,
    taken_bytes: int = 0,
) -> SlotBudget:
    """Divide a budget: each pool gets its share of the bytes of all pieces.

    Parameters
    ----------
    path : str
        The model, for messages.
    asked : int, str or None
        As for `parse_size`; None is what there is room for, beside `taken_bytes` that the weights
        have already.
    kept_bytes : int
        Memory of what stays.
    pools : sequence of Pool
        The pools.
    facts : optional
        Has the limits on memory.

    Raises
    ------
    CapacityError
        It is below the least budget that works, which the message names.
    """
    least = kept_bytes + sum(pool.least_bytes for pool in pools)
    most = kept_bytes + sum(pool.most_bytes for pool in pools)
    if asked is None:
        nbytes = min(most, choose_budget(facts) + taken_bytes)
    else:
        nbytes = parse_size(asked, "budget", facts)
    if nbytes < least:
        room = "this process has room for" if asked is None else f"budget={asked!r} allows"
        raise CapacityError(
            f"streaming {path} takes at least {least} bytes ({format_bytes(least)}), and {room} "
            f"{format_bytes(max(0, nbytes))}: {format_bytes(kept_bytes)} are for what every token "
            f"needs, the rest for the pieces of one layer: give budget={least} or more",
            max(0, nbytes),
            0,
            least,
        )
    slots = [pool.kind.least_slots for pool in pools]
    left, wanted = nbytes - least, most - least
    # The largest comes last: it gets what rounding has left of the others' shares.
    for i in sorted(range(len(pools)), key=lambda i: pools[i].most_bytes):
        pool = pools[i]
        more = pool.most_bytes - pool.least_bytes
        share = min(more, left * more // wanted) if wanted else 0
        slots[i] = max(slots[i], pool.most_slots(pool.least_bytes + share))
        left -= pool.nbytes(slots[i]) - pool.least_bytes
        wanted -= more
    return SlotBudget(nbytes, kept_bytes, tuple(pools), tuple(slots))


def move_slots(budget: SlotBudget, fetched: Sequence[int]) -> SlotBudget:
    """Move slots of experts between pools, to where they save more reads; the bytes stay.

    One more slot saves the reads of one of the pieces that have no slot: as many as these have on
    average. Pools that have a slot for each piece are left out, and a pool keeps the slots for all
    experts of a block, which prompts use.

    Parameters
    ----------
    budget : SlotBudget
        The present division.
    fetched : sequence of int
        How many pieces of each pool were read since the last division.
    """
    if sum(fetched) < _LEAST_READS * len(fetched):
        return budget
    slots = list(budget.slots)
    saved = {
        i: n / (pool.kind.n_pieces - slots[i])
        for i, (pool, n) in enumerate(zip(budget.pools, fetched, strict=True))
        if slots[i] < pool.kind.n_pieces
    }
    order = sorted(saved, key=lambda i: saved[i])
    spare = budget.nbytes - budget.kept_bytes - budget.slot_bytes
    for giver, taker in zip(order[: len(order) // 2], reversed(order), strict=False):
        less, more = budget.pools[giver], budget.pools[taker]
        n = slots[giver] - max(1, slots[giver] // _MOVED_SHARE)
        n = max(n, less.kind.block_slots, less.kind.least_slots)
        if saved[taker] < _LEAST_GAIN * saved[giver] or n >= slots[giver]:
            continue
        room = less.nbytes(slots[giver]) - less.nbytes(n) + spare + more.nbytes(slots[taker])
        if (n_more := more.most_slots(room)) > slots[taker]:
            spare = room - more.nbytes(n_more)
            slots[giver], slots[taker] = n, n_more
    return budget._replace(slots=tuple(slots))
