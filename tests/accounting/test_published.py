"""What a process shows of its ledger: seen by another process, and read as what anybody wrote."""

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
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from conftest import Run
from unimem._core.ledger import Entry
from unimem.accounting import published as shown
from unimem.accounting.published import COUNTERS, NAME, NBYTES, Published, published

MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_shown() -> Iterator[None]:
    """Each test begins and ends as a process that shows nothing."""
    shown._unpublish()
    yield
    shown._unpublish()


def look() -> Published:
    found = published(os.getpid())
    assert found is not None
    return found


@contextmanager
def other(script: str, *command: str) -> Iterator[subprocess.Popen[str]]:
    """Another process: it says one line when it is ready, and ends when its input does."""
    head = """
        import os, sys
        import unimem as um
        from unimem.accounting import published as shown
    """
    tail = """
        print(os.getpid(), flush=True)
        sys.stdin.read()
    """
    program = "".join(textwrap.dedent(part) for part in (head, script, tail))
    process = subprocess.Popen(
        [*command, sys.executable, "-W", "error", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline(), process.communicate()[1]
        yield process
    finally:
        assert process.communicate(timeout=60)[1] == ""


# ---- a process and those who look at it ----


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
    """
    with other(script) as process:
        found = published(process.pid)
        assert found is not None
        assert found.counters == dict(zip(COUNTERS, (5, 3, 200, 2), strict=True))
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


def test_nobody_else_can_write_to_it_or_cut_it_off() -> None:
    with other("shown.publish()") as process:
        folder = Path(f"/proc/{process.pid}/fd")
        (path,) = (fd for fd in folder.iterdir() if NAME in os.readlink(fd))
        fd = os.open(path, os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.write(fd, b"mine")
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 0)
            with pytest.raises(PermissionError):
                mmap.mmap(fd, NBYTES)
        finally:
            os.close(fd)


def test_a_process_that_shows_nothing_or_is_not_there_has_none() -> None:
    told: list[str] = []
    with other("") as process:
        assert published(process.pid, told) is None
    for pid in (process.pid, -1, 0, 2**40, os.getpid()):
        assert published(pid, told) is None
    assert told == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_process_of_another_user_cannot_be_read(run_python: Run) -> None:
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
    done = run_python(script)
    assert done.stdout == "None []\n", done.stderr


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare (util-linux) is not installed")
def test_a_process_in_a_container_is_known_by_its_number_out_here() -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make namespaces of process numbers")
    with other("shown.publish()", *command) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        found = published(int(children))
        assert found is not None
        assert [entry.name for entry in found.entries] == [NAME]


def test_nothing_is_left_at_the_end(run_python: Run) -> None:
    """No warning, and an engine that ends later than the interpreter begins to."""
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


# ---- when it is written ----


def test_entries_are_those_of_the_last_time_they_were_published() -> None:
    shown.publish()
    with um.Block(MIB, name="mine"):
        assert "mine" not in [entry.name for entry in look().entries]
        shown.refresh()
        assert "mine" in [entry.name for entry in look().entries]
    shown.publish()
    assert "mine" not in [entry.name for entry in look().entries]


def test_a_refresh_writes_only_where_memory_may_have_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown.refresh()
    assert published(os.getpid()) is None  # nobody has asked for it to be shown
    shown.publish()
    n_written = 0

    def entries() -> tuple[Entry, ...]:
        nonlocal n_written
        n_written += 1
        return ()

    monkeypatch.setattr("unimem._core.ledger.entries", entries)
    for _ in range(3):
        shown.refresh()
    assert n_written == 0
    um.Block(4096).close()
    for _ in range(3):
        shown.refresh()
    assert n_written == 1


def test_who_is_closed_in_the_middle_is_written_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a collection does, which may come anywhere."""
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
    assert "mine" in [entry.name for entry in look().entries]
    blocks[0].close()


def test_what_was_interrupted_is_written_by_the_next_refresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(text: bytes) -> int:
        raise KeyboardInterrupt

    shown.publish()
    with um.Block(4096, name="mine"):
        with monkeypatch.context() as patch:
            patch.setattr(zlib, "crc32", interrupted)
            with pytest.raises(KeyboardInterrupt):
                shown.publish()
        shown.refresh()
        assert "mine" in [entry.name for entry in look().entries]


def test_a_cache_that_gave_memory_back_is_shown() -> None:
    """What it once held is more than it has room for now."""
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


# ---- engines ----


def test_engines_add_up_and_what_they_counted_stays() -> None:
    first, second = shown.Tally(), shown.Tally()
    first.count(10, 1)
    first.hold(1000, 11)
    second.count(20, 2)
    second.hold(2000, 22)
    assert list(look().counters.values()) == [30, 3, 3000, 33]
    first.end()
    first.end()
    first.count(7, 7)  # it is no engine's any more
    assert list(look().counters.values()) == [30, 3, 2000, 22]
    third = shown.Tally()  # on the row that the first has left
    third.count(100, 10)
    assert list(look().counters.values()) == [130, 13, 2000, 22]


def test_each_engine_says_what_its_own_cache_holds() -> None:
    def held() -> list[tuple[int | None, int | None]]:
        parts = {part.address: part for entry in look().entries for part in entry.parts}
        found = [parts[kv.address(0, "k")] for kv in caches]
        return [(part.active_bytes, part.high_water_bytes) for part in found]

    with um.Tape(MIB, pages="4k") as tape:
        caches = [
            um.KVCache(2, 4, 8, 100, tape=tape),
            um.KVCache(2, 4, 8, 100, tape=tape),
            um.KVCache(2, 4, 8, 1000, window=100, pages="4k"),
        ]
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


def test_a_tally_that_is_forgotten_gives_its_row_back() -> None:
    tally = shown.Tally()
    tally.hold(1000, 10)
    del tally
    assert list(look().counters.values()) == [0, 0, 0, 0]
    assert len(shown._shared.free_rows) == shown._N_ROWS  # type: ignore[union-attr]


def test_engines_that_find_no_row_are_not_counted() -> None:
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

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(look().counters.values()) == [80, 160, 0, 0]


def test_a_decoder_counts_its_tokens() -> None:
    engine = pytest.importorskip(
        "unimem.engine", reason="the engine needs ggml: pip install '.[run]'", exc_type=ImportError
    )
    with engine.Decoder(engine.embedded_model(), ctx=64) as decoder:
        prompt = decoder.tokenize("Once upon a time")
        decoder.prefill(prompt)
        decoder.generate_next_token()
        kv = decoder.kv
        counted = [len(prompt), 1, kv.memory_usage_bytes, kv.seq_len]
        assert list(look().counters.values()) == counted
        listed = {entry.address for entry in look().entries}
        assert {decoder.layout.scratch.block.address, decoder.layout.history.block.address} < listed
        list(decoder.generate(prompt, 3, stop_at_eog=False))
        counted = [2 * len(prompt), 4, kv.memory_usage_bytes, kv.seq_len]
        assert list(look().counters.values()) == counted
        decoder.reset()
        assert list(look().counters.values()) == [2 * len(prompt), 4, 0, 0]
        decoder.prefill(prompt)
        scratch = decoder.layout.scratch.block.address
    assert list(look().counters.values()) == [3 * len(prompt), 4, 0, 0]
    assert scratch not in {entry.address for entry in look().entries}


# ---- forks and failures ----


def test_a_forked_child_shows_and_writes_nothing_until_it_asks_to(run_python: Run) -> None:
    done = run_python(
        """
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
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2, 2, 0, 0]\n"


def test_without_memory_for_it_nothing_is_shown_and_nothing_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", refuse)
        tally = shown.Tally()
        tally.count(1, 1)
        tally.hold(1, 1)
        assert shown.failure() == (
            "this process shows its ledger to no other: [Errno 1] Operation not permitted"
        )
        assert um.report().facts["problem"] == shown.failure()
        tally.end()
    assert published(os.getpid()) is None
    shown.publish()
    assert shown.failure() is None
    assert "problem" not in um.report().facts
    assert list(look().counters.values()) == [0, 0, 0, 0]


def test_a_python_without_memfds_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    shown.Tally().count(1, 1)
    assert "without memfd_create" in str(shown.failure())
    monkeypatch.undo()
    shown.publish()
    monkeypatch.delattr(os, "memfd_create")
    assert published(os.getpid()) is None


@pytest.mark.parametrize(("field", "is_known"), [("NSpid", True), ("mnt_id", False)])
def test_kernels_that_do_not_say_it(
    monkeypatch: pytest.MonkeyPatch, field: str, is_known: bool
) -> None:
    """Without containers a process has one number; what may be no memfd is not opened."""
    read = shown._lines

    def lines(path: str, folder: int | None = None) -> dict[str, str]:
        return {name: value for name, value in read(path, folder).items() if name != field}

    shown.publish()
    monkeypatch.setattr(shown, "_lines", lines)
    assert (published(os.getpid()) is not None) == is_known


@pytest.mark.parametrize("n_more", range(3))
def test_descriptors_run_out(n_more: int) -> None:
    """Two are needed at a time, to learn when the process began, and for the memory."""
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


# ---- more than there is room for ----


def entry_of(i: int, nbytes: int, **fields: Any) -> Entry:
    return Entry("other", f"block {i} " + 80 * "x", (i + 1) << 40, nbytes, nbytes)._replace(
        **fields
    )


def test_of_more_entries_than_have_room_the_largest_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_names_that_a_terminal_would_obey_are_shown_without_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = entry_of(0, 4096, name="\x1b[2Jname\n", path="/a\udcff\r/ü.gguf")
    monkeypatch.setattr("unimem._core.ledger.entries", lambda: (entry,))
    shown.publish()
    assert look().entries == (entry._replace(name="?[2Jname?", path="/a??/ü.gguf"),)


# ---- what anybody may have written ----

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
    """What this process would show, with something changed."""
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


def test_an_image_that_nobody_has_changed_is_read() -> None:
    with fake(image()):
        assert "mine" in [entry.name for entry in look().entries]


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        ({"magic": b"unimem!!"}, "does not begin as one"),
        ({"version": 2}, "version is 2, and this unimem reads version 1"),
        ({"n_columns": 2**31, "n_rows": 2**31}, "more than there is room for"),
        ({"n_rows": shown._N_ROWS + 1}, "more than there is room for"),
        ({"size": NBYTES}, "more than there is room for"),
        ({"size": 10}, "checksum"),
        ({"sum": 0}, "checksum"),
        ({"n_columns": 3}, "expected a list of 3, got list"),
    ],
    ids=str,
)
def test_headers_that_are_broken_are_told(head: dict[str, Any], reason: str) -> None:
    told: list[str] = []
    with fake(image(**head)):
        assert published(os.getpid(), told) is None
    (text,) = told
    assert text.startswith(f"process {os.getpid()} shows a ledger that cannot be used: ")
    assert reason in text


@pytest.mark.parametrize("head", [{"pid": 1}, {"started": 1}, {"magic": bytes(8)}], ids=str)
def test_that_of_a_parent_or_one_that_is_only_begun_is_none(head: dict[str, Any]) -> None:
    told: list[str] = []
    with fake(image(**head)):
        assert published(os.getpid(), told) is None
    assert told == []


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\0" * (NBYTES - 1)], ids=len)
def test_one_that_is_too_short_is_told(data: bytes) -> None:
    told: list[str] = []
    with fake(data):
        assert published(os.getpid(), told) is None
    assert f"it has {len(data)} bytes, not {NBYTES}" in told[0]


def test_no_more_is_read_than_there_can_be() -> None:
    """A fake of a terabyte costs no more than a ledger."""
    with fake(image()) as fd:
        os.ftruncate(fd, 1 << 40)
        with um.measure() as m:
            assert published(os.getpid()) is not None
        assert (m.malloc_bytes or 0) < MIB
        assert os.fstat(fd).st_blocks * 512 <= NBYTES


@pytest.mark.parametrize(
    "text",
    [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 200_000, b'{"counters":' + b"9" * 200_000 + b"}"],
    ids=lambda text: repr(text[:12]),
)
def test_texts_that_are_none_of_ours_are_told(text: bytes) -> None:
    told: list[str] = []
    with fake(image(text=text)):
        assert published(os.getpid(), told) is None
    assert len(told) == 1
    assert len(told[0]) < 200


def first(document: dict[str, Any]) -> list[Any]:
    """Take the fields of an entry."""
    entries: list[list[Any]] = document["entries"]
    return next(entry for entry in entries if entry[1] == "mine")


CHANGES: dict[str, Change] = {
    "no counters": lambda d: d.pop("counters"),
    "counters that are no names": lambda d: d.update(counters=[1, 2, 3, 4, 5]),
    "a name with an escape": lambda d: d.update(counters=["a", "b", "c", "d", "\x1b[2J"]),
    "no entries": lambda d: d.pop("entries"),
    "truncated below 0": lambda d: d.update(truncated=-1),
    "truncated a text": lambda d: d.update(truncated="1"),
    "an entry that is none": lambda d: d["entries"].append(None),
    "an entry with a field more": lambda d: first(d).append(1),
    "a category that is none": lambda d: first(d).__setitem__(0, None),
    "a long category": lambda d: first(d).__setitem__(0, "x" * 65),
    "an empty category": lambda d: first(d).__setitem__(0, ""),
    "a name that is none": lambda d: first(d).__setitem__(1, 5),
    "an address below 0": lambda d: first(d).__setitem__(2, -1),
    "an address past the end": lambda d: first(d).__setitem__(2, 2**64 - 4096),
    "an address that is a number": lambda d: first(d).__setitem__(2, 1e30),
    "an address that is none": lambda d: first(d).__setitem__(2, float("nan")),
    "an address that is true": lambda d: first(d).__setitem__(2, True),
    "more memory than addresses": lambda d: first(d).__setitem__(3, 2 * MIB),
    "reserved below 0": lambda d: first(d).__setitem__(4, -1),
    "reserved past the end": lambda d: first(d).__setitem__(4, 2**64),
    "requested a list": lambda d: first(d).__setitem__(5, []),
    "requested a tree": lambda d: first(d).__setitem__(5, {"pages": {"a": 1}}),
    "requested a number": lambda d: first(d).__setitem__(5, {"nbytes": float("nan")}),
    "a path that is none": lambda d: first(d).__setitem__(6, 1),
    "parts that are none": lambda d: first(d).__setitem__(7, None),
    "a part that is none": lambda d: first(d)[7].append(3),
    "a part before its entry": lambda d: first(d)[7].append(["kv", 4096, 1, None, None]),
    "a part behind its entry": lambda d: first(d)[7].append(
        ["kv", first(d)[2] + MIB, 1, None, None]
    ),
    "a part with more in use": lambda d: first(d)[7].append(["kv", first(d)[2], 10, 11, None]),
    "entries that overlap": lambda d: d["entries"].append(
        ["kv", "b", first(d)[2] + 4096, 1, 1, None, None, []]
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_documents_are_checked_field_by_field(change: Change) -> None:
    told: list[str] = []
    with fake(image(change)):
        assert published(os.getpid(), told) is None
    assert len(told) == 1
    assert len(told[0]) < 250
    assert told[0].isprintable()


def test_the_ledger_is_found_behind_fakes_and_other_files(tmp_path: Path) -> None:
    told: list[str] = []
    with fake(b"x" * NBYTES), fake(b"", "unimem"), fake(image(pid=1)):
        shown.publish()
        assert published(os.getpid(), told) is not None


def test_many_that_are_never_whole_are_not_waited_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    torn = image(sum=1)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(fake(torn))
        assert published(os.getpid()) is None
    assert len(waited) <= shown._TRIES + shown._MOST_FOUND


def test_what_is_half_written_is_waited_for() -> None:
    whole, torn = image(), image(sum=1)
    with fake(torn) as fd:
        thread = threading.Timer(0.005, os.pwrite, (fd, whole, 0))
        thread.start()
        assert published(os.getpid()) is not None
        thread.join()


def test_nothing_is_opened_but_memfds(tmp_path: Path) -> None:
    """A file of that name may be a file system's that never answers; a FIFO waits for a writer."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(image())
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        for name in ("fifo", "file"):
            with pytest.raises(PermissionError, match="no memfd"):
                shown._open_memfd(name, folder)
    finally:
        os.close(folder)
