"""Killed at any moment of a save, a process leaves the old snapshot or the new one, whole."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import unimem as um
from conftest import Run
from snapshot_files import cache, fork, interpose

# In a process of its own, which has one thread: so that it may fork, and its children save at once.
KILLS = """
    import json, os, random, signal, time
    import numpy as np
    import unimem as um
    from unimem.kv import snapshot

    path, n_kills = os.environ["FILE"], 210
    rng = random.Random(1)
    os.makedirs(os.path.dirname(path))

    def fill(kv, generation):
        # All bytes of a generation are alike, and unlike those of the last.
        for layer in range(kv.n_layers):
            for part in ("k", "v"):
                kv._rows(layer, part, 0)[:] = generation % 251

    kv = um.KVCache(2, 8, 64, 1024, pages="4k")
    zeros = np.zeros((1024, 8, 64), np.float16)
    for layer in range(2):
        kv.append(layer, zeros, zeros)

    def save_in_child(generation):
        '''The child's id, and a pipe that tells when save begins and ends.'''
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            fill(kv, generation)
            os.write(tell, b"b")
            kv.save(path, tokens=range(1024), model=str(generation))
            os.write(tell, b"e")
            time.sleep(60)
        os.close(tell)
        return pid, told

    def generation_on_disk():
        '''The generation of the file, all of which is checked.'''
        restored = um.KVCache.restore(path, mode="copy", tokens=range(1024))
        with restored:
            facts = snapshot.describe(path)
            generation = int(facts.model)
            for layer in range(2):
                for part in ("k", "v"):
                    assert (restored._rows(layer, part, 0) == generation % 251).all()
        return generation

    # How long a save takes.
    times = []
    for generation in range(5):
        pid, told = save_in_child(generation)
        os.read(told, 1)
        began = time.perf_counter()
        os.read(told, 1)
        times.append(time.perf_counter() - began)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
        assert generation_on_disk() == generation
    usual = sorted(times)[2]

    on_disk = generation
    result = {"inside": 0, "after": 0, "old": 0, "new": 0, "most_files": 0, "usual": usual}
    while result["inside"] < n_kills and generation < 5 * n_kills:
        generation += 1
        pid, told = save_in_child(generation)
        assert os.read(told, 1) == b"b"
        time.sleep(rng.uniform(0, 1.1 * usual))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ended = os.read(told, 1) == b"e"
        os.close(told)
        left = generation_on_disk()
        assert left in (on_disk, generation), (left, on_disk, generation)
        assert left == generation or not ended
        result["after" if ended else "inside"] += 1
        result["new" if left == generation else "old"] += 1
        result["most_files"] = max(result["most_files"], len(os.listdir(os.path.dirname(path))))
        on_disk = left
    kv.save(path)
    result["files"] = os.listdir(os.path.dirname(path))
    kv.close()
    print(json.dumps(result))
"""


def test_kills_at_random_moments(run_python: Run, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "session"
    done = run_python(KILLS, "-Wignore", FILE=str(path), OPENBLAS_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["inside"] == 210, result
    # Some before the file was replaced, some behind it.
    assert result["old"] >= 50, result
    assert result["new"] > result["after"], result
    # What one killed save left, the next has removed.
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
