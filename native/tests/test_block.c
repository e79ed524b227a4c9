/* Blocks: what is mapped, what the kernel reports, and what is left when a call fails. */
#include "blocks.h"

static void check_map_with(size_t asked, const um_block_options *options, size_t nbytes,
                           size_t step) {
    um_block block = make_block(asked, options); /* raises the ledger's high water */
    unmap_block(&block);
    os_state_begin();
    um_ledger_row row = ledger_row(options->category), row_mapped;

    block = make_block(asked, options);
    bool shared = options->sharing != UM_SHARING_NONE;
    check_block(&block,
                BLOCK(.nbytes = nbytes, .requested_nbytes = asked, .reserved_nbytes = nbytes,
                      .step_nbytes = step, .requested_pages = options->pages,
                      .category = options->category, .sharing = options->sharing,
                      .access = shared ? UM_ACCESS_SHARED : UM_ACCESS_PRIVATE));
    row_mapped = ledger_row(options->category);
    CHECK_EQ(row_mapped.n_mappings, row.n_mappings + 1);
    CHECK_EQ(row_mapped.mapped_bytes, row.mapped_bytes + nbytes);
    unsigned char *bytes = block.base;
    CHECK_STR(os_state_permissions(bytes - 1), "---p");
    CHECK_STR(os_state_permissions(bytes), shared ? "rw-s" : "rw-p");
    CHECK_STR(os_state_permissions(bytes + nbytes - 1), shared ? "rw-s" : "rw-p");
    CHECK_STR(os_state_permissions(bytes + nbytes), "---p");
    CHECK_EQ(placement_of(&block).resident_bytes, 0);
    CHECK(is_filled(bytes, nbytes, 0));
    memset(bytes, 1, nbytes);
    CHECK_EQ(placement_of(&block).resident_bytes, nbytes);

    unmap_block(&block);
    CHECK(os_state_unchanged());
}

static void check_map(size_t asked, um_pages pages, size_t nbytes, size_t step) {
    um_block_options options = *of(pages, UM_SHARING_NONE, 0);
    check_map_with(asked, &options, nbytes, step);
    options.sharing = UM_SHARING_MEMFD;
    check_map_with(asked, &options, nbytes, step);
}

TEST(map) {
    check_map(1, UM_PAGES_4K, page, page);
    check_map(page, UM_PAGES_4K, page, page);
    check_map(page + 1, UM_PAGES_4K, 2 * page, page);
    check_map(3 * unit + 1, UM_PAGES_4K, 3 * unit + page, page);
    check_map(1, UM_PAGES_THP, unit, unit);
    check_map(unit, UM_PAGES_THP, unit, unit);
    check_map(unit + 1, UM_PAGES_THP, 2 * unit, unit);
    check_map(1, UM_PAGES_AUTO, page, page);
    check_map(unit - 1, UM_PAGES_AUTO, unit, page);
    check_map(unit, UM_PAGES_AUTO, unit, unit);
    check_map(5 * unit - 1, UM_PAGES_AUTO, 5 * unit, unit);
}

/* The reserved size decides on the pages of a block, not its first size. */
TEST(auto_pages_of_a_growing_block) {
    SKIP_UNLESS(huge_page != 0, "the kernel has no huge pages");
    um_block_options options = *of(UM_PAGES_AUTO, UM_SHARING_NONE, 0);
    options.reserve_nbytes = huge_page;
    AUTO_BLOCK block = make_block(1, &options);
    CHECK_EQ(block.step_nbytes, huge_page);
    CHECK_EQ(block.nbytes, huge_page);
}

static void check_refused(um_status status, const char *what, size_t nbytes,
                          const um_block_options *options) {
    CHECK_MAKES_NONE(status, what, um_block_map, nbytes, options);
    if (status == UM_E_NOMEM) {
        CHECK(test_err.os_errno == ENOMEM);
        CHECK_EQ(test_err.asked, nbytes);
    }
}

TEST(refused_sizes) {
    um_pages kinds[] = {UM_PAGES_AUTO, UM_PAGES_4K, UM_PAGES_THP, UM_PAGES_2M, UM_PAGES_1G};
    for (size_t i = 0; i < COUNT(kinds); i++) {
        for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
            um_block_options options = *of(kinds[i], UM_SHARING_NONE, 0);
            options.sharing = sharing;
            check_refused(UM_E_INVALID, "nbytes", 0, &options);
            check_refused(UM_E_INVALID, "nbytes", SIZE_MAX, &options);
            check_refused(UM_E_INVALID, "nbytes", SIZE_MAX - page + 1, &options);
            /* More than the address space. */
            check_refused(UM_E_NOMEM, "mmap", SIZE_MAX / 4, &options);
            check_refused(UM_E_NOMEM, "mmap", (size_t)1 << 58, &options);
            options.reserve_nbytes = page;
            check_refused(UM_E_INVALID, "reserve_nbytes", page + 1, &options);
            options.reserve_nbytes = SIZE_MAX;
            check_refused(UM_E_INVALID, "nbytes", page, &options);
        }
    }
}

TEST(refused_options) {
    um_block_options options = *of((um_pages)5, UM_SHARING_NONE, 0);
    check_refused(UM_E_INVALID, "pages", page, &options);
    options = *of((um_pages)-1, UM_SHARING_NONE, 0);
    check_refused(UM_E_INVALID, "pages", page, &options);
    um_category categories[] = {UM_CAT_COUNT, (um_category)-1};
    for (size_t i = 0; i < 2; i++) {
        options = *OPTIONS(.category = categories[i]);
        check_refused(UM_E_INVALID, "category", page, &options);
    }
    options = *OPTIONS(.sharing = (um_sharing)3);
    check_refused(UM_E_INVALID, "sharing", page, &options);
    options = *OPTIONS(.numa = {.mode = (um_numa_mode)5, .nodes = {1}});
    check_refused(UM_E_INVALID, "numa", page, &options);
    options = *OPTIONS(.numa = {.nodes = {[15] = UINT64_C(1) << 63}});
    check_refused(UM_E_INVALID, "numa", page, &options);
    for (int mode = UM_NUMA_BIND; mode <= UM_NUMA_PREFERRED; mode++) {
        options = *OPTIONS(.numa = {.mode = (um_numa_mode)mode});
        check_refused(UM_E_INVALID, "numa", page, &options);
    }
    char name[251];
    memset(name, 'n', sizeof name - 1);
    name[250] = '\0';
    options = *OPTIONS(.sharing = UM_SHARING_MEMFD, .name = name);
    check_refused(UM_E_INVALID, "name", page, &options);
    name[249] = '\0';
    AUTO_BLOCK block = make_block(page, &options);
}

/* No machine has the node with the highest number. */
TEST(refused_nodes) {
    SKIP_UNLESS(may_bind(), "this process may not set policies");
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        um_block_options options =
            *OPTIONS(.category = UM_CAT_HISTORY, .sharing = sharing,
                     .numa = {.mode = UM_NUMA_BIND, .nodes = {[15] = UINT64_C(1) << 63}});
        check_refused(UM_E_OS, "mbind", page, &options);
        CHECK_EQ(test_err.detail, UM_BLOCK_NO_POLICY);
    }
}

TEST(unmap) {
    um_block zeroed = {0};
    fault_os_fail_nth(0, 0);
    unmap_block(&zeroed);
    CHECK_EQ(fault_os_calls(), 0);
    /* A block that could not be unmapped is still mapped, and can be unmapped later. */
    AUTO_BLOCK block = make_block(3 * page, of(UM_PAGES_4K, UM_SHARING_NONE, 0));
    um_block copy = block;
    memset(block.base, 7, block.nbytes);
    os_state_begin();
    fault_os_fail_nth(1, EPERM);
    CHECK_STATUS(UM_E_OS, um_block_unmap(&block, &test_err));
    CHECK_OS_ERR(EPERM, "munmap");
    fault_os_fail_nth(1, ENOMEM);
    CHECK(um_block_unmap(&block, NULL) != UM_OK);
    CHECK(memcmp(&block, &copy, sizeof block) == 0);
    CHECK(is_filled(block.base, block.nbytes, 7));
    CHECK(os_state_unchanged());
    unmap_block(&block);
}

static void check_hugetlb(um_sharing sharing, size_t huge) {
    um_block_options options =
        *OPTIONS(.pages = UM_PAGES_2M, .category = UM_CAT_HISTORY, .sharing = sharing);
    uint64_t available = huge_pages_available();
    um_block block = make_block(huge + 1, &options);
    CHECK_EQ(huge_pages_available(), available - 2); /* reserved when it is mapped */
    CHECK_EQ(smaps_bytes(block.base, "KernelPageSize:"), huge);
    unmap_block(&block);
    CHECK_EQ(huge_pages_available(), available);

    check_map_with(1, &options, huge, huge);
    check_map_with(3 * huge + 1, &options, 4 * huge, huge);
    check_refused(UM_E_NOMEM, "mmap", (available + 1) * huge, &options);
    CHECK_EQ(huge_pages_available(), available);
}

TEST(hugetlb) {
    BORROW_HUGE_PAGES(8);
    check_hugetlb(UM_SHARING_NONE, HUGE_BYTES);
    check_hugetlb(UM_SHARING_MEMFD, HUGE_BYTES);
}

/* In the child: shared memory is not mapped and leaves the ledger; private memory is a copy. */
static bool child_forgets(void *arg) {
    um_block *blocks = arg;
    static const um_block zeroed;
    void *base = blocks[0].base;
    int fd = blocks[0].fd;
    um_ledger_row row = ledger_row(UM_CAT_HISTORY);
    bool good = CHECK_STR(os_state_permissions(base), "");
    um_block_forget(&blocks[0]);
    good = CHECK(memcmp(&blocks[0], &zeroed, sizeof zeroed) == 0) && good;
    good = CHECK(fcntl(fd, F_GETFD) == -1) && CHECK(errno == EBADF) && good;
    um_ledger_row forgotten = ledger_row(UM_CAT_HISTORY);
    good = CHECK(forgotten.n_mappings == row.n_mappings - 1) && good;
    good = CHECK(forgotten.mapped_bytes == row.mapped_bytes - 4 * page) && good;
    good = CHECK(is_filled(blocks[1].base, 4 * page, 2)) && good;
    memset(blocks[1].base, 3, 4 * page);
    return CHECK(um_block_unmap(&blocks[1], NULL) == UM_OK) && good;
}

TEST(fork) {
    um_block_options options = *of(UM_PAGES_4K, UM_SHARING_NONE, 0);
    options.sharing = UM_SHARING_MEMFD;
    um_block blocks[2] = {make_block(4 * page, &options),
                          make_block(4 * page, of(UM_PAGES_4K, UM_SHARING_NONE, 0))};
    memset(blocks[0].base, 1, 4 * page);
    memset(blocks[1].base, 2, 4 * page);
    CHECK(has_vm_flag(blocks[0].base, "dc"));
    CHECK(!has_vm_flag(blocks[1].base, "dc"));
    CHECK(in_child(child_forgets, blocks));
    CHECK(is_filled(blocks[0].base, 4 * page, 1));
    CHECK(is_filled(blocks[1].base, 4 * page, 2));
    unmap_block(&blocks[0]);
    unmap_block(&blocks[1]);
    um_block_forget(&blocks[0]); /* nothing is left to forget */
}

TEST(lock) {
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        um_block_options options = *of(UM_PAGES_4K, UM_SHARING_NONE, 0);
        options.sharing = sharing;
        AUTO_BLOCK block = make_block(8 * page, &options);
        if (um_block_lock(&block, UM_LOCK_ONFAULT, NULL) != UM_OK) {
            test_skip("this process may not lock memory");
            unmap_block(&block);
            return;
        }
        CHECK(block.lock == UM_LOCK_ONFAULT);
        CHECK(has_vm_flag(block.base, "lo"));
        CHECK_EQ(placement_of(&block).resident_bytes, 0);
        *bytes_of(&block, page) = 1;
        CHECK_EQ(placement_of(&block).locked_bytes, page);
        CHECK_OK(um_block_lock(&block, UM_LOCK_NOW, &test_err));
        CHECK(block.lock == UM_LOCK_NOW);
        CHECK_EQ(placement_of(&block).locked_bytes, 8 * page);
        CHECK_OK(um_block_lock(&block, UM_LOCK_NONE, &test_err));
        CHECK(block.lock == UM_LOCK_NONE);
        CHECK(!has_vm_flag(block.base, "lo"));
        CHECK_EQ(placement_of(&block).resident_bytes, 8 * page);
        CHECK_INVALID(um_block_lock(&block, (um_lock)3, &test_err));
        CHECK_INVALID(um_block_lock(&block, (um_lock)-1, &test_err));
        /* The errno of the kernel for a page that it could not get. */
        fault_os_fail_nth(1, EAGAIN);
        CHECK_STATUS(UM_E_NOMEM, um_block_lock(&block, UM_LOCK_NOW, &test_err));
        CHECK_OS_ERR(EAGAIN, "mlock2");
        CHECK(block.lock == UM_LOCK_NONE);
        CHECK(!has_vm_flag(block.base, "lo"));
    }
}

/* The limit applies to processes without the capability. */
static bool child_passes_limit(void *arg) {
    um_block *block = arg;
    struct rlimit limit = {.rlim_cur = 4 * page, .rlim_max = 4 * page};
    um_error err;
    if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0 || (geteuid() == 0 && setuid(65534) != 0)) {
        return CHECK(!"the child cannot take a limit on");
    }
    bool good = CHECK(um_block_lock(block, UM_LOCK_NOW, &err) == UM_E_NOMEM);
    good = CHECK(err.os_errno == ENOMEM) && CHECK_STR(err.what, "mlock2") && good;
    good = CHECK(block->lock == UM_LOCK_NONE) && good;
    good = CHECK(!has_vm_flag(block->base, "lo")) && good;
    um_block small;
    um_block_options options = *of(UM_PAGES_4K, UM_SHARING_NONE, 0);
    good = CHECK(um_block_map(&small, 2 * page, &options, NULL) == UM_OK) && good;
    return CHECK(um_block_lock(&small, UM_LOCK_NOW, NULL) == UM_OK) && good;
}

TEST(lock_limit) {
    AUTO_BLOCK block = make_block(8 * page, of(UM_PAGES_4K, UM_SHARING_NONE, 0));
    CHECK(in_child(child_passes_limit, &block));
}

TEST(advise) {
    um_block_options options = *of(UM_PAGES_AUTO, UM_SHARING_NONE, 0);
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        options.sharing = sharing;
        AUTO_BLOCK block = make_block(8 * page, &options);
        memset(block.base, 7, block.nbytes);
        CHECK_INVALID(um_block_advise(&block, UM_ADVICE_DONTNEED, &test_err));
        CHECK(is_filled(block.base, block.nbytes, 7));
        CHECK_INVALID(um_block_advise(&block, (um_advice)6, &test_err));
        CHECK_INVALID(um_block_advise(&block, (um_advice)-1, &test_err));
        CHECK_OK(um_block_advise(&block, UM_ADVICE_SEQUENTIAL, &test_err));
        CHECK(has_vm_flag(block.base, "sr"));
        CHECK_OK(um_block_advise(&block, UM_ADVICE_RANDOM, &test_err));
        CHECK(has_vm_flag(block.base, "rr"));
        CHECK(!has_vm_flag(block.base, "sr"));
        if (huge_page != 0) {
            CHECK_OK(um_block_advise(&block, UM_ADVICE_HUGEPAGE, &test_err));
            CHECK(has_vm_flag(block.base, "hg"));
            CHECK_OK(um_block_advise(&block, UM_ADVICE_NOHUGEPAGE, &test_err));
            CHECK(has_vm_flag(block.base, "nh"));
            CHECK(!has_vm_flag(block.base, "hg"));
        }
        fault_os_fail_nth(1, EIO);
        CHECK_STATUS(UM_E_OS, um_block_advise(&block, UM_ADVICE_WILLNEED, &test_err));
        CHECK_OS_ERR(EIO, "madvise");
    }
}

typedef struct mapping {
    um_block block;
    size_t nbytes;
    um_block_options options;
} mapping;

static um_status run_map(void *context, um_error *err) {
    mapping *m = context;
    return um_block_map(&m->block, m->nbytes, &m->options, err);
}

static void undo_map(void *context) {
    mapping *m = context;
    CHECK(um_block_unmap(&m->block, NULL) == UM_OK);
    SPOIL(m->block);
}

static void check_map_faults(size_t nbytes, um_block_options options) {
    mapping m = {.nbytes = nbytes, .options = options};
    SPOIL(m.block);
    CHECK_EACH_FAULT(run_map, undo_map, &m, m.block, HARMLESS_HUGE_PAGE);
}

TEST(map_faults) {
    bool binds = may_bind();
    um_pages kinds[] = {UM_PAGES_AUTO, UM_PAGES_4K, UM_PAGES_THP};
    for (size_t i = 0; i < COUNT(kinds); i++) {
        for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
            um_block_options options =
                *OPTIONS(.pages = kinds[i], .category = UM_CAT_HISTORY, .sharing = sharing);
            check_map_faults(5 * page, options);
            options.reserve_nbytes = 3 * unit;
            options.numa.mode = binds ? UM_NUMA_PREFERRED : UM_NUMA_NONE;
            options.numa.nodes[0] = binds;
            check_map_faults(unit, options);
        }
    }
}

/* Locks or unlocks a block in three parts, which must all be in the same state afterwards. */
static um_status set_lock(um_block *block, um_lock lock, um_error *err) {
    um_lock old = block->lock;
    um_status status = um_block_lock(block, lock, err);
    um_lock now = status == UM_OK ? lock : old;
    for (size_t i = 0; i < 5; i += 2) {
        CHECK(has_vm_flag((char *)block->base + i * block->step_nbytes, "lo") ==
              (now != UM_LOCK_NONE));
    }
    return status;
}

static um_status run_lock(void *context, um_error *err) {
    return set_lock(context, UM_LOCK_ONFAULT, err);
}

static void undo_lock(void *context) {
    CHECK(set_lock(context, UM_LOCK_NONE, NULL) == UM_OK);
}

static um_status run_unlock(void *context, um_error *err) {
    return set_lock(context, UM_LOCK_NONE, err);
}

static void undo_unlock(void *context) {
    CHECK(set_lock(context, UM_LOCK_ONFAULT, NULL) == UM_OK);
}

/* With a block in three parts. */
TEST(lock_faults) {
    um_block_options options = *of(UM_PAGES_THP, UM_SHARING_NONE, 0);
    options.reserve_nbytes = 5 * unit;
    AUTO_BLOCK block = make_block(unit, &options);
    CHECK_OK(um_block_commit(&block, 2 * unit, unit, &test_err));
    CHECK_OK(um_block_commit(&block, 4 * unit, unit, &test_err));
    memset(bytes_of(&block, 4 * unit), 1, unit);
    SKIP_UNLESS(um_block_lock(&block, UM_LOCK_ONFAULT, NULL) == UM_OK,
                "this process may not lock memory");
    undo_lock(&block);
    CHECK_EACH_FAULT(run_lock, undo_lock, &block, block, NULL);
    undo_unlock(&block);
    CHECK_EACH_FAULT(run_unlock, undo_unlock, &block, block, NULL);
}
