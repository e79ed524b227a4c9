"""`unimem inspect`, as a user has it: in a process of its own, with and without a terminal."""

from __future__ import annotations

import errno
import json
import mmap
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gguf_files as g
import unimem as um
from unimem._core.gguf import GGUFHeader
from unimem._core.safetensors import SafetensorsHeader
from unimem.cli import inspect as command
from unimem.cli import terminal
from unimem.weights.residency import Residency

MAIN = "import sys; from unimem.cli import main; sys.exit(main())"
PATIENT = f"from unimem.cli import terminal; terminal._PATIENCE_SECONDS = -1.0; {MAIN}"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
PAGE = mmap.PAGESIZE
BIG = 3 << 20


def start(*arguments: str | Path, code: str = MAIN, **options: Any) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", code, "inspect", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    return subprocess.Popen(words, encoding="utf-8", **options)


def run(*arguments: str | Path, **options: Any) -> tuple[int, str, str]:
    with start(*arguments, **options) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def document_of(*arguments: str | Path) -> dict[str, Any]:
    code, out, err = run(*arguments, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    document: dict[str, Any] = json.loads(out)
    return document


def on_terminal(*arguments: str | Path, code: str = MAIN, **environment: str) -> tuple[int, str]:
    """Run with a terminal as standard output and standard error; give what it shows."""
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "24"} | environment
    env = {name: value for name, value in env.items() if name != "NO_COLOR" or environment}
    shown = b""
    with start(*arguments, code=code, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        with suppress(OSError):  # EIO: the other side was closed
            while part := os.read(ours, 4096):
                shown += part
        os.close(ours)
    return process.returncode, shown.decode()


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


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("split")
    return [
        write(
            folder / f"model-{i + 1:05}-of-00002.gguf",
            [
                g.kv("split.no", g.UINT16, struct.pack("<H", i)),
                g.kv("split.count", g.UINT16, struct.pack("<H", 2)),
                g.kv("split.tensors.count", g.INT32, struct.pack("<i", 6)),
            ],
            f"part{i}.",
        )
        for i in range(2)
    ]


@pytest.fixture
def half_in_ram(tmp_path: Path) -> Iterator[Path]:
    """A model whose first half is in the page cache."""
    path = write(tmp_path / "half.gguf", [])
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    with um.open_weights(path, load="map") as weights:
        (block,) = weights.blocks
        block.advise("random")
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        if weights.residency().resident_bytes:
            pytest.skip(f"the file system of {tmp_path} keeps files in memory")
        block._warm_range(0, block.nbytes // 2 // PAGE * PAGE)
        # What is mapped stays.
        yield path


# ---- the page -----------------------------------------------------------------------------------


def test_the_page(model: Path) -> None:
    code, out, err = run(model)
    assert (code, err) == (0, "")
    assert not CONTROL.search(out)
    assert [line for line in out.splitlines() if len(line) > 80 and str(model) not in line] == []
    with um.open_weights(model, load="map") as weights:
        fingerprint = weights.fingerprint
    for line in (
        r"model +A \\x1b\[2Jname",
        r"architecture +none",
        rf"parameters +{BIG // 4 + 65:,} in 3 tensors",
        r"context +4,096 tokens",
        r"format +GGUF",
        rf"files +{re.escape(str(model))} \(3\.0 MiB\)",
        rf"fingerprint +{fingerprint}",
        r"type +tensors +size +share",
        r"f32 +2  3\.0 MiB  100\.0%  █{47}",
        r"q8_0 +1     68 B    0\.0%",
        r"total +3  3\.0 MiB",
        r'tokens +\[3 strings\] "<s>" "a\\nb" "ö"',
        r"many +\[1,000 int32\] 0 1 2 .* \.\.\.",
        r"nested +\[1 array\] \[2 int8\] 1 2",
        r"template +first line\\nsecond x+ \.\.\.",
        r"eps +1e-05",
        r"infinite +inf",
        r"flag +true",
        r"evil\\x1b\]0;key +7",
    ):
        assert re.search(f"^{line}$", out, re.M), f"{line}\n{out}"
    assert "offset" not in out
    assert "in RAM" not in out


def test_tensors(model: Path) -> None:
    _, out, _ = run(model, "--tensors")
    assert not CONTROL.search(out)
    table = out[out.index("\nname ") + 1 :].splitlines()
    assert re.fullmatch(r"name +type +shape +size +offset", table[0])
    with um.open_weights(model, load="map") as weights:
        first = weights.tensors["big.weight"].offset
    assert re.fullmatch(rf"big\.weight +f32 +768x1024 +3\.0 MiB +{first}", table[1])
    assert re.fullmatch(rf"small\\x1b\[1m +q8_0 +64 +68 B +{first + BIG}", table[2])
    assert re.fullmatch(rf"scalar +f32 +scalar +4 B +{first + BIG + 96}", table[3])
    assert len(table) == 4


def test_whole_values(model: Path) -> None:
    code, out, err = run(model, "--metadata", "template", "--metadata", "tokens")
    assert (code, err) == (0, "")
    assert out == f"template\nfirst line\nsecond {'x' * 200}\ntokens\n<s>\na\\nb\nö\n"
    code, out, err = run(model, "--metadata", "evil\x1b]0;key")
    assert (code, out) == (0, "evil\\x1b]0;key\n7\n")
    code, out, err = run(model, "--metadata", "eps", "--metadata", "tokem")
    assert (code, out) == (1, "")
    assert err == f"unimem: {model}: its metadata have no key 'tokem'\n"


def test_a_split_model_is_one(split: list[Path]) -> None:
    code, out, err = run(split[1], "--tensors", "--residency")
    assert (code, err) == (0, "")
    assert all(f"{path} (3.0 MiB)" in out for path in split)
    assert re.search(r"^total +6  6\.0 MiB$", out, re.M)
    for i, path in enumerate(split):
        assert re.search(rf"^part{i}\.big\.weight .*%  {path.name}$", out, re.M)
        assert re.search(rf"^{re.escape(str(path))}: .* of 3\.0 MiB in RAM", out, re.M)
    assert re.search(r"^all files: .* of 6\.0 MiB in RAM", out, re.M)


def test_safetensors(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors writes the model")
    path = tmp_path / "model.safetensors"
    tensors = {"one": np.ones((3, 5), np.float32), "two": np.ones(7, np.float16)}
    numpy.save_file(tensors, path, metadata={"format": "np"})
    code, out, err = run(path, "--tensors")
    assert (code, err) == (0, "")
    for line in (
        r"model +unknown",
        r"architecture +unknown",
        r"parameters +22 in 2 tensors",
        r"context +unknown",
        r"format +safetensors",
        r"format +np",
        r"one +f32 +3x5 .*",
    ):
        assert re.search(f"^{line}$", out, re.M), f"{line}\n{out}"
    document = document_of(path)
    assert (document["format"], document["architecture"]) == ("safetensors", None)
    assert document["metadata"] == {"format": "np"}


def test_a_model_without_tensors_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.write_bytes(g.with_data(g.head(0, 0), nbytes=0)[0])
    code, out, err = run(path, "--tensors", "--residency")
    assert (code, err) == (0, "")
    assert re.search(r"^parameters +0 in 0 tensors$", out, re.M)
    assert "metadata" not in out
    assert document_of(path, "--residency")["tensors"] == []


# ---- the picture --------------------------------------------------------------------------------


def picture_of(out: str) -> tuple[str, str]:
    """The cells of one file's picture, and the line below them."""
    lines = out[out.index("\nin RAM\n") :].splitlines()[3:]
    return "".join(lines[:-1]), lines[-1]


def test_the_picture_shows_what_is_in_ram(half_in_ram: Path) -> None:
    code, out, err = run(half_in_ram, "--residency", "--tensors")
    assert (code, err) == (0, "")
    cells, key = picture_of(out)
    n_pages = -(-half_in_ram.stat().st_size // PAGE)
    assert len(cells) == min(640, n_pages)
    # The header was read at the beginning, and readahead may have brought more of it than is asked.
    assert re.fullmatch("[▓█]+▒?·+[▓▒]*", cells), cells
    assert abs(cells.count("·") - len(cells) / 2) < len(cells) / 8
    assert "▓ in RAM" in key or "█ in RAM, in huge pages" in key
    assert "· not in RAM" in key
    assert "a character is " in key
    assert re.search(
        r": 1\.\d MiB of 3\.0 MiB in RAM \(5\d%\)(, .*)?, 1\.\d MiB on node 0$", out, re.M
    )
    assert re.search(r"^big\.weight .* 5\d%$", out, re.M)


def test_the_picture_in_ascii(half_in_ram: Path) -> None:
    _, out, _ = run(half_in_ram, "--residency", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert out.isascii()
    cells, key = picture_of(out)
    assert re.fullmatch(r"[=#]+-?\.+[=-]*", cells), cells
    assert ". not in RAM" in key


def test_the_picture_is_as_wide_as_the_terminal(half_in_ram: Path) -> None:
    code, shown = on_terminal(half_in_ram, "--residency")
    assert code == 0
    assert "\x1b[2m··" in shown
    plain = re.sub(r"\x1b\[\d+m", "", shown).replace("\r\n", "\n")
    lines = plain[plain.index("\nin RAM\n") :].splitlines()[3:]
    n_pages = -(-half_in_ram.stat().st_size // PAGE)
    assert [len(line) for line in lines[: n_pages // 100]] == [100] * (n_pages // 100)
    code, shown = on_terminal(half_in_ram, "--residency", NO_COLOR="1")
    assert code == 0
    assert "\x1b" not in shown
    assert "··" in shown


def test_cells() -> None:
    def cell(*figures: int) -> str:
        resident, huge, unknown = figures
        return command._cell(Residency(10, resident, resident, huge, 0, unknown, {}))

    assert [cell(10, 10, 0), cell(10, 9, 0), cell(9, 9, 0)] == ["huge", "full", "part"]
    assert [cell(1, 0, 9), cell(0, 0, 10), cell(0, 0, 0)] == ["part", "unknown", "none"]


def test_looking_brings_nothing_in(half_in_ram: Path) -> None:
    with um.open_weights(half_in_ram, load="map") as weights:
        before = weights.residency().resident_bytes
        run(half_in_ram, "--residency")
        assert weights.residency().resident_bytes == before


# ---- the document -------------------------------------------------------------------------------


def test_the_document(model: Path) -> None:
    document = document_of(model, "--residency", "--tensors")
    with um.open_weights(model, load="map") as weights:
        look = weights.residency()
        assert document["fingerprint"] == weights.fingerprint
        assert document["files"] == [{"path": str(model), "nbytes": model.stat().st_size}]
        assert document["nbytes"] == weights.nbytes
        assert document["tensors"] == [
            {
                "name": t.name,
                "type": t.type,
                "shape": list(t.shape),
                "nbytes": t.nbytes,
                "offset": t.offset,
                "file": t.file,
            }
            for t in weights.tensors.values()
        ]
    residency = document["residency"]
    assert residency["nbytes"] == look.nbytes
    assert list(residency["files"]) == [str(model)]
    assert residency["tensors"]["big.weight"]["nbytes"] == BIG
    assert sum(residency["nodes"].values()) == residency["resident_bytes"]
    for key, value in {
        "schema": "unimem.inspect/1",
        "unimem": um.__version__,
        "format": "gguf",
        "name": "A \x1b[2Jname",
        "architecture": "none",
        "context": 4096,
        "parameters": BIG // 4 + 65,
        "content_hash": None,
        "types": [
            {"type": "f32", "count": 2, "nbytes": BIG + 4},
            {"type": "q8_0", "count": 1, "nbytes": 68},
        ],
    }.items():
        assert document[key] == value, key
    metadata = document["metadata"]
    assert metadata["tokens"] == ["<s>", "a\nb", "ö"]
    assert metadata["many"] == list(range(1000))
    assert metadata["nested"] == [[1, 2]]
    assert metadata["infinite"] == "inf"
    assert metadata["flag"] is True
    assert document_of(model)["residency"] is None
    assert document_of(model, "--metadata", "flag")["metadata"] == {"flag": True}


def test_content_hash(model: Path) -> None:
    with um.open_weights(model, load="map") as weights:
        digest = weights.content_hash()
    assert document_of(model, "--content-hash")["content_hash"] == digest
    assert re.search(rf"^content +{digest}$", run(model, "--content-hash")[1], re.M)


# ---- failures -----------------------------------------------------------------------------------


def test_failures(tmp_path: Path, model: Path) -> None:
    code, out, err = run(tmp_path / "none.gguf")
    assert (code, out) == (1, "")
    assert err == f"unimem: {tmp_path}/none.gguf: No such file or directory\n"
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:1000])
    code, out, err = run(broken)
    assert (code, out) == (1, "")
    assert err.startswith("unimem: ")
    assert str(broken) in err
    assert run()[0] == 2
    assert run(model, "--yaml")[0] == 2
    code, out, _ = run("--help")
    assert code == 0
    for option in ("--tensors", "--residency", "--metadata", "--content-hash", "--json"):
        assert option in out


def test_a_file_that_cannot_be_read_is_named() -> None:
    code, out, err = run("/proc/self/mem")
    assert (code, out) == (1, "")
    assert err == "unimem: /proc/self/mem: Input/output error\n"


@pytest.mark.parametrize("header", [GGUFHeader, SafetensorsHeader])
def test_a_header_that_cannot_be_read_is_of_a_file(header: Any) -> None:
    with open("/proc/self/mem", "rb") as file, pytest.raises(OSError, match="header") as caught:
        header(file.fileno(), 100, "the path")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "the path")


# ---- what a terminal shows ----------------------------------------------------------------------


def test_paths_stay_on_one_line(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x\nfiles  good.gguf (1 GiB)\u202e"
    folder.mkdir()
    path = shutil.copy(model, folder)
    shown = str(path).replace("\n", r"\n").replace("\u202e", r"\u202e")
    _, out, _ = run(path, "--residency")
    assert out.count(shown) == 2
    assert "\nfiles  good" not in out
    _, _, err = run(folder)
    assert err.count("\n") == 1
    assert "\u202e" not in err


# ---- the bar ------------------------------------------------------------------------------------


def test_a_bar_of_what_the_library_tells(model: Path) -> None:
    code, shown = on_terminal(model, "--content-hash", "--json", code=PATIENT)
    assert code == 0
    bar = shown[: shown.index('{"schema"')]
    assert "hashing" in bar
    assert re.search(r"\d/3\.0 (MiB|MB)|3\.0/3\.0 MiB", bar), bar


def test_no_bar_without_a_terminal(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "_PATIENCE_SECONDS", -1.0)
    with terminal.updates("working") as update:
        update(1, 2)
    assert capsys.readouterr() == ("", "")


def test_the_bar_has_bytes_rate_and_what_remains() -> None:
    script = """
        import time
        from unimem.cli import terminal
        terminal._PATIENCE_SECONDS = -1.0
        with terminal.updates("working") as update:
            for i in range(1, 5):
                update(i << 20, 8 << 20)
                time.sleep(0.15)  # it is drawn ten times a second
    """
    code, shown = on_terminal(code=textwrap.dedent(script))
    assert code == 0
    last = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    assert re.search(r"working .*[1-4]\.0/8\.0 MiB +\d+\.\d MiB/s +0:00:\d\d", last), last
