"""C and C++ programs that know nothing of Python, built with the header and library that the
package brings."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

import unimem as um

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
    um_block block, ring, shared, attached;
    um_block_options options;
    um_placement placement;
    um_ledger_row row;
    um_tape tape;
    um_kv kv;
    um_kv_spec spec;
    um_kv_storage storage;
    size_t nbytes;
    float k[16], v[16], back[32];
    const float *last;
    int i, j;

    memset(&options, 0, sizeof options);
    options.pages = UM_PAGES_4K;
    options.category = UM_CAT_HISTORY;
    options.reserve_nbytes = 1 << 20;
    CHECK(um_block_map(&block, 1 << 19, &options, &err));
    CHECK(um_block_commit(&block, 1 << 19, 1 << 19, &err));
    CHECK(um_block_warm(&block, 0, block.nbytes, 2, NULL, &err));
    CHECK(um_block_verify(&block, &placement, &err));
    CHECK(um_ledger_read(UM_CAT_HISTORY, &row, &err));
    printf("resident %llu mapped %llu\n", (unsigned long long)placement.resident_bytes,
           (unsigned long long)row.mapped_bytes);

    CHECK(um_tape_init(&tape, block.base, block.nbytes, &err));
    memset(&spec, 0, sizeof spec);
    spec.n_layers = 1;
    spec.n_kv_heads = 2;
    spec.head_dim = 8;
    spec.batch = 1;
    spec.max_seq_len = 1;
    spec.type = UM_F16;
    CHECK(um_kv_storage_bytes(&spec, &nbytes, &err));
    memset(&storage, 0, sizeof storage);
    storage.lane_stride = nbytes / 2;
    storage.n_rows = 1;
    storage.usable_rows = 1;
    CHECK(um_tape_take(&tape, nbytes, 64, &storage.base, &err));
    CHECK(um_kv_init(&kv, &spec, &storage, &err));
    for (i = 0; i < 16; i++) {
        k[i] = (float)i;
        v[i] = (float)-i;
    }
    CHECK(um_kv_append(&kv, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 1, &err));
    CHECK(um_convert(back, UM_F32, um_kv_lane(&kv, 0, 1, 0), UM_F16, 16, &err));
    printf("tokens %llu, last %g\n", (unsigned long long)um_kv_seq_len(&kv), (double)back[15]);
    if (um_kv_append(&kv, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 1, &err) == UM_OK) {
        return 1;
    }
    printf("%s: asked %llu, %llu of %llu used\n", um_status_name(err.status),
           (unsigned long long)err.asked, (unsigned long long)err.used,
           (unsigned long long)err.limit);
    um_kv_free(&kv);

    /* A ring of 1024 rows: K and V, each in memory that is mapped twice, back to back. */
    spec.max_seq_len = 1000;
    spec.window = 1000;
    spec.type = UM_F32;
    CHECK(um_kv_row_bytes(&spec, &nbytes, &err));
    storage.n_rows = storage.usable_rows = 1024;
    storage.lane_stride = 2 * 1024 * nbytes;
    options.reserve_nbytes = 0;
    options.sharing = UM_SHARING_MEMFD;
    options.mirror_nbytes = 1024 * nbytes;
    CHECK(um_block_map(&ring, 2 * 1024 * nbytes, &options, &err));
    storage.base = ring.base;
    CHECK(um_kv_init(&kv, &spec, &storage, &err));
    for (i = 0; i < 2000; i++) {
        for (j = 0; j < 16; j++) {
            k[j] = (float)i;
            v[j] = (float)-i;
        }
        CHECK(um_kv_append_all(&kv, k, v, UM_F32, &err));
    }
    CHECK(um_kv_read(&kv, 0, 1, 1023, 2, back, UM_F32, &err));
    last = (const float *)um_kv_lane(&kv, 0, 0, 0) + um_kv_row(&kv, 1000) * 16;
    printf("tokens %llu to %llu, %g and %g, last %g\n",
           (unsigned long long)um_kv_first_position(&kv),
           (unsigned long long)um_kv_next_position(&kv), (double)back[0], (double)back[8],
           (double)last[999 * 16]);
    if (um_kv_crop(&kv, 10, &err) == UM_OK) {
        return 1;
    }
    printf("%s: at least %llu\n", err.what, (unsigned long long)err.limit);
    CHECK(um_kv_crop(&kv, 977, &err));
    CHECK(um_kv_trim(&kv, 7, 0, &err));
    printf("tokens %llu to %llu\n", (unsigned long long)um_kv_first_position(&kv),
           (unsigned long long)um_kv_next_position(&kv));
    um_kv_free(&kv);
    CHECK(um_block_unmap(&ring, &err));

    options.mirror_nbytes = 0;
    options.reserve_nbytes = 1 << 20;
    options.name = "test_c_api";
    CHECK(um_block_map(&shared, 1 << 19, &options, &err));
    strcpy((char *)shared.base, "seen by both");
    CHECK(um_block_attach(&attached, shared.fd, UM_ACCESS_READ, UM_CAT_STAGING, &err));
    CHECK(um_block_release(&shared, 1 << 18, 1 << 18, &nbytes, &err));
    printf("%s, %u of %u released\n", (const char *)attached.base, (unsigned)nbytes, 1u << 19);
    if (um_block_is_committed(&shared, 1 << 18, 1)) {
        return 1;
    }
    CHECK(um_block_unmap(&attached, &err));
    CHECK(um_block_unmap(&shared, &err));
    CHECK(um_block_unmap(&block, &err));
    CHECK(um_ledger_read(UM_CAT_HISTORY, &row, &err));
    printf("mapped %llu\n", (unsigned long long)row.mapped_bytes);
    return 0;
}
"""

OUTPUT = """\
resident 1048576 mapped 1048576
tokens 1, last -15
UM_E_FULL: asked 1, 1 of 1 used
tokens 1000 to 2000, -1023 and -1024, last 1999
overwritten: at least 976
tokens 1970 to 1977
seen by both, 262144 of 524288 released
mapped 0
"""

CMAKE = """\
cmake_minimum_required(VERSION 3.24)
project(user LANGUAGES C)
find_package(unimem CONFIG REQUIRED)
add_executable(user user.c)
target_link_libraries(user PRIVATE unimem::unimem)
"""


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on this machine")
    return found


@pytest.mark.parametrize(
    ("compiler", "suffix", "options"),
    [
        ("cc", "c", ["-std=c17", "-Wall", "-Wextra", "-Wpedantic", "-Wstrict-prototypes"]),
        ("c++", "cpp", ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic"]),
    ],
)
def test_a_program_is_built_and_runs(
    tmp_path: Path, compiler: str, suffix: str, options: list[str]
) -> None:
    source, program, library = tmp_path / f"user.{suffix}", tmp_path / "user", um.get_library()
    source.write_text(PROGRAM)
    link = [library, f"-Wl,-rpath,{Path(library).parent}"]
    run(tool(compiler), *options, "-Werror", f"-I{um.get_include()}", source, "-o", program, *link)
    assert run(program) == OUTPUT


def test_a_cmake_project_finds_the_package(tmp_path: Path) -> None:
    cmake = tool("cmake")
    (tmp_path / "user.c").write_text(PROGRAM)
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    config = Path(um.get_library()).parent / "cmake" / "unimem"
    build = tmp_path / "build"
    run(cmake, "-S", tmp_path, "-B", build, f"-Dunimem_DIR={config}")
    run(cmake, "--build", build)
    assert run(build / "user") == OUTPUT


def test_the_library_exports_its_own_names_only() -> None:
    exported = [
        line.split()[-1]
        for line in run(tool("nm"), "-D", "--defined-only", um.get_library()).splitlines()
    ]
    assert "um_tape_take" in exported
    assert [name for name in exported if not name.startswith("um_")] == []
    declared = "".join(path.read_text() for path in Path(um.get_include()).glob("*.h"))
    assert [name for name in exported if f"{name}(" not in declared] == []


def test_the_library_loads_without_python() -> None:
    library = ctypes.CDLL(um.get_library())
    library.um_status_name.restype = ctypes.c_char_p
    assert library.um_status_name(2) == b"UM_E_FULL"
