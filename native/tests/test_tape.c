/* The tape: alignment, bounds without overflow, marks, keeping, freezing, and many threads. */
#include "test.h"

enum { TOTAL = 4096 };

static _Alignas(4096) unsigned char memory[2 * TOTAL];

static um_tape make_tape(void *base, size_t total) {
    um_tape tape;
    CHECK_OK(um_tape_init(&tape, base, total, &test_err));
    return tape;
}

static void *take(um_tape *tape, size_t nbytes, size_t align) {
    void *p = NULL;
    CHECK_OK(um_tape_take(tape, nbytes, align, &p, &test_err));
    return p;
}

/* A take that fails changes neither the tape nor `out`. */
static void check_take_fails(um_status status, um_tape *tape, size_t nbytes, size_t align) {
    void *const untouched = &test_err;
    void *p = untouched;
    um_tape before;
    memcpy(&before, tape, sizeof before);
    CHECK_DETAIL(status,
                 status == UM_E_FULL    ? UM_TAPE_FULL
                 : status == UM_E_STATE ? UM_TAPE_FROZEN
                                        : UM_DETAIL_NONE,
                 um_tape_take(tape, nbytes, align, &p, &test_err));
    if (status == UM_E_FULL) {
        CHECK_ROOM(tape->total, um_tape_used(tape), nbytes);
    }
    CHECK(um_tape_take(tape, nbytes, align, &p, NULL) == status);
    CHECK(p == untouched);
    CHECK(memcmp(&before, tape, sizeof before) == 0);
}

TEST(init) {
    um_tape tape;
    SPOIL(tape);
    CHECK_INVALID(um_tape_init(&tape, NULL, TOTAL, &test_err));
    CHECK(strcmp(test_err.what, "base") == 0);
    CHECK_INVALID(um_tape_init(&tape, memory, 0, &test_err));
    CHECK(strcmp(test_err.what, "total") == 0);
    CHECK(um_tape_init(&tape, NULL, 0, NULL) == UM_E_INVALID);
    CHECK_SPOILT(tape);
    CHECK_OK(um_tape_init(&tape, memory, TOTAL, &test_err));
    CHECK(tape.base == memory);
    CHECK_EQ(tape.total, TOTAL);
    CHECK_EQ(um_tape_used(&tape), 0);
    CHECK_EQ(um_tape_high_water(&tape), 0);
    CHECK_EQ(um_tape_n_takes(&tape), 0);
    CHECK(!um_tape_frozen(&tape));
}

TEST(alignment) {
    /* The address is aligned, wherever the base is. */
    for (size_t shift = 0; shift <= 65; shift++) {
        um_tape tape = make_tape(memory + shift, TOTAL);
        size_t end = 0;
        for (size_t align = 1; align <= 1024; align *= 2) {
            unsigned char *p = take(&tape, 3, align);
            CHECK((uintptr_t)p % align == 0);
            CHECK(p >= tape.base + end);
            CHECK((size_t)(p - tape.base) < end + align);
            end = (size_t)(p - tape.base) + 3;
            CHECK_EQ(um_tape_used(&tape), end);
        }
        CHECK_EQ(um_tape_n_takes(&tape), 11);
    }
    um_tape tape = make_tape(memory, TOTAL);
    size_t bad[] = {0, 3, 6, 12, 65, SIZE_MAX, SIZE_MAX - 1, (SIZE_MAX >> 1) + 2};
    for (size_t i = 0; i < COUNT(bad); i++) {
        check_take_fails(UM_E_INVALID, &tape, 1, bad[i]);
        check_take_fails(UM_E_INVALID, &tape, 0, bad[i]);
    }
}

TEST(bounds) {
    um_tape tape = make_tape(memory, TOTAL);
    check_take_fails(UM_E_FULL, &tape, TOTAL + 1, 1);
    CHECK(take(&tape, TOTAL, 64) == memory);
    check_take_fails(UM_E_FULL, &tape, 1, 1);
    CHECK(take(&tape, 0, 64) == memory + TOTAL);
    CHECK_EQ(um_tape_used(&tape), TOTAL);

    tape = make_tape(memory, TOTAL);
    take(&tape, TOTAL - 10, 1);
    check_take_fails(UM_E_FULL, &tape, 11, 1);
    check_take_fails(UM_E_FULL, &tape, 1, 64);
    take(&tape, 10, 1);
    /* There is no room for the padding, not even for a take of 0 bytes. */
    tape = make_tape(memory + 1, 63);
    check_take_fails(UM_E_FULL, &tape, 1, 64);
    CHECK(take(&tape, 0, 64) == memory + 64);
    tape = make_tape(memory + 1, 62);
    check_take_fails(UM_E_FULL, &tape, 0, 64);
}

TEST(sizes_that_overflow) {
    size_t sizes[] = {
        SIZE_MAX,         SIZE_MAX - 1,    SIZE_MAX - 63,         SIZE_MAX - 64,
        SIZE_MAX - TOTAL, (size_t)1 << 63, ((size_t)1 << 63) - 1, (size_t)0 - (uintptr_t)memory};
    size_t aligns[] = {1, 64, 4096, (size_t)1 << 32, (size_t)1 << 62, (size_t)1 << 63};
    for (size_t used = 0; used <= 65; used += 13) {
        um_tape tape = make_tape(memory, TOTAL);
        take(&tape, used, 1);
        for (size_t i = 0; i < COUNT(sizes); i++) {
            for (size_t j = 0; j < COUNT(aligns); j++) {
                check_take_fails(UM_E_FULL, &tape, sizes[i], aligns[j]);
            }
        }
        check_take_fails(UM_E_FULL, &tape, 1, (size_t)1 << 63);
    }
    /* A tape does not touch its memory, so it can be at the end of the address space, where
     * rounding up an address overflows to 0. */
    uintptr_t last_page = UINTPTR_MAX - 4095;
    um_tape tape = make_tape((void *)(last_page + 1), 4000);
    check_take_fails(UM_E_FULL, &tape, 0, 4096);
    check_take_fails(UM_E_FULL, &tape, 1, 4096);
    check_take_fails(UM_E_FULL, &tape, SIZE_MAX, 1);
    check_take_fails(UM_E_FULL, &tape, 4001, 1);
    CHECK((uintptr_t)take(&tape, 4000, 1) == last_page + 1);
    check_take_fails(UM_E_FULL, &tape, 1, 64);
}

TEST(clear_keep_rewind) {
    um_tape tape = make_tape(memory, TOTAL);
    memset(memory, 0x77, sizeof memory);
    void *first = take(&tape, 100, 1);
    size_t mark = um_tape_mark(&tape);
    CHECK_EQ(mark, 100);
    void *second = take(&tape, 200, 1);
    CHECK_EQ(um_tape_high_water(&tape), 300);
    CHECK_OK(um_tape_rewind(&tape, mark, &test_err));
    CHECK_EQ(um_tape_used(&tape), 100);
    CHECK(take(&tape, 50, 1) == second);
    CHECK_EQ(um_tape_high_water(&tape), 300);
    CHECK_OK(um_tape_rewind(&tape, um_tape_mark(&tape), &test_err));
    CHECK_EQ(um_tape_used(&tape), 150);
    um_tape before;
    memcpy(&before, &tape, sizeof before);
    CHECK_INVALID(um_tape_rewind(&tape, 151, &test_err));
    CHECK_INVALID(um_tape_rewind(&tape, SIZE_MAX, &test_err));
    CHECK(um_tape_rewind(&tape, 151, NULL) == UM_E_INVALID);
    CHECK(memcmp(&before, &tape, sizeof before) == 0);
    um_tape_clear(&tape);
    CHECK_EQ(um_tape_used(&tape), 0);
    CHECK(take(&tape, 100, 1) == first);
    CHECK_EQ(um_tape_kept(&tape), 0);
    um_tape_keep(&tape);
    CHECK_EQ(um_tape_kept(&tape), 100);
    take(&tape, 400, 1);
    um_tape_clear(&tape);
    CHECK_EQ(um_tape_used(&tape), 100);
    CHECK_EQ(um_tape_high_water(&tape), 500);
    take(&tape, 10, 1);
    CHECK_OK(um_tape_rewind(&tape, 40, &test_err));
    CHECK_EQ(um_tape_used(&tape), 100);
    CHECK_OK(um_tape_rewind(&tape, 0, &test_err));
    CHECK_EQ(um_tape_used(&tape), 100);
    CHECK(take(&tape, 1, 1) == memory + 100);
    CHECK_INVALID(um_tape_rewind(&tape, 102, &test_err));
    um_tape_keep(&tape);
    um_tape_clear(&tape);
    CHECK_EQ(um_tape_used(&tape), 101);
    CHECK_EQ(um_tape_high_water(&tape), 500);
    CHECK_EQ(um_tape_n_takes(&tape), 7);
    CHECK(is_filled(memory, sizeof memory, 0x77));
}

TEST(freeze) {
    um_tape tape = make_tape(memory, TOTAL);
    take(&tape, 100, 1);
    um_tape before;
    memcpy(&before, &tape, sizeof before);
    CHECK_INVALID(um_tape_freeze(&tape, TOTAL + 1, &test_err));
    CHECK_INVALID(um_tape_freeze(&tape, SIZE_MAX, &test_err));
    CHECK(um_tape_freeze(&tape, TOTAL + 1, NULL) == UM_E_INVALID);
    CHECK(memcmp(&before, &tape, sizeof before) == 0);
    /* 0: no take at all. */
    CHECK_OK(um_tape_freeze(&tape, 0, &test_err));
    CHECK(um_tape_frozen(&tape));
    check_take_fails(UM_E_STATE, &tape, 1, 1);
    check_take_fails(UM_E_STATE, &tape, 0, 1);
    check_take_fails(UM_E_STATE, &tape, SIZE_MAX, 64);
    um_tape_clear(&tape);
    CHECK_EQ(um_tape_used(&tape), 0);
    check_take_fails(UM_E_STATE, &tape, 1, 1);
    check_take_fails(UM_E_STATE, &tape, 0, 1);
    check_take_fails(UM_E_INVALID, &tape, 1, 3);
    /* Up to a limit, as for scratch up to its high water. */
    CHECK_OK(um_tape_freeze(&tape, um_tape_high_water(&tape), &test_err));
    check_take_fails(UM_E_STATE, &tape, 101, 1);
    take(&tape, 60, 1);
    check_take_fails(UM_E_STATE, &tape, 41, 1);
    check_take_fails(UM_E_STATE, &tape, 37, 64);
    take(&tape, 36, 64);
    CHECK_EQ(um_tape_used(&tape), 100);
    check_take_fails(UM_E_STATE, &tape, 1, 1);
    um_tape_clear(&tape);
    take(&tape, 100, 1);
    CHECK_EQ(um_tape_high_water(&tape), 100);
    um_tape_thaw(&tape);
    CHECK(!um_tape_frozen(&tape));
    take(&tape, TOTAL - 100, 1);
    check_take_fails(UM_E_FULL, &tape, 1, 1);
    um_tape_clear(&tape);
    CHECK_OK(um_tape_freeze(&tape, TOTAL, &test_err));
    take(&tape, TOTAL, 1);
    check_take_fails(UM_E_STATE, &tape, 1, 1);
}

TEST(owns) {
    um_tape tape = make_tape(memory + 64, 1000);
    CHECK(um_tape_owns(&tape, memory + 64));
    CHECK(um_tape_owns(&tape, memory + 64 + 999));
    CHECK(!um_tape_owns(&tape, memory + 64 + 1000));
    CHECK(!um_tape_owns(&tape, memory + 63));
    CHECK(!um_tape_owns(&tape, memory));
    CHECK(!um_tape_owns(&tape, NULL));
    CHECK(!um_tape_owns(&tape, (void *)UINTPTR_MAX));
}

/* Threads take until the tape is full. Each byte must then belong to at most one take. */

enum { N_THREADS = 4, BIG_TOTAL = 1 << 21, MAX_TAKES = BIG_TOTAL };

typedef struct taker {
    um_tape *tape;
    uint64_t seed;
    size_t max_align;
    unsigned char id;
    size_t n_takes, nbytes;
    bool aligned, zeroed;
} taker;

static unsigned char big_memory[BIG_TOTAL];

static void *take_until_full(void *arg) {
    taker *t = arg;
    t->aligned = t->zeroed = true;
    for (unsigned n_full = 0; n_full < 20;) {
        uint64_t r = test_random(&t->seed);
        size_t nbytes = r % 97, align = (size_t)1 << (r >> 32) % 8;
        align = align > t->max_align ? t->max_align : align;
        void *p;
        um_status status = um_tape_take(t->tape, nbytes, align, &p, NULL);
        if (status != UM_OK) {
            n_full += status == UM_E_FULL ? 1 : 1000;
            continue;
        }
        t->n_takes++;
        t->nbytes += nbytes;
        t->aligned = t->aligned && (uintptr_t)p % align == 0;
        /* If another thread got the same bytes, it has written to them, or it will find ours. */
        for (size_t i = 0; i < nbytes; i++) {
            t->zeroed = t->zeroed && ((unsigned char *)p)[i] == 0;
            ((unsigned char *)p)[i] = t->id;
        }
    }
    return NULL;
}

static void check_many_threads(size_t max_align) {
    taker takers[N_THREADS];
    memset(big_memory, 0, BIG_TOTAL);
    um_tape tape = make_tape(big_memory, BIG_TOTAL);
    for (unsigned i = 0; i < N_THREADS; i++) {
        takers[i] =
            (taker){.tape = &tape, .seed = i, .max_align = max_align, .id = (unsigned char)(i + 1)};
    }
    run_threads(N_THREADS, take_until_full, takers, sizeof takers[0]);
    size_t n_takes = 0, nbytes = 0, n_owned[N_THREADS + 1] = {0};
    for (unsigned i = 0; i < N_THREADS; i++) {
        CHECK(takers[i].aligned);
        CHECK(takers[i].zeroed);
        n_takes += takers[i].n_takes;
        nbytes += takers[i].nbytes;
    }
    for (size_t i = 0; i < BIG_TOTAL; i++) {
        n_owned[big_memory[i]]++;
    }
    for (unsigned i = 0; i < N_THREADS; i++) {
        CHECK_EQ(n_owned[i + 1], takers[i].nbytes);
    }
    CHECK_EQ(um_tape_n_takes(&tape), n_takes);
    CHECK(um_tape_used(&tape) <= BIG_TOTAL);
    CHECK(um_tape_used(&tape) > BIG_TOTAL - 97);
    CHECK_EQ(um_tape_high_water(&tape), um_tape_used(&tape));
    if (max_align == 1) {
        CHECK_EQ(um_tape_used(&tape), nbytes);
    }
}

TEST(many_threads) {
    for (int i = 0; i < 10; i++) {
        check_many_threads(1);
        check_many_threads(128);
    }
}
