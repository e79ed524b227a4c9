"""`unimem chat`: a conversation with a model, whose history stays in the KV cache."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from unimem.accounting.report_text import memory_lines
from unimem.accounting.row import explain
from unimem.base.atomic_file import write_text
from unimem.base.cache_folder import cache_folder, check_own_folder
from unimem.base.text import escape, fact_lines, format_count
from unimem.cli import terminal
from unimem.cli.exits import Ended
from unimem.cli.loading import (
    Fallbacks,
    ModelOptions,
    load_layout,
    new_decoder,
    read_tokenizer,
    warm,
)
from unimem.cli.options import (
    Ctx,
    KVType,
    LoadMode,
    NumaOfModel,
    PageSize,
    Rotate,
    Salt,
    SamplingSeed,
    Temperature,
    Threads,
    TopK,
    TopP,
    Verbose,
    WeightsBudget,
    Window,
    check_numa,
    parse_sampling,
    path_or_url,
    salt_of,
    value_option,
)
from unimem.errors import CacheFull, FormatError
from unimem.governor import Governor
from unimem.kv.store.store import KVStore

if TYPE_CHECKING:
    from collections.abc import Generator

    from unimem.engine import Decoder
    from unimem.engine.sampling import Sampling

_HELP = """\
/save FILE     keep the conversation in FILE, and its messages in FILE.json
/resume FILE   go on with a conversation that was saved
/memory        show where memory goes
/clear         begin anew
/quit          end, as Ctrl-D does; Ctrl-C ends an answer
"""
_MOST_LINES = 1000


class Message(NamedTuple):
    """A message of a conversation; `role` is "user" or "assistant"."""

    role: str
    content: str


class Dialogue:
    """Messages whose tokens are in a decoder's KV cache.

    The prompt of a message repeats all before it. Tokens that are in the cache stay, and only those
    behind them are computed.
    """

    def __init__(self, decoder: Decoder, sampling: Sampling) -> None:
        self.decoder = decoder
        self.messages: list[Message] = []
        self._sampling = asdict(sampling)
        self._prompt([Message("user", "")])  # a model without a template is refused at once

    def answer(self, text: str) -> Generator[str, None, None]:
        """Generate the answer to a message, in pieces. One that is not taken to its end is kept.

        Raises
        ------
        CacheFull
            The context has no room for the message. The conversation is as before.
        """
        said = Message("user", text)
        self._compute(self._prompt([*self.messages, said]))
        pieces: list[str] = []
        try:
            for piece in self._generate():
                pieces.append(piece)
                yield piece
        finally:
            self.messages += [said, Message("assistant", "".join(pieces).strip())]

    @property
    def aside(self) -> str | None:
        """What a governor put aside, and where."""
        if not self.decoder.kv.is_empty:
            return None
        aside: str | None = self.decoder.report().facts["put_aside"]
        return aside

    @property
    def is_full(self) -> bool:
        """Whether the context has no room for another token."""
        return self.decoder.kv.next_position >= self.decoder.ctx

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        from unimem.engine.text.chat import chat_prompt

        metadata, tokenizer = self.decoder.weights.metadata, self.decoder.tokenizer
        prompt = chat_prompt(metadata, tokenizer, [each._asdict() for each in messages])
        return tokenizer.encode(prompt, special=True)

    def _compute(self, ids: list[int]) -> None:
        """Make these tokens the content of the cache."""
        if len(ids) >= (most := self.decoder.ctx):
            raise CacheFull(
                f"the conversation has {format_count(len(ids), 'token')}, and the context holds "
                f"{most:,}: /clear begins anew, or start with a larger --ctx",
                most,
                self.decoder.kv.seq_len,
                len(ids),
            )
        self.decoder.set_tokens(ids)

    def _generate(self) -> Iterator[str]:
        tokenizer = self.decoder.tokenizer
        stream, ends = tokenizer.stream(), tokenizer.eog_ids
        while not self.is_full:
            token = self.decoder.generate_next_token(**self._sampling)
            if token in ends:
                break
            if text := stream.push(token):
                yield text
        if text := stream.flush():
            yield text

    def save(self, path: str) -> None:
        """Write the session, and the messages beside it."""
        self.decoder.save_session(path)
        write_text(f"{path}.json", json.dumps(self.messages))

    def resume(self, path: str) -> None:
        """Go on with a saved conversation.

        Raises
        ------
        FormatError
            The file of messages is damaged. The conversation is as before.
        """
        with open(f"{path}.json", encoding="utf-8") as file:
            try:
                messages = [Message(str(role), str(text)) for role, text in json.load(file)]
            except (TypeError, ValueError, RecursionError):
                expected = "expected a list of pairs: a role, and a text"
                raise FormatError(expected, path=f"{path}.json") from None
        self.decoder.resume(path)
        self.messages = messages

    def clear(self) -> None:
        """Begin anew."""
        self.decoder.reset()
        self.messages = []


def chat(
    model: Annotated[
        str, typer.Argument(metavar="MODEL.gguf", help="A GGUF file made for chat, or its URL.")
    ],
    ctx: Ctx = None,
    threads: Threads = None,
    kv_dtype: KVType = "f16",
    rotate: Rotate = None,
    window: Window = None,
    temperature: Temperature = 0.0,
    top_k: TopK = 40,
    top_p: TopP = 1.0,
    seed: SamplingSeed = None,
    load: LoadMode = "auto",
    weights_budget: WeightsBudget = None,
    pages: PageSize = "auto",
    numa: NumaOfModel = None,
    store: Annotated[
        str | None,
        value_option(
            "DIR",
            "Take first tokens from this store of prefixes, and put the conversation aside there "
            "if memory is short and it waits.",
        ),
    ] = None,
    salt: Salt = None,
    verbose: Verbose = False,
) -> None:
    """Talk with a model, whose history stays in the KV cache."""
    check_numa(numa, mirror=True)
    secret = salt_of(salt, store)
    options = ModelOptions(
        ctx=ctx,
        threads=threads,
        kv_dtype=kv_dtype,
        rotate=rotate,
        window=window,
        load=load,
        weights_budget=weights_budget,
        pages=pages,
        numa=numa,
    )
    sampling = parse_sampling(temperature, top_k, top_p, seed)
    converse(path_or_url(model), options, sampling, store=store, salt=secret, verbose=verbose)


def converse(
    path: Path | str,
    options: ModelOptions,
    sampling: Sampling,
    *,
    store: str | None = None,
    salt: str = "",
    verbose: bool = False,
) -> None:
    """Load a model, and answer messages from standard input until it ends."""
    if sys.stdin is None:
        raise OSError(errno.EBADF, "closed, expected messages, a line each", "standard input")
    tokenizer = read_tokenizer(path, options)
    with (
        Fallbacks(verbose=verbose) as fallbacks,
        nullcontext() if store is None else KVStore(store, ram_bytes=0, salt=salt) as opened,
        load_layout(path, options) as layout,
        new_decoder(layout, options, tokenizer, opened) as decoder,
        nullcontext() if opened is None else Governor().add(decoder) as governor,
        _lines_of_before(),
    ):
        if governor is not None:
            governor.start()
        talk = Dialogue(decoder, sampling)
        assert layout.plan is not None  # for_model made it
        warm(decoder, layout.plan)
        fallbacks.show(layout.plan)
        if isinstance(sys.stdin, TextIOWrapper):  # a line that is no text is refused alone
            sys.stdin.reconfigure(errors="surrogateescape")
        terminal.show("/help lists commands; Ctrl-C ends an answer, Ctrl-D the conversation.\n")
        while (line := _read()) is not None:
            try:
                if line.startswith("/"):
                    if not _obey(talk, *line.split(maxsplit=1)):
                        break
                elif line:
                    _answer(talk, line)
            except Ended:
                raise
            except KeyboardInterrupt:
                terminal.show("\n")
            except (CacheFull, OSError, RuntimeError, ValueError) as error:
                terminal.show(f"{escape(str(error))}\n")
        terminal.show(_memory(talk))


@contextmanager
def _lines_of_before() -> Iterator[None]:
    """Give `input` keys that edit a line, and the lines of earlier conversations."""
    folder = cache_folder()
    try:
        import readline
    except ImportError:
        folder = None
    if folder is None or not sys.stdin.isatty():
        yield
        return
    path = os.path.join(folder, "chat_history")
    readline.clear_history()
    with suppress(OSError, ValueError):
        for line in Path(path).read_text("utf-8").splitlines()[-_MOST_LINES:]:
            readline.add_history(line)
    try:
        yield
    finally:
        n = readline.get_current_history_length()
        lines = [readline.get_history_item(i + 1) for i in range(max(0, n - _MOST_LINES), n)]
        with suppress(OSError, ValueError):  # a conversation does not end for it
            check_own_folder(folder, create=True)
            write_text(path, "".join(f"{line}\n" for line in lines))


def _read() -> str | None:
    """Return the next line, or None at the end."""
    while True:
        try:
            terminal.show("\n")
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            terminal.show("\n")
            return None
        except Ended:
            raise
        except KeyboardInterrupt:  # drops the line
            terminal.show("\n")


def _answer(talk: Dialogue, line: str) -> None:
    flow, at_start = terminal.Flow(), True
    if aside := talk.aside:
        terminal.show(f"Memory was short: what was put aside is read again: {escape(aside)}\n")
    with closing(talk.answer(line)) as pieces:
        for piece in pieces:
            text = escape(piece, keeps_lines=True)
            text = text.lstrip() if at_start else text
            at_start = at_start and not text
            terminal.show(flow.push(text))
    terminal.show(f"{flow.flush()}\n")
    if talk.is_full:
        terminal.show("The context is full: /clear begins anew, a larger --ctx holds more.\n")


def _obey(talk: Dialogue, command: str, path: str = "") -> bool:
    """Do what a command says; return whether the conversation goes on."""
    kv = talk.decoder.kv
    if command in ("/save", "/resume") and not path:
        terminal.show(f"{command} expects the path of a file\n")
    elif command == "/save":
        talk.save(path)
        terminal.show(f"{format_count(kv.seq_len, 'token')} saved to {escape(path)}\n")
    elif command == "/resume":
        talk.resume(path)
        terminal.show(f"{format_count(kv.seq_len, 'token')} restored from {escape(path)}\n")
    elif command == "/memory":
        terminal.show(_memory(talk))
    elif command == "/clear":
        talk.clear()
    elif command != "/quit":
        terminal.show(_HELP)
    return command != "/quit"


def _memory(talk: Dialogue) -> str:
    surface, report = terminal.surface(), talk.decoder.report()
    lines = [*memory_lines(surface, report.rows), "", *fact_lines(surface, explain(report.rows))]
    if aside := report.facts["put_aside"]:
        return "\n".join([*lines, "", f"put aside while memory was short: {aside}", ""])
    used = f"{talk.decoder.kv.next_position:,} of {talk.decoder.ctx:,} tokens of context used"
    return "\n".join([*lines, "", used, ""])
