/* Discarding: pages go back to the system and stay committed. */
#include "blocks.h"

enum { N_STEPS = 10 };

static um_block make_steps(um_pages pages, um_sharing sharing, size_t step) {
    return make_block(N_STEPS * step,
                      OPTIONS(.pages = pages, .category = UM_CAT_HISTORY, .sharing = sharing));
}

static unsigned char *at(const um_block *block, size_t n_steps) {
    return (unsigned char *)block->base + n_steps * block->step_nbytes;
}

static void fill(const um_block *block) {
    for (size_t i = 0; i < N_STEPS; i++) {
        memset(at(block, i), (int)i + 1, block->step_nbytes);
    }
}

/* Whether steps [first, end) read as zeros, and all others as they were filled. */
static bool is_discarded(const um_block *block, size_t first, size_t end) {
    bool right = true;
    for (size_t i = 0; i < N_STEPS; i++) {
        bool gone = i >= first && i < end;
        right =
            right && is_filled(at(block, i), block->step_nbytes, gone ? 0 : (unsigned char)(i + 1));
    }
    return right;
}

static void discard(um_block *block, size_t offset, size_t nbytes, size_t discarded) {
    size_t out = 12345;
    um_block copy = *block;
    fault_os_fail_nth(0, 0);
    CHECK_OK(um_block_discard(block, offset, nbytes, &out, &test_err));
    CHECK_EQ(fault_os_calls(), discarded == 0 ? 0 : 1);
    CHECK_EQ(out, discarded);
    CHECK(memcmp(block, &copy, sizeof copy) == 0); /* still committed */
}

static void check_steps(um_block *block) {
    size_t step = block->step_nbytes;
    uint64_t entered = ledger_row(UM_CAT_HISTORY).mapped_bytes;
    fill(block);
    CHECK_EQ(placement_of(block).resident_bytes, N_STEPS * step);
    discard(block, 2 * step + 1, 4 * step, 3 * step); /* only whole steps inside the range */
    uint64_t resident;
    CHECK_OK(um_block_resident(block, 3 * step, 3 * step, &resident, &test_err));
    CHECK_EQ(resident, 0);
    CHECK_EQ(placement_of(block).resident_bytes, (N_STEPS - 3) * step);
    if (block->sharing != UM_SHARING_NONE) {
        CHECK_EQ(file_bytes(block), (N_STEPS - 3) * step);
    }
    CHECK(is_discarded(block, 3, 6));
    discard(block, step + 1, step, 0);
    discard(block, step + 1, step - 2, 0);
    discard(block, 0, 0, 0);
    discard(block, N_STEPS * step, 0, 0);
    fill(block);
    CHECK(is_discarded(block, 0, 0));
    discard(block, 0, N_STEPS * step, N_STEPS * step);
    CHECK_EQ(placement_of(block).resident_bytes, 0);
    CHECK(is_discarded(block, 0, N_STEPS));
    CHECK_OK(um_block_discard(block, 0, step, NULL, &test_err));
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).mapped_bytes, entered);
}

TEST(small_pages) {
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        AUTO_BLOCK block = make_steps(UM_PAGES_4K, sharing, page);
        check_steps(&block);
    }
}

TEST(huge_pages) {
    SKIP_UNLESS(huge_page != 0, "the kernel has none");
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        AUTO_BLOCK block = make_steps(UM_PAGES_THP, sharing, huge_page);
        fill(&block);
        if (sharing != UM_SHARING_NONE) {
            (void)um_block_collapse(&block, NULL); /* small pages will do as well */
        }
        check_steps(&block);
    }
}

static void check_refused(um_block *block, size_t offset, size_t nbytes) {
    um_block copy = *block;
    size_t out = 12345;
    fault_os_fail_nth(0, 0);
    CHECK_INVALID(um_block_discard(block, offset, nbytes, &out, &test_err));
    CHECK(um_block_discard(block, offset, nbytes, NULL, NULL) == UM_E_INVALID);
    CHECK_EQ(fault_os_calls(), 0);
    CHECK(out == 12345);
    CHECK(memcmp(block, &copy, sizeof copy) == 0);
}

TEST(hugetlb) {
    BORROW_HUGE_PAGES(N_STEPS);
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        AUTO_BLOCK block = make_steps(UM_PAGES_2M, sharing, HUGE_BYTES);
        fill(&block);
        check_refused(&block, 0, block.nbytes);
        CHECK(is_discarded(&block, 0, 0));
    }
}

TEST(refused) {
    AUTO_BLOCK block = make_steps(UM_PAGES_4K, UM_SHARING_MEMFD, page);
    um_block other;
    fill(&block);
    check_refused(&block, 0, N_STEPS * page + 1);
    check_refused(&block, N_STEPS * page + 1, 0);
    check_refused(&block, page, SIZE_MAX);
    CHECK_OK(
        um_block_map_file(&other, block.fd, 0, page, UM_ACCESS_SHARED, UM_CAT_HISTORY, &test_err));
    check_refused(&other, 0, page);
    unmap_block(&other);
    CHECK_OK(um_block_attach(&other, block.fd, UM_ACCESS_READ, UM_CAT_HISTORY, &test_err));
    check_refused(&other, 0, page);
    unmap_block(&other);
    CHECK_OK(um_block_attach(&other, block.fd, UM_ACCESS_SHARED, UM_CAT_HISTORY, &test_err));
    discard(&other, 0, page, page);
    CHECK(is_discarded(&block, 0, 1)); /* both blocks share the memory */
    unmap_block(&other);
    CHECK_OK(um_block_release(&block, 4 * page, page, NULL, &test_err));
    check_refused(&block, 3 * page, 2 * page);
    check_refused(&block, 4 * page + 1, 1);
    discard(&block, 5 * page, 5 * page, 5 * page);
    unmap_block(&block);
    check_refused(&block, 0, 1);

    block = make_steps(UM_PAGES_4K, UM_SHARING_NONE, page);
    fill(&block);
    for (int lock = UM_LOCK_NOW; lock <= UM_LOCK_ONFAULT; lock++) {
        if (um_block_lock(&block, (um_lock)lock, NULL) != UM_OK) {
            test_skip("this process may not lock memory");
        } else {
            check_refused(&block, 0, page);
        }
    }
    CHECK_OK(um_block_lock(&block, UM_LOCK_NONE, &test_err));
    CHECK(is_discarded(&block, 0, 0));
}

typedef struct discarding {
    um_block block;
    size_t out_nbytes;
} discarding;

static um_status run_discard(void *context, um_error *err) {
    discarding *d = context;
    um_status status = um_block_discard(&d->block, page, 4 * page, &d->out_nbytes, err);
    CHECK(is_discarded(&d->block, 1, status == UM_OK ? 5 : 1));
    return status;
}

static void undo_discard(void *context) {
    discarding *d = context;
    d->out_nbytes = 12345;
    fill(&d->block);
}

TEST(faults) {
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        discarding d = {.block = make_steps(UM_PAGES_4K, sharing, page), .out_nbytes = 12345};
        fill(&d.block);
        CHECK_EACH_FAULT(run_discard, undo_discard, &d, d, NULL);
        unmap_block(&d.block);
    }
}
