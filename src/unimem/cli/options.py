"""Options that several commands share."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from unimem.kv.types import KV_TYPES, kv_name, kv_pair
from unimem.planning.plan import DEFAULT_CTX
from unimem.remote.client import is_url
from unimem.system.placement import Pages
from unimem.system.policy import parse_numa
from unimem.weights.loading import EngineLoad

if TYPE_CHECKING:
    from unimem.engine.sampling import Sampling

# K is 1024, as in the sizes that commands write.
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)(?:([kmgt])(?:i?b)?)?", re.I | re.A)
_MOST_SALT = 4096  # characters
_SCALES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def value_option(metavar: str, text: str, *names: str, **more: Any) -> Any:
    """Make an option whose help text names its default."""
    return typer.Option(*names, metavar=metavar, help=text, show_default=False, **more)


def number_parser(least: int, most: int, examples: str) -> Callable[[str], int]:
    """Make the parser of an option for a number of tokens or bytes, such as ``8k`` or ``16G``.

    Its typer.BadParameter names the range and the examples.
    """

    def parse(text: str) -> int:
        found = _NUMBER.fullmatch(str(text))  # Typer gives it defaults, which may be numbers
        if found is not None:
            value = Fraction(found[1]) * _SCALES[(found[2] or "").lower()]
            if value.denominator == 1 and least <= value <= most:
                return int(value)
        raise typer.BadParameter(
            f"expected a whole number from {least} to {most}, as {examples}; got {text!r:.40}"
        )

    return parse


def read_salt(path: str) -> str:
    """Return the secret of a tenant from a file: every user can read the arguments of a process."""
    try:
        with open(path, encoding="utf-8") as file:
            salt = file.read(_MOST_SALT + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"expected a file with a text in UTF-8: {error}") from None
    if not 0 < len(salt) <= _MOST_SALT:
        raise typer.BadParameter(
            f"{path}: expected a text of 1 to {_MOST_SALT} characters, as `openssl rand -hex 16` "
            f"writes, got {len(salt) if len(salt) <= _MOST_SALT else 'more'}"
        )
    return salt


def salt_of(salt: str | None, store: str | None) -> str:
    """Return the salt of a store, by default the empty one; refuse one without a store."""
    if salt is not None and store is None:
        raise typer.BadParameter("--salt-file is for --store: leave it out, or name a store")
    return salt or ""


parse_tokens = number_parser(1, 2**31 - 1, "512, 8192 or 8k")

Ctx = Annotated[
    int | None,
    value_option(
        "N",
        "Tokens of context, as 8192 or 8k. [default: the smallest of the model's, "
        f"{DEFAULT_CTX}, and what fits]",
        parser=parse_tokens,
    ),
]
Salt = Annotated[
    str | None,
    value_option(
        "FILE",
        "A file with the secret of a tenant, who then finds no stored tokens but its own. "
        "[default: none]",
        "--salt-file",
        parser=read_salt,
    ),
]
Threads = Annotated[
    int | None,
    value_option(
        "N",
        "Threads that compute. [default: one per 32 MiB of weights, at most one per core]",
        min=1,
        max=512,
    ),
]


def _parse_kv_type(text: str) -> str:
    try:
        return kv_name(*kv_pair(text))
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("kv_dtype: ")) from None


KVType = Annotated[
    str,
    typer.Option(
        parser=_parse_kv_type,
        metavar="|".join(KV_TYPES),
        autocompletion=lambda: list(KV_TYPES),
        help="Type of the KV cache; two, as q8_0,q4_0, are those of K and of V.",
    ),
]
Rotate = Annotated[
    bool | None,
    typer.Option(
        "--rotate/--no-rotate",
        help="Store heads rotated, so that quantizing them changes less. [default: if the KV "
        "cache is quantized, and heads have a multiple of 64 values]",
        show_default=False,
    ),
]
Window = Annotated[
    int | None,
    value_option(
        "N",
        "Tokens that attention sees, as 4k; the KV cache is a ring of these. [default: all]",
        parser=parse_tokens,
    ),
]
LoadMode = Annotated[
    EngineLoad,
    typer.Option(
        metavar="|".join(get_args(EngineLoad)),
        help="How the model comes into memory: mapped, copied through the page cache, read past "
        "it, or repacked in the order that this CPU multiplies fastest; auto repacks a model that "
        "gains by it, and maps others if that satisfies --pages and --numa.",
    ),
]
WeightsBudget = Annotated[
    str | None,
    value_option(
        "SIZE",
        "The most memory that streamed weights take, as 8G or 50%; with it, a model is streamed. "
        "[default: what there is room for]",
    ),
]
PageSize = Annotated[
    Pages,
    typer.Option(
        metavar="|".join(get_args(Pages)),
        help="Pages of the KV cache, scratch memory, and a model that is read.",
    ),
]
NumaNodes = Annotated[
    str | None,
    value_option(
        "MODE[:NODES]",
        "NUMA nodes of the same: bind:0,2-3, preferred:1, interleave or weighted. [default: none]",
    ),
]
NumaOfModel = Annotated[
    str | None,
    value_option(
        "MODE[:NODES]",
        "NUMA nodes of the same: bind:0,2-3, preferred:1, interleave or weighted; or mirror, "
        "a copy of the model on each node. [default: none]",
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        min=0, metavar="X", help="0 takes the likeliest token each time; more adds chance."
    ),
]
TopK = Annotated[
    int, typer.Option(min=0, metavar="N", help="Choose among the N likeliest tokens; 0 for all.")
]
TopP = Annotated[
    float,
    typer.Option(
        metavar="X", help="Of these, choose among the fewest whose probabilities sum up to X."
    ),
]
SamplingSeed = Annotated[
    int | None,
    value_option("N", "Same seed, same text. [default: a new one each time]", "--seed", min=0),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Say in full what memory is not placed as asked for.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead (see docs/cli.md).")
]


def check_numa(numa: str | None, *, mirror: bool = False) -> None:
    """Refuse a value that is none of `NumaNodes`, or with `mirror` `NumaOfModel`."""
    try:
        parse_numa(numa, mirror=mirror)
    except ValueError as error:
        raise typer.BadParameter(f"--{error}") from None


@contextmanager
def check_window() -> Iterator[None]:
    """Refuse a `Window` beyond the context, which depends on the model's file, as wrong usage."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith("window: "):
            raise typer.BadParameter(f"--{error}") from None
        raise


def model_path(text: str) -> Path:
    """Return the path of a model file; refuse "", which `Path` takes for the current folder."""
    if not text:
        raise typer.BadParameter("expected the path of a model, got ''")
    return Path(text)


def path_or_url(text: str) -> Path | str:
    """Return the path of a model file, as `model_path`; a URL stays unchanged."""
    return text if is_url(text) else model_path(text)


def parse_sampling(temperature: float, top_k: int, top_p: float, seed: int | None) -> Sampling:
    """Make the checked options of sampling, with a seed of chance where one is needed."""
    from unimem.engine.sampling import Sampling

    if seed is None and temperature > 0:
        seed = secrets.randbits(32)  # so that the run can be repeated
    try:
        return Sampling(temperature, top_k, top_p, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
