/* Which piece is evicted. */
#ifndef UM_POLICY_H
#define UM_POLICY_H

#include "pieces/slots.h"

enum { UM__MOST_VICTIMS = 16 };

/* Slots of a pool that a call may take, best first. Begins with zeros, and begins anew if `pool` is
 * set to NULL, as after the lock was dropped. */
typedef struct um__victims {
    bool are_demanded; /* also those whose pieces were prefetched and are still awaited */
    const um__pool *pool;
    uint32_t n, n_taken;
    uint32_t slots[UM__MOST_VICTIMS];
    double values[UM__MOST_VICTIMS];
} um__victims;

/* Begins with no uses. */
void um__policy_start(um__slots *slots);
/* Counts a use of a piece by the present call, wherever the piece is; a second one is left out. */
void um__policy_use(um__slots *slots, um__piece *piece);
/* Expects a use of a piece by its group's next call. */
void um__policy_await(const um__slots *slots, um__piece *piece);
/* Takes a slot that is free, or whose piece is read, kept by no holder, and worth least. Returns
 * UM__NO_SLOT if there is no such slot. */
uint32_t um__policy_victim(const um__slots *slots, const um__pool *pool, um__victims *victims);

#endif
