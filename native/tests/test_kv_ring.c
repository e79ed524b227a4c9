/* Rings: the last tokens are one contiguous array, overwritten tokens are not visible, and crop
 * says how far back it can go. test_kv_random.c has all calls in any order. */
#include "kv_model.h"

/* 16 rows of 256 bytes are a page of 4096. */
static um_kv_spec spec_of(uint32_t batch, uint64_t window) {
    uint32_t head_dim = (uint32_t)(page_up(1) / 16 / 2 / 4);
    return (um_kv_spec){3, 2, head_dim, batch, .max_seq_len = 1000, window, UM_F32, UM_F32};
}

enum { ROWS = 16 };

static kv_model ring_model(uint32_t batch, uint64_t window) {
    kv_model m;
    make_model(&m, spec_of(batch, window), ROWS, ROWS, 4096, false);
    return m;
}

static void check_shown(const kv_model *m, uint64_t first, uint64_t next) {
    CHECK_EQ(um_kv_first_position(&m->kv), first);
    CHECK_EQ(um_kv_next_position(&m->kv), next);
    CHECK_EQ(um_kv_seq_len(&m->kv), next - first);
    for (uint32_t layer = 0; layer < m->spec.n_layers; layer++) {
        uint64_t at = 777;
        CHECK_EQ(um_kv_layer_len(&m->kv, layer, &at), next - first);
        CHECK_EQ(at, first);
    }
}

/* Twice around the ring, in steps of every size up to more than all rows. */
TEST(wrapping) {
    for (uint64_t n = 1; n <= 3 * ROWS; n++) {
        for (uint64_t window = ROWS - 3; window <= ROWS; window += 3) {
            AUTO_MODEL m = ring_model(n % 2 != 0 ? 1 : 3, window);
            for (uint64_t next = n; next <= 3 * ROWS + n; next += n) {
                append_everywhere(&m, n);
                check_shown(&m, next > window ? next - window : 0, next);
                CHECK_EQ(um_kv_row(&m.kv, next), next % ROWS);
            }
        }
    }
    AUTO_MODEL m = ring_model(1, ROWS);
    for (uint64_t next = 1; next <= 3 * ROWS; next++) {
        CHECK_EQ(do_append_all(&m, UM_F16), UM_OK);
        check_shown(&m, next > ROWS ? next - ROWS : 0, next);
    }
    /* Of more tokens than rows the last are kept, in both orders. */
    CHECK_EQ(do_append(&m, 0, 2 * ROWS + 5, UM_F16, UM_KV_TOKEN_MAJOR), UM_OK);
    CHECK_EQ(do_append(&m, 1, 2 * ROWS + 5, UM_F16, UM_KV_HEAD_MAJOR), UM_OK);
    CHECK_EQ(do_append(&m, 2, 0, UM_F16, UM_KV_HEAD_MAJOR), UM_OK);
    CHECK_EQ(do_append(&m, 2, 2 * ROWS + 5, UM_BF16, UM_KV_TOKEN_MAJOR), UM_OK);
    check_shown(&m, 4 * ROWS + 5, 5 * ROWS + 5);
}

TEST(refused) {
    AUTO_MODEL m = ring_model(1, 12);
    um_kv *kv = &m.kv;
    append_everywhere(&m, 20);
    CHECK_EQ(do_trim(&m, 3, 1), UM_E_INVALID);
    CHECK_EQ(do_trim(&m, 100, UINT64_MAX), UM_E_INVALID);
    CHECK(um_kv_trim(kv, 3, 1, NULL) == UM_E_INVALID);
    CHECK_EQ(do_set_usable(&m, ROWS), UM_E_INVALID);
    CHECK_EQ(do_set_usable(&m, 0), UM_E_INVALID);
    CHECK_EQ(do_move(&m, 0), UM_E_INVALID);
    CHECK_EQ(do_move(&m, 4), UM_E_INVALID);
    CHECK_EQ(do_adopt(&m, 100, 13), UM_E_INVALID);
    CHECK_EQ(do_adopt(&m, 11, 12), UM_E_INVALID);
    CHECK_EQ(do_crop(&m, 13), UM_E_INVALID);
    CHECK_EQ(do_reserve(&m, ROWS + 1), UM_E_FULL);
    CHECK_ROOM(ROWS, 0, ROWS + 1);
    uint64_t row = 777;
    CHECK_REFUSED(UM_E_INVALID, &m, um_kv_reserve(kv, 0, &row, &test_err));
    CHECK_REFUSED(UM_E_FULL, &m, um_kv_reserve(kv, UINT64_MAX, &row, &test_err));
    CHECK_EQ(row, 777);
    /* Tokens before the window are kept, but not visible. */
    CHECK_EQ(do_read(&m, 0, 0, 7, 1, UM_F32), UM_E_INVALID);
    CHECK_EQ(do_read(&m, 0, 0, 8, 12, UM_F32), UM_OK);
    CHECK_EQ(do_read(&m, 0, 0, 8, 13, UM_F32), UM_E_INVALID);
}

/* A window of 12 in 16 rows: 4 more tokens are kept than are visible. */
TEST(crop) {
    AUTO_MODEL m = ring_model(3, 12);
    append_everywhere(&m, 9);
    CHECK_EQ(do_crop(&m, 0), UM_OK);
    check_shown(&m, 0, 0);
    append_everywhere(&m, 40);
    check_shown(&m, 28, 40);
    /* Exactly the smallest n that works, and one less. */
    CHECK_EQ(do_crop(&m, 7), UM_E_INVALID);
    CHECK_EQ(test_err.detail, UM_KV_OVERWRITTEN);
    CHECK_EQ(test_err.limit, 8);
    CHECK_EQ(do_crop(&m, 0), UM_E_INVALID);
    CHECK_EQ(test_err.limit, 8);
    CHECK(um_kv_crop(&m.kv, 7, NULL) == UM_E_INVALID);
    CHECK_EQ(do_crop(&m, 8), UM_OK);
    check_shown(&m, 24, 36);
    CHECK_EQ(do_crop(&m, 12), UM_OK);
    CHECK_EQ(do_crop(&m, 11), UM_E_INVALID);
    CHECK_EQ(test_err.limit, 12);
    /* New tokens overwrite no older ones until they pass the previous end. */
    append_everywhere(&m, 4);
    CHECK_EQ(do_crop(&m, 8), UM_OK);
    append_everywhere(&m, 5);
    check_shown(&m, 29, 41);
    CHECK_EQ(do_crop(&m, 7), UM_E_INVALID);
    CHECK_EQ(test_err.limit, 8);
}

/* What was not saved is not there; what was dropped leaves the window short. */
TEST(crop_of_adopted_tokens) {
    AUTO_MODEL m = ring_model(2, 12);
    um_kv *kv = &m.kv;
    CHECK_EQ(do_adopt(&m, 40, 12), UM_OK);
    check_shown(&m, 28, 40);
    CHECK_EQ(um_kv_oldest_position(kv), 28);
    CHECK_EQ(um_kv_lowest_crop(kv), 40);
    CHECK_EQ(um_kv_lost_before(kv, 39), 28);
    CHECK_EQ(um_kv_lost_before(kv, 40), 0);
    CHECK_EQ(do_crop(&m, 11), UM_E_INVALID);
    CHECK_EQ(test_err.limit, 12);
    append_everywhere(&m, 3);
    CHECK_EQ(um_kv_lowest_crop(kv), 40);
    CHECK_EQ(do_crop(&m, 9), UM_OK);
    check_shown(&m, 28, 40);
    /* All tokens from the beginning on, and some that are left of a trim. */
    CHECK_EQ(do_adopt(&m, 12, 12), UM_OK);
    CHECK_EQ(do_crop(&m, 3), UM_OK);
    check_shown(&m, 0, 3);
    CHECK_EQ(do_adopt(&m, 40, 11), UM_OK);
    CHECK_EQ(um_kv_lowest_crop(kv), 29);
    CHECK_EQ(do_crop(&m, 3), UM_OK);
    check_shown(&m, 29, 32);
    CHECK_EQ(do_adopt(&m, UINT64_MAX, 12), UM_OK);
    CHECK_EQ(um_kv_seq_len(kv), 12);
}

/* A ring beside a plain cache of other layers, which says where tokens begin, and how many fit. */
TEST(beside_another) {
    AUTO_MODEL m = ring_model(1, 12);
    um_kv *kv = &m.kv;
    append_everywhere(&m, 20);
    uint64_t row = 777;
    um_kv_limit_end(kv, 21);
    CHECK_REFUSED(UM_E_FULL, &m, um_kv_append_begin(kv, 0, 2, &row, &test_err));
    CHECK_EQ(test_err.detail, UM_KV_ROWS);
    CHECK_ROOM(21, 20, 2);
    CHECK_EQ(um_kv_append_begin(kv, 0, 1, &row, &test_err), UM_OK);
    um_kv_limit_end(kv, UINT64_MAX);
    /* Tokens before 4 are overwritten: a window that ends at 15 would show one of them. */
    CHECK_EQ(um_kv_lowest_crop(kv), 16);
    CHECK_EQ(um_kv_lost_before(kv, 15), 4);
    CHECK_EQ(um_kv_lost_before(kv, 16), 0);
    CHECK_EQ(um_kv_lost_before(kv, 3), 3);
    CHECK_REFUSED(UM_E_INVALID, &m, um_kv_crop_to(kv, 15, &test_err));
    CHECK_REFUSED(UM_E_INVALID, &m, um_kv_crop_to(kv, 21, &test_err));
    CHECK_EQ(um_kv_crop_to(kv, 16, &test_err), UM_OK);
    check_shown(&m, 4, 16);
    /* Tokens that others begin with, and that this ring never had. */
    um_kv_set_first(kv, 2, 10);
    check_shown(&m, 10, 16);
    CHECK_EQ(um_kv_lost_before(kv, 16), 10);
    CHECK_EQ(um_kv_lowest_crop(kv), 16);
    um_kv_set_first(kv, 12, 12);
    check_shown(&m, 12, 16);
    CHECK_EQ(um_kv_lost_before(kv, 16), 0);
    CHECK_EQ(um_kv_lowest_crop(kv), 12);
    um_kv_rollback_to(kv, 14);
    check_shown(&m, 12, 14);
    um_kv_rollback_to(kv, 3);
    check_shown(&m, 12, 12);
}
