"""Files are created with the mode that they end with: other users read what is meant for them."""

from __future__ import annotations

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import unimem as um
from support.files.llama_states import state
from support.models.decoders import WIDE_HEADS
from support.models.make import write_model
from support.project.checkout import ROOT
from support.terminal.screens import MAIN, show
from unimem.base.atomic_file import write_text
from unimem.engine import Decoder, embedded_model
from unimem.llama_cpp import write_slot_file
from unimem.system.disk_speed import DiskSpeed, remember

SHIM = ROOT / "tests/support/kernel/shim/watch_created.c"


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
    with um.open_weights(folder / "q.gguf") as weights, um.repack(weights, cache=True):
        pass


def execute(folder: Path) -> None:
    words = [sys.executable, "-c", MAIN, "exec", "--report", str(folder / "report.json"), "--"]
    subprocess.run([*words, sys.executable, "-c", ""], check=True)


def stage(_folder: Path) -> None:
    um.stage(embedded_model()).close()


def stage_for_long(folder: Path) -> None:
    os.environ["UNIMEM_STAGING"] = str(folder / "staging")
    model = embedded_model()
    for words in (("--at", folder / "at", "--budget", "64M", model), ("--pin", model)):
        assert (done := show("stage", *words)).code == 0, done
    assert (done := show("stage", "--drop", model)).code == 0, done
    del os.environ["UNIMEM_STAGING"]


WRITERS: dict[str, Callable[[Path], object]] = {
    "disk speed": lambda _: remember("8:0", DiskSpeed(1, 1, "2026-11-28")),
    "exec": execute,
    "hash, snapshot of a talk": talk,
    "image": repack,
    "page": lambda folder: show("report", os.getpid(), "--html", folder / "page.html"),
    "share": lambda _: um.Block(4096, shared=f"mode-{os.getpid()}").close(),
    "slot": lambda folder: write_slot_file(folder / "slot", np.arange(20, dtype="i4"), state()),
    "snapshot, chunks": save,
    "stage": stage,
    "stage, budget, path": stage_for_long,
    "text": lambda folder: write_text(folder / "text", "text"),
    "textfile": lambda folder: show("metrics", os.getpid(), "--textfile", folder / "unimem.prom"),
}
FOR_OTHERS = (".unimem.prom.", ".repacked.", "/at")
Created = dict[str, list[tuple[str, str, str]]]  # modes in octal at the creation and now, and path


@pytest.fixture(scope="module")
def created(tmp_path_factory: pytest.TempPathFactory) -> Created:
    """Run all writers in a process that notes what is created, by it and by its children."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler builds the shim")
    folder = tmp_path_factory.mktemp("created")
    shim, logs = folder / "shim.so", folder / "logs"
    logs.mkdir()
    flags = ["-std=c17", "-O2", "-w", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", shim, SHIM, "-ldl"], check=True)
    given = {"LD_PRELOAD": str(shim), "PYTHONPATH": str(ROOT / "tests")}
    given |= {"UNIMEM_CACHE": str(folder / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, __file__, str(folder)]
    done = subprocess.run(
        words, env=os.environ | given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    now = {str(path.lstat().st_ino): path.lstat().st_mode for path in folder.rglob("*")}
    found: Created = {}
    for name in reversed(WRITERS):
        lines = [line.split(" ", 2) for line in (logs / name).read_text().splitlines()]
        found[name] = []
        for mode, inode, path in reversed(lines):
            # The last file with an inode is there: those before it were removed.
            last = now.pop(inode, None)
            ends = mode if last is None else f"{stat.S_IMODE(last):o}"
            found[name].append((mode, ends, path))
    return found


def write_all(folder: Path) -> None:
    write_model(folder / "q.gguf", kind="q4_0", shape=WIDE_HEADS).chmod(0o644)
    for name, write in WRITERS.items():
        os.environ["CREATED_LOG"] = str(folder / "logs" / name)
        mask = os.umask(0)  # which could hide a mode
        write(folder)
        os.umask(mask)
        del os.environ["CREATED_LOG"]


@pytest.mark.uncounted
@pytest.mark.parametrize("name", WRITERS)
def test_only_what_is_meant_for_others_is_created_for_them(created: Created, name: str) -> None:
    rows = created[name]
    assert rows, "nothing was created"
    assert [row for row in rows if row[0] != row[1]] == []
    assert {mode for mode, _, _ in rows} <= {"600", "700", "644", "755"}
    others = [path for mode, _, path in rows if mode in ("644", "755")]
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
        "client.py: self._fs.open(name)",  # of a server
        "keeper.py: open(stage._note.create(NOTE))",  # descriptors
        "stage.py: open(place.create(self.files.names[-1]))",
        "keeper_process.py: open(note)",
        "mount_process.py: open(path)",  # of /proc
        "server.py: path.write_bytes(slot_file_bytes(tokens, kv))",  # made before, with 0600
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


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
