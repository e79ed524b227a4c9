"""`unimem store show | drop | verify | pin | unpin`: the chunks on a store's disk."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from typing import Any

import typer

from unimem.base.text import escape, format_bytes, format_count
from unimem.cli import terminal
from unimem.cli.exits import FAILED
from unimem.cli.terminal import document_head
from unimem.kv.store import notes
from unimem.kv.store.inventory import ChunkNode, Inventory, StoredChunk, find_damaged, total_of
from unimem.kv.store.store import KVStore
from unimem.llama_cpp.stored import stored_prefixes

_SCHEMA = "unimem.store-chunks/1"
_LEAST_KEY = 4
_SHOWN_KEY, _SHOWN_MODEL = 16, 40
_TIME = re.compile(r"([0-9]{1,6})([smhd])", re.A)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DONE = {"drop": "dropped", "pin": "pinned", "unpin": "unpinned"}


def parse_seconds(text: str) -> float:
    """Return the seconds of a time such as ``30d``, ``12h``, ``90m`` or ``10s``."""
    found = _TIME.fullmatch(str(text))
    if found is None:
        raise typer.BadParameter(f"expected a time, as 30d, 12h, 90m or 10s; got {text!r:.40}")
    return float(int(found[1]) * _SECONDS[found[2]])


class ChunkWork:
    """One command on the chunks of an open store; only on those of a model, if there is one."""

    def __init__(self, store: KVStore, model: str | None, *, as_json: bool) -> None:
        if store._disk is None:
            raise ValueError(f"{store!r} has no chunks on a disk: expected a folder")
        self._store, self._disk, self._as_json, self._model = store, store._disk, as_json, model
        self._now = time.time()

    def run(self, action: str, words: list[str], seconds: float | None, *, drops: bool) -> None:
        """Do it, and show what was done."""
        done: dict[str, Any] = {"action": action, "n_chunks": 0, "nbytes": 0, "n_kept": 0}
        done["damaged"] = []
        if action == "verify":
            self._verify(done, drops=drops)
        elif action != "show":
            found = Inventory(self._disk)
            for chunk in self._chosen(found, words, seconds, drops=action == "drop"):
                is_done = self._change(action, chunk, seconds)
                done["n_chunks" if is_done else "n_kept"] += 1
                done["nbytes"] += chunk.nbytes * is_done
        self._show(Inventory(self._disk), done)
        if done["damaged"]:
            raise typer.Exit(FAILED)

    def _is_of_model(self, chunk: StoredChunk) -> bool:
        return self._model in (None, chunk.model)

    def _chosen(
        self, found: Inventory, words: list[str], seconds: float | None, *, drops: bool
    ) -> list[StoredChunk]:
        """List the chunks that a command means, each once."""
        chunks: Iterable[StoredChunk] = found.chunks.values()
        if not words and seconds is not None:
            chunks = [chunk for chunk in chunks if chunk.used < self._now - seconds]
        elif words != ["all"]:
            chunks = [chunk for word in words for chunk in self._named(found, word, drops=drops)]
        unique = {chunk.key: chunk for chunk in chunks if self._is_of_model(chunk)}
        return list(unique.values())

    def _named(self, found: Inventory, word: str, *, drops: bool) -> list[StoredChunk]:
        """List the chunks of the conversation that a key names."""
        nodes = [node for node in found.nodes.values() if node.at.startswith(word)]
        prefixes = stored_prefixes(self._store)
        named = [prefix for prefix in prefixes if prefix.key.startswith(word)]
        if len(word) < _LEAST_KEY or len(nodes) + len(named) != 1:
            raise ValueError(
                f"{word:.40}: expected all, or the beginning of one key, at least {_LEAST_KEY} "
                f"digits, got one of {len(nodes) + len(named)}: unimem store show, "
                "unimem store list"
            )
        if nodes:
            return found.only(nodes[0]) if drops else found.path(nodes[0])
        others = [prefix.chunks for prefix in prefixes if prefix is not named[0] and drops]
        keys = set(named[0].chunks).difference(*others)
        return [found.chunks[key] for key in sorted(keys) if key in found.chunks]

    def _change(self, action: str, chunk: StoredChunk, seconds: float | None) -> bool:
        """Drop, pin or unpin a chunk; return False if it stays as it was."""
        key = bytes.fromhex(chunk.key)
        if action == "drop":
            return self._disk.drop(key) > 0
        until = None if action == "unpin" else notes.FOR_EVER
        if until is not None and seconds is not None:
            until = min(int((self._now + seconds) * 1e9), notes.FOR_EVER)
        try:
            notes.pin(self._disk.path_of(key), until)
        except FileNotFoundError:  # another process has dropped it
            return False
        return True

    def _verify(self, done: dict[str, Any], *, drops: bool) -> None:
        chunks = Inventory(self._disk).chunks.values()
        total = sum(chunk.nbytes for chunk in chunks if self._is_of_model(chunk))
        with terminal.updates("verifying") as progress:
            for key, nbytes, fault in find_damaged(self._disk, self._model):
                done["n_chunks"] += 1
                done["nbytes"] += nbytes
                progress(min(done["nbytes"], total), total)
                if fault is not None:
                    done["damaged"].append({"key": key, "nbytes": nbytes, "fault": fault})
                    if drops:
                        self._disk.remove(bytes.fromhex(key))

    # ---- what is shown ----

    def _show(self, found: Inventory, done: dict[str, Any]) -> None:
        chunks = [chunk for chunk in found.chunks.values() if self._is_of_model(chunk)]
        models: dict[tuple[str, str, str, str], list[StoredChunk]] = {}
        for chunk in chunks:
            models.setdefault(chunk.namespace, []).append(chunk)
        by_use = sorted(models.values(), key=lambda each: max(c.used for c in each), reverse=True)
        prefixes = [
            self._prefix(found, node) for node in found.ends() if self._is_of_model(node.chunks[0])
        ]
        tiers = [tier._asdict() for tier in self._store.stat().tiers]
        if self._as_json:
            document = {"store": self._store.url or self._store.folder, "tiers": tiers}
            document |= {
                "models": [total_of(each)._asdict() for each in by_use],
                "prefixes": prefixes,
            } | done
            terminal.show(json.dumps(document_head(_SCHEMA) | document) + "\n")
            return
        if done["action"] in _DONE:
            kept = f"; {done['n_kept']} pinned or in use" if done["n_kept"] else ""
            _say(f"{_counted(done)} {_DONE[done['action']]}{kept}")
        elif done["action"] == "verify":
            for each in done["damaged"]:
                _say(f"damaged: {each['key']}: {each['fault']}")
            _say(f"{_counted(done)} read, {len(done['damaged'])} damaged")
        else:
            for each in by_use:
                _say(_line(total_of(each)._asdict()))
                for prefix in prefixes:
                    if all(prefix[name] == getattr(each[0], name) for name in _NAMES):
                        _say(f"    {_line(prefix)}")
            for tier in tiers:
                size = f"{format_bytes(tier['nbytes'])} of {format_bytes(tier['budget_bytes'])}"
                n = format_count(tier["n_chunks"], "chunk")
                _say(f"{tier['name']}: {n}, {size}: {tier['path']}")

    def _prefix(self, found: Inventory, node: ChunkNode) -> dict[str, Any]:
        """Sum up a conversation; its hits are those of its last chunk."""
        own = {"hits": max(chunk.hits for chunk in node.chunks)} | _pin_of(node.chunks)
        of = {"key": node.at, "n_tokens": node.end, "n_branches": len(node.children)}
        return of | found.total(node)._asdict() | own


_NAMES = "engine model layout tenant".split()


def _pin_of(chunks: list[StoredChunk]) -> dict[str, Any]:
    """Say whether chunks are all pinned, and for how long: a time, or null for ever."""
    ends = [chunk.pinned_until for chunk in chunks]
    first = min((end for end in ends if end is not None), default=None)
    is_pinned = None not in ends
    until = None if not is_pinned or first in (None, notes.FOR_EVER) else first / 1e9
    return {"pinned": is_pinned, "pinned_until": until}


def _line(facts: dict[str, Any]) -> str:
    """Write one line for a model, or for a prefix."""
    if "key" in facts:
        words = [f"{facts['key'][:_SHOWN_KEY]}  {format_count(facts['n_tokens'], 'token')}"]
        if facts["n_branches"]:
            words.append(f"shared by {facts['n_branches']}")
    else:
        tenant = f", tenant {facts['tenant']}" if facts["tenant"] else ""
        name = facts["model"][:_SHOWN_MODEL] or "a model that is not known"
        words = [f"{facts['engine'] or 'an engine'}, {name}{tenant}"]
        words.append(format_count(facts["n_chunks"], "chunk"))
    words += [format_bytes(facts["nbytes"]), format_count(facts["hits"], "hit")]
    words.append(f"used {_time(facts['used'])}")
    if facts["made"] is not None:
        words.append(f"made {_time(facts['made'])}")
    if facts.get("pinned"):
        until = facts["pinned_until"]
        words.append("pinned" if until is None else f"pinned until {_time(until)}")
    elif facts["pinned_chunks"] and "key" not in facts:
        words.append(f"{facts['pinned_chunks']} pinned")
    return ", ".join(words)


def _counted(done: dict[str, Any]) -> str:
    return f"{format_count(done['n_chunks'], 'chunk')}, {format_bytes(done['nbytes'])}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _say(text: str) -> None:
    terminal.show(f"{escape(text)}\n")
