/* Address space: the sizes of pages, what is reserved for a block, and the only node that has
 * memory. */
#include "block/space.h"
#include "blocks.h"

TEST(page_sizes) {
    CHECK_EQ(page, sysconf(_SC_PAGESIZE));
    if (huge_page != 0) {
        CHECK(huge_page > page);
        CHECK_EQ(huge_page % page, 0);
    }
    CHECK_EQ(huge_page != 0, access("/sys/kernel/mm/transparent_hugepage", F_OK) == 0);
}

TEST(huge_page_faults) {
    os_state_begin();
    for (unsigned n = 1; n <= 3; n++) {
        fault_os_fail_nth(n, EPERM);
        size_t found = um_huge_page_bytes();
        CHECK(found == 0 || found == huge_page);
    }
    fault_os_fail_nth(0, 0);
    CHECK(os_state_unchanged());
}

TEST(hugetlb_shift) {
    um_pages others[] = {UM_PAGES_AUTO, UM_PAGES_4K, UM_PAGES_THP};
    for (size_t i = 0; i < COUNT(others); i++) {
        CHECK_EQ(um__hugetlb_shift(others[i]), 0);
    }
    CHECK_EQ((size_t)1 << um__hugetlb_shift(UM_PAGES_2M), 2 << 20);
    CHECK_EQ((size_t)1 << um__hugetlb_shift(UM_PAGES_1G), 1 << 30);
}

static void check_reserve(size_t nbytes, size_t align, size_t phase) {
    um__space space;
    os_state_begin();
    CHECK_OK(um__space_reserve(&space, nbytes, align, phase, nbytes, &test_err));
    char *data = space.data;
    CHECK_EQ((uintptr_t)data % align, phase);
    CHECK(space.map_base == data - page);
    CHECK_EQ(space.map_nbytes, nbytes + 2 * page);
    const char *at[] = {data - page, data, data + nbytes - 1, data + nbytes};
    for (size_t i = 0; i < COUNT(at); i++) {
        CHECK_STR(os_state_permissions(at[i]), "---p");
    }
    REQUIRE(munmap(space.map_base, space.map_nbytes) == 0);
    CHECK(os_state_unchanged()); /* the surplus was given back */
}

TEST(reserve) {
    check_reserve(page, page, 0);
    check_reserve(7 * page, page, 0);
    check_reserve(page, unit, 0);
    check_reserve(3 * unit, unit, 0);
    check_reserve(unit, unit, page);
    check_reserve(5 * page, unit, unit - page);
    check_reserve(page, (size_t)1 << 30, 0);
}

TEST(refused_reserves) {
    struct {
        size_t nbytes;
        um_status status;
        const char *what;
    } bad[] = {{SIZE_MAX - page + 1, UM_E_INVALID, "nbytes"},
               {SIZE_MAX - 3 * page + 1, UM_E_INVALID, "nbytes"},
               {(size_t)1 << 58, UM_E_NOMEM, "mmap"}};
    um__space space;
    SPOIL(space);
    os_state_begin();
    for (size_t i = 0; i < COUNT(bad); i++) {
        CHECK_STATUS(bad[i].status,
                     um__space_reserve(&space, bad[i].nbytes, page, 0, 12345, &test_err));
        CHECK_STR(test_err.what, bad[i].what);
    }
    CHECK_EQ(test_err.asked, 12345);
    CHECK_SPOILT(space);
    CHECK(os_state_unchanged());
}

static um_status run_reserve(void *context, um_error *err) {
    return um__space_reserve(context, 3 * page, 512 * page, page, 3 * page, err);
}

static void undo_reserve(void *context) {
    um__space *space = context;
    CHECK(munmap(space->map_base, space->map_nbytes) == 0);
    memset(space, 0x5A, sizeof *space);
}

TEST(faults) {
    um__space space;
    SPOIL(space);
    CHECK_EACH_FAULT(run_reserve, undo_reserve, &space, space, NULL);
}

TEST(only_memory_node) {
    const char *path = "/sys/devices/system/node/has_memory";
    struct {
        const char *text;
        int node;
    } files[] = {{"0\n", 0},    {"3", 3},      {"1023\n", 1023}, {"1024\n", -1}, {"0-1\n", -1},
                 {"0,2\n", -1}, {"1,3-4", -1}, {"\n", -1},       {"", -1}};
    for (size_t i = 0; i < COUNT(files); i++) {
        fault_os_file(path, files[i].text);
        CHECK(um__only_memory_node() == files[i].node);
    }
    fault_os_file(path, "3\n");
    for (unsigned nth = 1; nth <= 2; nth++) { /* open, read */
        fault_os_fail_nth(nth, EPERM);
        CHECK(um__only_memory_node() == -1);
    }
}
