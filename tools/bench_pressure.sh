#!/usr/bin/env bash
# Measures the figures of docs/pressure.md: 25 minutes, as root, on a machine that is otherwise idle.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/unimem bench pressure "$@" --dir build/bench --output bench/results/pressure.json
.venv/bin/python tools/pressure_page.py bench/results/pressure.json
