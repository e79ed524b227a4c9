/* Warming: what is in RAM afterwards, which threads brought it there, and the error when a page is
 * not available. */
#include "blocks.h"
#include <sched.h>

TEST(range) {
    enum { N = 64 };
    uint64_t seed = 3;
    for (int i = 0; i < 60; i++) {
        AUTO_BLOCK block = make_pages(N * page, UM_PAGES_4K);
        unsigned char *bytes = block.base;
        bytes[20 * page + 5] = 99;
        uint64_t r = test_random(&seed);
        size_t offset = (size_t)(r % (N * page)), most = N * page - offset;
        size_t nbytes = i % 2 == 0 ? (size_t)(r >> 20) % (most + 1) : most / 2;
        unsigned n_threads = 1 + (unsigned)(r >> 50) % 5;
        bool touched = offset / page <= 20 && offset + nbytes > 20 * page;
        size_t expected = nbytes == 0 ? 0 : (offset + nbytes + page - 1) / page - offset / page;
        fault_os_fail_nth(0, 0);
        CHECK_OK(um_block_warm(&block, offset, nbytes, n_threads, NULL, &test_err));
        unsigned n_started = fault_os_calls_of("um__os_thread_start");
        CHECK(n_started <= n_threads);
        CHECK(n_started != 1);
        CHECK_EQ(fault_os_calls_of("um__os_thread_join"), n_started);
        CHECK_EQ(fault_os_calls_of("um__os_set_affinity"), n_started); /* test_cpus.c: to which */
        CHECK_EQ(resident(&block, offset, nbytes), expected * page);
        CHECK_EQ(resident(&block, 0, block.nbytes),
                 (expected + (touched && nbytes > 0 ? 0 : 1)) * page);
        CHECK(bytes[20 * page + 5] == 99);
    }
}

/* Threads divide a range at borders of huge pages. A range that begins and ends within a huge page
 * still has no more parts than threads. */
TEST(parts) {
    SKIP_UNLESS(huge_page != 0, "the kernel has no huge pages");
    AUTO_BLOCK block = make_pages(9 * huge_page, UM_PAGES_THP);
    size_t small = huge_page / 8;
    for (size_t offset = 0; offset < huge_page; offset += small) {
        for (size_t nbytes = small; nbytes <= 8 * huge_page; nbytes += 3 * small) {
            for (unsigned n_threads = 1; n_threads <= 4; n_threads++) {
                fault_os_fail_nth(0, 0);
                CHECK_OK(um_block_warm(&block, offset, nbytes, n_threads, NULL, &test_err));
                CHECK(fault_os_calls_of("um__os_thread_start") <= n_threads);
            }
        }
    }
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, UINT32_MAX, NULL, &test_err));
    CHECK_EQ(placement_of(&block).resident_bytes, block.nbytes);
}

TEST(cpus) {
    AUTO_BLOCK block = make_pages(16 * page, UM_PAGES_4K);
    cpu_set_t allowed, after;
    int some[2] = {-1, -1}, n_some = 0;
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    for (size_t cpu = 0; cpu < CPU_SETSIZE && n_some < 2; cpu++) {
        if (CPU_ISSET(cpu, &allowed)) {
            some[n_some++] = (int)cpu;
        }
    }
    some[1] = n_some < 2 ? some[0] : some[1];
    /* A single pinned thread is not the thread of the caller. */
    int one[] = {some[1]};
    fault_os_fail_nth(0, 0);
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, 1, one, &test_err));
    CHECK_EQ(fault_os_calls_of("um__os_thread_start"), 1);
    CHECK_EQ(fault_os_pinned_to((unsigned)some[1]), 1);
    one[0] = -1;
    fault_os_fail_nth(0, 0);
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, 1, one, &test_err));
    CHECK_EQ(fault_os_calls_of("um__os_thread_start"), 0);
    CHECK_EQ(fault_os_calls_of("um__os_set_affinity"), 0);
    /* Each thread is pinned to its own CPU; one with a negative number runs anywhere; a CPU that
     * does not exist does no harm. */
    int mixed[] = {some[0], -1, some[1], 8191};
    fault_os_fail_nth(0, 0);
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, 4, mixed, &test_err));
    CHECK_EQ(fault_os_calls_of("um__os_thread_start"), 4);
    CHECK_EQ(fault_os_calls_of("um__os_set_affinity"), 3);
    CHECK_EQ(fault_os_calls_of("um__os_get_affinity"), 0);
    CHECK_EQ(fault_os_pinned_to((unsigned)some[0]), some[0] == some[1] ? 2 : 1);
    CHECK_EQ(fault_os_pinned_to(8191), 1);
    CHECK_EQ(resident(&block, 0, block.nbytes), block.nbytes);
    fault_os_fail_nth(0, 0);
    CHECK_OK(um_block_warm(&block, 0, page, 4, NULL, &test_err)); /* by the caller */
    CHECK_EQ(fault_os_calls_of("um__os_thread_start"), 0);
    int beyond[] = {some[0], 8192};
    CHECK_INVALID(um_block_warm(&block, 0, page, 2, beyond, &test_err));
    CHECK_OK(um_block_warm(&block, 0, page, 1, beyond, &test_err));
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0);
    CHECK(CPU_EQUAL(&allowed, &after)); /* of the caller */
}

TEST(gaps) {
    AUTO_BLOCK block =
        make_block(10 * page, OPTIONS(.pages = UM_PAGES_4K, .reserve_nbytes = 100 * page));
    CHECK_OK(um_block_commit(&block, 40 * page, 20 * page, &test_err));
    CHECK_OK(um_block_warm(&block, 45 * page, 10 * page, 2, NULL, &test_err));
    CHECK_EQ(resident(&block, 0, 100 * page), 10 * page);
    size_t not_committed[][2] = {{0, 11 * page},
                                 {10 * page, 1},
                                 {39 * page, 2 * page},
                                 {0, 100 * page},
                                 {20 * page, 5 * page}};
    for (size_t i = 0; i < COUNT(not_committed); i++) {
        CHECK_INVALID(
            um_block_warm(&block, not_committed[i][0], not_committed[i][1], 2, NULL, &test_err));
    }
    CHECK_OK(um_block_warm(&block, 20 * page, 0, 1, NULL, &test_err));
    CHECK_EQ(placement_of(&block).resident_bytes, 10 * page);
}

TEST(shared) {
    AUTO_BLOCK block = make_block(20 * page,
                                  OPTIONS(.pages = UM_PAGES_4K, .sharing = UM_SHARING_MEMFD)),
               other;
    REQUIRE(CHECK_OK(um_block_attach(&other, block.fd, UM_ACCESS_READ, UM_CAT_OTHER, &test_err)));
    *bytes_of(&block, 0) = 77;
    CHECK_OK(um_block_warm(&other, 0, 5 * page, 2, NULL, &test_err));
    CHECK_EQ(placement_of(&other).resident_bytes, 5 * page);
    CHECK_EQ(placement_of(&block).resident_bytes, page);
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, 1, NULL, &test_err));
    CHECK_EQ(placement_of(&block).resident_bytes, 20 * page);
    CHECK(*bytes_of(&other, 0) == 77);
}

/* Shared memory that another process makes shorter. */
TEST(shorter) {
    AUTO_FD fd = memory_file(0);
    AUTO_BLOCK block =
        make_block(20 * page, OPTIONS(.pages = UM_PAGES_4K, .sharing = UM_SHARING_FD, .fd = fd));
    CHECK(ftruncate(fd, 10 * (off_t)page) == 0);
    for (unsigned n_threads = 1; n_threads <= 2; n_threads++) {
        CHECK_STATUS(UM_E_IO, um_block_warm(&block, 0, block.nbytes, n_threads, NULL, &test_err));
        CHECK(test_err.os_errno == 0);
        CHECK(um_block_warm(&block, 15 * page, page, n_threads, NULL, NULL) == UM_E_IO);
    }
    CHECK_OK(um_block_warm(&block, 0, 10 * page, 2, NULL, &test_err));
    unmap_block(&block);
    /* The last page of a file exists if the file ends inside it. */
    CHECK(ftruncate(fd, 2 * (off_t)page + 100) == 0);
    REQUIRE(CHECK_OK(um_block_attach(&block, fd, UM_ACCESS_SHARED, UM_CAT_OTHER, &test_err)));
    CHECK_OK(um_block_warm(&block, 0, 3 * page, 1, NULL, &test_err));
    fault_os_fail_nth(1, EFAULT);
    CHECK_STATUS(UM_E_NOMEM, um_block_warm(&block, 0, 3 * page, 1, NULL, &test_err));
    CHECK(ftruncate(fd, (off_t)page) == 0);
    CHECK_STATUS(UM_E_IO, um_block_warm(&block, 0, page + 1, 1, NULL, &test_err));
    CHECK_OK(um_block_warm(&block, 0, page, 1, NULL, &test_err));
}

/* A file system in memory that has less room than the file. */
TEST(full_file_system) {
    AUTO_FD fd = file_in_room_for(4);
    SKIP_UNLESS(fd >= 0, "this process may not mount one");
    AUTO_BLOCK block =
        make_block(20 * page, OPTIONS(.pages = UM_PAGES_4K, .sharing = UM_SHARING_FD, .fd = fd));
    CHECK_OK(um_block_warm(&block, 0, 2 * page, 1, NULL, &test_err));
    for (unsigned n_threads = 1; n_threads <= 2; n_threads++) {
        CHECK_STATUS(UM_E_NOMEM,
                     um_block_warm(&block, 0, block.nbytes, n_threads, NULL, &test_err));
        CHECK(test_err.os_errno == ENOMEM);
    }
}

TEST(hugetlb) {
    BORROW_HUGE_PAGES(4);
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        AUTO_BLOCK block =
            make_block(4 * HUGE_BYTES, OPTIONS(.pages = UM_PAGES_2M, .sharing = sharing));
        for (unsigned n_threads = 1; n_threads <= 6; n_threads++) {
            fault_os_fail_nth(0, 0);
            CHECK_OK(
                um_block_warm(&block, HUGE_BYTES / 2, 3 * HUGE_BYTES, n_threads, NULL, &test_err));
            CHECK(fault_os_calls_of("um__os_thread_start") <= (n_threads < 4 ? n_threads : 4));
        }
        CHECK_EQ(placement_of(&block).resident_bytes, 4 * HUGE_BYTES);
    }
}

/* The errno of the kernel where a touch would end the process. */
TEST(no_page) {
    struct {
        um_block_options options;
        um_status status;
    } cases[] = {{{.pages = UM_PAGES_4K}, UM_E_OS},
                 {{.pages = UM_PAGES_4K, .sharing = UM_SHARING_MEMFD}, UM_E_NOMEM}};
    for (int i = 0; i < 2; i++) {
        AUTO_BLOCK block = make_block(4 * page, &cases[i].options);
        for (int huge = 0; huge < 2; huge++) {
            block.requested_pages = huge ? UM_PAGES_2M : UM_PAGES_4K; /* in name only */
            um_status status = huge ? UM_E_NOMEM : cases[i].status;
            fault_os_fail_nth(1, EFAULT);
            CHECK_STATUS(status, um_block_warm(&block, 0, block.nbytes, 1, NULL, &test_err));
            CHECK_STR(fault_os_failed(), "um__os_advise");
            CHECK(test_err.os_errno == (status == UM_E_NOMEM ? ENOMEM : EFAULT));
            CHECK_EQ(test_err.asked, block.nbytes);
        }
    }
}

TEST(refused) {
    AUTO_BLOCK block = make_pages(4 * page, UM_PAGES_4K);
    um_block copy = block;
    size_t beyond[][2] = {{0, 4 * page + 1}, {4 * page, 1}, {4 * page + 1, 0},
                          {1, SIZE_MAX},     {SIZE_MAX, 2}, {SIZE_MAX - page, 2 * page}};
    for (size_t i = 0; i < COUNT(beyond); i++) {
        CHECK_INVALID(um_block_warm(&block, beyond[i][0], beyond[i][1], 2, NULL, &test_err));
    }
    CHECK_FAILS(UM_E_INVALID, um_block_warm, &block, 0, page, 0, NULL);
    CHECK(memcmp(&block, &copy, sizeof block) == 0);
    CHECK_EQ(placement_of(&block).resident_bytes, 0);
}

typedef struct warming {
    um_block block;
    unsigned n_threads;
    const int *cpus;
} warming;

static um_status run_warm(void *context, um_error *err) {
    warming *w = context;
    return um_block_warm(&w->block, 0, w->block.nbytes, w->n_threads, w->cpus, err);
}

TEST(faults) {
    static const int cpus[] = {0, -1, 0};
    os_state_settle_threads(6);
    um_block_options kinds[] = {{.pages = UM_PAGES_4K},
                                {.pages = UM_PAGES_THP},
                                {.pages = UM_PAGES_4K, .sharing = UM_SHARING_MEMFD}};
    for (unsigned n_threads = 1; n_threads <= 3; n_threads++) {
        for (int i = 0; i < 6; i++) {
            const um_block_options *options = &kinds[i % 3];
            warming w = {
                .block = make_block(3 * (options->pages == UM_PAGES_THP ? unit : page), options),
                .n_threads = n_threads,
                .cpus = i < 3 ? NULL : cpus};
            memset(w.block.base, 0x77, w.block.nbytes);
            CHECK_EACH_FAULT_AT(run_warm, NULL, &w, w.block.base, w.block.nbytes, HARMLESS_THREADS);
            unmap_block(&w.block);
        }
    }
    AUTO_BLOCK block = make_pages(4 * page, UM_PAGES_4K);
    int interruptions[] = {EINTR, EAGAIN};
    for (int i = 0; i < 2; i++) {
        fault_os_fail_nth(1, interruptions[i]);
        CHECK_OK(um_block_warm(&block, 0, block.nbytes, 1, NULL, &test_err));
        CHECK_STR(fault_os_failed(), "um__os_advise");
    }
    fault_os_fail_nth(0, 0);
    CHECK_EQ(placement_of(&block).resident_bytes, block.nbytes);
}
