/* Readers beside the writer of a KV cache: whatever they are told is there is whole, in a plain
 * cache and in a ring. In a ring that is so for as many tokens as it has rows beyond the window:
 * the writer waits for the readers after so many. */
#include "kv_model.h"

#include <pthread.h>

enum { LAYERS = 2, VALUES = 1024, WINDOW = 24, SPARE = 8, N_PHASES = 60, N_READERS = 2 };

static const um_kv *read_kv;
static _Atomic unsigned n_reads, n_torn;
static _Atomic bool phase_done;
static pthread_barrier_t phase;

/* All tokens that are shown of all layers, and the last one that all layers hold. */
static void read_tokens(void) {
    uint64_t next = um_kv_next_position(read_kv), shown = um_kv_seq_len(read_kv);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        uint64_t first = 0, len = um_kv_layer_len(read_kv, layer, &first);
        bool torn = len < shown || first + len < next;
        for (int v = 0; v < 2; v++) {
            const unsigned char *lane = um_kv_lane(read_kv, layer, v, 0);
            const float *rows = (const void *)(lane + um_kv_row(read_kv, first) * VALUES * 4);
            for (uint64_t t = 0; t < len; t++) {
                torn = torn || rows[t * VALUES] != (float)(first + t) ||
                       rows[t * VALUES + VALUES - 1] != (float)(first + t);
            }
        }
        atomic_fetch_add(&n_torn, torn);
    }
    atomic_fetch_add(&n_reads, 1);
}

static void *read_phases(void *arg) {
    static _Thread_local float out[VALUES];
    for (int i = 0; i < N_PHASES; i++) {
        pthread_barrier_wait(&phase);
        do {
            uint64_t next = um_kv_next_position(read_kv);
            read_tokens();
            if (next > 0 && um_kv_read(read_kv, 1, 1, next - 1, 1, out, UM_F32, NULL) == UM_OK) {
                atomic_fetch_add(&n_torn, out[0] != (float)(next - 1) || out[VALUES - 1] != out[0]);
            }
        } while (!atomic_load(&phase_done));
        pthread_barrier_wait(&phase);
    }
    return arg;
}

/* A token, in each of the three ways in turn. */
static void write_token(um_kv *kv) {
    static float rows[LAYERS * VALUES];
    uint64_t position = um_kv_next_position(kv), row;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        rows[i] = (float)position;
    }
    if (position % 3 == 0) {
        CHECK_OK(um_kv_append_all(kv, rows, rows, UM_F32, &test_err));
    } else if (position % 3 == 1) {
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            CHECK_OK(um_kv_append(kv, layer, rows, rows, UM_F32, UM_KV_HEAD_MAJOR, 1, &test_err));
        }
    } else if (CHECK_OK(um_kv_reserve(kv, 1, &row, &test_err))) {
        for (uint32_t i = 0; i < 2 * LAYERS; i++) {
            unsigned char *lane = um_kv_lane(kv, i / 2, i % 2, 0);
            memcpy(lane + row * kv->row_bytes, rows, kv->row_bytes);
        }
        CHECK_OK(um_kv_commit(kv, 1, &test_err));
    }
}

static void test_readers(uint64_t window) {
    um_kv_spec spec = {.n_layers = LAYERS,
                       .n_kv_heads = 2,
                       .head_dim = VALUES / 2,
                       .batch = 1,
                       .max_seq_len = N_PHASES * SPARE,
                       .window = window,
                       .type = UM_F32};
    uint64_t n_rows = window != 0 ? WINDOW + SPARE : spec.max_seq_len;
    kv_model m;
    pthread_t readers[N_READERS];
    make_model(&m, spec, n_rows, n_rows, 0, false);
    read_kv = &m.kv;
    REQUIRE(pthread_barrier_init(&phase, NULL, N_READERS + 1) == 0);
    for (int i = 0; i < N_READERS; i++) {
        REQUIRE(pthread_create(&readers[i], NULL, read_phases, NULL) == 0);
    }
    for (int i = 0; i < N_PHASES; i++) {
        pthread_barrier_wait(&phase);
        for (int t = 0; t < SPARE; t++) {
            write_token(&m.kv);
        }
        atomic_store(&phase_done, true);
        pthread_barrier_wait(&phase);
        atomic_store(&phase_done, false);
    }
    for (int i = 0; i < N_READERS; i++) {
        pthread_join(readers[i], NULL);
    }
    pthread_barrier_destroy(&phase);
    CHECK_EQ_U64(um_kv_next_position(&m.kv), N_PHASES * SPARE);
    CHECK(atomic_load(&n_reads) >= N_READERS * N_PHASES);
    CHECK_EQ_U64(atomic_load(&n_torn), 0);
    free_model(&m);
}

static void read_when_interrupted(int number) {
    (void)number;
    read_tokens();
}

/* At whatever instruction the writer is. Here a reader is never overtaken. */
static void test_interrupted(uint64_t window) {
    um_kv_spec spec = {.n_layers = LAYERS,
                       .n_kv_heads = 2,
                       .head_dim = VALUES / 2,
                       .batch = 1,
                       .max_seq_len = 200,
                       .window = window,
                       .type = UM_F32};
    uint64_t n_rows = window != 0 ? WINDOW + SPARE : spec.max_seq_len;
    kv_model m;
    make_model(&m, spec, n_rows, n_rows, 0, false);
    read_kv = &m.kv;
    atomic_store(&n_reads, 0);
    test_interrupt(read_when_interrupted);
    for (int round = 0; round < 300 && atomic_load(&n_reads) < 4000; round++) {
        um_kv_clear(&m.kv);
        for (int t = 0; t < 200; t++) {
            write_token(&m.kv);
        }
    }
    test_interrupt(NULL);
    CHECK(atomic_load(&n_reads) > 0);
    CHECK_EQ_U64(atomic_load(&n_torn), 0);
    free_model(&m);
}

int main(void) {
    test_readers(0);
    test_readers(WINDOW);
    test_interrupted(0);
    test_interrupted(WINDOW);
    return test_report();
}
