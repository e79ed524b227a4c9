"""Ten questions of a user. A quick run measures first what answers them."""

from __future__ import annotations

from typing import NamedTuple

from unimem_bench.record import BEST


class Question(NamedTuple):
    """A question, and the target that answers it."""

    text: str
    case: str  # the target's, as ``suite/name``
    other: str | None = None  # the side that the target compares with, where it does


QUESTIONS = (
    Question("How much of a token's time is bookkeeping in Python?", "decode/python-q8_0"),
    Question("Is decode as fast as llama.cpp's?", "decode/decode-q8_0", "llama.cpp"),
    Question("And with Q4_K_M weights?", "decode/decode-q4_k_m", "llama.cpp"),
    Question(
        "Is a prompt computed as fast, with such weights?", "decode/prefill-q4_k_m", "llama.cpp"
    ),
    Question("What does it cost to append a token to the KV cache?", "kv/append", "NumPy"),
    Question("Does a token cost more late in a conversation?", "scaling/append-after"),
    Question("How long until a model on the disk is in memory?", "load/cold", BEST),
    Question(
        "How soon does llama.cpp start from a staged model?",
        "load/staged",
        "the file, as it was written",
    ),
    Question("How fast is a snapshot saved?", "snapshot/save", "write, fsync"),
    Question("How soon does a saved conversation go on?", "snapshot/first-token", "prefill"),
)
