"""`unimem run`: text from a model file, the purpose of every byte, and the cost of a token."""

from __future__ import annotations

import json
import resource
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from unimem._core.status import counters
from unimem.accounting.report import Report
from unimem.accounting.report_text import memory_lines, pieces_text
from unimem.accounting.row import explain
from unimem.base.atomic_file import NewFile
from unimem.base.text import escape, fact_lines, format_bytes, format_count, table_lines
from unimem.cli import terminal
from unimem.cli.chat import converse
from unimem.cli.loading import (
    Fallbacks,
    ModelOptions,
    load_layout,
    new_decoder,
    read_tokenizer,
    warm,
)
from unimem.cli.options import (
    AsJson,
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
    parse_tokens,
    path_or_url,
    salt_of,
    value_option,
)
from unimem.engine import embedded_model
from unimem.errors import CacheFull
from unimem.governor import Governor
from unimem.kv import snapshot
from unimem.kv.store.store import KVStore
from unimem.planning.plan import DEFAULT_CTX
from unimem.planning.result import Plan
from unimem.remote.client import shown
from unimem.system.heap import warm_python_heap

if TYPE_CHECKING:
    from unimem.engine import Decoder
    from unimem.engine.sampling import Sampling
    from unimem.engine.text.tokenizer import Tokenizer

SCHEMA = "unimem.run/1"

DEFAULT_PROMPT = "Once upon a time"
DEFAULT_TOKENS = 256  # a whole story of the model in the package
# Tokens before the steady state, in which caches fill and Python runs each line for the first time.
WARM_UP = 8

_WIDTH = 80

Stop = Literal["length", "end", "interrupted"]
_STOPS = {"length": "the limit", "end": "ended by the model", "interrupted": "interrupted"}


class Costs(NamedTuple):
    """Counts of what this process has used, by the kernel and by unimem."""

    minor_faults: int
    major_faults: int
    allocations: int
    system_calls: int

    @classmethod
    def now(cls) -> Costs:
        """Read the counts."""
        usage, own = resource.getrusage(resource.RUSAGE_SELF), counters()
        return cls(usage.ru_minflt, usage.ru_majflt, own["allocations"], own["os_calls"])


@dataclass(frozen=True)
class Options(ModelOptions):
    """The options of a run."""

    embedded: bool
    governed: bool
    chat: bool
    resume: Path | None
    save_session: str | None
    store: str | None
    sampling: Sampling


@dataclass
class Talk:
    """A prompt and its text so far. It is filled in step by step, so that Ctrl-C loses nothing."""

    prompt: str
    prompt_tokens: list[int]
    made: NDArray[np.int32]  # as long as the limit
    n_made: int = 0
    stop: Stop = "interrupted"
    n_restored: int = 0
    n_known: int = 0  # tokens of the prompt that were in the store
    n_stored: int = 0
    n_saved: int = 0
    load_seconds: float = 0.0
    restore_seconds: float = 0.0
    save_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    before: Costs | None = None
    after: Costs | None = None
    n_buffers: int = 0
    moved: tuple[str, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The generated tokens."""
        return [int(token) for token in self.made[: self.n_made]]

    @property
    def n_prefilled(self) -> int:
        """Tokens of the prompt that were computed."""
        return len(self.prompt_tokens) - self.n_known

    @property
    def costs(self) -> Costs | None:
        """The costs of the steady state; None if it was not reached."""
        if self.before is None or self.after is None or self.n_made <= WARM_UP:
            return None
        return Costs(*(b - a for a, b in zip(self.before, self.after, strict=True)))


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL.gguf",
            help="A GGUF file, or a part of a split one, or its URL; without one, the small model "
            "that is in the package.",
            show_default=False,
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        value_option(
            "TEXT",
            "What the text begins with, or with --chat the message. [default: nothing; "
            f"for the model in the package '{DEFAULT_PROMPT}']",
            "--prompt",
            "-p",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        value_option(
            "N",
            "The most tokens to generate, as 256 or 1k. "
            f"[default: {DEFAULT_TOKENS}, or what the context holds]",
            "--tokens",
            "-n",
            parser=parse_tokens,
        ),
    ] = None,
    ctx: Ctx = None,
    threads: Threads = None,
    kv_dtype: KVType = "f16",
    rotate: Rotate = None,
    window: Window = None,
    resume: Annotated[
        Path | None,
        value_option("FILE", "Continue a saved session; a prompt follows its text."),
    ] = None,
    save_session: Annotated[
        str | None,  # a path that ends in a slash stays one
        value_option("FILE", "Save the session at the end."),
    ] = None,
    store: Annotated[
        str | None,
        value_option(
            "DIR",
            "Take the prompt's first tokens from this store of prefixes, and keep them there.",
        ),
    ] = None,
    salt: Salt = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Write the prompt as the model's chat template says; without a prompt, begin a "
            "conversation, as `unimem chat` does.",
        ),
    ] = False,
    temperature: Temperature = 0.0,
    top_k: TopK = 40,
    top_p: TopP = 1.0,
    seed: SamplingSeed = None,
    load: LoadMode = "auto",
    weights_budget: WeightsBudget = None,
    pages: PageSize = "auto",
    numa: NumaOfModel = None,
    governed: Annotated[
        bool,
        typer.Option("--governed", help="When memory gets short, give back what no token needs."),
    ] = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Generate text; show where memory goes and what a token costs."""
    check_numa(numa, mirror=True)
    secret = salt_of(salt, store)
    options = Options(
        embedded=model is None,
        ctx=ctx,
        threads=threads,
        kv_dtype=kv_dtype,
        rotate=rotate,
        window=window,
        load=load,
        weights_budget=weights_budget,
        pages=pages,
        numa=numa,
        governed=governed,
        chat=chat,
        resume=resume,
        save_session=save_session,
        store=store,
        sampling=parse_sampling(temperature, top_k, top_p, seed),
    )
    if prompt is None and model is None and resume is None:
        prompt = DEFAULT_PROMPT
    _check_usage(prompt, options, as_json=as_json, has_limit=tokens is not None)
    path = embedded_model() if model is None else path_or_url(model)
    started = time.perf_counter()
    not_saved: BaseException | None = None
    if chat and prompt is None:
        converse(path, options, options.sampling, verbose=verbose)
        return
    tokenizer = _read_tokenizer(path, options)
    with (
        Fallbacks(verbose=verbose) as fallbacks,
        # RAM of the store would end with this process; the page cache stays.
        nullcontext() if store is None else KVStore(store, ram_bytes=0, salt=secret) as prefixes,
        load_layout(path, options) as layout,
        new_decoder(layout, options, tokenizer, prefixes) as decoder,
        _governing(decoder, options) as governor,
    ):
        talk = _talk(decoder, prompt or "", options, tokens)
        plan = layout.plan
        assert plan is not None  # for_model made it
        warm(decoder, plan)  # last: errors are reported at once
        fallbacks.show(plan)
        talk.load_seconds = time.perf_counter() - started
        if resume is not None:
            _resume(decoder, talk, resume)
        _generate(decoder, talk, options, quiet=as_json)
        if save_session is not None and not decoder.kv.is_empty:
            try:
                _save(decoder, talk, save_session)
            except (OSError, MemoryError, KeyboardInterrupt) as error:
                not_saved = error  # the text is shown all the same
        _tell(decoder, plan, talk, options, governor, as_json=as_json)
        if isinstance(not_saved, Exception):
            raise not_saved
        if not_saved is not None or talk.stop == "interrupted":
            raise typer.Exit(130)  # here, so that nothing has to be waited for


def _check_usage(prompt: str | None, options: Options, *, as_json: bool, has_limit: bool) -> None:
    """Refuse options that are wrong whatever the model is."""
    if options.chat and prompt is None:
        others = {
            "--governed": options.governed,
            "--json": as_json,
            "--resume": options.resume is not None,
            "--save-session": options.save_session is not None,
            "--store": options.store is not None,
            "--tokens": has_limit,
        }
        if asked := ", ".join(name for name, is_asked in others.items() if is_asked):
            raise typer.BadParameter(
                f"--chat needs a message with {asked}: give it with -p, or leave them out and "
                "begin a conversation, which has /save and /resume"
            )
    for option, path, what in (
        ("--save-session", options.save_session, "a file"),
        ("--store", options.store, "a folder"),
    ):
        if path == "":
            raise typer.BadParameter(f"{option}: expected the path of {what}, got ''")
    try:
        (prompt or "").encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("--prompt: expected text in UTF-8") from None
    if options.save_session is not None:
        # An unwritable file is refused before everything is computed.
        NewFile(options.save_session).close()


def _read_tokenizer(path: Path | str, options: Options) -> Tokenizer:
    try:
        return read_tokenizer(path, options)
    except FileNotFoundError as error:
        if "/" not in str(path) and not str(path).endswith(".gguf"):
            error.add_note(f"to begin a text with it: unimem run -p {shlex.quote(str(path))}")
        raise


def _resume(decoder: Decoder, talk: Talk, path: Path) -> None:
    start = time.perf_counter()
    decoder.resume(path)
    talk.restore_seconds = time.perf_counter() - start


def _save(decoder: Decoder, talk: Talk, path: str) -> None:
    start = time.perf_counter()
    decoder.save_session(path)
    talk.save_seconds = time.perf_counter() - start
    talk.n_saved = decoder.kv.seq_len


@contextmanager
def _governing(decoder: Decoder, options: Options) -> Iterator[Governor | None]:
    """Run a governor if it was asked for."""
    if not options.governed:
        yield None
        return
    with Governor() as governor:
        governor.add(decoder)
        if decoder.weights.load != "map":
            governor.add(decoder.weights)
        governor.start()
        yield governor


def _talk(decoder: Decoder, prompt: str, options: Options, n: int | None) -> Talk:
    """Make token ids of the prompt, and room for the text."""
    used = n_restored = 0
    if options.resume is not None:
        saved = snapshot.describe(options.resume)
        decoder._check_session(saved)
        n_restored = saved.seq_len
        used = saved.next_position if decoder.window else n_restored
    if options.chat:
        from unimem.engine.text.chat import chat_prompt

        messages = [{"role": "user", "content": prompt}]
        prompt = chat_prompt(decoder.weights.metadata, decoder.tokenizer, messages)
    if n_restored:
        ids = decoder.tokenize(prompt, add_bos=False, special=options.chat) if prompt else []
        if ids[:1] == [decoder.tokenizer.bos_id]:
            del ids[0]  # written by a chat template
    else:
        ids = decoder.tokenize(prompt, special=options.chat)
    if not ids and not n_restored:
        raise typer.BadParameter(
            "no prompt, and this model has no token that begins a text: give a prompt with -p"
        )
    if n is None:
        n = max(1, min(DEFAULT_TOKENS, decoder.ctx - used - len(ids)))
    if used + len(ids) + n > decoder.ctx:
        restored = f"a session of {format_count(used, 'token')}, " if used else ""
        raise CacheFull(
            f"{restored}a prompt of {format_count(len(ids), 'token')} and {n:,} more do not fit in "
            f"the context of {decoder.ctx:,}: take fewer with -n, a shorter prompt, or a larger "
            "--ctx",
            decoder.ctx,
            used,
            len(ids) + n,
        )
    return Talk(prompt, ids, np.zeros(n, np.int32), n_restored=n_restored)


def _generate(decoder: Decoder, talk: Talk, options: Options, *, quiet: bool) -> None:
    """Compute the prompt, then token by token, and count the costs.

    Times are those of the decoder alone. Faults are those of the whole process, with Python's and
    those of printing.
    """
    stream, ends = decoder.tokenizer.stream(), decoder.tokenizer.eog_ids
    flow = terminal.Flow()
    addresses = decoder.addresses()
    clock, made, step = time.perf_counter, talk.made, decoder.generate_next_token
    how = asdict(options.sampling)
    # The first text loses its leading space if nothing precedes it.
    at_start = options.chat or not talk.prompt
    try:
        if not (quiet or at_start):
            prompt = escape(talk.prompt, keeps_lines=True)
            terminal.show(terminal.surface().dim(flow.push(prompt) + flow.flush()))
        if talk.prompt_tokens:
            start = clock()
            decoder.prefill(talk.prompt_tokens)
            talk.prefill_seconds = clock() - start
            if decoder._prefixes is not None:
                talk.n_known = decoder._prefixes.n_restored
                talk.n_stored = decoder._prefixes.n_stored
        warm_python_heap()
        for i in range(len(made)):
            if i == WARM_UP:
                talk.before = Costs.now()
            start = clock()
            token = step(**how)
            talk.decode_seconds += clock() - start
            made[i] = token
            talk.n_made = i + 1
            if token in ends:
                talk.stop = "end"
                break
            if not quiet:
                text = escape(stream.push(token), keeps_lines=True)
                text = text.lstrip() if at_start else text
                at_start = at_start and not text
                terminal.show(flow.push(text))
        else:
            talk.stop = "length"
    except KeyboardInterrupt:
        pass  # the text is shown, and the exit code is 130
    except Exception:
        if not quiet:
            terminal.show(flow.flush() + "\n")  # the message gets a line of its own
        raise
    talk.after = Costs.now()
    now = decoder.addresses()
    talk.n_buffers = len(addresses)
    talk.moved = tuple(name for name, address in addresses.items() if now[name] != address)
    if not quiet:
        terminal.show(flow.push(escape(stream.flush(), keeps_lines=True)) + flow.flush() + "\n\n")


# ---- what is shown ------------------------------------------------------------------------------


def _tell(
    decoder: Decoder,
    plan: Plan,
    talk: Talk,
    options: Options,
    governor: Governor | None,
    *,
    as_json: bool,
) -> None:
    if as_json:
        terminal.show(json.dumps(_document(decoder, plan, talk, options, governor)) + "\n")
    else:
        _show(decoder, plan, talk, options, governor)


def _show(
    decoder: Decoder, plan: Plan, talk: Talk, options: Options, governor: Governor | None
) -> None:
    report = decoder.report()
    surface = terminal.surface()
    narrow = replace(surface, width=_WIDTH)
    facts = _facts(decoder, report, talk, options)
    if plan.spread is not None:
        facts["nodes"] = str(plan.spread)
    if governor is not None:
        done = "; ".join(map(str, governor.events)) or "nothing was short, and nothing given back"
        facts["governor"] = f"{done}; it watched {', '.join(governor.watches)}"
    terminal.show("\n".join(fact_lines(narrow, facts.items(), cuts=False)) + "\n\n")
    terminal.show("\n".join(memory_lines(surface, report.rows)) + "\n\n")
    costs = talk.costs
    if costs is None:
        terminal.show(f"The steady state begins after {WARM_UP} tokens: it was not reached.\n\n")
    else:
        n = talk.n_made - WARM_UP
        names = "minor faults", "major faults", "allocations by unimem", "system calls by unimem"
        steady = [
            (name, f"{count / n:.3g}", str(count)) for name, count in zip(names, costs, strict=True)
        ]
        steady.append(("buffers that moved", "", f"{len(talk.moved)} of {talk.n_buffers}"))
        head = (f"tokens {WARM_UP + 1} to {talk.n_made}", "a token", "in all")
        terminal.show("\n".join(table_lines(surface, head, steady)) + "\n\n")
    terminal.show("\n".join(fact_lines(narrow, _notes(report).items(), cuts=False)) + "\n")


def _facts(decoder: Decoder, report: Report, talk: Talk, options: Options) -> dict[str, str]:
    n_prompt, longest, kv = len(talk.prompt_tokens), decoder.dims.max_seq_len, decoder.kv
    used = kv.next_position if decoder.window else kv.seq_len
    if options.ctx is not None:
        is_beyond = decoder.ctx > longest
        why = f"as asked for{', beyond what it was made for' * is_beyond}; the model's is {longest}"
    elif decoder.ctx == longest:
        why = "the model's"
    else:
        limit = "the default" if decoder.ctx == DEFAULT_CTX else "the most that works here"
        why = f"{limit}; the model's is {longest}"
    sampling = options.sampling
    by = (
        f"temperature {sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}, "
        f"seed {sampling.seed}"
        if sampling.temperature
        else "the likeliest each time"
    )
    session = []
    if options.resume is not None:
        session.append(f"{format_count(talk.n_restored, 'token')} restored from {options.resume}")
    if options.save_session is not None:
        if talk.n_saved:
            session.append(f"{format_count(talk.n_saved, 'token')} saved to {options.save_session}")
        else:
            session.append("nothing to save" if kv.is_empty else "not saved")
    store = ""
    if options.store is not None:
        store = (
            f"{talk.n_known} of {format_count(n_prompt, 'token')} of the prompt taken from "
            f"{shown(options.store)}, which has {talk.n_stored} now"
        )
    known = report.facts
    name = Path(decoder.weights.files[0]).name + (" (in the package)" if options.embedded else "")
    facts = {
        "text": f"{format_count(talk.n_made, 'token')} ({_STOPS[talk.stop]}), {by}",
        "speed": f"prefill {_speed(talk.n_prefilled, talk.prefill_seconds)}, "
        f"decode {_speed(talk.n_made, talk.decode_seconds)}",
        "context": f"{format_count(decoder.ctx, 'token')} ({why}), {used} used, "
        f"{n_prompt} of them the prompt"
        + (f"; attention sees the last {decoder.window}" if decoder.window else ""),
        "session": ", ".join(session),
        "store": store,
        "load": f"{known['load']}: {known['load_reason']}",
        "stream": "; ".join(map(_streamed, known.get("streams", ()))),
        "model": f"{name}: {known['architecture']}, "
        f"{format_count(decoder.dims.num_layers, 'layer')}, KV {known['kv_dtype']}"
        f"{', rotated' * known['rotate']}, {format_count(decoder.threads, 'thread')}",
    }
    return {name: fact for name, fact in facts.items() if fact}


def _streamed(stream: dict[str, int]) -> str:
    """Say how often weights were there, and what reading the others cost."""
    return f"a budget of {format_bytes(stream['budget_bytes'])}; {pieces_text(stream)}"


def _notes(report: Report) -> dict[str, str]:
    known = report.facts
    build = f"{known['ggml']}, {'' if known['tinyblas'] else 'no '}tinyBLAS"
    return dict(explain(report.rows)) | {"ggml": f"{build}, {' '.join(known['cpu_features'])}"}


def _speed(n: int, seconds: float) -> str:
    rate = _rate(n, seconds)
    if rate is None:
        return "not done"
    return f"{rate:,.0f} tokens/s" if rate >= 100 else f"{rate:.3g} tokens/s"


# ---- the JSON document --------------------------------------------------------------------------


_USED = ("ctx", "threads", "kv_dtype", "rotate", "window")
_ASKED = ("load", "weights_budget", "pages", "numa", "chat")
_PLANNED = "total_bytes available_bytes max_ctx model_ctx verdict spilled_bytes spread".split()


def _document(
    decoder: Decoder, plan: Plan, talk: Talk, options: Options, governor: Governor | None
) -> dict[str, Any]:
    report = decoder.report()
    weights = decoder.weights
    name = weights.metadata.get("general.name")
    known = {key: report.facts[key] for key in ("architecture", "load", "load_reason")}
    stream, ends = decoder.tokenizer.stream(), decoder.tokenizer.eog_ids
    text = "".join(stream.push(token) for token in talk.tokens if token not in ends)
    costs = talk.costs
    ggml = {key: report.facts.get(key) for key in ("ggml", "cpu_features", "tinyblas")}
    return terminal.document_head(SCHEMA) | {
        "model": {
            "files": list(weights.files),
            "embedded": options.embedded,
            "name": name if isinstance(name, str) else None,
            "fingerprint": weights.fingerprint,
            "dims": asdict(decoder.dims),
        }
        | known,
        "options": {key: report.facts[key] for key in _USED}
        | {key: getattr(options, key) for key in _ASKED}
        | asdict(options.sampling),
        "plan": {key: plan.to_dict()[key] for key in _PLANNED}
        | {"rows": [{"category": row.category, "nbytes": row.nbytes} for row in plan.rows]},
        "report": {key: report.to_dict()[key] for key in ("total_bytes", "rows")},
        "prompt": {"text": talk.prompt, "tokens": talk.prompt_tokens},
        "output": {"text": text + stream.flush(), "tokens": talk.tokens, "stop": talk.stop},
        "session": _session(talk, options),
        "store": None
        if options.store is None
        else {
            "folder": shown(options.store),
            "restored_tokens": talk.n_known,
            "stored_tokens": talk.n_stored,
        },
        "speed": {
            "load_seconds": talk.load_seconds,
            "prefill_seconds": talk.prefill_seconds,
            "prefill_tokens_per_second": _rate(talk.n_prefilled, talk.prefill_seconds),
            "decode_seconds": talk.decode_seconds,
            "decode_tokens_per_second": _rate(talk.n_made, talk.decode_seconds),
        },
        "steady_state": None
        if costs is None
        else {"first_token": WARM_UP + 1, "tokens": talk.n_made - WARM_UP, **costs._asdict()},
        "buffers": {"count": talk.n_buffers, "moved": list(talk.moved)},
        "ggml": ggml,
        "governor": _governor_fields(governor),
        "streams": report.facts.get("streams", []),
    }


def _governor_fields(governor: Governor | None) -> dict[str, Any] | None:
    if governor is None:
        return None
    return {
        "watches": list(governor.watches),
        "given_back_bytes": governor.given_back_bytes,
        "events": [asdict(event) for event in governor.events],
    }


def _session(talk: Talk, options: Options) -> dict[str, Any] | None:
    if options.resume is None and options.save_session is None:
        return None
    return {
        "resumed": None if options.resume is None else str(options.resume),
        "restored_tokens": talk.n_restored,
        "restore_seconds": talk.restore_seconds,
        "saved": options.save_session if talk.n_saved else None,
        "saved_tokens": talk.n_saved,
        "save_seconds": talk.save_seconds,
    }


def _rate(n: int, seconds: float) -> float | None:
    return n / seconds if seconds else None
