/* Which piece is evicted.
 *
 * Recent and frequent give each piece a value that only grows: the call that used it last, or the
 * sum of its uses, where each use weighs a little more than the one before, so that older ones fade.
 * Then a use changes a number and no order. The heap of a pool has values as they once were; what
 * comes to its top gets its present value, and goes down if that is higher. */
#include "pieces/policy.h"

static const double MOST_WEIGHT = 1e100;

static double value_of(const um__slots *slots, const um__slot *slot) {
    if (slots->policy == UM_PIECES_RECENT || slot->piece == UM__NO_PIECE) {
        return (double)slot->used;
    }
    return slots->pieces[slot->piece].weight;
}

static void sift_down(um__pool *pool, uint32_t at) {
    um__ranked moved = pool->heap[at];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= pool->n_ranked) {
            break;
        }
        child +=
            child + 1 < pool->n_ranked && pool->heap[child + 1].value < pool->heap[child].value;
        if (pool->heap[child].value >= moved.value) {
            break;
        }
        pool->heap[at] = pool->heap[child];
        at = child;
    }
    pool->heap[at] = moved;
}

static void sift_up(um__pool *pool, uint32_t at) {
    um__ranked moved = pool->heap[at];
    for (; at > 0 && pool->heap[(at - 1) / 2].value > moved.value; at = (at - 1) / 2) {
        pool->heap[at] = pool->heap[(at - 1) / 2];
    }
    pool->heap[at] = moved;
}

void um__policy_start(um__slots *slots, um__pool *pool) {
    pool->free = UM__NO_SLOT;
    pool->n_ranked = 0;
    for (uint32_t i = pool->layout.n_slots; i-- > 0;) {
        um__slot *slot = &slots->slots[pool->first + i];
        pool->heap[i].slot = pool->first + i;
        if (slot->state == UM__SLOT_FREE) {
            slot->next = pool->free;
            pool->free = pool->first + i;
        }
    }
    um__policy_settle(slots, pool);
}

/* Divides all weights, before they are too large for a number. */
static void lighten(um__slots *slots) {
    for (uint32_t i = 0; i < slots->n_pieces; i++) {
        slots->pieces[i].weight /= slots->weight;
    }
    for (um__pool *pool = slots->pools; pool < slots->pools + slots->n_pools; pool++) {
        for (uint32_t i = 0; i < pool->layout.n_slots; i++) {
            pool->heap[i].value /= slots->weight;
        }
    }
    slots->weight = 1;
}

void um__policy_use(um__slots *slots, um__slot *slot) {
    slot->used = slots->now;
    slot->awaited_until = 0;
    if (slots->policy == UM_PIECES_FREQUENT) {
        slots->pieces[slot->piece].weight += slots->weight;
        slots->weight *= slots->growth;
        if (slots->weight > MOST_WEIGHT) {
            lighten(slots);
        }
    }
}

static bool is_evictable(const um__slots *slots, const um__slot *slot) {
    return slot->state == UM__SLOT_READY && slot->n_holds == 0 && slot->awaited_until < slots->now;
}

/* Sets the top of the heap aside. */
static void set_aside(um__pool *pool) {
    um__ranked top = pool->heap[0];
    pool->heap[0] = pool->heap[--pool->n_ranked];
    pool->heap[pool->n_ranked] = top;
    if (pool->n_ranked > 0) {
        sift_down(pool, 0);
    }
}

/* Returns the evictable slot with the lowest value. */
static uint32_t lowest(const um__slots *slots, um__pool *pool) {
    while (pool->n_ranked > 0) {
        uint32_t number = pool->heap[0].slot;
        const um__slot *slot = &slots->slots[number];
        double value = value_of(slots, slot);
        if (value > pool->heap[0].value) {
            pool->heap[0].value = value;
            sift_down(pool, 0);
            continue;
        }
        set_aside(pool);
        if (is_evictable(slots, slot)) {
            return number;
        }
    }
    return UM__NO_SLOT;
}

/* Returns the evictable slot that was used last. */
static uint32_t latest(const um__slots *slots, const um__pool *pool) {
    uint32_t found = UM__NO_SLOT;
    for (uint32_t i = pool->first; i < pool->first + pool->layout.n_slots; i++) {
        const um__slot *slot = &slots->slots[i];
        if (is_evictable(slots, slot) &&
            (found == UM__NO_SLOT || slot->used > slots->slots[found].used)) {
            found = i;
        }
    }
    return found;
}

/* Returns the slot whose piece a prefetch awaits for the longest time. */
static uint32_t awaited(const um__slots *slots, const um__pool *pool) {
    uint32_t found = UM__NO_SLOT;
    for (uint32_t i = pool->first; i < pool->first + pool->layout.n_slots; i++) {
        const um__slot *slot = &slots->slots[i];
        if (slot->state == UM__SLOT_READY && slot->n_holds == 0 &&
            (found == UM__NO_SLOT || slot->awaited_until < slots->slots[found].awaited_until)) {
            found = i;
        }
    }
    return found;
}

uint32_t um__policy_victim(um__slots *slots, um__pool *pool, bool is_demanded) {
    uint32_t found = pool->free;
    if (found != UM__NO_SLOT) {
        pool->free = slots->slots[found].next;
        return found;
    }
    found = slots->policy == UM_PIECES_CYCLE ? latest(slots, pool) : lowest(slots, pool);
    return found == UM__NO_SLOT && is_demanded ? awaited(slots, pool) : found;
}

void um__policy_settle(um__slots *slots, um__pool *pool) {
    for (; pool->n_ranked < pool->layout.n_slots; pool->n_ranked++) {
        um__ranked *added = &pool->heap[pool->n_ranked];
        added->value = value_of(slots, &slots->slots[added->slot]);
        sift_up(pool, pool->n_ranked);
    }
}
