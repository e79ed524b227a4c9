#!/usr/bin/env bash
# Builds llama.cpp for the suite `decode` on this machine, since a wheel lacks instruction sets:
# bench/README.md.
set -euo pipefail
cd "$(dirname "$0")/.."
test -x build/peer/bin/python || "${PYTHON:-python3}" -m venv build/peer
CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" build/peer/bin/pip install --no-cache-dir \
    --no-binary llama-cpp-python llama-cpp-python==0.3.32
