"""What the ledger costs those who are entered in it.

Tapes and caches are holders: who asks for the entries asks them what they are for. A take and an
append know nothing of it, so that they cost the same whether few holders are alive or 10,000, each
with a region of its own. Making a block enters it, and closing it takes it out, in one step each,
however many there are. A plan reads a file's header, as opening does, and the limits. One thread,
pinned; the cost of the loop is taken off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import gguf
import unimem as um
from bench.harness import Bench, pin, ratios, stopwatch
from unimem.ledger import entries

N_OTHERS = 10_000
N_BLOCKS = 1000
PAGE = 4096


def main() -> int:
    bench = Bench("accounting", __doc__)
    bench.parse()
    bench.facts = {"numpy": np.__version__, "cpu": pin(1), "others": N_OTHERS}
    calls(bench)
    look(bench)
    plan(bench)
    return bench.finish()


def calls(bench: Bench) -> None:
    """Compare each call with itself, while few regions and holders are alive and while many are.

    Both are measured in each round: the others come before the one and go before the other.
    """
    n = 256
    # Tokens of 2 KB each of K and of V: 256 KiB, which the others do not push out of a second-level
    # cache again once they are there.
    n_tokens = 64
    k = np.zeros((1, 8, 128), np.float16)
    with um.Tape(n * 4 * PAGE) as tape, um.KVCache(1, 8, 128, n_tokens) as cache:
        names = {"take": tape.take, "take_address": tape.take_address, "append": cache.append}
        runs = {
            "Tape.take": stopwatch("take(16)", n, names, tape.clear),
            "Tape.take_address": stopwatch("take_address(64, 64)", n, names, tape.clear),
            "KVCache.append": stopwatch("append(0, k, k)", n_tokens, names | {"k": k}, cache.clear),
            "Block, made and closed": stopwatch("Block(4096).close()", 100, {"Block": um.Block}),
            "Tape over a block": stopwatch(
                "Tape(block)", n, {"Tape": um.Tape, "block": tape.block}
            ),
        }
        for title, run in runs.items():
            samples = bench.compare(
                f"{title}, beside others",
                {"few": warmed(run), f"{N_OTHERS}": beside_others(warmed(run))},
                unit="ns",
                rounds=11,
                warmup=1,
            )
            times = ratios(samples[f"{N_OTHERS}"], samples["few"])
            # A tape is entered in a table, which is larger beside many others.
            most = 1.25 if title == "Tape over a block" else 1.1
            bench.at_most(title, "beside many / beside few", times, most)


def warmed(run: Callable[[], float]) -> Callable[[], float]:
    """Measure the second of two runs: the first finds other things in the CPU's caches."""

    def second() -> float:
        run()
        return run()

    return second


def beside_others(run: Callable[[], float]) -> Callable[[], float]:
    """Measure while many other tapes are alive, each over a block of its own."""

    def measured() -> float:
        others = [um.Tape(PAGE, pages="4k") for _ in range(N_OTHERS)]
        try:
            return run()
        finally:
            for other in others:
                other.close()

    return measured


def look(bench: Bench) -> None:
    """Ask for the entries of blocks, and of tapes."""
    blocks = [um.Block(PAGE) for _ in range(N_BLOCKS)]
    bench.compare(
        f"entries() of {N_BLOCKS} blocks",
        {"entries": stopwatch("entries()", 10, {"entries": entries})},
        unit="ns",
        rounds=51,
    )
    tapes = [um.Tape(block) for block in blocks]
    bench.compare(
        f"entries() of {N_BLOCKS} blocks with a tape over each",
        {"entries": stopwatch("entries()", 10, {"entries": entries})},
        unit="ns",
        rounds=51,
    )
    for tape in tapes:
        tape.close()
    for block in blocks:
        block.close()


def plan(bench: Bench) -> None:
    """Plan a llama of 44 layers, and open the file, which both read the header of."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        n_tensors = write_model(path)
        samples = bench.compare(
            f"a file of {n_tensors} tensors",
            {
                "open": stopwatch("open(path, load='map').close()", 1, names_of(path)),
                "plan": stopwatch("plan(path)", 1, names_of(path)),
            },
            unit="ns",
            rounds=101,
        )
    bench.at_most("plan", "plan / open", ratios(samples["plan"], samples["open"]), 3)


def names_of(path: Path) -> dict[str, object]:
    """Return what the statements use."""
    return {"path": path, "open": um.open_weights, "plan": um.plan}


def write_model(path: Path, n_layers: int = 44, size: int = 64, vocab: int = 320) -> int:
    """Write a model of zeros, and return how many tensors it has."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "context_length": 600,
        "embedding_length": size,
        "block_count": n_layers,
        "feed_forward_length": size,
        "attention.head_count": 4,
        "attention.head_count_kv": 4,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd": (vocab, size), "output": (vocab, size), "output_norm": (size,)}
    for i in range(n_layers):
        shapes |= {f"blk.{i}.{name}": (size, size) for name in matrices}
        shapes |= {f"blk.{i}.{name}": (size,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return len(shapes)


if __name__ == "__main__":
    raise SystemExit(main())
