"""Ids are those that the newest llama.cpp gave for each name; other kinds say what works."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unimem.engine.text.pre_tokenizers import PRE_TOKENIZERS, unsupported_tokenizer
from unimem.engine.text.tokenizer import Tokenizer

# Written by tools/compare_tokenizers.py --record. An id list of a text is there once: cases have
# its index.
RECORD = Path(__file__).parent / "data/llama_cpp_ids.json.xz"
RECORDED: dict[str, Any] = json.loads(lzma.decompress(RECORD.read_bytes()))


def recorded_metadata(case: dict[str, Any]) -> dict[str, Any]:
    vocabulary = RECORDED["vocabularies"][case["vocabulary"]]
    return {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()} | dict(
        case["keys"]
    )


@pytest.mark.parametrize("name", RECORDED["cases"])
def test_ids_are_those_that_llama_cpp_gave(name: str) -> None:
    case = RECORDED["cases"][name]
    tokenizer = Tokenizer.from_metadata(recorded_metadata(case))
    assert sorted(tokenizer.eog_ids) == case["ends"]
    for special in (False, True):
        chosen = case["special" if special else "plain"]
        for text, known, at in zip(RECORDED["texts"], RECORDED["answers"], chosen, strict=True):
            assert tokenizer.encode(text, special=special) == known[at], text


def test_record_has_every_name_and_tells_them_apart() -> None:
    assert len(RECORDED["texts"]) == 300
    assert len(PRE_TOKENIZERS) == 93
    assert set(PRE_TOKENIZERS) <= set(RECORDED["cases"])
    seen: dict[tuple[Any, ...], set[Any]] = {}
    for name, way in PRE_TOKENIZERS.items():
        seen.setdefault(tuple(RECORDED["cases"][name]["plain"]), set()).add(way)
    # `\s*[\r\n]` and `\s*[\r\n]+` are the same.
    alike = {PRE_TOKENIZERS["qwen2"], PRE_TOKENIZERS["bailingmoe"]}
    assert [ways for ways in seen.values() if len(ways) > 1] == [alike]


@pytest.mark.parametrize(
    ("changes", "key", "named"),
    [
        ({"model": None}, "model", "has none"),
        ({"model": "rwkv"}, "model", "'rwkv' (RWKV's trie)"),
        ({"model": "bert"}, "model", "'bert' (WordPiece)"),
        ({"model": "t5"}, "model", "'t5' (unigram)"),
        ({"model": ["gpt2"]}, "model", "['gpt2']"),
        (
            {"model": "gpt2", "pre": "next-year"},
            "pre",
            "'gpt2' with tokenizer.ggml.pre 'next-year'",
        ),
        ({"model": "gpt2", "pre": 3}, "pre", "pre 3"),
        ({"model": "whitespace", "pre": "gpt-2"}, "pre", "'whitespace' with tokenizer.ggml.pre"),
    ],
)
def test_what_is_unsupported_is_said_with_what_works(
    changes: dict[str, Any], key: str, named: str
) -> None:
    said = unsupported_tokenizer({f"tokenizer.ggml.{name}": v for name, v in changes.items()})
    assert said is not None
    assert said.startswith(f"tokenizer.ggml.{key}: ")
    for part in (named, "plan, stage, exec and report work", "Decoder with token ids", "'llama'"):
        assert part in said


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.model": "llama"},
        {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.pre": "any"},
        {"tokenizer.ggml.model": "gpt2"},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"},
        {"tokenizer.ggml.model": "whitespace", "tokenizer.ggml.pre": "whitespace"},
    ],
)
def test_supported_kinds_have_nothing_to_say(metadata: dict[str, str]) -> None:
    assert unsupported_tokenizer(metadata) is None


def test_asking_needs_no_library_that_tokenizes() -> None:
    code = (
        "import sys; sys.modules.update(tokenizers=None, sentencepiece=None, jinja2=None)\n"
        "from unimem.engine.text.pre_tokenizers import unsupported_tokenizer\n"
        "print(unsupported_tokenizer({})[:20])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("tokenizer.ggml.model\n", "")


@pytest.mark.parametrize(
    "name", ["afmoe", "tiny_aya", "superbpe", "deepseek-llm", "gpt-4o", "jais-2"]
)
@pytest.mark.parametrize("piece", ["7", " ", "a", "A", "\n", "-", "a b", "\u4e00"])
def test_a_long_text_of_one_kind_is_cut_in_linear_time(name: str, piece: str) -> None:
    """30,000 pieces take 0.1 s; a search that begins anew at each of them takes up to 30."""
    tokenizer = Tokenizer.from_metadata(recorded_metadata(RECORDED["cases"][name]))
    for end in ("x", "7"):
        text = piece * 30_000 + end
        start = time.process_time()
        ids = tokenizer.encode(text, add_bos=False)
        assert time.process_time() - start < 2
        assert tokenizer.decode(ids) == text
