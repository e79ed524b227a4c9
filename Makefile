# The commands of the documents, and the gates. Everything happens in .venv and build/; nothing is
# installed elsewhere. Seldom-used commands are in tools/ (CONTRIBUTING.md); those that need more than
# `make install` name a stamp of this file, such as .venv/.frameworks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tools of the environment call each other by name: cython-lint pycodestyle, CMake ninja.
export PATH := $(abspath $(BIN)):$(PATH)
BUILD := build
# Tests start a thousand processes, which find compiled what they import; images set this variable.
unexport PYTHONDONTWRITEBYTECODE
# A pipe fails where any part of it does.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# Sources whose change needs a new build; Python files are used in place.
NATIVE := $(wildcard native/include/*.h native/src/*/*.[ch] native/exec/*.[ch] bench/native/*.[ch]) \
          $(wildcard src/unimem/*/*.p[yx][xd] src/unimem/*/*/*.p[yx][xd] bench/unimem_bench/*.pyx) \
          tools/stubs.py CMakeLists.txt $(wildcard cmake/*) pyproject.toml
C_FILES := $(wildcard native/include/*.h native/src/*/*.[ch] native/exec/*.[ch] native/tests/*.[ch]) \
           $(wildcard native/fuzz/*.[ch]) \
           $(wildcard bench/native/*.[ch] tests/support/kernel/shim/*.c tests/exec/*.c tests/exec/*.cpp) \
           $(wildcard examples/c/*.[ch] examples/cpp/*.[ch]pp) \
           $(wildcard src/unimem/cuda/*.cu ggml/src/unimem_ggml/*.h)

GGML := ggml/CMakeLists.txt ggml/pyproject.toml ggml/source.json ggml/fetch.py \
        $(wildcard ggml/src/unimem_ggml/*)

WORKERS ?= $(shell nproc)
# A test that hangs fails after so many seconds, and says where it was.
PYTEST = $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadgroup --timeout 600

.PHONY: run test test-all test-c test-py coverage mutants test-numa test-gpu test-vllm test-lmcache llama-prefixes models faults kills wheels \
        gpu-wheels docs release-check check format asan tsan fuzz soak install bench bench-docs bench-stream clean \
        test-transformers architectures

run: $(VENV)/.run
	$(BIN)/unimem run

# The fast tier. WORKERS=0 runs it in one process.
test: test-c test-py

# Everything there is: the fast tier, the slow tests, and searches with ten times the examples.
test-all: export UNIMEM_TESTS_ALL = 1
test-all: test-c $(VENV)/.frameworks
	$(BIN)/python -m unimem_bench.llama_build >/dev/null \
	    || echo "*** llama.cpp cannot be built: the tests beside it will be SKIPPED" >&2
	$(PYTEST) --all

test-c: $(VENV)/.installed
	$(BIN)/cmake -S . -B $(BUILD)/c -G Ninja -DUNIMEM_TESTS=ON -DCMAKE_BUILD_TYPE=Debug >/dev/null
	$(BIN)/cmake --build $(BUILD)/c
	$(BIN)/ctest --test-dir $(BUILD)/c --output-on-failure

test-py: $(VENV)/.installed
	$(PYTEST)

# The site of the documents: build/site/html. LINKS=--links asks the servers that they link to.
docs: $(VENV)/.docs
	$(BIN)/python tools/site/build.py $(LINKS)

# All that can be checked of a release before it is published; TAG=v0.1.0 is that release, and
# RELEASE="--links --wheels" adds to it.
release-check: $(VENV)/.release
	$(BIN)/python tools/release/release_check.py --tag "$(TAG)" $(RELEASE)

# Which lines and branches the tests run; with TIER=--all, those of both tiers.
coverage: $(VENV)/.worth $(if $(TIER),$(VENV)/.frameworks)
	TIER=$(TIER) tools/coverage.sh

# Which faults the tests notice, put into the core by tools; FILES="tape.c kv.c" tries some.
mutants: $(VENV)/.worth
	$(BIN)/python tools/mutants/run.py $(FILES)

# Model files that packages carry, from their plan to a resumed session: docs/tokenizers.md. LLAMA is a
# Python that has xllamacpp, to compare texts with.
models: $(VENV)/.installed
	$(BIN)/python tools/real_models.py $(if $(LLAMA),--llama $(LLAMA))

# llama.cpp's prefixes with the real thing: docs/llama-cpp.md. LLAMA is a Python that has xllamacpp,
# BINDING one that has llama-cpp-python.
llama-prefixes: $(VENV)/.installed
	$(BIN)/python tools/llama_prefixes.py $(if $(LLAMA),--llama $(LLAMA)) $(if $(BINDING),--binding $(BINDING)) \
	    --record bench/results/doors/llama_cpp.json

# What the tests of llama.cpp's doors want: its newest server, and llama-cpp-python. 500 MB.
$(BUILD)/llama: $(VENV)/.installed
	$(BIN)/python tools/llama_env.py $@

# The other minor of transformers with all of its tests: 130 MB, a minute.
OTHER ?= 5.23
test-transformers: $(VENV)/.frameworks
	test -d $(BUILD)/transformers-$(OTHER) || $(PIP) --no-deps \
	    --target $(BUILD)/transformers-$(OTHER) "transformers==$(OTHER).*"
	PYTHONPATH=$(BUILD)/transformers-$(OTHER) $(BIN)/python -m pytest -q --all tests/transformers

# The table of docs/transformers.md.
architectures: $(VENV)/.frameworks
	$(BIN)/python tools/architectures.py

# Real vLLM on CPUs, with the tier of unimem.vllm: docs/engines.md. 3.6 GB, 10 minutes.
test-vllm: $(VENV)/.installed
	$(BIN)/python tools/vllm_real.py $(BUILD)/vllm bench/results/doors/vllm.json
	$(BIN)/python tools/doors.py

# LMCache's real server, and SGLang's own classes, in an environment of their own: docs/engines.md.
test-lmcache: $(VENV)/.installed
	$(BIN)/python tools/lmcache_env.py $(BUILD)/lmcache
	$(BUILD)/lmcache/bin/python -m pytest -q -p no:cacheprovider -W ignore::DeprecationWarning \
	    -W ignore::FutureWarning tests/test_lmcache.py tests/test_sglang.py
	$(BUILD)/lmcache/bin/python tools/lmcache_real.py --dir $(BUILD)/lmcache-run \
	    --record bench/results/doors/lmcache.json $(if $(wildcard $(BUILD)/vllm/models),--vllm $(BUILD)/vllm)
	$(BIN)/python tools/doors.py

# Every call of the system fails once, in every operation. The table goes to docs/hardening.md.
faults: $(VENV)/.installed
	$(BIN)/python tools/faults/faults.py --page --dir $(BUILD)/faults

# Processes that are killed while they save, stage, repack, store and grow. The same document.
KILLS ?= 5000
kills: $(VENV)/.installed
	$(BIN)/python tools/kills.py --page --kills $(KILLS) --dir $(BUILD)

# Wheels and the sdist in dist/, each tried in an empty environment: docs/wheels.md. What they are
# made with is fetched by apt and pip. WHEELS="--python 3.12 --machine x86_64" makes one.
wheels:
	$(PYTHON) tools/wheels/make.py $(WHEELS)

# In an emulated machine with three NUMA nodes. What it needs is fetched by apt, QEMU by root only.
test-numa: $(VENV)/.installed
	$(BIN)/python tests/numa/vm.py -- $(abspath $(BIN))/python -m pytest -p no:cacheprovider tests/numa

# On a machine with a GPU, with the PYTHON there that has CuPy; reaches nothing outside.
test-gpu:
	$(PYTHON) tools/test_gpu.py

# For test-gpu, on a machine that is connected: wheels of what the other one's Python may lack.
GPU_PYTHON ?= 3.12
gpu-wheels:
	$(PYTHON) tools/test_gpu.py wheels $(GPU_PYTHON)

check: $(VENV)/.checkers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet .github/workflows
	$(BIN)/cython-lint src/unimem bench/unimem_bench ggml/src
	$(BIN)/clang-format --dry-run --Werror $(C_FILES)
	$(BIN)/python -m pytest -q --all tests/project/test_tidy.py tests/project/test_snippets.py

format: $(VENV)/.checkers
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_FILES)

install: $(VENV)/.installed

# What builds stands in build/tools; what runs, in .venv. pip compiles no modules for `make run`:
# Python does it for the few that are imported.
TOOLS := $(abspath $(BUILD)/tools)
PIP := $(BIN)/python -m pip install --quiet
WITH_TOOLS := PYTHONPATH=$(TOOLS) PATH=$(TOOLS)/bin:$$PATH $(PIP) --no-deps --no-build-isolation
NEEDS = $(BIN)/python tools/requirements.py

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile --upgrade pip "numpy>=2"
	$(BIN)/python -m pip uninstall --quiet --yes setuptools
	touch $@

$(TOOLS)/.done: $(VENV)/.python
	$(PIP) --target $(TOOLS) --upgrade scikit-build-core "cython==3.3.1" cmake ninja
	touch $@

# ggml is a distribution of its own, built for this CPU. What builds asks each package that is
# installed where its CMake files are: an older unimem, whose modules are not those of these sources,
# would fail to say.
$(VENV)/.ggml: $(TOOLS)/.done $(GGML)
	$(WITH_TOOLS) --no-compile ./ggml -C build-dir=$(abspath $(BUILD))/ggml
	touch $@

$(VENV)/.run: $(VENV)/.ggml $(NATIVE)
	$(NEEDS) run | $(PIP) --no-compile -r /dev/stdin
	$(BIN)/python -m pip uninstall -qq --yes unimem-llm
	$(WITH_TOOLS) --no-compile -e .
	touch $@

# Libraries that unimem is tested with, where they can be had. They are large: only the larger tier
# wants them. torch's CPU build is on an index of its own; PyPI's brings libraries for GPUs.
FRAMEWORKS := torch==2.13.0+cpu jax
VLLM := 0.33.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

$(VENV)/.installed: $(VENV)/.run
	$(NEEDS) test | $(PIP) -r /dev/stdin
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(NEEDS) docs | $(PIP) -r /dev/stdin
	touch $@

$(VENV)/.frameworks: $(VENV)/.docs
	for library in $(FRAMEWORKS); do \
	    $(PIP) $$library 2>/dev/null || $(PIP) --extra-index-url $(TORCH_INDEX) $$library \
	        || echo "*** $$library cannot be had: its tests will be SKIPPED" >&2; \
	done
	if $(BIN)/python -c 'import torch'; then $(NEEDS) transformers | $(PIP) -r /dev/stdin; fi
	$(PIP) 'peft==0.21.*' || echo "*** PEFT cannot be had: the tests of its adapters will be SKIPPED" >&2
	$(NEEDS) servers | $(PIP) -r /dev/stdin \
	    || echo "*** moto cannot be had: its tests will be SKIPPED" >&2
	$(NEEDS) ray | $(PIP) -r /dev/stdin \
	    || echo "*** Ray cannot be had: the tests of a cluster will be SKIPPED" >&2
	$(BIN)/python tools/vllm_sources.py $(VLLM) $(BUILD)/vllm \
	    || echo "*** vLLM's sources cannot be had: the tests of its tier will be SKIPPED" >&2
	touch $@

$(VENV)/.checkers: $(VENV)/.installed
	$(NEEDS) check | $(PIP) -r /dev/stdin
	touch $@

$(VENV)/.worth: $(VENV)/.installed
	$(NEEDS) worth | $(PIP) -r /dev/stdin
	touch $@

$(VENV)/.release: $(VENV)/.installed
	$(NEEDS) release | $(PIP) -r /dev/stdin
	touch $@

# The C tests, and the tests of the bindings, with AddressSanitizer and UBSan.
asan: $(VENV)/.installed
	tools/asan.sh

# The C tests with ThreadSanitizer, and sixteen threads on each kind of object for so many seconds.
SECONDS ?= 30
tsan: $(VENV)/.installed
	tools/tsan.sh $(SECONDS)

# What parses, under fuzzers: docs/fuzzing.md. clang is fetched by apt, by root only. FUZZ="gguf
# paged" runs some targets, FUZZ=--record adds the figures to the page.
FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.installed
	$(BIN)/python tools/fuzz.py --seconds $(FUZZ_SECONDS) $(FUZZ)

# Everything at once, with processes that are killed, and what grows meanwhile: docs/soak.md.
# SOAK=--page puts the result into that page.
SOAK_SECONDS ?= 7200
soak: $(VENV)/.installed
	mkdir -p $(BUILD)
	$(BIN)/python tools/soak.py --seconds $(SOAK_SECONDS) --record $(BUILD)/soak.json $(SOAK)

# All suites, half an hour. QUICK=--quick takes two minutes.
bench: $(VENV)/.frameworks
	$(BIN)/unimem bench $(QUICK) --dir $(BUILD)/bench --output $(BUILD)/bench/unimem-bench.json

# Models larger than memory, for docs/streaming.md: as root, an hour and 20 GB of disk.
bench-stream: $(VENV)/.frameworks
	$(BIN)/python -m unimem_bench.llama_build >/dev/null
	$(BIN)/unimem bench stream --dir $(BUILD)/bench --output bench/results/stream.json
	rm -f bench/results/stream-*.json  # older records of cases that this run has
	$(BIN)/python tools/streaming_page.py bench/results/stream.json
	$(BIN)/python tools/streaming_room.py --record bench/results/streaming-room.json

# The document that is made of the runs in the repository, and all of its plots in build/bench-docs.
bench-docs: $(VENV)/.installed
	$(BIN)/unimem bench --from bench/results/unimem-bench.json --from bench/results/decode.json \
	    --page docs/benchmarks.md --plots $(BUILD)/bench-docs

clean:
	rm -rf $(BUILD) $(VENV)
