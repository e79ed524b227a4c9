#!/usr/bin/env bash
# Converts every float32 to float16 and bfloat16 by all code that this CPU runs, and compares: minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv/bin:$PATH
cmake -S . -B build/exhaust -G Ninja -DUNIMEM_TESTS=ON -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build build/exhaust --target exhaust_convert
build/exhaust/native/tests/exhaust_convert
python tools/exhaust_convert.py
