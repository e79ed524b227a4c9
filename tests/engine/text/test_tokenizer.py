"""Token ids equal llama.cpp's; text comes back; broken metadata gives a ValueError."""

from __future__ import annotations

import random
import re
import runpy
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.models import llama_cpp
from support.models.tokenizer_models import (
    CONTROL,
    PAGE,
    USER_DEFINED,
    Vocab,
    bpe_vocab,
    spm_vocab,
    write_model,
)
from support.project.checkout import STORIES, needs_stories
from support.project.tiers import examples
from unimem.engine.text import tokenizer as tokenizer_module
from unimem.engine.text.tokenizer import Tokenizer, UnsupportedTokenizer


def odd_texts() -> list[str]:
    """Texts unlike the page: line ends, edges, and its characters and words in any order."""
    texts = ["", " ", "  ", "\n", "a", " a", "a ", "\r\n\r\n x\r", "\t\t\v\f", "\u2581\u2581 a"]
    texts += ["\x1c\x85\xa0\u1680\u2028\u202f\u3000", "\ufeff\u200b\u200d", "\U0010ffff\ue000"]
    texts += ["'\u017f 'S 'LL 'Re it'S'VE", "12345678901 ٣٤٥٦ Ⅷ½²"]
    texts += ["<s><s> <s>a</s> </s>\n<unk><0x41>"]
    rng = random.Random(1)
    characters = sorted(set(PAGE)) + list("\r\n\t   '''stremvdl0123456789")
    words = re.findall(r"\s+|\w+|[^\w\s]+", PAGE) + CONTROL + USER_DEFINED + ["<s>", "</s>"]
    for _ in range(examples(200)):
        texts.append("".join(rng.choices(characters, k=rng.randrange(1, 25))))
        texts.append("".join(rng.choices(words, k=rng.randrange(1, 25))))
        code_points = (rng.randrange(1, 0xD800) for _ in range(rng.randrange(1, 12)))
        texts.append("".join(map(chr, code_points)))
    return texts


TEXTS = [PAGE, *PAGE.split("\n"), *odd_texts()]


@dataclass
class Case:
    name: str
    vocab: Vocab
    tokenizer: Tokenizer
    folder: Path

    @cached_property
    def answers(self) -> llama_cpp.Answers:
        """llama.cpp's answers."""
        path = write_model(self.folder / f"{self.name}.gguf", self.vocab.metadata)
        return llama_cpp.tokenize(path, TEXTS)


@pytest.fixture(scope="module", params=["llama", "llama-bpe", "qwen2", "gpt-2", "default"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    vocab = spm_vocab() if request.param == "llama" else bpe_vocab(request.param)
    tokenizer = Tokenizer.from_metadata(vocab.metadata)
    return Case(request.param, vocab, tokenizer, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def spm() -> Vocab:
    return spm_vocab()


@pytest.fixture(scope="module")
def bpe() -> Vocab:
    return bpe_vocab("qwen2")


def test_ids_are_those_of_llama_cpp(case: Case) -> None:
    answers = case.answers
    for text, plain, special in zip(TEXTS, answers.plain, answers.special, strict=True):
        assert case.tokenizer.encode(text) == plain, text
        assert case.tokenizer.encode(text, special=True) == special, text


def test_text_is_that_of_llama_cpp(case: Case) -> None:
    answers = case.answers
    n_vocab = case.tokenizer.n_vocab
    # decode() removes a space in front for `llama`, which no piece shows there.
    assert [case.tokenizer.decode([0, i], special=True) for i in range(n_vocab)] == [
        answers.pieces[0] + piece for piece in answers.pieces
    ]
    if case.name in ("llama", "qwen2"):  # for the others llama.cpp rewrites spaces
        for tokens, decoded in zip(answers.special, answers.decoded, strict=True):
            assert case.tokenizer.decode(tokens).lstrip() == decoded.lstrip()


def test_special_ids_are_those_of_llama_cpp(case: Case) -> None:
    tokenizer, answers = case.tokenizer, case.answers
    assert (tokenizer.bos_id, tokenizer.eos_id) == (answers.bos, answers.eos)
    assert tokenizer.add_bos == answers.add_bos
    assert sorted(tokenizer.eog_ids) == answers.eog


def test_end_tokens_by_text_and_by_key(bpe: Vocab, tmp_path: Path) -> None:
    by_text = {"<|end|>": True, "<|fim_pad|>": True, "<|fim_prefix|>": False}
    by_key = dict.fromkeys(["<x>", "<y>", "<z>"], True)
    tokens = [*bpe.tokens, *by_text, "[PAD]", *by_key]
    keys = {"fim_pad": "<|fim_pad|>", "fim_sep": "<x>", "eom": "<y>", "eot": "<z>"}
    metadata = bpe.metadata | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(bpe.types + [1] * 7, np.int32),
        **{f"tokenizer.ggml.{key}_token_id": tokens.index(text) for key, text in keys.items()},
    }
    tokenizer = Tokenizer.from_metadata(metadata)
    for added, ends in (by_text | by_key).items():
        assert (tokens.index(added) in tokenizer.eog_ids) is ends, added
    # A token known by its text is a control token, though the file calls it a normal one.
    assert tokenizer.encode("a<|end|>", special=True)[-1] == tokens.index("<|end|>")
    assert tokens.index("<|end|>") not in tokenizer.encode("a<|end|>")
    assert tokenizer.decode([tokens.index("<|fim_prefix|>")]) == ""
    text = "a<|end|><|fim_prefix|>"
    answers = llama_cpp.tokenize(write_model(tmp_path / "ends.gguf", metadata), [text])
    assert sorted(tokenizer.eog_ids) == answers.eog
    assert tokenizer.encode(text, special=True) == answers.special[0]


@pytest.mark.parametrize("flags", [{"add_bos_token": False}, {"add_space_prefix": False}])
def test_flags_of_the_file(spm: Vocab, flags: dict[str, bool], tmp_path: Path) -> None:
    metadata = spm.metadata | {f"tokenizer.ggml.{name}": on for name, on in flags.items()}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert (tokenizer.encode("Yes")[0] == tokenizer.bos_id) is flags.get("add_bos_token", True)
    prefix = " " * flags.get("add_space_prefix", True)
    assert "".join(map(tokenizer.stream().push, tokenizer.encode("Yes"))) == prefix + "Yes"
    answers = llama_cpp.tokenize(write_model(tmp_path / "flags.gguf", metadata), TEXTS)
    assert [tokenizer.encode(text) for text in TEXTS] == answers.plain
    assert [tokenizer.decode(tokens).lstrip() for tokens in answers.special] == [
        text.lstrip() for text in answers.decoded
    ]


@pytest.mark.slow
def test_a_vocabulary_as_gemma_has_it(tmp_path: Path) -> None:
    """Begin and end have other ids, no space is put in front, and runs of spaces are tokens."""
    turns, runs = ["<start_of_turn>", "<end_of_turn>"], ["\n\n", "\n\n\n", "  ", "   "]
    whole = spm_vocab()
    vocab = Vocab(whole.tokens + turns + runs, whole.types + [3] * 2 + [4] * 4, whole.metadata)
    scores = np.concatenate([whole.metadata["tokenizer.ggml.scores"], np.zeros(6, np.float32)])
    flags = {"bos_token_id": 2, "eos_token_id": 1, "scores": scores}
    flags |= {"add_space_prefix": False, "add_eos_token": False}
    metadata = vocab.metadata | {f"tokenizer.ggml.{name}": on for name, on in flags.items()}
    tokenizer = Tokenizer.from_metadata(metadata)
    talk = "<start_of_turn>user\nWrite  a\n\nhaiku   .<end_of_turn>\n<start_of_turn>model\n"
    texts = [*TEXTS, talk, "\n" * 5, " " * 7]
    answers = llama_cpp.tokenize(write_model(tmp_path / "gemma.gguf", metadata), texts)
    assert [tokenizer.encode(text) for text in texts] == answers.plain
    assert [tokenizer.encode(text, special=True) for text in texts] == answers.special
    assert sorted(tokenizer.eog_ids) == answers.eog
    assert vocab.tokens.index("<end_of_turn>") in tokenizer.eog_ids


@needs_stories
def test_real_vocabulary(tmp_path: Path) -> None:
    fields = pytest.importorskip("gguf").GGUFReader(STORIES).fields
    tokenizer = Tokenizer.from_metadata({key: value.contents() for key, value in fields.items()})
    answers = llama_cpp.tokenize(STORIES, TEXTS)
    assert [tokenizer.encode(text) for text in TEXTS] == answers.plain
    assert [tokenizer.encode(text, special=True) for text in TEXTS] == answers.special
    assert sorted(tokenizer.eog_ids) == answers.eog


def test_text_comes_back(case: Case) -> None:
    for text in (*TEXTS, "nul\0nul"):
        if case.name == "llama" and ("\u2581" in text or any(t in text for t in USER_DEFINED)):
            continue  # SentencePiece writes spaces as U+2581, and adds one after a special token
        assert case.tokenizer.decode(case.tokenizer.encode(text, add_bos=False)) == text


def test_stream_gives_the_same_text_and_whole_characters(case: Case) -> None:
    tokens = case.tokenizer.encode(PAGE, add_bos=False)
    stream = case.tokenizer.stream()
    pushed = [stream.push(token) for token in tokens]
    assert stream.flush() == ""
    space = case.name == "llama"  # decode() removes it
    assert "".join(pushed) == " " * space + case.tokenizer.decode(tokens)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pushed)
    assert "" in pushed  # some characters of the page have no token


def test_stream_flushes_half_a_character(spm: Vocab) -> None:
    tokenizer = Tokenizer.from_metadata(spm.metadata)
    first, second, third = (spm.tokens.index(f"<0x{byte:02X}>") for byte in "☃".encode())
    stream = tokenizer.stream()
    assert [stream.push(token) for token in (first, second)] == ["", ""]
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert [stream.push(token) for token in (first, second, third)] == ["", "", "☃"]
    assert stream.flush() == ""


def test_control_tokens_give_text_only_when_asked(case: Case) -> None:
    end = case.vocab.tokens.index("<|eot_id|>")
    assert case.tokenizer.decode([end]) == ""
    assert case.tokenizer.stream().push(end) == ""
    assert case.tokenizer.decode([end], special=True) == "<|eot_id|>"


def test_aliases_and_missing_pre(bpe: Vocab) -> None:
    def ids(pre: str) -> tuple[int, ...]:
        metadata = bpe.metadata | {"tokenizer.ggml.pre": pre}
        return tuple(Tokenizer.from_metadata(metadata).encode(PAGE))

    assert ids("llama-bpe") == ids("llama3") == ids("llama-v3")
    assert ids("qwen2") == ids("deepseek-r1-qwen")
    assert len({ids(pre) for pre in ("llama-bpe", "qwen2", "gpt-2", "default")}) == 4
    without = {key: value for key, value in bpe.metadata.items() if key != "tokenizer.ggml.pre"}
    assert tuple(Tokenizer.from_metadata(without).encode(PAGE)) == ids("default")


def test_tokens_as_bytes(bpe: Vocab) -> None:
    raw = [text.encode() for text in bpe.tokens]
    tokenizer = Tokenizer.from_metadata(bpe.metadata | {"tokenizer.ggml.tokens": raw})
    assert tokenizer.encode(PAGE) == Tokenizer.from_metadata(bpe.metadata).encode(PAGE)


def test_no_begin_token(bpe: Vocab) -> None:
    metadata = {k: v for k, v in bpe.metadata.items() if k != "tokenizer.ggml.bos_token_id"}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert tokenizer.bos_id is None
    assert not tokenizer.add_bos
    with pytest.raises(ValueError, match="no token that begins a text"):
        tokenizer.encode("a", add_bos=True)
    with pytest.raises(ValueError, match=r"no tokenizer\.ggml\.bos_token_id"):
        Tokenizer.from_metadata(metadata | {"tokenizer.ggml.add_bos_token": True})


def test_ids_and_texts_out_of_range(case: Case) -> None:
    for token in (-1, case.tokenizer.n_vocab):
        with pytest.raises(ValueError, match=f"expected an integer from 0 to .*, got {token}"):
            case.tokenizer.decode([0, token])
        with pytest.raises(ValueError, match="token id"):
            case.tokenizer.stream().push(token)
    with pytest.raises(ValueError, match="surrogates"):
        case.tokenizer.encode("half a pair: \ud83d")
    assert case.tokenizer.decode(np.array([], np.int32)) == ""
    assert case.tokenizer.encode("", add_bos=False) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": None}, "has none"),
        ({"model": "rwkv"}, "'rwkv'"),
        ({"model": ["gpt2"]}, r"\['gpt2'\]"),
        ({"pre": "next-year"}, "'next-year'"),
        ({"pre": 3}, "pre 3"),
    ],
)
def test_unsupported_kinds_are_named(bpe: Vocab, changes: dict[str, Any], named: str) -> None:
    metadata = bpe.metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(UnsupportedTokenizer, match=named) as caught:
        Tokenizer.from_metadata(metadata)
    for supported in ("'llama'", "'gpt2'", "'llama-bpe'", "'qwen2'", "'gpt-2'"):
        assert supported in str(caught.value)


def test_broken_metadata_is_named(spm: Vocab, bpe: Vocab) -> None:
    def refused(vocab: Vocab, key: str, value: object, match: str) -> None:
        with pytest.raises(ValueError, match=match) as caught:
            Tokenizer.from_metadata(vocab.metadata | {f"tokenizer.ggml.{key}": value})
        assert f"tokenizer.ggml.{key}" in str(caught.value)

    tokens, n = spm.tokens, len(spm.tokens)
    refused(spm, "tokens", None, "no such key")
    refused(spm, "tokens", [], "at least one token")
    refused(spm, "tokens", "abc", "got one string")
    refused(spm, "tokens", 7, "array of strings")
    refused(spm, "tokens", [*tokens[:-1], 7], "found")
    refused(spm, "tokens", [*tokens[:-1], b"\xff"], "UTF-8")
    refused(spm, "tokens", [*tokens[:-1], "\ud800"], "UTF-8")
    refused(spm, "tokens", [*tokens[:-1], "nul\0"], "null character")
    refused(spm, "token_type", spm.types[:-1], f"expected {n} numbers")
    refused(spm, "token_type", ["a"] * n, f"expected {n} numbers")
    refused(spm, "token_type", [[1], [1, 2]], f"expected {n} numbers")
    refused(spm, "token_type", [1.0] * n, f"expected {n} numbers")
    refused(spm, "token_type", [*spm.types[:-1], 6], f"token {n - 1} is a byte")
    refused(spm, "scores", [0.0] * (n + 1), f"expected {n} numbers")
    refused(spm, "scores", [float("nan")] * n, "NaN")
    refused(spm, "bos_token_id", n, f"from 0 to {n - 1}, got {n}")
    refused(spm, "eos_token_id", -1, "got -1")
    refused(spm, "eot_token_id", 2.0, "got 2.0")
    refused(spm, "fim_pad_token_id", True, "got True")
    refused(spm, "add_bos_token", 1, "true or false, got 1")
    refused(spm, "add_space_prefix", "yes", "true or false, got 'yes'")
    refused(bpe, "merges", None, "no such key")
    refused(bpe, "merges", ["ab"], "two parts of the vocabulary with a space between, got 'ab'")


def test_a_token_that_is_there_twice_counts_as_the_last(spm: Vocab, bpe: Vocab) -> None:
    """As in Gemma 4's own files; decoding takes both."""
    for vocab in (spm, bpe):
        again = vocab.tokens.index("a")
        metadata = Vocab([*vocab.tokens, "a"], [*vocab.types, 1], dict(vocab.metadata)).metadata
        if "tokenizer.ggml.scores" in metadata:
            scores = metadata["tokenizer.ggml.scores"]
            metadata["tokenizer.ggml.scores"] = np.append(scores, scores[again])
        once, twice = map(Tokenizer.from_metadata, (vocab.metadata, metadata))
        last = twice.n_vocab - 1
        expected = [last if i == again else i for i in once.encode(PAGE)]
        assert twice.encode(PAGE) == expected
        assert last in expected
        assert twice.decode([last, again]) == "aa"


def test_bytes_without_a_token(spm: Vocab, bpe: Vocab) -> None:
    """Byte-level BPE skips such a byte, and merges nothing over it; SentencePiece says unknown."""

    def without(vocab: Vocab, token: str) -> Tokenizer:
        tokens = ["gone" * 9 if text == token else text for text in vocab.tokens]
        types = [
            1 if text == token else kind
            for text, kind in zip(vocab.tokens, vocab.types, strict=True)
        ]
        return Tokenizer.from_metadata(Vocab(tokens, types, dict(vocab.metadata)).metadata)

    whole = Tokenizer.from_metadata(bpe.metadata)
    assert without(bpe, "~").encode("th~e") == whole.encode("th") + whole.encode("e")
    whole = Tokenizer.from_metadata(spm.metadata)
    (*front, byte) = whole.encode("\x01")
    assert spm.tokens[byte] == "<0x01>"
    assert without(spm, "<0x01>").encode("\x01") == [*front, 0]


def test_a_merge_that_is_no_token_is_spelled(bpe: Vocab) -> None:
    metadata = bpe.metadata | {"tokenizer.ggml.merges": ["h qq", "x y", "h h", "hh h"]}
    tokenizer = Tokenizer.from_metadata(metadata)
    assert "xy" not in bpe.tokens
    assert tokenizer.encode("xyz") == [bpe.tokens.index(char) for char in "xyz"]


def test_a_text_of_many_of_very_many_special_tokens() -> None:
    """Each token of the vocabulary was looked for in every piece of the text: minutes for this."""
    names = [f"<token {i}>" for i in range(200_000)]
    tokenizer = Tokenizer.from_metadata({
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", *names, "<tok", "en"],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1, *[4] * (len(names) + 2)],
        "tokenizer.ggml.add_bos_token": False,
    })  # fmt: skip
    found = tokenizer.encode("a<token" + "a".join(names[:20_000]) + "<token 1")
    expected = [1, 0] + [i for n in range(1, 20_000) for i in (n + 1, 0)]
    assert found[:3] == [0, len(names) + 1, len(names) + 2]
    assert found[3 : 3 + len(expected) - 1] == expected[:-1]
    assert found[-2:] == [len(names) + 1, len(names) + 2]


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3000),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=4),
    st.binary(max_size=4),
    st.lists(st.one_of(st.text(max_size=2), st.integers(-1, 9), st.floats()), max_size=3),
)


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_metadata_give_a_tokenizer_or_a_value_error(
    spm: Vocab, bpe: Vocab, data: st.DataObject
) -> None:
    metadata = dict(data.draw(st.sampled_from([spm, bpe])).metadata)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(metadata)))
        value = metadata[key]
        if isinstance(value, list | np.ndarray) and len(value) and data.draw(st.booleans()):
            changed = list(value)
            i = data.draw(st.integers(0, len(changed) - 1))
            action = data.draw(st.sampled_from(["set", "drop", "copy", "cut"]))
            if action == "set":
                changed[i] = data.draw(VALUES)
            elif action == "drop":
                del changed[i]
            elif action == "copy":
                changed[i] = changed[-1]
            else:
                del changed[i:]
            metadata[key] = changed
        else:
            metadata[key] = data.draw(VALUES)
    try:
        tokenizer = Tokenizer.from_metadata(metadata)
    except ValueError:
        return
    tokens = tokenizer.encode("A few words, été 12 <|im_end|>", special=True)
    assert all(0 <= token < tokenizer.n_vocab for token in tokens)
    assert isinstance(tokenizer.decode(range(tokenizer.n_vocab), special=True), str)


@pytest.mark.parametrize("library", ["tokenizers", "sentencepiece"])
def test_missing_extra_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ImportError, match=rf"needs {library}.*install unimem-llm with the extra 'run'"
    ):
        runpy.run_path(str(tokenizer_module.__file__))
