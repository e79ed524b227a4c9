/* Which piece is evicted. */
#ifndef UM_POLICY_H
#define UM_POLICY_H

#include "pieces/slots.h"

/* Begins anew with the slots that the pool has now. */
void um__policy_start(um__slots *slots, um__pool *pool);
/* Counts a use of a piece that is in a slot. */
void um__policy_use(um__slots *slots, um__slot *slot);
/* Returns a slot that is free, or whose piece may be evicted: no holder keeps it, it is read, and,
 * unless the slot is demanded, no prefetch expects a use. UM__NO_SLOT: there is no such slot. One
 * call returns no slot twice before um__policy_settle. */
uint32_t um__policy_victim(um__slots *slots, um__pool *pool, bool is_demanded);
/* Ends a row of victims, which have their new pieces. */
void um__policy_settle(um__slots *slots, um__pool *pool);

#endif
