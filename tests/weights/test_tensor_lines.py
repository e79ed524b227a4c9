"""Lines and JSON of the tensors of a header, however many there are, or how long their names."""

from __future__ import annotations

import json
from pathlib import Path

from support.files import gguf_files as gf
from support.files import safetensors_files as st
from unimem.base.text import format_bytes
from unimem.weights.opened import open_weights
from unimem.weights.tensor_lines import columns, json_items, lines


def test_a_table_and_json_of_tensors(tmp_path: Path) -> None:
    names = ["a", "", 'quote"\\', "\x1b[2J\u202e", "漢"]
    sizes = [0, 1023, 1024, 1536, 3 << 20]
    raw = st.write({name: ("U8", (n,)) for name, n in zip(names, sizes, strict=True)})
    (tmp_path / "m.safetensors").write_bytes(raw)
    with open_weights(tmp_path / "m.safetensors") as weights:
        header = weights._parts[0].file.header
        at = header.data_offset
        rows = [line.split() for line in lines(header, columns(header))]
        assert [row[:3] for row in rows] == [
            [shown, "u8", str(n)]
            for shown, n in zip(["a", "''", 'quote"\\', r"\x1b[2J\u202e", "漢"], sizes, strict=True)
        ]
        assert [" ".join(row[3:5]) for row in rows] == list(map(format_bytes, sizes))
        assert [int(row[5]) for row in rows] == [at + sum(sizes[:i]) for i in range(len(sizes))]
        text = ", ".join(json_items(header, 'pa"th'))
        assert json.loads(f"[{text}]") == [
            {
                "name": name,
                "type": "u8",
                "nbytes": tensor.nbytes,
                "offset": tensor.offset,
                "file": 'pa"th',
                "shape": list(tensor.shape),
            }
            for name, tensor in weights.items()
        ]


def test_a_scalar_and_dimensions_have_numpy_order(tmp_path: Path) -> None:
    rows = [gf.tensor("x", (4, 3, 2), gf.F32, 0), gf.tensor("scalar", (), gf.F32, 96)]
    (tmp_path / "m.gguf").write_bytes(gf.with_data(gf.head(2, 0), *rows, nbytes=100)[0])
    with open_weights(tmp_path / "m.gguf") as weights:
        header = weights._parts[0].file.header
        widths = columns(header)
        assert widths == [6, 3, 6, 4, 3]
        assert list(lines(header, widths)) == [
            "x       f32   2x3x4  96 B  128",
            "scalar  f32  scalar   4 B  224",
        ]
        assert [item["shape"] for item in json.loads(f"[{''.join(json_items(header, ''))}]")] == [
            [2, 3, 4],
            [],
        ]


def test_one_long_name_or_shape_widens_no_other_line(tmp_path: Path) -> None:
    """A header of 3 MB would become a table of 4 GB."""
    tensors = {f"{i:x}": ("U8", (0,)) for i in range(2000)}
    raw = st.write(tensors | {"n" * 60_000: ("U8", (0,)), "long": ("U8", (0, *[1] * 60))})
    (tmp_path / "m.safetensors").write_bytes(raw)
    with open_weights(tmp_path / "m.safetensors") as weights:
        header = weights._parts[0].file.header
        written = sum(map(len, lines(header, columns(header))))
        assert written < 10 * header.nbytes
