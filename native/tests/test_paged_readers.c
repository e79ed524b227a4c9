/* Paged KV memory: a reader beside the writer never sees half of what is written. */
#include "paged_pool.h"
#include <signal.h>

enum { READ_TOKENS = 3000, READ_HEADS = 2 };
static um_paged_seq *read_seq;
static _Atomic bool read_torn;

/* Every value of token t is t. */
static void *read_all(void *arg) {
    (void)arg;
    static float out[READ_HEADS][READ_TOKENS];
    uint64_t n = 0;
    while (n < READ_TOKENS) {
        n = um_paged_seq_len(read_seq);
        um_status status = um_paged_gather(read_seq, 0, 1, n, out, sizeof out[0], UM_F32, NULL);
        bool same = status == UM_OK;
        for (uint64_t t = 0; t < n; t++) {
            same = same && out[0][t] == (float)t && out[1][t] == (float)t;
        }
        if (!same) {
            atomic_store(&read_torn, true);
        }
    }
    return NULL;
}

TEST(reader_beside_the_writer) {
    AUTO_POOL p =
        make_pool((um_paged_spec){1, READ_HEADS, 1, READ_TOKENS / 4 + 2, 4, UM_F32, UM_F32});
    AUTO_SEQ seq = make_seq(&p), other = {0};
    read_seq = &seq;
    pthread_t reader = start_thread(read_all, NULL);
    for (uint32_t t = 0; t < READ_TOKENS; t++) {
        float row[READ_HEADS] = {(float)t, (float)t};
        CHECK_OK(um_paged_append(&seq, 0, row, row, UM_F32, UM_KV_TOKEN_MAJOR, 1, &test_err));
        if (t % 8 == 5) { /* the next append copies the tail */
            um_paged_seq_free(&other);
            other = fork_of(&seq);
        } else if (t % 8 == 6) {
            row[0] = row[1] = -1;
            CHECK_OK(um_paged_append(&other, 0, row, row, UM_F32, UM_KV_TOKEN_MAJOR, 1, &test_err));
        }
    }
    REQUIRE(pthread_join(reader, NULL) == 0);
    CHECK(!atomic_load(&read_torn));
}

/* The writer interrupts a gather while it copies a block, as another thread could: the writer gets
 * a copy of the block, the fork that holds the block releases it, and a third sequence writes to
 * it. */
enum { TAIL = 4000, TAIL_HEADS = 2, TAIL_DIM = 8 };
static um_paged_seq gathered, forked, third;
static float good_rows[TAIL * TAIL_HEADS * TAIL_DIM], bad_rows[TAIL * TAIL_HEADS * TAIL_DIM];
static volatile sig_atomic_t n_takeovers;

static void take_over(int signal) {
    (void)signal;
    if (forked.n_blocks == 0) {
        return;
    }
    um_status status =
        um_paged_append(&gathered, 0, bad_rows, bad_rows, UM_F32, UM_KV_TOKEN_MAJOR, 1, NULL);
    um_paged_seq_clear(&forked);
    if (status == UM_OK && um_paged_append(&third, 0, bad_rows, bad_rows, UM_F32, UM_KV_TOKEN_MAJOR,
                                           TAIL, NULL) == UM_OK) {
        n_takeovers = n_takeovers + 1;
    }
}

TEST(a_copied_block_is_gathered_whole) {
    static float out[TAIL * TAIL_HEADS * TAIL_DIM];
    size_t stride = sizeof out / TAIL_HEADS;
    AUTO_POOL p = make_pool((um_paged_spec){1, TAIL_HEADS, TAIL_DIM, 3, TAIL + 1, UM_F32, UM_F32});
    gathered = make_seq(&p);
    third = make_seq(&p);
    for (size_t i = 0; i < TAIL * TAIL_HEADS * TAIL_DIM; i++) {
        good_rows[i] = (float)i;
        bad_rows[i] = -1;
    }
    for (int round = 0; round < 200 || (n_takeovers == 0 && round < 20000); round++) {
        um_paged_seq_clear(&gathered);
        um_paged_seq_clear(&third);
        CHECK_OK(um_paged_append(&gathered, 0, good_rows, good_rows, UM_F32, UM_KV_HEAD_MAJOR, TAIL,
                                 &test_err));
        um_paged_seq_free(&forked);
        forked = fork_of(&gathered);
        memset(out, 0, sizeof out);
        test_interrupt(take_over);
        um_status status =
            um_paged_gather(&gathered, 0, round % 2, TAIL, out, stride, UM_F32, NULL);
        test_interrupt(NULL);
        CHECK(status == UM_OK);
        CHECK(memcmp(out, good_rows, sizeof out) == 0);
    }
    CHECK(n_takeovers > 0);
    um_paged_seq_free(&gathered);
    um_paged_seq_free(&forked);
    um_paged_seq_free(&third);
}
