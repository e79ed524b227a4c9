/* A cache of pieces: slots hold what the files hold, whatever is read, evicted, kept or fails. */
#include "shelf.h"

#define FREQUENT UM_PIECES_FREQUENT
#define RECENT UM_PIECES_RECENT

static um_status ensure_all(const shelf *s, um_pieces_holder *holder, const int32_t *ids, size_t n,
                            um_error *err) {
    return um_pieces_ensure(s->pieces, holder, ids, n, NULL, err);
}
#define TRY_ENSURE(s, holder, ...)                                                                 \
    ensure_all(s, holder, (int32_t[]){__VA_ARGS__}, COUNT(((int32_t[]){__VA_ARGS__})), &test_err)
#define PREFETCH(s, ...)                                                                           \
    CHECK_OK(um_pieces_prefetch((s)->pieces, (int32_t[]){__VA_ARGS__},                             \
                                COUNT(((int32_t[]){__VA_ARGS__})), &test_err))

TEST(slots_hold_what_files_hold) {
    static const size_t limits[] = {0, 5000, 300000};
    EACH_IO(io) {
        for (size_t l = 0; l < COUNT(limits); l++) {
            AUTO_SHELF s;
            make_shelf(&s, io, FREQUENT, 10, 2);
            AUTO_HOLDER holder = make_holder(&s);
            fault_os_limit_read(limits[l]);
            for (int32_t id = 0; id < N_PIECES; id++) {
                ENSURE(&s, holder, id);
            }
            for (int32_t id = 0; id + 10 <= N_SMALL; id += 3) {
                ENSURE(&s, holder, id, id + 1, id + 2, id + 3, id + 4, id + 5, id + 6, id + 7,
                       id + 8, id + 9, id, id + 9);
            }
            ENSURE(&s, holder, N_SMALL, 0, N_SMALL + 1, 1, N_SMALL);
            fault_os_limit_read(0);
        }
    }
}

/* A file system that knows no direct reads, and one that wants larger units. */
TEST(files_that_cannot_be_read_directly) {
    EACH_IO(io) {
        for (int refuses_later = 0; refuses_later < 2; refuses_later++) {
            AUTO_SHELF s;
            prepare_shelf(&s, false, 10, 2);
            s.spec.io = io;
            for (unsigned n = 1; s.pieces == NULL; n++) {
                fault_os_fail_nth(refuses_later ? 0 : n, EINVAL);
                um_status status = um_pieces_create(&s.pieces, &s.spec, NULL);
                const char *failed = fault_os_failed();
                if (status == UM_OK && !refuses_later &&
                    strcmp(failed, "um__os_open_direct") != 0) {
                    um_pieces_destroy(s.pieces);
                    s.pieces = NULL;
                }
            }
            AUTO_HOLDER holder = make_holder(&s);
            const char *ends = io == UM_PIECES_IO_RING ? "um__ring_take" : "um__os_pread";
            for (unsigned n = 1; refuses_later == 1 && um_pieces_is_direct(s.pieces, 0); n++) {
                fault_os_fail_nth(n, EINVAL);
                bool both = um_pieces_is_direct(s.pieces, 1);
                um_status status = TRY_ENSURE(&s, holder, (int32_t)n);
                CHECK(status == UM_OK || !both || strcmp(fault_os_failed(), ends) != 0);
            }
            fault_os_fail_nth(0, 0);
            CHECK_EQ(um_pieces_is_direct(s.pieces, 0), 0);
            for (int32_t id = N_PIECES; id-- > 0;) {
                ENSURE(&s, holder, id);
            }
        }
    }
}

/* The most calls that reading threads make after the last read has come: a thread wakes whoever
 * waits, and then waits itself, at a time of its own. 1000 hits would make more. */
static uint64_t calls_of_threads(um_pieces_io io) {
    return io == UM_PIECES_IO_RING ? 0 : 200;
}

TEST(a_hit_makes_no_system_call) {
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, FREQUENT, 20, 2);
        AUTO_HOLDER holder = make_holder(&s);
        um_counters before, after;
        ENSURE(&s, holder, 0, 1, 2, 3, 4, 5, 6, 7, N_SMALL);
        um_counters_read(&before);
        for (int i = 0; i < 1000; i++) {
            CHECK(TRY_ENSURE(&s, holder, i % 8, 3, N_SMALL) == UM_OK);
        }
        um_counters_read(&after);
        CHECK_EQ(before.n_allocations, after.n_allocations);
        CHECK(after.n_os_calls - before.n_os_calls <= calls_of_threads(io));
        CHECK_EQ(stat_of(&s).misses, 9);
        CHECK_EQ(stat_of(&s).hits, 1000 * 3 - 125);
        CHECK_EQ(stat_of(&s).resident, 9);
        CHECK_EQ(stat_of(&s).resident_bytes, 8 * 75301 + LARGE_NBYTES);
    }
}

TEST(a_miss_allocates_nothing) {
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, FREQUENT, 8, 1);
        AUTO_HOLDER holder = make_holder(&s);
        um_counters before, after;
        um_counters_read(&before);
        for (int32_t id = 0; id < N_PIECES; id++) {
            CHECK(TRY_ENSURE(&s, holder, id) == UM_OK);
            PREFETCH(&s, (id + 1) % N_PIECES);
        }
        um_counters_read(&after);
        CHECK_EQ(before.n_allocations, after.n_allocations);
    }
}

TEST(what_is_kept_is_not_evicted) {
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, RECENT, 6, 1);
        AUTO_HOLDER holder = make_holder(&s);
        AUTO_HOLDER other = make_holder(&s);
        ENSURE(&s, other, 0, 1);
        int32_t kept = um_pieces_slot(s.pieces, 0);
        for (int32_t id = 2; id + 4 <= N_SMALL; id++) {
            ENSURE(&s, holder, id, id + 1, id + 2, id + 3);
            CHECK_EQ(um_pieces_slot(s.pieces, 0), kept);
        }
        CHECK(has_piece(&s, 0, kept));
        /* Four slots are left. */
        CHECK_DETAIL(UM_E_BUSY, UM_PIECES_HELD, TRY_ENSURE(&s, holder, 10, 11, 12, 13, 14));
        um_pieces_release(s.pieces, other);
        ENSURE(&s, holder, 10, 11, 12, 13, 14);
        ENSURE(&s, holder, 20, 21, 22, 23, 24, 25);
        CHECK_EQ(um_pieces_slot(s.pieces, 0), -1);
    }
}

TEST(a_call_with_too_many_pieces_changes_nothing) {
    AUTO_SHELF s;
    make_shelf(&s, UM_PIECES_IO_AUTO, FREQUENT, 4, 1);
    AUTO_HOLDER holder = make_holder(&s);
    ENSURE(&s, holder, 0, 1, 2, 3);
    um_pieces_stat before = stat_of(&s);
    CHECK_FULL(UM_PIECES_FULL, TRY_ENSURE(&s, holder, 4, 5, 6, 7, 8, 8, N_SMALL), 4, 0, 5);
    CHECK_FULL(UM_PIECES_FULL, TRY_ENSURE(&s, holder, 4, N_SMALL, 5, N_SMALL + 1), 1, 0, 2);
    CHECK(um_pieces_ensure(s.pieces, holder, (int32_t[]){0, N_PIECES}, 2, NULL, NULL) ==
          UM_E_INVALID);
    CHECK(TRY_ENSURE(&s, holder, -1) == UM_E_INVALID);
    CHECK(um_pieces_prefetch(s.pieces, (int32_t[]){N_PIECES}, 1, NULL) == UM_E_INVALID);
    um_pieces_stat after = stat_of(&s);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
    /* The holder still keeps its four. */
    AUTO_HOLDER other = make_holder(&s);
    CHECK(TRY_ENSURE(&s, other, 5) == UM_E_BUSY);
    ENSURE(&s, holder, 4, 5, 4, 5, 4, 5, 6, 7);
}

/* ---- prefetches ---- */

static void wait_until_resident(const shelf *s, uint64_t n) {
    for (int i = 0; i < 10000 && stat_of(s).resident < n; i++) {
        PREFETCH(s, 0); /* takes what has ended */
        usleep(1000);
    }
    CHECK_EQ(stat_of(s).resident, n);
}

TEST(a_prefetch_reads_ahead) {
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, FREQUENT, 8, 1);
        AUTO_HOLDER holder = make_holder(&s);
        ENSURE(&s, holder, 0);
        PREFETCH(&s, 0, 1, 2, 3, N_SMALL, N_SMALL + 1, 3); /* there is one slot for large ones */
        CHECK_EQ(stat_of(&s).prefetched, 4);
        wait_until_resident(&s, 5);
        um_counters before, after;
        um_counters_read(&before);
        ENSURE(&s, holder, 3, 1, N_SMALL);
        um_counters_read(&after);
        CHECK(after.n_os_calls - before.n_os_calls <= calls_of_threads(io));
        CHECK_EQ(stat_of(&s).misses, 1);
        CHECK_EQ(stat_of(&s).prefetch_hits, 3);
        /* Used before they have come. */
        PREFETCH(&s, 10, 11, 12, 13);
        ENSURE(&s, holder, 12, 10, 11);
        ENSURE(&s, holder, 13);
        CHECK_EQ(stat_of(&s).misses, 1);
        CHECK_EQ(stat_of(&s).prefetch_hits, 7);
    }
}

TEST(a_prefetch_leaves_what_is_kept_or_awaited) {
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, FREQUENT, 4, 1);
        AUTO_HOLDER holder = make_holder(&s);
        ENSURE(&s, holder, 0, 1);
        PREFETCH(&s, 2, 3);
        PREFETCH(&s, 4, 5, 6);
        CHECK_EQ(stat_of(&s).prefetched, 2);
        wait_until_resident(&s, 4);
        PREFETCH(&s, 4, 5, 6);
        CHECK_EQ(stat_of(&s).prefetched, 2);
        /* What is demanded may have their slots. */
        ENSURE(&s, holder, 7, 8, 0, 1);
        CHECK_EQ(stat_of(&s).evicted, 2);
        /* Nobody awaits what the group's next call did not use. */
        ENSURE(&s, holder, 0);
        PREFETCH(&s, 2, 3);
        wait_until_resident(&s, 4);
        ENSURE(&s, holder, 0);
        uint64_t before = stat_of(&s).prefetched;
        PREFETCH(&s, 4, 5, 6, 9);
        CHECK_EQ(stat_of(&s).prefetched, before + 3);
    }
}

TEST(a_demanded_read_overtakes_prefetched_ones) {
    EACH_IO(io) {
        AUTO_SHELF s;
        prepare_shelf(&s, false, 30, 1);
        s.spec.io = io;
        s.spec.n_reads = 1;
        REQUIRE(CHECK_OK(um_pieces_create(&s.pieces, &s.spec, &test_err)));
        AUTO_HOLDER holder = make_holder(&s);
        int32_t ids[20];
        for (int32_t i = 0; i < 20; i++) {
            ids[i] = i;
        }
        CHECK_OK(um_pieces_prefetch(s.pieces, ids, 20, &test_err));
        ENSURE(&s, holder, 30, 31);
        CHECK(stat_of(&s).n_reads <= 1 + 2 * 3 + 1);
        /* What was prefetched and is demanded now has its turn at once, too. */
        ENSURE(&s, holder, 15);
        CHECK(stat_of(&s).n_reads <= 1 + 3 * 3 + 2);
        wait_until_resident(&s, 22);
        CHECK_EQ(stat_of(&s).n_reads, 22 * 3);
    }
}

TEST(slots_of_unbegun_prefetches_go_to_what_is_demanded) {
    EACH_IO(io) {
        AUTO_SHELF s;
        prepare_shelf(&s, false, 6, 1);
        s.spec.io = io;
        s.spec.n_reads = 1;
        REQUIRE(CHECK_OK(um_pieces_create(&s.pieces, &s.spec, &test_err)));
        AUTO_HOLDER holder = make_holder(&s);
        PREFETCH(&s, 0, 1, 2, 3, 4, 5);
        ENSURE(&s, holder, 10, 11, 12, 13, 14, 15);
        CHECK_EQ(stat_of(&s).resident, 6);
        CHECK(stat_of(&s).n_reads <= 3 + 6 * 3);
    }
}

/* ---- sizes ---- */

TEST(a_pool_shrinks_and_grows) {
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, FREQUENT, 10, 2);
        AUTO_HOLDER holder = make_holder(&s);
        ENSURE(&s, holder, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9);
        CHECK_DETAIL(UM_E_BUSY, UM_PIECES_HELD, um_pieces_resize(s.pieces, 0, 9, &test_err));
        um_pieces_release(s.pieces, holder);
        CHECK_OK(um_pieces_resize(s.pieces, 0, 4, &test_err));
        CHECK_EQ(stat_of(&s).resident, 4);
        CHECK_EQ(stat_of(&s).evicted, 6);
        ENSURE(&s, holder, 0, 1, 2, 3);
        CHECK_EQ(stat_of(&s).misses, 10);
        CHECK(TRY_ENSURE(&s, holder, 0, 1, 2, 3, 4) == UM_E_FULL);
        for (int32_t id = 4; id < N_SMALL; id++) {
            ENSURE(&s, holder, id);
            CHECK(um_pieces_slot(s.pieces, id) < 4);
        }
        CHECK_OK(um_pieces_resize(s.pieces, 0, N_SMALL, &test_err));
        for (int32_t id = 0; id < N_SMALL; id++) {
            ENSURE(&s, holder, id);
        }
        CHECK_EQ(stat_of(&s).resident, N_SMALL);
        CHECK(um_pieces_resize(s.pieces, 0, 0, NULL) == UM_E_INVALID);
        CHECK(um_pieces_resize(s.pieces, 0, N_SMALL + 1, NULL) == UM_E_INVALID);
        CHECK(um_pieces_resize(s.pieces, 2, 1, NULL) == UM_E_INVALID);
    }
}

TEST(a_pool_shrinks_while_it_is_read_into) {
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, FREQUENT, 20, 4);
        AUTO_HOLDER holder = make_holder(&s);
        for (int i = 0; i < 20; i++) {
            PREFETCH(&s, N_SMALL, N_SMALL + 1, N_SMALL + 2, N_SMALL + 3, 1, 2, 3, 4, 5, 6, 7, 8);
            CHECK_OK(um_pieces_resize(s.pieces, 1, 1, &test_err));
            CHECK_OK(um_pieces_resize(s.pieces, 0, 2, &test_err));
            /* No read ends there any more. */
            memset(part_at(&s, 1, 1, 0), 0xEE, LARGE_NBYTES);
            ENSURE(&s, holder, N_SMALL + i % 4, i);
            CHECK(is_filled(part_at(&s, 1, 1, 0), LARGE_NBYTES, 0xEE));
            um_pieces_release(s.pieces, holder);
            CHECK_OK(um_pieces_resize(s.pieces, 1, 4, &test_err));
            CHECK_OK(um_pieces_resize(s.pieces, 0, 20, &test_err));
        }
    }
}

/* ---- failures ---- */

static void wait_until_failed(const shelf *s, uint64_t n) {
    for (int i = 0; i < 10000 && stat_of(s).failed < n; i++) {
        PREFETCH(s, 0); /* takes what has ended */
        usleep(1000);
    }
    CHECK_EQ(stat_of(s).failed, n);
}

TEST(a_file_that_has_become_shorter) {
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, FREQUENT, 10, 2);
        AUTO_HOLDER holder = make_holder(&s);
        um_pieces_range cut = ranges_of(&s, 8)[2];
        ENSURE(&s, holder, 0, 1, 2);
        REQUIRE(ftruncate(s.fds[cut.file], (off_t)cut.offset + 70000) == 0);
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(TRY_ENSURE(&s, holder, 0, 8, 1), UM_E_IO);
            CHECK_EQ(test_err.os_errno, 0);
            CHECK_EQ(test_err.used, cut.file);
            CHECK_EQ(test_err.offset, cut.offset);
            CHECK_EQ(test_err.asked, 70001);
            CHECK_EQ(um_pieces_slot(s.pieces, 8), -1);
            ENSURE(&s, holder, 0, 1, 2, 3);
        }
        CHECK_EQ(stat_of(&s).failed, 3);
        PREFETCH(&s, 8, 4);
        wait_until_resident(&s, 5);
        ENSURE(&s, holder, 0, 1, 2, 3, 4);
        CHECK_EQ(stat_of(&s).prefetch_hits, 1);
        wait_until_failed(&s, 4);
        fill_file(s.fds[cut.file], cut.file, cut.offset + 70001);
        ENSURE(&s, holder, 8);
    }
}

/* Every slot is free again after reads that failed. */
TEST(slots_of_failed_pieces_are_free) {
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, FREQUENT, 5, 1);
        AUTO_HOLDER holder = make_holder(&s);
        const char *ends = io == UM_PIECES_IO_RING ? "um__ring_take" : "um__os_pread";
        for (unsigned n = 1; n < 60; n++) {
            fault_os_fail_nth(n, EIO);
            um_status status = TRY_ENSURE(&s, holder, 0, 1, 2, 3, N_SMALL, 4);
            const char *failed = fault_os_failed();
            fault_os_fail_nth(0, 0);
            if (failed != NULL && strcmp(failed, ends) == 0) {
                CHECK_EQ(status, UM_E_IO);
                CHECK_EQ(test_err.os_errno, EIO);
            }
            for (int32_t id = 10; id < 20; id += 5) {
                ENSURE(&s, holder, id, id + 1, id + 2, id + 3, id + 4, N_SMALL + 1);
            }
            CHECK_EQ(stat_of(&s).resident, 6);
        }
        CHECK(stat_of(&s).failed > 0);
    }
}

/* A ring's reads end with ECANCELED where the thread that began them has ended, and with EINTR and
 * EAGAIN at any time. They are tried again. */
TEST(reads_that_are_to_be_tried_again) {
    static const int errnos[] = {EINTR, EAGAIN, ECANCELED};
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, FREQUENT, 5, 1);
        AUTO_HOLDER holder = make_holder(&s);
        const char *ends = io == UM_PIECES_IO_RING ? "um__ring_take" : "um__os_pread";
        unsigned n_tried = 0;
        for (unsigned n = 1; n < 40; n++) {
            fault_os_fail_nth(n, errnos[n % 3]);
            um_status status = TRY_ENSURE(&s, holder, (int32_t)n % N_SMALL);
            if (fault_os_failed() != NULL && strcmp(fault_os_failed(), ends) == 0) {
                CHECK_EQ(status, UM_OK);
                n_tried++;
            }
            fault_os_fail_nth(0, 0);
            ENSURE(&s, holder, (int32_t)n % N_SMALL);
        }
        CHECK(n_tried > 0);
    }
}

TEST(a_signal_interrupts_the_wait) {
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, FREQUENT, 5, 1);
        AUTO_HOLDER holder = make_holder(&s);
        const char *waits = io == UM_PIECES_IO_RING ? "um__os_ring_enter" : "um__os_wait";
        unsigned n_interrupted = 0;
        for (unsigned n = 1; n < 60; n++) {
            int32_t id = (int32_t)(n % N_SMALL);
            fault_os_fail_nth(n, EINTR);
            um_status status = TRY_ENSURE(&s, holder, id, N_SMALL + (int32_t)n % N_LARGE);
            if (status != UM_OK) {
                CHECK_STR(fault_os_failed(), waits);
                CHECK_EQ(status, UM_E_OS);
                CHECK_EQ(test_err.detail, UM_PIECES_INTERRUPTED);
                CHECK_EQ(test_err.os_errno, EINTR);
                n_interrupted++;
            }
            fault_os_fail_nth(0, 0);
            ENSURE(&s, holder, id, N_SMALL + (int32_t)n % N_LARGE);
        }
        /* Threads may have read all before this one sleeps. */
        CHECK(n_interrupted > 0 || io == UM_PIECES_IO_THREADS);
    }
}

/* ---- every system call fails once ---- */

static um_status create(void *context, um_error *err) {
    shelf *s = context;
    return um_pieces_create(&s->pieces, &s->spec, err);
}

static void destroy(void *context) {
    shelf *s = context;
    um_pieces_destroy(s->pieces);
    s->pieces = NULL;
}

#define HARMLESS " um__os_open_direct um__os_wait um__os_wake "

TEST(creation_fails_at_each_call) {
    os_state_settle_threads(16);
    for (um_pieces_io io = UM_PIECES_IO_AUTO; io < UM_PIECES_IO_COUNT; io++) {
        AUTO_SHELF s;
        prepare_shelf(&s, true, 4, 1);
        s.spec.io = io;
        const char *harmless = HARMLESS;
        if (io == UM_PIECES_IO_AUTO) {
            harmless = HARMLESS "um__os_ring_setup um__os_ring_map um__os_advise ";
        }
        if (has_io(io)) {
            CHECK_EACH_FAULT(create, destroy, &s, s.pieces, harmless);
        }
    }
}

TEST(creation_fails_at_each_allocation) {
    EACH_IO(io) {
        AUTO_SHELF s;
        prepare_shelf(&s, true, 4, 1);
        s.spec.io = io;
        unsigned n = 1;
        for (um_status status = UM_E_NOMEM; status != UM_OK; n++) {
            um_pieces_holder *holder = NULL;
            fault_os_fail_nth_alloc(n);
            status = um_pieces_create(&s.pieces, &s.spec, &test_err);
            if (status == UM_OK) {
                status = um_pieces_holder_create(&holder, s.pieces, &test_err);
            }
            CHECK(status == UM_OK || status == UM_E_NOMEM);
            um_pieces_holder_destroy(holder);
            um_pieces_destroy(s.pieces);
            s.pieces = NULL;
        }
        CHECK(n > 8);
        fault_os_fail_nth_alloc(0);
    }
}

/* Whichever call fails, the cache goes on, and nothing is lost. */
TEST(calls_fail_once) {
    static const int errnos[] = {ENOMEM, EPERM, EIO};
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, FREQUENT, 5, 1);
        AUTO_HOLDER holder = make_holder(&s);
        for (unsigned n = 1; n < 60; n++) {
            fault_os_fail_nth(n, errnos[n % 3]);
            um_status prefetched =
                um_pieces_prefetch(s.pieces, (int32_t[]){20, 21, 22, N_SMALL}, 4, NULL);
            um_status first = TRY_ENSURE(&s, holder, 0, 1, 20, 3);
            um_status second = TRY_ENSURE(&s, holder, 4, 5, N_SMALL + 2);
            CHECK((prefetched != UM_OK) + (first != UM_OK) + (second != UM_OK) <= 1);
            um_pieces_release(s.pieces, holder);
            CHECK_OK(um_pieces_resize(s.pieces, 0, 4, &test_err));
            CHECK_OK(um_pieces_resize(s.pieces, 0, 5, &test_err));
            fault_os_fail_nth(0, 0);
            ENSURE(&s, holder, 10, 11, 12, 13, 14, N_SMALL + 1);
            ENSURE(&s, holder, 0, 1, 20, 3, 4, N_SMALL);
        }
    }
}

/* ---- arguments ---- */

TEST(wrong_arguments_are_refused) {
    AUTO_SHELF s;
    prepare_shelf(&s, true, 4, 1);
    um_pieces_spec good = s.spec;
    um_pieces *pieces = NULL;
#define REFUSED(set, undo)                                                                         \
    do {                                                                                           \
        set;                                                                                       \
        CHECK(um_pieces_create(&pieces, &s.spec, &test_err) == UM_E_INVALID);                      \
        CHECK(pieces == NULL);                                                                     \
        undo;                                                                                      \
        s.spec = good;                                                                             \
    } while (0)
    REFUSED(s.spec.policy = UM_PIECES_POLICY_COUNT, );
    REFUSED(s.spec.io = UM_PIECES_IO_COUNT, );
    REFUSED(s.spec.n_reads = 1025, );
    REFUSED((s.spec.group_of = s.pool_of, s.spec.n_groups = 1), );
    REFUSED(s.spec.n_pieces = 0, );
    REFUSED(s.pools[0].n_slots = 0, s.pools[0].n_slots = 4);
    REFUSED(s.pools[0].n_slots = N_SMALL + 1, s.pools[0].n_slots = 4);
    REFUSED(s.pools[0].stride += 4096, s.pools[0].stride -= 4096);
    REFUSED(s.pools[1].part_offset[0] += 32, s.pools[1].part_offset[0] -= 32);
    void *base = s.pools[1].base;
    REFUSED(s.pools[1].base = NULL, s.pools[1].base = base);
    REFUSED(s.pools[1].base = (char *)base + 512, s.pools[1].base = base);
    REQUIRE(CHECK_OK(um_pieces_create(&s.pieces, &s.spec, &test_err)));
    shelf other;
    make_shelf(&other, UM_PIECES_IO_AUTO, FREQUENT, 1, 1);
    um_pieces_holder *foreign = make_holder(&other);
    CHECK(TRY_ENSURE(&s, foreign, 0) == UM_E_INVALID);
    um_pieces_holder_destroy(foreign);
    clear_shelf(&other);
    um_pieces_destroy(NULL);
    um_pieces_holder_destroy(NULL);
}

/* ---- forks ---- */

/* ThreadSanitizer ends a forked child that starts threads. */
#ifdef __SANITIZE_THREAD__
enum { MAY_NOT_START_THREADS = 1 };
#else
enum { MAY_NOT_START_THREADS = 0 };
#endif

/* Opens the files for this process. */
static bool reads_anew(um_pieces_io io) {
    shelf anew;
    make_shelf(&anew, io, FREQUENT, 2, 1);
    um_pieces_holder *own = make_holder(&anew);
    bool good = TRY_ENSURE(&anew, own, 3, 4) == UM_OK;
    um_pieces_holder_destroy(own);
    clear_shelf(&anew);
    return good;
}

TEST(a_forked_child_is_refused) {
    EACH_IO(io) {
        AUTO_SHELF s;
        make_shelf(&s, io, FREQUENT, 20, 2);
        AUTO_HOLDER holder = make_holder(&s);
        ENSURE(&s, holder, 0, 1);
        PREFETCH(&s, 2, 3, 4, 5, N_SMALL);
        pid_t child = fork();
        if (child == 0) {
            um_pieces_stat stat;
            bool good = TRY_ENSURE(&s, holder, 0) == UM_E_STATE &&
                        test_err.detail == UM_PIECES_FORKED &&
                        um_pieces_prefetch(s.pieces, (int32_t[]){9}, 1, NULL) == UM_E_STATE &&
                        um_pieces_resize(s.pieces, 0, 3, NULL) == UM_E_STATE &&
                        um_pieces_slot(s.pieces, 0) == -1;
            um_pieces_stat_read(s.pieces, &stat);
            um_pieces_holder_destroy(holder);
            um_pieces_destroy(s.pieces);
            good &= stat.hits == 0 && (MAY_NOT_START_THREADS || reads_anew(io));
            _exit(good ? 0 : 1);
        }
        int status = -1;
        REQUIRE(waitpid(child, &status, 0) == child);
        CHECK_EQ(status, 0);
        ENSURE(&s, holder, 2, 3, 4, 5, N_SMALL, 0, 1);
        CHECK_EQ(stat_of(&s).misses, 2);
    }
}

/* The thread that began reads ends before they do. */
static void *prefetch_all(void *arg) {
    const shelf *s = arg;
    PREFETCH(s, N_SMALL, N_SMALL + 1, N_SMALL + 2, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9);
    return NULL;
}

TEST(a_thread_ends_while_its_reads_are_under_way) {
    EACH_IO(io) {
        for (int i = 0; i < 20; i++) {
            AUTO_SHELF s;
            make_shelf(&s, io, FREQUENT, 20, 3);
            AUTO_HOLDER holder = make_holder(&s);
            pthread_join(start_thread(prefetch_all, &s), NULL);
            ENSURE(&s, holder, 0, 5, 9, N_SMALL, N_SMALL + 1, N_SMALL + 2);
            CHECK_EQ(stat_of(&s).failed, 0);
        }
    }
}

TEST(a_cache_is_destroyed_while_it_reads) {
    EACH_IO(io) {
        for (int i = 0; i < 20; i++) {
            AUTO_SHELF s;
            make_shelf(&s, io, FREQUENT, 20, 3);
            PREFETCH(&s, N_SMALL, N_SMALL + 1, N_SMALL + 2, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9);
        }
    }
}
