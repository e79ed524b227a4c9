/* Sixteen threads on one cache, and on the sequences of one pool, as docs/threads.md allows it. */
#include "paged_pool.h"
#include "stress.h"

enum { LAYERS = 2, VALUES = 64, ROWS = 4096 };

static um_kv cache;

/* Every value of token t is t. */
static void append_token(void) {
    float row[VALUES];
    uint64_t next = um_kv_next_position(&cache);
    for (size_t i = 0; i < VALUES; i++) {
        row[i] = (float)next;
    }
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        CHECK(um_kv_append(&cache, layer, row, row, UM_F32, UM_KV_TOKEN_MAJOR, 1, NULL) == UM_OK);
    }
}

static void use_cache(worker *w) {
    float row[VALUES];
    if (w->number == 0) {
        if (um_kv_seq_len(&cache) < ROWS) {
            append_token();
        }
        return;
    }
    uint64_t n = um_kv_seq_len(&cache), first = 0;
    uint32_t layer = (uint32_t)any_of(w, LAYERS);
    CHECK(um_kv_layer_len(&cache, layer, &first) >= n && first == 0);
    if (n > 0) {
        uint64_t t = any_of(w, n);
        const float *rows = um_kv_lane(&cache, layer, 1, 0);
        CHECK(rows[um_kv_row(&cache, t) * VALUES + any_of(w, VALUES)] == (float)t);
        CHECK(um_kv_read(&cache, layer, 0, t, 1, row, UM_F32, NULL) == UM_OK);
        CHECK(row[0] == (float)t && row[VALUES - 1] == (float)t);
    }
}

TEST(a_cache_has_one_writer_and_readers) {
    um_kv_spec spec = {.n_layers = LAYERS,
                       .n_kv_heads = 1,
                       .head_dim = VALUES,
                       .batch = 1,
                       .max_seq_len = ROWS,
                       .type = UM_F32,
                       .v_type = UM_F32};
    void *rows;
    REQUIRE(posix_memalign(&rows, 64, 2 * LAYERS * ROWS * VALUES * sizeof(float)) == 0);
    um_kv_storage storage = {.base = rows,
                             .n_rows = ROWS,
                             .usable_rows = ROWS,
                             .lane_stride = ROWS * VALUES * sizeof(float),
                             .v_lane_stride = ROWS * VALUES * sizeof(float)};
    CHECK_OK(um_kv_init(&cache, &spec, &storage, &test_err));
    stress(use_cache);
    CHECK(um_kv_seq_len(&cache) > 0);
    um_kv_free(&cache);
    free(rows);
}

static pool paged;
static um_paged_seq shared_prefix;
/* Blocks change hands under it; tokens are written and gathered without. */
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;

static void use_pool(worker *w) {
    enum { DIM = 8, MOST = 6 };
    float row[DIM], out[32 * DIM];
    um_paged_seq own;
    pthread_mutex_lock(&pool_lock);
    um_status status = um_paged_seq_fork(&own, &shared_prefix, NULL);
    pthread_mutex_unlock(&pool_lock);
    CHECK(status == UM_OK);
    uint64_t before = um_paged_seq_len(&own);
    for (size_t i = 0; i < MOST && status == UM_OK; i++) {
        um_paged_pending pending;
        for (size_t d = 0; d < DIM; d++) {
            row[d] = (float)(w->number * 100 + i);
        }
        pthread_mutex_lock(&pool_lock);
        status =
            um_paged_append_begin(&pending, &own, 0, row, row, UM_F32, UM_KV_TOKEN_MAJOR, 1, NULL);
        pthread_mutex_unlock(&pool_lock);
        if (status == UM_OK) {
            um_paged_append_write(&pending);
            pthread_mutex_lock(&pool_lock);
            um_paged_append_end(&pending);
            pthread_mutex_unlock(&pool_lock);
        }
    }
    CHECK(status == UM_OK || status == UM_E_FULL);
    uint64_t n = um_paged_seq_len(&own);
    CHECK(um_paged_gather(&own, 0, 1, n, out, sizeof out, UM_F32, NULL) == UM_OK);
    for (uint64_t t = 0; t < n; t++) {
        float expected = t < before ? (float)t : (float)(w->number * 100 + t - before);
        CHECK(out[t * DIM] == expected && out[t * DIM + DIM - 1] == expected);
    }
    pthread_mutex_lock(&pool_lock);
    um_paged_seq_free(&own);
    pthread_mutex_unlock(&pool_lock);
}

TEST(sequences_of_one_pool_are_written_by_all) {
    enum { DIM = 8, PREFIX = 6 };
    paged = make_pool((um_paged_spec){1, 1, DIM, 40, 4, UM_F32, UM_F32}); /* too few for all */
    shared_prefix = make_seq(&paged);
    for (uint32_t t = 0; t < PREFIX; t++) {
        float row[DIM];
        for (size_t d = 0; d < DIM; d++) {
            row[d] = (float)t;
        }
        CHECK_OK(
            um_paged_append(&shared_prefix, 0, row, row, UM_F32, UM_KV_TOKEN_MAJOR, 1, &test_err));
    }
    stress(use_pool);
    um_paged_seq_free(&shared_prefix);
    free_pool(&paged);
}
