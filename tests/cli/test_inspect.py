"""`unimem inspect`: its pages, its picture of residency, and its document."""

from __future__ import annotations

import errno
import io
import json
import mmap
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unimem as um
from support.files import gguf_files as g
from support.files import safetensors_files as st
from support.project.documents import check_document
from support.terminal.screens import CONTROL, Screen, show
from unimem.cli import inspect as command
from unimem.cli import terminal
from unimem.weights.gguf import GGUFHeader
from unimem.weights.residency import Residency
from unimem.weights.safetensors import SafetensorsHeader

PAGE = mmap.PAGESIZE
BIG = 3 << 20


def run(*arguments: object, **options: Any) -> Screen:
    return show("inspect", *arguments, **options)


def page_of(*arguments: object, **options: Any) -> str:
    code, out, err = run(*arguments, **options)
    assert (code, err) == (0, "")
    return out


def document_of(*arguments: object) -> dict[str, Any]:
    out = page_of(*arguments, "--json")
    assert out.count("\n") == 1
    document: dict[str, Any] = json.loads(out)
    check_document(document)
    return document


def assert_lines(page: str, *lines: str) -> None:
    for line in lines:
        assert re.search(f"^{line}$", page, re.M), f"{line}\n{page}"


def entries() -> list[list[g.Part]]:
    return [
        g.kv("general.architecture", g.STRING, g.string("none")),
        g.kv("general.name", g.STRING, g.string("A \x1b[2Jname")),
        g.kv("none.context_length", g.UINT32, g.u32(4096)),
        g.kv("tokens", g.ARRAY, g.array(g.STRING, 3, *map(g.string, ("<s>", "a\nb", "ö")))),
        g.kv("many", g.ARRAY, g.array(g.INT32, 1000, g.values(g.INT32, range(1000)))),
        g.kv("nested", g.ARRAY, g.array(g.ARRAY, 1, g.array(g.INT8, 2, g.values(g.INT8, (1, 2))))),
        g.kv("template", g.STRING, g.string("first line\nsecond " + "x" * 200)),
        g.kv("eps", g.FLOAT32, struct.pack("<f", 1e-5)),
        g.kv("infinite", g.FLOAT64, struct.pack("<d", float("inf"))),
        g.kv("flag", g.BOOL, b"\x01"),
        g.kv("evil\x1b]0;key", g.UINT8, b"\x07"),
    ]


def write(path: Path, more: list[list[g.Part]], name: str = "") -> Path:
    kvs = [*entries(), *more]
    tensors = [
        g.tensor(f"{name}big.weight", (1024, BIG // 4096), g.F32, 0),
        g.tensor(f"{name}small\x1b[1m", (64,), g.Q8_0, BIG),
        g.tensor(f"{name}scalar", (), g.F32, BIG + 96),
    ]
    head = g.head(len(tensors), len(kvs))
    path.write_bytes(g.with_data(head, *kvs, *tensors, nbytes=BIG + 128)[0])
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("inspect") / "model.gguf", [])


def test_unknown_types_and_empty_names_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    rows = [g.tensor("", (8,), g.F32, 32), g.tensor("odd", (8,), 156, 0)]
    entry = g.kv("a key before them", g.UINT8, b"\1")
    path.write_bytes(g.with_data(g.head(2, 1), entry, *rows, nbytes=64)[0])
    assert_lines(
        page_of(path, "--tensors"), r"type_156 +1 +32 B +50\.0% .*", r"'' +f32 +8 .*",
        r"odd: type 156 is not known here: its size is that of the gap to the next tensor",
    )  # fmt: skip
    assert document_of(path)["types"][0]["type"] in ("f32", "type_156")
    other = tmp_path / "m.safetensors"
    other.write_bytes(st.write({"": ("U8", (3,))}, {"": "x"}))
    assert_lines(page_of(other, "--tensors"), "'' +x", "'' +u8 +3 .*")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("split")

    def keys(i: int) -> list[list[g.Part]]:
        return [
            g.kv("split.no", g.UINT16, struct.pack("<H", i)),
            g.kv("split.count", g.UINT16, struct.pack("<H", 2)),
            g.kv("split.tensors.count", g.INT32, struct.pack("<i", 6)),
        ]

    paths = [folder / f"model-{i + 1:05}-of-00002.gguf" for i in range(2)]
    return [write(path, keys(i), f"part{i}.") for i, path in enumerate(paths)]


@pytest.fixture
def half_in_ram(tmp_path: Path) -> Iterator[Path]:
    path = write(tmp_path / "half.gguf", [])
    with um.open_weights(path, load="map") as weights:
        (block,) = weights.blocks
        block.advise("random")
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if weights.residency().resident_bytes:
            pytest.skip(f"the file system of {tmp_path} keeps files in memory")
        block._warm_range(0, block.nbytes // 2 // PAGE * PAGE)
        # Mapped pages stay.
        yield path


def test_the_page(model: Path) -> None:
    out = page_of(model)
    assert not CONTROL.search(out)
    assert [line for line in out.splitlines() if len(line) > 80 and str(model) not in line] == []
    with um.open_weights(model, load="map") as weights:
        fingerprint = weights.fingerprint
    assert_lines(
        out, r"model +A \\x1b\[2Jname", r"architecture +none",
        rf"parameters +{BIG // 4 + 65:,} in 3 tensors", r"context +4,096 tokens", r"format +GGUF",
        rf"files +{re.escape(str(model))} \(3\.0 MiB\)", rf"fingerprint +{fingerprint}",
        r"type +tensors +size +share", r"f32 +2  3\.0 MiB  100\.0%  █{47}",
        r"q8_0 +1     68 B    0\.0%", r"total +3  3\.0 MiB",
        r'tokens +\[3 strings\] "<s>" "a\\nb" "ö"', r"many +\[1,000 int32\] 0 1 2 .* \.\.\.",
        r"nested +\[1 array\] \[2 int8\] 1 2", r"template +first line\\nsecond x+ \.\.\.",
        r"eps +1e-05", r"infinite +inf", r"flag +true", r"evil\\x1b\]0;key +7",
    )  # fmt: skip
    assert "offset" not in out
    assert "in RAM" not in out


def test_tensors(model: Path) -> None:
    out = page_of(model, "--tensors")
    assert not CONTROL.search(out)
    head, *rows = out[out.index("\nname ") + 1 :].splitlines()
    assert re.fullmatch(r"name +type +shape +size +offset", head)
    with um.open_weights(model, load="map") as weights:
        first = weights.tensors["big.weight"].offset
    expected = (
        rf"big\.weight +f32 +768x1024 +3\.0 MiB +{first}",
        rf"small\\x1b\[1m +q8_0 +64 +68 B +{first + BIG}",
        rf"scalar +f32 +scalar +4 B +{first + BIG + 96}",
    )
    assert len(rows) == len(expected)
    assert all(map(re.fullmatch, expected, rows))


def test_whole_values(model: Path) -> None:
    out = page_of(model, "--metadata", "template", "--metadata", "tokens")
    assert out == f"template\nfirst line\nsecond {'x' * 200}\ntokens\n<s>\na\\nb\nö\n"
    assert page_of(model, "--metadata", "evil\x1b]0;key") == "evil\\x1b]0;key\n7\n"
    said = f"unimem: {model}: its metadata has no key 'tokem'\n"
    assert run(model, "--metadata", "eps", "--metadata", "tokem") == (1, "", said)


def test_a_split_model_is_one_model(split: list[Path]) -> None:
    out = page_of(split[1], "--tensors", "--residency")
    assert all(f"{path} (3.0 MiB)" in out for path in split)
    assert_lines(out, r"total +6  6\.0 MiB", r"all files: .* of 6\.0 MiB in RAM.*")
    for i, path in enumerate(split):
        assert_lines(out, rf"part{i}\.big\.weight .*%  {path.name}")
        assert_lines(out, rf"{re.escape(str(path))}: .* of 3\.0 MiB in RAM.*")


def test_safetensors(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors writes the model")
    path = tmp_path / "model.safetensors"
    tensors = {"one": np.ones((3, 5), np.float32), "two": np.ones(7, np.float16)}
    numpy.save_file(tensors, path, metadata={"format": "np"})
    assert_lines(
        page_of(path, "--tensors"),
        r"model +unknown",
        r"architecture +unknown",
        r"parameters +22 in 2 tensors",
        r"context +unknown",
        r"format +safetensors",
        r"format +np",
        r"one +f32 +3x5 .*",
    )
    document = document_of(path)
    assert (document["format"], document["architecture"]) == ("safetensors", None)
    assert document["metadata"] == {"format": "np"}


def test_a_model_without_tensors_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.write_bytes(g.with_data(g.head(0, 0), nbytes=0)[0])
    out = page_of(path, "--tensors", "--residency")
    assert_lines(out, r"parameters +0 in 0 tensors")
    assert "metadata" not in out
    assert document_of(path, "--residency")["tensors"] == []


def picture_of(out: str) -> tuple[list[str], str]:
    *lines, key = out[out.index("\nin RAM\n") :].splitlines()[3:]
    return lines, key


def test_the_picture_shows_what_is_in_ram(half_in_ram: Path) -> None:
    out = page_of(half_in_ram, "--residency", "--tensors")
    lines, key = picture_of(out)
    cells = "".join(lines)
    n_pages = -(-half_in_ram.stat().st_size // PAGE)
    assert len(cells) == min(640, n_pages)
    # Reading the header may have triggered readahead beyond the requested range.
    assert re.fullmatch("[▓█]+▒?·+[▓▒]*", cells), cells
    assert abs(cells.count("·") - len(cells) / 2) < len(cells) / 8
    assert "▓ in RAM" in key or "█ in RAM, in huge pages" in key
    assert "· not in RAM" in key
    assert "a character is " in key
    in_ram = r".*: 1\.\d MiB of 3\.0 MiB in RAM \(5\d%\)(, .*)?, 1\.\d MiB on node 0"
    assert_lines(out, in_ram, r"big\.weight .* 5\d%")


def test_the_picture_in_ascii(half_in_ram: Path) -> None:
    out = page_of(half_in_ram, "--residency", encoding="ascii")
    assert out.isascii()
    lines, key = picture_of(out)
    assert re.fullmatch(r"[=#]+-?\.+[=-]*", "".join(lines)), lines
    assert ". not in RAM" in key


def test_the_picture_is_as_wide_as_the_terminal(half_in_ram: Path) -> None:
    screen = run(half_in_ram, "--residency", columns=100)
    assert "\x1b[2m··" in screen.out
    lines, _ = picture_of(screen.plain)
    n_full = -(-half_in_ram.stat().st_size // PAGE) // 100
    assert [len(line) for line in lines[:n_full]] == [100] * n_full
    shown = page_of(half_in_ram, "--residency", columns=100, NO_COLOR="1")
    assert "\x1b" not in shown
    assert "··" in shown


def test_cells() -> None:
    def cell(*figures: int) -> str:
        resident, huge, unknown = figures
        return command._cell(Residency(10, resident, resident, huge, 0, unknown, {}))

    assert [cell(10, 10, 0), cell(10, 9, 0), cell(9, 9, 0)] == ["huge", "full", "part"]
    assert [cell(1, 0, 9), cell(0, 0, 10), cell(0, 0, 0)] == ["part", "unknown", "none"]


def test_looking_loads_no_pages(half_in_ram: Path) -> None:
    with um.open_weights(half_in_ram, load="map") as weights:
        before = weights.residency().resident_bytes
        page_of(half_in_ram, "--residency")
        assert weights.residency().resident_bytes == before


def test_the_document(model: Path) -> None:
    document = document_of(model, "--residency", "--tensors")
    with um.open_weights(model, load="map") as weights:
        assert document["fingerprint"] == weights.fingerprint
        assert document["nbytes"] == weights.nbytes
        assert document["residency"]["nbytes"] == weights.residency().nbytes
        names = ("name", "type", "nbytes", "offset", "file")
        assert document["tensors"] == [
            {name: getattr(tensor, name) for name in names} | {"shape": list(tensor.shape)}
            for tensor in weights.tensors.values()
        ]
    residency = document["residency"]
    assert list(residency["files"]) == [str(model)]
    assert residency["tensors"]["big.weight"]["nbytes"] == BIG
    assert sum(residency["nodes"].values()) == residency["resident_bytes"]
    expected = {
        "schema": "unimem.inspect/1", "unimem": um.__version__, "format": "gguf",
        "name": "A \x1b[2Jname", "architecture": "none", "context": 4096,
        "parameters": BIG // 4 + 65, "content_hash": None,
        "files": [{"path": str(model), "nbytes": model.stat().st_size}],
        "types": [
            {"type": "f32", "count": 2, "nbytes": BIG + 4},
            {"type": "q8_0", "count": 1, "nbytes": 68},
        ],
    }  # fmt: skip
    assert document | expected == document
    metadata = {
        "tokens": ["<s>", "a\nb", "ö"], "many": list(range(1000)), "nested": [[1, 2]],
        "infinite": "inf", "flag": True,
    }  # fmt: skip
    assert document["metadata"] | metadata == document["metadata"]
    assert document_of(model)["residency"] is None
    assert document_of(model, "--metadata", "flag")["metadata"] == {"flag": True}


def test_content_hash(model: Path) -> None:
    with um.open_weights(model, load="map") as weights:
        digest = weights.content_hash()
    assert document_of(model, "--content-hash")["content_hash"] == digest
    assert_lines(page_of(model, "--content-hash"), f"content +{digest}")


def test_failures(model: Path) -> None:
    assert run("/proc/self/mem") == (1, "", "unimem: /proc/self/mem: Input/output error\n")
    assert run().code == run(model, "--yaml").code == 2


@pytest.mark.parametrize("header", [GGUFHeader, SafetensorsHeader])
def test_an_unreadable_header_names_its_file(header: Any) -> None:
    with open("/proc/self/mem", "rb") as file, pytest.raises(OSError, match="header") as caught:
        header(file.fileno(), 100, "the path")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "the path")


def test_paths_stay_on_one_line(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x\nfiles  good.gguf (1 GiB)\u202e"
    folder.mkdir()
    path = shutil.copy(model, folder)
    shown = str(path).replace("\n", r"\n").replace("\u202e", r"\u202e")
    out = page_of(path, "--residency")
    assert out.count(shown) == 2
    assert "\nfiles  good" not in out
    err = run(folder).err
    assert err.count("\n") == 1
    assert "\u202e" not in err


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_PATIENCE_SECONDS", -1.0)


@pytest.mark.usefixtures("_impatient")
def test_a_bar_follows_the_library_s_progress(model: Path) -> None:
    bar = run(model, "--content-hash", "--json", columns=80).err
    assert "hashing" in bar
    assert re.search(r"\d/3\.0 (MiB|MB)|3\.0/3\.0 MiB", bar), bar
    assert run(model, "--content-hash", "--json").err == ""


@pytest.mark.usefixtures("_impatient")
def test_the_bar_has_bytes_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with terminal.updates("working") as update:
        for i in range(1, 5):
            update(i << 20, 8 << 20)
    shown = stream.getvalue()  # the last picture is drawn at the end, however fast that comes
    assert re.search(r"working .*4\.0/8\.0 MiB +\d+\.\d [KMGT]iB/s +\d+:\d\d:\d\d", shown), shown
