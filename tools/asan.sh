#!/usr/bin/env bash
# The C tests, and the Python tests of the bindings, under AddressSanitizer and UBSan: `make asan`.
# The sanitized package lies in build/asan-site and hides the installed one; nothing else changes.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
site=$PWD/build/asan-site
export PATH=$bin:$PATH

echo "== C tests"
cmake -S . -B build/c-asan -G Ninja -DUNIMEM_TESTS=ON -DUNIMEM_SANITIZE=ON \
    -DCMAKE_BUILD_TYPE=Debug >/dev/null
cmake --build build/c-asan
ctest --test-dir build/c-asan --output-on-failure

echo "== Python package"
rm -rf "$site"
python -m pip install --quiet --no-build-isolation --no-deps --target "$site" . \
    -C build-dir=build/py-asan -C cmake.build-type=Debug -C cmake.define.UNIMEM_SANITIZE=ON

# Python itself is not sanitized, so the runtime has to be there before it. Leaks are not looked
# for: Python leaves what it has made once (types, names, modules) to the end of the process. With
# its own allocator, objects would lie in arenas, where a write behind one of them shows nowhere.
# Everything takes several times as long, and so this is the fast tier.
sanitized=(env
    LD_PRELOAD="$(gcc -print-file-name=libasan.so)"
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1
    UBSAN_OPTIONS=print_stacktrace=1
    PYTHONMALLOC=malloc
    PYTHONPATH="$site:$PWD/tools/no_editable")

"${sanitized[@]}" python - "$site" <<'END'
import ctypes
import sys

import unimem

modules = {
    name: module.__file__
    for name, module in sys.modules.items()
    if name.startswith("unimem.") and getattr(module, "__file__", "").endswith(".so")
}
assert {"unimem.weights.gguf", "unimem.kv.cache.storage", "unimem.kv.paged"} < set(modules), modules
for path in modules.values():
    assert path.startswith(sys.argv[1]), path
    assert b"__asan_init" in open(path, "rb").read(), f"{path} is not sanitized"
assert unimem.get_library().startswith(sys.argv[1]), unimem.get_library()
assert b"__asan_init" in open(unimem.get_library(), "rb").read(), "libunimem is not sanitized"
assert b"__ubsan_handle" in open(unimem.get_library(), "rb").read(), "libunimem has no UBSan"
ctypes.CDLL(None).__asan_init  # the runtime is there
END

echo "== Python tests"
"${sanitized[@]}" python -m pytest -q -n "$(nproc)" --dist loadgroup --timeout 300 \
    -p no:cacheprovider tests/_core tests/kv tests/weights/test_opened.py \
    tests/weights/test_residency.py tests/weights/test_content_hash.py \
    tests/test_layout.py tests/cuda/test_tape.py tests/cuda/test_grid.py tests/cuda/test_kv.py \
    tests/cuda/test_kv_moves.py tests/cuda/test_scratchpad.py "$@"
