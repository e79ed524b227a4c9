"""Models whose pieces are streamed, as they are opened: bytes, budgets, rows and refusals."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files import gguf_files as gf
from support.files import safetensors_files
from support.files import streamed_models as models
from unimem.errors import CapacityError, ClosedError
from unimem.weights.files import open_model
from unimem.weights.streamed import plan_streamed

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_no_descriptor")

SHAPES: dict[str, Callable[[], models.Tensors]] = {
    "mixture": models.mixture,
    "mixed types": lambda: models.mixture(other=True),
    "biases": models.with_biases,
    "blocks": models.blocks,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return models.write(tmp_path / "m.gguf", models.mixture(other=True), n_used=2)


def weight_rows() -> dict[str, int]:
    """The rows of weights that have memory."""
    rows = [row for row in um.report().rows if row.category.startswith("weights:") and row.nbytes]
    return {row.category: row.nbytes for row in rows}


@pytest.mark.parametrize("budget", [None, "least"])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_bytes_are_those_of_the_file(tmp_path: Path, shape: str, budget: Any) -> None:
    file = models.write(tmp_path / "m.gguf", SHAPES[shape](), n_used=2)
    with um.open_weights(file, load="stream") as w:
        if budget == "least":
            models.stream(w).resize(models.stream(w).least_bytes)
        for name, tensor in w.items():
            if not isinstance(tensor, um.StreamedTensor):
                assert tensor.as_array().tobytes() == models.in_file(tensor).tobytes(), name
        for tensor in models.streamed(w).values():
            models.check(tensor, [tensor.n_pieces - 1, 0])


def test_what_is_streamed(tmp_path: Path) -> None:
    """Experts with their biases; what every token uses stays."""
    file = models.write(tmp_path / "m.gguf", models.with_biases(), n_used=2)
    with um.open_weights(file, load="stream") as w:
        found = models.streamed(w)
        assert {name.partition("exps.")[2] for name in found} == {"weight", "bias"}
        assert len(found) == 8
        fused, bias = found["blk.1.ffn_gate_up_exps.weight"], found["blk.1.ffn_gate_up_exps.bias"]
        assert (fused.shape, fused.type, fused.n_pieces) == ((4, 48, 32), "q8_0", 4)
        assert fused.piece_bytes == bias.piece_bytes == 48 * 34 + 32 * 34 + 4 * 48 + 4 * 32
        n_slots = len(fused.pool)
        assert (fused.pool.shape, str(fused.pool.dtype)) == ((n_slots, 48, 34), "uint8")
        assert (bias.pool.shape, str(bias.pool.dtype)) == ((n_slots, 48), "float32")
        assert not bias.pool.flags.writeable


def test_one_tensor_brings_all_of_its_expert(path: Path) -> None:
    with um.open_weights(path, load="stream") as w:
        gate, down = (
            models.tensor(w, f"blk.0.ffn_{name}_exps.weight") for name in ("gate", "down")
        )
        slots = models.check(gate, [[5, 1], [5, 5]])
        assert slots.shape == (2, 2)
        assert slots.dtype == np.int32
        assert (models.stream(w).hits, models.stream(w).misses) == (0, 2)
        assert models.check(down, [[5, 1], [5, 5]]).tolist() == slots.tolist()
        assert (models.stream(w).hits, models.stream(w).misses) == (2, 2)
        assert models.stream(w).read_bytes >= 2 * gate.piece_bytes
        assert models.stream(w).waited_ns > 0
        assert gate.ensure([]).tolist() == []


def test_a_block_without_experts_is_one_piece(tmp_path: Path) -> None:
    file = models.write(tmp_path / "m.gguf", models.blocks(10))
    with um.open_weights(file, load="stream") as w:
        q, norm = models.tensor(w, "blk.3.attn_q.weight"), w["blk.3.attn_norm.weight"]
        assert (q.n_pieces, q.shape, q.pool.shape[1:]) == (1, (64, 64), (64, 68))
        assert q.piece_bytes >= q.nbytes + norm.nbytes + w["blk.3.ffn_up.weight"].nbytes
        assert models.stream(w).resident_bytes == w.blocks[0].nbytes + 10 * q.piece_bytes, "all fit"
        models.stream(w).resize(models.stream(w).budget_bytes - 5 * 2 * q.piece_bytes)
        n = models.stream(w).misses
        for _ in range(3):
            for i in range(10):
                models.check(models.tensor(w, f"blk.{i}.attn_q.weight"), [0])
                models.check(models.tensor(w, f"blk.{i}.ffn_up.weight"), 0)
        n_slots = len(q.pool)
        assert 2 < n_slots < 10
        # All but those that pass through the window of two slots stay.
        assert models.stream(w).misses - n <= 3 * (10 - (n_slots - 2))


@pytest.mark.parametrize("cut", ["tensors", "first"])
def test_a_split_model(tmp_path: Path, cut: str) -> None:
    whole = models.write(tmp_path / "m.gguf", models.mixture(), n_used=2)
    parts = gf.split(whole, 4, no_tensor_first=cut == "first")
    assert len(parts) > 3
    with um.open_weights(parts[1], load="stream") as w:
        assert w.files == tuple(map(str, parts))
        for tensor in models.streamed(w).values():
            models.check(tensor, range(8))
        assert (
            w["output_norm.weight"].as_array().tobytes()
            == models.in_file(w["output_norm.weight"]).tobytes()
        )


def test_a_file_inside_another(tmp_path: Path) -> None:
    inner = models.write(tmp_path / "m.gguf", models.mixture(), n_used=2).read_bytes()
    outer = tmp_path / "archive"
    outer.write_bytes(bytes(1000) + inner + bytes(3))
    fd = os.open(outer, os.O_RDONLY)
    with um.open_weights(fd, offset=1000, nbytes=len(inner), load="stream") as w:
        os.close(fd)
        data = np.fromfile(outer, np.uint8)
        gate = models.tensor(w, "blk.1.ffn_gate_exps.weight")
        (slot,) = gate.ensure([3])
        n = gate.nbytes // 8
        assert gate.pool[slot].tobytes() == data[gate.offset + 3 * n :][:n].tobytes()


# ---- budgets ------------------------------------------------------------------------------------


def test_rows_agree_with_the_plan_and_the_memory_to_the_byte(path: Path) -> None:
    assert not weight_rows()
    for budget in (None, "1G", "90%"):
        with um.open_weights(path, load="stream", budget=budget) as w:
            with open_model(path) as model:
                planned = plan_streamed(model, budget, {})
            rows = weight_rows()
            assert rows == planned.rows()
            assert sum(rows.values()) == w.mapped_bytes == sum(b.committed_bytes for b in w.blocks)
            assert w.mapped_bytes <= models.stream(w).budget_bytes
            kept = sum(t.nbytes for t in w.values() if not isinstance(t, um.StreamedTensor))
            assert sum(n for kind, n in rows.items() if kind[8:] in w.by_type()) == kept
            assert models.stream(w).resident_bytes == planned.budget.kept_bytes
            up = models.tensor(w, "blk.0.ffn_up_exps.weight")
            up.ensure([1])
            assert models.stream(w).resident_bytes == planned.budget.kept_bytes + up.piece_bytes
            models.stream(w).resize(models.stream(w).least_bytes)
            assert weight_rows()["weights:slots"] == models.stream(w).slot_bytes
    assert not weight_rows()


def test_a_budget_below_the_least_names_it_and_takes_nothing(path: Path) -> None:
    with pytest.raises(CapacityError, match="at least") as caught:
        um.open_weights(path, load="stream", budget=4096)
    with um.open_weights(path, load="stream", budget=caught.value.asked) as w:
        assert models.stream(w).budget_bytes == models.stream(w).least_bytes == caught.value.asked
        for tensor in models.streamed(w).values():
            models.check(tensor, [7, 0])
            with pytest.raises(CapacityError):
                tensor.ensure([0, 1, 2])
            models.check(tensor, [1, 2])
        with pytest.raises(CapacityError, match="at least"):
            models.stream(w).resize(models.stream(w).least_bytes - 1)


def test_it_is_resized_while_it_is_used(path: Path) -> None:
    with um.open_weights(path, load="stream") as w:
        gate = models.tensor(w, "blk.0.ffn_gate_exps.weight")
        most, n_most = models.stream(w).budget_bytes, len(gate.pool)
        models.check(gate, range(8))
        models.stream(w).resize(models.stream(w).least_bytes)
        assert len(gate.pool) < n_most
        models.check(gate, [6, 7])
        middle = (most + models.stream(w).least_bytes) // 2
        models.stream(w).resize(middle)
        assert w.mapped_bytes <= middle
        for tensor in models.streamed(w).values():
            models.check(tensor, [3, 4])
        models.stream(w).resize()
        is_warm = w.verify().resident_bytes >= w.mapped_bytes
        assert is_warm, "new slots are in RAM before a piece is read into them"
        assert (models.stream(w).budget_bytes, len(gate.pool)) == (most, n_most)
        models.check(gate, range(8))


def test_a_live_view_keeps_no_memory_of_slots_that_went(path: Path) -> None:
    with um.open_weights(path, load="stream") as w:
        gate, stream = models.tensor(w, "blk.0.ffn_gate_exps.weight"), models.stream(w)
        models.check(gate, range(8))
        pool, resident = gate.pool, w.verify().resident_bytes
        stream.resize(stream.least_bytes)
        assert w.verify().resident_bytes < resident
        assert not pool[len(gate.pool) :].any()
        models.check(gate, [1, 2])
        del pool
        stream.resize()
        models.check(gate, range(8))


def test_all_of_its_memory_is_placed_as_asked(path: Path) -> None:
    options: Any = {"pages": "4k", "numa": "preferred:0", "lock": "onfault"}
    with um.open_weights(path, load="stream", **options) as w:
        assert len(w.blocks) == 3
        for block in w.blocks:
            requested: Any = block.requested
            assert {name: requested[name] for name in options} == options
        assert w.verify().pages == "4k"
        assert w.verify().resident_bytes == w.mapped_bytes, "it is warm"


def test_progress_counts_what_is_read_at_first(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    file = models.write(tmp_path / "m.gguf", models.blocks())
    with um.open_weights(file, load="stream", progress=lambda *n: told.append(n)) as w:
        assert told[-1][0] == told[-1][1] >= w.nbytes
        assert [done for done, _ in told] == sorted({done for done, _ in told})

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        um.open_weights(file, load="stream", progress=stop)


# ---- refusals, and files that change ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"tape": um.Tape}, "tape: .*leave out the tape, and give a budget"),
        ({"numa": "mirror"}, "numa='mirror': .*numa='interleave'"),
        ({"advice": "random"}, "advice='random' is for mapped files"),
        ({"budget": "many"}, "budget: expected bytes, a size such as '8G'"),
        ({"load": "copy", "budget": 1}, "budget=1 is for load='stream'"),
        ({"load": "auto", "budget": "8G"}, "budget='8G' is for load='stream'"),
    ],
)
def test_options_that_do_not_fit_are_refused(path: Path, options: Any, match: str) -> None:
    with um.Tape(1 << 20) as tape:
        options = {"load": "stream"} | options
        options |= {"tape": tape} if "tape" in options else {}
        with pytest.raises(ValueError, match=match):
            um.open_weights(path, **options)


def test_sources_that_cannot_be_streamed_are_refused(path: Path, tmp_path: Path) -> None:
    tensors = tmp_path / "m.safetensors"
    tensors.write_bytes(safetensors_files.everything())
    other = models.write(tmp_path / "o.gguf", {"embed": ((8,), gf.F32)})
    sources: list[tuple[Any, str]] = [
        ("s3://bucket/m.gguf", "copy the model there first; um.stage keeps one"),
        ("https://host/m.gguf", "copy the model there first"),
        (tensors, "expected GGUF.*convert_hf_to_gguf.py"),
        (path.read_bytes(), "it is in memory already"),
        (other, "no experts and no blocks"),
    ]
    for source, match in sources:
        with pytest.raises(ValueError, match=f"load='stream' of .*{match}"):
            um.open_weights(source, load="stream")


def test_a_file_that_is_cut_is_an_error_with_its_path(path: Path) -> None:
    whole = path.read_bytes()
    with um.open_weights(path, load="stream") as w:
        first = models.tensor(w, "blk.0.ffn_gate_exps.weight")
        last = models.tensor(w, "blk.2.ffn_down_exps.weight")
        models.check(first, [0])
        os.truncate(path, last.offset + 100)
        for _ in range(2):
            with pytest.raises(OSError, match=r"shorter|replaced") as caught:
                last.ensure([7])
            assert caught.value.filename == str(path)
        path.write_bytes(whole)  # another version


def test_a_file_that_is_written_to_is_noticed(path: Path) -> None:
    with um.open_weights(path, load="stream") as w:
        gate = models.tensor(w, "blk.0.ffn_gate_exps.weight")
        gate.ensure([0])
        with path.open("r+b") as file:
            file.seek(gate.offset)
            file.write(b"other")
        os.utime(path, ns=(1, 1))
        gate.ensure([0])  # is in memory
        for _ in range(2):
            with pytest.raises(OSError, match="written to") as caught:
                gate.ensure([1])
            assert caught.value.filename == str(path)
        with pytest.raises(OSError, match="written to"):
            w.content_hash()


def test_a_replaced_file_stays_open_as_it_was(path: Path, tmp_path: Path) -> None:
    whole = np.fromfile(path, np.uint8)
    with um.open_weights(path, load="stream") as w:
        gate = models.tensor(w, "blk.1.ffn_gate_exps.weight")
        os.replace(models.write(tmp_path / "new", models.mixture(1), 2), path)
        (slot,) = gate.ensure([2])
        n = gate.nbytes // 8
        assert gate.pool[slot].tobytes() == whole[gate.offset + 2 * n :][:n].tobytes()


# ---- the weights --------------------------------------------------------------------------------


def test_what_needs_all_of_a_model(path: Path) -> None:
    with um.open_weights(path, load="stream") as w, um.open_weights(path, load="map") as mapped:
        assert w.content_hash() == mapped.content_hash()
        assert (w.fingerprint, w.by_type(), w.nbytes) == (
            mapped.fingerprint,
            mapped.by_type(),
            mapped.nbytes,
        )
        assert mapped.stream is None
        assert (w.load, w.load_reason) == ("stream", "it was asked for")
        with pytest.raises(ValueError, match=r"stream\.resident_bytes"):
            w.residency()
        with pytest.raises(ValueError, match="memory of their own"):
            w.evict()
        w.warm()
        assert w.verify().resident_bytes >= models.stream(w).slot_bytes
        for text in ("stream", "tensors"):
            assert text in repr(w)
        assert "budget" in repr(models.stream(w))
        streamed = models.tensor(w, "blk.0.ffn_gate_exps.weight")
        uses: list[Callable[[], object]] = [
            lambda: streamed.address,
            streamed.as_array,
            streamed.dequantize,
            lambda: np.asarray(streamed),
            streamed.__dlpack__,
        ]
        for use in uses:
            with pytest.raises(ValueError, match=r"is streamed.*ensure\(ids\)"):
                use()


def test_a_report_names_it(path: Path) -> None:
    with um.open_weights(path, load="stream") as w:
        models.tensor(w, "blk.0.ffn_up_exps.weight").ensure([1, 2])
        (found,) = um.report().facts["streams"]
        assert found == models.stream(w).to_dict()
        assert (found["path"], found["misses"], found["hits"]) == (str(path), 2, 0)
        text = " ".join(str(um.report()).split())
        assert "0 of 2 pieces were in RAM, 0.0%;" in text
        assert "weights:slots" in text
    assert "streams" not in um.report().facts


def test_close(path: Path) -> None:
    w = um.open_weights(path, load="stream")
    gate = models.tensor(w, "blk.0.ffn_gate_exps.weight")
    stream = models.stream(w)
    gate.ensure([1])
    pool = gate.pool
    with pytest.raises(BufferError, match="live users"):
        w.close()
    models.check(gate, [2])  # nothing was closed
    del pool
    w.close()
    w.close()
    uses: list[Callable[[], object]] = [
        lambda: gate.ensure([1]),
        lambda: gate.prefetch([1]),
        lambda: gate.pool,
        lambda: w.stream,
        lambda: w["blk.0.ffn_gate_exps.weight"],
        lambda: stream.hits,
        stream.resize,
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()
    assert stream.give_back() == 0
    assert "closed" in repr(stream)


def test_an_engine_that_holds_pieces_keeps_the_slots(tmp_path: Path) -> None:
    file = models.write(tmp_path / "m.gguf", models.blocks(), n_used=2)
    with um.open_weights(file, load="stream") as w:
        stream, up = models.stream(w), models.tensor(w, "blk.1.ffn_up.weight")
        models.check(up, [0])
        engine = stream._pieces.holder()
        engine.ensure([0])
        with pytest.raises(BufferError, match="open holders"):
            w.close()
        n = stream.misses
        models.check(up, [0])
        assert stream.misses == n, "all blocks are still there"
    assert w.closed
    assert engine.ensure([1]).shape == (1,)
    with pytest.raises(ClosedError):
        up.ensure([0])
    engine.close()
    stream._close()


def test_views_outlive_a_with(path: Path) -> None:
    with um.open_weights(path, load="stream") as w:
        gate = models.tensor(w, "blk.0.ffn_gate_exps.weight")
        (slot,) = gate.ensure([3])
        pool, data = gate.pool, models.in_file(gate)
    assert w.closed
    assert pool[slot].tobytes() == data[3].tobytes()
