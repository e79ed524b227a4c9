"""`unimem cache`: the repacked images on disk."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated, Any, Literal

import typer

from unimem.base.cache_folder import cache_folder
from unimem.base.text import escape, format_bytes, format_count
from unimem.cli import terminal
from unimem.cli.exits import FAILED
from unimem.cli.options import AsJson
from unimem.cli.terminal import document_head
from unimem.weights.repack.image_cache import CachedImage, ImageCache

_SCHEMA = "unimem.cache/1"
_LEAST_KEY = 4


def cache(
    action: Annotated[
        Literal["list", "drop", "verify"],
        typer.Argument(
            metavar="list|drop|verify",
            help="list: show the images. drop: remove some. verify: read them, compare every "
            "checksum, and remove those that are damaged.",
        ),
    ],
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY|MODEL|stale|all",
            help="Which: the beginning of a key, a model, those whose model has changed or is "
            "gone, or all. [default: all, but for drop]",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With drop, say what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show, remove or check the repacked models kept on disk.

    `unimem store` has prefixes.
    """
    if dry_run and action != "drop":
        raise typer.BadParameter("--dry-run is for drop")
    if what is None and action == "drop":
        raise typer.BadParameter("drop: expected KEY, MODEL, stale or all")
    folder = cache_folder()
    store = ImageCache(folder) if folder is not None and os.path.exists(folder) else None
    found = [] if store is None else _choose(store.images(), what)
    if action == "drop" and store is not None and not dry_run:
        store.drop(found)
    if action == "verify" and store is not None:
        found = [_verified(store, image) for image in found]
    if as_json:
        terminal.show(json.dumps(_document(folder, store, found, action)) + "\n")
    else:
        _show(folder, found, "would drop" if dry_run else _DONE[action])
    if action == "verify" and any(image.problem for image in found):
        raise typer.Exit(FAILED)


_DONE = {"list": "", "drop": "dropped", "verify": "verified"}


def _choose(images: list[CachedImage], what: str | None) -> list[CachedImage]:
    if what in (None, "all"):
        return images
    if what == "stale":
        return [image for image in images if not image.current]
    path = os.path.realpath(what)
    found = [
        image
        for image in images
        if image.model == path or (len(what) >= _LEAST_KEY and image.key.startswith(what))
    ]
    if not found:
        raise ValueError(f"{what}: no image is kept under this name: unimem cache list")
    return found


def _verified(store: ImageCache, image: CachedImage) -> CachedImage:
    with terminal.updates("verifying") as progress:
        problem = store.verify(image, progress)
    return image._replace(problem=problem)


def _document(
    folder: str | None, store: ImageCache | None, found: list[CachedImage], action: str
) -> dict[str, Any]:
    return document_head(_SCHEMA) | {
        "folder": folder,
        "action": action,
        "limit_bytes": None if store is None else store.most_bytes(),
        "images": [image._asdict() for image in found],
    }


def _show(folder: str | None, found: list[CachedImage], done: str) -> None:
    for image in found:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(image.used))
        state = "current" if image.current else "the model has changed, or is gone"
        if image.problem is not None:
            state = image.problem
        head = f"{done}: " if done else ""
        text = f"{head}{image.key[:16]}  {format_bytes(image.nbytes)}, used {used}, {state}"
        terminal.show(f"{escape(text)}\n    {escape(image.model or image.path)}\n")
    if not found:
        where = "it is off (UNIMEM_CACHE=off)" if folder is None else escape(folder)
        terminal.show(f"no image in the cache: {where}\n")
    else:
        total = format_bytes(sum(image.nbytes for image in found))
        terminal.show(f"{format_count(len(found), 'image')}, {total}: {escape(folder or '')}\n")
