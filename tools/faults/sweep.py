"""Make each system call fail once in each operation, and check that nothing is lost.

``faults.py`` runs it in a process that has loaded ``tests/support/kernel/shim/fail_call.c``. It
prints a JSON document with a row for each operation.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import operations
import psutil
from operations import Call, Operation

import unimem as um
from kills import unkept
from unimem._core import status
from unimem._core.status import ledger
from unimem.accounting import published

#: The number of errors of a call; each is tried in a round of its own.
N_ROUNDS = 3
# A single difference may be a stack that the C library keeps. A real loss repeats each time.
_TRIES = 3

_SYSTEM, _MAPPINGS, _ALLOCATIONS = 1, 2, 4
# A folder identifies them, since a checkout may be called unimem and contain an environment.
_OURS = re.compile(rf"^{re.escape(str(Path(status.__file__).parents[1]))}/.*\.so|/libunimem\.so")
_PYTHON = re.compile(r"/(lib)?python3[^/]*$")
# The interpreter's modules that make system calls.
_MODULES = re.compile(r"/(fcntl|mmap|_socket|_posixsubprocess|select)\.[^/]*\.so$")


class Shim:
    """The preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.fail_name.restype = ctypes.c_char_p
        self._library.fail_range.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)

    def find_callers(self) -> None:
        """Count the calls of unimem and of the interpreter, as far as they are loaded."""
        self._library.fail_forget_ranges()
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, access, *rest = line.split(None, 5)
            if "x" not in access or len(rest) < 4:
                continue
            path, kinds = rest[3], 0
            if _OURS.search(path):
                kinds = _SYSTEM | _MAPPINGS | _ALLOCATIONS
            elif _MODULES.search(path):
                kinds = _SYSTEM | _MAPPINGS
            elif _PYTHON.search(path) or "/libpython3" in path:
                kinds = _SYSTEM
            begin, end = (int(part, 16) for part in place.split("-"))
            assert not kinds or self._library.fail_range(begin, end, kinds), "too many libraries"

    def begin(self, name: str = "", nth: int = 0, round_: int = 0) -> None:
        """Start counting, and fail the nth call of a function with its error of a round."""
        self._name = name.encode()  # the library keeps reading it
        self._library.fail_begin(self._name, nth, round_)

    def end(self) -> None:
        """Stop counting."""
        self._library.fail_end()

    def names(self) -> list[str]:
        """Name the counted calls, in order."""
        n = self._library.fail_calls()
        return [self._library.fail_name(i + 1).decode() for i in range(n)]

    def failure(self) -> int:
        """Return the errno that a call failed with; 0 if none failed."""
        return int(self._library.fail_errno())


# ---- what a process has ----


def state(folder: Path) -> dict[str, Any]:
    """Return what must be unchanged after a failed call."""
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            fds.append(re.sub(r"\d+\]", "]", os.readlink(f"/proc/self/fd/{fd}")))
    files = {
        os.path.relpath(os.path.join(at, name), folder)
        for at, folders, names in os.walk(folder)
        for name in (*folders, *names)
    }
    return {
        "ledger": {
            name: (row["n_mappings"], row["mapped_bytes"]) for name, row in ledger().items()
        },
        "mappings": _mapped_bytes(),
        "descriptors": Counter(fds),
        "files": files,
        "/dev/shm": {*unkept("unimem-stage-"), *unkept("unimem-kv-")},
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
    }


def _mapped_bytes() -> Counter[str]:
    """Sum up the bytes of mappings by kind; the heap and the stack belong to the program.

    In this process neither malloc nor the interpreter maps memory of its own.
    """
    found: Counter[str] = Counter()
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, _, _, _, *name = line.split(None, 5)
        what = name[0] if name else "anonymous"
        if what not in ("[heap]", "[stack]"):
            begin, end = (int(part, 16) for part in place.split("-"))
            found[what] += end - begin
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Say how two states differ."""
    found = []
    for name, old in before.items():
        new = after[name]
        if old != new:
            if isinstance(old, Counter):
                names = sorted(one for one in {*old, *new} if old[one] != new[one])
                text = ", ".join(f"{one} {old[one]} -> {new[one]}" for one in names)
            elif isinstance(old, set):
                text = f"gone {sorted(old - new)}, new {sorted(new - old)}"
            else:
                text = f"{old} -> {new}"
            found.append(f"{name}: {text}")
    return found


# ---- one call that fails ----


class Outcome(NamedTuple):
    """The result of a failed call.

    `kind` is "error" (a typed one), "warning" (a fallback with a warning), "none" (no effect) or
    "not failed" (the call has no such error). `call` is the call with its errno. `losses` says what
    was lost or is wrong.
    """

    kind: str
    call: str
    losses: list[str]


class Sweep:
    """Makes the calls of one operation fail, one after the other, in an empty folder."""

    def __init__(self, shim: Shim, operation: Operation, folder: Path) -> None:
        self._shim, self._operation, self._folder = shim, operation, folder
        self._unraisable: list[str] = []

    def run(self, n_rounds: int) -> dict[str, Any]:
        """Fail each call once in each round; return a row of the table."""
        kinds: Counter[str] = Counter()
        losses: dict[str, str] = {}
        sys.unraisablehook = lambda found: self._unraisable.append(repr(found.exc_value))
        with self._operation.prepare(self._folder) as call:
            # This imports modules, and gives threads their stacks.
            for _ in range(2):
                expected = call.run()
                call.undo()
            self._shim.find_callers()
            names: list[str] = []
            for _ in range(2):  # the first run fills caches for the second
                self._shim.begin()
                assert call.run() == expected, "it does not give the same each time"
                self._shim.end()
                names = self._shim.names()
                call.undo()
            for round_ in range(n_rounds):
                for name, n in Counter(names).items():
                    for nth in range(1, n + 1):
                        outcome = self._confirmed(call, expected, (name, nth, round_))
                        kinds[outcome.kind] += 1
                        for loss in outcome.losses:
                            losses.setdefault(loss, outcome.call)
        sys.unraisablehook = sys.__unraisablehook__
        return {
            "operation": self._operation.name,
            "calls": dict(Counter(names)),
            "outcomes": dict(kinds),
            "losses": [f"{call}: {loss}" for loss, call in losses.items()],
        }

    def _confirmed(self, call: Call, expected: Any, where: tuple[str, int, int]) -> Outcome:
        """Fail a call; if something seems lost, repeat until it is certain."""
        outcome = self._fail(call, expected, *where)
        for _ in range(_TRIES - 1):
            if not outcome.losses:
                break
            outcome = self._fail(call, expected, *where)
        return outcome

    def _fail(self, call: Call, expected: Any, name: str, nth: int, round_: int) -> Outcome:
        shim = self._shim
        losses: list[str] = []
        gc.collect()
        self._unraisable.clear()
        before, facts = state(self._folder), call.facts()
        raised, value = False, None
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            shim.begin(name, nth, round_)
            try:
                value = call.run()
            except BaseException as error:
                shim.end()
                raised = True
                losses += _wrong_error(error)
            shim.end()
            gc.collect()
        failed = shim.failure()
        if raised:
            # The next release retries mappings that could not be unmapped.
            if not call.in_parts and name != "munmap":
                losses += differences(before, state(self._folder))
            if call.facts() != facts:
                losses.append(f"the object was {facts} and is {call.facts()}")
        elif value != expected:
            losses.append(f"expected {expected!r:.200}, got {value!r:.200}")
        call.undo()
        try:
            value = call.run()
        except BaseException as error:
            losses.append(f"it cannot be done again: {error!r:.300}")
        else:
            if value != expected:
                losses.append(f"then, expected {expected!r:.200}, got {value!r:.200}")
        call.undo()
        gc.collect()
        losses += differences(before, state(self._folder))
        losses += [f"not raised: {text}" for text in self._unraisable]
        losses += [str(each.message) for each in told if each.category is ResourceWarning]
        warned = any(issubclass(each.category, um.PlacementWarning) for each in told)
        kind = "error" if raised else "warning" if warned else "none" if failed else "not failed"
        why = "short" if failed == -1 else os.strerror(failed)
        return Outcome(kind, f"{name} ({nth}): {why}", losses)


def _wrong_error(error: BaseException) -> list[str]:
    """Say what is wrong with an error: a type that a caller would not expect, or no text."""
    if not isinstance(error, OSError | MemoryError):
        return [f"raised {error!r:.300}"]
    # Python itself raises a MemoryError without a text.
    if isinstance(error, OSError) and not (error.errno and error.strerror):
        return [f"an error without a reason: {error!r:.300}"]
    return []


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Let each call fail once.")
    parser.add_argument("--rounds", type=int, default=N_ROUNDS)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    shim = Shim()
    rows = []
    # All other processes are read in the same way, and their number varies.
    psutil.pids = lambda: [os.getpid()]
    published.publish()  # the first decoder would publish it, and it stays
    gc.freeze()
    for operation in operations.OPERATIONS:
        if given.names and not any(name in operation.name for name in given.names):
            continue
        folder = Path(tempfile.mkdtemp(dir=given.dir))
        try:
            before = state(folder)
            row = Sweep(shim, operation, folder).run(given.rounds)
            gc.collect()
            row["losses"] += [
                f"at the end: {text}"
                for text in differences(before, state(folder))
                # This loads libraries and prepares the folder.
                if not text.startswith(("mappings", "files"))
            ]
        except operations.Absent as absent:
            row = {"operation": operation.name, "skipped": str(absent)}
        finally:
            shutil.rmtree(folder)
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
