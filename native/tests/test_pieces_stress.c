/* Sixteen threads on one cache, whose reads come short and fail. */
#include "shelf.h"
#include "stress.h"

static shelf shared;
static um_pieces_holder *holders[N_THREADS];

static void ensure_some(worker *w) {
    int32_t ids[6], slots[6];
    size_t n = 1 + any_of(w, COUNT(ids));
    for (size_t i = 0; i < n; i++) {
        bool is_large = any_of(w, 8) == 0;
        ids[i] = (int32_t)(is_large ? N_SMALL + any_of(w, N_LARGE) : any_of(w, N_SMALL));
    }
    um_error err;
    um_status status = um_pieces_ensure(shared.pieces, holders[w->number], ids, n, slots, &err);
    if (status == UM_OK) {
        size_t i = any_of(w, n);
        CHECK(has_piece(&shared, ids[i], slots[i]));
    } else {
        bool is_expected = status == UM_E_BUSY || status == UM_E_FULL || status == UM_E_OS ||
                           (status == UM_E_IO && err.os_errno == EIO);
        CHECK(is_expected);
    }
}

static void use_pieces(worker *w) {
    um_pieces_stat stat;
    switch (any_of(w, 12)) {
    case 0:
        um_pieces_release(shared.pieces, holders[w->number]);
        break;
    case 1: {
        int32_t ids[8];
        for (size_t i = 0; i < COUNT(ids); i++) {
            ids[i] = (int32_t)any_of(w, N_PIECES);
        }
        um_status status = um_pieces_prefetch(shared.pieces, ids, COUNT(ids), NULL);
        CHECK(status == UM_OK || status == UM_E_OS);
        break;
    }
    case 2: {
        uint32_t n_slots = 12 + (uint32_t)any_of(w, 20);
        um_status status = um_pieces_resize(shared.pieces, 0, n_slots, NULL);
        CHECK(status == UM_OK || status == UM_E_BUSY);
        break;
    }
    case 3:
        um_pieces_stat_read(shared.pieces, &stat);
        CHECK(stat.resident <= N_SMALL + N_LARGE);
        CHECK(um_pieces_slot(shared.pieces, (int32_t)any_of(w, N_PIECES)) < N_SMALL);
        break;
    case 4: /* once, some call of some thread */
        fault_os_fail_nth(1 + (unsigned)any_of(w, 20), EIO);
        fault_os_limit_read(any_of(w, 2) == 0 ? 0 : 4096 + any_of(w, 100000));
        break;
    default:
        ensure_some(w);
    }
}

static void stress_with(um_pieces_io io, um_pieces_policy policy) {
    make_shelf(&shared, io, policy, 30, 3);
    for (size_t i = 0; i < N_THREADS; i++) {
        holders[i] = make_holder(&shared);
    }
    stress(use_pieces);
    fault_os_reset();
    for (size_t i = 1; i < N_THREADS; i++) {
        um_pieces_holder_destroy(holders[i]);
    }
    for (int32_t id = 0; id < N_PIECES; id++) {
        ENSURE(&shared, holders[0], id);
    }
    um_pieces_holder_destroy(holders[0]);
    clear_shelf(&shared);
}

TEST(threads_share_an_io_uring) {
    SKIP_UNLESS(has_io(UM_PIECES_IO_RING), "the kernel refuses io_uring");
    stress_with(UM_PIECES_IO_RING, UM_PIECES_FREQUENT);
}

TEST(threads_share_reading_threads) {
    stress_with(UM_PIECES_IO_THREADS, UM_PIECES_RECENT);
}
