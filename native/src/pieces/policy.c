/* Which piece is evicted: of all slots of its pool, the one whose piece is worth least. */
#include "pieces/policy.h"

#include <float.h>

/* 2^(-1/64): a use counts half after 64 calls of its group. */
static const double FADING = 0.98922801319397549;
/* What a token used is often used by the next one, which counts as many uses. */
static const double LATEST = 8;
/* Pieces of the group whose turn comes last are worth so much less. */
static const double FAR = 0.3;
static const double FREE = -DBL_MAX, AWAITED = DBL_MAX;

void um__policy_start(um__slots *slots) {
    double share = 1;
    for (uint32_t age = 0; age < UM__N_AGES; age++, share *= FADING) {
        slots->shares[age] = (float)share;
    }
}

/* Returns the uses of a piece, as they count now. */
static float uses_of(const um__slots *slots, const um__piece *piece, uint32_t age) {
    return age < UM__N_AGES ? piece->count * slots->shares[age] : 0;
}

void um__policy_use(um__slots *slots, um__piece *piece) {
    um__group *group = &slots->groups[piece->group];
    group->clock += group->used != slots->now;
    group->used = slots->now;
    slots->group = piece->group;
    if (piece->used != slots->now) {
        piece->count = uses_of(slots, piece, group->clock - piece->last) + 1;
        piece->last = group->clock;
        piece->used = slots->now;
    }
}

void um__policy_await(const um__slots *slots, um__piece *piece) {
    piece->awaited = slots->groups[piece->group].clock + 1;
}

static double value_of(const um__slots *slots, const um__piece *piece) {
    uint32_t clock = slots->groups[piece->group].clock, age = clock - piece->last;
    if (piece->awaited == clock + 1) {
        return AWAITED;
    }
    if (slots->policy != UM_PIECES_FREQUENT) {
        return slots->policy == UM_PIECES_RECENT ? (double)piece->used : -(double)piece->used;
    }
    /* The groups' calls until it is this group's turn again, if they come in order. */
    uint32_t far = piece->group - slots->group;
    far += piece->group > slots->group ? 0 : slots->n_groups;
    double value = uses_of(slots, piece, age) + (age == 0 ? LATEST : 0);
    return value * (1 - FAR * far / slots->n_groups);
}

/* Finds the slots with the lowest values, which are in order. */
static void find_victims(const um__slots *slots, const um__pool *pool, um__victims *found) {
    *found = (um__victims){.are_demanded = found->are_demanded, .pool = pool};
    for (uint32_t s = pool->first; s < pool->first + pool->layout.n_slots; s++) {
        const um__slot *slot = &slots->slots[s];
        double value = FREE;
        if (slot->state != UM__SLOT_FREE) {
            if (slot->state != UM__SLOT_READY || slot->n_holds > 0) {
                continue;
            }
            value = value_of(slots, &slots->pieces[slot->piece]);
        }
        bool is_full = found->n == UM__MOST_VICTIMS;
        if ((value == AWAITED && !found->are_demanded) ||
            (is_full && value >= found->values[found->n - 1])) {
            continue;
        }
        uint32_t i = is_full ? found->n - 1 : found->n++;
        for (; i > 0 && found->values[i - 1] > value; i--) {
            found->values[i] = found->values[i - 1];
            found->slots[i] = found->slots[i - 1];
        }
        found->values[i] = value;
        found->slots[i] = s;
    }
}

uint32_t um__policy_victim(const um__slots *slots, const um__pool *pool, um__victims *victims) {
    if (victims->pool != pool || victims->n_taken == UM__MOST_VICTIMS) {
        find_victims(slots, pool, victims);
    }
    return victims->n_taken < victims->n ? victims->slots[victims->n_taken++] : UM__NO_SLOT;
}
