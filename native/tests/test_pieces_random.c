/* Random calls on a cache, beside a simple model of it: which pieces are there, and which is
 * evicted. */
#include "shelf.h"

typedef struct model {
    shelf s;
    um_pieces_holder *holders[2];
    bool keeps[2][N_PIECES];
    bool there[N_PIECES];
    uint64_t used[N_PIECES], now, n_evicted, n_misses;
    uint32_t n_slots[N_POOLS];
    uint64_t random;
} model;

static size_t one_of(model *m, size_t n) {
    return (size_t)(test_random(&m->random) % n);
}

static bool is_kept(const model *m, int32_t id) {
    return m->keeps[0][id] || m->keeps[1][id];
}

static uint32_t n_there(const model *m, uint32_t pool) {
    uint32_t n = 0;
    for (int32_t id = 0; id < N_PIECES; id++) {
        n += m->s.pool_of[id] == pool && m->there[id];
    }
    return n;
}

/* Evicts the piece that was used longest ago, or last, if the pool has no free slot. */
static bool make_room(model *m, uint32_t pool) {
    if (n_there(m, pool) < m->n_slots[pool]) {
        return true;
    }
    int32_t victim = -1;
    for (int32_t id = 0; id < N_PIECES; id++) {
        if (m->s.pool_of[id] == pool && m->there[id] && !is_kept(m, id)) {
            bool cycle = m->s.spec.policy == UM_PIECES_CYCLE;
            bool is_better = victim < 0 || (cycle ? m->used[id] > m->used[victim]
                                                  : m->used[id] < m->used[victim]);
            victim = is_better ? id : victim;
        }
    }
    if (victim >= 0) {
        m->there[victim] = false;
        m->n_evicted++;
    }
    return victim >= 0;
}

/* Calls use one piece each, so that uses have an order. */
static void ensure_one(model *m) {
    size_t h = one_of(m, 2);
    int32_t id = (int32_t)one_of(m, one_of(m, 2) == 0 ? 8 : N_PIECES);
    memset(m->keeps[h], 0, sizeof m->keeps[h]);
    m->now++;
    bool good = m->there[id] || make_room(m, m->s.pool_of[id]);
    int32_t slot = -1;
    um_status status = um_pieces_ensure(m->s.pieces, m->holders[h], &id, 1, &slot, &test_err);
    CHECK_EQ(status, good ? UM_OK : UM_E_BUSY);
    if (good) {
        CHECK(has_piece(&m->s, id, slot));
        CHECK(slot < (int32_t)m->n_slots[m->s.pool_of[id]]);
        m->n_misses += !m->there[id];
        m->there[id] = true;
        m->used[id] = m->now;
        m->keeps[h][id] = true;
    }
}

static void grow(model *m) {
    uint32_t pool = (uint32_t)one_of(m, N_POOLS);
    uint32_t more = m->n_slots[pool] + 1;
    um_status status = um_pieces_resize(m->s.pieces, pool, more, NULL);
    CHECK_EQ(status, more <= m->s.pools[pool].max_slots ? UM_OK : UM_E_INVALID);
    m->n_slots[pool] += status == UM_OK;
}

/* The model does not know which pieces lie at the end: the cache says it. */
static void shrink(model *m) {
    uint32_t pool = (uint32_t)one_of(m, N_POOLS), less = m->n_slots[pool] - 1;
    bool is_free = less > 0;
    int32_t at_end = -1;
    for (int32_t id = 0; id < N_PIECES; id++) {
        if (m->s.pool_of[id] == pool && um_pieces_slot(m->s.pieces, id) == (int32_t)less) {
            at_end = id;
        }
    }
    um_status wanted = !is_free                            ? UM_E_INVALID
                       : at_end >= 0 && is_kept(m, at_end) ? UM_E_BUSY
                                                           : UM_OK;
    CHECK_EQ(um_pieces_resize(m->s.pieces, pool, less, NULL), wanted);
    if (wanted == UM_OK) {
        m->n_slots[pool] = less;
        if (at_end >= 0) {
            m->there[at_end] = false;
            m->n_evicted++;
        }
    }
}

static void check_model(model *m) {
    uint64_t n = 0;
    for (int32_t id = 0; id < N_PIECES; id++) {
        CHECK_EQ(um_pieces_slot(m->s.pieces, id) >= 0, m->there[id]);
        n += m->there[id];
    }
    um_pieces_stat stat = stat_of(&m->s);
    CHECK_EQ(stat.resident, n);
    CHECK_EQ(stat.evicted, m->n_evicted);
    CHECK_EQ(stat.misses, m->n_misses);
}

static void run_model(um_pieces_io io, um_pieces_policy policy, uint64_t seed) {
    model m = {.random = seed, .n_slots = {6, 2}};
    make_shelf(&m.s, io, policy, 6, 2);
    for (size_t h = 0; h < 2; h++) {
        m.holders[h] = make_holder(&m.s);
    }
    for (unsigned i = 0; i < test_many(400, 4000); i++) {
        size_t what = one_of(&m, 20), h = one_of(&m, 2);
        if (what == 0) {
            um_pieces_release(m.s.pieces, m.holders[h]);
            memset(m.keeps[h], 0, sizeof m.keeps[h]);
        } else if (what == 1) {
            grow(&m);
        } else if (what == 2) {
            shrink(&m);
        } else {
            ensure_one(&m);
        }
        check_model(&m);
    }
    for (size_t h = 0; h < 2; h++) {
        um_pieces_holder_destroy(m.holders[h]);
    }
    clear_shelf(&m.s);
}

TEST(the_piece_used_longest_ago_goes) {
    EACH_IO(io) {
        run_model(io, UM_PIECES_RECENT, 1);
        run_model(io, UM_PIECES_RECENT, 2);
    }
}

TEST(the_piece_used_last_goes) {
    EACH_IO(io) {
        run_model(io, UM_PIECES_CYCLE, 3);
    }
}
