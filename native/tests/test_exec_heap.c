#include "test_exec.h"

#include <signal.h>
#include <sys/wait.h>

/* How many records are in use, and what they map. */
static uint64_t placed_bytes(void) {
    return counts_now().placed_bytes;
}

TEST(large_memory_is_placed_and_small_memory_is_not) {
    begin_with(THP_SETTINGS);
    uint64_t before = placed_bytes();
    void *small = um__large_malloc(1000), *large = um__large_malloc(3 * MIB);
    CHECK(um__table_find(small) == NULL && um__table_find(large) != NULL);
    CHECK_EQ((uintptr_t)large % UM__SLOT_BYTES, 0);
    CHECK_EQ(placed_bytes() - before, 4 * MIB);
    CHECK_EQ(um__large_usable_size(large), 4 * MIB);
    CHECK_EQ(n_advised, 1);
    memset(large, 1, 4 * MIB);
    um__large_free(large);
    CHECK(um__large_usable_size(small) >= 1000);
    um__large_free(small);
}

TEST(memory_that_is_used_again_is_zeroed_for_calloc) {
    begin_with(THP_SETTINGS);
    unsigned char *first = um__large_malloc(2 * MIB);
    memset(first, 7, 2 * MIB);
    um__large_free(first);
    unsigned char *second = um__large_calloc(2, MIB);
    CHECK(second == first && is_filled(second, 2 * MIB, 0));
    um__large_free(second);
    CHECK(um__large_calloc(SIZE_MAX, 2) == NULL);
}

TEST(freed_memory_is_kept_within_bounds) {
    begin_with(THP_SETTINGS);
    void *all[40];
    for (size_t i = 0; i < COUNT(all); i++) {
        all[i] = um__large_malloc((2 + 2 * (i % 8)) * MIB);
        REQUIRE(all[i] != NULL);
    }
    for (size_t i = 0; i < COUNT(all); i++) {
        um__large_free(all[i]);
    }
    CHECK(placed_bytes() <= 64 * MIB);
    void *huge = um__large_malloc(100 * MIB);
    um__large_free(huge);
    CHECK(um__table_find(huge) == NULL);
}

TEST(sizes_change_with_their_contents) {
    begin_with(THP_SETTINGS);
    static const size_t sizes[] = {100, 3 << 20, 50 << 20, 2 << 20, 10 << 20, 1 << 20, 70, 8 << 20};
    unsigned char *at = um__large_realloc(NULL, 16);
    size_t was = 16;
    memset(at, 1, was);
    void *blocker = NULL;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        at = um__large_realloc(at, sizes[i]);
        REQUIRE(at != NULL);
        CHECK(is_filled(at, was < sizes[i] ? was : sizes[i], (unsigned char)(i + 1)));
        CHECK_EQ(um__table_find(at) != NULL, sizes[i] >= MIB);
        was = sizes[i];
        memset(at, (int)i + 2, was);
        um__large_free(blocker); /* whatever lay behind it */
        blocker = um__large_malloc(2 * MIB);
    }
    um__large_free(blocker);
    CHECK(um__large_realloc(at, 0) == NULL);
}

TEST(alignments_are_kept) {
    begin_with(THP_SETTINGS);
    static const size_t aligns[] = {16, 4096, 2 << 20, 8 << 20, 64 << 20};
    for (size_t i = 0; i < COUNT(aligns); i++) {
        void *at = NULL;
        CHECK_EQ(um__large_posix_memalign(&at, aligns[i], 3 * MIB), 0);
        void *second = um__large_memalign(aligns[i], 3 * MIB);
        void *third = um__large_aligned_alloc(aligns[i], 4 * MIB);
        CHECK(at != NULL && second != NULL && third != NULL);
        CHECK_EQ(((uintptr_t)at | (uintptr_t)second | (uintptr_t)third) % aligns[i], 0);
        CHECK(um__table_find(at) != NULL && um__table_find(second) != NULL &&
              um__table_find(third) != NULL);
        um__large_free(at);
        um__large_free(second);
        um__large_free(third);
    }
    void *none = NULL;
    CHECK_EQ(um__large_posix_memalign(&none, 3, 3 * MIB), EINVAL);
    /* Aligned as ours are, and none of ours. */
    void *theirs = um__large_memalign(UM__SLOT_BYTES, 100);
    CHECK(um__table_find(theirs) == NULL);
    um__large_free(theirs);
}

TEST(allocations_that_cannot_be_placed_go_to_the_next_allocator) {
    begin_with(THP_SETTINGS);
    map_errno = ENOMEM;
    uint64_t before = counts_now().n_passed_on;
    void *at = um__large_malloc(33 * MIB);
    CHECK(at != NULL && um__table_find(at) == NULL);
    CHECK_EQ(counts_now().n_passed_on, before + 1);
    at = um__large_realloc(at, 40 * MIB);
    CHECK(at != NULL);
    um__large_free(at);
}

TEST(strict_memory_is_as_asked_or_refused) {
    begin_with(THP_SETTINGS " strict=1 lock=1 policy=2:1");
    static _Atomic int *const refusals[] = {&lock_errno, &bind_errno, &map_errno};
    for (size_t i = 0; i < COUNT(refusals); i++) {
        *refusals[i] = EPERM;
        void *at = &at;
        CHECK(um__large_malloc(20 * MIB) == NULL && errno == ENOMEM);
        CHECK(um__large_calloc(20, MIB) == NULL && errno == ENOMEM);
        CHECK_EQ(um__large_posix_memalign(&at, 64, 20 * MIB), ENOMEM);
        CHECK(um__large_aligned_alloc(64, 20 * MIB) == NULL);
        *refusals[i] = 0;
    }
}

TEST(downgrades_are_counted_unless_strict) {
    begin_with(THP_SETTINGS " lock=1 policy=2:1");
    um__counts before = counts_now();
    lock_errno = bind_errno = EPERM;
    void *at = um__large_malloc(20 * MIB);
    CHECK(um__table_find(at) != NULL);
    CHECK_EQ(counts_now().n_unbound - before.n_unbound, 1);
    CHECK_EQ(counts_now().n_unlocked - before.n_unlocked, 1);
    um__large_free(at);
}

#define HUGETLB_SETTINGS "1 pages=2m page=4096 thp=2097152 min=1048576 threads=3"

/* Whether the pool has no page, or it promises one that a cgroup refuses when it is touched. */
TEST(a_pool_without_room_is_replaced_unless_strict) {
    for (int promises = 0; promises < 2; promises++) {
        begin_with(HUGETLB_SETTINGS);
        uint64_t before = counts_now().n_fallback;
        *(promises ? &populate_errno : &hugetlb_errno) = promises ? EFAULT : ENOMEM;
        unsigned char *at = um__large_malloc(50 * MIB);
        CHECK(um__table_find(at) != NULL);
        CHECK_EQ(counts_now().n_fallback, before + 1);
        memset(at, 1, 50 * MIB);
        um__large_free(at);
        begin_with(HUGETLB_SETTINGS " strict=1");
        *(promises ? &populate_errno : &hugetlb_errno) = promises ? EFAULT : ENOMEM;
        CHECK(um__large_malloc(50 * MIB) == NULL);
    }
}

TEST(a_forked_child_goes_on_by_itself) {
    begin_with(THP_SETTINGS);
    unsigned char *at = um__large_malloc(20 * MIB);
    memset(at, 5, 20 * MIB);
    um__table_before_fork();
    pid_t child = fork();
    if (child == 0) {
        um__table_in_child();
        bool good = um__table_find(at) != NULL && is_filled(at, 20 * MIB, 5);
        um__large_free(at);
        void *other = um__large_malloc(20 * MIB);
        _exit(good && um__table_find(other) != NULL ? 0 : 1);
    }
    um__table_after_fork();
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
    CHECK(um__table_find(at) != NULL);
    um__large_free(at);
}

/* A fork that lasts: it waits for a lock of the thread that allocates. */
TEST(memory_is_passed_on_and_owed_while_a_thread_forks) {
    begin_with(THP_SETTINGS);
    unsigned char *at = um__large_malloc(20 * MIB), *grown = um__large_malloc(20 * MIB);
    memset(grown, 5, 20 * MIB);
    uint64_t before = counts_now().n_passed_on;
    um__table_before_fork();
    void *passed_on = um__large_malloc(20 * MIB);
    CHECK(passed_on != NULL && um__table_find(passed_on) == NULL);
    CHECK_EQ(counts_now().n_passed_on, before + 1);
    um__large_free(passed_on);
    um__large_free(at);
    unsigned char *copy = um__large_realloc(grown, 50 * MIB);
    CHECK(um__table_find(copy) == NULL && is_filled(copy, 20 * MIB, 5));
    CHECK(um__table_find(at) != NULL && um__table_find(grown) != NULL);
    um__table_after_fork();
    um__place_settle();
    CHECK(um__table_find(at) == NULL && um__table_find(grown) == NULL);
    um__large_free(copy);
}

static void *end_a_slow_fork(void *nothing) {
    usleep(400000);
    um__table_after_fork();
    return nothing;
}

/* The fork of a large process takes longer than others wait. */
TEST(strict_waits_for_a_slow_fork_and_then_refuses) {
    begin_with(THP_SETTINGS " strict=1");
    pthread_t other;
    uint64_t before = counts_now().n_passed_on;
    um__table_before_fork();
    pthread_create(&other, NULL, end_a_slow_fork, NULL);
    void *at = um__large_malloc(20 * MIB);
    pthread_join(other, NULL);
    CHECK(um__table_find(at) != NULL);
    um__table_before_fork();
    errno = 0;
    CHECK(um__large_malloc(20 * MIB) == NULL && errno == ENOMEM);
    CHECK_EQ(counts_now().n_passed_on, before + 1);
    um__table_after_fork();
    um__large_free(at);
}

/* A child of a fork frees what another thread freed meanwhile, and memory is freed once. */
TEST(what_is_owed_is_freed_once) {
    begin_with(THP_SETTINGS);
    void *at = um__large_malloc(20 * MIB);
    um__table_before_fork();
    um__large_free(at);
    pid_t children[2];
    for (int again = 0; again < 2; again++) {
        children[again] = fork();
        if (children[again] == 0 && again) {
            um__large_free(at);
        } else if (children[again] == 0) {
            um__table_in_child();
            um__place_settle();
            _exit(um__table_find(at) == NULL ? 0 : 1);
        }
    }
    um__table_after_fork();
    um__place_settle();
    int gone = -1, aborted = -1;
    waitpid(children[0], &gone, 0);
    waitpid(children[1], &aborted, 0);
    CHECK_EQ(gone, 0);
    CHECK(WIFSIGNALED(aborted) && WTERMSIG(aborted) == SIGABRT);
}

/* ---- many threads at random ---- */

typedef struct piece {
    unsigned char *at;
    size_t nbytes;
    unsigned char byte;
} piece;

typedef struct caller {
    uint64_t random;
    unsigned n_calls;
} caller;

/* Looks at some bytes of a piece, and writes others of it: all would take too long. */
static bool is_whole(const piece *own) {
    for (size_t at = 0; at < own->nbytes; at += 4093) {
        if (own->at[at] != own->byte) {
            return false;
        }
    }
    return own->at[own->nbytes - 1] == own->byte;
}

static void mark(piece *own) {
    for (size_t at = 0; at < own->nbytes; at += 4093) {
        own->at[at] = own->byte;
    }
    own->at[own->nbytes - 1] = own->byte;
}

static void call_once(uint64_t *random, piece *own) {
    uint64_t r = test_random(random);
    size_t most = r % 8 == 0 ? 600000 : 9000, nbytes = 1 + (size_t)(test_random(random) % most);
    void *aligned = NULL;
    if (own->at != NULL && r % 3 == 0) {
        CHECK(is_whole(own));
        unsigned char *moved = um__large_realloc(own->at, nbytes);
        REQUIRE(moved != NULL);
        own->at = moved;
        own->nbytes = own->nbytes < nbytes ? own->nbytes : nbytes;
        own->at[own->nbytes - 1] = own->byte;
        CHECK(is_whole(own));
        own->nbytes = nbytes;
    } else if (own->at != NULL) {
        CHECK(is_whole(own));
        um__large_free(own->at);
        own->at = NULL;
        return;
    } else if (r % 4 == 1) {
        own->at = um__large_calloc(1, nbytes);
        own->byte = 0;
        own->nbytes = nbytes;
        CHECK(is_whole(own));
    } else if (r % 4 == 2) {
        CHECK_EQ(um__large_posix_memalign(&aligned, (size_t)16 << r / 4 % 10, nbytes), 0);
        own->at = aligned;
    } else {
        own->at = um__large_malloc(nbytes);
    }
    REQUIRE(own->at != NULL);
    CHECK(um__large_usable_size(own->at) >= nbytes);
    own->nbytes = nbytes;
    own->byte = (unsigned char)r;
    mark(own);
}

static void *call_many(void *argument) {
    caller *own = argument;
    piece pieces[40] = {{0}};
    for (unsigned i = 0; i < own->n_calls; i++) {
        call_once(&own->random, &pieces[test_random(&own->random) % COUNT(pieces)]);
    }
    for (size_t i = 0; i < COUNT(pieces); i++) {
        um__large_free(pieces[i].at == NULL ? um__large_malloc(1) : pieces[i].at);
    }
    return NULL;
}

/* UNIMEM_EXEC_CALLS=100000000 makes as many calls in all. */
TEST(many_threads_call_at_random) {
    begin_with("1 pages=auto page=4096 thp=2097152 min=4096");
    const char *asked = getenv("UNIMEM_EXEC_CALLS");
    unsigned n = asked != NULL ? (unsigned)strtoul(asked, NULL, 10) : test_many(30000, 1000000);
    caller callers[16];
    for (size_t i = 0; i < COUNT(callers); i++) {
        callers[i] = (caller){.random = i, .n_calls = n / (unsigned)COUNT(callers)};
    }
    run_threads(COUNT(callers), call_many, callers, sizeof callers[0]);
    CHECK(placed_bytes() <= 64 * MIB);
}
