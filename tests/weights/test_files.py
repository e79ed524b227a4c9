"""The files of a model: parts, indices, and paths that are no model."""

from __future__ import annotations

import gc
import json
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Run
from support.files import gguf_files as gf
from support.files import safetensors_files as sf
from support.files.weight_bytes import LOADS, mapped_bytes, n_descriptors
from support.models.make import TINY, write_model
from support.processes import interrupts
from unimem.errors import GGUFError, SafetensorsError
from unimem.weights import files
from unimem.weights.files import open_model, reopen
from unimem.weights.opened import open_weights

pytest.importorskip("gguf", reason="gguf (extra test) writes the models: pip install '.[test]'")

pytestmark = pytest.mark.usefixtures("gives_memory_back", "leaves_no_descriptor")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", shape=TINY, kind="q8_0")


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


def test_a_relative_path_and_links(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = gf.split(model, 8)
    monkeypatch.chdir(model.parent)
    with open_weights(parts[1].name) as weights:
        assert weights.files == tuple(part.name for part in parts)
    # As caches of models have them: links with names, to files that are called by a hash.
    folder = model.parent / "snapshot"
    folder.mkdir()
    for i, part in enumerate(parts):
        (folder / part.name).symlink_to(part.rename(model.parent / f"blob{i}"))
    with open_weights(folder / parts[0].name) as weights:
        assert weights.files == tuple(str(folder / part.name) for part in parts)


def test_a_missing_part_is_named(model: Path) -> None:
    parts = gf.split(model, 8)
    count = len(parts)
    for missing in (0, 1, count - 1):
        away = parts[missing].rename(model.with_name("away"))
        with pytest.raises(FileNotFoundError, match=f"Part {missing + 1} of {count}") as caught:
            open_weights(parts[missing - 1])
        assert caught.value.filename == str(parts[missing])
        away.rename(parts[missing])


def test_more_tensors_than_one_file_may_have(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MOST_SPLIT_TENSORS", 20)
    with pytest.raises(GGUFError, match="more than 20 tensors in all parts"):
        open_weights(gf.split(model, 7)[0])


def of_another_model(parts: list[Path]) -> tuple[Path, str]:
    (parts[0].parent / "other").mkdir()
    other = parts[0].parent / "other" / "o.gguf"
    write_model(other, "qwen3", shape=TINY, kind="q8_0")
    shutil.copy(gf.split(other, 9)[1], parts[1])
    return parts[1], "part of another model"


def with_other_numbers(parts: list[Path]) -> tuple[Path, str]:
    shutil.copy(parts[2], parts[1])
    return parts[1], "part of another model: split.count and split.no are"


def with_fewer_tensors(parts: list[Path]) -> tuple[Path, str]:
    numbers = {"split.no": 1, "split.count": len(parts)}
    entries = [gf.kv(k, gf.UINT16, gf.values(gf.UINT16, [n])) for k, n in numbers.items()]
    parts[1].write_bytes(gf.join(gf.head(0, 2), *entries)[0])
    return parts[-1], "split.tensors.count is"  # which is the file that was asked for


def with_the_same_tensors(parts: list[Path]) -> tuple[Path, str]:
    # The first, numbered as the second: as many tensors, but some are there twice.
    raw, number = parts[0].read_bytes(), gf.string("split.no") + gf.u32(gf.UINT16)
    at = raw.index(number) + len(number)
    parts[1].write_bytes(raw[:at] + b"\1\0" + raw[at + 2 :])
    return parts[1], "is in .* already"


def with_arrays(parts: list[Path]) -> tuple[Path, str]:
    for i, part in enumerate(parts):
        numbers = {"split.no": i, "split.count": len(parts), "split.tensors.count": 0}
        entries = [gf.kv(k, gf.UINT16, gf.values(gf.UINT16, [n])) for k, n in numbers.items()]
        array = gf.array(gf.UINT16, 2, gf.values(gf.UINT16, [i, 1]))
        entries.append(gf.kv("general.name", gf.ARRAY, array))
        part.write_bytes(gf.join(gf.head(0, 4), *entries)[0])
    return parts[1], "its general.name is not that of the first part"


@pytest.mark.parametrize(
    "change",
    [of_another_model, with_other_numbers, with_fewer_tensors, with_the_same_tensors, with_arrays],
)
def test_parts_that_do_not_belong_together(model: Path, change: Any) -> None:
    parts = gf.split(model, 7)
    culprit, text = change(parts)
    with pytest.raises(GGUFError, match=text) as caught:
        open_weights(parts[-1])
    assert caught.value.path == str(culprit)


@pytest.mark.parametrize(
    "end", ["", "-00001-of-{}.gguf.bak", "-1-of-3", "-00002-of-{}", "-00001-of-99999"]
)
def test_a_part_with_another_name(model: Path, tmp_path: Path, end: str) -> None:
    parts = gf.split(model, 8)
    count = f"{len(parts):05}"
    wrong = parts[0].rename(tmp_path / f"away{end.format(count)}".removesuffix(".gguf"))
    with pytest.raises(GGUFError, match=f"end with -00001-of-{count}.gguf") as caught:
        open_weights(wrong)
    assert caught.value.path == str(wrong)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (gf.STRING, gf.string("2")),
        (gf.BOOL, b"\1"),
        (gf.INT32, gf.values(gf.INT32, [-2])),
        (gf.FLOAT32, gf.values(gf.FLOAT32, [2.0])),
        *((gf.UINT16, gf.values(gf.UINT16, [one])) for one in (0, 1)),  # needs no number
    ],
)
def test_split_keys_must_be_numbers(tmp_path: Path, kind: int, value: bytes) -> None:
    file = tmp_path / "m-00001-of-00002.gguf"
    file.write_bytes(gf.join(gf.head(0, 1), gf.kv("split.count", kind, value))[0])
    if kind == gf.UINT16:
        with open_weights(file) as weights:
            assert weights.files == (str(file),)
        return
    with pytest.raises(GGUFError, match=r"integer split\.count") as caught:
        open_weights(file)
    assert caught.value.path == str(file)


SHARDS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "model-00001-of-00002.safetensors": {"b": ("F16", (2, 3)), "a": ("BF16", (4,))},
    "model-00002-of-00002.safetensors": {"c": ("F8_E4M3", (2, 2)), "d": ("F4", (3, 2))},
}
INDEX = "model.safetensors.index.json"
WHERE = {tensor: name for name, tensors in SHARDS.items() for tensor in tensors}


def write_index(folder: Path, where: Any) -> Path:
    index = folder / INDEX
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return index


@pytest.fixture
def index(tmp_path: Path) -> Path:
    for name, tensors in SHARDS.items():
        (tmp_path / name).write_bytes(sf.write(tensors, {"format": "pt"}))
    return write_index(tmp_path, WHERE)


@pytest.mark.parametrize("load", LOADS)
def test_an_index_is_a_model(index: Path, load: Any) -> None:
    with open_weights(index, load=load) as weights:
        assert [Path(file).name for file in weights.files] == sorted(SHARDS)
        assert list(weights.tensors) == ["b", "a", "c", "d"]
        assert weights.by_type() == {"f16": 12, "bf16": 8, "f8_e4m3": 4, "f4": 3}
        assert weights.metadata["format"] == "pt"
        for name, tensor in weights.tensors.items():
            file = index.with_name(WHERE[name])
            assert tensor.file == str(file)
            data = file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
            assert tensor.as_array().tobytes() == data
        with open_weights(index.with_name(WHERE["b"])) as one:  # a file is a model, too
            assert list(one.tensors) == ["b", "a"]
        four_bits = weights.tensors["d"]
        assert (four_bits.shape, four_bits.ggml_type) == ((3, 2), None)
        assert four_bits.as_array().shape == (3, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "not JSON") for text in ("", "{", "\xff", "[" * 100_000)),
        *((text, "no weight_map") for text in ("[]", "{}")),
        *((f'{{"weight_map": {where}}}', "no weight_map") for where in ("{}", "[]")),
        ('{"weight_map": {"a": 1}}', "1 is not the name of a file"),
        *(
            (f'{{"weight_map": {{"a": "{name}"}}}}', "not the name of a file")
            for name in ("../a.safetensors", "/etc/passwd", "..", "", "x\\u0000", "x\\ud800")
        ),
        ('{"weight_map": {"a": "x", "a": "y"}}', "occurs twice"),
        pytest.param(" " * ((32 << 20) + 1), "longer than 32 MiB", id="long"),
    ],
    ids=lambda value: value[:30],
)
def test_invalid_indices(tmp_path: Path, text: str, said: str) -> None:
    index = tmp_path / INDEX
    index.write_bytes(text.encode("latin-1"))
    with pytest.raises(SafetensorsError, match=said) as caught:
        open_weights(index)
    assert caught.value.path == str(index)
    # An index is wrong as a whole.
    assert caught.value.offset is None
    assert "at byte" not in str(caught.value)


ONE, TWO = SHARDS
# An index, the file that the error names, and the error.
OTHER_INDICES: dict[str, tuple[dict[str, str], str, type[Exception], str]] = {
    "itself": ({"a": INDEX}, INDEX, SafetensorsError, "is not safetensors"),
    "no text": (WHERE | {"\ud800": TWO}, TWO, SafetensorsError, "does not have the tensor"),
    "one more": (WHERE | {"e": TWO}, TWO, SafetensorsError, "does not have the tensor 'e'"),
    "one less": (
        {name: file for name, file in WHERE.items() if name != "a"},
        ONE,
        SafetensorsError,
        "is not said to have the tensor 'a'",
    ),
    "missing": (WHERE | {"e": "none"}, "none", FileNotFoundError, "names this file"),
    "GGUF": ({"one": "file.gguf"}, "file.gguf", SafetensorsError, "not safetensors"),
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("name", OTHER_INDICES)
def test_files_that_do_not_belong_to_the_index(index: Path, name: str) -> None:
    where, culprit, error, text = OTHER_INDICES[name]
    write_index(index.parent, where)
    with pytest.raises(error, match=text) as caught:
        open_weights(index)
    told = getattr(caught.value, "path", None) or getattr(caught.value, "filename", None)
    assert told == str(index.with_name(culprit))
    assert str(caught.value).isprintable()


def test_too_few_descriptors_for_all_files(model: Path, run_python: Run) -> None:
    parts = gf.split(model, 1)
    run = run_python(f"""
        import errno, os, pytest, resource
        import unimem as um
        um.open_weights({str(model)!r}).close()  # so that all is imported
        held = len(os.listdir("/proc/self/fd"))
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + 4, most))
        with pytest.raises(OSError, match="ulimit -n") as caught:
            um.open_weights({str(parts[0])!r})
        assert caught.value.errno == errno.EMFILE
        assert {str(model.parent)!r} in caught.value.filename
        assert len(os.listdir("/proc/self/fd")) == held
        """)
    assert run.returncode == 0, run.stderr


def test_parts_joined_under_the_name_of_the_first(model: Path) -> None:
    first, *others = gf.split(model, 8)
    nbytes = first.stat().st_size
    with first.open("ab") as file:
        for other in others:
            file.write(other.read_bytes())
    for part in (first, others[0]):
        with pytest.raises(GGUFError, match="the file goes on behind its tensors") as caught:
            open_weights(part)
        assert caught.value.path == str(first)
        assert 0 <= nbytes - (caught.value.offset or 0) < 32


def lent(raw: bytes) -> list[Any]:
    """The same bytes as each kind of buffer."""
    shared = mmap.mmap(-1, len(raw))
    shared[:] = raw
    return [raw, bytearray(raw), memoryview(raw), np.frombuffer(raw, np.int8), shared]


@pytest.mark.parametrize("load", ["auto", *LOADS])
@pytest.mark.parametrize(("before", "behind"), [(0, 0), (1536, 700), (3, 1)])
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_files_inside_others(
    tmp_path: Path, load: Any, before: int, behind: int, kind: str
) -> None:
    raw = (gf if kind == "gguf" else sf).everything()
    alone, outer = tmp_path / "alone", tmp_path / "outer"
    alone.write_bytes(raw)
    outer.write_bytes(b"x" * before + raw + b"y" * behind)
    part: dict[str, Any] = {"offset": before, "nbytes": len(raw), "load": load}
    sources: list[Any] = [outer, *(lent(outer.read_bytes()) if load != "direct" else ())]
    with open_weights(alone) as expected, outer.open("rb") as file:
        for source in (*sources, file.fileno()):
            with open_weights(source, **part) as weights:
                assert weights.load == ("map" if load == "auto" else load)
                assert weights.fingerprint == expected.fingerprint
                assert weights.content_hash() == expected.content_hash()
                for name, tensor in expected.tensors.items():
                    here = weights.tensors[name]
                    assert here.offset == before + tensor.offset
                    assert here.as_array().tobytes() == tensor.as_array().tobytes()
                    assert not here.as_array().flags.writeable
                look = weights.residency()
                assert look.nbytes >= weights.nbytes
                weights.warm()
                assert weights.residency().mapped_bytes == look.nbytes


def test_a_descriptor_is_copied(path: Path) -> None:
    with path.open("rb") as file:
        weights = open_weights(file.fileno(), load="map")
        path.unlink()  # it has no name any more
        with open_weights(file.fileno()) as other:
            assert other.fingerprint == weights.fingerprint
    with weights:
        assert weights.content_hash()


def test_a_buffer_is_kept_and_viewed_without_a_copy() -> None:
    buffer = bytearray(gf.everything())
    before = mapped_bytes()["weights"]
    with open_weights(buffer) as weights:
        assert mapped_bytes()["weights"] == before, "it is the caller's"
        array = weights.tensors["four"].as_array()
        assert np.shares_memory(array, np.frombuffer(buffer, np.uint8))
        with pytest.raises(BufferError, match="live users"):
            weights.close()
        for change in (weights.evict, weights.lock, weights.repair):
            with pytest.raises(ValueError, match=r"memory of the caller.*load='copy'"):
                change()
    with pytest.raises(BufferError):
        buffer.append(0)  # the array keeps it
    del array
    buffer.append(0)


def test_wrong_sources(path: Path, tmp_path: Path) -> None:
    raw = path.read_bytes()
    nbytes = len(raw)
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (path, {"offset": 1}, GGUFError, "does not begin with GGUF"),
        (raw + bytes(300), {}, GGUFError, "goes on behind its tensors"),
        (b"ab" + raw[:99], {"offset": 2}, GGUFError, "more tensors than the file can hold"),
        (path, {"offset": nbytes + 1}, ValueError, f"offset: expected at most {nbytes}, the size"),
        (
            path,
            {"offset": 9, "nbytes": nbytes},
            ValueError,
            f"nbytes: expected at most {nbytes - 9}",
        ),
        (raw, {"offset": -1}, ValueError, "offset: expected an integer from 0 on"),
        (raw, {"nbytes": 0}, ValueError, "nbytes: expected an integer from 1 on"),
        (raw, {"load": "direct"}, ValueError, "load='direct' of a buffer.*load='copy'"),
        ("s3://a/b", {"offset": 1}, ValueError, "offset, nbytes: expected a file"),
        (-1, {}, ValueError, "path: expected an integer from 0"),
        (10**6, {}, OSError, "Bad file descriptor"),
        (True, {}, TypeError, "path: expected a path, a descriptor, or a buffer"),
        (np.zeros((4, 4))[:, ::2], {}, TypeError, "a buffer in one piece"),
    ]
    for source, options, kind, text in wrong:
        with pytest.raises(kind, match=text):
            open_weights(source, **options)
    with path.open("ab") as file, pytest.raises(OSError, match="not open for reading"):
        open_weights(file.fileno())


def test_one_part_of_a_split_model_is_no_model(model: Path) -> None:
    part = gf.split(model, 8)[0]
    with pytest.raises(GGUFError, match="a part of a split model: give the path"):
        open_weights(part.read_bytes())


@pytest.mark.parametrize("kind", ["split", "index"])
def test_an_interrupt_anywhere_leaves_no_descriptor(model: Path, index: Path, kind: str) -> None:
    path = gf.split(model, 20)[0] if kind == "split" else index
    gc.collect()
    held = n_descriptors()

    def call() -> None:
        with open_model(path) as opened:
            for file in opened.files:
                with reopen(file):
                    pass

    for _ in interrupts.at_each_line(call, "unimem/weights/files.py"):
        assert n_descriptors() == held


NO_MODELS: dict[str, tuple[Callable[[Path], object], type[OSError], str]] = {
    "missing.gguf": (lambda path: None, FileNotFoundError, "No such file"),
    "folder": (Path.mkdir, IsADirectoryError, "give a model file in it"),
    "link": (lambda p: p.symlink_to("away/blob"), FileNotFoundError, "leads to 'away/blob'"),
    "circle": (lambda path: path.symlink_to("circle"), OSError, "symbolic links"),
    # It does not wait for a writer.
    **dict.fromkeys(
        ("fifo", "fifo.safetensors", "fifo.index.json"), (os.mkfifo, OSError, "regular file")
    ),
    "device": (lambda path: path.symlink_to("/dev/zero"), OSError, "regular file"),
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_paths_that_are_not_files(tmp_path: Path, name: str) -> None:
    make, error, text = NO_MODELS[name]
    make(tmp_path / name)
    with pytest.raises(error, match=text) as caught:
        open_weights(tmp_path / name)
    assert caught.value.filename == str(tmp_path / name)


@pytest.mark.parametrize("name", ["\ud800", "\ud800.index.json"])
def test_a_path_that_no_file_has(name: str) -> None:
    with pytest.raises(ValueError, match="expected the path of a file") as caught:
        open_weights(name)
    assert str(caught.value).isprintable()


def test_an_unreadable_file(path: Path, open_folder: Path, run_python: Run) -> None:
    secret = Path(shutil.copy(path, open_folder))
    secret.chmod(0)
    done = run_python(f"""
        import os, pytest
        from unimem.weights.opened import open_weights
        open_weights({str(path)!r}).close()  # so that all is imported that others may not read
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        with pytest.raises(PermissionError) as caught:
            open_weights({str(secret)!r})
        assert caught.value.filename == {str(secret)!r}
        """)
    assert done.returncode == 0, done.stderr


def test_empty_files(tmp_path: Path) -> None:
    for name in ("empty", "empty.gguf", "empty.safetensors"):
        (tmp_path / name).touch()
        kind = SafetensorsError if name.endswith("s") else GGUFError
        with pytest.raises(kind, match=f"{name}: the file ends inside its header"):
            open_weights(tmp_path / name)


@pytest.mark.parametrize("load", ["map", "copy"])
@pytest.mark.parametrize(("raw", "name"), [(gf.everything(), "four"), (sf.everything(), "scalar")])
def test_file_in_memory(raw: bytes, name: str, load: Any) -> None:
    fd = os.memfd_create("model", os.MFD_CLOEXEC)
    try:
        os.write(fd, raw)
        with open_weights(f"/proc/self/fd/{fd}", load=load) as w:
            assert w._parts[0].file.in_memory
            assert w.tensors[name].as_array().size > 0
    finally:
        os.close(fd)
