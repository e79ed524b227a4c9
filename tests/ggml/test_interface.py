"""Declarations are found in headers, and differences between two versions of them."""

from __future__ import annotations

import interface  # ggml/interface.py: see conftest.py

HEADER = """\
#pragma once
#define GGML_MAX_DIMS   4  // sizes
#define GGML_LONG(a) \\
    { ggml_not_this(a); }
#ifdef __cplusplus
extern "C" {
#endif
    enum ggml_type {
        GGML_TYPE_F32 = 0,
        GGML_TYPE_Q4 = 0x2, /* ggml_gone(); */
        GGML_TYPE_Q5,
        GGML_TYPE_LAST = GGML_TYPE_Q5,
        GGML_TYPE_COUNT,
    };
    struct ggml_tensor {
        int64_t ne[GGML_MAX_DIMS];
        struct { int a; } inner;
        void (*call)(int);
    };
    typedef struct ggml_tensor * ggml_tensor_t;
    typedef void (*ggml_op_t)(struct ggml_tensor * dst);
    GGML_API void ggml_run(struct ggml_tensor * t,
                           ggml_op_t op); // runs
    GGML_DEPRECATED(GGML_API int ggml_old(int n), "use ggml_run() instead");
    static inline int ggml_inline(int n) { if (n) { n = 2; } return n; }
    GGML_API int ggml_after (void);
#ifdef __cplusplus
}
#endif
GGML_API int ggml_last(void);
"""
DECLARED = {
    "GGML_MAX_DIMS": "GGML_MAX_DIMS = 4",
    "GGML_TYPE_F32": "GGML_TYPE_F32 = 0",
    "GGML_TYPE_Q4": "GGML_TYPE_Q4 = 2",
    "GGML_TYPE_Q5": "GGML_TYPE_Q5 = 3",
    "GGML_TYPE_LAST": "GGML_TYPE_LAST = GGML_TYPE_Q5",
    "GGML_TYPE_COUNT": "GGML_TYPE_COUNT = GGML_TYPE_Q5 + 1",
    "ggml_tensor": "struct ggml_tensor { int64_t ne[GGML_MAX_DIMS]; struct { int a; } inner; "
    "void(*call)(int); }",
    "ggml_tensor_t": "typedef struct ggml_tensor * ggml_tensor_t",
    "ggml_op_t": "typedef void(*ggml_op_t)(struct ggml_tensor * dst)",
    "ggml_run": "GGML_API void ggml_run(struct ggml_tensor * t, ggml_op_t op)",
    "ggml_old": 'GGML_DEPRECATED(GGML_API int ggml_old(int n), "use ggml_run() instead")',
    "ggml_inline": "static inline int ggml_inline(int n)",
    "ggml_after": "GGML_API int ggml_after(void)",
    "ggml_last": "GGML_API int ggml_last(void)",
}


def test_declarations_are_found_by_name() -> None:
    assert interface.declared(HEADER) == DECLARED


def test_changes_name_what_was_and_what_is() -> None:
    new = HEADER.replace("ggml_op_t op)", "ggml_op_t op, int n)").replace("ggml_last", "ggml_next")
    new = new.replace("GGML_TYPE_F32 = 0,", "GGML_TYPE_F32 = 0, GGML_TYPE_F16,  // another")
    names = {*DECLARED, "ggml_next", "ggml_nowhere"}
    assert interface.changes(DECLARED, interface.declared(new), names) == [
        "ggml_last\n    was GGML_API int ggml_last(void)\n    is  gone",
        "ggml_next\n    was not there\n    is  GGML_API int ggml_next(void)",
        "ggml_run\n    was GGML_API void ggml_run(struct ggml_tensor * t, ggml_op_t op)\n"
        "    is  GGML_API void ggml_run(struct ggml_tensor * t, ggml_op_t op, int n)",
    ]


def test_the_binding_uses_these_names() -> None:
    names = interface.used(path.read_text() for path in interface.SOURCES)
    assert len(names) > 90
    # A guarded function, one that is looked up, a struct by its layout, and a constant.
    assert {"ggml_mul_mat", "ggml_cpu_init", "ggml_cplan", "GGML_TYPE_Q8_0"} < names
    assert not names & interface.OWN
    assert interface.used(["// ggml_not\nUNARY(cont)\nggml_this(GGML_MAX)"]) == {
        "ggml_cont",
        "ggml_this",
        "GGML_MAX",
    }
