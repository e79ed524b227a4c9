/* The KV cache: where rows go, in which type, and that a call that fails leaves no trace. */
#include "test.h"

#include <pthread.h>

/* A cache whose storage ends where its heap block ends, so that AddressSanitizer sees a write
 * behind it. */
typedef struct cache {
    um_kv kv;
    void *storage;
    size_t nbytes;
} cache;

static size_t storage_bytes(const um_kv_spec *spec) {
    size_t nbytes = 0;
    CHECK_OK(um_kv_storage_bytes(spec, &nbytes, &test_err));
    return nbytes;
}

static cache make_cache(um_kv_spec spec) {
    cache c = {.nbytes = storage_bytes(&spec)};
    REQUIRE(posix_memalign(&c.storage, 64, c.nbytes) == 0);
    memset(c.storage, 0xCC, c.nbytes);
    CHECK_OK(um_kv_init(&c.kv, &spec, c.storage, c.nbytes, &test_err));
    return c;
}

static um_kv_spec spec_of(uint32_t batch, um_float type) {
    return (um_kv_spec){.n_layers = 3,
                        .n_kv_heads = 2,
                        .head_dim = 5,
                        .batch = batch,
                        .max_seq_len = 7,
                        .type = type};
}

/* The whole of a cache, storage and struct, to be compared later. */
typedef struct picture {
    um_kv kv;
    void *storage;
} picture;

static picture picture_of(const cache *c) {
    picture p = {.storage = malloc(c->nbytes)};
    REQUIRE(p.storage != NULL);
    memcpy(&p.kv, &c->kv, sizeof p.kv);
    memcpy(p.storage, c->storage, c->nbytes);
    return p;
}

static bool is_as(const cache *c, picture *p) {
    bool same =
        memcmp(&c->kv, &p->kv, sizeof p->kv) == 0 && memcmp(c->storage, p->storage, c->nbytes) == 0;
    free(p->storage);
    return same;
}

/* `call` fails with this status, and changes nothing. */
#define CHECK_REFUSED(status, c, call)                                                             \
    do {                                                                                           \
        picture before_ = picture_of(c);                                                           \
        CHECK_STATUS(status, call);                                                                \
        CHECK(is_as(c, &before_));                                                                 \
    } while (0)

/* ---- values: each place has its own integer below 2048, which both types hold exactly ---- */

static float value_of(uint32_t layer, int v, size_t batch, uint64_t token, size_t head, size_t i) {
    size_t part = layer * 2 + (size_t)v;
    return (float)((((part * 3 + batch) * 7 + token) * 2 + head) * 5 + i);
}

static void set_item(void *rows, um_float type, size_t at, float value) {
    unsigned char *to = (unsigned char *)rows + at * um_float_bytes(type);
    CHECK(um_convert(to, type, &value, UM_F32, 1, NULL) == UM_OK);
}

static float item_of(const void *rows, um_float type, size_t at) {
    float value = -1;
    const unsigned char *from = (const unsigned char *)rows + at * um_float_bytes(type);
    CHECK(um_convert(&value, UM_F32, from, type, 1, NULL) == UM_OK);
    return value;
}

/* Rows for n tokens from `first` on, in heap memory of their exact size. */
static void *make_rows(const um_kv *kv, uint32_t layer, int v, uint64_t first, uint64_t n,
                       um_float type, um_kv_order order) {
    size_t heads = kv->spec.n_kv_heads, dim = kv->spec.head_dim, batch = kv->spec.batch;
    void *rows = malloc(batch * n * heads * dim * um_float_bytes(type) + (n == 0));
    REQUIRE(rows != NULL);
    for (size_t b = 0; b < batch; b++) {
        for (uint64_t t = 0; t < n; t++) {
            for (size_t h = 0; h < heads; h++) {
                for (size_t i = 0; i < dim; i++) {
                    size_t at = order == UM_KV_TOKEN_MAJOR ? (t * heads + h) * dim + i
                                                           : ((b * heads + h) * n + t) * dim + i;
                    set_item(rows, type, at, value_of(layer, v, b, first + t, h, i));
                }
            }
        }
    }
    return rows;
}

static void append(um_kv *kv, uint32_t layer, uint64_t n, um_float type, um_kv_order order) {
    uint64_t len = um_kv_layer_len(kv, layer);
    void *k = make_rows(kv, layer, 0, len, n, type, order);
    void *v = make_rows(kv, layer, 1, len, n, type, order);
    CHECK_OK(um_kv_append(kv, layer, k, v, type, order, n, &test_err));
    CHECK_EQ_U64(um_kv_layer_len(kv, layer), len + n);
    free(k);
    free(v);
}

static void append_everywhere(um_kv *kv, uint64_t n) {
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        append(kv, layer, n, kv->spec.type, UM_KV_HEAD_MAJOR);
    }
}

/* Each part is [batch, max_seq_len, heads, head_dim]: the first `len` tokens hold their values, and
 * what lies behind is as `make_cache` left it. */
static void check_contents(const cache *c, uint32_t layer, uint64_t len) {
    const um_kv_spec *s = &c->kv.spec;
    size_t row = (size_t)s->n_kv_heads * s->head_dim;
    bool values = true, rest = true;
    for (int v = 0; v < 2; v++) {
        const unsigned char *part = um_kv_part(&c->kv, layer, v);
        for (size_t b = 0; b < s->batch; b++) {
            for (uint64_t t = 0; t < s->max_seq_len; t++) {
                for (size_t j = 0; j < row; j++) {
                    size_t at = (b * s->max_seq_len + t) * row + j, item = um_float_bytes(s->type);
                    if (t < len) {
                        values = values &&
                                 item_of(part, s->type, at) ==
                                     value_of(layer, v, b, t, j / s->head_dim, j % s->head_dim);
                    } else {
                        rest = rest && part[at * item] == 0xCC && part[at * item + 1] == 0xCC;
                    }
                }
            }
        }
    }
    CHECK(values);
    CHECK(rest);
}

/* ---- storage ---- */

static void check_bad_spec(um_kv_spec spec) {
    size_t nbytes = 12345;
    um_kv kv, before;
    memset(&kv, 0x5A, sizeof kv);
    memcpy(&before, &kv, sizeof kv);
    static _Alignas(64) unsigned char storage[64];
    CHECK_STATUS(UM_E_INVALID, um_kv_storage_bytes(&spec, &nbytes, &test_err));
    CHECK(um_kv_storage_bytes(&spec, &nbytes, NULL) == UM_E_INVALID);
    CHECK_EQ_U64(nbytes, 12345);
    CHECK_STATUS(UM_E_INVALID, um_kv_init(&kv, &spec, storage, SIZE_MAX, &test_err));
    CHECK(memcmp(&before, &kv, sizeof kv) == 0);
}

static void test_bad_specs(void) {
    um_kv_spec good = spec_of(1, UM_F16), spec;
    uint32_t *fields[] = {&spec.n_layers, &spec.n_kv_heads, &spec.head_dim, &spec.batch};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        spec = good;
        *fields[i] = 0;
        check_bad_spec(spec);
    }
    spec = good;
    spec.max_seq_len = 0;
    check_bad_spec(spec);
    spec = good;
    spec.type = (um_float)2;
    check_bad_spec(spec);
    spec.type = (um_float)-1;
    check_bad_spec(spec);

    /* Each product on the way overflows in one of these. */
    uint64_t lens[] = {UINT64_MAX, UINT64_MAX / 2, UINT64_MAX / 20 + 1, UINT64_MAX / 40 + 1,
                       UINT64_MAX / 120 + 1};
    for (size_t i = 0; i < sizeof lens / sizeof lens[0]; i++) {
        spec = good;
        spec.max_seq_len = lens[i];
        check_bad_spec(spec);
    }
    check_bad_spec((um_kv_spec){.n_layers = 1,
                                .n_kv_heads = UINT32_MAX,
                                .head_dim = UINT32_MAX,
                                .batch = 1,
                                .max_seq_len = 1,
                                .type = UM_F32});
    check_bad_spec((um_kv_spec){.n_layers = 1,
                                .n_kv_heads = 1,
                                .head_dim = 1,
                                .batch = UINT32_MAX,
                                .max_seq_len = (uint64_t)1 << 33,
                                .type = UM_F16});
    /* The last row fits, the rounding up to 64 does not. */
    check_bad_spec((um_kv_spec){.n_layers = 1,
                                .n_kv_heads = 1,
                                .head_dim = 1,
                                .batch = 1,
                                .max_seq_len = UINT64_MAX / 4,
                                .type = UM_F32});
    check_bad_spec((um_kv_spec){.n_layers = UINT32_MAX,
                                .n_kv_heads = UINT32_MAX,
                                .head_dim = 1,
                                .batch = 1,
                                .max_seq_len = 1,
                                .type = UM_F16});
}

static void test_storage(void) {
    um_float types[] = {UM_F32, UM_F16};
    for (int i = 0; i < 2; i++) {
        um_kv_spec spec = spec_of(2, types[i]);
        size_t nbytes = storage_bytes(&spec), item = um_float_bytes(types[i]);
        size_t part = (2 * 7 * 2 * 5 * item + 63) / 64 * 64;
        CHECK(nbytes >= 3 * 2 * part + 3 * sizeof(uint64_t));
        CHECK(nbytes <= 3 * 2 * part + 3 * 64); /* of the lengths, at most a line each */

        unsigned char *memory;
        REQUIRE(posix_memalign((void **)&memory, 64, nbytes + 64) == 0);
        um_kv kv, before;
        memset(&kv, 0x5A, sizeof kv);
        memcpy(&before, &kv, sizeof kv);
        memset(memory, 0xCC, nbytes + 64);
        CHECK_STATUS(UM_E_INVALID, um_kv_init(&kv, &spec, NULL, nbytes, &test_err));
        for (size_t shift = 1; shift < 64; shift++) {
            CHECK_STATUS(UM_E_INVALID, um_kv_init(&kv, &spec, memory + shift, nbytes, &test_err));
        }
        CHECK_FULL(um_kv_init(&kv, &spec, memory, nbytes - 1, &test_err), nbytes - 1, 0, nbytes);
        CHECK_FULL(um_kv_init(&kv, &spec, memory, 0, &test_err), 0, 0, nbytes);
        CHECK(um_kv_init(&kv, &spec, memory, 0, NULL) == UM_E_FULL);
        CHECK(memcmp(&before, &kv, sizeof kv) == 0);
        bool untouched = true;
        for (size_t at = 0; at < nbytes + 64; at++) {
            untouched = untouched && memory[at] == 0xCC;
        }
        CHECK(untouched);

        CHECK_OK(um_kv_init(&kv, &spec, memory, nbytes, &test_err));
        CHECK_EQ_U64(kv.row_bytes, 2 * 5 * item);
        CHECK_EQ_U64(kv.part_bytes, part);
        CHECK(kv.base == memory);
        CHECK(memcmp(&kv.spec, &spec, sizeof spec) == 0);
        unsigned char *end = memory;
        for (uint32_t layer = 0; layer < 3; layer++) {
            CHECK_EQ_U64(um_kv_layer_len(&kv, layer), 0);
            for (int v = 0; v < 2; v++) {
                unsigned char *at = um_kv_part(&kv, layer, v);
                CHECK((uintptr_t)at % 64 == 0);
                CHECK(at >= end);
                end = at + 2 * 7 * kv.row_bytes;
            }
        }
        CHECK(end <= memory + nbytes);
        unsigned char *lens = (unsigned char *)kv.layer_len;
        CHECK(lens >= end && lens + 3 * sizeof(uint64_t) <= memory + nbytes);
        CHECK(um_kv_part(&kv, 3, 0) == NULL && um_kv_part(&kv, UINT32_MAX, 1) == NULL);
        CHECK_EQ_U64(um_kv_layer_len(&kv, 3), 0);
        CHECK_EQ_U64(um_kv_seq_len(&kv), 0);
        free(memory);
    }
}

/* ---- append ---- */

/* All orders, types and batches; 1, 0, 2 and 4 tokens fill the cache to the last row. */
static void test_append(void) {
    um_float types[] = {UM_F32, UM_F16};
    uint64_t steps[] = {1, 0, 2, 4};
    for (int i = 0; i < 16; i++) {
        um_float type = types[i & 1], in_type = types[i >> 1 & 1];
        um_kv_order order = (i & 4) != 0 ? UM_KV_HEAD_MAJOR : UM_KV_TOKEN_MAJOR;
        uint32_t batch = (i & 8) != 0 ? 3 : 1;
        if (batch > 1 && order == UM_KV_TOKEN_MAJOR) {
            continue;
        }
        cache c = make_cache(spec_of(batch, type));
        uint64_t len = 0;
        for (int step = 0; step < 4; step++) {
            for (uint32_t layer = 0; layer < 3; layer++) {
                append(&c.kv, layer, steps[step], in_type, order);
                CHECK_EQ_U64(um_kv_seq_len(&c.kv), layer < 2 ? len : len + steps[step]);
            }
            len += steps[step];
            for (uint32_t layer = 0; layer < 3; layer++) {
                check_contents(&c, layer, len);
            }
        }
        CHECK_EQ_U64(um_kv_seq_len(&c.kv), 7);
        free(c.storage);
    }
}

static void test_append_all(void) {
    for (int i = 0; i < 4; i++) {
        um_float type = i & 1 ? UM_F32 : UM_F16, in_type = i & 2 ? UM_F32 : UM_F16;
        cache c = make_cache(spec_of(1, type));
        size_t row = (size_t)2 * 5 * um_float_bytes(in_type);
        unsigned char *k = malloc(3 * row), *v = malloc(3 * row);
        REQUIRE(k != NULL && v != NULL);
        for (uint64_t token = 0; token < 7; token++) {
            for (uint32_t layer = 0; layer < 3; layer++) {
                void *k_row = make_rows(&c.kv, layer, 0, token, 1, in_type, UM_KV_TOKEN_MAJOR);
                void *v_row = make_rows(&c.kv, layer, 1, token, 1, in_type, UM_KV_TOKEN_MAJOR);
                memcpy(k + layer * row, k_row, row);
                memcpy(v + layer * row, v_row, row);
                free(k_row);
                free(v_row);
            }
            CHECK_OK(um_kv_append_all(&c.kv, k, v, in_type, &test_err));
            CHECK_EQ_U64(um_kv_seq_len(&c.kv), token + 1);
            for (uint32_t layer = 0; layer < 3; layer++) {
                check_contents(&c, layer, token + 1);
            }
        }
        CHECK_REFUSED(UM_E_FULL, &c, um_kv_append_all(&c.kv, k, v, in_type, &test_err));
        CHECK(test_err.limit == 7 && test_err.used == 7 && test_err.asked == 1);
        free(k);
        free(v);
        free(c.storage);
    }
}

static void test_refused_appends(void) {
    static const float k[1000], v[1000];
    cache c = make_cache(spec_of(1, UM_F16));
    um_kv *kv = &c.kv;
    append_everywhere(kv, 5);
    for (int order = UM_KV_TOKEN_MAJOR; order <= UM_KV_HEAD_MAJOR; order++) {
        um_kv_order o = (um_kv_order)order;
        uint64_t too_many[] = {3, 7, 1000, UINT64_MAX, UINT64_MAX - 5, (uint64_t)1 << 63};
        for (size_t i = 0; i < sizeof too_many / sizeof too_many[0]; i++) {
            CHECK_REFUSED(UM_E_FULL, &c,
                          um_kv_append(kv, 1, k, v, UM_F32, o, too_many[i], &test_err));
            CHECK_EQ_U64(test_err.limit, 7);
            CHECK_EQ_U64(test_err.used, 5);
            CHECK_EQ_U64(test_err.asked, too_many[i]);
        }
        CHECK_REFUSED(UM_E_INVALID, &c, um_kv_append(kv, 3, k, v, UM_F32, o, 1, &test_err));
        CHECK_REFUSED(UM_E_INVALID, &c,
                      um_kv_append(kv, UINT32_MAX, k, v, UM_F32, o, 1, &test_err));
        CHECK_REFUSED(UM_E_INVALID, &c, um_kv_append(kv, 0, k, v, (um_float)2, o, 1, &test_err));
        CHECK_REFUSED(UM_E_INVALID, &c, um_kv_append(kv, 0, k, v, (um_float)-1, o, 1, &test_err));
        CHECK_OK(um_kv_append(kv, 0, NULL, NULL, UM_F32, o, 0, &test_err));
    }
    CHECK_REFUSED(UM_E_INVALID, &c,
                  um_kv_append(kv, 0, k, v, UM_F32, (um_kv_order)2, 1, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &c, um_kv_append_all(kv, k, v, (um_float)2, &test_err));
    CHECK(um_kv_append(kv, 3, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 1, NULL) == UM_E_INVALID);
    CHECK(um_kv_append(kv, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 3, NULL) == UM_E_FULL);

    /* A token that only one layer holds: the others may follow, all of them at once may not. */
    append(kv, 1, 1, UM_F32, UM_KV_TOKEN_MAJOR);
    CHECK_EQ_U64(um_kv_seq_len(kv), 5);
    CHECK_REFUSED(UM_E_STATE, &c, um_kv_append_all(kv, k, v, UM_F32, &test_err));
    append(kv, 0, 1, UM_F32, UM_KV_TOKEN_MAJOR);
    append(kv, 2, 1, UM_F32, UM_KV_TOKEN_MAJOR);
    CHECK_EQ_U64(um_kv_seq_len(kv), 6);
    for (uint32_t layer = 0; layer < 3; layer++) {
        check_contents(&c, layer, 6);
    }
    free(c.storage);

    c = make_cache(spec_of(2, UM_F16));
    CHECK_REFUSED(UM_E_INVALID, &c,
                  um_kv_append(&c.kv, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 1, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &c,
                  um_kv_append(&c.kv, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 0, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &c, um_kv_append_all(&c.kv, k, v, UM_F32, &test_err));
    free(c.storage);
}

/* ---- reserve, commit, rollback ---- */

static void write_row(cache *c, uint64_t row) {
    um_kv *kv = &c->kv;
    for (uint32_t layer = 0; layer < kv->spec.n_layers; layer++) {
        for (int v = 0; v < 2; v++) {
            void *in = make_rows(kv, layer, v, row, 1, kv->spec.type, UM_KV_TOKEN_MAJOR);
            memcpy((unsigned char *)um_kv_part(kv, layer, v) + row * kv->row_bytes, in,
                   kv->row_bytes);
            free(in);
        }
    }
}

static void test_reserve(void) {
    static const float k[100], v[100];
    cache c = make_cache(spec_of(1, UM_F16));
    um_kv *kv = &c.kv;
    uint64_t row = 777;
    CHECK_REFUSED(UM_E_STATE, &c, um_kv_commit(kv, 1, &test_err));
    CHECK_REFUSED(UM_E_STATE, &c, um_kv_commit(kv, 0, &test_err));
    CHECK(um_kv_commit(kv, 1, NULL) == UM_E_STATE);
    append_everywhere(kv, 2);

    uint64_t too_many[] = {6, UINT64_MAX, UINT64_MAX - 1, (uint64_t)1 << 63};
    for (size_t i = 0; i < sizeof too_many / sizeof too_many[0]; i++) {
        CHECK_REFUSED(UM_E_FULL, &c, um_kv_reserve(kv, too_many[i], &row, &test_err));
        CHECK_EQ_U64(test_err.limit, 7);
        CHECK_EQ_U64(test_err.used, 2);
        CHECK_EQ_U64(test_err.asked, too_many[i]);
    }
    CHECK_REFUSED(UM_E_INVALID, &c, um_kv_reserve(kv, 0, &row, &test_err));
    CHECK(um_kv_reserve(kv, 6, &row, NULL) == UM_E_FULL);
    CHECK_EQ_U64(row, 777);

    /* While rows are reserved, nothing else moves the cache's end. */
    CHECK_OK(um_kv_reserve(kv, 3, &row, &test_err));
    CHECK_EQ_U64(row, 2);
    CHECK_EQ_U64(um_kv_seq_len(kv), 2);
    row = 777;
    CHECK_REFUSED(UM_E_STATE, &c, um_kv_reserve(kv, 1, &row, &test_err));
    CHECK_EQ_U64(row, 777);
    CHECK_REFUSED(UM_E_STATE, &c,
                  um_kv_append(kv, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 1, &test_err));
    CHECK_REFUSED(UM_E_STATE, &c, um_kv_append_all(kv, k, v, UM_F32, &test_err));
    CHECK_REFUSED(UM_E_STATE, &c, um_kv_crop(kv, 1, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &c, um_kv_commit(kv, 4, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &c, um_kv_commit(kv, UINT64_MAX, &test_err));

    /* Two of the three become visible, and the reservation ends. */
    write_row(&c, 2);
    write_row(&c, 3);
    CHECK_OK(um_kv_commit(kv, 2, &test_err));
    CHECK_EQ_U64(um_kv_seq_len(kv), 4);
    for (uint32_t layer = 0; layer < 3; layer++) {
        CHECK_EQ_U64(um_kv_layer_len(kv, layer), 4);
        check_contents(&c, layer, 4);
    }
    CHECK_REFUSED(UM_E_STATE, &c, um_kv_commit(kv, 1, &test_err));

    /* A rollback ends it too, and a commit of nothing. */
    CHECK_OK(um_kv_reserve(kv, 3, &row, &test_err));
    CHECK_EQ_U64(row, 4);
    um_kv_rollback(kv);
    CHECK_EQ_U64(um_kv_seq_len(kv), 4);
    CHECK_REFUSED(UM_E_STATE, &c, um_kv_commit(kv, 0, &test_err));
    CHECK_OK(um_kv_reserve(kv, 1, &row, &test_err));
    CHECK_OK(um_kv_commit(kv, 0, &test_err));
    CHECK_EQ_U64(um_kv_seq_len(kv), 4);
    CHECK_REFUSED(UM_E_STATE, &c, um_kv_commit(kv, 0, &test_err));

    /* To the last row. */
    CHECK_OK(um_kv_reserve(kv, 3, &row, &test_err));
    write_row(&c, 4);
    write_row(&c, 5);
    write_row(&c, 6);
    CHECK_OK(um_kv_commit(kv, 3, &test_err));
    for (uint32_t layer = 0; layer < 3; layer++) {
        check_contents(&c, layer, 7);
    }
    CHECK_FULL(um_kv_reserve(kv, 1, &row, &test_err), 7, 7, 1);
    free(c.storage);
}

static void test_torn_tokens(void) {
    cache c = make_cache(spec_of(1, UM_F16));
    um_kv *kv = &c.kv;
    uint64_t row = 777;
    append_everywhere(kv, 3);
    append(kv, 0, 2, UM_F16, UM_KV_TOKEN_MAJOR);
    append(kv, 1, 1, UM_F16, UM_KV_TOKEN_MAJOR);
    CHECK_EQ_U64(um_kv_seq_len(kv), 3);
    CHECK_EQ_U64(um_kv_layer_len(kv, 0), 5);
    CHECK_REFUSED(UM_E_STATE, &c, um_kv_reserve(kv, 1, &row, &test_err));
    CHECK_REFUSED(UM_E_STATE, &c, um_kv_crop(kv, 1, &test_err));
    CHECK_EQ_U64(row, 777);
    um_kv_rollback(kv);
    for (uint32_t layer = 0; layer < 3; layer++) {
        CHECK_EQ_U64(um_kv_layer_len(kv, layer), 3);
    }
    um_kv_rollback(kv);
    CHECK_EQ_U64(um_kv_seq_len(kv), 3);
    CHECK_OK(um_kv_reserve(kv, 1, &row, &test_err));
    CHECK_EQ_U64(row, 3);
    free(c.storage);
}

static void test_crop_and_clear(void) {
    cache c = make_cache(spec_of(2, UM_F32));
    um_kv *kv = &c.kv;
    append_everywhere(kv, 6);
    CHECK_REFUSED(UM_E_INVALID, &c, um_kv_crop(kv, 7, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &c, um_kv_crop(kv, UINT64_MAX, &test_err));
    CHECK(um_kv_crop(kv, 7, NULL) == UM_E_INVALID);
    CHECK_OK(um_kv_crop(kv, 6, &test_err));
    CHECK_EQ_U64(um_kv_seq_len(kv), 6);
    CHECK_OK(um_kv_crop(kv, 2, &test_err));
    for (uint32_t layer = 0; layer < 3; layer++) {
        CHECK_EQ_U64(um_kv_layer_len(kv, layer), 2);
    }
    CHECK_REFUSED(UM_E_INVALID, &c, um_kv_crop(kv, 3, &test_err));
    void *parts[2] = {um_kv_part(kv, 1, 0), um_kv_part(kv, 2, 1)};
    append_everywhere(kv, 4);
    CHECK_EQ_U64(um_kv_seq_len(kv), 6);
    for (uint32_t layer = 0; layer < 3; layer++) {
        check_contents(&c, layer, 6);
    }
    CHECK_OK(um_kv_crop(kv, 0, &test_err));
    CHECK_EQ_U64(um_kv_seq_len(kv), 0);

    append_everywhere(kv, 1);
    append(kv, 2, 1, UM_F32, UM_KV_HEAD_MAJOR);
    um_kv_clear(kv);
    for (uint32_t layer = 0; layer < 3; layer++) {
        CHECK_EQ_U64(um_kv_layer_len(kv, layer), 0);
    }
    uint64_t row;
    CHECK_OK(um_kv_reserve(kv, 7, &row, &test_err));
    um_kv_clear(kv);
    CHECK_STATUS(UM_E_STATE, um_kv_commit(kv, 1, &test_err));
    CHECK_OK(um_kv_reserve(kv, 7, &row, &test_err));
    CHECK_EQ_U64(row, 0);
    CHECK(parts[0] == um_kv_part(kv, 1, 0) && parts[1] == um_kv_part(kv, 2, 1));
    free(c.storage);
}

/* ---- a writer and its readers ---- */

enum { N_TOKENS = 600, HEADS = 2, DIM = 512, LAYERS = 2 };

static const um_kv *read_kv;
static _Atomic unsigned n_reads, n_torn;
static _Atomic bool writer_done;

/* Whatever length a reader sees, the token before it is whole in every layer. */
static void read_last_row(void) {
    uint64_t len = um_kv_seq_len(read_kv);
    for (uint32_t layer = 0; layer < LAYERS && len > 0; layer++) {
        for (int v = 0; v < 2; v++) {
            const unsigned char *part = um_kv_part(read_kv, layer, v);
            const float *row = (const void *)(part + (len - 1) * read_kv->row_bytes);
            bool torn = row[0] != (float)(len - 1) || row[HEADS * DIM - 1] != (float)(len - 1);
            atomic_fetch_add(&n_torn, torn);
        }
    }
    atomic_fetch_add(&n_reads, 1);
}

static void read_when_interrupted(int number) {
    (void)number;
    read_last_row();
}

static void *read_until_done(void *arg) {
    while (!atomic_load(&writer_done)) {
        read_last_row();
    }
    return arg;
}

/* Fills the cache, in each of the three ways in turn. */
static void write_tokens(um_kv *kv) {
    static float rows[LAYERS * HEADS * DIM];
    for (uint64_t token = 0; token < N_TOKENS; token++) {
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            rows[i] = (float)token;
        }
        if (token % 3 == 0) {
            CHECK_OK(um_kv_append_all(kv, rows, rows, UM_F32, &test_err));
            continue;
        }
        if (token % 3 == 1) {
            for (uint32_t layer = 0; layer < LAYERS; layer++) {
                CHECK_OK(
                    um_kv_append(kv, layer, rows, rows, UM_F32, UM_KV_HEAD_MAJOR, 1, &test_err));
            }
            continue;
        }
        uint64_t row;
        CHECK_OK(um_kv_reserve(kv, 1, &row, &test_err));
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            for (int v = 0; v < 2; v++) {
                unsigned char *part = um_kv_part(kv, layer, v);
                memcpy(part + row * kv->row_bytes, rows, kv->row_bytes);
            }
        }
        CHECK_OK(um_kv_commit(kv, 1, &test_err));
    }
    CHECK_EQ_U64(um_kv_seq_len(kv), N_TOKENS);
}

static void test_readers(void) {
    cache c = make_cache((um_kv_spec){.n_layers = LAYERS,
                                      .n_kv_heads = HEADS,
                                      .head_dim = DIM,
                                      .batch = 1,
                                      .max_seq_len = N_TOKENS,
                                      .type = UM_F32});
    pthread_t reader;
    read_kv = &c.kv;
    REQUIRE(pthread_create(&reader, NULL, read_until_done, NULL) == 0);
    write_tokens(&c.kv);
    atomic_store(&writer_done, true);
    pthread_join(reader, NULL);

    atomic_store(&n_reads, 0);
    test_interrupt(read_when_interrupted);
    for (int round = 0; round < 500 && atomic_load(&n_reads) < 4000; round++) {
        um_kv_clear(&c.kv);
        memset(c.storage, 0xCC, LAYERS * 2 * c.kv.part_bytes);
        write_tokens(&c.kv);
    }
    test_interrupt(NULL);
    CHECK(atomic_load(&n_reads) > 0);
    CHECK_EQ_U64(atomic_load(&n_torn), 0);
    free(c.storage);
}

int main(void) {
    test_bad_specs();
    test_storage();
    test_append();
    test_append_all();
    test_refused_appends();
    test_reserve();
    test_torn_tokens();
    test_crop_and_clear();
    test_readers();
    return test_report();
}
