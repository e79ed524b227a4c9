"""`unimem run`: text, tables, documents, sessions, and failures."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import signal
import subprocess
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")

import unimem as um
from support.files import gguf_files as gf
from support.kernel.proc_maps import huge_page_bytes
from support.models.make import TINY, write_model
from support.models.tokenizer_models import spm_vocab
from support.models.tokenizer_models import write_model as write_constant_model
from support.project.checkout import STORIES, needs_stories
from support.project.documents import check_document
from support.terminal.screens import (
    MAIN,
    Screen,
    run_anew,
    run_command,
    show,
    show_on_terminal,
    start_command,
)
from unimem import CapacityError
from unimem.cli import terminal
from unimem.engine import Decoder, embedded_model
from unimem.system import limits
from unimem.system.limits import Limit
from unimem.weights import residency

# llama.cpp's greedy continuation of "Once upon a time".
STORY = (
    ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw "
    "a big, red ball. She wanted to play with it, but it was too high."
)
# ggml's threads wait for each other, which is slow while other processes compute.
ONE_THREAD = ("--threads", "1")
PAGE = mmap.PAGESIZE
Patch = pytest.MonkeyPatch
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # the text may have tabs


def run(*arguments: object, **options: Any) -> Screen:
    return show("run", *ONE_THREAD, *arguments, **options)


def page_of(*arguments: object, **options: Any) -> str:
    code, out, err = run(*arguments, **options)
    assert (code, err) == (0, "")
    return out


def run_json(*arguments: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(page_of(*arguments, "--json"))
    check_document(document)
    return document


def row_of(document: dict[str, Any], category: str, of: str = "report") -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = (row for row in document[of]["rows"] if row["category"] == category)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with random weights, whose tokens are mostly single bytes."""
    return write_model(tmp_path_factory.mktemp("run") / "random.gguf", shape=TINY, kind="f32")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a zero model with a chat template; its likeliest token, 0, ends a text."""
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    added = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": template}
    folder = tmp_path_factory.mktemp("chat")
    return write_constant_model(folder / "chat.gguf", spm_vocab().metadata | added)


def test_without_a_terminal_text_and_tables_are_plain_lines(model: Path) -> None:
    out = page_of(model, "-p", "Hello", "-n", "20")
    assert out.startswith("Hello")
    assert not CONTROL.search(out)
    tables = out[out.index("\n\ntext ") :]
    assert all(len(line) <= 80 for line in tables.splitlines())
    for category in ("weights:f32", "weights:padding", "kv", "scratch", "logits", "total"):
        assert re.search(rf"^{category} +\d+\.\d (B|KiB|MiB)", tables, re.M), category
    for evidence in (
        r"tokens 9 to 20 +a token +in all",
        r"minor faults +\d\S* +\d+",
        r"allocations by unimem +0 +0",
        r"system calls by unimem +0 +0",
        r"buffers that moved +0 of \d+",
        r"context +600 tokens \(the model's\)",
        r"text +20 tokens \(the limit\)",
        r"speed +prefill \S+ tokens/s, decode \S+ tokens/s",
    ):
        assert re.search(f"^{evidence}", tables, re.M), evidence


def test_the_document_has_every_fact_and_sizes_in_bytes(model: Path) -> None:
    document = run_json(model, "-p", "Hello", "-n", "20", "--ctx", "100")
    assert list(document) == [
        "schema", "unimem", "model", "options", "plan", "report", "prompt", "output", "session",
        "store",
        "speed", "steady_state", "buffers", "ggml", "governor", "streams",
    ]  # fmt: skip
    assert document["schema"] == "unimem.run/1"
    assert document["model"]["files"] == [str(model)]
    assert document["model"]["architecture"] == "llama"
    assert document["model"]["dims"]["num_layers"] == TINY.layers
    assert document["options"] == {
        "ctx": 100, "threads": 1, "kv_dtype": "f16", "rotate": False, "window": None,
        "load": "auto", "weights_budget": None, "pages": "auto", "numa": None, "chat": False,
        "temperature": 0.0, "top_k": 40, "top_p": 1.0, "seed": None,
    }  # fmt: skip
    report, plan = document["report"], document["plan"]
    sizes = {row["category"]: row["nbytes"] for row in report["rows"]}
    assert sum(sizes.values()) == report["total_bytes"]
    planned = {row["category"]: row["nbytes"] for row in plan["rows"]}
    assert sum(planned.values()) == plan["total_bytes"] <= plan["available_bytes"]
    assert planned == sizes
    of_file = {"weights:f32", "weights:padding"}
    assert set(sizes) == of_file | {"kv", "scratch", "logits", "tokens", "diagnostics", "other"}
    assert sizes["logits"] == 4 * TINY.vocab
    row_bytes = 2 * TINY.layers * TINY.kv_heads * TINY.head * 2
    assert sizes["kv"] == pytest.approx(100 * row_bytes, abs=4096)
    kv, weights = row_of(document, "kv"), row_of(document, "weights:f32")
    n_prompt = len(document["prompt"]["tokens"])
    assert kv["active_bytes"] == (n_prompt + 20) * row_bytes
    assert kv["resident_bytes"] == kv["nbytes"]
    assert kv["granted"]["pages"] == "4k"
    assert weights["resident_bytes"] == weights["nbytes"]
    assert document["output"]["stop"] == "length"
    assert len(document["output"]["tokens"]) == 20
    assert document["session"] is None
    assert document["store"] is None
    assert document["speed"]["decode_tokens_per_second"] > 0
    assert document["ggml"]["tinyblas"] in (True, False)


def test_the_default_model_is_in_the_package() -> None:
    document = run_json()
    assert document["model"]["embedded"]
    assert document["prompt"]["text"] == "Once upon a time"
    # The text is readable: a story in sentences.
    words = re.findall(r"[A-Za-z']+", document["output"]["text"])
    assert len(words) > 40
    assert len({"the", "and", "was", "a"} & set(words)) >= 3
    assert not re.search(r"[^\w\s.,!?\"';:-]", document["output"]["text"])
    assert document["options"]["ctx"] == document["model"]["dims"]["max_seq_len"]


def test_after_eight_tokens_a_token_costs_nothing(model: Path) -> None:
    # The kernel may move a page, which rarely adds a fault.
    # The cost of a token itself would appear in every run.
    for _ in range(4):
        # A separate process has only the faults of the command.
        words = ("run", model, "-p", "Hello", "-n", "72", "--json", *ONE_THREAD)
        document = json.loads(run_anew(*words).out)
        if document["steady_state"]["minor_faults"] == 0:
            break
    assert document["steady_state"] == {
        "first_token": 9, "tokens": 64, "minor_faults": 0, "major_faults": 0, "allocations": 0,
        "system_calls": 0,
    }  # fmt: skip
    assert document["buffers"]["moved"] == []
    assert document["buffers"]["count"] >= 2 * TINY.layers + 1  # K and V of each layer, logits


def test_an_unreached_steady_state_is_not_reported(model: Path) -> None:
    document = run_json(model, "-n", "8")
    assert document["steady_state"] is None
    assert document["prompt"] == {"text": "", "tokens": [1]}  # which begins a text
    assert "it was not reached" in page_of(model, "-n", "8")


def test_control_characters_are_written_out(model: Path) -> None:
    chance = ("-p", "Hi", "-n", "200", "--temperature", "20", "--top-k", "0", "--seed", "2")
    text = run_json(model, *chance)["output"]["text"]
    assert CONTROL.search(text)
    out = page_of(model, *chance)
    assert not CONTROL.search(out)
    visible = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    assert out.startswith(f"Hi{visible}\n\ntext ")


def test_a_drawn_seed_is_shown_and_repeats_the_text(model: Path) -> None:
    chance = ("-p", "Hi", "-n", "40", "--temperature", "1.5", "--top-k", "0")
    first = run_json(model, *chance)
    again = run_json(model, *chance, "--seed", str(first["options"]["seed"]))
    assert again["output"] == first["output"]
    # Two drawn seeds may give the same short text, so fixed ones show that the seed decides.
    one, two = (run_json(model, *chance, "--seed", seed)["output"] for seed in "12")
    assert one != two


def test_kv_dtype_and_pages(model: Path) -> None:
    half = run_json(model, "-n", "1", "--ctx", "512", "--pages", "4k")
    full = run_json(model, "-n", "1", "--ctx", "512", "--kv-dtype", "f32")
    assert row_of(half, "kv")["granted"]["pages"] == "4k"
    assert row_of(full, "kv")["nbytes"] == pytest.approx(2 * row_of(half, "kv")["nbytes"], abs=PAGE)
    if not huge_page_bytes():
        pytest.skip("this system gives no transparent huge pages")
    huge = run_json(model, "-n", "1", "--pages", "thp")
    assert {row_of(huge, name)["granted"]["pages"] for name in ("kv", "scratch")} == {"thp"}


def test_the_model_is_loaded_as_requested(model: Path) -> None:
    loads = ("map", "copy", "direct")
    documents = [run_json(model, "-p", "Hello", "-n", "9", "--load", load) for load in loads]
    for load, document in zip(loads, documents, strict=True):
        assert document["options"]["load"] == document["model"]["load"] == load
        assert document["model"]["load_reason"] == "it was asked for"
        assert document["output"] == documents[0]["output"]
    part = gf.split(model, 8)[1]
    split = run_json(part, "-p", "Hello", "-n", "9", "--numa", "preferred:0")
    assert split["output"] == documents[0]["output"]
    assert len(split["model"]["files"]) > 2
    assert split["options"]["load"] == "auto"
    assert split["model"]["load"] in ("copy", "direct")
    assert "numa='preferred:0' cannot be had for a mapped file" in split["model"]["load_reason"]
    page = page_of(model, "-n", "1", "--load", "copy")
    assert re.search(r"^load +copy: it was asked for$", page, re.M)


def test_a_repacked_model_is_planned_and_reported(tmp_path: Path) -> None:
    ggml_repack = pytest.importorskip("unimem.backends.ggml_orders", exc_type=ImportError)
    if ggml_repack.find_order(2, (256, 64)) is None:
        pytest.skip("this build of ggml has no order for q4_0 on this CPU")
    path = write_model(tmp_path / "q4_0.gguf", shape=TINY, kind="q4_0")
    document = run_json(path, "-p", "Hello", "-n", "9", "--load", "repack")
    assert document["options"]["load"] == document["model"]["load"] == "repack"
    assert document["model"]["load_reason"] == "it was asked for"
    rows = {row["category"]: row["nbytes"] for row in document["report"]["rows"]}
    assert rows == {row["category"]: row["nbytes"] for row in document["plan"]["rows"]}
    assert rows["weights:q4_0 repacked"] > 0
    plan = json.loads(show("plan", path, "--load", "repack", "--json").out)
    assert (plan["load"], plan["unread_bytes"]) == ("repack", rows["weights:q4_0 repacked"])


def test_the_default_number_of_tokens_ends_with_the_context(model: Path) -> None:
    document = run_json(model, "-p", "Hello", "--ctx", "32")
    n_prompt = len(document["prompt"]["tokens"])
    assert len(document["output"]["tokens"]) == 32 - n_prompt


def test_chat_formats_the_message_by_the_template(chat_model: Path) -> None:
    document = run_json(chat_model, "--chat", "-p", "Hello", "-n", "5")
    assert document["prompt"]["text"] == "<|im_start|>Hello<|im_end|>"
    plain = run_json(chat_model, "-p", "<|im_start|>Hello<|im_end|>", "-n", "5")
    # Without --chat, a special token in the prompt is plain text.
    assert len(plain["prompt"]["tokens"]) > len(document["prompt"]["tokens"])


def test_a_text_ends_where_the_model_ends_it(chat_model: Path) -> None:
    expected = {"text": "", "tokens": [0], "stop": "end"}
    assert run_json(chat_model, "-p", "Hello")["output"] == expected
    out = page_of(chat_model, "-p", "Hello")
    assert out.startswith("Hello\n\ntext ")
    assert "text      1 token (ended by the model)" in out


@needs_stories
def test_the_continuation_is_llama_cpp_s() -> None:
    greedy = ("-p", "Once upon a time", "-n", "60", "--temperature", "0")
    assert page_of(STORIES, *greedy).startswith(f"Once upon a time{STORY}")
    assert run_json(STORIES, *greedy)["output"]["text"].startswith(STORY)


def assert_fails(folder: Path, code: int, said: str, *arguments: object) -> None:
    with chdir(folder):
        screen = run(*arguments)
    assert (screen.code, screen.out) == (code, "")
    assert said in " ".join(screen.err.split())
    assert len(screen.err.splitlines()) <= (4 if code == 2 else 1)


@pytest.mark.parametrize("arch", ["gemma3", "qwen3moe"])
def test_models_whose_layers_differ_or_have_experts(arch: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", arch, replace(TINY, layers=7), "f32")
    saved, options = tmp_path / "a.session", ("-n", "100", "--ctx", "300")
    document = run_json(path, "-p", "Hello", *options, "--save-session", saved)
    assert document["model"]["architecture"] == arch
    assert document["options"]["window"] is None
    planned, reported = (
        {row["category"]: row["nbytes"] for row in document[of]["rows"]}
        for of in ("plan", "report")
    )
    assert planned == reported
    n_saved = document["session"]["saved_tokens"]
    assert n_saved == len(document["prompt"]["tokens"]) + len(document["output"]["tokens"])
    document = run_json(path, "-p", "", "--resume", saved, *options)
    assert document["session"]["restored_tokens"] == n_saved


def test_a_window(model: Path) -> None:
    document = run_json(model, "-p", "Hello", "-n", "400", "--window", "50", "--ctx", "450")
    assert document["options"]["window"] == 50
    assert len(document["output"]["tokens"]) == 400
    kv = row_of(document, "kv")
    assert kv["nbytes"] == row_of(document, "kv", "plan")["nbytes"]
    assert kv["resident_bytes"] == kv["nbytes"] - PAGE  # the history tape has one, and no need
    assert kv["active_bytes"] == 50 * 2 * TINY.layers * TINY.kv_heads * TINY.head * 2
    assert document["report"]["total_bytes"] == document["plan"]["total_bytes"]
    assert document["buffers"]["moved"] == []
    assert document["steady_state"]["allocations"] == document["steady_state"]["system_calls"] == 0
    out = page_of(model, "-p", "Hello", "-n", "90", "--window", "50")
    assert "attention sees the last 50" in " ".join(out.split())


@pytest.fixture
def session(tmp_path: Path) -> Path:
    return tmp_path / "talk.session"


@pytest.mark.parametrize("options", [
    (), ("--kv-dtype", "f32"), ("--kv-dtype", "bf16"), ("--window", "20"),
], ids=lambda value: " ".join(value) or "plain")  # fmt: skip
def test_a_session_needs_no_prefill(model: Path, session: Path, options: tuple[str, ...]) -> None:
    whole = run_json(model, "-p", "Hello", "-n", "60", *options)["output"]["tokens"]
    first = run_json(model, "-p", "Hello", "-n", "40", "--save-session", session, *options)
    n = len(first["prompt"]["tokens"]) + 40
    held = min(n, 20) if "--window" in options else n
    assert first["session"] | {"save_seconds": 0} == {
        "resumed": None, "restored_tokens": 0, "restore_seconds": 0.0, "saved": str(session),
        "saved_tokens": held, "save_seconds": 0,
    }  # fmt: skip
    then = run_json(model, "-n", "20", "--resume", session, *options)
    assert first["output"]["tokens"] + then["output"]["tokens"] == whole
    assert then["prompt"] == {"text": "", "tokens": []}
    assert then["speed"]["prefill_seconds"] == 0
    assert then["speed"]["prefill_tokens_per_second"] is None
    resumed = {"resumed": str(session), "restored_tokens": held, "saved": None}
    assert then["session"] | resumed == then["session"]
    # The file is unchanged, and its continuation may replace it.
    both = ("--resume", session, "--save-session", session)
    again = [run_json(model, "-n", "10", *both, *options)["output"]["tokens"] for _ in range(2)]
    assert again[0] + again[1] == then["output"]["tokens"]


def test_a_stored_prompt_is_taken_from_the_store(model: Path, tmp_path: Path) -> None:
    prompt = "1234" * 100
    options = (model, "-p", prompt, "-n", "4", "--store", tmp_path / "store")
    first, then = run_json(*options), run_json(*options)
    n = len(first["prompt"]["tokens"])
    stored = n // 256 * 256
    assert stored > 0
    for document, restored in ((first, 0), (then, (n - 1) // 256 * 256)):
        assert document["store"] == {
            "folder": str(tmp_path / "store"),
            "restored_tokens": restored,
            "stored_tokens": stored,
        }
    assert then["output"] == first["output"]
    facts = " ".join(page_of(*options).split())
    assert f"{(n - 1) // 256 * 256} of {n} tokens of the prompt taken from" in facts
    secret = tmp_path / "secret"
    secret.write_text("the secret of A")
    of_a = (*options, "--salt-file", secret)
    assert [run_json(*of_a)["store"]["restored_tokens"] for _ in range(2)] == [
        *(0, (n - 1) // 256 * 256),
    ]
    for words in (("--store", ""), ("--salt-file", secret)):
        code, _, err = run(model, "-p", "x", *words)
        assert code == 2
        assert "--store" in err


def test_a_prompt_follows_the_session_s_text(model: Path, session: Path) -> None:
    run_json(model, "-p", "Hello", "-n", "5", "--save-session", session)
    then = run_json(model, "-p", "you", "-n", "20", "--resume", session)
    assert 1 not in then["prompt"]["tokens"]  # which begins a text
    assert then["speed"]["prefill_tokens_per_second"] > 0
    both = ("--resume", session, "--save-session", session)
    out = page_of(model, "-p", "you", "-n", "20", *both)
    assert out.startswith("you")
    n = then["session"]["restored_tokens"]
    used = n + len(then["prompt"]["tokens"]) + 20
    facts = " ".join(out.split())
    assert f"session {n} tokens restored from {session}, {used} tokens saved to {session}" in facts
    assert f"{used} used" in facts


def test_a_chat_continues_without_starting_over(tmp_path: Path, session: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    added = {"tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": template}
    path = write_constant_model(tmp_path / "chat.gguf", spm_vocab().metadata | added)
    first = run_json(path, "--chat", "-p", "Hello", "-n", "1", "--save-session", session)
    then = run_json(path, "--chat", "-p", "Hello", "-n", "1", "--resume", session)
    assert first["prompt"]["tokens"][0] == 1
    assert then["prompt"]["tokens"] == first["prompt"]["tokens"][1:]


@pytest.mark.filterwarnings("always::unimem.PlacementWarning")
def test_a_run_reads_as_much_from_disk_as_planned(monkeypatch: Patch) -> None:
    plan = um.plan(embedded_model(), ctx=100, threads=1)
    room = plan.total_bytes - plan["other"].nbytes - (256 << 10)  # the header is copied by then
    limit = Limit("memory of the machine", 2 * room, room, "take less")
    monkeypatch.setattr(limits, "memory_limits", lambda: (limit,))
    screen = run("--ctx", "100", "-n", "1", "--load", "map", "--json")
    again = "256.0 KiB of the model are read from disk with every token"
    assert screen.err == f"unimem: warning: {again} (--verbose says more)\n"
    assert screen.code == 0
    told = json.loads(screen.out)["plan"]
    assert (told["verdict"], told["spilled_bytes"]) == ("reads from disk", 256 << 10)
    planned = um.plan(embedded_model(), ctx=100, threads=1, load="map")
    assert planned.spilled_bytes == 256 << 10


def test_a_run_streams_a_model_without_room_or_into_a_budget(monkeypatch: Patch) -> None:
    whole = um.plan(embedded_model(), ctx=100, threads=1, load="stream")
    assert whole.weights_budget is not None
    budget = ("--weights-budget", str(whole.weights_budget - (256 << 10)))
    page = " ".join(page_of("--ctx", "100", "-n", "12", *budget).split())
    assert re.search(r"stream a budget of .*; .* pieces were in RAM, .* s waited", page)
    document = run_json("--ctx", "100", "-n", "12", *budget)
    assert document["model"]["load"] == "stream"
    assert document["options"]["weights_budget"] == budget[1]
    (stream,) = document["streams"]
    assert stream["misses"] > 0
    assert document["report"]["total_bytes"] == document["plan"]["total_bytes"]
    room = whole.total_bytes - (256 << 10)
    limit = Limit("memory of the machine", 2 * room, room, "take less")
    monkeypatch.setattr(limits, "memory_limits", lambda: (limit,))
    document = run_json("--ctx", "100", "-n", "1")
    assert (document["model"]["load"], document["plan"]["verdict"]) == ("stream", "streams")
    assert "would not stay in memory" in document["model"]["load_reason"]


def test_a_context_beyond_the_model_s_own_is_mentioned() -> None:
    page = page_of("--ctx", "600", "-n", "1")
    assert "600 tokens (as asked for, beyond what it was made for; the model's is 512)" in " ".join(
        page.split()
    )


@pytest.mark.filterwarnings("always::unimem.PlacementWarning")
def test_a_spilling_model_runs_with_a_message(model: Path, monkeypatch: Patch) -> None:
    def refuse(*_: object, **_options: object) -> None:
        raise CapacityError("warming it does not fit", 1, 1, 2)

    monkeypatch.setattr(residency, "require_room", refuse)
    code, out, err = run(model, "--json", "--load", "map", "-n", "2", "-p", "a")
    assert code == 0, err
    assert json.loads(out)["output"]["tokens"]
    assert "is read from the disk for every token" in err
    assert len(err.splitlines()) == 1


@pytest.fixture(scope="module")
def sessions(model: Path, chat_model: Path) -> Path:
    folder = model.parent
    run_json(model, "-p", "1234", "-n", "17", "--save-session", folder / "a.session")
    run_json(chat_model, "-p", "12", "-n", "1", "--save-session", folder / "other.session")
    raw = bytearray((folder / "a.session").read_bytes())
    raw[-4096] ^= 4
    (folder / "damaged.session").write_bytes(raw)
    return folder


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["--save-session", "nowhere/file"], 1, "nowhere/file: No such file or directory"),
    (["--resume", "a.session", "--kv-dtype", "f32"], 1, "a.session: the snapshot is of a"),
    (["--resume", "a.session", "--window", "9"], 1, "a.session: the snapshot is of a cache"),
    (["--resume", "other.session"], 1, "other.session: expected a session of model"),
    (["--resume", "damaged.session"], 1, "damaged.session: the data's checksum"),
    (["--resume", "a.session", "--ctx", "20"], 3, "session of 25 tokens does not fit in the "
     "context of 20"),
    (["--resume", "a.session", "--ctx", "30", "-n", "6"], 3, "a session of 25 tokens, a prompt "
     "of 0 tokens and 6 more do not fit in the context of 30"),
    (["--window", "601"], 2, "--window: expected at most the context, 600"),
    (["--kv-dtype", "q8_0"], 1, "head_dim: expected a multiple of 32 for q8_0, got 16"),
    (["--rotate"], 1, "rotate: expected heads of a multiple of 64 values, and the model's have 16"),
], ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "")  # fmt: skip
def test_a_session_must_fit(sessions: Path, arguments: list[str], code: int, said: str) -> None:
    assert_fails(sessions, code, said, "random.gguf", *arguments, "--json")


@pytest.mark.parametrize(("target", "said"), [
    ("folder", "folder: Is a directory"),
    ("new/", "new/: Is a directory"),
    ("pipe", "pipe: Is not a regular file"),
    ("/dev/null", "/dev/null: Is not a regular file"),
    ("/proc/unimem.session", "/proc/unimem.session: "),
    ("n" * 300, "File name too long"),
    ("loop", "loop: Too many levels of symbolic links"),
    ("dangling", "nowhere/file: No such file or directory"),
], ids=lambda value: value[:30])  # fmt: skip
def test_an_unsavable_session_is_refused_at_once(tmp_path: Path, target: str, said: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere/file")
    before = sorted(os.listdir(tmp_path))
    # The check precedes opening the model, which is missing here.
    assert_fails(tmp_path, 1, said, "none.gguf", "--save-session", target)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(("error", "code", "said"), [
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1, "No space left on device"),
    (MemoryError("no room for it"), 3, "no room for it"),
    (KeyboardInterrupt(), 130, ""),
], ids=["disk", "memory", "Ctrl-C"])  # fmt: skip
def test_a_failed_save_still_shows_the_text(
    model: Path, session: Path, error: BaseException, code: int, said: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(Decoder, "save_session", Mock(side_effect=error))
    arguments = (model, "-p", "Hello", "-n", "20")
    screen = run(*arguments, "--save-session", session, "--json")
    document = json.loads(screen.out)
    assert (screen.code, document["output"]) == (code, run_json(*arguments)["output"])
    not_saved = {"saved": None, "saved_tokens": 0, "save_seconds": 0}
    assert document["session"] | not_saved == document["session"]
    screen = run(*arguments, "--save-session", session)
    assert screen.code == code
    assert re.search(r"^session +not saved$", screen.out, re.M)
    assert said in screen.err
    assert len(screen.err.splitlines()) == (1 if said else 0)


def test_a_failure_in_the_middle_keeps_the_text_and_says_why(tmp_path: Path) -> None:
    broken = write_model(tmp_path / "nan.gguf", shape=TINY, kind="f32")
    raw = bytearray(broken.read_bytes())
    raw[-4 * TINY.vocab * TINY.hidden :] = b"\xff\xff\xff\x7f" * (TINY.vocab * TINY.hidden)
    broken.write_bytes(raw)
    code, out, err = run(broken, "-p", "Hello")
    assert (code, out) == (1, "Hello\n")
    assert "the weights are damaged" in err
    assert len(err.splitlines()) == 1


def remedy(name: str) -> str:
    return rf"unimem: .*{name}.*install unimem-llm with the extra 'run': .*"


PACKAGES = ("sentencepiece", "jinja2")
MISSING = f"""
import sys
from unimem.cli import main
for name in {PACKAGES}:
    sys.modules[name] = None
    print(main(), flush=True)
    del sys.modules[name]
"""


def test_a_remedy_that_the_model_needs_is_shown(chat_model: Path) -> None:
    screen = run_command("run", chat_model, "--chat", "-p", "Hello", code=MISSING)
    assert screen.lines == ["1"] * len(PACKAGES)
    for name, said in zip(PACKAGES, screen.err.splitlines(), strict=True):
        assert re.fullmatch(remedy(name), said)


# Generates twelve tokens, then waits for a line before more.
GATED = f"""
import sys
from unimem.engine import Decoder
step, n = Decoder.generate_next_token, 0
def gated(self, **options):
    global n
    n += 1
    if n == 13:
        sys.stdin.readline()
    return step(self, **options)
Decoder.generate_next_token = gated
{MAIN}
"""


def start_gated(*arguments: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    process = start_command("run", *arguments, *ONE_THREAD, code=GATED, stdin=pipe)
    assert process.stdout is not None
    assert process.stdout.read(8)
    return process


def test_a_reader_that_leaves_ends_it_quietly(model: Path) -> None:
    with start_gated(model, "-p", "Hello", "-n", "500") as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate("\n")
    assert (process.returncode, err) == (1, "")


def test_ctrl_c_shows_what_was_done(model: Path) -> None:
    with start_gated(model, "-p", "Hello", "-n", "590") as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, err) == (130, "")
    assert re.search(r"^text +\d+ tokens? \(interrupted\)", out, re.M)
    assert re.search(r"^total ", out, re.M)


@pytest.fixture
def interrupted(monkeypatch: Patch) -> Patch:
    step, n = Decoder.generate_next_token, 0

    def interrupt(self: Decoder, **options: Any) -> int:
        nonlocal n
        n += 1
        if n == 13:
            raise KeyboardInterrupt
        return step(self, **options)

    monkeypatch.setattr(Decoder, "generate_next_token", interrupt)
    return monkeypatch


def test_ctrl_c_leaves_document_and_session(model: Path, session: Path, interrupted: Patch) -> None:
    code, out, err = run(model, "-p", "Hello", "--json", "--save-session", session)
    assert (code, err) == (130, "")
    document = json.loads(out)
    made = document["output"]["tokens"]
    assert (document["output"]["stop"], len(made)) == ("interrupted", 12)
    assert document["steady_state"]["tokens"] == 4
    assert document["session"]["saved_tokens"] == len(document["prompt"]["tokens"]) + 12
    interrupted.undo()
    then = run_json(model, "-n", "8", "--resume", session)["output"]["tokens"]
    assert made + then == run_json(model, "-p", "Hello", "-n", "20")["output"]["tokens"]


INTERRUPTED_LOAD = """
import os, signal, sys
from unimem.weights import loading
from unimem._core.status import ledger
from unimem.cli import main
read = loading.read_parts
def interrupted(*arguments, progress, **options):
    def progress_then_ctrl_c(done, total):
        progress(done, total)
        os.kill(os.getpid(), signal.SIGINT)
    read(*arguments, progress=progress_then_ctrl_c, **options)
loading.read_parts = interrupted
for load in ("copy", "direct"):
    n_threads = len(os.listdir("/proc/self/task"))
    code = main([*sys.argv[1:], "--load", load])
    left = [name for name, row in ledger().items() if row["mapped_bytes"]]
    print(code, left, len(os.listdir("/proc/self/task")) - n_threads)
"""


def test_ctrl_c_during_loading_leaves_nothing(model: Path) -> None:
    screen = run_command("run", model, *ONE_THREAD, code=INTERRUPTED_LOAD)
    assert screen == (0, "130 [] 0\n" * 2, "")


def test_without_a_token_nothing_is_saved(model: Path, session: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Decoder, "prefill", Mock(side_effect=KeyboardInterrupt))
    arguments = (model, "-p", "Hello", "--save-session", session)
    code, out, err = run(*arguments)
    assert (code, err) == (130, "")
    assert re.search(r"^session +nothing to save", out, re.M)
    code, out, _ = run(*arguments, "--json")
    assert (code, json.loads(out)["session"]["saved"]) == (130, None)
    assert not session.exists()


def test_on_a_terminal(model: Path) -> None:
    arguments = (model, "-p", "Hello", "-n", "10")
    screen = show_on_terminal("run", *arguments, *ONE_THREAD)
    assert screen.code == 0
    for shown in (screen.out, page_of(*arguments, columns=80)):
        assert shown.startswith("\x1b[2mHello\x1b[0m")
        assert "\x1b[1mmemory " in shown
        # Only these sequences appear (bars are cyan), and none from the model.
        used = {"\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[36m"}
        assert set(re.findall(r"\x1b[^m]*m?", shown)) == used
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in page_of(*arguments, columns=80, **environment)


def test_lines_on_a_terminal_end_between_words() -> None:
    story, narrow = (
        page_of("-n", "100", **options).split("\n\ntext ")[0]
        for options in ({}, {"columns": 40, "NO_COLOR": "1"})
    )
    lines = narrow.splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 40
    assert " ".join(lines).split() == story.split()


def test_a_bar_is_on_a_terminal_when_loading_takes_long(model: Path, monkeypatch: Patch) -> None:
    arguments = (model, "-p", "Hello", "-n", "1", "--json")
    monkeypatch.setattr(terminal, "_PATIENCE_SECONDS", 600)
    assert run(*arguments, columns=80).err == ""  # loading small models is quick
    monkeypatch.setattr(terminal, "_PATIENCE_SECONDS", -1)
    for load in ("map", "copy"):
        shown = run(*arguments, "--load", load, columns=80).err
        assert "loading" in shown
        assert "\x1b[?25h" in shown  # the cursor is back
    assert run(*arguments).err == ""  # elsewhere there is no bar
