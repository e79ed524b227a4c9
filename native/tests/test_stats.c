/* The ledger and the counters. */
#include "base/stats.h"
#include "test.h"

static um_ledger_row row_of(um_category category) {
    um_ledger_row row;
    CHECK_OK(um_ledger_read(category, &row, &test_err));
    return row;
}

static void check_row(um_category category, uint64_t n_mappings, uint64_t mapped_bytes,
                      uint64_t high_water_bytes) {
    um_ledger_row row = row_of(category);
    CHECK_EQ(row.n_mappings, n_mappings);
    CHECK_EQ(row.mapped_bytes, mapped_bytes);
    CHECK_EQ(row.high_water_bytes, high_water_bytes);
}

TEST(categories) {
    const char *names[] = {"other",   "weights",     "scratch", "history",
                           "staging", "diagnostics", "logits",  "tokens"};
    for (int i = 0; i < UM_CAT_COUNT; i++) {
        CHECK_STR(um_category_name((um_category)i), names[i]);
        check_row((um_category)i, 0, 0, 0);
    }
    um_category unknown[] = {UM_CAT_COUNT, (um_category)-1, (um_category)1000};
    for (size_t i = 0; i < COUNT(unknown); i++) {
        um_ledger_row row, before;
        SPOIL(row);
        before = row;
        CHECK(um_category_name(unknown[i]) == NULL);
        CHECK_FAILS(UM_E_INVALID, um_ledger_read, unknown[i], &row);
        CHECK(memcmp(&row, &before, sizeof row) == 0);
    }
}

TEST(ledger) {
    um__ledger_enter(UM_CAT_STAGING, 4096);
    um__ledger_enter(UM_CAT_STAGING, 8192);
    check_row(UM_CAT_STAGING, 2, 12288, 12288);
    um__ledger_leave(UM_CAT_STAGING, 8192);
    um__ledger_enter(UM_CAT_STAGING, 1024);
    check_row(UM_CAT_STAGING, 2, 5120, 12288);
    um__ledger_leave(UM_CAT_STAGING, 1024);
    um__ledger_leave(UM_CAT_STAGING, 4096);
    check_row(UM_CAT_STAGING, 0, 0, 12288);
    CHECK_EQ(row_of(UM_CAT_HISTORY).high_water_bytes, 0);
}

/* A mapping that grows and shrinks stays one mapping. */
TEST(ledger_resize) {
    um__ledger_enter(UM_CAT_DIAGNOSTICS, 4096);
    um__ledger_enter(UM_CAT_DIAGNOSTICS, 100);
    um__ledger_resize(UM_CAT_DIAGNOSTICS, 4096, 12288);
    check_row(UM_CAT_DIAGNOSTICS, 2, 12388, 12388);
    um__ledger_resize(UM_CAT_DIAGNOSTICS, 12288, 8192);
    um__ledger_resize(UM_CAT_DIAGNOSTICS, 100, 100);
    check_row(UM_CAT_DIAGNOSTICS, 2, 8292, 12388);
    um__ledger_resize(UM_CAT_DIAGNOSTICS, 8192, 0);
    um__ledger_leave(UM_CAT_DIAGNOSTICS, 0);
    um__ledger_leave(UM_CAT_DIAGNOSTICS, 100);
    check_row(UM_CAT_DIAGNOSTICS, 0, 0, 12388);
}

TEST(marks) {
    unsigned outer, inner, last;
    uint64_t most[UM_CAT_COUNT], most_inner[UM_CAT_COUNT];
    um__ledger_enter(UM_CAT_STAGING, 100); /* there before */
    CHECK_OK(um_marks_begin(&outer, &test_err));
    um__ledger_enter(UM_CAT_STAGING, 1000);
    um__ledger_leave(UM_CAT_STAGING, 1000);
    CHECK_OK(um_marks_begin(&inner, &test_err));
    CHECK(inner != outer);
    um__ledger_resize(UM_CAT_STAGING, 100, 300);
    um__ledger_resize(UM_CAT_STAGING, 300, 100);
    um_marks_read(outer, most);
    um_marks_read(inner, most_inner);
    CHECK_EQ(most[UM_CAT_STAGING], 1100);
    CHECK_EQ(most_inner[UM_CAT_STAGING], 300);
    CHECK_EQ(most[UM_CAT_WEIGHTS], 0);
    /* They may end in any order; an end leaves the others alone. */
    um_marks_end(outer);
    um__ledger_enter(UM_CAT_STAGING, 5000);
    um_marks_read(inner, most_inner);
    CHECK_EQ(most_inner[UM_CAT_STAGING], 5100);
    CHECK_OK(um_marks_begin(&last, &test_err));
    CHECK_EQ(last, outer); /* the number is reused, without the old figures */
    um__ledger_leave(UM_CAT_STAGING, 5000);
    um_marks_end(last);
    CHECK_OK(um_marks_begin(&last, &test_err));
    um_marks_read(last, most);
    CHECK_EQ(most[UM_CAT_STAGING], 100);
    um_marks_end(last);
    um_marks_end(inner);
    um__ledger_leave(UM_CAT_STAGING, 100);
}

TEST(marks_are_bounded) {
    unsigned marks, more = 99;
    uint64_t seen = 0;
    for (int i = 0; i < UM_MAX_MARKS; i++) {
        CHECK_OK(um_marks_begin(&marks, &test_err));
        seen |= (uint64_t)1 << marks;
    }
    CHECK_EQ(seen, UINT64_MAX);
    CHECK_DETAIL(UM_E_FULL, UM_MARKS_FULL, um_marks_begin(&more, &test_err));
    CHECK_EQ(test_err.limit, UM_MAX_MARKS);
    CHECK_EQ(more, 99);
    um_marks_end(17);
    CHECK_OK(um_marks_begin(&marks, &test_err));
    CHECK_EQ(marks, 17);
    for (unsigned i = 0; i < UM_MAX_MARKS; i++) {
        um_marks_end(i);
    }
}

TEST(counters) {
    um_counters before, after;
    um_counters_read(&before);
    um__count_os_call();
    um__count_os_call();
    um_counters_read(&after);
    CHECK_EQ(after.n_os_calls, before.n_os_calls + 2);
    CHECK_EQ(after.n_allocations, before.n_allocations);

    unsigned char *p = um__heap_alloc(300, 11);
    REQUIRE(p != NULL);
    CHECK(is_filled(p, (size_t)300 * 11, 0));
    um_counters_read(&after);
    CHECK_EQ(after.n_allocations, before.n_allocations + 1);
    CHECK_EQ(after.allocated_bytes, before.allocated_bytes + 3300);
    um__heap_free(p);
    um__heap_free(NULL);
    /* A product that overflows to 16 must be refused. The volatile keeps the compiler from refusing
     * it first. */
    volatile size_t huge = SIZE_MAX / 16 + 2;
    CHECK(um__heap_alloc(huge, 16) == NULL);
    um_counters_read(&after);
    CHECK_EQ(after.n_allocations, before.n_allocations + 1);
    CHECK_EQ(after.allocated_bytes, before.allocated_bytes + 3300);
}

enum { N_THREADS = 4, N_ROUNDS = 100000 };
enum { MOST_BYTES = 4096 * (N_THREADS * (N_THREADS + 1) / 2) };

static pthread_barrier_t all_run;

static void *enter_and_leave(void *arg) {
    uint64_t nbytes = 4096 * (*(unsigned *)arg + 1u);
    pthread_barrier_wait(&all_run);
    for (int i = 0; i < N_ROUNDS; i++) {
        um__ledger_enter(UM_CAT_SCRATCH, nbytes / 2);
        um__ledger_resize(UM_CAT_SCRATCH, nbytes / 2, nbytes);
        um__count_os_call();
        if (i % 16 == 0) {
            uint64_t most[UM_CAT_COUNT];
            unsigned marks;
            CHECK(um_marks_begin(&marks, NULL) == UM_OK);
            um_marks_read(marks, most);
            um_marks_end(marks);
            /* This thread's own mappings are included. */
            CHECK(most[UM_CAT_SCRATCH] >= nbytes);
            CHECK(most[UM_CAT_SCRATCH] <= MOST_BYTES);
        }
        um__ledger_leave(UM_CAT_SCRATCH, nbytes);
    }
    return NULL;
}

TEST(threads) {
    unsigned ids[N_THREADS] = {0, 1, 2, 3};
    um_counters before, after;
    um_counters_read(&before);
    REQUIRE(pthread_barrier_init(&all_run, NULL, N_THREADS) == 0);
    run_threads(N_THREADS, enter_and_leave, ids, sizeof ids[0]);
    pthread_barrier_destroy(&all_run);
    um_counters_read(&after);
    CHECK_EQ(after.n_os_calls, before.n_os_calls + (uint64_t)N_THREADS * N_ROUNDS);
    um_ledger_row row = row_of(UM_CAT_SCRATCH);
    CHECK_EQ(row.n_mappings, 0);
    CHECK_EQ(row.mapped_bytes, 0);
    CHECK(row.high_water_bytes >= 4096 * N_THREADS);
    CHECK(row.high_water_bytes <= MOST_BYTES);
}
