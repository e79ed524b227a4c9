"""The files that get faults, and the tests that must notice them."""

from __future__ import annotations

# Files of native/src and their tests in Python. The C tests with their name run first, then all
# others.
C_FILES = {
    "tape.c": ("tests/_core/test_tape.py", "tests/test_layout.py"),
    "kv.c": ("tests/kv/cache/test_*.py",),
    "paged.c": ("tests/kv/test_paged*.py",),
    "gguf.c": ("tests/weights/test_gguf*.py", "tests/weights/test_opened.py"),
    "safetensors.c": ("tests/weights/test_safetensors*.py",),
    "placement.c": ("tests/_core/test_block*.py",),
    "grow.c": ("tests/_core/test_mapping_grow.py", "tests/kv/cache/test_storage_grow.py"),
}

# Modules of src/unimem, and the tests of their rooms.
PYTHON_FILES = {
    "system/limits.py": ("tests/system/test_limits*.py", "tests/planning/test_plan_limits.py"),
    "planning/needs.py": tuple(
        """
        tests/planning/test_needs.py tests/models/test_families.py tests/planning/test_plan.py
        tests/engine/test_graph.py
    """.split()
    ),
    "planning/search.py": ("tests/planning/test_search.py",),
    "planning/plan.py": ("tests/planning/test_*.py", "tests/cli/test_plan.py"),
    "planning/result.py": ("tests/planning/test_*.py", "tests/cli/test_plan.py"),
    "kv/snapshot/format_rows.py": ("tests/kv/snapshot/test_*.py", "tests/project/test_upgrades.py"),
}
