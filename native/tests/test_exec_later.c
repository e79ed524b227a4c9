#include "test_exec.h"

#include <unistd.h>

/* Whether the page at an address is in RAM. */
static bool is_there(void *at) {
    unsigned char page;
    REQUIRE(mincore(at, 4096, &page) == 0);
    return (page & 1) != 0;
}

/* The states of a mapping. */
static uint32_t state_of(void *at) {
    um__table_lock();
    uint32_t state = um__table_find(at)->state;
    um__table_unlock();
    return state;
}

TEST(a_trial_touches_little_and_stops_at_the_second_slow_page) {
    static const struct {
        uint64_t step_ns;
        const char *more;
        size_t nbytes;
        bool touched, slow;
    } cases[] = {
        {0, " trial=1", 64 * MIB, true, false},        /* quick: huge pages, as ever */
        {1600000, " trial=1", 64 * MIB, true, true},   /* slow: small ones */
        {1600000, " trial=1", 16 * MIB, false, false}, /* not worth a trial */
        {1600000, "", 64 * MIB, false, false},         /* no host takes memory here */
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        char text[200];
        snprintf(text, sizeof text, THP_SETTINGS "%s", cases[i].more);
        begin_with(text);
        clock_step_ns = cases[i].step_ns;
        char *at = um__large_malloc(cases[i].nbytes);
        CHECK_EQ(is_there(at), cases[i].touched);
        CHECK(!is_there(at + cases[i].nbytes / 16));
        CHECK_EQ((state_of(at) & UM__IS_DUE) != 0, cases[i].slow);
        CHECK_EQ(n_begun, cases[i].slow);
        um__large_free(at);
    }
}

TEST(a_slow_trial_holds_for_two_seconds) {
    begin_with(THP_SETTINGS " trial=1");
    clock_step_ns = 1600000;
    char *first = um__large_malloc(64 * MIB), *second = um__large_malloc(64 * MIB);
    char *small = um__large_malloc(2 * MIB);
    CHECK((state_of(second) & state_of(small) & UM__IS_DUE) != 0);
    CHECK(!is_there(second) && !is_there(small));
    now_ns += 2000000000;
    clock_step_ns = 0;
    char *third = um__large_malloc(64 * MIB);
    CHECK_EQ(state_of(third) & UM__IS_DUE, 0);
    char *all[] = {first, second, small, third};
    for (size_t i = 0; i < COUNT(all); i++) {
        um__large_free(all[i]);
    }
    CHECK(um__table_any(UM__IS_DUE) == NULL ||
          um__table_any(UM__IS_DUE)->nbytes == 2 * MIB); /* which is kept */
}

TEST(small_pages_are_joined_when_the_program_has_become_quiet) {
    begin_with(THP_SETTINGS " trial=1");
    clock_step_ns = 1600000;
    char *at = um__large_malloc(64 * MIB), *gone = um__large_malloc(64 * MIB);
    memset(at, 1, 8 * MIB);
    faults += 100000;
    CHECK(um__later_step() >= 100000000);
    CHECK_EQ(n_joined, 0);
    uint64_t wait;
    int n = 0;
    while ((wait = um__later_step()) != 0 && n++ < 1000) {
        CHECK(wait >= 9 * clock_step_ns); /* a tenth of one core */
        if (n == 1) {
            um__large_free(gone);
        }
    }
    CHECK_EQ(state_of(at) & UM__IS_DUE, 0);
    CHECK(n_joined >= 32 && n_joined < 64);
    uint64_t resident, huge;
    if (um__sys_scan(at, 64 * MIB, &resident, &huge) == 0) {
        CHECK(resident <= 12 * MIB); /* nothing that was untouched */
    }
    CHECK_EQ(at[8 * MIB - 1], 1);
    um__large_free(at);
}

TEST(a_thread_advises_a_mapping_of_the_program_s_and_joins_nothing) {
    begin_with(THP_SETTINGS " trial=1");
    clock_step_ns = 1600000;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    void *at = um__ranges_map(NULL, 64 * MIB, PROT_READ | PROT_WRITE, flags, -1, 0);
    CHECK_EQ(n_begun, 1);
    uint64_t before = n_advised;
    __real_um__later_begin();
    __real_um__later_begin(); /* it runs */
    bool is_due = true;
    while (is_due) {
        usleep(1000);
        um__table_lock();
        is_due = um__table_any(UM__IS_DUE) != NULL;
        um__table_unlock();
    }
    CHECK_EQ(n_joined, 0);
    CHECK_EQ(n_advised, before + 1);
    um__ranges_unmap(at, 64 * MIB);
}

static int n_refused;

static void count_refusal(void) {
    n_refused++;
}

TEST(a_strict_refusal_says_how_many_pages_are_missing) {
    int pipes[2], kept = dup(STDERR_FILENO);
    char text[600] = "";
    snprintf(text, sizeof text, "1 pages=2m page=4096 thp=2097152 min=1048576 strict=1 pid=%d",
             (int)getpid());
    REQUIRE(pipe(pipes) == 0 && kept >= 0);
    begin_with(text);
    hugetlb_errno = ENOMEM;
    um__when_refused = count_refusal;
    dup2(pipes[1], STDERR_FILENO);
    void *at = um__large_malloc(120 * MIB);
    dup2(kept, STDERR_FILENO);
    CHECK(at == NULL && errno == ENOMEM);
    CHECK_EQ(n_refused, 1);
    um__when_refused = NULL;
    ssize_t n = read(pipes[0], text, sizeof text - 1);
    text[n < 0 ? 0 : n] = '\0';
    CHECK(strstr(text, "120 MiB has failed: 57 huge pages are missing") != NULL);
    CHECK(strstr(text, "echo 77 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages") != NULL);
    close(pipes[0]);
    close(pipes[1]);
    close(kept);
}

TEST(pages_of_a_sure_pool_are_not_touched) {
    begin_with("1 pages=2m page=4096 thp=2097152 min=1048576 touch=0");
    populate_errno = EFAULT; /* a touch would be refused */
    char *at = um__large_malloc(4 * MIB);
    CHECK((state_of(at) & UM__IS_HUGETLB) != 0 && !is_there(at));
    um__large_free(at);
}
