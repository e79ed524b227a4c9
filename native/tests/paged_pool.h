/* Helpers for the tests of paged KV memory: a pool, sequences in it, tokens, and a check of the
 * tokens of a sequence. */
#ifndef UM_PAGED_POOL_H
#define UM_PAGED_POOL_H

#include "test.h"

/* A pool whose storage ends where its heap block ends, so that AddressSanitizer sees a write past
 * the end. */
typedef struct pool {
    um_paged paged;
    void *storage;
    size_t nbytes;
} pool;

static inline um_paged_spec spec_of(um_dtype type, uint32_t n_blocks) {
    return (um_paged_spec){2, 3, type == UM_Q8_0 ? 32 : 4, n_blocks, 5, type, type};
}

static inline pool make_pool(um_paged_spec spec) {
    pool p;
    CHECK_OK(um_paged_storage_bytes(&spec, &p.nbytes, &test_err));
    REQUIRE(posix_memalign(&p.storage, 64, p.nbytes) == 0);
    memset(p.storage, 0xCC, p.nbytes);
    CHECK_OK(um_paged_init(&p.paged, &spec, p.storage, &test_err));
    return p;
}

static inline void free_pool(pool *p) {
    CHECK_EQ(um_paged_n_in_use(&p->paged), 0);
    um_paged_free(&p->paged);
    free(p->storage);
}

/* Freed where their scope ends, sequences before the pool that is declared before them. */
#define AUTO_POOL __attribute__((cleanup(free_pool))) pool
#define AUTO_SEQ __attribute__((cleanup(um_paged_seq_free))) um_paged_seq

static inline um_paged_seq make_seq(pool *p) {
    um_paged_seq seq;
    CHECK_OK(um_paged_seq_init(&seq, &p->paged, NULL, 0, &test_err));
    return seq;
}

static inline um_paged_seq fork_of(const um_paged_seq *seq) {
    um_paged_seq out;
    CHECK_OK(um_paged_seq_fork(&out, seq, &test_err));
    return out;
}

static inline uint32_t block_of(const um_paged_seq *seq, uint32_t i) {
    return (uint32_t)seq->table[i];
}

/* ---- values: a token is a number below 2000, which every type represents exactly ---- */

static inline float value_of(uint32_t token, uint32_t layer, int v, size_t head, size_t i) {
    /* The first value of each 32 is the largest, so that the scale of a q8_0 block is 1. */
    return i % 32 == 0 ? 127.0F
                       : (float)((token * 7 + layer * 31 + (uint32_t)v * 17 + head * 5 + i) % 120);
}

static inline size_t bytes_of(um_dtype type, size_t n) {
    return n / um_dtype_block_values(type) * um_dtype_block_bytes(type);
}

/* The rows of the tokens, in heap memory of their exact size. */
static inline void *make_rows(const um_paged_spec *s, uint32_t layer, int v, const uint32_t *tokens,
                              uint64_t n, um_dtype type, um_kv_order order) {
    size_t heads = s->n_kv_heads, dim = s->head_dim;
    unsigned char *rows = allocate(bytes_of(type, n * heads * dim) + (n == 0));
    AUTO_FREE float *head = allocate(dim * sizeof *head);
    REQUIRE(head != NULL);
    for (uint64_t t = 0; t < n; t++) {
        for (size_t h = 0; h < heads; h++) {
            for (size_t i = 0; i < dim; i++) {
                head[i] = value_of(tokens[t], layer, v, h, i);
            }
            size_t at = order == UM_KV_TOKEN_MAJOR ? t * heads + h : h * n + t;
            CHECK(um_convert(rows + bytes_of(type, at * dim), type, head, UM_F32, dim, NULL) ==
                  UM_OK);
        }
    }
    return rows;
}

static inline um_status append(um_paged_seq *seq, uint32_t layer, const uint32_t *tokens,
                               uint64_t n, um_dtype type, um_kv_order order) {
    AUTO_FREE void *k = make_rows(&seq->paged->spec, layer, 0, tokens, n, type, order);
    AUTO_FREE void *v = make_rows(&seq->paged->spec, layer, 1, tokens, n, type, order);
    um_status status = um_paged_append(seq, layer, k, v, type, order, n, &test_err);
    return status;
}

/* Appends n tokens to all layers, beginning with `first`. */
static inline void append_tokens(um_paged_seq *seq, uint32_t first, uint32_t n) {
    uint32_t tokens[64];
    for (uint32_t i = 0; i < n; i++) {
        tokens[i] = first + i;
    }
    for (uint32_t layer = 0; layer < seq->paged->spec.n_layers; layer++) {
        CHECK_OK(append(seq, layer, tokens, n, UM_F32, UM_KV_HEAD_MAJOR));
    }
}

/* Checks that a layer holds these tokens, gathered into memory of their exact size. */
static inline void check_tokens(const um_paged_seq *seq, uint32_t layer, const uint32_t *tokens,
                                uint64_t n) {
    const um_paged_spec *s = &seq->paged->spec;
    CHECK_EQ(um_paged_layer_len(seq, layer), n);
    for (int v = 0; v < 2; v++) {
        um_dtype type = v != 0 ? s->v_type : s->type;
        size_t nbytes = bytes_of(type, n * s->n_kv_heads * s->head_dim);
        AUTO_FREE unsigned char *out = malloc(nbytes + (nbytes == 0));
        REQUIRE(out != NULL);
        AUTO_FREE void *expected = make_rows(s, layer, v, tokens, n, type, UM_KV_HEAD_MAJOR);
        size_t stride = bytes_of(type, n * s->head_dim);
        CHECK_OK(um_paged_gather(seq, layer, v, n, out, stride, type, &test_err));
        CHECK(memcmp(out, expected, nbytes) == 0);
    }
}

static inline void check_count_from(const um_paged_seq *seq, uint32_t first, uint32_t n) {
    uint32_t tokens[64];
    for (uint32_t i = 0; i < n; i++) {
        tokens[i] = first + i;
    }
    for (uint32_t layer = 0; layer < seq->paged->spec.n_layers; layer++) {
        check_tokens(seq, layer, tokens, n);
    }
    CHECK_EQ(um_paged_seq_len(seq), n);
}

#endif
