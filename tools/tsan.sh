#!/usr/bin/env bash
# The C tests under ThreadSanitizer, and the stress tests for a number of seconds each: `make tsan`.
# A report fails its test. docs/threads.md says what ThreadSanitizer is not shown, and why.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
seconds=${1:-30}

cmake -S . -B build/c-tsan -G Ninja -DUNIMEM_TESTS=ON -DUNIMEM_TSAN=ON \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
cmake --build build/c-tsan
# Some tests ask for more memory than any heap has, where it would end the program.
export TSAN_OPTIONS=halt_on_error=0:exitcode=66:second_deadlock_stack=1:allocator_may_return_null=1
echo "== C tests"
ctest --test-dir build/c-tsan --output-on-failure --timeout 900
echo "== stress, $seconds seconds for each test"
UNIMEM_STRESS_SECONDS=$seconds ctest --test-dir build/c-tsan --output-on-failure --timeout 3600 \
    -R "stress|exec_hooks"
