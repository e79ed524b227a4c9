/* Blocks: what is mapped, what the kernel says of it, and what is left when a call fails. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "test.h"

#include <errno.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "fault_os.h"

/* Without the huge page size a block gets base pages, and says so. */
static size_t page, huge_page;
static os_state before, after;

static um_block make_block(size_t nbytes, um_pages pages) {
    um_block block;
    memset(&block, 0x5A, sizeof block);
    REQUIRE(CHECK_OK(um_block_map(&block, nbytes, pages, UM_CAT_SCRATCH, &test_err)));
    return block;
}

static void unmap(um_block *block) {
    static const um_block zeroed;
    CHECK_OK(um_block_unmap(block, &test_err));
    CHECK(memcmp(block, &zeroed, sizeof zeroed) == 0);
}

static um_placement placement_of(const um_block *block) {
    um_placement placement;
    memset(&placement, 0, sizeof placement);
    CHECK_OK(um_block_verify(block, &placement, &test_err));
    return placement;
}

static um_ledger_row ledger_row(um_category category) {
    um_ledger_row row;
    CHECK_OK(um_ledger_read(category, &row, &test_err));
    return row;
}

static uint64_t resident(const um_block *block, size_t offset, size_t nbytes) {
    uint64_t found = UINT64_MAX;
    CHECK_OK(um_block_resident(block, offset, nbytes, &found, &test_err));
    return found;
}

static bool thp_enabled(void) {
    char text[64] = "";
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r");
    if (file != NULL) {
        size_t n = fread(text, 1, sizeof text - 1, file);
        text[n] = '\0';
        fclose(file);
    }
    return huge_page != 0 && strstr(text, "[never]") == NULL;
}

static void test_page_sizes(void) {
    page = um_page_bytes();
    CHECK_EQ_U64(page, sysconf(_SC_PAGESIZE));
    huge_page = um_huge_page_bytes();
    CHECK(huge_page == 0 || (huge_page > page && huge_page % page == 0));
    CHECK_EQ_U64(huge_page != 0, access("/sys/kernel/mm/transparent_hugepage", F_OK) == 0);
}

/* ---- map and unmap ---- */

static void check_map(size_t asked, um_pages pages, size_t nbytes, size_t align) {
    um_block block = make_block(asked, pages); /* sets the ledger's high water */
    unmap(&block);
    os_state_read(&before);
    um_ledger_row row = ledger_row(UM_CAT_SCRATCH), row_mapped;

    block = make_block(asked, pages);
    CHECK_EQ_U64(block.nbytes, nbytes);
    CHECK_EQ_U64((uintptr_t)block.base % align, 0);
    CHECK_EQ_U64(block.requested_nbytes, asked);
    CHECK(block.requested_pages == pages);
    CHECK(block.category == UM_CAT_SCRATCH);
    row_mapped = ledger_row(UM_CAT_SCRATCH);
    CHECK_EQ_U64(row_mapped.n_mappings, row.n_mappings + 1);
    CHECK_EQ_U64(row_mapped.mapped_bytes, row.mapped_bytes + nbytes);

    unsigned char *bytes = block.base;
    CHECK(strcmp(os_state_permissions(bytes - 1), "---p") == 0);
    CHECK(strcmp(os_state_permissions(bytes), "rw-p") == 0);
    CHECK(strcmp(os_state_permissions(bytes + nbytes - 1), "rw-p") == 0);
    CHECK(strcmp(os_state_permissions(bytes + nbytes), "---p") == 0);
    CHECK_EQ_U64(placement_of(&block).resident_bytes, 0);
    bool zeroed = true;
    for (size_t at = 0; at < nbytes; at += page) {
        zeroed = zeroed && bytes[at] == 0 && bytes[at + page - 1] == 0;
        bytes[at] = 1;
    }
    CHECK(zeroed);
    CHECK_EQ_U64(placement_of(&block).resident_bytes, nbytes);

    unmap(&block);
    os_state_read(&after);
    CHECK(os_state_same(&before, &after));
}

static void test_map(void) {
    size_t unit = huge_page == 0 ? page : huge_page;
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

static void check_map_fails(um_status status, size_t nbytes, um_pages pages, um_category category) {
    um_block block, untouched;
    memset(&block, 0x5A, sizeof block);
    memcpy(&untouched, &block, sizeof block);
    os_state_read(&before);
    CHECK_STATUS(status, um_block_map(&block, nbytes, pages, category, &test_err));
    if (status == UM_E_NOMEM) {
        CHECK(test_err.os_errno == ENOMEM);
        CHECK_EQ_U64(test_err.asked, nbytes);
    }
    CHECK(um_block_map(&block, nbytes, pages, category, NULL) == status);
    CHECK(memcmp(&block, &untouched, sizeof block) == 0);
    os_state_read(&after);
    CHECK(os_state_same(&before, &after));
}

static void test_refused_maps(void) {
    um_pages kinds[] = {UM_PAGES_AUTO, UM_PAGES_4K, UM_PAGES_THP};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        check_map_fails(UM_E_INVALID, 0, kinds[i], UM_CAT_SCRATCH);
        check_map_fails(UM_E_INVALID, SIZE_MAX, kinds[i], UM_CAT_SCRATCH);
        check_map_fails(UM_E_INVALID, SIZE_MAX - page + 1, kinds[i], UM_CAT_SCRATCH);
        /* More than the address space has. */
        check_map_fails(UM_E_NOMEM, SIZE_MAX / 4, kinds[i], UM_CAT_SCRATCH);
        check_map_fails(UM_E_NOMEM, (size_t)1 << 58, kinds[i], UM_CAT_SCRATCH);
        check_map_fails(UM_E_INVALID, page, kinds[i], UM_CAT_COUNT);
        check_map_fails(UM_E_INVALID, page, kinds[i], (um_category)-1);
    }
    check_map_fails(UM_E_INVALID, page, (um_pages)3, UM_CAT_SCRATCH);
    check_map_fails(UM_E_INVALID, page, (um_pages)-1, UM_CAT_SCRATCH);
}

static void test_unmap(void) {
    um_block zeroed = {0};
    fault_os_fail_nth(0, 0);
    unmap(&zeroed);
    CHECK_EQ_U64(fault_os_calls(), 0);

    /* What cannot be unmapped is still there, and can be unmapped later. */
    um_block block = make_block(3 * page, UM_PAGES_4K), copy = block;
    memset(block.base, 7, block.nbytes);
    os_state_read(&before);
    fault_os_fail_nth(1, EPERM);
    CHECK_STATUS(UM_E_OS, um_block_unmap(&block, &test_err));
    CHECK(test_err.os_errno == EPERM && strcmp(test_err.what, "munmap") == 0);
    fault_os_fail_nth(1, ENOMEM);
    CHECK(um_block_unmap(&block, NULL) != UM_OK);
    CHECK(memcmp(&block, &copy, sizeof block) == 0);
    CHECK(((unsigned char *)block.base)[3 * page - 1] == 7);
    os_state_read(&after);
    CHECK(os_state_same(&before, &after));
    unmap(&block);
    unmap(&block);
}

/* ---- verify ---- */

static void test_verify_small_pages(void) {
    um_block block = make_block(100 * page, UM_PAGES_4K);
    um_block neighbour = make_block(50 * page, UM_PAGES_4K); /* the kernel puts it close */
    unsigned char *bytes = block.base;
    for (size_t i = 0; i < 100; i += 3) {
        bytes[i * page] = 1;
    }
    um_placement p = placement_of(&block);
    CHECK(p.pages == UM_PAGES_4K);
    CHECK_EQ_U64(p.page_bytes, page);
    CHECK_EQ_U64(p.resident_bytes, 34 * page);
    CHECK_EQ_U64(p.pss_bytes, 34 * page);
    CHECK_EQ_U64(p.huge_bytes, 0);
    CHECK_EQ_U64(p.locked_bytes, 0);
    CHECK_EQ_U64(p.swapped_bytes, 0);
    CHECK_EQ_U64(placement_of(&neighbour).resident_bytes, 0);

    /* Pages that somebody protected or locked make the range several entries of smaps: all of them
     * count. */
    CHECK(mprotect(bytes + 30 * page, page, PROT_READ) == 0);
    CHECK(mprotect(bytes + 60 * page, 2 * page, PROT_NONE) == 0);
    CHECK_EQ_U64(placement_of(&block).resident_bytes, 34 * page);
    /* Not through the C library: AddressSanitizer makes its mlock do nothing. */
    if (syscall(SYS_mlock, bytes + page, 5 * page) == 0) {
        p = placement_of(&block);
        CHECK_EQ_U64(p.locked_bytes, 5 * page);
        CHECK_EQ_U64(p.resident_bytes, (34 + 4) * page); /* page 3 was there */
        CHECK(syscall(SYS_munlock, bytes, block.nbytes) == 0);
    } else {
        test_skip("locked_bytes", "this process may not lock memory");
    }

    /* However few bytes a read of /proc gives. */
    um_placement whole = placement_of(&block), piecewise;
    fault_os_limit_read(61);
    CHECK_OK(um_block_verify(&block, &piecewise, &test_err));
    fault_os_limit_read(0);
    CHECK(memcmp(&whole, &piecewise, sizeof whole) == 0);

    memset(neighbour.base, 1, neighbour.nbytes);
    CHECK(memcmp(&whole, &(um_placement){0}, sizeof whole) != 0);
    p = placement_of(&block);
    CHECK(memcmp(&whole, &p, sizeof whole) == 0);
    CHECK_EQ_U64(placement_of(&neighbour).resident_bytes, 50 * page);
    CHECK(mprotect(bytes, block.nbytes, PROT_READ | PROT_WRITE) == 0);
    unmap(&neighbour);
    unmap(&block);
}

static void test_verify_huge_pages(void) {
    if (!thp_enabled()) {
        test_skip("huge pages", "transparent huge pages are switched off");
        return;
    }
    um_block block = make_block(4 * huge_page, UM_PAGES_THP);
    um_placement p = placement_of(&block);
    CHECK(p.pages == UM_PAGES_THP); /* would be, when touched */
    CHECK_EQ_U64(p.page_bytes, huge_page);
    CHECK_EQ_U64(p.huge_bytes, 0);
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, 1, &test_err));
    p = placement_of(&block);
    CHECK_EQ_U64(p.resident_bytes, block.nbytes);
    CHECK(p.huge_bytes <= block.nbytes && p.huge_bytes % huge_page == 0);
    CHECK(p.pages == (p.huge_bytes > 0 ? UM_PAGES_THP : UM_PAGES_4K));
    CHECK_EQ_U64(p.page_bytes, p.huge_bytes > 0 ? huge_page : page);
    if (p.huge_bytes == 0) {
        test_skip("huge_bytes", "the kernel gave no huge page (memory is fragmented)");
    }
    unmap(&block);

    block = make_block(4 * huge_page, UM_PAGES_4K);
    CHECK(placement_of(&block).pages == UM_PAGES_4K);
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, 1, &test_err));
    p = placement_of(&block);
    CHECK(p.pages == UM_PAGES_4K);
    CHECK_EQ_U64(p.page_bytes, page);
    CHECK_EQ_U64(p.huge_bytes, 0);
    CHECK_EQ_U64(p.resident_bytes, block.nbytes);
    unmap(&block);
}

static void test_resident(void) {
    um_block block = make_block(5000 * page, UM_PAGES_4K);
    unsigned char *bytes = block.base;
    for (size_t i = 10; i < 20; i++) {
        bytes[i * page] = 1;
    }
    bytes[4999 * page] = 1;
    CHECK_EQ_U64(resident(&block, 0, block.nbytes), 11 * page);
    CHECK_EQ_U64(resident(&block, 0, 10 * page), 0);
    CHECK_EQ_U64(resident(&block, 0, 10 * page + 1), page);
    CHECK_EQ_U64(resident(&block, 10 * page - 1, 2), page);
    CHECK_EQ_U64(resident(&block, 15 * page + 7, 1), page);
    CHECK_EQ_U64(resident(&block, 15 * page + 7, page), 2 * page);
    CHECK_EQ_U64(resident(&block, 4999 * page, page), page);
    CHECK_EQ_U64(resident(&block, 15 * page, 0), 0);
    CHECK_EQ_U64(resident(&block, block.nbytes, 0), 0);

    uint64_t untouched = 12345;
    size_t beyond[][2] = {{0, block.nbytes + 1}, {block.nbytes, 1},        {block.nbytes + 1, 0},
                          {1, SIZE_MAX},         {SIZE_MAX, block.nbytes}, {SIZE_MAX, 1}};
    for (size_t i = 0; i < sizeof beyond / sizeof beyond[0]; i++) {
        CHECK_STATUS(UM_E_INVALID,
                     um_block_resident(&block, beyond[i][0], beyond[i][1], &untouched, &test_err));
    }
    CHECK_EQ_U64(untouched, 12345);
    unmap(&block);
}

/* ---- warm ---- */

static void test_warm_range(void) {
    enum { N = 64 };
    uint64_t seed = 3;
    for (int i = 0; i < 60; i++) {
        um_block block = make_block(N * page, UM_PAGES_4K);
        unsigned char *bytes = block.base;
        bytes[20 * page + 5] = 99;
        uint64_t r = test_random(&seed);
        size_t offset = (size_t)(r % (N * page)), most = N * page - offset;
        size_t nbytes = i % 2 == 0 ? (size_t)(r >> 20) % (most + 1) : most / 2;
        unsigned n_threads = 1 + (unsigned)(r >> 50) % 5;
        bool touched = offset / page <= 20 && offset + nbytes > 20 * page;
        size_t expected = nbytes == 0 ? 0 : (offset + nbytes + page - 1) / page - offset / page;
        fault_os_fail_nth(0, 0);
        CHECK_OK(um_block_warm(&block, offset, nbytes, n_threads, &test_err));
        unsigned n_started = fault_os_calls_of("um_os_thread_start");
        CHECK(n_started <= n_threads && n_started != 1);
        CHECK_EQ_U64(fault_os_calls_of("um_os_thread_join"), n_started);
        CHECK_EQ_U64(fault_os_calls_of("um_os_set_affinity"), n_started);
        CHECK_EQ_U64(resident(&block, offset, nbytes), expected * page);
        CHECK_EQ_U64(resident(&block, 0, block.nbytes),
                     (expected + (touched && nbytes > 0 ? 0 : 1)) * page);
        CHECK(bytes[20 * page + 5] == 99);
        unmap(&block);
    }
}

/* Where threads meet at huge page borders, a range that begins and ends within a huge page is no
 * more parts than there are threads. */
static void test_warm_parts(void) {
    if (huge_page == 0) {
        test_skip("parts of huge pages", "the kernel has no huge pages");
        return;
    }
    um_block block = make_block(9 * huge_page, UM_PAGES_THP);
    size_t small = huge_page / 8;
    for (size_t offset = 0; offset < huge_page; offset += small) {
        for (size_t nbytes = small; nbytes <= 8 * huge_page; nbytes += 3 * small) {
            for (unsigned n_threads = 1; n_threads <= 4; n_threads++) {
                fault_os_fail_nth(0, 0);
                CHECK_OK(um_block_warm(&block, offset, nbytes, n_threads, &test_err));
                CHECK(fault_os_calls_of("um_os_thread_start") <= n_threads);
            }
        }
    }
    CHECK_OK(um_block_warm(&block, 0, block.nbytes, UINT32_MAX, &test_err));
    CHECK_EQ_U64(placement_of(&block).resident_bytes, block.nbytes);
    unmap(&block);
}

static void test_warm_keeps_content_and_affinity(void) {
    um_block block = make_block(40 * page, UM_PAGES_AUTO);
    unsigned char *bytes = block.base;
    cpu_set_t cpus, cpus_after;
    CHECK(sched_getaffinity(0, sizeof cpus, &cpus) == 0);
    for (size_t i = 0; i < block.nbytes; i += 2 * page) {
        memset(bytes + i, (int)(i / page) + 1, page);
    }
    for (unsigned n_threads = 1; n_threads <= 3; n_threads++) {
        CHECK_OK(um_block_warm(&block, 0, block.nbytes, n_threads, &test_err));
        CHECK_OK(um_block_warm(&block, block.nbytes, 0, n_threads, &test_err));
    }
    bool same = true;
    for (size_t i = 0; i < block.nbytes; i++) {
        size_t at = i / page;
        same = same && bytes[i] == (at % 2 == 0 ? at + 1 : 0);
    }
    CHECK(same);
    CHECK(sched_getaffinity(0, sizeof cpus_after, &cpus_after) == 0);
    CHECK(CPU_EQUAL(&cpus, &cpus_after));
    CHECK_EQ_U64(placement_of(&block).resident_bytes, block.nbytes);
    unmap(&block);
}

static void test_refused_warm(void) {
    um_block block = make_block(4 * page, UM_PAGES_4K), copy = block;
    size_t beyond[][2] = {{0, 4 * page + 1}, {4 * page, 1}, {4 * page + 1, 0},
                          {1, SIZE_MAX},     {SIZE_MAX, 2}, {SIZE_MAX - page, 2 * page}};
    for (size_t i = 0; i < sizeof beyond / sizeof beyond[0]; i++) {
        CHECK_STATUS(UM_E_INVALID, um_block_warm(&block, beyond[i][0], beyond[i][1], 2, &test_err));
    }
    CHECK_STATUS(UM_E_INVALID, um_block_warm(&block, 0, page, 0, &test_err));
    CHECK(um_block_warm(&block, 0, page, 0, NULL) == UM_E_INVALID);
    CHECK(memcmp(&block, &copy, sizeof block) == 0);
    CHECK_EQ_U64(placement_of(&block).resident_bytes, 0);
    unmap(&block);
}

/* ---- each system call in turn ---- */

typedef struct mapping {
    um_block block;
    size_t nbytes;
    um_pages pages;
} mapping;

static um_status run_map(void *context, um_error *err) {
    mapping *m = context;
    return um_block_map(&m->block, m->nbytes, m->pages, UM_CAT_HISTORY, err);
}

static void undo_map(void *context) {
    mapping *m = context;
    CHECK(um_block_unmap(&m->block, NULL) == UM_OK);
    memset(&m->block, 0x5A, sizeof m->block);
}

static void test_map_faults(void) {
    size_t unit = huge_page == 0 ? page : huge_page;
    mapping cases[] = {{.nbytes = 5 * page, .pages = UM_PAGES_4K},
                       {.nbytes = 2 * unit, .pages = UM_PAGES_THP},
                       {.nbytes = 2 * unit, .pages = UM_PAGES_AUTO},
                       {.nbytes = page, .pages = UM_PAGES_AUTO}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        memset(&cases[i].block, 0x5A, sizeof cases[i].block);
        fault_os_check_each(&(fault_case){.run = run_map,
                                          .undo = undo_map,
                                          .context = &cases[i],
                                          .outputs = &cases[i].block,
                                          .outputs_nbytes = sizeof cases[i].block,
                                          .harmless = HARMLESS_HUGE_PAGE});
    }
    /* A kernel without THP refuses the advice; base pages need none. */
    um_block block;
    fault_os_fail_nth(4, EINVAL);
    CHECK_OK(um_block_map(&block, page, UM_PAGES_4K, UM_CAT_HISTORY, &test_err));
    CHECK(strcmp(fault_os_failed(), "um_os_advise_huge") == 0);
    fault_os_fail_nth(0, 0);
    unmap(&block);
}

typedef struct warming {
    um_block block;
    unsigned n_threads;
} warming;

static um_status run_warm(void *context, um_error *err) {
    warming *w = context;
    return um_block_warm(&w->block, 0, w->block.nbytes, w->n_threads, err);
}

static void test_warm_faults(void) {
    size_t unit = huge_page == 0 ? page : huge_page;
    os_state_settle_threads(6);
    for (unsigned n_threads = 1; n_threads <= 3; n_threads++) {
        um_pages kinds[] = {UM_PAGES_4K, UM_PAGES_THP};
        for (int i = 0; i < 2; i++) {
            warming w = {.block = make_block(3 * (i == 0 ? page : unit), kinds[i]),
                         .n_threads = n_threads};
            memset(w.block.base, 0x77, w.block.nbytes);
            /* A thread that cannot be pinned still warms. */
            fault_os_check_each(&(fault_case){.run = run_warm,
                                              .context = &w,
                                              .outputs = w.block.base,
                                              .outputs_nbytes = w.block.nbytes,
                                              .harmless = HARMLESS_HUGE_PAGE
                                              " um_os_get_affinity um_os_set_affinity "
                                              " um_os_thread_join "});
            unmap(&w.block);
        }
    }
    um_block block = make_block(4 * page, UM_PAGES_4K);
    int interruptions[] = {EINTR, EAGAIN};
    for (int i = 0; i < 2; i++) {
        fault_os_fail_nth(1, interruptions[i]);
        CHECK_OK(um_block_warm(&block, 0, block.nbytes, 1, &test_err));
        CHECK(strcmp(fault_os_failed(), "um_os_populate") == 0);
    }
    fault_os_fail_nth(0, 0);
    CHECK_EQ_U64(placement_of(&block).resident_bytes, block.nbytes);
    unmap(&block);
}

typedef struct verifying {
    um_block block;
    um_placement placement;
    uint64_t nbytes;
} verifying;

static um_status run_verify(void *context, um_error *err) {
    verifying *v = context;
    return um_block_verify(&v->block, &v->placement, err);
}

static um_status run_resident(void *context, um_error *err) {
    verifying *v = context;
    return um_block_resident(&v->block, 0, v->block.nbytes, &v->nbytes, err);
}

static void forget(void *context) {
    verifying *v = context;
    memset(&v->placement, 0x5A, sizeof v->placement);
    v->nbytes = 12345;
}

static void test_verify_faults(void) {
    verifying v = {.block = make_block(10000 * page, UM_PAGES_4K)};
    ((unsigned char *)v.block.base)[0] = 1;
    forget(&v);
    fault_os_check_each(&(fault_case){.run = run_verify,
                                      .undo = forget,
                                      .context = &v,
                                      .outputs = &v.placement,
                                      .outputs_nbytes = sizeof v.placement,
                                      .harmless = " um_os_close "});
    fault_os_check_each(&(fault_case){.run = run_resident,
                                      .undo = forget,
                                      .context = &v,
                                      .outputs = &v.nbytes,
                                      .outputs_nbytes = sizeof v.nbytes});
    fault_os_fail_nth(2, EINTR);
    CHECK_OK(um_block_verify(&v.block, &v.placement, &test_err));
    CHECK(strcmp(fault_os_failed(), "um_os_read") == 0);
    fault_os_fail_nth(0, 0);
    CHECK_EQ_U64(v.placement.resident_bytes, page);
    unmap(&v.block);
}

static void test_huge_page_faults(void) {
    os_state_read(&before);
    for (unsigned n = 1; n <= 3; n++) {
        fault_os_fail_nth(n, EPERM);
        size_t found = um_huge_page_bytes();
        CHECK(found == 0 || found == huge_page);
    }
    fault_os_fail_nth(0, 0);
    os_state_read(&after);
    CHECK(os_state_same(&before, &after));
}

int main(void) {
    test_page_sizes();
    test_map();
    test_refused_maps();
    test_unmap();
    test_verify_small_pages();
    test_verify_huge_pages();
    test_resident();
    test_warm_range();
    test_warm_parts();
    test_warm_keeps_content_and_affinity();
    test_refused_warm();
    test_map_faults();
    test_warm_faults();
    test_verify_faults();
    test_huge_page_faults();
    um_ledger_row row = ledger_row(UM_CAT_SCRATCH);
    CHECK(row.n_mappings == 0 && row.mapped_bytes == 0);
    return test_report();
}
