"""Decoders on the nodes of a Ray cluster: one copy of the model a node, one store of prefixes.

    python examples/ray_decoders.py MODEL STORE "Once upon a time"

MODEL is a path on the nodes, or a URL. STORE is a folder that all nodes see. The program connects
to the cluster of this machine. Each decoder tells a piece of one story: a conversation continues on
any node, and its computed tokens come from STORE.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, NamedTuple

import ray

import unimem as um
from unimem.engine import Decoder
from unimem.ray import Stager

CHUNK_TOKENS = 32


class Said(NamedTuple):
    """A piece of the story: the text, its node and process, and tokens from the store."""

    text: str
    node_id: str
    pid: int
    n_restored: int


class Teller:
    """A decoder over the copy of its node; an actor."""

    def __init__(self, stager: Stager, store: str, ctx: int) -> None:
        # RAM would be faster than a folder on a network, which is enough here.
        self._store = um.KVStore(store, ram_bytes=0, disk_bytes=1 << 30, chunk_tokens=CHUNK_TOKENS)
        self._decoder = Decoder(stager.path, ctx=ctx, threads=1, load="map", store=self._store)

    def tell(self, text: str, n: int) -> Said:
        """Go on with a text, for n tokens at most."""
        before = self._store.stat().restored_chunks
        more = "".join(self._decoder.generate(text, n))
        restored = self._store.stat().restored_chunks - before
        node = ray.get_runtime_context().get_node_id()
        return Said(more, node, os.getpid(), restored * CHUNK_TOKENS)


def start(stager: Stager, store: str, ctx: int) -> list[Any]:
    """Start the decoders on their planned nodes."""
    actor = ray.remote(Teller)
    return [actor.options(**each).remote(stager, store, ctx) for each in stager.actor_options()]


def main(model: str, store: str, text: str, n_engines: int, ctx: int) -> None:
    """Tell a story that moves from decoder to decoder."""
    ray.init(address="auto")
    with Stager(model, n_engines=n_engines, ctx=ctx) as stager:
        print(stager)
        for teller in start(stager, store, ctx):
            said = ray.get(teller.tell.remote(text, 24))
            print(f"[node {said.node_id[:8]}, {said.n_restored} tokens from the store]{said.text}")
            text += said.text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("store")
    parser.add_argument("text")
    parser.add_argument("-n", type=int, default=8, help="decoders")
    parser.add_argument("--ctx", type=int, default=512, help="tokens of context of each")
    asked = parser.parse_args()
    main(asked.model, os.path.abspath(asked.store), asked.text, asked.n, asked.ctx)
