"""The first bytes of model files, for the parsers of both formats: cut, large, and changing."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conftest import Run
from support.files import gguf_files as gf
from support.files import safetensors_files as sf
from support.files.mutations import file_of
from support.files.weight_bytes import LOADS, mapped_bytes
from support.project import tiers
from unimem._core.status import counters
from unimem.errors import FormatError, GGUFError, SafetensorsError
from unimem.weights.gguf import GGUFHeader
from unimem.weights.opened import open_weights
from unimem.weights.safetensors import SafetensorsHeader


class Format(NamedTuple):
    kind: type[Any]
    error: type[FormatError]
    raw: bytes  # of a file with everything


GGUF = Format(GGUFHeader, GGUFError, gf.everything())
SAFETENSORS = Format(SafetensorsHeader, SafetensorsError, sf.everything())
EACH = pytest.mark.parametrize("form", [GGUF, SAFETENSORS], ids=["gguf", "safetensors"])


def header_of(form: Format, raw: bytes) -> Any:
    with file_of(raw) as (fd, _):
        return form.kind(fd, len(raw), "path")


@EACH
def test_shrinking_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Format) -> None:
    kind: Any = form.kind
    raw, path = form.raw, tmp_path / "file.gguf"
    path.write_bytes(raw)
    with path.open("rb") as file, pytest.raises(OSError, match="shorter") as caught:
        kind(file.fileno(), len(raw) + (1 << 20), str(path))
    assert str(path) in str(caught.value)

    class ReadThenTruncate(kind):  # type: ignore[misc]
        def __init__(self, _: int, file_nbytes: int, name: str, begin: int = 0) -> None:
            os.truncate(name, file_nbytes - 1)

    monkeypatch.setattr(f"unimem.weights.files.{kind.__name__}", ReadThenTruncate)
    for load in LOADS:
        with pytest.raises(OSError, match=r"shorter|replaced or written to") as caught:
            open_weights(path, load=load)
        assert caught.value.filename == str(path)
        os.truncate(path, len(raw))


def test_metadata_survives_a_truncation_of_the_file(path: Path, run_python: Run) -> None:
    """In a process of its own: it would die if the header were read from the mapping."""
    done = run_python(f"""
        import os
        from unimem.weights.opened import open_weights
        with open_weights({str(path)!r}) as w:
            os.truncate({str(path)!r}, 0)
            values = list(w.metadata.values())
            print(len(values), w.metadata["general.architecture"], len(w.fingerprint))
        """)
    assert done.stdout.split() == [str(5 + 2 * len(gf.CODES)), "none", "32"], done.stderr


@EACH
def test_file_cut_anywhere(form: Format) -> None:
    header = header_of(form, form.raw)
    end = max(sum(header.tensor(i)[3:]) for i in header.tensor_names().values())
    for n in range(0, end, 1 if tiers.everything else 3):
        with pytest.raises(form.error) as caught:
            header_of(form, form.raw[:n])
        assert caught.value.offset is not None
        assert caught.value.offset <= n
        if n >= header.nbytes:
            assert caught.value.rule == "a tensor passes the end of the file"
        elif form is SAFETENSORS:
            assert caught.value.rule == "the file ends inside its header"


# As many entries as fit into a file: the tables are largest in proportion.
KEYS = gf.join(gf.head(0, 4096), *(gf.kv(f"{i:x}", gf.UINT8, b"\0") for i in range(4096)))[0]
TENSORS = [gf.tensor(f"{i:x}", (0,), 0, 0) for i in range(25_000)]
ZEROS = ",".join("0" * 64)


def many(n: int, of: str) -> str:
    return "{" + ",".join(f'"{i:x}":{of}' for i in range(n)) + "}"


ST_KEYS = sf.file(f'{{"__metadata__":{many(50_000, chr(34) * 2)}}}')
ST_TENSORS = sf.file(many(2_500, f'{{"dtype":"U8","shape":[{ZEROS}],"data_offsets":[0,0]}}'))
LARGE: dict[str, tuple[Format, bytes]] = {
    "keys": (GGUF, KEYS),
    "keys, cut": (GGUF, KEYS[:-1]),
    "everything": (GGUF, GGUF.raw),
    "tensors": (GGUF, gf.with_data(gf.head(len(TENSORS), 0), *TENSORS)[0]),
    "counts": (GGUF, gf.head(2**60, 2**60)),
    "count that fits, of nothing": (GGUF, gf.head(0, 10**5) + bytes(14 * 10**5)),
    "safetensors, keys": (SAFETENSORS, ST_KEYS),
    "safetensors, keys, cut": (SAFETENSORS, ST_KEYS[:-1] + b" "),
    "safetensors, everything": (SAFETENSORS, SAFETENSORS.raw),
    "safetensors, dimensions": (SAFETENSORS, ST_TENSORS),
    "safetensors, length": (SAFETENSORS, sf.file("{}", 1000, length=1000)),
}


@pytest.mark.parametrize(("form", "raw"), LARGE.values(), ids=LARGE)
@pytest.mark.usefixtures("no_collection")
def test_memory_is_a_small_multiple_of_the_header(form: Format, raw: bytes) -> None:
    gc.collect()  # what other tests left lying
    before, mapped = counters(), mapped_bytes()["other"]
    with contextlib.suppress(form.error):
        header_of(form, raw).close()
    allocated = counters()["allocated_bytes"] - before["allocated_bytes"]
    assert allocated <= (10 if form is GGUF else 16) * len(raw) + 4096
    assert mapped_bytes()["other"] == mapped


NAMES = [f"{'x' * 2000}{i:06}" for i in range(4000)]
PAIRS = ",".join(f"'{name}':''" for name in NAMES)
LONG_NAMES = {
    "a key occurs twice": (
        GGUF,
        gf.join(
            gf.head(0, len(NAMES) + 1),
            *(gf.kv(name, gf.UINT8, b"\0") for name in (*NAMES, NAMES[0])),
        )[0],
    ),
    "a key of __metadata__ occurs twice": (
        SAFETENSORS,
        sf.marked("{'__metadata__':{" + PAIRS + f",^'\\u0078{NAMES[0][1:]}':''" + "}}")[0],
    ),
}


@pytest.mark.parametrize("rule", LONG_NAMES)
def test_many_long_names_that_differ_late(rule: str) -> None:
    form, raw = LONG_NAMES[rule]
    with pytest.raises(form.error, match=rule) as caught:
        header_of(form, raw)
    assert raw[caught.value.offset or 0 :].lstrip(b"'\"")[:1] in (b"x", b"\\")
