"""Prefixes of llama.cpp in a store, with the real thing: the recipe of docs/llama-cpp.md, measured.

``tools/llama_prefixes.py --llama PYTHON --binding PYTHON`` runs each door with SmolLM2-135M, which
a package carries: states by the C interface of llama.cpp's newest sources, `LlamaStoreCache` in a
Python that has llama-cpp-python, and two servers of a Python that has `xllamacpp` with one store.
It holds each to what is promised: 20 times as fast as computing, the same text, after kills and
damage too, and nothing for another version, model or cache type. A door that cannot be opened is
skipped, loudly, and then the tool fails.

llama.cpp rounds otherwise if a prompt is computed in other parts. So a restored prompt is compared
with one that a server without a store continues from its own cache, at the same token: the bits of
all keys and values have to be equal, not only the text.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

import llama_server
import real_models
import unimem as um
from recorded import short_commit
from unimem.engine.text.tokenizer import Tokenizer
from unimem.errors import FormatError
from unimem.llama_cpp import (
    LlamaPrefixes,
    LlamaServer,
    SlotFile,
    kv_to_state,
    model_hash,
    state_to_kv,
)
from unimem_bench import llama_build
from unimem_bench.llama_cpp import Conversation, Flags, Library, PeerModel, options

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZES = (1024, 2048)
LEAST_GAIN = 20
_ANSWER = 24
_QUESTION = "Which rule is the most important one? Answer in one sentence."
_OTHER = "Another question?"
_KILLS = 4
_REPEATS = 2
# What llama-cpp-python's process runs.
_BINDING = Path(__file__).with_name("llama_binding.py")


class Row(NamedTuple):
    """A row of the table."""

    door: str
    version: str
    run: str
    computed_s: float | None
    restored_s: float | None
    result: str
    is_kept: bool

    def __str__(self) -> str:
        times = ["" if s is None else f"{s:.2f} s" for s in (self.computed_s, self.restored_s)]
        gain = ""
        if self.computed_s and self.restored_s:
            gain = f"{self.computed_s / self.restored_s:.0f}"
        result = self.result if self.is_kept else f"**FAILED**: {self.result}"
        return f"| {' | '.join([self.door, self.version, self.run, *times, gain, result])} |"


def system_prompt(tokenizer: Tokenizer, n: int) -> str:
    """Return a text of at most n tokens, nearly as many."""
    text = "You are a careful assistant. These are the rules of the house."
    i = 1
    while True:
        more = f"{text}\nRule {i}: in case {7 * i % 31} of {i % 13}, tell the visitor about it."
        if len(tokenizer.encode(more)) > n:
            return text
        text, i = more, i + 1


# ---- states ----


def by_states(model: Path, tokenizer: Tokenizer, threads: int) -> Iterator[Row]:
    """Compute a prefix, store its state, and go on from it in another context."""
    library = Library(llama_build.library(build=True))
    name = library.facts()["llama_cpp"]
    given = options(Flags(flash=True), n_ctx=4096, n_threads=threads)
    opened = PeerModel(library, str(model), given)
    text = system_prompt(tokenizer, SIZES[-1] + 64)
    question = tokenizer.encode(f"\n{_QUESTION}\n")
    with tempfile.TemporaryDirectory() as folder, um.KVStore(folder, ram_bytes=0) as store:
        for n in SIZES:
            ids = tokenizer.encode(text)[:n]
            talk = Conversation(opened, given)
            begin = time.perf_counter()
            talk.decode(ids)
            computed = time.perf_counter() - begin
            state = talk.state()
            said = answer(talk, question)
            talk.close()
            like = state_to_kv(state)
            prefixes = LlamaPrefixes(store, "model", like)
            prefixes.put(ids, like)
            other = Conversation(opened, given)
            begin = time.perf_counter()
            kv = prefixes.restore([*ids, *question])
            assert kv is not None
            other.set_state(np.frombuffer(kv_to_state(kv._replace(head=like.head)), np.uint8))
            restored = time.perf_counter() - begin
            same = kv.n_tokens == n and answer(other, question) == said
            other.close()
            gain = computed / restored
            result = "text equal" if same else "another text"
            yield Row(
                *("`state_to_kv`", f"llama.cpp {name}", f"{n} tokens", computed, restored, result),
                same and gain >= LEAST_GAIN,
            )
        refused = []
        for change in ({"version": 3}, {"version": 5}):
            try:
                state_to_kv(state, **change)
            except FormatError:
                refused.append(True)
        yield Row(
            *("`state_to_kv`", f"llama.cpp {name}", "versions 3 and 5 of a state", None, None),
            *("refused", len(refused) == 2),
        )


def answer(talk: Conversation, tokens: list[int]) -> list[int]:
    """Return greedy tokens behind others."""
    said: list[int] = []
    while len(said) < _ANSWER:
        said.append(int(talk.decode(tokens).argmax()))
        tokens = said[-1:]
    return said


# ---- llama-cpp-python ----


def by_binding(model: Path, tokenizer: Tokenizer, threads: int, python: str) -> Iterator[Row]:
    """Ask a `Llama` without a cache, and one in a new process with a cache that has the prefix."""
    with tempfile.TemporaryDirectory() as folder:
        for n in SIZES:
            # The tokens behind the prompt's whole chunks are computed in any case.
            prompt = system_prompt(tokenizer, n + 8)
            plain, first, second = (
                _ask_binding(python, model, threads, prompt, store)
                for store in ("", f"{folder}/{n}", f"{folder}/{n}")
            )
            same = plain["text"] == first["text"] == second["text"]
            gain = plain["prefill"] / second["taken"]
            yield Row(
                *("`LlamaStoreCache`", f"llama-cpp-python {plain['version']}", f"{n} tokens"),
                *(plain["prefill"], second["taken"], "text equal" if same else "another text"),
                same and gain >= LEAST_GAIN and second["n_taken"] >= n,
            )


def _ask_binding(python: str, model: Path, threads: int, prompt: str, store: str) -> Any:
    paths = [path for path in sys.path if path.endswith("-packages")]
    given = {"model": str(model), "threads": threads, "prompt": prompt, "store": store}
    words = json.dumps(given | {"paths": paths})
    done = subprocess.run(
        [python, str(_BINDING), words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"llama-cpp-python fails: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# ---- servers ----


class Answer(NamedTuple):
    """What a server says to a chat."""

    text: str
    first_s: float  # until the first token
    n_restored: int


def chat(url: str, system: str, question: str = _QUESTION) -> Answer:
    """Ask a server, which streams its answer; OSError or ValueError if it ends too early."""
    body = _chat(system, question) | {
        **{"max_tokens": _ANSWER, "temperature": 0, "stream": True, "id_slot": 0},
    }
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    begin = time.perf_counter()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(response.read().decode())
        text, first, is_done = "", 0.0, False
        for line in response:
            if line.startswith(b"data: [DONE]"):
                is_done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                content = event["choices"][0]["delta"].get("content") if event["choices"] else None
                if content:
                    first = first or time.perf_counter() - begin
                    text += content
        if not is_done:
            raise ValueError("the answer ended too early")
        return Answer(text, first, int(response.getheader("Unimem-Restored-Tokens", "0")))
    except http.client.HTTPException as error:
        raise ValueError(f"the answer ended too early: {error!r}") from None
    finally:
        connection.close()


def alone(server: LlamaServer, system: str, n: int) -> tuple[Answer, Answer]:
    """Ask a server without a store.

    Return its answers to another question, from the beginning, and to the question, where it goes
    on from its own first n tokens.
    """
    server.erase(0)
    first = chat(server.url, system, _OTHER) if n else Answer("", 0, 0)
    if n:  # a prompt that differs behind n tokens cuts the others off
        prompt = server.ask("/apply-template", _chat(system, _QUESTION))["prompt"]
        ids = server.tokenize(prompt)[: n + 1]
        ids[n] = 0 if ids[n] else 1
        server.ask("/completion", {"prompt": ids, "n_predict": 0, "id_slot": 0})
    return first, chat(server.url, system)


def _chat(system: str, question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages}


def _restoring_s(server: LlamaServer, folder: str, model: Path, system: str) -> float:
    """Restore a prompt's prefix as `SlotProxy` does, and return the seconds of that."""
    saved = server.save(0)
    prompt = server.ask("/apply-template", _chat(system, _QUESTION))["prompt"]
    ids = np.array(server.tokenize(prompt), np.int32)
    with um.KVStore(folder, ram_bytes=0) as store:
        prefixes = LlamaPrefixes(store, model_hash(model), saved.kv)
        begin = time.perf_counter()
        kv = prefixes.restore(ids[:-1])
        assert kv is not None
        server.restore(0, ids[: kv.n_tokens], kv._replace(n_streams=saved.kv.n_streams))
        return time.perf_counter() - begin


def _same_rows(a: SlotFile, b: SlotFile) -> bool:
    """Whether two slots have the same tokens, and the same bits of their keys and values."""
    return list(a.tokens) == list(b.tokens) and kv_to_state(a.kv) == kv_to_state(b.kv)


@contextmanager
def proxied(server: LlamaServer, store: str, model: Path, folder: Path) -> Iterator[Any]:
    """Run `unimem serve-slots` before a server; give its process, with its address."""
    code = "import sys; from unimem.cli import main; sys.exit(main())"
    words = ["serve-slots", server.url, "--store", store, "--model", str(model), "--port", "0"]
    command = [sys.executable, "-c", code, *words, "--slot-save-path", str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            if not line.startswith("serving "):
                raise RuntimeError(process.stderr.read())
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield process, line.split()[1].rstrip(",")
            process.terminate()  # an answer is stored before it ends
            process.wait(60)
        finally:
            process.kill()


def by_servers(model: Path, tokenizer: Tokenizer, threads: int, python: str) -> Iterator[Row]:
    """Let two servers share a store, kill one and the proxies, and damage the store."""
    command = [python, "-c", "import importlib.metadata as m; print(m.version('xllamacpp'))"]
    number = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    door = "`unimem serve-slots`", f"xllamacpp {number}"
    with ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store, folder = str(base / "store"), base / "slots"
        folder.mkdir()

        def server(**params: Any) -> LlamaServer:
            params |= {"n_ctx": 8192, "n_parallel": 2, "threads": threads}
            # Nothing but the store keeps a prompt that a slot has no more.
            params |= {"cache_ram_mib": 0}
            running = llama_server.running(python, model, folder, **params)
            return LlamaServer(stack.enter_context(running).url, folder)

        servers = one, two, other = server(), server(), server()
        for n in SIZES:
            # The chat's template has about 30 tokens, half of them behind the system prompt.
            system = system_prompt(tokenizer, n + 8)
            with proxied(one, store, model, folder) as (_, url):
                chat(url, system, _OTHER)
            begun = []
            for _ in range(_REPEATS):
                with proxied(two, store, model, folder) as (_, url):
                    begun.append(chat(url, system))
            n_restored = min(answer.n_restored for answer in begun)
            whole, own = alone(other, system, n_restored)
            rows = _same_rows(two.save(0), other.save(0))
            same = {answer.text for answer in begun} == {own.text} and rows
            ours = min(answer.first_s for answer in begun)
            # The prefix alone: what is behind it is computed in each case.
            computed_s = whole.first_s - own.first_s
            restored_s = _restoring_s(other, store, model, system)
            yield Row(
                *door,
                f"{n} tokens of a system prompt, computed by another server",
                *(computed_s, restored_s),
                f"text and all bits {'equal' if same else 'differ'}, {n_restored} restored, first "
                f"token after {ours:.2f} s instead of {whole.first_s:.2f} s",
                same and n_restored >= n and computed_s >= LEAST_GAIN * restored_s,
            )
        yield _kills(door, model, tokenizer, servers, store, folder)
        chunks = list(Path(store).glob("*.kv"))
        for chunk in chunks:
            data = bytearray(chunk.read_bytes())
            data[len(data) // 2] ^= 1
            chunk.write_bytes(data)
        system = system_prompt(tokenizer, SIZES[0] + 8)
        with proxied(two, store, model, folder) as (_, url):
            again = chat(url, system)
        yield Row(
            *(*door, f"a bit changed in each of {len(chunks)} chunks", None, None),
            *("text equal", again.text == alone(other, system, 0)[1].text and not again.n_restored),
        )
        yield from _refusals(
            door, (one, server(cache_type_k="GGML_TYPE_Q8_0")), store, folder, model
        )


def _kills(
    door: tuple[str, str],
    model: Path,
    tokenizer: Tokenizer,
    servers: tuple[LlamaServer, LlamaServer, LlamaServer],
    store: str,
    folder: Path,
) -> Row:
    """Kill proxies while they answer and save, and ask others for the same."""
    one, two, other = servers
    texts, n_broken = [], 0
    for i in range(_KILLS):
        system = f"Case {i}. {system_prompt(tokenizer, SIZES[0] // 2)}"
        with proxied(one, store, model, folder) as (process, url):
            timer = threading.Timer(2 + 0.3 * i, process.kill)
            timer.start()
            try:
                chat(url, system)
            except (OSError, ValueError):
                n_broken += 1
            timer.join()
        with proxied(two, store, model, folder) as (_, url):
            found = chat(url, system)
        texts.append((found.text, alone(other, system, found.n_restored)[1].text))
    left = list(folder.glob("unimem-*"))
    same = sum(a == b for a, b in texts)
    return Row(
        *(*door, f"{_KILLS} proxies killed, {n_broken} of them in an answer", None, None),
        f"{same} of {len(texts)} texts equal, {len(left)} files left",
        same == len(texts) and not left,
    )


def _refusals(
    door: tuple[str, str],
    servers: tuple[LlamaServer, LlamaServer],
    store: str,
    folder: Path,
    model: Path,
) -> Iterator[Row]:
    one, quantized = servers
    system = "You are short. " * 80
    with proxied(one, store, model, folder) as (_, url):
        chat(url, system)
        again = chat(url, system)
    with proxied(quantized, store, model, folder) as (_, url):
        other = chat(url, system)
    yield Row(
        *(*door, "another cache type (K q8_0)", None, None),
        *(f"{other.n_restored} restored", other.n_restored == 0 and len(again.text) > 0),
    )
    tiny = folder / "tiny.gguf"
    tiny.write_bytes(model.read_bytes()[:-4096] + bytes(4096))
    try:
        with proxied(one, store, tiny, folder):
            said = "served"
    except RuntimeError as error:
        said = str(error).strip()
    yield Row(*(*door, "another model's file", None, None, "refused", "the server runs" in said))


def record(done: list[Row], missed: dict[str, str]) -> dict[str, Any]:
    """Return what tools/doors.py shows of each door and version."""
    rows, figures, today = [], {}, datetime.now(UTC).date().isoformat()
    for name, why in missed.items():
        lost = {"version": name, "ran": "not run", "what": name, "date": today}
        rows.append(lost | {"result": f"missed: {why}"})
    for door in dict.fromkeys((row.door, row.version) for row in done):
        own = [row for row in done if (row.door, row.version) == door]
        failed = [row.run for row in own if not row.is_kept]
        name, engine = door
        rows.append(
            {
                "version": f"{name.strip('`')}: {engine}",
                "ran": "real engine",
                "what": "; ".join(row.run for row in own),
                "date": today,
                "result": f"failed: {'; '.join(failed)}" if failed else "passed",
            }
        )
        for row in own:
            if row.computed_s and row.restored_s:
                times = round(row.computed_s / row.restored_s, 1)
                figures[f"{name.strip('`')}, {row.run}: times as fast"] = times
    return {
        "door": "llama.cpp",
        "module": "unimem.llama_cpp",
        "command": "make llama-prefixes",
        "unimem": f"{version('unimem-llm')} ({short_commit()})",
        "rows": rows,
        "figures": figures,
    }


def _write(path: Path | None, done: list[Row], missed: dict[str, str]) -> None:
    if path is not None:
        path.write_text(json.dumps(record(done, missed), indent=1) + "\n")


def main() -> None:
    """Print the table, and exit with 1 if a promise is not kept or a door stayed closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama", help="a Python that has xllamacpp")
    parser.add_argument("--binding", help="a Python that has llama-cpp-python")
    parser.add_argument("--states", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dir", type=Path, default=real_models.ROOT / "build/models")
    parser.add_argument("--record", type=Path, help="the file of the doors' rows (tools/doors.py)")
    given = parser.parse_args()
    given.dir.mkdir(parents=True, exist_ok=True)
    model = real_models.fetch(NAME, real_models.FILES[NAME], given.dir)
    with um.open_weights(model, load="map") as weights:
        tokenizer = Tokenizer.from_metadata(weights.metadata)
    threads = given.threads
    today = datetime.now(UTC)
    print(f"{today:%Y-%m-%d}, unimem {version('unimem-llm')}, {NAME}, {threads} threads\n")
    print("| door | version | run | computed | restored | times | result |")
    print("|---|---|---|---|---|---|---|", flush=True)
    done: list[Row] = []
    doors: dict[str, Iterator[Row]] = {}
    if given.states:
        doors["states"] = by_states(model, tokenizer, threads)
    if given.binding:
        doors["binding"] = by_binding(model, tokenizer, threads, given.binding)
    if given.llama:
        doors["llama"] = by_servers(model, tokenizer, threads, given.llama)
    missed = {name: f"without --{name}" for name in ("states", "binding", "llama")}
    missed |= dict.fromkeys(doors, "the run ended before its last row")
    for name, door in doors.items():
        for row in door:
            print(row, flush=True)
            done.append(row)
            _write(given.record, done, missed)
        del missed[name]
        _write(given.record, done, missed)
    for name, why in missed.items():
        print(f"SKIPPED: {name}, {why}", flush=True)
    sys.exit(bool(missed) or not all(row.is_kept for row in done))


if __name__ == "__main__":
    main()
