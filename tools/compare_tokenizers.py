# ruff: noqa: RUF001 - characters of many scripts are meant
"""Compares the tokenizer with the newest llama.cpp, for every name of a pre-tokenizer.

``tools/compare_tokenizers.py --llama PYTHON`` makes a vocabulary for each name, tokenizes 300 texts
with both, and prints a table of differences. PYTHON is one that has the wheel of `xllamacpp`; the
package needs the extras ``run`` and ``test``. ``--record`` writes the vocabularies, the texts and
llama.cpp's ids into ``tests/engine/text/data``, where a test holds the tokenizer to them.
``--json FILE --only NAME`` takes the vocabulary of a model's own ``tokenizer.json`` for this name.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import llama_peer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.models import tokenizer_models  # noqa: E402
from unimem.engine.text.pre_tokenizers import PRE_TOKENIZERS  # noqa: E402
from unimem.engine.text.tokenizer import Tokenizer  # noqa: E402

RECORD = ROOT / "tests/engine/text/data/llama_cpp_ids.json.xz"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_ADDED = {
    **dict.fromkeys(("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_end|>|"), _CONTROL),
    **dict.fromkeys(("<mask>", "[MASK]", "<|end|>", "<|endoftext|>", "<|user|>"), _CONTROL),
    **dict.fromkeys(("<tool_call>", "</tool_call>", "    "), _USER_DEFINED),
    "<unk>": _UNKNOWN,
}
# Each set ends a generation, or does not, by rules of its own.
_ENDS = {
    "harmony": ("<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|start|>"),
    "solar": ("<|flush|>", "<|calls|>", "<|constrain|>"),
    "gemma": ("<turn|>", "<|tool_response>", "<eos>"),
    "others": ("[e~[", "<|ifm|im_end|>", "[EOS]", "[PAD]", "<｜fim▁end｜>", "<|code_prefix|>"),
}
_WORDS = "don't I'LL we've He'S it'd THEY'RE 'tis o'clock l'été HTTPServer camelCase ALLCAPS iPhone"
_WHOLE = ("internationalization", "\u0120internationalization")  # reached by no merge
_CODE = (
    "def f(x, *, y=None):\n    return x[0:{a}] + y // {b}\n",
    'for (int i = {a}; i < {b}; ++i) {{\n\tprintf("%d\\n", i);\n}}\n',
    '<a href="https://example.org/{a}?q={b}#top">&amp;</a>\r\n',
    "SELECT * FROM t{a} WHERE id != {b} -- all\n",
    "x{a} = {{'k': [{b}, -1.5e-{a}], \"s\": `z`}} /* done */\n\n",
    "C:\\dir\\file{a}.txt && rm -rf ~/$HOME/{b} || exit 1\n",
)
_SCRIPTS = (
    (0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x17F), (0x370, 0x3FF), (0x400, 0x45F), (0x531, 0x587),
    (0x5D0, 0x5EA), (0x620, 0x669), (0x900, 0x96F), (0x985, 0x9D0), (0xB85, 0xBCD), (0xC05, 0xC4D),
    (0xE01, 0xE4E), (0xE81, 0xEC4), (0x1000, 0x1049), (0x10A0, 0x10FF), (0x1100, 0x1112),
    (0x1200, 0x1248), (0x13A0, 0x13F4), (0x1780, 0x17E9), (0x1E00, 0x1EFF), (0x3041, 0x3096),
    (0x30A1, 0x30FE), (0x4E00, 0x4E80), (0x9F00, 0x9FA5), (0x3400, 0x3420), (0x20000, 0x20010),
    (0xAC00, 0xAC60), (0x3131, 0x3163), (0xFF01, 0xFF5E), (0x10400, 0x10440), (0x1D400, 0x1D430),
    (0x2C00, 0x2C5F), (0xA640, 0xA66D), (0xAB70, 0xABBF), (0xFB00, 0xFB06), (0x2160, 0x2188),
)  # fmt: skip
_SPACES = "  \t\n\n\r\v\f\x1c\x85\xa0\u1680\u2003\u2028\u202f\u205f\u3000\u200b\ufeff"
_SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~§©±¿÷–—‘’“”…€№™→∑∞、。「」！？《》・।،؟۔"
_EMOJI = "😀 👍🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️ ☃ ✓ 1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🫶🏿 ♟︎".split(" ")
_DIGITS = ("0123456789", "٠١٢٣٤٥٦٧٨٩", "०१२३४५६७८९", "０１２３４５６７８９", "½²Ⅷ⑤")


def _word(rng: random.Random) -> str:
    low, high = rng.choice(_SCRIPTS)
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 9)))


def _number(rng: random.Random) -> str:
    digits = rng.choice([_DIGITS[0]] * 4 + list(_DIGITS))
    text = "".join(rng.choices(digits, k=rng.randint(1, 14)))
    return rng.choice(["", "", "$", "-", "v", "x"]) + text + rng.choice(["", "", ",", ".5", "%"])


def _text(rng: random.Random, kind: int) -> str:
    """Return a text of one of six kinds."""

    def several(pieces: list[str], low: int, high: int, between: list[str]) -> str:
        return "".join(
            rng.choice(pieces) + rng.choice(between) for _ in range(rng.randint(low, high))
        )

    words = [*_WORDS.split(), _WHOLE[0], *(_word(rng) for _ in range(12))]
    signs, numbers = list(_SIGNS), [_number(rng) for _ in range(8)]
    spaces = ["".join(rng.choices(_SPACES, k=rng.randint(1, 5))) for _ in range(8)]
    if kind == 0:
        a, b = rng.randint(0, 99999), rng.randint(0, 9)
        return "".join(rng.choice(_CODE).format(a=a, b=b) for _ in range(2))
    between = [" ", " ", "", "  "] if kind == 1 else [" ", " ", ""]
    pieces = [
        numbers + words[:2],
        words,
        [*_EMOJI, *words[:3]],
        [*spaces, *spaces, *words, *numbers[:2]],
        [*_ADDED, *_ADDED, *sum(_ENDS.values(), ()), " ", "\n", " \n\n", *words[:6]],
    ][kind - 1]
    made = several(pieces + signs[: rng.randint(0, len(signs))][-8:], 2, 12, between)
    return made[: rng.randint(len(made) // 2, len(made))] if kind != 5 else made


def texts(seed: int, n: int) -> list[str]:
    """Return `n` texts: code, numbers, scripts, emoji, white space, special tokens, in turn."""
    rng = random.Random(seed)
    found = ["", " ", "\n", "a", " a", "'ſ ", *tokenizer_models.PAGE.split("\n\n")]
    while len(found) < n:
        text = _text(rng, len(found) % 6)
        if "\0" not in text:
            found.append(text)
    return found


def _trained(raw: bool) -> dict[str, Any]:
    """Return tokens and merges, trained without cutting words, so that a wrong cut shows."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    corpus = tokenizer_models.corpus() + texts(1, 3000)
    tokenizer = Tokenizer(models.BPE())
    if raw:
        corpus = [line.replace(" ", "\u2581") for text in corpus for line in text.split("\n")]
        options: dict[str, Any] = {"limit_alphabet": 300}
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        options = {"initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet())}
    trainer = trainers.BpeTrainer(
        vocab_size=2500, show_progress=False, max_token_length=10, **options
    )
    tokenizer.train_from_iterator(corpus, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {"tokens": tokens, "merges": [" ".join(merge) for merge in model["merges"]]}


def vocabularies() -> dict[str, dict[str, Any]]:
    """Return the metadata of each vocabulary, without its pre-tokenizer."""

    def whole(
        model: str, made: dict[str, Any], front: dict[str, int], behind: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        added = {text: kind for text, kind in _ADDED.items() if text not in front}
        added |= dict.fromkeys(behind, _NORMAL)
        tokens = [
            *front,
            *(t for t in made["tokens"] if t not in added and t not in front),
            *added,
        ]
        types = {**front, **added}
        return {
            "model": model,
            "tokens": tokens,
            "token_type": [types.get(token, _NORMAL) for token in tokens],
            "bos_token_id": tokens.index("<s>"),
            "eos_token_id": tokens.index("</s>"),
            **({"merges": made["merges"]} if "merges" in made else {}),
        }

    bytes_ = {"<unk>": _UNKNOWN} | {f"<0x{byte:02X}>": _BYTE for byte in range(256)}
    lines = dict.fromkeys(("\n", "\n\n", "\n\n\n"), _NORMAL)
    spm = tokenizer_models.spm_vocab()
    scores = spm.metadata["tokenizer.ggml.scores"].tolist()
    n = len(spm.tokens) - len(tokenizer_models.ADDED)
    made = {"tokens": spm.tokens[:n]}
    trained, front = _trained(raw=False), dict.fromkeys(_WHOLE, _NORMAL)
    found = {
        "bytes": whole("gpt2", trained, front),
        **{name: whole("gpt2", trained, front, more) for name, more in _ENDS.items()},
        "raw": whole("gpt2", _trained(raw=True), bytes_ | lines),
        "spm": whole("llama", made, dict(zip(spm.tokens[:n], spm.types[:n], strict=True))),
    }
    found["spm"]["scores"] = scores[:n] + [0.0] * (len(found["spm"]["tokens"]) - n)
    # As SmolLM2 has it: bytes without a token, and here also results of merges.
    lacking = {*"ÀÁõö÷øùú", *found["bytes"]["tokens"][400:410], *found["bytes"]["tokens"][900:905]}
    tokens = [f"[gone {i}]" if t in lacking else t for i, t in enumerate(found["bytes"]["tokens"])]
    found["lacking"] = found["bytes"] | {"tokens": tokens}
    return found


def own_vocabulary(path: Path) -> dict[str, Any]:
    """Return the metadata of a ``tokenizer.json`` of byte pairs."""
    made = json.loads(path.read_text(encoding="utf-8"))
    added = {each["id"]: each for each in made["added_tokens"]}
    of_id = {i: token for token, i in made["model"]["vocab"].items()}
    of_id |= {i: each["content"] for i, each in added.items()}
    ids = range(max(of_id) + 1)
    merges = made["model"]["merges"]
    return {
        "model": "gpt2",
        "tokens": [of_id.get(i, f"[unused {i}]") for i in ids],
        "token_type": [
            (_CONTROL if added[i]["special"] else _USER_DEFINED) if i in added else _NORMAL
            for i in ids
        ],
        "bos_token_id": min(added, default=0),
        "eos_token_id": min(added, default=0),  # llama.cpp's default is 11
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
    }


def cases() -> dict[str, tuple[str, dict[str, str | bool]]]:
    """Return the vocabulary of each case, and the keys that it adds."""
    pre = "tokenizer.ggml.pre"
    found: dict[str, tuple[str, dict[str, str | bool]]] = {
        name: ("raw" if way.is_raw else "bytes", {pre: name})
        for name, way in PRE_TOKENIZERS.items()
    }
    model = "tokenizer.ggml.model"
    small: dict[str, str | bool] = {"tokenizer.ggml.normalizer.lowercase": True}
    found["whitespace"] = ("raw", found["whitespace"][1] | {model: "whitespace"})
    found["whitespace, small letters"] = ("raw", found["whitespace"][1] | small)
    found["model gemma4"] = ("raw", {model: "gemma4"})
    found["lacking bytes"] = ("lacking", {pre: "smollm"})
    found["lacking bytes, whole words"] = ("lacking", {pre: "llama-bpe"})
    found |= {f"ends of {name}": (name, {pre: "gpt-4o"}) for name in _ENDS}
    found["SentencePiece"] = ("spm", {})
    found["SentencePiece, phi-3"] = ("spm", {"general.name": "Phi-3 mini"})
    found["SentencePiece, no space in front"] = ("spm", {"tokenizer.ggml.add_space_prefix": False})
    found["name phi3"] = ("bytes", {pre: "gpt-4o", "general.name": "my-PHI3"})
    found["name modern-bert"] = ("bytes", {pre: "modern-bert", "general.name": "Modern-BERT"})
    return found


def metadata(vocabulary: dict[str, Any], keys: dict[str, str | bool]) -> dict[str, Any]:
    """Return the metadata of a file with a recorded vocabulary."""
    found = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()} | keys
    for key, kind in (("token_type", np.int32), ("scores", np.float32)):
        if f"tokenizer.ggml.{key}" in found:
            found[f"tokenizer.ggml.{key}"] = np.array(found[f"tokenizer.ggml.{key}"], kind)
    return found


def main() -> None:
    """Compare, print the table, and record llama.cpp's ids if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama", required=True, help="a Python that has xllamacpp")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", help="one case")
    parser.add_argument("--json", type=Path, help="a tokenizer.json for this case")
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of other texts")
    options = parser.parse_args()
    asked, made = texts(options.seed, options.texts), vocabularies()
    answers: list[list[list[int]]] = [[] for _ in asked]
    record: dict[str, Any] = {"texts": asked, "vocabularies": made, "cases": {}}
    rows: dict[Any, list[str]] = {}
    differing = 0
    for name, (which, keys) in cases().items():
        if options.only not in (None, name):
            continue
        whole = metadata(own_vocabulary(options.json) if options.json else made[which], keys)
        with tempfile.TemporaryDirectory() as folder:
            model = tokenizer_models.write_model(Path(folder) / "vocab.gguf", whole)
            said = llama_peer.ask(options.llama, "tokenize", model=str(model), texts=asked)
        tokenizer = Tokenizer.from_metadata(whole)
        wrong = [
            (text, ours, theirs)
            for i, text in enumerate(asked)
            for special, ids in ((False, said["plain"]), (True, said["special"]))
            if (ours := tokenizer.encode(text, special=special)) != (theirs := ids[i])
        ]
        if sorted(tokenizer.eog_ids) != said["eog"] or tokenizer.add_bos != said["add_bos"]:
            wrong.append(("ends", sorted(tokenizer.eog_ids), said["eog"]))
        # Names of one way, with the same result, are one row.
        rows.setdefault((PRE_TOKENIZERS.get(name, name), len(wrong)), []).append(f"`{name}`")
        print(name, len(wrong), file=sys.stderr, flush=True)
        differing += bool(wrong)
        for text, ours, theirs in wrong[:2]:
            shown = [[tokenizer._texts[i] for i in ids] for ids in (ours, theirs)]
            print(repr(text), *shown, sep="\n  ", file=sys.stderr)
        case: dict[str, Any] = {"vocabulary": which, "keys": keys, "ends": said["eog"]}
        for way in ("plain", "special"):
            case[way] = []
            for known, ids in zip(answers, said[way], strict=True):
                if ids not in known:
                    known.append(ids)
                case[way].append(known.index(ids))
        record["cases"][name] = case
        record["llama.cpp"] = said["version"]
    print("| case | texts | differences |\n|---|--:|--:|")
    for (_, n_wrong), names in rows.items():
        print(f"| {', '.join(names)} | {len(asked)} | {n_wrong} |")
    if options.record:
        text = json.dumps(record | {"answers": answers}, ensure_ascii=False, separators=(",", ":"))
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_bytes(lzma.compress(text.encode(), preset=9))
        print(f"{RECORD}: {RECORD.stat().st_size} bytes", file=sys.stderr)
    sys.exit(differing != 0)


if __name__ == "__main__":
    main()
