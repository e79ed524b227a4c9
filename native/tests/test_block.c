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
    REQUIRE(CHECK_OK(um_block_map(&block, nbytes,
                                  &(um_block_options){.pages = pages, .category = UM_CAT_SCRATCH},
                                  &test_err)));
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
    um_block_options options = {.pages = pages, .category = category};
    um_block block, untouched;
    memset(&block, 0x5A, sizeof block);
    memcpy(&untouched, &block, sizeof block);
    os_state_read(&before);
    CHECK_STATUS(status, um_block_map(&block, nbytes, &options, &test_err));
    if (status == UM_E_NOMEM) {
        CHECK(test_err.os_errno == ENOMEM);
        CHECK_EQ_U64(test_err.asked, nbytes);
    }
    CHECK(um_block_map(&block, nbytes, &options, NULL) == status);
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
    check_map_fails(UM_E_INVALID, page, (um_pages)5, UM_CAT_SCRATCH);
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

/* ---- each system call in turn ---- */

typedef struct mapping {
    um_block block;
    size_t nbytes;
    um_pages pages;
} mapping;

static um_status run_map(void *context, um_error *err) {
    mapping *m = context;
    return um_block_map(&m->block, m->nbytes,
                        &(um_block_options){.pages = m->pages, .category = UM_CAT_HISTORY}, err);
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
    CHECK_OK(um_block_map(&block, page,
                          &(um_block_options){.pages = UM_PAGES_4K, .category = UM_CAT_HISTORY},
                          &test_err));
    CHECK(strcmp(fault_os_failed(), "um_os_advise") == 0);
    fault_os_fail_nth(0, 0);
    unmap(&block);
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
    test_map_faults();
    test_huge_page_faults();
    um_ledger_row row = ledger_row(UM_CAT_SCRATCH);
    CHECK(row.n_mappings == 0 && row.mapped_bytes == 0);
    return test_report();
}
