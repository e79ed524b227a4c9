"""`unimem run`, as a user has it: in a process of its own, with and without a terminal."""

from __future__ import annotations

import errno
import json
import mmap
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")

import gguf_files as gf
from models.make import TINY, write_model
from project import STORIES
from tokenizer_models import spm_vocab
from tokenizer_models import write_model as write_constant_model
from unimem.cli import terminal

# What llama.cpp writes, greedily, after "Once upon a time".
STORY = (
    ", there was a little girl named Lily. She loved to play outside in the park. One day, she saw "
    "a big, red ball. She wanted to play with it, but it was too high."
)
# A row of ggml's threads that wait for each other takes long where other processes compute, too.
ONE_THREAD = ("--threads", "1")
MAIN = "import sys; from unimem.cli import main; sys.exit(main())"
PAGE = mmap.PAGESIZE
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def start(*arguments: str | Path, code: str = MAIN, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(command, encoding="utf-8", **options)


def run(*arguments: str | Path, **options: Any) -> tuple[int, str, str]:
    with start(*arguments, **options) as process:
        out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def run_json(*arguments: str | Path, **options: Any) -> dict[str, Any]:
    code, out, err = run("run", *arguments, "--json", *ONE_THREAD, **options)
    assert (code, err) == (0, "")
    document: dict[str, Any] = json.loads(out)
    return document


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, whose tokens are mostly single bytes."""
    return write_model(tmp_path_factory.mktemp("run") / "random.gguf", shape=TINY, kind="f32")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of zero weights with a chat template; its likeliest token, 0, ends a text."""
    vocab = spm_vocab()
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    metadata = vocab.metadata | {
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": template,
    }
    return write_constant_model(tmp_path_factory.mktemp("chat") / "chat.gguf", metadata)


# ---- what it prints ------------------------------------------------------------------------


def test_without_a_terminal_text_and_tables_are_plain_lines(model: Path) -> None:
    code, out, err = run("run", model, "-p", "Hello", "-n", "20", *ONE_THREAD)
    assert (code, err) == (0, "")
    assert out.startswith("Hello")
    assert not CONTROL.search(out)
    tables = out[out.index("\nmemory ") :]
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
        "speed", "steady_state", "buffers", "ggml",
    ]  # fmt: skip
    assert document["schema"] == "unimem.run/1"
    assert document["model"]["files"] == [str(model)]
    assert document["model"]["architecture"] == "llama"
    assert document["model"]["dims"]["num_layers"] == TINY.layers
    assert document["options"] == {
        "ctx": 100, "threads": 1, "kv_dtype": "f16", "window": None, "load": "auto",
        "pages": "auto", "numa": None, "chat": False, "temperature": 0.0, "top_k": 40,
        "top_p": 1.0, "seed": None,
    }  # fmt: skip
    report, plan = document["report"], document["plan"]
    sizes = {row["category"]: row["nbytes"] for row in report["rows"]}
    assert sum(sizes.values()) == report["total_bytes"]
    planned = {row["category"]: row["nbytes"] for row in plan["rows"]}
    assert sum(planned.values()) == plan["total_bytes"] <= plan["available_bytes"]
    assert planned == sizes
    of_file = {"weights:f32", "weights:padding"}
    assert set(sizes) == of_file | {*("kv", "scratch", "logits", "tokens", "diagnostics", "other")}
    assert sizes["logits"] == 4 * TINY.vocab
    row_bytes = 2 * TINY.layers * TINY.kv_heads * TINY.head * 2
    assert sizes["kv"] == pytest.approx(100 * row_bytes, abs=4096)
    kv = next(row for row in report["rows"] if row["category"] == "kv")
    n_prompt = len(document["prompt"]["tokens"])
    assert kv["active_bytes"] == (n_prompt + 20) * row_bytes
    assert kv["resident_bytes"] == kv["nbytes"]
    assert kv["granted"]["pages"] == "4k"
    weights = next(row for row in report["rows"] if row["category"] == "weights:f32")
    assert weights["resident_bytes"] == weights["nbytes"]
    assert document["output"]["stop"] == "length"
    assert len(document["output"]["tokens"]) == 20
    assert document["session"] is None
    assert document["speed"]["decode_tokens_per_second"] > 0
    assert document["ggml"]["tinyblas"] in (True, False)


def test_without_a_model_it_is_the_one_in_the_package() -> None:
    document = run_json()
    assert document["model"]["embedded"]
    assert document["prompt"]["text"] == "Once upon a time"
    # Readable: a story of sentences, in words.
    words = re.findall(r"[A-Za-z']+", document["output"]["text"])
    assert len(words) > 40
    assert len({"the", "and", "was", "a"} & set(words)) >= 3
    assert not re.search(r"[^\w\s.,!?\"';:-]", document["output"]["text"])
    assert document["options"]["ctx"] == document["model"]["dims"]["max_seq_len"]


def test_after_eight_tokens_a_token_costs_nothing(model: Path) -> None:
    # The kernel may take a page for a moment, to move it, and its return counts as a fault: seldom.
    # What a token costs by itself would show in every run.
    for _ in range(4):
        document = run_json(model, "-p", "Hello", "-n", "72")
        if document["steady_state"]["minor_faults"] == 0:
            break
    assert document["steady_state"] == {
        "first_token": 9,
        "tokens": 64,
        "minor_faults": 0,
        "major_faults": 0,
        "allocations": 0,
        "system_calls": 0,
    }
    assert document["buffers"]["moved"] == []
    assert document["buffers"]["count"] >= 2 * TINY.layers + 1  # K and V of each layer, logits


def test_a_steady_state_that_was_not_reached_is_not_reported(model: Path) -> None:
    assert run_json(model, "-p", "Hello", "-n", "8")["steady_state"] is None
    code, out, _ = run("run", model, "-p", "Hello", "-n", "8", *ONE_THREAD)
    assert code == 0
    assert "it was not reached" in out


def test_what_a_terminal_would_obey_is_written_out(model: Path) -> None:
    chance = ("-p", "Hi", "-n", "200", "--temperature", "20", "--top-k", "0", "--seed", "2")
    text = run_json(model, *chance)["output"]["text"]
    assert CONTROL.search(text)
    code, out, _ = run("run", model, *chance, *ONE_THREAD)
    assert code == 0
    assert not CONTROL.search(out)
    visible = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    assert out.startswith(f"Hi{visible}\n\nmemory")


def test_without_a_prompt_the_text_begins_with_the_model_s_first_token(model: Path) -> None:
    document = run_json(model, "-n", "1")
    assert document["prompt"] == {"text": "", "tokens": [1]}


# ---- options -------------------------------------------------------------------------------


def test_a_seed_that_was_drawn_is_told_and_repeats_the_text(model: Path) -> None:
    chance = ("-p", "Hi", "-n", "40", "--temperature", "1.5", "--top-k", "0")
    first = run_json(model, *chance)
    again = run_json(model, *chance, "--seed", str(first["options"]["seed"]))
    other = run_json(model, *chance, "--seed", str(first["options"]["seed"] + 1))
    assert again["output"] == first["output"]
    assert other["output"] != first["output"]


def test_kv_dtype_and_pages(model: Path) -> None:
    half = run_json(model, "-n", "1", "--ctx", "512", "--pages", "4k")
    full = run_json(model, "-n", "1", "--ctx", "512", "--kv-dtype", "f32")

    def kv(document: dict[str, Any]) -> dict[str, Any]:
        return next(row for row in document["report"]["rows"] if row["category"] == "kv")

    assert kv(half)["granted"]["pages"] == "4k"
    assert kv(full)["nbytes"] == pytest.approx(2 * kv(half)["nbytes"], abs=4096)


def test_huge_pages_are_granted_where_they_are_asked_for(model: Path) -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this system gives no transparent huge pages")
    document = run_json(model, "-n", "1", "--pages", "thp")
    granted = {row["category"]: row["granted"] for row in document["report"]["rows"]}
    assert granted["kv"]["pages"] == granted["scratch"]["pages"] == "thp"
    assert document["options"]["pages"] == "thp"


def test_the_model_comes_into_memory_as_asked_for(model: Path) -> None:
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
    assert "numa='preferred:0' is not kept by a mapped file" in split["model"]["load_reason"]
    _, out, _ = run("run", model, "-n", "1", "--load", "copy", *ONE_THREAD)
    assert re.search(r"^load +copy: it was asked for$", out, re.M)


def test_the_default_number_of_tokens_ends_with_the_context(model: Path) -> None:
    document = run_json(model, "-p", "Hello", "--ctx", "32")
    n_prompt = len(document["prompt"]["tokens"])
    assert len(document["output"]["tokens"]) == 32 - n_prompt


def test_chat_writes_the_message_as_the_template_says(chat_model: Path) -> None:
    document = run_json(chat_model, "--chat", "-p", "Hello", "-n", "5")
    assert document["prompt"]["text"] == "<|im_start|>Hello<|im_end|>"
    plain = run_json(chat_model, "-p", "<|im_start|>Hello<|im_end|>", "-n", "5")
    # In a prompt without --chat, what looks like a special token is text.
    assert len(plain["prompt"]["tokens"]) > len(document["prompt"]["tokens"])


def test_a_text_ends_where_the_model_ends_it(chat_model: Path) -> None:
    assert run_json(chat_model, "-p", "Hello")["output"] == {
        "text": "",
        "tokens": [0],
        "stop": "end",
    }
    _, out, _ = run("run", chat_model, "-p", "Hello", *ONE_THREAD)
    assert out.startswith("Hello\n\nmemory")
    assert "text      1 token (ended by the model)" in out


def test_the_continuation_is_llama_cpp_s() -> None:
    if not STORIES.exists():
        pytest.skip(f"{STORIES.name} is not beside the project")
    greedy = ("-p", "Once upon a time", "-n", "60", "--temperature", "0")
    code, out, _ = run("run", STORIES, *greedy)
    assert code == 0
    assert out.startswith(f"Once upon a time{STORY}")
    assert run_json(STORIES, *greedy)["output"]["text"].startswith(STORY)


# ---- windows and sessions ------------------------------------------------------------------


def test_a_window(model: Path) -> None:
    document = run_json(model, "-p", "Hello", "-n", "400", "--window", "50", "--ctx", "450")
    assert document["options"]["window"] == 50
    assert len(document["output"]["tokens"]) == 400
    kv = next(row for row in document["report"]["rows"] if row["category"] == "kv")
    planned = next(row for row in document["plan"]["rows"] if row["category"] == "kv")
    assert kv["nbytes"] == planned["nbytes"]
    assert kv["resident_bytes"] == kv["nbytes"] - PAGE  # the history tape has one, and no need
    assert kv["active_bytes"] == 50 * 2 * TINY.layers * TINY.kv_heads * TINY.head * 2
    assert document["report"]["total_bytes"] == document["plan"]["total_bytes"]
    assert document["buffers"]["moved"] == []
    assert document["steady_state"]["allocations"] == document["steady_state"]["system_calls"] == 0
    _, out, _ = run("run", model, "-p", "Hello", "-n", "90", "--window", "50", *ONE_THREAD)
    assert "attention sees the last 50" in " ".join(out.split())


@pytest.fixture
def session(tmp_path: Path) -> Path:
    return tmp_path / "talk.session"


@pytest.mark.parametrize(
    "options",
    [(), ("--kv-dtype", "f32"), ("--kv-dtype", "bf16"), ("--window", "20")],
    ids=lambda value: " ".join(value) or "plain",
)
def test_a_session_goes_on_without_prefill(
    model: Path, session: Path, options: tuple[str, ...]
) -> None:
    whole = run_json(model, "-p", "Hello", "-n", "60", *options)["output"]["tokens"]
    first = run_json(model, "-p", "Hello", "-n", "40", "--save-session", session, *options)
    n = len(first["prompt"]["tokens"]) + 40
    held = min(n, 20) if "--window" in options else n
    assert first["session"] | {"save_seconds": 0} == {
        "resumed": None,
        "restored_tokens": 0,
        "restore_seconds": 0.0,
        "saved": str(session),
        "saved_tokens": held,
        "save_seconds": 0,
    }
    then = run_json(model, "-n", "20", "--resume", session, *options)
    assert first["output"]["tokens"] + then["output"]["tokens"] == whole
    assert then["prompt"] == {"text": "", "tokens": []}
    assert (then["speed"]["prefill_seconds"], then["speed"]["prefill_tokens_per_second"]) == (
        0,
        None,
    )
    assert then["session"]["resumed"] == str(session)
    assert then["session"]["restored_tokens"] == held
    assert then["session"]["saved"] is None
    # The file is as it was, and it can be replaced by what follows on it.
    both = ("--resume", session, "--save-session", session)
    again = [run_json(model, "-n", "10", *both, *options)["output"]["tokens"] for _ in range(2)]
    assert again[0] + again[1] == then["output"]["tokens"]


def test_a_prompt_follows_the_session_s_text(model: Path, session: Path) -> None:
    run_json(model, "-p", "Hello", "-n", "5", "--save-session", session)
    then = run_json(model, "-p", "you", "-n", "20", "--resume", session)
    assert 1 not in then["prompt"]["tokens"]  # which begins a text
    assert then["speed"]["prefill_tokens_per_second"] > 0
    code, out, err = run(
        "run", model, "-p", "you", "-n", "20", "--resume", session, "--save-session", session,
        *ONE_THREAD,
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert out.startswith("you")
    n = then["session"]["restored_tokens"]
    used = n + len(then["prompt"]["tokens"]) + 20
    facts = " ".join(out.split())
    assert f"session {n} tokens restored from {session}, {used} tokens saved to {session}" in facts
    assert f"{used} used" in facts


def test_a_chat_goes_on_without_beginning_anew(tmp_path: Path, session: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    added = {"tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": template}
    path = write_constant_model(tmp_path / "chat.gguf", spm_vocab().metadata | added)
    first = run_json(path, "--chat", "-p", "Hello", "-n", "1", "--save-session", session)
    then = run_json(path, "--chat", "-p", "Hello", "-n", "1", "--resume", session)
    assert first["prompt"]["tokens"][0] == 1
    assert then["prompt"]["tokens"] == first["prompt"]["tokens"][1:]


def test_the_model_in_the_package_goes_on_with_its_story(session: Path) -> None:
    whole = run_json("-n", "40")["output"]["text"]
    first = run_json("-n", "20", "--save-session", session)["output"]["text"]
    code, out, _ = run("run", "-n", "20", "--resume", session, *ONE_THREAD)
    then = out.split("\n\nmemory")[0]
    assert code == 0
    assert "".join((first + then).split()) == "".join(whole.split())


def test_a_model_that_spills_runs_and_says_so(model: Path) -> None:
    code = f"""
from unimem import CapacityError
from unimem.weights import residency
def refuse(weights, mapped):
    raise CapacityError("warming it does not fit", 1, 1, 2)
residency._require_room = refuse
{MAIN}"""
    arguments = ("run", model, "--json", "--load", "map", "-n", "2", "-p", "a", *ONE_THREAD)
    status, out, err = run(*arguments, code=code)
    assert status == 0, err
    assert json.loads(out)["output"]["tokens"]
    assert "is read from the disk for every token" in " ".join(err.split())


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--resume", "nowhere"], 1, "nowhere: No such file or directory"),
        (["--resume", "random.gguf"], 1, "random.gguf: "),
        (["--save-session", "nowhere/file"], 1, "nowhere/file: No such file or directory"),
        (["--resume", "a.session", "--kv-dtype", "f32"], 1, "a.session: the snapshot is of a"),
        (["--resume", "a.session", "--window", "9"], 1, "a.session: the snapshot is of a cache"),
        (["--resume", "other.session"], 1, "other.session: expected a session of model"),
        (["--resume", "damaged.session"], 1, "damaged.session: the data's checksum"),
        (["--resume", "a.session", "--ctx", "20"], 3, "session of 25 tokens does not fit in the "
         "context of 20"),
        (["--resume", "a.session", "--ctx", "30", "-n", "6"], 3, "a session of 25 tokens, a prompt "
         "of 0 tokens and 6 more do not fit in the context of 30"),
        (["--window", "0"], 2, "--window"),
        (["--window", "601"], 1, "window: expected at most the context, 600"),
        (["--kv-dtype", "q8_0"], 1, "head_dim: expected a multiple of 32 for q8_0, got 16"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)  # fmt: skip
def test_a_session_that_does_not_fit_is_refused(
    model: Path, chat_model: Path, arguments: list[str], code: int, said: str
) -> None:
    folder = model.parent
    if not (folder / "damaged.session").exists():
        run_json(model, "-p", "1234", "-n", "17", "--save-session", folder / "a.session")
        run_json(chat_model, "-p", "12", "-n", "1", "--save-session", folder / "other.session")
        raw = bytearray((folder / "a.session").read_bytes())
        raw[-4096] ^= 4
        (folder / "damaged.session").write_bytes(raw)
    got, out, err = run("run", model.name, *arguments, "--json", *ONE_THREAD, cwd=folder)
    assert (got, out) == (code, "")
    assert said in " ".join(err.split())
    assert len(err.splitlines()) <= 4


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("folder", "folder: Is a directory"),
        ("new/", "new/: Is a directory"),
        ("", ": Is a directory"),
        ("pipe", "pipe: Is not a regular file"),
        ("/dev/null", "/dev/null: Is not a regular file"),
        ("/proc/unimem.session", "/proc/unimem.session: "),
        ("n" * 300, "File name too long"),
        ("loop", "loop: Too many levels of symbolic links"),
        ("dangling", "nowhere/file: No such file or directory"),
    ],
    ids=lambda value: value[:30],
)
def test_a_session_that_could_not_be_saved_is_refused_at_once(
    tmp_path: Path, target: str, said: str
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere/file")
    before = sorted(os.listdir(tmp_path))
    # Before the model, even, which is not there.
    got, out, err = run("run", "none.gguf", "--save-session", target, cwd=tmp_path)
    assert (got, out) == (1, "")
    assert said in err
    assert len(err.splitlines()) == 1
    assert sorted(os.listdir(tmp_path)) == before


FAILING_SAVE = """
import errno, os
from unimem.engine import Decoder
def failing(self, path):
    raise {error}
Decoder.save_session = failing
{MAIN}
"""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)", 1, "No space left on device"),
        ("MemoryError('no room for it')", 3, "no room for it"),
        ("KeyboardInterrupt", 130, ""),
    ],
)
def test_when_saving_fails_what_was_made_is_shown(
    model: Path, session: Path, error: str, code: int, said: str
) -> None:
    program = FAILING_SAVE.format(error=error, MAIN=MAIN)
    arguments = ("-p", "Hello", "-n", "20", "--save-session", session, *ONE_THREAD)
    expected = run_json(model, "-p", "Hello", "-n", "20")["output"]
    got, out, err = run("run", model, *arguments, "--json", code=program)
    document = json.loads(out)
    assert (got, document["output"]) == (code, expected)
    assert document["session"]["saved"] is None
    assert (document["session"]["saved_tokens"], document["session"]["save_seconds"]) == (0, 0)
    got, out, err = run("run", model, *arguments, code=program)
    assert got == code
    assert re.search(r"^session +not saved$", out, re.M)
    assert said in err
    assert len(err.splitlines()) == (1 if said else 0)


# ---- failures ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere.gguf"], 1, "nowhere.gguf: No such file or directory"),
        (["."], 1, ".: A directory: give a model file in it"),
        (["text.gguf"], 1, "text.gguf: the file does not begin with GGUF (at byte 0)"),
        (["none.gguf"], 1, "'none'"),
        (["random.gguf", "--chat", "-p", "hi"], 1, "expected a chat template"),
        (["random.gguf", "--chat"], 2, "--chat needs a message"),
        (["random.gguf", "-n", "0"], 2, "--tokens"),
        (["random.gguf", "-n", "many"], 2, "--tokens"),
        (["random.gguf", "--ctx", "0"], 2, "--ctx"),
        (["random.gguf", "--ctx", str(2**31)], 2, "--ctx"),
        (["random.gguf", "--threads", "0"], 2, "--threads"),
        (["random.gguf", "--kv-dtype", "q9"], 2, "--kv-dtype"),
        (["random.gguf", "--load", "mmap"], 2, "--load"),
        (["random.gguf", "--pages", "3k"], 2, "--pages"),
        (["random.gguf", "--numa", "bind:1024"], 2, "bind:NODES"),
        (["random.gguf", "--temperature", "-1"], 2, "temperature"),
        (["random.gguf", "--temperature", "nan"], 2, "temperature"),
        (["random.gguf", "--temperature", "inf"], 2, "temperature"),
        (["random.gguf", "--top-k", "-1"], 2, "--top-k"),
        (["random.gguf", "--top-p", "0"], 2, "top_p"),
        (["random.gguf", "--seed", "-1"], 2, "--seed"),
        (["random.gguf", "-p", os.fsdecode(b"\xff")], 2, "expected text in UTF-8"),
        (["random.gguf", "--unknown"], 2, "--unknown"),
        (["random.gguf", "more.gguf"], 2, "more.gguf"),
        (["random.gguf", "--ctx", "8", "-n", "20"], 3, "do not fit in the context of 8"),
        (["random.gguf", "--ctx", "8", "-p", "too long for this"], 3, "context of 8"),
        (["random.gguf", "--ctx", "2000000000"], 3, "a context of 600 tokens, the longest"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_a_failure_is_a_sentence_and_an_exit_code(
    model: Path, arguments: list[str], code: int, said: str
) -> None:
    folder = model.parent
    (folder / "text.gguf").write_text("no model at all, only text of some length")
    (folder / "none.gguf").write_bytes(gf.everything())
    # The context that is too small is refused before anything is written, with --json or not.
    got, out, err = run("run", *arguments, *(["--json"] if code == 3 else []), cwd=folder)
    assert (got, out) == (code, "")
    assert said in " ".join(err.split())
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 4


def test_a_failure_in_the_middle_keeps_the_text_and_says_why(tmp_path: Path) -> None:
    broken = write_model(tmp_path / "nan.gguf", shape=TINY, kind="f32")
    raw = bytearray(broken.read_bytes())
    raw[-4 * TINY.vocab * TINY.hidden :] = b"\xff\xff\xff\x7f" * (TINY.vocab * TINY.hidden)
    broken.write_bytes(raw)
    code, out, err = run("run", broken, "-p", "Hello", *ONE_THREAD)
    assert (code, out) == (1, "Hello\n")
    assert "the weights are damaged" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["typer", "rich", "sentencepiece", "jinja2"])
def test_a_missing_package_is_named_with_its_remedy(chat_model: Path, name: str) -> None:
    code, out, err = run(
        "run", chat_model, "--chat", "-p", "Hello",
        code=f"import sys; sys.modules[{name!r}] = None; {MAIN}",
    )  # fmt: skip
    assert (code, out) == (1, "")
    assert re.fullmatch(rf"unimem: .*{name}.*pip install 'unimem-llm\[run\]'\n", err)


def test_without_a_command_the_help_is_shown() -> None:
    code, out, err = run()
    assert code == 2
    assert "run" in out + err
    code, out, err = run("run", "--help")
    assert (code, err) == (0, "")
    assert "--kv-dtype" in out
    code, out, err = run("walk")
    assert (code, out) == (2, "")
    assert "walk" in err


# ---- the other end goes away ---------------------------------------------------------------


def test_a_reader_that_leaves_ends_it_quietly(model: Path) -> None:
    with start("run", model, "-n", "500", *ONE_THREAD) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        assert (process.wait(timeout=300), err) == (1, "")


@pytest.mark.parametrize("extra", [[], ["--json"]], ids=["plain", "json"])
def test_a_full_disk_is_an_error(model: Path, extra: list[str]) -> None:
    with open("/dev/full", "w") as full:
        code, _, err = run("run", model, "-n", "1", *ONE_THREAD, *extra, stdout=full)
    assert code == 1
    assert err == f"unimem: standard output: {os.strerror(errno.ENOSPC)}\n"


def test_a_closed_standard_output_is_an_error(model: Path) -> None:
    code, _, err = run("run", model, code=f"import os; os.close(1); import sys; "
                       f"sys.stdout = None; {MAIN}")  # fmt: skip
    assert code == 1
    assert "standard output is closed" in err


def test_ctrl_c_shows_what_was_done(model: Path) -> None:
    with start("run", model, "-p", "Hello", "-n", "590", *ONE_THREAD, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stdout.read(8)  # of the text, beyond the prompt
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "")
    assert re.search(r"^text +\d+ tokens? \(interrupted\)", out, re.M)
    assert re.search(r"^total ", out, re.M)


INTERRUPTED = f"""
import os, signal
from unimem.engine import Decoder
step, n = Decoder.generate_next_token, 0
def interrupted(self, **options):
    global n
    n += 1
    if n == 13:
        os.kill(os.getpid(), signal.SIGINT)
    return step(self, **options)
Decoder.generate_next_token = interrupted
{MAIN}
"""


def test_ctrl_c_leaves_one_whole_document(model: Path) -> None:
    code, out, err = run("run", model, "-p", "Hello", "--json", *ONE_THREAD, code=INTERRUPTED)
    assert (code, err) == (130, "")
    document = json.loads(out)
    assert document["output"]["stop"] == "interrupted"
    assert len(document["output"]["tokens"]) == 12
    assert document["steady_state"]["tokens"] == 4


def test_ctrl_c_saves_what_is_there(model: Path, session: Path) -> None:
    arguments = ("-p", "Hello", "--json", "--save-session", session, *ONE_THREAD)
    code, out, err = run("run", model, *arguments, code=INTERRUPTED)
    assert (code, err) == (130, "")
    document = json.loads(out)
    assert document["session"]["saved_tokens"] == len(document["prompt"]["tokens"]) + 12
    then = run_json(model, "-n", "8", "--resume", session)["output"]["tokens"]
    whole = run_json(model, "-p", "Hello", "-n", "20")["output"]["tokens"]
    assert document["output"]["tokens"] + then == whole


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
n_threads = len(os.listdir("/proc/self/task"))
code = main()
left = [name for name, row in ledger().items() if row["mapped_bytes"]]
print(code, left, len(os.listdir("/proc/self/task")) - n_threads)
"""


@pytest.mark.parametrize("load", ["copy", "direct"])
def test_ctrl_c_while_it_is_loaded_leaves_nothing(model: Path, load: str) -> None:
    code, out, err = run("run", model, "--load", load, *ONE_THREAD, code=INTERRUPTED_LOAD)
    assert (code, out, err) == (0, "130 [] 0\n", "")


INTERRUPTED_AT_ONCE = f"""
from unimem.engine import Decoder
def interrupted(self, tokens):
    raise KeyboardInterrupt
Decoder.prefill = interrupted
{MAIN}
"""


def test_without_a_token_nothing_is_saved(model: Path, session: Path) -> None:
    arguments = ("-p", "Hello", "--save-session", session, *ONE_THREAD)
    code, out, err = run("run", model, *arguments, code=INTERRUPTED_AT_ONCE)
    assert (code, err) == (130, "")
    assert re.search(r"^session +nothing to save", out, re.M)
    code, out, _ = run("run", model, *arguments, "--json", code=INTERRUPTED_AT_ONCE)
    assert (code, json.loads(out)["session"]["saved"]) == (130, None)
    assert not session.exists()


# ---- on a terminal -------------------------------------------------------------------------


def on_terminal(*arguments: str | Path, code: str = MAIN, **environment: str) -> tuple[int, str]:
    """Run with a terminal as standard output and standard error; give what it shows."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"} | environment
    env = {name: value for name, value in env.items() if name != "NO_COLOR" or environment}
    process = start(*arguments, code=code, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b"".join(_read_all(ours))
    os.close(ours)
    return process.wait(timeout=300), shown.decode()


def _read_all(fd: int) -> Iterator[bytes]:
    with suppress(OSError):  # EIO: the other side was closed
        while part := os.read(fd, 4096):
            yield part


def test_a_terminal_shows_colours(model: Path) -> None:
    code, shown = on_terminal("run", model, "-p", "Hello", "-n", "10", *ONE_THREAD)
    assert code == 0
    assert shown.startswith("\x1b[2mHello\x1b[0m")
    assert "\x1b[1mmemory " in shown
    # Nothing but these (bars are cyan): not from the model either.
    used = {"\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[36m"}
    assert set(re.findall(r"\x1b[^m]*m?", shown)) == used


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_shows_none_where_it_shall_not(model: Path, environment: dict[str, str]) -> None:
    code, shown = on_terminal("run", model, "-p", "Hello", "-n", "10", *ONE_THREAD, **environment)
    assert code == 0
    assert "\x1b" not in shown


def test_lines_on_a_terminal_end_between_words() -> None:
    _, out, _ = run("run", *ONE_THREAD)
    story, _ = out.split("\n\nmemory")
    _, shown = on_terminal("run", *ONE_THREAD, COLUMNS="40", NO_COLOR="1")
    lines = shown.replace("\r\n", "\n").split("\n\nmemory")[0].splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 40
    assert " ".join(lines).split() == story.split()


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["One day, ", "Maya wal", "ked"], ["One day,", "Maya", "walked"]),
        (["1234567 9"], ["1234567", "9"]),
        (["12345678 9"], ["12345678", "9"]),
        (["a\n\n  b"], ["a", "", "  b"]),
        (["ab abcdefghijkl"], ["ab", "abcdefgh", "ijkl"]),
        (["日本語日本語"], ["日本語日", "本語"]),
    ],
    ids=str,
)
def test_text_flows_in_lines_of_eight_columns(pieces: list[str], lines: list[str]) -> None:
    flow = terminal.Flow(8)
    shown = "".join(flow.push(piece) for piece in pieces) + flow.flush()
    assert [line.rstrip() for line in shown.split("\n")] == lines


def test_a_long_word_is_shown_as_it_comes() -> None:
    flow = terminal.Flow(8)
    assert flow.push("abcdefghij") == "abcdefgh"


IMPATIENT = f"""
from unimem.cli import terminal
terminal._PATIENCE_SECONDS = -1
{MAIN}
"""


def test_a_bar_is_shown_on_a_terminal_when_loading_takes_long(model: Path) -> None:
    arguments = ("run", model, "-p", "Hello", "-n", "1", "--json", *ONE_THREAD)
    code, shown = on_terminal(*arguments, code=IMPATIENT)
    assert code == 0
    assert "loading" in shown
    assert "\x1b[?25h" in shown  # the cursor is back
    assert "loading" in on_terminal(*arguments, "--load", "copy", code=IMPATIENT)[1]
    # Loading small models is quick, and elsewhere there is none at all.
    assert "loading" not in on_terminal(*arguments)[1]
    assert run(*arguments, code=IMPATIENT)[2] == ""
