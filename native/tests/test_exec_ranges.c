#include "test_exec.h"

enum { RW = PROT_READ | PROT_WRITE, PRIVATE = MAP_PRIVATE | MAP_ANONYMOUS };

/* Bytes of a range that the table has, page by page. */
static size_t known_bytes(const char *at, size_t nbytes) {
    size_t n = 0;
    um__record found;
    um__table_lock();
    for (size_t i = 0; i < nbytes; i += 4096) {
        n += um__table_overlaps((uintptr_t)at + i, 4096, &found) ? 4096 : 0;
    }
    um__table_unlock();
    return n;
}

static char *map(size_t nbytes) {
    char *at = um__ranges_map(NULL, nbytes, RW, PRIVATE, -1, 0);
    REQUIRE(at != MAP_FAILED);
    return at;
}

TEST(a_mapping_is_aligned_and_keeps_its_size) {
    begin_with(THP_SETTINGS);
    char *at = map(5 * MIB + 4096);
    CHECK_EQ((uintptr_t)at % (2 * MIB), 0);
    CHECK_EQ(known_bytes(at, 8 * MIB), 5 * MIB + 4096);
    CHECK_EQ(um__ranges_unmap(at, 5 * MIB + 4096), 0);
    CHECK_EQ(known_bytes(at, 8 * MIB), 0);
}

TEST(other_mappings_than_plain_memory_are_left_alone) {
    begin_with(THP_SETTINGS);
    static const struct {
        size_t nbytes;
        int protection, flags;
    } cases[] = {{4096, RW, PRIVATE},
                 {4 << 20, PROT_NONE, PRIVATE},
                 {4 << 20, PROT_READ, PRIVATE},
                 {4 << 20, RW | PROT_EXEC, PRIVATE},
                 {4 << 20, RW, MAP_SHARED | MAP_ANONYMOUS},
                 {4 << 20, RW, PRIVATE | MAP_STACK},
                 {4 << 20, RW, PRIVATE | MAP_GROWSDOWN}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        char *at =
            um__ranges_map(NULL, cases[i].nbytes, cases[i].protection, cases[i].flags, -1, 0);
        REQUIRE(at != MAP_FAILED);
        CHECK_EQ(known_bytes(at, cases[i].nbytes), 0);
        CHECK_EQ(um__ranges_unmap(at, cases[i].nbytes), 0);
    }
    CHECK(um__ranges_map(NULL, 0, RW, PRIVATE, -1, 0) == MAP_FAILED && errno == EINVAL);
    CHECK(um__ranges_map(NULL, MIB, RW, MAP_PRIVATE, -1, 0) == MAP_FAILED && errno == EBADF);
}

TEST(unmapped_parts_leave_the_table) {
    begin_with(THP_SETTINGS);
    char *at = map(16 * MIB);
    CHECK_EQ(um__ranges_unmap(at + 4 * MIB, MIB), 0);  /* the middle */
    CHECK_EQ(um__ranges_unmap(at, 4096), 0);           /* the beginning */
    CHECK_EQ(um__ranges_unmap(at + 15 * MIB, MIB), 0); /* the end */
    CHECK_EQ(known_bytes(at, 16 * MIB), 14 * MIB - 4096);
    /* Another mapping in the place of some of it. */
    CHECK(um__ranges_map(at + 8 * MIB, MIB, PROT_NONE, PRIVATE | MAP_FIXED, -1, 0) == at + 8 * MIB);
    CHECK_EQ(known_bytes(at, 16 * MIB), 13 * MIB - 4096);
    CHECK_EQ(um__ranges_unmap(at, 16 * MIB), 0);
    CHECK_EQ(known_bytes(at, 16 * MIB), 0);
    CHECK_EQ(um__ranges_unmap(at + 1, 4096), -1);
}

TEST(the_table_follows_a_mapping_that_moves) {
    begin_with(THP_SETTINGS);
    char *at = map(4 * MIB), *wall = map(4 * MIB);
    memset(at, 3, 4 * MIB);
    char *moved = um__ranges_remap(at, 4 * MIB, 32 * MIB, MREMAP_MAYMOVE, NULL);
    REQUIRE(moved != MAP_FAILED);
    CHECK(is_filled(moved, 4 * MIB, 3));
    CHECK_EQ(known_bytes(moved, 32 * MIB), 32 * MIB);
    CHECK(um__ranges_remap(moved, 32 * MIB, 2 * MIB, 0, NULL) == moved);
    CHECK_EQ(known_bytes(moved, 32 * MIB), 2 * MIB);
    /* Onto another one, whose place it takes. */
    int flags = MREMAP_MAYMOVE | MREMAP_FIXED;
    CHECK(um__ranges_remap(moved, 2 * MIB, 2 * MIB, flags, wall) == wall);
    CHECK_EQ(known_bytes(moved, 2 * MIB), 0);
    CHECK_EQ(known_bytes(wall, 4 * MIB), 4 * MIB);
    CHECK(um__ranges_remap(wall + 1, 1, 1, 0, NULL) == MAP_FAILED);
    CHECK_EQ(um__ranges_unmap(wall, 4 * MIB), 0);
}

TEST(locked_memory_is_given_back) {
    begin_with(THP_SETTINGS " lock=1");
    char *at = map(MIB);
    memset(at, 1, MIB);
    CHECK_EQ(um__ranges_advise(at, MIB, MADV_DONTNEED), 0);
    CHECK(is_filled(at, MIB, 0));
    CHECK_EQ(um__ranges_unmap(at, MIB), 0);
    CHECK_EQ(um__ranges_advise(at + 1, 4096, MADV_DONTNEED), -1);
}

TEST(strict_mappings_fail_whole) {
    begin_with(THP_SETTINGS " strict=1 policy=2:1");
    bind_errno = EINVAL;
    uint64_t before = counts_now().placed_bytes;
    CHECK(um__ranges_map(NULL, 4 * MIB, RW, PRIVATE, -1, 0) == MAP_FAILED && errno == ENOMEM);
    CHECK_EQ(counts_now().placed_bytes, before);
}

TEST(populated_mappings_are_populated) {
    begin_with(THP_SETTINGS);
    char *at = um__ranges_map(NULL, 4 * MIB, RW, PRIVATE | MAP_POPULATE, -1, 0);
    unsigned char in_ram[1024];
    CHECK_EQ(mincore(at, 4 * MIB, in_ram), 0);
    CHECK(is_filled(in_ram, sizeof in_ram, 1));
    CHECK_EQ(um__ranges_unmap(at, 4 * MIB), 0);
}
