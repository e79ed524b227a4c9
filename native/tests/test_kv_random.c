/* Random calls, valid and not, of random caches. Every sequence has a number, which is printed when
 * it fails. With a number as its argument the program runs only that sequence; with a second number
 * N, it runs N sequences from there on. */
#include "kv_model.h"

enum { N_SEQUENCES = 1000, N_CALLS = 60 };

static uint64_t below(kv_model *m, uint64_t n) {
    return test_random(&m->random) % n;
}

/* Mostly at most n + 1, sometimes far too many. */
static uint64_t about(kv_model *m, uint64_t n) {
    return below(m, 30) == 0 ? UINT64_MAX - below(m, 3) : below(m, n + 2);
}

static um_dtype any_type(kv_model *m) {
    uint64_t type = below(m, m->spec.type >= UM_Q8_0 ? 4 : 3);
    return type == 3 ? m->spec.type : (um_dtype)type;
}

/* A random cache: any type, plain or ring, some with rows that are not usable yet, some with as
 * many rows as tokens. */
static void make_any(kv_model *m, uint64_t sequence) {
    uint64_t random = sequence;
    m->random = sequence;
    um_kv_spec spec = {.n_layers = (uint32_t)below(m, 3) + 1,
                       .n_kv_heads = (uint32_t)below(m, 3) + 1,
                       .head_dim = (uint32_t)below(m, 40) + 1,
                       .batch = below(m, 3) == 0 ? 3 : 1,
                       .type = (um_dtype)below(m, UM_DTYPE_COUNT)};
    bool ring = below(m, 2) == 0, guarded = !ring && below(m, 2) == 0;
    uint64_t n_rows = below(m, 24) + 1, usable = n_rows;
    size_t gap = (size_t)below(m, 3) * 64;
    spec.head_dim = spec.type >= UM_Q8_0 ? 32 * (spec.head_dim % 3 + 1) : spec.head_dim;
    if (ring) {
        /* Rows must fill whole pages: 16 or 32 rows of this size do. */
        n_rows = 16 + 16 * below(m, 2);
        spec.n_kv_heads = spec.type >= UM_Q8_0 ? 4 : 2;
        spec.head_dim = (uint32_t)(page_up(1) / 32 / (spec.type == UM_F32 ? 4 : 2) * 2);
        spec.head_dim = spec.type >= UM_Q8_0 ? (uint32_t)page_up(1) / 4 : spec.head_dim;
        spec.window = below(m, 3) == 0 ? n_rows : below(m, n_rows) + 1;
        spec.max_seq_len = spec.window + below(m, 3) * 100;
        usable = n_rows;
    } else {
        spec.max_seq_len = below(m, 2) == 0 ? n_rows : below(m, 30) + 1;
        usable = below(m, 2) == 0 ? n_rows : below(m, n_rows + 1);
        /* A page has several rows, so that a part of it may be unusable. */
        spec.head_dim = guarded && spec.type < UM_Q8_0 ? 512 : spec.head_dim;
    }
    spec.v_type = spec.type;
    random = m->random;
    make_model(m, spec, n_rows, usable, gap, guarded);
    m->random = random;
}

static void append_some(kv_model *m) {
    um_kv_order order = below(m, 2) == 0 ? UM_KV_TOKEN_MAJOR : UM_KV_HEAD_MAJOR;
    uint64_t rows = m->storage.n_rows, n = below(m, 4) == 0 ? below(m, rows + 2) : below(m, 4);
    if (model_is_ring(m) && below(m, 20) == 0) {
        n = below(m, 3 * rows);
    }
    um_dtype type = any_type(m);
    if (below(m, 3) == 0) {
        do_append(m, (uint32_t)below(m, m->spec.n_layers), n, type, order);
        return;
    }
    for (uint32_t layer = 0; layer < m->spec.n_layers; layer++) {
        do_append(m, layer, n, type, order);
    }
}

static void reserve_some(kv_model *m) {
    uint64_t n = below(m, 10) == 0 ? about(m, m->storage.n_rows) : below(m, 5) + 1;
    do_reserve(m, n == 0 ? 1 : n);
    if (m->reserved != 0 && below(m, 3) != 0) {
        write_reserved(m);
        do_commit(m, below(m, 2) == 0 ? m->reserved : about(m, m->reserved));
    }
}

/* Positions near every limit of a number. */
static void adopt_some(kv_model *m) {
    uint64_t edges[] = {0, (uint64_t)1 << 32, (uint64_t)1 << 63, UINT64_MAX - 60};
    uint64_t next = edges[below(m, 4)] + below(m, 30);
    do_adopt(m, next, about(m, model_is_ring(m) ? m->spec.window : m->kv.usable_rows));
}

static void read_some(kv_model *m) {
    uint32_t layer = (uint32_t)below(m, m->spec.n_layers);
    uint64_t first = model_layer_first(m, layer), held = m->next[layer] - first;
    uint64_t at = below(m, held + 1);
    uint64_t n = below(m, 4) == 0 ? about(m, held) : below(m, held - at + 1);
    do_read(m, layer, (int)below(m, 2), first + at - (below(m, 20) == 0), n, any_type(m));
}

static void call_some(kv_model *m) {
    uint64_t len = model_len(m), call = below(m, 100);
    if (call < 30) {
        append_some(m);
    } else if (call < 40) {
        do_append_all(m, any_type(m));
    } else if (call < 52) {
        reserve_some(m);
    } else if (call < 55) {
        do_commit(m, about(m, m->reserved));
    } else if (call < 61) {
        do_rollback(m);
    } else if (call < 70) {
        do_crop(m, below(m, 2) == 0 ? len - len / 4 : about(m, len));
    } else if (call < 77) {
        do_trim(m, about(m, len), below(m, 2) == 0 ? 0 : about(m, len));
    } else if (call < 83) {
        do_set_usable(m, about(m, m->storage.n_rows));
    } else if (call < 87) {
        do_move(m, below(m, 2) == 0 ? 0 : about(m, m->storage.n_rows));
    } else if (call < 89) {
        adopt_some(m);
    } else if (call < 90) {
        do_clear(m);
    } else {
        read_some(m);
    }
}

static bool run_sequence(uint64_t sequence) {
    kv_model m;
    memset(&m, 0, sizeof m);
    make_any(&m, sequence);
    for (int i = 0; i < N_CALLS; i++) {
        call_some(&m);
        if (atomic_load(&test_n_failures) != 0) {
            fprintf(stderr, "sequence %" PRIu64 ", call %d: type %d, window %" PRIu64 "\n",
                    sequence, i, (int)m.spec.type, m.spec.window);
            return false;
        }
    }
    free_model(&m);
    return true;
}

TEST(random_calls) {
    uint64_t first = 0, n = test_many(400, N_SEQUENCES);
    if (test_args[0] != NULL) {
        first = strtoull(test_args[0], NULL, 10);
        n = test_args[1] != NULL ? strtoull(test_args[1], NULL, 10) : 1;
    }
    for (uint64_t i = 0; i < n && run_sequence(first + i); i++) {
    }
}
