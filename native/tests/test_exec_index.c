#include "test_exec.h"

enum { MOST = 30000, N_RANDOM = 64 };

static um__record records[MOST];

static void enter(uint32_t number, uint64_t address, uint64_t nbytes) {
    records[number - 1] = (um__record){.address = address, .nbytes = nbytes, .via = UM__MMAP};
    um__index_add(number);
}

/* Returns the first record that ends behind an address, among all. */
static uint32_t first_of_all(uint64_t address) {
    uint32_t found = 0;
    for (uint32_t i = 1; i <= N_RANDOM; i++) {
        const um__record *each = &records[i - 1];
        if (each->address != 0 && each->address + each->nbytes > address &&
            (found == 0 || each->address < records[found - 1].address)) {
            found = i;
        }
    }
    return found;
}

TEST(records_are_found_by_their_addresses) {
    uint64_t random = 1;
    memset(records, 0, sizeof records);
    REQUIRE(um__index_init(records));
    for (int i = 0; i < 20000; i++) {
        uint32_t number = 1 + (uint32_t)(test_random(&random) % N_RANDOM);
        uint64_t place = (1 + (number * 37) % N_RANDOM) * 100;
        if (records[number - 1].address == 0) {
            enter(number, place + test_random(&random) % 50, 1 + test_random(&random) % 50);
        } else {
            um__index_remove(number);
            records[number - 1].address = 0;
        }
        uint64_t address = test_random(&random) % 7000;
        CHECK_EQ(um__index_first(address), first_of_all(address));
    }
    for (uint32_t i = 1; i <= N_RANDOM; i++) {
        if (records[i - 1].address != 0) {
            um__index_remove(i);
        }
    }
    CHECK_EQ(um__index_first(0), 0);
}

/* A search passes few records, in whatever order they came. A random tree of 30,000 is 30 to 45
 * deep. */
TEST(a_search_does_not_look_at_all_records) {
    for (int downwards = 0; downwards < 2; downwards++) {
        unsigned deepest = 0;
        REQUIRE(um__index_init(records));
        for (uint32_t i = 1; i <= MOST; i++) {
            enter(i, (uint64_t)(downwards ? MOST - i + 1 : i) << 21, MIB);
        }
        for (uint32_t i = 1; i <= MOST; i++) {
            CHECK_EQ(um__index_first(records[i - 1].address), i);
            deepest = um__index_depth(i) > deepest ? um__index_depth(i) : deepest;
        }
        CHECK(deepest < 64);
        for (uint32_t i = 1; i <= MOST; i++) {
            um__index_remove(i);
        }
        CHECK_EQ(um__index_first(0), 0);
    }
}
