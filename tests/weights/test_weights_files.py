"""Which files are a model: whole ones, split ones, those of an index, and what is none of these."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")

import gguf_files as gf
import interrupts
import safetensors_files as sf
from conftest import Run
from models.make import TINY, write_model
from unimem._core.gguf import GGUFHeader
from unimem._core.safetensors import SafetensorsHeader
from unimem.errors import FormatError, GGUFError, SafetensorsError
from unimem.weights.files import open_model, reopen
from unimem.weights.opened import open_weights

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_no_descriptor")


@pytest.fixture
def leaves_no_descriptor() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file.gguf"
    file.write_bytes(gf.everything())
    return file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", shape=TINY, kind="q8_0")


# ---- split GGUF --------------------------------------------------------------------------------


@pytest.mark.parametrize("no_tensor_first", [False, True])
@pytest.mark.parametrize("most", [1, 4, 1000])
def test_a_split_model_is_the_model(model: Path, most: int, no_tensor_first: bool) -> None:
    parts = gf.split(model, most, no_tensor_first=no_tensor_first)
    with open_weights(model) as whole:
        # From any part, the model is the same; paths are those of the parts, in order.
        for part in {parts[0], parts[-1], parts[len(parts) // 2]}:
            with open_weights(part) as split:
                assert split.files == tuple(map(str, parts))
                assert list(split.tensors) == list(whole.tensors)
                assert split.by_type() == whole.by_type()
                assert len(split.blocks) == len(parts)
                assert split.mapped_bytes == sum(p.stat().st_size for p in parts)
                for name, tensor in split.tensors.items():
                    here = whole.tensors[name]
                    assert (tensor.ne, tensor.type) == (here.ne, here.type)
                    assert np.array_equal(tensor.as_array(), here.as_array())
                keys = [key for key in split.metadata if not key.startswith("split.")]
                assert keys == list(whole.metadata)
                assert "and" in repr(split) or len(parts) == 1
                assert split.fingerprint != whole.fingerprint


def test_the_fingerprint_is_of_all_parts(model: Path) -> None:
    parts = gf.split(model, 8)
    with open_weights(parts[0]) as weights:
        first = weights.fingerprint
    with parts[-1].open("ab") as file:
        file.write(b"\0")
    with open_weights(parts[0]) as weights:
        assert weights.fingerprint != first
        assert len(first) == len(weights.fingerprint) == 32


def test_a_relative_path_and_links(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = gf.split(model, 8)
    monkeypatch.chdir(model.parent)
    with open_weights(parts[1].name) as weights:
        assert weights.files == tuple(part.name for part in parts)
    # As caches of models have them: links with names, to files that are called by a hash.
    folder = model.parent / "snapshot"
    folder.mkdir()
    for i, part in enumerate(parts):
        blob = model.parent / f"blob{i}"
        part.rename(blob)
        (folder / part.name).symlink_to(blob)
    with open_weights(folder / parts[0].name) as weights:
        assert len(weights.files) == len(parts)


def test_a_missing_part_is_named(model: Path) -> None:
    parts = gf.split(model, 8)
    for missing in (0, 1, len(parts) - 1):
        kept = parts[missing].read_bytes()
        parts[missing].unlink()
        other = parts[missing - 1]
        with pytest.raises(
            FileNotFoundError, match=f"Part {missing + 1} of {len(parts)}"
        ) as caught:
            open_weights(other)
        assert caught.value.filename == str(parts[missing])
        parts[missing].write_bytes(kept)


def of_another_model(parts: list[Path], other: Path) -> tuple[Path, str]:
    shutil.copy(gf.split(other, 9)[1], parts[1])
    return parts[1], "part of another model"


def with_other_numbers(parts: list[Path], other: Path) -> tuple[Path, str]:
    shutil.copy(parts[2], parts[1])
    return parts[1], "part of another model: split.count and split.no are"


def with_fewer_tensors(parts: list[Path], other: Path) -> tuple[Path, str]:
    entries = [
        gf.kv("split.no", gf.UINT16, gf.values(gf.UINT16, [1])),
        gf.kv("split.count", gf.UINT16, gf.values(gf.UINT16, [len(parts)])),
    ]
    parts[1].write_bytes(gf.with_data(gf.head(0, 2), *entries)[0])
    return parts[-1], "split.tensors.count is"  # which is the file that was asked for


def with_the_same_tensors(parts: list[Path], other: Path) -> tuple[Path, str]:
    # The first, numbered as the second: as many tensors, but some are there twice.
    raw, number = parts[0].read_bytes(), gf.string("split.no") + gf.u32(gf.UINT16)
    at = raw.index(number) + len(number)
    parts[1].write_bytes(raw[:at] + b"\1\0" + raw[at + 2 :])
    return parts[1], "is in .* already"


@pytest.mark.parametrize(
    "change", [of_another_model, with_other_numbers, with_fewer_tensors, with_the_same_tensors]
)
def test_parts_that_do_not_belong_together(
    model: Path, tmp_path: Path, change: Callable[[list[Path], Path], tuple[Path, str]]
) -> None:
    parts = gf.split(model, 7)
    (tmp_path / "other").mkdir()
    other = write_model(tmp_path / "other" / "o.gguf", "qwen3", shape=TINY, kind="q8_0")
    culprit, text = change(parts, other)
    with pytest.raises(GGUFError, match=text) as caught:
        open_weights(parts[-1])
    assert caught.value.path == str(culprit)


@pytest.mark.parametrize(
    "name",
    [
        "m.gguf",
        "m-00001-of-00003.gguf.bak",
        "m-1-of-3.gguf",
        "m-00002-of-00003.gguf",
        "m-00001-of-00004.gguf",
    ],
)
def test_a_part_with_another_name(model: Path, tmp_path: Path, name: str) -> None:
    parts = gf.split(model, 8)
    count = len(parts)
    wrong = tmp_path / "away" / name.replace("00003", f"{count:05}")
    wrong.parent.mkdir()
    parts[0].rename(wrong)
    with pytest.raises(GGUFError, match=f"end with -00001-of-{count:05}.gguf") as caught:
        open_weights(wrong)
    assert caught.value.path == str(wrong)


@pytest.mark.parametrize(
    "entry",
    [
        gf.kv("split.count", gf.STRING, gf.string("2")),
        gf.kv("split.count", gf.BOOL, b"\1"),
        gf.kv("split.count", gf.INT32, gf.values(gf.INT32, [-2])),
        gf.kv("split.count", gf.FLOAT32, gf.values(gf.FLOAT32, [2.0])),
    ],
    ids=["string", "bool", "negative", "float"],
)
def test_keys_of_a_split_that_are_no_numbers(tmp_path: Path, entry: gf.Part) -> None:
    file = tmp_path / "m-00001-of-00002.gguf"
    file.write_bytes(gf.with_data(gf.head(0, 1), entry)[0])
    with pytest.raises(GGUFError, match=r"integer split\.count") as caught:
        open_weights(file)
    assert caught.value.path == str(file)


@pytest.mark.parametrize("count", [0, 1])
def test_a_count_of_one_needs_no_number(tmp_path: Path, count: int) -> None:
    entry = gf.kv("split.count", gf.UINT16, gf.values(gf.UINT16, [count]))
    file = tmp_path / "m.gguf"
    file.write_bytes(gf.with_data(gf.head(0, 1), entry)[0])
    with open_weights(file) as weights:
        assert weights.files == (str(file),)


def test_a_model_that_was_split_in_one_stays_alone(model: Path, tmp_path: Path) -> None:
    (part,) = gf.split(model, 1000)
    renamed = part.rename(tmp_path / "renamed.gguf")
    with open_weights(renamed) as weights:
        assert weights.files == (str(renamed),)


# ---- safetensors -------------------------------------------------------------------------------

SHARDS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "model-00001-of-00002.safetensors": {"b": ("F16", (2, 3)), "a": ("BF16", (4,))},
    "model-00002-of-00002.safetensors": {"c": ("F8_E4M3", (2, 2)), "d": ("F4", (3, 2))},
}


def write_index(folder: Path, where: Any, name: str = "model.safetensors.index.json") -> Path:
    index = folder / name
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return index


@pytest.fixture
def index(tmp_path: Path) -> Path:
    for name, tensors in SHARDS.items():
        (tmp_path / name).write_bytes(sf.write(tensors, {"format": "pt"}))
    where = {tensor: name for name, tensors in SHARDS.items() for tensor in tensors}
    return write_index(tmp_path, where)


@pytest.mark.parametrize("load", ["map", "copy", "direct"])
def test_an_index_is_a_model(index: Path, load: Any) -> None:
    with open_weights(index, load=load) as weights:
        assert [Path(file).name for file in weights.files] == sorted(SHARDS)
        assert list(weights.tensors) == ["b", "a", "c", "d"]
        assert weights.by_type() == {"f16": 12, "bf16": 8, "f8_e4m3": 4, "f4": 3}
        assert weights.metadata["format"] == "pt"
        for name, tensors in SHARDS.items():
            file = index.parent / name
            raw = file.read_bytes()
            for tensor_name in tensors:
                tensor = weights.tensors[tensor_name]
                assert tensor.file == str(file)
                data = raw[tensor.offset : tensor.offset + tensor.nbytes]
                assert tensor.as_array().tobytes() == data
        four_bits = weights.tensors["d"]
        assert (four_bits.shape, four_bits.ggml_type) == ((3, 2), None)
        assert four_bits.as_array().shape == (3, 1)


def test_one_file_of_an_index_is_a_model_too(index: Path) -> None:
    name = next(iter(SHARDS))
    with open_weights(index.parent / name) as weights:
        assert list(weights.tensors) == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("\xff", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no weight_map"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {"a": 1}}', "1 is not the name of a file"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "not the name of a file"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not the name of a file"),
        ('{"weight_map": {"a": ".."}}', "not the name of a file"),
        ('{"weight_map": {"a": ""}}', "not the name of a file"),
        ('{"weight_map": {"a": "x\\u0000"}}', "not the name of a file"),
        ('{"weight_map": {"a": "x\\ud800"}}', "not the name of a file"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "occurs twice"),
    ],
    ids=lambda value: value[:30],
)
def test_an_index_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(text.encode("latin-1"))
    with pytest.raises(SafetensorsError, match=said) as caught:
        open_weights(index)
    assert caught.value.path == str(index)
    # An index is wrong as a whole.
    assert caught.value.offset is None
    assert "at byte" not in str(caught.value)


def test_an_index_that_is_too_long(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, (32 << 20) + 1)
    with pytest.raises(SafetensorsError, match="longer than 32 MiB"):
        open_weights(index)


def test_an_index_that_names_itself(tmp_path: Path) -> None:
    name = "model.safetensors.index.json"
    index = write_index(tmp_path, {"a": name}, name)
    with pytest.raises(SafetensorsError, match="is not safetensors") as caught:
        open_weights(index)
    assert caught.value.path == str(index)


def test_a_tensor_whose_name_is_no_text(index: Path) -> None:
    where = json.loads(index.read_text())["weight_map"]
    write_index(index.parent, where | {"\ud800": "model-00002-of-00002.safetensors"})
    with pytest.raises(SafetensorsError, match="does not have the tensor") as caught:
        open_weights(index)
    assert str(caught.value).isprintable()


def test_files_that_do_not_belong_to_the_index(index: Path) -> None:
    where = json.loads(index.read_text())["weight_map"]
    one, two = SHARDS
    for changed, culprit, text in (
        (where | {"e": two}, two, "does not have the tensor 'e'"),
        ({k: v for k, v in where.items() if k != "a"}, one, "is not said to have the tensor 'a'"),
    ):
        write_index(index.parent, changed)
        with pytest.raises(SafetensorsError, match=text) as caught:
            open_weights(index)
        assert caught.value.path == str(index.parent / culprit)
    write_index(index.parent, where | {"e": "missing.safetensors"})
    with pytest.raises(FileNotFoundError, match="names this file") as missing:
        open_weights(index)
    assert missing.value.filename == str(index.parent / "missing.safetensors")
    write_index(index.parent, {"one": "m.gguf"})
    (index.parent / "m.gguf").write_bytes(gf.everything())
    with pytest.raises(SafetensorsError, match="not safetensors"):
        open_weights(index)


# ---- descriptors ------------------------------------------------------------------------------


def test_too_few_descriptors_for_all_files(model: Path, run_python: Run) -> None:
    parts = gf.split(model, 1)
    script = f"""
        import errno, os, resource
        import unimem as um
        um.open_weights({str(model)!r}).close()  # so that all is imported
        held = len(os.listdir("/proc/self/fd"))
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 4, most))
        try:
            um.open_weights({str(parts[0])!r})
        except OSError as error:
            assert error.errno == errno.EMFILE
            assert "ulimit -n" in str(error) and {str(model.parent)!r} in error.filename, error
        else:
            raise AssertionError("they were opened")
        assert len(os.listdir("/proc/self/fd")) == held
    """
    run = run_python(script)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("kind", ["split", "index"])
def test_an_interrupt_at_any_moment_leaves_no_descriptor(
    model: Path, index: Path, kind: str
) -> None:
    path = gf.split(model, 20)[0] if kind == "split" else index
    held = len(os.listdir("/proc/self/fd"))

    def call() -> None:
        with open_model(path) as opened:
            for file in opened.files:
                with reopen(file):
                    pass

    for _ in interrupts.at_each_line(call, "unimem/weights/files.py"):
        assert len(os.listdir("/proc/self/fd")) == held


# ---- what is no model --------------------------------------------------------------------------


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open_weights(tmp_path / "no.gguf")
    assert caught.value.filename == str(tmp_path / "no.gguf")


def test_a_path_that_no_file_has(tmp_path: Path) -> None:
    for wrong in ("\ud800", str(tmp_path / "\ud800.index.json")):
        with pytest.raises(ValueError, match="cannot be the path of a file") as caught:
            open_weights(wrong)
        assert str(caught.value).isprintable()


def test_a_link_that_leads_nowhere_says_where(tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to("away/blob")
    with pytest.raises(FileNotFoundError, match=r"leads to 'away/blob'") as caught:
        open_weights(link)
    assert caught.value.filename == str(link)
    link.unlink()
    link.symlink_to("link.gguf")
    with pytest.raises(OSError, match="symbolic links"):
        open_weights(link)


def test_a_link_is_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    with open_weights(tmp_path / "link") as weights:
        assert weights.files == (str(tmp_path / "link"),)


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="give a model file in it") as caught:
        open_weights(tmp_path)
    assert caught.value.filename == str(tmp_path)


@pytest.mark.parametrize("name", ["fifo", "fifo.safetensors", "fifo.index.json"])
def test_fifo_does_not_wait_for_a_writer(tmp_path: Path, name: str) -> None:
    fifo = tmp_path / name
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="regular file") as caught:
        open_weights(fifo)
    assert caught.value.filename == str(fifo)


def test_device() -> None:
    with pytest.raises(OSError, match="regular file"):
        open_weights("/dev/zero")


AS_NOBODY = """
import os, sys
from unimem.weights.opened import open_weights
path, readable = sys.argv[1:]
open_weights(readable).close()  # so that all is imported that this user may not read
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    open_weights(path)
except PermissionError as error:
    print(type(error).__name__, error.filename)
"""


def test_a_file_that_may_not_be_read(path: Path) -> None:
    if os.geteuid() != 0:
        path.chmod(0)
        with pytest.raises(PermissionError) as caught:
            open_weights(path)
        assert caught.value.filename == str(path)
        return
    with tempfile.TemporaryDirectory(prefix="unimem-test-") as folder:
        os.chmod(folder, 0o755)
        secret = shutil.copy(path, folder)
        os.chmod(secret, 0o600)
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, secret, str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.split() == ["PermissionError", secret]


@pytest.mark.parametrize(
    ("name", "error"),
    [("empty", GGUFError), ("empty.gguf", GGUFError), ("empty.safetensors", SafetensorsError)],
)
def test_empty_file(tmp_path: Path, name: str, error: type[FormatError]) -> None:
    (tmp_path / name).touch()
    with pytest.raises(error, match="the file ends inside its header") as caught:
        open_weights(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)


def test_file_in_memory(path: Path) -> None:
    for raw, name in ((path.read_bytes(), "four"), (sf.everything(), "scalar")):
        fd = os.memfd_create("model", os.MFD_CLOEXEC)
        try:
            os.write(fd, raw)
            for load in ("map", "copy"):
                with open_weights(f"/proc/self/fd/{fd}", load=load) as w:
                    assert w.tensors[name].as_array().size > 0
        finally:
            os.close(fd)


@pytest.mark.parametrize("format", ["gguf", "safetensors"])
def test_file_that_shrinks_while_its_header_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    kind: Any = GGUFHeader
    if format == "safetensors":
        path.write_bytes(sf.everything())
        kind = SafetensorsHeader
    size = path.stat().st_size
    with path.open("rb") as file, pytest.raises(OSError, match="shorter") as caught:
        kind(file.fileno(), size + (1 << 20), str(path))
    assert str(path) in str(caught.value)

    class ReadThenTruncate(kind):  # type: ignore[misc]
        def __init__(self, _: int, file_nbytes: int, name: str) -> None:
            os.truncate(name, file_nbytes - 1)

    monkeypatch.setattr(
        f"unimem.weights.files.{'GGUFHeader' if format == 'gguf' else 'SafetensorsHeader'}",
        ReadThenTruncate,
    )
    for load in ("map", "copy", "direct"):
        with pytest.raises(OSError, match=r"shorter|replaced or written to") as caught:
            open_weights(path, load=load)
        assert caught.value.filename == str(path)
        os.truncate(path, size)
