"""`unimem chat`: turns, commands, interrupts and lines of before, on a terminal and in a pipe."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("unimem_ggml", reason="the engine needs ggml: pip install ./ggml '.[run]'")

from support.terminal.screens import MAIN, show
from unimem.cli.chat import Dialogue
from unimem.cli.options import parse_sampling
from unimem.engine import Decoder, embedded_model
from unimem.errors import CacheFull, FormatError, SnapshotError
from unimem.governor import Governor
from unimem.kv.store.store import KVStore

KEY, TEMPLATE = b"tokenizer.chat_template", b"{% for m in messages %}{{ m.content }} {% endfor %}"
ONE_THREAD = ("--threads", "1")
# The terminal controls the process, so that Ctrl-C reaches it. At the 13th token an answer waits.
ON_TERMINAL = f"""
import fcntl, os, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from unimem.engine import Decoder
step, n = Decoder.generate_next_token, 0
def gated(self, **options):
    global n
    n += 1
    if n == 13:
        os.write(1, b"<waits>")
        while True:  # a signal just before a long sleep would be seen behind it
            time.sleep(0.01)
    return step(self, **options)
Decoder.generate_next_token = gated
{MAIN}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model in the package with a chat template, as long as its alignment needs."""
    raw = embedded_model().read_bytes()
    (n_keys,) = struct.unpack_from("<Q", raw, 16)
    n = len(TEMPLATE) + -(8 + len(KEY) + 4 + 8 + len(TEMPLATE) + 4) % 32 + 4
    text = TEMPLATE + b"{#" + b" " * (n - len(TEMPLATE) - 4) + b"#}"
    entry = struct.pack("<Q", len(KEY)) + KEY + struct.pack("<IQ", 8, len(text)) + text
    assert len(entry) % 32 == 0
    path = tmp_path_factory.mktemp("chat") / "chat.gguf"
    path.write_bytes(raw[:16] + struct.pack("<Q", n_keys + 1) + entry + raw[24:])
    return path


@contextmanager
def conversation(model: Path, **options: Any) -> Iterator[Dialogue]:
    with Decoder(model, threads=1, **options) as decoder:
        yield Dialogue(decoder, parse_sampling(0, 40, 1, None))


def answer(talk: Dialogue, text: str, n: int | None = None) -> str:
    """Return an answer, or its first n pieces."""
    pieces = talk.answer(text)
    said = [piece for _, piece in zip(range(10**6 if n is None else n), pieces, strict=False)]
    pieces.close()
    return "".join(said)


def test_what_is_in_the_cache_is_not_computed_again(model: Path) -> None:
    with conversation(model) as talk, conversation(model) as anew:
        answer(talk, "Once upon a time", 30)
        anew.messages = list(talk.messages)
        n_before = talk.decoder.kv.seq_len
        with patch.object(
            Decoder, "prefill", autospec=True, side_effect=Decoder.prefill
        ) as prefill:
            said = answer(talk, "Lily was sad.", 20)
            assert said == answer(anew, "Lily was sad.", 20) != ""
        n_new, n_all = (len(call.args[1]) for call in prefill.call_args_list)
        assert n_new < 12 < n_before < n_all
        assert [role for role, _ in talk.messages] == ["user", "assistant"] * 2
        talk.clear()
        assert (talk.messages, talk.decoder.kv.seq_len) == ([], 0)


def test_a_window_that_does_not_reach_back_begins_anew(model: Path) -> None:
    with conversation(model, window=16) as talk:
        answer(talk, "Once upon a time", 60)
        talk.messages[1] = talk.messages[1]._replace(content="Another text.")
        assert answer(talk, "Lily was sad.", 5)


def test_a_message_without_room_changes_nothing(model: Path) -> None:
    with conversation(model, ctx=64) as talk:
        answer(talk, "Once upon a time", 9)
        before = list(talk.messages)
        with pytest.raises(CacheFull, match=r"and the context holds 64: /clear begins anew"):
            answer(talk, "Lily " * 64)
        assert talk.messages == before
        answer(talk, "Once")
        assert talk.is_full


def test_a_conversation_is_saved_and_resumed(model: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "talk.session")
    with conversation(model) as talk, conversation(model) as then:
        answer(talk, "Once upon a time", 20)
        talk.save(path)
        then.resume(path)
        assert then.messages == talk.messages
        assert answer(then, "Lily was sad.", 20) == answer(talk, "Lily was sad.", 20)
        for text in ("[1, 2]", "[" * 3000):
            Path(f"{path}.json").write_text(text)
            with pytest.raises(FormatError, match="expected a list of pairs: a role, and a text"):
                then.resume(path)
        Path(f"{path}.json").write_text("[]")
        Path(path).write_bytes(b"")
        with pytest.raises(SnapshotError):
            then.resume(path)
        assert len(then.messages) == 4


def test_a_conversation_that_was_put_aside_says_so_and_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A governor puts it aside while the second message is awaited."""
    governors: list[Governor] = []
    lines: list[str] = []
    step, n = Decoder.generate_next_token, 0

    def start(governor: Governor) -> None:
        governors.append(governor)

    def read(_: str) -> str:
        if len(lines) == 2 and governors:
            assert governors[-1].give_back() > 0
            lines.insert(0, "/memory")
            governors.clear()
        return lines.pop(0) if lines else "/quit"

    def short(decoder: Decoder, **options: Any) -> int:
        nonlocal n
        n += 1
        return step(decoder, **options) if n % 10 else min(decoder.tokenizer.eog_ids)

    def answers(*options: str) -> list[str]:
        lines[:] = ["Once", "Lily", "Lily " * 400]
        code, out, err = show("chat", model, "--ctx", "256", *ONE_THREAD, *options)
        assert (code, err) == (0, "")
        assert "/clear begins anew, or start with a larger --ctx" in out
        assert ("put aside while memory was short: " in out) == bool(options)
        assert ("Memory was short: what was put aside is read again" in out) == bool(options)
        return [line for line in out.splitlines() if "Lily" in line or "once" in line]

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("unimem.engine.decoder._IDLE_NS", 0)
    monkeypatch.setattr(Governor, "start", start)
    monkeypatch.setattr(Decoder, "generate_next_token", short)
    expected = answers()
    assert expected
    (secret := tmp_path / "secret").write_text("the secret of A")
    asked: list[str] = []

    def opened(*where: Any, salt: str, **options: Any) -> KVStore:
        asked.append(salt)
        return KVStore(*where, salt=salt, **options)

    monkeypatch.setattr("unimem.cli.chat.KVStore", opened)
    assert answers("--store", str(tmp_path / "kv"), "--salt-file", str(secret)) == expected
    assert asked == ["the secret of A"]


@contextmanager
def on_terminal(*arguments: object, cache: Path) -> Iterator[Callable[[str, str], str]]:
    """Start a command on a terminal; yield what types keys and waits for words of the output."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "dumb", "UNIMEM_CACHE": str(cache), "INPUTRC": os.devnull}
    process = subprocess.Popen(
        [sys.executable, "-c", ON_TERMINAL, *map(str, arguments)],
        stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)

    def type_keys(keys: str, words: str) -> str:
        os.write(ours, keys.encode())
        shown = ""
        while not re.search(words, shown):
            assert select.select([ours], [], [], 300)[0], shown
            try:
                shown += os.read(ours, 4096).decode(errors="replace").replace("\r", "")
            except OSError:  # the process has ended
                assert words == "$"
                break
        return shown

    try:
        yield type_keys
        assert process.wait(300) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_on_a_terminal_ctrl_c_ends_an_answer_only(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("readline", reason="this Python has no readline")
    saved, cache = tmp_path / "talk.session", tmp_path / "cache"
    with on_terminal("chat", model, *ONE_THREAD, cache=cache) as types:
        assert "/help lists commands" in types("", "\n> $")
        types("Once upon a time\n", "<waits>")
        types("\x03", "\n> $")
        # Python may begin to wait just after the signal came, and sees it at the next line then.
        types("a line that is dropped\x03\n", "\n> $")
        types("/help\n", r"Ctrl-C ends an answer[\s\S]*\n> $")
        assert "/save expects the path" in types("/save\n", "\n> $")
        assert re.search(r"\d\d tokens saved to ", types(f"/save {saved}\n", "\n> $"))
        types("/clear\n", "\n> $")
        assert "No such file" in types("/resume /nowhere\n", "\n> $")
        assert re.search(r"\d\d tokens restored from ", types(f"/resume {saved}\n", "\n> $"))
        shown = types("/memory\n", "\n> $")
        assert re.search(
            r"^kv .*\n(.*\n)+total .*\n(.*\n)+\n\d\d of 512 tokens of context used", shown, re.M
        )
        assert "tokens of context used" in types("\x04", "context used\n")
    lines = (cache / "chat_history").read_text().splitlines()
    assert lines[0] == "Once upon a time"
    assert stat.S_IMODE((cache / "chat_history").stat().st_mode) == 0o600
    assert stat.S_IMODE(saved.with_name(f"{saved.name}.json").stat().st_mode) == 0o600
    with on_terminal("run", model, "--chat", *ONE_THREAD, cache=cache) as types:
        types("", "\n> $")
        assert "/memory" in types("\x10", "/memory")  # the line before, as in a shell
        types("\x15/quit\n", "context used\n")


def test_in_a_pipe_messages_are_lines(model: Path) -> None:
    words = [sys.executable, "-c", MAIN, "chat", str(model), *ONE_THREAD]
    done = subprocess.run(
        words, input="Once upon\n\n/quit\n", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "> " not in done.stdout
    assert "tokens of context used\n" in done.stdout


def test_a_line_in_another_encoding_is_refused_alone(model: Path) -> None:
    """As in a locale such as de_DE.UTF-8, where Python's standard input is strict."""
    words = [sys.executable, "-c", MAIN, "chat", str(model), *ONE_THREAD, "--ctx", "64"]
    done = subprocess.run(
        words,
        input=b"caf\xe9\nOnce upon\n",
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"expected text that UTF-8 can write" in done.stdout
    assert b"64 of 64 tokens of context used" in done.stdout


def test_a_closed_standard_input_is_an_error(model: Path) -> None:
    code = f"import os, sys; os.close(0); sys.stdin = None\n{MAIN}"
    done = subprocess.run(
        [sys.executable, "-c", code, "chat", model, *ONE_THREAD],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "unimem: standard input: closed, expected messages, a line each\n"


def test_sigterm_ends_a_conversation(model: Path) -> None:
    words = [sys.executable, "-c", MAIN, "chat", str(model), *ONE_THREAD]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert "/help" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert (process.returncode, err) == (143, "")


def test_a_model_without_a_template_is_refused() -> None:
    code, out, err = show("chat", embedded_model(), *ONE_THREAD)
    assert (code, out) == (1, "")
    assert "tokenizer.chat_template: expected a chat template" in err
