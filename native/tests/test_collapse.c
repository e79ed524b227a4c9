/* Collapsing: small pages of a block, and of the images of mirrored memory, become huge pages. */
#include "mirrors.h"

/* A block of four huge pages; the first and the third have small pages. */
static um_block make_scattered(um_sharing sharing) {
    um_block block =
        make_block(4 * huge_page,
                   OPTIONS(.pages = UM_PAGES_THP, .category = UM_CAT_SCRATCH, .sharing = sharing));
    unsigned char *bytes = block.base;
    CHECK_OK(um_block_advise(&block, UM_ADVICE_NOHUGEPAGE, &test_err));
    memset(bytes + page, 5, 3 * page);
    memset(bytes + 3 * huge_page - page, 6, page);
    CHECK_EQ(placement_of(&block).huge_bytes, 0);
    CHECK_OK(um_block_advise(&block, UM_ADVICE_HUGEPAGE, &test_err));
    return block;
}

static void check_collapse(um_sharing sharing) {
    AUTO_BLOCK block = make_scattered(sharing);
    unsigned char *bytes = block.base;
    um_status status = um_block_collapse(&block, &test_err);
    if (status != UM_OK) {
        CHECK(status == UM_E_OS || status == UM_E_NOMEM);
        test_skip(strerror(test_err.os_errno));
    } else {
        um_placement p = placement_of(&block);
        CHECK_EQ(p.huge_bytes, 2 * huge_page);
        CHECK_EQ(p.resident_bytes, 2 * huge_page); /* untouched pages are not in RAM */
        CHECK(is_filled(bytes, page, 0));
        CHECK(is_filled(bytes + page, 3 * page, 5));
        CHECK(is_filled(bytes + 4 * page, huge_page - 4 * page, 0));
        CHECK(is_filled(bytes + 3 * huge_page - page, page, 6));
        CHECK_OK(um_block_collapse(&block, &test_err)); /* huge pages are left as they are */
    }
}

TEST(collapse) {
    SKIP_UNLESS(huge_page != 0, "the kernel has no huge pages");
    check_collapse(UM_SHARING_NONE);
    check_collapse(UM_SHARING_MEMFD);
    AUTO_BLOCK block = make_pages(2 * huge_page, UM_PAGES_4K);
    memset(block.base, 1, block.nbytes);
    CHECK_STATUS(UM_E_OS, um_block_collapse(&block, &test_err));
    CHECK_OS_ERR(EINVAL, "madvise");
    unmap_block(&block);
    /* It is too small for a huge page. */
    block = make_pages(3 * page, UM_PAGES_AUTO);
    memset(block.base, 1, block.nbytes);
    CHECK_OK(um_block_collapse(&block, &test_err));
}

/* The system calls of one collapse: mincore, madvise, mincore, mincore, madvise, mincore. */
TEST(collapse_answers) {
    SKIP_UNLESS(gives_huge_pages(2), "the kernel gives no huge pages");
    AUTO_BLOCK block = make_scattered(UM_SHARING_NONE);
    fault_os_fail_nth(2, EBUSY); /* no room in the memory cgroup */
    CHECK_STATUS(UM_E_NOMEM, um_block_collapse(&block, &test_err));
    CHECK_OS_ERR(EBUSY, "madvise");
    fault_os_fail_nth(2, EAGAIN); /* a busy page is tried again */
    CHECK_OK(um_block_collapse(&block, &test_err));
    CHECK_EQ(fault_os_calls_of("um__os_advise"), 3);
    fault_os_fail_nth(1, ENOMEM);
    CHECK_STATUS(UM_E_NOMEM, um_block_collapse(&block, &test_err));
    CHECK_STR(test_err.what, "mincore");
}

static um_status run_collapse(void *context, um_error *err) {
    return um_block_collapse(context, err);
}

/* With a block in three parts. */
TEST(failures) {
    SKIP_UNLESS(gives_huge_pages(3), "the kernel gives no huge pages");
    AUTO_BLOCK block =
        make_block(huge_page, OPTIONS(.pages = UM_PAGES_THP, .category = UM_CAT_SCRATCH,
                                      .reserve_nbytes = 5 * huge_page));
    commit(&block, 2 * huge_page, huge_page);
    commit(&block, 4 * huge_page, huge_page);
    memset(bytes_of(&block, 4 * huge_page), 1, huge_page);
    CHECK_EACH_FAULT(run_collapse, NULL, &block, block, NULL);
}

/* `halves`: the size of a piece, in halves of a huge page. `huge_halves`: how much of the memory
 * can be in huge pages, in the same unit. */
static void check_images(size_t n_pieces, size_t halves, size_t huge_halves) {
    size_t m = halves * huge_page / 2;
    AUTO_BLOCK block = make_mirror(n_pieces, m, UM_PAGES_THP);
    bool whole = halves % 2 == 0;
    CHECK_EQ(block.step_nbytes, whole ? huge_page : page);
    CHECK_EQ((uintptr_t)block.base % huge_page, 0);
    CHECK_OK(um_block_collapse(&block, &test_err)); /* no page is in RAM */
    CHECK_EQ(placement_of(&block).resident_bytes, 0);
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, 1, NULL, &test_err));
    fill_images(&block);
    um_status status = um_block_collapse(&block, &test_err);
    if (status != UM_OK) {
        test_skip(test_err.what);
        unmap_block(&block);
        return;
    }
    CHECK_EQ(faults_of_reading(&block), 0); /* through any image */
    check_placed(&block, huge_halves == 0 ? UM_PAGES_4K : UM_PAGES_THP,
                 huge_halves == 0 ? page : huge_page, n_pieces * m, huge_halves * huge_page / 2, 0);
    for (size_t i = 0; i < 2 * n_pieces; i++) {
        CHECK(is_filled(image(&block, i), m, (unsigned char)(i / 2 * 2 + 1)));
    }
    /* Less than a huge page is given back only where that is a whole step. */
    size_t out, gone = whole ? 0 : page;
    CHECK_OK(um_block_discard(&block, m + m / 2, page, &out, &test_err));
    CHECK_EQ(out, gone);
    CHECK_EQ(file_bytes(&block), n_pieces * m - gone);
    CHECK_EQ(faults_of_reading(&block) > 0, gone > 0);
    CHECK_OK(um_block_discard(&block, 0, 2 * m, &out, &test_err));
    CHECK_EQ(out, m);
    CHECK_EQ(placement_of(&block).resident_bytes, (n_pieces - 1) * m);
    CHECK_EQ(file_bytes(&block), (n_pieces - 1) * m);
}

TEST(images) {
    SKIP_UNLESS(huge_page != 0, "the kernel has none");
    check_images(3, 2, 6);
    check_images(2, 4, 8);
    check_images(3, 1, 0);
    check_images(4, 3, 8); /* in each pair, one image is aligned as its place in the file is */
    AUTO_BLOCK block = make_mirror(2, huge_page, UM_PAGES_4K);
    fill_images(&block);
    CHECK_STATUS(UM_E_OS, um_block_collapse(&block, &test_err));
    CHECK_EQ(placement_of(&block).huge_bytes, 0);
}

static um_status run_collapse_images(void *context, um_error *err) {
    um_block *block = context;
    um_status status = um_block_collapse(block, err);
    CHECK(is_filled(image(block, 0), 2 * block->mirror_nbytes, 1));
    return status;
}

TEST(failures_of_images) {
    AUTO_BLOCK block = make_mirror(2, huge_page, UM_PAGES_THP);
    fill_images(&block);
    if (huge_page == 0 || um_block_collapse(&block, NULL) != UM_OK) {
        test_skip("there are no huge pages");
    } else {
        CHECK_EACH_FAULT(run_collapse_images, NULL, &block, block, NULL);
    }
}
