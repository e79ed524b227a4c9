"""C and C++ programs that know nothing of Python, built with the header and library that the
package brings."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import unimem as um
from support.project.building import run, tool

PROGRAM = r"""
#include <stdio.h>
#include <string.h>

#include <unimem.h>

#define CHECK(call)                                                                              \
    do {                                                                                         \
        if ((call) != UM_OK) {                                                                   \
            printf("%s failed: %s, %s\n", #call, um_status_name(err.status), err.what);          \
            return 1;                                                                            \
        }                                                                                        \
    } while (0)

int main(void) {
    um_error err;
    um_block block;
    um_block_options options;
    um_ledger_row row;
    um_tape tape;
    um_kv kv;
    um_kv_spec spec;
    um_kv_storage storage;
    size_t nbytes;
    float k[16], v[16], back[16];
    int i;

    memset(&options, 0, sizeof options);
    options.pages = UM_PAGES_4K;
    options.category = UM_CAT_HISTORY;
    CHECK(um_block_map(&block, 1 << 20, &options, &err));
    CHECK(um_tape_init(&tape, block.base, block.nbytes, &err));
    memset(&spec, 0, sizeof spec);
    spec.n_layers = spec.batch = spec.max_seq_len = 1;
    spec.n_kv_heads = 2;
    spec.head_dim = 8;
    spec.type = spec.v_type = UM_F16;
    CHECK(um_kv_storage_bytes(&spec, &nbytes, &err));
    memset(&storage, 0, sizeof storage);
    storage.lane_stride = storage.v_lane_stride = nbytes / 2;
    storage.n_rows = storage.usable_rows = 1;
    CHECK(um_tape_take(&tape, nbytes, 64, &storage.base, &err));
    CHECK(um_kv_init(&kv, &spec, &storage, &err));
    for (i = 0; i < 16; i++) {
        k[i] = (float)i;
        v[i] = (float)-i;
    }
    CHECK(um_kv_append_all(&kv, k, v, UM_F32, &err));
    CHECK(um_convert(back, UM_F32, um_kv_lane(&kv, 0, 1, 0), UM_F16, 16, &err));
    printf("tokens %llu, last %g\n", (unsigned long long)um_kv_seq_len(&kv), (double)back[15]);
    if (um_kv_append_all(&kv, k, v, UM_F32, &err) == UM_OK) {
        return 1;
    }
    printf("%s: asked %llu, %llu of %llu used\n", um_status_name(err.status),
           (unsigned long long)err.asked, (unsigned long long)err.used,
           (unsigned long long)err.limit);
    um_kv_free(&kv);
    CHECK(um_ledger_read(UM_CAT_HISTORY, &row, &err));
    printf("mapped %llu\n", (unsigned long long)row.mapped_bytes);
    CHECK(um_block_unmap(&block, &err));
    CHECK(um_ledger_read(UM_CAT_HISTORY, &row, &err));
    printf("mapped %llu\n", (unsigned long long)row.mapped_bytes);
    return 0;
}
"""

OUTPUT = """\
tokens 1, last -15
UM_E_FULL: asked 1, 1 of 1 used
mapped 1048576
mapped 0
"""

CMAKE = """\
cmake_minimum_required(VERSION 3.24)
project(user LANGUAGES C)
find_package(unimem 0.1 REQUIRED)
add_executable(user user.c)
target_link_libraries(user PRIVATE unimem::unimem)
"""
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


@pytest.mark.parametrize(
    ("compiler", "suffix", "options"),
    [("cc", "c", ["-std=c17", "-Wstrict-prototypes"]), ("c++", "cpp", ["-std=c++17"])],
)
def test_a_program_runs(tmp_path: Path, compiler: str, suffix: str, options: list[str]) -> None:
    source, program, library = tmp_path / f"user.{suffix}", tmp_path / "user", um.get_library()
    source.write_text(PROGRAM)
    link = [library, f"-Wl,-rpath,{Path(library).parent}"]
    run(tool(compiler), *options, *WARNINGS, f"-I{um.get_include()}", source, "-o", program, *link)
    assert run(program) == OUTPUT


def test_a_cmake_project_finds_the_package(tmp_path: Path) -> None:
    cmake = tool("cmake")
    (tmp_path / "user.c").write_text(PROGRAM)
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    build = tmp_path / "build"
    run(cmake, "-S", tmp_path, "-B", build, f"-Dunimem_DIR={flags('cmake-dir')}")
    run(cmake, "--build", build)
    assert run(build / "user") == OUTPUT


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ("0.2 REQUIRED", "compatible with requested version"),
        ("0.1 REQUIRED COMPONENTS fortran", "no component fortran here: expected one of shared"),
    ],
)
def test_cmake_says_what_it_does_not_find(tmp_path: Path, wanted: str, reason: str) -> None:
    (tmp_path / "CMakeLists.txt").write_text(CMAKE.replace("0.1 REQUIRED", wanted))
    folder = str(tmp_path)
    command = [tool("cmake"), "-S", folder, "-B", folder, f"-Dunimem_DIR={flags('cmake-dir')}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert reason in " ".join(done.stderr.split())


def flags(*names: str) -> str:
    """What the package says of itself."""
    return run(sys.executable, "-m", "unimem", *(f"--{name}" for name in names)).strip()


def test_flags_are_all_that_a_compiler_needs(tmp_path: Path) -> None:
    (tmp_path / "user.c").write_text(PROGRAM)
    program = tmp_path / "user"
    run(tool("cc"), tmp_path / "user.c", "-o", program, *shlex.split(flags("cflags", "libs")))
    assert run(program) == OUTPUT
    assert flags("prefix") == str(Path(um.get_include()).parent)


def test_the_module_is_the_command() -> None:
    def runs(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "unimem", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert runs("--version").stdout.startswith("unimem 0.")
    assert "Usage: unimem" in runs("--help").stdout
    assert runs("plan", "/nowhere").returncode == 1
    done = runs("--cflags", "--other")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unrecognized arguments: --other" in done.stderr


def test_pkg_config_finds_the_package(tmp_path: Path) -> None:
    (tmp_path / "user.c").write_text(PROGRAM)
    folder = Path(um.get_library()).parent
    where = {**os.environ, "PKG_CONFIG_PATH": str(folder / "pkgconfig")}
    asked = [tool("pkg-config"), "--cflags", "--libs", "unimem >= 0.1"]
    found = subprocess.run(asked, env=where, capture_output=True, text=True, check=True).stdout
    program = tmp_path / "user"
    run(tool("cc"), tmp_path / "user.c", "-o", program, *found.split(), f"-Wl,-rpath,{folder}")
    assert run(program) == OUTPUT


def test_the_library_loads_without_python() -> None:
    library = ctypes.CDLL(um.get_library())
    library.um_status_name.restype = ctypes.c_char_p
    assert library.um_status_name(2) == b"UM_E_FULL"
