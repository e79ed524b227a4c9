"""The fixture `unimem_steady_state`, in separate runs of pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pytest_unimem import SteadyState
from support.project.checkout import ROOT

HEAD = """
    import gc, mmap, threading, unittest
    import numpy as np
    import pytest
    import unimem as um

    token = np.ones((2, 4, 64), "float32")

    def cache(**options):
        kv = um.KVCache(2, 4, 64, 1 << 16, **options)
        kv.append_all(token, token)
        return kv
"""
# One run has all tests; the first letter of a name is its expected result.
TESTS = """
    def test_pass_append(unimem_steady_state):
        with cache() as kv:
            kv.warm()
            unimem_steady_state.run(lambda: kv.append_all(token, token), times=16)

    def test_pass_with(unimem_steady_state):
        with um.Tape(1 << 20) as tape:  # taken before what counts
            tape.take_address(64)
            with unimem_steady_state:
                tape.take_address(64)
            um.Block(4096).close()  # and between
            tape.warm()
            with unimem_steady_state:
                tape.take_address(64)

    @pytest.fixture
    def kv():
        with cache() as kv:
            kv.warm()
            kv.append_all(token, token)
            yield kv

    def test_pass_begin(kv, unimem_steady_state):
        um.Block(4096).close()
        unimem_steady_state(allow_faults=16).begin()
        assert not gc.isenabled()
        kv.append_all(token, token)

    def test_pass_allowed(unimem_steady_state):
        with um.Block(64 << 10, pages="4k") as block:
            array = block.as_array()
            with unimem_steady_state(allow_faults=20):
                array[::4096] = 1
            del array

    def test_pass_without_it():
        assert gc.isenabled()  # again

    def test_pass_later_try(unimem_steady_state):
        block = um.Block(64 << 10, pages="4k")
        array = block.as_array()
        pages = iter(range(0, 64 << 10, 4096))
        def step():
            # Like a page moved by the kernel, it faults once.
            array[next(pages, 0)] = 1
        unimem_steady_state.run(step, times=5, tries=4)
        del array, step
        block.close()

    def test_fail_block(unimem_steady_state):
        with unimem_steady_state:
            um.Block(1 << 20, category="scratch").close()

    def test_fail_growing(unimem_steady_state):
        with cache(grow=True) as kv:
            kv.append_all(token, token)
            n = kv.capacity_bytes
            with unimem_steady_state:
                while kv.capacity_bytes == n:
                    kv.append_all(token, token)

    def test_fail_page(unimem_steady_state):
        with um.Block(64 << 10, pages="4k") as block:
            array = block.as_array()
            with unimem_steady_state(allow_faults=3):
                array[::4096] = 1

    def test_fail_begun(unimem_steady_state):
        um.Block(1 << 20, category="scratch").close()
        unimem_steady_state.begin()
        um.Block(1 << 21, pages="4k", category="staging").close()

    def test_fail_whole(unimem_steady_state):
        um.Block(1 << 20, pages="4k", category="diagnostics").close()

    def test_fail_every_try(unimem_steady_state):
        unimem_steady_state.run(lambda: um.Block(4096).close(), tries=2)

    def test_fail_other_thread(unimem_steady_state):
        memory = mmap.mmap(-1, 64 << 10)
        def touch():
            memory[:: 4096] = bytes(16)
        thread = threading.Thread(target=touch)
        with unimem_steady_state(all_threads=True):
            thread.start()
            thread.join()

    @pytest.mark.usefixtures("unimem_steady_state")
    class TestCase(unittest.TestCase):
        def test_fail_unittest(self):
            um.Block(1 << 20).close()

    def test_raise(unimem_steady_state):
        with unimem_steady_state:
            um.Block(4096).close()
            raise KeyError("mine")

    def test_zkip(unimem_steady_state):
        um.Block(4096).close()
        pytest.skip("mine")
"""
MESSAGES = {
    "test_fail_block": ["scratch: 1.0 MiB mapped", "system calls by unimem: "],
    "test_fail_growing": [r"kv: \d.* mapped", "system calls by unimem: "],
    "test_fail_page": [r"page faults of this thread: 1\d, 0 with a disk, 3 allowed"],
    "test_fail_begun": ["staging: 2.0 MiB mapped", "system calls by unimem: "],
    "test_fail_whole": ["diagnostics: 1.0 MiB mapped", "system calls by unimem: "],
    "test_fail_every_try": ["other: 4.0 KiB mapped", "system calls by unimem: "],
    "test_fail_other_thread": ["page faults of all threads: "],
    "test_fail_unittest": ["other: 1.0 MiB mapped", "system calls by unimem: "],
}


def run_pytest(folder: Path, *options: str, **environment: str) -> str:
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options, "."],
        cwd=folder, env=os.environ | {"COLUMNS": "200"} | environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of our tests and of the page's example, without plugin autoload."""
    folder = tmp_path_factory.mktemp("pytest")
    (example,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs/measure.md").read_text(), re.S)
    (folder / "test_example.py").write_text(example)
    (folder / "test_it.py").write_text(textwrap.dedent(HEAD + TESTS))
    return run_pytest(folder, "-p", "pytest_unimem", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def outcomes(output: str, outcome: str) -> set[str]:
    return set(re.findall(rf"^{outcome} .*::(\w+)", output, re.M))


def test_steady_tests_pass_and_others_fail(output: str) -> None:
    passing = set(re.findall(r"def (test_pass\w+)", TESTS))
    assert len(passing) == 6
    of_the_example = {"test_a_step", "test_a_block"}
    assert outcomes(output, "PASSED") == passing | of_the_example, output
    assert outcomes(output, "FAILED") == set(MESSAGES) | {"test_raise"}
    assert outcomes(output, "ERROR") == set()
    assert "SKIPPED [1] test_it.py" in output


@pytest.mark.parametrize("name", MESSAGES)
def test_the_message_names_what_was_taken(output: str, name: str) -> None:
    section = re.search(rf"^_+ (?:\w+\.)?{name} _+$(.*?)^(_|=)\2+ ", output, re.M | re.S)
    assert section is not None
    assert "the steady state took memory:" in section[1]
    for line in MESSAGES[name]:
        assert re.search(rf"^(E\s+)?\s*{line}", section[1], re.M), section[1]
    # The output shows the test, not the fixture's internals.
    assert "pytest_unimem/" not in section[1]


def test_the_test_s_own_error_is_reported(output: str) -> None:
    section = re.search(r"^_+ test_raise _+$(.*?)^(_|=)\2+ ", output, re.M | re.S)
    assert section is not None
    assert "KeyError: 'mine'" in section[1]
    assert "steady state" not in section[1]


IMPORTS = """
import sys

def test_not_imported(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("unimem")
    assert "pytest_unimem" in sys.modules
    assert not [name for name in ("unimem", "numpy", "ctypes") if name in sys.modules]

def test_imported(unimem_steady_state):
    assert "unimem" in sys.modules
    unimem_steady_state(allow_faults=1 << 20)
"""


@pytest.mark.uncounted
def test_pytest_finds_the_plugin_without_importing_unimem(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(IMPORTS)
    output = run_pytest(tmp_path, "-p", "no:run-parallel")  # which imports NumPy
    assert outcomes(output, "PASSED") == {"test_not_imported", "test_imported"}, output


@pytest.mark.slow  # a docstring
def test_the_fixture_is_listed_with_its_purpose(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "--fixtures")
    assert re.search(r"unimem_steady_state.*\n\s+Fail the test if unimem takes", output)


def test_a_decoder_is_steady(unimem_steady_state: SteadyState) -> None:
    engine = pytest.importorskip(
        "unimem.engine",
        reason="no ggml: pip install ./ggml '.[run]'",
        exc_type=ImportError,
    )
    with engine.Decoder(engine.embedded_model(), ctx=256, threads=1) as decoder:
        decoder.prefill(decoder.tokenize("Once upon a time"))
        unimem_steady_state.run(decoder.generate_next_token, times=32)
