/* Growing: what is committed and released, what stays, and what is left when a call fails. */
#include "blocks.h"

static void check_growth(um_sharing sharing) {
    AUTO_BLOCK block = make_block(page + 1, of(UM_PAGES_4K, sharing, 9 * page + 1));
    const char *usable = sharing == UM_SHARING_NONE ? "rw-p" : "rw-s";
    CHECK_EQ(block.nbytes, 2 * page);
    CHECK_EQ(block.committed_nbytes, 2 * page);
    CHECK_EQ(block.reserved_nbytes, 10 * page);
    CHECK_EQ(block.step_nbytes, page);
    CHECK_EQ(block.requested_nbytes, page + 1);
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).mapped_bytes, 2 * page);
    memset(block.base, 1, 2 * page);
    CHECK_PAGES(block.base, "11--------");

    commit(&block, 2 * page, 1); /* whole steps */
    CHECK_EQ(block.nbytes, 3 * page);
    CHECK(block.committed == NULL);
    CHECK_PAGES(block.base, "110-------");
    CHECK_STR(os_state_permissions(bytes_of(&block, 3 * page - 1)), usable);

    commit(&block, 6 * page - 1, 2); /* after a gap, across a border of steps */
    CHECK_EQ(block.nbytes, 3 * page);
    CHECK_EQ(block.committed_nbytes, 5 * page);
    const uint64_t *bits = block.committed;
    CHECK(bits != NULL);
    CHECK(!um_block_is_committed(&block, 3 * page, 1));
    CHECK(um_block_is_committed(&block, 5 * page, 2 * page));
    CHECK(!um_block_is_committed(&block, 5 * page, 2 * page + 1));
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).mapped_bytes, 5 * page);
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).n_mappings, 1);
    memset(bytes_of(&block, 5 * page), 5, 2 * page);
    CHECK_PAGES(block.base, "110--55---");

    commit(&block, 0, 10 * page); /* fills the gaps; the rest stays as it is */
    CHECK_EQ(block.nbytes, 10 * page);
    CHECK(block.committed == bits); /* another thread may be walking them */
    CHECK_PAGES(block.base, "1100055000");
}

static void check_release(um_sharing sharing) {
    AUTO_BLOCK block = make_block(10 * page, of(UM_PAGES_4K, sharing, 0));
    unsigned char *bytes = block.base;
    memset(bytes, 3, block.nbytes);
    CHECK(has_vm_flag(bytes + 4 * page, "ac") == (sharing == UM_SHARING_NONE));
    release(&block, 3 * page + 1, 3 * page - 1, 2 * page); /* only whole steps inside the range */
    CHECK_PAGES(bytes, "3333--3333");
    CHECK(!has_vm_flag(bytes + 4 * page, "ac")); /* the commit charge has gone as well */
    CHECK_EQ(block.nbytes, 4 * page);
    CHECK_EQ(block.committed_nbytes, 8 * page);
    CHECK_EQ(placement_of(&block).resident_bytes, 8 * page);
    CHECK_EQ(ledger_row(UM_CAT_HISTORY).mapped_bytes, 8 * page);
    if (sharing != UM_SHARING_NONE) {
        CHECK_EQ(file_bytes(&block), 8 * page);
    }
    release(&block, 4 * page, 2 * page, 0); /* again */
    release(&block, 7 * page + 1, page, 0); /* no whole step */
    release(&block, 8 * page, 0, 0);
    release(&block, 5 * page, 3 * page, 2 * page);
    commit(&block, 4 * page, page);
    CHECK_PAGES(bytes, "33330---33"); /* released contents are lost */
    CHECK_EQ(block.nbytes, 5 * page);
    CHECK_OK(um_block_release(&block, 5 * page, 5 * page, NULL, &test_err));
    CHECK_EQ(block.committed_nbytes, block.nbytes); /* one piece again */
    release(&block, 0, page, page);
    CHECK_EQ(block.nbytes, 0);
    CHECK_EQ(block.committed_nbytes, 4 * page);
    CHECK_PAGES(bytes, "-3330-----");
    release(&block, 0, 10 * page, 4 * page);
    CHECK_EQ(block.committed_nbytes, 0);
    CHECK_EQ(placement_of(&block).resident_bytes, 0);
    commit(&block, 0, 10 * page);
    CHECK_PAGES(bytes, "0000000000");
}

TEST(one_at_a_time) {
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        check_growth(sharing);
        check_release(sharing);
    }
}

static void check_refused(um_block *block, size_t offset, size_t nbytes) {
    um_block copy = *block;
    size_t out = 12345;
    CHECK_INVALID(um_block_commit(block, offset, nbytes, &test_err));
    CHECK_INVALID(um_block_release(block, offset, nbytes, &out, &test_err));
    CHECK(um_block_commit(block, offset, nbytes, NULL) == UM_E_INVALID);
    CHECK(um_block_release(block, offset, nbytes, NULL, NULL) == UM_E_INVALID);
    CHECK(out == 12345);
    CHECK(memcmp(block, &copy, sizeof copy) == 0);
}

TEST(refused) {
    um_block block = make_block(4 * page, of(UM_PAGES_4K, UM_SHARING_MEMFD, 8 * page)), other;
    check_refused(&block, 0, 8 * page + 1);
    check_refused(&block, 8 * page, 1);
    check_refused(&block, 8 * page + 1, 0);
    check_refused(&block, SIZE_MAX, 2);
    check_refused(&block, page, SIZE_MAX);
    CHECK_OK(um_block_commit(&block, 8 * page, 0, &test_err));
    CHECK_OK(
        um_block_map_file(&other, block.fd, 0, page, UM_ACCESS_READ, UM_CAT_HISTORY, &test_err));
    check_refused(&other, 0, page);
    unmap_block(&other);
    /* Read-only memory counts as committed. It cannot be released. */
    CHECK_OK(um_block_attach(&other, block.fd, UM_ACCESS_READ, UM_CAT_HISTORY, &test_err));
    CHECK_OK(um_block_commit(&other, 0, 8 * page, &test_err));
    CHECK_INVALID(um_block_release(&other, 0, page, NULL, &test_err));
    unmap_block(&other);
    unmap_block(&block);
    check_refused(&block, 0, 1);
}

TEST(huge_steps) {
    SKIP_UNLESS(huge_page != 0, "the kernel has no huge pages");
    AUTO_BLOCK block = make_block(1, of(UM_PAGES_THP, UM_SHARING_NONE, 5 * huge_page + 1));
    CHECK_EQ(block.step_nbytes, huge_page);
    CHECK_EQ(block.reserved_nbytes, 6 * huge_page);
    CHECK_EQ((uintptr_t)block.base % huge_page, 0);
    commit(&block, huge_page + 1, 1);
    commit(&block, 3 * huge_page, 2 * huge_page);
    CHECK_EQ(block.nbytes, 2 * huge_page);
    CHECK_EQ(block.committed_nbytes, 4 * huge_page);
    CHECK(has_vm_flag(bytes_of(&block, 4 * huge_page), "hg"));
    CHECK_OK(um_block_warm(&block, 0, 2 * huge_page, 1, NULL, &test_err));
    CHECK_OK(um_block_warm(&block, 3 * huge_page, 2 * huge_page, 1, NULL, &test_err));
    uint64_t huge_bytes = placement_of(&block).huge_bytes;
    if (huge_bytes != 4 * huge_page) {
        test_skip("the kernel gave too few huge pages");
    } else {
        /* Less than a huge page is not released, and the other pages stay huge. */
        release(&block, 3 * huge_page + page, huge_page, 0);
        release(&block, 3 * huge_page, huge_page + page, huge_page);
        CHECK_EQ(placement_of(&block).huge_bytes, 3 * huge_page);
    }
}

static void check_hugetlb(um_sharing sharing, size_t huge) {
    uint64_t available = huge_pages_available();
    um_block block = make_block(huge, of(UM_PAGES_2M, sharing, 64 * huge));
    unsigned char *bytes = block.base;
    CHECK_EQ(block.step_nbytes, huge);
    CHECK_EQ(huge_pages_available(), available - 1); /* reserved address space takes none */
    commit(&block, 4 * huge, 2 * huge);
    CHECK_EQ(huge_pages_available(), available - 3);
    memset(bytes + 4 * huge, 4, 2 * huge);
    um_block copy = block;
    uint64_t word = block.committed[0];
    CHECK_STATUS(UM_E_NOMEM, um_block_commit(&block, 4 * huge, 60 * huge, &test_err));
    CHECK_STR(test_err.what, "mmap");
    REQUIRE(memcmp(&block, &copy, sizeof copy) == 0);
    CHECK_EQ(block.committed[0], word);
    CHECK_EQ(huge_pages_available(), available - 3);
    if (sharing == UM_SHARING_NONE) {
        /* In two parts: there is memory for the first only. */
        CHECK_STATUS(UM_E_NOMEM, um_block_commit(&block, 0, 64 * huge, &test_err));
        REQUIRE(memcmp(&block, &copy, sizeof copy) == 0);
        CHECK_EQ(block.committed[0], word);
        CHECK_EQ(huge_pages_available(), available - 3);
    }
    CHECK_STR(os_state_permissions(bytes + huge), "---p");
    CHECK(is_filled(bytes + 4 * huge, 2 * huge, 4));

    release(&block, 4 * huge + page, 2 * huge - page, huge);
    commit(&block, huge, 2 * huge);
    CHECK_EQ(huge_pages_available(), available - 4);
    release(&block, huge, 2 * huge, 2 * huge); /* never touched */
    CHECK_EQ(huge_pages_available(), available - 2);
    commit(&block, 5 * huge, huge);
    CHECK(is_filled(bytes + 4 * huge, huge, 4));
    CHECK(is_filled(bytes + 5 * huge, huge, 0));
    CHECK_EQ(placement_of(&block).huge_bytes, 2 * huge);
    unmap_block(&block);
    CHECK_EQ(huge_pages_available(), available);
}

TEST(hugetlb_steps) {
    BORROW_HUGE_PAGES(8);
    check_hugetlb(UM_SHARING_NONE, HUGE_BYTES);
    check_hugetlb(UM_SHARING_MEMFD, HUGE_BYTES);
}

/* Another mapping reads released memory as zeros. What was written through it to steps that are not
 * committed here is kept. */
TEST(other_processes_see_it) {
    AUTO_BLOCK block = make_block(4 * page, of(UM_PAGES_4K, UM_SHARING_MEMFD, 8 * page)), other;
    memset(block.base, 1, 4 * page);
    CHECK_OK(um_block_attach(&other, block.fd, UM_ACCESS_SHARED, UM_CAT_HISTORY, &test_err));
    CHECK_EQ(other.nbytes, 8 * page);
    CHECK(is_filled(other.base, 4 * page, 1));
    release(&block, page, page, page);
    CHECK(is_filled(bytes_of(&other, page), page, 0));
    memset(bytes_of(&other, 6 * page), 6, page);
    fault_os_fail_nth(3, EPERM); /* mmap, madvise twice */
    CHECK_STATUS(UM_E_OS, um_block_commit(&block, 6 * page, page, &test_err));
    fault_os_fail_nth(0, 0);
    CHECK(is_filled(bytes_of(&other, 6 * page), page, 6));
    commit(&block, 6 * page, page);
    CHECK(is_filled(bytes_of(&block, 6 * page), page, 6));
}

/* A single refusal of the kernel leaves the block as it was: its first list of steps goes. */
TEST(release_that_is_undone) {
    AUTO_BLOCK block = make_block(8 * page, of(UM_PAGES_4K, UM_SHARING_MEMFD, 0));
    memset(block.base, 9, block.nbytes);
    fault_os_fail_nth(2, EPERM); /* mmap, fallocate */
    CHECK_STATUS(UM_E_OS, um_block_release(&block, 2 * page, 2 * page, NULL, &test_err));
    fault_os_fail_nth(0, 0);
    CHECK_OS_ERR(EPERM, "fallocate");
    CHECK_EQ(block.committed_nbytes, 8 * page);
    CHECK(is_filled(block.base, 8 * page, 9));
}

/* Another process forbids writing through the descriptor: the memory can neither be given back nor
 * be mapped again. Its contents are kept, and the block no longer counts it as committed. */
TEST(release_of_sealed_memory) {
    AUTO_BLOCK block = make_block(8 * page, of(UM_PAGES_4K, UM_SHARING_MEMFD, 0));
    um_block other;
    memset(block.base, 9, block.nbytes);
    if (fcntl(block.fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0) {
        test_skip("the kernel has not F_SEAL_FUTURE_WRITE");
    } else {
        CHECK_STATUS(UM_E_OS, um_block_release(&block, 2 * page, 2 * page, NULL, &test_err));
        CHECK_OS_ERR(EPERM, "fallocate");
        CHECK_EQ(block.nbytes, 2 * page);
        CHECK_EQ(block.committed_nbytes, 6 * page);
        CHECK(!um_block_is_committed(&block, 2 * page, 1));
        CHECK(is_filled(block.base, 2 * page, 9));
        CHECK(is_filled(bytes_of(&block, 4 * page), 4 * page, 9));
        CHECK_OK(um_block_attach(&other, block.fd, UM_ACCESS_READ, UM_CAT_HISTORY, &test_err));
        CHECK(is_filled(other.base, 8 * page, 9));
        unmap_block(&other);
    }
}

typedef struct changing {
    um_block block;
    size_t out_nbytes;
} changing;

/* A bit for each of the first ten steps that the block says is committed. */
static uint64_t bits_of(const um_block *block) {
    uint64_t bits = 0;
    for (size_t i = 0; i < 10; i++) {
        bits |= (uint64_t)(um_block_is_committed(block, i * block->step_nbytes, 1) != 0) << i;
    }
    return bits;
}

static um_status run_commit(void *context, um_error *err) {
    changing *c = context;
    uint64_t bits = bits_of(&c->block);
    um_status status =
        um_block_commit(&c->block, c->block.step_nbytes, 8 * c->block.step_nbytes, err);
    CHECK(bits_of(&c->block) == (status == UM_OK ? UINT64_C(0x3FF) : bits));
    CHECK(is_filled((char *)c->block.base + 4 * c->block.step_nbytes, page, 4));
    return status;
}

/* Steps 0, 4 and 9 are committed. */
static void undo_commit(void *context) {
    changing *c = context;
    size_t step = c->block.step_nbytes;
    CHECK(um_block_release(&c->block, step, 3 * step, NULL, NULL) == UM_OK);
    CHECK(um_block_release(&c->block, 5 * step, 4 * step, NULL, NULL) == UM_OK);
}

static um_status run_release(void *context, um_error *err) {
    changing *c = context;
    size_t step = c->block.step_nbytes;
    uint64_t bits = bits_of(&c->block);
    um_status status = um_block_release(&c->block, step, 8 * step, &c->out_nbytes, err);
    CHECK(bits_of(&c->block) == (status == UM_OK ? UINT64_C(0x201) : bits));
    if (status != UM_OK) {
        CHECK(is_filled((char *)c->block.base + 4 * step, page, 4));
        CHECK(is_filled((char *)c->block.base + step, page, 1));
    }
    return status;
}

static void undo_release(void *context) {
    changing *c = context;
    size_t step = c->block.step_nbytes;
    c->out_nbytes = 12345;
    CHECK(um_block_commit(&c->block, step, 4 * step, NULL) == UM_OK);
    CHECK(um_block_commit(&c->block, 7 * step, step, NULL) == UM_OK);
    memset((char *)c->block.base + step, 1, step);
    memset((char *)c->block.base + 4 * step, 4, step);
}

static void check_faults(um_block_options options, um_lock lock) {
    size_t step = options.pages == UM_PAGES_THP && huge_page != 0 ? huge_page : page;
    options.reserve_nbytes = 10 * step;
    /* Without the capability, all of it together may be more than this process may lock. */
    AUTO_BLOCK whole = make_block(10 * step, &options);
    SKIP_UNLESS(um_block_lock(&whole, lock, NULL) == UM_OK, "this process may not lock memory");
    unmap_block(&whole);
    changing c = {.block = make_block(step, &options), .out_nbytes = 12345};
    CHECK_OK(um_block_lock(&c.block, lock, &test_err));
    commit(&c.block, 4 * step, step);
    commit(&c.block, 9 * step, step);
    memset((char *)c.block.base + 4 * step, 4, step);
    CHECK_EACH_FAULT(run_commit, undo_commit, &c, c, NULL);
    undo_release(&c);
    CHECK_EACH_FAULT(run_release, undo_release, &c, c, NULL);
    undo_release(&c);
    unmap_block(&c.block);
}

TEST(faults) {
    bool binds = may_bind();
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        um_block_options options = *of(UM_PAGES_4K, sharing, 0);
        check_faults(options, UM_LOCK_NONE);
        options.numa = (um_numa){.mode = binds ? UM_NUMA_BIND : UM_NUMA_NONE, .nodes = {binds}};
        check_faults(options, UM_LOCK_NOW);
        options.pages = UM_PAGES_THP;
        check_faults(options, UM_LOCK_ONFAULT);
    }
}
