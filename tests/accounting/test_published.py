"""Published ledgers: visible to other processes, and read as untrusted input."""

from __future__ import annotations

import errno
import json
import mmap
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import unimem as um
from conftest import Run
from support.processes.warm_python import run_script
from unimem._core.ledger import Entry
from unimem.accounting import published as shown
from unimem.accounting.published import COUNTERS, NAME, NBYTES, Published, published
from unimem.base.kernel_files import parse_fields
from unimem.system import memfds
from unimem.system import process as processes

Patch = pytest.MonkeyPatch
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_shown() -> Iterator[None]:
    shown._unpublish()
    yield
    shown._unpublish()


def look(pid: int | None = None) -> Published:
    found = published(pid or os.getpid())
    assert found is not None
    return found


def names() -> list[str]:
    return [entry.name for entry in look().entries]


def counted() -> list[int]:
    return list(look().counters.values())[:4]


def told() -> list[str]:
    said: list[str] = []
    assert published(os.getpid(), said) is None
    return said


@contextmanager
def other(script: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that prints a line when it is ready and ends with its input."""
    program = f"""
import os, sys
import unimem as um
from unimem.accounting import published as shown
{textwrap.dedent(script)}
print(os.getpid(), flush=True)
sys.stdin.read()
"""
    words = [*command, sys.executable, "-W", "error", "-c", program]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline(), process.communicate()[1]
        yield process
    finally:
        assert process.communicate()[1] == ""


def test_another_process_sees_entries_and_counters() -> None:
    script = """
        import atexit
        block = um.Block(1 << 20, name="mine", category="scratch", pages="4k")
        atexit.register(block.close)
        tally = shown.Tally()
        tally.count(5, 0)
        for n in range(3):
            tally.count(0, 1)
            tally.hold(100 * n, n)
            tally.stream(5 + n, 3, 4096, 99)
    """
    with other(script) as process:
        found = look(process.pid)
        assert found.counters == dict(zip(COUNTERS, (5, 3, 200, 2, 7, 3, 4096, 99), strict=True))
        assert found.truncated == 0
        (mine,) = (entry for entry in found.entries if entry.name == "mine")
        assert (mine.category, mine.nbytes, mine.reserved_bytes) == ("scratch", MIB, MIB)
        assert mine.requested is not None
        assert mine.requested["pages"] == "4k"
        areas = Path(f"/proc/{process.pid}/maps").read_text()
        assert f"{mine.address:x}-{mine.address + MIB:x}" in areas
        assert areas.count(f"/memfd:{NAME} (deleted)\n") == 1
        # It is in the ledger as all of unimem's memory is.
        (itself,) = (entry for entry in found.entries if entry.name == NAME)
        assert (itself.category, itself.nbytes) == ("diagnostics", NBYTES)
    assert published(process.pid) is None


def test_other_processes_cannot_write_or_truncate_it() -> None:
    with other("shown.publish()") as process:
        folder = Path(f"/proc/{process.pid}/fd")
        (path,) = (fd for fd in folder.iterdir() if NAME in os.readlink(fd))
        fd = os.open(path, os.O_RDWR)
        try:
            for act in (lambda: os.write(fd, b"mine"), lambda: os.ftruncate(fd, 0)):
                with pytest.raises(PermissionError):
                    act()
            with pytest.raises(PermissionError):
                mmap.mmap(fd, NBYTES)
        finally:
            os.close(fd)


def test_a_silent_or_missing_process_has_no_ledger() -> None:
    said: list[str] = []
    with other("") as process:
        assert published(process.pid, said) is None
    for pid in (process.pid, -1, 0, 2**40, os.getpid()):
        assert published(pid, said) is None
    assert said == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_process_of_another_user_cannot_be_read() -> None:
    shown.publish()
    script = f"""
        import os
        from unimem.accounting.published import published
        assert published({os.getpid()})
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        told = []
        print(published({os.getpid()}, told), told)
    """
    done = run_script(script)
    assert done.stdout == "None []\n", done.stderr


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare (util-linux) is not installed")
def test_a_process_in_a_container_is_known_by_its_outer_pid() -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make namespaces of process numbers")
    with other("shown.publish()", *command) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        assert [entry.name for entry in look(int(children)).entries] == [NAME]


def test_nothing_is_left_at_exit(run_python: Run) -> None:
    """No warning appears, even if an engine ends during the interpreter's shutdown."""
    done = run_python(
        """
        import atexit
        ended = []
        atexit.register(lambda: (tally.count(1, 1), tally.end(), ended.append(1)))
        from unimem.accounting import published as shown
        tally = shown.Tally()
        class Late:
            def __del__(self):
                tally.hold(1, 1)
                tally.end()
        late = Late()
        """,
        "-W",
        "error",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_entries_are_the_last_published_ones() -> None:
    shown.publish()
    with um.Block(MIB, name="mine"):
        assert "mine" not in names()
        shown.refresh()
        assert "mine" in names()
    shown.publish()
    assert "mine" not in names()


def test_a_refresh_writes_only_possible_changes(monkeypatch: Patch) -> None:
    shown.refresh()
    assert published(os.getpid()) is None  # nobody has asked for it to be shown
    shown.publish()
    written = Mock(return_value=())
    monkeypatch.setattr("unimem._core.ledger.entries", written)
    for _ in range(3):
        shown.refresh()
    assert written.call_count == 0
    um.Block(4096).close()
    for _ in range(3):
        shown.refresh()
    assert written.call_count == 1


def test_a_close_during_a_write_causes_another_write(monkeypatch: Patch) -> None:
    """A garbage collection can close a tally at any point."""
    tallies, blocks = [shown.Tally()], []

    def collected(text: bytes) -> int:
        if tallies:
            blocks.append(um.Block(4096, name="mine"))
            tallies.pop().end()
        return checksum(text)

    checksum = zlib.crc32
    with monkeypatch.context() as patch:
        patch.setattr(zlib, "crc32", collected)
        shown.publish()
    assert "mine" in names()
    blocks[0].close()


def test_the_next_refresh_completes_an_interrupted_write(monkeypatch: Patch) -> None:
    shown.publish()
    with um.Block(4096, name="mine"):
        with monkeypatch.context() as patch:
            patch.setattr(zlib, "crc32", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                shown.publish()
        shown.refresh()
        assert "mine" in names()


def test_a_cache_that_gave_memory_back_is_shown() -> None:
    """Its high-water mark exceeds its current size."""
    token = np.ones((2, 4, 64), "float32")
    with um.KVCache(2, 4, 64, 4096, grow=True, pages="4k", name="mine") as kv:
        for _ in range(1000):
            kv.append_all(token, token)
        most = kv.memory_usage_bytes
        kv.clear()
        shown.publish()
        (entry,) = (entry for entry in look().entries if entry.name == "mine")
        (part,) = entry.parts
        assert (part.active_bytes, part.high_water_bytes) == (0, most)
        assert part.nbytes < most


def test_counting_costs_no_fault_and_no_call() -> None:
    tally = shown.Tally()
    faults = []
    for _ in range(4):  # the kernel may take a page for a moment, to move it: seldom
        with um.measure() as m:
            for _ in range(100):
                tally.count(1, 1)
                tally.hold(1, 1)
        assert m.n_os_calls == m.n_allocations == 0
        faults.append(m.thread_minor_faults)
    assert 0 in faults


def test_engine_counters_add_up_and_outlive_engines() -> None:
    first, second = shown.Tally(), shown.Tally()
    first.count(10, 1)
    first.hold(1000, 11)
    second.count(20, 2)
    second.hold(2000, 22)
    assert counted() == [30, 3, 3000, 33]
    first.end()
    first.end()
    first.count(7, 7)  # it is no engine's any more
    assert counted() == [30, 3, 2000, 22]
    third = shown.Tally()  # on the row that the first has left
    third.count(100, 10)
    assert counted() == [130, 13, 2000, 22]


def test_pieces_are_counted_on_where_an_engine_has_ended() -> None:
    def counted_pieces() -> list[int]:
        return [n for name, n in look().counters.items() if name.startswith("piece")]

    first, second = shown.Tally(), shown.Tally()
    first.stream(10, 1, 100, 1000)
    first.stream(20, 2, 200, 2000)
    second.stream(1, 1, 1, 1)
    assert counted_pieces() == [21, 3, 201, 2001]
    first.end()
    third = shown.Tally()  # on the row that the first has left
    third.stream(5, 5, 5, 5)
    assert counted_pieces() == [26, 8, 206, 2006]


def test_each_engine_publishes_its_own_cache() -> None:
    def held() -> list[tuple[int | None, int | None]]:
        parts = {part.address: part for entry in look().entries for part in entry.parts}
        found = [parts[kv.address(0, "k")] for kv in caches]
        return [(part.active_bytes, part.high_water_bytes) for part in found]

    with um.Tape(MIB, pages="4k") as tape:
        caches = [um.KVCache(2, 4, 8, 100, tape=tape) for _ in range(2)]
        caches.append(um.KVCache(2, 4, 8, 1000, window=100, pages="4k"))
        tallies = [shown.Tally(kv.address(0, "k")) for kv in caches]
        shown.publish()
        assert held() == 3 * [(0, 0)]
        for i, tally in enumerate(tallies):
            tally.hold(256 * (i + 1), i + 1)
        assert held() == [(256, 256), (512, 512), (768, 768)]
        assert look().counters["kv_active_bytes"] == 6 * 256
        tallies[1].hold(0, 0)
        shown.publish()  # their parts themselves say nothing of what engines count
        assert held() == [(256, 256), (0, 0), (768, 768)]
        tallies[0].hold(1 << 40, 0)
        tallies[2].end()
        size = caches[0].capacity_bytes
        assert held() == [(size, size), (0, 0), (0, 0)]
        for kv in caches:
            kv.close()


def test_a_collected_tally_frees_its_row() -> None:
    tally = shown.Tally()
    tally.hold(1000, 10)
    del tally
    assert counted() == [0, 0, 0, 0]
    assert len(shown._shared.free_rows) == shown._N_ROWS  # type: ignore[union-attr]


def test_engines_without_a_free_row_are_not_counted() -> None:
    tallies = [shown.Tally() for _ in range(shown._N_ROWS + 2)]
    for tally in tallies:
        tally.count(1, 0)
    assert look().counters["n_prompt_tokens"] == shown._N_ROWS
    for tally in tallies:
        tally.end()
    assert len({cells.obj for cells in shown._shared.free_rows}) == 1  # type: ignore[union-attr]
    assert len(shown._shared.free_rows) == shown._N_ROWS  # type: ignore[union-attr]


def test_engines_come_and_go_in_threads() -> None:
    def work() -> None:
        for _ in range(20):
            tally = shown.Tally()
            tally.count(1, 2)
            tally.hold(5, 5)
            tally.end()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: work(), range(4)))
    assert counted() == [80, 160, 0, 0]


def test_a_decoder_counts_its_tokens() -> None:
    engine = pytest.importorskip(
        "unimem.engine",
        reason="no ggml: pip install ./ggml '.[run]'",
        exc_type=ImportError,
    )
    with engine.Decoder(engine.embedded_model(), ctx=64) as decoder:
        prompt = decoder.tokenize("Once upon a time")
        decoder.prefill(prompt)
        decoder.generate_next_token()
        kv = decoder.kv
        assert counted() == [len(prompt), 1, kv.memory_usage_bytes, kv.seq_len]
        listed = {entry.address for entry in look().entries}
        assert {decoder.layout.scratch.block.address, decoder.layout.history.block.address} < listed
        list(decoder.generate(prompt, 3, stop_at_eog=False))
        assert counted() == [2 * len(prompt), 4, kv.memory_usage_bytes, kv.seq_len]
        decoder.reset()
        assert counted() == [2 * len(prompt), 4, 0, 0]
        decoder.prefill(prompt)
        scratch = decoder.layout.scratch.block.address
    assert counted() == [3 * len(prompt), 4, 0, 0]
    assert scratch not in {entry.address for entry in look().entries}


def test_a_forked_child_publishes_only_on_request() -> None:
    done = run_script("""
        import os
        import unimem as um
        from unimem.accounting import published as shown
        from unimem.accounting.published import published

        tally = shown.Tally()
        tally.count(1, 1)
        pid = os.fork()
        if pid == 0:
            tally.count(100, 100)
            tally.hold(100, 100)
            tally.end()
            shown.refresh()
            told = []
            assert published(os.getpid(), told) is None and told == [], told
            assert "unimem-ledger" not in open("/proc/self/maps").read()
            assert not [fd for fd in os.listdir("/proc/self/fd")
                        if os.path.exists(f"/proc/self/fd/{fd}")
                        and "unimem-ledger" in os.readlink(f"/proc/self/fd/{fd}")]
            own = shown.Tally()
            own.count(7, 7)
            assert published(os.getpid()).counters["n_prompt_tokens"] == 7
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        tally.count(1, 1)
        print(list(published(os.getpid()).counters.values()))
    """)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2, 2, 0, 0, 0, 0, 0, 0]\n"


def test_without_memory_nothing_is_published_and_nothing_fails(monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        refused = OSError(errno.EPERM, os.strerror(errno.EPERM))
        patch.setattr(os, "memfd_create", Mock(side_effect=refused))
        tally = shown.Tally()
        tally.count(1, 1)
        tally.hold(1, 1)
        assert shown.failure() == (
            "this process cannot publish its ledger: [Errno 1] Operation not permitted"
        )
        assert um.report().facts["problem"] == shown.failure()
        tally.end()
    assert published(os.getpid()) is None
    shown.publish()
    assert shown.failure() is None
    assert "problem" not in um.report().facts
    assert counted() == [0, 0, 0, 0]


def test_a_python_without_memfds_shows_nothing(monkeypatch: Patch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    shown.Tally().count(1, 1)
    assert "without memfd_create" in str(shown.failure())
    monkeypatch.undo()
    shown.publish()
    monkeypatch.delattr(os, "memfd_create")
    assert published(os.getpid()) is None


@pytest.mark.parametrize(("field", "is_known"), [("NSpid", True), ("mnt_id", False)])
def test_kernels_without_the_needed_fields(monkeypatch: Patch, field: str, is_known: bool) -> None:
    """Without containers a process has one PID; a file that may not be a memfd is not opened."""

    def without_it(text: str) -> dict[str, str]:
        return {name: value for name, value in parse_fields(text).items() if name != field}

    shown.publish()
    for module in (memfds, processes):
        monkeypatch.setattr(module, "parse_fields", without_it)
    assert (published(os.getpid()) is not None) == is_known


@pytest.mark.parametrize("n_more", range(3))
def test_descriptors_run_out(n_more: int) -> None:
    """Two descriptors are needed at a time: for the process's start time and for the memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    n_before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + n_more, hard))
    try:
        shown.Tally().count(1, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if shown.failure() is not None:
        assert "Too many open files" in str(shown.failure())
        assert len(os.listdir("/proc/self/fd")) == n_before
    assert n_more > 1 or shown.failure() is not None


def entry_of(i: int, nbytes: int, **fields: Any) -> Entry:
    return Entry("other", f"block {i} " + 80 * "x", (i + 1) << 40, nbytes, nbytes)._replace(
        **fields
    )


def test_the_largest_entries_are_kept(monkeypatch: Patch) -> None:
    sizes = [4096 * (1 + i * 7919 % 5000) for i in range(5000)]
    entries = tuple(entry_of(i, nbytes) for i, nbytes in enumerate(sizes))
    monkeypatch.setattr("unimem._core.ledger.entries", lambda: entries)
    shown.publish()
    found = look()
    assert found.truncated == len(entries) - len(found.entries) > 0
    assert len(found.entries) > 1000
    kept = sorted((entry.nbytes for entry in found.entries), reverse=True)
    assert kept == sorted(sizes, reverse=True)[: len(kept)]
    assert list(found.entries) == [entry for entry in entries if entry.nbytes >= kept[-1]]


def test_control_characters_in_names_are_replaced(monkeypatch: Patch) -> None:
    entry = entry_of(0, 4096, name="\x1b[2Jname\n", path="/a\udcff\r/ü.gguf")
    monkeypatch.setattr("unimem._core.ledger.entries", lambda: (entry,))
    shown.publish()
    assert look().entries == (entry._replace(name="?[2Jname?", path="/a??/ü.gguf"),)


Change = Callable[[dict[str, Any]], object]


@contextmanager
def fake(data: bytes, name: str = NAME) -> Iterator[int]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.truncate(fd, len(data))
        os.pwrite(fd, data.rstrip(b"\0"), 0)
        yield fd
    finally:
        os.close(fd)


def image(change: Change | None = None, text: bytes | None = None, **head: Any) -> bytes:
    """Return this process's published bytes with a change."""
    with um.Block(MIB, name="mine"):
        shown.publish()
        assert shown._shared is not None
        data = bytearray(shown._shared.memory)
    shown._unpublish()
    names = ("magic", "version", "pid", "started", "n_columns", "n_rows", "size", "sum")
    fields = dict(zip(names, shown._HEAD.unpack_from(data), strict=True))
    if text is None:
        document = json.loads(data[shown._TEXT_AT :][: fields["size"]])
        if change is not None:
            change(document)
        text = json.dumps(document).encode()
    data[shown._TEXT_AT : shown._TEXT_AT + len(text)] = text
    fields |= {"size": len(text), "sum": zlib.crc32(text)} | head
    shown._HEAD.pack_into(data, 0, *fields.values())
    return bytes(data[:NBYTES])


def test_an_unchanged_image_is_read() -> None:
    with fake(image()):
        assert "mine" in names()


@pytest.mark.parametrize(("head", "reason"), [
    ({"magic": b"unimem!!"}, "its beginning is another"),
    ({"version": 3}, "version is 3, and this unimem reads version 1"),
    ({"n_columns": 2**31, "n_rows": 2**31}, "counts more than fits"),
    ({"n_rows": shown._N_ROWS + 1}, "counts more than fits"),
    ({"size": NBYTES}, "counts more than fits"),
    ({"size": 10}, "checksum"),
    ({"sum": 0}, "checksum"),
    ({"n_columns": 3}, "expected a list of 3, got list"),
    # That of a parent, and one that is only begun, are none.
    ({"pid": 1}, None),
    ({"started": 1}, None),
    ({"magic": bytes(8)}, None),
], ids=str)  # fmt: skip
def test_broken_headers_are_refused(head: dict[str, Any], reason: str | None) -> None:
    with fake(image(**head)):
        said = told()
    expected = f"process {os.getpid()} publishes an unusable ledger: "
    assert len(said) == (reason is not None)
    assert all(text.startswith(expected) and str(reason) in text for text in said)


@pytest.mark.parametrize("nbytes", [0, 100, NBYTES - 1])
def test_a_short_ledger_is_refused(nbytes: int) -> None:
    with fake(bytes(nbytes)):
        assert f"it has {nbytes} bytes, not {NBYTES}" in told()[0]


def test_reads_are_bounded() -> None:
    """A fake ledger of a terabyte costs no more than a real one."""
    with fake(image()) as fd:
        os.ftruncate(fd, 1 << 40)
        with um.measure() as m:
            assert published(os.getpid()) is not None
        assert (m.malloc_bytes or 0) < MIB
        assert os.fstat(fd).st_blocks * 512 <= NBYTES


@pytest.mark.parametrize("text", [
    b"", b"null", b"[]", b"{}", b"\xff", b"[" * 200_000, b'{"counters":' + b"9" * 200_000 + b"}",
], ids=lambda text: repr(text[:12]))  # fmt: skip
def test_foreign_texts_are_refused(text: bytes) -> None:
    with fake(image(text=text)):
        (said,) = told()
    assert len(said) < 200


def mine(document: dict[str, Any]) -> list[Any]:
    entries: list[list[Any]] = document["entries"]
    return next(entry for entry in entries if entry[1] == "mine")


def part(offset: int, nbytes: int, active: int | None = None) -> Change:
    return lambda d: mine(d)[7].append(["kv", mine(d)[2] + offset, nbytes, active, None])


CHANGES: dict[str, Change] = {
    "no counters": lambda d: d.pop("counters"),
    "counters that are no names": lambda d: d.update(counters=[*range(9)]),
    "a name with an escape": lambda d: d.update(counters=[*"abcdefgh", "\x1b[2J"]),
    "no entries": lambda d: d.pop("entries"),
    "truncated below 0": lambda d: d.update(truncated=-1),
    "truncated a text": lambda d: d.update(truncated="1"),
    "an entry that is none": lambda d: d["entries"].append(None),
    "an entry with a field more": lambda d: mine(d).append(1),
    "a part that is none": lambda d: mine(d)[7].append(3),
    "a part before its entry": part(-1, 1),
    "a part behind its entry": part(MIB, 1),
    "a part with more in use": part(0, 10, 11),
    "a category for each sample": lambda d: mine(d)[7].extend(
        [f"kv:{i}", mine(d)[2], 1, None, None] for i in range(65)
    ),
    "entries that overlap": lambda d: d["entries"].append(
        ["kv", "b", mine(d)[2] + 4096, 1, 1, None, None, []]
    ),
}
# What the fields of an entry may not be, by number: category, name, address, size, reserved,
# requested, path, parts.
FIELDS: list[tuple[int, list[Any]]] = [
    (0, [None, "x" * 65, ""]), (1, [5]), (2, [-1, 2**64 - 4096, 1e30, float("nan"), True]),
    (3, [2 * MIB]), (4, [-1, 2**64]), (5, [[], {"pages": {"a": 1}}, {"nbytes": float("nan")}]),
    (5, [{"nbytes": 10**4000}, {"nbytes": -1}, {str(i): i for i in range(33)}]),
    (6, [1]), (7, [None]),
]  # fmt: skip


def field(number: int, value: Any) -> Change:
    return lambda d: mine(d).__setitem__(number, value)


CHANGES |= {
    f"field {number} {value!r:.20}": field(number, value)
    for number, values in FIELDS
    for value in values
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_documents_are_checked_field_by_field(change: Change) -> None:
    with fake(image(change)):
        (said,) = told()
    assert len(said) < 250
    assert said.isprintable()


def test_the_ledger_is_found_behind_fakes_and_other_files() -> None:
    with fake(b"x" * NBYTES), fake(b"", "unimem"), fake(image(pid=1)):
        shown.publish()
        assert NAME in names()


def test_many_incomplete_ledgers_share_one_wait(monkeypatch: Patch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    torn = image(sum=1)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(fake(torn))
        assert published(os.getpid()) is None
    assert len(waited) <= shown._TRIES + shown._MOST_FOUND


def test_a_half_written_ledger_is_waited_for(monkeypatch: Patch) -> None:
    whole, torn = image(), image(sum=1)
    with fake(torn) as fd:
        monkeypatch.setattr(time, "sleep", lambda _: os.pwrite(fd, whole, 0))
        assert published(os.getpid()) is not None


def test_only_memfds_are_opened(tmp_path: Path) -> None:
    """A file of that name may lie in a hanging file system, and a FIFO waits for a writer."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(image())
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        for name in ("fifo", "file"):
            with pytest.raises(PermissionError, match="no memfd"):
                memfds._open_memfd(name, folder)
    finally:
        os.close(folder)
