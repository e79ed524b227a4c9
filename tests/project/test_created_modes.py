"""Files are created with the mode that they end with: other users read what is meant for them."""

from __future__ import annotations

import ast
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import unimem as um
from support.models.decoders import WIDE_HEADS
from support.models.make import write_model
from support.project.checkout import ROOT
from support.terminal.screens import show
from unimem.base.atomic_file import write_text
from unimem.engine import Decoder, embedded_model
from unimem.system.disk_speed import DiskSpeed, remember

Watched = list[tuple[str, int]]


@pytest.fixture
def created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """Watch names and modes at creation, after `tmp_path` is made; no umask hides any."""
    found: Watched = []
    opens, makes = os.open, os.mkdir

    def watched_open(path: str, flags: int, mode: int = 0o777, **options: int | None) -> int:
        fd = opens(path, flags, mode, **options)
        if flags & os.O_CREAT:
            found.append((os.fsdecode(path), stat.S_IMODE(os.fstat(fd).st_mode)))
        return fd

    def watched_mkdir(path: str, mode: int = 0o777, **options: int | None) -> None:
        makes(path, mode, **options)
        found.append((os.fsdecode(path), mode))

    monkeypatch.setattr(os, "open", watched_open)
    monkeypatch.setattr(os, "mkdir", watched_mkdir)
    mask = os.umask(0)
    try:
        yield found
    finally:
        os.umask(mask)


def save(folder: Path) -> None:
    with um.KVCache(1, 1, 32, 64) as kv:
        kv.append(0, *np.zeros((2, 64, 1, 32), np.float32))
        kv.save(folder / "snapshot")
        with um.KVStore(folder / "store", ram_bytes=1 << 20, chunk_tokens=16) as store:
            store.put(kv, np.arange(64), model="any")


def talk(folder: Path) -> None:
    with Decoder(embedded_model(), ctx=64, threads=1) as decoder:
        decoder.prefill([1, 5])
        decoder.save_session(folder / "session")


def repack(folder: Path) -> None:
    path = write_model(folder / "q.gguf", kind="q4_0", shape=WIDE_HEADS)
    path.chmod(0o644)
    with um.open_weights(path) as weights, um.repack(weights, cache=True):
        pass


def stage(_folder: Path) -> None:
    um.stage(embedded_model()).close()


WRITERS: dict[str, Callable[[Path], object]] = {
    "disk speed": lambda _: remember("8:0", DiskSpeed(1, 1, "2026-11-28")),
    "hash, snapshot of a talk": talk,
    "image": repack,
    "page": lambda folder: show("report", os.getpid(), "--html", folder / "page.html"),
    "share": lambda _: um.Block(4096, shared=f"mode-{os.getpid()}").close(),
    "snapshot, chunks": save,
    "stage": stage,
    "text": lambda folder: write_text(folder / "text", "text"),
    "textfile": lambda folder: show("metrics", os.getpid(), "--textfile", folder / "unimem.prom"),
}
FOR_OTHERS = (".unimem.prom.", ".repacked.")


@pytest.mark.parametrize("name", WRITERS)
def test_only_what_is_meant_for_others_is_created_for_them(
    name: str, created: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNIMEM_CACHE", str(tmp_path / "cache"))
    WRITERS[name](tmp_path)
    assert created, "nothing was watched"
    others = {path: oct(mode) for path, mode in created if mode & 0o077}
    assert {path: mode for path, mode in others.items() if mode != "0o644"} == {}
    assert [path for path in others if not any(word in path for word in FOR_OTHERS)] == []


def test_every_creation_names_its_mode() -> None:
    """Files that `open` and `Path.write_text` create are open to all users."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            modes = [ast.literal_eval(each) for each in node.args[1:2] if is_text(each)]
            creates = called.endswith("open") and set("wax+") & set("".join(modes))
            if creates or called.endswith((".write_text", ".write_bytes", "os.makedirs")):
                found.append(f"{path.name}: {called}({ast.unparse(node.args[0])})")
    assert set(found) == {
        "stage.py: open(os.devnull)",
        "client.py: self._fs.open(name)",  # of a server
        "keeper.py: open(stage._note.create(NOTE))",  # descriptors
        "stage.py: open(place.create(self.files.names[-1]))",
        "keeper_process.py: open(note)",
        "mount_process.py: open(path)",  # of /proc
        "slot_file.py: open(file_path(path))",  # for llama-server, which may be another user
        "remote_files.py: open(os.memfd_create('unimem header', os.MFD_CLOEXEC))",
    }


# The sources that create files by flags, and the writer above that shows with which mode; those
# without one create their files 0600 in the same line.
CREATING = {
    "atomic_file.py": "text",
    "backings.py": "stage",
    "block.pyx": "share",
    "image_cache.py": "image",
    "ram_tier.py": "snapshot, chunks",
    "server.py": None,
    "staging_folder.py": None,
    "tiers.py": "snapshot, chunks",
    "unimem_exec/__init__.py": None,
}
CREATES = re.compile(r"\b(O_CREAT|O_TMPFILE|mk[od]*stemp|mkfifo|mknod|shm_open)\b")


def test_no_writer_is_forgotten() -> None:
    """A new source that creates files gets a row, and a writer that is watched."""
    sources = [path for kind in ("py", "pyx", "c", "h") for path in ROOT.glob(f"src/**/*.{kind}")]
    sources += [path for kind in ("c", "h") for path in ROOT.glob(f"native/[eis]*/**/*.{kind}")]
    found = {}
    for path in sources:
        lines = [line for line in path.read_text("utf-8").splitlines() if CREATES.search(line)]
        name = path.name if path.name != "__init__.py" else f"{path.parent.name}/{path.name}"
        if lines:
            found[name] = lines
    assert len(sources) > 300
    assert found.keys() == CREATING.keys()
    for name, writer in CREATING.items():
        is_private = all("0o600" in line for line in found[name])
        assert writer in WRITERS if writer else is_private, name


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
