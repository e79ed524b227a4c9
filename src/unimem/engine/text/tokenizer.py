"""Text to token ids and back, with the vocabulary that a GGUF file carries.

Two libraries merge: ``sentencepiece`` for ``tokenizer.ggml.model = llama`` and ``tokenizers`` for
``gpt2``. This module does the rest as llama.cpp does, so that ids are the same: which tokens are
looked for in the text first, where a space is put in front, which ids end a generation. The source
of these facts is ``src/llama-vocab.cpp`` of llama.cpp
(https://github.com/ggml-org/llama.cpp), build b11549.
"""

from __future__ import annotations

import codecs
import operator
import re
import reprlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from unimem.base.arguments import flag, integer, string
from unimem.base.install_hint import install_hint
from unimem.base.turns import Turn
from unimem.engine.text.pre_tokenizers import (
    PRE_TOKENIZERS,
    PreTokenizer,
    unsupported_tokenizer,
)

try:
    import sentencepiece
    import tokenizers
except ImportError as error:
    raise ImportError(f"unimem.engine needs {error.name}: {install_hint('run')}") from error

# Token types of the GGUF specification (`tokenizer.ggml.token_type`). Tokens of other types
# (undefined 0, unused 5) are never shown, as in llama.cpp.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

# How SentencePiece writes a space inside a token.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))

# Tokens with these texts end a generation and are control tokens, whatever the file says.
_END_TEXTS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>",
    "<|flush|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<end_of_utterance>",
    "<turn|>", "<|tool_response>", "<eos>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[",
    "<|ifm|im_end|>", "<\uff5cend▁of▁sentence\uff5c>",
)  # fmt: skip

# A token that does not end a generation, but is of this type, if others that end it are there: one
# of each set.
_NO_END_TEXTS = (
    ("<|end|>", _USER_DEFINED, ({"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"})),
    ("</s>", _NORMAL, ({"<|tool_response>", "<|plamo:eos|>"},)),
)
# These are shown, and looked for in any text, whatever the file says.
_SHOWN_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")

# Fill-in-the-middle: the token of a role is named by a key, or else has one of these texts, and is
# a control token. Tokens of the first three roles end a generation.
_FIM_TEXTS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>", "<|plamo:file_separator|>"),
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim▁begin\uff5c>",
                "<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>", "<|plamo:fim_prefix|>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim▁hole\uff5c>",
                "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>", "<|plamo:fim_suffix|>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim▁end\uff5c>", "<MID>",
                "▁<MID>", "<|code_middle|>", "<|middle|>", "<|plamo:fim_middle|>"),
}  # fmt: skip
# Older names of keys.
_FIM_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_FIM_END_ROLES = ("fim_pad", "fim_rep", "fim_sep")

# White space that a special token takes from the text beside it, as C's `isspace`.
_STRIPPED = " \t\n\v\f\r"
# The first of these rules whose key has one of its words decides: the token loses what is in front.
_STRIPS_IN_FRONT = (
    ("tokenizer.ggml.pre", ("jina-v2-de", "jina-v2-es", "jina-v2-code", "mmbert"), "<mask>"),
    ("general.architecture", ("nomic-bert-moe", "jina-bert-v3"), "<mask>"),
    ("general.name", ("phi-3", "phi3"), None),  # all special tokens but these lose what is behind
    ("general.name", ("modern-bert",), "[MASK]"),
)
_STRIP_NOTHING = ("<unk>", "<s>", "<|endoftext|>")


def _byte_alphabet() -> list[str]:
    """Return the 256 characters by which byte-level BPE writes bytes.

    Printable characters of Latin-1 mean themselves; the other bytes are written as 256, 257, ...
    (``bytes_to_unicode`` in https://github.com/openai/gpt-2/blob/master/src/encoder.py).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    code_of = dict(zip(printable, printable, strict=True))
    code_of.update((byte, 256 + i) for i, byte in enumerate(others))
    return [chr(code_of[byte]) for byte in range(256)]


_ALPHABET = _byte_alphabet()
_BYTE_OF = {char: bytes([byte]) for byte, char in enumerate(_ALPHABET)}


class UnsupportedTokenizer(ValueError):  # noqa: N818 - the name is part of the public interface
    """The file's tokenizer is not supported; the message names those that are."""


class Tokenizer:
    """Turns text into token ids and back, as llama.cpp does.

    Any number of threads may encode and decode; after a fork both processes may.

    Attributes
    ----------
    n_vocab : int
        Number of tokens.
    bos_id, eos_id : int or None
        The tokens that begin and end a text.
    add_bos : bool
        Whether the model expects `bos_id` in front of a text.
    eog_ids : frozenset of int
        The tokens that end a generation.
    """

    n_vocab: int
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    eog_ids: frozenset[int]

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        pre = _read_pre_tokenizer(metadata)
        texts = _read_texts(metadata, "tokens")
        if not texts:
            raise ValueError("tokenizer.ggml.tokens: expected at least one token, got none")
        self._texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
        self.n_vocab = len(self._texts)
        ids = {text: i for i, text in enumerate(self._texts)}  # the last counts if two are equal
        self._types = _read_types(metadata, self._texts)

        # llama.cpp's defaults for `llama`. Its defaults for `gpt2` (11 for both) are no text
        # boundary in any vocabulary of today, so such a file must name its own.
        default = (1, 2) if pre is None else (None, None)
        self.bos_id = _read_id(metadata, "bos", self.n_vocab, default[0])
        self.eos_id = _read_id(metadata, "eos", self.n_vocab, default[1])
        self.add_bos = _read_flag(metadata, "add_bos_token", pre is None or pre.add_bos)
        if pre is not None and pre.is_raw and pre.add_bos:
            self.add_bos = True  # of Gemma 4, whose files may deny it
        if self.add_bos and self.bos_id is None:
            raise ValueError(
                "tokenizer.ggml.add_bos_token is true, but there is no tokenizer.ggml.bos_token_id"
            )
        self.eog_ids = self._find_ends(metadata, ids)

        self._space_prefix = False
        if pre is None:
            self._space_prefix = _read_flag(metadata, "add_space_prefix", True)
            unknown = _read_id(metadata, "unknown", self.n_vocab, 0) or 0
            scores = _read_scores(metadata, self.n_vocab)
            self._merge = _sentencepiece(self._texts, ids, scores, unknown)
        else:
            lowers = pre.drops_cuts and _read_flag(metadata, "normalizer.lowercase", False)
            merge = _byte_pairs(ids, self.n_vocab, _read_merges(metadata), pre)
            self._merge = (lambda text: merge(_lower(text))) if lowers else merge
        self._is_byte_level = pre is not None and not pre.is_raw
        self._writes_spaces = pre is None or pre.writes_spaces

        # The longest are first; control tokens count only if the caller asks for them.
        matched = {_UNKNOWN, _CONTROL, _USER_DEFINED}
        special = sorted(
            (i for text, i in ids.items() if self._types[i] in matched),
            key=lambda i: (-len(self._texts[i].encode()), i),
        )
        user_defined = [i for i in special if self._types[i] == _USER_DEFINED]
        self._special = _Special(self._texts, special)
        self._user_defined = _Special(self._texts, user_defined)
        self._strip_front, self._strip_behind = self._find_strips(metadata, ids)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Make the tokenizer that a GGUF file describes.

        Parameters
        ----------
        metadata : mapping
            The file's metadata, with the keys ``tokenizer.ggml.*``. Arrays may be any sequence.

        Raises
        ------
        UnsupportedTokenizer
            The file has another kind of tokenizer, or none.
        ValueError
            The metadata contradict themselves; the message names the key.
        """
        return cls(metadata)

    def __repr__(self) -> str:
        return f"Tokenizer({self.n_vocab} tokens, bos {self.bos_id}, eos {self.eos_id})"

    def _find_ends(self, metadata: Mapping[str, Any], ids: Mapping[str, int]) -> frozenset[int]:
        """Find the ids that end a generation, and mark tokens known by text as control tokens."""
        ends = {ids[text] for text in _END_TEXTS if text in ids}
        for role, texts in _FIM_TEXTS.items():
            keys = (role, _FIM_KEYS.get(role, role))
            named = [_read_id(metadata, key, self.n_vocab, None) for key in keys]
            token = next((i for i in named if i is not None), None)
            if token is None and (found := [ids[text] for text in texts if text in ids]):
                token = found[0]
                self._types[token] = _CONTROL
            if token is not None and role in _FIM_END_ROLES:
                ends.add(token)
        for text in _END_TEXTS:
            if text in ids:
                self._types[ids[text]] = _CONTROL
        for text in _SHOWN_TEXTS:
            if text in ids:
                self._types[ids[text]] = _USER_DEFINED
        named = [self.eos_id, *(_read_id(metadata, n, self.n_vocab, None) for n in ("eot", "eom"))]
        ends.update(i for i in named if i is not None)
        for text, kind, others in _NO_END_TEXTS:
            has = {self._texts[i] for i in ends}
            if text in has and all(has & each for each in others):
                ends.remove(ids[text])
                self._types[ids[text]] = kind
        return frozenset(ends)

    def _find_strips(
        self, metadata: Mapping[str, Any], ids: Mapping[str, int]
    ) -> tuple[frozenset[int], frozenset[int]]:
        """Find the special tokens that take white space in front of them, and behind them."""
        for key, words, token in _STRIPS_IN_FRONT:
            name = str(metadata.get(key, "")).lower()
            if any(word in name for word in words):
                if token is not None:
                    return frozenset({ids[token]} if token in ids else ()), frozenset()
                keep = {ids.get(text) for text in _STRIP_NOTHING}
                return frozenset(), frozenset(i for i in self._special.ids if i not in keep)
        return frozenset(), frozenset()

    def encode(self, text: str, *, add_bos: bool | None = None, special: bool = False) -> list[int]:
        """Return the token ids of a text.

        Parameters
        ----------
        text : str
            Any text.
        add_bos : bool, optional
            Whether `bos_id` is put in front; by default as the file says. An end token is never
            appended, since the text is to be continued.
        special : bool
            Whether texts of control tokens, such as ``<|im_end|>``, become those tokens. Leave it
            off for text from outside.

        Raises
        ------
        ValueError
            `add_bos` is set and the vocabulary has no such token, or the text cannot be written as
            UTF-8 (it holds half of a surrogate pair).
        """
        try:  # the libraries' messages about a lone surrogate are unclear
            string(text, "text").encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text: expected text that UTF-8 can write, got one of the surrogates at index "
                f"{error.start}"
            ) from None
        output: list[int] = []
        if self.add_bos if add_bos is None else flag(add_bos, "add_bos"):
            if self.bos_id is None:
                raise ValueError("add_bos: the vocabulary has no token that begins a text")
            output.append(self.bos_id)
        after_special = True
        cut_at = self._special if flag(special, "special") else self._user_defined
        for part in self._cut(text, cut_at):
            if isinstance(part, int):
                output.append(part)
                after_special = True
            else:
                prefix = " " if self._space_prefix and after_special else ""
                output += self._merge(prefix + part)
                after_special = False
        return output

    def _cut(self, text: str, special: _Special) -> list[str | int]:
        """Cut a text at the special tokens in it: the longest first, wherever they are."""
        taken = bytearray(len(text))
        cuts = []
        for _, place, token in sorted(special.find(text)):
            start, end = place, place + len(self._texts[token])
            if taken.find(1, start, end) >= 0:
                continue
            if token in self._strip_front:
                while start and not taken[start - 1] and text[start - 1] in _STRIPPED:
                    start -= 1
            if token in self._strip_behind:
                while end < len(text) and not taken[end] and text[end] in _STRIPPED:
                    end += 1
            taken[start:end] = b"\1" * (end - start)
            cuts.append((start, end, token))
        parts: list[str | int] = []
        at = 0
        for start, end, token in sorted(cuts):
            parts += [text[at:start], token] if at < start else [token]
            at = end
        return [*parts, text[at:]] if at < len(text) else parts

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Return the text of token ids.

        As llama.cpp's ``llama_detokenize``, without its ``clean_spaces``, which would change the
        encoded text for some vocabularies (``" ,"`` to ``","``).

        Parameters
        ----------
        tokens : iterable of int
            Token ids.
        special : bool
            Whether control tokens are written out; otherwise they have no text.

        Returns
        -------
        str
            The text, without the space that the tokenizer puts in front of a text. Bytes that are
            not UTF-8 become U+FFFD.

        Raises
        ------
        ValueError
            An id is not in the vocabulary.
        """
        try:
            ids = iter(tokens)
        except TypeError:
            raise TypeError(f"tokens: expected token ids, got {tokens!r:.60}") from None
        pieces = [self._piece(token, special) for token in ids]
        if self._space_prefix and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        return b"".join(pieces).decode("utf-8", "replace")

    def stream(self) -> TokenStream:
        """Return a stream for the text of one token after another, which continue a text."""
        return TokenStream(self._piece)

    def _piece(self, token: int, special: bool = False) -> bytes:
        """Return the bytes of a token."""
        token = integer(token, "token id", 0, self.n_vocab - 1)
        text, kind = self._texts[token], self._types[token]
        if kind in (_CONTROL, _UNKNOWN):
            return text.encode() if special else b""
        if kind == _USER_DEFINED:
            return text.encode()
        if kind == _BYTE:
            return bytes([int(text[3:5], 16)])
        if kind != _NORMAL:
            return b""
        if self._is_byte_level:
            # Characters outside the alphabet are not from a merge; they mean themselves.
            return b"".join(_BYTE_OF.get(char) or char.encode() for char in text)
        return (text.replace(_SPACE, " ") if self._writes_spaces else text).encode()


class _Special:
    """Tokens that are looked for in a text, in their order. Finding costs little for many, too."""

    def __init__(self, texts: Sequence[str], ids: Sequence[int]) -> None:
        self.ids = ids
        self._found = {texts[i]: (rank, i) for rank, i in enumerate(ids)}
        lengths: dict[str, set[int]] = {}
        for text in self._found:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = lengths  # by the first character

    def find(self, text: str) -> Iterable[tuple[int, int, int]]:
        """Yield the rank, the place and the id of each token in a text; they may overlap."""
        for start, first in enumerate(text):
            for length in self._lengths.get(first, ()):
                found = self._found.get(text[start : start + length])
                if found is not None:
                    yield found[0], start, found[1]


class TokenStream:
    """The text of one token after another, never cut within a character. For one thread."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that this token completes, and keep the bytes of half a character."""
        return self._decoder.decode(self._piece(token))

    def flush(self) -> str:
        """Return the kept rest, U+FFFD for half a character, and reset the stream."""
        return self._decoder.decode(b"", final=True)


def _sentencepiece(
    texts: Sequence[str], ids: Mapping[str, int], scores: Sequence[float], unknown_id: int
) -> Callable[[str], list[int]]:
    """Merge by score, with a SentencePiece model made from the vocabulary.

    The library's own treatment of spaces and special symbols is off: the text is cut already, and
    every token but the bytes is a normal one, since llama.cpp merges into any. The library wants
    each text once, and a token for each byte. A token whose text comes again gets one that never
    matches, since a space is written otherwise; a byte that is missing is the character or the
    unknown token.
    """
    n_vocab = len(texts)
    names = [text if ids[text] == i else _new(f" {i}", ids) for i, text in enumerate(texts)]
    missing = sorted(_BYTE_TOKENS.difference(ids))
    instead = [ids.get(chr(int(name[3:5], 16)), unknown_id) for name in missing]
    # The model is a protocol buffer (sentencepiece_model.proto), whose wire format is
    # (field << 3 | kind), value; kind 0 is an integer, 2 a length and bytes, 5 four bytes.
    pieces = [
        _message(0x0A, name.encode())
        + struct.pack("<BfBB", 0x15, score, 0x18, 6 if name in _BYTE_TOKENS else 1)
        for name, score in zip(names + missing, [*scores, *[0.0] * len(missing)], strict=True)
    ]
    # SentencePiece needs an unknown token, which is never used since all bytes are there.
    pieces.append(_message(0x0A, _new("<unk>", ids).encode()) + b"\x18\x02")
    model = b"".join(_message(0x0A, piece) for piece in pieces)
    # trainer_spec: model_type (3) = BPE, byte_fallback (35) = true.
    model += _message(0x12, b"\x18\x02" + b"\x98\x02\x01")
    # normalizer_spec: add_dummy_prefix (3), remove_extra_whitespaces (4), escape_whitespaces (5)
    # = false, and no character map.
    model += _message(0x1A, b"\x18\x00\x20\x00\x28\x00")
    # The library computes without the interpreter's lock. The end of the interpreter takes the
    # turn: ending a thread within the library would abort the process.
    turn = Turn()
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"tokenizer.ggml.tokens: SentencePiece refuses them: {error}") from error

    def merge(text: str) -> list[int]:
        with turn:
            found: list[int] = processor.encode(text.replace(" ", _SPACE))
        return [i if i < n_vocab else instead[i - n_vocab] for i in found] if missing else found

    return merge


def _new(text: str, others: Mapping[str, Any]) -> str:
    """Return a text like `text` that is none of the others."""
    while text in others:
        text += "?"
    return text


def _message(tag: int, data: bytes) -> bytes:
    """Return a length-delimited field of a protocol buffer."""
    size, length = len(data), bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes((tag, *length)) + data


def _byte_pairs(
    ids: dict[str, int], n_vocab: int, pairs: Sequence[tuple[str, str]], pre: PreTokenizer
) -> Callable[[str], list[int]]:
    """Merge by rank: cut into words, write their bytes in the alphabet, and merge.

    The library wants a token for each character and each result of a merge. Those that the
    vocabulary lacks get ids behind it, and are then spelled: by a token for each byte of the text
    as it is written, as far as there is one.
    """
    alphabet = [] if pre.is_raw else _ALPHABET
    lacking = [part for pair in pairs for part in (*pair, "".join(pair)) if part not in ids]
    added = dict.fromkeys([*(char for char in alphabet if char not in ids), *lacking])
    vocab = ids | {part: n_vocab + i for i, part in enumerate(added)}
    unknown = _new("<unk>", vocab) if pre.is_raw else None
    if unknown is not None:
        vocab[unknown] = n_vocab + len(added)
    written = "<0x{:02X}>".format if pre.is_raw else lambda byte: chr(byte) if byte < 0x80 else ""

    def spell(text: str) -> list[int]:
        return [ids[token] for token in map(written, text.encode()) if token in ids]

    spelled = [spell(part) for part in added]
    try:
        bpe = tokenizers.models.BPE(
            vocab=vocab, merges=list(pairs), ignore_merges=pre.whole_words, unk_token=unknown
        )
    except Exception as error:  # the library raises no class of its own
        raise ValueError(f"tokenizer.ggml.merges: {error}") from error
    tokenizer = tokenizers.Tokenizer(bpe)
    steps = tokenizers.pre_tokenizers
    behavior = "removed" if pre.drops_cuts else "isolated"
    cuts: list[Any] = [steps.Split(tokenizers.Regex(pattern), behavior) for pattern in pre.patterns]
    if not pre.is_raw:
        cuts.append(steps.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = steps.Sequence(cuts)

    def merge(text: str) -> list[int]:
        encoding = tokenizer.encode(text)
        found: list[int] = encoding.ids
        if max(found, default=0) < n_vocab:
            return found
        output: list[int] = []
        for i, (start, end) in zip(found, encoding.offsets, strict=True):
            if i < n_vocab:
                output.append(i)
            else:
                known = i - n_vocab < len(spelled)
                output += spelled[i - n_vocab] if known else spell(text[start:end])
        return output

    def merge_raw(text: str) -> list[int]:
        if pre.writes_spaces:
            text = text.replace(" ", _SPACE)
        if pre.spaces_lines:
            text = re.sub(rf"(?<![^\n])(?=[^\n{_SPACE}])", _SPACE, text)
        if not pre.whole_newlines:
            return merge(text)
        output: list[int] = []
        for part in re.findall(r"\n+|[^\n]+", text):
            output += [ids[part]] if part[0] == "\n" and part in ids else merge(part)
        return output

    return merge_raw if pre.is_raw else merge


def _lower(text: str) -> str:
    """Return a text in small letters, one for each letter."""
    return "".join(char.lower()[0] for char in text)


def _read_pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer | None:
    """Read how words are cut; None for `llama`, which does not."""
    problem = unsupported_tokenizer(metadata)
    if problem is not None:
        raise UnsupportedTokenizer(problem)
    model = metadata["tokenizer.ggml.model"]
    pre = "gemma4" if model == "gemma4" else metadata.get("tokenizer.ggml.pre", "default")
    return None if model == "llama" else PRE_TOKENIZERS[pre]


def _read_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Read the pairs to merge, each once: if one is there twice, the first counts."""
    merges = dict.fromkeys(_read_texts(metadata, "merges"))
    spaces = [merge.find(" ", 1) for merge in merges]
    for merge, at in zip(merges, spaces, strict=True):
        if at < 0:
            raise ValueError(
                f"tokenizer.ggml.merges: expected two parts of the vocabulary with a space "
                f"between, got {reprlib.repr(merge)}"
            )
    return [(merge[:at], merge[at + 1 :]) for merge, at in zip(merges, spaces, strict=True)]


def _read_texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    """Read an array of strings in UTF-8."""
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None:
        raise ValueError(f"{key}: expected an array of strings, but the file has no such key")
    problem = f"{key}: expected an array of strings in UTF-8"
    if isinstance(value, str | bytes):
        raise ValueError(f"{problem}, got one string")
    try:
        texts = [text.decode() if isinstance(text, bytes) else text for text in value]
        "".join(texts).encode()
    except (TypeError, UnicodeError) as error:
        raise ValueError(f"{problem}: {error}") from error
    return texts


def _read_numbers(
    metadata: Mapping[str, Any], name: str, count: int, kinds: str
) -> np.ndarray[Any, Any] | None:
    """Read an optional array of `count` numbers of the dtype kinds `kinds`."""
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key)
    if value is None:
        return None
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{key}: expected {count} numbers, one for each token: {error}") from error
    if array.shape != (count,) or array.dtype.kind not in kinds:
        raise ValueError(
            f"{key}: expected {count} numbers, one for each token, "
            f"got {array.dtype} of shape {array.shape}"
        )
    return array


def _read_types(metadata: Mapping[str, Any], texts: Sequence[str]) -> list[int]:
    """Read the type of each token, normal by default."""
    array = _read_numbers(metadata, "token_type", len(texts), "iu")
    if array is None:
        return [_NORMAL] * len(texts)
    types: list[int] = array.tolist()
    for i, kind in enumerate(types):
        if kind == _BYTE and texts[i] not in _BYTE_TOKENS:
            raise ValueError(
                f"tokenizer.ggml.token_type: token {i} is a byte, "
                f"so expected a text from <0x00> to <0xFF>, got {reprlib.repr(texts[i])}"
            )
    return types


def _read_scores(metadata: Mapping[str, Any], n_vocab: int) -> list[float]:
    """Read the score of each token, 0 by default."""
    array = _read_numbers(metadata, "scores", n_vocab, "fiu")
    if array is None:
        return [0.0] * n_vocab
    with np.errstate(over="ignore"):
        array = array.astype(np.float32)
    if np.isnan(array).any():
        raise ValueError("tokenizer.ggml.scores: expected numbers, got NaN")
    scores: list[float] = array.tolist()
    return scores


def _read_id(
    metadata: Mapping[str, Any], name: str, n_vocab: int, default: int | None
) -> int | None:
    """Read an optional token id."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key, default)
    if value is None:
        return None
    try:
        token = -1 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        token = -1
    if not 0 <= token < n_vocab:
        raise ValueError(
            f"{key}: expected a token id from 0 to {n_vocab - 1}, got {reprlib.repr(value)}"
        )
    return token


def _read_flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    """Read an optional truth value."""
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{key}: expected true or false, got {reprlib.repr(value)}")
    return bool(value)
