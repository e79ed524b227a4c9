/* Policies: what is evicted, beside a search through all slots. */
#include "pieces/policy.h"
#include "test.h"

#include <math.h>

enum { N_SLOTS = 9, N_PIECES = 30 };

typedef struct desk {
    um__pool pool;
    um__slot slots[N_SLOTS];
    um__piece pieces[N_PIECES];
    um__ranked heap[N_SLOTS];
    um__slots all;
    double weights[N_PIECES]; /* what the test knows of uses */
    uint64_t random;
} desk;

static void fill_desk(desk *d, um_pieces_policy policy) {
    *d = (desk){.random = 5, .pool = {.layout = {.n_slots = N_SLOTS}}};
    d->pool.heap = d->heap;
    d->all = (um__slots){.pools = &d->pool,
                         .slots = d->slots,
                         .pieces = d->pieces,
                         .n_pools = 1,
                         .n_pieces = N_PIECES,
                         .policy = policy,
                         .weight = 1,
                         .growth = 1.01};
    for (uint32_t i = 0; i < N_SLOTS; i++) {
        d->slots[i].piece = UM__NO_PIECE;
    }
    for (uint32_t i = 0; i < N_PIECES; i++) {
        d->pieces[i].slot = UM__NO_SLOT;
    }
    um__policy_start(&d->all, &d->pool);
}

static void put_piece(desk *d, uint32_t slot, uint32_t piece) {
    if (d->slots[slot].piece != UM__NO_PIECE) {
        d->pieces[d->slots[slot].piece].slot = UM__NO_SLOT;
    }
    d->slots[slot] = (um__slot){.piece = piece, .state = UM__SLOT_READY, .used = d->all.now};
    d->pieces[piece].slot = slot;
}

static void use(desk *d, uint32_t piece) {
    um__policy_use(&d->all, &d->slots[d->pieces[piece].slot]);
    for (uint32_t i = 0; i < N_PIECES; i++) {
        d->weights[i] /= d->all.growth;
    }
    d->weights[piece] += 1;
}

/* What a policy is to look at: the lowest goes. */
static double rank_of(const desk *d, const um__slot *slot) {
    switch (d->all.policy) {
    case UM_PIECES_FREQUENT:
        return d->weights[slot->piece];
    case UM_PIECES_RECENT:
        return (double)slot->used;
    default:
        return -(double)slot->used;
    }
}

static void check_victim(const desk *d, const um__slot *before, uint32_t victim) {
    const um__slot *chosen = &before[victim];
    CHECK(chosen->n_holds == 0 && chosen->awaited_until < d->all.now);
    for (uint32_t i = 0; i < N_SLOTS; i++) {
        if (before[i].n_holds == 0 && before[i].awaited_until < d->all.now) {
            double rank = rank_of(d, &before[i]);
            CHECK(rank_of(d, chosen) - rank <= fabs(rank) * 1e-9 + 1e-12);
        }
    }
}

static void run_policy(um_pieces_policy policy) {
    desk d;
    fill_desk(&d, policy);
    for (uint32_t i = 0; i < N_SLOTS; i++) { /* free slots come first, each once */
        d.all.now++;
        uint32_t victim = um__policy_victim(&d.all, &d.pool, true);
        REQUIRE(victim < N_SLOTS);
        CHECK_EQ(d.slots[victim].state, UM__SLOT_FREE);
        put_piece(&d, victim, i);
        use(&d, i);
        um__policy_settle(&d.all, &d.pool);
    }
    for (unsigned i = 0; i < 3000; i++) {
        d.all.now++;
        uint64_t r = test_random(&d.random);
        uint32_t piece = (uint32_t)((r % 3 == 0 ? r >> 8 : r >> 40 & 7) % N_PIECES);
        for (uint32_t s = 0; s < N_SLOTS; s++) {
            d.slots[s].n_holds = (uint32_t)(test_random(&d.random) % 4 == 0);
            bool waits = test_random(&d.random) % 8 == 0;
            d.slots[s].awaited_until = waits ? d.all.now : 0;
        }
        if (d.pieces[piece].slot == UM__NO_SLOT) {
            um__slot before[N_SLOTS];
            memcpy(before, d.slots, sizeof before);
            uint32_t victim = um__policy_victim(&d.all, &d.pool, false);
            if (victim == UM__NO_SLOT) {
                um__policy_settle(&d.all, &d.pool);
                continue;
            }
            check_victim(&d, before, victim);
            put_piece(&d, victim, piece);
            um__policy_settle(&d.all, &d.pool);
        }
        use(&d, piece);
    }
}

TEST(frequent) {
    run_policy(UM_PIECES_FREQUENT);
}

TEST(recent) {
    run_policy(UM_PIECES_RECENT);
}

TEST(cycle) {
    run_policy(UM_PIECES_CYCLE);
}

/* Weights grow with every use, and are divided in time. */
TEST(weights_stay_numbers) {
    desk d;
    fill_desk(&d, UM_PIECES_FREQUENT);
    d.all.growth = 1e10;
    for (uint32_t i = 0; i < N_SLOTS; i++) {
        put_piece(&d, um__policy_victim(&d.all, &d.pool, true), i);
        um__policy_settle(&d.all, &d.pool);
    }
    for (uint32_t i = 0; i < 1000; i++) {
        d.all.now++;
        um__policy_use(&d.all, &d.slots[i % N_SLOTS]);
        CHECK(d.all.weight >= 1 && d.all.weight <= 1e110);
    }
    uint32_t last = 999 % N_SLOTS;
    CHECK_EQ(um__policy_victim(&d.all, &d.pool, true), (last + 1) % N_SLOTS);
}

TEST(victims_of_one_call_differ) {
    for (um_pieces_policy policy = 0; policy < UM_PIECES_CYCLE; policy++) {
        desk d;
        fill_desk(&d, policy);
        for (uint32_t i = 0; i < N_SLOTS; i++) {
            put_piece(&d, um__policy_victim(&d.all, &d.pool, true), i);
        }
        um__policy_settle(&d.all, &d.pool);
        bool seen[N_SLOTS] = {false};
        d.all.now++;
        d.slots[3].n_holds = 1;
        d.slots[4].awaited_until = 100;
        for (uint32_t i = 0; i < N_SLOTS - 2; i++) {
            uint32_t victim = um__policy_victim(&d.all, &d.pool, false);
            REQUIRE(victim < N_SLOTS);
            CHECK(!seen[victim] && victim != 3 && victim != 4);
            seen[victim] = true;
            d.slots[victim].n_holds = 1;
        }
        CHECK_EQ(um__policy_victim(&d.all, &d.pool, false), UM__NO_SLOT);
        CHECK_EQ(um__policy_victim(&d.all, &d.pool, true), 4);
        um__policy_settle(&d.all, &d.pool);
        CHECK_EQ(d.pool.n_ranked, N_SLOTS);
    }
}
