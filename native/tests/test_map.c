/* Mapping a range as its block is: pages, policy and lock, of a new block and of steps committed
 * later. */
#include "blocks.h"

/* If the kernel has the page size but its pool is empty, there is no memory. If it has no such page
 * size, the kernel refuses. */
TEST(gigantic_pages) {
    const char *free_pages = "/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages";
    bool known = access(free_pages, F_OK) == 0;
    size_t nbytes = (size_t)1 << 45; /* more than any pool has */
    um_block block;
    um_status status = um_block_map(&block, nbytes, OPTIONS(.pages = UM_PAGES_1G), &test_err);
    CHECK(status == (known ? UM_E_NOMEM : UM_E_OS));
    CHECK_STR(test_err.what, "mmap");
}

/* A kernel without THP refuses the advice, which base pages do not need. */
TEST(kernel_without_thp) {
    AUTO_BLOCK block;
    fault_os_fail_nth(4, EINVAL);
    CHECK_OK(um_block_map(&block, page, of(UM_PAGES_4K, UM_SHARING_NONE, page), &test_err));
    CHECK_STR(fault_os_failed(), "um__os_advise");
}

static void check_policy(um_numa_mode mode, um_sharing sharing, const char *policy) {
    um_block_options options =
        *OPTIONS(.category = UM_CAT_SCRATCH, .sharing = sharing,
                 .numa = {.mode = mode, .nodes = {1}}, .reserve_nbytes = 8 * page);
    AUTO_BLOCK block;
    um_status status = um_block_map(&block, 4 * page, &options, &test_err);
    if (status != UM_OK && mode == UM_NUMA_WEIGHTED) {
        CHECK_EQ(test_err.detail, UM_BLOCK_NO_POLICY);
        test_skip("the kernel is older than 6.9");
        return;
    }
    REQUIRE(CHECK(status == UM_OK));
    CHECK_STR(policy_at(block.base), policy);
    memset(block.base, 1, block.nbytes);
    um_placement p = placement_of(&block);
    CHECK_EQ(p.node_bytes[0], 4 * page);
    CHECK_EQ(p.resident_bytes, 4 * page);
}

TEST(policies) {
    SKIP_UNLESS(may_bind(), "this process may not set policies");
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        check_policy(UM_NUMA_BIND, sharing, "bind:0");
        check_policy(UM_NUMA_INTERLEAVE, sharing, "interleave:0");
        check_policy(UM_NUMA_WEIGHTED, sharing, "weighted interleave:0");
        check_policy(UM_NUMA_PREFERRED, sharing, "prefer:0");
    }
}

TEST(new_steps_have_the_policy) {
    SKIP_UNLESS(may_bind(), "this process may not set policies");
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        um_block_options options = *of(UM_PAGES_4K, sharing, 8 * page);
        options.numa = (um_numa){.mode = UM_NUMA_BIND, .nodes = {1}};
        AUTO_BLOCK block = make_block(page, &options);
        commit(&block, 4 * page, page);
        CHECK_STR(policy_at(bytes_of(&block, 4 * page)), "bind:0");
        CHECK_STR(policy_at(bytes_of(&block, page)), "default");
    }
}

TEST(new_steps_are_placed_like_the_block) {
    for (um_sharing sharing = UM_SHARING_NONE; sharing <= UM_SHARING_MEMFD; sharing++) {
        AUTO_BLOCK block = make_block(page, of(UM_PAGES_4K, sharing, 8 * page));
        char *bytes = block.base;
        commit(&block, 4 * page, page);
        CHECK(has_vm_flag(bytes + 4 * page, "dc") == (sharing != UM_SHARING_NONE));
        if (huge_page != 0) {
            CHECK(has_vm_flag(bytes + 4 * page, "nh"));
        }
        if (um_block_lock(&block, UM_LOCK_NOW, NULL) != UM_OK) {
            test_skip("this process may not lock memory");
        } else {
            CHECK(has_vm_flag(bytes + 4 * page, "lo"));
            CHECK(!has_vm_flag(bytes + 2 * page, "lo"));
            commit(&block, 6 * page, 2 * page);
            CHECK_EQ(placement_of(&block).locked_bytes, 4 * page); /* and already in RAM */
            release(&block, 6 * page, page, page);
            CHECK_EQ(placement_of(&block).locked_bytes, 3 * page);
            CHECK_OK(um_block_lock(&block, UM_LOCK_ONFAULT, &test_err));
            commit(&block, 2 * page, page);
            CHECK_EQ(placement_of(&block).resident_bytes, 3 * page);
            bytes[2 * page] = 1;
            CHECK_EQ(placement_of(&block).locked_bytes, 4 * page);
        }
    }
}
