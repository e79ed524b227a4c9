"""A process killed at any moment of a save leaves the old snapshot or the new one, whole."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import unimem as um
from conftest import Run
from support.files.snapshot_files import cache, interpose
from support.processes.forks import fork

# In a process of its own with one thread, so that it may fork and its children save at once.
KILLS = """
    import json, os, random, signal, time
    import numpy as np
    import unimem as um
    from unimem.kv import snapshot

    path, n_kills = os.environ["FILE"], 210
    rng = random.Random(1)
    os.makedirs(os.path.dirname(path))
    ours, theirs = os.pipe()  # it ends with this process at the latest

    def fill(kv, generation):
        # All bytes of a generation are equal, and differ from the previous generation.
        for layer in range(kv.n_layers):
            for part in ("k", "v"):
                kv._body._rows(layer, part, 0)[:] = generation % 251

    kv = um.KVCache(2, 8, 64, 1024, pages="4k")
    zeros = np.zeros((1024, 8, 64), np.float16)
    for layer in range(2):
        kv.append(layer, zeros, zeros)

    def save_in_child(generation):
        '''Return the child's id, and a pipe that reports when save begins and ends.'''
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(theirs)
            fill(kv, generation)
            os.write(tell, b"b")
            kv.save(path, tokens=range(1024), model=str(generation))
            os.write(tell, b"e")
            os.read(ours, 1)
            os._exit(0)
        os.close(tell)
        assert os.read(told, 1) == b"b"
        return pid, told

    def kill(pid, told):
        '''Return whether it had saved before.'''
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ended = os.read(told, 1) == b"e"
        os.close(told)
        return ended

    def generation_on_disk():
        '''Check the whole file and return its generation.'''
        with um.KVCache.restore(path, mode="copy", tokens=range(1024)) as restored:
            generation = int(snapshot.describe(path).model)
            for layer in range(2):
                for part in ("k", "v"):
                    assert (restored._body._rows(layer, part, 0) == generation % 251).all()
        return generation

    kv.save(path, tokens=range(1024), model="0")
    on_disk, usual, result = 0, 0, {"inside": 0, "old": 0, "most_files": 0}
    for generation in range(1, n_kills + 1):
        pid, told = save_in_child(generation)
        began = time.perf_counter()
        if generation % 20 == 1:  # one save is completed, to measure its time
            assert os.read(told, 1) == b"e"
            usual = time.perf_counter() - began
            kill(pid, told)
            on_disk = generation_on_disk()
            assert on_disk == generation
            continue
        time.sleep(rng.uniform(0, 1.1 * usual))
        ended = kill(pid, told)
        left = generation_on_disk()
        assert left in (on_disk, generation), (left, on_disk, generation)
        assert left == generation or not ended
        result["inside"] += not ended
        result["old"] += left != generation
        result["most_files"] = max(result["most_files"], len(os.listdir(os.path.dirname(path))))
        on_disk = left
    kv.save(path)
    result["files"] = os.listdir(os.path.dirname(path))
    kv.close()
    print(json.dumps(result))
"""


@pytest.mark.slow
def test_kills_at_random_moments(run_python: Run, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "session"
    done = run_python(KILLS, "-Wignore", FILE=str(path), OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert 0 < result["old"] <= result["inside"], result
    # The next save removes the remains of a killed one.
    assert result["most_files"] == 2, result
    assert result["files"] == ["session"]


def test_kills_before_each_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "session"
    with cache(30) as old, cache(40, seed=1) as new:
        new.save(path)
        after = path.read_bytes()
        old.save(path)
        before = path.read_bytes()
        calls: list[str] = []
        with monkeypatch.context() as patch:
            interpose(patch, lambda name, *_: calls.append(name))
            new.save(path)
        replaced = calls.index("replace")
        n_old = 0
        for which in range(len(calls)):
            for name in os.listdir(tmp_path):
                (tmp_path / name).unlink()
            path.write_bytes(before)
            pid = fork()
            if pid == 0:
                left = [which]

                def die(*_: object, left: list[int] = left) -> None:
                    if not left[0]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left[0] -= 1

                interpose(monkeypatch, die)
                try:
                    new.save(path)
                finally:
                    os._exit(1)
            _, status = os.waitpid(pid, 0)
            assert os.WIFSIGNALED(status), calls[which]
            assert path.read_bytes() == (before if which <= replaced else after), calls[which]
            n_old += which <= replaced
            with um.KVCache.restore(path, mode="copy") as kv:
                assert kv.seq_len == (30 if which <= replaced else 40)
        assert 0 < n_old < len(calls)
        new.save(path)
        assert os.listdir(tmp_path) == ["session"]
