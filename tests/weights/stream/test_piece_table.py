"""Which tensors of a model are pieces."""

from __future__ import annotations

from unimem.weights.stream.piece_table import (
    MOST_PARTS,
    BlockPieces,
    PieceKind,
    TensorPlace,
    TensorRow,
    find_pieces,
)


def row(name: str, ne: tuple[int, ...], offset: int, nbytes: int, **more: int) -> TensorRow:
    return TensorRow(
        name, "q8_0", ne, offset, nbytes, more.get("file", 0), more.get("known", 1) == 1
    )


def experts(block: int, offset: int, n: int = 4, nbytes: int = 400) -> list[TensorRow]:
    names = ("ffn_gate_exps", "ffn_down_exps")
    return [
        row(f"blk.{block}.{name}.weight", (8, n), offset + i * 10_000, nbytes)
        for i, name in enumerate(names)
    ]


def test_an_expert_has_its_part_of_each_tensor() -> None:
    rows = [row("token_embd.weight", (8,), 0, 100), row("blk.0.ffn_up_shexp.weight", (8,), 1, 5)]
    table = find_pieces([*experts(0, 1000), *rows, *experts(1, 50_000)], n_used=3)
    assert table.kinds == (PieceKind((100, 100), 8, 3, 4),)
    assert table.blocks == (
        BlockPieces(0, 0, 4, ((0, 11_000), (0, 1000))),  # by name: down, gate
        BlockPieces(0, 4, 4, ((0, 60_000), (0, 50_000))),
    )
    assert table.places["blk.1.ffn_gate_exps.weight"] == TensorPlace(0, 1, 0, 100, 4, 4)
    assert len(table.places) == 4
    assert table.has_experts
    pieces = list(table.pieces())
    assert pieces[2] == (0, [(0, 11_200), (0, 1200)])
    assert len(pieces) == 8
    assert table.groups() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_experts_of_another_size_have_their_own_pool() -> None:
    table = find_pieces([*experts(0, 0), *experts(1, 50_000, nbytes=800)], n_used=2)
    assert table.kinds == (PieceKind((100, 100), 4, 2, 4), PieceKind((200, 200), 4, 2, 4))
    assert [block.kind for block in table.blocks] == [0, 1]


def test_many_experts_are_in_several_pools() -> None:
    for n_blocks, n, sizes in ((8, 64, [512]), (9, 64, [320, 256]), (9, 256, [768, 768, 768])):
        rows = [row for i in range(n_blocks) for row in experts(i, 100_000 * i, n, 100 * n)]
        table = find_pieces(rows, 8)
        assert [kind.n_pieces for kind in table.kinds] == sizes
        assert {kind.least_slots for kind in table.kinds} == {8}
        assert [block.kind for block in table.blocks] == sorted(b.kind for b in table.blocks)


def test_all_experts_are_used_if_the_model_does_not_say_how_many() -> None:
    assert find_pieces(experts(0, 0), None).kinds[0].least_slots == 4
    assert find_pieces(experts(0, 0), 9).kinds[0].least_slots == 4


def test_what_cannot_be_divided_among_experts_stays() -> None:
    odd = [
        row("blk.0.ffn_gate_exps.scale", (4,), 90_000, 16),
        row("blk.0.ffn_up_exps.weight", (8, 3), 91_000, 300),  # of fewer experts
        row("blk.0.ffn_x_exps.weight", (8, 4), 92_000, 399),
        row("blk.0.ffn_y_exps.weight", (8, 4), 93_000, 400, known=0),
        row("blk.0.ffn_z_exps.weight", (8, 0), 93_000, 0),
        row("mtp.ffn_up_exps.weight", (8, 4), 94_000, 400),
    ]
    table = find_pieces([*experts(0, 0), *odd], 2)
    assert set(table.places) == {"blk.0.ffn_gate_exps.weight", "blk.0.ffn_down_exps.weight"}


def test_without_experts_a_block_is_a_piece_of_runs_of_its_file() -> None:
    rows = [
        row("output.weight", (8,), 0, 100),
        row("blk.0.b.weight", (8,), 1064, 100),
        row("blk.0.a.weight", (8,), 1000, 50),
        row("blk.0.c.weight", (8,), 9000, 70),  # far away
        row("blk.1.b.weight", (8,), 20_064, 100),
        row("blk.1.a.weight", (8,), 20_000, 50),
        row("blk.1.c.weight", (8,), 0, 70, file=1),
    ]
    table = find_pieces(rows, None)
    assert not table.has_experts
    assert table.kinds == (PieceKind((164, 70), 2, 2, 1),)
    assert table.blocks == (
        BlockPieces(0, 0, 1, ((0, 1000), (0, 9000))),
        BlockPieces(0, 1, 1, ((0, 20_000), (1, 0))),
    )
    assert table.places["blk.1.b.weight"] == TensorPlace(0, 0, 64, 100, 1, 1)
    assert table.places["blk.0.c.weight"] == TensorPlace(0, 1, 0, 70, 0, 1)
    assert find_pieces(rows[:4], None).kinds[0].least_slots == 1


def test_a_piece_of_too_many_parts_has_the_largest() -> None:
    rows = [row(f"blk.0.t{i}.weight", (8,), i * 100_000, 100 + i) for i in range(MOST_PARTS + 2)]
    table = find_pieces(rows, None)
    assert len(table.kinds[0].part_bytes) == MOST_PARTS
    assert "blk.0.t0.weight" not in table.places
    assert f"blk.0.t{MOST_PARTS + 1}.weight" in table.places


def test_a_model_of_other_names_has_no_pieces() -> None:
    table = find_pieces([row("model.layers.0.weight", (8,), 0, 8)], None)
    assert (table.blocks, table.kinds, dict(table.places)) == ((), (), {})
