r"""How byte-pair tokenizers cut text into words, by the names of `tokenizer.ggml.pre`.

Names, expressions and rules are those of ``src/llama-vocab.cpp`` and ``src/unicode.cpp`` of
llama.cpp (https://github.com/ggml-org/llama.cpp), build b11549, which has most expressions from the
models' own ``tokenizer.json``. Where it differs from those, this file follows llama.cpp:

- All of ``\p{Lu}``, ``\p{Ll}``, ``\p{Lt}``, ``\p{Lm}`` and ``\p{Lo}`` are ``\p{L}``.
- A space beyond ASCII is ``\s`` alone, even where a range of characters includes it.
- ``(?i:'s|...)`` is spelled out, because the flag would also match U+017F as an s.

Nothing here needs the libraries that tokenize.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple


class PreTokenizer(NamedTuple):
    """The way from text to words, within which pairs are merged."""

    patterns: tuple[str, ...] = ()  # each cuts the pieces of the one before
    drops_cuts: bool = False  # what a pattern matches is no word
    whole_words: bool = False  # a word that is a token is taken without merging
    add_bos: bool = False  # unless the file says otherwise
    # Of the vocabularies that have text as it is, not bytes written as characters:
    is_raw: bool = False
    writes_spaces: bool = False  # as U+2581
    whole_newlines: bool = False  # newlines in a row that are a token are taken without merging
    spaces_lines: bool = False  # a line begins with a space, and each space begins a word


_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SUFFIX = rf"(?:{_CONTRACTIONS})?"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_REST = rf"{_SIGNS}[\r\n]*|{_LINES}"
_SLASH_REST = rf"{_SIGNS}[\r\n/]*|{_LINES}"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SIGNS}|{_SPACES}"
_ONE, _THREE = r"\p{N}", r"\p{N}{1,3}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|{_THREE}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|{_ONE}|{_REST}"
# Digits in threes from the right; the first of them keep the text in front. The parts before and
# behind match nothing else: they keep the search linear.
_THREES_FROM_RIGHT = r"(?<=\p{N})\p{N}{3}|\P{N}*\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))|\P{N}+\z"


def _by_case(letters: str) -> str:
    """Return the expression of words that begin with capitals."""
    large, small = f"[{letters}&&[^a-z]]", f"[{letters}&&[^A-Z]]"
    front = r"[^\r\n\p{L}\p{N}]?"
    return rf"{front}{large}*{small}+{_SUFFIX}|{front}{large}+{small}*{_SUFFIX}"


_TEKKEN = _by_case(r"\p{L}").replace(_SUFFIX, "")
_GPT4O = rf"{_by_case(chr(92) + 'p{L}')}|{_THREE}|{_SLASH_REST}"
_CJK = r"[一-龥\u3040-\u309F\u30A0-\u30FF]+"
_ASCII_SIGN = r"[!-/:-@\[-`{-~]"
_SIGN_WORD = rf"{_ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_SIGN_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
_EAST = r"[一-龥\u0800-一가-\uD7FF&&\S]+"
# Cased letters of Unicode 11, without some blocks.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10C7-\u10FF\u1C80-\u1C8F\u2D00-\u2D2D\uA790-\uA7FF"
    r"\uAB30-\uAB6F\x{10570}-\x{105FF}\x{10D40}-\x{10D8F}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}"
    r"\x{1DF00}-\x{1DF2F}]]"
)
_BLOOM = r" ?[^(\s|.,!?…\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"
_HAN = (
    r"\u4E00-\u9FFF\u3400-\u4DBF\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}\uF900-\uFAFF"
    r"\x{2F800}-\x{2FA1F}"
)
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_LINES_ALONE = r"[^\n]+|\n+"
_YOUTU = (
    r"[가-힣ㄱ-ㆎ]+|[\uFF01…“”‘’—\uFF1A\uFF1B\uFF0C\u3001-\u303F\uFE30-\uFE4F]+|[ㄅ-ㄯ]+|" + _CJK,
    rf"{_MARKED_WORD}{_SUFFIX}|{_ONE}|{_SLASH_REST}",
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    _ONE,
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_AFMOE = (
    _THREES_FROM_RIGHT,
    r"[一-鿿㐀-䶿豈-\uFAFF\u3040-\u309F\u30A0-\u30FF\uFF65-\uFF9F\u2F00-\u2FDF\u0E40-\u0E7F"
    r"\u0E80-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F\uA9E0-\uA9FF가-\uD7AF\u1100-\u11FF]+",
    _DEEPSEEK3,
)
_JAIS2_SPACES = "|".join(rf"\s{{{1 << n}}}(?!\S)" for n in range(9, 1, -1))

# A row has what comes of the names in front of it.
_TABLE: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer(_DEFAULT)),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True)),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), whole_words=True)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
     PreTokenizer((_QWEN2,))),
    ("qwen35", PreTokenizer((
        rf"{_CONTRACTIONS}|{_MARKED_WORD}|{_ONE}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}",
    ))),
    ("ufakzeka", PreTokenizer((rf"{_WORD}|{_ONE}|{_REST}",))),
    ("laguna", PreTokenizer((_LINES_ALONE, _QWEN2))),
    ("minicpm5", PreTokenizer(
        (_THREE, rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_REST}"), whole_words=True
    )),
    ("k2-horizon", PreTokenizer((
        rf"{_CONTRACTIONS.replace('[sS]', '[sS' + chr(0x17F) + ']')}|"
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}\u200C\u200D]+|{_THREE}|{_REST}",
    ))),
    ("jais-2", PreTokenizer((
        rf"{_CONTRACTIONS}|{_WORD}|{_THREE}|{_SIGNS}[\r\n]*|\s*[\r\n]+|{_JAIS2_SPACES}"
        r"|\s{1,2}(?!\S)|\s",
    ))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((
        rf"{_CONTRACTIONS}|{_WORD}|{_ONE}|{_SIGNS}[\r\n]*|\s*[\r\n]|{_SPACES}",
    ))),
    ("seed-coder", PreTokenizer((
        rf"{_CONTRACTIONS}|{_WORD}|{_ONE}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}",
    ))),
    ("exaone-moe", PreTokenizer((
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}\p{{M}}*(?: ?\p{{L}}\p{{M}}*)*|{_ONE}|"
        rf"{_SIGNS}[\r\n/]?|\s*[\r\n]|{_SPACES}",
    ))),
    ("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
     "jina-v1-en jina-v2-code roberta-bpe exaone4 mpt olmo jais trillion granite-docling",
     PreTokenizer((_GPT2,))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
     PreTokenizer((_ONE, _GPT2))),
    ("falcon", PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, _ONE))),
    ("superbpe", PreTokenizer((
        r"\p{N}+", r"(?<=[0-9])[0-9]{3}|[0-9]{1,3}(?=(?:[0-9]{3})*(?![0-9]))"
    ))),
    ("tekken", PreTokenizer((rf"{_TEKKEN}|{_ONE}|{_SLASH_REST}",), whole_words=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("granite-embed-multi-97m", PreTokenizer(
        (rf"{_by_case(chr(92) + 'p{L}' + chr(92) + 'p{M}')}|{_THREE}|{_SLASH_REST}",),
        whole_words=True,
    )),
    ("tiny_aya cohere2moe", PreTokenizer(
        (_THREES_FROM_RIGHT, rf"{_MARKED_WORD}{_SUFFIX}|{_THREE}|{_SLASH_REST}")
    )),
    ("kimi-k2", PreTokenizer((
        rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_SUFFIX}|{_THREE}|{_REST}",
    ))),
    ("deepseek-llm", PreTokenizer((
        r"[\r\n]", rf"\s?{_CASED}+",
        r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3001\u3002]+",
        r"\s+\z", _EAST, r"\p{N}+",
    ))),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST, _ONE))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer((_THREE, _CJK, _DEEPSEEK3))),
    ("spark2_5", PreTokenizer((
        _THREE, _CJK, rf"{_SIGN_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{_SPACES}", _ONE
    ))),
    ("youtu", PreTokenizer(_YOUTU, whole_words=True)),
    ("chameleon", PreTokenizer(_CHAMELEON, add_bos=True)),
    ("afmoe", PreTokenizer(_AFMOE)),
    ("gemma4 granite-embed-multi-311m", PreTokenizer(
        add_bos=True, is_raw=True, writes_spaces=True, whole_newlines=True
    )),
    ("mmbert", PreTokenizer(
        (r"\u2581[^\u2581]*",), is_raw=True, writes_spaces=True, whole_newlines=True,
        spaces_lines=True,
    )),
    ("sarvam-moe", PreTokenizer((_LINES_ALONE,), is_raw=True, writes_spaces=True)),
    ("whitespace", PreTokenizer((r"\s+",), is_raw=True, drops_cuts=True)),
)  # fmt: skip
PRE_TOKENIZERS = {name: pre for names, pre in _TABLE for name in names.split()}
"""The way of each name that llama.cpp knows."""

# `tokenizer.ggml.model` of other kinds that llama.cpp reads.
_OTHER_KINDS = {
    "bert": "WordPiece",
    "t5": "unigram",
    "rwkv": "RWKV's trie",
    "plamo2": "PLaMo's tables",
    "plamo3": "PLaMo's tables",
    "hybriddna": "byte-pair with DNA",
    "none": "no vocabulary",
    "no_vocab": "no vocabulary",
}
_ALL_THE_SAME = "plan, stage, exec and report work all the same, and so does Decoder with token ids"


def unsupported_tokenizer(metadata: Mapping[str, Any]) -> str | None:
    """Return why the text of a model cannot be tokenized, or None if it can.

    The message names the key, what it says, what works all the same, and what is supported. Only
    the kind is looked at: a vocabulary that contradicts itself is found by `Tokenizer`.

    Parameters
    ----------
    metadata : mapping
        The file's metadata, with the keys ``tokenizer.ggml.*``.
    """
    model = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    is_text = isinstance(model, str)
    if is_text and model in ("llama", "gemma4"):
        return None
    if is_text and model in ("gpt2", "whitespace"):
        if isinstance(pre, str) and pre in PRE_TOKENIZERS and model in ("gpt2", pre):
            return None
        key, has = "pre", f"model {model!r} with tokenizer.ggml.pre {reprlib.repr(pre)}"
    else:
        key, has = "model", "none" if model is None else f"model {reprlib.repr(model)}"
        if is_text and model in _OTHER_KINDS:
            has += f" ({_OTHER_KINDS[model]})"
    return (
        f"tokenizer.ggml.{key}: the file has {has}, so its text cannot be tokenized; "
        f"{_ALL_THE_SAME}. Supported are 'llama' (SentencePiece), 'gemma4', 'whitespace', and "
        f"'gpt2' (byte-level BPE) with {len(PRE_TOKENIZERS)} names of tokenizer.ggml.pre, such as "
        f"'llama-bpe', 'qwen2' and 'gpt-2'"
    )
