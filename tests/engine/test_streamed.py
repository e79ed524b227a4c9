"""Weights that are read while tokens are computed: the same logits, and reads that fail."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import unimem as um
from support.models.decoders import greedy, interrupted, logits_of, tokens
from support.models.make import Shape, small, write_model
from support.processes.forks import in_child, needs_fork, refuses
from support.processes.running import running
from unimem.engine import Decoder, UnsupportedModel
from unimem.planning import needs
from unimem.planning.needs import PREFILL_BATCH
from unimem.system import limits
from unimem.system.limits import Limit
from unimem.weights.stream.stream import Stream

MIXTURE = Shape(hidden=256, layers=3, heads=4, kv_heads=2, inner=256, vocab=320, ctx=600)
DENSE = small(layers=6, hidden=256, inner=512, vocab=320)
PROMPT = tokens(PREFILL_BATCH + 22, first=3)
# Expert sizes that are no multiple of 512 bytes: a file has them at any place.
KINDS = ("q4_0", "q8_0", "f32", "q4_1")


@pytest.fixture(autouse=True)
def same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute streamed models in the batches of mapped ones, whose bits are compared."""
    monkeypatch.setattr(needs, "_STREAMED_BATCH", PREFILL_BATCH)


def write(folder: Path, arch: str, kind: str = "q4_0") -> Path:
    return write_model(folder / "m.gguf", arch, DENSE if arch == "llama" else MIXTURE, kind)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("mixture"), "qwen3moe")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("dense"), "llama")


@pytest.fixture(params=["qwen3moe", "llama"])
def model(request: pytest.FixtureRequest, mixture: Path, dense: Path) -> Path:
    return mixture if request.param == "qwen3moe" else dense


def budget_of(path: Path, share: float) -> int:
    """A budget between the least and the one with a slot for each piece."""
    with um.open_weights(path, load="stream", budget="1G") as weights:
        assert weights.stream is not None
        least = weights.stream.least_bytes
        return least + int(share * (weights.mapped_bytes - least))


def streamed(path: Path, share: float, *, ctx: int = 200) -> Decoder:
    budget = budget_of(path, share)
    return Decoder(path, ctx=ctx, threads=1, load="stream", weights_budget=budget)


def stream_of(decoder: Decoder) -> Stream:
    assert decoder.weights.stream is not None
    return decoder.weights.stream


def figures(decoder: Decoder) -> dict[str, int]:
    found: dict[str, int] = decoder.report().facts["streams"][0]
    return found


# ---- logits ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "kind"),
    [*((arch, kind) for arch in ("qwen3moe", "llama") for kind in KINDS), ("gpt-oss", "mxfp4")],
)
def test_logits_have_the_bits_of_a_mapped_model(arch: str, kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, arch, kind)
    with Decoder(path, ctx=200, threads=1, load="map") as mapped:
        chosen, expected = logits_of(mapped, PROMPT, 6)
    for share in (0.4, 1.0):
        with streamed(path, share) as decoder:
            found, logits = logits_of(decoder, PROMPT, 6)
            n_read = figures(decoder)["read_bytes"]
        np.testing.assert_array_equal(logits, expected)
        assert found == chosen
        assert n_read > 0


@pytest.mark.parametrize("most_waves", [1, 2])  # of three that are needed
def test_a_batch_that_waves_do_not_suffice_for_is_split(
    most_waves: int, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs, "_MOST_WAVES", most_waves)
    with Decoder(mixture, ctx=64, threads=1, load="map") as mapped:
        for token in PROMPT[:9]:
            mapped.prefill([token])
        expected = mapped.logits.copy()
    # There are slots for the experts of one token.
    with streamed(mixture, 0, ctx=64) as decoder:
        stream_of(decoder)._pieces.resize(0, 3)
        np.testing.assert_array_equal(decoder.prefill(PROMPT[:9]), expected)
        assert decoder.kv.seq_len == 9


@pytest.mark.parametrize(
    ("arch", "n_slots"), [*(("qwen3moe", n) for n in (3, 4, 7, 24)), ("gpt-oss", 4)]
)
def test_each_expert_is_read_once_for_a_batch(
    arch: str, n_slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture, prompt, n_read = write(tmp_path, arch), tokens(512, first=3), []
    with streamed(mixture, 1, ctx=512) as decoder:
        stream_of(decoder)._pieces.resize(0, n_slots)
        decoder.prefill(prompt)
        n_read.append(figures(decoder)["read_bytes"])
    monkeypatch.setattr(needs, "_STREAMED_BATCH", 512)
    with streamed(mixture, 1, ctx=512) as decoder:
        pieces = stream_of(decoder)._pieces
        pieces.resize(0, n_slots)
        logits = decoder.prefill(prompt).copy()
        stat, n_read = pieces.stat(), [*n_read, figures(decoder)["read_bytes"]]
        # All of two layers, and those of one token in the last.
        n_parts = 6 if arch == "gpt-oss" else 3  # with biases
        assert stat["misses"] + stat["prefetched"] == stat["n_reads"] // n_parts == 8 + 8 + 3
        assert stat["prefetched"] >= 4
        decoder.reset()
        np.testing.assert_array_equal(decoder.prefill(prompt), logits)
        assert figures(decoder)["read_bytes"] <= 2 * n_read[1]
    assert n_slots == 24 or n_read[0] > 3 * n_read[1]
    # Waves have the bits of all at once, and of a mapped file in the same batch.
    monkeypatch.setattr(needs, "PREFILL_BATCH", 512)
    with Decoder(mixture, ctx=512, threads=1, load="map") as mapped:
        np.testing.assert_array_equal(mapped.prefill(prompt), logits)


def test_each_layer_is_read_once_for_a_batch(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "_STREAMED_BATCH", 512)
    with streamed(dense, 0, ctx=512) as decoder:
        decoder.prefill(tokens(512, first=3))
        stat = stream_of(decoder)._pieces.stat()
        # Of six; the first of the next batch are read ahead.
        assert 6 <= stat["misses"] + stat["prefetched"] <= 8


def test_each_piece_is_read_once_if_all_fit(model: Path) -> None:
    with streamed(model, 1) as decoder:
        decoder.prefill(PROMPT)
        greedy(decoder, 4)
        before = figures(decoder)
        greedy(decoder, 4)
        after = figures(decoder)
    if "dense" in str(model):
        assert after["misses"] == before["misses"]
    with um.open_weights(model, load="stream", budget="1G") as weights:
        assert after["read_bytes"] <= weights.nbytes
    assert after["hits"] > before["hits"]


def test_a_batch_brings_the_experts_of_the_next_layer(mixture: Path) -> None:
    with streamed(mixture, 1) as decoder:
        decoder.prefill(PROMPT[:PREFILL_BATCH])
        stat = stream_of(decoder)._pieces.stat()
    # All of the first layer, and few of the last one, which computes a single token.
    assert stat["prefetched"] == 8
    assert stat["prefetch_hits"] >= 6


def test_a_token_begins_to_read_half_of_what_the_next_layers_use(mixture: Path) -> None:
    with streamed(mixture, 1) as decoder:
        decoder.prefill(PROMPT[:1])
        stat = stream_of(decoder)._pieces.stat()
        assert stat["prefetched"] == 2 * 2  # of 3 experts in two layers


@pytest.mark.parametrize("name", ["blk.1.ffn_up_exps.bias", "blk.0.ffn_gate_exps.weight"])
def test_experts_that_are_not_the_last_dimension_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = gguf.GGUFWriter.add_tensor_info

    def add_longer(self: Any, tensor: str, shape: Any, *facts: Any, **options: Any) -> None:
        add(self, tensor, (1, *shape) if tensor == name else shape, *facts, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor_info", add_longer)
    path = write(tmp_path, "gpt-oss", "f32")
    with Decoder(path, ctx=64, threads=1, load="map") as mapped:
        mapped.prefill(PROMPT[:9])
    with pytest.raises(UnsupportedModel, match=rf"'{name}' has shape .*, 1\], and .*load='map'"):
        streamed(path, 1)


# ---- the budget --------------------------------------------------------------------------


def test_a_budget_streams_and_is_kept(model: Path) -> None:
    budget = budget_of(model, 0.5)
    with Decoder(model, ctx=64, threads=1, weights_budget=budget) as decoder:
        assert decoder.weights.load == decoder.report().facts["load"] == "stream"
        assert decoder.weights.mapped_bytes <= budget
        assert figures(decoder)["budget_bytes"] == budget
        rows = {row.category: row.nbytes for row in decoder.report().rows}
        assert rows["weights:slots"] == stream_of(decoder).slot_bytes


def test_what_is_read_is_counted_for_other_processes(model: Path) -> None:
    with streamed(model, 0.5) as decoder:
        decoder.prefill(PROMPT[:1])
        counted = []
        for _ in range(2):
            found = figures(decoder)
            names = ("hits", "misses", "read_bytes", "waited_ns")
            counted.append([*(found[name] for name in names), *decoder._tally._cells[4:8]])
            greedy(decoder, 3)
        change = np.diff(counted, axis=0)[0]
        assert change[0] > 0
        np.testing.assert_array_equal(change[:4], change[4:])


def test_a_budget_below_the_least_is_refused_with_its_name(model: Path) -> None:
    least = budget_of(model, 0)
    with pytest.raises(um.CapacityError, match=f"{least}"):
        Decoder(model, ctx=64, load="stream", weights_budget=least - 1)


@pytest.mark.parametrize("url", ["s3://bucket/m.gguf", "https://host/m.gguf"])
@pytest.mark.parametrize("options", [{"load": "stream"}, {"weights_budget": "1G"}])
@pytest.mark.parametrize("make", [Decoder, um.Layout.for_model])
def test_a_url_is_refused_before_its_server_is_asked(
    make: Any, options: dict[str, Any], url: str
) -> None:
    with pytest.raises(ValueError, match=f"load='stream' of {url}: .*copy the model there first"):
        make(url, **options)


@pytest.mark.parametrize("spare", [0, 0.07])
def test_a_tiny_model_needs_a_share_beside_its_plan(
    spare: float, mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = budget_of(mixture, 0.5)
    needed = um.plan(
        mixture, ctx=64, threads=1, load="stream", weights_budget=budget, engine="unimem"
    )
    room = int(needed.total_bytes * (1 + spare))
    limit = Limit("memory of the machine", 2 * room, room, "take less")
    monkeypatch.setattr(limits, "memory_limits", lambda: (limit,))
    with nullcontext() if spare else pytest.raises(um.CapacityError):
        Decoder(mixture, ctx=64, threads=1, load="stream", weights_budget=budget).close()


def test_opened_weights_keep_their_budget(model: Path) -> None:
    with um.open_weights(model, load="stream", budget="1G") as weights:
        with pytest.raises(ValueError, match="weights_budget=1000: the weights are opened"):
            Decoder(weights, ctx=64, weights_budget=1000)
        with Decoder(weights, ctx=64, threads=1) as decoder:
            assert decoder.report().facts["load"] == "stream"
            decoder.prefill(PROMPT[:9])


def test_the_budget_may_change_between_tokens(model: Path) -> None:
    with Decoder(model, ctx=200, threads=1, load="map") as mapped:
        chosen, expected = logits_of(mapped, PROMPT, 12)
    whole, half = budget_of(model, 1), budget_of(model, 0.3)
    with streamed(model, 1) as decoder:
        decoder.prefill(PROMPT)
        found, logits = [], []
        for i in range(12):
            if i % 3 == 1:
                stream_of(decoder).resize(half if i % 2 else whole)
            logits.append(decoder.logits.copy())
            found.append(decoder.generate_next_token())
    np.testing.assert_array_equal(np.array(logits), expected)
    assert found == chosen


# ---- failures ----------------------------------------------------------------------------


@contextmanager
def unreadable(path: Path, flags: int) -> Iterator[None]:
    """Have this process's descriptors of a file be of /dev/null."""
    ours = [int(fd) for fd in os.listdir("/proc/self/fd") if _target(fd) == str(path)]
    assert ours
    null, kept = os.open("/dev/null", flags), {fd: os.dup(fd) for fd in ours}
    try:
        for fd in kept:
            os.dup2(null, fd, inheritable=False)
        yield
    finally:
        for fd, other in kept.items():
            os.dup2(other, fd, inheritable=False)
            os.close(other)
        os.close(null)


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("flags", "why"), [(os.O_RDONLY, "has become shorter"), (os.O_WRONLY, "Bad file descriptor")]
)
def test_a_token_whose_weights_cannot_be_read_does_not_count(
    model: Path, flags: int, why: str
) -> None:
    with streamed(model, 0.3) as other:
        other.prefill(PROMPT[:20])
        expected = other.prefill([7]).copy()
    with streamed(model, 0.3) as decoder:
        decoder.prefill(PROMPT[:20])
        with unreadable(model, flags), pytest.raises(OSError, match=rf"offset \d+ .*{why}") as info:
            greedy(decoder, 50)
        assert info.value.filename == str(model)
        assert decoder.kv.seq_len < 70
        decoder.kv.crop(20)
        np.testing.assert_array_equal(decoder.prefill([7]), expected)
        greedy(decoder, 3)


@pytest.mark.parametrize("n_slots", [4, None])
def test_a_prompt_whose_weights_cannot_be_read_does_not_count(
    n_slots: int | None, model: Path
) -> None:
    with streamed(model, 0.3) as decoder:
        if n_slots is not None and "mixture" in str(model):  # else blocks are kept
            stream_of(decoder)._pieces.resize(0, n_slots)
        expected = decoder.prefill(PROMPT).copy()
        decoder.reset()
        decoder.prefill(PROMPT[:3])
        with pytest.raises(OSError, match="cannot be read"), unreadable(model, os.O_RDONLY):
            decoder._forward.prefill(np.array(PROMPT[3:]))
        assert decoder.kv.seq_len == 3
        decoder.reset()
        np.testing.assert_array_equal(decoder.prefill(PROMPT), expected)


@pytest.mark.parametrize("way", ["written", "cut"])
def test_a_changed_file_is_noticed_by_the_first_token_that_reads(
    way: str, model: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    with streamed(path, 0.3) as decoder:
        decoder.prefill(PROMPT[:20])
        if way == "cut":
            os.truncate(path, path.stat().st_size - 1)
        else:
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"x")
        counted: list[int] = []

        def go_on() -> None:
            for _ in range(80):
                counted.append(decoder.kv.seq_len)
                n_read = figures(decoder)["read_bytes"]
                decoder.generate_next_token()
                assert figures(decoder)["read_bytes"] == n_read

        with pytest.raises(OSError, match=r"copy\.gguf"):
            go_on()
        with pytest.raises(OSError, match=r"copy\.gguf"):
            decoder.prefill(PROMPT[20:40])
        assert decoder.kv.seq_len == counted[-1]


def test_files_are_looked_at_only_after_reads(mixture: Path) -> None:
    with streamed(mixture, 1) as decoder:
        stream, looks = stream_of(decoder), list[int]()
        decoder.prefill(PROMPT[:20])
        stream._files = stream._files._replace(check=lambda: looks.append(1))
        with stream._pieces.holder() as holder:
            holder.ensure(range(stream._pieces.n_pieces))
        greedy(decoder, 1)
        assert len(looks) == 1
        greedy(decoder, 5)
        assert len(looks) == 1


def test_signals_during_reads_change_nothing(model: Path) -> None:
    with Decoder(model, ctx=200, threads=1, load="map") as mapped:
        chosen, expected = logits_of(mapped, PROMPT, 6)
    n_signals = count()
    before = signal.signal(signal.SIGALRM, lambda *_: next(n_signals))
    try:
        with streamed(model, 0.3) as decoder:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            found, logits = logits_of(decoder, PROMPT, 6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    np.testing.assert_array_equal(logits, expected)
    assert found == chosen
    assert next(n_signals) > 0


def test_an_interrupt_loses_no_token(model: Path) -> None:
    with streamed(model, 0.3) as decoder:
        decoder.prefill(PROMPT[:20])
        with interrupted(decoder):
            decoder.prefill([7])
        assert decoder.kv.seq_len == 20
        decoder.prefill([7])


@needs_fork
def test_a_forked_child_cannot_read(model: Path) -> None:
    with streamed(model, 0.3) as decoder:
        decoder.prefill(PROMPT[:20])
        assert in_child(lambda: refuses(lambda: greedy(decoder, 40), "forked child"))
        greedy(decoder, 3)


# ---- several decoders --------------------------------------------------------------------


@pytest.mark.parametrize("is_shared", [True, False], ids=["one weights", "one file"])
def test_two_decoders_at_once(model: Path, is_shared: bool) -> None:
    with Decoder(model, ctx=200, threads=1, load="map") as mapped:
        expected = logits_of(mapped, PROMPT, 6)[1]
    with ExitStack() as stack:
        given: Any = model
        options: dict[str, Any] = {"load": "stream", "weights_budget": budget_of(model, 0.6)}
        if is_shared:
            given = stack.enter_context(
                um.open_weights(model, load="stream", budget=options["weights_budget"])
            )
            options = {}
        ours = [
            stack.enter_context(Decoder(given, ctx=200, threads=1, **options)) for _ in range(2)
        ]
        with ThreadPoolExecutor(2) as threads:
            for _, logits in threads.map(lambda one: logits_of(one, PROMPT, 6), ours):
                np.testing.assert_array_equal(logits, expected)


ENDLESS = """
import sys
from unimem.engine import Decoder
decoder = Decoder(sys.argv[1], ctx=64, threads=2, load="stream", weights_budget=int(sys.argv[2]))
decoder.prefill(range(3, 12))
print("ready", flush=True)
while True:  # tokens that need other experts
    decoder.kv.crop(9)
    for token in range(3, 40):
        decoder.prefill([token])
"""


def test_a_killed_process_leaves_nothing(mixture: Path) -> None:
    before = sorted(mixture.parent.iterdir()), mixture.read_bytes()
    with running(ENDLESS, mixture, budget_of(mixture, 0)) as pid:  # it is killed while it reads
        maps = Path(f"/proc/{pid}/maps").read_text()
    # No other process, and no name, could keep its memory.
    shared = re.findall(r" rw-s .* (/.*)", maps)
    assert shared
    assert all(re.fullmatch(r"/memfd:.* \(deleted\)", name) for name in shared)
    assert not [name for name in os.listdir("/dev/shm") if str(pid) in name]
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            assert os.fsencode(mixture) not in command.read_bytes()
    assert (sorted(mixture.parent.iterdir()), mixture.read_bytes()) == before


def test_the_end_of_a_decoder_ends_its_files(model: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    weights = um.open_weights(model, load="stream", budget=budget_of(model, 0.5))
    decoder = Decoder(weights, ctx=64, threads=1)
    decoder.prefill(PROMPT[:9])
    with pytest.raises(BufferError):
        weights.close()
    greedy(decoder, 2)
    decoder.close()
    weights.close()
    with streamed(model, 0.5):
        pass
    assert set(os.listdir("/proc/self/fd")) == before
