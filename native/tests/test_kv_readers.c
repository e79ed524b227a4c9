/* Readers beside the writer of a KV cache: every token that they are told of is whole, in a plain
 * cache and in a ring. In a ring that holds for as many tokens as it has rows beyond the window:
 * after that many, the writer waits for the readers. */
#include "kv_model.h"

enum { LAYERS = 2, VALUES = 1024, WINDOW = 24, SPARE = 8, N_PHASES = 200, N_READERS = 2 };

static const um_kv *read_kv;
static _Atomic unsigned n_reads, n_torn;
static _Atomic bool phase_done;
static pthread_barrier_t phase;

/* Reads all visible tokens of all layers, and the last one that all layers hold. */
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

/* The rows of tokens, of K and V of all layers. Each value is the position. */
static void fill_rows(float *rows, uint64_t position, uint64_t n) {
    for (uint64_t i = 0; i < LAYERS * n * VALUES; i++) {
        rows[i] = (float)(position + i / VALUES % n);
    }
}

/* Writes n tokens, in one of three ways. */
static void write_tokens(um_kv *kv, uint64_t n, uint64_t way) {
    static float rows[LAYERS * SPARE * VALUES];
    uint64_t position = um_kv_next_position(kv), row;
    for (uint64_t t = 0; way == 0 && t < n; t++) {
        fill_rows(rows, position + t, 1);
        CHECK_OK(um_kv_append_all(kv, rows, rows, UM_F32, &test_err));
    }
    fill_rows(rows, position, n);
    for (uint32_t layer = 0; way == 1 && layer < LAYERS; layer++) {
        CHECK_OK(um_kv_append(kv, layer, rows, rows, UM_F32, UM_KV_TOKEN_MAJOR, n, &test_err));
    }
    if (way == 2 && CHECK_OK(um_kv_reserve(kv, n, &row, &test_err))) {
        for (uint32_t i = 0; i < 2 * LAYERS; i++) {
            unsigned char *lane = um_kv_lane(kv, i / 2, i % 2, 0);
            memcpy(lane + row * kv->row_bytes, rows, n * kv->row_bytes);
        }
        CHECK_OK(um_kv_commit(kv, n, &test_err));
    }
}

/* Called while no reader reads: drops some tokens and wipes their rows, so that old contents are
 * not taken for new ones. */
static void drop_some(um_kv *kv, uint64_t *random) {
    uint64_t next = um_kv_next_position(kv), len = um_kv_seq_len(kv);
    uint64_t what = test_random(random) % 8, n = test_random(random) % (len + 1);
    if (kv->spec.window == 0 && um_kv_row(kv, next) + SPARE > kv->n_rows) {
        CHECK_OK(um_kv_trim(kv, n, 0, &test_err));
        CHECK_OK(um_kv_move(kv, 0, &test_err));
        if (n + SPARE > kv->n_rows) {
            um_kv_clear(kv);
        }
    } else if (what == 0) {
        um_kv_clear(kv);
    } else if (what == 1) {
        CHECK_OK(um_kv_trim(kv, n, 0, &test_err));
    } else if (what < 4 && um_kv_crop(kv, n, NULL) != UM_OK) {
        CHECK(kv->spec.window != 0);
    }
    uint64_t left = um_kv_next_position(kv), first = um_kv_first_position(kv);
    for (uint32_t i = 0; i < 2 * LAYERS && left < next; i++) {
        for (uint64_t at = left; at < next && at - first < kv->n_rows; at++) {
            unsigned char *lane = um_kv_lane(kv, i / 2, i % 2, 0);
            memset(lane + um_kv_row(kv, at) * kv->row_bytes, FILL, kv->row_bytes);
        }
    }
}

static kv_model make_cache(uint64_t window) {
    um_kv_spec spec = {LAYERS, 2, VALUES / 2, 1, .max_seq_len = 200, window, UM_F32, UM_F32};
    uint64_t n_rows = window != 0 ? WINDOW + SPARE : spec.max_seq_len;
    kv_model m;
    make_model(&m, spec, n_rows, n_rows, 0, false);
    return m;
}

static void check_readers(uint64_t window) {
    uint64_t random = window;
    AUTO_MODEL m = make_cache(window);
    pthread_t readers[N_READERS];
    read_kv = &m.kv;
    REQUIRE(pthread_barrier_init(&phase, NULL, N_READERS + 1) == 0);
    for (int i = 0; i < N_READERS; i++) {
        REQUIRE(pthread_create(&readers[i], NULL, read_phases, NULL) == 0);
    }
    for (int i = 0; i < N_PHASES; i++) {
        drop_some(&m.kv, &random);
        pthread_barrier_wait(&phase);
        for (uint64_t n = 0, more; n < SPARE; n += more) {
            more = test_random(&random) % (SPARE - n) + 1;
            write_tokens(&m.kv, more, test_random(&random) % 3);
        }
        atomic_store(&phase_done, true);
        pthread_barrier_wait(&phase);
        atomic_store(&phase_done, false);
    }
    for (int i = 0; i < N_READERS; i++) {
        pthread_join(readers[i], NULL);
    }
    pthread_barrier_destroy(&phase);
    CHECK(atomic_load(&n_reads) >= N_READERS * N_PHASES);
    CHECK_EQ(atomic_load(&n_torn), 0);
}

static void read_when_interrupted(int number) {
    (void)number;
    read_tokens();
}

/* Reads at any instruction of the writer. Here no reader is overtaken. */
static void check_interrupted(uint64_t window) {
    AUTO_MODEL m = make_cache(window);
    read_kv = &m.kv;
    atomic_store(&n_reads, 0);
    for (int round = 0; round < 300 && atomic_load(&n_reads) < 4000; round++) {
        um_kv_clear(&m.kv);
        test_interrupt(read_when_interrupted);
        for (uint64_t t = 0; t < 200; t += 4) {
            write_tokens(&m.kv, t % 3 + 1, t / 4 % 3);
        }
        test_interrupt(NULL);
    }
    CHECK(atomic_load(&n_reads) > 0);
    CHECK_EQ(atomic_load(&n_torn), 0);
}

TEST(readers) {
    check_readers(0);
    check_readers(WINDOW);
}

TEST(interrupted) {
    check_interrupted(0);
    check_interrupted(WINDOW);
}
