/* Pages: the report on each page agrees with what was done to it, and with the sums of the
 * kernel. */
#include "blocks.h"
#include <sys/prctl.h>

enum { IN_RAM = UM_PAGE_IN_RAM, MAPPED = UM_PAGE_IN_RAM | UM_PAGE_MAPPED };
enum { MAX_PAGES = 1 << 14 };

static const char has_memory_path[] = "/sys/devices/system/node/has_memory";
static uint8_t pages[MAX_PAGES + 1];
static int16_t nodes[MAX_PAGES + 1];

/* Asks for the pages, and checks that nothing is written past those of the range. */
static void look(const um_block *block, size_t offset, size_t nbytes) {
    size_t n = (offset % page + nbytes + page - 1) / page;
    REQUIRE(n <= MAX_PAGES);
    memset(pages, 0xA5, n + 1);
    memset(nodes, 0x5A, (n + 1) * sizeof *nodes);
    CHECK_OK(um_block_pages(block, offset, nbytes, pages, nodes, &test_err));
    CHECK(pages[n] == 0xA5);
    CHECK(nodes[n] == 0x5A5A);
}

static size_t n_with(size_t n, uint8_t flags) {
    size_t found = 0;
    for (size_t i = 0; i < n; i++) {
        found += (pages[i] & flags) == flags;
    }
    return found;
}

/* Whether nodes are reported exactly for the pages that are mapped here. */
static bool nodes_agree(size_t n) {
    bool agree = true;
    for (size_t i = 0; i < n; i++) {
        agree = agree && (nodes[i] >= 0) == ((pages[i] & UM_PAGE_MAPPED) != 0);
    }
    return agree;
}

static um_block map_new_file(size_t nbytes, um_access access) {
    AUTO_FD fd = temp_file();
    fill_file(fd, 0, nbytes);
    REQUIRE(fsync(fd) == 0);
    REQUIRE(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    um_block block;
    REQUIRE(CHECK_OK(um_block_map_file(&block, fd, 0, nbytes, access, UM_CAT_WEIGHTS, &test_err)));
    return block;
}

TEST(touched) {
    AUTO_BLOCK block = make_pages(100 * page, UM_PAGES_4K);
    unsigned char *bytes = block.base;
    for (size_t i = 0; i < 100; i += 3) {
        bytes[i * page] = 1;
    }
    look(&block, 0, 100 * page);
    for (size_t i = 0; i < 100; i++) {
        CHECK_EQ(pages[i], i % 3 == 0 ? MAPPED : 0);
    }
    CHECK(nodes_agree(100));
    /* A range reports all pages that it touches. */
    look(&block, 3 * page + 1, 1);
    CHECK_EQ(pages[0], MAPPED);
    look(&block, 4 * page - 1, 2);
    CHECK(pages[0] == MAPPED);
    CHECK(pages[1] == 0);
    look(&block, 0, 0);
    look(&block, 100 * page, 0);
    /* With any number of runs from each scan, and without nodes. */
    fault_os_limit_runs(1);
    look(&block, page, 99 * page);
    fault_os_limit_runs(0);
    CHECK_EQ(n_with(99, MAPPED), 33);
    CHECK_OK(um_block_pages(&block, 0, 100 * page, pages, NULL, &test_err));
    CHECK_EQ(n_with(100, MAPPED), 34);
}

TEST(locked) {
    AUTO_BLOCK block = make_pages(10 * page, UM_PAGES_4K);
    memset(block.base, 1, 4 * page);
    SKIP_UNLESS(um_block_lock(&block, UM_LOCK_ONFAULT, NULL) == UM_OK,
                "this process may not lock memory");
    look(&block, 0, 10 * page);
    CHECK_EQ(n_with(10, UM_PAGE_LOCKED | MAPPED), 4);
    CHECK_EQ(n_with(10, UM_PAGE_LOCKED), 4);
    CHECK_OK(um_block_lock(&block, UM_LOCK_NONE, &test_err));
    look(&block, 0, 10 * page);
    CHECK_EQ(n_with(10, UM_PAGE_LOCKED), 0);
}

TEST(gaps_and_misuse) {
    AUTO_BLOCK block =
        make_block(10 * page, OPTIONS(.pages = UM_PAGES_4K, .reserve_nbytes = 40 * page));
    CHECK_OK(um_block_commit(&block, 20 * page, 10 * page, &test_err));
    memset(bytes_of(&block, 20 * page), 1, 5 * page);
    look(&block, 20 * page, 10 * page);
    CHECK_EQ(n_with(10, MAPPED), 5);
    memset(pages, 0xA5, sizeof pages);
    struct {
        size_t offset, nbytes;
    } wrong[] = {{0, 11 * page}, {15 * page, page}, {30 * page, 1}, {41 * page, 0}, {1, SIZE_MAX}};
    for (size_t i = 0; i < COUNT(wrong); i++) {
        CHECK_INVALID(
            um_block_pages(&block, wrong[i].offset, wrong[i].nbytes, pages, nodes, &test_err));
        CHECK(is_filled(pages, sizeof pages, 0xA5));
    }
}

TEST(huge) {
    AUTO_BLOCK block = make_pages(4 * huge_page, UM_PAGES_THP);
    size_t n = huge_page / page;
    unsigned char *bytes = block.base;
    bytes[huge_page] = bytes[3 * huge_page] = 1;
    uint64_t huge_bytes = placement_of(&block).huge_bytes;
    look(&block, 0, 4 * huge_page);
    CHECK_EQ(n_with(4 * n, UM_PAGE_HUGE) * page, huge_bytes);
    CHECK_EQ(n_with(n, MAPPED), 0);
    CHECK(nodes_agree(4 * n));
    if (huge_bytes == 0) {
        test_skip("the kernel gave none");
    } else {
        CHECK_EQ(pages[n] & UM_PAGE_HUGE, UM_PAGE_HUGE);
        /* A range that begins inside a huge page. */
        look(&block, huge_page + 5 * page, 20 * page);
        CHECK_EQ(n_with(20, MAPPED | UM_PAGE_HUGE), 20);
        CHECK(nodes_agree(20));
    }
}

TEST(hugetlb) {
    size_t huge = (size_t)2 << 20, n = huge / page;
    BORROW_HUGE_PAGES(8);
    um_sharing kinds[] = {UM_SHARING_NONE, UM_SHARING_MEMFD};
    for (int i = 0; i < 2; i++) {
        AUTO_BLOCK block = make_block(3 * huge, OPTIONS(.pages = UM_PAGES_2M, .sharing = kinds[i]));
        *bytes_of(&block, huge) = 1;
        look(&block, 0, 3 * huge);
        uint8_t untouched = kinds[i] == UM_SHARING_NONE ? 0 : UM_PAGE_UNKNOWN;
        for (size_t k = 0; k < 3; k++) {
            CHECK(is_filled(pages + k * n, n,
                            k == 1 ? MAPPED | UM_PAGE_HUGE | UM_PAGE_LOCKED : untouched));
        }
        CHECK(nodes_agree(3 * n));
    }
}

TEST(shared) {
    AUTO_BLOCK block = make_block(20 * page,
                                  OPTIONS(.pages = UM_PAGES_4K, .sharing = UM_SHARING_MEMFD)),
               other;
    memset(block.base, 1, 10 * page);
    REQUIRE(CHECK_OK(um_block_attach(&other, block.fd, UM_ACCESS_READ, UM_CAT_OTHER, &test_err)));
    look(&other, 0, 20 * page);
    CHECK_EQ(n_with(20, IN_RAM), 10);
    CHECK_EQ(n_with(20, UM_PAGE_MAPPED), 0);
    CHECK(nodes_agree(20));
}

TEST(files) {
    um_access kinds[] = {UM_ACCESS_READ, UM_ACCESS_PRIVATE};
    for (int i = 0; i < 2; i++) {
        /* The distance is larger than readahead and large folios, so that one touch does not reach
         * the next. */
        size_t n = 4096, nbytes = n * page - 100;
        AUTO_BLOCK block = map_new_file(nbytes, kinds[i]);
        CHECK_OK(um_block_advise(&block, UM_ADVICE_RANDOM, &test_err));
        look(&block, 0, nbytes);
        if (n_with(n, IN_RAM) != 0) {
            test_skip("the page cache keeps what it should drop");
            unmap_block(&block);
            return;
        }
        CHECK_OK(um_block_warm(&block, 2048 * page, 2 * page, 1, NULL, &test_err));
        look(&block, 0, nbytes);
        CHECK(pages[2048] == MAPPED);
        CHECK(pages[2049] == MAPPED);
        CHECK(pages[0] == 0);
        CHECK(pages[n - 1] == 0);
        CHECK(nodes_agree(n));
        uint64_t resident = 0;
        CHECK_OK(um_block_resident(&block, 0, nbytes, &resident, &test_err));
        CHECK_EQ(n_with(n, IN_RAM) * page, resident);
        CHECK_EQ(n_with(n, UM_PAGE_MAPPED) * page, placement_of(&block).resident_bytes);
    }
}

/* The report to a user who may only read another user's file. */
static bool look_as_nobody(void *arg) {
    int fd = *(const int *)arg;
    um_block block;
    /* /proc/self belongs to root once a process has changed its user. */
    REQUIRE(seteuid(65534) == 0);
    REQUIRE(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0);
    REQUIRE(CHECK_OK(
        um_block_map_file(&block, fd, 0, 10 * page, UM_ACCESS_READ, UM_CAT_WEIGHTS, &test_err)));
    CHECK(block.is_cache_hidden != 0);
    CHECK_OK(um_block_warm(&block, 3 * page, page, 1, NULL, &test_err));
    look(&block, 0, 10 * page);
    CHECK(pages[3] == MAPPED);
    CHECK_EQ(n_with(10, UM_PAGE_UNKNOWN) + n_with(10, MAPPED), 10);
    CHECK_EQ(n_with(10, UM_PAGE_UNKNOWN | IN_RAM), 0);
    CHECK(nodes_agree(10));
    uint64_t resident = 0;
    CHECK_OK(um_block_resident(&block, 0, 10 * page, &resident, &test_err));
    CHECK_EQ(resident, n_with(10, MAPPED) * page);
    /* A file that ends inside a page. */
    um_block part;
    size_t nbytes = 9 * page + 100;
    REQUIRE(CHECK_OK(
        um_block_map_file(&part, fd, 0, nbytes, UM_ACCESS_READ, UM_CAT_WEIGHTS, &test_err)));
    CHECK_OK(um_block_warm(&part, 9 * page, 100, 1, NULL, &test_err));
    CHECK_OK(um_block_resident(&part, 9 * page, 100, &resident, &test_err));
    CHECK_EQ(resident, page);
    unmap_block(&part);
    return atomic_load(&test_n_failures) == 0;
}

TEST(hidden_cache) {
    AUTO_FD fd = temp_file();
    REQUIRE(ftruncate(fd, (off_t)(10 * page)) == 0);
    REQUIRE(fchmod(fd, 0644) == 0);
    AUTO_FD reader = reopen(fd, O_RDONLY);
    REQUIRE(reader >= 0);
    um_block block;
    REQUIRE(CHECK_OK(um_block_map_file(&block, reader, 0, 10 * page, UM_ACCESS_READ, UM_CAT_WEIGHTS,
                                       &test_err)));
    CHECK(block.is_cache_hidden == 0);
    unmap_block(&block);
    if (geteuid() != 0) {
        test_skip("only root has files that nobody may read");
    } else {
        CHECK(in_child(look_as_nobody, &reader));
    }
}

/* A process that has changed its user may not look at its own page tables. */
TEST(without_pagemap) {
    AUTO_BLOCK block = make_pages(10 * page, UM_PAGES_4K);
    *bytes_of(&block, 3 * page) = 1;
    fault_os_fail_nth(2, EACCES); /* mincore, open */
    CHECK_OK(um_block_pages(&block, 0, 10 * page, pages, nodes, &test_err));
    CHECK_STR(fault_os_failed(), "um__os_open_read");
    for (size_t i = 0; i < 10; i++) {
        CHECK(pages[i] == (i == 3 ? IN_RAM : 0));
        CHECK(nodes[i] == -1);
    }
    /* Any other failure to open is an error. */
    fault_os_fail_nth(2, EMFILE);
    CHECK(um_block_pages(&block, 0, 10 * page, pages, NULL, &test_err) == UM_E_OS);
}

/* Before Linux 6.7 there is no PAGEMAP_SCAN. */
TEST(old_kernel) {
    AUTO_BLOCK block = make_pages(5000 * page, UM_PAGES_4K);
    unsigned char *bytes = block.base;
    for (size_t i = 0; i < 5000; i += 7) {
        bytes[i * page] = 1;
    }
    fault_os_fail_nth(3, ENOTTY); /* mincore, open, ioctl */
    fault_os_limit_read(1000);
    CHECK_OK(um_block_pages(&block, page, 4998 * page, pages, nodes, &test_err));
    CHECK_STR(fault_os_failed(), "um__os_scan_pages");
    fault_os_limit_read(0);
    fault_os_fail_nth(0, 0);
    for (size_t i = 0; i < 4998; i++) {
        if (!CHECK_EQ(pages[i], (i + 1) % 7 == 0 ? MAPPED : 0)) {
            break;
        }
    }
    CHECK(nodes_agree(4998));
}

static size_t n_asked;

/* The node depends on the address; a huge page is on one node. */
static int answer_nodes(size_t n, void *const *addresses, const int *wanted, int *out_status) {
    CHECK(wanted == NULL);
    n_asked += n;
    for (size_t i = 0; i < n; i++) {
        uintptr_t at = (uintptr_t)addresses[i];
        out_status[i] = at / page % 11 == 5 ? -ENOENT : (int)(at / huge_page % 3);
    }
    return 0;
}

TEST(several_nodes) {
    fault_os_file(has_memory_path, "0-2\n");
    fault_os_move_pages(answer_nodes);
    size_t n = huge_page / page;

    AUTO_BLOCK block = make_pages(9000 * page, UM_PAGES_4K);
    unsigned char *bytes = block.base;
    for (size_t i = 0; i < 9000; i += 2) {
        bytes[i * page] = 1;
    }
    n_asked = 0;
    look(&block, page, 8999 * page);
    CHECK_EQ(n_asked, 4499);
    for (size_t i = 0; i < 8999; i++) {
        uintptr_t at = (uintptr_t)block.base + (i + 1) * page;
        int expected = i % 2 == 0 || at / page % 11 == 5 ? -1 : (int)(at / huge_page % 3);
        if (!CHECK(nodes[i] == expected)) {
            break;
        }
    }
    unmap_block(&block);
    block = make_pages(3 * huge_page, UM_PAGES_THP);
    memset(block.base, 1, block.nbytes);
    if (placement_of(&block).huge_bytes == block.nbytes) {
        n_asked = 0;
        look(&block, 0, 3 * huge_page);
        CHECK_EQ(n_asked, 3);
        for (size_t i = 0; i < 3 * n; i++) {
            uintptr_t at = (uintptr_t)block.base + i / n * huge_page;
            CHECK(nodes[i] == (at / page % 11 == 5 ? -1 : (int)(at / huge_page % 3)));
        }
        /* From inside a huge page, the address asked about is the beginning of the range. */
        n_asked = 0;
        look(&block, page, 2 * huge_page);
        CHECK_EQ(n_asked, 3);
    } else {
        test_skip("the kernel gave none");
    }
}

static um_status run_look(void *context, um_error *err) {
    um_block *block = context;
    return um_block_pages(block, 0, block->nbytes, pages, NULL, err);
}

static int refuse_nodes(size_t n, void *const *addresses, const int *wanted, int *out_status) {
    (void)n, (void)addresses, (void)wanted, (void)out_status;
    return EPERM;
}

TEST(faults) {
    AUTO_BLOCK block = make_pages(10 * page, UM_PAGES_4K);
    memset(block.base, 1, block.nbytes);
    CHECK_EACH_FAULT(run_look, NULL, &block, block, " um__os_close ");
    fault_os_fail_nth(3, EINTR); /* mincore, open, ioctl */
    CHECK_OK(run_look(&block, &test_err));
    CHECK_STR(fault_os_failed(), "um__os_scan_pages");
    CHECK_EQ(n_with(10, MAPPED), 10);
    /* Containers often may not ask for nodes. */
    fault_os_file(has_memory_path, "0-1\n");
    fault_os_move_pages(refuse_nodes);
    CHECK_STATUS(UM_E_OS, um_block_pages(&block, 0, 10 * page, pages, nodes, &test_err));
    REQUIRE(test_err.os_errno == EPERM);
    CHECK(strstr(test_err.what, "move_pages") != NULL);
}
