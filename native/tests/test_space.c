/* Address space: the sizes of pages, what is reserved for a block, and the only node that has
 * memory. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "blocks.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fault_os.h"
#include "space.h"

static size_t page, huge_page;
static os_state before, after;

/* ---- sizes of pages ---- */

static void test_page_sizes(void) {
    CHECK_EQ_U64(page, sysconf(_SC_PAGESIZE));
    if (huge_page != 0) {
        CHECK(huge_page > page);
        CHECK_EQ_U64(huge_page % page, 0);
    }
    CHECK_EQ_U64(huge_page != 0, access("/sys/kernel/mm/transparent_hugepage", F_OK) == 0);
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

static void test_hugetlb_shift(void) {
    um_pages others[] = {UM_PAGES_AUTO, UM_PAGES_4K, UM_PAGES_THP};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        CHECK_EQ_U64(um_hugetlb_shift(others[i]), 0);
    }
    CHECK_EQ_U64((size_t)1 << um_hugetlb_shift(UM_PAGES_2M), 2 << 20);
    CHECK_EQ_U64((size_t)1 << um_hugetlb_shift(UM_PAGES_1G), 1 << 30);
}

/* ---- reserving ---- */

static void check_reserve(size_t nbytes, size_t align, size_t phase) {
    um_space space;
    os_state_read(&before);
    CHECK_OK(um_space_reserve(&space, nbytes, align, phase, nbytes, &test_err));
    char *data = space.data;
    CHECK_EQ_U64((uintptr_t)data % align, phase);
    CHECK(space.map_base == data - page);
    CHECK_EQ_U64(space.map_nbytes, nbytes + 2 * page);
    const char *at[] = {data - page, data, data + nbytes - 1, data + nbytes};
    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
        CHECK(strcmp(os_state_permissions(at[i]), "---p") == 0);
    }
    REQUIRE(munmap(space.map_base, space.map_nbytes) == 0);
    os_state_read(&after);
    CHECK(os_state_same(&before, &after)); /* the surplus was given back */
}

static void test_reserve(void) {
    size_t unit = huge_page == 0 ? 512 * page : huge_page;
    check_reserve(page, page, 0);
    check_reserve(7 * page, page, 0);
    check_reserve(page, unit, 0);
    check_reserve(3 * unit, unit, 0);
    check_reserve(unit, unit, page);
    check_reserve(5 * page, unit, unit - page);
    check_reserve(page, (size_t)1 << 30, 0);
}

static void test_refused_reserves(void) {
    struct {
        size_t nbytes;
        um_status status;
        const char *what;
    } bad[] = {{SIZE_MAX - page + 1, UM_E_INVALID, "nbytes"},
               {SIZE_MAX - 3 * page + 1, UM_E_INVALID, "nbytes"},
               {(size_t)1 << 58, UM_E_NOMEM, "mmap"}};
    um_space space, untouched;
    memset(&space, 0x5A, sizeof space);
    memcpy(&untouched, &space, sizeof space);
    os_state_read(&before);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_STATUS(bad[i].status,
                     um_space_reserve(&space, bad[i].nbytes, page, 0, 12345, &test_err));
        CHECK(strcmp(test_err.what, bad[i].what) == 0);
    }
    CHECK_EQ_U64(test_err.asked, 12345);
    CHECK(memcmp(&space, &untouched, sizeof space) == 0);
    os_state_read(&after);
    CHECK(os_state_same(&before, &after));
}

static um_status run_reserve(void *context, um_error *err) {
    return um_space_reserve(context, 3 * page, 512 * page, page, 3 * page, err);
}

static void undo_reserve(void *context) {
    um_space *space = context;
    CHECK(munmap(space->map_base, space->map_nbytes) == 0);
    memset(space, 0x5A, sizeof *space);
}

static void test_faults(void) {
    um_space space;
    memset(&space, 0x5A, sizeof space);
    fault_os_check_each(&(fault_case){.run = run_reserve,
                                      .undo = undo_reserve,
                                      .context = &space,
                                      .outputs = &space,
                                      .outputs_nbytes = sizeof space});
}

/* ---- the only node ---- */

static void test_only_memory_node(void) {
    const char *path = "/sys/devices/system/node/has_memory";
    struct {
        const char *text;
        int node;
    } files[] = {{"0\n", 0},    {"3", 3},      {"1023\n", 1023}, {"1024\n", -1}, {"0-1\n", -1},
                 {"0,2\n", -1}, {"1,3-4", -1}, {"\n", -1},       {"", -1}};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        fault_os_file(path, files[i].text);
        CHECK(um_only_memory_node() == files[i].node);
    }
    fault_os_file(path, "3\n");
    for (unsigned nth = 1; nth <= 2; nth++) { /* open, read */
        fault_os_fail_nth(nth, EPERM);
        CHECK(um_only_memory_node() == -1);
    }
    fault_os_fail_nth(0, 0);
    fault_os_file(path, NULL);
}

int main(void) {
    page = um_page_bytes();
    huge_page = um_huge_page_bytes();
    test_page_sizes();
    test_huge_page_faults();
    test_hugetlb_shift();
    test_reserve();
    test_refused_reserves();
    test_faults();
    test_only_memory_node();
    return test_report();
}
