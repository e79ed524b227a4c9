/* The grid: sizes, cells, giving twice, and the ABA problem under many threads. */
#include "test.h"
#include <sched.h>

enum { MEMORY_BYTES = 1 << 16, N_THREADS = 4, MAX_CELLS = 64, N_ROUNDS = 50000 };

static _Alignas(4096) unsigned char memory[MEMORY_BYTES];

static um_tape make_tape(void *base, size_t total) {
    um_tape tape;
    CHECK_OK(um_tape_init(&tape, base, total, &test_err));
    return tape;
}

static um_grid make_grid(um_tape *tape, size_t cell_bytes, uint32_t n_cells) {
    um_grid grid;
    memset(&grid, 0, sizeof grid);
    CHECK_OK(um_grid_init(&grid, tape, cell_bytes, n_cells, &test_err));
    return grid;
}

static size_t grid_bytes(size_t cell_bytes, uint32_t n_cells) {
    size_t nbytes = 0;
    CHECK_OK(um_grid_bytes(cell_bytes, n_cells, &nbytes, &test_err));
    return nbytes;
}

TEST(bad_sizes) {
    um_tape tape = make_tape(memory, sizeof memory), tape_before;
    um_grid grid;
    SPOIL(grid);
    memcpy(&tape_before, &tape, sizeof tape);
    struct {
        size_t cell_bytes;
        uint32_t n_cells;
    } bad[] = {{0, 1},
               {1, 0},
               {0, 0},
               {SIZE_MAX, 1},
               {SIZE_MAX - 63, 1},
               {SIZE_MAX - 64, 1},
               {SIZE_MAX / 2 + 1, 2},
               {(size_t)1 << 32, UINT32_MAX},
               {64, UINT32_MAX}}; /* the last cell's number would be the mark of an empty list */
    for (size_t i = 0; i < COUNT(bad); i++) {
        size_t nbytes = 12345;
        CHECK_FAILS(UM_E_INVALID, um_grid_bytes, bad[i].cell_bytes, bad[i].n_cells, &nbytes);
        CHECK_EQ(nbytes, 12345);
        um_status status = um_grid_init(&grid, &tape, bad[i].cell_bytes, bad[i].n_cells, &test_err);
        CHECK(status == UM_E_INVALID || status == UM_E_FULL);
        CHECK(status == UM_E_INVALID || bad[i].n_cells == 1);
    }
    CHECK_SPOILT(grid);
    CHECK(memcmp(&tape_before, &tape, sizeof tape) == 0);
}

TEST(bytes_are_enough) {
    size_t sizes[] = {1, 63, 64, 65, 100, 1000};
    uint32_t counts[] = {1, 2, 7, 33};
    for (size_t i = 0; i < COUNT(sizes); i++) {
        for (size_t j = 0; j < COUNT(counts); j++) {
            size_t nbytes = grid_bytes(sizes[i], counts[j]);
            CHECK(nbytes >= (sizes[i] + sizeof(uint32_t)) * counts[j]);
            for (size_t shift = 0; shift <= 64; shift++) {
                um_tape tape = make_tape(memory + shift, nbytes);
                um_grid grid = make_grid(&tape, sizes[i], counts[j]);
                CHECK_EQ(um_grid_n_available(&grid), counts[j]);
                CHECK(grid.base >= tape.base);
                CHECK(um_tape_used(&tape) <= nbytes);
            }
        }
    }
}

/* Whatever there is no room for, nothing is left on the tape. */
TEST(init_without_room) {
    size_t nbytes = grid_bytes(100, 9), smallest = 0;
    for (size_t total = 1; total <= nbytes; total++) {
        um_tape tape = make_tape(memory, total), before;
        um_grid grid, grid_before;
        SPOIL(grid);
        memcpy(&grid_before, &grid, sizeof grid);
        memcpy(&before, &tape, sizeof tape);
        test_err_pattern(&test_err);
        um_status status = um_grid_init(&grid, &tape, 100, 9, &test_err);
        if (status == UM_OK) {
            smallest = smallest == 0 ? total : smallest;
            continue;
        }
        CHECK(smallest == 0);
        CHECK(status == UM_E_FULL);
        CHECK(test_err.status == UM_E_FULL);
        CHECK_EQ(test_err.limit, total);
        CHECK_EQ(test_err.used, 0);
        CHECK(memcmp(&grid_before, &grid, sizeof grid) == 0);
        CHECK(memcmp(&before, &tape, sizeof tape) == 0);
    }
    CHECK(smallest != 0);
    um_tape tape = make_tape(memory, sizeof memory), before;
    um_grid grid;
    CHECK_OK(um_tape_freeze(&tape, 0, &test_err));
    memcpy(&before, &tape, sizeof tape);
    CHECK_DETAIL(UM_E_STATE, UM_TAPE_FROZEN, um_grid_init(&grid, &tape, 100, 9, &test_err));
    CHECK(memcmp(&before, &tape, sizeof tape) == 0);
}

static void check_give_fails(um_status status, um_grid *grid, uint32_t id) {
    um_grid before;
    memcpy(&before, grid, sizeof before);
    CHECK_FAILS(status, um_grid_give, grid, id);
    CHECK_DETAIL(status, status == UM_E_STATE ? UM_GRID_FREE : UM_DETAIL_NONE,
                 um_grid_give(grid, id, &test_err));
    CHECK(memcmp(&before, grid, sizeof before) == 0);
}

/* All cells are there: each can be taken once, and then none is left. */
static void take_all(um_grid *grid) {
    bool taken[MAX_CELLS] = {false};
    uint32_t n = grid->n_cells, id = 777;
    for (uint32_t i = 0; i < n; i++) {
        CHECK_EQ(um_grid_n_available(grid), n - i);
        CHECK_OK(um_grid_take(grid, &id, &test_err));
        REQUIRE(id < n);
        CHECK(!taken[id]);
        taken[id] = true;
    }
    id = 777;
    CHECK_FULL(UM_GRID_FULL, um_grid_take(grid, &id, &test_err), n, n, 1);
    CHECK(um_grid_take(grid, &id, NULL) == UM_E_FULL);
    CHECK_EQ(id, 777);
    CHECK_EQ(um_grid_n_available(grid), 0);
}

TEST(take_and_give) {
    enum { N = 9, CELL = 100 };
    um_tape tape = make_tape(memory + 1, sizeof memory - 1);
    um_grid grid = make_grid(&tape, CELL, N);
    CHECK_EQ(grid.cell_bytes, 128);
    CHECK_EQ(grid.n_cells, N);
    take_all(&grid);
    /* Every byte of every cell is its own: no other cell and no link is written over it. */
    for (uint32_t id = 0; id < N; id++) {
        unsigned char *cell = um_grid_cell(&grid, id);
        CHECK((uintptr_t)cell % 64 == 0);
        CHECK(um_tape_owns(&tape, cell));
        CHECK(cell + grid.cell_bytes <= tape.base + um_tape_used(&tape));
        memset(cell, (int)id + 1, grid.cell_bytes);
    }
    for (uint32_t id = 0; id < N; id++) {
        CHECK(is_filled(um_grid_cell(&grid, id), grid.cell_bytes, (unsigned char)(id + 1)));
    }
    check_give_fails(UM_E_INVALID, &grid, N);
    check_give_fails(UM_E_INVALID, &grid, UINT32_MAX);
    check_give_fails(UM_E_INVALID, &grid, UINT32_MAX - 1);
    CHECK(um_grid_cell(&grid, N) == NULL);
    CHECK(um_grid_cell(&grid, UINT32_MAX) == NULL);
    /* Cells are given back in another order; their contents stay. */
    for (uint32_t i = 0; i < N; i++) {
        uint32_t give = (i * 4 + 3) % N;
        CHECK_OK(um_grid_give(&grid, give, &test_err));
        check_give_fails(UM_E_STATE, &grid, give);
        CHECK(((unsigned char *)um_grid_cell(&grid, give))[0] == give + 1);
        CHECK_EQ(um_grid_n_available(&grid), i + 1);
    }
    for (uint32_t i = 0; i < N; i++) {
        check_give_fails(UM_E_STATE, &grid, i);
    }
    take_all(&grid);
}

/* An address where nothing is mapped: touching it ends the process. */
static void *const NOWHERE = (void *)(uintptr_t)64;

TEST(apart) {
    enum { N = 9, CELL = 100, STRIDE = 128 };
    uint32_t links[N + 2], id;
    um_grid grid;
    links[0] = links[N + 1] = 0x5A5A5A5A;
    CHECK_OK(um_grid_init_apart(&grid, NOWHERE, links + 1, CELL, N, &test_err));
    CHECK_EQ(grid.cell_bytes, STRIDE);
    CHECK_EQ(grid.n_cells, N);
    take_all(&grid);
    for (id = 0; id < N; id++) {
        CHECK((uintptr_t)um_grid_cell(&grid, id) == (uintptr_t)NOWHERE + (size_t)id * STRIDE);
    }
    CHECK_OK(um_grid_give(&grid, 4, &test_err));
    check_give_fails(UM_E_STATE, &grid, 4);
    CHECK_OK(um_grid_take(&grid, &id, &test_err));
    CHECK_EQ(id, 4);
    CHECK(links[0] == 0x5A5A5A5A);
    CHECK(links[N + 1] == 0x5A5A5A5A);
}

TEST(bad_places) {
    uint32_t links[4];
    um_grid grid;
    SPOIL(grid);
    struct {
        uintptr_t cells;
        void *links;
        size_t cell_bytes;
        uint32_t n_cells;
    } bad[] = {{0, links, 64, 4},
               {32, links, 64, 4}, /* cells lie at multiples of 64 */
               {64, NULL, 64, 4},
               {64, (char *)links + 1, 64, 2},
               {UINTPTR_MAX - 63, links, 64, 1}, /* cells end after the last address */
               {UINTPTR_MAX - 127, links, 64, 2},
               {64, links, 0, 4},
               {64, links, 64, 0},
               {64, links, SIZE_MAX, 1},
               {64, links, 64, UINT32_MAX}};
    for (size_t i = 0; i < COUNT(bad); i++) {
        CHECK_FAILS(UM_E_INVALID, um_grid_init_apart, &grid, (void *)bad[i].cells, bad[i].links,
                    bad[i].cell_bytes, bad[i].n_cells);
    }
    CHECK_SPOILT(grid);
}

typedef struct shared_grid {
    um_grid *grid;
    _Atomic uint32_t owner[MAX_CELLS]; /* 0: no owner */
    _Atomic unsigned n_twice, n_foreign, n_lost, n_wrong;
    uint32_t hold; /* cells held at once */
} shared_grid;

typedef struct worker {
    shared_grid *shared;
    uint32_t id;
} worker;

/* Takes up to `hold` cells, writes to them, and gives them back in another order. */
static void *take_and_give(void *arg) {
    worker *w = arg;
    shared_grid *s = w->shared;
    uint32_t held[MAX_CELLS], n_held = 0;
    uint64_t seed = w->id;
    for (int round = 0; round < N_ROUNDS; round++) {
        uint64_t r = test_random(&seed);
        uint32_t id;
        if (n_held < s->hold && r % 2 == 0 && um_grid_take(s->grid, &id, NULL) == UM_OK) {
            if (atomic_exchange(&s->owner[id], w->id) != 0) {
                atomic_fetch_add(&s->n_twice, 1);
            }
            /* Below n_cells, since this thread holds a cell, and not wrapped around, as when a take
             * is counted before its give. */
            if (um_grid_n_available(s->grid) >= s->grid->n_cells) {
                atomic_fetch_add(&s->n_wrong, 1);
            }
            memcpy(um_grid_cell(s->grid, id), &w->id, sizeof w->id);
            held[n_held++] = id;
        } else if (n_held > 0) {
            uint32_t at = (uint32_t)(r >> 32) % n_held, content;
            id = held[at];
            held[at] = held[--n_held];
            memcpy(&content, um_grid_cell(s->grid, id), sizeof content);
            if (content != w->id || atomic_exchange(&s->owner[id], 0) != w->id) {
                atomic_fetch_add(&s->n_foreign, 1);
            }
            if (um_grid_give(s->grid, id, NULL) != UM_OK) {
                atomic_fetch_add(&s->n_lost, 1);
            }
        }
    }
    while (n_held > 0) {
        uint32_t id = held[--n_held];
        atomic_store(&s->owner[id], 0);
        if (um_grid_give(s->grid, id, NULL) != UM_OK) {
            atomic_fetch_add(&s->n_lost, 1);
        }
    }
    return NULL;
}

static void check_threads(uint32_t n_cells, uint32_t hold) {
    um_tape tape = make_tape(memory, sizeof memory);
    um_grid grid = make_grid(&tape, 64, n_cells);
    shared_grid s = {.grid = &grid, .hold = hold};
    worker workers[N_THREADS];
    for (uint32_t i = 0; i < N_THREADS; i++) {
        workers[i] = (worker){.shared = &s, .id = i + 1};
    }
    run_threads(N_THREADS, take_and_give, workers, sizeof workers[0]);
    CHECK_EQ(atomic_load(&s.n_twice), 0);
    CHECK_EQ(atomic_load(&s.n_foreign), 0);
    CHECK_EQ(atomic_load(&s.n_lost), 0);
    CHECK_EQ(atomic_load(&s.n_wrong), 0);
    take_all(&grid); /* they are back */
}

TEST(threads) {
    check_threads(1, 1);
    check_threads(2, 2);
    check_threads(3, 2);
    check_threads(MAX_CELLS, MAX_CELLS);
}

/* The ABA problem, provoked: a signal interrupts the thread at any instruction, and its handler
 * takes two cells and gives the first one back. If that happens between reading the link of the
 * head and exchanging the head, the head is the same cell again, but its link leads to a taken
 * one. */

static um_grid *signalled_grid;
static _Atomic uint32_t cell_owner[MAX_CELLS]; /* 0: no owner */
static _Atomic unsigned n_signals, n_handed_twice;

static void own(uint32_t id, uint32_t owner) {
    if (atomic_exchange(&cell_owner[id], owner) != 0) {
        atomic_fetch_add(&n_handed_twice, 1);
    }
}

static void disown_and_give(uint32_t id) {
    atomic_store(&cell_owner[id], 0);
    (void)um_grid_give(signalled_grid, id, NULL);
}

static void on_signal(int number) {
    static uint32_t held = UINT32_MAX; /* since the previous signal */
    uint32_t first, second;
    (void)number;
    atomic_fetch_add(&n_signals, 1);
    if (held != UINT32_MAX) {
        disown_and_give(held);
        held = UINT32_MAX;
        return;
    }
    if (um_grid_take(signalled_grid, &first, NULL) != UM_OK) {
        return;
    }
    own(first, 2);
    if (um_grid_take(signalled_grid, &second, NULL) == UM_OK) {
        own(second, 2);
        held = second;
    }
    disown_and_give(first);
}

TEST(signals) {
    um_tape tape = make_tape(memory, sizeof memory);
    um_grid grid = make_grid(&tape, 64, 4);
    signalled_grid = &grid;
    test_interrupt(on_signal);
    for (unsigned round = 0; round < 20000000 && atomic_load(&n_signals) < 8000; round++) {
        uint32_t id;
        if (um_grid_take(&grid, &id, NULL) == UM_OK) {
            own(id, 1);
            disown_and_give(id);
        }
    }
    test_interrupt(NULL);
    CHECK(atomic_load(&n_signals) > 0);
    CHECK_EQ(atomic_load(&n_handed_twice), 0);
}

/* Two threads give back the same cell at once: one of them gets an error. */

typedef struct rivals {
    um_grid *grid;
    _Atomic uint32_t round; /* the round that may start; both threads wait for it */
    _Atomic uint32_t n_done;
    _Atomic uint32_t n_ok, n_state;
    uint32_t id;
} rivals;

enum { N_RIVALRIES = 300 };

static void *give_the_same(void *arg) {
    rivals *r = arg;
    for (uint32_t round = 1; round <= N_RIVALRIES; round++) {
        while (atomic_load(&r->round) != round) {
            sched_yield();
        }
        um_status status = um_grid_give(r->grid, r->id, NULL);
        atomic_fetch_add(status == UM_OK ? &r->n_ok : &r->n_state, 1);
        atomic_fetch_add(&r->n_done, 1);
    }
    return NULL;
}

TEST(rivals) {
    um_tape tape = make_tape(memory, sizeof memory);
    um_grid grid = make_grid(&tape, 64, 3);
    rivals r = {.grid = &grid};
    pthread_t threads[] = {start_thread(give_the_same, &r), start_thread(give_the_same, &r)};
    for (uint32_t round = 1; round <= N_RIVALRIES; round++) {
        CHECK_OK(um_grid_take(&grid, &r.id, &test_err));
        atomic_store(&r.round, round);
        while (atomic_load(&r.n_done) != 2 * round) {
            sched_yield();
        }
        CHECK_EQ(atomic_load(&r.n_ok), round);
        CHECK_EQ(atomic_load(&r.n_state), round);
        CHECK_EQ(um_grid_n_available(&grid), 3);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
}
