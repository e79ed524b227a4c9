#include "test_exec.h"

/* Whether all pages of a range are in RAM. */
static bool is_in_ram(void *at, size_t nbytes) {
    static unsigned char pages[64 << 8];
    REQUIRE(nbytes / 4096 <= sizeof pages && mincore(at, nbytes, pages) == 0);
    for (size_t i = 0; i < nbytes / 4096; i++) {
        if ((pages[i] & 1) == 0) {
            return false;
        }
    }
    return true;
}

TEST(prefaulted_memory_is_in_ram_before_it_is_touched) {
    static const unsigned threads[] = {1, 2, 5};
    for (size_t i = 0; i < COUNT(threads); i++) {
        char text[200];
        snprintf(text, sizeof text, THP_SETTINGS " prefault=1000000000 threads=%u", threads[i]);
        begin_with(text);
        void *at = um__large_memalign(64, 64 * MIB);
        CHECK(is_in_ram(at, 64 * MIB));
        CHECK_EQ(counts_now().prefaulted_bytes, 64 * MIB);
        um__large_free(at);
        CHECK_EQ(counts_now().prefaulted_bytes, 0);
    }
}

TEST(no_more_is_prefaulted_than_there_was_room_for) {
    begin_with(THP_SETTINGS " prefault=50000000");
    char *first = um__large_memalign(64, 40 * MIB), *second = um__large_memalign(64, 40 * MIB);
    CHECK(is_in_ram(first, 40 * MIB) && !is_in_ram(second, 40 * MIB));
    CHECK_EQ(counts_now().prefaulted_bytes, 40 * MIB);
    um__large_free(first);
    um__large_free(second);
}

TEST(a_kernel_that_is_slow_is_asked_for_small_pages) {
    begin_with(THP_SETTINGS " prefault=1000000000");
    uint64_t before = counts_now().n_stalled;
    clock_step_ns = 1600000;
    void *at = um__large_memalign(64, 40 * MIB);
    CHECK(is_in_ram(at, 40 * MIB));
    CHECK_EQ(n_no_huge, 2); /* behind the second page, and for what comes later */
    CHECK_EQ(n_begun, 1);
    CHECK_EQ(counts_now().n_stalled, before + 1);
    um__large_free(at);
    /* Small pages were never at fault. */
    begin_with("1 pages=auto page=4096 thp=0 min=1048576 prefault=1000000000");
    clock_step_ns = 500000000;
    at = um__large_memalign(64, 40 * MIB);
    CHECK_EQ(n_no_huge, 0);
    um__large_free(at);
}

TEST(tables_that_may_stay_empty_are_not_prefaulted) {
    begin_with(THP_SETTINGS " prefault=1000000000");
    char *tables[] = {um__large_malloc(40 * MIB), um__large_calloc(40, MIB)};
    for (size_t i = 0; i < COUNT(tables); i++) {
        CHECK(!is_in_ram(tables[i], MIB));
        um__large_free(tables[i]);
    }
    CHECK_EQ(counts_now().prefaulted_bytes, 0);
}
