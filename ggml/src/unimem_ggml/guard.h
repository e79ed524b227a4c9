// Failed checks of ggml as return values.
//
// ggml calls its abort callback for a wrong shape or too little room, and then ends the process. In
// a guarded call the callback jumps out before: ggml holds no lock while it makes headers. Kernels
// are not guarded: other threads wait for the one that fails, which ends the process as before.

#ifndef UNIMEM_GGML_GUARD_H
#define UNIMEM_GGML_GUARD_H

#include <setjmp.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

static _Thread_local jmp_buf *guard_exit;
static _Thread_local char guard_text[512];

// The last warning or error that ggml logged, of any thread.
static char guard_logged[512];
static atomic_flag guard_logs = ATOMIC_FLAG_INIT;

static void guard_abort(const char *text) {
    if (guard_exit) {
        snprintf(guard_text, sizeof guard_text, "%s", text);
        longjmp(*guard_exit, 1);
    }
    fprintf(stderr, "ggml: %s\n", text);
}

static void guard_log(enum ggml_log_level level, const char *text, void *data) {
    (void)data;
    if (level != GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_ERROR) {
        return;
    }
    while (atomic_flag_test_and_set(&guard_logs)) {
    }
    snprintf(guard_logged, sizeof guard_logged, "%s", text);
    atomic_flag_clear(&guard_logs);
}

static void guard_take_log(char *into, size_t size) {
    while (atomic_flag_test_and_set(&guard_logs)) {
    }
    snprintf(into, size, "%s", guard_logged);
    guard_logged[0] = 0;
    atomic_flag_clear(&guard_logs);
}

static void guard_set_up(void) {
    ggml_set_abort_callback(guard_abort);
    ggml_log_set(guard_log, NULL);
}

// guarded_NAME calls ggml_NAME; it returns NULL where a check fails, with the reason in guard_text.
#define GUARDED(name, parameters, arguments)                                                       \
    static void *guarded_##name parameters {                                                       \
        void *volatile made = NULL;                                                                \
        jmp_buf place;                                                                             \
        guard_text[0] = 0;                                                                         \
        guard_exit = &place;                                                                       \
        if (setjmp(place) == 0) {                                                                  \
            made = ggml_##name arguments;                                                          \
        }                                                                                          \
        guard_exit = NULL;                                                                         \
        return made;                                                                               \
    }

typedef struct ggml_context context_t;
typedef struct ggml_tensor tensor_t;

static const size_t ne_offset = offsetof(tensor_t, ne);
static const size_t nb_offset = offsetof(tensor_t, nb);
static const size_t data_offset = offsetof(tensor_t, data);

#define UNARY(name) GUARDED(name, (context_t * c, tensor_t * a), (c, a))
#define BINARY(name) GUARDED(name, (context_t * c, tensor_t * a, tensor_t * b), (c, a, b))
#define TERNARY(name)                                                                              \
    GUARDED(name, (context_t * c, tensor_t * x, tensor_t * y, tensor_t * z), (c, x, y, z))

UNARY(soft_max)
UNARY(sum_rows)
UNARY(cont)
BINARY(get_rows)
BINARY(mul)
BINARY(add)
BINARY(div)
BINARY(mul_mat)
BINARY(swiglu_split)
BINARY(geglu_split)
TERNARY(mul_mat_id)
TERNARY(add_id)
TERNARY(set_rows)
GUARDED(new_tensor, (context_t * c, int type, int n, const int64_t *ne),
        (c, (enum ggml_type)type, n, ne))
GUARDED(rms_norm, (context_t * c, tensor_t *a, float eps), (c, a, eps))
GUARDED(scale, (context_t * c, tensor_t *a, float s), (c, a, s))
GUARDED(swiglu_oai, (context_t * c, tensor_t *gate, tensor_t *up, float alpha, float limit),
        (c, gate, up, alpha, limit))
GUARDED(clamp, (context_t * c, tensor_t *a, float low, float high), (c, a, low, high))
GUARDED(argsort_top_k, (context_t * c, tensor_t *a, int k), (c, a, k))
GUARDED(reshape_2d, (context_t * c, tensor_t *a, int64_t n0, int64_t n1), (c, a, n0, n1))
GUARDED(reshape_3d, (context_t * c, tensor_t *a, int64_t n0, int64_t n1, int64_t n2),
        (c, a, n0, n1, n2))
GUARDED(view_2d, (context_t * c, tensor_t *a, int64_t n0, int64_t n1, size_t s1, size_t at),
        (c, a, n0, n1, s1, at))
GUARDED(view_3d,
        (context_t * c, tensor_t *a, int64_t n0, int64_t n1, int64_t n2, size_t s1, size_t s2,
         size_t at),
        (c, a, n0, n1, n2, s1, s2, at))
GUARDED(permute, (context_t * c, tensor_t *a, int i, int j, int k, int l), (c, a, i, j, k, l))
GUARDED(map_custom1_inplace,
        (context_t * c, tensor_t *a, ggml_custom1_op_t call, int n_tasks, void *data),
        (c, a, call, n_tasks, data))
GUARDED(rope_ext,
        (context_t * c, tensor_t *a, tensor_t *at, tensor_t *factors, int n, int mode, int n_ctx,
         float base, float scale, float ext, float attn, float fast, float slow),
        (c, a, at, factors, n, mode, n_ctx, base, scale, ext, attn, fast, slow))
GUARDED(flash_attn_ext,
        (context_t * c, tensor_t *q, tensor_t *k, tensor_t *v, tensor_t *mask, float scale,
         float bias, float cap),
        (c, q, k, v, mask, scale, bias, cap))
GUARDED(new_graph_custom, (context_t * c, size_t size, bool grads), (c, size, grads))

// Calls without a result: they return what they change.
static void *ggml_with_sinks(tensor_t *attended, tensor_t *sinks) {
    ggml_flash_attn_ext_add_sinks(attended, sinks);
    return attended;
}
GUARDED(with_sinks, (tensor_t * attended, tensor_t *sinks), (attended, sinks))

static void *ggml_expanded(struct ggml_cgraph *graph, tensor_t *tensor) {
    ggml_build_forward_expand(graph, tensor);
    return graph;
}
GUARDED(expanded, (struct ggml_cgraph * graph, tensor_t *tensor), (graph, tensor))

// Functions of the CPU backend, whose library is chosen when the module is imported.
static struct cpu_functions {
    void (*init)(void);
    struct ggml_cplan (*plan)(const struct ggml_cgraph *, int, struct ggml_threadpool *);
    enum ggml_status (*compute)(struct ggml_cgraph *, struct ggml_cplan *);
    struct ggml_threadpool *(*threadpool_new)(struct ggml_threadpool_params *);
    void (*threadpool_free)(struct ggml_threadpool *);
    const struct ggml_type_traits_cpu *(*traits)(enum ggml_type);
    ggml_backend_reg_t (*reg)(void);
} cpu;

static void *ggml_planned(struct ggml_cplan *plan, const struct ggml_cgraph *graph, int n_threads,
                          struct ggml_threadpool *pool) {
    *plan = cpu.plan(graph, n_threads, pool);
    return plan;
}
GUARDED(planned,
        (struct ggml_cplan * plan, const struct ggml_cgraph *graph, int n_threads,
         struct ggml_threadpool *pool),
        (plan, graph, n_threads, pool))

// A buffer of a type over memory of the caller. ggml would allocate that of such a buffer itself:
// the interface of a tiny one serves, with nothing to free. NULL if such a buffer knows its memory
// by more than an address.
static bool buffer_interface(ggml_backend_buffer_type_t type, size_t tiny_bytes,
                             struct ggml_backend_buffer_i *interface) {
    ggml_backend_buffer_t tiny = ggml_backend_buft_alloc_buffer(type, tiny_bytes);
    if (!tiny) {
        return false;
    }
    size_t apart = (char *)ggml_backend_buffer_get_base(tiny) - (char *)tiny->context;
    bool is_known = tiny->buft == type && apart < tiny_bytes;
    *interface = tiny->iface;
    ggml_backend_buffer_free(tiny);
    interface->free_buffer = NULL;
    return is_known;
}

#endif
