/* Paged KV memory: the pool, appending and gathering, blocks that sequences share. Random calls are
 * in test_paged_random.c, readers in test_paged_readers.c. */
#include "fault_os.h"
#include "paged_pool.h"
#include "values/convert.h"

static void check_bad_spec(um_paged_spec spec) {
    static _Alignas(64) unsigned char storage[64];
    size_t nbytes = 12345;
    um_paged paged;
    SPOIL(paged);
    CHECK_FAILS(UM_E_INVALID, um_paged_storage_bytes, &spec, &nbytes);
    CHECK_EQ(nbytes, 12345);
    CHECK_INVALID(um_paged_init(&paged, &spec, storage, &test_err));
    CHECK_SPOILT(paged);
}

TEST(bad_specs) {
    uint32_t most = UINT32_MAX, blocks = INT32_MAX - 1;
    um_paged_spec bad[] = {/* layers, heads, values, blocks, tokens */
                           {0, 3, 4, 4, 5, UM_F16, UM_F16},
                           {2, 0, 4, 4, 5, UM_F16, UM_F16},
                           {2, 3, 0, 4, 5, UM_F16, UM_F16},
                           {2, 3, 4, 0, 5, UM_F16, UM_F16},
                           {2, 3, 4, 4, 0, UM_F16, UM_F16},
                           {2, 3, 4, INT32_MAX, 5, UM_F16, UM_F16},
                           {2, 3, 4, 4, 5, (um_dtype)9, (um_dtype)9},
                           {2, 3, 33, 4, 5, UM_Q8_0, UM_Q8_0},
                           {2, 3, 16, 4, 5, UM_IQ4_NL, UM_IQ4_NL},
                           {2, 3, 4, 4, 5, UM_F16, (um_dtype)9},
                           {2, 3, 33, 4, 5, UM_F16, UM_Q8_0},
                           /* Each product of the size overflows in one of these. */
                           {1, most, most, blocks, most, UM_F32, UM_F32},
                           {most, most, most, blocks, 1, UM_F32, UM_F32},
                           {1, 1, most, blocks, 1, UM_F32, UM_F32},
                           /* 2^63 bytes: no valid distance between two addresses. */
                           {1, 1, (uint32_t)1 << 31, (uint32_t)1 << 29, 1, UM_F32, UM_F32}};
    for (size_t i = 0; i < COUNT(bad); i++) {
        check_bad_spec(bad[i]);
    }
}

TEST(storage) {
    um_dtype types[] = {UM_F32, UM_F16, UM_BF16, UM_Q8_0};
    size_t head_bytes[] = {16, 8, 8, 34};
    for (int i = 0; i < 4; i++) {
        AUTO_POOL p = make_pool(spec_of(types[i], 3));
        um_paged *paged = &p.paged;
        size_t lane = 3 * 5 * head_bytes[i], block = (2 * 2 * lane + 63) / 64 * 64;
        CHECK_EQ(p.nbytes, 3 * block);
        CHECK_EQ(paged->head_bytes, head_bytes[i]);
        CHECK_EQ(paged->lane_bytes, lane);
        CHECK_EQ(paged->block_bytes, block);
        for (uint32_t at = 0; at < 3; at++) {
            for (uint32_t lanes = 0; lanes < 4; lanes++) {
                CHECK(um_paged_lane(paged, at, lanes / 2, lanes % 2) ==
                      (unsigned char *)p.storage + at * block + lanes * lane);
            }
            CHECK_EQ(um_paged_n_holders(paged, at), 0);
            CHECK(!um_paged_is_cached(paged, at));
        }
        CHECK(um_paged_lane(paged, 3, 0, 0) == NULL);
        CHECK(um_paged_lane(paged, 0, 2, 0) == NULL);
        CHECK(um_paged_n_holders(paged, 3) == 0);
        CHECK(!um_paged_is_cached(paged, UINT32_MAX));
        CHECK(paged->n_free == 3);
        CHECK(paged->n_evictable == 0);
    }
    um_paged_spec spec = spec_of(UM_F16, 3);
    static _Alignas(64) unsigned char storage[4096];
    um_paged paged;
    CHECK_INVALID(um_paged_init(&paged, &spec, NULL, &test_err));
    CHECK_INVALID(um_paged_init(&paged, &spec, storage + 32, &test_err));
    um_paged zeroed = {0};
    um_paged_free(&zeroed);
    AUTO_SEQ no_seq = {0};
}

/* K and V of two types: lanes of two sizes, converted apart, copied together. */
TEST(types_apart) {
    AUTO_POOL p = make_pool((um_paged_spec){2, 3, 32, 4, 5, UM_F16, UM_Q8_0});
    um_paged *paged = &p.paged;
    size_t lanes[] = {3 * 5 * 64, 3 * 5 * 34}, layer = lanes[0] + lanes[1];
    CHECK_EQ(paged->head_bytes, 64);
    CHECK_EQ(paged->v_head_bytes, 34);
    CHECK_EQ(paged->lane_bytes, lanes[0]);
    CHECK_EQ(paged->v_lane_bytes, lanes[1]);
    CHECK_EQ(paged->block_bytes, (2 * layer + 63) / 64 * 64);
    CHECK(um_paged_lane(paged, 1, 1, 1) ==
          (unsigned char *)p.storage + paged->block_bytes + layer + lanes[0]);
    AUTO_SEQ seq = make_seq(&p);
    append_tokens(&seq, 0, 8);
    AUTO_SEQ fork = fork_of(&seq);
    append_tokens(&fork, 8, 5); /* copies the tail block */
    check_count_from(&seq, 0, 8);
    check_count_from(&fork, 0, 13);
    /* Blocks would be those of both. */
    uint32_t token = 8;
    for (int i = 0; i < 2; i++) {
        um_dtype type = i == 0 ? UM_Q8_0 : UM_Q4_0;
        CHECK_INVALID(append(&seq, 0, &token, 1, type, UM_KV_HEAD_MAJOR));
    }
    um_paged_pending pending;
    AUTO_FREE void *k = make_rows(&paged->spec, 0, 0, &token, 1, UM_F16, UM_KV_TOKEN_MAJOR);
    AUTO_FREE void *v = make_rows(&paged->spec, 0, 1, &token, 1, UM_Q8_0, UM_KV_TOKEN_MAJOR);
    CHECK_OK(
        um_paged_append_stored_begin(&pending, &seq, 0, k, v, UM_KV_TOKEN_MAJOR, 1, &test_err));
    um_paged_append_write(&pending);
    um_paged_append_end(&pending);
    uint32_t tokens[] = {0, 1, 2, 3, 4, 5, 6, 7, 8};
    check_tokens(&seq, 0, tokens, 9);
    CHECK_INVALID(
        um_paged_append_stored_begin(&pending, &seq, 2, k, v, UM_KV_TOKEN_MAJOR, 1, &test_err));
    unsigned char out[64];
    CHECK_INVALID(um_paged_gather(&seq, 0, 0, 0, out, 64, UM_Q8_0, &test_err));
    CHECK_OK(um_paged_gather(&seq, 0, 1, 0, out, 64, UM_Q8_0, &test_err));
    /* Blocks that K may have, and V not. */
    AUTO_POOL turned = make_pool((um_paged_spec){2, 3, 32, 4, 5, UM_Q8_0, UM_F16});
    AUTO_SEQ of_turned = make_seq(&turned);
    CHECK_INVALID(append(&of_turned, 0, &token, 1, UM_Q8_0, UM_KV_HEAD_MAJOR));
}

TEST(no_memory) {
    um_paged_spec spec = spec_of(UM_F16, 3);
    static _Alignas(64) unsigned char storage[4096];
    um_paged paged;
    SPOIL(paged);
    fault_os_fail_nth_alloc(1);
    CHECK_STATUS(UM_E_NOMEM, um_paged_init(&paged, &spec, storage, &test_err));
    CHECK(test_err.asked > spec.n_blocks + 2); /* bytes, not blocks */
    CHECK_SPOILT(paged);

    AUTO_POOL p = make_pool(spec);
    AUTO_SEQ seq = make_seq(&p);
    um_paged_seq other;
    append_tokens(&seq, 0, 7);
    SPOIL(other);
    int32_t blocks[] = {seq.table[0]};
    fault_os_fail_nth_alloc(1);
    CHECK_STATUS(UM_E_NOMEM, um_paged_seq_init(&other, &p.paged, blocks, 1, &test_err));
    fault_os_fail_nth_alloc(1);
    CHECK_STATUS(UM_E_NOMEM, um_paged_seq_fork(&other, &seq, &test_err));
    CHECK_SPOILT(other);
    CHECK_EQ(um_paged_n_holders(&p.paged, block_of(&seq, 0)), 1);
    /* From then on a sequence allocates nothing. */
    fault_os_fail_nth_alloc(1);
    append_tokens(&seq, 7, 8);
    CHECK_OK(um_paged_crop(&seq, 3, &test_err));
    append_tokens(&seq, 3, 9);
    CHECK_EQ(fault_os_allocs(), 0);
    fault_os_fail_nth_alloc(0);
    check_count_from(&seq, 0, 12);
}

/* All types, orders and steps, across the ends of blocks, with one layer ahead of the other. */
TEST(append) {
    uint64_t steps[] = {1, 0, 3, 1, 11, 4};
    uint32_t tokens[20];
    for (uint32_t i = 0; i < 20; i++) {
        tokens[i] = 100 + i;
    }
    for (int i = 0; i < 32; i++) {
        um_dtype type = (um_dtype)(i & 3), in_type = (um_dtype)(i >> 2 & 3);
        um_kv_order order = (i & 16) != 0 ? UM_KV_HEAD_MAJOR : UM_KV_TOKEN_MAJOR;
        if (in_type == UM_Q8_0 && type != UM_Q8_0) {
            continue;
        }
        AUTO_POOL p = make_pool(spec_of(type, 4));
        AUTO_SEQ seq = make_seq(&p);
        uint64_t len = 0;
        for (int step = 0; step < 6; step++) {
            for (uint32_t layer = 0; layer < 2; layer++) {
                CHECK_OK(append(&seq, layer, tokens + len, steps[step], in_type, order));
                check_tokens(&seq, layer, tokens, len + steps[step]);
                CHECK_EQ(um_paged_seq_len(&seq), layer == 0 ? len : len + steps[step]);
            }
            len += steps[step];
            CHECK_EQ(seq.n_blocks, (len + 4) / 5);
            CHECK_EQ(um_paged_n_in_use(&p.paged), (len + 4) / 5);
        }
        check_count_from(&seq, 100, 20);
    }
}

TEST(append_all) {
    AUTO_POOL p = make_pool(spec_of(UM_F16, 4));
    AUTO_SEQ seq = make_seq(&p);
    uint32_t n_values = 3 * 4;
    for (uint32_t token = 0; token < 20; token++) {
        float in[2][2 * 12];
        for (uint32_t layer = 0; layer < 2; layer++) {
            for (int v = 0; v < 2; v++) {
                float *rows =
                    make_rows(&p.paged.spec, layer, v, &token, 1, UM_F32, UM_KV_TOKEN_MAJOR);
                memcpy(in[v] + layer * n_values, rows, n_values * sizeof *rows);
                free(rows);
            }
        }
        CHECK_OK(um_paged_append_all(&seq, in[0], in[1], UM_F32, &test_err));
        check_count_from(&seq, 0, token + 1);
    }
    static const float k[24], v[24];
    CHECK_FULL(UM_PAGED_FULL, um_paged_append_all(&seq, k, v, UM_F32, &test_err), 4, 4, 1);
    CHECK_INVALID(um_paged_append_all(&seq, k, v, (um_dtype)9, &test_err));
    CHECK_OK(um_paged_crop(&seq, 18, &test_err));
    CHECK_OK(um_paged_append(&seq, 1, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 1, &test_err));
    CHECK_DETAIL(UM_E_STATE, UM_PAGED_UNEVEN, um_paged_append_all(&seq, k, v, UM_F32, &test_err));
    um_paged_rollback(&seq);
    check_count_from(&seq, 0, 18);
}

TEST(refused_calls) {
    static const float k[200], v[200];
    AUTO_POOL p = make_pool(spec_of(UM_F16, 3));
    AUTO_SEQ seq = make_seq(&p), other = make_seq(&p);
    append_tokens(&seq, 0, 7);
    uint64_t too_many[] = {9, 1000, UINT64_MAX, UINT64_MAX - 7, (uint64_t)1 << 63};
    for (size_t i = 0; i < COUNT(too_many); i++) {
        uint64_t end = too_many[i] > UINT64_MAX - 7 ? UINT64_MAX : too_many[i] + 7;
        uint64_t asked = end / 5 + (end % 5 != 0) - 2;
        CHECK_FULL(UM_PAGED_FULL,
                   um_paged_append(&seq, 1, k, v, UM_F32, UM_KV_HEAD_MAJOR, too_many[i], &test_err),
                   3, 2, asked);
    }
    CHECK_FULL(UM_PAGED_FULL,
               um_paged_append(&other, 0, k, v, UM_F32, UM_KV_HEAD_MAJOR, 6, &test_err), 3, 2, 2);
    CHECK_INVALID(um_paged_append(&seq, 2, k, v, UM_F32, UM_KV_HEAD_MAJOR, 1, &test_err));
    CHECK_INVALID(um_paged_append(&seq, 0, k, v, UM_F32, (um_kv_order)2, 1, &test_err));
    CHECK_INVALID(um_paged_append(&seq, 0, k, v, (um_dtype)-1, UM_KV_HEAD_MAJOR, 1, &test_err));
    CHECK_INVALID(um_paged_append(&seq, 0, k, v, UM_Q8_0, UM_KV_HEAD_MAJOR, 1, &test_err));
    CHECK_INVALID(um_paged_crop(&seq, 8, &test_err));
    float out[200];
    CHECK_INVALID(um_paged_gather(&seq, 2, 0, 0, out, 400, UM_F32, &test_err));
    CHECK_INVALID(um_paged_gather(&seq, 2, 0, 1, out, 400, UM_F32, &test_err));
    CHECK_INVALID(um_paged_gather(&seq, 0, 0, 8, out, 400, UM_F32, &test_err));
    CHECK_INVALID(um_paged_gather(&seq, 0, 0, 7, out, 7 * 16 - 1, UM_F32, &test_err));
    CHECK_INVALID(um_paged_gather(&seq, 0, 0, 7, out, 400, UM_Q8_0, &test_err));
    CHECK_INVALID(um_paged_gather(&seq, 0, 0, 7, out, 400, (um_dtype)7, &test_err));
    int32_t blocks[] = {seq.table[0], -1, 3, 0};
    um_paged_seq made;
    for (int i = 1; i < 3; i++) {
        CHECK_INVALID(um_paged_seq_init(&made, &p.paged, blocks + i, 1, &test_err));
    }
    CHECK_INVALID(um_paged_seq_init(&made, &p.paged, blocks, 4, &test_err));
    /* Its table would have no room for all other blocks. */
    int32_t twice[] = {seq.table[0], seq.table[0]};
    CHECK_INVALID(um_paged_seq_init(&made, &p.paged, twice, 2, &test_err));
    CHECK_EQ(um_paged_n_holders(&p.paged, (uint32_t)twice[0]), 1);
    int32_t free_block = 0;
    while (um_paged_n_holders(&p.paged, (uint32_t)free_block) != 0) {
        free_block++;
    }
    CHECK_INVALID(um_paged_seq_init(&made, &p.paged, &free_block, 1, &test_err));
    CHECK_DETAIL(UM_E_STATE, UM_PAGED_UNHELD,
                 um_paged_cache(&p.paged, (uint32_t)free_block, &test_err));
    CHECK_INVALID(um_paged_cache(&p.paged, 3, &test_err));
    um_paged_uncache(&p.paged, (uint32_t)free_block);
    um_paged_uncache(&p.paged, 3);

    CHECK_OK(um_paged_append(&seq, 1, k, v, UM_F32, UM_KV_HEAD_MAJOR, 4, &test_err));
    CHECK_DETAIL(UM_E_STATE, UM_PAGED_UNEVEN, um_paged_crop(&seq, 1, &test_err));
    CHECK_DETAIL(UM_E_STATE, UM_PAGED_UNEVEN, um_paged_seq_fork(&made, &seq, &test_err));
    CHECK_EQ(um_paged_n_in_use(&p.paged), 3);
    um_paged_rollback(&seq);
    check_count_from(&seq, 0, 7);
    CHECK(p.paged.n_free == 1);
    CHECK(um_paged_n_holders(&p.paged, (uint32_t)free_block) == 0);
}

/* Into rows of a larger array, converted, for any number of tokens. */
TEST(gather_into_a_part) {
    AUTO_POOL p = make_pool(spec_of(UM_F16, 4));
    AUTO_SEQ seq = make_seq(&p);
    append_tokens(&seq, 0, 13);
    for (uint64_t n = 0; n <= 13; n++) {
        float out[3][15][4];
        for (size_t i = 0; i < sizeof out / sizeof(float); i++) {
            (&out[0][0][0])[i] = -1;
        }
        CHECK_OK(um_paged_gather(&seq, 1, 1, n, out, sizeof out[0], UM_F32, &test_err));
        bool same = true;
        for (size_t h = 0; h < 3; h++) {
            for (uint32_t t = 0; t < 15; t++) {
                for (size_t i = 0; i < 4; i++) {
                    same = same && out[h][t][i] == (t < n ? value_of(t, 1, 1, h, i) : -1);
                }
            }
        }
        CHECK(same);
    }
}

/* Outputs too large for the caches are written past them: the bytes are the same, at any alignment,
 * and none is written past the end. */
TEST(large_gather) {
    enum { N = 8200, HEADS = 5, DIM = 64, OFFSETS = 3 };
    AUTO_POOL p = make_pool((um_paged_spec){1, HEADS, DIM, 600, 16, UM_F16, UM_F16});
    AUTO_SEQ seq = make_seq(&p);
    size_t n_values = (size_t)N * HEADS * DIM;
    AUTO_FREE uint16_t *in = allocate(n_values * sizeof *in);
    uint64_t random = 1;
    for (size_t i = 0; i < n_values; i++) {
        in[i] = (uint16_t)test_random(&random);
    }
    CHECK_OK(um_paged_append(&seq, 0, in, in, UM_F16, UM_KV_HEAD_MAJOR, N, &test_err));
    size_t offsets[OFFSETS] = {0, 1, 8};
    for (int i = 0; i < OFFSETS; i++) {
        void *memory;
        size_t stride = (N + 3) * DIM * sizeof *in, nbytes = (HEADS - 1) * stride + N * DIM * 2;
        REQUIRE(posix_memalign(&memory, 64, nbytes + offsets[i] * 2) == 0);
        uint16_t *out = (uint16_t *)memory + offsets[i];
        memset(memory, 0xCC, nbytes + offsets[i] * 2);
        CHECK_OK(um_paged_gather(&seq, 0, i & 1, N, out, stride, UM_F16, &test_err));
        for (size_t h = 0; h < HEADS; h++) {
            CHECK(memcmp(out + h * stride / 2, in + h * N * DIM, (size_t)N * DIM * 2) == 0);
            CHECK(h + 1 == HEADS || out[h * stride / 2 + (size_t)N * DIM] == 0xCCCC);
        }
        free(memory);
    }
    /* Converted rows are not copied past the caches, however large they are. */
    AUTO_FREE float *wide = allocate(n_values * sizeof *wide);
    CHECK_OK(um_paged_gather(&seq, 0, 0, N, wide, N * DIM * sizeof *wide, UM_F32, &test_err));
    AUTO_FREE float *expected = allocate(n_values * sizeof *expected);
    um__convert_values((unsigned char *)expected, UM_F32, (const unsigned char *)in, UM_F16,
                       n_values);
    CHECK(memcmp(wide, expected, n_values * sizeof *wide) == 0);
}

TEST(fork) {
    AUTO_POOL p = make_pool(spec_of(UM_BF16, 4));
    AUTO_SEQ a = make_seq(&p);
    append_tokens(&a, 0, 7);
    AUTO_SEQ b = fork_of(&a), c = fork_of(&b);
    CHECK_EQ(um_paged_n_in_use(&p.paged), 2);
    CHECK_EQ(um_paged_n_holders(&p.paged, block_of(&a, 0)), 3);
    CHECK(um_paged_will_copy(&a, 0));
    CHECK(um_paged_will_copy(&c, 1));
    uint32_t shared = block_of(&a, 1);
    append_tokens(&b, 7, 1);
    CHECK(block_of(&b, 0) == block_of(&a, 0));
    CHECK(block_of(&b, 1) != shared);
    CHECK(block_of(&a, 1) == shared);
    CHECK(um_paged_n_holders(&p.paged, shared) == 2);
    CHECK(!um_paged_will_copy(&b, 0));
    /* A copy and a new block are needed, and only one block is free: nothing changes. */
    static const float k[200], v[200];
    um_paged before = p.paged;
    CHECK_FULL(UM_PAGED_FULL, um_paged_append(&c, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 4, &test_err),
               4, 3, 2);
    CHECK(memcmp(&before, &p.paged, sizeof before) == 0);
    CHECK(block_of(&c, 1) == shared);
    append_tokens(&c, 50, 3);
    CHECK_FULL(UM_PAGED_FULL, um_paged_append(&a, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 4, &test_err),
               4, 4, 1);
    /* No sequence shares the tail of `a` any more. */
    CHECK(!um_paged_will_copy(&a, 0));
    append_tokens(&a, 7, 3);
    check_count_from(&a, 0, 10);
    check_count_from(&b, 0, 8);
    /* After a crop to whole blocks, the next append writes to no shared block. */
    CHECK_OK(um_paged_crop(&b, 5, &test_err));
    CHECK(!um_paged_will_copy(&b, 0));
    CHECK_EQ(b.n_blocks, 1);
    CHECK_OK(um_paged_crop(&b, 4, &test_err));
    CHECK(um_paged_will_copy(&b, 0));
    append_tokens(&b, 4, 1);
    CHECK(block_of(&b, 0) != block_of(&a, 0));
    um_paged_seq_clear(&b);
    CHECK_EQ(um_paged_seq_len(&b), 0);
}

static void cache_all(um_paged_seq *seq) {
    for (uint32_t i = 0; i < seq->n_blocks; i++) {
        CHECK_OK(um_paged_cache(seq->paged, block_of(seq, i), &test_err));
    }
}

/* Cached blocks are shared again, or reused in the order in which they became evictable. */
TEST(cached_blocks_are_taken_in_order) {
    AUTO_POOL p = make_pool(spec_of(UM_F32, 6));
    um_paged_seq a = make_seq(&p), b = make_seq(&p);
    append_tokens(&a, 0, 10);
    append_tokens(&b, 100, 10);
    cache_all(&a);
    cache_all(&b);
    uint32_t order[] = {block_of(&a, 1), block_of(&a, 0), block_of(&b, 1), block_of(&b, 0)};
    int32_t of_a[] = {a.table[0], a.table[1]};
    um_paged_seq_free(&a);
    um_paged_seq_free(&b);
    CHECK(p.paged.n_free == 2);
    CHECK(p.paged.n_evictable == 4);
    CHECK_EQ(um_paged_n_in_use(&p.paged), 0);
    /* A block that is shared again keeps its tokens, and moves to the end of the order. */
    CHECK_OK(um_paged_seq_init(&a, &p.paged, of_a, 1, &test_err));
    check_count_from(&a, 0, 5);
    um_paged_seq_free(&a);
    uint32_t first = order[1];
    order[1] = order[2];
    order[2] = order[3];
    order[3] = first;
    /* Free blocks are taken first, then those that have been evictable for longest. */
    AUTO_SEQ c = make_seq(&p);
    append_tokens(&c, 200, 10);
    CHECK(p.paged.n_free == 0);
    CHECK(p.paged.n_evictable == 4);
    for (uint32_t i = 0; i < 4; i += 2) {
        for (uint32_t j = i; j < 4; j++) {
            CHECK(um_paged_is_cached(&p.paged, order[j]));
        }
        append_tokens(&c, 210 + 5 * i, 10);
        CHECK_EQ(block_of(&c, 2 + i), order[i]);
        CHECK_EQ(block_of(&c, 3 + i), order[i + 1]);
        CHECK(!um_paged_is_cached(&p.paged, order[i]));
        CHECK(!um_paged_is_cached(&p.paged, order[i + 1]));
    }
    check_count_from(&c, 200, 30);
}

/* A cached block that only one sequence holds is written in place, and is then no longer cached. */
TEST(cached_blocks_are_let_go) {
    AUTO_POOL p = make_pool(spec_of(UM_F32, 6));
    um_paged_seq c = make_seq(&p);
    append_tokens(&c, 200, 30);
    cache_all(&c);
    um_paged_seq d = fork_of(&c);
    CHECK_OK(um_paged_crop(&c, 28, &test_err));
    um_paged_seq_free(&d);
    uint32_t tail = block_of(&c, 5);
    CHECK(um_paged_is_cached(&p.paged, tail));
    append_tokens(&c, 228, 2);
    CHECK(block_of(&c, 5) == tail);
    CHECK(!um_paged_is_cached(&p.paged, tail));
    check_count_from(&c, 200, 30);

    uint32_t held = block_of(&c, 0), let_go = block_of(&c, 4);
    CHECK_OK(um_paged_crop(&c, 20, &test_err));
    CHECK(p.paged.n_free == 1);
    CHECK(p.paged.n_evictable == 1);
    um_paged_uncache(&p.paged, held);
    um_paged_uncache(&p.paged, let_go);
    um_paged_uncache(&p.paged, let_go);
    CHECK(p.paged.n_free == 2);
    CHECK(p.paged.n_evictable == 0);
    CHECK(!um_paged_is_cached(&p.paged, held));
    CHECK(um_paged_n_holders(&p.paged, held) == 1);
    um_paged_seq_free(&c);
    CHECK(p.paged.n_free == 3);
    CHECK(p.paged.n_evictable == 3);
}

/* Calls that other threads may make with other sequences while this one is written. */
TEST(append_in_steps) {
    AUTO_POOL p = make_pool(spec_of(UM_F16, 6));
    AUTO_SEQ a = make_seq(&p), other = make_seq(&p);
    append_tokens(&a, 0, 7);
    append_tokens(&other, 50, 3);
    AUTO_SEQ fork = fork_of(&a);
    uint32_t shared = block_of(&a, 1), tokens[12];
    for (uint32_t i = 0; i < 12; i++) {
        tokens[i] = i;
    }
    /* A block for the copy of the shared one, and a new block, are taken. No token is visible
     * yet. */
    AUTO_FREE void *k = make_rows(&p.paged.spec, 0, 0, tokens + 7, 5, UM_F32, UM_KV_TOKEN_MAJOR);
    AUTO_FREE void *v = make_rows(&p.paged.spec, 0, 1, tokens + 7, 5, UM_F32, UM_KV_TOKEN_MAJOR);
    um_paged_pending pending;
    CHECK_OK(um_paged_append_begin(&pending, &a, 0, k, v, UM_F32, UM_KV_TOKEN_MAJOR, 5, &test_err));
    CHECK_EQ(um_paged_n_in_use(&p.paged), 5);
    CHECK(block_of(&a, 1) == shared);
    CHECK(um_paged_n_holders(&p.paged, shared) == 2);
    check_count_from(&a, 0, 7);
    /* Other sequences release and take blocks, but not those that are being written. */
    um_paged_seq_free(&other);
    CHECK_EQ(um_paged_n_in_use(&p.paged), 4);
    CHECK_FULL(UM_PAGED_FULL, append(&fork, 1, tokens, 11, UM_F32, UM_KV_HEAD_MAJOR), 6, 4, 3);
    um_paged_append_write(&pending);
    check_count_from(&a, 0, 7);
    /* The sequence holds the shared block until the end, so that the fork does not write to it. */
    append_tokens(&fork, 60, 1);
    CHECK(block_of(&a, 1) == shared);
    CHECK(block_of(&fork, 1) != shared);
    um_paged_append_end(&pending);
    CHECK(block_of(&a, 1) != shared);
    CHECK(um_paged_n_holders(&p.paged, shared) == 0);
    check_tokens(&a, 0, tokens, 12);
    check_tokens(&a, 1, tokens, 7);
    uint32_t of_fork[] = {0, 1, 2, 3, 4, 5, 6, 60};
    check_tokens(&fork, 1, of_fork, 8);
    CHECK_EQ(um_paged_n_in_use(&p.paged), 4);
    um_paged_rollback(&a);
    CHECK_OK(um_paged_crop(&a, 5, &test_err));
    check_count_from(&a, 0, 5);
}

TEST(steps_that_do_nothing) {
    static const float k[200], v[200];
    AUTO_POOL p = make_pool(spec_of(UM_F16, 6));
    AUTO_SEQ a = make_seq(&p);
    um_paged_pending pending;
    append_tokens(&a, 0, 5);
    AUTO_SEQ fork = fork_of(&a);
    append_tokens(&fork, 5, 3);
    /* Without tokens no step does anything. */
    CHECK_OK(um_paged_append_begin(&pending, &a, 1, k, v, UM_F32, UM_KV_HEAD_MAJOR, 0, &test_err));
    um_paged_append_write(&pending);
    um_paged_append_end(&pending);
    check_count_from(&a, 0, 5);
    /* A refused call changes nothing. */
    um_paged before = p.paged;
    memset(&pending, 0xCC, sizeof pending);
    um_paged_pending untouched = pending;
    CHECK_FULL(
        UM_PAGED_FULL,
        um_paged_append_begin(&pending, &a, 0, k, v, UM_F32, UM_KV_HEAD_MAJOR, 26, &test_err), 6, 2,
        6);
    CHECK_INVALID(
        um_paged_append_begin(&pending, &a, 2, k, v, UM_F32, UM_KV_HEAD_MAJOR, 1, &test_err));
    CHECK_INVALID(um_paged_append_all_begin(&pending, &a, k, v, (um_dtype)9, &test_err));
    CHECK(memcmp(&before, &p.paged, sizeof before) == 0);
    CHECK(memcmp(&untouched, &pending, sizeof pending) == 0);
}
