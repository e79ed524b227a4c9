/* Policies: what is evicted, beside the rule in plain numbers. */
#include "pieces/policy.h"
#include "test.h"

#include <math.h>

enum { N_SLOTS = 40, N_PIECES = 90, N_GROUPS = 3, N_CALLS = 1500 };

typedef struct desk {
    um__pool pool;
    um__slot slots[N_SLOTS];
    um__piece pieces[N_PIECES];
    um__group groups[N_GROUPS];
    um__slots all;
    uint32_t n_calls[N_GROUPS]; /* what the test knows of groups, and below of pieces */
    uint32_t uses[N_PIECES][N_CALLS], n_uses[N_PIECES]; /* calls of its group */
    uint64_t used[N_PIECES];
    uint32_t awaited[N_PIECES];
    uint64_t random;
} desk;

static void fill_desk(desk *d, um_pieces_policy policy) {
    *d = (desk){.random = 5, .pool = {.layout = {.n_slots = N_SLOTS}}};
    d->all = (um__slots){.pools = &d->pool,
                         .slots = d->slots,
                         .pieces = d->pieces,
                         .groups = d->groups,
                         .n_pools = 1,
                         .n_pieces = N_PIECES,
                         .n_groups = N_GROUPS,
                         .policy = policy};
    um__policy_start(&d->all);
    for (uint32_t i = 0; i < N_SLOTS; i++) {
        d->slots[i].piece = UM__NO_PIECE;
    }
    for (uint32_t i = 0; i < N_PIECES; i++) {
        d->pieces[i].slot = UM__NO_SLOT;
        d->pieces[i].group = i % N_GROUPS;
    }
}

static void put_piece(desk *d, uint32_t slot, uint32_t piece) {
    if (d->slots[slot].piece != UM__NO_PIECE) {
        d->pieces[d->slots[slot].piece].slot = UM__NO_SLOT;
    }
    d->slots[slot] = (um__slot){.piece = piece, .state = UM__SLOT_READY};
    d->pieces[piece].slot = slot;
}

/* The lowest goes. */
static double worth_of(const desk *d, uint32_t piece) {
    uint32_t group = piece % N_GROUPS, now = d->n_calls[group];
    if (d->awaited[piece] == now + 1) {
        return INFINITY;
    }
    if (d->all.policy != UM_PIECES_FREQUENT) {
        return d->all.policy == UM_PIECES_RECENT ? (double)d->used[piece] : -(double)d->used[piece];
    }
    double sum = 0;
    for (uint32_t i = 0; i < d->n_uses[piece]; i++) {
        uint32_t age = now - d->uses[piece][i];
        sum += exp2(-(double)age / 64) + (age == 0 ? 8 : 0);
    }
    uint32_t turn = (group - d->all.group - 1 + 2 * N_GROUPS) % N_GROUPS + 1;
    return sum * (1 - 0.3 * turn / N_GROUPS);
}

static bool may_go(const desk *d, const um__slot *slot) {
    return slot->state == UM__SLOT_FREE || (slot->state == UM__SLOT_READY && slot->n_holds == 0 &&
                                            worth_of(d, slot->piece) < INFINITY);
}

static void check_victim(const desk *d, uint32_t victim) {
    const um__slot *chosen = &d->slots[victim];
    REQUIRE(may_go(d, chosen));
    double worth = chosen->state == UM__SLOT_FREE ? -1e9 : worth_of(d, chosen->piece);
    for (uint32_t i = 0; i < N_SLOTS; i++) {
        if (may_go(d, &d->slots[i])) {
            CHECK(d->slots[i].state != UM__SLOT_FREE || chosen->state == UM__SLOT_FREE);
            double other = d->slots[i].state == UM__SLOT_FREE ? 0 : worth_of(d, d->slots[i].piece);
            CHECK(worth - other <= fabs(other) * 1e-5);
        }
    }
}

/* A call asks for some pieces of one group; what is missing takes the slots of victims. */
static void call(desk *d) {
    uint32_t ids[12], group = (uint32_t)(d->all.now++ % N_GROUPS);
    d->n_calls[group]++;
    for (uint32_t i = 0; i < COUNT(ids); i++) {
        uint64_t r = test_random(&d->random);
        uint32_t n = (uint32_t)(r % 3 == 0 ? r >> 8 & 7 : (r >> 8) % (N_PIECES / N_GROUPS));
        uint32_t id = ids[i] = n * N_GROUPS + group;
        um__policy_use(&d->all, &d->pieces[id]);
        if (d->used[id] != d->all.now) { /* others of the call are the same piece again */
            d->used[id] = d->all.now;
            d->uses[id][d->n_uses[id]++] = d->n_calls[group];
        }
        if (d->pieces[id].slot != UM__NO_SLOT) {
            d->slots[d->pieces[id].slot].n_holds = 1;
        }
    }
    um__victims victims = {.are_demanded = false};
    for (uint32_t i = 0; i < COUNT(ids); i++) {
        if (d->pieces[ids[i]].slot == UM__NO_SLOT) {
            uint32_t victim = um__policy_victim(&d->all, &d->pool, &victims);
            REQUIRE(victim < N_SLOTS);
            check_victim(d, victim);
            put_piece(d, victim, ids[i]);
            d->slots[victim].n_holds = 1;
        }
    }
}

static void run_policy(um_pieces_policy policy) {
    static desk d;
    fill_desk(&d, policy);
    for (uint32_t n = 0; n < N_CALLS; n++) {
        call(&d);
        for (uint32_t s = 0; s < N_SLOTS; s++) {
            um__slot *slot = &d.slots[s];
            uint64_t r = test_random(&d.random);
            slot->n_holds = r % 8 == 0;
            if (slot->state == UM__SLOT_READY) {
                slot->state = r % 64 == 1 ? UM__SLOT_READING : UM__SLOT_READY;
                if (r % 16 == 2) {
                    um__policy_await(&d.all, &d.pieces[slot->piece]);
                    d.awaited[slot->piece] = d.n_calls[slot->piece % N_GROUPS] + 1;
                }
            } else if (slot->state == UM__SLOT_READING) {
                slot->state = UM__SLOT_READY;
            }
        }
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

/* A piece that is evicted and comes back counts as before; after 512 calls it is new. */
TEST(uses_are_remembered_for_a_while) {
    desk d;
    fill_desk(&d, UM_PIECES_FREQUENT);
    for (uint32_t i = 0; i < 600; i++) {
        d.all.now++;
        um__policy_use(&d.all, &d.pieces[i < 10 ? 0 : N_GROUPS]);
        um__policy_use(&d.all, &d.pieces[i < 10 ? 0 : N_GROUPS]);
    }
    CHECK(fabs((double)d.pieces[0].count - 9.5289) < 0.001);
    d.all.now++;
    um__policy_use(&d.all, &d.pieces[0]);
    CHECK_EQ(d.pieces[0].last, 601);
    CHECK(fabs((double)d.pieces[0].count - 1) < 1e-9);
}

TEST(victims_of_one_call_differ) {
    for (um_pieces_policy policy = 0; policy < UM_PIECES_POLICY_COUNT; policy++) {
        desk d;
        fill_desk(&d, policy);
        for (uint32_t i = 0; i < N_SLOTS; i++) {
            put_piece(&d, i, i);
        }
        bool seen[N_SLOTS] = {false};
        d.slots[3].n_holds = 1;
        um__policy_await(&d.all, &d.pieces[4]);
        um__victims victims = {.are_demanded = false};
        for (uint32_t i = 0; i < N_SLOTS - 2; i++) {
            uint32_t victim = um__policy_victim(&d.all, &d.pool, &victims);
            REQUIRE(victim < N_SLOTS);
            CHECK(!seen[victim] && victim != 3 && victim != 4);
            seen[victim] = true;
            d.slots[victim].n_holds = 1;
        }
        CHECK_EQ(um__policy_victim(&d.all, &d.pool, &victims), UM__NO_SLOT);
        victims = (um__victims){.are_demanded = true};
        CHECK_EQ(um__policy_victim(&d.all, &d.pool, &victims), 4);
    }
}
