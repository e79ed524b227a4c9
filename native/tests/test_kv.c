/* The KV cache: where rows go, in which type, and that a call that fails leaves no trace. Rings are
 * in test_kv_ring.c, calls in any order and at all positions in test_kv_random.c, readers in
 * test_kv_readers.c. */
#include "fault_os.h"
#include "kv_model.h"

enum { N_TYPES = 6 };

static const um_dtype TYPES[N_TYPES] = {UM_F32, UM_F16, UM_BF16, UM_Q8_0, UM_Q4_1, UM_IQ4_NL};

static um_kv_spec spec_of(uint32_t batch, um_dtype type) {
    return (um_kv_spec){
        3, 2, type >= UM_Q8_0 ? 32 : 5, batch, .max_seq_len = 7, .type = type, .v_type = type};
}

/* Fixed storage, with bytes between the lanes that must stay as they are. */
static kv_model fixed_model(um_kv_spec spec) {
    kv_model m;
    make_model(&m, spec, spec.max_seq_len, spec.max_seq_len, 64, false);
    return m;
}

static um_status init_status(const um_kv_spec *spec, const um_kv_storage *storage, um_error *err) {
    um_kv kv;
    SPOIL(kv);
    um_status status = um_kv_init(&kv, spec, storage, err);
    if (status == UM_OK) {
        um_kv_free(&kv);
    } else {
        CHECK_SPOILT(kv);
    }
    return status;
}

static void check_bad_spec(um_kv_spec spec) {
    size_t nbytes = 12345;
    static _Alignas(64) unsigned char memory[64];
    um_kv_storage storage = {memory, 64, 64, .n_rows = 1, .usable_rows = 1};
    CHECK_INVALID(um_kv_storage_bytes(&spec, &nbytes, &test_err));
    size_t row;
    CHECK(um_kv_row_bytes(&spec, 0, &row, NULL) == UM_E_INVALID ||
          um_kv_row_bytes(&spec, 1, &row, NULL) == UM_E_INVALID);
    CHECK(um_kv_storage_bytes(&spec, &nbytes, NULL) == UM_E_INVALID);
    CHECK_EQ(nbytes, 12345);
    CHECK_INVALID(init_status(&spec, &storage, &test_err));
    CHECK(init_status(&spec, &storage, NULL) == UM_E_INVALID);
}

TEST(bad_specs) {
    um_kv_spec good = spec_of(1, UM_F16), spec;
#define CHECK_BAD_SPEC(change)                                                                     \
    do {                                                                                           \
        spec = good;                                                                               \
        change;                                                                                    \
        check_bad_spec(spec);                                                                      \
    } while (0)
    CHECK_BAD_SPEC(spec.n_layers = 0);
    CHECK_BAD_SPEC(spec.n_kv_heads = 0);
    CHECK_BAD_SPEC(spec.head_dim = 0);
    CHECK_BAD_SPEC(spec.batch = 0);
    CHECK_BAD_SPEC(spec.max_seq_len = 0);
    CHECK_BAD_SPEC((spec.max_seq_len = 0, spec.window = 1));
    CHECK_BAD_SPEC(spec.window = spec.max_seq_len + 1);
    CHECK_BAD_SPEC(spec.window = UINT64_MAX);
    CHECK_BAD_SPEC(spec.type = (um_dtype)9);
    CHECK_BAD_SPEC(spec.type = (um_dtype)-1);
    CHECK_BAD_SPEC(spec.v_type = (um_dtype)9);
    CHECK_BAD_SPEC((spec.head_dim = 33, spec.v_type = UM_Q4_0));
    good.type = UM_Q8_0;
    for (uint32_t dim = 1; dim < 100; dim++) {
        size_t row = 0;
        if (dim % 32 != 0) {
            CHECK_BAD_SPEC(spec.head_dim = dim);
            continue;
        }
        spec.head_dim = dim;
        CHECK_OK(um_kv_row_bytes(&spec, 0, &row, &test_err));
        CHECK_EQ(row, 2 * 34 * dim / 32);
    }
    good.type = UM_F32;
    CHECK_BAD_SPEC(spec.n_kv_heads = spec.head_dim = UINT32_MAX);
#undef CHECK_BAD_SPEC
}

/* Each product of the size overflows in one of these; the last is more than any address space. */
TEST(sizes_that_overflow) {
    uint64_t most = UINT64_MAX, space = (uint64_t)1 << 62;
    uint32_t m = UINT32_MAX;
    struct {
        uint32_t n_layers, head_dim, batch;
        uint64_t max_seq_len;
    } cases[] = {{3, 5, 1, most},
                 {3, 5, 1, most / 20 + 1},
                 {3, 5, 1, most / 20},
                 {3, 5, 1, most / 40 + 1},
                 {3, 5, 1, most / 120 + 1},
                 {m, 5, m, 1},
                 {m, m, m, 1},
                 {1, 5, 1, space / 20}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        um_kv_spec spec = {.n_layers = cases[i].n_layers,
                           .n_kv_heads = 2,
                           .head_dim = cases[i].head_dim,
                           .batch = cases[i].batch,
                           .max_seq_len = cases[i].max_seq_len,
                           .type = UM_F16,
                           .v_type = UM_F16};
        size_t nbytes = 12345;
        CHECK_INVALID(um_kv_storage_bytes(&spec, &nbytes, &test_err));
        CHECK_EQ(nbytes, 12345);
    }
}

static um_kv_storage storage_for(const um_kv_spec *spec, void *memory, uint64_t n_rows) {
    size_t row = 0;
    CHECK_OK(um_kv_row_bytes(spec, 0, &row, &test_err));
    size_t rows = (size_t)n_rows * (spec->window != 0 ? 2 : 1);
    size_t lane = (rows * row + 63) / 64 * 64;
    return (um_kv_storage){.base = memory,
                           .lane_stride = lane,
                           .v_lane_stride = lane,
                           .n_rows = n_rows,
                           .usable_rows = n_rows};
}

TEST(bad_storage) {
    static _Alignas(64) unsigned char memory[1 << 16];
    um_kv_spec spec = spec_of(2, UM_F16);
    um_kv_storage good = storage_for(&spec, memory, 7), bad;
    memset(memory, FILL, sizeof memory);
    CHECK_OK(init_status(&spec, &good, &test_err));
#define CHECK_BAD_STORAGE(change)                                                                  \
    do {                                                                                           \
        bad = good;                                                                                \
        bad.change;                                                                                \
        CHECK_INVALID(init_status(&spec, &bad, &test_err));                                        \
        CHECK(init_status(&spec, &bad, NULL) == UM_E_INVALID);                                     \
    } while (0)
    CHECK_BAD_STORAGE(base = NULL);
    for (size_t shift = 1; shift < 64; shift++) {
        CHECK_BAD_STORAGE(base = memory + shift);
        CHECK_BAD_STORAGE(lane_stride += shift);
        CHECK_BAD_STORAGE(v_lane_stride += shift);
    }
    CHECK_BAD_STORAGE(lane_stride -= 64);
    CHECK_BAD_STORAGE(v_lane_stride -= 64);
    CHECK_BAD_STORAGE(lane_stride = 0);
    CHECK_BAD_STORAGE(lane_stride = SIZE_MAX / 64 * 64);
    CHECK_BAD_STORAGE(n_rows = bad.usable_rows = 0);
    CHECK_BAD_STORAGE(n_rows = 6);
    CHECK_BAD_STORAGE(n_rows = 1000);
    CHECK_BAD_STORAGE(n_rows = UINT64_MAX);
    CHECK_BAD_STORAGE(n_rows = UINT64_MAX / 2 + 1);
    CHECK_BAD_STORAGE(usable_rows = 8);
    CHECK_BAD_STORAGE(usable_rows = UINT64_MAX);
    /* More memory than needed, fewer rows than tokens, no row usable yet. */
    bad = good;
    bad.lane_stride += 64;
    CHECK_OK(init_status(&spec, &bad, &test_err));
    bad.n_rows = bad.usable_rows = 1;
    CHECK_OK(init_status(&spec, &bad, &test_err));
    bad.usable_rows = 0;
    CHECK_OK(init_status(&spec, &bad, &test_err));

    spec.window = 5;
    good = storage_for(&spec, memory, 5);
    CHECK_OK(init_status(&spec, &good, &test_err));
    CHECK_BAD_STORAGE(lane_stride -= 64);
    CHECK_BAD_STORAGE(usable_rows = 4);
    CHECK_BAD_STORAGE(usable_rows = 0);
    for (int i = 0; i < 2; i++) { /* twice as many rows overflow */
        bad = good;
        bad.n_rows = bad.usable_rows = ((uint64_t)1 << 63) + (i == 0 ? 0 : 5);
        CHECK_INVALID(init_status(&spec, &bad, &test_err));
    }
    bad = storage_for(&spec, memory, 4);
    CHECK_INVALID(init_status(&spec, &bad, &test_err));
    bad = storage_for(&spec, memory, 9);
    CHECK_OK(init_status(&spec, &bad, &test_err));
#undef CHECK_BAD_STORAGE
    CHECK(is_filled(memory, sizeof memory, FILL));
}

TEST(no_memory) {
    static _Alignas(64) unsigned char memory[1 << 12];
    um_kv_spec spec = spec_of(1, UM_F16);
    um_kv_storage storage = storage_for(&spec, memory, 7);
    fault_os_fail_nth_alloc(1);
    CHECK_STATUS(UM_E_NOMEM, init_status(&spec, &storage, &test_err));
    CHECK_EQ(test_err.os_errno, ENOMEM);
    CHECK_EQ(test_err.asked, (uint64_t)spec.n_layers * 2 * sizeof(uint64_t)); /* two tables */
    fault_os_fail_nth_alloc(1);
    CHECK(init_status(&spec, &storage, NULL) == UM_E_NOMEM);
    fault_os_fail_nth_alloc(0);
    CHECK_OK(init_status(&spec, &storage, &test_err));
    CHECK_EQ(fault_os_allocs(), 1);
    um_kv none;
    memset(&none, 0, sizeof none);
    um_kv_free(&none);
    um_kv_free(&none);
    CHECK(none.base == NULL);
}

TEST(sizes) {
    size_t items[N_TYPES] = {10 * 4, 10 * 2, 10 * 2, 2 * 34, 2 * 20, 2 * 18};
    for (int i = 0; i < N_TYPES; i++) {
        um_kv_spec spec = spec_of(3, TYPES[i]);
        size_t row = 0, nbytes = 0;
        CHECK_OK(um_kv_row_bytes(&spec, 0, &row, &test_err));
        CHECK_EQ(row, items[i]);
        CHECK_OK(um_kv_storage_bytes(&spec, &nbytes, &test_err));
        CHECK_EQ(nbytes, 3 * 2 * 3 * ((7 * items[i] + 63) / 64 * 64));

        AUTO_MODEL m = fixed_model(spec);
        CHECK(m.kv.base == m.map);
        CHECK(memcmp(&m.kv.spec, &spec, sizeof spec) == 0);
        CHECK_EQ(m.kv.row_bytes, row);
        CHECK_EQ(m.kv.lane_stride, m.storage.lane_stride);
        CHECK_EQ(m.kv.n_rows, 7);
        CHECK_EQ(m.kv.usable_rows, 7);
        CHECK(um_kv_lane(&m.kv, 2, 1, 2) == m.map + 17 * m.storage.lane_stride);
        CHECK(um_kv_lane(&m.kv, 3, 0, 0) == NULL);
        CHECK(um_kv_lane(&m.kv, UINT32_MAX, 1, 0) == NULL);
        CHECK(um_kv_lane(&m.kv, 0, 0, 3) == NULL);
        CHECK(um_kv_lane(&m.kv, 0, 1, UINT32_MAX) == NULL);
        uint64_t first = 777;
        CHECK_EQ(um_kv_layer_len(&m.kv, 3, &first), 0);
        CHECK_EQ(um_kv_layer_len(&m.kv, UINT32_MAX, NULL), 0);
        CHECK_EQ(um_kv_row(&m.kv, 0), 0);
        CHECK_EQ(um_kv_row(&m.kv, 6), 6);
        check_model(&m);
    }
}

/* All orders, types and batches; 1, 0, 2 and 4 tokens fill the cache to the last row. */
TEST(append) {
    uint64_t steps[] = {1, 0, 2, 4};
    for (int i = 0; i < 4 * N_TYPES * N_TYPES; i++) {
        um_dtype type = TYPES[i % N_TYPES], in_type = TYPES[i / N_TYPES % N_TYPES];
        int rest = i / N_TYPES / N_TYPES;
        um_kv_order order = rest % 2 != 0 ? UM_KV_HEAD_MAJOR : UM_KV_TOKEN_MAJOR;
        uint32_t batch = rest / 2 != 0 ? 3 : 1;
        if (in_type >= UM_Q8_0 && type != in_type) {
            continue;
        }
        AUTO_MODEL m = fixed_model(spec_of(batch, type));
        uint64_t len = 0;
        for (int step = 0; step < 4; step++) {
            for (uint32_t layer = 0; layer < 3; layer++) {
                CHECK_EQ(do_append(&m, layer, steps[step], in_type, order), UM_OK);
                CHECK_EQ(um_kv_seq_len(&m.kv), layer < 2 ? len : len + steps[step]);
            }
            len += steps[step];
        }
        CHECK_EQ(um_kv_seq_len(&m.kv), 7);
        CHECK_EQ(um_kv_next_position(&m.kv), 7);
        for (uint32_t layer = 0; layer < 3; layer++) {
            CHECK_EQ(do_read(&m, layer, 0, 0, 7, UM_F32), UM_OK);
            CHECK_EQ(do_read(&m, layer, 1, 2, 3, type), UM_OK);
        }
    }
}

/* K of one type and V of another: lanes of two sizes, without a gap, and rows of two sizes in them.
 * All that moves rows moves both. */
TEST(types_apart) {
    enum { ROWS = 4, VALUES = 2 * 64, K_ROW = VALUES / 32 * 34, V_ROW = VALUES / 32 * 18 };
    um_kv_spec spec = {2, 2, 64, 2, .max_seq_len = ROWS, .type = UM_Q8_0, .v_type = UM_Q4_0};
    enum { K_LANE = (ROWS * K_ROW + 63) / 64 * 64, V_LANE = (ROWS * V_ROW + 63) / 64 * 64 };
    static _Alignas(64) unsigned char memory[4 * (K_LANE + V_LANE)];
    um_kv_storage storage = {memory, K_LANE, V_LANE, ROWS, ROWS};
    size_t nbytes = 0;
    um_kv kv;
    CHECK_OK(um_kv_storage_bytes(&spec, &nbytes, &test_err));
    CHECK_EQ(nbytes, sizeof memory);
    CHECK_OK(um_kv_init(&kv, &spec, &storage, &test_err));
    CHECK_EQ(kv.row_bytes, K_ROW);
    CHECK_EQ(kv.v_row_bytes, V_ROW);
    for (uint32_t i = 0; i < 4; i++) { /* layers and streams */
        unsigned char *layer = memory + i / 2 * 2 * (K_LANE + V_LANE);
        CHECK(um_kv_lane(&kv, i / 2, 0, i % 2) == layer + i % 2 * K_LANE);
        CHECK(um_kv_lane(&kv, i / 2, 1, i % 2) == layer + 2 * K_LANE + i % 2 * V_LANE);
    }
    float k[ROWS][2 * VALUES], v[ROWS][2 * VALUES];
    uint64_t seed = 1;
    for (size_t t = 0; t < ROWS; t++) {
        for (size_t i = 0; i < 2 * VALUES; i++) {
            k[t][i] = (float)(int32_t)test_random(&seed) * 0x1p-28f;
            v[t][i] = (float)(int32_t)test_random(&seed) * 0x1p-28f;
        }
    }
    /* Tokens 0 to 3 of layer 0 at once and of layer 1 one by one; then 0 and 3 are kept. */
    CHECK_OK(um_kv_append(&kv, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, ROWS, &test_err));
    for (int t = 0; t < ROWS; t++) {
        CHECK_OK(um_kv_append(&kv, 1, k[t], v[t], UM_F32, UM_KV_TOKEN_MAJOR, 1, &test_err));
    }
    CHECK_OK(um_kv_trim(&kv, 1, 1, &test_err));
    CHECK_OK(um_kv_move(&kv, 0, &test_err));
    for (uint32_t i = 0; i < 4; i++) {
        unsigned char want_k[K_ROW], want_v[V_ROW];
        for (size_t row = 0; row < 2; row++) {
            size_t t = row == 0 ? 0 : 3, at = i % 2 * VALUES;
            CHECK_OK(um_convert(want_k, UM_Q8_0, k[t] + at, UM_F32, VALUES, &test_err));
            CHECK_OK(um_convert(want_v, UM_Q4_0, v[t] + at, UM_F32, VALUES, &test_err));
            unsigned char *k_lane = um_kv_lane(&kv, i / 2, 0, i % 2);
            unsigned char *v_lane = um_kv_lane(&kv, i / 2, 1, i % 2);
            CHECK(memcmp(k_lane + row * K_ROW, want_k, K_ROW) == 0);
            CHECK(memcmp(v_lane + row * V_ROW, want_v, V_ROW) == 0);
        }
    }
    /* Blocks are read as what they are, and are no tokens of both. */
    unsigned char out[2 * 2 * (K_ROW + V_ROW)];
    CHECK_OK(um_kv_read(&kv, 1, 0, kv.first, 2, out, UM_Q8_0, &test_err));
    CHECK_OK(um_kv_read(&kv, 1, 1, kv.first, 2, out, UM_Q4_0, &test_err));
    CHECK_INVALID(um_kv_read(&kv, 1, 1, kv.first, 2, out, UM_Q8_0, &test_err));
    CHECK_INVALID(um_kv_append(&kv, 0, k, v, UM_Q8_0, UM_KV_TOKEN_MAJOR, 1, &test_err));
    CHECK_INVALID(um_kv_append_all(&kv, k, v, UM_Q4_0, &test_err));
    um_kv_free(&kv);
}

/* Rows of V with fewer values than those of K, or with none, in lanes of their own size. */
TEST(heads_of_v_of_another_size) {
    enum { ROWS = 4, HEADS = 2, K_DIM = 32 };
    static const uint32_t given[] = {8, UM_KV_NO_V, 0};
    static const size_t dims[] = {8, 0, K_DIM};
    static float k[3 * HEADS * K_DIM], v[3 * HEADS * K_DIM], out[3 * HEADS * K_DIM];
    for (size_t i = 0; i < COUNT(k); i++) {
        k[i] = (float)i;
        v[i] = -(float)i;
    }
    for (size_t i = 0; i < COUNT(given); i++) {
        um_kv_spec spec = {2,
                           HEADS,
                           K_DIM,
                           1,
                           .max_seq_len = ROWS,
                           .type = UM_F32,
                           .v_type = UM_F32,
                           .v_head_dim = given[i]};
        size_t k_row = HEADS * K_DIM * sizeof(float), v_row = HEADS * dims[i] * sizeof(float);
        static _Alignas(64) unsigned char memory[2 * 2 * ROWS * HEADS * K_DIM * sizeof(float)];
        um_kv_storage storage = {memory, ROWS * k_row, ROWS * v_row, ROWS, ROWS};
        size_t nbytes = 0;
        um_kv kv;
        CHECK_OK(um_kv_storage_bytes(&spec, &nbytes, &test_err));
        CHECK_EQ(nbytes, 2 * ROWS * (k_row + v_row));
        CHECK_OK(um_kv_init(&kv, &spec, &storage, &test_err));
        CHECK_EQ(kv.v_row_bytes, v_row);
        CHECK_OK(um_kv_append_all(&kv, k, v, UM_F32, &test_err)); /* of two layers */
        CHECK_OK(um_kv_append(&kv, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 3, &test_err));
        CHECK(memcmp(um_kv_lane(&kv, 1, 0, 0), k + HEADS * K_DIM, k_row) == 0);
        CHECK(memcmp(um_kv_lane(&kv, 1, 1, 0), v + HEADS * dims[i], v_row) == 0);
        CHECK(memcmp((char *)um_kv_lane(&kv, 0, 1, 0) + v_row, v, 3 * v_row) == 0);
        CHECK_OK(um_kv_read(&kv, 0, 1, 1, 1, out, UM_F32, &test_err));
        CHECK(memcmp(out, v, v_row) == 0);
        um_kv_rollback(&kv);
        CHECK_OK(um_kv_move(&kv, 2, &test_err));
        CHECK(memcmp((char *)um_kv_lane(&kv, 1, 0, 0) + 2 * k_row, k + HEADS * K_DIM, k_row) == 0);
        um_kv_free(&kv);
    }
    um_kv_spec spec = {1, 1, 32, 1, .max_seq_len = 1, .type = UM_Q8_0, .v_type = UM_Q8_0};
    size_t row = 0;
    spec.v_head_dim = 40;
    CHECK_OK(um_kv_row_bytes(&spec, 0, &row, &test_err));
    CHECK_INVALID(um_kv_row_bytes(&spec, 1, &row, &test_err));
}

/* Floats are rotated on the way in; blocks, and what is read, are as they are stored. */
TEST(rotated_heads) {
    enum { ROWS = 40, HEADS = 3, DIM = 128, ROW = HEADS * DIM };
    um_kv_spec spec = {
        1, HEADS, DIM, 1, .max_seq_len = ROWS, .type = UM_Q8_0, .v_type = UM_Q8_0, .rotate = 1};
    static _Alignas(64) unsigned char memory[2 * ROWS * ROW / 32 * 34];
    enum { LANE = ROWS * ROW / 32 * 34 };
    static float tokens[ROWS * ROW], rotated[ROWS * ROW];
    static unsigned char want[2][LANE];
    uint64_t seed = 5;
    um_kv_storage storage = {memory, LANE, LANE, ROWS, ROWS};
    um_kv kv;
    for (size_t i = 0; i < COUNT(tokens); i++) {
        tokens[i] = (float)(int32_t)test_random(&seed) * 0x1p-28f;
    }
    for (int v = 0; v < 2; v++) {
        memcpy(rotated, tokens, sizeof tokens);
        CHECK_OK(um_rotate(rotated, COUNT(rotated), v == 0 ? 128 : 64, &test_err));
        CHECK_OK(um_convert(want[v], UM_Q8_0, rotated, UM_F32, COUNT(rotated), &test_err));
    }
    CHECK_OK(um_kv_init(&kv, &spec, &storage, &test_err));
    /* More than one piece at once, then a token, then blocks. */
    CHECK_OK(um_kv_append(&kv, 0, tokens, tokens, UM_F32, UM_KV_TOKEN_MAJOR, 38, &test_err));
    CHECK_OK(um_kv_append_all(&kv, tokens + 38 * ROW, tokens + 38 * ROW, UM_F32, &test_err));
    CHECK_OK(um_kv_append(&kv, 0, want[0] + LANE / ROWS * 39, want[1] + LANE / ROWS * 39, UM_Q8_0,
                          UM_KV_TOKEN_MAJOR, 1, &test_err));
    for (int v = 0; v < 2; v++) {
        CHECK(memcmp(um_kv_lane(&kv, 0, v, 0), want[v], LANE) == 0);
    }
    um_kv_free(&kv);
    size_t row = 0;
    spec.head_dim = 96;
    CHECK_INVALID(um_kv_row_bytes(&spec, 0, &row, &test_err));
    spec.head_dim = 128;
    spec.v_head_dim = UM_KV_NO_V;
    CHECK_OK(um_kv_row_bytes(&spec, 1, &row, &test_err));
    CHECK_EQ(row, 0);
}

/* Blocks of another type are no blocks of the cache, however large they are. */
TEST(blocks_of_another_type) {
    static const unsigned char k[100];
    static unsigned char out[1000];
    AUTO_MODEL m = fixed_model(spec_of(1, UM_Q4_0));
    append_everywhere(&m, 1);
    for (um_dtype type = UM_Q8_0; type < UM_DTYPE_COUNT; type++) {
        if (type != UM_Q4_0) {
            CHECK_REFUSED(UM_E_INVALID, &m,
                          um_kv_append(&m.kv, 0, k, k, type, UM_KV_TOKEN_MAJOR, 1, &test_err));
            CHECK_REFUSED(UM_E_INVALID, &m, um_kv_read(&m.kv, 0, 0, 0, 1, out, type, &test_err));
        }
    }
}

TEST(refused_appends) {
    static const float k[1000], v[1000];
    AUTO_MODEL m = fixed_model(spec_of(1, UM_F16));
    um_kv *kv = &m.kv;
    append_everywhere(&m, 5);
    for (int order = UM_KV_TOKEN_MAJOR; order <= UM_KV_HEAD_MAJOR; order++) {
        um_kv_order o = (um_kv_order)order;
        uint64_t too_many[] = {3, 7, 1000, UINT64_MAX, UINT64_MAX - 5, (uint64_t)1 << 63};
        for (size_t i = 0; i < COUNT(too_many); i++) {
            CHECK_REFUSED(UM_E_FULL, &m,
                          um_kv_append(kv, 1, k, v, UM_F32, o, too_many[i], &test_err));
            CHECK_ROOM(7, 5, too_many[i]);
            CHECK_EQ(test_err.detail, UM_KV_FULL);
        }
        CHECK_REFUSED(UM_E_INVALID, &m, um_kv_append(kv, 3, k, v, UM_F32, o, 1, &test_err));
        CHECK_REFUSED(UM_E_INVALID, &m,
                      um_kv_append(kv, UINT32_MAX, k, v, UM_F32, o, 1, &test_err));
        CHECK_REFUSED(UM_E_INVALID, &m, um_kv_append(kv, 0, k, v, UM_Q8_0, o, 1, &test_err));
        CHECK_REFUSED(UM_E_INVALID, &m, um_kv_append(kv, 0, k, v, (um_dtype)9, o, 1, &test_err));
        CHECK_REFUSED(UM_E_INVALID, &m, um_kv_append(kv, 0, k, v, (um_dtype)-1, o, 1, &test_err));
        CHECK_OK(um_kv_append(kv, 0, NULL, NULL, UM_F32, o, 0, &test_err));
        check_model(&m);
    }
    CHECK_REFUSED(UM_E_INVALID, &m,
                  um_kv_append(kv, 0, k, v, UM_F32, (um_kv_order)2, 1, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &m, um_kv_append_all(kv, k, v, (um_dtype)9, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &m, um_kv_append_all(kv, k, v, UM_Q8_0, &test_err));
    CHECK(um_kv_append(kv, 3, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 1, NULL) == UM_E_INVALID);
    CHECK(um_kv_append(kv, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 3, NULL) == UM_E_FULL);
    /* A token that only one layer has: each other layer may follow, but not all in one call. */
    CHECK_EQ(do_append(&m, 1, 1, UM_F32, UM_KV_TOKEN_MAJOR), UM_OK);
    CHECK_EQ(um_kv_seq_len(kv), 5);
    CHECK_EQ(do_append_all(&m, UM_F32), UM_E_STATE);
    CHECK_EQ(do_append(&m, 0, 1, UM_F32, UM_KV_TOKEN_MAJOR), UM_OK);
    CHECK_EQ(do_append(&m, 2, 1, UM_F32, UM_KV_TOKEN_MAJOR), UM_OK);
    CHECK_EQ(um_kv_seq_len(kv), 6);
}

/* Rows that the caller writes, layer by layer. */
TEST(append_halves) {
    uint64_t row = 12345;
    AUTO_MODEL m = fixed_model(spec_of(2, UM_F16));
    um_kv *kv = &m.kv;
    append_everywhere(&m, 5);
    CHECK_REFUSED(UM_E_INVALID, &m, um_kv_append_begin(kv, 3, 1, &row, &test_err));
    CHECK_REFUSED(UM_E_FULL, &m, um_kv_append_begin(kv, 1, 3, &row, &test_err));
    CHECK_ROOM(7, 5, 3);
    CHECK(um_kv_append_begin(kv, 1, UINT64_MAX, &row, NULL) == UM_E_FULL);
    CHECK_EQ(row, 12345);
    CHECK_OK(um_kv_append_begin(kv, 1, 2, &row, &test_err));
    CHECK_EQ(row, 5);
    check_model(&m); /* nothing has changed yet */
    um_kv_append_end(kv, 1, 2);
    CHECK_EQ(um_kv_layer_len(kv, 1, NULL), 7);
    CHECK_EQ(um_kv_layer_len(kv, 0, NULL), 5);
    CHECK_EQ(um_kv_layer_len(kv, kv->spec.n_layers, NULL), 0);
    CHECK_EQ(um_kv_seq_len(kv), 5);
    um_kv_rollback(kv);
    CHECK_EQ(do_trim(&m, 2, 0), UM_OK);
    CHECK_OK(um_kv_append_begin(kv, 0, 2, &row, &test_err));
    CHECK_EQ(row, 5);
    CHECK_EQ(do_reserve(&m, 1), UM_OK);
    CHECK_REFUSED(UM_E_STATE, &m, um_kv_append_begin(kv, 0, 1, &row, &test_err));
}

TEST(refused_reads) {
    float out[100];
    AUTO_MODEL m = fixed_model(spec_of(1, UM_F16));
    um_kv *kv = &m.kv;
    append_everywhere(&m, 6);
    CHECK_EQ(do_append(&m, 1, 1, UM_F32, UM_KV_TOKEN_MAJOR), UM_OK);
    CHECK_EQ(do_read(&m, 1, 0, 6, 1, UM_F32), UM_OK);
    CHECK_EQ(do_read(&m, 0, 0, 6, 1, UM_F32), UM_E_INVALID);
    CHECK_EQ(do_read(&m, 0, 0, 5, 2, UM_F32), UM_E_INVALID);
    CHECK_EQ(do_read(&m, 0, 0, 7, 0, UM_F32), UM_E_INVALID);
    CHECK_EQ(do_read(&m, 0, 1, 0, UINT64_MAX, UM_F32), UM_E_INVALID);
    CHECK_EQ(do_read(&m, 0, 1, 3, UINT64_MAX - 1, UM_F32), UM_E_INVALID);
    CHECK_EQ(do_read(&m, 0, 1, UINT64_MAX, 2, UM_F32), UM_E_INVALID);
    do_rollback(&m);
    CHECK_EQ(do_read(&m, 1, 0, 6, 1, UM_F32), UM_E_INVALID);
    CHECK_EQ(do_trim(&m, 4, 0), UM_OK);
    CHECK_EQ(do_read(&m, 2, 0, 1, 1, UM_F32), UM_E_INVALID);
    CHECK_EQ(do_read(&m, 2, 0, 2, 4, UM_BF16), UM_OK);
    CHECK_OK(um_kv_read(kv, 0, 0, 6, 0, NULL, UM_F32, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &m, um_kv_read(kv, 3, 0, 2, 1, out, UM_F32, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &m, um_kv_read(kv, 3, 0, 0, 0, out, UM_F32, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &m, um_kv_read(kv, 0, 0, 2, 1, out, UM_Q8_0, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &m, um_kv_read(kv, 0, 0, 2, 1, out, (um_dtype)9, &test_err));
    CHECK(um_kv_read(kv, 0, 0, 2, 5, out, UM_F32, NULL) == UM_E_INVALID);
}

TEST(refused_reserves) {
    uint64_t row = 777;
    AUTO_MODEL m = fixed_model(spec_of(1, UM_F16));
    um_kv *kv = &m.kv;
    CHECK_EQ(do_commit(&m, 1), UM_E_STATE);
    CHECK_EQ(do_commit(&m, 0), UM_E_STATE);
    CHECK(um_kv_commit(kv, 1, NULL) == UM_E_STATE);
    append_everywhere(&m, 2);

    uint64_t too_many[] = {6, UINT64_MAX, UINT64_MAX - 1, (uint64_t)1 << 63};
    for (size_t i = 0; i < COUNT(too_many); i++) {
        CHECK_REFUSED(UM_E_FULL, &m, um_kv_reserve(kv, too_many[i], &row, &test_err));
        CHECK_ROOM(7, 2, too_many[i]);
        CHECK_EQ(test_err.detail, UM_KV_FULL);
    }
    CHECK_REFUSED(UM_E_INVALID, &m, um_kv_reserve(kv, 0, &row, &test_err));
    CHECK(um_kv_reserve(kv, 6, &row, NULL) == UM_E_FULL);
    CHECK_EQ(row, 777);
}

/* While rows are reserved, no other call moves the ends of the cache. */
TEST(reserve) {
    static const float k[100], v[100];
    AUTO_MODEL m = fixed_model(spec_of(1, UM_F16));
    um_kv *kv = &m.kv;
    append_everywhere(&m, 2);
    CHECK_EQ(do_reserve(&m, 3), UM_OK);
    CHECK_EQ(um_kv_seq_len(kv), 2);
    CHECK_EQ(do_reserve(&m, 1), UM_E_STATE);
    for (uint64_t n = 0; n < 2; n++) {
        CHECK_REFUSED(UM_E_STATE, &m,
                      um_kv_append(kv, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, n, &test_err));
    }
    CHECK_EQ(do_append_all(&m, UM_F32), UM_E_STATE);
    CHECK_EQ(do_crop(&m, 2), UM_E_STATE);
    CHECK_EQ(do_trim(&m, 9, 0), UM_E_STATE);
    CHECK_EQ(do_move(&m, 0), UM_E_STATE);
    CHECK_EQ(do_set_usable(&m, 4), UM_E_INVALID);
    CHECK_EQ(do_set_usable(&m, 5), UM_OK);
    CHECK_EQ(do_set_usable(&m, 7), UM_OK);
    CHECK_EQ(do_commit(&m, 4), UM_E_INVALID);
    CHECK_EQ(do_commit(&m, UINT64_MAX), UM_E_INVALID);
    /* Two of the three become visible, and the reservation ends. */
    write_reserved(&m);
    CHECK_EQ(do_commit(&m, 2), UM_OK);
    CHECK_EQ(um_kv_seq_len(kv), 4);
    CHECK_EQ(do_commit(&m, 1), UM_E_STATE);
    /* A rollback ends a reservation too, and so does a commit of nothing. */
    CHECK_EQ(do_reserve(&m, 3), UM_OK);
    do_rollback(&m);
    CHECK_EQ(do_commit(&m, 0), UM_E_STATE);
    CHECK_EQ(do_reserve(&m, 3), UM_OK);
    CHECK_EQ(do_commit(&m, 0), UM_OK);
    CHECK_EQ(um_kv_seq_len(kv), 4);
}

TEST(crop_and_clear) {
    AUTO_MODEL m = fixed_model(spec_of(2, UM_F32));
    append_everywhere(&m, 6);
    CHECK_EQ(do_crop(&m, 7), UM_E_INVALID);
    CHECK_EQ(do_crop(&m, UINT64_MAX), UM_E_INVALID);
    CHECK(um_kv_crop(&m.kv, 7, NULL) == UM_E_INVALID);
    CHECK_EQ(do_crop(&m, 6), UM_OK);
    CHECK_EQ(um_kv_seq_len(&m.kv), 6);
    CHECK_EQ(do_crop(&m, 2), UM_OK);
    CHECK_EQ(um_kv_next_position(&m.kv), 2);
    append_everywhere(&m, 4);
    CHECK_EQ(do_append(&m, 2, 1, UM_F32, UM_KV_HEAD_MAJOR), UM_OK);
    CHECK_EQ(do_crop(&m, 0), UM_E_STATE);
    do_clear(&m);
    CHECK_EQ(um_kv_layer_len(&m.kv, 2, NULL), 0);
    CHECK_EQ(do_reserve(&m, 7), UM_OK);
    do_clear(&m);
    CHECK_EQ(do_commit(&m, 1), UM_E_STATE);
    CHECK_EQ(do_reserve(&m, 7), UM_OK);
}

TEST(trim) {
    AUTO_MODEL m = fixed_model(spec_of(2, UM_F16));
    um_kv *kv = &m.kv;
    CHECK_EQ(do_trim(&m, 0, 0), UM_OK);
    append_everywhere(&m, 7);
    /* Trimming to at least as many tokens as there are keeps all of them. */
    uint64_t many = UINT64_MAX;
    uint64_t all[][2] = {{7, 0},    {8, 0},       {0, 7},    {4, 3},   {many, 0},
                         {0, many}, {many, many}, {1, many}, {many, 1}};
    for (size_t i = 0; i < COUNT(all); i++) {
        CHECK_EQ(do_trim(&m, all[i][0], all[i][1]), UM_OK);
        CHECK_EQ(um_kv_seq_len(kv), 7);
    }
    /* The kept tokens keep their positions and rows: not a byte is written. */
    CHECK_EQ(do_trim(&m, 5, 0), UM_OK);
    CHECK_EQ(um_kv_next_position(kv), 7);
    CHECK_EQ(um_kv_first_position(kv), 2);
    CHECK_EQ(um_kv_row(kv, 2), 2);
    /* max_seq_len has room, but the rows have none; a move makes room. */
    CHECK_EQ(do_append(&m, 0, 2, UM_F32, UM_KV_HEAD_MAJOR), UM_E_FULL);
    CHECK_ROOM(7, 7, 2);
    CHECK_EQ(test_err.detail, UM_KV_ROWS);
    CHECK_EQ(do_append(&m, 0, 3, UM_F32, UM_KV_HEAD_MAJOR), UM_E_FULL);
    CHECK_ROOM(7, 5, 3);
    CHECK_EQ(test_err.detail, UM_KV_FULL);
    CHECK_EQ(do_reserve(&m, 1), UM_E_FULL);
    CHECK_EQ(test_err.detail, UM_KV_ROWS);
    CHECK_EQ(do_move(&m, 0), UM_OK);
    CHECK_EQ(um_kv_row(kv, 2), 0);
    CHECK_EQ(um_kv_first_position(kv), 2);
    append_everywhere(&m, 2);
    CHECK_EQ(um_kv_next_position(kv), 9);
}

/* Moves bytes as memmove does. The last of a given number of calls fails. */
static um_status move_some(void *context, void *to, const void *from, size_t nbytes) {
    int *left = context;
    if (--*left == 0) {
        return UM_E_IO;
    }
    memmove(to, from, nbytes);
    return UM_OK;
}

TEST(mover) {
    kv_model m;
    um_kv *kv = &m.kv;
    int left = 1000;
    m = fixed_model(spec_of(2, UM_F16));
    um_kv_set_mover(kv, move_some, &left);
    append_everywhere(&m, 7);
    CHECK_EQ(do_trim(&m, 3, 2), UM_OK);
    CHECK_EQ(1000 - left, m.n_lanes);
    CHECK_EQ(do_move(&m, 0), UM_OK);
    CHECK_EQ(1000 - left, 2 * m.n_lanes);
    /* Tokens that are already there, and no tokens, are not moved. */
    CHECK_EQ(do_move(&m, 0), UM_OK);
    CHECK_EQ(do_trim(&m, 3, 0), UM_OK);
    CHECK_EQ(1000 - left, 2 * m.n_lanes);
    free_model(&m);
    for (int n = 1; n <= 12; n++) {
        m = fixed_model(spec_of(2, UM_F16));
        um_kv_set_mover(kv, move_some, &left);
        append_everywhere(&m, 7);
        left = n;
        CHECK_STATUS(UM_E_IO, um_kv_trim(kv, 3, 2, &test_err));
        CHECK(um_kv_seq_len(kv) == 7);
        CHECK(um_kv_first_position(kv) == 0);
        CHECK_OK(um_kv_trim(kv, 4, 0, &test_err));
        left = n;
        CHECK_STATUS(UM_E_IO, um_kv_move(kv, 1, &test_err));
        CHECK(um_kv_seq_len(kv) == 4);
        CHECK(um_kv_row(kv, 3) == 3);
        free_model(&m);
    }
}

/* Rows become usable page by page. The others are inaccessible. */
TEST(growing) {
    um_kv_spec spec = spec_of(2, UM_F32);
    spec.head_dim = (uint32_t)page_up(1) / 16; /* two rows in each page */
    spec.max_seq_len = 100;
    AUTO_MODEL m;
    make_model(&m, spec, 12, 0, 0, true);
    CHECK_EQ(do_append(&m, 0, 1, UM_F32, UM_KV_HEAD_MAJOR), UM_E_FULL);
    CHECK_ROOM(0, 0, 1);
    CHECK_EQ(test_err.detail, UM_KV_ROWS);
    CHECK_EQ(do_set_usable(&m, 4), UM_OK);
    append_everywhere(&m, 3);
    CHECK_EQ(do_append(&m, 1, 2, UM_F32, UM_KV_HEAD_MAJOR), UM_E_FULL);
    CHECK_ROOM(4, 3, 2);
    CHECK_EQ(do_append(&m, 1, 98, UM_F32, UM_KV_HEAD_MAJOR), UM_E_FULL);
    CHECK_ROOM(100, 3, 98);
    CHECK_EQ(do_set_usable(&m, 12), UM_OK);
    append_everywhere(&m, 7);
    CHECK_EQ(do_set_usable(&m, 13), UM_E_INVALID);
    CHECK_EQ(do_set_usable(&m, UINT64_MAX), UM_E_INVALID);
    CHECK_EQ(do_set_usable(&m, 9), UM_E_INVALID);
    CHECK(um_kv_set_usable(&m.kv, 9, NULL) == UM_E_INVALID);
    CHECK_EQ(do_trim(&m, 1, 0), UM_OK);
    CHECK_EQ(do_move(&m, 12), UM_E_INVALID);
    CHECK_EQ(do_move(&m, UINT64_MAX), UM_E_INVALID);
    CHECK(um_kv_move(&m.kv, 12, NULL) == UM_E_INVALID);
    /* No token is left: the next goes to the row that the cache was moved to. */
    CHECK_EQ(do_trim(&m, 0, 0), UM_OK);
    CHECK_EQ(do_move(&m, 3), UM_OK);
    append_everywhere(&m, 2);
    CHECK_EQ(um_kv_row(&m.kv, 10), 3);
    do_clear(&m);
    CHECK_EQ(do_set_usable(&m, 0), UM_OK);
}

TEST(adopt) {
    AUTO_MODEL m = fixed_model(spec_of(1, UM_F16));
    append_everywhere(&m, 7);
    CHECK_EQ(do_adopt(&m, 7, 8), UM_E_INVALID);
    CHECK_EQ(do_adopt(&m, 2, 3), UM_E_INVALID);
    CHECK_EQ(do_adopt(&m, UINT64_MAX, UINT64_MAX), UM_E_INVALID);
    CHECK(um_kv_adopt(&m.kv, 0, 1, NULL) == UM_E_INVALID);
    CHECK_EQ(do_adopt(&m, 100, 4), UM_OK);
    CHECK_EQ(um_kv_next_position(&m.kv), 100);
    CHECK_EQ(um_kv_first_position(&m.kv), 96);
    CHECK_EQ(um_kv_row(&m.kv, 96), 0);
    CHECK_EQ(do_reserve(&m, 2), UM_OK);
    CHECK_EQ(do_adopt(&m, 1, 0), UM_OK);
    CHECK_EQ(do_commit(&m, 1), UM_E_STATE);
    CHECK_EQ(do_set_usable(&m, 3), UM_OK);
    CHECK_EQ(do_adopt(&m, 4, 4), UM_E_INVALID);
    CHECK_EQ(do_adopt(&m, UINT64_MAX, 3), UM_OK); /* the last possible position */
    CHECK_EQ(do_append_all(&m, UM_F32), UM_E_FULL);
    free_model(&m);
    make_model(&m, spec_of(1, UM_F16), 20, 20, 0, false);
    CHECK_EQ(do_adopt(&m, 100, 8), UM_E_INVALID); /* above max_seq_len */
    CHECK_EQ(do_adopt(&m, 100, 7), UM_OK);
}
