/* Placement: the report on a block agrees with the kernel's figures, whatever they are. */
#include "blocks.h"
#include <sys/syscall.h>

static const char smaps_path[] = "/proc/self/smaps";
static const char numa_maps_path[] = "/proc/self/numa_maps";
static const char has_memory_path[] = "/sys/devices/system/node/has_memory";

static bool same_placement(const um_placement *a, const um_placement *b) {
    return a->pages == b->pages && a->page_bytes == b->page_bytes &&
           a->resident_bytes == b->resident_bytes && a->pss_bytes == b->pss_bytes &&
           a->huge_bytes == b->huge_bytes && a->locked_bytes == b->locked_bytes &&
           a->swapped_bytes == b->swapped_bytes &&
           memcmp(a->node_bytes, b->node_bytes, sizeof a->node_bytes) == 0;
}

static bool file_has(const char *path, const char *text) {
    char content[4096] = "";
    FILE *file = fopen(path, "r");
    if (file != NULL) {
        content[fread(content, 1, sizeof content - 1, file)] = '\0';
        fclose(file);
    }
    return strstr(content, text) != NULL;
}

static bool thp_enabled(void) {
    return huge_page != 0 && !file_has("/sys/kernel/mm/transparent_hugepage/enabled", "[never]");
}

TEST(small_pages) {
    AUTO_BLOCK block = make_pages(100 * page, UM_PAGES_4K);
    AUTO_BLOCK neighbour = make_pages(50 * page, UM_PAGES_4K); /* the kernel places it nearby */
    unsigned char *bytes = block.base;
    for (size_t i = 0; i < 100; i += 3) {
        bytes[i * page] = 1;
    }
    check_placed(&block, UM_PAGES_4K, page, 34 * page, 0, 0);
    CHECK_EQ(placement_of(&neighbour).resident_bytes, 0);
    /* Protected or locked pages split the range into several entries of smaps: all of them
     * count. */
    CHECK(mprotect(bytes + 30 * page, page, PROT_READ) == 0);
    CHECK(mprotect(bytes + 60 * page, 2 * page, PROT_NONE) == 0);
    CHECK_EQ(placement_of(&block).resident_bytes, 34 * page);
    /* Not through the C library: under AddressSanitizer its mlock does nothing. */
    if (syscall(SYS_mlock, bytes + page, 5 * page) == 0) {
        check_placed(&block, UM_PAGES_4K, page, (34 + 4) * page, 0, 5 * page); /* 3 was in RAM */
        CHECK(syscall(SYS_munlock, bytes, block.nbytes) == 0);
    } else {
        test_skip("this process may not lock memory");
    }
    /* With any number of bytes from each read of /proc. */
    um_placement whole = placement_of(&block), piecewise;
    fault_os_limit_read(61);
    CHECK_OK(um_block_verify(&block, &piecewise, &test_err));
    fault_os_limit_read(0);
    CHECK(same_placement(&whole, &piecewise));

    memset(neighbour.base, 1, neighbour.nbytes);
    um_placement p = placement_of(&block);
    CHECK(same_placement(&whole, &p));
    CHECK_EQ(placement_of(&neighbour).resident_bytes, 50 * page);
    CHECK(mprotect(bytes, block.nbytes, PROT_READ | PROT_WRITE) == 0);
}

TEST(huge_pages) {
    SKIP_UNLESS(thp_enabled(), "transparent huge pages are switched off");
    AUTO_BLOCK block = make_pages(4 * huge_page, UM_PAGES_THP);
    check_placed(&block, UM_PAGES_THP, huge_page, 0, 0, 0); /* they will be, once touched */
    memset(block.base, 1, block.nbytes);
    uint64_t huge_bytes = placement_of(&block).huge_bytes;
    check_placed(&block, huge_bytes > 0 ? UM_PAGES_THP : UM_PAGES_4K,
                 huge_bytes > 0 ? huge_page : page, block.nbytes, huge_bytes, 0);
    CHECK(huge_bytes <= block.nbytes);
    CHECK(huge_bytes % huge_page == 0);
    if (huge_bytes == 0) {
        test_skip("the kernel gave no huge page (memory is fragmented)");
    }
    AUTO_BLOCK small = make_pages(4 * huge_page, UM_PAGES_4K);
    check_placed(&small, UM_PAGES_4K, page, 0, 0, 0);
    memset(small.base, 1, small.nbytes);
    check_placed(&small, UM_PAGES_4K, page, small.nbytes, 0, 0);
}

TEST(gaps) {
    AUTO_BLOCK block =
        make_block(10 * page, OPTIONS(.pages = UM_PAGES_4K, .reserve_nbytes = 100 * page));
    CHECK_OK(um_block_commit(&block, 40 * page, 20 * page, &test_err));
    memset(block.base, 1, 10 * page);
    memset(bytes_of(&block, 50 * page), 1, 10 * page);
    check_placed(&block, UM_PAGES_4K, page, 20 * page, 0, 0);
    CHECK_EQ(resident(&block, 0, 100 * page), 20 * page);
    CHECK_EQ(resident(&block, 5 * page, 50 * page), 10 * page);
    CHECK_OK(um_block_release(&block, 0, 10 * page, NULL, &test_err));
    CHECK_EQ(placement_of(&block).resident_bytes, 10 * page);
    CHECK_EQ(resident(&block, 0, 100 * page), 10 * page);
}

TEST(shared) {
    AUTO_BLOCK block = make_block(20 * page,
                                  OPTIONS(.pages = UM_PAGES_4K, .sharing = UM_SHARING_MEMFD)),
               other;
    memset(block.base, 1, 10 * page);
    check_placed(&block, UM_PAGES_4K, page, 10 * page, 0, 0);
    /* A page that is mapped twice counts half in each Pss, but as a whole when locked. */
    REQUIRE(CHECK_OK(um_block_attach(&other, block.fd, UM_ACCESS_READ, UM_CAT_OTHER, &test_err)));
    CHECK_EQ(placement_of(&other).resident_bytes, 0); /* it has touched none */
    CHECK_EQ(resident(&other, 0, other.nbytes), 10 * page);
    volatile unsigned char *bytes = other.base;
    for (size_t i = 0; i < 10; i++) {
        CHECK(bytes[i * page] == 1);
    }
    CHECK_EQ(placement_of(&other).resident_bytes, 10 * page);
    CHECK_EQ(placement_of(&other).pss_bytes, 5 * page);
    CHECK_EQ(placement_of(&block).pss_bytes, 5 * page);
    if (syscall(SYS_mlock, block.base, 10 * page) == 0) {
        CHECK_EQ(placement_of(&block).locked_bytes, 10 * page);
        CHECK_EQ(placement_of(&other).locked_bytes, 0);
    } else {
        test_skip("this process may not lock memory");
    }
}

TEST(hugetlb) {
    BORROW_HUGE_PAGES(8);
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        AUTO_BLOCK block =
            make_block(4 * HUGE_BYTES, OPTIONS(.pages = UM_PAGES_2M, .sharing = sharing));
        size_t in_ram = 3 * HUGE_BYTES;
        check_placed(&block, UM_PAGES_2M, HUGE_BYTES, 0, 0, 0);
        memset(block.base, 1, in_ram);
        check_placed(&block, UM_PAGES_2M, HUGE_BYTES, in_ram, in_ram, in_ram);
        CHECK_EQ(resident(&block, 0, block.nbytes), in_ram);
    }
}

/* A block that is not mapped, which only the invented figures contain. */
static um_block invented_block(void) {
    return BLOCK(.base = (void *)(uintptr_t)0x200000, .nbytes = 0x100000, .step_nbytes = page,
                 .reserved_nbytes = 0x200000, .fd = -1);
}

static const char before[] = "100000-1ff000 rw-p 00000000 00:00 0 \nKernelPageSize: 4 kB\n"
                             "Rss: 7 kB\nPss: 7 kB\nVmFlags: rd wr lo \n"
                             "1ff000-200000 ---p 00000000 00:00 0 \nKernelPageSize: 4 kB\n"
                             "Rss: 9 kB\nTHPeligible: 1\nVmFlags: mr \n";
static const char behind[] = "400000-401000 ---p 00000000 00:00 0 \nKernelPageSize: 2048 kB\n"
                             "Rss: 11 kB\nPss: 13 kB\nAnonHugePages: 17 kB\nVmFlags: rd lo \n";

static um_placement placement_by(const char *smaps) {
    static char text[8192];
    um_block block = invented_block();
    snprintf(text, sizeof text, "%s%s%s", before, smaps, behind);
    fault_os_file(smaps_path, text);
    um_placement whole = placement_of(&block);
    fault_os_limit_read(7);
    um_placement piecewise = placement_of(&block);
    fault_os_limit_read(0);
    CHECK(same_placement(&whole, &piecewise));
    fault_os_file(smaps_path, NULL);
    return whole;
}

TEST(invented_smaps) {
    fault_os_file(has_memory_path, "5\n");
    um_placement p = placement_by("");
    CHECK(p.pages == UM_PAGES_4K);
    CHECK(p.resident_bytes == 0);
    CHECK(p.locked_bytes == 0);
    CHECK_EQ(on_all_nodes(&p), 0);

    p = placement_by("200000-280000 rw-p 00000000 00:00 0 \nSize: 512 kB\nKernelPageSize: 4 kB\n"
                     "MMUPageSize: 4 kB\nRss: 100 kB\nPss: 50 kB\nPss_Dirty: 1 kB\n"
                     "Anonymous: 3 kB\nAnonHugePages: 0 kB\nSwap: 8 kB\nSwapPss: 3 kB\n"
                     "Locked: 50 kB\nTHPeligible: 1\nVmFlags: rd wr mr mw me lo ac \n"
                     "280000-300000 ---p 00000000 00:00 0 \nKernelPageSize: 4 kB\n"
                     "THPeligible: 1\nVmFlags: mr mw me nr \n"
                     "300000-400000 r--s 00000000 00:01 2 /a:\\040lo \nKernelPageSize: 4 kB\n"
                     "Rss: 40 kB\nPss: 20 kB\nSwap: 16 kB\nVmFlags: rd mr \n");
    CHECK(p.pages == UM_PAGES_4K);
    CHECK(p.page_bytes == page);
    CHECK_EQ(p.resident_bytes, 140 << 10);
    CHECK_EQ(p.pss_bytes, 70 << 10);
    CHECK_EQ(p.locked_bytes, 100 << 10);
    CHECK_EQ(p.swapped_bytes, 24 << 10);
    CHECK_EQ(p.node_bytes[5], 140 << 10);
    CHECK_EQ(on_all_nodes(&p), 140 << 10);

    const char *kinds[] = {"AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"};
    for (int i = 0; i < 3; i++) {
        char text[512];
        snprintf(text, sizeof text,
                 "200000-400000 rw-p 00000000 00:00 0 \nKernelPageSize: 4 kB\nRss: 4096 kB\n"
                 "%s: 2048 kB\nVmFlags: rd \n",
                 kinds[i]);
        p = placement_by(text);
        CHECK(p.pages == UM_PAGES_THP);
        CHECK(p.page_bytes == (huge_page == 0 ? 2 << 20 : huge_page));
        CHECK_EQ(p.huge_bytes, 2 << 20);
    }
    /* Before the first touch, accessible memory that is eligible for THP counts. */
    p = placement_by("200000-300000 rw-p 00000000 00:00 0 \nTHPeligible: 1\nVmFlags: rd \n");
    CHECK(p.pages == UM_PAGES_THP);
    p = placement_by("200000-300000 rw-p 00000000 00:00 0 \nTHPeligible: 0\nVmFlags: rd \n"
                     "300000-400000 ---p 00000000 00:00 0 \nTHPeligible: 1\nVmFlags: mr \n");
    CHECK(p.pages == UM_PAGES_4K);
}

TEST(invented_hugetlb) {
    struct {
        um_pages pages;
        uint64_t kb;
    } sizes[] = {{UM_PAGES_2M, 2048}, {UM_PAGES_1G, 1 << 20}};
    fault_os_file(has_memory_path, "5\n");
    for (int i = 0; i < 2; i++) {
        char text[512];
        snprintf(text, sizeof text,
                 "200000-280000 rw-s 00000000 00:00 0 \nKernelPageSize: %zu kB\nRss: 0 kB\n"
                 "Shared_Hugetlb: %zu kB\nPrivate_Hugetlb: %zu kB\nVmFlags: rd ht \n"
                 "280000-400000 ---p 00000000 00:00 0 \nKernelPageSize: 4 kB\nVmFlags: mr \n",
                 (size_t)sizes[i].kb, (size_t)sizes[i].kb, 2 * (size_t)sizes[i].kb);
        um_placement p = placement_by(text);
        CHECK(p.pages == sizes[i].pages);
        CHECK_EQ(p.page_bytes, sizes[i].kb << 10);
        uint64_t fields[] = {p.resident_bytes, p.pss_bytes, p.huge_bytes, p.locked_bytes,
                             p.node_bytes[5]};
        for (int k = 0; k < 5; k++) {
            CHECK_EQ(fields[k], 3 * sizes[i].kb << 10);
        }
    }
}

TEST(invented_nodes) {
    static const char smaps[] =
        "200000-400000 rw-p 00000000 00:00 0 \nKernelPageSize: 4 kB\nRss: 64 kB\nVmFlags: rd \n";
    static const char numa_maps[] =
        "1f0000 default anon=5 N0=5 kernelpagesize_kB=4\n"
        "200000 bind:0-1,1023 anon=3 dirty=3 active=1 N0=1 N1=2 N1023=4 kernelpagesize_kB=4\n"
        "280000 interleave:0-1 file=/a\\040N1=7\\075N1 huge dirty=3 N1=3 kernelpagesize_kB=2048\n"
        "2c0000 default\n"
        "300000 default file=/N0=9 mapped=1 Nothing=1 N=3 N0 N1024=6 N1=1 kernelpagesize_kB=64\n"
        "3ff000 prefer=static:1 anon=1 N7=1\n"
        "400000 default anon=50 N0=50 kernelpagesize_kB=4\n";
    fault_os_file(smaps_path, smaps);
    fault_os_file(numa_maps_path, numa_maps);
    um_block block = invented_block();
    const char *several[] = {"0-1,7,1023\n", "0,1\n", "\n", "", "1024\n"};
    for (int i = 0; i < 10; i++) {
        fault_os_file(has_memory_path, several[i % 5]);
        fault_os_limit_read(i < 5 ? 0 : 5);
        um_placement p = placement_of(&block);
        CHECK_EQ(p.node_bytes[0], 4 << 10);
        CHECK_EQ(p.node_bytes[1], (8 << 10) + (3 * 2048 << 10) + (64 << 10));
        CHECK_EQ(p.node_bytes[7], page);
        CHECK_EQ(p.node_bytes[1023], 16 << 10);
        CHECK_EQ(on_all_nodes(&p), ((4 + 8 + 16 + 3 * 2048 + 64) << 10) + page);
    }
    fault_os_limit_read(0);
    /* A line with all possible nodes. */
    static char line[40000];
    int n = snprintf(line, sizeof line, "200000 default");
    for (int node = 0; node < UM_MAX_NODES; node++) {
        n += snprintf(line + n, sizeof line - (size_t)n, " N%d=%d", node, 1000000 + node);
    }
    snprintf(line + n, sizeof line - (size_t)n, " kernelpagesize_kB=4\n");
    fault_os_file(numa_maps_path, line);
    um_placement p = placement_of(&block);
    bool all = true;
    for (uint64_t node = 0; node < UM_MAX_NODES; node++) {
        all = all && p.node_bytes[node] == (1000000 + node) * 4096;
    }
    CHECK(all);
    /* With one node, its figures are not read. */
    const char *one[] = {"0\n", "3\n"};
    for (int i = 0; i < 2; i++) {
        fault_os_file(has_memory_path, one[i]);
        p = placement_of(&block);
        CHECK_EQ(p.node_bytes[3 * i], 64 << 10);
        CHECK_EQ(on_all_nodes(&p), 64 << 10);
    }
}

TEST(resident) {
    AUTO_BLOCK block = make_pages(5000 * page, UM_PAGES_4K);
    unsigned char *bytes = block.base;
    for (size_t i = 10; i < 20; i++) {
        bytes[i * page] = 1;
    }
    bytes[4999 * page] = 1;
    CHECK_EQ(resident(&block, 0, block.nbytes), 11 * page);
    CHECK_EQ(resident(&block, 0, 10 * page), 0);
    CHECK_EQ(resident(&block, 0, 10 * page + 1), page);
    CHECK_EQ(resident(&block, 10 * page - 1, 2), page);
    CHECK_EQ(resident(&block, 15 * page + 7, 1), page);
    CHECK_EQ(resident(&block, 15 * page + 7, page), 2 * page);
    CHECK_EQ(resident(&block, 4999 * page, page), page);
    CHECK_EQ(resident(&block, 15 * page, 0), 0);
    CHECK_EQ(resident(&block, block.nbytes, 0), 0);

    uint64_t untouched = 12345;
    size_t beyond[][2] = {{0, block.nbytes + 1}, {block.nbytes, 1},        {block.nbytes + 1, 0},
                          {1, SIZE_MAX},         {SIZE_MAX, block.nbytes}, {SIZE_MAX, 1}};
    for (size_t i = 0; i < COUNT(beyond); i++) {
        CHECK_INVALID(um_block_resident(&block, beyond[i][0], beyond[i][1], &untouched, &test_err));
    }
    CHECK_EQ(untouched, 12345);
}

typedef struct asking {
    um_block block;
    uint64_t nbytes;
} asking;

static um_status run_resident(void *context, um_error *err) {
    asking *a = context;
    return um_block_resident(&a->block, 0, a->block.nbytes, &a->nbytes, err);
}

static void forget(void *context) {
    ((asking *)context)->nbytes = 12345;
}

/* Makes the Nth call fail: either the same placement is found in another way, or an error names the
 * call and nothing else has changed. */
static bool check_verify_fault(const um_block *block, const um_placement *expected, unsigned n,
                               int os_errno) {
    um_placement placement, pattern;
    um_error err;
    SPOIL(placement);
    SPOIL(pattern);
    test_err_pattern(&err);
    os_state_begin();
    fault_os_fail_nth(n, os_errno);
    um_status status = um_block_verify(block, &placement, &err);
    const char *failed = fault_os_failed();
    fault_os_fail_nth(0, 0);
    CHECK(os_state_unchanged());
    if (status == UM_OK) {
        CHECK(same_placement(&placement, expected));
    } else {
        REQUIRE(failed != NULL);
        bool is_read = strcmp(failed, "um__os_read") == 0;
        CHECK(is_read || strcmp(failed, "um__os_open_read") == 0);
        CHECK(status == (is_read ? UM_E_IO : os_errno == ENOMEM ? UM_E_NOMEM : UM_E_OS));
        CHECK(err.status == status);
        CHECK(err.os_errno == os_errno);
        CHECK(strstr(err.what, is_read ? "read /proc/self/" : "open /proc/self/") != NULL);
        CHECK(memcmp(&placement, &pattern, sizeof pattern) == 0);
    }
    return failed != NULL;
}

TEST(faults) {
    asking a = {.block = make_pages(10000 * page, UM_PAGES_4K)};
    ((unsigned char *)a.block.base)[0] = 1;
    forget(&a);
    CHECK_EACH_FAULT(run_resident, forget, &a, a.nbytes, NULL);
    /* With one node and with several, whose figures the kernel reports. */
    bool has_numa_maps = access(numa_maps_path, R_OK) == 0;
    for (int several = 0; several <= has_numa_maps; several++) {
        fault_os_file(has_memory_path, several ? "0-3\n" : NULL);
        um_placement expected = placement_of(&a.block);
        CHECK_EQ(expected.resident_bytes, page);
        CHECK_EQ(on_all_nodes(&expected), page);
        int errnos[] = {EPERM, ENOMEM, EIO};
        for (int i = 0; i < 3; i++) {
            unsigned n = 1;
            while (check_verify_fault(&a.block, &expected, n, errnos[i])) {
                n++;
            }
            CHECK(n > 5);
        }
        /* An interruption is no failure, and a kernel without NUMA has one node. */
        for (unsigned n = 2; n < 4; n++) {
            um_placement p;
            fault_os_fail_nth(n, EINTR);
            CHECK_OK(um_block_verify(&a.block, &p, &test_err));
            CHECK_STR(fault_os_failed(), "um__os_read");
            CHECK(same_placement(&p, &expected));
        }
    }
    unmap_block(&a.block);
    um_placement p;
    um_block block = invented_block();
    fault_os_file(smaps_path, "200000-400000 rw-p 00000000 00:00 0 \nRss: 64 kB\nVmFlags: rd \n");
    fault_os_file(has_memory_path, "0-3\n");
    unsigned n = 1, n_books = 0;
    for (const char *failed = ""; failed != NULL; n++) {
        fault_os_fail_nth(n, ENOENT);
        um_status status = um_block_verify(&block, &p, NULL);
        failed = fault_os_failed();
        if (n > 1 && failed != NULL && strcmp(failed, "um__os_open_read") == 0) {
            CHECK(status == UM_OK);
            n_books++; /* first has_memory, then numa_maps */
            CHECK_EQ(p.node_bytes[0], n_books == 2 ? 64 << 10 : 0);
        }
    }
    CHECK_EQ(n_books, 2);
}
