"""The newest llama.cpp as the peer, in a process of its own.

`unimem_bench.llama_build` builds it, for this CPU, from the same sources as the engine's ggml. Both
libraries bring a ggml whose symbols must not meet, so tests start this file:
``python tests/support/models/llama_cpp.py COMMAND JSON``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_bool, c_void_p, create_string_buffer
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unimem_bench import llama_build
from unimem_bench.llama_cpp import KV_TYPES, Conversation, Flags, Library, PeerModel, options

Q4_K_M = 15  # llama_ftype
BATCH = 128  # as unimem's: ggml multiplies few columns by other kernels than many


def llama_library() -> Path:
    """Return llama.cpp's library; skip where it is not built, and in the larger tier build it."""
    import pytest  # not in llama.cpp's process

    from support.project import tiers

    try:
        return llama_build.library(build=tiers.everything)
    except llama_build.NoPeer as reason:
        pytest.skip(f"llama.cpp: {reason}")


def has_our_kernels() -> bool:
    """Return whether its ggml is that of the engine, compiled for the same CPU features."""
    from unimem.backends import ggml

    facts = llama_build.facts(llama_library())
    both = [(ggml.version()["version"], ggml.features()), (facts["ggml"], facts["features"])]
    ours, theirs = ((version, features.keys() - {"OPENMP"}) for version, features in both)
    return bool(ours == theirs)


def assert_same_logits(
    ours: NDArray[Any], theirs: NDArray[Any], *, bound: float = 0.01, rounded: float = 0.0
) -> None:
    """Compare logits; they may be `rounded` apart on the same kernels, and `bound` on others.

    Both are shares of the logits' standard deviation.
    """
    apart = rounded if has_our_kernels() else bound
    assert np.abs(ours - theirs).max() <= apart * theirs.std()


def greedy(
    model: Path,
    prompt: list[int],
    n: int,
    *,
    ctx: int = 1024,
    kv_dtype: str = "f16",
    rotate: bool | None = None,
    repack: bool = False,
    threads: int = 1,
) -> tuple[list[int], NDArray[Any]]:
    """Generate `n` tokens; returns them and the logits [n, vocab] each was chosen by.

    Weights are used as they lie in the file, or with `repack` as is llama.cpp's default. Attention
    is flash attention. Heads of a quantized cache are rotated as is llama.cpp's default, or with
    ``rotate=False`` not.
    """
    given = {"model": str(model), "prompt": prompt, "n": n, "ctx": ctx, "kv": kv_dtype}
    with tempfile.TemporaryDirectory() as folder:  # the model's may be read-only
        out = f"{folder}/out.npz"
        _run("greedy", given | {"repack": repack, "threads": threads, "out": out}, rotate)
        with np.load(out) as data:
            return [int(token) for token in data["tokens"]], data["logits"]


def follow(model: Path, steps: list[list[Any]], *, ctx: int, kv_dtype: str = "f16") -> NDArray[Any]:
    """Compute what the steps say; returns the logits [n, vocab] behind each token or batch.

    Steps are ``["batch", tokens]``, ``["each", tokens]`` one by one, and ``["remove", first, end]``
    for tokens at these positions, behind which the others keep theirs. Nothing is overwritten that
    a layer that slides could show again.
    """
    given = {"model": str(model), "steps": steps, "ctx": ctx, "kv": kv_dtype}
    with tempfile.TemporaryDirectory() as folder:
        _run("follow", given | {"out": f"{folder}/out.npy"})
        return np.asarray(np.load(f"{folder}/out.npy"))


def rows(
    model: Path, prompt: list[int], kv_dtypes: list[str], sizes: list[int]
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Compute a prompt with each of these caches; return K and V of the only layer in each.

    They are uint8 [tokens, bytes], as they lie in the cache, rotated where llama.cpp does so; a row
    has the bytes that `sizes` says for the cache.
    """
    found = []
    with tempfile.TemporaryDirectory() as folder:
        _run("rows", {"model": str(model), "prompt": prompt, "kv": kv_dtypes, "out": folder})
        for kv_dtype, row_bytes in zip(kv_dtypes, sizes, strict=True):
            state = np.load(f"{folder}/{kv_dtype}.npy")
            # A state of one layer ends with K's type and size of a row, its rows, and V's.
            head = np.array([KV_TYPES[kv_dtype], row_bytes, 0], np.uint32).view(np.uint8)
            lanes = state[-2 * (head.size + len(prompt) * row_bytes) :].reshape(2, -1)
            if (lanes[:, : head.size] != head).any():
                raise RuntimeError(f"a state of {kv_dtype} is laid out in another way")
            keys, values = lanes[:, head.size :].reshape(2, len(prompt), row_bytes)
            found.append((keys, values))
    return found


class LlamaState(NamedTuple):
    """A state as llama.cpp gives it, and logits after some more tokens."""

    blob: NDArray[np.uint8]
    logits: NDArray[np.float32]


def states(model: Path, prompt: list[int], n: int, **options: Any) -> LlamaState:
    """Compute n tokens of a prompt, take the state, and compute the rest; `options` of `_begin`."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"prompt": prompt, "n": n, "out": f"{folder}/out.npz"}
        _run("states", {"model": str(model), "ctx": 1024, "kv_dtype": "f16"} | given | options)
        with np.load(f"{folder}/out.npz") as data:
            return LlamaState(data["blob"], data["logits"])


def continued(
    model: Path, blob: bytes, tokens: list[int], **options: Any
) -> NDArray[np.float32] | None:
    """Return the logits after tokens that follow a state; None if llama.cpp refuses the state."""
    with tempfile.TemporaryDirectory() as folder:
        state, out = f"{folder}/in.npy", f"{folder}/out.npy"
        np.save(state, np.frombuffer(blob, np.uint8))
        given = {"model": str(model), "ctx": 1024, "kv_dtype": "f16", "tokens": tokens}
        _run("continue", given | {"state": state, "out": out} | options)
        found = np.load(out)
        return found if found.size else None


def quantize(source: Path, target: Path, ftype: int = Q4_K_M) -> Path:
    """Quantize a model with llama.cpp's own quantizer."""
    _run("quantize", {"source": str(source), "target": str(target), "ftype": ftype})
    return target


@contextmanager
def holding(model: Path | str) -> Iterator[int]:
    """Start a process that has generated a token of the model, from its file; return its number."""
    with subprocess.Popen(
        _command("hold", {"model": str(model)}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready %d\n" % process.pid:
                raise RuntimeError("llama.cpp could not load the model")
            yield process.pid
        finally:
            process.kill()


def repacked_mib(model: Path) -> float:
    """Return how many MiB of a model llama.cpp repacks by default."""
    said = _run("repack", {"model": str(model)}).stderr
    sizes = re.findall(r"(?:CPU_REPACK|AMX) model buffer size = +(\S+) MiB", said)
    return sum(map(float, sizes))


@dataclass
class Answers:
    """llama.cpp's answers for a vocabulary and texts."""

    bos: int
    eos: int
    add_bos: bool
    eog: list[int]
    pieces: list[str]  # of every token, control tokens written out
    plain: list[list[int]]  # ids of every text, with the file's BOS
    special: list[list[int]]  # the same with control tokens parsed
    decoded: list[str]  # of `special`, control tokens left out


def tokenize(model: Path, texts: list[str]) -> Answers:
    """Ask llama.cpp about a vocabulary, and texts in it."""
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "texts.json"
        given.write_text(json.dumps(texts))
        said = _run("tokenize", {"model": str(model), "texts": str(given)}).stdout
        return Answers(**json.loads(said))


def _command(command: str, given: dict[str, Any]) -> list[str]:
    words = json.dumps(given | {"library": str(llama_library())})
    return [sys.executable, "-P", __file__, command, words]


def _run(command: str, given: dict[str, Any], rotate: bool | None = None) -> Any:
    done = subprocess.run(
        _command(command, given),
        capture_output=True,
        text=True,
        env=os.environ | {"LLAMA_ATTN_ROT_DISABLE": str(int(rotate is False))},
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"llama.cpp failed ({done.returncode}): {done.stderr[-2000:]}")
    return done


# ---- llama.cpp's process -----------------------------------------------------------------------


def _begin(
    library: str,
    model: str,
    ctx: int,
    kv_dtype: str,
    *,
    repack: bool = False,
    keeps_all: bool = False,
    threads: int = 1,
    flash: bool = True,
    n_streams: int | None = None,
) -> Conversation:
    """Return a context of a model, as it lies in its file or repacked.

    With `keeps_all`, sliding layers also keep tokens that they no longer see.
    """
    k, _, v = kv_dtype.partition(",")
    given = options(
        Flags(repack=repack, load_mode="mmap", flash=flash, ubatch=BATCH),
        **{"n_ctx": ctx, "n_threads": threads, "keeps_all": keeps_all, "n_streams": n_streams},
        **{"type_k": KV_TYPES[k], "type_v": KV_TYPES[v or k]},
    )
    return Conversation(PeerModel(Library(library), model, given), given)


def _greedy(*, prompt: list[int], n: int, out: str, kv: str, ctx: int, **where: Any) -> None:
    talk, batch = _begin(ctx=ctx, kv_dtype=kv, **where), prompt
    tokens: list[int] = []
    logits = []
    while len(tokens) < n:
        logits.append(talk.decode(batch).copy())
        tokens.append(int(logits[-1].argmax()))
        batch = tokens[-1:]
    np.savez(out, tokens=tokens, logits=logits)


def _follow(*, steps: list[list[Any]], out: str, kv: str, ctx: int, **where: Any) -> None:
    talk = _begin(ctx=ctx, kv_dtype=kv, keeps_all=True, **where)
    logits = []
    for kind, *given in steps:
        if kind == "remove":
            if not talk.remove(*given):
                raise RuntimeError(f"llama.cpp does not remove {given}")
            continue
        (tokens,) = given
        for batch in [tokens] if kind == "batch" else ([token] for token in tokens):
            logits.append(talk.decode(batch).copy())
    np.save(out, np.array(logits))


def _rows(*, prompt: list[int], kv: list[str], out: str, **where: Any) -> None:
    for kv_dtype in kv:
        talk = _begin(ctx=256, kv_dtype=kv_dtype, **where)
        talk.decode(prompt)
        np.save(f"{out}/{kv_dtype}.npy", talk.state())


def _states(*, prompt: list[int], n: int, out: str, **where: Any) -> None:
    talk = _begin(**where)
    talk.decode(prompt[:n])
    state = talk.state()
    np.savez(out, blob=state, logits=talk.decode(prompt[n:]))


def _continue(*, state: str, tokens: list[int], out: str, **where: Any) -> None:
    talk = _begin(**where)
    try:
        talk.set_state(np.load(state))
    except RuntimeError:
        np.save(out, np.empty(0, np.float32))
    else:
        np.save(out, talk.decode(tokens))


def _quantize(*, library: str, source: str, target: str, ftype: int) -> None:
    Library(library).quantize(source, target, ftype)


def _repack(*, library: str, model: str) -> None:
    PeerModel(Library(library, is_loud=True), model, options(Flags(repack=True)))


def _hold(*, library: str, model: str) -> None:
    _begin(library, model, 256, "f16").decode([1])
    print("ready", os.getpid(), flush=True)
    sys.stdin.read()


def _tokenize(*, library: str, model: str, texts: str) -> None:
    peer = Library(library)
    opened = PeerModel(peer, model, options(Flags(), vocab_only=True))
    c, vocab, ids = peer.c, c_void_p(opened.vocab), range(opened.n_vocab)
    c.llama_vocab_is_eog.restype = c.llama_vocab_get_add_bos.restype = c_bool
    buffer = create_string_buffer(1 << 16)

    def encoded(text: str, special: bool) -> list[int]:
        data = text.encode()
        into = np.empty(len(data) + 8, np.int32)
        to = c_void_p(into.ctypes.data)
        n = c.llama_tokenize(vocab, data, len(data), to, into.size, c_bool(True), c_bool(special))
        return [int(token) for token in into[:n]]

    def decoded(tokens: list[int]) -> str:
        given = np.array(tokens, np.int32)
        whole = vocab, c_void_p(given.ctypes.data), given.size, buffer, len(buffer)
        n = c.llama_detokenize(*whole, c_bool(False), c_bool(False))
        return buffer.raw[:n].decode(errors="replace")

    def piece(token: int) -> str:
        n = c.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, c_bool(True))
        return buffer.raw[:n].decode(errors="replace")

    asked = json.loads(Path(texts).read_text())
    special = [encoded(text, True) for text in asked]
    answers = {
        "bos": c.llama_vocab_bos(vocab),
        "eos": c.llama_vocab_eos(vocab),
        "add_bos": c.llama_vocab_get_add_bos(vocab),
        "eog": [i for i in ids if c.llama_vocab_is_eog(vocab, i)],
        "pieces": [piece(i) for i in ids],
        "plain": [encoded(text, False) for text in asked],
        "special": special,
        "decoded": [decoded(tokens) for tokens in special],
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {
        **{"greedy": _greedy, "follow": _follow, "rows": _rows, "quantize": _quantize},
        **{"states": _states, "continue": _continue},
        **{"hold": _hold, "repack": _repack, "tokenize": _tokenize},
    }
    commands[sys.argv[1]](**json.loads(sys.argv[2]))
