/* The steps of a block: which are committed, which are of a file, and the bitmaps. */
#include "blocks.h"

enum { N_STEPS = 130 }; /* more than two words of the bitmap */

TEST(is_committed) {
    um_block block = make_block(4 * page, of(UM_PAGES_4K, UM_SHARING_NONE, 8 * page));
    struct {
        size_t offset, nbytes;
        bool committed;
    } ranges[] = {{0, 4 * page, true},      {0, 4 * page + 1, false},
                  {4 * page, 0, true},      {8 * page, 0, true},
                  {8 * page + 1, 0, false}, {8 * page, 1, false},
                  {4 * page - 1, 1, true},  {4 * page, 1, false},
                  {SIZE_MAX, 0, false},     {SIZE_MAX, 1, false},
                  {1, SIZE_MAX, false},     {0, SIZE_MAX, false},
                  {0, 8 * page + 1, false}, {0, 0, true}};
    for (int gap = 0; gap < 2; gap++) {
        for (size_t i = 0; i < COUNT(ranges); i++) {
            CHECK((um_block_is_committed(&block, ranges[i].offset, ranges[i].nbytes) != 0) ==
                  ranges[i].committed);
        }
        commit(&block, 7 * page, page); /* now with a bitmap */
    }
    unmap_block(&block);
    CHECK(um_block_is_committed(&block, 0, 0));
    CHECK(!um_block_is_committed(&block, 0, 1));
}

TEST(is_overlaid) {
    enum { RESERVED = 12 };
    AUTO_FD fd = memory_file(3 * page);
    AUTO_BLOCK block = make_block(page, of(UM_PAGES_4K, UM_SHARING_NONE, RESERVED * page));
    CHECK(!um_block_is_overlaid(&block, 0, RESERVED * page)); /* without a bitmap */
    CHECK_OK(um_block_overlay(&block, 2 * page, fd, 0, 3 * page, &test_err));
    CHECK(um_block_is_overlaid(&block, 0, RESERVED * page));
    CHECK(um_block_is_overlaid(&block, 5 * page - 1, page));
    CHECK(um_block_is_overlaid(&block, 2 * page - 1, 2));
    CHECK(!um_block_is_overlaid(&block, 0, 2 * page));
    CHECK(!um_block_is_overlaid(&block, 5 * page, page));
    CHECK(!um_block_is_overlaid(&block, 3 * page, 0));
    CHECK(!um_block_is_overlaid(&block, 3 * page, SIZE_MAX));
    release(&block, 2 * page, 2 * page, 2 * page);
    CHECK(!um_block_is_overlaid(&block, 2 * page, 2 * page));
    CHECK(um_block_is_overlaid(&block, 4 * page, page));
}

/* The contents of each step; GAP: it is not committed. */
enum { GAP = -1 };

static void check_model(const um_block *block, const int *steps) {
    size_t n_committed = 0, n_usable = 0;
    bool right = true;
    for (size_t i = 0; i < N_STEPS; i++) {
        bool there = um_block_is_committed(block, i * page, page) != 0;
        n_committed += steps[i] != GAP;
        n_usable += n_usable == i && steps[i] != GAP;
        right = right && there == (steps[i] != GAP);
        right = right && (!there ||
                          is_filled((char *)block->base + i * page, page, (unsigned char)steps[i]));
    }
    CHECK(right);
    CHECK_EQ(block->committed_nbytes, n_committed * page);
    CHECK_EQ(block->nbytes, n_usable * page);
    CHECK(block->committed != NULL || n_usable == n_committed);
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).mapped_bytes, n_committed * page);
}

static void check_random_order(um_sharing sharing, uint64_t seed) {
    AUTO_BLOCK block = make_block(3 * page, of(UM_PAGES_4K, sharing, N_STEPS * page));
    int steps[N_STEPS];
    for (size_t i = 0; i < N_STEPS; i++) {
        steps[i] = i < 3 ? 0 : GAP;
    }
    for (int round = 0; round < 300; round++) {
        uint64_t r = test_random(&seed);
        size_t first = (size_t)(r % N_STEPS), most = N_STEPS - first;
        size_t n = (size_t)(r >> 16) % (r >> 60 == 0 ? most : most < 20 ? most : 20) + 1;
        if ((r >> 40 & 1) != 0) {
            commit(&block, first * page, n * page);
            for (size_t i = first; i < first + n; i++) {
                steps[i] = steps[i] == GAP ? 0 : steps[i];
            }
        } else {
            size_t n_there = 0;
            for (size_t i = first; i < first + n; i++) {
                n_there += steps[i] != GAP;
                steps[i] = GAP;
            }
            release(&block, first * page, n * page, n_there * page);
        }
        for (size_t i = first; i < first + n && steps[i] != GAP; i++) {
            steps[i] = round % 250 + 1;
            memset(bytes_of(&block, i * page), steps[i], page);
        }
        check_model(&block, steps);
    }
}

TEST(any_order) {
    for (uint64_t seed = 1; seed <= 3; seed++) {
        check_random_order(UM_SHARING_NONE, seed);
        check_random_order(UM_SHARING_MEMFD, seed);
    }
}

/* The first gap needs a bitmap; without memory for it, nothing changes. */
TEST(heap_faults) {
    um_block block = make_block(4 * page, of(UM_PAGES_4K, UM_SHARING_MEMFD, 8 * page)),
             copy = block;
    size_t out = 12345;
    memset(block.base, 1, block.nbytes);
    os_state_begin();
    fault_os_fail_nth_alloc(1);
    CHECK_STATUS(UM_E_NOMEM, um_block_commit(&block, 6 * page, page, &test_err));
    CHECK_OS_ERR(ENOMEM, "calloc");
    fault_os_fail_nth_alloc(1);
    CHECK_STATUS(UM_E_NOMEM, um_block_release(&block, page, page, &out, &test_err));
    /* An unused bitmap is freed (AddressSanitizer would report a leak). */
    fault_os_fail_nth(1, EPERM);
    CHECK_STATUS(UM_E_OS, um_block_commit(&block, 6 * page, page, &test_err));
    fault_os_fail_nth(1, EPERM);
    CHECK_STATUS(UM_E_OS, um_block_release(&block, page, page, &out, &test_err));
    fault_os_fail_nth(2, EPERM);
    CHECK_STATUS(UM_E_OS, um_block_release(&block, page, page, &out, &test_err));
    fault_os_fail_nth(0, 0);
    CHECK(out == 12345);
    CHECK(memcmp(&block, &copy, sizeof copy) == 0);
    CHECK(is_filled(block.base, block.nbytes, 1));
    CHECK(os_state_unchanged());
    /* Growing and shrinking at the end needs no bitmap. */
    fault_os_fail_nth_alloc(1);
    commit(&block, 2 * page, 5 * page);
    release(&block, 3 * page, 4 * page, 4 * page);
    CHECK_EQ(fault_os_allocs(), 0);
    unmap_block(&block);
}
