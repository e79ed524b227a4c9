"""`unimem report`: the list of processes, and the page of one."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import unimem as um
from support.project.documents import check_document
from support.terminal.screens import CONTROL, HOSTILE, show
from unimem.accounting.report import Mapping, Report, Row
from unimem.cli import watch
from unimem.cli.processes import ModelProcess, Processes
from unimem.system.placement import Placement

Patch = pytest.MonkeyPatch

command = importlib.import_module("unimem.cli.report")

MIB, GIB = 2**20, 2**30


def placed(nbytes: int, huge: int = 0, **more: Any) -> Placement:
    made = Placement("4k", 4096, nbytes, huge, 0, 0, nbytes, {0: nbytes} if nbytes else {})
    return replace(made, **more)


def model(path: str, **more: Any) -> dict[str, Any]:
    return {
        "path": path, "staged_from": None, "state": "file", "format": "GGUF",
        "architecture": "llama", "name": "A model", "problem": None, "nbytes": 4 * GIB,
        "rss_bytes": 4 * GIB, "pss_bytes": 2 * GIB, "written_bytes": 0,
    } | more  # fmt: skip


REPORT = Report(
    rows=(
        Row("weights:q4_k", 4 * GIB, placed(4 * GIB, pss_bytes=2 * GIB), resident_bytes=2 * GIB),
        Row("kv", 512 * MIB, placed(512 * MIB, pages="thp"), 40 * MIB, 512 * MIB, 512 * MIB),
        Row("anonymous", GIB, placed(512 * MIB, 256 * MIB), resident_bytes=512 * MIB),
        Row("kernel", 36 << 10, placed(0), resident_bytes=0),
    ),
    facts={
        "pid": 1234, "name": "llama-server", "command": "/bin/llama-server -m m.gguf",
        "source": "published ledger", "minor_faults": 12345, "major_faults": 3,
        "counters": {"n_prompt_tokens": 1005, "n_generated_tokens": 60, "kv_tokens": 64},
        "models": [model("/models/m.gguf")],
    },
    mappings=(
        Mapping("anonymous", "[heap]", 0x1000, GIB, placed(512 * MIB), parts={"anonymous": GIB}),
        Mapping(
            "weights", "", 0x7F0000000000, 4 * GIB, placed(2 * GIB), path="/models/m.gguf",
            parts={"weights:padding": 4096, "weights:q4_k": 4 * GIB - 4096},
        ),
        Mapping("kv", "history", 0x7E0000000000, 512 * MIB, placed(0)),
    ),
)  # fmt: skip
PAGE = """\
process   1234 /bin/llama-server -m m.gguf
model     /models/m.gguf (4.0 GiB, all in RAM)
engine    1,005 tokens read, 60 made, 64 in the KV cache

memory             size     in RAM    active     pages
weights:q4_k    4.0 GiB    2.0 GiB         -        4k  ████████████████
kv            512.0 MiB  512.0 MiB  40.0 MiB       thp  ████
anonymous       1.0 GiB  512.0 MiB         -  50% huge  ████
kernel         36.0 KiB        0 B         -        4k
total           5.5 GiB    3.0 GiB

in RAM    3.0 GiB (Pss), 5.0 GiB with all that is shared (Rss)
of Rss    256.0 MiB in huge pages (5%), 0 B locked, 5.0 GiB on node 0
faults    12,345 minor, 3 major; 0 B swapped out
"""
MAPPINGS = """
     address       size     in RAM  pages  memory           name
7f0000000000    4.0 GiB    2.0 GiB     4k  weights:q4_k +1  m.gguf
        1000    1.0 GiB  512.0 MiB     4k  anonymous        [heap]
7e0000000000  512.0 MiB        0 B     4k  kv               history
"""
FOUND = Processes(
    (
        ModelProcess(
            1234, "llama-server", "/opt/bin/llama-server -m x", ("/m/a.gguf", "/m/b.gguf"), False,
            5 * GIB, 3 * GIB, (None, None),
        ),
        ModelProcess(99, "python", "", (), True, 300 * MIB, 200 * MIB),
        *(
            ModelProcess(
                pid, "python", "python", ("/proc/97/fd/5",), False, 90 * MIB, (pid - 18) * MIB,
                ("/m/c.gguf",), keeps_staged=pid == 97,
            )
            for pid in (98, 97)
        ),
    ),
    2,
)  # fmt: skip
LIST = """\
 pid     in RAM        Rss  command            model
1234    3.0 GiB    5.0 GiB  llama-server -m x  a.gguf and 1 more
  99  200.0 MiB  300.0 MiB  python             none mapped
  98   80.0 MiB   90.0 MiB  python             c.gguf, staged
  97   79.0 MiB   90.0 MiB  python             c.gguf, kept for others

unimem report PID shows the memory of one, with --watch as it changes. 2
processes are not ours to look at.
"""


@pytest.fixture
def invented(monkeypatch: Patch) -> None:
    monkeypatch.setattr(command, "make_report", lambda pid: REPORT)
    monkeypatch.setattr(command, "find", lambda: FOUND)


@pytest.mark.usefixtures("invented")
def test_the_page() -> None:
    assert show("report", 1234) == (0, PAGE, "")
    blocks = str.maketrans("█▌", "##")
    assert show("report", 1234, encoding="ascii") == (0, PAGE.translate(blocks), "")
    wide = show("report", 1234, columns=120)
    assert wide.widest > 100
    assert re.search(r"^memory +size +in RAM +active +high water +pages$", wide.plain, re.M)
    assert re.search(r"^kv +512\.0 MiB  512\.0 MiB  40\.0 MiB +512\.0 MiB +thp", wide.plain, re.M)


@pytest.mark.usefixtures("invented")
def test_mappings_have_a_line_each() -> None:
    assert show("report", 1234, "--mappings") == (0, PAGE + MAPPINGS, "")
    narrow = show("report", 1234, "--mappings", columns=48).plain
    assert re.search(r"^ +size +in RAM  pages  memory +name$", narrow, re.M)
    wide = show("report", 1234, "--mappings", columns=120).plain
    assert re.search(r"^7f0000000000 .*  /models/m\.gguf$", wide, re.M)


@pytest.mark.usefixtures("invented")
def test_only_willing_terminals_get_colours() -> None:
    screen = show("report", 1234, columns=80)
    assert screen.plain == PAGE
    assert set(re.findall(r"\x1b\[(\d+)m", screen.out)) == {"0", "1", "2", "36"}
    assert show("report", 1234, columns=80, NO_COLOR="1").out == PAGE
    assert show("report", 1234, columns=80, TERM="dumb").out == PAGE


def test_oddities_of_a_model_are_named(monkeypatch: Patch) -> None:
    models = [
        model("/a", nbytes=1 * GIB, rss_bytes=MIB, state="deleted"),
        model("/b", nbytes=2 * GIB, rss_bytes=0, state="replaced", problem="no header"),
        model("/c", nbytes=3 * GIB, state="staged", staged_from="/disk/c"),
        model("memfd:d", nbytes=4 * GIB, state="unnamed"),
        model("/e", nbytes=5),
        model("/f", nbytes=6),
    ]
    facts = REPORT.facts | {"models": models, "counters": {}, "problem": "a ledger is broken"}
    monkeypatch.setattr(command, "make_report", lambda pid: replace(REPORT, facts=facts))
    assert show("report", 1234).plain.partition("\n\n")[0].splitlines()[1:] == [
        "model     memfd:d (4.0 GiB, all in RAM; memory without a path)",
        "model     /c (3.0 GiB, all in RAM; staged from /disk/c)",
        "model     /b (0 B of 2.0 GiB in RAM; another file is at this path now; no",
        "          header)",
        "model     /a (1.0 MiB of 1.0 GiB in RAM; no file is at this path any more)",
        "          and 2 more files, which --json names",
        "problem   a ledger is broken",
    ]


def test_streamed_weights_say_how_often_they_were_read(monkeypatch: Patch) -> None:
    """In another process by its counters, in this one each by its path."""
    counts = {"hits": 900, "misses": 100, "read_bytes": 5 * MIB, "waited_ns": 2_500_000_000}
    counters = {f"piece_{name}": n for name, n in counts.items()}
    stream = {"path": "/m.gguf", "budget_bytes": 2 * GIB, "resident_bytes": GIB} | counts
    facts = REPORT.facts | {"counters": counters, "streams": [stream]}
    monkeypatch.setattr(command, "make_report", lambda pid: replace(REPORT, facts=facts))
    text = " ".join(show("report", 1234, columns=200).plain.split())
    done = "900 of 1,000 pieces were in RAM, 90.0%; 5.0 MiB read, 2.5 s waited"
    assert f"streams {done}" in text
    assert f"streams /m.gguf (1.0 GiB in RAM of a budget of 2.0 GiB; {done})" in text


def test_rows_of_a_gpu_have_their_own_total(monkeypatch: Patch) -> None:
    made = replace(REPORT, rows=(*REPORT.rows, Row("kv", GIB, device="cuda:0")))
    monkeypatch.setattr(command, "make_report", lambda pid: made)
    page = show("report", 1234).plain
    assert re.search(r"^kv on cuda:0 +1\.0 GiB +- +- +-$", page, re.M)
    assert re.search(r"^total on cuda:0 +1\.0 GiB$", page, re.M)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("columns", [None, 40, 64, 80, 120, 240])
def test_lines_are_short_and_escaped(
    monkeypatch: Patch, columns: int | None, encoding: str
) -> None:
    odd = model(f"/{HOSTILE}", staged_from=HOSTILE, problem=HOSTILE)
    mapped = Mapping("weights", "", 2**64 - 4096, 1, placed(0), path=f"/{HOSTILE}/{HOSTILE}")
    made = Report(
        (*REPORT.rows, Row("z" * 64, 1, placed(1))),
        REPORT.facts | {"command": HOSTILE, "models": [odd]},
        (*REPORT.mappings, mapped, replace(mapped, name=HOSTILE, path=None)),
    )
    found = replace(FOUND.found[0], command=HOSTILE, models=(f"/{HOSTILE}/{HOSTILE}",))
    monkeypatch.setattr(command, "make_report", lambda pid: made)
    monkeypatch.setattr(command, "find", lambda: Processes((found,), 0))
    for words in (["report", 1234, "--mappings"], ["report"]):
        screen = show(*words, columns=columns, encoding=encoding)
        assert screen.code == 0
        assert screen.widest <= (columns or 80)
        assert not CONTROL.search(screen.plain)


def test_a_real_process(holder: tuple[int, Path]) -> None:
    pid, path = holder
    page = show("report", pid, columns=120).plain
    assert re.search(rf"^process   {pid} .*python", page)
    assert re.search(rf"^model     {re.escape(str(path))} \(1\.0 MiB, all in RAM\)$", page, re.M)
    for category in ("weights:q8_0", "weights:padding", "libraries", "total"):
        assert re.search(rf"^{category} +\d+\.\d [KMG]iB", page, re.M), page
    lines = show("report", pid, "--mappings").plain
    assert re.search(r"^ *[0-9a-f]+ .* 4k  weights:q8_0 \+2 +held\.gguf$", lines, re.M)


def test_the_document_is_the_library_s(holder: tuple[int, Path]) -> None:
    pid, path = holder
    screen = show("report", pid, "--json", columns=80)
    assert (screen.code, screen.err, screen.out.count("\n")) == (0, "", 1)
    document, here = json.loads(screen.out), um.report(pid).to_dict()
    assert list(document) == list(here)
    check_document(document)
    for shown, read in zip(document["rows"], here["rows"], strict=True):
        assert (shown["category"], shown["nbytes"]) == (read["category"], read["nbytes"])
    assert [each["path"] for each in document["facts"]["models"]] == [str(path)]


@pytest.mark.usefixtures("invented")
def test_the_list() -> None:
    assert show("report") == (0, LIST, "")
    assert "/m/a.gguf and 1 more" in show("report", columns=120).plain
    document = json.loads(show("report", "--json").out)
    check_document(document)
    assert document == {
        "schema": "unimem.processes/1",
        "processes": [
            {
                "pid": 1234, "name": "llama-server", "command": "/opt/bin/llama-server -m x",
                "models": ["/m/a.gguf", "/m/b.gguf"], "has_ledger": False,
                "rss_bytes": 5 * GIB, "pss_bytes": 3 * GIB,
                "staged_from": [None, None], "keeps_staged": False,
            },
            {
                "pid": 99, "name": "python", "command": "", "models": [], "has_ledger": True,
                "rss_bytes": 300 * MIB, "pss_bytes": 200 * MIB,
                "staged_from": [], "keeps_staged": False,
            },
            *(
                {
                    "pid": pid, "name": "python", "command": "python",
                    "models": ["/proc/97/fd/5"], "has_ledger": False,
                    "rss_bytes": 90 * MIB, "pss_bytes": (pid - 18) * MIB,
                    "staged_from": ["/m/c.gguf"], "keeps_staged": pid == 97,
                }
                for pid in (98, 97)
            ),
        ],
        "n_hidden": 2,
    }  # fmt: skip


def test_an_empty_list_names_the_next_step(monkeypatch: Patch) -> None:
    monkeypatch.setattr(command, "find", lambda: Processes((), 1))
    screen = show("report")
    assert (screen.code, screen.err) == (0, "")
    text = " ".join(screen.lines)
    assert "No process has a model file mapped." in text
    assert "unimem report PID takes any, and ps -e lists all. 1 process is not ours" in text


def test_a_process_of_another_user(monkeypatch: Patch) -> None:
    said = "Process 1 (x) is of user 'root': run this as root"
    monkeypatch.setattr(command, "make_report", Mock(side_effect=PermissionError(13, said)))
    assert show("report", 1) == (1, "", f"unimem: {said}\n")


def test_a_watch_gets_its_options(monkeypatch: Patch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(watch, "watch", lambda *options: asked.append(options))
    monkeypatch.setattr(command, "find", lambda: Processes(FOUND.found[:1], 0))
    show("report", 7, "--watch")
    show("report", "--watch", "--interval", 0.5, "--count", 3, "--json")
    assert asked == [(7, 1.0, None, False, None), (1234, 0.5, 3, True, None)]
    # A holder is watched by default only if it also computes with its model.
    both = [replace(FOUND.found[-1], has_ledger=computes) for computes in (False, True)]
    monkeypatch.setattr(command, "find", lambda: Processes(tuple(both), 0))
    show("report", "--watch")
    assert asked[2:] == [(97, 1.0, None, False, None)]
    monkeypatch.setattr(command, "find", lambda: FOUND)
    screen = show("report", "--watch")
    assert (screen.code, screen.out) == (1, "")
    assert "3 processes have a model: name one" in screen.err
    assert show("report", 7, "--watch", "--mappings").code == 2
