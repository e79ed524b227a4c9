/* Sixteen threads on one object of each kind, as docs/threads.md allows it. The caches have a file
 * of their own, test_kv_stress.c. */
#include "blocks.h"
#include "stress.h"

/* ---- tape and grid ---- */

static um_tape tape;
static pthread_barrier_t all_taken, all_checked;

/* Nobody's memory is another's, and one thread takes it all back. */
static void use_tape(worker *w) {
    struct {
        unsigned char *at;
        size_t nbytes;
    } taken[8];
    for (size_t i = 0; i < COUNT(taken); i++) {
        void *at = NULL;
        taken[i].nbytes = 1 + any_of(w, 500);
        CHECK(um_tape_take(&tape, taken[i].nbytes, 64, &at, NULL) == UM_OK);
        CHECK(um_tape_owns(&tape, at) && um_tape_used(&tape) <= um_tape_high_water(&tape));
        taken[i].at = at;
        memset(at, (int)w->number, taken[i].nbytes);
    }
    pthread_barrier_wait(&all_taken);
    for (size_t i = 0; i < COUNT(taken); i++) {
        CHECK(is_filled(taken[i].at, taken[i].nbytes, (unsigned char)w->number));
    }
    pthread_barrier_wait(&all_checked);
    if (w->number == 0) {
        um_tape_clear(&tape);
    }
    pthread_barrier_wait(&all_taken);
}

/* Threads that meet make as many rounds each: these are counted, whatever the clock says. */
static void use_tape_together(worker *w) {
    int n = w->until == 0 ? N_ROUNDS : 20 * N_ROUNDS;
    for (int i = 0; i < n; i++) {
        use_tape(w);
    }
    w->until = 1; /* over */
}

TEST(a_tape_is_taken_from_by_all) {
    AUTO_BLOCK block = make_pages(16 * 8 * 1024, UM_PAGES_4K);
    CHECK_OK(um_tape_init(&tape, block.base, block.nbytes, &test_err));
    REQUIRE(pthread_barrier_init(&all_taken, NULL, N_THREADS) == 0);
    REQUIRE(pthread_barrier_init(&all_checked, NULL, N_THREADS) == 0);
    stress(use_tape_together);
    CHECK_EQ(um_tape_n_takes(&tape) % ((size_t)N_THREADS * 8), 0);
    pthread_barrier_destroy(&all_taken);
    pthread_barrier_destroy(&all_checked);
}

static um_grid grid;

static void use_grid(worker *w) {
    uint32_t cells[4];
    size_t n = 0;
    for (; n < COUNT(cells) && um_grid_take(&grid, &cells[n], NULL) == UM_OK; n++) {
        memset(um_grid_cell(&grid, cells[n]), (int)w->number, grid.cell_bytes);
    }
    while (n > 0) {
        n--;
        CHECK(is_filled(um_grid_cell(&grid, cells[n]), grid.cell_bytes, (unsigned char)w->number));
        CHECK(um_grid_give(&grid, cells[n], NULL) == UM_OK);
    }
    CHECK(um_grid_n_available(&grid) <= grid.n_cells);
}

TEST(a_grid_is_shared_by_all) {
    AUTO_BLOCK block = make_pages(64 << 10, UM_PAGES_4K);
    CHECK_OK(um_tape_init(&tape, block.base, block.nbytes, &test_err));
    CHECK_OK(um_grid_init(&grid, &tape, 256, N_THREADS * 3, &test_err)); /* too few for all */
    stress(use_grid);
    CHECK_EQ(um_grid_n_available(&grid), N_THREADS * 3);
}

/* ---- growth ---- */

enum { STEPS = 200, KEPT = 4 }; /* the first ones are always there */

static um_block growing;

/* One thread changes which steps are there. Gaps come and go, the last one as well. */
static void change_steps(worker *w) {
    size_t first = KEPT + any_of(w, STEPS - KEPT), n = 1 + any_of(w, STEPS - first);
    um_status status = UM_OK;
    switch (any_of(w, 4)) {
    case 0:
        status = um_block_release(&growing, first * page, n * page, NULL, NULL);
        break;
    case 1:
        status = um_block_commit(&growing, 0, STEPS * page, NULL); /* the last gap is closed */
        break;
    default:
        status = um_block_commit(&growing, first * page, n * page, NULL);
    }
    CHECK(status == UM_OK);
}

/* The others look at the steps, and call the kernel for those that they find. A step that goes
 * meanwhile may fail their call. */
static void look_at_steps(worker *w) {
    uint8_t pages[KEPT];
    uint64_t resident = 0;
    um_placement placement;
    um_status status = UM_OK;
    CHECK(um_block_is_committed(&growing, 0, KEPT * page));
    (void)um_block_is_committed(&growing, any_of(w, STEPS) * page, page);
    (void)um_block_is_overlaid(&growing, 0, STEPS * page);
    switch (any_of(w, 6)) {
    case 0:
        status = um_block_warm(&growing, 0, KEPT * page, 1, NULL, NULL);
        CHECK(status == UM_OK);
        break;
    case 1:
        CHECK(um_block_resident(&growing, 0, KEPT * page, &resident, NULL) == UM_OK);
        CHECK(resident <= KEPT * page);
        break;
    case 2:
        CHECK(um_block_pages(&growing, 0, KEPT * page, pages, NULL, NULL) == UM_OK);
        break;
    case 3:
        status = um_block_advise(&growing, UM_ADVICE_RANDOM, NULL);
        CHECK(status == UM_OK || status == UM_E_OS || status == UM_E_NOMEM);
        break;
    case 4:
        if (any_of(w, 8) == 0) { /* it reads all of smaps */
            CHECK(um_block_verify(&growing, &placement, NULL) == UM_OK);
        }
        break;
    default:
        status = um_block_warm(&growing, any_of(w, STEPS) * page, page, 1, NULL, NULL);
    }
}

static void grow_and_look(worker *w) {
    if (w->number == 0) {
        change_steps(w);
    } else {
        look_at_steps(w);
    }
}

TEST(a_block_grows_while_others_look_at_it) {
    um_sharing sharings[] = {UM_SHARING_NONE, UM_SHARING_MEMFD};
    for (size_t i = 0; i < COUNT(sharings); i++) {
        growing = make_block(KEPT * page, of(UM_PAGES_4K, sharings[i], STEPS * page));
        stress(grow_and_look);
        unmap_block(&growing);
    }
}

static int overlay_fd;

static void overlay_and_look(worker *w) {
    if (w->number != 0) {
        look_at_steps(w);
        return;
    }
    size_t first = KEPT + any_of(w, STEPS - KEPT - 8);
    CHECK(um_block_release(&growing, first * page, 8 * page, NULL, NULL) == UM_OK);
    CHECK(um_block_overlay(&growing, first * page, overlay_fd, 0, 8 * page, NULL) == UM_OK);
}

TEST(a_block_is_overlaid_while_others_look_at_it) {
    AUTO_FD fd = memory_file(8 * page);
    overlay_fd = fd;
    growing = make_block(KEPT * page, of(UM_PAGES_4K, UM_SHARING_NONE, STEPS * page));
    stress(overlay_and_look);
    unmap_block(&growing);
}

/* ---- ledger, staging, loading ---- */

static void use_ledger(worker *w) {
    um_category category = (um_category)any_of(w, UM_CAT_COUNT);
    um_block_options options = {.pages = UM_PAGES_4K, .category = category};
    um_block block;
    um_ledger_row row;
    um_counters counters;
    uint64_t most[UM_CAT_COUNT];
    unsigned marks;
    size_t nbytes = (1 + any_of(w, 8)) * page;
    CHECK(um_marks_begin(&marks, NULL) == UM_OK);
    CHECK(um_block_map(&block, nbytes, &options, NULL) == UM_OK);
    CHECK(um_ledger_read(category, &row, NULL) == UM_OK);
    CHECK(row.n_mappings >= 1 && row.high_water_bytes >= nbytes);
    um_counters_read(&counters);
    CHECK(um_block_unmap(&block, NULL) == UM_OK);
    um_marks_read(marks, most);
    CHECK(most[category] >= nbytes);
    um_marks_end(marks);
}

TEST(the_ledger_is_changed_by_all) {
    stress(use_ledger); /* main.c checks that it is empty again */
}

static um_block staged;

/* All attach one shared memory, and stage some of their own. */
static void use_staging(worker *w) {
    um_block_options options = {
        .pages = UM_PAGES_4K, .category = UM_CAT_STAGING, .sharing = UM_SHARING_MEMFD};
    um_block view, own, sealed;
    CHECK(um_block_attach(&view, staged.fd, UM_ACCESS_READ, UM_CAT_STAGING, NULL) == UM_OK);
    CHECK(is_filled(view.base, view.nbytes, 7));
    CHECK(um_block_map(&own, 2 * page, &options, NULL) == UM_OK);
    memset(own.base, (int)w->number + 1, own.nbytes);
    CHECK(um_block_copy_sealed(&sealed, &own, &options, NULL) == UM_OK);
    CHECK(is_filled(sealed.base, sealed.nbytes, (unsigned char)(w->number + 1)));
    CHECK(um_block_unmap(&sealed, NULL) == UM_OK && um_block_unmap(&own, NULL) == UM_OK);
    CHECK(um_block_unmap(&view, NULL) == UM_OK);
}

TEST(shared_memory_is_attached_by_all) {
    staged = make_block(8 * page, OPTIONS(.pages = UM_PAGES_4K, .category = UM_CAT_STAGING,
                                          .sharing = UM_SHARING_MEMFD));
    memset(staged.base, 7, staged.nbytes);
    stress(use_staging);
    unmap_block(&staged);
}

static int load_fd;

static void use_load(worker *w) {
    enum { PARTS = 3 };
    um_load_part parts[PARTS];
    AUTO_FREE unsigned char *out = allocate(PARTS * page);
    um_load_options options = {.n_threads = 2, .request_nbytes = page / 2};
    um_load *load;
    uint64_t done = 0;
    int running = 1;
    for (size_t i = 0; i < PARTS; i++) {
        parts[i] = (um_load_part){
            .fd = load_fd, .offset = any_of(w, 5) * page, .to = out + i * page, .nbytes = page};
    }
    CHECK(um_load_start(&load, parts, PARTS, &options, NULL) == UM_OK);
    while (running != 0) {
        um_load_wait(load, 50, &done, &running);
    }
    CHECK(um_load_end(load, NULL, NULL) == UM_OK);
    for (size_t i = 0; i < PARTS; i++) {
        CHECK(is_filled(out + i * page, page, (unsigned char)(parts[i].offset / page)));
    }
}

TEST(files_are_loaded_by_all) {
    AUTO_FD fd = memory_file(5 * page);
    for (size_t i = 0; i < 5; i++) {
        AUTO_FREE void *text = allocate(page);
        memset(text, (int)i, page);
        REQUIRE(pwrite(fd, text, page, (off_t)(i * page)) == (ssize_t)page);
    }
    load_fd = fd;
    stress(use_load);
}
