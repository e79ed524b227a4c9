#!/usr/bin/env bash
# Which lines and branches the tests run: `make coverage`, of the fast tier; with TIER=--all of both.
# Python by coverage.py; C and Cython by gcov. The counted package lies in build/coverage/site and
# hides the installed one; nothing else changes.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$PWD/build/coverage
site=$out/site
export PATH=$PWD/.venv/bin:$PATH

cmake -S . -B "$out/c" -G Ninja -DUNIMEM_TESTS=ON -DUNIMEM_COVERAGE=ON -DCMAKE_BUILD_TYPE=Debug \
    >/dev/null
cmake --build "$out/c" >/dev/null
rm -rf "$site"
python -m pip install --quiet --no-build-isolation --no-deps --target "$site" . \
    -C build-dir="$out/py" -C cmake.build-type=Debug -C cmake.define.UNIMEM_COVERAGE=ON
find "$out" -name '*.gcda' -delete
rm -f "$out"/.coverage*

cat >"$out/coverage.toml" <<END
[tool.coverage.run]
branch = true
data_file = "$out/.coverage"
parallel = true
patch = ["subprocess"]
source = ["$site/unimem"]

[tool.coverage.paths]
unimem = ["src/unimem", "$site/unimem"]

[tool.coverage.report]
exclude_also = ["if TYPE_CHECKING:", "@overload", "\\\\.\\\\.\\\\.\$"]
END

status=0
ctest --test-dir "$out/c" --output-on-failure -Q || status=$?
export COVERAGE_RCFILE=$out/coverage.toml
PYTHONPATH=$site:$PWD/tools/no_editable python -m coverage run -m pytest -q -n "$(nproc)" \
    --dist loadgroup -p no:cacheprovider ${TIER:-} "$@" || status=$?

python -m coverage combine --quiet
python -m coverage report --skip-covered >"$out/python.txt" || true
python -m coverage json -q -o "$out/python.json"
python tools/coverage_table.py "$out"
exit "$status"
