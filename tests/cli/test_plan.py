"""`unimem plan`: its page, and the options of the plan."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import unimem as um
from support.files import gguf_files as g
from support.files.safetensors_files import marked
from support.models.family_models import FAMILIES, write_family
from support.project.documents import check_document
from support.terminal.html_pages import HtmlPage
from support.terminal.screens import CONTROL, HOSTILE, run_anew, show, show_on_terminal
from unimem.accounting.report import Row
from unimem.cli import _app
from unimem.engine import embedded_model
from unimem.planning.result import Advice, Check, Plan
from unimem.planning.streaming import Reading

command = importlib.import_module("unimem.cli.plan")

MIB, GIB = 2**20, 2**30

PLAN = Plan(
    rows=(
        Row("weights:q4_k", 3 * GIB), Row("weights:q6_k", 512 * MIB),
        Row("weights:padding", 12 << 10), Row("kv", 512 * MIB), Row("scratch", 128 * MIB),
        Row("logits", 125 << 10),
    ),
    checks=(
        Check("memory of the machine", 640 * MIB, 22 * GIB, 24 * GIB, "more memory"),
        Check("cgroup /llm", 640 * MIB, 15 * GIB, 16 * GIB, "raise memory.max"),
    ),
    advice=(),
    unknown=(),
    facts={"name": "Mistral 7B", "architecture": "llama", "format": "GGUF", "ggml": "3 MiB more"},
    ctx=4096, batch=1, kv_dtype="f16", window=None, threads=4, sessions=1, load="map",
    load_reason="a mapping shares the page cache", pages="auto", numa=None, max_ctx=22 * 1024,
    required_bytes=640 * MIB, spilled_bytes=0, available_bytes=15 * GIB,
    scratch_bytes=128 * MIB, history_bytes=512 * MIB, model_ctx=32 * 1024,
)  # fmt: skip
TOO_LARGE = replace(
    PLAN,
    checks=(
        PLAN.checks[0],
        Check("cgroup /llm", 4 * GIB + 128 * MIB, GIB, GIB, "echo max > memory.max"),
        Check("locked memory (memlock)", 5 * GIB, 8 * MIB, 8 * MIB, "ulimit -l unlimited", False),
    ),
    advice=(
        Advice("map the file instead of copying it", 3 * GIB, {"load": "map"}, True),
        Advice("a KV cache of q8_0", 240 * MIB, {"kv_dtype": "q8_0", "ctx": 512}, False),
        Advice("a smaller model", -5, {}, False),
    ),
    unknown=("the KV cache: 'mamba' has none that unimem knows",),
    load="copy",
    max_ctx=0,
    available_bytes=GIB,
)
SPILLS = replace(PLAN, spilled_bytes=GIB, available_bytes=3 * GIB)
FALLS_BACK = replace(PLAN, checks=(*PLAN.checks, TOO_LARGE.checks[2]))
ON_GPU = replace(
    PLAN,
    rows=tuple(replace(row, device="cuda:0") for row in PLAN.rows[:4]) + PLAN.rows[4:],
    checks=(PLAN.checks[0], Check("cuda:0", 4 * GIB, 8 * GIB, 8 * GIB, "another GPU")),
)

STREAMS = replace(PLAN, load="stream", weights_budget=GIB, reading=Reading(GIB, 256 * MIB, 4 * GIB))

CODES = {"fits": 0, "streams": 0, "reads from disk": 4, "does not fit": 3}

PAGE = """\
Fits: 4.1 of 15.0 GiB. Largest context 22k.

model     Mistral 7B: llama, GGUF for unimem: unimem run runs it
file      some/mistral.gguf
context   4,096 tokens (model's own: 32,768, fits: 22,528), KV f16, 4 threads
load      map: a mapping shares the page cache

memory                 size
weights:q4_k        3.0 GiB  █████████████████████████████████████
weights:q6_k      512.0 MiB  ██████
weights:padding    12.0 KiB
kv                512.0 MiB  ██████
scratch           128.0 MiB  █▌
logits            125.0 KiB
total               4.1 GiB
must stay in RAM  640.0 MiB

limit                     needed  available  fits
memory of the machine  640.0 MiB   22.0 GiB   yes  █░░░░░░░░░░░░░░░░░░░░░░░░░░░░
cgroup /llm            640.0 MiB   15.0 GiB   yes  █░░░░░░░░░░░░░░░░░░░░░░░░░░░░

ggml      3 MiB more
"""


Planned = Callable[[Plan], dict[str, Any]]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Make the command get this plan; return its request."""

    def give(made: Plan) -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def plan(model: Path, **options: Any) -> Plan:
            asked.update(options, model=model)
            return made

        monkeypatch.setattr(command, "make_plan", plan)
        return asked

    return give


def test_the_page(planned: Planned) -> None:
    planned(PLAN)
    assert show("plan", "some/mistral.gguf") == (0, PAGE, "")
    blocks = str.maketrans("█▌░", "##.")
    in_ascii = show("plan", "some/mistral.gguf", encoding="ascii")
    assert in_ascii == (0, PAGE.translate(blocks), "")
    wide = show("plan", "some/mistral.gguf", columns=120)
    assert (wide.widest, wide.lines[0]) == (120, PAGE.splitlines()[0])


def test_only_willing_terminals_get_colours(planned: Planned) -> None:
    planned(PLAN)
    screen = show("plan", "some/mistral.gguf", columns=80)
    assert screen.plain == PAGE
    styles = {"0", "1", "2", "32", "36"}  # bold heads, dim names, green, the colour of bars
    assert set(re.findall(r"\x1b\[(\d+)m", screen.out)) == styles
    assert "\x1b[32mFits: 4.1 of 15.0 GiB. Largest context 22k.\x1b[0m" in screen.out
    assert show("plan", "some/mistral.gguf", columns=80, NO_COLOR="1").out == PAGE
    assert show("plan", "some/mistral.gguf", columns=80, TERM="dumb").out == PAGE


def test_a_plan_that_does_not_fit(planned: Planned) -> None:
    planned(TOO_LARGE)
    screen = show("plan", "m.gguf", columns=80)
    assert (screen.code, screen.err) == (3, "")
    page = screen.plain
    for line in (
        r"context   4,096 tokens \(model's own: 32,768, none fits\), KV f16, 4 threads",
        r"cgroup /llm +4\.1 GiB    1\.0 GiB    no  █+",
        r"-  the KV cache: 'mamba' has none that unimem knows",
        r"1\. Map the file instead of copying it \(saves 3\.0 GiB, then it fits\):\n   --load map",
        r"2\. A KV cache of q8_0 \(saves 240\.0 MiB\):\n   --kv-dtype q8_0 --ctx 512",
        r"3\. A smaller model",
        # Hard limits come before limits of requested options.
        r"Does not fit: 4\.1 of 1\.0 GiB \(cgroup /llm\)\. No context fits\.",
    ):
        assert re.search(f"^{line}$", page, re.M), f"{line}\n{page}"
    assert f"\x1b[33m{screen.lines[0]}\x1b[0m" in screen.out


def test_a_helpful_command_is_on_its_own_line(planned: Planned) -> None:
    command = "echo max > /sys/fs/cgroup/" + "a/" * 40 + "memory.max"
    check = Check("cgroup /a", 2 * GIB, GIB, GIB, command)
    advice = Advice(f"1.0 GiB more in cgroup /a: {command}", 0, {}, False)
    planned(replace(TOO_LARGE, checks=(check,), advice=(advice,)))
    lines = show("plan", "m.gguf", columns=80).lines
    number = lines.index("1. 1.0 GiB more in cgroup /a:")
    assert lines[number + 1 : number + 3] == ["   " + command, ""]


def test_a_long_name_is_cut_to_leave_room(planned: Planned) -> None:
    check = Check("cgroup /" + "x" * 200, 2 * GIB, GIB, GIB, "more")
    planned(replace(TOO_LARGE, checks=(check,)))
    screen = show("plan", "m.gguf", columns=80)
    assert len(screen.lines[0]) == 80
    assert re.fullmatch(
        r"Does not fit: 2\.0 of 1\.0 GiB \(cgroup /x+\.\.\.x+\)\. .*", screen.lines[0]
    )
    assert re.search(r"^cgroup /x+\.\.\.x+  2\.0 GiB +1\.0 GiB    no  █{9,}$", screen.plain, re.M)


def test_in_a_notebook() -> None:
    empty = Check("node 1", 0, 0, 0, "-")
    page = HtmlPage(replace(TOO_LARGE, checks=(*TOO_LARGE.checks, empty))._repr_html_())
    memory = page.table("memory")
    assert memory.rows == [[row.category, row.nbytes, ""] for row in PLAN.rows]
    in_ram = ["must stay in RAM", 640 * MIB, ""]
    assert memory.foot == [["total", PLAN.total_bytes, ""], in_ram]
    styles = [value or "" for name, value in page.attributes if name == "style"]
    bars = [style.split(";")[0] for style in styles if style.startswith("width:")]
    shares = [row.nbytes / PLAN.total_bytes for row in PLAN.rows] + [640 / 22 / 1024, 1, 1, 1]
    assert bars[len(PLAN.rows) :] == [f"width:{share:.1%}" for share in shares]
    assert "A KV cache of q8_0 (saves 240.0 MiB): --kv-dtype q8_0 --ctx 512" in page.text
    all_of_it = replace(PLAN, required_bytes=PLAN.total_bytes)
    assert HtmlPage(all_of_it._repr_html_()).table("memory").foot == memory.foot[:1]


def test_a_page_without_figures(planned: Planned) -> None:
    facts = {"name": None, "architecture": None, "format": "safetensors"}
    planned(
        replace(
            PLAN, ctx=None, max_ctx=None, model_ctx=None, facts=facts, rows=(Row("weights", 0),)
        )
    )
    screen = show("plan", "folder/model.safetensors")
    assert screen.code == 0
    assert screen.lines[2] == "model     model: architecture unknown, safetensors"
    assert "context   unknown, KV f16, 4 threads" in screen.lines
    assert "total     0 B" in screen.lines
    assert screen.lines[0] == "Fits: 0 B of 15.0 GiB. Largest context unknown."


@pytest.mark.parametrize(("changes", "said"), [
    ({"batch": 4, "sessions": 2, "window": 512, "pages": "2m", "numa": "bind:0"},
     ["KV f16, attention sees the last 512, 4 streams, 2 sessions, 4 threads",
      "pages 2m numa bind:0"]),
    ({"spilled_bytes": GIB},
     ["1.0 GiB of the file cannot stay in RAM beside the rest: every token reads"]),
    ({"checks": FALLS_BACK.checks},
     ["Not as asked for: locked memory (memlock). Memory falls back to what is available."]),
    ({"ctx": 40_000}, ["40,000 tokens (beyond the model's own: 32,768, fits: 22,528)"]),
], ids=["asked", "spills", "falls back", "beyond the model"])  # fmt: skip
def test_messages_about_a_plan(planned: Planned, changes: dict[str, Any], said: list[str]) -> None:
    planned(replace(PLAN, **changes))
    text = " ".join(show("plan", "m.gguf").plain.split())
    assert all(each in text for each in said)


def test_a_gpu_has_its_own_total(planned: Planned) -> None:
    planned(ON_GPU)
    page = show("plan", "m.gguf").plain
    assert re.search(r"^weights:q4_k on cuda:0 +3\.0 GiB  █+", page, re.M)
    assert re.search(r"^total +128\.1 MiB$", page, re.M)
    assert re.search(r"^total on cuda:0 +4\.0 GiB$", page, re.M)


@pytest.mark.parametrize(("made", "line"), [
    (replace(PLAN, max_ctx=1500), "Fits: 4.1 of 15.0 GiB. Largest context 1,500."),
    (replace(PLAN, max_ctx=2048), "Fits: 4.1 of 15.0 GiB. Largest context 2k."),
    (replace(PLAN, max_ctx=22_700), "Fits: 4.1 of 15.0 GiB. Largest context 22k."),
    (SPILLS, "Reads from disk: 1.0 GiB with every token. Largest context 22k."),
    (STREAMS, "Streams: 3.5 of 4.0 GiB in RAM. Largest context 22k."),
    (ON_GPU, "Fits: 128.1 MiB of 15.0 GiB, 4.0 of 8.0 GiB on cuda:0. Largest context 22k."),
    (FALLS_BACK, "Fits: 4.1 of 15.0 GiB. Largest context 22k."),
    (replace(TOO_LARGE, checks=TOO_LARGE.checks[1:2], max_ctx=300),
     "Does not fit: 4.1 of 1.0 GiB (cgroup /llm). Largest context 300."),
])  # fmt: skip
def test_the_first_line(planned: Planned, made: Plan, line: str) -> None:
    planned(made)
    screen = show("plan", "m.gguf")
    assert (screen.code, screen.lines[0]) == (CODES[made.verdict], line)
    assert made.verdict == line.partition(":")[0].lower()


@pytest.mark.parametrize("columns", [None, 60, 80, 120, 240])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_lines_are_short_and_escaped(planned: Planned, columns: int | None, encoding: str) -> None:
    check = Check(f"cgroup /{HOSTILE}", 4 * GIB, GIB, GIB, HOSTILE)
    planned(replace(
        TOO_LARGE, rows=(*PLAN.rows, Row("weights:" + "y" * 100, 1), *ON_GPU.rows[:1]),
        checks=(*TOO_LARGE.checks, check), unknown=(HOSTILE,), load_reason=HOSTILE,
        advice=(Advice(HOSTILE, 1, {"numa": "z" * 100}, False),),
        facts={"name": HOSTILE, "architecture": HOSTILE, "format": "GGUF", "ggml": HOSTILE},
    ))  # fmt: skip
    screen = show("plan", HOSTILE, columns=columns, encoding=encoding)
    assert screen.code == 3
    options = "   --numa " + "z" * 100  # what is to be typed is whole
    assert options in screen.lines
    assert screen._replace(out=screen.out.replace(options, "")).widest <= (columns or 80)
    assert not CONTROL.search(screen.plain)
    assert screen.lines[0].startswith("Does not fit: 4.")
    assert screen.lines[0].endswith("). No context fits.")


def test_options_reach_the_library(planned: Planned) -> None:
    asked = planned(PLAN)
    show("plan", "m.gguf")
    assert asked == {
        "model": Path("m.gguf"), "ctx": None, "batch": 1, "kv_dtype": "f16", "window": None,
        "threads": None, "sessions": 1, "load": "auto", "device": None, "machine": None,
        "pages": "auto", "numa": None, "lock": False, "engine": None, "slots": None,
        "mmproj": None, "draft": None, "weights_budget": None, "cache_ram": None,
        "min_ctx": 512, "process": True, "now": False,
    }  # fmt: skip
    words = (
        "--ctx 8 --batch 2 --kv-dtype q8_0 --window 4 --threads 3 --sessions 5 --load copy "
        "--device cuda:1 --pages 2m --numa bind:0 --lock --engine llama.cpp --slots 4:divided "
        "--mmproj p.gguf --draft d.gguf --weights-budget 25% --cache-ram 1G --min-ctx 8 --now"
    )
    show("plan", *words.split())
    assert asked == {
        "model": embedded_model(), "ctx": 8, "batch": 2, "kv_dtype": "q8_0", "window": 4,
        "threads": 3, "sessions": 5, "load": "copy", "device": "cuda:1", "machine": None,
        "pages": "2m", "numa": "bind:0", "lock": True, "engine": "llama.cpp",
        "slots": "4:divided", "mmproj": Path("p.gguf"), "draft": Path("d.gguf"),
        "weights_budget": "25%", "cache_ram": "1G", "min_ctx": 8, "process": True, "now": True,
    }  # fmt: skip


def test_budgets_of_weights() -> None:
    made = show("plan", "--weights-budget", "900k", "--ctx", "64")
    assert (made.code, made.lines[0].partition(":")[0]) == (0, "Streams")
    small = show("plan", "--weights-budget", "1k")
    assert (small.code, small.out) == (3, "")
    assert "takes at least" in small.err
    for words in ("--weights-budget much", "--weights-budget 1M --load map"):
        wrong = show("plan", *words.split())
        assert (wrong.code, wrong.out) == (2, "")
        assert "--weights-budget" in wrong.err


@pytest.mark.parametrize(("words", "machine"), [
    ("--memory 16G", {"memory": "16G"}),
    ("--memory 16G --cpus 8 --pool 2m=4096 --pool 1g=0 --nodes 2",
     {"memory": "16G", "cpus": 8, "pools": {"2m": 4096, "1g": 0}, "nodes": 2}),
])  # fmt: skip
def test_another_machine(planned: Planned, words: str, machine: dict[str, Any]) -> None:
    asked = planned(PLAN)
    assert show("plan", *words.split()).code == 0
    assert asked["machine"] == machine


def test_the_answer_is_about_the_other_machine() -> None:
    large = show("plan", "--memory", "4G", "--cpus", "3")
    assert (large.code, large.err) == (0, "")
    assert re.search(r"^memory of the machine +\S+ MiB +4\.0 GiB", large.plain, re.M)
    for memory, code, verdict in (("40M", 3, "Does not fit"), ("100K", 3, "Does not fit")):
        small = show("plan", "--memory", memory)
        assert (small.code, small.lines[0].partition(":")[0]) == (code, verdict)


def test_options_mean_the_same_as_for_run() -> None:
    import typer

    commands = typer.main.get_command(_app()).commands  # type: ignore[attr-defined]
    run, plan = ({each.name: each for each in commands[name].params} for name in ("run", "plan"))
    same = ("ctx", "threads", "kv_dtype", "window", "load", "pages", "numa", "as_json")
    for name in same:
        assert (plan[name].opts, plan[name].help) == (run[name].opts, run[name].help)
        assert plan[name].default == run[name].default


def test_the_document_is_the_library_s(planned: Planned) -> None:
    for made in (PLAN, STREAMS, SPILLS, FALLS_BACK, TOO_LARGE):
        planned(made)
        screen = show("plan", "m.gguf", "--json", columns=80)
        assert (screen.code, screen.err) == (CODES[made.verdict], "")
        assert screen.out == made.to_json() + "\n"
        assert json.loads(screen.out)["verdict"] == made.verdict


def test_the_model_in_the_package() -> None:
    screen = show("plan", "--json")
    assert (screen.code, screen.err) == (0, "")
    document = json.loads(screen.out)
    check_document(document)
    for kv_dtype in ("q4_0", "q8_0,iq4_nl"):
        other = json.loads(show("plan", "--json", "--kv-dtype", kv_dtype).out)
        check_document(other)
        assert other["kv_dtype"] == kv_dtype
    # These change from moment to moment.
    now = {name: document[name] for name in ("checks", "available_bytes")}
    assert document == um.plan(embedded_model(), process=True, min_ctx=512).to_dict() | now
    page = show("plan").plain
    assert re.match(r"Fits: \d+\.\d MiB of .*iB\. Largest context 512\.\n\nmodel     unimem-", page)


def test_any_architecture_can_be_planned(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    kvs = [g.kv("general.architecture", g.STRING, g.string("no\x1b[2Jne"))]
    tensors = [g.tensor("one", (64,), g.Q8_0, 0)]
    path.write_bytes(g.with_data(g.head(1, 1), *kvs, *tensors, nbytes=96)[0])
    screen = show("plan", path)
    assert (screen.code, screen.err) == (5, "")
    assert screen.lines[2] == r"model     odd: no\x1b[2Jne, GGUF for llama.cpp"
    assert "Not known:" in screen.lines
    assert re.search(r"^weights:q8_0 +68 B  ", screen.plain, re.M)
    assert re.match(r"At least 8\.0 KiB of .* is not known\.$", screen.lines[0])
    document = json.loads(show("plan", path, "--json").out)
    assert (document["schema"], document["verdict"]) == ("unimem.plan/2", "at least")
    assert (document["fits"], document["is_counted"]) == (None, False)
    too_small = show("plan", path, "--memory", "1K")
    assert too_small.code == 3


def test_a_path_that_is_not_text(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/m\xff\n.gguf")
    shutil.copy(embedded_model(), path)
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    for screen in (show("plan", path), run_anew("plan", path, env=env)):
        assert (screen.code, screen.err) == (0, "")
        assert screen.lines[3].startswith("file ")
        assert screen.lines[3].endswith("/m?\\n.gguf")
        assert screen.lines[0].startswith("Fits: ")


@pytest.mark.parametrize(("options", "hugepages"), [
    ((), None), (("--pages", "2m", "--memory", "16G", "--pool", "2m=100"), "hugepages-2Mi"),
])  # fmt: skip
def test_requests_and_limits_of_a_container(
    options: tuple[str, ...], hugepages: str | None
) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML (extra test) reads the answer")
    words = ("plan", "--ctx", "64", "--threads", "2", *options)
    made = json.loads(show(*words, "--json").out)
    resources = yaml.safe_load(show(*words, "--kubernetes").out)["resources"]
    assert resources["requests"] == resources["limits"]
    expected = {"cpu": "2", "memory": f"{-(-made['container_bytes'] // 2**20)}Mi"}
    if hugepages:
        (pool,) = (each for each in made["checks"] if each["name"].startswith("hugetlb"))
        expected[hugepages] = f"{pool['needed_bytes'] >> 20}Mi"
    assert resources["limits"] == expected
    other = show(*words, "--kubernetes", "--engine", "llama.cpp").out if not options else ""
    assert ("the program's own memory is not known" in other) == (not options)
    assert show(*words, "--kubernetes", "--json").code == 2


def test_a_pool_that_pages_auto_takes_is_in_the_container_s_limits() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML (extra test) reads the answer")
    words = ("plan", "--threads", "1", "--memory", "1G", "--pool", "2m=480", "--batch", "1000")
    made = json.loads(show(*words, "--json").out)
    limits = yaml.safe_load(show(*words, "--kubernetes").out)["resources"]["limits"]
    assert made["pool_bytes"] == {"2m": 500 << 20}
    assert limits["hugepages-2Mi"] == "500Mi"
    assert int(limits["memory"].removesuffix("Mi")) < 100
    assert show(*words).lines[0].startswith("Fits: 5")
    assert " of 64.0 MiB" in show(*words).lines[0]


@pytest.mark.parametrize("words", ["--load copy", "--pages 2m", "--lock", "--weights-budget 1M"])
def test_an_option_that_a_gpu_does_not_have_is_wrong_usage(words: str) -> None:
    screen = show("plan", "--device", "cuda:0", *words.split())
    assert screen.code == 2
    assert f"{words.split(maxsplit=1)[0]}=" in screen.err
    assert "a plan for a GPU is of its memory" in screen.err


def test_on_a_terminal() -> None:
    screen = show_on_terminal("plan")
    assert screen.code == 0
    assert "\x1b[1mmemory" in screen.out
    assert screen.widest <= 80
    assert len(screen.lines) <= 24


@pytest.mark.parametrize(("words", "said"), [
    ("{llama}", "llama, GGUF for unimem: unimem run runs it"),
    ("{llama} --engine llama.cpp", "run llama-server runs it; unimem run does, too"),
    ("{gemma2}", "run llama-server runs it; unimem run does not"),
    ("{tensors}", "run transformers and vLLM run it; unimem run does not"),
])  # fmt: skip
def test_a_line_says_what_runs_the_file(words: str, said: str, tmp_path: Path) -> None:
    files = {"llama": embedded_model(), "tensors": tmp_path / "m.safetensors"}
    files["gemma2"] = write_family(tmp_path / "gemma2.gguf", FAMILIES["gemma2"])
    header = "{'a':{'dtype':'F32','shape':[2],'data_offsets':[0,8]}}^"
    files["tensors"].write_bytes(marked(header, 8)[0])
    lines = [" ".join(line.split()) for line in show("plan", *words.format(**files).split()).lines]
    assert [line for line in lines if line.endswith(said)], lines
