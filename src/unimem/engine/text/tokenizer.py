"""Text to token ids and back, with the vocabulary that a GGUF file carries.

Two libraries merge: ``sentencepiece`` for ``tokenizer.ggml.model = llama`` and ``tokenizers`` for
``gpt2``. This module does the rest as llama.cpp does, so that ids are the same: which tokens are
looked for in the text first, where a space is put in front, which ids end a generation. The source
of these facts is ``src/llama-vocab.cpp`` of llama.cpp
(https://github.com/ggml-org/llama.cpp), build b9190.
"""

from __future__ import annotations

import codecs
import operator
import reprlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from unimem.base.arguments import flag, integer, string
from unimem.base.install_hint import install_hint

try:
    import sentencepiece
    import tokenizers
except ImportError as error:
    raise ImportError(f"unimem.engine needs {error.name}: {install_hint('run')}") from error

__all__ = ["TokenStream", "Tokenizer", "UnsupportedTokenizer"]

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
    "<turn|>", "<|tool_response>", "<eos>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 - these are the characters of the token
)  # fmt: skip

# Fill-in-the-middle: the token of a role is named by a key, or else has one of these texts, and is
# a control token. Tokens of the first three roles end a generation.
_FIM_TEXTS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
    "fim_pre": ("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "▁<PRE>"),
    "fim_suf": ("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "▁<SUF>"),
    "fim_mid": ("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "▁<MID>"),
}
_FIM_END_ROLES = ("fim_pad", "fim_rep", "fim_sep")


class _PreTokenizer(NamedTuple):
    """How text is cut into words; bytes are merged within a word (`tokenizer.ggml.pre`)."""

    patterns: tuple[str, ...]  # each is applied to the pieces of the one before
    whole_words: bool = False  # a word that is a token is taken without merging
    add_bos: bool = False  # unless the file says otherwise


# The expressions are those of the models' own tokenizer.json and of llama.cpp, which spells
# `(?i:'s|'t|...)` out, because the flag would also match U+017F as an s.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _PreTokenizer(
    (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",), whole_words=True, add_bos=True
)
_QWEN2 = _PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",))
_PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-2": _PreTokenizer((_GPT2,)),
    "default": _PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


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
_BYTES_NOT_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))


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
        ids = {text: i for i, text in enumerate(self._texts)}
        if len(ids) != self.n_vocab:
            i, text = next((i, t) for i, t in enumerate(self._texts) if ids[t] != i)
            raise ValueError(
                f"tokenizer.ggml.tokens: tokens {i} and {ids[text]} are both {reprlib.repr(text)}"
            )
        self._types = _read_types(metadata, self._texts)

        # llama.cpp's defaults for `llama`. Its defaults for `gpt2` (11 for both) are no text
        # boundary in any vocabulary of today, so such a file must name its own.
        default = (1, 2) if pre is None else (None, None)
        self.bos_id = _read_id(metadata, "bos", self.n_vocab, default[0])
        self.eos_id = _read_id(metadata, "eos", self.n_vocab, default[1])
        self.add_bos = _read_flag(metadata, "add_bos_token", pre is None or pre.add_bos)
        if self.add_bos and self.bos_id is None:
            raise ValueError(
                "tokenizer.ggml.add_bos_token is true, but there is no tokenizer.ggml.bos_token_id"
            )
        self.eog_ids = self._find_ends(metadata, ids)

        self._space_prefix = False
        if pre is None:
            self._space_prefix = _read_flag(metadata, "add_space_prefix", True)
            self._merge = _sentencepiece(self._texts, _read_scores(metadata, self.n_vocab))
        else:
            self._merge = _byte_level(ids, _read_texts(metadata, "merges"), pre)
        self._is_byte_level = pre is not None

        # The longest are first; control tokens count only if the caller asks for them.
        matched = {_UNKNOWN, _CONTROL, _USER_DEFINED}
        self._special = sorted(
            (i for i in range(self.n_vocab) if self._types[i] in matched),
            key=lambda i: -len(self._texts[i].encode()),
        )
        self._user_defined = [i for i in self._special if self._types[i] == _USER_DEFINED]

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

    def _find_ends(self, metadata: Mapping[str, Any], ids: Mapping[str, int]) -> frozenset[int]:
        """Find the ids that end a generation, and mark tokens known by text as control tokens."""
        ends = {ids[text] for text in _END_TEXTS if text in ids}
        for i in ends:
            self._types[i] = _CONTROL
        for role, texts in _FIM_TEXTS.items():
            token = _read_id(metadata, role, self.n_vocab, None)
            if token is None and (found := [ids[text] for text in texts if text in ids]):
                token = found[0]
                self._types[token] = _CONTROL
            if token is not None and role in _FIM_END_ROLES:
                ends.add(token)
        named = (self.eos_id, *(_read_id(metadata, n, self.n_vocab, None) for n in ("eot", "eom")))
        return frozenset(ends.union(i for i in named if i is not None))

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

    def _cut(self, text: str, special_ids: Sequence[int]) -> list[str | int]:
        """Cut a text at the special tokens in it, in the order of `special_ids`."""
        parts: list[str | int] = [text] if text else []
        for i in special_ids:
            special = self._texts[i]
            if special not in text:
                continue  # nearly always
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                first, *others = part.split(special)
                if first:
                    cut.append(first)
                for other in others:
                    cut.append(i)
                    if other:
                        cut.append(other)
            parts = cut
        return parts

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
        return text.replace(_SPACE, " ").encode()


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


def _sentencepiece(texts: Sequence[str], scores: Sequence[float]) -> Callable[[str], list[int]]:
    """Merge by score, with a SentencePiece model made from the vocabulary.

    The library's own treatment of spaces and special symbols is off: the text is cut already, and
    every token but the bytes is a normal one, since llama.cpp merges into any.
    """
    missing = _BYTE_TOKENS.difference(texts)
    if missing:
        raise ValueError(
            f"tokenizer.ggml.tokens: expected a token for each byte, <0x00> to <0xFF>; "
            f"{len(missing)} are missing, first {min(missing)}"
        )
    # The model is a protocol buffer (sentencepiece_model.proto), whose wire format is
    # (field << 3 | kind), value; kind 0 is an integer, 2 a length and bytes, 5 four bytes.
    pieces = [
        _message(0x0A, text.encode())
        + struct.pack("<BfBB", 0x15, score, 0x18, 6 if text in _BYTE_TOKENS else 1)
        for text, score in zip(texts, scores, strict=True)
    ]
    # SentencePiece needs an unknown token, which is never used since all bytes are there.
    unknown = "<unk>"
    while unknown in texts:
        unknown += "?"
    pieces.append(_message(0x0A, unknown.encode()) + b"\x18\x02")
    model = b"".join(_message(0x0A, piece) for piece in pieces)
    # trainer_spec: model_type (3) = BPE, byte_fallback (35) = true.
    model += _message(0x12, b"\x18\x02" + b"\x98\x02\x01")
    # normalizer_spec: add_dummy_prefix (3), remove_extra_whitespaces (4), escape_whitespaces (5)
    # = false, and no character map.
    model += _message(0x1A, b"\x18\x00\x20\x00\x28\x00")
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"tokenizer.ggml.tokens: SentencePiece refuses them: {error}") from error

    def merge(text: str) -> list[int]:
        ids: list[int] = processor.encode(text.replace(" ", _SPACE))
        return ids

    return merge


def _message(tag: int, data: bytes) -> bytes:
    """Return a length-delimited field of a protocol buffer."""
    size, length = len(data), bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes((tag, *length)) + data


def _byte_level(
    ids: dict[str, int], merges: Sequence[str], pre: _PreTokenizer
) -> Callable[[str], list[int]]:
    """Merge by rank: cut into words, write their bytes in the alphabet, and merge."""
    missing = [
        byte
        for byte, char in enumerate(_ALPHABET)
        if char not in ids and byte not in _BYTES_NOT_IN_UTF8
    ]
    if missing:
        raise ValueError(
            f"tokenizer.ggml.tokens: expected a token for each byte; {len(missing)} are missing, "
            f"first 0x{missing[0]:02X} (written {_ALPHABET[missing[0]]!r})"
        )
    # If a merge occurs twice, the first one counts.
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in dict.fromkeys(merges))]
    try:
        bpe = tokenizers.models.BPE(vocab=ids, merges=pairs, ignore_merges=pre.whole_words)
    except Exception as error:  # the library raises no class of its own
        raise ValueError(f"tokenizer.ggml.merges: {error}") from error
    tokenizer = tokenizers.Tokenizer(bpe)
    steps = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = steps.Sequence(
        [steps.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
        + [steps.ByteLevel(add_prefix_space=False, use_regex=False)]
    )

    def merge(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    return merge


def _read_pre_tokenizer(metadata: Mapping[str, Any]) -> _PreTokenizer | None:
    """Read how `gpt2` cuts words; None for `llama`, which does not."""
    model = metadata.get("tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if isinstance(model, str) and model == "llama":
        return None
    if isinstance(model, str) and model == "gpt2":
        if isinstance(pre, str) and pre in _PRE_TOKENIZERS:
            return _PRE_TOKENIZERS[pre]
        has = f"model 'gpt2' with tokenizer.ggml.pre {reprlib.repr(pre)}"
    else:
        has = "none" if model is None else f"model {reprlib.repr(model)}"
    raise UnsupportedTokenizer(
        f"tokenizer.ggml.model: the file has {has}; supported are 'llama' (SentencePiece) and "
        f"'gpt2' (byte-level BPE) with tokenizer.ggml.pre {', '.join(map(repr, _PRE_TOKENIZERS))}"
    )


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
