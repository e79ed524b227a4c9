"""The folder that remembers of staged models what their processes cannot know.

It has a budget for all of them, and for each one its last use, whether it is pinned, and the links
to it. The models themselves lie in memory that processes keep: see `unimem.weights.staged`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from unimem.base.atomic_file import write_text
from unimem.base.cache_folder import BudgetFolder, CachedFile, check_own_folder
from unimem.base.descriptors import Descriptors
from unimem.base.text import format_bytes
from unimem.errors import CapacityError, PlacementError
from unimem.staging.keeper import drop
from unimem.staging.readers import find_readers
from unimem.system import limits
from unimem.weights.staged import Held, holders

_ENTRY = re.compile(r"[0-9a-f]{32}")
_BUDGET, _TURN, _USES = "budget", ".turn", ".uses"
# A model that was staged so lately is in use: who asked for its path is about to open it.
_START_NS = 10 * 10**9
_TICK_NS = 10**9 // os.sysconf("SC_CLK_TCK")

Tell = Callable[[str], object]


class Remembered(NamedTuple):
    """The use, the pin and the links of a model, as the folder has them.

    Attributes
    ----------
    used_ns : int
        When it was last staged, or seen in use, in nanoseconds since 1970.
    is_pinned : bool
        Whether it stays, however long it is unused.
    links : tuple of str
        Stable paths that lead to its files.
    """

    used_ns: int
    is_pinned: bool = False
    links: tuple[str, ...] = ()


def open_staging_folder(*, create: bool = False) -> StagingFolder | None:
    """Open this user's folder; None if it is missing, unless `create` makes it.

    It is ``UNIMEM_STAGING``, or else ``unimem-staging-UID`` in the first of ``/dev/shm``, the
    user's folder in ``/run`` and ``/tmp`` that can be used. Nothing of it outlives the machine's
    next start, as staged models do not.

    Raises
    ------
    PlacementError
        `create`, and none of them can be used.
    """
    uid, asked = os.geteuid(), os.environ.get("UNIMEM_STAGING", "")
    roots = [root for root in (limits.SHM, f"/run/user/{uid}", "/tmp") if os.path.isdir(root)]
    places = (
        [os.path.abspath(asked)] if asked else [f"{root}/unimem-staging-{uid}" for root in roots]
    )
    refusals = []
    for make in (False, True) if create else (False,):
        for path in places:
            try:
                check_own_folder(path, create=make, instead="another one in UNIMEM_STAGING")
            except OSError as error:
                refusals.append(f"{path}: {error.strerror}")
            else:
                return StagingFolder(path)
    if create:
        why = "; ".join(refusals[-len(places) :])
        raise PlacementError(
            errno.EACCES,
            f"nowhere to keep a budget, pins and links of staged models: {why}: UNIMEM_STAGING "
            "names another folder",
        )
    return None


def staged_ns(held: Held) -> int:
    """Return when a model was staged, in nanoseconds since 1970: when its keeper began.

    A model without a keeper was staged by this command, now.
    """
    if not held.pid:
        return time.time_ns()
    since_boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return time.time_ns() - max(0, since_boot - held.began * _TICK_NS)


def entries(found: Sequence[Held]) -> list[Remembered]:
    """Return what is remembered of each of these models."""
    folder = open_staging_folder()
    return [Remembered(staged_ns(held)) if folder is None else folder.entry(held) for held in found]


def staged_values() -> list[tuple[str, tuple[str, ...], float]]:
    """Return the name, the labels and the value of each metric of what is staged."""
    found, values = holders(), list[tuple[str, tuple[str, ...], float]]()
    for held, entry, readers in zip(found, entries(found), find_readers(found), strict=True):
        labels = (str(held.pid), held.source)
        n_readers = len(readers.pids) + readers.has_others
        unused_s = 0.0 if readers else (time.time_ns() - entry.used_ns) / 1e9
        values.append(("unimem_staged_bytes", (*labels, held.backing), held.nbytes))
        values.append(("unimem_staged_readers", labels, n_readers))
        values.append(("unimem_staged_unused_seconds", labels, unused_s))
    folder = open_staging_folder()
    if folder is not None and (budget := folder.budget_bytes) is not None:
        values.append(("unimem_staged_budget_bytes", (), budget))
    return values


class StagingFolder:
    """The folder of one user, at `path`. Any number of threads and processes may use it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._files = BudgetFolder(path, _ENTRY)

    # ---- the budget ----

    @property
    def budget_bytes(self) -> int | None:
        """The most that staged models take; None for no budget."""
        with suppress(OSError, ValueError), open(os.path.join(self.path, _BUDGET)) as file:
            nbytes = int(file.read(64))
            return nbytes if 0 <= nbytes < 1 << 63 else None
        return None

    def set_budget(self, nbytes: int | None) -> None:
        """Set the budget, or end it."""
        if nbytes is None:
            self._files.remove(_BUDGET)
        else:
            write_text(os.path.join(self.path, _BUDGET), f"{nbytes}\n")

    @contextmanager
    def turn(self, waiting: Callable[[], object]) -> Iterator[None]:
        """Stage one model at a time, so that two cannot take the same room; `waiting` is called."""
        with self._locked(_TURN, waiting):
            yield

    @contextmanager
    def uses(self) -> Iterator[None]:
        """Let no model be dropped for the budget between a look for it and a note of its use."""
        with self._locked(_USES):
            yield

    @contextmanager
    def _locked(self, name: str, waiting: Callable[[], object] = bool) -> Iterator[None]:
        path, flags = os.path.join(self.path, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        with Descriptors() as fds:
            fd = fds.add(os.open, path, flags | os.O_CREAT, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield

    def make_room(self, nbytes: int, what: str, tell: Tell) -> None:
        """Drop models that no process reads, the least recently used first, for a new one.

        Pinned models stay, as do those in use and those that programs keep. If only models that
        were staged just now could go, this waits until they have had time to be opened.

        Raises
        ------
        CapacityError
            The budget has no room for `nbytes`, and nothing was dropped.
        """
        while (missing := self._missing(nbytes)) > 0:
            found, rows = self._may_go()
            if sum(row.nbytes for row in rows) < missing:
                raise self._refusal(nbytes, what, found, rows)
            begun_ns = time.time_ns() - _START_NS
            old = [row for row in rows if row.used_ns <= begun_ns]
            if sum(row.nbytes for row in old) < missing:
                wait_s = (min(row.used_ns for row in rows if row not in old) - begun_ns) / 1e9
                tell(f"{what}: waiting {wait_s:.0f} s for a model that was staged just now")
                time.sleep(wait_s)
            else:
                self._drop_oldest(found, old, missing, tell)

    def trim(self, tell: Tell) -> int:
        """Drop what may go of the models beyond the budget; return the bytes that stay there."""
        found, rows = self._may_go()
        old = [row for row in rows if row.used_ns <= time.time_ns() - _START_NS]
        self._drop_oldest(found, old, self._missing(0), tell)
        return max(0, self._missing(0))

    def _missing(self, nbytes: int) -> int:
        """Return the bytes that a new model, or 0, would be beyond the budget."""
        budget = self.budget_bytes
        return 0 if budget is None else sum(held.nbytes for held in holders()) + nbytes - budget

    def _may_go(self) -> tuple[list[Held], list[CachedFile]]:
        """Return what is staged, and by its index what the budget may drop; note what is in use."""
        found, rows = holders(), []
        for i, (held, readers) in enumerate(zip(found, find_readers(found), strict=True)):
            entry = self.entry(held)
            if readers:
                self.note_use(held.source)
            elif held.kept_by == "command" and not entry.is_pinned:
                rows.append(CachedFile(str(i), held.nbytes, entry.used_ns))
        return found, rows

    def _drop_oldest(
        self, found: Sequence[Held], rows: Sequence[CachedFile], nbytes: int, tell: Tell
    ) -> None:
        def remove(name: str) -> bool:
            held = found[int(name)]
            with self.uses():  # it may have been staged again, or opened
                entry = self.entry(held)
                if entry.used_ns > time.time_ns() - _START_NS or any(find_readers([held])):
                    return False
                drop(held)
            self.clean(holders())
            tell(f"dropped {held.path}, of {held.source}: the least recently used, for the budget")
            return True

        self._files.remove_oldest(rows, nbytes, remove)

    def _refusal(
        self, nbytes: int, what: str, found: Sequence[Held], may_go: Sequence[CachedFile]
    ) -> CapacityError:
        budget, free = self.budget_bytes or 0, {row.name for row in may_go}
        stay = [held for i, held in enumerate(found) if str(i) not in free]
        used = sum(held.nbytes for held in stay)
        names = (
            f" ({', '.join(os.path.basename(held.source) for held in stay[:5])})" if stay else ""
        )
        return CapacityError(
            f"{what} of {format_bytes(nbytes)} does not fit: the budget of staged models is "
            f"{format_bytes(budget)}, and {format_bytes(used)} are in use, pinned or a program's"
            f"{names}: 'unimem stage --budget' sets it, 'unimem stage --list' shows the readers",
            budget,
            used,
            nbytes,
        )

    # ---- what is remembered of each model ----

    def _file(self, source: str) -> str:
        name = hashlib.sha256(os.fsencode(source)).hexdigest()[:32]
        return os.path.join(self.path, name)

    def _read(self, path: str) -> tuple[str, Remembered] | None:
        """Read the source of a model and what is remembered of it; None if that is damaged."""
        try:
            with open(path) as file:
                known = json.load(file)
                used_ns = os.fstat(file.fileno()).st_mtime_ns
            source, is_pinned, links = known["source"], known["pinned"], tuple(known["links"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        if not isinstance(is_pinned, bool) or {str} != {type(text) for text in (source, *links)}:
            return None
        return source, Remembered(used_ns, is_pinned, links)

    def entry(self, held: Held) -> Remembered:
        """Return what is remembered of a model; if nothing is, it was used when it was staged."""
        found = self._read(self._file(held.source))
        return Remembered(staged_ns(held)) if found is None else found[1]

    def note_use(self, source: str) -> None:
        """Note that a model is in use now."""
        now_ns = time.time_ns()  # finer than the kernel's own, so that uses have an order
        try:
            os.utime(self._file(source), ns=(now_ns, now_ns))
        except FileNotFoundError:
            self._write(source, is_pinned=False, links=())

    def pin(self, held: Held, is_pinned: bool) -> None:
        """Pin a model, or let it go when it is unused; a pin stays if it is staged again."""
        self._write(held.source, is_pinned=is_pinned, links=self.entry(held).links)

    def add_links(self, held: Held, links: Sequence[str]) -> None:
        """Remember links to a model, which go with it."""
        entry = self.entry(held)
        links = tuple(sorted({*entry.links, *links}))
        self._write(held.source, is_pinned=entry.is_pinned, links=links)

    def _write(self, source: str, *, is_pinned: bool, links: Sequence[str]) -> None:
        known = {"source": source, "pinned": is_pinned, "links": list(links)}
        write_text(self._file(source), json.dumps(known))

    def clean(self, found: Sequence[Held]) -> None:
        """Forget models that are not in `found`, and remove links that lead nowhere.

        Pins stay, so that a model that is staged again has them.
        """
        known = {os.path.basename(self._file(held.source)) for held in found}
        for file in self._files.files():
            if (one := self._read(os.path.join(self.path, file.name))) is None:
                continue
            source, entry = one
            links = tuple(link for link in entry.links if not _remove_dangling(link))
            with suppress(OSError):
                if file.name not in known and not entry.is_pinned and not links:
                    self._files.remove(file.name)
                elif links != entry.links:
                    self._write(source, is_pinned=entry.is_pinned, links=links)


def _remove_dangling(link: str) -> bool:
    """Remove a link that leads nowhere; return whether there is no such link any more."""
    if os.path.islink(link) and not os.path.exists(link):
        with suppress(OSError):
            os.unlink(link)
    return not os.path.lexists(link)


def link_into(folder: str, held: Held) -> list[str]:
    """Make links to the files of a staged model in a folder, the one to open first.

    A link of the same name is replaced at once. In ``/dev/shm`` links are relative, so that they
    hold wherever it is mounted.

    Raises
    ------
    OSError
        The folder cannot be made or written to, or has a file of this name that is no link.
    """
    with suppress(FileExistsError):
        os.mkdir(folder, 0o755)  # the links are for whom the files are for
    links = []
    for path in dict.fromkeys((held.path, *held.paths)):
        has_name = held.backing in ("tmpfs", "shm")
        link = os.path.join(folder, os.path.basename(path if has_name else held.source))
        target = path
        if os.path.realpath(folder).startswith(f"{limits.SHM}/") and held.backing == "shm":
            target = os.path.relpath(path, os.path.realpath(folder))
        if os.path.lexists(link) and not os.path.islink(link):
            raise FileExistsError(errno.EEXIST, "Is no link, and stays", link)
        temporary = f"{link}.{os.urandom(4).hex()}"
        os.symlink(target, temporary)
        os.replace(temporary, link)
        links.append(link)
    return links
